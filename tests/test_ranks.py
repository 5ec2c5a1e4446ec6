"""Several processes under mlx.launch: the same bytes and the same reports as one, and an end in any case."""

import json
import random
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import launch
import psutil
import pytest
from conftest import REFERENCE, SMALL_CONFIG, contents, motif_convert, random_weights, write_checkpoint
from motif_convert.convert.parts import share_of
from motif_convert.convert.ranks import Ranks

TINY, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "demo-motif3"
SHARD_BYTES = 50_000
JOURNAL = ".motif-convert.json"
HANG = 10  # seconds that ranks may live on after one has died


def differing(folder: Path, whole: Path) -> list[str]:
    """Names of the files that are not the same, or that only one of the folders has."""
    found, expected = contents(folder), contents(whole)
    return [name for name in sorted(found | expected) if found.get(name) != expected.get(name)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random checkpoint of more layers."""
    config = SMALL_CONFIG | {"num_hidden_layers": 6}
    return write_checkpoint(tmp_path_factory.mktemp("source") / "six", config, random_weights(config))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """What one process makes of it, in an odd number of small shards."""
    out = tmp_path_factory.mktemp("whole") / "out"
    command = launch.small_shards(SHARD_BYTES, "convert", "--source", source, "--mtp", "fp16", "--out", out)
    launch.start(1, command).finish()
    assert len(list(out.glob("*.safetensors"))) % 2 == 1
    return out


def converting(ranks: int, source: Path, out: Path):
    command = ("convert", "--source", source, "--mtp", "fp16", "--out", out)
    return launch.start(ranks, launch.small_shards(SHARD_BYTES, *command))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_build(ranks, source, whole, tmp_path):
    out, err = converting(ranks, source, tmp_path / "out").finish()
    assert differing(tmp_path / "out", whole) == [], err
    assert err.count("Written: ") == 1
    assert out == ""


def verifying(ranks: int, build: Path, source: Path) -> tuple[str, str]:
    command = launch.small_shards(SHARD_BYTES, "verify", build, "--source", source, "--json")
    return launch.start(ranks, command).finish()


def test_verified_together(source, whole, tmp_path):
    """The report of one process, bit for bit, and its evidence."""
    alone, together = (Path(shutil.copytree(whole, tmp_path / name)) for name in ("alone", "together"))
    one, several = verifying(1, alone, source), verifying(3, together, source)
    assert json.loads(one[0])["passed"]
    assert several[0] == one[0], several[1]
    assert differing(together, alone) == []


def test_what_another_rank_has_found(source, whole, tmp_path):
    """One changed bit in the last shard, which is not rank 0's."""
    build = Path(shutil.copytree(whole, tmp_path / "build"))
    shard = sorted(build.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    one, several = verifying(1, build, source), verifying(2, build, source)
    assert not json.loads(one[0])["passed"]
    assert several[0] == one[0], several[1]
    assert "exited with code 1" in several[1]


def test_evaluated_together(built, tmp_path):
    """The numbers of one process, bit for bit."""
    build = Path(shutil.copytree(built(DEMO), tmp_path / "build"))
    args = ("eval", build, "--source", DEMO, "--tokens", 60, "--json")
    alone = motif_convert(*args)
    assert alone.returncode == 0, alone.stderr
    out, err = launch.run(3, *args)
    assert out == alone.stdout, err


def test_smoke_together(built, tmp_path):
    """The drafts of one process, and the record of rank 0 alone."""
    build = Path(shutil.copytree(built(DEMO, "--recipe", "bf16"), tmp_path / "build"))
    prompts, text = tmp_path / "prompts.jsonl", tmp_path / "text.txt"
    prompts.write_text(json.dumps({"prompt": "This function returns the number of ", "raw": True}))
    text.write_bytes((REFERENCE / "demo-heldout.txt").read_bytes()[:100])
    args = ("smoke", build, "--prompts", prompts, "--text", text, "--tokens", 8, "--dtype", "float32", "--json")
    alone = motif_convert(*args)
    assert alone.returncode == 0, alone.stderr
    out, err = launch.run(2, *args)
    assert out, err
    found, expected = (json.loads(x) | {"speed": None} for x in (out, alone.stdout))
    assert found == expected | {"device": f"2 x {expected['device']}"}
    assert json.loads((build / "validation.json").read_text())["smoke"]["greedy"] == found["greedy"]


@pytest.mark.parametrize("source", [TINY, DEMO], ids=lambda p: p.name)
def test_fewer_shards_than_ranks(source, built, tmp_path):
    """A rank that has nothing to do."""
    _, err = launch.run(2, "convert", "--source", source, "--out", tmp_path / "out")
    assert differing(tmp_path / "out", built(source)) == [], err


def test_complete_already(source, whole, tmp_path):
    build = Path(shutil.copytree(whole, tmp_path / "build"))
    _, err = converting(2, source, build).finish()
    assert "Complete already" in err
    assert differing(build, whole) == []
    shard = sorted(build.glob("*.safetensors"))[-1]
    shard.write_bytes(b"damaged")
    again = launch.small_shards(SHARD_BYTES, "convert", "--source", source, "--mtp", "fp16", "--out", build)
    _, err = launch.start(2, [*again, "--recheck"]).finish()
    assert differing(build, whole) == [], err


# --- ranks that go ---


def ranks_of(launcher: int) -> list[psutil.Process]:
    """The ranks' processes, by rank; not what they start themselves."""
    found = {}
    for p in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if rank := p.environ().get("MLX_RANK"):
                found.setdefault(int(rank), p)
    return [found[rank] for rank in sorted(found)]


def test_ranks_killed_in_turn(source, whole, tmp_path):
    """Ten times, at random moments: all ranks end, nothing looks whole, and the next run goes on."""
    rng, out, gone = random.Random(9), tmp_path / "out", 0
    for turn in range(10):
        process = converting(3, source, out)
        while len(ranks_of(process.process.pid)) < 3 and process.process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 2))
        mortal = ranks_of(process.process.pid)
        killed = len(mortal) == 3
        if killed:
            mortal[turn % 3].kill()
            gone += 1
        _, err = process.finish(HANG if killed else launch.SECONDS)
        if (out / "config.json").exists():
            assert differing(out, whole) == []
            shutil.rmtree(out)
        elif out.exists():
            assert (out / JOURNAL).exists() or not list(out.iterdir())
    assert gone >= 5
    _, err = converting(3, source, out).finish()
    assert differing(out, whole) == [], err


