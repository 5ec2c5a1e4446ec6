"""Runs that stop half-way, and runs that are large: killed, interrupted, out of space, and in bounded memory."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import REAL_SIZES, REFERENCE, SMALL_CONFIG, contents, motif_convert, random_weights, write_checkpoint
from motif_convert.convert.names import entries
from motif_convert.convert.repo import write_repo
from motif_convert.convert.shards import new_file
from motif_convert.convert.workers import Workers
from motif_convert.quantize.errors import CheckError, OutputError, SourceError
from motif_convert.recipes.cli import cli
from motif_convert.recipes.pipeline import prepare
from motif_convert.validate.comparisons import Comparisons
from warm import COMMAND

TINY = REFERENCE / "tiny-motif3"
JOURNAL = ".motif-convert.json"
SHARD = "model-00001-of-00001.safetensors"


def differing(folder: Path, whole: Path) -> list[str]:
    """Names of the files that are not the same, or that only one of the folders has."""
    found, expected = contents(folder), contents(whole)
    return [name for name in sorted(found | expected) if found.get(name) != expected.get(name)]


def convert(source: Path, out: Path, *options: str) -> None:
    cli.main(["convert", "--source", str(source), "--out", str(out), *options], standalone_mode=False)


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


def assert_refused(result: subprocess.CompletedProcess, *fragments: str) -> None:
    assert (result.returncode, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("motif-convert: error: ")
    for fragment in fragments:
        assert fragment in last


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


# --- several shards: the plan of a small checkpoint, dealt out to more files than its size asks for ---


@pytest.fixture(scope="module")
def sharded_job():
    job = prepare(str(TINY), "4.5bit", None)
    count = 6
    modules = tuple(
        replace(m, shard=f"model-{i * count // len(job.plan.modules) + 1:05d}-of-{count:05d}.safetensors")
        for i, m in enumerate(job.plan.modules)
    )
    return replace(job, plan=replace(job.plan, modules=modules))


def run(job, out: Path, progress=lambda count, shard: None) -> None:
    write_repo(job.plan, job.checkpoint, job.source, out, lambda made: "card", {}, progress)


@pytest.fixture(scope="module")
def sharded(sharded_job, tmp_path_factory) -> tuple[Path, list[Path]]:
    """The six-shard build, and its folder as a kill would leave it at every 15th step."""
    folder = tmp_path_factory.mktemp("sharded")
    out, left, steps = folder / "out", [], 0

    def progress(count: int, shard: str) -> None:
        nonlocal steps
        steps += 1
        if steps % 15 == 0:
            left.append(shutil.copytree(out, folder / f"left-{steps:03d}"))

    run(sharded_job, out, progress)
    return out, left


def test_killed_in_any_shard_then_finished(sharded_job, sharded, tmp_path):
    whole, left = sharded
    finished = {len(list(folder.glob("model-*"))) for folder in left}
    assert finished == set(range(len(list(whole.glob("model-*")))))  # killed in the first shard, in the second...
    for folder in left:
        out = shutil.copytree(folder, tmp_path / folder.name)
        before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.glob("model-*")}
        run(sharded_job, out)
        assert differing(out, whole) == []
        assert {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in before} == before


def test_interrupted_run_with_other_weights_of_the_same_names(sharded, sharded_job, tmp_path):
    """A fine-tune of the model that was begun with: its config and its index are the same."""
    source = Path(shutil.copytree(TINY, tmp_path / "source"))
    shard = sorted(source.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-4:-2] = b"\x80\x3f"
    shard.write_bytes(data)
    other = prepare(str(source), "4.5bit", None)
    out = Path(shutil.copytree(sharded[1][-1], tmp_path / "out"))
    before = contents(out)
    with pytest.raises(OutputError, match="other weights of its source"):
        run(replace(other, plan=replace(other.plan, modules=sharded_job.plan.modules)), out)
    assert contents(out) == before


class FlipsABit(Comparisons):
    """The disk, or the memory, of a machine at fault: what is read back of a shard is not what was written."""

    def inspect(self, shard: str) -> None:
        if shard == "model-00003-of-00006.safetensors":
            path = self.out / shard
            data = bytearray(path.read_bytes())
            data[-1] ^= 4
            path.write_bytes(data)
        super().inspect(shard)


def test_what_is_read_back_wrong_is_written_again(sharded_job, sharded, tmp_path):
    job, out = sharded_job, tmp_path / "out"

    def write(inspection: type[Comparisons]) -> None:
        looks = inspection(out, job.plan, job.checkpoint, tmp_path / "kept")
        write_repo(
            job.plan, job.checkpoint, job.source, out, lambda made: "card", {}, lambda n, name: None, inspection=looks
        )

    with pytest.raises(CheckError, match=r"model-00003.*read back.*expected.*run the same command again"):
        write(FlipsABit)
    assert len(json.loads((out / JOURNAL).read_text())["shards"]) == 2
    assert not (out / "config.json").exists()
    write(Comparisons)
    assert len(list((tmp_path / "kept").iterdir())) == 6
    assert differing(out, sharded[0]) == []


def test_progress_counts_every_source_byte_once(sharded_job, sharded, tmp_path):
    """Also where shards were finished before."""
    size = sum(e["data_offsets"][1] - e["data_offsets"][0] for e in headers(TINY).values())
    for start in (None, sharded[1][len(sharded[1]) // 2]):
        out = tmp_path / str(start is None)
        if start:
            shutil.copytree(start, out)
        counts = []
        run(sharded_job, out, lambda count, shard, counts=counts: counts.append(count))
        assert sum(counts) == size


def headers(folder: Path) -> dict[str, dict]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            found |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found.pop("__metadata__", None)
    return found


def test_source_cut_off_in_the_middle_of_a_run(tmp_path):
    """Nothing was finished, so that nothing is left."""
    source = shutil.copytree(TINY, tmp_path / "source")
    job = prepare(str(source), "4.5bit", None)
    cut = job.checkpoint.tensors["lm_head.weight"].shard
    os.truncate(source / cut, 5000)
    with pytest.raises(SourceError, match=cut):
        run(job, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_source_that_changes_in_the_middle_of_a_run(tmp_path):
    source = Path(shutil.copytree(TINY, tmp_path / "source"))
    job = prepare(str(source), "4.5bit", None)
    shard = source / job.checkpoint.tensors["lm_head.weight"].shard
    content, changed = shard.read_bytes(), []

    def progress(count: int, name: str) -> None:
        """Half way: somebody copies the file once more."""
        changed.append(count)
        if len(changed) == 50:
            shard.chmod(0o644)
            shard.write_bytes(content)

    with pytest.raises(SourceError, match=f"{shard.name}: has changed while it was read"):
        run(job, tmp_path / "out", progress)
    assert len(changed) > 50
    assert not (tmp_path / "out").exists()


def test_a_shard_asks_for_its_room_first(tmp_path):
    """Before hours of work go into it; what an earlier try has left there does not count against it."""
    path, left = tmp_path / "file", tmp_path / ".file.partial"
    left.write_bytes(bytes(5000))
    message = f"{path}: .* bytes are needed and .* are free; free some space"
    with pytest.raises(OutputError, match=message), new_file(path, 1 << 60):
        pytest.fail("was begun")
    assert not list(tmp_path.iterdir())


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


# --- a run that is large enough to be stopped from outside ---


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


# --- a head that does not fit float16 ---


def with_head_value(folder: Path, value: float) -> Path:
    """A small checkpoint with one value, which BF16 has, in the head's input projection."""
    weights = random_weights(SMALL_CONFIG)
    bits = int(np.float32(value).view(np.uint32)) >> 16
    weights["model.mtp_layers.0.input_proj.weight"][3, 5] = bits
    return write_checkpoint(folder, SMALL_CONFIG, weights)


