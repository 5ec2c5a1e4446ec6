"""Publishing: refused by the Hub, interrupted, and done again; the token is nowhere."""

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import SMALL_CONFIG, random_weights, write_checkpoint
from hub_server import Fault, HubServer, storage_exceeded
from publishing import REPO, assert_refused, assert_said, commits, flip, make_build, ours, tree_of
from warm import COMMAND

NOW = {"Retry-After": "0"}  # a test need not wait


# --- refusals and faults of the Hub ---


@pytest.mark.parametrize(
    ("fault", "fragments"),
    [
        (storage_exceeded(), ["no room", "storage limit", "billing", "not sent again"]),
        (Fault("POST", "/commit/", None, status=403, message="Forbidden"), ["refused: Forbidden", "settings/tokens"]),
        (Fault("PUT", "", None, status=403, message="SignatureDoesNotMatch"), ["refused", "SignatureDoesNotMatch"]),
        (Fault("POST", "/repos/create", None, status=402, message="Payment required"), ["no room", "billing"]),
        (Fault("POST", "/preupload/", None, status=404, message="gone"), ["not there", "gone"]),
    ],
    ids=["quota", "commit", "put", "create", "404"],
)
def test_refused_for_good(fault, fragments, target, upload, builds):
    """At once, in a line, and nothing is there to be seen."""
    target.fail(fault)
    result = upload(builds["one"], REPO)
    assert_refused(result, *fragments)
    assert "trying again" not in result.stderr
    assert "Signature=" not in result.stderr
    assert len([r for r in target.seen(fault.path, fault.method) if r.status == fault.status]) == 1
    assert REPO not in target.repos or not ours(target)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_waited_for(status, target, upload, builds):
    for path in ("/whoami-v2", "/repos/create", "/refs", "/preupload/", "/commit/", "/tree/"):
        target.fail(Fault("GET|POST", path, status=status, headers=NOW))
    assert_said(upload(builds["one"], REPO), 0, "Uploaded")
    assert ours(target) == tree_of(builds["one"])
    assert commits(target) == 1


def test_what_does_not_pass_is_given_up(target, upload, builds):
    target.fail(Fault("POST", "/commit/", None, status=503, message="busy", headers=NOW))
    result = upload(builds["one"], REPO)
    assert_refused(result, "still answers 503 after 6 tries: busy", "not sent again")
    assert len(target.seen("/commit/")) == 6
    assert result.stderr.count("trying again in 0 s") == 5


@pytest.mark.parametrize("drop", ["before", "after"])
@pytest.mark.parametrize("path", ["/repos/create", "/branch/", "/commit/", "/[0-9a-f]{64}$"])
def test_connection_that_is_lost(path, drop, target, upload, builds):
    """Before anything is done, or after it: the answer alone is lost then. One commit in any case."""
    for lost in ("/whoami-v2", path, "/tree/"):
        target.fail(Fault(".*", lost, drop=drop))
    assert_said(upload(builds["one"], REPO, "--revision", "dev"), 0, "Uploaded")
    assert ours(target, revision="dev") == tree_of(builds["one"])
    assert commits(target) == 1
    assert len(target.seen("/commit/")) == (2 if (path, drop) == ("/commit/", "before") else 1)


def test_somebody_else_commits_meanwhile(target, token, upload, builds, tmp_path):
    target.add_repo(REPO)
    target.fail(Fault("POST", "/commit/", drop="before"))
    refused = []
    thread = threading.Thread(target=lambda: refused.append(upload(builds["one"], REPO)))
    thread.start()
    target.wait_for("/commit/")
    target.commit(REPO, {"notes.txt": b"mine"})
    thread.join()
    assert_refused(refused[0], "somebody else has changed main", "not sent again")
    sent = len(target.seen("", "PUT"))
    assert_said(upload(builds["one"], REPO), 0)
    assert len(target.seen("", "PUT")) == sent
    assert "notes.txt" in ours(target)


def test_a_tree_that_is_not_what_was_sent(target, upload, builds):
    target.fail(Fault("GET", "/tree/", drop="before"))  # of a new repository, the first tree is that after the push
    done = []
    thread = threading.Thread(target=lambda: done.append(upload(builds["one"], REPO)))
    thread.start()
    target.wait_for("/tree/")
    head = target.repo(REPO).find("main")
    del head.files["motif.py"]
    head.files["README.md"] = target.storage.copy("README.md", b"other")
    head.files["more.txt"] = head.files["config.json"]
    thread.join()
    assert_said(done[0], 1, "NOT equal", "motif.py: is not there", "README.md: has 5 bytes there", "more.txt: should")


