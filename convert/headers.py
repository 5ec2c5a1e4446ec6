"""The header of a safetensors file, checked against the file. Nothing that it says is trusted."""

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..quantize.errors import SourceError, quoted
from ..quantize.precision import DTYPE_BYTES

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
MAX_RANK = 8


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes at `offset` of the file `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


def read_header(path: Path) -> list[TensorInfo]:
    """`header_tensors` of a file. Raises SourceError."""
    with open_regular(path) as (fd, size):
        return header_tensors(path.name, size, lambda start, count: os.pread(fd, count, start))


def header_tensors(name: str, size: int, read: Callable[[int, int], bytes]) -> list[TensorInfo]:
    """The tensors of one safetensors file, checked against its size; offsets are the file's.

    Args:
        name, size: of the file, in bytes.
        read: gives bytes of it: read(offset, count), fewer at its end.
    Raises:
        SourceError: naming the file, and the tensor where one is at fault.
    """
    start = read(0, 8)
    if start == b"version ":
        raise SourceError(f"{name}: a git-lfs pointer, not the file; run `git lfs pull`")
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise SourceError(f"{name}: not a safetensors file (header of {length} bytes in a file of {size})")
    if 8 + length > size:
        raise SourceError(f"{name}: cut off inside its header ({size} bytes); download it again")
    header = parse_json(read(8, length), f"{name}: header")
    header.pop("__metadata__", None)
    tensors = [_tensor_info(tensor, entry, name, 8 + length) for tensor, entry in header.items()]
    end = 8 + length
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != end:
            what = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
            raise SourceError(f"{name}: {quoted(info.name)} {what}")
        end += info.nbytes
    if end != size:
        what = "cut off" if size < end else "longer than its header says"
        raise SourceError(f"{name}: {what}: {size} bytes, the header says {end}; download it again")
    return tensors


def _tensor_info(name: str, entry: object, shard: str, data_start: int) -> TensorInfo:
    where = f"{shard}: {name[:200]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise SourceError(f"{where}: needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise SourceError(f"{where}: unknown dtype {str(dtype)[:50]!r}")
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise SourceError(f"{where}: shape {str(shape)[:80]} is not a list of at most {MAX_RANK} sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SourceError(f"{where}: data_offsets {str(offsets)[:80]} are not a range")
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise SourceError(f"{where}: {offsets[1] - offsets[0]} bytes, but {dtype} {shape} takes {nbytes}")
    return TensorInfo(name, dtype, tuple(shape), shard, data_start + offsets[0], nbytes)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def parse_json(raw: bytes, where: str) -> dict:
    def unique(pairs):
        keys = [k for k, _ in pairs]
        if len(set(keys)) != len(keys):
            twice = Counter(keys).most_common(1)[0][0]
            raise ValueError(f"key {twice[:200]!r} twice")
        return dict(pairs)

    def none(text):
        raise ValueError(f"{text} is not a number of JSON")

    def finite(text):
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text[:50]} is too large")
        return value

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=none, parse_float=finite)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate can't be written anywhere
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{where}: not valid JSON ({e or 'nested too deeply'})") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: not a JSON object")
    return value


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """A regular file's descriptor and its size; never blocks on a pipe or a device.

    Raises:
        SourceError: missing, unreadable, not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as e:
        raise SourceError(f"{path.name}: {e.strerror} ({path})") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path.name}: not a regular file")
        yield fd, status.st_size
    finally:
        os.close(fd)
