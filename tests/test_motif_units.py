"""Parts of the architecture file by themselves, and the keys of config.json that it reads."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from motif_convert.validate import torch_forward
from motif_goldens import GOLDEN, TINY_CONFIG, f64, off_by


def assert_unit(ours, name):
    np.testing.assert_allclose(f64(ours).reshape(GOLDEN[name].shape), GOLDEN[name], rtol=1e-5, atol=1e-6)


def unit(name):
    return mx.array(GOLDEN[f"unit.{name}"])


def test_polynorm(architecture):
    ours = architecture.poly_norm(
        unit("polynorm.gate"), unit("polynorm.up"), unit("polynorm.weight"), unit("polynorm.bias"), 1.0
    )
    assert_unit(ours, "unit.polynorm.out_before_output_scale")


def test_grouped_polynorm(architecture):
    """Each expert's own coefficients and clamped bias, between projections that pass on what they are given.

    Rows that reach hidden_clamp (1e6, far beyond any sane activation) are left out: the file does not implement it.
    """
    gate, up, golden = (GOLDEN[f"unit.grouped_polynorm.{x}"] for x in ("gate", "up", "out"))
    bound = TINY_CONFIG["hidden_clamp"]
    product = np.abs(golden).max(axis=(0, 2)) / TINY_CONFIG["polynorm_output_scale"]
    inert = np.max([np.abs(gate).max(axis=-1), np.abs(up).max(axis=-1), product], axis=0) < bound
    assert inert.sum() == 4
    assert np.abs(GOLDEN["unit.grouped_polynorm.bias"]).max() > TINY_CONFIG["polynorm_bias_clamp"]

    args = architecture.ModelArgs.from_dict(TINY_CONFIG | {"num_experts": len(golden)})
    experts, width = architecture.RoutedExperts(args), gate.shape[-1]
    experts.act_fn.weight, experts.act_fn.bias = unit("grouped_polynorm.weight"), unit("grouped_polynorm.bias")
    experts.gate_proj = lambda x, indices, sorted_indices: x[..., :width]
    experts.up_proj = lambda x, indices, sorted_indices: x[..., width:]
    experts.down_proj = lambda x, indices, sorted_indices: x
    every = mx.broadcast_to(mx.arange(len(golden)), (len(gate), len(golden)))
    ours = f64(experts(mx.array(np.concatenate([gate, up], axis=-1)), every).swapaxes(0, 1))
    np.testing.assert_allclose(ours[:, inert], golden[:, inert], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [1, 5, 20])
def test_sinkhorn(architecture, rounds):
    logits = mx.clip(unit("sinkhorn.logits"), -architecture.MHC_RES_CLIP, architecture.MHC_RES_CLIP)
    assert_unit(architecture.sinkhorn(mx.exp(logits), rounds), f"unit.sinkhorn.out_{rounds}")


def test_mhc_gates_clip_their_logits(architecture):
    """Gate logits of 1e3 and 1e6 both count as 10, residual ones as 20."""
    block, n = architecture.HyperConnection(architecture.ModelArgs.from_dict(TINY_CONFIG)), 4
    corner, streams = mx.zeros((n, n)).at[0, 0].add(1), mx.ones((1, 1, n, TINY_CONFIG["hidden_size"]))
    golden = torch_forward.sinkhorn(torch.from_numpy(np.array(20 * corner)), TINY_CONFIG["mhc_sinkhorn_iters"]).numpy()
    for logit in (1e3, 1e6):
        block.bias_pre, block.bias_post, block.bias_res = mx.full(n, logit), mx.full(n, -logit), logit * corner
        h_pre, h_post, h_res = (f64(x) for x in block.gates(streams))
        np.testing.assert_allclose(h_pre, 1 / (1 + np.exp(-10)), rtol=1e-6)
        np.testing.assert_allclose(h_post, 1 / (1 + np.exp(10)), rtol=1e-5)
        assert off_by(h_res[0, 0], golden) < 1e-6


def test_rmsnorm(tiny, architecture):
    norm = architecture.MotifModel(tiny.args).norm
    norm.weight = unit("rmsnorm.weight")
    assert_unit(norm(unit("rmsnorm.x")), "unit.rmsnorm.out")


ROPE_DIMS = {"tiny": {}, "real": {"head_dim": 192, "qk_rope_head_dim": 64}}  # tiny has the real YaRN facts


def rope_tolerance(inverse):
    """[positions, pairs]: the goldens' own tolerance, or two units in the last place of the angle if that is more.

    mlx takes wavelengths and divides by them, so a frequency can come out as the float32 next to the golden one (the
    golden table itself, passed as wavelengths, is as far off), and then so can the angle's own rounding.
    """
    positions = GOLDEN["rope.positions"][:, None]
    two_units = 1e-6 + positions * inverse * 2 * 2**-23
    return np.where(positions <= 4096, two_units, np.minimum(two_units, 2e-2))


@pytest.mark.parametrize("kind", ["plain", "yarn"])
@pytest.mark.parametrize("size", ROPE_DIMS)
def test_rope_tables(architecture, size, kind):
    args = architecture.ModelArgs.from_dict(TINY_CONFIG | ROPE_DIMS[size])
    attention = architecture.Attention(args, slides=kind == "plain")
    inverse = GOLDEN[f"rope.{size}.{kind}_inv_freq"]
    np.testing.assert_allclose(1 / f64(attention._frequencies), inverse, rtol=1e-6)

    positions, half = GOLDEN["rope.positions"], args.qk_rope_head_dim // 2
    one = np.repeat([1.0, 0.0], half)[None, None, None]  # turned, it is the cosines, then the sines
    turned = attention._rope(mx.array(np.repeat(one, len(positions), 0), dtype=mx.float32), mx.array(positions))
    cos, sin = np.split(f64(turned)[:, 0, 0], 2, axis=-1)
    atol = 1e-6 if kind == "plain" else rope_tolerance(inverse)
    assert (np.abs(cos - GOLDEN[f"rope.{size}.{kind}_cos"][:, :half]) <= atol).all()
    assert (np.abs(sin - GOLDEN[f"rope.{size}.{kind}_sin"][:, :half]) <= atol).all()


def test_rope_turns_halves(architecture):
    attention = architecture.Attention(architecture.ModelArgs.from_dict(TINY_CONFIG), slides=False)
    x = GOLDEN["rope.apply_in"]
    turned = attention._rope(mx.array(x[:, :, None]), mx.array(GOLDEN["rope.positions"]))
    atol = np.tile(rope_tolerance(GOLDEN["rope.tiny.yarn_inv_freq"]), 2)[:, None] * 2 * np.abs(x).max()
    assert (np.abs(f64(turned)[:, :, 0] - GOLDEN["rope.apply_out_yarn_tiny"]) <= atol).all()


def test_logits_scale_with_yarn(architecture):
    """Global layers: 192^-0.5 (0.1 ln 64 + 1)^2 for the real head; sliding ones: 192^-0.5."""
    args = architecture.ModelArgs.from_dict(TINY_CONFIG | ROPE_DIMS["real"])
    scales = [architecture.Attention(args, slides).scale for slides in (True, False)]
    assert scales == pytest.approx([192**-0.5, 192**-0.5 * (0.1 * np.log(64) + 1) ** 2], rel=1e-12)


# --- config.json ----------------------------------------------------------------------------------------------


def another(value):
    return not value if isinstance(value, bool) else value + (1 if isinstance(value, int) else "x")


def test_config_is_read(architecture):
    args = architecture.ModelArgs.from_dict(TINY_CONFIG)
    for key in args.__dataclass_fields__.keys() & TINY_CONFIG.keys():
        assert getattr(args, key) == TINY_CONFIG[key]


# Facts that the file implements one value of, which is the source's.
FIXED = (
    "model_type", "attention_cls", "diff_v2", "k_ratio", "headwise_attn_output_gate", "elementwise_attn_output_gate",
    "hidden_act", "polynorm_sigmoid_weight", "interleave_moe_layer_step", "score_func", "score_before_experts",
    "_debug_force_load_balance", "mhc_enabled", "use_sliding_window", "sliding_window_pattern", "tie_word_embeddings",
)  # fmt: skip


def test_fixed_keys_have_the_values_of_the_source(architecture):
    assert {key: TINY_CONFIG[key] for key in FIXED} == architecture.FIXED


@pytest.mark.parametrize("key", FIXED)
def test_other_value_of_a_fixed_key_is_refused(architecture, key):
    with pytest.raises(ValueError, match=f"^{key} is"):
        architecture.ModelArgs.from_dict(TINY_CONFIG | {key: another(TINY_CONFIG[key])})
    without = {k: v for k, v in TINY_CONFIG.items() if k != key}
    assert architecture.ModelArgs.from_dict(without) == architecture.ModelArgs.from_dict(TINY_CONFIG)


REQUIRED = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_noise_heads", "head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
    "kv_lora_rank", "moe_intermediate_size", "num_experts", "experts_top_k", "n_dense_first_layers",
    "sliding_window", "sliding_window_period", "mhc_expansion_rate", "mhc_sinkhorn_iters", "polynorm_output_scale",
    "polynorm_bias_clamp", "rms_norm_eps", "swa_rope_theta", "route_norm", "route_scale",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(architecture, key):
    with pytest.raises(ValueError, match=f"^{key} missing$"):
        architecture.ModelArgs.from_dict({k: v for k, v in TINY_CONFIG.items() if k != key})


def test_all_missing_keys_are_named_at_once(architecture):
    with pytest.raises(ValueError, match="missing") as e:
        architecture.ModelArgs.from_dict({})
    assert [key for key in [*REQUIRED, "rope_theta"] if key not in str(e.value)] == []


@pytest.mark.parametrize(
    ("key", "nested"),
    {
        "rope_factor": "factor",
        "original_seq_len": "original_max_position_embeddings",
        "mscale": "mscale",
        "rope_theta": "rope_theta",
    }.items(),
)
def test_rope_scaling_and_flat_keys(architecture, key, nested):
    """The nested facts stand in for flat keys that are absent, and may not contradict those that are there."""
    scaling = TINY_CONFIG["rope_scaling"] | {nested: 3}
    with pytest.raises(ValueError, match=f"rope_scaling says {key} 3"):
        architecture.ModelArgs.from_dict(TINY_CONFIG | {"rope_scaling": scaling})
    nested_only = {k: v for k, v in TINY_CONFIG.items() if k != key} | {"rope_scaling": scaling}
    assert getattr(architecture.ModelArgs.from_dict(nested_only), key) == 3


@pytest.mark.parametrize("wrong", [{"rope_type": "linear"}, {"apply_yarn_scaling": True}])
def test_other_rope_scaling_is_refused(architecture, wrong):
    with pytest.raises(ValueError, match="rope_scaling must be yarn"):
        architecture.ModelArgs.from_dict(TINY_CONFIG | {"rope_scaling": TINY_CONFIG["rope_scaling"] | wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_noise_heads": 1},
        {"num_attention_heads": 9},
        {"num_attention_heads": 2},
        {"qk_rope_head_dim": 31},
        {"qk_rope_head_dim": 96},
        {"num_shared_experts": 2},
        {"num_nextn_predict_layers": 2},
        {"experts_top_k": 9},
        {"hidden_clamp": 100.0},
        {"mtp_compute_dtype": "float64"},
    ],
    ids=str,
)
def test_value_that_does_not_fit_is_refused(architecture, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        architecture.ModelArgs.from_dict(TINY_CONFIG | wrong)
