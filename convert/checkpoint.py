"""Lazy reader of a sharded safetensors checkpoint: all headers now, bytes when asked for.

Nothing of a source is trusted: every header is checked against its file, every name of the index
against the folder, and index and shards against each other, before one weight is read.
"""

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np

from ..quantize.errors import SourceError, listing, quoted
from ..quantize.precision import DTYPE_BYTES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
MAX_JSON_BYTES = 256 << 20
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


@dataclass
class Checkpoint:
    """Headers of a checkpoint and its open files.

    Args:
        folder: where config.json lies.
        config: config.json.
        tensors: by name.
        others: safetensors files that are no part of it.
        config_sha256, index_sha256: hex digests of config.json and of the index (None for a
            checkpoint of one file without index).
        shard_folder: where the shards are read from.
    """

    folder: Path
    config: dict
    tensors: dict[str, TensorInfo]
    others: frozenset[str]
    config_sha256: str
    index_sha256: str | None
    shard_folder: Path
    _files: dict[str, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def read(self, name: str, start: int, count: int, into: np.ndarray | None = None) -> np.ndarray:
        """Bytes [start, start + count) of a tensor, as uint8. Threads may read side by side.

        Args:
            into: uint8, at least `count`, to read into and to return the front of; a new array if None. Fresh
                memory costs as much as the reading.
        Raises:
            SourceError: the shard could not be read, or ended early.
        """
        info = self.tensors[name]
        buffer = np.empty(count, np.uint8) if into is None else into[:count]
        view, done = memoryview(buffer), 0
        try:
            fd = self._open(info.shard)
            while done < count:
                got = os.preadv(fd, [view[done:]], info.offset + start + done)
                if got == 0:
                    raise SourceError(
                        f"{info.shard}: ended while {name} was read; the file has changed: download it again"
                    )
                done += got
        except OSError as e:
            raise SourceError(f"{info.shard}: {name} could not be read: {e.strerror}") from e
        return buffer

    def _open(self, shard: str) -> int:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = os.open(self.shard_folder / shard, os.O_RDONLY)
            return self._files[shard]

    def close(self) -> None:
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_checkpoint(
    folder: Path, header: Callable[[str], list[TensorInfo]] | None = None, files: Iterable[str] = ()
) -> Checkpoint:
    """Reads config.json, the index and every shard's header, and checks them against each other.

    Args:
        header: gives a shard's tensors (see `header_tensors`); None reads the folder's files.
        files: names of shards that are not in the folder yet, but will be.
    Raises:
        SourceError: with all that is wrong with the folder's shards listed.
    """
    header = header or (lambda shard: read_header(folder / shard))
    present = {p.name for p in folder.glob("*.safetensors")} | {f for f in files if f.endswith(".safetensors")}
    config, config_sha = read_json(folder / "config.json")
    index_sha = None
    if (folder / INDEX).exists():
        weight_map, index_sha = _read_index(folder / INDEX)
        shards = sorted(set(weight_map.values()))
    elif SINGLE in present:
        weight_map, shards = None, [SINGLE]
    else:
        raise SourceError(f"{folder}: holds neither {INDEX} nor {SINGLE}; is this a model's folder?")

    problems, tensors, broken = [], {}, set()
    for shard in shards:
        try:
            found = header(shard)
        except SourceError as e:
            problems.append(str(e))
            broken.add(shard)
            continue
        for info in found:
            if info.name in tensors:
                problems.append(f"{quoted(info.name)} is in both {tensors[info.name].shard} and {shard}")
            tensors[info.name] = info
    if weight_map is not None:
        problems += _disagreements({n: s for n, s in weight_map.items() if s not in broken}, tensors)
    others = present - set(shards)
    strays = sorted(name for name in others if name.startswith("model"))
    problems += [f"{quoted(s)}: not in {INDEX}; remove it, or restore the index that names it" for s in strays]
    if problems:
        raise SourceError(listing(f"{folder}: the checkpoint is not whole", problems))
    return Checkpoint(folder, config, tensors, frozenset(others), config_sha, index_sha, folder)


def read_json(path: Path) -> tuple[dict, str]:
    """A JSON object from a file, and the hex sha256 of its bytes.

    Raises:
        SourceError: missing, unreadable, too large, not JSON, not an object, a key twice.
    """
    raw = read_whole(path)
    if raw.startswith(b"version https://git-lfs"):
        raise SourceError(f"{path.name}: a git-lfs pointer, not the file; run `git lfs pull`")
    return parse_json(raw, path.name), hashlib.sha256(raw).hexdigest()


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
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{where}: not valid JSON ({e or 'nested too deeply'})") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: not a JSON object")
    return value


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


def _read_index(path: Path) -> tuple[dict[str, str], str]:
    index, sha = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise SourceError(f"{path.name}: has no weight_map of tensor names to file names")
    if not weight_map:
        raise SourceError(f"{path.name}: weight_map is empty")
    wrong = sorted({v for v in weight_map.values() if not _is_plain_name(v)})
    if wrong:
        names = [repr(v[:200]) for v in wrong]
        raise SourceError(listing(f"{path.name}: file names must be plain *.safetensors names in its folder", names))
    return weight_map, sha


def _is_plain_name(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and len(name) <= 255
        and name.isprintable()
        and not any(c in name for c in "/\\:")
        and not name.startswith(".")
    )


def _disagreements(weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> list[str]:
    problems = []
    for name, shard in weight_map.items():
        if name not in tensors:
            problems.append(f"{shard}: lacks {quoted(name)}, which {INDEX} places in it")
        elif tensors[name].shard != shard:
            problems.append(f"{quoted(name)}: in {tensors[name].shard}, but {INDEX} places it in {shard}")
    extra = [n for n in tensors if n not in weight_map]
    return problems + [f"{tensors[n].shard}: {quoted(n)} is not in {INDEX}" for n in extra]


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


def read_whole(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """A file's bytes. Raises SourceError, also for more than `limit` of them."""
    with open_regular(path) as (fd, size):
        if size > limit:
            raise SourceError(f"{path.name}: {size} bytes, more than the {limit} that such a file may have")
        chunks = []
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)
