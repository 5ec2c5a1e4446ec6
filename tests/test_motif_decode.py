"""`motif.py` decodes: greedy, with drafts, and with prompts cut anywhere."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_tokenizer
from motif_goldens import (
    DEMO,
    DEMO_FACTS,
    DEMO_GOLDEN,
    GOLDEN,
    LOGITS_ATOL,
    TINY_CONFIG,
    TINY_FACTS,
    assert_golden,
    f64,
    off_by,
    rows,
)

# --- greedy decode with drafts ---


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


# --- any cut of a prompt gives the same logits ---


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
