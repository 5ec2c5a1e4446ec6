"""Where a source comes from."""

from dataclasses import dataclass
from pathlib import Path

from ..quantize.errors import SourceError

SOURCE_FILES = (
    "*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*",
    "README.md",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, the name it goes by, and the commit it is (None for a local folder)."""

    id: str
    revision: str | None
    folder: Path

    @property
    def name(self) -> str:
        return self.id.rsplit("/", 1)[-1]


def find_source(source: str) -> Source:
    """A local folder, or a repository in the local Hub cache.

    Raises:
        SourceError: neither is there.
    """
    folder = Path(source)
    if folder.is_dir():
        return _in_cache(folder.resolve()) or Source(folder.resolve().name, None, folder)
    if folder.exists():
        raise SourceError(f"{source}: not a folder; name the folder that holds config.json")
    if not _is_repo_id(source):
        raise SourceError(f"{source}: no such folder, and not a Hub repo id such as owner/name")
    return _cached(source)


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


def _cached(repo: str) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(repo, local_files_only=True, allow_patterns=list(SOURCE_FILES))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        raise SourceError(
            f"{repo}: not in the local Hub cache; run `hf download {repo}` first, or name a local folder"
        ) from None
    return Source(repo, Path(folder).name, Path(folder))
