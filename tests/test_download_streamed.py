"""Sources on the Hub of which few shards lie on the disk at a time."""

import json
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import launch
import numpy as np
import pytest
from conftest import SMALL_CONFIG, contents, environment_with, random_weights, write_checkpoint
from downloading import DEMO, REPO, sent
from hub_server import Fault, HubServer
from motif_convert.convert.supply import itinerary
from motif_convert.quantize.errors import OutputError
from motif_convert.recipes.disk import check_space, order_text
from motif_convert.recipes.pipeline import prepare


@pytest.fixture(scope="module")
def ten(tmp_path_factory) -> Path:
    config = SMALL_CONFIG | {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 16}
    return write_checkpoint(
        tmp_path_factory.mktemp("ten") / "ten-motif3", config, random_weights(config), 10, dealt=False
    )


def test_stream_holds_no_more_than_the_plan_says(ten, tmp_path):
    (tmp_path / "server").mkdir()
    largest = max(p.stat().st_size for p in ten.glob("*.safetensors")) // 3
    command = launch.small_shards(largest)
    with HubServer(tmp_path / "server") as hub:
        hub.add_repo("acme/ten", files={p.name: p for p in ten.iterdir()})
        env = environment_with(hub.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        plan = json.loads(
            subprocess.check_output([*command, "plan", "--source", "acme/ten", "--json"], cwd=tmp_path, env=env)
        )
        hub.fail(Fault("GET", "safetensors", times=None, pause=0.002, chunk=1 << 16))
        most, finished = [0], threading.Event()

        def watch():
            while not finished.is_set():
                most[0] = max(most[0], disk_use(tmp_path / "out"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        result = subprocess.run(
            [*command, "convert", "--source", "acme/ten", "--out", "out", "--stream"],
            **{"cwd": tmp_path, "env": env, "stderr": subprocess.PIPE, "text": True},
        )
        finished.set()
        watcher.join()
        assert result.returncode == 0
        assert f"in the order in which they are made: {order_text(plan['stream']['order'])}." in result.stderr
        cached = sum(p.stat().st_size for p in (tmp_path / "home").rglob("blobs/*"))
    local = subprocess.run([*command, "convert", "--source", str(ten), "--out", "local"], cwd=tmp_path)
    assert local.returncode == 0
    made, whole = contents(tmp_path / "out"), contents(tmp_path / "local")
    assert len([n for n in made if n.endswith(".safetensors")]) >= 5
    assert {n for n in made if made[n] != whole.get(n)} == {"README.md", "motif-convert.json"}
    small_files = 1 << 20
    source = sum(p.stat().st_size for p in ten.glob("*.safetensors"))
    assert plan["stream"]["source_peak"] < 0.8 * source
    assert 0.5 * plan["stream"]["peak"] < most[0] < plan["stream"]["peak"] + small_files
    assert cached < small_files, "no shard in the Hub cache"


@pytest.fixture
def streamed(ten, tmp_path):
    """The command with small output shards, in a folder of its own, and the Hub that it asks."""
    (tmp_path / "server").mkdir()
    largest = max(p.stat().st_size for p in ten.glob("*.safetensors")) // 3
    with HubServer(tmp_path / "server") as hub:
        hub.add_repo("acme/ten", files={p.name: p for p in ten.iterdir()})
        env = environment_with(hub.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})

        def command(*args, **how):
            words = launch.small_shards(largest, *args)
            return subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE, **how)

        yield command, hub


def ended(process) -> tuple[int, str]:
    said = process.communicate()[1]
    return process.returncode, said


WHOLE = ("--source", "acme/ten", "--out", "out", "--stream", "--max-tokens", "2")


def test_a_streamed_build_is_verified_as_it_is_made(streamed, ten, tmp_path):
    """The source comes once, and what the evidence says is what verifying against the whole source says."""
    command, hub = streamed
    code, said = ended(command(*WHOLE))
    assert code == 0, said
    size = sum(p.stat().st_size for p in ten.glob("*.safetensors"))
    assert sent(hub) == size
    found = json.loads((tmp_path / "out" / "validation.json").read_text())["verify"]
    assert ended(command("verify", "out", "--source", str(ten)))[0] == 0
    assert json.loads((tmp_path / "out" / "validation.json").read_text())["verify"] == found
    assert (found["passed"], found["sampled"]) == (True, 1)
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    before = sent(hub)
    code, said = ended(command(*WHOLE))
    assert (code, sent(hub) - before) == (0, 0), said
    assert "validation.json stands" in said


def test_a_finished_build_whose_source_is_no_longer_here(hub, run, tmp_path):
    """The bare command on it verifies what was not verified: it fetches the source again."""
    plain = ("--recipe", "bf16")  # decodes ten times as fast
    assert run("convert", "--source", REPO, *plain, "--out", "out").returncode == 0
    shutil.rmtree(tmp_path / "home")
    result = run("--source", REPO, *plain, "--out", "out", "--max-tokens", "2")
    assert result.returncode == 0, result.stderr
    assert "Complete already" in result.stderr
    assert "Verified: every weight compared" in result.stdout


def test_a_streamed_run_is_killed_and_compares_what_it_has_not(streamed, ten, tmp_path):
    command, hub = streamed
    hub.fail(Fault("GET", "safetensors", times=None, pause=0.002, chunk=1 << 16))
    process = command(*WHOLE)
    while process.poll() is None and len(list((tmp_path / "home").rglob("compared/*/model*.json"))) < 3:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert not (tmp_path / "out" / "config.json").exists()
    hub.heal()
    code, said = ended(command("convert", "--source", "acme/ten", "--out", "out", "--stream"))
    assert code == 0, said
    before = sent(hub)
    code, said = ended(command("verify", "out", "--stream"))
    assert code == 0, said
    size = sum(p.stat().st_size for p in ten.glob("*.safetensors"))
    assert 0 < sent(hub) - before < size, "what had been compared was not fetched again"
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    assert json.loads((tmp_path / "out" / "validation.json").read_text())["passed"]


def moved_weights(hub, ten) -> None:
    """New weights of the same names and sizes on the branch: a fine-tune, whose config and index are the old ones."""
    shards = {p.name: bytearray(p.read_bytes()) for p in ten.glob("*.safetensors")}
    for data in shards.values():
        data[-4:-2] = b"\x80\x3f"
    hub.commit("acme/ten", {name: bytes(data) for name, data in shards.items()})


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["cache", "stream"])
def test_an_interrupted_build_stays_with_its_commit(stream, streamed, ten, tmp_path):
    command, hub = streamed
    first = hub.repo("acme/ten").find("main").oid
    hub.fail(Fault("GET", "safetensors", times=None, pause=0.002, chunk=1 << 16))
    options = ("--source", "acme/ten", "--out", "out", "--max-tokens", "2", *stream)
    process = command(*options)
    while process.poll() is None and len(list((tmp_path / "out").glob("model*"))) < 3:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    hub.heal()
    moved_weights(hub, ten)
    code, said = ended(command(*options, "--revision", "main"))
    assert code == 2
    assert "other weights of its source" in said
    code, said = ended(command(*options))
    assert code == 0, said
    assert f"begun at commit {first}" in said
    assert json.loads((tmp_path / "out" / "motif-convert.json").read_text())["source"]["revision"] == first
    assert ended(command("verify", "out", "--source", str(ten)))[0] == 0
    code, said = ended(command("convert", "--source", "acme/ten", "--out", "out", "--revision", "main"))
    assert (code, "other weights" in said) == (2, True), "nor is a finished one taken for another"
    assert ended(command("convert", "--source", "acme/ten", "--out", "out"))[0] == 0


