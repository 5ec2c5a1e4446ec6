"""Runs a Plan: weights are read once, transformed, and written once, shard by shard.

Memory is bounded by one block of rows, and by the scales and biases of one module, which stand behind
its codes in the file.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from ..quantize.errors import OutputError, SourceError
from ..quantize.kernels import RAW_DTYPES, affine_quantize, cast, nvfp4_decode
from ..quantize.precision import DTYPE_BYTES, NVFP4, Quantized
from .checkpoint import Checkpoint
from .nvfp4 import BLOCK_SCALES, SPAN, check_block_scales, expert_scales
from .plan import Module, Plan
from .shards import HashedFile, Written, as_json, new_file, shard_header, write_file

BLOCK_BYTES = 16 << 20  # of source, read and quantized at once
JOURNAL = ".motif-convert.json"  # the state of an unfinished run


@dataclass
class CastReport:
    """What casts cost: values cast, values changed, the largest change and its tensor."""

    values: int = 0
    changed: int = 0
    max_change: float = 0.0
    tensor: str = ""

    def as_dict(self) -> dict:
        return asdict(self)

    def add(self, name: str, change: np.ndarray) -> None:
        self.values += change.size
        self.changed += int(np.count_nonzero(change))
        if change.size and float(change.max()) > self.max_change:
            self.max_change, self.tensor = float(change.max()), name


@dataclass
class Journal:
    """What an unfinished run has done, beside its shards; see `open_journal`."""

    path: Path
    plan_hash: str
    version: str
    recipe: str
    mtp: str
    shards: dict[str, Written] = field(default_factory=dict)

    def save(self) -> None:
        state = asdict(self)
        del state["path"]
        write_file(self.path, as_json(state))

    def remove(self) -> None:
        self.path.unlink()

    def discard(self) -> None:
        """Undoes a run that wrote nothing, and the folder too if nothing else is in it."""
        self.remove()
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()


def open_journal(out: Path, plan: Plan, version: str) -> Journal:
    """The journal of a new run, or of an interrupted run of the same plan.

    Raises:
        OutputError: the folder is in use for something else, or for another plan.
    """
    fresh = Journal(out / JOURNAL, plan.plan_hash, version, plan.recipe.name, plan.mtp)
    if not fresh.path.exists():
        check_unused(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise OutputError(f"{out}: could not be made: {e.strerror}") from None
        fresh.save()
        return fresh
    try:
        state = json.loads(fresh.path.read_bytes())
        differs = [k for k in ("version", "recipe", "mtp", "plan_hash") if state[k] != getattr(fresh, k)]
        if not differs:
            fresh.shards = {k: Written(**v) for k, v in state["shards"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise OutputError(f"{fresh.path}: not readable as the state of a run; choose another --out") from None
    if differs:
        what = "the source or the recipe's rules" if differs == ["plan_hash"] else f"another {differs[0]}"
        raise OutputError(f"{out}: holds an interrupted run with {what}; finish that one, or choose another --out")
    return fresh


def check_unused(out: Path) -> None:
    """Refuses a folder with anything in it, unless an interrupted run left it.

    Raises:
        OutputError: naming the folder.
    """
    if out.is_symlink() and not out.exists():
        raise OutputError(f"{out}: a link to nothing; choose another --out")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out}: exists and is not a folder; choose another --out")
    if out.is_dir() and not (out / JOURNAL).exists() and any(out.iterdir()):
        raise OutputError(f"{out}: is not empty, and nothing in it is overwritten; choose another --out")


def write_shards(plan: Plan, checkpoint: Checkpoint, journal: Journal, progress: Callable[[int, str], None]) -> None:
    """Writes every shard of the plan that the journal lacks.

    Args:
        progress: called with bytes of source done and the shard's name.
    Raises:
        SourceError, OutputError.
    """
    for name, modules in plan.shards.items():
        path = journal.path.parent / name
        done = journal.shards.get(name)
        if done and path.is_file() and path.stat().st_size == done.size:
            progress(sum(m.source_nbytes for m in modules), name)
            continue
        with new_file(path) as file:
            file.write(shard_header(modules))
            for module in modules:
                _write_module(module, checkpoint, file, lambda n, name=name: progress(n, name))
        journal.shards[name] = file.written()
        journal.save()


def check_casts(plan: Plan, checkpoint: Checkpoint) -> CastReport | None:
    """What the plan's casts will cost, or None if it has none.

    Read before anything is written, since a value that does not fit has to stop the run: it is
    the MTP head alone, a thousandth of the model.

    Raises:
        SourceError: naming the tensor with a finite value that overflows.
    """
    report = CastReport()
    for module in plan.modules:
        (stored, *_) = module.stored
        if isinstance(module.precision, Quantized) or stored.dtype == module.float_dtype:
            continue
        row = 0
        for block in blocks(module, checkpoint):
            _, change = cast(block, module.source_dtype, stored.dtype)
            if (over := np.argwhere(np.isinf(change))).size:
                at = [int(over[0][0]) + row, int(over[0][1])]
                raise SourceError(
                    f"{module.source}: the value at {at} is too large for {stored.dtype}; choose --mtp bf16"
                )
            report.add(module.source, change)
            row += len(block)
    return report if report.values else None


@dataclass(frozen=True)
class Rows:
    """A run of rows of one matrix of a source stack: [first, first + count) of matrix `matrix`."""

    matrix: int
    first: int
    count: int


def row_runs(module: Module, row_bytes: int, limit: int = BLOCK_BYTES) -> Iterator[Rows]:
    """A module's rows in order, in runs of at most `limit` bytes (but one row at least).

    A part of a stack (the gate or the up half of every expert) is cut out of each of its matrices.
    """
    *lead, rows, _ = module.source_shape if len(module.source_shape) > 1 else (1, *module.source_shape)
    part = rows // module.parts
    step = max(1, limit // max(row_bytes, 1))
    for matrix in range(prod(lead)):
        end = (module.part + 1) * part
        for first in range(module.part * part, end, step):
            yield Rows(matrix, first, min(step, end - first))


def read_rows(checkpoint: Checkpoint, module: Module, source: str, row_bytes: int, run: Rows) -> np.ndarray:
    """The bytes of a run of rows: uint8 [count, row_bytes]."""
    rows = module.source_shape[-2] if len(module.source_shape) > 1 else 1
    start = (run.matrix * rows + run.first) * row_bytes
    return checkpoint.read(source, start, run.count * row_bytes).reshape(run.count, row_bytes)


def blocks(module: Module, checkpoint: Checkpoint) -> Iterator[np.ndarray]:
    """A module's source, in order, as raw float arrays [rows, K]; NVFP4 is decoded to BF16."""
    width = module.source_shape[-1]
    if module.source_dtype == "NVFP4":
        scales = expert_scales(checkpoint, module.source)
        for run in row_runs(module, width * DTYPE_BYTES["BF16"]):
            codes = read_rows(checkpoint, module, module.source, width // 2, run)
            yield nvfp4_decode(codes, _block_scales(checkpoint, module, run), scales[run.matrix])
        return
    row_bytes = width * DTYPE_BYTES[module.source_dtype]
    for run in row_runs(module, row_bytes):
        yield read_rows(checkpoint, module, module.source, row_bytes, run).view(RAW_DTYPES[module.source_dtype])


def _block_scales(checkpoint: Checkpoint, module: Module, run: Rows) -> np.ndarray:
    width = module.source_shape[-1] // NVFP4.group_size
    scales = read_rows(checkpoint, module, module.source + BLOCK_SCALES, width, run)
    check_block_scales(scales, module.source, run.matrix, run.first)
    return scales


def _write_module(module: Module, checkpoint: Checkpoint, file: HashedFile, progress) -> None:
    if module.precision == NVFP4:
        _write_nvfp4(module, checkpoint, file, progress)
    elif isinstance(module.precision, Quantized):
        _write_quantized(module, checkpoint, file, progress)
    else:
        (stored,) = module.stored
        for block in blocks(module, checkpoint):
            if stored.dtype != module.float_dtype:
                block, _ = cast(block, module.float_dtype, stored.dtype)
            file.write(block)
            progress(block.size * module.source_nbytes // module.parameters)


def _write_quantized(module: Module, checkpoint: Checkpoint, file: HashedFile, progress) -> None:
    later = {t.name: np.empty(prod(t.shape), RAW_DTYPES[t.dtype]) for t in module.stored[1:]}
    at = 0
    for block in blocks(module, checkpoint):
        made = affine_quantize(block, module.float_dtype, module.precision)
        file.write(made[".weight"])
        groups = made[".scales"].size
        for suffix in (".scales", ".biases"):
            later[module.path + suffix][at : at + groups] = made[suffix].reshape(-1)
        at += groups
        progress(block.size * module.source_nbytes // module.parameters)
    for values in later.values():
        file.write(values)


def _write_nvfp4(module: Module, checkpoint: Checkpoint, file: HashedFile, progress) -> None:
    """Codes and block scales byte for byte: MLX packs both as the vendor does."""
    width = module.source_shape[-1]
    for run in row_runs(module, width // 2):
        codes = read_rows(checkpoint, module, module.source, width // 2, run)
        file.write(codes)
        progress(codes.nbytes)
    file.write(expert_scales(checkpoint, module.source) * SPAN)
    for run in row_runs(module, width // NVFP4.group_size):
        scales = _block_scales(checkpoint, module, run)
        file.write(scales)
        progress(scales.nbytes)
