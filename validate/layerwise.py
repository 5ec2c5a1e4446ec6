"""A model evaluated layer by layer: one layer's weights at a time, for all tokens, then the next.

What is held is the residual streams of all tokens, and of a layer's weights all but the routed experts, which come one
after the other, only those that some token chose. The layers are those of a `motif.py`; the sum over a token's experts
is written here, since nothing there takes experts one by one.
"""

from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from .dense import Dense

EXPERTS = ("gate_proj", "up_proj", "down_proj")


def product(x: mx.array, weight: mx.array | np.ndarray) -> mx.array:
    """x @ W^T. mlx's wheels for Linux bring a plain BLAS, which takes fifty times as long as numpy's."""
    if mx.default_device() == mx.gpu or x.dtype != mx.float32:
        return x @ mx.array(weight).astype(x.dtype).T
    rows = np.array(x, copy=False).reshape(-1, x.shape[-1])
    return mx.array((rows @ np.array(weight, copy=False).T).reshape(*x.shape[:-1], -1))


class _NumpyLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return product(x, self.weight)


@dataclass
class Side:
    """One of the two models that are compared.

    Args:
        motif: the module that its layers come from.
        args: its `ModelArgs`.
        dense: its weights.
        dtype: in which it is computed.
    """

    motif: ModuleType
    args: object
    dense: Dense
    dtype: mx.Dtype

    def array(self, name: str, shape: tuple[int, ...]) -> mx.array:
        return mx.array(self.dense.whole(name).reshape(shape)).astype(self.dtype)

    def loaded(self, module: nn.Module, prefix: str) -> nn.Module:
        """Fills a module with the parameters under a prefix; those of routed experts stay unmade."""
        found = [
            (name, self.array(prefix + name, made.shape))
            for name, made in tree_flatten(module.parameters())
            if not any(f"switch_mlp.{projection}." in name for projection in EXPERTS)
        ]
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
        """[B, L] ids to the residual streams before the first layer, [B, L, n, D]."""
        return mx.repeat(self.embed(tokens)[..., None, :], self.args.mhc_expansion_rate, axis=-2)

    def hidden(self, streams: mx.array) -> mx.array:
        """Streams [B, L, n, D] to the state after the final norm, [B, L, D]."""
        norm = self.array("model.norm.weight", (self.args.hidden_size,))
        mean = streams.astype(mx.float32).mean(axis=-2).astype(self.dtype)
        return mx.fast.rms_norm(mean, norm, self.args.rms_norm_eps)


@dataclass
class Passed:
    """What a layer made of some batches.

    Args:
        streams: [B, L, n, D] each.
        choices: of the router, int [B * L, K] each; None where a layer is dense.
    """

    streams: list[mx.array]
    choices: list[np.ndarray] | None


def pass_layer(side: Side, index: int, batches: list[mx.array]) -> Passed:
    """Applies layer `index` to batches of streams, each a number of windows of one length."""
    prefix = f"model.layers.{index}."
    layer = side.loaded(side.motif.DecoderLayer(side.args, index), prefix)
    window = side.args.window if layer.slides else None
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
    made, start, done = _mixture(side, prefix, layer.mlp, flat, choices, shares), 0, []
    ends = np.cumsum([x.shape[0] * x.shape[1] for x in inputs])
    for h, x, end in zip(attended, inputs, ends, strict=True):
        out = made[start:end].reshape(x.shape)
        if "shared_experts" in layer.mlp:
            out = out + layer.mlp.shared_experts(x)
        done.append(layer.mhc_ffn(h, lambda _, out=out: out))
        mx.eval(done[-1])
        start = int(end)
    return Passed(done, np.split(choices, ends[:-1]))


def _attend(layer: nn.Module, streams: mx.array, window: int | None) -> mx.array:
    """The first half of a layer, a window at a time: scores of many would be many times as large."""
    mask = create_attention_mask(streams[:1, :, 0], None, window_size=window)

    def attention(x: mx.array) -> mx.array:
        return layer.self_attn(layer.input_layernorm(x), mask, None)

    if streams.shape[1] == 1:
        return layer.mhc_attn(streams, attention)
    done = []
    for row in range(len(streams)):
        done.append(layer.mhc_attn(streams[row : row + 1], attention))
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


def _mixture(side: Side, prefix: str, moe: nn.Module, x: mx.array, choices: np.ndarray, shares: mx.array) -> mx.array:
    """The weighted sum over each token's experts: x [N, D], choices [N, K] -> [N, D] in x's dtype."""
    experts, total = moe.switch_mlp, np.zeros(x.shape, np.float32)
    shares = np.array(shares.astype(mx.float32))
    order = np.argsort(choices, axis=None, kind="stable")
    chosen, starts = np.unique(choices.ravel()[order], return_index=True)
    places = dict(zip(chosen.tolist(), np.split(order, starts[1:]), strict=True))
    stacks = tuple(f"{prefix}mlp.switch_mlp.{p}.weight" for p in EXPERTS)
    for expert, matrices in side.dense.experts(stacks, chosen.tolist()):
        tokens, ranks = np.divmod(places[expert], choices.shape[1])
        gate, up, down = matrices
        rows = x[mx.array(tokens)]
        weight, bias = experts.act_fn.weight[expert][None], experts.act_fn.bias[expert][None]
        if experts.bias_clamp is not None:
            bias = mx.clip(bias, -experts.bias_clamp, experts.bias_clamp)
        act = side.motif.poly_norm(product(rows, gate), product(rows, up), weight, bias, experts.output_scale)
        made = np.array(product(act, down).astype(mx.float32))
        total[tokens] += made * shares[tokens, ranks][:, None]  # a token chooses an expert once
    return mx.array(total).astype(x.dtype)


def head_states(side: Side, hidden: mx.array, tokens: np.ndarray) -> mx.array:
    """What the MTP head makes of windows of hidden states [B, L, D] and ids [B, L]: [B, L - 1, D].

    At t it reads the state at t and token t + 1, and says what token t + 2 is.
    """
    head, made = side.loaded(side.motif.MTPHead(side.args), "mtp."), []
    for row in range(len(hidden)):
        made.append(head(hidden[row : row + 1, :-1], side.embed(tokens[row : row + 1, 1:])))
        mx.eval(made[-1])
    return mx.concatenate(made)
