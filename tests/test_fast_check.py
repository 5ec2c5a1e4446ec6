"""Verify's fast route: the same as the plain formulas on groups of every kind, and not content where those are not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL_CONFIG, random_weights, write_checkpoint
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize import oracle
from motif_convert.quantize.precision import Float, Quantized
from motif_convert.recipes import pipeline
from motif_convert.validate import contents, fast_check
from motif_convert.validate.arithmetic import decoded_error, expected
from motif_convert.validate.layout import Comparison, Part
from motif_convert.validate.planes import bf16_pairs, nvfp4_planes, round_bits, rounded_pairs
from motif_convert.validate.tile import check_tile
from motif_convert.validate.verify import verify_repo
from test_oracle import KINDS, raw_values, trouble

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


def assert_same(quick, plain):
    assert (quick.steps, quick.share) == (plain.steps, plain.share)
    assert quick.signal == pytest.approx(plain.signal, rel=1e-5)
    assert quick.noise == pytest.approx(plain.noise, rel=1e-5)


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


# --- NVFP4 ---


def nvfp4_rows(rows: int, width: int) -> list[np.ndarray]:
    """Random codes and block scales: subnormal and zero ones too, a few negative; three experts."""
    rng = np.random.default_rng(width)
    scales = rng.integers(0, 120, (rows, width // 16), np.uint8)
    scales[rng.random(scales.shape) < 0.02] |= 0x80
    scale_2 = np.array([3e-5, 1e-9, 0.7], "<f4").repeat(-(-rows // 3))[:rows]
    return [rng.integers(0, 256, (rows, width // 2), np.uint8), scales, scale_2.view("<u4")]


@every_layout
def test_nvfp4_is_decoded_as_by_the_oracle(bits, size):
    codes, scales, scale_2 = nvfp4_rows(300, size)
    planes = nvfp4_planes(codes, scales, scale_2.view("<f4"), np.empty(300 * size, np.float32))
    pairs = rounded_pairs(planes, np.empty(150 * size, np.uint32))
    exact = oracle.nvfp4_dequantize(codes, scales, scale_2.view("<f4")[:, None])
    in_order = planes.reshape(2, size // 8, 300, 4).transpose(2, 1, 3, 0).reshape(300, size)
    np.testing.assert_array_equal(in_order, exact)
    raw = pairs.reshape(size // 8, 300, 4).transpose(1, 0, 2).reshape(300, -1).copy().view(np.uint16)
    np.testing.assert_array_equal(oracle.bf16_to_f32(raw), oracle.bf16_to_f32(oracle.f32_to_bf16(exact)))


@every_layout
def test_a_block_of_nvfp4_is_what_the_plain_formulas_make_of_it(bits, size):
    m, source = module(bits, size, 512, "NVFP4"), nvfp4_rows(700, 512)
    rows = expected(m, source)
    assert_same(
        fast_check.affine_error(m, source, rows.stored, 0.0, scratch_of(m)), decoded_error(m, rows, rows.stored)
    )
    for part in (0, 1, 2):
        wrong = [a.copy() for a in rows.stored]
        wrong[part][555, -1] ^= 1
        assert fast_check.affine_error(m, source, wrong, 0.0, scratch_of(m)) is None
    source[0][699] ^= 0x22
    assert fast_check.affine_error(m, source, rows.stored, 0.0, scratch_of(m)) is None


@pytest.mark.parametrize(("part", "value"), [(1, 0x7F), (1, 0xFF), (2, 0x7F800000), (2, 0x7FC00000)])
def test_nvfp4_that_is_not_finite_is_left_to_the_plain_formulas(part, value):
    m, source = module(4, 64, 512, "NVFP4"), nvfp4_rows(9, 512)
    source[part].reshape(-1)[5] = value
    with np.errstate(all="ignore"):
        assert fast_check.affine_error(m, source, expected(m, source).stored, 0.0, scratch_of(m)) is None


# --- whole builds by both routes ---


@pytest.mark.parametrize("faulty", [False, True])
def test_a_build_by_both_routes(tmp_path, monkeypatch, faulty):
    """Blocks of several pieces, pieces of several tiles with a ragged end, groups out of the ordinary in between."""
    config = SMALL_CONFIG | {"vocab_size": 5000, "hidden_size": 1024, "moe_intermediate_size": 640}
    config |= {"num_hidden_layers": 2, "q_lora_rank": 64, "intermediate_size": 64, "mhc_expansion_rate": 2}
    weights, rng = random_weights(config), np.random.default_rng(3)
    for w in (w for w in weights.values() if w.size > 1 << 18):
        places = rng.integers(0, w.size, 40)
        w.reshape(-1)[places] = rng.choice([0x7F7F, 0xFF7F, 0x7F00, 0x8000, 0x0001], 40)
    source = write_checkpoint(tmp_path / "source", config, weights)
    job = pipeline.prepare(str(source), "4.5bit", "bf16")
    with job.checkpoint:
        pipeline.convert(job, tmp_path / "out", lambda *_: None)
    if faulty:
        (shard,) = (tmp_path / "out").glob("model*.safetensors")
        with shard.open("r+b") as f:
            for place in rng.integers(1 << 20, shard.stat().st_size - 1, 30):
                f.seek(place)
                byte = f.read(1)[0]
                f.seek(place)
                f.write(bytes([byte ^ 1 << rng.integers(8)]))
    found = []
    for known in (fast_check.is_known, lambda m: False):
        monkeypatch.setattr(contents, "is_known", known)
        with open_checkpoint(source) as checkpoint:
            found.append(verify_repo(tmp_path / "out", checkpoint, workers=1).as_dict())
    assert found[0]["offenders_total"] == (found[1]["offenders_total"] if faulty else 0)
    for rows in zip(*(f["families"] + f["layers"] for f in found), strict=True):
        noise = [row.pop("snr_db") for row in rows]
        assert noise[0] == pytest.approx(noise[1], abs=1e-4)
    assert found[0] == found[1]
