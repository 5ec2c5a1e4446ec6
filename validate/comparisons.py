"""Compares a build with its source shard by shard, where the source's shards come and go.

What was found is kept until the verification is recorded, a file for each shard of the build: an interrupted run does
not fetch and compare again what it has compared. Not in the build, whose files may be anybody's, but with the user.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..convert.checkpoint import Checkpoint, read_json
from ..convert.headers import read_header
from ..convert.hub import private_folder
from ..convert.plan import Module, Plan
from ..convert.shards import as_json, write_file
from ..quantize.errors import CheckError, SourceError
from .contents import Digest, Result, compare, digest
from .layout import Comparison, blocks, comparison, misplaced
from .offenders import Offender
from .pool import Task, default_workers, results
from .structure import Shards

WORTH_A_POOL = 64 << 20  # bytes to read; below, starting processes takes longer than the work
NOT_KEPT = ("offenders", "problem", "source_bytes")  # of results: only what is as it should be is kept


@dataclass(frozen=True)
class Compared:
    """What comparing a shard of a build gave; `sha256` is of the file that was compared."""

    sha256: str | None
    results: list[Result]
    faults: list[str]

    @property
    def passed(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict:
        """All of it as JSON, for another process of this program."""
        rows = [asdict(r) | {"offenders": [asdict(o) for o in r.offenders.values()]} for r in self.results]
        return {"sha256": self.sha256, "results": rows, "faults": self.faults}

    @staticmethod
    def of(found: dict) -> "Compared":
        """What `as_dict` gave."""
        rows = []
        for row in found["results"]:
            worst = [Offender(**o) for o in row["offenders"]]
            rows.append(Result(**row | {"offenders": {(o.tensor, o.expert): o for o in worst}}))
        return Compared(found["sha256"], rows, found["faults"])


class Comparisons:
    """What was compared so far of a build.

    Args:
        out: the build, finished or not.
        kept: a folder for what is found, of this plan and this source alone; None: it is not kept.
        workers: processes; None for as many as fit the work.
        progress: called with bytes of source that were compared since the last call.
    """

    def __init__(
        self,
        out: Path,
        plan: Plan,
        checkpoint: Checkpoint,
        kept: Path | None,
        workers: int | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ):
        self.out, self.plan, self.checkpoint, self.kept = out, plan, checkpoint, kept
        self.workers, self.progress = workers, progress
        self.of: dict[str, Compared] = {}
        for shard in plan.shards if kept else ():
            if before := self._read(shard):
                self.of[shard] = before
                progress(sum(m.source_nbytes for m in plan.shards[shard]))

    def lacks(self, shard: str, sha256: str | None) -> bool:
        """Whether a shard with this hash still has to be compared."""
        found = self.of.get(shard)
        return found is None or not found.passed or found.sha256 != sha256

    def compare(self, shard: str) -> Compared:
        """Compares a shard of the build; the source's shards that it is made of are here."""
        try:
            tensors = {t.name: t for t in read_header(self.out / shard)}
        except SourceError as e:
            return self._keep(shard, Compared(None, [], [str(e)]))
        planned = self.plan.shards[shard]
        modules = comparable(planned, {shard: tensors}, self.out, self.checkpoint)
        faults = [f"{shard}: not all of its tensors are as planned"] if len(modules) < len(planned) else []
        found, sha256 = [], None
        with results(tasks(modules, [self.out / shard], None), workers_for(self.workers, modules)) as done:
            for result in done:
                if isinstance(result, Digest):
                    sha256 = result.sha256
                else:
                    found.append(result)
                    self.progress(result.source_bytes)
                    faults += map(str, result.offenders.values())
                faults += [result.problem] if result.problem else []
        return self._keep(shard, Compared(sha256, found, faults))

    def inspect(self, shard: str) -> None:
        """Compares a shard. Raises CheckError if it is not what the source gives."""
        if faults := self.compare(shard).faults:
            more = f" ({len(faults)} such places)" if len(faults) > 1 else ""
            raise CheckError(
                f"{self.out / shard}: read back, it is not what the source gives: {faults[0]}{more}; the disk or the "
                "memory of this machine is at fault: run the same command again to make this shard again"
            )

    def _keep(self, shard: str, found: Compared) -> Compared:
        self.of[shard] = found
        if found.passed and self.kept:
            rows = [{k: v for k, v in asdict(r).items() if k not in NOT_KEPT} for r in found.results]
            write_file(private_folder(self.kept) / f"{shard}.json", as_json({"sha256": found.sha256, "results": rows}))
        return found

    def _read(self, shard: str) -> Compared | None:
        """What an earlier run kept of a shard; None if that can't be read."""
        try:
            state, _ = read_json(self.kept / f"{shard}.json")
            return Compared(state["sha256"], [Result(**row) for row in state["results"]], [])
        except (SourceError, KeyError, TypeError):
            return None


def comparable(modules: list[Module], shards: Shards, out: Path, checkpoint: Checkpoint) -> list[Comparison]:
    """The modules whose tensors are what the plan says; what is wrong with the others is said elsewhere."""
    found = []
    for m in modules:
        tensors = shards.get(m.shard, {})
        kinds = [(t.dtype, t.shape) for t in m.stored]
        there = [(tensors[t.name].dtype, tensors[t.name].shape) for t in m.stored if t.name in tensors]
        if kinds == there and not misplaced(m, checkpoint):
            found.append(comparison(m, tensors, out, checkpoint))
    return found


def tasks(modules: list[Comparison], files: Iterable[Path], sample: float | None) -> Iterator[Task]:
    """The comparisons, shard by shard, each shard hashed beside them, while the system still has it in memory."""
    left = dict.fromkeys(files)
    for block in blocks(modules, sample):
        shard = block.module.stored[0].file
        if shard in left:
            del left[shard]
            yield digest, shard
        yield compare, block
    for file in left:
        yield digest, file


def workers_for(workers: int | None, modules: list[Comparison], sample: float | None = None) -> int:
    """How many processes are worth it; as many as asked for, if so."""
    if workers is not None:
        return workers
    nbytes = sum(m.matrices * m.rows * m.width * 2 for m in modules) * (sample or 1)
    return default_workers() if nbytes > WORTH_A_POOL else 1
