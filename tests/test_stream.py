"""Runs that stop half-way: with any number of threads, killed at any moment, and gone on with."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import REFERENCE, contents, motif_convert
from interrupted import JOURNAL, SHARD, TINY, assert_refused, convert, differing
from motif_convert.convert.workers import Workers
from motif_convert.quantize.errors import OutputError
from warm import COMMAND

# --- the compiled kernels, and the way round them ---


@pytest.mark.parametrize("source", ["tiny-motif3", "tiny-motif3-nvfp4"])
def test_the_same_bytes_without_compiled_kernels(source, built, tmp_path):
    source = REFERENCE / source
    options = ("--bits", "4.5", *(("--experts", "affine") if source.name.endswith("nvfp4") else ()))
    result = motif_convert(
        *("convert", "--source", source, "--out", tmp_path / "out", *options), env={"NUMBA_DISABLE_JIT": "1"}
    )
    assert "go through mx.quantize" in result.stderr
    assert "numba can't compile the kernel here" in result.stderr
    assert not differing(tmp_path / "out", built(source, *options))


# --- threads ---


@pytest.mark.parametrize("workers", ["1", "2", "7"])
@pytest.mark.parametrize("source", ["tiny-motif3", "tiny-motif3-nvfp4"])
def test_the_same_bytes_with_any_number_of_workers(source, workers, built, tmp_path, monkeypatch):
    """In runs of 3 kB, so that all threads have much to do and every buffer is used many times."""
    monkeypatch.setattr("motif_convert.convert.rows.BLOCK_BYTES", 3000)
    convert(REFERENCE / source, tmp_path / "out", "--workers", workers)
    assert not differing(tmp_path / "out", built(REFERENCE / source))


def test_a_result_stays_until_the_next_is_asked_for():
    """However long the work of one item takes."""
    with Workers(3) as threads:

        def work(item, buffers):
            time.sleep(0.002 * (item % 5))
            array = buffers.array("x", np.int64, (100,))
            array[:] = item
            return array

        for item, array in enumerate(threads.in_order(work, range(200))):
            time.sleep(0.001)
            assert (array == item).all()


def test_an_error_in_a_thread_ends_the_work():
    with Workers(2) as threads, pytest.raises(ZeroDivisionError):
        for _ in threads.in_order(lambda item, buffers: 1 / (item - 20), range(10_000)):
            pass


# --- kill -9, at moments that cannot be hit from outside ---


# Copies the output folder before each of its files is opened, takes its name, or goes: what a kill
# at that moment would leave.
WITNESS = """
import os, shutil, sys
out, states = sys.argv.pop(1), sys.argv.pop(1)
copying, count = False, 0

def witness(event, args):
    global copying, count
    if copying or event not in ("open", "os.rename", "os.remove") or not str(args[0]).startswith(out + os.sep):
        return
    copying = True
    shutil.copytree(out, os.path.join(states, f"{count:02d} {event} {os.path.basename(str(args[0]))}"))
    copying, count = False, count + 1

