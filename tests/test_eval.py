"""A build against its source, layer by layer: against the reference's numbers, and against models loaded whole."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, motif_convert
from evaluating import DEMO, NVFP4, TINY, compared
from mlx.utils import tree_map
from mlx_lm.utils import load_model
from motif_convert.validate.corpus import make_corpus, read_texts
from motif_convert.validate.divergence import Layer, bootstrap, suspects

HELDOUT = REFERENCE / "demo-heldout.txt"
FACTS = json.loads((REFERENCE / "demo-goldens.json").read_text())
AGREEMENT = next(v for k, v in FACTS.items() if k.startswith("heldout_teacher_forced_draft_agreement"))


def whole(folder: Path):
    """mlx-lm's model of a build, its floats upcast."""
    model, _ = load_model(folder, trust_remote_code=True)
    floats = tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
    model.update(floats)
    return model


def log_softmax(x: mx.array) -> np.ndarray:
    x = np.array(x).astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def said_whole(folder: Path, windows: np.ndarray, temperature: float) -> dict[str, np.ndarray]:
    """What a model that is loaded whole says of windows: log-probabilities, and body's and head's at a temperature."""
    model, found = whole(folder), {"log_p": [], "agree": [], "shared": []}
    for window in windows:
        ids = mx.array(window[None])
        logits, hidden = model(ids, return_hidden=True)
        draft = model.mtp_forward(hidden[:, :-1], ids[:, 1:])
        found["log_p"].append(log_softmax(logits)[0])
        p, q = (np.exp(log_softmax(x / temperature))[0] for x in (logits[:, 1:], draft))
        found["agree"].append(p.argmax(-1) == q.argmax(-1))
        found["shared"].append(np.minimum(p, q).sum(-1))
    return {k: np.concatenate(v) for k, v in found.items()}


# --- the numbers ---


@pytest.mark.parametrize("source", [TINY, NVFP4, DEMO], ids=lambda p: p.name)
@pytest.mark.parametrize("recipe", ["4.5bit", "bf16"])
def test_layer_by_layer_as_loaded_whole(source, recipe, built, copied, tmp_path):
    """Every number against one that comes of two models in memory, logits and all."""
    text = tmp_path / "text.txt"
    text.write_bytes(HELDOUT.read_bytes()[: 3 * 80])
    windows = np.frombuffer(text.read_bytes(), np.uint8).reshape(3, 80).astype(np.int32)
    out = copied(source, "--recipe", recipe)
    found = compared(out, source, "--text", text, "--window", 80)

    exact = built(source, "--recipe", "bf16")  # of NVFP4, the weights rounded to BF16
    true, mine = (said_whole(folder, windows, 0.8) for folder in (exact, out))
    close = {"abs": 2e-3 if source == NVFP4 else 2e-5}
    following = np.arange(len(true["log_p"])).reshape(3, 80)[:, :-1].ravel()
    for side, said in (("source", true), ("build", mine)):
        loss = -said["log_p"][following, windows[:, 1:].ravel()]
        assert found[side]["bits_per_byte"] == pytest.approx(loss.mean() / np.log(2), **close)
        assert found[side]["perplexity"] == pytest.approx(np.exp(loss.mean()), rel=1e-3)
        assert found[side]["expected_acceptance"] == pytest.approx(said["shared"].mean(), **close)
        assert found[side]["forced_agreement"] == pytest.approx(said["agree"].mean(), abs=0.01)
    kl = (np.exp(true["log_p"]) * (true["log_p"] - mine["log_p"])).sum(-1)[following]
    assert found["kl"]["mean"] == pytest.approx(kl.mean(), **close)
    assert found["kl"]["median"] == pytest.approx(np.median(kl), **close)
    same = (true["log_p"].argmax(-1) == mine["log_p"].argmax(-1))[following]
    assert found["top1_agreement"] == pytest.approx(same.mean(), abs=0.01)
    assert found["tokens"] == 240
    assert json.loads((out / "validation.json").read_text())["eval"]["kl"] == found["kl"]


def test_the_demo_against_itself(copied):
    """What it says of the held-out text are the reference's numbers."""
    found = compared(copied(DEMO, "--recipe", "bf16"), DEMO, "--text", HELDOUT)
    assert (found["windows"], found["tokens"]) == (32, 32 * 512)
    assert found["kl"] == {"mean": 0, "median": 0, "p99": 0}
    assert found["top1_agreement"] == 1
    for side in ("source", "build"):
        assert found[side]["bits_per_byte"] == pytest.approx(FACTS["heldout_bpb"], abs=1e-3)
        assert found[side]["forced_agreement"] == pytest.approx(AGREEMENT, abs=2e-3)
        assert found[side]["expected_acceptance"] == pytest.approx(0.862, abs=2e-3)
    assert found["suspects"] == []
    assert all(x["error"] == x["local"] == 0 for x in found["layers"])


