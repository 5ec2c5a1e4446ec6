"""NaN and infinite weights: found wherever they are, refused by name, kept on request where nothing is computed."""

from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL_CONFIG, motif_convert, random_weights, read_safetensors, write_checkpoint
from motif_convert.quantize.kernels import bf16_to_f32, first_nonfinite

BITS = {"nan": 0x7FC0, "-nan": 0xFFFF, "inf": 0x7F80, "-inf": 0xFF80}


def as_floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    return bf16_to_f32(raw) if dtype == "BF16" else raw


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", "<u2"), ("F16", "<f2"), ("F32", "<f4")])
def test_first_nonfinite_is_numpy_s(dtype, kind):
    """Random bits, of which one in a few hundred is not finite, in arrays of every length."""
    rng = np.random.default_rng(0)
    for size in [0, 1, 2, 63, 1000] * 20:
        raw = rng.integers(0, 256, size * np.dtype(kind).itemsize, np.uint8).view(kind)
        wrong = np.flatnonzero(~np.isfinite(as_floats(raw, dtype)))
        assert first_nonfinite(raw, dtype) == (wrong[0] if len(wrong) else None)


def test_every_bf16_alone_among_finite_ones():
    for bits in range(0, 1 << 16, 7):
        raw = np.array([0x3F80, bits, 0xBF80], "<u2")
        assert (first_nonfinite(raw, "BF16") is None) == np.isfinite(bf16_to_f32(raw)).all()


def source_with(folder: Path, name: str, place: tuple[int, ...], bits: int) -> Path:
    weights = random_weights(SMALL_CONFIG)
    weights[name][place] = bits
    return write_checkpoint(folder, SMALL_CONFIG, weights)


@pytest.mark.parametrize("value", BITS)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.0.mlp.down_proj.weight", (5, 17)),
        ("model.layers.1.moe.experts.gate_up_proj", (4, 200, 63)),
        ("model.layers.2.moe.experts.down_proj", (0, 0, 0)),
        ("model.norm.weight", (63,)),
        ("model.mtp_layers.0.input_proj.weight", (1, 127)),
    ],
)
def test_named_by_file_tensor_and_place(name, place, value, tmp_path):
    source = source_with(tmp_path / "source", name, place, BITS[value])
    result = motif_convert("convert", "--source", source, "--out", tmp_path / "out")
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith("motif-convert: error: model-0000")
    assert f"{name}{list(place)} is {value.lstrip('-') if 'nan' in value else value}," in line
    assert ("--allow-nonfinite" in line) == ("norm" in name or "mtp" in name)
    assert not (tmp_path / "out").exists()


def test_kept_on_request_where_nothing_is_computed(tmp_path):
    name = "model.layers.1.input_layernorm.weight"
    source = source_with(tmp_path / "source", name, (3,), BITS["-inf"])
    out = ("--source", source, "--out", tmp_path / "out", "--allow-nonfinite")
    result = motif_convert("convert", *out)
    assert result.returncode == 0, result.stderr
    assert read_safetensors(tmp_path / "out")[name] == read_safetensors(source)[name]
    assert motif_convert("verify", tmp_path / "out", "--source", source).returncode == 0
    assert "--allow-nonfinite" in (tmp_path / "out" / "README.md").read_text()


def test_never_quantized(tmp_path):
    source = source_with(tmp_path / "source", "lm_head.weight", (0, 1), BITS["nan"])
    result = motif_convert("convert", "--source", source, "--out", tmp_path / "out", "--allow-nonfinite")
    assert result.returncode == 2
    assert "lm_head.weight[0, 1] is nan" in result.stderr
