"""Sources on the Hub: the installed command against a server that speaks the Hub's protocol, and fails on demand."""

import json
import random
import resource
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import permutations
from pathlib import Path

import launch
import numpy as np
import pytest
from conftest import (
    REFERENCE,
    SMALL_CONFIG,
    contents,
    environment_with,
    motif_convert,
    random_weights,
    write_checkpoint,
)
from hub_server import READ, Fault, HubServer
from motif_convert.convert.supply import itinerary
from motif_convert.quantize.errors import OutputError
from motif_convert.recipes.disk import check_space, order_text
from motif_convert.recipes.pipeline import prepare

REPO = "acme/demo-motif3"
DEMO = REFERENCE / "demo-motif3"
SHARDS = sorted(p.name for p in DEMO.glob("*.safetensors"))


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server").mkdir()
    with HubServer(tmp_path / "server") as server:
        server.add_repo(REPO, files={p.name: p for p in DEMO.iterdir()})
        yield server


@pytest.fixture
def run(server, tmp_path):
    """Runs the command in a folder of its own, with the server as the Hub."""

    def command(*args, token=None, **env):
        env = server.env(tmp_path / "home", token) | {"HF_HUB_OFFLINE": "0"} | env
        return motif_convert(*args, cwd=tmp_path, env=env)

    return command


def sent(server, pattern: str = r"\.safetensors(\?|$)") -> int:
    """Bytes of files that went out, but for requests of the first 64 KiB, which read headers."""
    return sum(r.sent for r in server.seen(pattern, "GET") if r.range != "bytes=0-65535")


def line_of(result) -> str:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("motif-convert: error: ")
    return line


# --- the ordinary way ---


def test_plan_reads_headers_alone(server, run, tmp_path):
    found = json.loads(run("plan", "--source", REPO, "--json").stdout)
    here = json.loads(motif_convert("plan", "--source", DEMO, "--json").stdout)
    assert found["tensors"] == here["tensors"]
    assert found["source"] == {"id": REPO, "revision": server.repo(REPO).find("main").oid}
    size = sum((DEMO / s).stat().st_size for s in SHARDS)
    assert found["download"] == {"shards": len(SHARDS), "bytes": size, "here": 0}
    assert sent(server) == 0
    assert sum(r.sent for r in server.seen(r"\.safetensors(\?|$)", "GET")) <= len(SHARDS) * 65536
    assert not list(tmp_path.glob("*-mlx-*"))


def test_from_the_hub_as_from_a_folder(server, run, built, tmp_path):
    result = run("convert", "--source", REPO, "--out", "out")
    assert result.returncode == 0, result.stderr
    made, local = contents(tmp_path / "out"), contents(built(DEMO))
    assert {n for n in made if made[n] != local.get(n)} == {"README.md", "motif-convert.json"}  # these name the source
    source = json.loads(made["motif-convert.json"])["source"]
    assert (source["id"], source["revision"]) == (REPO, server.repo(REPO).find("main").oid)
    assert sent(server) == sum((DEMO / s).stat().st_size for s in SHARDS)
    before = len(server.requests)
    assert run("verify", "out").returncode == 0
    assert not [r for r in server.requests[before:] if r.method == "GET" and r.sent > 65536], "fetched twice"


def test_every_file_is_of_one_commit(server, run, tmp_path):
    old = server.repo(REPO).find("main").oid
    config = json.loads((DEMO / "config.json").read_text())
    server.commit(REPO, {"config.json": json.dumps(config | {"vocab_size": 7}).encode()})
    assert run("plan", "--source", REPO).returncode == 2, "the branch has moved on to a config that does not fit"
    before = len(server.requests)
    result = run("convert", "--source", REPO, "--revision", old, "--out", "out")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out" / "motif-convert.json").read_text())["source"]["revision"] == old
    asked = {r.path for r in server.requests[before:] if "/resolve/" in r.path and not r.cdn}
    assert run("verify", "out").returncode == 0, "the recorded commit is the source"
    assert len(asked) > len(SHARDS)
    assert all(f"/resolve/{old}/" in path for path in asked)


# --- what is in the cache, and what arrives ---


def blobs(tmp_path) -> dict[int, Path]:
    return {p.stat().st_size: p for p in (tmp_path / "home").rglob("blobs/*") if p.is_file()}


