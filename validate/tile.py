"""A tile of groups against its codes, scales and biases: `oracle.affine_quantize` laid out for speed.

Each step is that of the oracle, with the same float32 operations, so that codes, scales, biases and the worst error are
the same bit for bit. What makes it fast: rows along which groups lie side by side, extremes taken from the bits, codes
compared in the order in which they were read, and scratch memory that is used again.
"""

from typing import NamedTuple

import numpy as np

from .planes import EVEN, ODD, bf16_in_lanes, bf16_plane, code_pairs, in_lanes, largest, round_bits

HUGE = 0x5880  # 2^50 as BF16: below it nothing overflows, squares included
NEGATIVE = 0x8000

_SMALLEST_SCALE = np.float32(1e-7)


class Tile(NamedTuple):
    """What a tile gave, in which nothing differs.

    Args:
        signal, noise: sums of squares, as in `arithmetic.Error`.
        worst: the largest decoded error of each group, float32 [groups], not yet divided by the scale.
        rounded: the most that rounding to a code moved an element of each group, in steps, float32 [groups].
        scale: float32 [groups], before it was rounded.
        odd: bool [groups]: NaN, infinite or huge. They were left out.
    """

    signal: float
    noise: float
    worst: np.ndarray
    rounded: np.ndarray
    scale: np.ndarray
    odd: np.ndarray


def check_tile(
    pairs: np.ndarray, exact: np.ndarray | None, stored: tuple[np.ndarray, ...], bits: int, scratch: np.ndarray
) -> Tile | None:
    """Compares a tile; None if any ordinary group of it differs.

    Args:
        pairs: BF16 pairs of the source; spoiled where groups are odd.
        exact: float32 [2, ...], both planes of the weights before they were rounded to BF16; None if they never were.
        stored: codes uint32 [groups, size * bits / 32], scales and biases as BF16 bits, uint16 [groups].
        bits: 4 or 8.
        scratch: float32 [3, >= size / 2 * groups].
    """
    words, scales, biases = stored
    groups = len(words)
    codes = code_pairs(words, bits)
    wmax, wmin, odd = _extremes(pairs, groups)
    if odd.any():
        for columns in (pairs, codes, *(() if exact is None else exact)):
            columns.reshape(len(columns), groups, 4)[:, odd] = 0
    scale, bias = _scale_and_bias(wmax, wmin, bits)
    raw_scale, raw_bias = (round_bits(scale) >> 16).astype(np.uint16), (bias.view(np.uint32) >> 16).astype(np.uint16)
    if not ((raw_scale == scales) & (raw_bias == biases) | odd).all():
        return None

    quantizing, scaling, adding = in_lanes(scale), bf16_in_lanes(raw_scale), bf16_in_lanes(raw_bias)
    last = np.full(4 * groups, 2**bits - 1, np.float32)  # a row, which numpy takes faster than a single number
    w, code, step = (part[: pairs.size].reshape(pairs.shape) for part in scratch)
    expected = np.zeros_like(codes)
    signal = noise = 0.0
    rounded, worst = np.empty((2, 2, 4 * groups), np.float32)
    for which in (EVEN, ODD):
        bf16_plane(pairs, which, w)
        np.subtract(w, adding, out=step)  # the bias is a BF16 number of the source: rounding left it as it was
        step /= quantizing
        np.minimum(step, last, out=step)
        np.rint(step, out=code)  # -0 at the least: no ordinary group has an element on the other side of its bias
        expected |= code.astype(codes.dtype) << (which * bits)
        step -= code
        np.abs(step, out=step)
        np.maximum.reduce(step, axis=0, out=rounded[which])
        decoded = code
        decoded *= scaling
        decoded += adding
        if exact is not None:
            signal += _energy(exact[which])
            noise += _energy(np.subtract(decoded, exact[which], out=step))
        off = decoded
        off -= w
        if exact is None:
            signal += _energy(w)
            noise += _energy(off)
        np.abs(off, out=off)
        np.maximum.reduce(off, axis=0, out=worst[which])
    if not np.array_equal(expected, codes):
        return None
    return Tile(signal, noise, largest(worst, 4), largest(rounded, 4), scale, odd)


def _extremes(pairs: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum and minimum of each group, float32 [groups] both, and which groups are odd: those have 0 twice.

    Of BF16 bits the largest int16 is the maximum if there is a number without a sign, and the largest uint16 the
    minimum if there is one with a sign. A NaN or an infinity is larger than any other of its sign.
    """
    high, low = largest(pairs.view(np.int16), 8), largest(pairs.view(np.uint16), 8)
    odd = (high >= HUGE) | (low >= NEGATIVE | HUGE)
    one_sided = np.flatnonzero((high < 0) | (low < NEGATIVE))
    if len(one_sided):  # then the smallest uint16 is the end next to zero
        least = pairs.reshape(len(pairs), groups, 4)[:, one_sided].view(np.uint16).min(axis=(0, 2))
        negative = high[one_sided] < 0
        high[one_sided[negative]] = least[negative].view(np.int16)
        low[one_sided[~negative]] = least[~negative]
    high[odd] = low[odd] = 0
    wmax, wmin = (np.left_shift(x.view(np.uint16), 16, dtype=np.uint32).view(np.float32) for x in (high, low))
    return wmax, wmin, odd


def _scale_and_bias(wmax: np.ndarray, wmin: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Of ordinary groups, as in the oracle: float32 [groups] all."""
    flip = np.abs(wmin) > np.abs(wmax)
    step = np.maximum((wmax - wmin) / np.float32(2**bits - 1), _SMALLEST_SCALE)
    step = np.copysign(step, flip - np.float32(0.5))
    edge = np.where(flip, wmin, wmax)
    edge_code = np.rint(edge / step)
    has_edge = edge_code != 0
    if has_edge.all():
        return edge / edge_code, edge
    return np.divide(edge, edge_code, out=step, where=has_edge), np.where(has_edge, edge, np.float32(0))


def _energy(x: np.ndarray) -> float:
    """The sum of squares of a plane: of some thousands in float32, of all in float64."""
    parts = x.reshape(4 * len(x), -1)  # short enough for one thread: there are processes enough
    return float(np.vecdot(parts, parts).sum(dtype=np.float64))
