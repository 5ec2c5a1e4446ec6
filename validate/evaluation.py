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
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..convert import motif
from ..convert.checkpoint import Checkpoint, read_json
from ..convert.config import MODEL_FILE
from ..convert.fingerprint import fingerprint
from ..convert.hub import Source, own_folder, private_folder
from ..convert.plan import Plan
from ..convert.shards import sha256_of
from ..quantize.errors import SourceError, listing
from .corpus import Corpus
from .dense import Dense, modules_of
from .divergence import Layer, report
from .judge import Seen, judge
from .layerwise import Side, head_states, pass_layer
from .layout import Comparison
from .loading import check_small_files
from .structure import check_tensors, read_shards
from .verify import what_it_should_be

LENS = 256  # positions that are looked at after every layer
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class Parameters:
    """The plan of a build, and each of its parameters beside its source, by its MLX name."""

    plan: Plan
    modules: dict[str, Comparison]


@dataclass
class State:
    """Where an evaluation stands.

    Args:
        done: layers that both models have passed.
        source, build: residual streams of each batch, [B, L, n, D].
        layers: what was seen at each of those layers.
    """

    done: int
    source: list[mx.array]
    build: list[mx.array]
    layers: list[Layer]


def evaluate(
    out: Path,
    origin: Source,
    checkpoint: Checkpoint,
    parameters: Parameters,
    corpus: Corpus,
    dtype: str,
    temperature: float,
    lens: bool,
    say: Callable[[str], None],
    progress: Callable[[int, str], None],
) -> dict:
    """Runs both models over a corpus and compares what they say.

    Args:
        out: the build. Its own `motif.py` is run.
        origin: where the source comes from.
        parameters: see `parameters_of`.
        corpus: the tokens.
        dtype: "float32" or "bfloat16", of the streams and all that is computed.
        temperature: of the softmaxes of body and head.
        lens: whether to look through the output head after every layer.
        progress: called with bytes of both models' weights that were used, and the layer.
    Returns:
        JSON: see `divergence.report`.
    Raises:
        SourceError: something can't be read.
    """
    plan, modules, theirs = parameters.plan, parameters.modules, _module(out / MODEL_FILE)
    kept = own_folder() / "evaluations" / _key(out, origin, checkpoint, plan, corpus, dtype, lens)
    with closing(Dense(modules, build=False)) as true, closing(Dense(modules, build=True)) as mine:
        source = Side(motif, motif.ModelArgs.from_dict(checkpoint.config), true, DTYPES[dtype])
        build = Side(theirs, theirs.ModelArgs.from_dict(read_json(out / "config.json")[0]), mine, DTYPES[dtype])
        state = _restored(kept) or State(0, _begun(source, corpus), _begun(build, corpus), [])
        used = _bytes_by_layer((source, build))
        if state.done:
            say(f"Going on after layer {state.done - 1}, where an earlier run stopped.")
            progress(sum(used[layer] for layer in range(state.done)), f"layer {state.done - 1}")
        for index in range(state.done, source.args.num_hidden_layers):
            state = _next(state, source, build, corpus, lens)
            _keep(kept, state)
            progress(used[index], f"layer {index}")
        seen = _seen(source, state.source, corpus), _seen(build, state.build, corpus)
        words = judge(*seen, corpus.targets, corpus.judged, temperature)
        progress(used[None], "output head")
    _forget(kept)
    return report(corpus, *words, state.layers, dtype, temperature)


def gated(result: dict, max_kl: float | None, min_top1: float | None) -> dict:
    """A result with what was asked of it: `max_kl`, `min_top1`, `failures`, `passed`."""
    failures = []
    if max_kl is not None and not result["kl"]["mean"] <= max_kl:
        failures.append(f"mean KL {result['kl']['mean']:.4g} is above {max_kl:g}")
    if min_top1 is not None and not result["top1_agreement"] >= min_top1:
        failures.append(f"top-1 agreement {result['top1_agreement']:.4f} is below {min_top1:g}")
    return result | {"max_kl": max_kl, "min_top1": min_top1, "failures": failures, "passed": not failures}