def test_one_process_goes_on_with_what_ranks_have_done(source, whole, tmp_path):
    """What rank 1 had finished is not made again."""
    out = tmp_path / "out"
    process = converting(2, source, out)
    while not (journals := list(out.glob(".motif-convert.rank-1.json"))) and process.process.poll() is None:
        time.sleep(0.001)
    process.end()
    assert journals
    done = set(json.loads(journals[0].read_text())["shards"]) if journals[0].exists() else set()
    before = {name: (out / name).stat().st_mtime_ns for name in done}
    converting(1, source, out).finish()
    assert differing(out, whole) == []
    assert {name: (out / name).stat().st_mtime_ns for name in done} == before


# As the installed command, but rank 1's connections drop whatever arrives, as if its cable had been pulled.
SILENT = """
import ctypes, socket, struct
from motif_convert.convert.ranks import Ranks
from motif_convert.recipes.cli import main
gather, SO_ATTACH_FILTER, BPF_RET = Ranks.gather, 26, 6
drop = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
def silent(ranks, value):
    for peer in ranks.peers if ranks.rank == 1 else ():
        program = struct.pack("HP", 1, ctypes.addressof(drop))
        peer.connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    return gather(ranks, value)
Ranks.gather = silent
main()
"""
if sys.platform == "linux":

    def test_a_host_that_falls_silent(tmp_path):
        """It closes no connection, so nothing tells the others: they give it up after some seconds."""
        out = tmp_path / "out"
        command = [sys.executable, "-c", SILENT, "convert", "--source", DEMO, "--out", out]
        process = launch.start(3, command)
        _, err = process.finish(launch.SECONDS / 2)
        lines = [line for line in err.splitlines() if line.startswith("motif-convert: error: rank ")]
        assert lines, err
        assert all("(127.0.0.1) is gone, or can't be reached" in line for line in lines)
        assert not out.exists()


