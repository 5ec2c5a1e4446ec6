"""Affine tensors at the speed of a disk: what `arithmetic.py` finds in them, found in another order.

This route only ever says that all is well. Groups that it does not know, and a whole block in which anything differs,
are left to the plain formulas: whatever is reported as wrong comes from `arithmetic.py`.
"""

from dataclasses import replace

import numpy as np

from ..quantize.oracle import bf16_to_f32, f32_to_bf16, nvfp4_dequantize
from ..quantize.precision import Quantized
from .arithmetic import Error, Expected, decoded_error, differing, expected
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
        decoding, adding = bf16_to_f32(scales), bf16_to_f32(biases)
        limits = allowed_error(decoding, adding, bits, "BF16")
        total = Error(sum(signals), sum(noises), float((worst * limits[0]).max()), share)
        bounds = _bounds(rounded, scale, decoding, adding, bits, limits)
    if not np.isfinite(total.signal + total.noise):
        return None
    groups, stored = replace(m, width=size), (words, scales[:, None], biases[:, None])
    if odd.any():
        bounds[odd] = 0
        total = _with_odd(total, groups, source, stored, np.flatnonzero(odd))
    return total and _with_share(total, groups, source, stored, bounds)


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


def _with_odd(total: Error, groups: Comparison, source: list, stored: tuple, which: np.ndarray) -> Error | None:
    """Adds the odd groups by the plain formulas; None if one differs or if they are too many."""
    if len(which) * FEW > len(stored[0]):
        return None
    rows, found = expected(groups, [a[which] for a in source]), [a[which] for a in stored]
    if differing(groups, rows, found) is not None:
        return None
    error = decoded_error(groups, rows, found)
    signal, noise = total.signal + error.signal, total.noise + error.noise
    return Error(signal, noise, max(total.steps, error.steps), max(total.share, error.share))


def _with_share(total: Error, groups: Comparison, source: list, stored: tuple, bounds: np.ndarray) -> Error | None:
    """Adds the worst share, plainly computed for those groups in which it may be worse than what was found so far,
    the likeliest first; None if it is more than what is allowed."""
    share, count = total.share, AT_FIRST
    while len(which := np.flatnonzero(bounds > share)):
        if len(which) > count:
            which = which[np.argpartition(bounds[which], -count)[-count:]]
        rows = _weights(groups, [a[which] for a in source])
        share = max(share, decoded_error(groups, rows, [a[which] for a in stored]).share)
        bounds[which] = 0
        count *= GROWTH
    return replace(total, share=share) if share <= 1 else None


def _weights(m: Comparison, source: list[np.ndarray]) -> Expected:
    """The weights of rows as `expected` has them, without what they have to become."""
    if m.source_dtype == "BF16":
        exact = bf16_to_f32(source[0])
        return Expected([], exact, exact)
    exact = nvfp4_dequantize(source[0], source[1], source[2].view("<f4")[:, None])
    return Expected([], exact, bf16_to_f32(f32_to_bf16(exact)))


def _bounds(
    rounded: np.ndarray, scale: np.ndarray, stored: np.ndarray, biases: np.ndarray, bits: int, limits: tuple
) -> np.ndarray:
    """What no share of a group is above: float32 [groups] all.

    A code inside its range is off by at most `rounded` of the scale that it was computed with, and by code * (stored -
    scale). Of that the share is (a + b * code) / (c + d * code), which is monotonic: largest for the smallest or for
    the largest code.
    """
    steps_in_unit, fixed, per_code = limits
    moved = np.abs(stored - scale) * steps_in_unit
    error = _F32_ERROR * (np.abs(biases) * steps_in_unit + np.float32(2**bits))
    fraction = rounded * np.abs(scale) * steps_in_unit + error
    first, last = np.float32(1), np.float32(2**bits - 2)
    ends = ((fraction + code * moved) / (fixed + code * per_code) for code in (first, last))
    return np.maximum(*ends)
