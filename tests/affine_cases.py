"""Bits and group sizes that the affine kernels have, and arrays for them to write to."""

import numpy as np
from motif_convert.quantize import affine

CONFIGS = [(bits, size) for bits in affine.BITS for size in affine.GROUP_SIZES]


def outputs(n, k, bits, size):
    """Arrays to write to, full of what no kernel leaves there."""
    parts = (np.uint32, k * bits // 32), (np.uint16, k // size), (np.uint16, k // size)
    return tuple(np.full((n, width), 0xA5A5, dtype) for dtype, width in parts)
