"""A checkpoint's index against its shards, and lazy reads of one that is right."""

import hashlib
import json
import os
from math import prod
from pathlib import Path

import numpy as np
import pytest
from checkpoints import BYTES, FIRST, INDEX, LFS_POINTER, SECOND, entry, file_of, problem, whole, write_folder
from conftest import REFERENCE, read_safetensors
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize.errors import SourceError

pytestmark = pytest.mark.usefixtures("no_hang")

# --- files, written by hand; other test modules use these too ---


A, B = entry("U8", [4], 0, 4), entry("U8", [4], 4, 8)


def sparse_checkpoint(folder: Path, config: dict, tensors: dict[str, tuple[str, tuple, str]]) -> Path:
    """A checkpoint of (dtype, shape, shard) with real headers, whose weights are holes: any size costs no disk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {name: shard for name, (_, _, shard) in tensors.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    headers: dict[str, dict] = {}
    ends: dict[str, int] = {}
    for name, (dtype, shape, shard) in tensors.items():
        start = ends.get(shard, 0)
        ends[shard] = start + BYTES[dtype] * prod(shape)
        headers.setdefault(shard, {})[name] = entry(dtype, list(shape), start, ends[shard])
    for shard, header in headers.items():
        content = file_of(header)
        (folder / shard).write_bytes(content)
        os.truncate(folder / shard, len(content) + ends[shard])
    return folder


# --- the index against the shards ---


def test_missing_shard(two):
    (two / SECOND).unlink()
    assert f"{SECOND}: No such file" in problem(two)


def test_tensor_that_no_shard_has(two):
    write_folder(two, {}, {"a": FIRST, "b": SECOND, "c": SECOND})
    assert f"{SECOND}: lacks c, which {INDEX} places in it" in problem(two)


def test_tensor_that_the_index_lacks(two):
    write_folder(two, {SECOND: file_of({"b": A, "c": B}, bytes(8))})
    assert f"{SECOND}: c is not in {INDEX}" in problem(two)


def test_tensor_in_another_shard(two):
    write_folder(two, {}, {"a": SECOND, "b": FIRST})
    assert f"a: in {FIRST}, but {INDEX} places it in {SECOND}" in problem(two)


def test_tensor_in_two_shards(two):
    write_folder(two, {SECOND: file_of({"a": A, "b": B}, bytes(8))})
    assert f"a is in both {FIRST} and {SECOND}" in problem(two)


@pytest.mark.parametrize("stray", ["model-00003-of-00003.safetensors", "model.safetensors", "model_old.safetensors"])
def test_stray_shard(two, stray):
    write_folder(two, {stray: whole("c", "U8", [4])})
    assert f"{stray}: not in {INDEX}; remove it" in problem(two)


def test_stray_shard_beside_a_single_file(tmp_path):
    """A loader takes every model*.safetensors, so a single file beside shards without an index is two models."""
    files = {"model.safetensors": whole("a", "U8", [4]), FIRST: whole("b", "U8", [4])}
    assert FIRST in problem(write_folder(tmp_path, files))


def test_files_that_are_no_shards(two):
    sidecars = ("nvfp4_act_scales.safetensors", "adapter.safetensors", ".model-00001.safetensors.partial")
    write_folder(two, dict.fromkeys(sidecars, b"anything"))
    with open_checkpoint(two) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"}


def test_every_broken_shard_is_listed(two):
    write_folder(two, {FIRST: b"", SECOND: LFS_POINTER})
    message = problem(two)
    assert f"{FIRST}: not a safetensors file" in message
    assert f"{SECOND}: a git-lfs pointer" in message


def test_problems_of_all_kinds_are_listed_at_once(two):
    third, stray = "model-00003-of-00003.safetensors", "model-00009-of-00009.safetensors"
    write_folder(two, {SECOND: b"", third: file_of({"c": A, "d": B}, bytes(8)), stray: whole("e", "U8", [1])})
    write_folder(two, {}, {"a": FIRST, "z": FIRST, "b": SECOND, "c": third})
    message = problem(two)
    for part in (f"{SECOND}: not a safetensors", f"{FIRST}: lacks z", f"{third}: d is not in", f"{stray}: not in"):
        assert part in message
    assert "lacks b" not in message  # nobody knows what a broken shard holds


WRONG_FILE_NAMES = {
    "the folder above": f"../{FIRST}",
    "an absolute path": "/etc/model.safetensors",
    "a folder below": "sub/model.safetensors",
    "a backslash": "..\\model.safetensors",
    "a drive": "C:model.safetensors",
    "a newline": "model\n.safetensors",
    "an escape": "model\x1b[2J.safetensors",
    "NUL": "model\0.safetensors",
    "text that runs backwards": "model\u202e.safetensors",
    "hidden": ".safetensors",
    "nothing": "",
    "another type": "model.bin",
    "a pickle": "pytorch_model.safetensors.pkl",
    "10 MB": "m" * 10_000_000 + ".safetensors",
}


@pytest.mark.parametrize("name", WRONG_FILE_NAMES.values(), ids=WRONG_FILE_NAMES)
def test_file_name_that_is_not_plain(two, name):
    write_folder(two.parent, {FIRST: whole("a", "BF16", [2, 3])})  # a right file where "../" leads
    write_folder(two, {}, {"a": name, "b": SECOND})
    message = problem(two)
    assert f"{INDEX}: file names must be plain" in message
    assert repr(name[:100])[:-1] in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "name", ["n" * 10_000_000, "\x1b[2J\nmotif-convert: error: all is well"], ids=["10 MB", "ANSI"]
)
@pytest.mark.parametrize("where", ["index", "shard", "both shards", "overlap"])
def test_tensor_name_cannot_flood_or_fake_a_message(two, name, where):
    if where == "index":
        write_folder(two, {}, {"a": FIRST, "b": SECOND, name: SECOND})
    elif where == "shard":
        write_folder(two, {SECOND: file_of({"b": A, name: B}, bytes(8))})
    elif where == "both shards":
        write_folder(two, {FIRST: whole(name, "U8", [1]), SECOND: whole(name, "U8", [1])})
    else:
        write_folder(two, {SECOND: file_of({"b": A, name: A}, bytes(4))})
    message = problem(two)
    assert len(message) < 2000
    assert all(line.isprintable() for line in message.splitlines())
    assert not any(line.startswith("motif-convert") for line in message.splitlines())


# --- what is right ---


def test_digests_are_those_of_the_files(two):
    with open_checkpoint(two) as checkpoint:
        assert checkpoint.config_sha256 == hashlib.sha256((two / "config.json").read_bytes()).hexdigest()
        assert checkpoint.index_sha256 == hashlib.sha256((two / INDEX).read_bytes()).hexdigest()


def test_one_file_needs_no_index(tmp_path):
    folder = write_folder(tmp_path, {"model.safetensors": whole("a", "F32", [2, 2], fill=9)})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.index_sha256 is None
        assert {t.name: (t.dtype, t.shape, t.shard) for t in checkpoint.tensors.values()} == {
            "a": ("F32", (2, 2), "model.safetensors")
        }
        assert bytes(checkpoint.read("a", 4, 8)) == b"\x09" * 8


@pytest.mark.parametrize("name", ["tiny-motif3", "tiny-motif3-nvfp4", "demo-motif3"])
def test_every_tensor_of_the_reference(name):
    expected = read_safetensors(REFERENCE / name)
    weight_map = json.loads((REFERENCE / name / INDEX).read_text())["weight_map"]
    with open_checkpoint(REFERENCE / name) as checkpoint:
        assert {t.name: t.shard for t in checkpoint.tensors.values()} == weight_map
        found = {
            t.name: (t.dtype, t.shape, bytes(checkpoint.read(t.name, 0, t.nbytes))) for t in checkpoint.tensors.values()
        }
    assert found == expected


def test_an_expert_and_its_rows():
    name = "model.layers.2.moe.experts.gate_up_proj"
    _, shape, data = read_safetensors(REFERENCE / "tiny-motif3")[name]
    stack = np.frombuffer(data, np.uint16).reshape(shape)
    experts, rows, width = shape
    with open_checkpoint(REFERENCE / "tiny-motif3") as checkpoint:
        for expert in (0, 3, experts - 1):
            raw = checkpoint.read(name, expert * rows * width * 2, rows * width * 2)
            np.testing.assert_array_equal(raw.view(np.uint16).reshape(rows, width), stack[expert])
            up = checkpoint.read(name, (expert * rows + rows // 2) * width * 2, rows * width)
            np.testing.assert_array_equal(up.view(np.uint16).reshape(-1, width), stack[expert, rows // 2 :])
        assert checkpoint.read(name, len(data), 0).shape == (0,)


def test_reads_no_more_than_it_is_asked_for(tmp_path):
    """64 GiB of holes with a few bytes at the far end; offsets beyond 2^32."""
    size = 64 << 30
    folder = sparse_checkpoint(
        tmp_path / "sparse", {}, {"a": ("U8", (5,), FIRST), "big": ("BF16", (size // 2,), FIRST)}
    )
    with (folder / FIRST).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"last")
    with open_checkpoint(folder) as checkpoint:
        assert bytes(checkpoint.read("big", size - 6, 6)) == b"\0\0last"
        assert bytes(checkpoint.read("big", size // 2, 4)) == bytes(4)


def test_shard_cut_while_it_is_read(two):
    with open_checkpoint(two) as checkpoint:
        checkpoint.read("b", 0, 16)
        os.truncate(two / SECOND, (two / SECOND).stat().st_size - 1)
        assert bytes(checkpoint.read("b", 0, 15)) == b"\7" * 15
        with pytest.raises(SourceError, match=f"{SECOND}: ended while b was read; .* download it again"):
            checkpoint.read("b", 0, 16)


def _written_to(path: Path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def _exchanged(path: Path):
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    new.replace(path)


def _cut(path: Path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [_written_to, _exchanged, _cut])
@pytest.mark.parametrize("already_read", [False, True])
def test_shard_that_changes(two, change, already_read):
    """Between its header and its weights, or between two reads."""
    with open_checkpoint(two) as checkpoint:
        if already_read:
            checkpoint.read("b", 0, 16)
            checkpoint.check_unchanged()
        change(two / SECOND)
        with pytest.raises(SourceError, match=f"{SECOND}: has changed while it was read"):
            checkpoint.check_unchanged() if already_read else checkpoint.read("b", 0, 1)
        checkpoint.close()
        with pytest.raises(SourceError, match=f"{SECOND}: has changed while it was read"):
            checkpoint.read("b", 0, 1)


def test_shard_removed_after_opening(two):
    with open_checkpoint(two) as checkpoint:
        (two / FIRST).unlink()
        with pytest.raises(SourceError, match=f"{FIRST}: a could not be read: No such file"):
            checkpoint.read("a", 0, 1)


def test_shard_removed_while_it_is_read(two):
    with open_checkpoint(two) as checkpoint:
        checkpoint.read("a", 0, 1)
        (two / FIRST).unlink()
        with pytest.raises(SourceError, match=f"{FIRST}: went away while it was read"):
            checkpoint.check_unchanged()
