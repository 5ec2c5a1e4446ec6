"""config.json: which ones are refused, and what the converted repository says."""

import json
import re

import pytest
from conftest import REFERENCE, SMALL_CONFIG
from motif_convert.convert import motif
from motif_convert.convert.config import built_config, check_config
from motif_convert.convert.model_args import model_args
from motif_convert.quantize.errors import SourceError
from motif_convert.quantize.precision import Quantized

TINY_CONFIG = json.loads((REFERENCE / "tiny-motif3" / "config.json").read_text())
FLAT_ROPE = ("rope_factor", "original_seq_len", "mscale", "rope_theta")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_noise_heads", "head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
    "kv_lora_rank", "moe_intermediate_size", "num_experts", "experts_top_k", "sliding_window",
    "sliding_window_period", "mhc_expansion_rate", "mhc_sinkhorn_iters",
)  # fmt: skip
NUMBERS = (
    "rms_norm_eps", "rope_theta", "swa_rope_theta", "route_scale", "polynorm_output_scale", "rope_factor",
    "original_seq_len", "mscale", "mhc_h_post_alpha_end",
)  # fmt: skip


def problem(config: dict) -> str:
    with pytest.raises(SourceError) as refusal:
        check_config(config)
    assert str(refusal.value).startswith("config.json: ")
    assert len(str(refusal.value)) < 1000
    return str(refusal.value)


def without(config: dict, *keys: str) -> dict:
    return {k: v for k, v in config.items() if k not in keys}


# --- what is taken ---


@pytest.mark.parametrize(
    "config",
    [
        SMALL_CONFIG,
        TINY_CONFIG,
        without(TINY_CONFIG, "auto_map", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
        without(TINY_CONFIG, *FLAT_ROPE),
        without(TINY_CONFIG, "rope_scaling"),
        TINY_CONFIG | {"rope_scaling": None},
        without(TINY_CONFIG, "num_nextn_predict_layers", "num_shared_experts"),
        TINY_CONFIG | {"polynorm_bias_clamp": None, "hidden_clamp": None, "quantization_config": None},
        TINY_CONFIG | {"rope_theta": 10000, "a_key_of_tomorrow": {"a": [1]}},
    ],
    ids=["small", "tiny", "no optional keys", "nested rope", "flat rope", "null rope", "no counts", "nulls", "others"],
)
def test_right_config(config):
    check_config(config)


ODD = (
    {"num_noise_heads": 1},
    {"num_attention_heads": 4},
    {"qk_rope_head_dim": 3},
    {"num_shared_experts": 2},
    {"num_nextn_predict_layers": 2},
    {"experts_top_k": 99},
    {"hidden_clamp": 5.0},
    {"hidden_clamp": 1e6},
    {"mtp_compute_dtype": "int8"},
    {"mtp_compute_dtype": "float16"},
    {"attention_cls": "mha"},
    {"rope_scaling": {"rope_type": "linear"}},
    {"rope_scaling": {"factor": 3.0}},
    {"rope_scaling": {"factor": 8.0, "mscale": 0.7}, "a_key_of_tomorrow": 1},
)


@pytest.mark.parametrize("config", [SMALL_CONFIG, TINY_CONFIG, *(SMALL_CONFIG | odd for odd in ODD)])
def test_arguments_without_the_model_are_the_model_s(config):
    def made(args: type) -> dict | str:
        try:
            return vars(args.from_dict(config))
        except ValueError as e:
            return str(e)

    assert made(model_args()) == made(motif.ModelArgs)


# --- what is refused ---


@pytest.mark.parametrize("value", [None, "motif", "llama", ["Motif"], 3])
def test_another_model(value):
    assert problem(SMALL_CONFIG | {"model_type": value}).endswith(
        f"model_type is {value!r}, not 'Motif'; not a Motif-3"
    )


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [None, 0, -1, 2.0, True, "64", [64], 2**31])
def test_size_that_is_none(key, value):
    assert f"{key} is {value!r}, not a positive whole number" in problem(SMALL_CONFIG | {key: value})


@pytest.mark.parametrize("key", ["n_dense_first_layers", "num_shared_experts", "num_nextn_predict_layers"])
@pytest.mark.parametrize("value", [None, -1, 1.0, False, "1", []])
def test_count_that_is_none(key, value):
    assert f"{key} is {value!r}, not a whole number" in problem(SMALL_CONFIG | {key: value})


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [None, "1e-5", True, [1.0], float("nan"), float("inf")])
def test_number_that_is_none(key, value):
    """A null as well: the model would fail on it only when it is loaded."""
    assert key in problem(SMALL_CONFIG | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 0), ("swa_rope_theta", -1.0), ("original_seq_len", 0), ("rms_norm_eps", -1e-5)],
)
def test_number_that_has_to_be_positive(key, value):
    assert key in problem(SMALL_CONFIG | {key: value})


def test_every_wrong_key_is_listed():
    wrong = {"hidden_size": 0, "num_experts": "8", "route_scale": "2", "n_dense_first_layers": -1}
    message = problem(SMALL_CONFIG | wrong)
    for key, value in wrong.items():
        assert f"\n  - {key} is {value!r}" in message


