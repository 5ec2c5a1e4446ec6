"""Conversions that are killed, interrupted, or meet a failing disk at random moments; then the same command again.

A random moment is random with a fixed seed; what it hits differs from run to run all the same.
"""

import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import warm
from conftest import contents, environment_with

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo-motif3"
SHARD_BYTES = 350_000  # so that the demo makes several shards
ENVIRONMENT = environment_with({"HF_HUB_OFFLINE": "1"})
RUNS = 100
JOURNAL = ".motif-convert.json"
SMALL_SHARDS = {"set": {"motif_convert.convert.planner.MAX_SHARD_BYTES": SHARD_BYTES}}


def command(out: Path) -> list[object]:
    return ["convert", "--source", DEMO, "--out", out, "--workers", 2]


@contextmanager
def begun(out: Path, **trouble: object) -> Iterator[warm.Process]:
    """A conversion that runs; killed in the end if it still does."""
    with tempfile.TemporaryFile() as err, open(os.devnull, "wb") as null:
        process = warm.start(command(out), ENVIRONMENT, out.parent, null, err, SMALL_SHARDS | trouble)
        process.stderr = err
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def finish(out: Path):
    return warm.run(command(out), ENVIRONMENT, out.parent, more=SMALL_SHARDS)


def said(process: warm.Process) -> str:
    process.stderr.seek(0)
    return process.stderr.read().decode()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    """The files of a conversion that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    result = finish(out)
    assert result.returncode == 0, result.stderr
    found = contents(out)
    assert sum(name.startswith("model-") for name in found) > 4
    return found


@pytest.fixture(scope="module")
def seconds(whole, tmp_path_factory) -> float:
    """How long one takes, warm."""
    out = tmp_path_factory.mktemp("timed") / "out"
    start = time.monotonic()
    assert finish(out).returncode == 0
    return time.monotonic() - start


@pytest.fixture
def moments(seconds) -> Iterator[float]:
    """Moments in the course of a conversion, and a little beyond."""
    chance = random.Random(7)
    return iter(lambda: chance.random() * seconds * 1.1, None)


def is_honest(out: Path, whole: dict[str, bytes]) -> bool:
    """Whether no loader takes the folder for a model, unless it is the whole one: at the very end all that a stopped
    run leaves too much is its journal."""
    return not (out / "config.json").exists() or contents(out) | {JOURNAL: b""} == whole | {JOURNAL: b""}


def wait_until_it_speaks(process: warm.Process) -> None:
    """Until the command itself runs: before that a signal meets an interpreter that is starting."""
    while not said(process) and process.poll() is None:
        time.sleep(0.001)


def test_killed(whole, moments, tmp_path):
    """Kill -9 at a hundred moments, each followed by the same command, undisturbed."""
    survived = 0
    for number in range(RUNS):
        out = tmp_path / str(number)
        with begun(out) as process:
            time.sleep(next(moments))
            process.send_signal(signal.SIGKILL)
            code = process.wait()
        assert code in (0, -signal.SIGKILL)
        survived += code == 0
        assert is_honest(out, whole)
        result = finish(out)
        assert result.returncode == 0, result.stderr
        assert contents(out) == whole, number
    assert survived < RUNS / 2


def test_killed_over_and_over(whole, moments, tmp_path):
    """One folder, and a run that gets further each time."""
    out = tmp_path / "out"
    for _ in range(10):
        with begun(out):
            time.sleep(next(moments))
    assert finish(out).returncode == 0
    assert contents(out) == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_interrupted(number, whole, moments, tmp_path):
    """The piece in hand is dropped, or finished; exit code 130, and a word on how to go on."""
    interrupted = 0
    for run in range(12):
        out = tmp_path / str(run)
        with begun(out) as process:
            wait_until_it_speaks(process)
            time.sleep(next(moments))
            process.send_signal(number)
            code = process.wait(20)
            message = said(process)
        assert code in (0, 130), message
        assert "Traceback" not in message
        if code == 130:
            interrupted += 1
            assert "Interrupted." in message
            assert is_honest(out, whole)
            assert not list(out.glob(".*.partial"))
        assert finish(out).returncode == 0
        assert contents(out) == whole
    assert interrupted


# What the kernel answers a system call from some moment on: a full disk, a quota, a disk that fails or is not there
# any more, one that became read-only.
TROUBLES = {
    "no space": ("pwrite64", errno.ENOSPC),
    "quota": ("pwrite64", errno.EDQUOT),
    "write error": ("pwrite64", errno.EIO),
    "fsync fails": ("fsync", errno.EIO),
    "read-only": ("rename", errno.EROFS),
    "volume gone": ("rename", errno.ENODEV),
    "read error": ("preadv2", errno.EIO),
}


if sys.platform == "linux":  # trouble.py asks its kernel; test_no_space has what other systems can do

    @pytest.mark.parametrize(("call", "error"), TROUBLES.values(), ids=TROUBLES)
    def test_disk_trouble(call, error, whole, moments, tmp_path):
        met = 0
        for run in range(6):
            out = tmp_path / str(run)
            with begun(out, refuse=[call, error, next(moments) if run else 0]) as process:
                code = process.wait(20)
                message = said(process)
            assert code in (0, 2), message
            assert "Traceback" not in message
            if code:
                met += 1
                assert message.splitlines()[-1].startswith("motif-convert: error: "), message
                assert os.strerror(error) in message
                assert is_honest(out, whole)
                assert not list(out.glob(".*.partial"))
            result = finish(out)
            assert result.returncode == 0, result.stderr
            assert contents(out) == whole
        assert met


def test_an_interruption_that_is_swallowed():
    """By a callback, of the collector's for instance: the process ends a little later all the same."""
    script = (
        "import time\n"
        "from motif_convert.recipes import process\n"
        "process.PATIENCE = 1\n"
        "process.be_sturdy()\n"
        "while True:\n"
        "    try:\n"
        "        print('here', flush=True)\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130


@pytest.mark.parametrize("lead", [0, 0.1, 0.3, 0.8, 0.95])
def test_two_runs_together(lead, whole, seconds, tmp_path):
    """One makes the build. The other is refused while the first lives, or finds it complete: whenever that is."""
    for run in range(3):
        out = tmp_path / str(run)
        with begun(out) as one:
            time.sleep(lead * seconds)
            with begun(out) as other:
                codes = [one.wait(20), other.wait(20)]
                messages = [said(one), said(other)]
        assert 0 in codes, messages
        for code, message in zip(codes, messages, strict=True):
            assert code == 0 or (code == 2 and "another run is writing into it" in message), message
        assert contents(out) == whole


def test_a_run_takes_over_from_one_that_died(whole, tmp_path):
    out = tmp_path / "out"
    with begun(out) as first:
        while not list(out.glob("model-*")):
            time.sleep(0.001)
        first.send_signal(signal.SIGSTOP)
        assert "another run is writing into it" in finish(out).stderr
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert finish(out).returncode == 0
    assert contents(out) == whole
