"""The numpy oracle against mlx, bit for bit, and against cases worked out by hand."""

import json
from fractions import Fraction
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from motif_convert.quantize import oracle

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"
RAW = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
BIT_PATTERN = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
MLX = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


# --- groups that a wrong kernel gets wrong: each function gives float32 [n, size] ---


def _signs(rng, shape):
    return rng.choice(np.array([-1, 1], np.float32), shape)


def _normal(rng, size, bits):
    return rng.standard_normal((4000, size), np.float32) * np.float32(0.02)


def _signed_zeros(rng, size, bits):
    return np.zeros((20, size), np.float32) * _signs(rng, (20, size))


def _constants(rng, size, bits):
    return np.repeat(rng.standard_normal((100, 1), np.float32), size, axis=1)


def _near_constants(rng, size, bits):
    return _constants(rng, size, bits) * (1 + rng.integers(-2, 3, (100, size)).astype(np.float32) / 128)


def _one_sided(rng, size, bits):
    return np.abs(rng.standard_normal((200, size), np.float32)) * _signs(rng, (200, 1))


def _equal_ends(rng, size, bits):
    """Minimum and maximum of the same magnitude: the maximum dominates."""
    groups = rng.uniform(-1, 1, (50, size)).astype(np.float32)
    groups[:, :2] = [1, -1]
    return rng.permuted(groups, axis=1)


def _subnormals(rng, size, bits):
    return rng.integers(-(2**23), 2**23, (100, size)).astype(np.float32) * np.float32(2.0**-149)


def _around_smallest_scale(rng, size, bits):
    return rng.standard_normal((400, size), np.float32) * np.float32(10) ** rng.uniform(-9, -5, (400, 1)).astype("f4")