@pytest.mark.parametrize("key", [*SIZES, "n_dense_first_layers", "rms_norm_eps", "route_norm", "polynorm_output_scale"])
def test_a_key_that_is_missing(key):
    assert key in problem(without(SMALL_CONFIG, key))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_cls", "mla"),
        ("diff_v2", False),
        ("k_ratio", 2),
        ("elementwise_attn_output_gate", False),
        ("headwise_attn_output_gate", True),
        ("hidden_act", "silu"),
        ("polynorm_sigmoid_weight", False),
        ("interleave_moe_layer_step", 2),
        ("score_func", "softmax"),
        ("score_before_experts", True),
        ("mhc_enabled", False),
        ("use_sliding_window", False),
        ("sliding_window_pattern", "every"),
        ("tie_word_embeddings", True),
    ],
)
def test_what_the_model_does_not_implement(key, value):
    assert f"{key} is {value!r}; only" in problem(SMALL_CONFIG | {key: value})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_noise_heads": 2}, "num_noise_heads"),
        ({"num_attention_heads": 10}, "num_attention_heads"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"qk_rope_head_dim": 40}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"experts_top_k": 6}, "experts_top_k"),
        ({"num_shared_experts": 2}, "num_shared_experts"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"hidden_clamp": 10.0}, "hidden_clamp"),
        ({"route_norm": "false"}, "route_norm"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "apply_yarn_scaling": True}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": "32"}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_slow": None}}, "beta_slow"),
        ({"beta_fast": [32]}, "beta_fast"),
    ],
)
def test_values_that_do_not_go_together(change, key):
    assert key in problem(SMALL_CONFIG | change)


@pytest.mark.parametrize(
    ("key", "value"),
    [("factor", "64"), ("original_max_position_embeddings", True), ("mscale", None), ("rope_theta", [1e4])],
)
def test_nested_number_that_is_none(key, value):
    config = without(TINY_CONFIG, *FLAT_ROPE)
    config["rope_scaling"] = TINY_CONFIG["rope_scaling"] | {key: value}
    message = problem(config)
    assert re.search("rope_factor|original_seq_len|mscale|rope_theta|rope_scaling", message)


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
@pytest.mark.parametrize(
    ("scheme", "shown"),
    [({"quant_method": "fp8", "bits": 8}, "'fp8'"), ({"bits": 4, "group_size": 64}, "4"), ("awq", "'awq'")],
)
def test_a_source_that_is_quantized(key, scheme, shown):
    message = problem(SMALL_CONFIG | {key: scheme})
    assert "quantization_config is " in message
    assert shown in message
    assert "BF16 and modelopt_nvfp4 can be read" in message


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "rope_theta", "quantization_config", "score_func"])
def test_a_value_of_megabytes_is_not_printed(key):
    problem(SMALL_CONFIG | {key: "x" * 1_000_000})


# --- what is written ---

Q4, Q8 = Quantized("affine", 4, 64), Quantized("affine", 8, 32)
HEAD = {"torch_dtype": "bfloat16", "num_nextn_predict_layers": 1}


def test_keys_of_the_source_stay():
    built = built_config(TINY_CONFIG, {}, None, HEAD)
    kept = without(TINY_CONFIG, "auto_map", "rope_scaling")
    assert {key: built.get(key) for key in kept} == kept


@pytest.mark.parametrize("key", ["auto_map", "_name_or_path", "quantization_config", "quantization", "rope_scaling"])
def test_keys_that_would_mislead_go(key):
    assert key not in built_config(TINY_CONFIG | {key: None} if key not in TINY_CONFIG else TINY_CONFIG, {}, None, HEAD)


def test_the_model_file_is_ours():
    assert built_config(TINY_CONFIG | {"model_file": "evil.py"}, {}, None, HEAD)["model_file"] == "motif.py"


def test_nested_rope_becomes_flat():
    nested = {"rope_type": "yarn", "factor": 7.0, "original_max_position_embeddings": 99, "mscale": 0.5}
    nested |= {"beta_fast": 31.0, "beta_slow": 2.0, "rope_theta": 123.0}
    source = without(TINY_CONFIG, *FLAT_ROPE) | {"rope_scaling": nested}
    built = built_config(source, {}, None, HEAD)
    expected = {"rope_factor": 7.0, "original_seq_len": 99, "mscale": 0.5, "beta_fast": 31.0, "beta_slow": 2.0}
    assert {key: built[key] for key in expected} == expected
    assert built["rope_theta"] == 123.0
    check_config(built)


def test_the_source_is_left_as_it_was():
    before = json.dumps(TINY_CONFIG)
    built_config(TINY_CONFIG, {"lm_head": Q4}, Q4, HEAD)
    assert json.dumps(TINY_CONFIG) == before


def test_the_quantization_map():
    built = built_config(SMALL_CONFIG, {"lm_head": Q8, "model.layers.0.self_attn.wo": Q4}, Q4, HEAD)
    assert built["quantization"] == {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "lm_head": {"group_size": 32, "bits": 8, "mode": "affine"},
        "model.layers.0.self_attn.wo": {"group_size": 64, "bits": 4, "mode": "affine"},
    }
    assert built["quantization_config"] == built["quantization"]


def test_nothing_quantized_has_no_map():
    assert not {"quantization", "quantization_config"} & built_config(SMALL_CONFIG, {}, None, HEAD).keys()


def test_what_became_of_the_head_overrides_the_source():
    head = {"torch_dtype": "float32", "num_nextn_predict_layers": 0}
    built = built_config(TINY_CONFIG, {}, None, head)
    assert (built["torch_dtype"], built["num_nextn_predict_layers"]) == ("float32", 0)


@pytest.mark.parametrize("source", [SMALL_CONFIG, TINY_CONFIG], ids=["small", "tiny"])
def test_what_is_written_is_a_right_config_and_json(source):
    built = built_config(source, {"lm_head": Q4}, Q4, HEAD)
    assert json.loads(json.dumps(built, allow_nan=False)) == built
    check_config(without(built, "quantization", "quantization_config"))
