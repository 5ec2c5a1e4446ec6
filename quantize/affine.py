"""Affine quantization of BF16, bit for bit what `mx.quantize` gives on the CPU, and more than 20 times as fast.

numba compiles the loops, once on each machine, and keeps them on disk. Where that can't be had, `available` says why,
and `mx.quantize` on the CPU gives the same bytes.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Availability:
    """True if the kernels work here; otherwise `reason` says why they don't and what helps."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@cache
def available(bits: int = 4, group_size: int = 64) -> Availability:
    """Whether `quantize_into` works here for these bits and this group size: found out once, by running it.

    The first time on a machine this compiles, in seconds. Its result is compared with that of the scalar loop, which
    follows the formula to the letter.
    """
    try:
        if _is_right(bits, group_size):
            return Availability()
        return Availability(f"the kernel for {bits} bits and groups of {group_size}, compiled here, gives wrong bits")
    except ImportError as error:
        return Availability(f"numba can't be imported ({error}); install it, on a Python that it supports")
    except Exception as error:  # whatever it is, there is another way to do the work
        hint = "; set NUMBA_CACHE_DIR to a folder that can be written" if "cannot cache" in str(error) else ""
        return Availability(f"numba can't compile the kernel here: {error}{hint}")


def quantize_into(
    rows: np.ndarray, bits: int, group_size: int, packed: np.ndarray, scales: np.ndarray, biases: np.ndarray
) -> None:
    """Quantizes rows into arrays of the caller. Runs without the GIL.

    Args:
        rows: BF16 as uint16 [N, K]; NaN, infinity and subnormal values included.
        bits: 4 or 8.
        group_size: 32, 64 or 128; it divides K.
        packed: uint32 [N, K * bits / 32]. Element i of a row has the bits from bits * i on, low bits first.
        scales, biases: BF16 as uint16 [N, K / group_size]; a NaN is 0x7FC0.
        All C-contiguous.
    Raises:
        ValueError: other bits, group size, dtype, shape or layout.
        ImportError, RuntimeError, OSError: no numba, or no folder for its cache; ask `available` first.

    For each group, in float32, as `quantize` in mlx/backend/cpu/quantized.cpp (mlx 0.32.4) has it; top is 2^bits - 1:

        low, high = minimum and maximum, passing over NaN
        scale     = max((high - low) / top, 1e-7), negative unless |low| > |high|
        edge      = the one of low and high with the larger magnitude; high if equal
        bias      = 0
        if rint(edge / scale) is not 0: scale, bias = edge / rint(edge / scale), edge
        code      = rint((w - bias) / scale), at least 0 and at most top; 0 for NaN

    rint rounds halves to even; scale and bias are rounded to BF16, nearest even, only when they are stored.
    """
    check_outputs(rows.shape, bits, group_size, packed, scales, biases)
    check("rows", rows, np.uint16, rows.shape)
    _quantize(flat(rows), bits, group_size, packed.reshape(-1), scales.reshape(-1), biases.reshape(-1))


def _quantize(rows, bits, group_size, packed, scales, biases):
    from . import compiled

    run = compiled.quantizer(bits, group_size)
    group = 0
    while group < scales.size:
        group = run(rows, group, packed, scales, biases)
        if group < scales.size:  # something for the scalar loop
            end = min(group + compiled.TILE, scales.size)
            compiled.exact(rows, group, end, bits, group_size, packed, scales, biases)
            group = end


def _is_right(bits, group_size):
    """Compares 20 groups of numbers of both signs, from 2^-7 to 2^0, with the scalar loop."""
    from . import compiled

    n_groups = compiled.TILE + 4
    scrambled = np.arange(n_groups * group_size, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(16)
    rows = flat((scrambled & 0x83FF | 0x3C00).astype(np.uint16))
    fast, right = (
        (np.zeros(rows.size * bits // 32, np.uint32), np.zeros(n_groups, np.uint16), np.zeros(n_groups, np.uint16))
        for _ in range(2)
    )
    _quantize(rows, bits, group_size, *fast)
    compiled.exact(rows, 0, n_groups, bits, group_size, *right)
    return all(np.array_equal(a, b) for a, b in zip(fast, right, strict=True))


def check_outputs(shape, bits, group_size, packed, scales, biases):
    """Raises ValueError unless values of this shape can be quantized like this, into these arrays."""
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, not {bits!r}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GROUP_SIZES}, not {group_size!r}")
    if len(shape) != 2 or shape[1] % group_size:
        raise ValueError(f"values of shape {tuple(shape)}: need [N, K], where K is a multiple of {group_size}")
    n, k = shape
    check("packed", packed, np.uint32, (n, k * bits // 32), to_write=True)
    check("scales", scales, np.uint16, (n, k // group_size), to_write=True)
    check("biases", biases, np.uint16, (n, k // group_size), to_write=True)


def check(name, array, dtype, shape, to_write=False):
    """Raises ValueError unless the array is C-contiguous, of this dtype and shape, and writable if it has to be."""
    if array.dtype != dtype or array.shape != tuple(shape):
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not {np.dtype(dtype)} {tuple(shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not C-contiguous")
    if to_write and not array.flags.writeable:
        raise ValueError(f"{name} can't be written to")


def flat(array):
    """A flat view, read-only even if the array isn't: numba compiles for each kind apart."""
    view = array.reshape(-1)
    view.flags.writeable = False
    return view
