"""The shard writer, the index, and files that appear whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from ..quantize.errors import OutputError
from .plan import Module, Plan

METADATA = {"format": "mlx"}
TAKE_BYTES = 4 << 20
TOO_LARGE = "; a limit on the size of files is in the way (ulimit -f, or the disk's format): lift it and run it again"
GO_ON = "; free some space and run the same command again"


@dataclass(frozen=True)
class Written:
    """A finished file: its size in bytes and the hex sha256 of its content."""

    size: int
    sha256: str

    def as_dict(self) -> dict:
        return {"size": self.size, "sha256": self.sha256}

    @staticmethod
    def of(data: bytes) -> "Written":
        return Written(len(data), hashlib.sha256(data).hexdigest())


class HashedFile:
    """A file of which threads write pieces at their places, hashed from front to back on the way.

    `size` is where the next bytes to be hashed belong.
    """

    def __init__(self, fd: int, path: Path):
        self._fd, self._path = fd, path
        self._hash = hashlib.sha256()
        self._writing = Lock()  # one writer at a time: the kernel lets the others spin
        self.size = 0

    def write_at(self, offset: int, data) -> None:
        """Writes bytes, or a C-contiguous array's bytes; any thread may. `hash` or `take` has to see them later."""
        view, done = memoryview(data).cast("B"), 0
        with self._writing, _writing(self._path):
            while done < view.nbytes:
                done += os.pwrite(self._fd, view[done:], offset + done)

    def hash(self, data) -> None:
        """Hashes the next bytes of the file, which have been written there."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.size += view.nbytes

    def write(self, data) -> None:
        """Appends bytes, or a C-contiguous array's bytes."""
        self.write_at(self.size, data)
        self.hash(data)

    def take(self, count: int) -> None:
        """Hashes the next `count` bytes, which have been written: they are read back."""
        buffer = bytearray(min(count, TAKE_BYTES))
        while count:
            view = memoryview(buffer)[:count]
            with _writing(self._path):
                got = os.preadv(self._fd, [view], self.size)
            if got == 0:
                raise OutputError(f"{self._path}: became shorter while it was written")
            self.hash(view[:got])
            count -= got

    def close(self) -> None:
        """After it no thread writes: its number may soon be another file's."""
        with self._writing:
            os.close(self._fd)
            self._fd = -1

    def written(self) -> Written:
        return Written(self.size, self._hash.hexdigest())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says of a failed write which file it was; the caller's own errors pass it by."""
    try:
        yield
    except OSError as e:
        hint = GO_ON if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        hint = TOO_LARGE if e.errno == errno.EFBIG else hint
        raise OutputError(f"{path}: could not be written: {e.strerror}{hint}") from e


@contextmanager
def new_file(path: Path, nbytes: int = 0) -> Iterator[HashedFile]:
    """A file that takes its name when it is complete and on the disk.

    Until then it is `.<name>.partial`, which no loader looks at; on an error it is removed.

    Args:
        nbytes: that it will have, if it is worth asking for them before they are made.
    Raises:
        OutputError: it could not be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _writing(path):
            partial.unlink(missing_ok=True)  # it may be a link to somebody's file
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        file = HashedFile(fd, path)
        try:
            with _writing(path):
                free = shutil.disk_usage(path.parent).free
            if nbytes > free:
                raise OutputError(f"{path}: {nbytes:,} bytes are needed and {free:,} are free{GO_ON}")
            yield file
            with _writing(path):
                os.fsync(fd)
        finally:
            file.close()
        with _writing(path):
            os.replace(partial, path)
            sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """The hex sha256 of a file's content. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, data: bytes) -> Written:
    """Writes a small file whole, synced. Raises OutputError."""
    with new_file(path) as file:
        file.write(data)
    return file.written()


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def as_json(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def shard_header(modules: list[Module]) -> bytes:
    """The safetensors header of a shard that holds these modules' tensors, one after the other."""
    entries, end = {"__metadata__": METADATA}, 0
    for tensor in (t for m in modules for t in m.stored):
        start, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text


def index_json(plan: Plan) -> bytes:
    """`model.safetensors.index.json`: sizes, and the sorted map from tensor to shard."""
    return as_json(
        {
            "metadata": {"total_size": plan.total_bytes, "total_parameters": plan.total_parameters},
            "weight_map": dict(sorted((t.name, m.shard) for m in plan.modules for t in m.stored)),
        }
    )