def _ties(rng, size, bits):
    """Minimum -2^(b-1) and maximum 2^(b-1) - 1 make the scale 1 and every half a tie; also mirrored and rescaled."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    groups = rng.integers(2 * low, 2 * high + 1, (300, size)).astype(np.float32) / 2
    groups[:, :2] = [low, high]
    return rng.permuted(groups, axis=1) * _signs(rng, (300, 1)) * np.float32(2) ** rng.integers(-9, 4, (300, 1))


def _some_nan(rng, size, bits):
    groups = _normal(rng, size, bits)[:200]
    return np.where(rng.random(groups.shape) < 0.2, _nan(rng, groups.shape), groups)


def _all_nan(rng, size, bits):
    return _nan(rng, (20, size))


def _nan(rng, shape):
    """Quiet and signalling NaN of both signs with payloads that survive in the upper 16 bits."""
    payload = rng.integers(1 << 16, 1 << 23, shape, np.uint32)
    return (payload | np.uint32(0x7F800000) | rng.integers(0, 2, shape, np.uint32) << np.uint32(31)).view(np.float32)


def _infinities(rng, size, bits):
    groups = _some_nan(rng, size, bits)
    special = rng.choice(np.array([np.inf, -np.inf, 0], np.float32), groups.shape)
    chance = rng.choice([0.02, 0.2, 1], (len(groups), 1))
    return np.where(rng.random(groups.shape) < chance, special, groups).astype(np.float32)


def _one_infinity(rng, size, bits):
    return np.full((10, size), np.inf, np.float32) * _signs(rng, (10, 1))


def _huge(rng, size, bits):
    """Constants and near-constants around 2^90, where edge / 1e-7 nears and passes the end of float32."""
    exponent = rng.integers(84, 127, (200, 1)).astype(np.float32)
    return (
        _signs(rng, (200, 1)) * 2**exponent * (1 + rng.integers(0, 2, (200, size)) * rng.integers(0, 2, (200, 1)) / 128)
    )


def _whole_range(rng, size, bits):
    return rng.uniform(-3.3e38, 3.3e38, (50, size)).astype(np.float32)


KINDS = {
    function.__name__.strip("_"): function
    for function in (
        *(_normal, _signed_zeros, _constants, _near_constants, _one_sided, _equal_ends, _subnormals),
        *(_around_smallest_scale, _ties, _some_nan, _all_nan, _infinities, _one_infinity, _huge, _whole_range),
    )
}


def raw_values(x, dtype):
    """float32 in the raw form of dtype; to BF16 by cutting off the lower half, which keeps a NaN a NaN."""
    if dtype == "BF16":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return x.astype(RAW[dtype])


def trouble(bits, size, dtype):
    """Raw groups [n, size] of every kind and of random bits, and the kind of each group."""
    rng = np.random.default_rng([bits, size, len(dtype)])
    parts = {name: raw_values(kind(rng, size, bits), dtype) for name, kind in KINDS.items()}
    pattern = BIT_PATTERN[dtype]
    parts["random_bits"] = rng.integers(0, np.iinfo(pattern).max, (2000, size), pattern, endpoint=True).view(RAW[dtype])
    return np.concatenate(list(parts.values())), np.repeat(list(parts), [len(part) for part in parts.values()])


# --- mlx, and telling differences ---


def to_mlx(raw, dtype):
    return mx.array(raw).view(MLX[dtype])


def from_mlx(array, dtype):
    return np.array(array.view(mx.uint16)) if dtype == "BF16" else np.array(array)


def mlx_quantize(raw, bits, size, dtype):
    packed, scales, biases = mx.quantize(to_mlx(raw, dtype), group_size=size, bits=bits, stream=mx.cpu)
    return np.array(packed), from_mlx(scales, dtype), from_mlx(biases, dtype)


def comparable_bits(array, dtype):
    """The bits of raw values; in F16 and F32 all NaN are one, because mlx leaves those bits to the processor."""
    bits = np.array(array).view(BIT_PATTERN[dtype])
    if dtype != "BF16":
        bits[np.isnan(array)] = np.iinfo(bits.dtype).max
    return bits


def codes_by_bits(packed, bits):
    """A second way to unpack: bit by bit."""
    stream = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(*packed.shape[:-1], -1, bits) @ (1 << np.arange(bits))


def difference(ours, theirs, kinds, bits, size, dtype):
    """'' where both routes agree, else how many groups differ, of which kinds, and the worst of them."""
    ours, theirs = (
        (codes_by_bits(packed, bits).reshape(-1, size), scales.reshape(-1), biases.reshape(-1))
        for packed, scales, biases in (ours, theirs)
    )
    code_distance = np.abs(ours[0] - theirs[0]).sum(axis=1)
    side_differs = [
        comparable_bits(a, dtype) != comparable_bits(b, dtype) for a, b in zip(ours[1:], theirs[1:], strict=True)
    ]
    differs = (code_distance > 0) | side_differs[0] | side_differs[1]
    if not differs.any():
        return ""
    worst = np.argmax(np.where(differs, code_distance, -1))
    counts = {str(kind): int(differs[kinds == kind].sum()) for kind in np.unique(kinds[differs])}
    shown = [f"scale {s[worst]!r} bias {b[worst]!r} codes {c[worst].tolist()}" for c, s, b in (ours, theirs)]
    return (
        f"{differs.sum()} of {len(differs)} groups differ at {bits} bits, group size {size}, {dtype}: {counts}\n"
        f"worst: group {worst}, {kinds[worst]}\n  oracle {shown[0]}\n  mlx    {shown[1]}"
    )


# --- against mlx ---


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("size", oracle.GROUP_SIZES)
@pytest.mark.parametrize("bits", oracle.BITS)
def test_quantize_is_mlx(bits, size, dtype):
    groups, kinds = trouble(bits, size, dtype)
    usable = len(groups) // 4 * 4  # four groups a row
    rows, kinds = groups[:usable].reshape(-1, 4 * size), kinds[:usable]
    ours, theirs = oracle.affine_quantize(rows, bits, size, dtype), mlx_quantize(rows, bits, size, dtype)
    assert [part.shape for part in ours] == [part.shape for part in theirs]
    assert [part.dtype for part in ours] == [part.dtype for part in theirs]
    message = difference(ours, theirs, kinds, bits, size, dtype)
    assert not message, message


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_quantize_one_group_at_a_time_and_leave_it_as_it_was(dtype):
    groups, kinds = trouble(4, 64, dtype)
    before = groups.tobytes()
    whole = mlx_quantize(groups, 4, 64, dtype)
    for index in np.random.default_rng(0).choice(len(groups), 300, replace=False):
        theirs = tuple(part[index] for part in whole)
        message = difference(oracle.affine_quantize(groups[index], 4, 64, dtype), theirs, kinds[[index]], 4, 64, dtype)
        assert not message, message
    assert groups.tobytes() == before


@pytest.mark.parametrize("bits", oracle.BITS)
def test_quantize_an_expert_stack_in_one_call_and_in_chunks(bits):
    rng = np.random.default_rng(bits)
    stack = raw_values(rng.standard_normal((3, 260, 512), np.float32), "BF16")  # more values than one block
    ours = oracle.affine_quantize(stack, bits, 64, "BF16")
    for part, theirs in zip(ours, mlx_quantize(stack, bits, 64, "BF16"), strict=True):
        np.testing.assert_array_equal(part, theirs)
    gate = oracle.affine_quantize(stack[1, :130], bits, 64, "BF16")
    every_other = oracle.affine_quantize(stack[:, ::2], bits, 64, "BF16")  # not contiguous
    for part, whole, strided in zip(gate, ours, every_other, strict=True):
        np.testing.assert_array_equal(part, whole[1, :130])
        np.testing.assert_array_equal(strided, whole[:, ::2])


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("bits", oracle.BITS)
def test_dequantize_is_mlx_in_float32(bits, dtype):
    groups, kinds = trouble(bits, 64, dtype)
    rows = groups[np.isin(kinds, ["normal", "one_sided", "ties", "around_smallest_scale", "constants"])].reshape(
        -1, 256
    )
    packed, scales, biases = mlx_quantize(rows, bits, 64, dtype)
    wide = [to_mlx(part, dtype).astype(mx.float32) for part in (scales, biases)]
    theirs = np.array(mx.dequantize(mx.array(packed), *wide, group_size=64, bits=bits, stream=mx.cpu))
    ours = oracle.affine_dequantize(packed, scales, biases, bits, 64, dtype)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    np.testing.assert_array_equal(oracle.affine_codes(packed, bits, 256), codes_by_bits(packed, bits))


def test_bf16_conversions_are_mlx():
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = oracle.bf16_to_f32(every)
    np.testing.assert_array_equal(wide.view(np.uint32), every.astype(np.uint32) << 16)
    below_tie_tie_above = (wide.view(np.uint32)[:, None] + np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)).ravel()
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32)
    for bits in (below_tie_tie_above, random):
        theirs = np.array(mx.array(bits).view(mx.float32).astype(mx.bfloat16, stream=mx.cpu).view(mx.uint16))
        np.testing.assert_array_equal(oracle.f32_to_bf16(bits.view(np.float32)), theirs)


def test_e4m3_is_mlx():
    every = np.arange(256, dtype=np.uint8)
    theirs = np.array(mx.from_fp8(mx.array(every), dtype=mx.float32, stream=mx.cpu))
    ours = oracle.e4m3_to_f32(every)
    number = (every & 0x7F) != 0x7F
    np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))
    assert np.isnan(ours[~number]).all()


# --- against the reference checkpoint ---


def safetensors_arrays(path):
    """Every tensor of a file as a numpy array, F8_E4M3 and BF16 as bits; read without the library."""
    kinds = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8, "F8_E4M3": np.uint8}
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        flat = np.frombuffer(blob[start + first : start + end], kinds[entry["dtype"]])
        arrays[name] = flat.reshape(entry["shape"])
    return arrays


def test_nvfp4_dequantize_is_the_reference():
    source = {}
    for shard in sorted((REFERENCE / "tiny-motif3-nvfp4").glob("model-*.safetensors")):
        source |= safetensors_arrays(shard)
    expected = safetensors_arrays(REFERENCE / "tiny-nvfp4-dequant.safetensors")
    ending = "_weight_scale"
    assert set(expected) == {name.removesuffix(ending) for name in source if name.endswith(ending)}
    for name, values in expected.items():
        scale_2 = source[f"{name}_weight_scale_2"]
        ours = oracle.nvfp4_dequantize(source[name], source[f"{name}_weight_scale"], scale_2[:, None, None])
        np.testing.assert_array_equal(ours.view(np.uint32), values.view(np.uint32), err_msg=name)
        half = oracle.nvfp4_dequantize(source[name][3, ::2], source[f"{name}_weight_scale"][3, ::2], scale_2[3])
        np.testing.assert_array_equal(half.view(np.uint32), values[3, ::2].view(np.uint32), err_msg=name)


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
