"""Lazy reader of a sharded safetensors checkpoint: all headers now, bytes when asked for.

Nothing of a source is trusted: every header is checked against its file, every name of the index
against the folder, and index and shards against each other, before one weight is read.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from ..quantize.errors import SourceError, listing, quoted
from .headers import TensorInfo, open_regular, parse_json, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 256 << 20


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
    _stamps: dict[str, tuple] = field(default_factory=dict)
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
                fd = os.open(self.shard_folder / shard, os.O_RDONLY)
                self._files[shard] = fd
                self._stamps.setdefault(shard, _stamp(os.fstat(fd)))
                self._check(shard)
            return self._files[shard]

    def check_unchanged(self) -> None:
        """Refuses files that are open here and have been written to, or exchanged, since their headers were read.

        Raises:
            SourceError: naming the shard.
        """
        with self._lock:
            for shard in self._files:
                self._check(shard)

    def _check(self, shard: str) -> None:
        try:
            there = _stamp(os.stat(self.shard_folder / shard))
        except OSError as e:
            raise SourceError(f"{shard}: went away while it was read: {e.strerror}") from None
        if {_stamp(os.fstat(self._files[shard])), there} != {self._stamps[shard]}:
            raise SourceError(f"{shard}: has changed while it was read; let it rest, and run the same command again")

    def close(self) -> None:
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    """What changes when a file is written to, or exchanged for another."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


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
    stamps = {} if header else {p.name: _stamp(p.stat()) for p in folder.glob("*.safetensors") if p.is_file()}
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
    return Checkpoint(folder, config, tensors, frozenset(others), config_sha, index_sha, folder, stamps)


def read_json(path: Path) -> tuple[dict, str]:
    """A JSON object from a file, and the hex sha256 of its bytes.

    Raises:
        SourceError: missing, unreadable, too large, not JSON, not an object, a key twice.
    """
    raw = read_whole(path)
    if raw.startswith(b"version https://git-lfs"):
        raise SourceError(f"{path.name}: a git-lfs pointer, not the file; run `git lfs pull`")
    return parse_json(raw, path.name), hashlib.sha256(raw).hexdigest()


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


def read_whole(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """A file's bytes. Raises SourceError, also for more than `limit` of them."""
    with open_regular(path) as (fd, size):
        if size > limit:
            raise SourceError(f"{path.name}: {size} bytes, more than the {limit} that such a file may have")
        chunks = []
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)
