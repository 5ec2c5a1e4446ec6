"""What rows of a source have to become, from `quantize/oracle.py`, and how far what was stored is off."""

from dataclasses import dataclass

import numpy as np

from ..quantize import oracle
from ..quantize.precision import NVFP4, Quantized
from .layout import Comparison
from .rounding import allowed_error, round_to, widen

RAW = {"U8": "<u1", "F8_E4M3": "<u1", "BF16": "<u2", "F16": "<u2", "U32": "<u4", "F32": "<u4"}
SPAN = 448 * 6  # global_scale / weight_scale_2: the largest block scale times the largest code


@dataclass(frozen=True)
class Expected:
    """What some rows of a source give.

    Args:
        stored: the build's tensors in the plan's order, raw [n, ...]; `.global_scale` as that of each row, [n].
        exact: the weights, float32 [n, K]; None where the build holds the bits of its source.
        rounded: the weights that are quantized, float32 [n, K]: those of NVFP4 have been through BF16.
    """

    stored: list[np.ndarray]
    exact: np.ndarray | None = None
    rounded: np.ndarray | None = None


@dataclass(frozen=True)
class Error:
    """How far decoded weights are off; a weight that is not finite is left out.

    Args:
        signal, noise: sums of squares, of the weights and of their errors.
        steps: the worst error in steps of the stored scale; None where nothing is affine.
        share: the worst share of what `allowed_error` allows that a code inside its range uses.
        shares: where that is over 1, the worst of each group: float32 [n, K / group_size].
    """

    signal: float
    noise: float
    steps: float | None = None
    share: float | None = None
    shares: np.ndarray | None = None


def expected(m: Comparison, source: list[np.ndarray]) -> Expected:
    """What rows of the source have to be in the build.

    Args:
        source: raw rows of its tensors, in the order of `m.sources`; `_weight_scale_2` as that of each row.
    """
    if m.source_dtype == "NVFP4":
        codes, block_scales, scale_2 = source[0], source[1], source[2].view("<f4")
        if m.precision == NVFP4:
            global_scale = (scale_2.astype(np.float64) * SPAN).astype("<f4")  # exact, then rounded once
            return Expected([codes.view("<u4"), global_scale.view("<u4"), block_scales])
        exact, dtype = oracle.nvfp4_dequantize(codes, block_scales, scale_2[:, None]), "BF16"
        raw = oracle.f32_to_bf16(exact)
        rounded = widen(raw, dtype)
    else:
        (raw,), dtype = source, m.source_dtype
        if is_float(m) and m.stored[0].dtype == dtype:
            return Expected([raw])
        exact = rounded = widen(raw, dtype)
    if is_float(m):
        return Expected([round_to(rounded, m.stored[0].dtype)], exact, rounded)
    made = oracle.affine_quantize(_numbers(raw, dtype), m.precision.bits, m.precision.group_size, dtype)
    return Expected([made[0], *(a.view(RAW[dtype]) for a in made[1:])], exact, rounded)


def weights(m: Comparison, stored: list[np.ndarray]) -> np.ndarray:
    """The weights that raw rows of a build stand for: float32 [n, K]."""
    if is_float(m):
        return widen(stored[0], m.stored[0].dtype)
    if m.precision == NVFP4:
        codes, global_scale, block_scales = stored
        return oracle.nvfp4_dequantize(codes.view("<u1"), block_scales, global_scale.view("<f4")[:, None] / SPAN)
    dtype = m.stored[1].dtype
    scales, biases = (_numbers(raw, dtype) for raw in stored[1:])
    return oracle.affine_dequantize(stored[0], scales, biases, m.precision.bits, m.precision.group_size, dtype)


def differing(m: Comparison, rows: Expected, found: list[np.ndarray]) -> list[np.ndarray] | None:
    """Where each tensor of a build differs: bool [n, groups], or [n] for one number an expert; None if none does.

    Bit for bit, but for a NaN in F16 and F32 that is computed: its payload is not defined.
    """
    if all(np.array_equal(want, got) for want, got in zip(rows.stored, found, strict=True)):
        return None
    masks = []
    for part, want, got in zip(m.stored, rows.stored, found, strict=True):
        mask = want != got
        if rows.exact is not None and part.dtype in ("F16", "F32"):
            mask &= ~(np.isnan(widen(want, part.dtype)) & np.isnan(widen(got, part.dtype)))
        if part.dtype == "U32":
            mask = mask.reshape(len(mask), -1, m.precision.group_size * m.precision.bits // 32).any(axis=-1)
        masks.append(mask)
    return masks


def decoded_error(m: Comparison, rows: Expected, found: list[np.ndarray]) -> Error:
    """How far the weights of rows that were rounded are off."""
    with np.errstate(all="ignore"):
        if is_float(m):
            return Error(*_energies(rows.exact, weights(m, found) - rows.exact))
        bits, dtype, groups = m.precision.bits, m.stored[1].dtype, (-1, m.precision.group_size)
        codes = oracle.affine_codes(found[0], bits, m.width).reshape(groups)
        scales, biases = (widen(raw, dtype).reshape(-1, 1) for raw in found[1:])
        exact, rounded = rows.exact.reshape(groups), rows.rounded.reshape(groups)
        numbers = codes.astype(np.float32)
        off = numbers * scales
        off += biases
        noise = None if rows.exact is rows.rounded else off - exact
        off -= rounded
        energies = _energies(exact, off if noise is None else noise)

        steps_in_unit, fixed, per_code = allowed_error(scales, biases, bits, dtype)
        np.abs(off, out=off)
        off *= steps_in_unit
        if not np.isfinite(off.max()):
            off[~np.isfinite(off)] = 0
        steps = float(off.max())
        numbers *= per_code
        numbers += fixed
        np.copyto(numbers, np.inf, where=codes - np.uint8(1) >= 2**bits - 2)  # both end stops: 0 - 1 is 255
        off /= numbers
        share = float(off.max())
        return Error(*energies, steps, share, off.max(axis=1).reshape(len(found[0]), -1) if share > 1 else None)


def _energies(exact: np.ndarray, off: np.ndarray) -> tuple[float, float]:
    """Sums of the squares of weights [n, k] and of their errors, of rows in float32, of all in float64."""
    signal, noise = (np.einsum("ij,ij->i", x, x).sum(dtype=np.float64) for x in (exact, off))
    if not np.isfinite(signal + noise):
        usable = np.isfinite(off)
        signal, noise = (np.square(x[usable], dtype=np.float64).sum() for x in (exact, off))
    return float(signal), float(noise)


def _numbers(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw bits in the form that the oracle takes: BF16 as bits, F16 and F32 as floats."""
    return raw if dtype == "BF16" else raw.view(f"<f{raw.itemsize}")


def is_float(m: Comparison) -> bool:
    return not isinstance(m.precision, Quantized)


def group_size(m: Comparison) -> int:
    """Weights of a group; 1 where a tensor has none."""
    return 1 if is_float(m) else m.precision.group_size
