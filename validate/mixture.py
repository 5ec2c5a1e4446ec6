"""The weighted sum over each token's experts, one expert after the other; several ranks take turns at them.

Rank 0 runs the models; the others compute experts for it. Experts come in groups of as many as there are ranks, each
of which reads and computes its own one, and rank 0 adds them up in order: to the bit what one process gets.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..convert.ranks import Ranks
from .dense import EXPERTS
from .products import product

if TYPE_CHECKING:
    from .layerwise import MlxSide


def mixture(side: "MlxSide", layer: int, x: mx.array, choices: np.ndarray, shares: np.ndarray | None) -> mx.array:
    """The sum over each token's experts: x [N, D], choices [N, K], shares float32 [N, K] -> [N, D] in x's dtype.

    Every rank calls it, those other than the first without shares; what it gives counts on rank 0.
    """
    ranks, total = side.ranks, np.zeros(x.shape, np.float32)
    order = np.argsort(choices, axis=None, kind="stable")
    chosen, starts = np.unique(choices.ravel()[order], return_index=True)
    places = [np.divmod(place, choices.shape[1]) for place in np.split(order, starts[1:])]
    tokens = [t for t, _ in places]
    made = _experts(side, layer, x, chosen[ranks.rank :: ranks.size].tolist(), tokens[ranks.rank :: ranks.size])
    for first in range(0, len(chosen), ranks.size):
        group = places[first : first + ranks.size]
        ends = np.cumsum([len(t) for t, _ in group])
        rows = np.zeros((ends[-1], x.shape[1]), np.float32) if ranks.several else next(made)
        if ranks.several:
            if ranks.rank < len(group):
                rows[ends[ranks.rank] - len(group[ranks.rank][0]) : ends[ranks.rank]] = next(made)
            rows = ranks.added(rows)
        if shares is not None:
            for (t, k), one in zip(group, np.split(rows, ends[:-1]), strict=True):
                total[t] += one * shares[t, k][:, None]  # a token chooses an expert once
    return mx.array(total).astype(x.dtype)


def _experts(
    side: "MlxSide", layer: int, x: mx.array, chosen: list[int], tokens: list[np.ndarray]
) -> Iterator[np.ndarray]:
    """What each of some experts makes of its tokens, float32 [n, D]."""
    mlp, args = f"model.layers.{layer}.mlp.", side.args
    weights, biases = (side.array(f"{mlp}switch_mlp.act_fn.{kind}") for kind in ("weight", "bias"))
    if args.polynorm_bias_clamp is not None:
        biases = mx.clip(biases, -args.polynorm_bias_clamp, args.polynorm_bias_clamp)
    every = side.dense.experts(tuple(f"{mlp}{e}weight" for e in EXPERTS), chosen)
    for (expert, (gate, up, down)), mine in zip(every, tokens, strict=True):
        rows = x[mx.array(mine)]
        act = side.motif.poly_norm(
            product(rows, gate),
            product(rows, up),
            weights[expert][None],
            biases[expert][None],
            args.polynorm_output_scale,
        )
        yield np.array(product(act, down).astype(mx.float32))


def call(ranks: Ranks, side: str, layer: int, x: mx.array, choices: np.ndarray) -> None:
    """Rank 0 asks the others to take part in a `mixture`. Raises MotifConvertError: a rank is gone."""
    if ranks.several:
        ranks.told([side, layer])
        ranks.shared(np.array(x.astype(mx.float32)))
        ranks.shared(choices)


def dismiss(ranks: Ranks) -> None:
    """Rank 0 needs the others no more."""
    ranks.told(None)


def serve(ranks: Ranks, sides: dict[str, "MlxSide"]) -> None:
    """What a rank other than the first does: experts, as rank 0 calls for them. Raises MotifConvertError."""
    while (task := ranks.told()) is not None:
        side, layer = task
        x = mx.array(ranks.shared(None)).astype(sides[side].dtype)
        mixture(sides[side], layer, x, ranks.shared(None), None)
