"""The oracle against numbers worked out by hand."""

from fractions import Fraction

import numpy as np
import pytest
from motif_convert.quantize import oracle
from raw_forms import codes_by_bits, raw_values

# --- by hand ---


def bf16(*values):
    return raw_values(np.array(values, np.float32), "BF16")


@pytest.mark.parametrize(("sign", "scale", "bias"), [(1, 0x3F80, 0xC100), (-1, 0xBF80, 0x4100)])
def test_by_hand_sixteen_steps(sign, scale, bias):
    """-8..7 dominated by its minimum: scale 1, bias -8, code k for -8 + k. Mirrored, scale and bias change sign."""
    row = bf16(*(sign * (k - 8) for k in range(16)), *(sign * (k - 8) for k in range(16)))
    packed, scales, biases = oracle.affine_quantize(row, 4, 32, "BF16")
    assert packed.tolist() == [0x76543210, 0xFEDCBA98] * 2
    assert (scales.tolist(), biases.tolist()) == ([scale], [bias])
    values = oracle.affine_dequantize(packed, scales, biases, 4, 32, "BF16")
    np.testing.assert_array_equal(values, oracle.bf16_to_f32(row))


def test_by_hand_ties_nan_and_the_end_stop():
    """Scale 1, bias -8: halves go to the even code, NaN to 0."""
    row = bf16(-8, 7, -7.5, -6.5, -5.5, 6.5, np.nan, -np.nan, *[0] * 24)
    packed, scales, _ = oracle.affine_quantize(row, 4, 32, "BF16")
    assert oracle.affine_codes(packed, 4, 32).tolist() == [0, 15, 0, 2, 2, 14, 0, 0] + [8] * 24
    assert scales.tolist() == [0x3F80]
    # Two bits from -1.4 to 1.6: a step of 1 puts the edge at rint(1.6) = 2 steps from zero, so the step becomes 0.8 and
    # the far end, 3.75 steps away, stops at code 3.
    row = np.array([1.6, -1.4, 0.0, 0.8] * 8, np.float32)
    packed, scales, biases = oracle.affine_quantize(row, 2, 32, "F32")
    assert oracle.affine_codes(packed, 2, 32).tolist() == [0, 3, 2, 1] * 8
    assert scales.tolist() == [np.float32(-0.8)]
    assert biases.tolist() == [np.float32(1.6)]


def test_by_hand_zeros_and_infinity():
    """Zeros keep the smallest scale, 1e-7 = 0x33D6BF95, negative, and bias 0; infinity makes the scale NaN, 0x7FC0."""
    row = bf16(*[0.0, -0.0] * 16, *[np.inf] * 32, *[np.nan] * 32, 1, -np.inf, *[1] * 30)
    packed, scales, biases = oracle.affine_quantize(row, 8, 32, "BF16")
    assert not packed.any()
    assert scales.tolist() == [0xB3D7, 0x7FC0, 0x7FC0, 0x7FC0]
    assert biases.tolist() == [0x0000, 0x7F80, 0xFF80, 0xFF80]


@pytest.mark.parametrize(
    ("bits", "stream"),
    [
        (2, "e4e4e4e4e4e4e4e4"),  # 0, 1, 2, 3: 11 10 01 00
        (3, "88c6fa88c6fa88c6fa88c6fa"),  # octal 76543210
        (4, "10325476103254761032547610325476"),
        (5, "2088418a392088418a392088418a392088418a39"),
        (6, "40200c44611c40200c44611c40200c44611c40200c44611c"),  # 0 | 1 << 6 | 2 << 12 | 3 << 18 = 0x0c2040
        (8, "0001020304050607" * 4),
    ],
)
def test_by_hand_packing(bits, stream):
    """Codes 0..7 over and over (0..3 at two bits) as one little-endian bit stream."""
    codes = np.arange(32) % min(8, 2**bits)
    packed = np.frombuffer(bytes.fromhex(stream), np.uint32)
    assert oracle.affine_codes(packed, bits, 32).tolist() == codes.tolist()
    ends = bf16(-(2**bits - 1), 0)  # with both ends in the group, scale 1 and code k for k - (2^b - 1)
    row = np.concatenate([bf16(*(codes - (2**bits - 1)))[:31], ends[1:]])
    ours = oracle.affine_codes(oracle.affine_quantize(row, bits, 32, "BF16")[0], bits, 32)
    assert ours.tolist() == [*codes[:31].tolist(), 2**bits - 1]


