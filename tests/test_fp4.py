"""The NVFP4 decode against exact products in float64 and the reference checkpoint, compiled and in numpy."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, read_safetensors
from motif_convert.quantize import affine, compiled, fp4

SCALES = [
    *(1.0, 3.3e-5, 0.001953125, -0.7),  # ordinary ones
    1 + 2**-8,  # with many weights exactly between two BF16 numbers
    *(2.0**90 / 448, 2.0**115, 3e38, 1e-38, 1e-45, 0.0, -0.0),  # out to where products overflow and underflow
    *(np.inf, -np.inf, np.nan),
]


# --- the other route: no table of ours, no float32 product, mlx's rounding to BF16 ---


def e4m3(raw):
    """float64; by the definition of E4M3FN: sign, 4 exponent bits with bias 7, 3 mantissa bits; NaN is 0x7F or 0xFF."""
    exponent, mantissa = (raw >> 3 & 15).astype(int), (raw & 7).astype(float)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(raw & 0x7F == 0x7F, np.nan, np.copysign(magnitude, np.where(raw & 0x80, -1.0, 1.0)))


def e2m1(code):
    """float64; by the definition of E2M1: sign, 2 exponent bits with bias 1, 1 mantissa bit."""
    exponent, mantissa = (code >> 1 & 3).astype(int), (code & 1).astype(float)
    magnitude = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return np.copysign(magnitude, np.where(code & 8, -1.0, 1.0))


def expected_f32(codes, block_scales, scale):
    """A product of 2, 4 and 24 significant bits is exact in float64: rounded once, to float32."""
    each = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    with np.errstate(all="ignore"):
        product = e2m1(each) * np.repeat(e4m3(block_scales), 16, axis=1) * np.float64(np.float32(scale))
        return product.astype(np.float32)


def to_bf16(x):
    raw = np.array(mx.array(x).astype(mx.bfloat16, stream=mx.cpu).view(mx.uint16))
    return np.where(np.isnan(x), np.uint16(0x7FC0), raw)


def random_tensor(rng, n, k):
    """Codes of all kinds, block scales as they are in checkpoints: positive, of similar size."""
    return rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(0x50, 0x7F, (n, k // 16), np.uint8)


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def route(request, monkeypatch):
    """Every test runs on both; without numba there is but the second."""
    assert fp4.is_compiled()
    monkeypatch.setattr(fp4, "is_compiled", lambda: request.param == "compiled")


def decoded(codes, block_scales, scale):
    out = np.full((len(codes), codes.shape[1] * 2), 0xA5A5, np.uint16)
    assert fp4.decode(codes, block_scales, scale, out) is out
    return out


# --- decode ---


@pytest.mark.parametrize("scale", SCALES)
def test_every_byte_of_codes_under_every_block_scale(scale):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    block_scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    expected = to_bf16(expected_f32(codes, block_scales, scale))
    np.testing.assert_array_equal(decoded(codes, block_scales, scale), expected)


@pytest.mark.parametrize("decode", [compiled.decode_by_permutation, compiled.decode_one_by_one])
def test_both_ways_to_look_up(decode):
    rng = np.random.default_rng(0)
    codes, block_scales = random_tensor(rng, 1, 16 * 1001)
    table, out = rng.integers(0, 1 << 16, 256 * 16, np.uint16), np.zeros(16 * 1001, np.uint16)
    decode(affine.flat(codes), affine.flat(block_scales), affine.flat(table), out)
    each = np.stack([codes & 15, codes >> 4], axis=-1).ravel()
    np.testing.assert_array_equal(out, table[np.repeat(block_scales.ravel().astype(int), 16) * 16 + each])


@pytest.mark.parametrize("scale", [3.3e-5, np.float32(3.3e-5), np.array(3.3e-5, np.float32)])
def test_kinds_of_scale(scale):
    codes, block_scales = random_tensor(np.random.default_rng(1), 3, 48)
    expected = to_bf16(expected_f32(codes, block_scales, 3.3e-5))
    np.testing.assert_array_equal(decoded(codes, block_scales, scale), expected)


def test_the_reference_checkpoint():
    source = read_safetensors(REFERENCE / "tiny-motif3-nvfp4")
    values = mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors"))
    for name, stack in values.items():
        parts = [array(*source[name + suffix]) for suffix in ("", "_weight_scale", "_weight_scale_2")]
        for weights, *one in zip(np.array(stack), *parts, strict=True):
            np.testing.assert_array_equal(expected_f32(*one), weights, err_msg=name)  # the route we compare with
            np.testing.assert_array_equal(decoded(*one), to_bf16(weights), err_msg=name)


def array(dtype, shape, data):
    return np.frombuffer(data, np.float32 if dtype == "F32" else np.uint8).reshape(shape)


def test_a_new_array_where_none_is_given():
    codes, block_scales = random_tensor(np.random.default_rng(2), 5, 64)
    np.testing.assert_array_equal(fp4.decode(codes, block_scales, 0.5), decoded(codes, block_scales, 0.5))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (1, 16)])
def test_small_shapes(shape):
    codes, block_scales = random_tensor(np.random.default_rng(3), *shape)
    assert fp4.decode(codes, block_scales, 1.0).shape == shape


# --- what callers may not do ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((4, 63), np.uint8)}, r"codes is uint8 \(4, 63\), not uint8 \(4, 64\)"),
        ({"codes": np.zeros((4, 64), np.int8)}, "codes is int8"),
        ({"codes": np.zeros((4, 128), np.uint8)[:, ::2]}, "codes is not C-contiguous"),
        ({"block_scales": np.zeros(32, np.uint8)}, r"not \[N, K / 16\]"),
        ({"block_scales": np.zeros((4, 8), np.float32)}, "block_scales is float32"),
        ({"out": np.zeros((4, 64), np.uint16)}, r"out is uint16 \(4, 64\), not uint16 \(4, 128\)"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    right = {"codes": np.zeros((4, 64), np.uint8), "block_scales": np.zeros((4, 8), np.uint8), "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        fp4.decode(**right | change)
