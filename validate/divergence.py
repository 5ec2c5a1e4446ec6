"""What two models' words and streams come to: the numbers of `motif-convert eval`, and which layer is at fault.

bits_per_byte         mean of -log2 p(next token), times tokens per byte of the text
perplexity            exp of the mean of -ln p(next token)
kl                    KL(source || build) = sum over tokens of p ln(p / q) at each position, in nats
top1_agreement        share of positions with the same first choice
forced_agreement      share of positions at which the MTP head's first choice is the body's own, on true text
expected_acceptance   mean of sum min(p, q) of body and head at a temperature: what rejection sampling accepts
error                 of a layer: |build - source| / |source| of the streams behind it, each model on its own way
local                 of a layer: |build's layer - source's layer|, both given the source's streams, over what the
                      source's layer changes in them; the median over the tokens, and what 99 % stay below
rerouted              share of experts that a token of the build does not choose as the source does
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from .corpus import Corpus
from .judge import Words

FORMAT = 1
RESAMPLES, UNIT = 1000, 32  # of the bootstrap, and positions that go together: neighbours are alike
SUSPECT = 4.0  # times the local error of the best layer of its kind
NEGLIGIBLE = 1e-4  # a local error that float32 may make by itself


@dataclass(frozen=True)
class Layer:
    """What was seen at a layer; see above.

    Args:
        kind: "dense" or "experts".
        single: `error` of tokens that stand alone.
    """

    layer: int
    kind: str
    error: float
    single: float
    local: float
    local_p99: float
    rerouted: float | None
    lens: dict | None = None

    @staticmethod
    def compared(
        index: int,
        corpus: Corpus,
        before: list[mx.array],
        source: list[mx.array],
        build: list[mx.array],
        probe: list[mx.array],
        choices: tuple[list[np.ndarray], list[np.ndarray]] | None,
    ) -> "Layer":
        """Streams of every batch, single tokens last: before the source's layer and behind it, behind the build's, and
        behind the build's layer when it is given the source's streams."""
        errors = [_norm(b - s) / mx.maximum(_norm(s), 1e-30) for s, b in zip(source, build, strict=True)]
        moved = zip(before, source, probe, strict=True)
        local = [_by_token(p - s) / mx.maximum(_by_token(s - b), 1e-30) for b, s, p in moved]
        text = np.concatenate([np.array(x).ravel() for x in local[:-1]])
        weights = [b.size for b in corpus.batches[:-1]]
        return Layer(
            layer=index,
            kind="experts" if choices else "dense",
            error=float(np.average([e.item() for e in errors[:-1]], weights=weights)),
            single=errors[-1].item(),
            local=float(np.median(text)),
            local_p99=float(np.quantile(text, 0.99)),
            rerouted=_rerouted(*choices) if choices else None,
        )


def _norm(x: mx.array) -> mx.array:
    return mx.sqrt(mx.square(x.astype(mx.float32)).sum())


def _by_token(x: mx.array) -> mx.array:
    return mx.sqrt(mx.square(x.astype(mx.float32)).sum(axis=(-2, -1)))


def _rerouted(source: list[np.ndarray], build: list[np.ndarray]) -> float:
    one, other = np.concatenate(source), np.concatenate(build)
    same = (one[:, :, None] == other[:, None, :]).any(axis=-1)
    return float(1 - same.mean())


def suspects(layers: list[Layer], same_weights: bool = False) -> list[dict]:
    """Layers that do more to the same streams than others of their kind, in order, each with what it does; of the same
    weights, layers that do more than float32 may."""
    found = []
    for layer in layers:
        kin = [k for k in layers if k.kind == layer.kind]
        for key, name in (("local", "median"), ("local_p99", "99th percentile")):
            value = getattr(layer, key)
            best = min(getattr(k, key) for k in kin)
            if value > max(0 if same_weights else SUSPECT * best, NEGLIGIBLE):
                found.append({"layer": layer.layer, "what": name, "error": value, "best": best})
                break
    return found


def report(
    corpus: Corpus,
    source: Words,
    build: Words,
    kl: np.ndarray,
    layers: list[Layer],
    dtype: str,
    temperature: float,
    same_weights: bool = False,
) -> dict:
    """All numbers as JSON; see the head of this file."""
    scored = corpus.targets >= 0
    named = corpus.slices[scored]
    rates = np.array([corpus.tokens_per_byte[n] for n in named])
    columns = {
        "source_loss": source.loss[scored],
        "build_loss": build.loss[scored],
        "rate": rates,
        "kl": kl[scored],
        "same": (source.first == build.first)[scored].astype(float),
    }
    heads = {}
    if source.agree is not None and build.agree is not None:
        heads = {
            "source_agree": source.agree.astype(float),
            "build_agree": build.agree.astype(float),
            "source_shared": source.shared,
            "build_shared": build.shared,
        }
    single = corpus.slices == ""
    return {
        "format": FORMAT,
        "tokens": int(sum(b.size for b in corpus.batches[:-1])),
        "windows": int(sum(len(b) for b in corpus.batches[:-1])),
        "window": int(corpus.batches[0].shape[1]),
        "dtype": dtype,
        "temperature": temperature,
        "source": _model(columns, heads, "source"),
        "build": _model(columns, heads, "build"),
        "kl": {
            "mean": float(columns["kl"].mean()),
            "median": float(np.median(columns["kl"])),
            "p99": float(np.quantile(columns["kl"], 0.99)),
        },
        "top1_agreement": float(columns["same"].mean()),
        "differences": _differences(columns, heads),
        "slices": {name: _slice({k: v[named == name] for k, v in columns.items()}) for name in corpus.tokens_per_byte},
        "single_tokens": {
            "tokens": int(single.sum()),
            "kl": float(kl[single].mean()),
            "top1_agreement": float((source.first == build.first)[single].mean()),
        },
        "layers": [asdict(layer) for layer in layers],
        "suspects": suspects(layers, same_weights),
    }


def _bits_per_byte(loss: np.ndarray, rate: np.ndarray) -> float:
    return float((loss * rate).mean() / np.log(2))


def _model(columns: dict, heads: dict, side: str) -> dict:
    loss = columns[f"{side}_loss"]
    return {
        "bits_per_byte": _bits_per_byte(loss, columns["rate"]),
        "perplexity": float(np.exp(min(loss.mean(), 700.0))),
        "forced_agreement": float(heads[f"{side}_agree"].mean()) if heads else None,
        "expected_acceptance": float(heads[f"{side}_shared"].mean()) if heads else None,
    }


def _slice(columns: dict) -> dict:
    return {
        "tokens": len(columns["kl"]),
        "source_bits_per_byte": _bits_per_byte(columns["source_loss"], columns["rate"]),
        "build_bits_per_byte": _bits_per_byte(columns["build_loss"], columns["rate"]),
        "kl": float(columns["kl"].mean()),
        "top1_agreement": float(columns["same"].mean()),
    }


def _differences(columns: dict, heads: dict) -> dict:
    """Build less source, each with its 95 % interval; null where there are no heads."""
    bits = (columns["build_loss"] - columns["source_loss"]) * columns["rate"] / np.log(2)
    found = {
        "bits_per_byte": bits,
        "kl": columns["kl"],
        "top1_agreement": columns["same"] - 1,
    }
    for name, key in (("forced_agreement", "agree"), ("expected_acceptance", "shared")):
        found[name] = heads[f"build_{key}"] - heads[f"source_{key}"] if heads else None
    return {
        name: None if x is None else {"value": float(x.mean()), "interval": bootstrap(x, np.mean)}
        for name, x in found.items()
    }


def bootstrap(values: np.ndarray, statistic: Callable[[np.ndarray], float]) -> list[float]:
    """The 95 % percentile interval of a statistic, from resampled runs of UNIT positions (Kuensch 1989); seeded."""
    units = np.array_split(values, max(1, len(values) // UNIT))
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(units), (RESAMPLES, len(units)))
    found = [statistic(np.concatenate([units[i] for i in row])) for row in drawn]
    return [float(x) for x in np.quantile(found, (0.025, 0.975))]
