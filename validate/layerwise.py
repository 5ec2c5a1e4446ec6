"""A model evaluated by mlx, layer by layer: one layer's weights at a time, for all tokens, then the next.

What is held is the residual streams of all tokens, and of a layer's weights all but the routed experts, which come one
after the other, only those that some token chose. The layers are those of a `motif.py`; the sum over a token's experts
is in `mixture.py`, since nothing there takes experts one by one.
"""

from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, create_causal_mask

from ..convert.ranks import ALONE, Ranks
from ..quantize.errors import SourceError
from .dense import EXPERTS, Dense
from .loading import compiled_anew
from .mixture import call, mixture
from .products import mlx_multiplies, product
from .side import Passed


def attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | str | None = None) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`: q [B, H, L, d], k and v [B, G, T, d], H a multiple of G."""
    if mlx_multiplies(q):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    batch, heads, length, _ = q.shape
    groups, total = k.shape[1:3]
    if isinstance(mask, str):
        mask = create_causal_mask(length, total - length)
    out = np.empty((batch, heads, length, v.shape[-1]), np.float32)
    hidden = None if mask is None else np.broadcast_to(np.array(mask), (batch, heads, length, total))
    queries, keys, values = (np.array(x, copy=False) for x in (q, k, v))
    for row, head in np.ndindex(batch, heads):
        group = head // (heads // groups)
        scores = queries[row, head] @ keys[row, group].T * np.float32(scale)
        if hidden is not None and hidden.dtype == bool:
            scores[~hidden[row, head]] = -np.inf
        elif hidden is not None:
            scores += hidden[row, head]
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[row, head] = scores @ values[row, group] / scores.sum(axis=-1, keepdims=True)
    return mx.array(out)


def module_of(path: Path) -> ModuleType:
    """A `motif.py` as a module of its own, in which attention is `attention`.

    Raises:
        SourceError: it can't be run.
    """
    spec = spec_from_file_location("motif_of_build", path)
    module = module_from_spec(spec)
    try:
        with compiled_anew():
            spec.loader.exec_module(module)
    except Exception as e:
        raise SourceError(f"{path}: can't be run: {type(e).__name__}: {e}") from None
    fast = SimpleNamespace(**vars(mx.fast) | {"scaled_dot_product_attention": attention})
    module.mx = SimpleNamespace(**vars(mx) | {"fast": fast})
    return module


class _NumpyLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return product(x, self.weight)


@dataclass
class MlxSide:
    """A `Side` in mlx.

    Args:
        motif: the module that its layers come from.
        args: its `ModelArgs`.
        dense: its weights.
        dtype: in which it is computed.
        ranks: those that share its routed experts, which know it by its name.
    """

    motif: ModuleType
    args: object
    dense: Dense
    dtype: mx.Dtype
    ranks: Ranks = ALONE
    name: str = ""

    @property
    def layers(self) -> int:
        return self.args.num_hidden_layers

    @property
    def vocabulary(self) -> int:
        return self.args.vocab_size

    def array(self, name: str) -> mx.array:
        return mx.array(self.dense.whole(name)).astype(self.dtype)

    def loaded(self, module: nn.Module, prefix: str) -> nn.Module:
        """Fills a module with the parameters under a prefix; those of routed experts stay unmade."""
        names = [n for n, _ in tree_flatten(module.parameters()) if not any(e in n for e in EXPERTS)]
        found = [(name, self.array(prefix + name)) for name in names]
        module.load_weights(found, strict=False)
        if self.dtype == mx.float32 and mx.default_device() == mx.cpu:
            for part in module.modules():
                if type(part) is nn.Linear:
                    part.__class__ = _NumpyLinear
        return module

    def embed(self, tokens: np.ndarray) -> mx.array:
        """[B, L] ids to [B, L, D]: the rows of the ids that occur, and no others."""
        ids, places = np.unique(tokens, return_inverse=True)
        table = np.concatenate([self.dense.rows("model.embed_tokens.weight", int(i), 1) for i in ids])
        return mx.array(table[places.reshape(tokens.shape)]).astype(self.dtype)

    def streams(self, tokens: np.ndarray) -> mx.array:
        return mx.repeat(self.embed(tokens)[..., None, :], self.args.mhc_expansion_rate, axis=-2)

    def hidden(self, streams: mx.array) -> mx.array:
        norm = self.array("model.norm.weight")
        mean = streams.astype(mx.float32).mean(axis=-2).astype(self.dtype)
        return mx.fast.rms_norm(mean, norm, self.args.rms_norm_eps)

    def passed(self, index: int, batches: list[mx.array]) -> Passed:
        prefix = f"model.layers.{index}."
        layer = self.loaded(self.motif.DecoderLayer(self.args, index), prefix)
        window = self.args.window if layer.slides else None
        attended = []
        for streams in batches:
            attended.append(_attend(layer, streams, window))
            mx.eval(attended[-1])
        if "switch_mlp" not in layer.mlp:
            done = [layer.mhc_ffn(h, lambda x: layer.mlp(layer.post_attention_layernorm(x))) for h in attended]
            for h in done:
                mx.eval(h)
            return Passed(done, None)

        inputs = [_sublayer_input(layer, h) for h in attended]
        mx.eval(inputs)
        flat = mx.concatenate([x.reshape(-1, x.shape[-1]) for x in inputs])
        indices, shares = layer.mlp.gate(flat)
        mx.eval(indices, shares)
        choices = np.array(indices.astype(mx.int32))
        call(self.ranks, self.name, index, flat, choices)
        made, start, done = mixture(self, index, flat, choices, np.array(shares.astype(mx.float32))), 0, []
        ends = np.cumsum([x.shape[0] * x.shape[1] for x in inputs])
        for h, x, end in zip(attended, inputs, ends, strict=True):
            out = made[start:end].reshape(x.shape)
            if "shared_experts" in layer.mlp:
                out = out + layer.mlp.shared_experts(x)
            done.append(layer.mhc_ffn(h, lambda _, out=out: out))
            mx.eval(done[-1])
            start = int(end)
        return Passed(done, np.split(choices, ends[:-1]))

    def head_states(self, hidden: mx.array, tokens: np.ndarray) -> mx.array:
        head, made = self.loaded(self.motif.MTPHead(self.args), "mtp."), []
        for row in range(len(hidden)):
            made.append(head(hidden[row : row + 1, :-1], self.embed(tokens[row : row + 1, 1:])))
            mx.eval(made[-1])
        return mx.concatenate(made)


def _attend(layer: nn.Module, streams: mx.array, window: int | None) -> mx.array:
    """The first half of a layer, a window at a time: scores of many would be many times as large."""
    mask = create_attention_mask(streams[:1, :, 0], None, window_size=window)

    def attend(x: mx.array) -> mx.array:
        return layer.self_attn(layer.input_layernorm(x), mask, None)

    if streams.shape[1] == 1:
        return layer.mhc_attn(streams, attend)
    done = []
    for row in range(len(streams)):
        done.append(layer.mhc_attn(streams[row : row + 1], attend))
        mx.eval(done[-1])
    return mx.concatenate(done)


def _sublayer_input(layer: nn.Module, streams: mx.array) -> mx.array:
    """What the second half of a layer hands to its experts, normed."""
    seen = []

    def note(x: mx.array) -> mx.array:
        seen.append(layer.post_attention_layernorm(x))
        return x

    layer.mhc_ffn(streams, note)
    return seen[0]
