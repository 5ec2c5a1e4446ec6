"""Checkpoints written by hand, byte by byte, and what is said of those that are wrong."""

import json
import signal
from math import prod
from pathlib import Path

import pytest
from conftest import motif_convert
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize.errors import SourceError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5001\n"
BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}


def file_of(header: object, data: bytes = b"") -> bytes:
    """A safetensors file: a header (bytes as they are, all else as JSON), then the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, start: object, end: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def whole(name: str, dtype: str, shape: list[int], fill: int = 7) -> bytes:
    """A file of one right tensor whose bytes are all `fill`."""
    size = BYTES[dtype] * prod(shape)
    return file_of({name: entry(dtype, shape, 0, size)}, bytes([fill]) * size)


def write_folder(folder: Path, files: dict[str, bytes], weight_map: object = None) -> Path:
    """A folder with an empty config.json, `files`, and an index if there is a weight map."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(cwd: Path, *args: object) -> str:
    """The one message of a command that refuses its input: exit code 2, no traceback, nothing left behind."""
    before = sorted(cwd.rglob("*"))
    result = motif_convert(*args, cwd=cwd)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("motif-convert: error: ")
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr
    assert sorted(cwd.rglob("*")) == before
    return result.stderr


def problem(folder: Path) -> str:
    """Why a folder is refused."""
    with pytest.raises(SourceError) as refusal:
        open_checkpoint(folder)
    return str(refusal.value)


@pytest.fixture
def two(tmp_path) -> Path:
    """A right checkpoint of two shards, for a test to break."""
    files = {FIRST: whole("a", "BF16", [2, 3]), SECOND: whole("b", "F32", [4])}
    return write_folder(tmp_path / "two", files, {"a": FIRST, "b": SECOND})


@pytest.fixture
def no_hang():
    """Fails a test that blocks, on a pipe for instance."""

    def stop(*_):
        raise AssertionError("hangs")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
