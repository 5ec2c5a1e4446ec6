"""The architecture file as users get it: converted by the installed command, loaded by mlx-lm, against the
reference's goldens and itself cut into pieces.

Weights are upcast to float32 where numbers are compared; tolerances of goldens are those that their JSON states.
"""

from fnmatch import fnmatch

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import REFERENCE
from mlx_lm.generate import generate_step
from mlx_lm.models.base import create_causal_mask
from mlx_lm.utils import load_tokenizer
from motif_goldens import (
    DEMO,
    DEMO_FACTS,
    DEMO_GOLDEN,
    GOLDEN,
    GOLDENS,
    LOGITS_ATOL,
    TINY,
    TINY_CONFIG,
    TINY_FACTS,
    assert_golden,
    f64,
    load,
    off_by,
    record,
    rows,
)

# Goldens that the taps below don't show: compared in tests of their own, or hidden inside of a module.
APART = ("bf16.*", "rope.*", "unit.*", "decode.*", "long.*", "nvfp4.*", "offset5000.*", "input_ids", "*.router.[iw]*s")
HIDDEN = ("*.attn_heads", "*.diff", "*.router.logits", "*.router.scores")
TAPPED = [name for name in GOLDENS if not any(fnmatch(name, p) for p in APART + HIDDEN)]


# --- every golden that a module shows -------------------------------------------------------------------------


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


# --- greedy decode with drafts --------------------------------------------------------------------------------


def greedy_with_drafts(model, prompt, count):
    """Greedy tokens, a draft at every step from the hidden state before it, both through their caches.

    Returns tokens [count + 1], drafts [count], logits and draft logits [count, V]; draft i stands for token i + 1.
    """
    cache, mtp_cache = model.make_cache(), model.make_mtp_cache()
    ids = rows(prompt)
    logits, hidden = model(ids, cache, return_hidden=True)
    model.mtp_forward(hidden[:, :-1], ids[:, 1:], mtp_cache)
    steps = []
    for _ in range(count):
        token = logits[:, -1:].argmax(axis=-1)
        draft_logits = model.mtp_forward(hidden[:, -1:], token, mtp_cache)
        steps.append((token, draft_logits.argmax(axis=-1), logits[:, -1], draft_logits[:, 0]))
        logits, hidden = model(token, cache, return_hidden=True)
        mx.eval(logits, hidden, steps[-1])
    tokens, drafts, all_logits, all_draft_logits = (
        np.array(mx.concatenate(x, axis=0)) for x in zip(*steps, strict=True)
    )
    return [*tokens[:, 0].tolist(), logits.argmax().item()], drafts[:, 0].tolist(), all_logits, all_draft_logits


def test_cached_greedy_decode_of_tiny(tiny):
    tokens, drafts, logits, draft_logits = greedy_with_drafts(
        tiny, GOLDEN["decode.prompt"], len(GOLDEN["decode.tokens"])
    )
    assert tokens == [*GOLDEN["decode.tokens"], TINY_FACTS["decode"]["next_token_after"]]
    assert drafts == GOLDEN["decode.drafts"].tolist()
    assert [d == t for d, t in zip(drafts, tokens[1:], strict=True)] == GOLDEN["decode.accepted"].astype(bool).tolist()
    assert_golden(logits, "decode.logits")
    assert_golden(draft_logits, "decode.draft_logits")


@pytest.fixture(scope="session")
def demo_decodes(demo):
    return [greedy_with_drafts(demo, p["prompt_ids"], len(p["greedy_ids"])) for p in DEMO_FACTS["prompts"]]


@pytest.mark.parametrize("prompt", range(len(DEMO_FACTS["prompts"])))
def test_greedy_tokens_and_drafts_of_demo(demo_decodes, prompt):
    facts, (tokens, drafts, _, _) = DEMO_FACTS["prompts"][prompt], demo_decodes[prompt]
    assert tokens[:-1] == facts["greedy_ids"]
    assert drafts == facts["draft_ids"]
    assert [int(d == t) for d, t in zip(drafts, tokens[1:], strict=True)] == facts["draft_accepted"]


def test_acceptance_per_draft(demo_decodes):
    accepted = [d == t for tokens, drafts, _, _ in demo_decodes for d, t in zip(drafts, tokens[1:], strict=True)]
    assert (len(accepted), sum(accepted)) == (DEMO_FACTS["drafts"], DEMO_FACTS["accepted"])


