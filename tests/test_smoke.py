"""Decoding with the MTP head: lossless, counted rightly, and telling a broken head from a good one."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, SMALL_CONFIG, motif_convert, random_weights, write_checkpoint
from mlx.utils import tree_map
from mlx_lm.utils import load_model
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.convert.planner import make_plan
from motif_convert.quantize.errors import SourceError
from motif_convert.recipes.recipe import load_recipe
from motif_convert.validate import smoke as smoke_module
from motif_convert.validate.decode import Decoder, branch, confirm, decode, log_probs, take_back
from motif_convert.validate.evidence import record
from motif_convert.validate.forced import forced_acceptance, forced_positions, windows_of
from motif_convert.validate.heads import build_head
from motif_convert.validate.statistics import drafting, text_health, wilson

DEMO = REFERENCE / "demo-motif3"
GOLDENS = json.loads((REFERENCE / "demo-goldens.json").read_text())
HELDOUT = list((REFERENCE / "demo-heldout.txt").read_bytes())[:16384]


def loaded(folder):
    model, _ = load_model(folder, trust_remote_code=True)
    floats = tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
    model.update(floats)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def demo(built):
    return loaded(built(DEMO, "--recipe", "bf16"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory, built):
    """A random model of few tokens, whose drafts are mostly wrong: every step takes rows back."""
    config = SMALL_CONFIG | {"vocab_size": 12}
    source = write_checkpoint(tmp_path_factory.mktemp("odd") / "odd", config, random_weights(config, 3))
    return loaded(built(source, "--recipe", "bf16"))


# --- the loop ---


def test_one_draft_a_step_makes_the_reference_counts(demo):
    """A step after the last of 110 judged places would judge one more: 111 tokens need 110 drafts at the most."""
    runs = [decode(demo, p["prompt_ids"], 111, drafts=1) for p in GOLDENS["prompts"]]
    for run, p in zip(runs, GOLDENS["prompts"], strict=True):
        assert run.tokens[:110] == p["greedy_ids"]
        assert (run.drafted, run.accepted) == ([p["k1_spec_drafts"]], [p["k1_spec_accepted"]])
    totals = sum(r.drafted[0] for r in runs), sum(r.accepted[0] for r in runs)
    assert totals == (GOLDENS["k1_spec_drafts"], GOLDENS["k1_spec_accepted"])


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_greedy_text_is_the_same_far_beyond_the_window(odd, drafts):
    """The window is 6 keys; the prompt and the text are many times that."""
    prompt = [t % 12 for t in range(5, 50, 3)] * 3
    plain = decode(odd, prompt, 90)
    drafted = decode(odd, prompt, 90, drafts=drafts)
    assert drafted.tokens == plain.tokens
    assert sum(drafted.accepted) < sum(drafted.drafted)
    assert drafted.steps < 90 or not sum(drafted.accepted)


def test_prefill_in_chunks_is_prefill_at_once(odd, monkeypatch):
    prompt = [t * 7 % 12 for t in range(60)]
    whole = decode(odd, prompt, 20, drafts=2)
    monkeypatch.setattr("motif_convert.validate.decode.PREFILL_CHUNK", 7)
    assert decode(odd, prompt, 20, drafts=2).tokens == whole.tokens


def test_caches_hold_what_was_kept(odd):
    """After rejections the caches equal those of a run that only ever saw the kept tokens."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    decoder = Decoder(odd, prompt, drafts=2)
    for _ in range(12):
        decoder.step()
    kept = prompt + decoder.run.tokens[:-1]
    fresh = odd.make_cache()
    odd(mx.array([kept]), cache=fresh)
    probe = mx.array([[decoder.run.tokens[-1]]])
    assert [c.offset for c in decoder.cache] == [c.offset for c in fresh] == [len(kept)] * len(fresh)
    assert mx.abs(odd(probe, cache=decoder.cache) - odd(probe, cache=fresh)).max() < 1e-4


def test_a_wrapped_cache_is_taken_back_only_after_several_rows(odd):
    cache = odd.make_cache()
    odd(mx.array([[1] * 20]), cache=cache)
    odd(mx.array([[1]]), cache=cache)
    with pytest.raises(ValueError, match="several rows"):
        take_back(cache, 1)