def test_a_corrupt_file_in_the_cache_is_found_and_fetched_again_once(server, run, built, tmp_path):
    assert run("convert", "--source", REPO, "--out", "out").returncode == 0
    size = (DEMO / SHARDS[1]).stat().st_size
    blob = blobs(tmp_path)[size]
    with blob.open("r+b") as f:
        f.seek(size // 2)
        f.write(b"\xff\x00\xff\x00")
    before = sent(server)
    assert run("convert", "--source", REPO, "--out", "again").returncode == 0
    assert sent(server) - before == size
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_a_body_with_another_hash_is_fetched_again_once(server, run, tmp_path):
    server.fail(Fault("GET", SHARDS[0], skip=2, corrupt=True))  # the first two are for its header
    assert run("convert", "--source", REPO, "--out", "out").returncode == 0
    server.fail(Fault("GET", SHARDS[0], times=None, corrupt=True))
    shutil.rmtree(tmp_path / "home")
    result = run("convert", "--source", REPO, "--out", "never")
    assert result.returncode == 2
    assert SHARDS[0] in result.stderr
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", SHARDS[2], skip=2, cut=100_000),
        Fault("GET", SHARDS[2], skip=2, drop="before"),
        Fault("GET", SHARDS[2], skip=2, status=503, times=2),
        Fault("GET", SHARDS[2], skip=2, status=429, headers={"Retry-After": "0"}),
        Fault("GET", "/revision/", status=503),
    ],
    ids=["cut", "reset", "503", "429", "503 on the API"],
)
def test_what_passes_is_waited_for(fault, server, run):
    server.fail(fault)
    result = run("convert", "--source", REPO, "--out", "out")
    assert result.returncode == 0, result.stderr


# --- what does not pass: one line ---


def test_refusals_name_the_repository_and_the_remedy(server, run, tmp_path):
    server.add_repo("acme/gated", files={"config.json": b"{}"}, gated=True)
    server.add_repo("acme/hidden", files={"config.json": b"{}"}, private=True)
    server.add_repo("acme/empty", files={"README.md": b"hello"})
    server.add_repo("acme/old", files={"config.json": b"{}"})
    server.rename_repo("acme/old", "acme/new")
    for repo, options, words in (
        ("acme/gated", (), ("gated", "hf auth login", "HF_TOKEN")),
        ("acme/hidden", (), ("no such repository",)),
        ("acme/missing", (), ("no such repository",)),
        ("acme/empty", (), ("config.json", "not there")),
        ("acme/old", (), ("now called acme/new",)),
        (REPO, ("--revision", "v9"), ("no revision 'v9'",)),
    ):
        line = line_of(run("convert", "--source", repo, *options, "--out", "out"))
        assert repo in line
        assert all(word in line for word in words), line
    assert "token" in line_of(run("plan", "--source", REPO, token="hf_nonsense"))
    assert "HF_HUB_OFFLINE" in line_of(run("plan", "--source", REPO, HF_HUB_OFFLINE="1"))
    assert not (tmp_path / "out").exists()


def test_no_hub_at_all(run, tmp_path):
    line = line_of(run("plan", "--source", REPO, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_ETAG_TIMEOUT="1"))
    assert "can't be reached" in line


def test_revision_and_stream_are_for_the_hub(run):
    assert "--revision" in run("plan", "--source", DEMO, "--revision", "main").stderr
    assert "--revision" in run("plan", "--source", "demo", "--revision", "main").stderr
    assert run("convert", "--source", DEMO, "--stream").returncode == 2
    assert "--sample" in run("verify", DEMO, "--stream", "--sample", "0.5").stderr


def test_a_token_is_nowhere(server, run, tmp_path):
    server.add_repo("acme/mine", files={p.name: p for p in DEMO.iterdir()}, private=True)
    token = server.add_token("reader", "fineGrained", scoped={"acme/mine": (READ,)})
    result = run("convert", "--source", "acme/mine", "--out", "out", token=token)
    assert result.returncode == 0, result.stderr
    server.fail(Fault("GET", "/revision/", status=403, times=None))
    failed = run("plan", "--source", "acme/mine", token=token)
    assert failed.returncode == 2
    for text in (result.stdout, result.stderr, failed.stdout, failed.stderr):
        assert token not in text
    files = [p for p in tmp_path.rglob("*") if p.is_file() and "server" not in p.relative_to(tmp_path).parts]
    assert len(files) > 20
    assert not [p for p in files if token.encode() in p.read_bytes()]


