"""Verify's fast route: the same as the plain formulas on groups of every kind."""

from dataclasses import replace

import numpy as np
import pytest
from motif_convert.quantize import oracle
from motif_convert.quantize.precision import Float, Quantized
from motif_convert.validate import fast_check
from motif_convert.validate.arithmetic import decoded_error, expected
from motif_convert.validate.planes import bf16_pairs, round_bits
from motif_convert.validate.tile import check_tile
from raw_forms import raw_values
from test_oracle import KINDS, trouble
from tiles import assert_same, every_layout, module, scratch_of


def checked(raw: np.ndarray, stored: list[np.ndarray], bits: int):
    groups = len(raw)
    pairs = bf16_pairs(raw, np.empty(raw.size // 2, np.uint32))
    words, scales, biases = stored
    tile = (words.reshape(groups, -1), scales.reshape(-1), biases.reshape(-1))
    return check_tile(pairs, None, tile, bits, np.full((3, raw.size // 2), np.nan, np.float32))


def is_odd(raw: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return ~(np.abs(oracle.bf16_to_f32(raw).astype(np.float64)) < 2.0**50).all(axis=1)


def mostly_ordinary(bits: int, size: int) -> np.ndarray:
    """Groups of every kind, shuffled, with more than seven ordinary ones for each odd one; several tiles of them."""
    raw, _ = trouble(bits, size, "BF16")
    rng = np.random.default_rng(size)
    odd = np.flatnonzero(is_odd(raw))
    raw = np.delete(raw, odd[700:], axis=0)
    more = raw_values(rng.standard_normal((2 * fast_check.TILE // size, size), np.float32), "BF16")
    return rng.permutation(np.concatenate([raw, more]))


# --- one tile ---


@every_layout
def test_a_tile_is_what_the_oracle_makes_of_it(bits, size):
    raw, kinds = trouble(bits, size, "BF16")
    stored = oracle.affine_quantize(raw, bits, size, "BF16")
    tile = checked(raw, stored, bits)
    assert tile is not None
    np.testing.assert_array_equal(tile.odd, is_odd(raw))
    assert set(kinds[~tile.odd]) >= {"normal", "signed_zeros", "subnormals", "ties", "one_sided", "near_constants"}
    assert {"some_nan", "all_nan", "infinities", "huge", "whole_range", "random_bits"} <= set(kinds[tile.odd])
    usable = ~tile.odd
    w = oracle.bf16_to_f32(raw[usable])
    decoded = oracle.affine_dequantize(*(part[usable] for part in stored), bits, size, "BF16")
    np.testing.assert_array_equal(tile.worst[usable], np.abs(decoded - w).max(axis=1))
    np.testing.assert_array_equal(oracle.f32_to_bf16(tile.scale[usable]), stored[1][usable, 0])
    assert not tile.worst[tile.odd].any()
    assert tile.signal == pytest.approx((w.astype(np.float64) ** 2).sum(), rel=1e-5)
    assert tile.noise == pytest.approx(((decoded.astype(np.float64) - w) ** 2).sum(), rel=1e-5)


@every_layout
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"all_nan", "one_infinity", "whole_range"}))
def test_a_tile_of_one_kind_and_ragged(bits, size, kind):
    """Whatever a tile has in it, and however few groups: the quick ways for the usual case are not the only ones."""
    raw = raw_values(KINDS[kind](np.random.default_rng(7), size, bits), "BF16")
    for groups in (1, 3, len(raw)):
        stored = oracle.affine_quantize(raw[:groups], bits, size, "BF16")
        assert checked(raw[:groups], stored, bits) is not None


@every_layout
def test_just_below_what_is_huge(bits, size):
    """Constants, of which the scale is the smallest one, and near-constants, up to the limit and past it."""
    rng = np.random.default_rng(1)
    rough = rng.integers(0, 2, (300, size)) * rng.integers(0, 2, (300, 1))
    x = np.float32(2) ** rng.integers(40, 52, (300, 1)) * (1 + rough / 128)
    raw = raw_values(x.astype("f4"), "BF16")
    tile = checked(raw, oracle.affine_quantize(raw, bits, size, "BF16"), bits)
    np.testing.assert_array_equal(tile.odd, is_odd(raw))
    assert 0.1 < tile.odd.mean() < 0.5


@every_layout
def test_every_bit_of_every_kind_of_group_counts(bits, size):
    """One flipped bit in the codes, the scale or the bias of an ordinary group is never overlooked."""
    raw, kinds = trouble(bits, size, "BF16")
    raw, kinds = raw[~is_odd(raw)], kinds[~is_odd(raw)]
    rng = np.random.default_rng(bits * size)
    for kind in np.unique(kinds):
        some = rng.choice(np.flatnonzero(kinds == kind), 8)
        stored = [part.copy() for part in oracle.affine_quantize(raw[some], bits, size, "BF16")]
        assert checked(raw[some], stored, bits) is not None
        for part in (0, 0, 0, 0, 1, 2):
            flat = stored[part].reshape(-1)
            at, bit = rng.integers(flat.size), flat.dtype.type(1 << rng.integers(8 * flat.itemsize))
            flat[at] ^= bit
            assert checked(raw[some], stored, bits) is None, (kind, part, at, bit)
            flat[at] ^= bit


@every_layout
def test_a_tie_to_the_odd_code_is_found(bits, size):
    """Scale 1: the half beside each even code is a tie, and the odd code on its other side is as near."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    row = np.zeros(size, np.float32)
    row[:3] = low, high, low / 2 + 0.5
    raw = raw_values(row[None], "BF16")
    stored = [part.copy() for part in oracle.affine_quantize(raw, bits, size, "BF16")]
    assert stored[1][0, 0] == 0x3F80
    code = int(oracle.affine_codes(stored[0], bits, size)[0, 2])
    assert code % 2 == 0
    assert checked(raw, stored, bits) is not None
    stored[0].view(np.uint8)[0, 2 * bits // 8] += 1
    assert oracle.affine_codes(stored[0], bits, size)[0, 2] == code + 1
    assert checked(raw, stored, bits) is None


def test_bits_are_rounded_as_by_the_oracle():
    every = np.arange(0x7F80, dtype=np.uint32) << 16
    near = np.concatenate([every + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001)])
    x = np.concatenate([near, near | 0x80000000]).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(round_bits(x) >> 16, oracle.f32_to_bf16(x))


# --- blocks ---


@every_layout
def test_a_block_is_what_the_plain_formulas_make_of_it(bits, size):
    raw = mostly_ordinary(bits, size)
    raw = raw[: len(raw) // 2 * 2].reshape(-1, 2 * size)
    m = module(bits, size, 2 * size)
    rows = expected(m, [raw])
    plain = decoded_error(m, rows, rows.stored)
    before = raw.tobytes()
    assert_same(fast_check.affine_error(m, [raw], rows.stored, 0.0, scratch_of(m)), plain)
    assert fast_check.affine_error(m, [raw], rows.stored, plain.share / 2, scratch_of(m)).share == plain.share
    assert fast_check.affine_error(m, [raw], rows.stored, 0.999, scratch_of(m)).share == max(
        plain.share, np.float32(0.999)
    )
    assert raw.tobytes() == before


@every_layout
def test_any_difference_leaves_the_block_to_the_plain_formulas(bits, size):
    raw = mostly_ordinary(bits, size)
    m, rng = module(bits, size, size), np.random.default_rng(bits)
    stored = expected(m, [raw]).stored
    odd = np.flatnonzero(is_odd(raw))
    for part in (0, 1, 2):
        for row in (0, len(raw) - 1, rng.integers(len(raw)), rng.choice(odd)):
            wrong = [a.copy() for a in stored]
            wrong[part][row, rng.integers(wrong[part].shape[1])] ^= 1 << 3
            assert fast_check.affine_error(m, [raw], wrong, 0.0, scratch_of(m)) is None


def test_too_many_odd_groups_are_left_to_the_plain_formulas():
    raw = raw_values(KINDS["some_nan"](np.random.default_rng(0), 64, 4), "BF16")
    m = module(4, 64, 64)
    assert fast_check.affine_error(m, [raw], expected(m, [raw]).stored, 0.0, scratch_of(m)) is None


@every_layout
@pytest.mark.parametrize("spread", [0, 3])
def test_no_share_is_above_its_bound(monkeypatch, bits, size, spread):
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((300, size)) * 10.0 ** rng.uniform(-spread, spread, (300, 1))
    raw, m, seen = raw_values(x.astype("f4"), "BF16"), module(bits, size, size), []
    bounds = fast_check._bounds
    monkeypatch.setattr(fast_check, "_bounds", lambda *a: seen.append(bounds(*a)) or seen[-1].copy())
    rows = expected(m, [raw])
    assert fast_check.affine_error(m, [raw], rows.stored, 0.0, scratch_of(m)) is not None
    for i, bound in enumerate(seen[0]):
        one = expected(m, [raw[i : i + 1]])
        assert decoded_error(m, one, one.stored).share <= bound


def test_the_plain_formulas_have_little_to_do(monkeypatch):
    raw = raw_values(np.random.default_rng(0).standard_normal((32768, 64), np.float32), "BF16")
    m, judged = module(4, 64, 64), []
    plainly = fast_check.decoded_error
    monkeypatch.setattr(fast_check, "decoded_error", lambda *a: judged.append(len(a[2][0])) or plainly(*a))
    assert fast_check.affine_error(m, [raw], expected(m, [raw]).stored, 0.0, scratch_of(m)) is not None
    assert 0 < sum(judged) < 0.02 * len(raw)


def test_what_is_known():
    assert fast_check.is_known(module(4, 64, 64))
    assert fast_check.is_known(module(8, 32, 64, "NVFP4"))
    assert not fast_check.is_known(module(6, 64, 64))
    assert not fast_check.is_known(module(4, 64, 64, "F32"))
    assert not fast_check.is_known(replace(module(4, 64, 64), precision=Float("BF16")))
    assert not fast_check.is_known(replace(module(4, 64, 64, "NVFP4"), precision=Quantized("nvfp4", 4, 16)))
