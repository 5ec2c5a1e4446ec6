"""Sources on the Hub: the installed command against a server that speaks the Hub's protocol, and fails on demand."""

import json
import random
import resource
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

import launch
import pytest
from conftest import SMALL_CONFIG, contents, environment_with, motif_convert, random_weights, write_checkpoint
from downloading import DEMO, REPO, SHARDS, sent
from hub_server import READ, Fault, HubServer


def line_of(result) -> str:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("motif-convert: error: ")
    return line


# --- the ordinary way ---


def test_plan_reads_headers_alone(hub, run, tmp_path):
    found = json.loads(run("plan", "--source", REPO, "--json").stdout)
    here = json.loads(motif_convert("plan", "--source", DEMO, "--json").stdout)
    assert found["tensors"] == here["tensors"]
    assert found["source"] == {"id": REPO, "revision": hub.repo(REPO).find("main").oid}
    size = sum((DEMO / s).stat().st_size for s in SHARDS)
    assert found["download"] == {"shards": len(SHARDS), "bytes": size, "here": 0}
    assert sent(hub) == 0
    assert sum(r.sent for r in hub.seen(r"\.safetensors(\?|$)", "GET")) <= len(SHARDS) * 65536
    assert not list(tmp_path.glob("*-mlx-*"))


def test_from_the_hub_as_from_a_folder(hub, run, built, tmp_path):
    result = run("convert", "--source", REPO, "--out", "out")
    assert result.returncode == 0, result.stderr
    made, local = contents(tmp_path / "out"), contents(built(DEMO))
    assert {n for n in made if made[n] != local.get(n)} == {"README.md", "motif-convert.json"}  # these name the source
    source = json.loads(made["motif-convert.json"])["source"]
    assert (source["id"], source["revision"]) == (REPO, hub.repo(REPO).find("main").oid)
    assert sent(hub) == sum((DEMO / s).stat().st_size for s in SHARDS)
    before = len(hub.requests)
    assert run("verify", "out").returncode == 0
    assert not [r for r in hub.requests[before:] if r.method == "GET" and r.sent > 65536], "fetched twice"


def test_every_file_is_of_one_commit(hub, run, tmp_path):
    old = hub.repo(REPO).find("main").oid
    config = json.loads((DEMO / "config.json").read_text())
    hub.commit(REPO, {"config.json": json.dumps(config | {"vocab_size": 7}).encode()})
    assert run("plan", "--source", REPO).returncode == 2, "the branch has moved on to a config that does not fit"
    before = len(hub.requests)
    result = run("convert", "--source", REPO, "--revision", old, "--out", "out")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out" / "motif-convert.json").read_text())["source"]["revision"] == old
    asked = {r.path for r in hub.requests[before:] if "/resolve/" in r.path and not r.cdn}
    assert run("verify", "out").returncode == 0, "the recorded commit is the source"
    assert len(asked) > len(SHARDS)
    assert all(f"/resolve/{old}/" in path for path in asked)


# --- what is in the cache, and what arrives ---


def blobs(tmp_path) -> dict[int, Path]:
    return {p.stat().st_size: p for p in (tmp_path / "home").rglob("blobs/*") if p.is_file()}


