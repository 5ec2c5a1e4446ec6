"""The arithmetic of MLX affine quantization and of NVFP4, in plain numpy: what tests and `verify` trust.

Written for reading, against the text of each formula, and sharing no code with the kernels it judges. Arrays travel as
they lie in a safetensors file: BF16 as uint16 bits, F16 as float16, F32 as float32. Everything works on any number of
leading axes; the last one is the input dimension K. A caller passes a chunk of rows at a time: outputs and inputs are
held whole, the float32 temporaries of `affine_quantize` never exceed a few megabytes.

Where a group holds an infinity or nothing but NaN, its scale is NaN. In BF16 that is 0x7FC0 always, in MLX and here. In
F16 and F32 MLX leaves sign and payload to the processor (F16 on x86: 0x7D00 or 0xFD00), so compare those as "is NaN".
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("BF16", "F16", "F32")

_SMALLEST_SCALE = np.float32(1e-7)
_BLOCK = 1 << 17  # values at a time: temporaries stay in the cache, at two to three times the speed of memory


# --- numbers ---


def bf16_to_f32(raw: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16, any shape) as float32, exact: BF16 is the upper half of a float32."""
    return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 (any shape) to BF16 bits (uint16), nearest even; overflow gives infinity, every NaN gives 0x7FC0.

    Source: `_MLX_BFloat16(float)` in mlx/types/bf16.h.
    """
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = np.add(bits, 0x7FFF + ((bits >> 16) & 1)) >> 16  # just under half, and the rest of it if odd
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


class _Format(NamedTuple):
    raw: np.dtype
    widen: Callable[[np.ndarray], np.ndarray]  # raw -> float32, exact
    narrow: Callable[[np.ndarray], np.ndarray]  # float32 -> raw, nearest even


_FORMATS = {
    "BF16": _Format(np.dtype(np.uint16), bf16_to_f32, f32_to_bf16),
    "F16": _Format(np.dtype(np.float16), lambda raw: raw.astype(np.float32), lambda x: x.astype(np.float16)),
    "F32": _Format(np.dtype(np.float32), lambda raw: raw, lambda x: x),
}


# --- affine ---


def affine_quantize(w: np.ndarray, bits: int, group_size: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `mx.quantize(w, group_size, bits)` gives on the CPU, bit for bit.

    w: [..., K], uint16 bits for dtype "BF16", float16 for "F16", float32 for "F32"; K is a multiple of group_size.
    bits: 2, 3, 4, 5, 6 or 8. group_size: 32, 64 or 128.
    Returns packed uint32 [..., K * bits / 32], then scales and biases [..., K / group_size] in the dtype of w.
    Raises ValueError for any other argument. Source: `quantize` in mlx/backend/cpu/quantized.cpp, mlx 0.32.4.
    """
    form = _checked_format(bits, group_size, dtype, w)
    if w.ndim == 0 or w.shape[-1] % group_size:
        raise ValueError(f"w of shape {w.shape}: the last axis must be a multiple of the group size {group_size}")
    groups = w.reshape(-1, group_size)
    packed = np.empty((len(groups), group_size * bits // 8), np.uint8)
    scales = np.empty(len(groups), form.raw)
    biases = np.empty(len(groups), form.raw)
    for start in range(0, len(groups), _BLOCK // group_size):
        block = slice(start, start + _BLOCK // group_size)
        with np.errstate(all="ignore"):  # NaN, infinity and overflow are ordinary values of this arithmetic
            values = form.widen(groups[block])
            scale, bias = _scale_and_bias(values, bits)
            packed[block] = _pack(_round_to_codes(values, scale, bias, bits), bits)
            scales[block], biases[block] = form.narrow(scale), form.narrow(bias)
    lead, n_groups = w.shape[:-1], w.shape[-1] // group_size
    words = packed.view(np.uint32).reshape(*lead, n_groups * group_size * bits // 32)
    return words, scales.reshape(*lead, n_groups), biases.reshape(*lead, n_groups)


def affine_codes(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The codes of packed rows: uint32 [..., count * bits / 32] -> uint8 [..., count].

    Code i of a row lies in bits `bits * i` to `bits * i + bits - 1` of the row's bytes, low bits first; at 3, 5 and 6
    bits a code may straddle two words. Raises ValueError if the row length is not count * bits / 32.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, not {bits}")
    if packed.dtype != np.uint32 or packed.ndim == 0 or packed.shape[-1] * 32 != count * bits:
        raise ValueError(f"packed is {packed.dtype} {packed.shape}: {count} codes of {bits} bits need uint32 rows")
    return _unpack(np.ascontiguousarray(packed).view(np.uint8), bits).reshape(*packed.shape[:-1], count)


def affine_dequantize(
    packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group_size: int, dtype: str
) -> np.ndarray:
    """The weights that a quantized tensor stands for: scale * code + bias in float32, [..., K].

    packed: uint32 [..., K * bits / 32]; scales, biases: [..., K / group_size] as stored, in the raw form of dtype.
    Scale and bias are the stored, rounded ones. From BF16 and F16 the product is exact (below overflow) and the sum
    rounds once, so each value is the nearest float32 to the true one; from F32 both round. Raises ValueError as above.
    """
    form = _checked_format(bits, group_size, dtype, scales, biases)
    if scales.shape != biases.shape or scales.ndim == 0 or scales.shape[:-1] != packed.shape[:-1]:
        raise ValueError(f"shapes do not match: packed {packed.shape}, scales {scales.shape}, biases {biases.shape}")
    codes = affine_codes(packed, bits, scales.shape[-1] * group_size)
    values = codes.reshape(*scales.shape, group_size).astype(np.float32)
    with np.errstate(all="ignore"):
        values *= form.widen(scales)[..., None]
        values += form.widen(biases)[..., None]
    return values.reshape(codes.shape)


def _checked_format(bits: int, group_size: int, dtype: str, *raw: np.ndarray) -> _Format:
    """The format that dtype names, once bits, group_size and the element types of the arrays are found right."""
    choices = (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES), ("dtype", dtype, DTYPES))
    for name, value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, not {value!r}")
    form = _FORMATS[dtype]
    for array in raw:
        if array.dtype != form.raw:
            raise ValueError(f"dtype {dtype} means arrays of {form.raw}, not {array.dtype}")
    return form


def _scale_and_bias(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias of each group, not yet rounded to the source dtype: float32 [G, group_size] -> two float32 [G]."""
    columns = values.T.copy()  # numpy reduces over the first axis several times faster than the last
    missing = np.isnan(columns)  # passed over by hand: a signalling NaN makes fmax and fmin forget what they have seen
    np.copyto(columns, -np.inf, where=missing)
    wmax = columns.max(axis=0)
    np.copyto(columns, np.inf, where=missing)
    wmin = columns.min(axis=0)
    flip = np.abs(wmin) > np.abs(wmax)
    step = np.maximum((wmax - wmin) / np.float32(2**bits - 1), _SMALLEST_SCALE)  # maximum keeps NaN
    step = np.where(flip, step, -step)
    edge = np.where(flip, wmin, wmax)
    edge_code = np.rint(edge / step)
    has_edge = edge_code != 0  # true for NaN
    scale = np.where(has_edge, edge / edge_code, step)
    bias = np.where(has_edge, edge, np.float32(0))
    return scale, bias


def _round_to_codes(values: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int) -> np.ndarray:
    """clamp(rint((w - bias) / scale)), half to even, NaN to 0: float32 [G, group_size] -> uint8, same shape."""
    steps = values - bias[:, None]
    steps /= scale[:, None]
    np.rint(steps, out=steps)
    np.copyto(steps, 0, where=np.isnan(steps))
    np.clip(steps, 0, 2**bits - 1, out=steps)
    return steps.astype(np.uint8)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [G, n] -> bytes uint8 [G, n * bits / 8], low bits first; n is a multiple of 8.

    Eight codes, one a byte, are read as one uint64. Neighbours move together three times (bytes, then pairs, then
    fours) until the eight fill its low 8 * bits bits, which are the next `bits` bytes of the stream.
    """
    if bits == 8:
        return codes
    eights = codes.view(np.uint64)
    for lane in (8, 16, 32):
        filled, mask = _lanes(lane, bits)
        eights = (eights & mask) | (((eights >> np.uint64(lane)) & mask) << filled)
    return eights.view(np.uint8).reshape(len(codes), -1, 8)[:, :, :bits].reshape(len(codes), -1)


def _unpack(stream: np.ndarray, bits: int) -> np.ndarray:
    """The way back: bytes uint8 [..., n * bits / 8] -> codes uint8 [total / 8, 8], `_pack` step by step in reverse."""
    if bits == 8:
        return stream.copy()
    eights = np.zeros((stream.size // bits, 8), np.uint8)
    eights[:, :bits] = stream.reshape(-1, bits)
    eights = eights.view(np.uint64)
    for lane in (32, 16, 8):
        filled, mask = _lanes(lane, bits)
        eights = (eights & mask) | (((eights >> filled) & mask) << np.uint64(lane))
    return eights.view(np.uint8)


def _lanes(lane: int, bits: int) -> tuple[np.uint64, np.uint64]:
    """How many low bits of a lane of `lane` bits are filled, and a mask of those bits in every other lane."""
    filled = lane // 8 * bits
    mask = sum((2**filled - 1) << low for low in range(0, 64, 2 * lane))
    return np.uint64(filled), np.uint64(mask)


# --- NVFP4 ---


def _e4m3_table() -> np.ndarray:
    """float32 [256]: E4M3FN is sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    magnitude[(code & 127) == 127] = np.nan
    return np.copysign(magnitude, np.where(code & 128, -1, 1)).astype(np.float32)


def _e2m1_pairs() -> np.ndarray:
    """uint64 [256]: the two weights of a byte as adjacent float32, low nibble first, so that a byte is one look-up.

    A code is sign << 3 | index of the magnitude.
    """
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    weights = np.concatenate([magnitudes, -magnitudes])
    byte = np.arange(256)
    return np.stack([weights[byte & 15], weights[byte >> 4]], axis=1).view(np.uint64).ravel()


_E4M3 = _e4m3_table()
_E2M1_PAIRS = _e2m1_pairs()


def e4m3_to_f32(raw: np.ndarray) -> np.ndarray:
    """E4M3FN bits (uint8, any shape) as float32, exact."""
    return _E4M3[raw]


def nvfp4_dequantize(codes: np.ndarray, block_scales: np.ndarray, scale_2: np.ndarray | float) -> np.ndarray:
    """The weights of an NVFP4 tensor: (E2M1(code) * E4M3(block scale)) * scale_2 in float32, [..., K].

    codes: uint8 [..., K / 2], even k in the low nibble; block_scales: E4M3FN bits, uint8 [..., K / 16]; scale_2:
    float32, one number or an array that broadcasts to the result (one per expert: pass scale_2[:, None, None]).
    The first product is exact in float32, the second rounds once. Raises ValueError for other dtypes or shapes.
    Source: the layout of NVIDIA ModelOpt checkpoints, where scale_2 = amax / (448 * 6).
    """
    if codes.dtype != np.uint8 or block_scales.dtype != np.uint8:
        raise ValueError(f"codes and block scales must be uint8, not {codes.dtype} and {block_scales.dtype}")
    if block_scales.ndim == 0 or codes.shape != (*block_scales.shape[:-1], block_scales.shape[-1] * 8):
        raise ValueError(f"codes {codes.shape} and block scales {block_scales.shape}: one scale takes 8 bytes of codes")
    weights = _E2M1_PAIRS.take(codes).view(np.float32).reshape(*block_scales.shape, 16)
    with np.errstate(all="ignore"):
        weights *= e4m3_to_f32(block_scales)[..., None]
        weights = weights.reshape(*codes.shape[:-1], codes.shape[-1] * 2)
        weights *= np.asarray(scale_2, np.float32)
    return weights
