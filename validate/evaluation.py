"""A build measured against its true source, layer by layer, in the memory of a few: `motif-convert eval`.

Both models see the same tokens. Each layer is read once from either's shards, applied to all tokens, and dropped. What
is held beside is the residual streams of the tokens, which are kept on the disk after each layer, so that an
interrupted run goes on.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..convert.checkpoint import Checkpoint, read_json
from ..convert.config import MODEL_FILE
from ..convert.hub import own_folder
from ..convert.plan import Plan
from ..convert.ranks import ALONE, Ranks
from ..convert.shards import sha256_of
from ..quantize.errors import CheckError, SourceError, listing
from . import eval_state
from .corpus import Corpus
from .dense import Dense, modules_of
from .divergence import Layer, report
from .eval_state import State
from .judge import Seen, judge
from .layerwise import MlxSide, module_of
from .layout import Comparison
from .loading import check_small_files
from .mixture import dismiss, serve
from .pytorch import let_in
from .side import Passed, Side
from .structure import check_tensors, read_shards
from .verify import what_it_should_be

LENS = 256  # positions that are looked at after every layer
OF_ENGINES = ("kl", "top1_agreement", "layers", "suspects")  # of a report, where two engines are compared
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class Parameters:
    """The plan of a build, and each of its parameters beside its source, by its MLX name."""

    plan: Plan
    modules: dict[str, Comparison]


def evaluate(
    out: Path,
    checkpoint: Checkpoint,
    parameters: Parameters,
    corpus: Corpus,
    kept: Path,
    engine: str,
    dtype: str,
    temperature: float,
    lens: bool,
    say: Callable[[str], None],
    progress: Callable[[int, str], None],
    ranks: Ranks = ALONE,
) -> dict | None:
    """Runs both models over a corpus and compares what they say.

    Args:
        out: the build. Its own `motif.py` is run.
        parameters: see `parameters_of`.
        corpus: the tokens.
        kept: where the streams are kept between layers; for `eval_state.forget`, once the result is safe.
        engine: "mlx", or "torch": PyTorch computes both models, and mlx, with the build's `motif.py` and the source's
            weights, a third.
        dtype: "float32" or "bfloat16", of the streams and all that is computed.
        temperature: of the softmaxes of body and head.
        lens: whether to look through the output head after every layer.
        progress: called with bytes of both models' weights that were used, and the layer.
        ranks: those that share the routed experts; engine "mlx" alone.
    Returns:
        JSON: see `divergence.report`; None on ranks other than the first.
    Raises:
        SourceError: something can't be read, or the source gives NaN.
        CheckError: a layer or a head of the build gives NaN or infinite values where the source's does not.
    """
    modules = parameters.modules
    with closing(Dense(modules, build=False)) as true, closing(Dense(modules, build=True)) as mine:
        sides = _sides(out, checkpoint, true, mine, engine, DTYPES[dtype], ranks)
        if not ranks.first:
            return serve(ranks, sides)
        source, others = sides["source"], [name for name in sides if name != "source"]
        state = eval_state.restored(kept) or _begun(sides, corpus)
        used = _bytes_by_layer(list(sides.values()))
        if state.done:
            say(f"Going on after layer {state.done - 1}, where an earlier run stopped.")
            progress(sum(used[layer] for layer in range(state.done)), f"layer {state.done - 1}")
        for index in range(state.done, source.layers):
            state = _next(state, sides, corpus, lens)
            eval_state.keep(kept, state)
            progress(used[index], f"layer {index}")
        dismiss(ranks)
        seen = {name: _seen(side, state.streams[name], corpus) for name, side in sides.items()}
        for name, states in seen.items():
            _check_finite(name, "the MTP head", [] if states.head is None else [states.head])
        reports = {}
        for name in others:
            words = judge(seen["source"], seen[name], corpus.targets, corpus.judged, temperature)
            for side, said in zip(("source", name), words[:2], strict=True):
                _check_finite(side, "the output head", [mx.array(said.loss[corpus.targets >= 0])])
            reports[name] = report(corpus, *words, state.layers[name], dtype, temperature, name == "other")
        progress(used[None], "output head")
    other = reports.get("other")
    return reports["build"] | {"engine": engine, "other_engine": other and {k: other[k] for k in OF_ENGINES}}


def _sides(
    out: Path, checkpoint: Checkpoint, true: Dense, mine: Dense, engine: str, dtype: mx.Dtype, ranks: Ranks
) -> dict[str, Side]:
    """The models: "source", "build", and, where PyTorch computes these, "other": the source in mlx."""
    theirs, config = module_of(out / MODEL_FILE), read_json(out / "config.json")[0]
    args = theirs.ModelArgs.from_dict(config)
    if engine == "mlx":
        ours = module_of(Path(files("motif_convert.convert") / MODEL_FILE))
        source = MlxSide(ours, ours.ModelArgs.from_dict(checkpoint.config), true, dtype, ranks, "source")
        return {"source": source, "build": MlxSide(theirs, args, mine, dtype, ranks, "build")}
    try:
        let_in()
        from .torch_side import TorchSide
    except ImportError as e:
        raise SourceError(f"--engine torch needs PyTorch: pip install 'motif-convert[torch]' ({e})") from None
    source, build = TorchSide(checkpoint.config, true), TorchSide(config, mine)
    return {"source": source, "build": build, "other": MlxSide(theirs, args, true, dtype)}


def gated(result: dict, max_kl: float | None, min_top1: float | None) -> dict:
    """A result with what was asked of it: `max_kl`, `min_top1`, `failures`, `passed`."""
    failures = []
    if max_kl is not None and not result["kl"]["mean"] <= max_kl:
        failures.append(f"mean KL {result['kl']['mean']:.4g} is above {max_kl:g}")
    if min_top1 is not None and not result["top1_agreement"] >= min_top1:
        failures.append(f"top-1 agreement {result['top1_agreement']:.4f} is below {min_top1:g}")
    return result | {"max_kl": max_kl, "min_top1": min_top1, "failures": failures, "passed": not failures}


def memory_needed(checkpoint: Checkpoint, corpus: Corpus, dtype: str, engine: str) -> int:
    """About how many bytes an evaluation takes: the streams of all models before and after a layer, the largest layer
    without its routed experts, the next one's, and the experts that are read ahead."""
    c, itemsize = checkpoint.config, 4 if dtype == "float32" else 2
    models = 3 if engine == "torch" else 2
    streams = (2 * models + 1) * corpus.count * c["mhc_expansion_rate"] * c["hidden_size"] * itemsize
    attention = sum(
        int(np.prod(t.shape)) for t in checkpoint.tensors.values() if t.name.startswith("model.layers.0.self_attn.")
    )
    dense = 3 * c["hidden_size"] * c["intermediate_size"]
    expert = 3 * c["hidden_size"] * c["moe_intermediate_size"] * (itemsize + 4 * 5)
    return 300_000_000 + streams + 12 * (attention + dense) + expert + 6 * 4096 * corpus.count * 4


