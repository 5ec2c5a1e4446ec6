"""Teacher-forced drafting: body and head over real text, once, with no sampling noise."""

from collections.abc import Iterable

import mlx.core as mx

WINDOW = 512  # tokens, each with a fresh context


def forced_acceptance(model, windows: Iterable[list[int]], temperature: float) -> dict:
    """What the head's drafts are worth on text, counted at every position.

    At position t the body has seen token t + 1 and the head the body's state at t and token t + 1; both say what
    token t + 2 is. Each window is its own context.

    Args:
        model: a loaded Motif-3 with an MTP head.
        windows: token ids, each at least three.
        temperature: of the softmaxes p and q.
    Returns:
        `positions`; `agreement`, the share where both first choices are the same; `expected_acceptance`, the mean
        over positions of sum over x of min(p(x), q(x)), which is what rejection sampling accepts.
    Raises:
        ValueError: no window is long enough.
    """
    agree, accept, count = 0, 0.0, 0
    for window in windows:
        ids = mx.array([window])
        hidden = model.model(ids)
        body = model.lm_head(hidden[:, 1:]).astype(mx.float32)
        head = model.mtp_forward(hidden[:, :-1], ids[:, 1:]).astype(mx.float32)
        # The last position's token t + 2 lies behind the window: it is still a draft that the body judges.
        same = (mx.argmax(body, axis=-1) == mx.argmax(head, axis=-1)).sum()
        shared = mx.minimum(mx.softmax(body / temperature, axis=-1), mx.softmax(head / temperature, axis=-1)).sum()
        agree, accept, count = agree + same.item(), accept + shared.item(), count + body.shape[1]
    if not count:
        raise ValueError("the text is too short: a window needs two tokens")
    return {"positions": count, "agreement": agree / count, "expected_acceptance": accept / count}


def windows_of(tokens: list[int], size: int = WINDOW) -> list[list[int]]:
    """Cuts tokens into windows; a rest of fewer than two tokens is left out."""
    cut = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return [w for w in cut if len(w) > 1]