def test_a_branch_leaves_the_cache_alone(odd):
    (cache,) = odd.make_mtp_cache()
    hidden = mx.ones((1, 9, SMALL_CONFIG["hidden_size"]))
    odd.mtp_forward(hidden, mx.array([[1] * 9]), [cache])
    before = [np.array(x) if isinstance(x, mx.array) else x for x in cache.state]
    for _ in range(8):
        odd.mtp_forward(hidden[:, :1], mx.array([[2]]), [branch(cache)])
    twin = branch(cache)
    for _ in range(8):
        odd.mtp_forward(hidden[:, :1], mx.array([[2]]), [twin])
    after = [np.array(x) if isinstance(x, mx.array) else x for x in cache.state]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations a chi-square statistic lies above its mean (Wilson and Hilferty 1931)."""
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), counts.size - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_keeps_the_distribution(temperature):
    """Pairs of emitted tokens follow p exactly, whatever q is; a correct loop fails once in 100,000 times.

    100,000 rows of one draft each: the first token against p, the second, where the draft held, against p as well.
    """
    rows, vocabulary = 100_000, 7
    rng = np.random.default_rng(5)
    p, q = (mx.array(rng.standard_normal((1, 2, vocabulary)).astype(np.float32) * 1.5) for _ in range(2))
    q = mx.broadcast_to(q[:, :1], (rows, 1, vocabulary))
    drafts = mx.random.categorical(log_probs(q, temperature), key=mx.random.key(1))
    logits = mx.broadcast_to(p, (rows, 2, vocabulary))
    confirmed, tokens = (np.array(x) for x in confirm(drafts, q, logits, temperature, mx.random.key(2)))
    exact = np.array(mx.softmax(p[0] / temperature, axis=-1), dtype=np.float64)
    first = np.bincount(tokens[:, 0], minlength=vocabulary)
    assert chi_square(first, rows * exact[0]) < 4.26
    held = tokens[confirmed == 1, 1]
    assert chi_square(np.bincount(held, minlength=vocabulary), len(held) * exact[1]) < 4.26
    draft_probability = np.array(mx.softmax(q[0] / temperature, axis=-1), dtype=np.float64)[0]
    expected = np.minimum(exact[0], draft_probability).sum()
    assert abs(confirmed.mean() - expected) < 4.3 * math.sqrt(expected * (1 - expected) / rows)
    assert chi_square(first, rows * draft_probability) > 4.26, "q is another distribution, or this could not fail"


# --- teacher-forced ---


def test_forced_counts_one_position_at_a_time(odd):
    """Every window is a context of its own; each position is what a step would see, counted by hand."""
    windows = windows_of([t * 5 % 12 for t in range(31)], 11)
    assert [len(w) for w in windows] == [11, 11, 9]
    agree, shared = forced_positions(odd, windows, 0.8)
    at = 0
    for window in windows:
        for t in range(1, len(window)):
            ids = mx.array([window[: t + 1]])
            logits, hidden = odd(ids, return_hidden=True)
            p = np.array(mx.softmax(logits[0, -1] / 0.8))
            q = np.array(mx.softmax(odd.mtp_forward(hidden[:, :-1], ids[:, 1:])[0, -1] / 0.8))
            assert agree[at] == (p.argmax() == q.argmax())
            assert shared[at] == pytest.approx(np.minimum(p, q).sum(), abs=1e-4)
            at += 1
    assert at == len(agree)
    found = forced_acceptance(agree, shared)
    assert found["positions"] == at
    assert found["agreement"] == pytest.approx(agree.mean())


def test_a_head_as_a_plan_would_write_it(built, demo):
    """Each policy's head, built on the loaded body, drafts as that policy's own build does."""
    checkpoint = open_checkpoint(DEMO)
    windows = windows_of(HELDOUT[:128])
    for policy in ("fp16", "8", "4.5"):
        own = loaded(built(DEMO, "--recipe", "bf16", "--mtp", policy))
        theirs = own.mtp
        head = build_head(demo, make_plan(checkpoint, load_recipe("bf16"), policy), checkpoint)
        expected = forced_positions(own, windows, 0.8)
        own.mtp = head
        found = forced_positions(own, windows, 0.8)
        own.mtp = theirs
        assert np.abs(found[1] - expected[1]).max() < 1e-4


# --- numbers ---


def test_wilson_by_hand():
    """For 8 of 10 the interval is (0.4902, 0.9433), as tables have it."""
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 5)[0] == 0
    assert wilson(5, 5)[1] == pytest.approx(1)


def test_acceptance_and_share_are_different_numbers():
    """One draft a step: share = a / (1 + a)."""
    rates = drafting([100], [65], 165, 100)
    assert rates["acceptance"] == 0.65
    assert rates["draft_share"] == pytest.approx(0.65 / 1.65)
    assert rates["tokens_per_step"] == 1.65


def test_nothing_drafted_is_an_error():
    with pytest.raises(ValueError, match="nothing was drafted"):
        drafting([0], [0], 1, 1)


@pytest.mark.parametrize(
    ("tokens", "distinct", "longest"),
    [(list(range(20)), 1.0, 0), ([7] * 20, 1 / 17, 20), ([1, 2] * 10, 2 / 17, 20), ([1, 2, 3, 9, 9, 9, 4], 1.0, 3)],
)
def test_text_health(tokens, distinct, longest):
    found = text_health(tokens, False)
    assert found["distinct_4grams"] == pytest.approx(distinct)
    assert found["longest_run"] == longest


# --- the command ---


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": ""}', '{"prompt": 1}', '{"prompt": "a", "raw": "no"}', '{"text": "a"}']
)
def test_a_bad_prompt_line_is_named(tmp_path, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(SourceError, match="line 2"):
        smoke_module.read_prompts(tmp_path / "p.jsonl")


def test_smoke_on_the_command_line(built, tmp_path):
    """In BF16, since mlx's quantized products are slow on a CPU; the last run decodes with them all the same."""
    out = built(DEMO, "--recipe", "bf16", "--mtp", "fp16")
    prompts, text = tmp_path / "p.jsonl", tmp_path / "t.txt"
    prompts.write_text(json.dumps({"prompt": GOLDENS["prompts"][0]["prompt"], "name": "first", "raw": True}))
    text.write_bytes(bytes(HELDOUT[:200]))
    options = ("--prompts", prompts, "--text", text, "--tokens", 12, "--dtype", "float32", "--json")
    result = motif_convert("smoke", out, *options, "--compare-mtp", "bf16,4.5", "--source", DEMO)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["lossless"]
    assert found["passed"]
    assert found["prompts"][0]["greedy"]["tokens"] == GOLDENS["prompts"][0]["greedy_ids"][:12]
    assert [row["policy"] for row in found["heads"]] == ["bf16", "4.5"]
    assert found["heads"][1]["bytes"] < found["heads"][0]["bytes"]
    evidence = json.loads((out / "validation.json").read_text())
    assert evidence["smoke"]["greedy"] == found["greedy"]
    assert not evidence["passed"], "not verified yet"
    assert motif_convert("verify", out, "--source", DEMO).returncode == 0
    assert json.loads((out / "validation.json").read_text())["passed"]
    text.write_bytes(bytes(HELDOUT[:100]))
    quantized = built(DEMO, "--mtp", "fp16")
    failed = motif_convert("smoke", quantized, *options, "--drafts", 3, "--min-acceptance", 1)
    assert failed.returncode == 1
    assert "is below 1" in failed.stdout


def test_smoke_without_a_head(built):
    result = motif_convert("smoke", built(DEMO, "--mtp", "drop"))
    assert result.returncode == 2
    assert "no MTP head" in result.stderr


def test_evidence_of_another_plan_is_not_kept(built):
    out = built(DEMO, "--mtp", "bf16")
    (out / "validation.json").write_text(json.dumps({"format": 1, "plan_hash": "0" * 64, "smoke": {"passed": True}}))
    verified = {"passed": True, "sampled": 1, "layers": [], "families": [], "plan_hash": "0" * 64}
    evidence = record(out, "verify", verified)
    assert evidence["smoke"] is None
    assert evidence["passed"]
