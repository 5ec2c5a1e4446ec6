"""Plans of tensors that do not fit their config, and of heads that are not whole."""

import json
import re

import pytest
from checkpoints import refused
from conftest import SMALL_CONFIG
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.convert.planner import make_plan
from motif_convert.quantize.errors import RecipeError, SourceError
from motif_convert.recipes.recipe import parse_recipe
from plans import POLICIES, is_head, plan_of, planned_tensors, small_tensors, write_small
from test_checkpoint import sparse_checkpoint

# --- tensors that do not fit ---


SHARD = "model-00001-of-00001.safetensors"


def test_every_tensor_that_does_not_fit_is_listed(tmp_path):
    folder = write_small(
        tmp_path / "source",
        drop=("model.layers.1.mhc_attn.alpha_pre", "model.layers.2.self_attn.wo"),
        add={
            "model.layers.0.self_attn.wq_c.weight": ("BF16", (64, 64), SHARD),
            "model.layers.7.input_layernorm.weight": ("BF16", (64,), SHARD),
            "model.layers.1.moe.experts.down_proj": ("BF16", (5, 128, 64), SHARD),
            "model.norm.weight": ("BF16", (1, 64), SHARD),
            "model.layers.0.mlp.up_proj.weight": ("I32", (192, 64), SHARD),
            "lm_head.weight": ("U8", (160, 64), SHARD),
        },
    )
    work = tmp_path / "work"
    work.mkdir()
    message = refused(work, "plan", "--source", folder)
    for line in (
        "model.layers.1.mhc_attn.alpha_pre: missing",
        "model.layers.2.self_attn.wo.weight: missing",
        f"model.layers.0.self_attn.wq_c.weight: not a tensor of this model ({SHARD})",
        f"model.layers.7.input_layernorm.weight: not a tensor of this model ({SHARD})",
        f"model.layers.1.moe.experts.down_proj: shape [5, 128, 64], config.json means [5, 64, 128] ({SHARD})",
        f"model.norm.weight: shape [1, 64], config.json means [64] ({SHARD})",
        f"model.layers.0.mlp.up_proj.weight: dtype I32, not one of BF16, F16, F32 ({SHARD})",
        f"lm_head.weight: dtype U8, not one of BF16, F16, F32 ({SHARD})",
    ):
        assert f"  - {line}\n" in message
    assert message.count("\n  - ") == 8


@pytest.mark.parametrize("first", [0, 1])
def test_no_tensor_may_be_missing(tmp_path, first):
    """Every other tensor is missing, so that the two runs name all."""
    present = dict(list(small_tensors().items())[1 - first :: 2])
    with pytest.raises(SourceError) as refusal:
        plan_of(sparse_checkpoint(tmp_path / "source", SMALL_CONFIG, present))
    assert re.findall(r"- (\S+): missing", str(refusal.value)) == list(small_tensors())[first::2]


def test_a_config_of_another_size_lists_what_it_means(tmp_path):
    folder = sparse_checkpoint(tmp_path / "source", SMALL_CONFIG | {"moe_intermediate_size": 64}, small_tensors())
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    expected = [n for n in small_tensors() if re.search(r"experts.*_proj", n)]
    assert re.findall(r"  - (\S+): shape ", str(refusal.value)) == expected


def test_a_config_of_many_more_layers_is_no_flood(tmp_path):
    """A mistyped number of layers is one mistake, not a line for each of a million tensors."""
    folder = write_small(tmp_path / "source")
    (folder / "config.json").write_text(json.dumps(SMALL_CONFIG | {"num_hidden_layers": 400}))
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    assert len(str(refusal.value)) < 100_000


def test_names_cannot_fake_a_message(tmp_path):
    folder = write_small(tmp_path / "source", add={"\x1b[2J\nmotif-convert: error: fine": ("U8", (1,), SHARD)})
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    assert all(line.isprintable() and not line.startswith("motif") for line in str(refusal.value).splitlines())


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_scales_have_the_dtype_of_the_source(tmp_path, dtype):
    folder = sparse_checkpoint(tmp_path / "source", SMALL_CONFIG, small_tensors(dtype))
    plan = plan_of(folder, "8bit", "8")
    found = {t.name: (t.dtype, t.nbytes) for m in plan.modules for t in m.stored}
    size = {"F16": 2, "F32": 4}[dtype]
    assert found["model.layers.1.mlp.switch_mlp.up_proj.weight"] == ("U32", 5 * 128 * 64)
    assert found["model.layers.1.mlp.switch_mlp.up_proj.scales"] == (dtype, 5 * 128 * size)
    assert found["mtp.input_proj.biases"] == (dtype, 64 * 2 * size)
    assert found["mtp.embed_norm.weight"] == found["model.norm.weight"] == (dtype, 64 * size)
    assert plan.config_keys()["torch_dtype"] == {"F16": "float16", "F32": "float32"}[dtype]