@pytest.mark.parametrize(("value", "exists"), [(1e5, False), (-65536.0, True)], ids=["new folder", "empty folder"])
def test_value_too_large_for_float16(value, exists, tmp_path):
    source, out = with_head_value(tmp_path / "source", value), tmp_path / "out"
    if exists:
        out.mkdir()
    result = motif_convert("convert", "--source", source, "--keep-mtp-fp16", "--out", out)
    assert_refused(result, "model.mtp_layers.0.input_proj.weight", "[3, 5]", "--mtp bf16")
    assert out.exists() is exists
    assert not exists or not list(out.iterdir())


@pytest.mark.parametrize("value", [65280.0, np.inf, -np.inf, np.nan], ids=str)
def test_value_that_float16_has(value, tmp_path):
    """The largest that fits; and what was infinite before is no overflow."""
    convert(with_head_value(tmp_path / "source", value), tmp_path / "out", "--mtp", "fp16", "--allow-nonfinite")
    x = mx.load(str(tmp_path / "out" / SHARD))["mtp.input_proj.weight"]
    assert x.dtype == mx.float16
    np.testing.assert_array_equal(np.array(x)[3, 5], np.float16(value))


# --- one layer of the real size ---

REAL_EXPERTS = (0, 205, 383)  # the first, one from where Metal goes wrong in others' builds, the last
ONE_REAL_LAYER = {"vocab_size": 512, "num_hidden_layers": 1, "n_dense_first_layers": 0, "mhc_expansion_rate": 4}
REAL_CONFIG = SMALL_CONFIG | REAL_SIZES | ONE_REAL_LAYER | {"num_nextn_predict_layers": 0}
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
sys.exit(code)
"""


def expert_weights(name: str, expert: int) -> np.ndarray:
    """BF16 bits [rows, K] of an expert: random, or zeros where nothing was written."""
    rows, width = {"gate_up_proj": (2560, 4096), "down_proj": (4096, 1280)}[name]
    if expert not in REAL_EXPERTS:
        return np.zeros((rows, width), np.uint16)
    rng = np.random.default_rng([expert, rows])
    return rng.integers(0x3800, 0x3D00, (rows, width), np.uint16) | (rng.integers(0, 2, (rows, width), np.uint16) << 15)


def small_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """BF16 bits: norms are 1, matrices random and of unit gain, all else random."""
    if "norm" in name:
        return np.full(shape, 0x3F80, np.uint16)
    rng = np.random.default_rng(shape)
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture
def real_layer(tmp_path) -> Path:
    """12 GB that take little room: a sparse file with three experts in it. It and the build are removed.

    Linux reads holes many times faster from memory than from a disk; 100 MB of it are used.
    """
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 1e9
    source = Path(tempfile.mkdtemp(dir=memory if fits else tmp_path))
    try:
        write_real_layer(source)
        yield source
    finally:
        shutil.rmtree(source)
        shutil.rmtree(tmp_path)


def write_real_layer(source: Path) -> None:
    (source / "config.json").write_text(json.dumps(REAL_CONFIG))
    header, end = {}, 0
    for entry in entries(REAL_CONFIG):
        start, end = end, end + 2 * prod(entry.shape)
        header[entry.source] = {"dtype": "BF16", "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries(REAL_CONFIG):
            if ".experts.gate_up" not in entry.source and ".experts.down" not in entry.source:
                file.seek(8 + len(text) + header[entry.source]["data_offsets"][0])
                file.write(small_values(entry.source, entry.shape).tobytes())
        for name in ("gate_up_proj", "down_proj"):
            (first, _) = header[f"model.layers.0.moe.experts.{name}"]["data_offsets"]
            for expert in REAL_EXPERTS:
                data = expert_weights(name, expert).tobytes()
                file.seek(8 + len(text) + first + expert * len(data))
                file.write(data)
        file.truncate(8 + len(text) + end)


def quantized_expert(name: str, expert: int) -> dict[str, dict[str, bytes]]:
    """What mlx makes of one expert: for gate and up, or for down, the bytes of its three parts."""
    w = mx.array(expert_weights(name, expert)).view(mx.bfloat16)
    parts = mx.quantize(w, group_size=64, bits=4, stream=mx.cpu)
    arrays = [np.array(x if x.dtype == mx.uint32 else x.view(mx.uint16, stream=mx.cpu)) for x in parts]
    made = {}
    for i, projection in enumerate(("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)):
        rows = slice(1280 * i, 1280 * (i + 1)) if name == "gate_up_proj" else slice(None)
        made[projection] = {k: x[rows].tobytes() for k, x in zip(("weight", "scales", "biases"), arrays, strict=True)}
    return made


def memory_of(*args: object) -> int:
    """Bytes that the command takes at most; its exit code is 0."""
    command = [sys.executable, "-c", MEASURE, COMMAND, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1])


def test_layer_of_the_real_size(real_layer, tmp_path):
    """Stacks of over 2^31 elements, in less memory than a tenth of one, and every expert right."""
    out = tmp_path / "out"
    assert memory_of("convert", "--source", real_layer, "--out", out) < 1e9
    (shard,) = out.glob("*.safetensors")
    data = np.memmap(shard, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    places = headers(out)
    expected = {e: quantized_expert("gate_up_proj", e) | quantized_expert("down_proj", e) for e in (1, *REAL_EXPERTS)}
    wrong = []
    for projection, parts in expected[1].items():
        for part in parts:
            place = places[f"model.layers.0.mlp.switch_mlp.{projection}.{part}"]
            first, last = place["data_offsets"]
            stack = data[start + first : start + last].reshape(place["shape"][0], -1)
            for expert, found in enumerate(stack):
                right = expected[expert if expert in REAL_EXPERTS else 1][projection][part]
                if not np.array_equal(found, np.frombuffer(right, np.uint8)):
                    wrong.append((projection, part, expert))
    assert wrong == []

    assert memory_of("eval", out, "--source", real_layer, "--tokens", 510) < 3e9
    (layer,) = json.loads((out / "validation.json").read_text())["eval"]["layers"]
    assert 0 < layer["error"] < 0.2
    assert layer["rerouted"] < 0.1