# --- shares ---


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_are_runs_and_all(ranks):
    sizes = {f"s{i}": size for i, size in enumerate([5, 1, 1, 1, 9, 2, 2, 2, 2, 5])}
    shares = [share_of(sizes, Ranks(rank, ranks)) for rank in range(ranks)]
    assert [name for share in shares for name in share] == list(sizes)
    most = max(sum(sizes[n] for n in share) for share in shares)
    assert most <= sum(sizes.values()) / ranks + max(sizes.values())


def test_alone_imports_no_mlx():
    code = "import sys; from motif_convert.convert.ranks import join; join(); print('mlx.core' in sys.modules)"
    process = launch.start(1, [sys.executable, "-c", code])
    assert process.finish()[0] == "False\n"


# --- each rank with a disk of its own ---


def at_home(home: Path, ranks: int, *args: object) -> list[str]:
    """A command line that every rank runs in a folder of its own."""
    for rank in range(ranks):
        (home / str(rank)).mkdir(exist_ok=True)
    return ["bash", "-c", f'cd {home}/$MLX_RANK && exec "$@"', "-", *launch.small_shards(SHARD_BYTES, *args)]


def test_local_shards(source, whole, tmp_path):
    """Each rank has what mlx-lm's pipeline looks for on it, of the bytes of one process; together it is all, and
    verified. Killed, it goes on; what is damaged on one rank is made again there."""
    options = ("convert", "--source", source, "--mtp", "fp16", "--local", "--out", "out")
    process = launch.start(2, at_home(tmp_path, 2, *options))
    while not (tmp_path / "1" / "out" / JOURNAL).exists() and process.process.poll() is None:
        time.sleep(0.01)
    ranks_of(process.process.pid)[1].kill()
    process.finish()
    _, err = launch.start(2, at_home(tmp_path, 2, *options)).finish()
    found = [contents(tmp_path / str(rank) / "out") for rank in (0, 1)]
    expected = contents(whole)
    assert found[0].keys() | found[1].keys() == expected.keys(), err
    assert all(expected[name] == data for part in found for name, data in part.items())
    shards = {name for name in expected if name.endswith(".safetensors")}
    assert all(expected.keys() - shards <= part.keys() for part in found)
    weight_map = json.loads(expected["model.safetensors.index.json"])["weight_map"]
    last = {f for n, f in weight_map.items() if not n.startswith(tuple(f"model.layers.{i}." for i in (0, 1, 2)))}
    assert found[0].keys() & shards == last
    verify = ("verify", "out", "--source", source, "--local", "--json")
    out, err = launch.start(2, at_home(tmp_path, 2, *verify)).finish()
    assert out, err
    assert json.loads(out)["passed"], out
    assert json.loads(out)["sampled"] == 1

    damaged = tmp_path / "1" / "out" / min(shards - last)
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    out, err = launch.start(2, at_home(tmp_path, 2, *verify)).finish()
    assert out, err
    assert not json.loads(out)["passed"]
    assert [p for p in json.loads(out)["problems"] if p.startswith(f"rank 1: {damaged.name}: ")]
    _, err = launch.start(2, at_home(tmp_path, 2, *options, "--recheck")).finish()
    assert damaged.read_bytes() == expected[damaged.name], err
