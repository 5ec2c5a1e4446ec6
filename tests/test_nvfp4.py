"""The NVFP4 checkpoint: recognised, passed through, and decoded."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, motif_convert, read_safetensors
from mlx.utils import tree_map
from mlx_lm.utils import load_model
from nvfp4_sources import STACKS, TINY
from nvfp4_writer import unpack, write_nvfp4


@pytest.fixture
def experts_only(tmp_path) -> Path:
    """A recipe that keeps all but the experts in BF16."""
    recipe = tmp_path / "experts-only.yaml"
    recipe.write_text(
        "name: experts-only\nrules:\n"
        "  - {match: '*.switch_mlp.*', mode: affine, bits: 4, group_size: 64}\n"
        "  - {match: '*', dtype: source}\n"
    )
    return recipe


def parts(stack: str) -> dict[str, slice]:
    """MLX modules that a stack becomes, and which rows of it."""
    base = stack.replace(".moe.experts.", ".mlp.switch_mlp.")
    if stack.endswith("down_proj"):
        return {base: slice(None)}
    return {base.replace("gate_up", "gate"): slice(0, 64), base.replace("gate_up", "up"): slice(64, 128)}


def array(tensor: tuple, dtype: str) -> np.ndarray:
    *lead, _ = tensor[1]
    return np.frombuffer(tensor[2], dtype).reshape(*lead, -1)


def float32_model(folder: Path):
    model, _ = load_model(folder, trust_remote_code=True)
    floats = tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
    model.update(floats)
    return model


def test_experts_pass_through_byte_for_byte(built):
    made, source = read_safetensors(built(TINY)), read_safetensors(TINY)
    for stack in STACKS:
        codes, blocks = array(source[stack], "u1"), array(source[stack + "_weight_scale"], "u1")
        scale = array(source[stack + "_weight_scale_2"], "<f4")
        for path, rows in parts(stack).items():
            assert made[f"{path}.weight"][0] == "U32"
            assert made[f"{path}.weight"][2] == codes[:, rows].tobytes()
            assert made[f"{path}.scales"][0] == "U8"
            assert made[f"{path}.scales"][2] == blocks[:, rows].tobytes()
            assert made[f"{path}.global_scale"] == ("F32", (8,), (scale * np.float32(2688)).tobytes())
            assert f"{path}.biases" not in made


def test_decoded_weights_equal_the_reference(built):
    made, exact = read_safetensors(built(TINY)), mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors"))
    for stack in STACKS:
        expected = np.array(exact[stack])
        for path, rows in parts(stack).items():
            codes = array(made[f"{path}.weight"], "u1")
            scale = array(made[f"{path}.global_scale"], "<f4").astype(np.float64) / 2688
            values = unpack(codes, array(made[f"{path}.scales"], "u1"), np.ones(8)).astype(np.float64)
            values = (values * scale[:, None, None]).astype(np.float32)
            ulps = np.abs(values.view("<i4").astype(np.int64) - expected[:, rows].view("<i4"))
            assert ulps.max() <= 1, path


def test_logits_equal_the_reference(built, experts_only):
    goldens = mx.load(str(REFERENCE / "tiny-goldens.safetensors"))
    model = float32_model(built(TINY, "--recipe", str(experts_only)))
    logits = model(goldens["input_ids"][None])[0]
    assert mx.abs(logits - goldens["nvfp4.logits"]).max() < 1e-4


def test_bf16_recipe_rounds_the_exact_values(built):
    made, exact = (
        read_safetensors(built(TINY, "--recipe", "bf16")),
        mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors")),
    )
    for stack in STACKS:
        rounded = np.array(exact[stack].astype(mx.bfloat16).view(mx.uint16))
        for path, rows in parts(stack).items():
            assert made[f"{path}.weight"][2] == rounded[:, rows].tobytes()


@pytest.mark.parametrize(("options", "bits"), [(("--bits", "8"), 8), (("--experts", "affine"), 4)])
def test_quantized_again_equals_mx_quantize_of_the_decoded_stack(built, options, bits):
    made = read_safetensors(built(TINY, *options))
    exact = mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors"))
    for stack in STACKS:
        decoded = exact[stack].astype(mx.bfloat16)
        for path, rows in parts(stack).items():
            q, scales, biases = mx.quantize(decoded[:, rows], group_size=64, bits=bits, stream=mx.cpu)
            assert made[f"{path}.weight"][2] == np.array(q).tobytes()
            assert made[f"{path}.scales"][2] == np.array(scales.view(mx.uint16)).tobytes()
            assert made[f"{path}.biases"][2] == np.array(biases.view(mx.uint16)).tobytes()


def test_scattered_shards_give_the_same_weights(small, tmp_path):
    made = []
    for seed, shards in ((1, 2), (2, 7)):
        source = write_nvfp4(small, tmp_path / f"source{seed}", shards, seed)
        result = motif_convert("convert", "--source", source, "--out", tmp_path / f"out{seed}")
        assert result.returncode == 0, result.stderr
        made.append(read_safetensors(tmp_path / f"out{seed}"))
    assert made[0] == made[1]


def test_config_says_what_was_written(built):
    config = json.loads((built(TINY) / "config.json").read_text())
    expert = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}
    assert config["quantization"]["model.layers.2.mlp.switch_mlp.up_proj"] == expert
    assert config["quantization_config"] == config["quantization"]
    assert "byte for byte" in config["experts_from"]
    provenance = json.loads((built(TINY) / "motif-convert.json").read_text())
    assert provenance["experts"] == {"from": config["experts_from"], "requantize": False, "requantized": None}


def test_inspect_and_plan_say_where_the_experts_come_from(built):
    found = json.loads(motif_convert("inspect", built(TINY), "--json").stdout)
    experts = next(f for f in found["families"] if f["family"] == "routed experts")
    assert "nvfp4 4-bit, group 16" in experts["precisions"]
    assert "byte for byte" in found["experts_from"]
    plan = motif_convert("plan", "--source", TINY)
    assert "Routed experts: from NVFP4" in plan.stdout
    assert "nvfp4_act_scales.safetensors: activation scales" in plan.stdout
    assert not (built(TINY) / "nvfp4_act_scales.safetensors").exists()


def test_quantizing_again_warns_and_reports_the_error(tmp_path):
    result = motif_convert("convert", "--source", TINY, "--experts", "affine", "--out", tmp_path / "out")
    assert "WARNING" in result.stderr
    assert "twice" in result.stderr
    report = json.loads((tmp_path / "out" / "motif-convert.json").read_text())["experts"]["requantized"]
    exact = mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors"))
    error = power = 0.0
    for stack in STACKS:
        for expert in (0, 4, 7):
            w = exact[stack][expert]
            again = mx.dequantize(*mx.quantize(w.astype(mx.bfloat16), 64, 4, stream=mx.cpu), 64, 4, stream=mx.cpu)
            error += float(((again.astype(mx.float32) - w) ** 2).sum())
            power += float((w**2).sum())
    assert report["relative_rms"] == pytest.approx((error / power) ** 0.5, rel=0.01)
    assert report["experts"] == 3 * 12


def test_affine_experts_need_an_nvfp4_source(tmp_path):
    result = motif_convert("plan", "--source", REFERENCE / "tiny-motif3", "--experts", "affine")
    assert result.returncode == 2
    assert "NVFP4 source" in result.stderr


@pytest.mark.parametrize("rule", ["mode: nvfp4, bits: 4, group_size: 16", "dtype: source"])
def test_affine_experts_need_a_recipe_that_quantizes_them(rule, tmp_path):
    (tmp_path / "r.yaml").write_text(
        f"name: r\nrules:\n  - {{match: '*.switch_mlp.*', {rule}}}\n  - {{match: '*', dtype: source}}\n"
    )
    for recipe in (tmp_path / "r.yaml", "bf16"):
        result = motif_convert("plan", "--source", TINY, "--recipe", recipe, "--experts", "affine")
        assert result.returncode == 2
        assert "quantizes no experts affinely" in result.stderr
