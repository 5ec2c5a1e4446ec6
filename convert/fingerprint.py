"""Tells sources apart whose config and index are the same: a model and its fine-tune, a branch before and after."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from .headers import open_regular
from .hub import Source

PLACES, SAMPLE = 8, 64 << 10  # of a shard that is here: looks, evenly spread, and bytes at each


def fingerprint(source: Source, shards: Iterable[str]) -> str:
    """A hex sha256 of all shards: of the Hub's own hashes where those are known, else of sizes and samples.

    Raises:
        SourceError: a shard can't be read.
    """
    whole = hashlib.sha256()
    for name in sorted(shards):
        digest = source.files[name].digest if name in source.files else _stated(source.folder / name)
        whole.update(f"{name} {digest or _sampled(source.folder / name)}\n".encode())
    return whole.hexdigest()


def _stated(path: Path) -> str:
    """The hash in the name of the file that a link of the Hub cache leads to."""
    name = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
    return name if len(name) == 64 and set(name) <= set("0123456789abcdef") else ""


def _sampled(path: Path) -> str:
    found = hashlib.sha256()
    with open_regular(path) as (fd, size):
        found.update(str(size).encode())
        for place in range(PLACES):
            found.update(os.pread(fd, SAMPLE, max(0, size - SAMPLE) * place // (PLACES - 1)))
    return found.hexdigest()
