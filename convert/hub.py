"""Files of one commit of a Hub repository, and what goes wrong on the way to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..quantize.errors import SourceError, quoted


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `digest`: the sha256 of an LFS file, of others git's sha1 of the blob; it names the
    file in the Hub cache."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, the name it goes by, and the commit it is (None for a local folder).

    Args:
        files: what the repository holds at that commit, by name; empty where nothing is to be fetched.
    """

    id: str
    revision: str | None
    folder: Path
    files: dict[str, HubFile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.id.rsplit("/", 1)[-1]


def read_range(source: Source, name: str, start: int, count: int) -> bytes:
    """Bytes of a file that need not be here. Raises SourceError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url = hf_hub_url(source.id, name, revision=source.revision)
    headers = build_hf_headers() | {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    with hub_errors(source.id, source.revision):
        response = http_backoff("GET", url, headers=headers, follow_redirects=True)
        hf_raise_for_status(response)
    data = response.content
    if response.status_code != 206 or len(data) > count:
        raise SourceError(f"{source.id}: {name}: the server does not answer for parts of files")
    return data


def own_folder() -> Path:
    """Where this program keeps what is to outlive a run and is no part of a build: beside the Hub cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "motif-convert"


def private_folder(folder: Path) -> Path:
    """Makes a folder that is this user's alone, if it is not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Says what went wrong between here and the Hub in a line. Raises SourceError."""
    from huggingface_hub import errors

    at = f"{repo} at revision {revision}" if revision else repo
    try:
        yield
    except errors.GatedRepoError:
        raise SourceError(
            f"{repo}: gated; accept its conditions on its page, then `hf auth login`, or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise SourceError(
            f"{repo}: no such repository, or a private one that you may not see; see `hf auth whoami`"
        ) from None
    except errors.RevisionNotFoundError:
        raise SourceError(f"{repo}: has no revision {revision!r}; give a branch, a tag or a commit") from None
    except errors.LocalEntryNotFoundError as e:
        raise SourceError(f"{at}: {_because(e.__cause__)}") from None
    except errors.EntryNotFoundError as e:
        raise SourceError(f"{at}: {_file_of(e)} is not there; is it a model in safetensors format?") from None
    except errors.HFValidationError as e:
        raise SourceError(f"{repo}: not a Hub repo id: {quoted(e)}") from None
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as e:
        raise SourceError(f"{at}: {_because(e)}") from None


def _because(error: BaseException | None) -> str:
    response = getattr(error, "response", None)
    if response is None:
        what = type(error).__name__ if error else "no answer"
        return f"the Hub can't be reached ({what}); try again later, or set HF_HUB_OFFLINE=1 to use what is cached"
    status = response.status_code
    remedy = {
        401: "the token is not valid: `hf auth login`, or set HF_TOKEN",
        403: "the token may not read it: see https://huggingface.co/settings/tokens",
        429: "too many requests: wait, then run the same command again",
    }.get(status, "run the same command again to go on")
    return f"the Hub answered {status}; {remedy}"


def _file_of(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return response.request.url.path.rsplit("/", 1)[-1] if response is not None else "a file"
