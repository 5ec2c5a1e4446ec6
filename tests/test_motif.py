"""The architecture file as users get it: converted by the installed command, loaded by mlx-lm, against the
reference's goldens and itself cut into pieces.

Weights are upcast to float32 where numbers are compared; tolerances of goldens are those that their JSON states."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE
from mlx_lm.models.base import create_causal_mask
from motif_goldens import GOLDEN, GOLDENS, TAPPED, TINY, assert_golden, load, off_by, record, rows


def mlp_taps(at, mlp, norm):
    """From the golden input: rounding alone moves the cubes in `act` by its tolerance over a few layers."""
    x = mx.array(GOLDEN[norm][None])
    calls = record(mlp, lambda: mlp(x))
    return {
        f"{at}.gate": calls["gate_proj"][1],
        f"{at}.up": calls["up_proj"][1],
        f"{at}.act": calls["down_proj"][0][0],
        f"{at}.out": calls[""][1],
    }


def attention_taps(at, path, calls, attention):
    nope, rank = attention.nope_dim, attention.kv_rank
    (x, *_), out = calls[path]
    q = calls[f"{path}.wq_b"][1].reshape(*x.shape[:2], attention.num_heads, -1)
    return {
        f"{at}.q_latent": calls[f"{path}.q_norm"][1],
        f"{at}.q_nope": q[..., :nope],
        f"{at}.q_pe": attention._rope(q[..., nope:].swapaxes(1, 2), 0).swapaxes(1, 2),
        f"{at}.c_kv": calls[f"{path}.kv_norm"][1],
        f"{at}.k_pe": attention._rope(calls[f"{path}.wkv_a"][1][:, None, :, rank:], 0),
        f"{at}.lambda": calls[f"{path}.lambda_proj"][1],
        f"{at}.gate": calls[f"{path}.wq_b_gate"][1],
        f"{at}.gated": calls[f"{path}.wo"][0][0],
        f"{at}.out": out,
    }


def mhc_taps(at, block, streams):
    h_pre, h_post, h_res = block.gates(streams)
    flat = block.rms_norm(streams.flatten(-2))
    mixes = mx.concatenate([block.proj_pre(flat), block.proj_post(flat), block.proj_res(flat)], axis=-1)
    return {f"{at}.h_pre": h_pre, f"{at}.h_post": h_post, f"{at}.h_res": h_res, f"{at}.mixes": mixes}


def moe_taps(at, path, calls, moe):
    indices, weights = calls[f"{path}.gate"][1]
    order = mx.argsort(indices, axis=-1)
    routed = (calls[f"{path}.switch_mlp"][1] * weights[..., None]).sum(axis=-2)
    x = calls[f"{path}.gate"][0][0]
    every = mx.broadcast_to(mx.arange(moe.gate.weight.shape[0]), (x.shape[0], moe.gate.weight.shape[0]))
    return {
        f"{at}.router.indices": mx.take_along_axis(indices, order, axis=-1),
        f"{at}.router.weights": mx.take_along_axis(weights, order, axis=-1),
        f"{at}.routed_out": routed,
        f"{at}.out": calls[path][1],
        f"{at}.all_expert_out": moe.switch_mlp(x, every).swapaxes(0, 1),
    }


def all_taps(model, ids):
    """What the modules compute for ids [1, S], by the goldens' names."""
    out = {}

    def run():
        out["logits"], hidden = model(ids, return_hidden=True)
        out["mtp.logits"] = model.mtp_forward(hidden[:, :-1], ids[:, 1:])
        out["final_hidden"] = hidden

    calls = record(model, run)
    out["embed"] = model.model.embed_tokens(ids)
    out["final_stream_mean"] = calls["model.norm"][0][0]
    for i, layer in enumerate(model.layers):
        at, path = f"layers.{i}", f"model.layers.{i}"
        for block in ("mhc_attn", "mhc_ffn"):
            out |= mhc_taps(f"{at}.{block}", layer[block], calls[f"{path}.{block}"][0][0])
        for block, norm in {"mhc_attn": "input_layernorm", "mhc_ffn": "post_attention_layernorm"}.items():
            (out[f"{at}.{block}.x_reduced"],), out[f"{at}.{norm}.out"] = calls[f"{path}.{norm}"]
        out |= attention_taps(f"{at}.self_attn", f"{path}.self_attn", calls, layer.self_attn)
        if i < model.args.n_dense_first_layers:
            out |= mlp_taps(f"{at}.mlp", layer.mlp, f"{at}.post_attention_layernorm.out")
        else:
            out |= moe_taps(f"{at}.moe", f"{path}.mlp", calls, layer.mlp)
            if f"{at}.moe.shared_experts.out" in GOLDEN:
                shared = layer.mlp.shared_experts
                out |= mlp_taps(f"{at}.moe.shared_experts", shared, f"{at}.post_attention_layernorm.out")
        out[f"{at}.x_mid"], out[f"{at}.x_out"] = calls[f"{path}.mhc_attn"][1], calls[path][1]
    out["mtp.input_proj"], out["mtp.out"] = calls["mtp.input_proj"][1], calls["mtp"][1]
    out["mtp.attn_out"], out["mtp.mlp_out"] = calls["mtp.self_attn"][1], calls["mtp.mlp"][1]
    return out