def parameters_of(out: Path, checkpoint: Checkpoint) -> Parameters:
    """Where a build's parameters and their sources lie.

    Raises:
        SourceError: `out` is not a build of this source, or not whole.
    """
    check_small_files(out)
    _, plan, problems = what_it_should_be(out, checkpoint)
    if plan is None:
        raise SourceError(listing(f"{out}: can't be evaluated against this source", problems))
    shards, unreadable = read_shards(out)
    if problems := unreadable + check_tensors(plan, shards, out):
        raise SourceError(listing(f"{out}: can't be evaluated; `motif-convert verify` says more", problems))
    tensors = {name: info for shard in shards.values() for name, info in shard.items()}
    return Parameters(plan, modules_of(plan, tensors, out, checkpoint))


def _begun(sides: dict[str, Side], corpus: Corpus) -> State:
    streams = {name: [side.streams(batch) for batch in corpus.batches] for name, side in sides.items()}
    return State(0, streams, {name: [] for name in sides if name != "source"})


def _next(state: State, sides: dict[str, Side], corpus: Corpus, lens: bool) -> State:
    """Every model's next layer; the others' also on the source's streams, which shows what this layer alone does."""
    index, before, layers = state.done, state.streams["source"], {}
    names = list(sides)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        sides[following].dense.read_ahead(index if following != "source" else index + 1)
        given = state.streams[name]
        if name == "source":
            true = sides[name].passed(index, given)
            _check_finite(name, f"layer {index}", true.streams)
            streams = {name: true.streams}
            continue
        same = all(mx.array_equal(mine, theirs) for mine, theirs in zip(given, before, strict=True))
        both = sides[name].passed(index, given if same else given + before)
        _check_finite(name, f"layer {index}", both.streams)
        streams[name] = both.streams[: len(given)]
        choices = (true.choices, both.choices[: len(given)]) if true.choices else None
        probe = both.streams[-len(given) :]
        seen = Layer.compared(index, corpus, before, true.streams, streams[name], probe, choices)
        if lens:
            seen = replace(seen, lens=_through_lens(sides["source"], sides[name], true, both, corpus))
        layers[name] = [*state.layers[name], seen]
    return State(index + 1, streams, layers)


