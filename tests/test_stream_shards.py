"""Conversions into several shards: killed, with other weights, a source that changes, a head that does not fit."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import SMALL_CONFIG, contents, motif_convert, random_weights, write_checkpoint
from interrupted import JOURNAL, SHARD, TINY, assert_refused, convert, differing, headers
from motif_convert.convert.repo import write_repo
from motif_convert.convert.shards import new_file
from motif_convert.quantize.errors import CheckError, OutputError, SourceError
from motif_convert.recipes.pipeline import prepare
from motif_convert.validate.comparisons import Comparisons

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
