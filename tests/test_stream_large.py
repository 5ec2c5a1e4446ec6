"""Conversions that are large enough to be stopped from outside."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL_CONFIG, contents, motif_convert, random_weights, write_checkpoint
from interrupted import JOURNAL, SHARD, TINY, assert_refused, convert, differing
from motif_convert.convert.shards import new_file
from motif_convert.quantize.errors import OutputError
from warm import COMMAND


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Above 150 MB, nearly all in the embedding and the output head."""
    config = SMALL_CONFIG | {"vocab_size": 600_000}
    weights = random_weights(SMALL_CONFIG)
    rng = np.random.default_rng(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shape = (config["vocab_size"], config["hidden_size"])
        weights[name] = rng.integers(0x3000, 0x3F80, shape, np.uint16)  # BF16 between 5e-10 and 1
    return write_checkpoint(tmp_path_factory.mktemp("large") / "source", config, weights)


@pytest.fixture(scope="module")
def large_built(large, built) -> Path:
    return built(large)


# Heeds Ctrl-C, which children of a background shell ignore, and lets the test that watches it go first.
PLAINLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.nice(10)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def started(source: Path, out: Path):
    """A conversion that runs; killed at the end if it still does."""
    command = [sys.executable, "-c", PLAINLY, COMMAND, "convert", "--source", source, "--out", out]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_for_bytes(process: subprocess.Popen, out: Path, size: float) -> None:
    """Until the shard that is being written has this size."""
    partial = out / f".{SHARD}.partial"
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if partial.stat().st_size >= size:
                return
        time.sleep(0.001)
    pytest.fail(f"ended before the shard had {size:.0f} bytes: {process.communicate()[1]}")


def test_kill_9_three_times_then_finished(large, large_built, tmp_path):
    out, size = tmp_path / "out", (large_built / SHARD).stat().st_size
    for share in (0, 0.3, 0.6):
        with started(large, out) as process:
            wait_for_bytes(process, out, share * size)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert set(contents(out)) == {JOURNAL, f".{SHARD}.partial"}
    result = motif_convert("convert", "--source", large, "--out", out)
    assert result.returncode == 0, result.stderr
    assert differing(out, large_built) == []


def test_ctrl_c(large, large_built, tmp_path):
    out = tmp_path / "out"
    with started(large, out) as process:
        wait_for_bytes(process, out, 1 << 20)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "same command again" in stderr
    assert f"--out {out}" in stderr
    assert set(contents(out)) == {JOURNAL}
    result = motif_convert("convert", "--source", large, "--out", out)
    assert result.returncode == 0, result.stderr
    assert differing(out, large_built) == []


def test_second_run_into_the_same_folder(large, large_built, tmp_path):
    """Two at once would write into each other's files; the first goes on undisturbed."""
    out = tmp_path / "out"
    with started(large, out) as first:
        wait_for_bytes(first, out, 1 << 20)
        first.send_signal(signal.SIGSTOP)
        second = motif_convert("convert", "--source", large, "--out", out)
        first.send_signal(signal.SIGCONT)
        _, stderr = first.communicate()
    assert_refused(second, str(out))
    assert first.returncode == 0, stderr
    assert differing(out, large_built) == []


def test_no_space(built, tmp_path):
    """A limit on the size of files stands for a full disk: the shard does not fit."""
    out = tmp_path / "out"
    command = ["bash", "-c", f"ulimit -f 1000; exec '{COMMAND}' \"$@\"", "bash"]
    args = ["convert", "--source", str(TINY), "--out", str(out)]
    result = subprocess.run([*command, *args], capture_output=True, text=True)
    assert_refused(result, str(out / SHARD), os.strerror(errno.EFBIG))
    assert set(contents(out)) == {JOURNAL}
    convert(TINY, out)
    assert differing(out, built(TINY)) == []


def test_a_thread_that_is_late_writes_nowhere(tmp_path):
    """The run was interrupted, the file is closed, and its number is another file's."""
    with suppress(KeyboardInterrupt), new_file(tmp_path / "file") as file:
        file.write(b"begun")
        raise KeyboardInterrupt
    assert not (tmp_path / "file").exists()
    others = [(tmp_path / f"other-{i}").open("w+b") for i in range(9)]
    with pytest.raises(OutputError):
        file.write_at(0, b"late")
    for other in others:
        with other:
            assert other.read() == b""


def test_error_of_the_caller_is_not_a_failed_write(tmp_path):
    """Such as progress that is printed into a pipe which nobody reads any more."""
    with pytest.raises(BrokenPipeError), new_file(tmp_path / "file"):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    assert not list(tmp_path.iterdir())