def _check_finite(side: str, what: str, arrays: list[mx.array]) -> None:
    """Ends the comparison at the first of a model's parts that gives NaN or infinite values."""
    if all(mx.isfinite(a).all().item() for a in arrays):
        return
    if side == "source":
        raise SourceError(f"{what} of the source gives NaN or infinite values: there is nothing to compare with")
    whose = "the build" if side == "build" else "motif.py, with the source's weights,"
    raise CheckError(
        f"{what} of {whose} gives NaN or infinite values where the source gives none; `motif-convert verify` "
        "names the tensor"
    )


def _through_lens(source: Side, build: Side, one: Passed, other: Passed, corpus: Corpus) -> dict:
    """What the first windows say if the output head stood here: `source_loss`, `build_loss`, `kl`, nats a token."""
    true, mine = one.streams[0], other.streams[0]
    windows = max(1, LENS // true.shape[1])
    seen = (Seen(s, s.hidden(h[:windows]).reshape(-1, h.shape[-1]), None) for s, h in ((source, true), (build, mine)))
    targets = corpus.targets[: min(windows, len(true)) * true.shape[1]]
    one, other, kl = judge(*seen, targets, np.array([], int), 1.0)
    losses = {f"{name}_loss": float(np.nanmean(w.loss)) for name, w in (("source", one), ("build", other))}
    return losses | {"kl": float(kl[targets >= 0].mean())}


def _seen(side: Side, streams: list[mx.array], corpus: Corpus) -> Seen:
    """The last states, one position after the other."""
    hidden = [side.hidden(h) for h in streams]
    head = None
    if "mtp.embed_norm.weight" in side.dense:
        made = [side.head_states(h, t) for h, t in zip(hidden, corpus.batches, strict=True) if t.shape[1] > 1]
        head = mx.concatenate([h.reshape(-1, h.shape[-1]) for h in made])
    return Seen(side, mx.concatenate([h.reshape(-1, h.shape[-1]) for h in hidden]), head)


def _bytes_by_layer(sides: list[Side]) -> dict[int | None, int]:
    """Bytes of all sides' parameters in each layer; those outside the layers under None."""
    found: dict[int | None, int] = {None: 0}
    for side in sides:
        for name, m in side.dense.modules.items():
            found[m.layer] = found.get(m.layer, 0) + side.dense.nbytes(name)
    return found


def kept_folder(out: Path, source: str, plan: Plan, corpus: Corpus, **asked) -> Path:
    """Where an evaluation of these very weights on these very tokens is kept between two layers.

    Args:
        source: its fingerprint.
        asked: what else decides the numbers.
    """
    made = {name: os.stat(out / name) for name in plan.shards}
    parts = [
        version("motif-convert"),
        plan.plan_hash,
        source,
        sorted((name, s.st_size, s.st_mtime_ns) for name, s in made.items()),
        sha256_of(out / MODEL_FILE),
        corpus.digest,
        sorted(asked.items()),
    ]
    return own_folder() / "evaluations" / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
