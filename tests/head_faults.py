"""Ways to break an MTP head that change nothing in the text, put into a loaded model and taken out again."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache


class Both(nn.Module):
    """In place of the body's final norm: what it gives, and behind it what it takes."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def __call__(self, x):
        return mx.concatenate([self.norm(x), x], axis=-1)


class FirstHalf(nn.Module):
    """The output head, on the first half of the body's `Both`, and on an MTP head's hidden state as it is."""

    def __init__(self, lm_head, dims):
        super().__init__()
        self.lm_head, self.dims = lm_head, dims

    def __call__(self, x):
        return self.lm_head(x[..., : self.dims])


class Hidden(nn.Module):
    """An MTP head that sees `Both` of the body's hidden state, or its own when a draft is chained."""

    def __init__(self, head, body_state, chained):
        super().__init__()
        self.head, self.body_state, self.chained = head, body_state, chained

    def __call__(self, hidden, embedding, cache=None):
        dims = embedding.shape[-1]
        of_body = hidden.shape[-1] == 2 * dims
        hidden = self.body_state(hidden[..., :dims], hidden[..., dims:]) if of_body else self.chained(hidden)
        return self.head(hidden, embedding, cache)


@contextmanager
def _seen(model, body_state, chained) -> Iterator[None]:
    norm, lm_head, head = model.model.norm, model.lm_head, model.mtp
    model.model.norm, model.lm_head = Both(norm), FirstHalf(lm_head, model.args.hidden_size)
    model.mtp = Hidden(head, body_state, chained)
    try:
        yield
    finally:
        model.model.norm, model.lm_head, model.mtp = norm, lm_head, head


def no_fault(model):
    """The same detour, and nothing wrong: what the others are compared with."""
    return _seen(model, lambda normed, raw: normed, lambda hidden: hidden)


def pre_norm_hidden(model):
    return _seen(model, lambda normed, raw: raw, lambda hidden: hidden)


def chained_draft_normed_twice(model):
    return _seen(model, lambda normed, raw: normed, model.model.norm)


@contextmanager
def _weights(model, change) -> Iterator[None]:
    layers = [m for _, m in model.mtp.named_modules() if isinstance(m, nn.Linear)]
    own = [layer.weight for layer in layers]
    for layer in layers:
        layer.weight = change(layer is model.mtp.input_proj, layer.weight)
    try:
        yield
    finally:
        for layer, weight in zip(layers, own, strict=True):
            layer.weight = weight


def e_before_h(model):
    def change(is_input, weight):
        return mx.concatenate(mx.split(weight, 2, axis=1)[::-1], axis=1) if is_input else weight

    return _weights(model, change)


def scales_dropped(model):
    """Codes of 8 bits, read as if every group had scale 1 and bias 0, which RMS norms behind them half forgive."""

    def change(is_input, weight):
        packed, scales, biases = mx.quantize(weight, group_size=32, bits=8)
        return mx.dequantize(packed, mx.ones_like(scales), mx.zeros_like(biases), group_size=32, bits=8)

    return _weights(model, change)


@contextmanager
def position_one_later(model) -> Iterator[None]:
    attention = model.mtp.self_attn
    kind, own = type(attention), type(attention)._rope
    attention.__class__ = type("Later", (kind,), {"_rope": lambda self, x, offset: own(self, x, offset + 1)})
    try:
        yield
    finally:
        attention.__class__ = kind


@contextmanager
def full_attention(model) -> Iterator[None]:
    window, make_cache = model.mtp.window, model.make_mtp_cache
    model.mtp.window = 1 << 20
    object.__setattr__(model, "make_mtp_cache", lambda: [KVCache()])
    try:
        yield
    finally:
        model.mtp.window = window
        object.__setattr__(model, "make_mtp_cache", make_cache)


FAULTS = {
    "none": no_fault,
    "[e ; h]": e_before_h,
    "pre-norm hidden": pre_norm_hidden,
    "position t + 1": position_one_later,
    "full attention": full_attention,
    "chained draft normed twice": chained_draft_normed_twice,
    "scales dropped": scales_dropped,
}