def test_a_corrupt_file_in_the_cache_is_found_and_fetched_again_once(hub, run, built, tmp_path):
    assert run("convert", "--source", REPO, "--out", "out").returncode == 0
    size = (DEMO / SHARDS[1]).stat().st_size
    blob = blobs(tmp_path)[size]
    with blob.open("r+b") as f:
        f.seek(size // 2)
        f.write(b"\xff\x00\xff\x00")
    before = sent(hub)
    assert run("convert", "--source", REPO, "--out", "again").returncode == 0
    assert sent(hub) - before == size
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_a_body_with_another_hash_is_fetched_again_once(hub, run, tmp_path):
    hub.fail(Fault("GET", SHARDS[0], skip=2, corrupt=True))  # the first two are for its header
    assert run("convert", "--source", REPO, "--out", "out").returncode == 0
    hub.fail(Fault("GET", SHARDS[0], times=None, corrupt=True))
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
def test_what_passes_is_waited_for(fault, hub, run):
    hub.fail(fault)
    result = run("convert", "--source", REPO, "--out", "out")
    assert result.returncode == 0, result.stderr


# --- what does not pass: one line ---


def test_refusals_name_the_repository_and_the_remedy(hub, run, tmp_path):
    hub.add_repo("acme/gated", files={"config.json": b"{}"}, gated=True)
    hub.add_repo("acme/hidden", files={"config.json": b"{}"}, private=True)
    hub.add_repo("acme/empty", files={"README.md": b"hello"})
    hub.add_repo("acme/old", files={"config.json": b"{}"})
    hub.rename_repo("acme/old", "acme/new")
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


def test_a_token_is_nowhere(hub, run, tmp_path):
    hub.add_repo("acme/mine", files={p.name: p for p in DEMO.iterdir()}, private=True)
    token = hub.add_token("reader", "fineGrained", scoped={"acme/mine": (READ,)})
    result = run("convert", "--source", "acme/mine", "--out", "out", token=token)
    assert result.returncode == 0, result.stderr
    hub.fail(Fault("GET", "/revision/", status=403, times=None))
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
    with HubServer(tmp_path / "server") as hub:
        hub.add_repo("acme/larger", files={p.name: p for p in larger.iterdir()})
        env = environment_with(hub.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        limit = 8 << 20  # bytes of a file, where the shards have 20 and more

        def command() -> subprocess.CompletedProcess:
            words = [launch.COMMAND, "convert", "--source", "acme/larger"]
            words += ["--out", "out", *stream]
            full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, preexec_fn=full)

        line = line_of(command())
        assert "could not be written" in line
        arrived, limit = sent(hub), resource.RLIM_INFINITY
        result = command()
        assert result.returncode == 0, result.stderr
        size = sum(p.stat().st_size for p in larger.glob("*.safetensors"))
        in_hand = 4 << 20  # of each of four downloads, most of it in the buffers of sockets
        assert arrived > 8 << 20
        assert sent(hub) < size + 4 * in_hand


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["cache", "stream"])
def test_killed_twenty_times(stream, larger, built, tmp_path):
    """Every time it goes on: of what arrived, no more is fetched again than was in hand."""
    rng, in_hand = random.Random(3), 1 << 20
    shards = sorted(larger.glob("*.safetensors"))
    size = sum(p.stat().st_size for p in shards)
    (tmp_path / "server").mkdir()
    with HubServer(tmp_path / "server") as hub:
        hub.add_repo("acme/larger", files={p.name: p for p in larger.iterdir()})
        env = environment_with(hub.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"})
        command = [launch.COMMAND, "convert", "--source", "acme/larger"]
        kills, downloads = 0, 1
        while kills < 20:
            hub.heal()
            hub.fail(Fault("GET", "safetensors", times=None, pause=0.004, chunk=1 << 18))
            done, until = sent(hub), rng.uniform(0, 0.1) * size
            process = subprocess.Popen(
                [*command, "--out", "out", *stream], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL
            )
            while process.poll() is None and sent(hub) - done < until:
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
        hub.heal()
        if not (tmp_path / "out" / "config.json").exists():
            assert subprocess.run([*command, "--out", "out", *stream], cwd=tmp_path, env=env).returncode == 0
        print(f"{kills} kills, {downloads} downloads, {sent(hub) / size:.2f} times the source")
    local = contents(built(larger))
    made = contents(tmp_path / "out")
    assert {n for n in made if made[n] != local.get(n)} == {"README.md", "motif-convert.json"}
    assert set(made) == set(local)
    assert sent(hub) <= size * downloads + kills * 4 * (in_hand + (1 << 20))
