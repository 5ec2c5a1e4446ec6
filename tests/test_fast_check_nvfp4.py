"""The fast check of NVFP4 sources, and whole builds by both routes."""

import numpy as np
import pytest
from conftest import SMALL_CONFIG, random_weights, write_checkpoint
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize import oracle
from motif_convert.recipes import pipeline
from motif_convert.validate import contents, fast_check
from motif_convert.validate.arithmetic import decoded_error, expected
from motif_convert.validate.planes import nvfp4_planes, rounded_pairs
from motif_convert.validate.verify import verify_repo
from tiles import assert_same, every_layout, module, scratch_of

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
