"""Arrays in, codes, scales and biases out.

Tensors travel as raw numpy arrays: BF16, which numpy lacks, as the uint16 of its bits.
"""

import numpy as np

from . import affine
from .precision import Quantized, stored_tensors

RAW_DTYPES = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "U32": np.dtype("<u4")}


def affine_quantize(
    rows: np.ndarray, dtype: str, precision: Quantized, into: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Quantizes rows exactly as `mx.quantize` does on its CPU device.

    Groups don't reach across rows, so any chunking of a tensor into rows gives the bits of the whole.

    Args:
        rows: raw [N, K] of `dtype`, C-contiguous.
        dtype: "BF16", "F16" or "F32".
        precision: its group size divides K.
        into: arrays as they are returned, to write to; new ones if None.
    Returns:
        `.weight` uint32 [N, K * bits / 32]; `.scales`, `.biases` raw `dtype` [N, K / group_size].
    """
    if into is None:
        parts = stored_tensors(rows.shape, dtype, precision).items()
        into = {suffix: np.empty(shape, RAW_DTYPES[stored]) for suffix, (stored, shape) in parts}
    if not why_not_compiled(dtype, precision):
        affine.quantize_into(rows, precision.bits, precision.group_size, *into.values())
    else:
        for part, made in zip(into.values(), _mlx_quantize(rows, dtype, precision), strict=True):
            np.copyto(part, made)
    return into


def why_not_compiled(dtype: str, precision: Quantized) -> str:
    """Why `affine_quantize` leaves this to `mx.quantize`, 20 times slower and the same bits; "" if it does not."""
    if dtype != "BF16" or precision.bits not in affine.BITS or precision.group_size not in affine.GROUP_SIZES:
        return f"there is no kernel for {dtype} to {precision.bits} bits in groups of {precision.group_size}"
    return affine.available(precision.bits, precision.group_size).reason


def _mlx_quantize(rows, dtype, precision):
    """The CPU device is asked for by name: a GPU's kernel does not promise the same rounding."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        w = mx.array(rows)
        if dtype == "BF16":
            w = w.view(mx.bfloat16)
        packed, scales, biases = mx.quantize(
            w, group_size=precision.group_size, bits=precision.bits, mode=precision.mode
        )
        if dtype == "BF16":
            scales, biases = scales.view(mx.uint16), biases.view(mx.uint16)
        mx.eval(packed, scales, biases)
        return np.array(packed), np.array(scales), np.array(biases)


def bf16_to_f32(raw: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) to float32, exactly: they are its upper half."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to BF16 bits (uint16), to the nearest, ties to even; NaN becomes 0x7FC0."""
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}  # bits; what is larger, less the sign, is NaN


def first_nonfinite(raw: np.ndarray, dtype: str) -> int | None:
    """The place in an array, read as flat, of its first NaN or infinite value; None if all are finite.

    Args:
        raw: of `dtype`, "BF16", "F16" or "F32", C-contiguous.
    """
    size = 8 * raw.itemsize
    bits = raw.reshape(-1).view(f"<u{raw.itemsize}")
    sign, infinity = 1 << size - 1, INFINITY[dtype]
    # Positive ones are the largest of signed integers, negative ones the largest of unsigned: two passes, no arrays.
    if not bits.size or (bits.view(f"<i{raw.itemsize}").max() < infinity and bits.max() < sign | infinity):
        return None
    return int(np.argmax((bits & (sign - 1)) >= infinity))


def cast(raw: np.ndarray, source: str, target: str) -> tuple[np.ndarray, np.ndarray]:
    """Casts between float dtypes, to the nearest, ties to even (IEEE 754).

    Args:
        raw: array of `source`, any shape.
    Returns:
        The raw array of `target`, and the change of each value as float32 (0 where exact,
        infinite where a finite value overflowed, 0 for NaN).
    """
    x = bf16_to_f32(raw) if source == "BF16" else raw.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "BF16":
            out = f32_to_bf16(x)
            back = bf16_to_f32(out)
        else:
            out = x.astype(RAW_DTYPES[target])
            back = out.astype(np.float32)
        change = np.where((back == x) | np.isnan(x), np.float32(0), np.abs(back - x))
    return out, change
