"""What rounding may cost, by computations of verify's own: exact casts, and the bound on a decoded error."""

from typing import NamedTuple

import numpy as np

from ..quantize.oracle import bf16_to_f32


class _Float(NamedTuple):
    """A binary float format: bits of its significand, its smallest normal exponent, its largest value."""

    significand: int
    min_exponent: int
    largest: float


_FLOATS = {
    "BF16": _Float(8, -126, (2 - 2.0**-7) * 2.0**127),
    "F16": _Float(11, -14, (2 - 2.0**-10) * 2.0**15),
    "F32": _Float(24, -126, (2 - 2.0**-23) * 2.0**127),
}
_ARITHMETIC = np.float32(2**-22)  # of a value: what float32 adds by itself, twice over


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bits (uint16 for "BF16" and "F16", uint32 for "F32") as float32, exact."""
    if dtype == "BF16":
        return bf16_to_f32(raw)
    return raw.view(np.float16).astype(np.float32) if dtype == "F16" else raw.view(np.float32)


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of any shape to the bits of "BF16", "F16" or "F32", nearest, ties to even, past the largest to infinity.

    Each value is divided by the distance of its neighbours in the target, a power of two, rounded to a whole number
    and multiplied again, in float64 where all of that is exact. A NaN stays one; its payload is not defined.
    """
    form = _FLOATS[dtype]
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        exponent = np.frexp(wide)[1] - 1
        ulp = np.ldexp(1.0, np.maximum(exponent, form.min_exponent) - (form.significand - 1))
        near = np.rint(wide / ulp) * ulp
        near = np.where(np.abs(near) > form.largest, np.copysign(np.inf, wide), near)
        if dtype == "F16":
            return near.astype(np.float16).view(np.uint16)
        bits = near.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits


def half_ulp(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32, finite: the most that rounding to `dtype` moves a value that becomes x."""
    form = _FLOATS[dtype]
    exponent = np.maximum(np.frexp(x)[1] - 1, form.min_exponent)
    return np.ldexp(np.float32(1), exponent - form.significand)


def allowed_error(scales: np.ndarray, biases: np.ndarray, bits: int, dtype: str) -> tuple[np.ndarray, ...]:
    """How far a decoded weight may be off, in steps of the stored scale: fixed + code * per_code.

    A code inside its range is the nearest one, so that the weight lies within half a step of what the scale and the
    bias gave before they were rounded to `dtype`. Decoding moves by code * half_ulp(scale) + half_ulp(bias) more:

        |w - decoded| <= scale / 2 + (code + 1/2) * half_ulp(scale) + half_ulp(bias)

    and by the float32 arithmetic, 2^-22 of the largest magnitude in it. A code at an end stop (0 or 2^bits - 1) may
    be further off, since mlx moves the scale so that zero is exact.

    Args:
        scales, biases: float32 [G], as stored.
    Returns:
        steps in a unit, fixed, per_code: float32 [G] each. A group whose scale is 0 or not finite, or whose bias is
        not, has 0 steps in a unit: there the bits alone decide.
    """
    with np.errstate(all="ignore"):
        size, bias = np.abs(scales), np.abs(biases)
        usable = np.isfinite(size) & (size > 0) & np.isfinite(bias)
        size, bias = np.where(usable, size, 1), np.where(usable, bias, 0)
        per_code = half_ulp(size, dtype) / size
        fixed = 0.5 + per_code / 2 + (half_ulp(bias, dtype) + _ARITHMETIC * bias) / size + _ARITHMETIC * 2**bits
        return np.where(usable, 1 / size, 0).astype(np.float32), fixed.astype(np.float32), per_code.astype(np.float32)
