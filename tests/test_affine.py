"""The compiled affine kernel against mlx, bit for bit, on groups that a wrong kernel gets wrong."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from affine_cases import CONFIGS, outputs
from motif_convert.quantize import affine, compiled

TILE = compiled.TILE


# --- groups: each function gives float32 or raw BF16 [n, size] ---


def _signs(rng, shape):
    return rng.choice(np.array([-1, 1], np.float32), shape)


def _weights(rng, n, size):
    return rng.standard_normal((n, size), np.float32) * np.float32(0.02)


def _normal(rng, size, bits):
    """Many: a reciprocal in place of a division shows in about one group of a thousand."""
    return _weights(rng, 20_000, size)


def _signed_zeros(rng, size, bits):
    return np.zeros((64, size), np.float32) * _signs(rng, (64, size))


def _zeros_and_one_value(rng, size, bits):
    groups = _signed_zeros(rng, size, bits)
    groups[np.arange(64), rng.integers(0, size, 64)] = rng.standard_normal(64) * 10.0 ** rng.integers(-9, 9, 64)
    return groups


def _every_constant(rng, size, bits):
    """A group for each of the 65536 values that there are, in order: a tile is wholly finite or wholly not."""
    return np.repeat(np.arange(1 << 16, dtype=np.uint16)[:, None], size, axis=1)


def _near_constants(rng, size, bits):
    """BF16 neighbours, 1 to 3 steps apart, at every magnitude below the guard."""
    base = rng.integers(0, 0x6C00, (2000, 1)) + rng.integers(0, 4, (2000, size))
    return (base | rng.choice([0, 0x8000], (2000, 1))).astype(np.uint16)


def _one_sided(rng, size, bits):
    return np.abs(rng.standard_normal((500, size), np.float32)) * _signs(rng, (500, 1))


def _equal_ends(rng, size, bits):
    """Minimum and maximum of the same magnitude: the maximum dominates."""
    groups = rng.uniform(-1, 1, (200, size)).astype(np.float32)
    groups[:, :2] = [1, -1]
    return rng.permuted(groups, axis=1)


def _subnormals(rng, size, bits):
    return rng.integers(-(2**23), 2**23, (300, size)).astype(np.float32) * np.float32(2.0**-149)


def _around_smallest_scale(rng, size, bits):
    return rng.standard_normal((1500, size), np.float32) * np.float32(10) ** rng.uniform(-9, -5, (1500, 1)).astype("f4")


def _ties(rng, size, bits):
    """Minimum -2^(b-1) and maximum 2^(b-1) - 1 make the scale 1 and every half a tie; also mirrored and rescaled."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    groups = rng.integers(2 * low, 2 * high + 1, (1000, size)).astype(np.float32) / 2
    groups[:, :2] = [low, high]
    return rng.permuted(groups, axis=1) * _signs(rng, (1000, 1)) * np.float32(2) ** rng.integers(-9, 4, (1000, 1))


def _nan(rng, shape):
    """Quiet and signalling, both signs, every payload that BF16 has."""
    return (rng.integers(0x7F81, 0x8000, shape) | rng.choice([0, 0x8000], shape)).astype(np.uint16)


def _rare_nan(rng, size, bits):
    """One in most tiles, none in some."""
    groups = to_bf16(_weights(rng, 4000, size))
    where = rng.random(groups.shape) < 1 / (TILE * size)
    groups[where] = _nan(rng, where.sum())
    return groups


def _some_nan(rng, size, bits):
    groups = to_bf16(_weights(rng, 400, size))
    return np.where(rng.random(groups.shape) < 0.2, _nan(rng, groups.shape), groups)


def _all_nan(rng, size, bits):
    return _nan(rng, (40, size))


def _infinities(rng, size, bits):
    groups = to_bf16(_weights(rng, 400, size))
    special = rng.choice(np.array([0x7F80, 0xFF80, 0x0000, 0x8000], np.uint16), groups.shape)
    return np.where(rng.random(groups.shape) < rng.choice([0.001, 0.2, 1], (400, 1)), special, groups)


def _one_infinity(rng, size, bits):
    return np.full((40, size), np.inf, np.float32) * _signs(rng, (40, 1))


def _huge_constants(rng, size, bits):
    """Around 2^90, and on to where edge / 1e-7 passes the end of float32; one such group among ordinary ones too."""
    groups = _weights(rng, 2000, size)
    constants = 2.0 ** rng.integers(84, 128, (2000, 1)) * (1 + rng.integers(0, 128, (2000, 1)) / 128)
    return np.where(
        rng.random((2000, 1)) < rng.choice([0.05, 1], (2000, 1)), constants * _signs(rng, (2000, 1)), groups
    )


def _huge_near_constants(rng, size, bits):
    constants = 2.0 ** rng.integers(84, 127, (500, 1)) * _signs(rng, (500, 1))
    return constants * (1 + rng.integers(0, 2, (500, size)) / 128)


def _whole_range(rng, size, bits):
    return rng.uniform(-3.3e38, 3.3e38, (100, size))


def _random_bits(rng, size, bits):
    return rng.integers(0, 1 << 16, (2000, size), np.uint16)


def _random_bits_below_guard(rng, size, bits):
    """Any exponent that the vector code takes."""
    return rng.integers(0, 0x6C80, (5000, size), np.uint16) | rng.choice(np.array([0, 0x8000], np.uint16), (5000, size))


KINDS = {
    function.__name__.strip("_"): function
    for function in (
        *(_normal, _signed_zeros, _zeros_and_one_value, _every_constant, _near_constants, _one_sided, _equal_ends),
        *(_subnormals, _around_smallest_scale, _ties, _rare_nan, _some_nan, _all_nan, _infinities, _one_infinity),
        *(_huge_constants, _huge_near_constants, _whole_range, _random_bits, _random_bits_below_guard),
    )
}


