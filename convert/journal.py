"""The state of an unfinished run: what it makes, and which shards are done."""

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..quantize.errors import CheckError, OutputError, SourceError
from .checkpoint import read_json
from .plan import Plan
from .ranks import TOKEN
from .shards import Written, as_json, write_file

JOURNAL = ".motif-convert.json"
OF_A_RANK = ".motif-convert.rank-{}.json"  # of ranks other than the first


@dataclass
class Journal:
    """What an unfinished run has done, beside its shards; see `open_journal`.

    Args:
        source: its `id`, `revision` and `fingerprint`.
        shards: finished ones.
        requantized: `losses.requantization_errors` of what is in them.
        finishing: whether the small files were begun, so that those that stand there are this run's own.
    """

    path: Path
    plan_hash: str
    version: str
    recipe: str
    mtp: str
    allow_nonfinite: bool
    source: dict
    shards: dict[str, Written] = field(default_factory=dict)
    requantized: dict[str, list[float]] = field(default_factory=dict)
    finishing: bool = False

    @property
    def done(self) -> dict:
        """What `add` takes: JSON."""
        return {"shards": {name: w.as_dict() for name, w in self.shards.items()}, "requantized": self.requantized}

    def add(self, done: dict, only: Collection[str] | None = None) -> None:
        """Takes over what another rank has done, or of that some shards.

        Raises:
            CheckError: a shard that both have is not the same.
        """
        every = {name: Written(**w) for name, w in done["shards"].items()}
        if differs := [name for name, w in every.items() if self.shards.get(name, w) != w]:
            raise CheckError(
                f"{differs[0]}: two ranks have made other bytes of the same source; verify on each of them"
            )
        self.shards |= every if only is None else {name: w for name, w in every.items() if name in only}
        self.requantized |= done["requantized"]

    def take_in(self, journals: list[Path]) -> None:
        """Writes down what other ranks' journals held, which then go."""
        if journals:
            self.save()
        for path in journals:
            path.unlink(missing_ok=True)

    def save(self) -> None:
        state = asdict(self)
        del state["path"]
        write_file(self.path, as_json(state))

    def forget(self, shard: str) -> None:
        """A shard that is not what it should be: it is no more, whatever happens next."""
        del self.shards[shard]
        self.save()
        (self.path.parent / shard).unlink(missing_ok=True)

    def remove(self) -> None:
        self.path.unlink()

    def discard(self) -> None:
        """Undoes a run that has got nothing done."""
        if [p.name for p in self.path.parent.iterdir()] == [self.path.name]:
            self.remove()


def fresh_journal(out: Path, plan: Plan, version: str, source: dict, rank: int = 0) -> Journal:
    """The journal of a run, or of a rank of it, that has done nothing yet, not written."""
    path = out / (OF_A_RANK.format(rank) if rank else JOURNAL)
    return Journal(path, plan.plan_hash, version, plan.recipe.name, plan.mtp, plan.allow_nonfinite, source)


def open_journal(out: Path, plan: Plan, version: str, source: dict) -> Journal:
    """The journal, in a folder that `sole_run` holds, of a new run, or of an interrupted run of the same plan.

    Args:
        source: see `Journal`.
    Raises:
        OutputError: the folder is in use for something else, for another plan, or for another source.
    """
    fresh = fresh_journal(out, plan, version, source)
    if not fresh.path.exists():
        check_unused(out)
        fresh.save()
        return fresh
    left = sorted(out.glob(OF_A_RANK.format("*")))
    for path in (fresh.path, *left):
        _take_up(fresh, path, plan)
    fresh.take_in(left)
    return fresh


def _take_up(fresh: Journal, path: Path, plan: Plan) -> None:
    """Adds what an interrupted run, or a rank of it, has written down."""
    try:
        state, _ = read_json(path)
        differs = other_run(state, vars(fresh))
        if not differs:
            fresh.shards |= {name: _finished(state["shards"][name]) for name in plan.shards if name in state["shards"]}
            paths = {m.path for m in plan.modules}
            measured = {k: v for k, v in state["requantized"].items() if k.rpartition(" expert ")[0] in paths}
            fresh.requantized |= {k: [float(error), float(power)] for k, (error, power) in measured.items()}
            fresh.finishing |= state["finishing"] is True
    except (SourceError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise OutputError(f"{path}: not readable as the state of a run; choose another --out") from None
    if differs:
        raise OutputError(
            f"{path.parent}: holds an interrupted run with {differs}; finish or delete that one, or choose another "
            "--out"
        )


def _finished(entry: dict) -> Written:
    size, digest = entry["size"], entry["sha256"]
    if type(size) is not int or not isinstance(digest, str) or len(digest) != 64:
        raise ValueError("no size and hash")
    return Written(size, digest)


def finished_shards(out: Path) -> int | None:
    """How many shards an interrupted run has finished; None where there is none."""
    if not (out / JOURNAL).exists():
        return None
    try:
        return len(read_json(out / JOURNAL)[0]["shards"])
    except (SourceError, KeyError, TypeError):
        return None


def other_run(theirs: dict, mine: dict) -> str:
    """What a run has other than this one: of `version`, `recipe`, `mtp`, `allow_nonfinite`, `plan_hash` and `source`;
    empty if nothing."""
    keys = ("version", "recipe", "mtp", "allow_nonfinite", "plan_hash")
    differs = [k for k in keys if theirs[k] != mine[k]]
    if differs == ["plan_hash"]:
        return "another source, other rules or other --experts"
    if differs:
        return f"another {differs[0]} ({theirs[differs[0]]}, not {mine[differs[0]]})"
    return "" if theirs["source"]["fingerprint"] == mine["source"]["fingerprint"] else "other weights of its source"


@contextmanager
def sole_run(out: Path, wait: bool = False) -> Iterator[int]:
    """Makes the folder, and keeps other runs out of it until the block ends or the process dies.

    Folders that it made and that an error leaves empty are removed again. Yields what `share_run` takes.

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
        yield fd
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise
    finally:
        os.close(fd)


def share_run(lock: int) -> None:
    """Lets other ranks of the run into the folder, and still keeps other runs out."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH)


@contextmanager
def part_of_run(out: Path) -> Iterator[None]:
    """Another rank's stay in the folder that rank 0 has opened with `share_run`.

    Raises:
        OutputError: it can't be opened here.
    """
    try:
        fd = os.open(out, os.O_RDONLY)
    except OSError as e:
        raise OutputError(f"{out}: can't be opened: {e.strerror}") from None
    try:
        share_run(fd)
        yield
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
    found = {p.name for p in out.iterdir() if not p.name.startswith(TOKEN)} if out.is_dir() else set()
    if JOURNAL not in found and found - begun:
        raise OutputError(f"{out}: is not empty, and nothing in it is overwritten; choose another --out")
