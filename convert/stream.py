"""Runs a Plan: weights are read once, transformed, and written once, shard by shard.

Threads read and quantize runs of rows ahead of the one that writes. Memory is bounded by their buffers.
"""

from collections import Counter
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Protocol

import numpy as np

from ..quantize.errors import CheckError
from ..quantize.kernels import RAW_DTYPES, affine_quantize, cast, why_not_compiled
from ..quantize.precision import NVFP4, Quantized
from .checkpoint import Checkpoint
from .journal import Journal
from .losses import requantization_errors
from .nvfp4 import SPAN, check_expert_scales, expert_scales
from .plan import Module, Plan
from .rows import Rows, finite_reader, float_runs, placed, read_block_scales, read_rows, row_runs
from .shards import HashedFile, new_file, sha256_of, shard_header
from .supply import AtHand, Downloads, shard_needs
from .workers import Buffers, Workers, default_threads


class Inspection(Protocol):
    """Looks at finished shards while what they are made of is here."""

    def lacks(self, shard: str, sha256: str) -> bool:
        """Whether a shard still has to be looked at."""

    def inspect(self, shard: str) -> None:
        """Raises CheckError if it is not what it should be."""


def write_shards(
    plan: Plan,
    checkpoint: Checkpoint,
    journal: Journal,
    progress: Callable[[int, str], None],
    workers: int | None = None,
    supply: AtHand | Downloads | None = None,
    inspection: Inspection | None = None,
    recheck: Callable[[str], None] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Writes every shard of the plan that the journal lacks.

    Args:
        progress: called with bytes of source done and the shard's name.
        workers: threads that read and quantize; None for `default_threads`. The bytes do not depend on it.
        supply: brings the source's shards; None where they are at hand.
        inspection: of each shard, before what it is made of may go.
        recheck: called with each shard that an earlier run has finished and that is not any more what was written; it
            is written again. None: size and journal are trusted.
        only: the shards that are this rank's to write; None for all.
    Raises:
        SourceError, OutputError. CheckError: by the inspection; that shard will be written again.
    """
    supply, written = supply or AtHand(), set()
    needs = {n: s for n, s in shard_needs(plan, checkpoint).items() if only is None or n in only}
    for name in list(needs):
        modules = plan.shards[name]
        done, path = journal.shards.get(name), journal.path.parent / name
        there = done and path.is_file() and path.stat().st_size == done.size
        if there and recheck and sha256_of(path) != done.sha256:
            there = False
            journal.forget(name)
            recheck(name)
        if there:
            progress(sum(m.source_nbytes for m in modules), name)
            written.add(name)
            if not (inspection and inspection.lacks(name, done.sha256)):
                del needs[name]
    with Workers(workers or default_threads()) as threads:
        for name in supply.begin(needs):
            supply.need(name)
            if name not in written:
                _write_shard(name, plan, checkpoint, journal, threads, progress)
            if inspection:
                _inspect(name, inspection, journal)
            checkpoint.close()  # a file that is open keeps its place on the disk
            supply.release(name)


def _write_shard(name: str, plan: Plan, checkpoint: Checkpoint, journal: Journal, threads: Workers, progress) -> None:
    modules, keep = plan.shards[name], plan.allow_nonfinite
    check_expert_scales(checkpoint, sorted({m.source for m in modules if m.source_dtype == "NVFP4"}))
    header = shard_header(modules)
    with new_file(journal.path.parent / name, len(header) + sum(m.nbytes for m in modules)) as file:
        file.write(header)
        for module in modules:
            _write_module(module, checkpoint, file, threads, lambda count: progress(count, name), keep)
        checkpoint.check_unchanged()
    journal.shards[name] = file.written()
    journal.requantized |= requantization_errors(modules, checkpoint)
    journal.save()


def _inspect(name: str, inspection: Inspection, journal: Journal) -> None:
    try:
        inspection.inspect(name)
    except CheckError:
        journal.forget(name)
        raise


def left_to_mlx(plan: Plan) -> dict[str, int]:
    """What the compiled kernels can't do of a plan: the reason, and the bytes of source that `mx.quantize` gets."""
    reasons = Counter()
    for m in plan.modules:
        if isinstance(m.precision, Quantized) and m.precision.mode == "affine":
            reasons[why_not_compiled(m.float_dtype, m.precision)] += m.source_nbytes
    del reasons[""]
    return dict(reasons)


def _write_module(
    module: Module, checkpoint: Checkpoint, file: HashedFile, threads: Workers, progress, allow_nonfinite: bool
) -> None:
    if module.precision == NVFP4:
        _write_nvfp4(module, checkpoint, file, threads, progress)
    elif isinstance(module.precision, Quantized):
        _write_quantized(module, checkpoint, file, threads, progress)
    else:
        _write_floats(module, checkpoint, file, threads, progress, allow_nonfinite)


def _write_floats(
    module: Module, checkpoint: Checkpoint, file: HashedFile, threads: Workers, progress, allow_nonfinite: bool
) -> None:
    (stored,), read, start = module.stored, finite_reader(module, checkpoint, allow_nonfinite), file.size
    row_bytes = stored.nbytes // module.rows

    def floats(place: tuple[int, Rows], buffers: Buffers) -> np.ndarray:
        first, run = place
        rows = read(run, buffers)
        rows = rows if stored.dtype == module.float_dtype else cast(rows, module.float_dtype, stored.dtype)[0]
        file.write_at(start + first * row_bytes, rows)
        return rows

    for rows in threads.in_order(floats, placed(float_runs(module))):
        file.hash(rows)
        progress(rows.size * module.source_nbytes // module.parameters)


def _write_quantized(module: Module, checkpoint: Checkpoint, file: HashedFile, threads: Workers, progress) -> None:
    """Scales and biases stand behind all codes in the file; they go to their places at once, so that none are held."""
    read, precision = finite_reader(module, checkpoint), module.precision
    starts = accumulate((t.nbytes for t in module.stored), initial=file.size)
    places = list(zip((".weight", ".scales", ".biases"), module.stored, starts, strict=False))

    def quantize(place: tuple[int, Rows], buffers: Buffers) -> np.ndarray:
        first, run = place
        into = {suffix: buffers.array(suffix, RAW_DTYPES[t.dtype], (run.count, t.shape[-1])) for suffix, t, _ in places}
        made = affine_quantize(read(run, buffers), module.float_dtype, precision, into)
        for suffix, t, start in places:
            file.write_at(start + first * (t.nbytes // module.rows), made[suffix])
        return made[".weight"]

    for codes in threads.in_order(quantize, placed(float_runs(module))):
        file.hash(codes)
        progress(len(codes) * module.shape[-1] * module.source_nbytes // module.parameters)
    file.take(sum(t.nbytes for t in module.stored[1:]))


def _write_nvfp4(module: Module, checkpoint: Checkpoint, file: HashedFile, threads: Workers, progress) -> None:
    """Codes and block scales byte for byte: MLX packs both as the vendor does."""
    width = module.source_shape[-1]

    def codes(run: Rows, buffers: Buffers) -> np.ndarray:
        into = buffers.array("codes", "u1", (run.count * width // 2,))
        return read_rows(checkpoint, module, module.source, width // 2, run, into)

    def block_scales(run: Rows, buffers: Buffers) -> np.ndarray:
        return read_block_scales(checkpoint, module, run, buffers)

    def copy(read, row_bytes: int) -> None:
        start = file.size

        def copied(place: tuple[int, Rows], buffers: Buffers) -> np.ndarray:
            first, run = place
            rows = read(run, buffers)
            file.write_at(start + first * row_bytes, rows)
            return rows

        for rows in threads.in_order(copied, placed(row_runs(module, row_bytes))):
            file.hash(rows)
            progress(rows.nbytes)

    copy(codes, width // 2)
    file.write(expert_scales(checkpoint, module.source) * SPAN)
    copy(block_scales, width // NVFP4.group_size)