# --- the two routes ---


def to_bf16(x):
    """Raw BF16, from float32 by cutting off the lower half, which keeps a NaN a NaN."""
    if x.dtype == np.uint16:
        return np.ascontiguousarray(x)
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def groups_of(kind, bits, size):
    return to_bf16(KINDS[kind](np.random.default_rng([bits, size, len(kind)]), size, bits))


def kernel(rows, bits, size):
    parts = outputs(*rows.shape, bits, size)
    affine.quantize_into(rows, bits, size, *parts)
    return parts


def scalar_loop(rows, bits, size):
    parts = outputs(*rows.shape, bits, size)
    flat = affine.flat(rows), 0, parts[1].size, bits, size, *(part.reshape(-1) for part in parts)
    compiled.exact(*flat)
    return parts


def mlx(rows, bits, size):
    raw = mx.array(rows).view(mx.bfloat16)
    packed, scales, biases = mx.quantize(raw, group_size=size, bits=bits, stream=mx.cpu)
    return np.array(packed), np.array(scales.view(mx.uint16)), np.array(biases.view(mx.uint16))


def difference(ours, theirs, bits, size):
    """'' where both agree, else how many groups differ, and the worst of them."""
    ours, theirs = (
        (unpacked(packed, bits).reshape(-1, size), scales.reshape(-1), biases.reshape(-1))
        for packed, scales, biases in (ours, theirs)
    )
    distance = np.abs(ours[0] - theirs[0]).sum(axis=1)
    differs = (distance > 0) | (ours[1] != theirs[1]) | (ours[2] != theirs[2])
    if not differs.any():
        return ""
    worst = np.argmax(np.where(differs, distance, -1))
    shown = [f"scale {s[worst]:#06x} bias {b[worst]:#06x} codes {c[worst].tolist()}" for c, s, b in (ours, theirs)]
    counts = f"{differs.sum()} of {len(differs)} groups differ; the worst is {worst}"
    return f"{counts}:\n  kernel {shown[0]}\n  mlx    {shown[1]}"


def unpacked(packed, bits):
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (packed[..., None] >> shifts & (2**bits - 1)).astype(np.int64)


# --- against mlx ---


@pytest.mark.parametrize(("bits", "size"), CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_is_mlx(kind, bits, size):
    rows = groups_of(kind, bits, size).reshape(-1, 4 * size)
    message = difference(kernel(rows, bits, size), mlx(rows, bits, size), bits, size)
    assert not message, message


@pytest.mark.parametrize(("bits", "size"), CONFIGS)
def test_scalar_loop_is_mlx(bits, size):
    """On all kinds: it has to be right where the vector code is, too."""
    rows = np.concatenate([groups_of(kind, bits, size)[:4000] for kind in KINDS])
    message = difference(scalar_loop(rows, bits, size), mlx(rows, bits, size), bits, size)
    assert not message, message


@pytest.mark.parametrize(("bits", "size"), CONFIGS)
@pytest.mark.parametrize("groups_a_row", [1, 3])
def test_any_number_of_groups(bits, size, groups_a_row):
    """Ragged tails: fewer groups than a tile, whole tiles, and one more or less, with a NaN now here and now there."""
    rng = np.random.default_rng(size)
    pool = to_bf16(rng.standard_normal((3 * TILE + 2, groups_a_row * size), np.float32))
    for n in range(len(pool) + 1):
        for bad in (None, 0, n // 2, n - 1):
            rows = pool[:n].copy()
            if n and bad is not None:
                rows[bad, -1] = 0x7FC1
            message = difference(kernel(rows, bits, size), mlx(rows, bits, size), bits, size)
            assert not message, f"{n} rows, NaN in row {bad}: {message}"


@pytest.mark.parametrize(("bits", "size"), CONFIGS)
def test_chunks_give_the_bits_of_the_whole_and_nothing_else_is_touched(bits, size):
    rows = groups_of("rare_nan", bits, size)[:3000].reshape(-1, 3 * size)
    before = rows.tobytes()
    whole, parts = mlx(rows, bits, size), outputs(*rows.shape, bits, size)
    cuts = [7, 8, 40, 41, 300, 700, 990]
    for first, last in pairwise(cuts):
        affine.quantize_into(rows[first:last], bits, size, *(part[first:last] for part in parts))
    assert rows.tobytes() == before
    for ours, theirs in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(ours[cuts[0] : cuts[-1]], theirs[cuts[0] : cuts[-1]])
        assert (ours[: cuts[0]] == 0xA5A5).all()
        assert (ours[cuts[-1] :] == 0xA5A5).all()


def test_rows_that_are_read_only_or_lie_at_an_odd_address():
    rows = groups_of("normal", 4, 64)[:100]
    whole = mlx(rows, 4, 64)
    shifted = np.frombuffer(b"." + rows.tobytes(), np.uint16, offset=1).reshape(rows.shape)
    assert not shifted.flags.writeable
    assert not shifted.flags.aligned
    assert not difference(kernel(shifted, 4, 64), whole, 4, 64)


def test_threads_side_by_side():
    rows = groups_of("rare_nan", 4, 64)
    whole, parts = mlx(rows, 4, 64), outputs(*rows.shape, 4, 64)
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(affine.quantize_into, rows[i : i + 130], 4, 64, *(part[i : i + 130] for part in parts))
            for i in range(0, len(rows), 130)
        ]
        for job in jobs:
            job.result()
    assert not difference(parts, whole, 4, 64)
