"""Reads a module's source in bounded runs of rows, as floats whatever the layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ..quantize import fp4
from ..quantize.errors import SourceError
from ..quantize.kernels import RAW_DTYPES, bf16_to_f32, first_nonfinite
from ..quantize.precision import DTYPE_BYTES, NVFP4, Quantized
from .checkpoint import Checkpoint
from .nvfp4 import BLOCK_SCALES, check_block_scales, expert_scales
from .plan import Module
from .workers import Buffers

BLOCK_BYTES = 2 << 20  # of source, read and quantized at once


@dataclass(frozen=True)
class Rows:
    """A run of rows of one matrix of a source stack: [first, first + count) of matrix `matrix`."""

    matrix: int
    first: int
    count: int


def row_runs(module: Module, row_bytes: int, matrix: int | None = None) -> Iterator[Rows]:
    """A module's rows in order, in runs of at most BLOCK_BYTES (but one row at least).

    A part of a stack (the gate or the up half of every expert) is cut out of each of its matrices.

    Args:
        matrix: the one matrix of the stack to go through; None for all.
    """
    *lead, rows, _ = module.source_shape if len(module.source_shape) > 1 else (1, *module.source_shape)
    part = rows // module.parts
    step = max(1, BLOCK_BYTES // max(row_bytes, 1))
    end = (module.part + 1) * part
    for index in range(prod(lead)) if matrix is None else (matrix,):
        for first in range(module.part * part, end, step):
            yield Rows(index, first, min(step, end - first))


def placed(runs: Iterator[Rows]) -> Iterator[tuple[int, Rows]]:
    """Each run with the number of rows before it."""
    first = 0
    for run in runs:
        yield first, run
        first += run.count


def read_rows(
    checkpoint: Checkpoint, module: Module, source: str, row_bytes: int, run: Rows, into: np.ndarray | None = None
) -> np.ndarray:
    """The bytes of a run of rows: uint8 [count, row_bytes], in `into` if given (see `Checkpoint.read`)."""
    rows = module.source_shape[-2] if len(module.source_shape) > 1 else 1
    start = (run.matrix * rows + run.first) * row_bytes
    return checkpoint.read(source, start, run.count * row_bytes, into).reshape(run.count, row_bytes)


def float_runs(module: Module, matrix: int | None = None) -> Iterator[Rows]:
    """The runs in which a module's source is read as floats; see `row_runs`."""
    return row_runs(module, module.source_shape[-1] * DTYPE_BYTES[module.float_dtype], matrix)


def float_reader(module: Module, checkpoint: Checkpoint) -> Callable[[Rows, Buffers], np.ndarray]:
    """A function that reads a run of rows as raw floats [count, K], in buffers; NVFP4 is decoded to BF16.

    It may be called from several threads.
    """
    width, dtype = module.source_shape[-1], RAW_DTYPES[module.float_dtype]
    if module.source_dtype != "NVFP4":
        row_bytes = width * dtype.itemsize
        return lambda run, buffers: read_rows(
            checkpoint, module, module.source, row_bytes, run, buffers.array("floats", "u1", (run.count * row_bytes,))
        ).view(dtype)
    scales = expert_scales(checkpoint, module.source)

    def read(run: Rows, buffers: Buffers) -> np.ndarray:
        into = buffers.array("codes", "u1", (run.count * width // 2,))
        codes = read_rows(checkpoint, module, module.source, width // 2, run, into)
        block_scales = read_block_scales(checkpoint, module, run, buffers)
        return fp4.decode(codes, block_scales, scales[run.matrix], buffers.array("floats", dtype, (run.count, width)))

    return read


def finite_reader(
    module: Module, checkpoint: Checkpoint, allow_nonfinite: bool = False
) -> Callable[[Rows, Buffers], np.ndarray]:
    """A `float_reader` that refuses NaN and infinite values.

    Args:
        allow_nonfinite: whether such values may stay in a tensor that is kept as floats.
    Raises:
        SourceError: when called, naming the value and its place.
    """
    read = float_reader(module, checkpoint)
    quantized = isinstance(module.precision, Quantized)
    if allow_nonfinite and not quantized:
        return read

    def checked(run: Rows, buffers: Buffers) -> np.ndarray:
        rows = read(run, buffers)
        at = first_nonfinite(rows, module.float_dtype)
        if at is not None:
            _refuse(module, checkpoint, run, at, rows.reshape(-1)[at], quantized)
        return rows

    return checked


def _refuse(module: Module, checkpoint: Checkpoint, run: Rows, at: int, raw: np.generic, quantized: bool) -> None:
    *_, rows, width = (1, *module.source_shape)
    place = np.unravel_index((run.matrix * rows + run.first) * width + at, module.source_shape)
    value = float(bf16_to_f32(np.array([raw]))[0] if module.float_dtype == "BF16" else raw)
    keep = "" if quantized else ", or keep it with --allow-nonfinite"
    shard, where = checkpoint.tensors[module.source].shard, list(map(int, place))
    raise SourceError(f"{shard}: {module.source}{where} is {value}, which no weight can be: get the file again{keep}")


def blocks(module: Module, checkpoint: Checkpoint, matrix: int | None = None) -> Iterator[np.ndarray]:
    """A module's source, in order, as raw float arrays [rows, K], each an array of its own."""
    read = float_reader(module, checkpoint)
    for run in float_runs(module, matrix):
        yield read(run, Buffers())


def read_block_scales(checkpoint: Checkpoint, module: Module, run: Rows, buffers: Buffers) -> np.ndarray:
    """The block scales of a run of rows of an NVFP4 stack: E4M3 bits, uint8 [count, K / 16], checked."""
    width = module.source_shape[-1] // NVFP4.group_size
    into = buffers.array("block scales", "u1", (run.count * width,))
    scales = read_rows(checkpoint, module, module.source + BLOCK_SCALES, width, run, into)
    check_block_scales(scales, module.source, run.matrix, run.first)
    return scales
