"""A model evaluated by PyTorch, layer by layer, in float32: `torch_forward`, with weights straight from the shards."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from ..convert.workers import processors
from . import torch_forward
from .dense import EXPERTS, Dense
from .side import Passed


class Weights:
    """`torch_forward.Weights` of one side."""

    def __init__(self, dense: Dense):
        self.dense = dense

    def __call__(self, name: str) -> Tensor:
        return torch.from_numpy(self.dense.whole(name))

    def embed(self, ids: Tensor) -> Tensor:
        rows = [self.dense.rows("model.embed_tokens.weight", i, 1) for i in ids.tolist()]
        return torch.from_numpy(np.concatenate(rows))

    def experts(self, prefix: str, chosen: list[int]) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        for expert, matrices in self.dense.experts(tuple(f"{prefix}.{e}weight" for e in EXPERTS), chosen):
            yield expert, tuple(map(torch.from_numpy, matrices))


class TorchSide:
    """A `Side` in PyTorch.

    Args:
        config: `config.json` of the source or of the build.
        dense: its weights.
    """

    def __init__(self, config: dict, dense: Dense):
        self.config, self.dense, self.weights = config, dense, Weights(dense)
        self.layers, self.vocabulary = config["num_hidden_layers"], config["vocab_size"]
        torch.set_num_threads(processors())

    def streams(self, tokens: np.ndarray) -> mx.array:
        streams = torch_forward.embedded(self.config, self.weights, torch.from_numpy(tokens.ravel()))
        return _as_mlx(streams.reshape(*tokens.shape, *streams.shape[1:]))

    @torch.inference_mode()
    def passed(self, index: int, batches: list[mx.array]) -> Passed:
        lengths = [b.shape[1] for b in batches for _ in range(len(b))]
        flat = torch.cat([_as_torch(b).flatten(0, 1) for b in batches])
        streams, choices = torch_forward.decoder_layer(self.config, self.weights, index, flat, lengths)
        sizes = [b.shape[0] * b.shape[1] for b in batches]
        made = [_as_mlx(s.reshape(b.shape)) for s, b in zip(streams.split(sizes), batches, strict=True)]
        return Passed(made, None if choices is None else [c.numpy() for c in choices.split(sizes)])

    @torch.inference_mode()
    def hidden(self, streams: mx.array) -> mx.array:
        flat = _as_torch(streams).flatten(0, 1)
        hidden = torch_forward.last_hidden(self.config, self.weights, flat)
        return _as_mlx(hidden.reshape(*streams.shape[:2], -1))

    @torch.inference_mode()
    def head_states(self, hidden: mx.array, tokens: np.ndarray) -> mx.array:
        count, length = tokens.shape
        states = torch_forward.mtp_hidden(
            self.config,
            self.weights,
            _as_torch(hidden[:, :-1]).flatten(0, 1),
            torch.from_numpy(tokens[:, 1:].ravel()),
            [length - 1] * count,
        )
        return _as_mlx(states.reshape(count, length - 1, -1))


def _as_torch(x: mx.array) -> Tensor:
    return torch.from_numpy(np.array(x))


def _as_mlx(x: Tensor) -> mx.array:
    return mx.array(x.contiguous().numpy())
