"""What rounding may cost, by computations of verify's own: exact casts, and the bound on a decoded error."""

import numpy as np

from ..quantize.oracle import bf16_to_f32

_SIGNIFICAND = {"BF16": 8, "F16": 11, "F32": 24}  # bits
_SMALLEST_NORMAL = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126}
_INFINITY = 0x7F800000  # of the bits of a float32
_F16_NORMAL = 0x38800000  # 2^-14
_F16_REBIAS = (127 - 15) << 23
_ARITHMETIC = np.float32(2**-22)  # of a value: what float32 adds by itself, twice over


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bits (uint16 for "BF16" and "F16", uint32 for "F32") as float32, exact."""
    if dtype == "BF16":
        return bf16_to_f32(raw)
    return raw.view(np.float16).astype(np.float32) if dtype == "F16" else raw.view(np.float32)


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of any shape to the bits of "BF16", "F16" or "F32", nearest, ties to even, past the largest to infinity.

    On the bits: those that go are rounded by adding just under half of the last that stays, and the rest of it if that
    one is odd; a carry goes into the exponent, as it should. A NaN stays one; its payload is not defined.
    """
    bits = np.ascontiguousarray(x).view(np.uint32)
    if dtype == "F32":
        return bits
    sign, magnitude = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    if dtype == "BF16":
        near, largest, nan = _without(magnitude, 16), 0x7F80, 0x7FC0
    else:
        near, largest, nan = _without(magnitude - _F16_REBIAS, 13), 0x7C00, 0x7E00
        small = magnitude < _F16_NORMAL
        if small.any():  # there F16 counts in 2^-24, as float32 does from a half on: adding a half rounds
            half = np.float32(0.5)
            near[small] = (magnitude[small].view(np.float32) + half).view(np.uint32) - half.view(np.uint32)
    if near.size and near.max() > largest:
        near[near > largest] = largest
    if magnitude.size and magnitude.max() > _INFINITY:
        near[magnitude > _INFINITY] = nan
    near |= sign
    return near.astype(np.uint16)


def _without(bits: np.ndarray, count: int) -> np.ndarray:
    """The bits less the `count` lowest, rounded to even; uint32 both."""
    odd = bits >> count & 1
    odd += 2 ** (count - 1) - 1
    odd += bits
    odd >>= count
    return odd


def half_ulp(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32, finite: the most that rounding to `dtype` moves a value that becomes x."""
    power = (x.view(np.uint32) & 0x7F800000).view(np.float32)  # of two, at or below x; 0 below the normal ones
    return np.maximum(power, np.float32(_SMALLEST_NORMAL[dtype])) * np.float32(2.0 ** -_SIGNIFICAND[dtype])


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
        if not usable.all():
            size, bias = np.where(usable, size, np.float32(1)), np.where(usable, bias, np.float32(0))
        per_code = half_ulp(size, dtype) / size
        fixed = 0.5 + per_code / 2 + (half_ulp(bias, dtype) + _ARITHMETIC * bias) / size + _ARITHMETIC * 2**bits
        steps_in_unit = 1 / size
        steps_in_unit[~usable] = 0
        return steps_in_unit, fixed, per_code
