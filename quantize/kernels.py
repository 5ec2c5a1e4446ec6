"""Arrays in, codes, scales and biases out.

Tensors travel as raw numpy arrays: BF16, which numpy lacks, as the uint16 of its bits.
"""

from functools import lru_cache

import numpy as np

from .precision import Quantized

RAW_DTYPES = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


def affine_quantize(rows: np.ndarray, dtype: str, precision: Quantized) -> dict[str, np.ndarray]:
    """Quantizes rows exactly as `mx.quantize` does on its CPU device.

    The CPU device is asked for by name: a GPU's kernel does not promise the same rounding, and a
    recipe has to give the same bytes on every machine. Groups don't reach across rows, so any
    chunking of a tensor into rows gives the bits of the whole.

    Args:
        rows: raw [N, K] of `dtype`, C-contiguous.
        dtype: "BF16", "F16" or "F32".
        precision: its group size divides K.
    Returns:
        `.weight` uint32 [N, K * bits / 32]; `.scales`, `.biases` raw `dtype` [N, K / group_size].
    """
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
        return {".weight": np.array(packed), ".scales": np.array(scales), ".biases": np.array(biases)}


def bf16_to_f32(raw: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) to float32, exactly: they are its upper half."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to BF16 bits (uint16), to the nearest, ties to even; NaN becomes 0x7FC0."""
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def e2m1_e4m3_tables() -> tuple[np.ndarray, np.ndarray]:
    """Values of all E2M1 bytes (two codes, the low nibble first), float32 [256, 2], and of all E4M3 bytes,
    float32 [256] (OCP Microscaling Formats 1.0; E4M3 without infinities, 0x7F and 0xFF are NaN)."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.concatenate([magnitudes, -magnitudes])
    byte = np.arange(256)
    pairs = np.stack([codes[byte & 15], codes[byte >> 4]], axis=-1)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(byte & 0x7F == 0x7F, np.nan, np.where(byte & 0x80, -value, value))
    return pairs, value.astype(np.float32)


E2M1_PAIRS, E4M3 = e2m1_e4m3_tables()


@lru_cache(maxsize=2)
def _pair_table(scale: float) -> np.ndarray:
    """BF16 pairs (uint32, the low half first) of every E4M3 scale and code byte: [256 * 256]."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = (E4M3[:, None, None] * E2M1_PAIRS) * np.float32(scale)
    return f32_to_bf16(values).view("<u4").reshape(-1)


def nvfp4_decode(codes: np.ndarray, block_scales: np.ndarray, scale: np.float32) -> np.ndarray:
    """NVFP4 rows to BF16: `(E2M1 * E4M3) * scale`, the first product exact, the second rounded to float32,
    the result rounded to BF16, both to the nearest, ties to even.

    Args:
        codes: uint8 [N, K / 2], even k in the low nibble.
        block_scales: uint8 [N, K / 16], E4M3 bits.
        scale: the matrix's own.
    Returns:
        uint16 [N, K], BF16 bits.
    """
    rows, blocks = block_scales.shape
    index = (block_scales.astype(np.int32) << 8)[..., None] | codes.reshape(rows, blocks, 8)
    return _pair_table(float(scale)).take(index).view("<u2").reshape(rows, blocks * 16)


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