def test_logits_of_demo(demo):
    assert off_by(demo(rows(DEMO_GOLDEN["input_ids"])), DEMO_GOLDEN["logits"]) <= LOGITS_ATOL


def test_generate_and_batch_generate_agree(demo, built):
    """mlx-lm's own loops: prompts of several lengths, some longer than the window and some not, in one batch."""
    whole, count = DEMO_FACTS["prompts"][0]["prompt_ids"], demo.args.window + 5
    cut = [whole[:n] for n in (3, 20, demo.args.window + 1)]
    single = [
        [token for token, _ in generate_step(mx.array(ids), demo, max_tokens=count, prefill_step_size=16)]
        for ids in [*cut, whole]
    ]
    golden = [p["greedy_ids"][:count] for p in DEMO_FACTS["prompts"]]
    assert single.pop() == golden[0]
    response = mlx_lm.batch_generate(
        demo,
        load_tokenizer(built(DEMO, "--recipe", "bf16")),
        [p["prompt_ids"] for p in DEMO_FACTS["prompts"]] + cut,
        max_tokens=count,
        return_token_ids=True,
        prefill_step_size=16,
    )
    assert response.token_ids == golden + single


# --- any cut of a prompt gives the same logits ----------------------------------------------------------------


def cuts(length, seed):
    """A random way to cut `length`: single tokens, short and long pieces."""
    rng, pieces = np.random.default_rng(seed), []
    while sum(pieces) < length:
        pieces.append(int(rng.choice([1, 1, 1, 2, 3, 7, 16, 17, 18, 40])))
    return pieces


CUT_LENGTH = 100  # nearly six of tiny's windows
EVEN = [[n] * -(-CUT_LENGTH // n) for n in (1, 3, 8, 16, 17, 18, 35, 99)]
RANDOM = [cuts(CUT_LENGTH, seed) for seed in range(4)]
UNEVEN = [[17, *[1] * 20, 40, *[1] * 3, 20], [80, *[1] * 20], [*[1] * 20, 80], [16, 1, 1, 18, 1, 63]]


@pytest.fixture(scope="session")
def two_prompts(tiny):
    """Two prompts [2, S], and the logits and draft logits of each alone, in one piece, without a cache."""
    ids = np.random.default_rng(5).integers(0, tiny.args.vocab_size, (2, CUT_LENGTH))
    alone = [tiny(rows(row), return_hidden=True) for row in ids]
    drafts = [tiny.mtp_forward(h[:, :-1], rows(row[1:])) for (_, h), row in zip(alone, ids, strict=True)]
    return mx.array(ids), f64(mx.concatenate([logits for logits, _ in alone])), f64(mx.concatenate(drafts))


@pytest.mark.parametrize("pieces", EVEN + UNEVEN + RANDOM, ids=lambda p: "-".join(map(str, p))[:24])
def test_cut_prompts_give_the_same_logits(tiny, two_prompts, pieces):
    ids, golden_logits, golden_drafts = two_prompts
    cache, mtp_cache = tiny.make_cache(), tiny.make_mtp_cache()
    logits, drafts, start = [], [], 0
    for piece in pieces:
        end = min(start + piece, CUT_LENGTH)
        part, hidden = tiny(ids[:, start:end], cache, return_hidden=True)
        logits.append(part)
        if following := min(end + 1, CUT_LENGTH) - start - 1:  # the last token has none after it
            part = tiny.mtp_forward(hidden[:, :following], ids[:, start + 1 : start + 1 + following], mtp_cache)
            drafts.append(part)
        start = end
        if start == CUT_LENGTH:
            break
    assert off_by(mx.concatenate(logits, axis=1), golden_logits) <= LOGITS_ATOL
    assert off_by(mx.concatenate(drafts, axis=1), golden_drafts) <= LOGITS_ATOL


def test_caches_hold_the_window_and_no_more(tiny):
    cache, mtp_cache = tiny.make_cache(), tiny.make_mtp_cache()
    length = 3 * TINY_CONFIG["sliding_window"]
    for _ in range(length):
        _, hidden = tiny(mx.array([[1]]), cache, return_hidden=True)
        tiny.mtp_forward(hidden, mx.array([[2]]), mtp_cache)
    sliding = [i for i in range(TINY_CONFIG["num_hidden_layers"]) if i % TINY_CONFIG["sliding_window_period"]]
    for i, c in enumerate(cache):
        assert c.size() == (TINY_CONFIG["sliding_window"] + 1 if i in sliding else length)
    assert [c.size() for c in mtp_cache] == [TINY_CONFIG["sliding_window"] + 1]