def memory_needed(checkpoint: Checkpoint, corpus: Corpus, dtype: str) -> int:
    """About how many bytes an evaluation takes: the streams of both models before and after a layer, the largest layer
    without its routed experts, and those that are read ahead."""
    c, itemsize = checkpoint.config, 4 if dtype == "float32" else 2
    streams = 5 * corpus.count * c["mhc_expansion_rate"] * c["hidden_size"] * itemsize
    attention = sum(
        int(np.prod(t.shape)) for t in checkpoint.tensors.values() if t.name.startswith("model.layers.0.self_attn.")
    )
    dense = 3 * c["hidden_size"] * c["intermediate_size"]
    expert = 3 * c["hidden_size"] * c["moe_intermediate_size"] * (itemsize + 4 * 5)
    return 300_000_000 + streams + 8 * (attention + dense) + expert + 6 * 4096 * corpus.count * 4


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


def _module(path: Path):
    """A build's `motif.py`, whose hash `check_small_files` has compared."""
    spec = spec_from_file_location("motif_of_build", path)
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise SourceError(f"{path}: can't be run: {type(e).__name__}: {e}") from None
    return module


def _begun(side: Side, corpus: Corpus) -> list[mx.array]:
    return [side.streams(batch) for batch in corpus.batches]


def _next(state: State, source: Side, build: Side, corpus: Corpus, lens: bool) -> State:
    """Both models' next layer; the build's also on the source's streams, which shows what this layer alone does."""
    index, count = state.done, len(state.source)
    true = pass_layer(source, index, state.source)
    both = pass_layer(build, index, state.build + state.source)
    choices = both.choices and both.choices[:count]
    seen = Layer.compared(
        index,
        corpus,
        state.source,
        true.streams,
        both.streams[:count],
        both.streams[count:],
        (true.choices, choices) if choices else None,
    )
    if lens:
        seen = replace(seen, lens=_through_lens(source, build, true.streams[0], both.streams[0], corpus))
    return State(index + 1, true.streams, both.streams[:count], [*state.layers, seen])


def _through_lens(source: Side, build: Side, true: mx.array, mine: mx.array, corpus: Corpus) -> dict:
    """What the first windows say if the output head stood here: `source_loss`, `build_loss`, `kl`, nats a token."""
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
        made = [head_states(side, h, t) for h, t in zip(hidden, corpus.batches, strict=True) if t.shape[1] > 1]
        head = mx.concatenate([h.reshape(-1, h.shape[-1]) for h in made])
    return Seen(side, mx.concatenate([h.reshape(-1, h.shape[-1]) for h in hidden]), head)


def _bytes_by_layer(sides: tuple[Side, Side]) -> dict[int | None, int]:
    """Bytes of both sides' parameters in each layer; those outside the layers under None."""
    found: dict[int | None, int] = {None: 0}
    for side in sides:
        for name, m in side.dense.modules.items():
            found[m.layer] = found.get(m.layer, 0) + side.dense.nbytes(name)
    return found


# --- what is kept of an unfinished run ---


def _key(out: Path, origin: Source, checkpoint: Checkpoint, plan: Plan, corpus: Corpus, *asked) -> str:
    """Names an evaluation of these very weights on these very tokens."""
    shards = {t.shard for t in checkpoint.tensors.values()}
    made = {name: os.stat(out / name) for name in plan.shards}
    parts = [
        version("motif-convert"),
        plan.plan_hash,
        fingerprint(origin, shards),
        sorted((name, s.st_size, s.st_mtime_ns) for name, s in made.items()),
        sha256_of(out / MODEL_FILE),
        [b.tolist() for b in corpus.batches],
        asked,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _keep(folder: Path, state: State) -> None:
    """Writes the streams, then, in one step, what says which they are and their hash."""
    private_folder(folder)
    path = folder / f"streams-{state.done}.safetensors"
    arrays = {f"{side}.{i}": a for side in ("source", "build") for i, a in enumerate(getattr(state, side))}
    mx.save_safetensors(str(path), arrays)
    record = {"done": state.done, "sha256": sha256_of(path), "layers": [asdict(layer) for layer in state.layers]}
    partial = folder / "state.json.partial"
    partial.write_text(json.dumps(record))
    partial.replace(folder / "state.json")
    (folder / f"streams-{state.done - 1}.safetensors").unlink(missing_ok=True)


def _restored(folder: Path) -> State | None:
    """What an earlier run has kept; None if nothing, or nothing whole."""
    try:
        record = json.loads((folder / "state.json").read_text())
        path = folder / f"streams-{record['done']}.safetensors"
        if sha256_of(path) != record["sha256"]:
            return None
        arrays = mx.load(str(path))
        sides = [[arrays[f"{side}.{i}"] for i in range(len(arrays) // 2)] for side in ("source", "build")]
        return State(record["done"], *sides, [Layer(**layer) for layer in record["layers"]])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def _forget(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()
    if folder.exists():
        folder.rmdir()
