"""NVFP4 weights to BF16: E2M1 codes, an E4M3 scale for each block of 16 along K, a float32 scale for the matrix.

That is the layout of NVIDIA ModelOpt checkpoints. A weight is one of 4096 (256 block scales, 16 codes), so that a
table of them, made once for each matrix, is all the arithmetic; `compiled.py` looks it up fast, numpy otherwise.
"""

from functools import cache, lru_cache

import numpy as np

from .affine import available, check, flat
from .kernels import f32_to_bf16

BLOCK = 16  # codes that share a scale


def decode(codes: np.ndarray, block_scales: np.ndarray, scale: float, out: np.ndarray | None = None) -> np.ndarray:
    """The weights, rounded to BF16. Runs without the GIL where numba can be had.

    w = (E2M1(code) * E4M3(block scale)) * scale: the first product is exact in float32, the second is rounded once to
    float32; then w is rounded to BF16. Both to the nearest, ties to even; NaN becomes 0x7FC0.

    Args:
        codes: uint8 [N, K / 2], even k in the low nibble; a code is sign << 3 | index of 0, .5, 1, 1.5, 2, 3, 4, 6.
        block_scales: uint8 [N, K / 16], E4M3 bits (OCP Microscaling Formats 1.0: no infinities, 0x7F and 0xFF NaN).
        scale: float32, one number.
        out: uint16 [N, K] to write to; a new array if None.
        All C-contiguous.
    Returns:
        uint16 [N, K], BF16 bits.
    Raises:
        ValueError: another dtype, shape or layout.
    """
    check("block_scales", block_scales, np.uint8, block_scales.shape)
    if block_scales.ndim != 2:
        raise ValueError(f"block_scales has shape {block_scales.shape}, not [N, K / {BLOCK}]")
    n, blocks = block_scales.shape
    check("codes", codes, np.uint8, (n, blocks * BLOCK // 2))
    if out is None:
        out = np.empty((n, blocks * BLOCK), np.uint16)
    check("out", out, np.uint16, (n, blocks * BLOCK), to_write=True)
    look_up = _compiled if is_compiled() else _in_numpy
    look_up(codes, block_scales, _table(_bits(scale)), out)
    return out


@cache
def is_compiled() -> bool:
    """Whether the compiled look-up works here: found out once, on every byte of codes under every block scale."""
    if not available():
        return False
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    block_scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    results = np.zeros((2, 256, 512), np.uint16)
    for look_up, out in zip((_compiled, _in_numpy), results, strict=True):
        look_up(codes, block_scales, _table(_bits(1)), out)
    return np.array_equal(*results)


def _compiled(codes, block_scales, table, out):
    from . import compiled

    compiled.decode(flat(codes), flat(block_scales), flat(table), out.reshape(-1))


def _in_numpy(codes, block_scales, table, out):
    n, blocks = block_scales.shape
    pairs = codes.reshape(n, blocks, BLOCK // 2)
    row = block_scales.astype(np.int32)[..., None] * BLOCK
    values = out.reshape(n, blocks, BLOCK)
    values[..., 0::2] = table[row | pairs & 15]
    values[..., 1::2] = table[row | pairs >> 4]


def _bits(scale):
    return int(np.float32(scale).view(np.uint32))


@lru_cache(maxsize=8)
def _table(scale_bits: int) -> np.ndarray:
    """Every weight that there can be, as BF16: uint16 [256 block scales * 16 codes]."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    with np.errstate(all="ignore"):
        weights = _E4M3[:, None] * np.concatenate([magnitudes, -magnitudes])
        weights *= np.uint32(scale_bits).view(np.float32)
    return f32_to_bf16(weights).reshape(-1)


def _e4m3() -> np.ndarray:
    """float32 [256]. Moved to the bits of a float32, an E4M3 number is 2^-120 of itself; subnormal numbers too."""
    code = np.arange(256, dtype=np.uint32)
    numbers = ((code & 0x80) << 24 | (code & 0x7F) << 20).view(np.float32) * np.float32(2**120)
    numbers[[0x7F, 0xFF]] = np.nan
    return numbers


_E4M3 = _e4m3()
