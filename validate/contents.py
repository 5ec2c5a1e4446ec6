"""Compares blocks of a build with their source: raw bytes, plain numpy, a few megabytes at a time.

What a block has to be is computed from the source and compared bit for bit. It runs in processes of its own: all that
goes in and out is small and can be pickled, and each call opens and closes its files.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ..convert.shards import sha256_of
from ..quantize.errors import SourceError
from .arithmetic import RAW, Error, Expected, decoded_error, differing, expected, group_size, weights
from .fast_check import affine_error, is_known, scratch_bytes
from .layout import Block, Comparison, Part
from .offenders import Offenders, add_offenders, beyond_bound, describe, name_offenders, relative_errors

PIECE = 1 << 21  # weights read at a time
MEMORY, ALIGNED = 16 << 20, 64  # bytes
SLICE = 1 << 17  # weights at a time: what is computed on the way stays in the processor's cache


@dataclass
class Result:
    """What comparing a block gave: counts, extremes and sums.

    Args:
        elements, groups, differing: weights, groups of them (or single ones), and groups that differ.
        steps, share: the worst decoded error of an affine tensor, in steps and as a share of what is allowed.
        signal, noise: sums of the squares of the weights and of their errors, where something was rounded.
        source_bytes: read, less the numbers that experts have.
        problem: why the build could not be read.
    """

    family: str
    layer: int | None
    elements: int
    groups: int
    differing: int = 0
    steps: float | None = None
    share: float | None = None
    signal: float = 0.0
    noise: float = 0.0
    source_bytes: int = 0
    offenders: Offenders = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Digest:
    """The hex sha256 of a file, or why it could not be read."""

    file: Path
    sha256: str | None
    problem: str | None = None


def compare(block: Block) -> Result:
    """Compares a block with its source, a piece at a time: by `fast_check.py`, or plainly what that does not vouch for.

    Raises:
        SourceError: the source could not be read. A build that can't be read is a problem of the result.
    """
    m = block.module
    result = Result(m.family, m.layer, block.count * m.width, block.count * (m.width // group_size(m)))
    rows = min(block.count, max(1, PIECE // m.width))
    sources, stored, scratch = _memory(m, rows)
    for start in range(0, block.count, rows):
        piece = Block(m, block.first + start, min(rows, block.count - start))
        try:
            source = [read_rows(p, piece, m.source_rows, m.first_row, sources[p]) for p in m.sources]
        except OSError as e:
            name = f"{m.sources[0].file.name}: {m.sources[0].name}"
            raise SourceError(f"{name} could not be read: {e.strerror}") from None
        try:
            found = [read_rows(p, piece, m.rows, 0, stored[p]) for p in m.stored]
        except OSError as e:
            result.problem = f"{m.stored[0].file.name}: {m.stored[0].name} could not be read: {e.strerror}"
            return result
        result.source_bytes += sum(a.nbytes for a in source if a.ndim == 2)
        error = affine_error(m, source, found, result.share or 0.0, scratch) if is_known(m) else None
        if error is None:
            _compare_plainly(m, piece, source, found, result)
        else:
            _add_error(error, result)
    return result


def digest(file: Path) -> Digest:
    """Hashes a file, in chunks."""
    try:
        return Digest(file, sha256_of(file))
    except OSError as e:
        return Digest(file, None, f"{file.name}: could not be read: {e.strerror}")


def _memory(m: Comparison, rows: int) -> tuple[dict[Part, np.ndarray], dict[Part, np.ndarray], np.ndarray]:
    """Buffers for so many rows of each tensor, of the source and of the build, and scratch memory: parts of one array.

    It is large, though mostly untouched, for the sake of the C library of Linux, which hands memory back to the system
    as soon as twice the largest array that was ever freed is free, only to take it again page by page.
    """
    sizes = [-(-rows * p.row_bytes // ALIGNED) * ALIGNED for p in (*m.sources, *m.stored)]
    scratch = scratch_bytes(m)
    whole = np.empty(max(MEMORY, sum(sizes) + scratch), np.uint8)
    *buffers, rest = np.split(whole, np.cumsum(sizes))
    count = len(m.sources)
    sources, stored = zip(m.sources, buffers[:count], strict=True), zip(m.stored, buffers[count:], strict=True)
    return dict(sources), dict(stored), rest[:scratch].view(np.float32)


def read_rows(part: Part, block: Block, rows: int, first_row: int, into: np.ndarray) -> np.ndarray:
    """The rows of a block: raw [count, row], from matrices of `rows` rows, of which the module's begin at `first_row`;
    of a tensor with one number an expert, that of each row, [count]. Raises OSError.

    Args:
        into: uint8, for what is read.
    """
    m, dtype = block.module, RAW[part.dtype]
    with part.file.open("rb", buffering=0) as file:
        if not part.row_bytes:
            numbers = np.empty(m.matrices, dtype)
            _fill(file.fileno(), numbers, part.offset)
            return numbers[np.arange(block.first, block.first + block.count) // m.rows]
        data, done = into[: block.count * part.row_bytes].reshape(block.count, -1), 0
        while done < block.count:
            matrix, row = divmod(block.first + done, m.rows)
            count = block.count - done if rows == m.rows else min(block.count - done, m.rows - row)
            at = (matrix * rows + first_row + row) * part.row_bytes
            _fill(file.fileno(), data[done : done + count], part.offset + at)
            done += count
    return data.view(dtype)


def _fill(fd: int, data: np.ndarray, offset: int) -> None:
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if not got:
            raise OSError(0, "the file ends early")
        done += got


def _compare_plainly(m: Comparison, piece: Block, source: list, found: list, result: Result) -> None:
    """Adds a piece to the result, a slice at a time."""
    rows = max(1, SLICE // m.width)
    for start in range(0, piece.count, rows):
        part = slice(start, start + rows)
        _compare_rows(m, piece.first + start, [a[part] for a in source], [a[part] for a in found], result)


def _compare_rows(m: Comparison, first: int, source: list, found: list, result: Result) -> None:
    """Adds rows [first, first + n) of a module to the result; the arrays are those rows."""
    rows = expected(m, source)
    masks = differing(m, rows, found)
    wrong = None if masks is None else _add_differences(m, first, rows, found, masks, result)
    if rows.exact is None:
        return
    error = decoded_error(m, rows, found)
    _add_error(error, result)
    if error.shares is not None:
        beyond = error.shares > 1 if wrong is None else (error.shares > 1) & ~wrong
        texts = partial(beyond_bound, error.shares)
        add_offenders(result.offenders, name_offenders(m, m.stored[0], first, beyond, error.shares, texts))


def _add_error(error: Error, result: Result) -> None:
    result.signal, result.noise = result.signal + error.signal, result.noise + error.noise
    if error.steps is not None:
        result.steps, result.share = max(result.steps or 0, error.steps), max(result.share or 0, error.share)


def _add_differences(m: Comparison, first: int, rows: Expected, found: list, masks: list, result: Result) -> np.ndarray:
    """Names what differs; bool [n, groups], the groups that do."""
    errors = relative_errors(weights(m, rows.stored), weights(m, found), group_size(m))
    wrong = np.zeros(errors.shape, bool)
    for part, mask, want, got in zip(m.stored, masks, rows.stored, found, strict=True):
        wrong |= mask if mask.ndim == 2 else mask[:, None]
        texts = partial(describe, m, part, want, got)
        add_offenders(result.offenders, name_offenders(m, part, first, mask, errors, texts))
    result.differing += int(wrong.sum())
    return wrong
