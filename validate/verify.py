"""Every tensor of a build against its source, by a route of its own, and all that the build says of itself."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..convert.checkpoint import Checkpoint
from ..convert.journal import JOURNAL
from ..convert.plan import Module, Plan
from ..convert.repo import PROVENANCE
from ..quantize.errors import SourceError
from ..quantize.precision import Quantized
from .claims import check_claims
from .contents import Digest, compare, digest
from .layout import Comparison, blocks, comparison, layer_of, misplaced
from .offenders import Offenders, add_offenders
from .pool import Task, default_workers, results
from .provenance import Provenance, one_line, other_source, planned, read_provenance
from .structure import Shards, check_copied, check_files, check_index, check_tensors, read_shards
from .verification import Tallies, Verification

LISTED = 100  # offenders
WORTH_A_POOL = 64 << 20  # bytes to read; below, starting processes takes longer than the work


def verify_repo(
    out: Path,
    checkpoint: Checkpoint,
    sample: float | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Verification:
    """Checks a build against its source: every bit of every tensor, and everything that it says of itself.

    Contents are compared on the raw bytes with what `quantize/oracle.py` makes of the source, in blocks of a few
    megabytes, without mlx. A build that is wrong in any way is a finding; none makes this raise.

    Args:
        out: a folder that motif-convert wrote.
        checkpoint: the source that it was made from.
        sample: the fraction to compare, in (0, 1], for a quick look: always the first, the middle and the last expert
            of every stack, and an even spread of all else, the same each time. Shards are then not hashed.
        workers: processes; None for the number of processors, or for none beside this one if there is little to do.
        progress: called with bytes of source that were compared since the last call.
    Raises:
        SourceError: `out` is not a build, or the source can't be read.
        MotifConvertError: a worker process was killed.
        ValueError: `sample` is not in (0, 1].
    """
    if sample is not None and not 0 < sample <= 1:
        raise ValueError(f"sample must be in (0, 1], not {sample}")
    sample = None if sample == 1 else sample
    if not out.is_dir():
        raise SourceError(f"{out}: no such folder")
    if not any(os.path.lexists(out / name) for name in (PROVENANCE, JOURNAL)):
        raise SourceError(f"{out}: not a build of motif-convert: it has no {PROVENANCE}")
    provenance, plan, problems = _what_it_should_be(out, checkpoint)
    shards, unreadable = read_shards(out)
    problems += unreadable + check_index(out, shards, plan) + check_claims(out, shards, plan, checkpoint)
    modules: list[Comparison] = []
    tallies = Tallies()
    if plan:
        problems += check_tensors(plan, shards, out)
        every = [m for modules in plan.shards.values() for m in modules]
        _expect(tallies, every)
        problems += [fault for m in every if (fault := misplaced(m, checkpoint))]
        modules = _comparable(every, shards, out, checkpoint)
    recorded = provenance.files if provenance else {}
    files = {
        out / name: file.sha256
        for name, file in recorded.items()
        if (sample is None or not name.endswith(".safetensors")) and _has_size(out / name, file.size)
    }
    workers = _workers(workers, modules, sample)
    offenders: Offenders = {}
    faults: dict[str, None] = {}
    with results(_tasks(modules, files, sample), workers) as done:
        for result in done:
            if isinstance(result, Digest):
                fault = result.problem or _other_hash(result, files)
            else:
                fault = result.problem
                tallies.of(result.family, result.layer).add(result)
                add_offenders(offenders, result.offenders.values())
                progress(result.source_bytes)
            if fault:
                faults[fault] = None
    if not problems and not faults and sample is None and tallies.sampled != 1:
        problems.append(f"only {tallies.sampled:.6%} of the weights were compared: a fault of this program")
    worst = sorted(offenders.values(), key=lambda o: o.order)
    return Verification(
        problems=[" ".join(line.splitlines()) for line in (*problems, *sorted(faults))],
        families=tallies.families(),
        layers=tallies.layers(),
        offenders=worst[:LISTED],
        offenders_total=len(worst),
        sampled=tallies.sampled,
        files=len(recorded),
        hashed=len(files),
        plan_hash=plan.plan_hash if plan else None,
    )


def _what_it_should_be(out: Path, checkpoint: Checkpoint) -> tuple[Provenance | None, Plan | None, list[str]]:
    """What motif-convert.json says, the plan that it means, and what is wrong with either and with the files."""
    try:
        provenance = read_provenance(out)
    except SourceError as e:
        files = check_files(out, None)
        return None, None, [one_line(e), *files, "nothing was compared, since the recipe is not known"]
    problems = check_files(out, provenance.files)
    if other := other_source(provenance, checkpoint):
        return provenance, None, [*problems, *other, "nothing was compared, since the source is another one"]
    plan, more = planned(provenance, checkpoint)
    if plan is None:
        more.append("nothing was compared, since there is no plan to compare with")
    return provenance, plan, [*problems, *check_copied(provenance.files, checkpoint), *more]


def _expect(tallies: Tallies, modules: list[Module]) -> None:
    for m in modules:
        precision = str(m.precision) if isinstance(m.precision, Quantized) else m.stored[0].dtype
        tallies.of(m.family, layer_of(m.stored[0].name)).expect(m.parameters, precision)


def _comparable(modules: list[Module], shards: Shards, out: Path, checkpoint: Checkpoint) -> list[Comparison]:
    """The modules whose tensors are what the plan says; what is wrong with the others is said elsewhere."""
    found = []
    for m in modules:
        tensors = shards.get(m.shard, {})
        kinds = [(t.dtype, t.shape) for t in m.stored]
        there = [(tensors[t.name].dtype, tensors[t.name].shape) for t in m.stored if t.name in tensors]
        if kinds == there and not misplaced(m, checkpoint):
            found.append(comparison(m, tensors, out, checkpoint))
    return found


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _workers(workers: int | None, modules: list[Comparison], sample: float | None) -> int:
    if workers is not None:
        return workers
    nbytes = sum(m.matrices * m.rows * m.width * 2 for m in modules) * (sample or 1)
    return default_workers() if nbytes > WORTH_A_POOL else 1


def _tasks(modules: list[Comparison], files: Iterable[Path], sample: float | None) -> Iterator[Task]:
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


def _other_hash(found: Digest, recorded: dict[Path, str]) -> str | None:
    if found.sha256 == recorded[found.file]:
        return None
    return f"{found.file.name}: sha256 is {found.sha256}, {PROVENANCE} says {recorded[found.file]}"
