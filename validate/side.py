"""What `eval` asks of a model, whichever engine computes it."""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from .dense import Dense


@dataclass
class Passed:
    """What a layer made of some batches.

    Args:
        streams: [B, L, n, D] each.
        choices: of the router, int [B * L, K] each; None where a layer is dense.
    """

    streams: list[mx.array]
    choices: list[np.ndarray] | None


class Side(Protocol):
    """One of the models that are compared; `layers` and `vocabulary` are its sizes, `dense` its weights."""

    dense: Dense
    layers: int
    vocabulary: int

    def streams(self, tokens: np.ndarray) -> mx.array:
        """[B, L] ids to the residual streams before the first layer, [B, L, n, D]."""

    def passed(self, index: int, batches: list[mx.array]) -> Passed:
        """Applies layer `index` to batches of streams, each a number of windows of one length."""

    def hidden(self, streams: mx.array) -> mx.array:
        """Streams [B, L, n, D] behind the last layer to the state after the final norm, [B, L, D]."""

    def head_states(self, hidden: mx.array, tokens: np.ndarray) -> mx.array:
        """What the MTP head makes of windows of hidden states [B, L, D] and ids [B, L]: [B, L - 1, D].

        At t it reads the state at t and token t + 1, and says what token t + 2 is.
        """
