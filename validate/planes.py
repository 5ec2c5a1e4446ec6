"""Groups as numpy goes through them fastest: side by side, even and odd elements apart.

A group of `size` elements is cut into size / 8 chunks of 8. Chunk j of every group of a tile comes into row j, so that
what a group shares (extremes, scale, bias) lies along rows of contiguous memory, and each chunk is one 16-byte move.
A BF16 chunk is four uint32, each an even and an odd element: `u << 16` is the even one as a float, `u & 0xffff0000`
the odd one. Codes of 4 and 8 bits come in pairs of an even and an odd one just so. Hence

    pairs   [size / 8, 4 * groups]   uint32, the four pairs of a chunk next to each other
    plane   [size / 8, 4 * groups]   float32, the even or the odd elements
    lanes   [4 * groups]             what a group shares, once for each of its four columns
"""

import numpy as np

from ..quantize.oracle import bf16_to_f32, e4m3_to_f32

EVEN, ODD = 0, 1
_CODE_CHUNKS = {4: (np.uint32, np.uint8), 8: (np.uint64, np.uint16)}  # bits -> eight codes, two of them
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
_TWICE_BOTH = (_TWICE_E2M1[:, None] << 8 | _TWICE_E2M1 & 0xFF).reshape(-1)  # of a byte: the even one in the low half


def transposed(chunks: np.ndarray) -> np.ndarray:
    """[groups, n] of any dtype -> [n, groups], contiguous."""
    out = np.empty(chunks.shape[::-1], chunks.dtype)
    np.copyto(out, chunks.T)
    return out


def bf16_pairs(raw: np.ndarray, out: np.ndarray) -> np.ndarray:
    """BF16 bits, uint16 [groups, size] -> pairs, in the front of `out`, uint32 [>= groups * size / 2]."""
    groups, size = raw.shape
    pairs = out[: raw.size // 2].reshape(size // 8, 4 * groups)
    np.copyto(pairs.view(np.complex128), raw.view(np.complex128).T)
    return pairs


def code_pairs(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 4 or 8 bits, packed [groups, ...] -> pairs, uint8 or uint16 [size / 8, 4 * groups]."""
    eight, two = _CODE_CHUNKS[bits]
    return transposed(words.view(eight)).view(two)


def bf16_plane(pairs: np.ndarray, which: int, out: np.ndarray) -> None:
    """The even or the odd elements of pairs, exact, into a plane."""
    if which == EVEN:
        np.left_shift(pairs, 16, out=out.view(np.uint32))
    else:
        np.bitwise_and(pairs, 0xFFFF0000, out=out.view(np.uint32))


def nvfp4_planes(codes: np.ndarray, block_scales: np.ndarray, scale_2: np.ndarray, out: np.ndarray) -> np.ndarray:
    """What `oracle.nvfp4_dequantize` gives for groups, but that no zero is negative, as both planes.

    Args:
        codes, block_scales: uint8 [groups, size / 2] and, of finite E4M3, [groups, size / 16].
        scale_2: float32 [groups].
        out: float32 [>= groups * size].
    Returns:
        float32 [2, size / 8, 4 * groups], in the front of `out`.
    """
    groups, size = len(codes), codes.shape[1] * 2
    planes = out[: groups * size].reshape(2, size // 8, 4 * groups)
    pairs, expert = code_pairs(codes, 4), in_lanes(scale_2)
    halves = in_lanes(transposed(e4m3_to_f32(block_scales) * np.float32(0.5)).reshape(-1)).reshape(-1, 1, 4 * groups)
    twice = _TWICE_BOTH.take(pairs)
    for plane, numbers in zip(planes, (twice << 8 >> 8, twice >> 8), strict=True):
        np.copyto(plane, numbers)
        blocks = plane.reshape(len(halves), 2, -1)
        blocks *= halves
        plane *= expert
    return planes


def rounded_pairs(planes: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Both planes, without NaN, to BF16, nearest even: pairs, in the front of `out`."""
    pairs = out[: planes.size // 2].reshape(planes.shape[1:])
    for which, plane in enumerate(planes):
        near = round_bits(plane)
        if which == EVEN:
            np.right_shift(near, 16, out=pairs)
        else:
            near &= 0xFFFF0000
            pairs |= near
    return pairs


def round_bits(x: np.ndarray) -> np.ndarray:
    """float32 but NaN -> uint32, of which the upper half is the nearest BF16, ties to even."""
    bits = x.view(np.uint32)
    near = bits >> 16
    near &= 1
    near += 0x7FFF
    near += bits
    return near


def in_lanes(x: np.ndarray) -> np.ndarray:
    """One number a group, [groups] -> lanes [4 * groups]."""
    return np.repeat(x, 4)


def bf16_in_lanes(raw: np.ndarray) -> np.ndarray:
    """One BF16 number a group, uint16 [groups] -> float32 lanes [4 * groups]."""
    return bf16_to_f32((raw * np.uint64(0x0001_0001_0001_0001)).view(np.uint16))


def largest(columns: np.ndarray, per_group: int) -> np.ndarray:
    """The largest of each group, [rows, per_group * groups] -> [groups], where no number is NaN."""
    best = np.maximum.reduce(columns, axis=0)
    return np.maximum.reduce(transposed(best.reshape(-1, per_group)), axis=0)