def test_a_tensor_of_another_float_dtype_keeps_it(tmp_path):
    name = "model.layers.1.moe.expert_bias"
    folder = write_small(tmp_path / "source", add={name: ("F32", (5,), SHARD)})
    plan = planned_tensors(plan_of(folder, "4.5bit").as_dict())
    assert plan["model.layers.1.mlp.gate.expert_bias"] == (name, "F32", (5,), None, 20)
    assert plan["model.layers.1.mlp.gate.weight"][1] == "BF16"


# --- the MTP head ---


def test_a_head_that_is_declared_but_absent(tmp_path):
    with pytest.raises(SourceError, match=r"num_nextn_predict_layers is 1, but .* no model\.mtp_layers\.0\.\* tensors"):
        plan_of(write_small(tmp_path / "source", drop=("model.mtp_layers",)))


def test_a_head_that_lacks_a_part(tmp_path):
    folder = write_small(tmp_path / "source", drop=("model.mtp_layers.0.embed_norm", "model.mtp_layers.0.self_attn.wo"))
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    assert str(refusal.value).count("model.mtp_layers.0.embed_norm.weight: missing") == 1
    assert str(refusal.value).count("missing") == 2


def test_a_head_that_is_not_declared(tmp_path):
    """The remedy is in config.json, so the message has to name the key."""
    head = {name: info for name, info in small_tensors().items() if is_head(name)}
    with pytest.raises(SourceError, match=r"model\.mtp_layers\.0\.") as refusal:
        plan_of(write_small(tmp_path / "source", add=head, num_nextn_predict_layers=0))
    assert "num_nextn_predict_layers" in str(refusal.value)


def test_two_heads(tmp_path):
    head = {name: info for name, info in small_tensors().items() if is_head(name)}
    second = {name.replace("layers.0.", "layers.1."): info for name, info in head.items()}
    with pytest.raises(SourceError, match=r"2 MTP layers \(model\.mtp_layers\.\*\); one is supported"):
        plan_of(write_small(tmp_path / "one", add=second))
    folder = write_small(tmp_path / "two", add=second)
    (folder / "config.json").write_text(json.dumps(SMALL_CONFIG | {"num_nextn_predict_layers": 2}))
    with pytest.raises(SourceError, match="num_nextn_predict_layers is 2; one MTP layer at most"):
        plan_of(folder)


@pytest.mark.parametrize("mtp", POLICIES)
def test_a_policy_for_a_head_that_is_not_there(tmp_path, mtp):
    folder = write_small(tmp_path / "source", num_nextn_predict_layers=0)
    with pytest.raises(RecipeError, match=f"--mtp {mtp}: this checkpoint has no MTP head"):
        plan_of(folder, mtp=mtp)


@pytest.mark.parametrize("recipe", ["mtp: drop", "mtp: fp16", "mtp: '8'", ""])
def test_a_recipe_may_name_a_policy_for_a_head_that_is_not_there(tmp_path, recipe):
    folder = write_small(tmp_path / "source", num_nextn_predict_layers=0)
    rules = parse_recipe(f"name: r\n{recipe}\nrules:\n  - match: '*'\n    dtype: source\n", "r.yaml")
    with open_checkpoint(folder) as checkpoint:
        plan = make_plan(checkpoint, rules)
    assert (plan.mtp, plan.has_mtp, plan.dropped) == ("none", False, ())
    assert plan.config_keys() == {"torch_dtype": "bfloat16", "num_nextn_predict_layers": 0}


CONFIG_KEYS = {
    "bf16": {"num_nextn_predict_layers": 1, "mtp_dtype": "bfloat16", "mtp_compute_dtype": "bfloat16"},
    "fp16": {"num_nextn_predict_layers": 1, "mtp_dtype": "float16", "mtp_compute_dtype": "bfloat16"},
    "8": {"num_nextn_predict_layers": 1},
    "4.5": {"num_nextn_predict_layers": 1},
    "drop": {"num_nextn_predict_layers": 0},
}


@pytest.mark.parametrize(("mtp", "keys"), CONFIG_KEYS.items())
def test_config_says_what_became_of_the_head(tmp_path, mtp, keys):
    plan = plan_of(write_small(tmp_path / "source"), mtp=mtp)
    assert plan.config_keys() == keys | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize(("mtp", "bits"), [("8", 8), ("4.5", 4)])
def test_inputs_of_the_head_that_groups_do_not_divide(tmp_path, mtp, bits):
    folder = write_small(tmp_path / "source", intermediate_size=200)
    message = f"MTP policy {mtp}: group_size 64 does not divide the inputs: mtp.mlp.down_proj has 200 inputs"
    with pytest.raises(RecipeError) as refusal:
        plan_of(folder, mtp=mtp)
    assert str(refusal.value) == message
    for fits in ("bf16", "fp16", "drop"):
        plan_of(folder, mtp=fits)


def test_quantized_sources_are_refused(tmp_path):
    folder = write_small(tmp_path / "source", quantization_config={"quant_method": "fp8", "bits": 8})
    work = tmp_path / "work"
    work.mkdir()
    message = refused(work, "plan", "--source", folder)
    assert "config.json" in message
    assert "quantization_config is 'fp8'; BF16 and modelopt_nvfp4 can be read" in message