def test_what_quantization_costs(copied):
    found = compared(copied(DEMO, "--bits", "4.5"), DEMO, "--tokens", 600)
    assert 0 < found["kl"]["median"] < found["kl"]["mean"] < found["kl"]["p99"]
    assert set(found["slices"]) == {"english", "korean", "code"}
    assert found["suspects"] == []
    low, high = found["differences"]["kl"]["interval"]
    assert low < found["kl"]["mean"] < high
    errors = [x["error"] for x in found["layers"]]
    assert all(0 < e < 0.3 for e in errors)
    assert [x["rerouted"] is None for x in found["layers"]] == [True, True, False, False, False, False]


def test_lens(copied):
    """Behind the last layer it sees what the model says."""
    out = copied(DEMO)
    found = compared(out, DEMO, "--tokens", 120, "--lens")
    plain = compared(out, DEMO, "--tokens", 120)
    last = found["layers"][-1]["lens"]
    windows = found["slices"]
    first = np.mean([windows[n]["source_bits_per_byte"] * np.log(2) for n in windows])
    assert last["source_loss"] == pytest.approx(first, rel=0.01)
    assert found["layers"][0]["lens"]["source_loss"] > last["source_loss"]
    assert {k: v for k, v in found.items() if k != "layers"} == {k: v for k, v in plain.items() if k != "layers"}
    assert "Lens: nats a token" in motif_convert("eval", out, "--source", DEMO, "--tokens", 60, "--lens").stdout


def test_a_dropped_head_is_not_judged(copied):
    found = compared(copied(DEMO, "--mtp", "drop"), DEMO, "--tokens", 200)
    assert found["source"]["forced_agreement"] is None
    assert found["differences"]["expected_acceptance"] is None


def test_another_shape_in_bfloat16(small, copied):
    """No dimension of it coincides with the others'."""
    out = copied(small)
    found, exact = (
        compared(out, small, "--tokens", 120, "--window", 50, "--dtype", d) for d in ("bfloat16", "float32")
    )
    assert found["source"]["bits_per_byte"] == pytest.approx(exact["source"]["bits_per_byte"], abs=0.2)


# --- parts ---


def test_every_text_gives_its_share():
    texts = {"a": "x" * 25, "b": "y" * 12}
    corpus = make_corpus(texts, lambda t: list(t.encode()), 256, 10, 48)
    assert [b.shape for b in corpus.batches] == [(3, 10), (1, 4), (1, 2), (2, 1)]
    assert corpus.names == (("a", "a", "b"), ("a",), ("b",), ())
    assert corpus.count == 38
    assert (corpus.targets == -1).sum() == 5 + 2
    assert len(corpus.judged) == 36 - 5
    assert (corpus.slices == "").sum() == 2
    assert corpus.tokens_per_byte == {"a": 1, "b": 1}


@pytest.mark.parametrize("most", [2, 3, 10, 47])
def test_no_more_tokens_than_asked_for(most):
    texts = {str(i): "x" * 30 for i in range(20)}
    corpus = make_corpus(texts, lambda t: list(t.encode()), 256, 10, most)
    assert 0 < sum(b.size for b in corpus.batches[:-1]) <= most


def test_texts_that_ship():
    texts = read_texts(None)
    assert set(texts) == {"english", "korean", "code"}
    assert all(len(t.encode()) > 1000 for t in texts.values())


def test_bootstrap_of_known_noise():
    """The interval of a mean is about 1.96 standard errors to each side."""
    values = np.random.default_rng(1).standard_normal(32 * 400)
    low, high = bootstrap(values, np.mean)
    error = 1.96 / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - error, abs=0.3 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.3 * error)


def test_suspects_are_compared_with_their_kind():
    def layer(index, kind, local, most):
        return Layer(index, kind, 0.1, 0.1, local, most, None)

    layers = [layer(0, "dense", 0.01, 0.02), layer(1, "experts", 0.1, 0.3), layer(2, "experts", 0.12, 2.0)]
    assert [(s["layer"], s["what"]) for s in suspects(layers)] == [(2, "99th percentile")]
    assert suspects(layers[:2]) == []