# --- killed ---


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> Path:
    """Shards of about 30 MB."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "intermediate_size": 1024, "vocab_size": 8192}
    config = SMALL_CONFIG | sizes | {"num_experts": 48}
    return write_checkpoint(
        tmp_path_factory.mktemp("larger") / "larger-motif3", config, random_weights(config), 4, dealt=False
    )


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["cache", "stream"])
def test_a_disk_that_fills_up_on_the_way(stream, larger, tmp_path):
    """What has arrived stays, and is not fetched again when there is room."""
    (tmp_path / "server").mkdir()
    with HubServer(tmp_path / "server") as server:
        server.add_repo("acme/larger", files={p.name: p for p in larger.iterdir()})
        env = environment_with(server.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        limit = 8 << 20  # bytes of a file, where the shards have 20 and more

        def command() -> subprocess.CompletedProcess:
            words = [launch.COMMAND, "convert", "--source", "acme/larger"]
            words += ["--out", "out", *stream]
            full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, preexec_fn=full)

        line = line_of(command())
        assert "could not be written" in line
        arrived, limit = sent(server), resource.RLIM_INFINITY
        result = command()
        assert result.returncode == 0, result.stderr
        size = sum(p.stat().st_size for p in larger.glob("*.safetensors"))
        in_hand = 4 << 20  # of each of four downloads, most of it in the buffers of sockets
        assert arrived > 8 << 20
        assert sent(server) < size + 4 * in_hand


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["cache", "stream"])
def test_killed_twenty_times(stream, larger, built, tmp_path):
    """Every time it goes on: of what arrived, no more is fetched again than was in hand."""
    rng, in_hand = random.Random(3), 1 << 20
    shards = sorted(larger.glob("*.safetensors"))
    size = sum(p.stat().st_size for p in shards)
    (tmp_path / "server").mkdir()
    with HubServer(tmp_path / "server") as server:
        server.add_repo("acme/larger", files={p.name: p for p in larger.iterdir()})
        env = environment_with(server.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        command = [launch.COMMAND, "convert", "--source", "acme/larger"]
        kills, downloads = 0, 1
        while kills < 20:
            server.heal()
            server.fail(Fault("GET", "safetensors", times=None, pause=0.004, chunk=1 << 18))
            done, until = sent(server), rng.uniform(0, 0.1) * size
            process = subprocess.Popen(
                [*command, "--out", "out", *stream], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL
            )
            while process.poll() is None and sent(server) - done < until:
                time.sleep(0.005)
            if process.poll() is not None:  # all had arrived: from the start again
                assert process.returncode == 0
                shutil.rmtree(tmp_path / "out")
                shutil.rmtree(tmp_path / "home")
                downloads += 1
                continue
            process.kill()
            process.wait()
            kills += 1
        server.heal()
        if not (tmp_path / "out" / "config.json").exists():
            assert subprocess.run([*command, "--out", "out", *stream], cwd=tmp_path, env=env).returncode == 0
        print(f"{kills} kills, {downloads} downloads, {sent(server) / size:.2f} times the source")
    local = contents(built(larger))
    made = contents(tmp_path / "out")
    assert {n for n in made if made[n] != local.get(n)} == {"README.md", "motif-convert.json"}
    assert set(made) == set(local)
    assert sent(server) <= size * downloads + kills * 4 * (in_hand + (1 << 20))


# --- streamed ---


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
    with HubServer(tmp_path / "server") as server:
        server.add_repo("acme/ten", files={p.name: p for p in ten.iterdir()})
        env = environment_with(server.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        plan = json.loads(
            subprocess.check_output([*command, "plan", "--source", "acme/ten", "--json"], cwd=tmp_path, env=env)
        )
        server.fail(Fault("GET", "safetensors", times=None, pause=0.002, chunk=1 << 16))
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
    with HubServer(tmp_path / "server") as server:
        server.add_repo("acme/ten", files={p.name: p for p in ten.iterdir()})
        env = environment_with(server.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})

        def command(*args, **how):
            words = launch.small_shards(largest, *args)
            return subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE, **how)

        yield command, server


def ended(process) -> tuple[int, str]:
    said = process.communicate()[1]
    return process.returncode, said


WHOLE = ("--source", "acme/ten", "--out", "out", "--stream", "--max-tokens", "2")


def test_a_streamed_build_is_verified_as_it_is_made(streamed, ten, tmp_path):
    """The source comes once, and what the evidence says is what verifying against the whole source says."""
    command, server = streamed
    code, said = ended(command(*WHOLE))
    assert code == 0, said
    size = sum(p.stat().st_size for p in ten.glob("*.safetensors"))
    assert sent(server) == size
    found = json.loads((tmp_path / "out" / "validation.json").read_text())["verify"]
    assert ended(command("verify", "out", "--source", str(ten)))[0] == 0
    assert json.loads((tmp_path / "out" / "validation.json").read_text())["verify"] == found
    assert (found["passed"], found["sampled"]) == (True, 1)
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    before = sent(server)
    code, said = ended(command(*WHOLE))
    assert (code, sent(server) - before) == (0, 0), said
    assert "validation.json stands" in said


def test_a_finished_build_whose_source_is_no_longer_here(server, run, tmp_path):
    """The bare command on it verifies what was not verified: it fetches the source again."""
    plain = ("--recipe", "bf16")  # decodes ten times as fast
    assert run("convert", "--source", REPO, *plain, "--out", "out").returncode == 0
    shutil.rmtree(tmp_path / "home")
    result = run("--source", REPO, *plain, "--out", "out", "--max-tokens", "2")
    assert result.returncode == 0, result.stderr
    assert "Complete already" in result.stderr
    assert "Verified: every weight compared" in result.stdout


def test_a_streamed_run_is_killed_and_compares_what_it_has_not(streamed, ten, tmp_path):
    command, server = streamed
    server.fail(Fault("GET", "safetensors", times=None, pause=0.002, chunk=1 << 16))
    process = command(*WHOLE)
    while process.poll() is None and len(list((tmp_path / "home").rglob("compared/*/model*.json"))) < 3:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert not (tmp_path / "out" / "config.json").exists()
    server.heal()
    code, said = ended(command("convert", "--source", "acme/ten", "--out", "out", "--stream"))
    assert code == 0, said
    before = sent(server)
    code, said = ended(command("verify", "out", "--stream"))
    assert code == 0, said
    size = sum(p.stat().st_size for p in ten.glob("*.safetensors"))
    assert 0 < sent(server) - before < size, "what had been compared was not fetched again"
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    assert json.loads((tmp_path / "out" / "validation.json").read_text())["passed"]


def moved_weights(server, ten) -> None:
    """New weights of the same names and sizes on the branch: a fine-tune, whose config and index are the old ones."""
    shards = {p.name: bytearray(p.read_bytes()) for p in ten.glob("*.safetensors")}
    for data in shards.values():
        data[-4:-2] = b"\x80\x3f"
    server.commit("acme/ten", {name: bytes(data) for name, data in shards.items()})


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["cache", "stream"])
def test_an_interrupted_build_stays_with_its_commit(stream, streamed, ten, tmp_path):
    command, server = streamed
    first = server.repo("acme/ten").find("main").oid
    server.fail(Fault("GET", "safetensors", times=None, pause=0.002, chunk=1 << 16))
    options = ("--source", "acme/ten", "--out", "out", "--max-tokens", "2", *stream)
    process = command(*options)
    while process.poll() is None and len(list((tmp_path / "out").glob("model*"))) < 3:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    server.heal()
    moved_weights(server, ten)
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
    with HubServer(tmp_path / "server") as server:
        server.add_repo("acme/ten", files={p.name: p for p in ten.iterdir()})
        env = environment_with(server.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        last = sorted(p.name for p in ten.glob("*.safetensors"))[-1]
        server.fail(Fault("GET", last, skip=2, times=None, pause=0.6, chunk=int(size / 20)))
        command = launch.small_shards(int(size) // 3, "convert", "--source", "acme/ten")
        process = subprocess.Popen([*command, "--out", "out"], cwd=tmp_path, env=env)
        while process.poll() is None and not list((tmp_path / "out").glob("model-*.safetensors")):
            time.sleep(0.005)
        assert not list((tmp_path / "home").rglob(f"snapshots/*/{last}")), "it had not arrived"
        server.heal()
        assert process.wait(60) == 0
