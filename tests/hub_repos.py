"""What the test Hub keeps: repositories with their history, file contents on disk, and tokens with what they may do."""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

READ, WRITE = "repo.content.read", "repo.write"
HEADS, TAGS, PULLS = "refs/heads/", "refs/tags/", "refs/pr/"


class HubError(Exception):
    """A refusal, as the Hub words it: huggingface_hub chooses the exception by `code`, which is X-Error-Code."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, dict(headers or {})


@dataclass(frozen=True)
class Token:
    """An access token. `scoped` is for the role fineGrained alone: an owner or a repo id, and its permissions there;
    `org_role` is the user's role in all of `orgs`."""

    name: str
    value: str = field(repr=False)
    role: str
    user: str
    orgs: tuple[str, ...]
    scoped: Mapping[str, tuple[str, ...]]
    gated: tuple[str, ...]
    org_role: str = "write"

    def may(self, permission: str, repo_id: str) -> bool:
        owner = repo_id.partition("/")[0]
        if self.role == "fineGrained":
            return permission in (*self.scoped.get(owner, ()), *self.scoped.get(repo_id, ()))
        if permission == WRITE and (self.role != "write" or (owner in self.orgs and self.org_role == "read")):
            return False
        return owner in (self.user, *self.orgs)


@dataclass(frozen=True)
class Blob:
    """A file's content. `git_oid` is the sha1 that git gives to the content, or to the pointer of an LFS file."""

    file: Path
    size: int
    sha256: str
    git_oid: str
    lfs: bool

    @property
    def oid(self) -> str:
        """What the Hub calls it in an ETag and in the answer to preupload."""
        return self.sha256 if self.lfs else self.git_oid

    @property
    def pointer_size(self) -> int:
        return len(_pointer(self.sha256, self.size))


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: "Commit | None"
    title: str
    date: str
    files: Mapping[str, Blob]
    description: str = ""


@dataclass
class Pull:
    """A pull request; its commits are at refs/pr/<number>."""

    title: str
    author: str
    status: str = "open"


@dataclass
class Repo:
    """A model repository. `refs` are full names such as refs/heads/main; `objects` are its LFS objects by sha256;
    `pulls` are its pull requests by number."""

    id: str
    private: bool = False
    gated: bool = False
    refs: dict[str, Commit] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    objects: dict[str, Blob] = field(default_factory=dict)
    pulls: dict[int, Pull] = field(default_factory=dict)

    def find(self, revision: str) -> Commit:
        """The commit of a branch, a tag, a full ref such as refs/pr/1, or a commit's first seven digits or more."""
        for ref in (HEADS + revision, TAGS + revision, revision):
            if ref in self.refs:
                return self.refs[ref]
        matches = [c for oid, c in self.commits.items() if len(revision) >= 7 and oid.startswith(revision)]
        if len(matches) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return matches[0]

    def writable_ref(self, revision: str) -> str:
        for ref in (HEADS + revision, revision):
            if ref in self.refs and ref.startswith((HEADS, PULLS)):
                return ref
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(
        self, ref: str, parent: Commit | None, title: str, files: Mapping[str, Blob], description: str = ""
    ) -> Commit:
        content = [f"{path} {blob.git_oid}" for path, blob in sorted(files.items())]
        oid = sha1("\n".join([str(len(self.commits)), self.id, parent.oid if parent else "", title, *content]).encode())
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        commit = Commit(oid, parent, title, date, dict(files), description)
        self.commits[oid] = self.refs[ref] = commit
        return commit

    def tree(self, revision: str = "main") -> dict[str, tuple[int, str]]:
        """Size and sha256 of every file at a revision."""
        return {path: (blob.size, blob.sha256) for path, blob in self.find(revision).files.items()}

    def read(self, path: str, revision: str = "main") -> bytes:
        return self.find(revision).files[path].file.read_bytes()


class Storage:
    """File contents in a folder, each once, under its sha256; and which files go to LFS."""

    def __init__(self, folder: Path, lfs_patterns: tuple[str, ...], lfs_threshold: int):
        self.folder, self.lfs_patterns, self.lfs_threshold = folder, lfs_patterns, lfs_threshold
        folder.mkdir(parents=True)

    def is_lfs(self, path: str, size: int) -> bool:
        return size > self.lfs_threshold or any(fnmatch(path.rpartition("/")[2], p) for p in self.lfs_patterns)

    def gitattributes(self) -> bytes:
        return "".join(f"{p} filter=lfs diff=lfs merge=lfs -text\n" for p in self.lfs_patterns).encode()

    def copy(self, path: str, content: bytes | Path) -> Blob:
        """Takes a copy of a file of a repo; an empty one is never LFS, whatever its name, as on the Hub."""
        if isinstance(content, bytes):
            size, sha256 = len(content), hashlib.sha256(content).hexdigest()
        else:
            with content.open("rb") as file:
                size, sha256 = content.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
        stored = self.folder / sha256
        if not stored.exists():
            stored.write_bytes(content) if isinstance(content, bytes) else shutil.copyfile(content, stored)
        if size and self.is_lfs(path, size):
            return lfs_blob(stored, size, sha256)
        return Blob(stored, size, sha256, git_blob_oid(stored.read_bytes()), lfs=False)

    def move(self, file: Path, size: int, sha256: str) -> Blob:
        """Takes an uploaded LFS object over."""
        return lfs_blob(file.replace(self.folder / sha256), size, sha256)


def lfs_blob(file: Path, size: int, sha256: str) -> Blob:
    return Blob(file, size, sha256, git_blob_oid(_pointer(sha256, size)), lfs=True)


def sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def git_blob_oid(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content)


def _pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