def test_verify_streamed_finds_what_differs(streamed, ten, tmp_path):
    command, _ = streamed
    assert ended(command("convert", "--source", "acme/ten", "--out", "out", "--stream"))[0] == 0
    shard = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    code, said = ended(command("verify", "out", "--stream"))
    assert code == 1, said
    found = json.loads((tmp_path / "out" / "validation.json").read_text())["verify"]
    assert ended(command("verify", "out", "--source", str(ten)))[0] == 1
    assert json.loads((tmp_path / "out" / "validation.json").read_text())["verify"] == found
    assert found["offenders_total"] == 1
    assert [p for p in found["problems"] if shard.name in p and "sha256" in p]


def disk_use(folder: Path) -> int:
    total = 0
    with suppress(FileNotFoundError):  # folders go too
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def test_itinerary_against_all_orders():
    """The greedy order is as good as the best of all orders, where shards follow the layers as they do in Motif-3."""
    needs = {f"out-{i}": frozenset({f"s{2 * i}", f"s{2 * i + 1}", f"s{2 * i + 2}"}) for i in range(6)}
    sizes = {f"s{i}": 10 + i % 3 for i in range(13)}
    outputs = dict.fromkeys(needs, 7)
    scrambled = {name: needs[name] for name in ("out-3", "out-0", "out-5", "out-1", "out-4", "out-2")}
    found = itinerary(scrambled, sizes, outputs)

    def peak(order):
        worst = written = 0
        held = set()
        for i, name in enumerate(order):
            held |= needs[name] | (needs[order[i + 1]] if i + 1 < len(order) else set())
            written += outputs[name]
            worst = max(worst, sum(sizes[s] for s in held) + written)
            held &= set().union(*(needs[n] for n in order[i + 1 :]))
        return worst

    assert found.peak == peak(found.order)
    assert found.peak <= 1.2 * min(peak(order) for order in permutations(needs))


def test_the_order_as_text():
    names = [f"model-{n:05d}-of-00009.safetensors" for n in (1, 2, 3, 7, 6, 4, 5, 8, 9)]
    assert order_text(names) == "1 to 3, 7, 6, 4 to 5, 8 to 9"


def test_a_disk_that_is_too_small_is_found_before_anything_starts(monkeypatch, tmp_path):
    """The one thing that is not real here is the size of the disk."""
    job = prepare(str(DEMO), "4.5bit", None)
    check_space(job, tmp_path / "out", False)
    usage = shutil.disk_usage(tmp_path)._replace(free=job.plan.total_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match="are needed there"):
        check_space(job, tmp_path / "out", False)


def test_conversion_begins_before_the_last_shard_is_here(ten, tmp_path):
    (tmp_path / "server").mkdir()
    size = np.mean([p.stat().st_size for p in ten.glob("*.safetensors")])
    with HubServer(tmp_path / "server") as hub:
        hub.add_repo("acme/ten", files={p.name: p for p in ten.iterdir()})
        env = environment_with(hub.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        last = sorted(p.name for p in ten.glob("*.safetensors"))[-1]
        hub.fail(Fault("GET", last, skip=2, times=None, pause=0.6, chunk=int(size / 20)))
        command = launch.small_shards(int(size) // 3, "convert", "--source", "acme/ten")
        process = subprocess.Popen([*command, "--out", "out"], cwd=tmp_path, env=env)
        while process.poll() is None and not list((tmp_path / "out").glob("model-*.safetensors")):
            time.sleep(0.005)
        assert not list((tmp_path / "home").rglob(f"snapshots/*/{last}")), "it had not arrived"
        hub.heal()
        assert process.wait(60) == 0