@pytest.fixture(scope="session", params=["absorbed", "expanded"])
def taps(request, tiny):
    """Twice: attention over the latents, and over the keys and values expanded from them."""
    with pytest.MonkeyPatch.context() as patch:
        attention = type(tiny.layers[0].self_attn)
        patch.setattr(attention, "_absorbs", lambda self, queries: request.param == "absorbed")
        return all_taps(tiny, rows(GOLDEN["input_ids"]))


@pytest.mark.parametrize("name", TAPPED)
def test_golden(taps, name):
    assert_golden(taps[name], name)


@pytest.mark.parametrize("at", ["layers.2.moe.router", "layers.4.moe.router"])
def test_router_chooses_and_weighs_as_the_golden(taps, at):
    order = np.argsort(GOLDEN[f"{at}.indices"], axis=-1)  # the order of a choice means nothing
    golden_indices = np.take_along_axis(GOLDEN[f"{at}.indices"], order, axis=-1)
    golden_weights = np.take_along_axis(GOLDEN[f"{at}.weights"], order, axis=-1)
    np.testing.assert_array_equal(np.array(taps[f"{at}.indices"]), golden_indices)
    assert off_by(taps[f"{at}.weights"], golden_weights) <= GOLDENS[f"{at}.weights"]["atol"]


class NothingBefore:
    """A cache that stands at a position and holds nothing yet."""

    def __init__(self, offset):
        self.offset = offset

    def update_and_fetch(self, keys, values):
        return keys, values

    def make_mask(self, length, window_size=None, return_array=False):
        return create_causal_mask(length, 0, window_size)


def test_positions_beyond_the_original_context(tiny):
    cache = [NothingBefore(5000) for _ in tiny.layers]
    assert_golden(tiny(rows(GOLDEN["input_ids"]), cache), "offset5000.logits")


def test_a_prompt_many_windows_long(tiny):
    logits = tiny(rows(GOLDEN["long.input_ids"]))[0]
    assert_golden(logits[-16:], "long.logits_last16")
    np.testing.assert_array_equal(np.array(logits.argmax(axis=-1)), GOLDEN["long.argmax"])


def test_nvfp4_experts(built):
    """The same class with the experts' exact NVFP4 values: gate rows first, then up rows."""
    model = load(built(TINY, "--recipe", "bf16"))
    experts = mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors"))
    for i, layer in enumerate(model.layers):
        if i >= model.args.n_dense_first_layers:
            both, mlp = experts[f"model.layers.{i}.moe.experts.gate_up_proj"], layer.mlp.switch_mlp
            mlp.gate_proj.weight, mlp.up_proj.weight = mx.split(both, 2, axis=1)
            mlp.down_proj.weight = experts[f"model.layers.{i}.moe.experts.down_proj"]
    logits, hidden = model(rows(GOLDEN["input_ids"]), return_hidden=True)
    assert_golden(logits, "nvfp4.logits")
    assert_golden(hidden, "nvfp4.final_hidden")
