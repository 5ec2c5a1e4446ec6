"""Whether a folder is a finished build, whole and as motif-convert.json says, without its source."""

from collections.abc import Mapping
from pathlib import Path

from ..convert.checkpoint import INDEX
from ..convert.config import MODEL_FILE
from ..convert.repo import PROVENANCE
from ..quantize.errors import SourceError
from .claims import CONFIG, check_claims
from .provenance import Provenance, check_is_build, one_line, read_provenance
from .structure import EVIDENCE, check_files, check_index, read_shards


def check_structure(out: Path) -> tuple[Provenance | None, list[str]]:
    """What motif-convert.json says, and all that is wrong with the files, the shards, the index and config.json.

    Raises:
        SourceError: it is not a build at all.
    """
    check_is_build(out)
    try:
        provenance = read_provenance(out)
    except SourceError as e:
        return None, [*check_files(out, None), one_line(e)]
    problems = [
        f"{PROVENANCE}: lists {name!r}, which is no file of a build"
        for name in provenance.files
        if "/" in name or name.startswith(".") or name in (PROVENANCE, *EVIDENCE)
    ]
    if problems:
        return provenance, problems
    shards, unreadable = read_shards(out)
    indexed = {CONFIG, INDEX, MODEL_FILE, *shards}
    problems = [f"{PROVENANCE}: does not list {name}" for name in sorted(indexed - provenance.files.keys())]
    problems += check_files(out, provenance.files) + unreadable
    return provenance, problems + check_index(out, shards, None) + check_claims(out, shards, None, None)


def files_of(out: Path, provenance: Provenance) -> list[str]:
    """The names of the files that make up the build, with its evidence where there is any."""
    return [*provenance.files, PROVENANCE, *(name for name in EVIDENCE if (out / name).is_file())]


def check_hashes(provenance: Provenance, found: Mapping[str, str]) -> list[str]:
    """Files whose sha256 is not the recorded one, a line each."""
    return [
        f"{name}: sha256 is {found[name]}, {PROVENANCE} says {recorded.sha256}"
        for name, recorded in provenance.files.items()
        if found[name] != recorded.sha256
    ]
