"""Kernels against mlx over the whole tensor and against the numpy oracle; casts against a second arithmetic."""

import struct

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, read_safetensors
from motif_convert.quantize import oracle
from motif_convert.quantize.kernels import affine_quantize, bf16_to_f32, cast, f32_to_bf16
from motif_convert.quantize.precision import Quantized

EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16)
DTYPES = {"BF16": (np.uint16, mx.bfloat16), "F16": (np.float16, mx.float16), "F32": (np.float32, mx.float32)}
EVERY_QUANTIZED = [Quantized("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]


# --- quantization ---


def bits_of(array: np.ndarray) -> np.ndarray:
    """An array's bits, so that NaN and the sign of zero compare."""
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def assert_same_bits(ours: dict, theirs: tuple) -> None:
    for (suffix, a), b in zip(ours.items(), theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), suffix
        differs = np.argwhere(bits_of(a) != bits_of(b))
        assert not len(differs), f"{suffix}: {len(differs)} of {a.size} differ, first at {differs[0]}"


def mlx_quantize(raw: np.ndarray, dtype: str, precision: Quantized) -> tuple:
    """mx.quantize of a whole tensor on the CPU, back as raw arrays."""
    w = mx.array(raw).view(DTYPES[dtype][1])
    parts = mx.quantize(w, group_size=precision.group_size, bits=precision.bits, stream=mx.cpu)
    return tuple(np.array(p.view(mx.uint16) if p.dtype == mx.bfloat16 else p) for p in parts)


def values(dtype: str, shape: tuple) -> np.ndarray:
    """Raw finite values of many magnitudes, some rows constant or zero."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(shape, np.float32) * np.float32(2) ** rng.integers(-12, 6, (*shape[:-1], 1))
    x = x.astype(np.float32)
    x[..., ::7, :] = rng.standard_normal()
    x[..., ::11, :] = -0.0
    return f32_to_bf16(x) if dtype == "BF16" else x.astype(DTYPES[dtype][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", EVERY_QUANTIZED, ids=str)
def test_chunks_of_rows_give_the_bits_of_the_whole(precision, dtype):
    stack = values(dtype, (3, 50, 256))
    theirs = mlx_quantize(stack, dtype, precision)
    rows = stack.reshape(-1, 256)
    for step in (1, 7, 50, 150):
        chunks = [affine_quantize(rows[i : i + step], dtype, precision) for i in range(0, 150, step)]
        joined = {k: np.concatenate([c[k] for c in chunks]).reshape(3, 50, -1) for k in chunks[0]}
        assert list(joined) == [".weight", ".scales", ".biases"]
        assert_same_bits(joined, theirs)


@pytest.mark.parametrize("precision", EVERY_QUANTIZED, ids=str)
def test_the_kernel_is_the_oracle(precision):
    """On weights of every size, and on random bits: NaN, infinities, subnormals and huge values among them."""
    random = np.random.default_rng(precision.bits).integers(0, 1 << 16, (500, 256), np.uint16)
    for raw in (values("BF16", (500, 256)), random):
        ours = affine_quantize(raw, "BF16", precision)
        assert_same_bits(ours, oracle.affine_quantize(raw, precision.bits, precision.group_size, "BF16"))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_experts_of_the_reference(bits):
    """Half of a stack at a time, as a conversion reads it, against the whole stack."""
    precision = Quantized("affine", bits, 64)
    _, shape, data = read_safetensors(REFERENCE / "tiny-motif3")["model.layers.3.moe.experts.gate_up_proj"]
    stack = np.frombuffer(data, np.uint16).reshape(shape)
    half = shape[1] // 2
    whole = mlx_quantize(stack, "BF16", precision)
    for expert in range(shape[0]):
        for rows in (slice(None, half), slice(half, None)):
            assert_same_bits(
                affine_quantize(stack[expert, rows], "BF16", precision), tuple(part[expert, rows] for part in whole)
            )


def test_the_input_is_left_as_it_was_and_the_output_is_ours():
    raw = values("BF16", (4, 64))
    before = raw.tobytes()
    made = affine_quantize(raw, "BF16", Quantized("affine", 4, 64))
    assert raw.tobytes() == before
    assert all(part.flags.c_contiguous for part in made.values())


# --- casts: every value ---


def f32_of(bf16: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bf16 << 16))[0]


def f16_bits_of(x: float) -> int:
    """IEEE 754 binary16, to the nearest, ties to even, by Python's own packing."""
    try:
        packed = struct.pack("<e", x)
    except OverflowError:
        packed = struct.pack("<e", float("-inf") if x < 0 else float("inf"))
    return int.from_bytes(packed, "little")


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest BF16 of float64 values that are no NaN: the nearer of two neighbours, the even one on a tie.

    The neighbours above the largest are taken as 2^128, which stands for infinity.
    """
    grid = (np.arange(0x7F81, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)  # 0, ..., infinity
    grid[0x7F80] = 2.0**128
    magnitude = np.minimum(np.abs(x), 2.0**128)
    low = np.searchsorted(grid, magnitude, side="right") - 1
    low = np.minimum(low, 0x7F7F)
    below, above = magnitude - grid[low], grid[low + 1] - magnitude
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return (np.where(up, low + 1, low) | np.where(np.signbit(x), 0x8000, 0)).astype(np.uint16)


def test_every_bf16_to_f32():
    expected = np.array([f32_of(b) for b in range(1 << 16)])
    for ours in (bf16_to_f32(EVERY_16_BITS), cast(EVERY_16_BITS, "BF16", "F32")[0]):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(np.signbit(ours), EVERY_16_BITS >= 0x8000)
    np.testing.assert_array_equal(cast(EVERY_16_BITS, "BF16", "F32")[1], 0)


def test_every_bf16_to_f16():
    ours, change = cast(EVERY_16_BITS, "BF16", "F16")
    assert (ours.dtype, change.dtype) == (np.float16, np.float32)
    x = np.array([f32_of(b) for b in range(1 << 16)])
    number = ~np.isnan(x)
    expected = np.array([f16_bits_of(v) for v in x[number].tolist()], np.uint16)
    np.testing.assert_array_equal(ours.view(np.uint16)[number], expected)
    assert np.isnan(ours[~number]).all()
    lost = [0.0 if a == b else abs(a - b) for a, b in zip(x[number], expected.view(np.float16).tolist(), strict=True)]
    np.testing.assert_array_equal(change[number], np.array(lost, np.float32))
    np.testing.assert_array_equal(change[~number], 0)


@pytest.mark.parametrize(
    ("bf16", "f16", "change"),
    [
        (0x0000, 0x0000, 0.0),
        (0x8000, 0x8000, 0.0),  # minus zero
        (0x3F80, 0x3C00, 0.0),  # 1
        (0x477F, 0x7BF8, 0.0),  # 65280, the largest BF16 below the end of F16
        (0x4780, 0x7C00, np.inf),  # 65536
        (0xC780, 0xFC00, np.inf),
        (0x7F7F, 0x7C00, np.inf),  # the largest BF16
        (0x7F80, 0x7C00, 0.0),  # infinity stays what it is
        (0xFF80, 0xFC00, 0.0),
        (0x3380, 0x0001, 0.0),  # 2^-24, the smallest F16
        (0x3300, 0x0000, 2.0**-25),  # half of it: a tie, to even
        (0x3301, 0x0001, 2.0**-25 - 2.0**-32),  # just above the tie
        (0xB300, 0x8000, 2.0**-25),
        (0x3340, 0x0001, 2.0**-26),  # three quarters
        (0x33C0, 0x0002, 2.0**-25),  # one and a half: a tie, to even
        (0x0001, 0x0000, 2.0**-133),  # the smallest BF16
    ],
)
def test_bf16_to_f16_by_hand(bf16, f16, change):
    ours, lost = cast(np.array([[bf16]], np.uint16), "BF16", "F16")
    assert ours.view(np.uint16).tolist() == [[f16]]
    assert lost.tolist() == [[np.float32(change)]]


def test_every_f16_to_bf16():
    raw = EVERY_16_BITS.view(np.float16)
    ours, change = cast(raw, "F16", "BF16")
    number = ~np.isnan(raw)
    x = raw[number].astype(np.float64)
    np.testing.assert_array_equal(ours[number], nearest_bf16(x))
    assert set(ours[~number].tolist()) == {0x7FC0}
    finite = np.isfinite(x)
    lost = np.abs(bf16_to_f32(nearest_bf16(x[finite])).astype(np.float64) - x[finite])
    np.testing.assert_array_equal(change[number][finite], lost.astype(np.float32))
    np.testing.assert_array_equal(change[number][~finite], 0)


def test_f32_to_bf16_at_and_around_every_tie():
    """Each BF16 with the lower half 0, one, just under, at and just over the middle, and full."""
    below = EVERY_16_BITS.astype(np.uint32) << 16
    bits = (below[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    x = bits.view(np.float32)
    number = ~np.isnan(x)
    expected = nearest_bf16(x[number].astype(np.float64))
    for ours in (f32_to_bf16(x), cast(x, "F32", "BF16")[0]):
        assert ours.dtype == np.uint16
        np.testing.assert_array_equal(ours[number], expected)
        assert set(ours[~number].tolist()) == {0x7FC0}


@pytest.mark.parametrize(
    ("f32", "bf16", "change"),
    [
        (0x3F808000, 0x3F80, 2.0**-8),  # a tie above an even number
        (0x3F818000, 0x3F82, 2.0**-8),  # a tie above an odd one
        (0x3F808001, 0x3F81, 2.0**-8 - 2.0**-23),
        (0x3F807FFF, 0x3F80, 2.0**-8 - 2.0**-23),
        (0x7F7F7FFF, 0x7F7F, 0x7FFF * 2.0**104),  # just under the tie between the largest and infinity
        (0x7F7F8000, 0x7F80, np.inf),
        (0xFF7FFFFF, 0xFF80, np.inf),
        (0x7F800000, 0x7F80, 0.0),
        (0x80000000, 0x8000, 0.0),
        (0x00008000, 0x0000, 2.0**-134),
        (0x00018000, 0x0002, 2.0**-134),
        (0xFFFFFFFF, 0x7FC0, 0.0),  # NaN
        (0x7F800001, 0x7FC0, 0.0),
    ],
)
def test_f32_to_bf16_by_hand(f32, bf16, change):
    ours, lost = cast(np.array([f32], np.uint32).view(np.float32), "F32", "BF16")
    assert (ours.tolist(), lost.tolist()) == ([bf16], [np.float32(change)])


def test_f32_to_f16():
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 20_000, np.uint32)
    near = (EVERY_16_BITS[::7].view(np.float16).astype(np.float32)).view(np.uint32) + np.uint32(0x1000)  # on ties
    x = np.concatenate([bits, near, near + np.uint32(1), near - np.uint32(1)]).view(np.float32)
    x = x[~np.isnan(x)]
    ours, change = cast(x, "F32", "F16")
    expected = np.array([f16_bits_of(v) for v in x.tolist()], np.uint16)
    np.testing.assert_array_equal(ours.view(np.uint16), expected)
    overflow = np.isinf(expected.view(np.float16)) & np.isfinite(x)
    np.testing.assert_array_equal(np.isinf(change), overflow)
    np.testing.assert_array_equal(change == 0, expected.view(np.float16).astype(np.float32) == x)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 4)])
def test_casts_keep_the_shape(source, target, shape):
    raw = np.ones(shape, DTYPES[source][0])  # 1, or in BF16 the smallest subnormal
    before = raw.tobytes()
    out, change = cast(raw, source, target)
    assert (out.shape, change.shape) == (shape, shape)
    assert (out.dtype, change.dtype) == (DTYPES[target][0], np.float32)
    assert raw.tobytes() == before
