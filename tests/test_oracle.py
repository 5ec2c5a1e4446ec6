"""The numpy oracle against mlx, bit for bit."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from motif_convert.quantize import oracle
from raw_forms import RAW, codes_by_bits, raw_values

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"
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
