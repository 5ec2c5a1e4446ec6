"""Where a source comes from: a folder, or one commit of a Hub repository."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from ..quantize.errors import SourceError, quoted
from .fetch import blob_path, fetch
from .headers import TensorInfo, header_tensors, open_regular
from .hub import HubFile, Source, hub_errors, read_range

Result = TypeVar("Result")

SOURCE_FILES = (
    "*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*",
    "README.md",
)  # fmt: skip
HEADERS_AT_ONCE = 8
FIRST_BYTES = 64 << 10  # of a shard: most headers are shorter


def find_source(source: str, revision: str | None = None) -> Source:
    """A local folder, or a repository of the Hub at the commit that `revision` is now.

    Of a repository the small files are fetched, into the Hub cache; its shards when they are needed (see `fetch`).

    Args:
        revision: a branch, tag or commit; None for the default branch.
    Raises:
        SourceError: it is not there, or may not be read.
    """
    folder = Path(source)
    if folder.exists():
        if revision is not None:
            raise SourceError(f"{source}: a folder; --revision goes with a Hub repo id")
        if any("\ud800" <= c <= "\udfff" for c in folder.resolve().name):
            raise SourceError(f"{quoted(source)}: the folder's name is not UTF-8, and builds record it; rename it")
        if not folder.is_dir():
            raise SourceError(f"{source}: not a folder; name the folder that holds config.json")
        return _in_cache(folder.resolve()) or Source(folder.resolve().name, None, folder)
    if not _is_repo_id(source):
        raise SourceError(f"{source}: no such folder, and not a Hub repo id such as owner/name")
    from huggingface_hub import constants

    return _cached(source, revision) if constants.HF_HUB_OFFLINE else _at_commit(source, revision)


def _asked(call: Callable[[], Result]) -> Result:
    """What a request of the API gives, in the end: huggingface_hub makes it once."""
    from huggingface_hub.errors import HTTPError

    from .patience import TRIES, may_pass, seconds_to_wait

    for tried in range(1, TRIES):
        try:
            return call()
        except HTTPError as e:
            if not may_pass(e):
                raise
            time.sleep(seconds_to_wait(e, tried))
    return call()


def shard_reader(source: Source) -> Callable[[str], list[TensorInfo]] | None:
    """Reads headers of a repository's shards, by ranged requests where the Hub cache lacks a shard, several at once.

    Returns:
        shard -> its tensors (see `header_tensors`); None for a local folder.
    """
    if not source.files:
        return None
    shards = [name for name in source.files if name.endswith(".safetensors")]
    pool = ThreadPoolExecutor(HEADERS_AT_ONCE, thread_name_prefix="header")
    headers = {name: pool.submit(_header, source, name) for name in shards}
    pool.shutdown(wait=False)

    def read(shard: str) -> list[TensorInfo]:
        if shard not in headers:
            raise SourceError(f"{shard}: is not in {source.id}, though the index names it")
        return headers[shard].result()

    return read


def _header(source: Source, name: str) -> list[TensorInfo]:
    blob, size = blob_path(source, name), source.files[name].size
    if blob.exists() and blob.stat().st_size == size:
        with open_regular(blob) as (fd, size):
            return header_tensors(name, size, lambda start, count: os.pread(fd, count, start))
    start = read_range(source, name, 0, min(size, FIRST_BYTES)) if size else b""

    def read(offset: int, count: int) -> bytes:
        if offset + count <= len(start):
            return start[offset : offset + count]
        return read_range(source, name, offset, count) if offset < size else b""

    return header_tensors(name, size, read)


def source_name(source: str) -> str:
    """The name that builds of a source carry: a folder's, or a repository's without its owner."""
    folder = Path(source).resolve()
    cached = _in_cache(folder)
    return cached.name if cached else folder.name


def _in_cache(folder: Path) -> Source | None:
    """The repository and commit of a snapshot folder of the Hub cache, named by its path."""
    cache = folder.parent.parent
    if folder.parent.name != "snapshots" or not cache.name.startswith("models--"):
        return None
    return Source(cache.name.removeprefix("models--").replace("--", "/", 1), folder.name, folder)


def _is_repo_id(source: str) -> bool:
    owner, _, name = source.partition("/")
    ok = all(c.isascii() and (c.isalnum() or c in "-_.") for c in owner + name)
    return bool(ok and owner and name and owner[0] != "." and name[0] != ".")


def _cached(repo: str, revision: str | None) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=list(SOURCE_FILES))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        at = f" at revision {revision}" if revision else ""
        raise SourceError(
            f"{repo}{at}: not in the local Hub cache, and HF_HUB_OFFLINE is set; unset it, or run "
            f"`hf download {repo}` where there is a network"
        ) from None
    return Source(repo, Path(folder).name, Path(folder))


def _at_commit(repo: str, revision: str | None) -> Source:
    """The one request in which a revision becomes a commit is that for config.json; all others ask for the commit."""
    from huggingface_hub import HfApi, hf_hub_download

    with hub_errors(repo, revision):
        config = Path(hf_hub_download(repo, "config.json", revision=revision))
        commit = config.parent.name
        info = _asked(lambda: HfApi().model_info(repo, revision=commit, files_metadata=True))
    if info.id != repo:
        raise SourceError(f"{repo}: the repository is now called {info.id}; name that one")
    files = {
        f.rfilename: HubFile(f.rfilename, f.size, f.lfs.sha256 if f.lfs else f.blob_id)
        for f in info.siblings
        if "/" not in f.rfilename and any(fnmatchcase(f.rfilename, pattern) for pattern in SOURCE_FILES)
    }
    source = Source(repo, commit, config.parent, files)
    for name in files:
        if not name.endswith(".safetensors"):
            fetch(source, name)
    return source
