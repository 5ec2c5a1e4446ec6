"""Downloads, each checked against the Hub's own hash before it is used, going on where an earlier try stopped."""

import hashlib
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from ..quantize.errors import SourceError
from .hub import HubFile, Source, hub_errors, private_folder

ATTEMPTS = 6  # in a row that bring nothing, before a download is given up
CHUNK = 1 << 20
LONGEST_WAIT = 30  # seconds between them


def blob_path(source: Source, name: str) -> Path:
    """Where the Hub cache keeps a file's bytes."""
    return source.folder.parent.parent / "blobs" / source.files[name].digest


def fetch(
    source: Source, name: str, progress: Callable[[int], None] = lambda _: None, into: Path | None = None
) -> Path:
    """Brings a file here, checked against the Hub's own hash; it goes on where an earlier try stopped.

    A file that is here already is checked as well; one that is wrong is fetched again.

    Args:
        progress: called with bytes that arrived, or were here.
        into: a folder to keep it in; None for the Hub cache.
    Raises:
        SourceError: it could not be had, or has twice arrived with another hash.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import WeakFileLock

    file = source.files[name]
    blob = blob_path(source, name)
    if into is not None:
        private_folder(into)
        if not (into / name).exists() and blob.exists() and _is(blob, file):
            (into / name).symlink_to(blob.resolve())
            progress(file.size)
        else:
            _bring(source, file, into / name, progress)
        return into / name
    cache = blob.parent.parent
    lock = cache.parent / ".locks" / cache.name / f"{file.digest}.lock"  # the library's own, of this file
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            _bring(source, file, blob, progress)
    except OSError as e:
        raise SourceError(f"{e.filename or blob}: {e.strerror or e}; is the Hub cache (HF_HOME) writable?") from None
    with hub_errors(source.id, source.revision):
        return Path(hf_hub_download(source.id, name, revision=source.revision))  # gives the blob its name


def _bring(source: Source, file: HubFile, path: Path, progress: Callable[[int], None]) -> None:
    if path.exists():
        if _is(path, file):
            progress(file.size)
            return
        path.unlink()
    partial = path.with_name(f"{path.name}.motif-convert.incomplete")
    for _ in range(2):
        _receive(source, file, partial, progress)
        if _is(partial, file):
            os.replace(partial, path)
            return
        partial.unlink()
        progress(-file.size)
    raise SourceError(f"{file.name}: has twice arrived with another hash than the Hub states; try again later")


def _is(path: Path, file: HubFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256() if len(file.digest) == 64 else hashlib.sha1(b"blob %d\0" % file.size)
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == file.digest


def _receive(source: Source, file: HubFile, partial: Path, progress: Callable[[int], None]) -> None:
    """All bytes of a file, the first of which may be here; patient with a server that brings something now and then."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    from .patience import keep_quiet

    keep_quiet(bars=False)
    have = partial.stat().st_size if partial.exists() else 0
    if have > file.size:
        partial.unlink()
        have = 0
    progress(have)
    failures = 0
    while have < file.size or not partial.exists():
        try:
            with partial.open("ab", buffering=0) as f:
                _append(source, file.name, f, have, progress)
        except HTTPError as e:
            response = getattr(e, "response", None)
            status = response.status_code if response is not None else 0
            from_hub = response is not None and str(response.request.url).startswith(constants.ENDPOINT)
            if (400 <= status < 500 and from_hub and status not in (408, 429)) or failures == ATTEMPTS:
                with hub_errors(source.id, source.revision):
                    raise
        except OSError as e:
            raise SourceError(f"{file.name}: could not be written to {partial.parent}: {e.strerror or e}") from None
        before, have = have, partial.stat().st_size
        failures = 0 if have > before else failures + 1
        if have > file.size:
            raise SourceError(f"{file.name}: the Hub sends more than the {file.size} bytes that it states")
        if failures > ATTEMPTS:
            raise SourceError(f"{file.name}: the Hub sends {have} of {file.size} bytes; try again later")
        time.sleep(min(2.0**failures / 2, LONGEST_WAIT) if failures else 0)


def _append(source: Source, name: str, f: FileIO, have: int, progress: Callable[[int], None]) -> None:
    """Appends what comes behind the first `have` bytes. Not by `http_get`, which holds 10 MiB in its hands."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    url = hf_hub_url(source.id, name, revision=source.revision)
    with http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),
        retry_on_status_codes=(408, 429),
    ) as response:
        hf_raise_for_status(response)
        if have and response.status_code != 206:  # a server that gives all or nothing
            f.truncate(0)
            progress(-have)
        for chunk in response.iter_bytes(CHUNK):
            f.write(chunk)
            progress(len(chunk))
