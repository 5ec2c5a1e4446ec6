"""Blocks of affine tensors at the speed of a disk: what `arithmetic.py` finds in them, found in another order.

This route only ever says that all is well. Groups that it does not know, and a whole block in which anything differs,
are left to the plain formulas: whatever is reported as wrong comes from `arithmetic.py`.
"""

from dataclasses import replace

import numpy as np

from ..quantize.oracle import bf16_to_f32
from ..quantize.precision import Quantized
from .arithmetic import Error, decoded_error, differing, expected
from .layout import Comparison
from .planes import bf16_pairs, nvfp4_planes, rounded_pairs
from .rounding import allowed_error
from .tile import check_tile

TILE = 1 << 18  # weights: rows of over 8,192 columns, from where on numpy broadcasts at full speed
FEW = 8  # one group in so many may be odd; where more are, the plain formulas take all
AT_FIRST, GROWTH = 128, 4  # groups whose shares are computed together, and how many more in each round

_F32_ERROR = np.float32(2**-21)  # of the largest magnitude in it: more than float32 adds to a decoded error


def is_known(m: Comparison) -> bool:
    """Whether this route knows a module: from BF16, which NVFP4 becomes, to affine in 4 or 8 bits."""
    affine = isinstance(m.precision, Quantized) and m.precision.mode == "affine"
    return affine and m.source_dtype in ("BF16", "NVFP4") and m.precision.bits in (4, 8)


def scratch_bytes(m: Comparison) -> int:
    """Memory that `affine_error` takes, to be given to it again and again: fresh memory is slow."""
    planes = {"BF16": 4, "NVFP4": 6}
    return planes[m.source_dtype] * TILE * 2 if is_known(m) else 0


def affine_error(
    m: Comparison, source: list[np.ndarray], found: list[np.ndarray], share: float, memory: np.ndarray
) -> Error | None:
    """What `decoded_error` says of rows in which nothing differs; None where something does, or may.

    Its sums of squares are added up in another order; the rest is the same bit for bit.

    Args:
        source, found: raw rows of a module that `is_known`, as `expected` and `differing` take them.
        share: the worst found before; whether a smaller one is found here makes no difference.
        memory: float32 [`scratch_bytes` / 4].
    """
    size, bits = m.precision.group_size, m.precision.bits
    per_row = m.width // size
    count = len(found[0]) * per_row
    source = [a.reshape(count, -1) if a.ndim == 2 else a.repeat(per_row) for a in source]
    words, scales, biases = found[0].reshape(count, -1), found[1].reshape(-1), found[2].reshape(-1)
    if m.source_dtype == "NVFP4" and not _is_finite(*source):
        return None
    memory, step = memory.reshape(-1, TILE // 2), TILE // size
    tiles = []
    with np.errstate(all="ignore"):  # only odd groups overflow
        for start in range(0, count, step):
            part = slice(start, start + step)
            pairs, exact = _tile_of(m, [a[part] for a in source], memory[3:])
            tile = check_tile(pairs, exact, (words[part], scales[part], biases[part]), bits, memory[:3])
            if tile is None:
                return None
            tiles.append(tile)
        signals, noises, *each = zip(*tiles, strict=True)
        worst, rounded, scale, odd = map(np.concatenate, each)
        steps_in_unit, *limits = allowed_error(bf16_to_f32(scales), bf16_to_f32(biases), bits, "BF16")
        total = Error(sum(signals), sum(noises), float((worst * steps_in_unit).max()), share)
        bounds = _bounds(rounded, scale, bf16_to_f32(scales), bf16_to_f32(biases), steps_in_unit, limits, bits)
    if not np.isfinite(total.signal + total.noise):
        return None
    groups, stored = replace(m, width=size), (words, scales[:, None], biases[:, None])
    return _with_shares(_with_odd(total, groups, source, stored, odd), groups, source, stored, np.where(odd, 0, bounds))


def _is_finite(codes: np.ndarray, block_scales: np.ndarray, scale_2: np.ndarray) -> bool:
    """Whether an NVFP4 source has no NaN and no infinite scale."""
    return bool(np.isfinite(scale_2.view("<f4")).all() and not ((block_scales & 0x7F) == 0x7F).any())


def _tile_of(m: Comparison, source: list[np.ndarray], memory: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The BF16 pairs of groups of the source, and what they were rounded from, if from anything."""
    pairs = memory[0].view(np.uint32)
    if m.source_dtype == "BF16":
        return bf16_pairs(source[0], pairs), None
    codes, block_scales, scale_2 = source
    exact = nvfp4_planes(codes, block_scales, scale_2.view("<f4"), memory[1:].reshape(-1))
    return rounded_pairs(exact, pairs), exact


def _plainly(groups: Comparison, source: list, stored: tuple, which: np.ndarray) -> Error | None:
    """Some groups by the plain formulas; None if any differs."""
    rows, found = expected(groups, [a[which] for a in source]), [a[which] for a in stored]
    return None if differing(groups, rows, found) is not None else decoded_error(groups, rows, found)


def _with_odd(total: Error, groups: Comparison, source: list, stored: tuple, odd: np.ndarray) -> Error | None:
    """Adds the odd groups; None if one differs or if they are too many."""
    which = np.flatnonzero(odd)
    if not len(which):
        return total
    error = _plainly(groups, source, stored, which) if len(which) * FEW <= len(odd) else None
    if error is None:
        return None
    signal, noise = total.signal + error.signal, total.noise + error.noise
    return Error(signal, noise, max(total.steps, error.steps), max(total.share, error.share))


def _with_shares(
    total: Error | None, groups: Comparison, source: list, stored: tuple, bounds: np.ndarray
) -> Error | None:
    """Finds the worst share: computed for groups in which it may be worse than what was found so far, likeliest first;
    None if a group differs or is beyond what is allowed."""
    count = AT_FIRST
    while total is not None and len(which := np.flatnonzero(bounds > total.share)):
        if len(which) > count:
            which = which[np.argpartition(bounds[which], -count)[-count:]]
        count *= GROWTH
        error = _plainly(groups, source, stored, which)
        total = None if error is None else replace(total, share=max(total.share, error.share))
        bounds[which] = 0
    return total if total is not None and total.share <= 1 else None


def _bounds(
    rounded: np.ndarray,
    scale: np.ndarray,
    stored: np.ndarray,
    biases: np.ndarray,
    steps_in_unit: np.ndarray,
    limits: list,
    bits: int,
) -> np.ndarray:
    """What no share of a group is above: float32 [groups] all.

    A code inside its range is off by at most `rounded` of the scale that it was computed with, and by code * (stored -
    scale). Of that the share is (a + b * code) / (c + d * code), which is monotonic: largest for the smallest or for
    the largest code.
    """
    fixed, per_code = limits
    moved = np.abs(stored - scale) * steps_in_unit
    error = _F32_ERROR * (np.abs(biases) * steps_in_unit + np.float32(2**bits))
    fraction = rounded * np.abs(scale) * steps_in_unit + error
    first, last = np.float32(1), np.float32(2**bits - 2)
    return np.maximum(*((fraction + code * moved) / (fixed + code * per_code) for code in (first, last)))
