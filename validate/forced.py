"""Teacher-forced drafting: body and head over real text, once, with no sampling noise."""

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

WINDOW = 512  # tokens, each with a fresh context


def forced_positions(model, windows: Iterable[list[int]], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """What the head's draft is worth at every position of a text.

    At position t the body has seen token t + 1 and the head the body's state at t and token t + 1; both say what
    token t + 2 is, and the body judges the draft also where token t + 2 lies behind the window.

    Args:
        model: a loaded Motif-3 with an MTP head.
        windows: token ids, each its own context, of two tokens or more.
        temperature: of the softmaxes p and q.
    Returns:
        bool [N], whether both first choices are the same; float32 [N], sum over x of min(p(x), q(x)).
    Raises:
        ValueError: no window is long enough.
    """
    agree, shared = [], []
    for window in windows:
        ids = mx.array([window])
        hidden = model.model(ids)
        body = model.lm_head(hidden[:, 1:]).astype(mx.float32)
        head = model.mtp_forward(hidden[:, :-1], ids[:, 1:]).astype(mx.float32)
        agree.append(np.array(mx.argmax(body, axis=-1) == mx.argmax(head, axis=-1))[0])
        p, q = mx.softmax(body / temperature, axis=-1), mx.softmax(head / temperature, axis=-1)
        shared.append(np.array(mx.minimum(p, q).sum(axis=-1))[0])
    if not agree:
        raise ValueError("the text is too short: a window needs two tokens")
    return np.concatenate(agree), np.concatenate(shared)


def forced_acceptance(agree: np.ndarray, shared: np.ndarray) -> dict:
    """`forced_positions` added up: `positions`; `agreement`, the share of equal first choices;
    `expected_acceptance`, the mean of sum min(p, q), which is what rejection sampling accepts."""
    return {
        "positions": len(agree),
        "agreement": float(agree.mean()),
        "expected_acceptance": float(shared.astype(np.float64).mean()),
    }


def windows_of(tokens: list[int], size: int = WINDOW) -> list[list[int]]:
    """Cuts tokens into windows; a rest of fewer than two tokens is left out."""
    cut = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return [w for w in cut if len(w) > 1]
