"""The state of an unfinished run: what it makes, and which shards are done."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..quantize.errors import OutputError
from .plan import Plan
from .shards import Written, as_json, write_file

JOURNAL = ".motif-convert.json"


@dataclass
class Journal:
    """What an unfinished run has done, beside its shards; see `open_journal`.

    Args:
        source: its `id`, `revision` and `fingerprint`.
        shards: finished ones.
        requantized: `losses.requantization_errors` of what is in them.
    """

    path: Path
    plan_hash: str
    version: str
    recipe: str
    mtp: str
    source: dict
    shards: dict[str, Written] = field(default_factory=dict)
    requantized: dict[str, list[float]] = field(default_factory=dict)

    def save(self) -> None:
        state = asdict(self)
        del state["path"]
        write_file(self.path, as_json(state))

    def remove(self) -> None:
        self.path.unlink()

    def discard(self) -> None:
        """Undoes a run that has got nothing done."""
        if [p.name for p in self.path.parent.iterdir()] == [self.path.name]:
            self.remove()


def open_journal(out: Path, plan: Plan, version: str, source: dict) -> Journal:
    """The journal, in a folder that `sole_run` holds, of a new run, or of an interrupted run of the same plan.

    Args:
        source: see `Journal`.
    Raises:
        OutputError: the folder is in use for something else, for another plan, or for another source.
    """
    fresh = Journal(out / JOURNAL, plan.plan_hash, version, plan.recipe.name, plan.mtp, source)
    if not fresh.path.exists():
        check_unused(out)
        fresh.save()
        return fresh
    try:
        state = json.loads(fresh.path.read_bytes())
        differs = other_run(state, vars(fresh))
        if not differs:
            fresh.shards = {k: Written(**v) for k, v in state["shards"].items()}
            fresh.requantized = {k: [float(error), float(power)] for k, (error, power) in state["requantized"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise OutputError(f"{fresh.path}: not readable as the state of a run; choose another --out") from None
    if differs:
        raise OutputError(f"{out}: holds an interrupted run with {differs}; finish that one, or choose another --out")
    return fresh


def other_run(theirs: dict, mine: dict) -> str:
    """What a run has other than this one: of `version`, `recipe`, `mtp`, `plan_hash` and `source`; empty if nothing."""
    differs = [k for k in ("version", "recipe", "mtp", "plan_hash") if theirs[k] != mine[k]]
    if differs == ["plan_hash"]:
        return "another source, other rules or other --experts"
    if differs:
        return f"another {differs[0]}"
    return "" if theirs["source"]["fingerprint"] == mine["source"]["fingerprint"] else "other weights of its source"


@contextmanager
def sole_run(out: Path, wait: bool = False) -> Iterator[None]:
    """Makes the folder, and keeps other runs out of it until the block ends or the process dies.

    Folders that it made and that an error leaves empty are removed again.

    Args:
        wait: for another run to end, where there is one.
    Raises:
        OutputError: the folder can't be made, or another run is at work in it.
    """
    made = [p for p in (out, *out.parents) if not p.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        fd = os.open(out, os.O_RDONLY)
    except OSError as e:
        raise OutputError(f"{out}: could not be made: {e.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        raise OutputError(f"{out}: another run is writing into it; wait for it, or choose another --out") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise
    finally:
        os.close(fd)


def check_unused(out: Path) -> None:
    """Refuses a folder with anything in it, unless an interrupted run left it, and one that can't be written.

    Raises:
        OutputError: naming the folder.
    """
    if out.is_symlink() and not out.exists():
        raise OutputError(f"{out}: a link to nothing; choose another --out")
    above = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    if not above.is_dir():
        where = "exists and" if above == out.resolve() else f"can't be made: {above}"
        raise OutputError(f"{out}: {where} is not a folder; choose another --out")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(f"{out}: you may not write in {above}; choose another --out")
    begun = {JOURNAL, f".{JOURNAL}.partial"}  # the second alone: killed before the first was there
    if out.is_dir() and not (out / JOURNAL).exists() and any(p.name not in begun for p in out.iterdir()):
        raise OutputError(f"{out}: is not empty, and nothing in it is overwritten; choose another --out")
