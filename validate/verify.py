"""Every tensor of a build against its source, by a route of its own, and all that the build says of itself."""

import os
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from ..convert.checkpoint import Checkpoint
from ..convert.headers import TensorInfo
from ..convert.plan import Module, Plan
from ..convert.repo import PROVENANCE
from ..quantize.errors import SourceError, quoted
from ..quantize.precision import Quantized
from .claims import check_claims, check_losses
from .comparisons import Compared, Comparisons, comparable, tasks, workers_for
from .contents import Digest
from .layout import Comparison, layer_of, misplaced
from .offenders import Offenders, add_offenders
from .pool import results
from .provenance import Provenance, check_is_build, one_line, other_source, planned, read_provenance
from .structure import NONE, check_copied, check_files, check_index, check_tensors, read_shards
from .verification import Tallies, Verification

NOTHING: Mapping[str, list[TensorInfo]] = MappingProxyType({})
LISTED = 100  # offenders
ANOTHER = "nothing was compared, since the source is another one"


def verify_repo(
    out: Path,
    checkpoint: Checkpoint,
    sample: float | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    compared: Comparisons | None = None,
    fresh: bool = False,
    elsewhere: Mapping[str, list[TensorInfo]] = NOTHING,
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
        compared: what was compared shard by shard before; those shards are hashed, and their source is not needed.
        fresh: whether that was just now, so that the hashes of then stand.
        elsewhere: shards that other ranks have and have compared, by name, with their tensors.
    Raises:
        SourceError: `out` is not a build, or the source can't be read.
        MotifConvertError: a worker process was killed.
        ValueError: `sample` is not in (0, 1].
    """
    if sample is not None and not 0 < sample <= 1:
        raise ValueError(f"sample must be in (0, 1], not {sample}")
    sample = None if sample == 1 else sample
    check_is_build(out)
    sizes = {name: max((t.offset + t.nbytes for t in tensors), default=0) for name, tensors in elsewhere.items()}
    provenance, plan, problems = what_it_should_be(out, checkpoint, sizes)
    shards, unreadable = read_shards(out)
    shards |= {name: {t.name: t for t in tensors} for name, tensors in elsewhere.items() if name not in shards}
    problems += unreadable + check_index(out, shards, plan) + check_claims(out, shards, plan, checkpoint)
    modules: list[Comparison] = []
    known = compared.of if compared else {}
    tallies = Tallies()
    if plan:
        problems += check_tensors(plan, shards, out)
        problems += [] if sample else check_losses(provenance, plan, checkpoint)
        every = [m for modules in plan.shards.values() for m in modules]
        _expect(tallies, every)
        problems += [fault for m in every if (fault := misplaced(m, checkpoint))]
        modules = [m for m in comparable(every, shards, out, checkpoint) if m.stored[0].file.name not in known]
    recorded = provenance.files if provenance else {}
    files = {
        out / name: file.sha256
        for name, file in recorded.items()
        if (sample is None or not name.endswith(".safetensors")) and (name in sizes or _has_size(out / name, file.size))
    }
    hashes = [Digest(out / name, c.sha256) for name, c in known.items() if fresh and c.sha256 and out / name in files]
    to_hash = files.keys() - {d.file for d in hashes}
    workers = workers_for(workers, modules, sample)
    offenders: Offenders = {}
    faults: dict[str, None] = {}
    with results(tasks(modules, [f for f in files if f in to_hash], sample), workers) as done:
        for result in chain((r for c in known.values() for r in c.results), hashes, done):
            if isinstance(result, Digest):
                fault = result.problem or _other_hash(result, files) or _changed(result, known)
            else:
                fault = result.problem
                tallies.of(result.family, result.layer).add(result)
                add_offenders(offenders, result.offenders.values())
                progress(result.source_bytes)
            if fault:
                faults[fault] = None
    if not problems and not faults and sample is None and tallies.sampled != 1:
        problems.append(f"only {tallies.sampled:.6%} of the weights were compared: a fault of this program")
    others = {*other_source(provenance, checkpoint), ANOTHER} if provenance else set()
    worst = sorted(offenders.values(), key=lambda o: o.order)
    return Verification(
        problems=[_without_paths(line, out, checkpoint) for line in (*problems, *sorted(faults))],
        families=tallies.families(),
        layers=tallies.layers(),
        offenders=worst[:LISTED],
        offenders_total=len(worst),
        sampled=tallies.sampled,
        files=len(recorded),
        hashed=len(files),
        plan_hash=plan.plan_hash if plan else None,
        other_source=ANOTHER in problems and not faults and set(problems) <= others,
    )


def _without_paths(line: str, out: Path, checkpoint: Checkpoint) -> str:
    """One line that may be published: files by their names, whatever folder of this machine they lie in."""
    for folder in (out, out.resolve(), checkpoint.folder, checkpoint.folder.resolve()):
        line = line.replace(f"{folder}{os.sep}", "")
    return " ".join(line.splitlines())


def what_it_should_be(
    out: Path, checkpoint: Checkpoint, elsewhere: Mapping[str, int] = NONE
) -> tuple[Provenance | None, Plan | None, list[str]]:
    """What motif-convert.json says, the plan that it means, and what is wrong with either and with the files.

    The plan is None where the source is another one, or the recipe is not known.

    Args:
        elsewhere: see `check_files`.
    """
    try:
        provenance = read_provenance(out)
    except SourceError as e:
        files = check_files(out, None)
        return None, None, [one_line(e), *files, "nothing was compared, since the recipe is not known"]
    problems = check_files(out, provenance.files, elsewhere)
    if other := other_source(provenance, checkpoint):
        return provenance, None, [*problems, *other, ANOTHER]
    plan, more = planned(provenance, checkpoint)
    if plan is None:
        more.append("nothing was compared, since there is no plan to compare with")
    return provenance, plan, [*problems, *check_copied(provenance.files, checkpoint), *more]


def _expect(tallies: Tallies, modules: list[Module]) -> None:
    for m in modules:
        precision = str(m.precision) if isinstance(m.precision, Quantized) else m.stored[0].dtype
        tallies.of(m.family, layer_of(m.stored[0].name)).expect(m.parameters, precision)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _other_hash(found: Digest, recorded: dict[Path, str]) -> str | None:
    if found.sha256 == recorded[found.file]:
        return None
    return f"{found.file.name}: sha256 is {found.sha256}, {PROVENANCE} says {quoted(recorded[found.file])}"


def _changed(found: Digest, known: dict[str, Compared]) -> str | None:
    name = found.file.name
    if name not in known or known[name].sha256 == found.sha256:
        return None
    return f"{name}: has changed since it was compared; verify again"
