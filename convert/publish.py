"""What publishing a build would do: the files here and on the Hub, and what becomes of each. Decides; does nothing."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from huggingface_hub import CommitOperationAdd, HfApi, RepoFile, hf_hub_download

from ..quantize.errors import SourceError
from .account import Target
from .checkpoint import INDEX, read_json
from .patience import patiently
from .repo import PROVENANCE

LOADED = "model*.safetensors"  # what loaders read, whatever the index says
MADE_BY_THE_HUB = ".gitattributes"  # with a new repository
IN_MEMORY = 10 << 20  # bytes; what is larger is LFS on the Hub, the rest is sent from the bytes that were hashed

Say = Callable[[str], None]
Counted = Callable[[int, str], None]


@dataclass(frozen=True)
class LocalFile:
    """A file to publish: its size and hashes, and the operation that adds it, which has read it once.

    `git_oid` is the sha1 that git gives to the content, by which the Hub knows files outside LFS; None for what is
    too large to be one.
    """

    path: str
    size: int
    sha256: str
    git_oid: str | None
    addition: CommitOperationAdd = field(repr=False, compare=False)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository; `sha256` is known of LFS files alone."""

    size: int
    sha256: str | None
    git_oid: str


@dataclass(frozen=True)
class Change:
    """What becomes of a file of the repository; `sha256` is that of the content it then has."""

    path: str
    size: int
    sha256: str | None
    action: Literal["new", "replace", "unchanged", "delete"]


@dataclass(frozen=True)
class Push:
    """All that an upload does. `kept` are files of the repository that are not this program's."""

    target: Target
    files: tuple[LocalFile, ...]
    changes: tuple[Change, ...]
    kept: tuple[str, ...]

    @property
    def needed(self) -> bool:
        return any(c.action != "unchanged" for c in self.changes)

    @property
    def to_send(self) -> list[LocalFile]:
        sent = {c.path for c in self.changes if c.action in ("new", "replace")}
        return [f for f in self.files if f.path in sent]

    def as_dict(self) -> dict:
        return {
            "repo": self.target.repo,
            "revision": self.target.branch,
            "files": [asdict(c) for c in self.changes],
            "kept": list(self.kept),
        }


def hash_files(folder: Path, names: Iterable[str], contents: Mapping[str, bytes], progress: Counted) -> list[LocalFile]:
    """Reads files of a build, each once, for their hashes.

    Args:
        contents: of files that are not, or not so, in the folder.
        progress: called with bytes hashed and the file's name.
    """

    def hashed(name: str) -> LocalFile:
        path, data = folder / name, contents.get(name)
        if data is None and path.stat().st_size <= IN_MEMORY:
            data = path.read_bytes()
        addition = CommitOperationAdd(name, str(path) if data is None else data)
        size, sha256 = addition.upload_info.size, addition.upload_info.sha256.hex()
        return LocalFile(name, size, sha256, None if data is None else _git_oid(data), addition)

    files = []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        for file in threads.map(hashed, names):
            progress(file.size, file.path)
            files.append(file)
    return files


def remote_files(target: Target, revision: str | None, say: Say) -> dict[str, RemoteFile]:
    """Every file of the repository at a commit; none where it is still to be made."""
    if revision is None:
        return {}
    api = HfApi()
    tree = patiently(target.repo, lambda: list(api.list_repo_tree(target.repo, revision=revision, recursive=True)), say)
    files = (f for f in tree if isinstance(f, RepoFile))
    return {f.path: RemoteFile(f.size, f.lfs.sha256 if f.lfs else None, f.blob_id) for f in files}


def earlier_files(target: Target, remote: Mapping[str, RemoteFile], say: Say) -> set[str]:
    """The files of the build that the repository holds, by its motif-convert.json; none if it holds none."""
    if PROVENANCE not in remote:
        return set()
    with TemporaryDirectory() as folder:
        path = patiently(
            target.repo,
            lambda: hf_hub_download(target.repo, PROVENANCE, revision=target.head, local_dir=folder),
            say,
        )
        try:
            listed = read_json(Path(path))[0].get("files")
        except SourceError:
            listed = None
    return {PROVENANCE, *(listed if isinstance(listed, dict) else ())}


def plan_push(
    target: Target, files: Iterable[LocalFile], remote: Mapping[str, RemoteFile], earlier: Iterable[str]
) -> Push:
    """Decides of each file here and there.

    Deleted is what belongs to an `earlier` build and not to this one, and any other shard that a loader would read
    along with it; all else stays.
    """
    files = sorted(files, key=lambda f: (f.path == "config.json", f.path == INDEX, f.path))
    changes = []
    for file in files:
        there = remote.get(file.path)
        action = "new" if there is None else "unchanged" if _same(file, there) else "replace"
        changes.append(Change(file.path, file.size, file.sha256, action))
    others = sorted(remote.keys() - {f.path for f in files})
    gone = [path for path in others if path in earlier or ("/" not in path and fnmatchcase(path, LOADED))]
    changes += [Change(path, remote[path].size, remote[path].sha256, "delete") for path in gone]
    return Push(target, tuple(files), tuple(changes), tuple(p for p in others if p not in gone))


def differences(plan: Push, found: Mapping[str, RemoteFile]) -> list[str]:
    """What a repository's tree has otherwise than it should, a line each."""
    lines = []
    for file in plan.files:
        there = found.get(file.path)
        if there is None:
            lines.append(f"{file.path}: is not there")
        elif there.size != file.size:
            lines.append(f"{file.path}: has {there.size:,} bytes there, {file.size:,} here")
        elif not _same(file, there):
            lines.append(f"{file.path}: has another content there")
    expected = {MADE_BY_THE_HUB, *plan.kept, *(f.path for f in plan.files)}
    return lines + [f"{path}: should not be there" for path in sorted(found.keys() - expected)]


def _same(file: LocalFile, there: RemoteFile) -> bool:
    by_hash = file.sha256 == there.sha256 if there.sha256 else file.git_oid == there.git_oid
    return by_hash and file.size == there.size


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