def test_by_hand_small_formats():
    scales = np.array([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xB8, 0x80], np.uint8)
    assert oracle.e4m3_to_f32(scales).tolist() == [0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, -1, 0]
    codes = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = oracle.nvfp4_dequantize(codes, np.array([[0x40]], np.uint8), 0.25)  # 2 * 0.25
    assert values.tolist() == [[0.5 * m for m in magnitudes] + [-0.5 * m for m in magnitudes]]
    assert np.signbit(values[0, 8])  # minus zero


def test_dequantized_values_are_the_nearest_to_the_exact_ones():
    rng = np.random.default_rng(1)
    row = raw_values(rng.standard_normal(512, np.float32), "BF16")
    packed, scales, biases = oracle.affine_quantize(row, 4, 64, "BF16")
    values = oracle.affine_dequantize(packed, scales, biases, 4, 64, "BF16")
    scale, bias = (np.repeat(oracle.bf16_to_f32(part), 64).tolist() for part in (scales, biases))
    for value, s, b, code in zip(values, scale, bias, codes_by_bits(packed, 4).tolist(), strict=True):
        exact = Fraction(s) * code + Fraction(b)
        neighbours = (np.nextafter(value, np.float32(-np.inf)), np.nextafter(value, np.float32(np.inf)))
        assert all(abs(Fraction(float(value)) - exact) <= abs(Fraction(float(n)) - exact) for n in neighbours)


# --- what callers may not do ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: oracle.affine_quantize(np.zeros(64, np.uint16), 7, 64, "BF16"), "bits must be one of"),
        (lambda: oracle.affine_quantize(np.zeros(64, np.uint16), 4, 16, "BF16"), "group_size must be one of"),
        (lambda: oracle.affine_quantize(np.zeros(64, np.uint16), 4, 64, "F64"), "dtype must be one of"),
        (lambda: oracle.affine_quantize(np.zeros(64, np.uint16), 4, 64, "F16"), "means arrays of float16, not uint16"),
        (lambda: oracle.affine_quantize(np.zeros((2, 96), np.uint16), 4, 64, "BF16"), "multiple of the group size 64"),
        (lambda: oracle.affine_codes(np.zeros(8, np.uint32), 4, 32), "32 codes of 4 bits"),
        (lambda: oracle.affine_codes(np.zeros(8, np.int32), 4, 64), "packed is int32"),
        (lambda: oracle.affine_codes(np.zeros(8, np.uint32), 1, 256), "bits must be one of"),
        (
            lambda: oracle.affine_dequantize(np.zeros(8, np.uint32), bf16(1), bf16(1, 2), 4, 64, "BF16"),
            "shapes do not match",
        ),
        (lambda: oracle.nvfp4_dequantize(np.zeros(8, np.int8), np.zeros(1, np.uint8), 1.0), "must be uint8"),
        (lambda: oracle.nvfp4_dequantize(np.zeros(8, np.uint8), np.uint8(1), 1.0), "8 bytes of codes"),
        (lambda: oracle.nvfp4_dequantize(np.zeros(9, np.uint8), np.zeros(1, np.uint8), 1.0), "8 bytes of codes"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_no_rows():
    packed, scales, biases = oracle.affine_quantize(np.zeros((0, 128), np.uint16), 4, 64, "BF16")
    assert (packed.shape, scales.shape, biases.shape) == ((0, 16), (0, 2), (0, 2))
    assert oracle.affine_dequantize(packed, scales, biases, 4, 64, "BF16").shape == (0, 128)
