"""The architecture file in dimensions that no reference has, against `torch_forward`, which the goldens judge."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
import torch
from conftest import SMALL_CONFIG, random_weights, write_checkpoint
from motif_convert.validate import torch_forward
from motif_convert.validate.dense import EXPERTS
from motif_convert.validate.layout import source_name
from motif_goldens import GOLDEN, TINY, TINY_CONFIG, assert_golden, load, relative, rows


class Held:
    """A source's weights in memory, float64: `torch_forward.Weights`."""

    def __init__(self, weights: dict[str, np.ndarray]):
        self.tensors = {name: torch.from_numpy(np.asarray(w, np.float64)) for name, w in weights.items()}

    def __call__(self, name: str) -> torch.Tensor:
        source, part, parts = source_name(name)
        return self.tensors[source].chunk(parts, dim=-2)[part] if parts > 1 else self.tensors[source]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self("model.embed_tokens.weight")[ids]

    def experts(self, prefix: str, chosen: list[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        for expert in chosen:
            yield expert, [self(f"{prefix}.{e}weight")[expert] for e in EXPERTS]


def forward(config, weights, ids, offset=0):
    """ids [S] at positions offset.. -> logits [S, V] and the state [S, D] that the MTP head takes."""
    w = Held(weights)
    streams = torch_forward.embedded(config, w, torch.from_numpy(ids.astype(np.int64)))
    for layer in range(config["num_hidden_layers"]):
        streams, _ = torch_forward.decoder_layer(config, w, layer, streams, [len(ids)], offset)
    hidden = torch_forward.last_hidden(config, w, streams)
    return (hidden @ w("lm_head.weight").T).numpy(), hidden.numpy()


def mtp_forward(config, weights, hidden, next_ids):
    """hidden [S, D] and the token after each [S] -> logits [S, V] of the token after that."""
    w, ids = Held(weights), torch.from_numpy(next_ids.astype(np.int64))
    state = torch_forward.mtp_hidden(config, w, torch.from_numpy(hidden), ids, [len(ids)])
    return (state @ w("lm_head.weight").T).numpy()


VARIATIONS = {
    "small": {},
    "shallow, wide latent": {"num_hidden_layers": 1, "kv_lora_rank": 512, "mhc_expansion_rate": 2},
    "all dense, no MTP": {"n_dense_first_layers": 3, "num_nextn_predict_layers": 0, "mhc_h_post_alpha_end": 1.0},
    "no dense, no shared expert": {
        "n_dense_first_layers": 0,
        "num_experts": 7,
        "experts_top_k": 1,
        "num_shared_experts": 0,
        "polynorm_bias_clamp": None,
        "mhc_expansion_rate": 2,
        "mhc_h_post_alpha_end": 0.5,
    },
    "deep, plain rope": {
        "num_hidden_layers": 7,
        "sliding_window_period": 3,
        "sliding_window": 8,
        "num_experts": 12,
        "experts_top_k": 5,
        "route_norm": False,
        "rope_factor": 1.0,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_noise_heads": 2,
        "qk_rope_head_dim": 16,
        "mhc_sinkhorn_iters": 3,
    },
}


@pytest.fixture(scope="session", params=VARIATIONS)
def variation(request, built, tmp_path_factory):
    """A config, its weights as float64, token ids, the loaded model, and PyTorch's logits and hidden."""
    config = SMALL_CONFIG | VARIATIONS[request.param]
    bits = random_weights(config, seed=len(request.param))
    source = write_checkpoint(tmp_path_factory.mktemp("variation") / "source", config, bits)
    weights = {name: (w.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for name, w in bits.items()}
    ids = np.random.default_rng(3).integers(0, config["vocab_size"], 40)
    return config, weights, ids, load(built(source, "--recipe", "bf16")), forward(config, weights, ids)


@pytest.mark.parametrize("piece", [1, 7, 40])
def test_other_dimensions(variation, piece):
    _, _, ids, model, (logits, hidden) = variation
    attention = model.layers[0].self_attn
    assert attention._absorbs(1)
    assert not attention._absorbs(len(ids))  # so the pieces of 1 and 40 take different paths
    cache = model.make_cache() if piece < len(ids) else None
    parts = [model(rows(ids[i : i + piece]), cache, return_hidden=True) for i in range(0, len(ids), piece)]
    assert relative(mx.concatenate([part for part, _ in parts], axis=1), logits) <= 2e-5
    assert relative(mx.concatenate([part for _, part in parts], axis=1), hidden) <= 2e-5


@pytest.mark.parametrize("piece", [1, 7, 39])
def test_mtp_head_of_other_dimensions(variation, piece):
    config, weights, ids, model, (_, hidden) = variation
    if not config["num_nextn_predict_layers"]:
        assert model.make_mtp_cache() == []
        with pytest.raises(ValueError, match="no MTP head"):
            model.mtp_forward(mx.array(hidden[None].astype(np.float32)), rows(ids))
        return
    golden = mtp_forward(config, weights, hidden[:-1], ids[1:])
    given, after = mx.array(hidden[None, :-1].astype(np.float32)), rows(ids[1:])
    cache = model.make_mtp_cache() if piece < after.shape[1] else None
    starts = range(0, after.shape[1], piece)
    parts = [model.mtp_forward(given[:, i : i + piece], after[:, i : i + piece], cache) for i in starts]
    assert relative(mx.concatenate(parts, axis=1), golden) <= 2e-5


def test_torch_forward_meets_the_goldens():
    """The judge of the tests above, judged itself."""
    weights, ids = {}, GOLDEN["input_ids"]
    for shard in sorted(TINY.glob("*.safetensors")):
        weights |= {name: np.array(x.astype(mx.float32)) for name, x in mx.load(str(shard)).items()}
    logits, hidden = forward(TINY_CONFIG, weights, ids)
    assert_golden(logits, "logits")
    assert_golden(hidden, "final_hidden")
    assert_golden(mtp_forward(TINY_CONFIG, weights, hidden[:-1], ids[1:]), "mtp.logits")
    assert_golden(forward(TINY_CONFIG, weights, ids, offset=5000)[0], "offset5000.logits")