# --- interrupted ---


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Several shards of more bytes than a socket's buffers hold: those would arrive even after a client's death."""
    config = SMALL_CONFIG | {"vocab_size": 110_000, "num_experts": 300, "num_nextn_predict_layers": 0}
    folder = tmp_path_factory.mktemp("large")
    source = write_checkpoint(folder / "large-motif3", config, random_weights(config))
    out = make_build(source, folder / "out", 15_000_000, "--recipe", "bf16")
    assert len(list(out.glob("model-*"))) >= 4
    return out


def test_ctrl_c(target, token, large, tmp_path):
    target.fail(Fault("PUT", "", times=None, pause=0.1))
    env = os.environ | target.env(tmp_path / "home", token)
    with subprocess.Popen([COMMAND, "upload", large, REPO], env=env, stderr=subprocess.PIPE, text=True) as process:
        target.wait_for("", "PUT", received=100_000)
        process.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        error = process.stderr.read()
    assert process.returncode == 130
    assert time.monotonic() - stopped < 5
    assert (
        error.splitlines()[-1]
        == "Interrupted. Run the same command again to go on; what has arrived is not sent again."
    )


KILLS = 20


def left_to_send(target: HubServer, unpublished: Path) -> int:
    """Bytes of the shards that have not arrived whole."""
    there = target.repos[REPO].objects if REPO in target.repos else {}
    return sum(
        size for name, (size, sha256) in tree_of(unpublished).items() if "model-" in name and sha256 not in there
    )


def settle(target: HubServer) -> None:
    """Waits until what a dead client's sockets still held has come in."""
    before = -1
    while before != received(target):
        before = received(target)
        time.sleep(0.1)


def test_killed_at_twenty_moments(target, token, upload, large, tmp_path):
    """Between any two requests and any two bytes. Each object that has arrived whole is sent once, in all the runs."""
    rng = random.Random(20)
    env = os.environ | target.env(tmp_path / "home", token)
    for i, shard in enumerate(sorted(large.glob("model-*"))):  # at several speeds, so that some arrive before others
        sha256 = tree_of(large)[shard.name][1]
        target.fail(Fault("PUT", sha256, times=None, pause=0.0015 * (i + 1)))
    first, last = ["/whoami-v2", "/repos/create"], ["/lfs/verify", "/commit/", "/tree/"]
    moments: list = ["/auth-check/write", "/refs", "/preupload/", "/objects/batch"]
    moments += [rng.uniform(0, 0.45) for _ in range(KILLS - len([*moments, *first, *last]))]  # of the bytes left
    rng.shuffle(moments)
    killed, arrived = 0, []
    for at in first + moments + last:
        left, before, seen = left_to_send(target, large), received(target), len(target.requests)
        with subprocess.Popen(
            [COMMAND, "upload", large, REPO], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while process.poll() is None:
                if isinstance(at, float):
                    now = received(target) - before > at * left
                else:
                    now = any(re.search(at, r.path) for r in target.requests[seen:])
                if now:
                    killed += 1
                    process.kill()
                    break
                time.sleep(0.002)
        settle(target)
        arrived.append(left_to_send(target, large))
    assert killed == KILLS, arrived
    result = upload(large, REPO)
    assert_said(result, 0, "equal")
    assert ours(target) == tree_of(large)
    shards, puts = len(list(large.glob("model-*"))), target.seen("", "PUT")
    whole = Counter(r.path for r in puts if r.status == 200)
    assert len(whole) == shards
    assert set(whole.values()) == {1}
    assert commits(target) == 1
    assert len([r for r in target.seen("/commit/") if r.status == 200]) == 1
    sent, cut = (sum(r.received for r in puts if (r.status is None) == is_cut) for is_cut in (False, True))
    assert sent == sum(p.stat().st_size for p in large.glob("model-*"))
    print(f"{killed} kills: {len(puts)} PUTs, {shards} whole of {sent:,} bytes, {cut:,} bytes cut off; left {arrived}")


def received(target: HubServer) -> int:
    return sum(r.received for r in target.seen("", "PUT"))


# --- the token ---


def test_the_token_is_nowhere(target, token, upload, builds, unpublished, tmp_path):
    """Not in what is printed, in no file, in no list of processes, whether all goes well or not."""
    target.fail(Fault("PUT", "", times=None, pause=0.05))
    seen, stop = [], threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.append(path.read_bytes())
                except OSError:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    results = [upload(unpublished, REPO)]
    stop.set()
    thread.join()
    flip(unpublished / "motif.py")
    results.append(upload(unpublished, REPO))
    for status in (400, 401, 403, 412, 500):
        target.fail(Fault("POST", "/commit/", times=None, status=status, message="no", headers=NOW))
        results.append(upload(builds["one"], REPO))
        target.heal()
    target.fail(Fault("PUT", "", times=None, status=501, message="no", headers=NOW))
    results.append(upload(builds["bare"], "acme/other", "--force", HF_HUB_VERBOSITY="debug", HF_DEBUG="1"))
    results.append(upload(builds["one"], REPO, token=token + "\x0b"))
    outputs = [r.stdout + r.stderr for r in results]
    assert not any(token in text for text in outputs)
    assert not any("Traceback" in text for text in outputs)
    assert any(b"upload" in line for line in seen)
    assert not any(token.encode() in line for line in seen)
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        assert token.encode() not in path.read_bytes(), path