sys.addaudithook(witness)
from motif_convert.recipes.cli import main
main()
"""


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> list[Path]:
    """The output folder of one run at every moment that matters, oldest first."""
    folder = tmp_path_factory.mktemp("states")
    out = folder / "out"
    (folder / "states").mkdir()
    args = [sys.executable, "-c", WITNESS, out, folder / "states", "convert", "--source", TINY, "--out", out]
    subprocess.run(list(map(str, args)), check=True, capture_output=True)
    found = sorted((folder / "states").iterdir())
    (cut,) = [s for s in found if s.name.endswith(f"os.rename .{SHARD}.partial")]
    for i, share in enumerate((0.1, 0.9)):  # and in the middle of the shard
        middle = shutil.copytree(cut, cut.with_name(f"{cut.name}, {share:.0%}"))
        partial = middle / f".{SHARD}.partial"
        os.truncate(partial, int(share * partial.stat().st_size))
        found.insert(found.index(cut) + i, middle)
    return found


def state_after(states: list[Path], name: str) -> Path:
    """The folder as it was just after the file `name` took its place."""
    return next(s for s in states if (s / name).exists())


def test_states_cover_every_file(states, built):
    for name in contents(built(TINY)):
        assert any(s.name.endswith(f"os.rename .{name}.partial") for s in states)
        assert any(not (s / name).exists() for s in states)
        assert any((s / name).exists() for s in states)


def test_killed_at_any_moment_then_finished(states, built, tmp_path):
    stuck = []
    for state in states:
        out = shutil.copytree(state, tmp_path / state.name)
        try:
            convert(TINY, out)
        except OutputError as e:
            stuck.append(str(e))
        else:
            assert (state.name, differing(out, built(TINY))) == (state.name, [])
    assert stuck == []


def test_unfinished_folder_is_no_model(states, built):
    """config.json comes last: where it is, every other file is, and in full."""
    whole = contents(built(TINY))
    for state in states:
        found = contents(state)
        if "config.json" in found:
            assert {k: v for k, v in found.items() if k != JOURNAL} == whole


def test_finished_shard_is_not_written_again(states, tmp_path):
    out = shutil.copytree(state_after(states, "config.json"), tmp_path / "out")
    before = (out / SHARD).stat()
    convert(TINY, out)
    after = (out / SHARD).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_finished_shard_that_was_damaged_is_written_again(damage, states, built, tmp_path):
    out = shutil.copytree(state_after(states, "config.json"), tmp_path / "out")
    if damage == "gone":
        (out / SHARD).unlink()
    else:
        os.truncate(out / SHARD, 1000)
    convert(TINY, out)
    assert differing(out, built(TINY)) == []


# --- an interrupted run is gone on with by the same command alone ---


@pytest.fixture
def interrupted(states, tmp_path) -> Path:
    return shutil.copytree(state_after(states, SHARD), tmp_path / "interrupted")


@pytest.mark.parametrize(
    ("options", "fragment"), [(["--bits", "8"], "another recipe"), (["--mtp", "drop"], "another mtp")], ids=str
)
def test_other_options(options, fragment, interrupted):
    before = contents(interrupted)
    result = motif_convert("convert", "--source", TINY, *options, "--out", interrupted)
    assert_refused(result, str(interrupted), fragment, "--out")
    assert contents(interrupted) == before


def test_other_source(interrupted, tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    with (source / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(OutputError, match="interrupted run with another source"):
        convert(source, interrupted)


def test_other_version(interrupted):
    journal = json.loads((interrupted / JOURNAL).read_text())
    (interrupted / JOURNAL).write_text(json.dumps(journal | {"version": "0.0.1"}))
    with pytest.raises(OutputError, match="another version"):
        convert(TINY, interrupted)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"shards": 3}'])
def test_damaged_journal(text, interrupted):
    (interrupted / JOURNAL).write_text(text)
    before = contents(interrupted)
    with pytest.raises(OutputError, match=JOURNAL):
        convert(TINY, interrupted)
    assert contents(interrupted) == before


# --- what was finished is read again on request ---


def test_recheck(states, built, tmp_path):
    """A bit that turned on the disk keeps size and time; without --recheck nobody looks at it before verify."""
    out = shutil.copytree(state_after(states, "config.json"), tmp_path / "out")
    shard = out / SHARD
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    kept = shutil.copytree(out, tmp_path / "kept")
    result = motif_convert("convert", "--source", TINY, "--out", kept)
    assert result.returncode == 0, result.stderr
    assert differing(kept, built(TINY)) == [SHARD]
    result = motif_convert("convert", "--source", TINY, "--out", kept, "--recheck")
    assert result.returncode == 0, result.stderr
    assert f"made again: {SHARD}." in result.stderr
    assert differing(kept, built(TINY)) == []
    result = motif_convert("convert", "--source", TINY, "--out", out, "--recheck")
    assert result.returncode == 0, result.stderr
    assert f"{SHARD} is not what was written any more: it is written again." in result.stderr
    assert differing(out, built(TINY)) == []
    result = motif_convert("convert", "--source", TINY, "--out", out, "--recheck")
    assert result.returncode == 0, result.stderr
    assert "Complete already" in result.stderr


def test_damage_that_was_found_stays_found(states, built, tmp_path):
    """The run that finds it is stopped before the shard is there again; the next is not told to look."""
    out = shutil.copytree(state_after(states, "config.json"), tmp_path / "out")
    with (out / SHARD).open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff\xff")
    limited = ["bash", "-c", f"ulimit -f 1000; exec '{COMMAND}' \"$@\"", "bash"]
    args = ["convert", "--source", str(TINY), "--out", str(out)]
    result = subprocess.run([*limited, *args, "--recheck"], capture_output=True, text=True)
    assert_refused(result, SHARD, "ulimit -f")
    (out / f".{SHARD}.partial").write_bytes(b"what a kill would have left")
    assert motif_convert(*args).returncode == 0
    assert differing(out, built(TINY)) == []
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("name", [SHARD, "config.json", "motif.py", "model.safetensors.index.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_finished_build_is_mended(name, damage, built, tmp_path):
    """Only what is damaged is made again; a card that was changed by hand is kept beside."""
    out = shutil.copytree(built(TINY), tmp_path / "out")
    (out / name).unlink() if damage == "gone" else os.truncate(out / name, 9)
    (out / "README.md").write_text("mine")
    before = (out / SHARD).stat().st_ino if name != SHARD else None
    result = motif_convert("convert", "--source", TINY, "--out", out)
    assert_refused(result, name, "--recheck makes it again")
    result = motif_convert("convert", "--source", TINY, "--out", out, "--recheck")
    assert result.returncode == 0, result.stderr
    (kept,) = [p for p in out.iterdir() if p.name not in contents(built(TINY))]
    assert kept.read_text() == "mine"
    kept.unlink()
    assert differing(out, built(TINY)) == []
    assert before is None or (out / SHARD).stat().st_ino == before


def test_recheck_leaves_what_is_right(states, tmp_path):
    out = shutil.copytree(state_after(states, "config.json"), tmp_path / "out")
    before = (out / SHARD).stat()
    result = motif_convert("convert", "--source", TINY, "--out", out, "--recheck")
    assert result.returncode == 0, result.stderr
    assert "written again" not in result.stderr
    assert (out / SHARD).stat().st_ino == before.st_ino
