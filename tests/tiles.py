"""What the tests of the fast check share."""

from pathlib import Path

import numpy as np
import pytest
from motif_convert.quantize.precision import Quantized
from motif_convert.validate import fast_check
from motif_convert.validate.layout import Comparison, Part

BITS, SIZES = (4, 8), (32, 64, 128)


every_layout = pytest.mark.parametrize(("bits", "size"), [(b, s) for b in BITS for s in SIZES])


def module(bits: int, size: int, width: int, source_dtype: str = "BF16") -> Comparison:
    stored = tuple(Part("", d, Path(), 0, 1) for d in ("U32", "BF16", "BF16"))
    return Comparison(
        family="",
        layer=None,
        precision=Quantized("affine", bits, size),
        source_dtype=source_dtype,
        stored=stored,
        sources=(),
        shape=(1, width),
        matrices=1,
        rows=1,
        width=width,
        source_rows=1,
        first_row=0,
        stacked=source_dtype == "NVFP4",
    )


def scratch_of(m: Comparison) -> np.ndarray:
    return np.full(fast_check.scratch_bytes(m) // 4, np.nan, np.float32)


def assert_same(quick, plain):
    assert (quick.steps, quick.share) == (plain.steps, plain.share)
    assert quick.signal == pytest.approx(plain.signal, rel=1e-5)
    assert quick.noise == pytest.approx(plain.noise, rel=1e-5)
