"""Two models' last hidden states, compared by the words that they stand for.

The output head is read in blocks of the vocabulary, twice: the logits of a whole one would be the largest thing in
memory. The first time gives normalizers and first choices, the second what needs both.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .products import product
from .side import Side

BLOCK = 4096  # rows of the output head at a time


@dataclass
class Words:
    """What one model says at every position, each array float64 or int of its N positions.

    Args:
        loss: -log of the probability of the token that follows, in nats; NaN where none does.
        first: the first choice.
        agree: whether the MTP head's first choice for the token after the next is the body's; as long as the positions
            that the head sees.
        shared: sum over tokens of min(p, q) there, of the body's and the head's softmaxes at a temperature.
    """

    loss: np.ndarray
    first: np.ndarray
    agree: np.ndarray | None = None
    shared: np.ndarray | None = None


class Softmax:
    """Of logits that come in blocks: log of the normalizer, at temperature 1 and at another, and the first choice."""

    def __init__(self, rows: int, temperature: float):
        self.temperature = temperature
        self.top = mx.full((rows,), -mx.inf)
        self.first = mx.zeros((rows,), mx.int32)
        self.plain, self.warm = mx.zeros((rows,)), mx.zeros((rows,))

    def add(self, logits: mx.array, start: int) -> None:
        """Logits [rows, v] of tokens from `start` on."""
        top = mx.maximum(self.top, logits.max(axis=-1))
        self.first = mx.where(top > self.top, logits.argmax(axis=-1).astype(mx.int32) + start, self.first)
        off, moved = logits - top[:, None], self.top - top
        self.plain = self.plain * mx.exp(moved) + mx.exp(off).sum(axis=-1)
        t = self.temperature
        self.warm = self.warm * mx.exp(moved / t) + mx.exp(off / t).sum(axis=-1)
        self.top = top
        mx.eval(self.top, self.first, self.plain, self.warm)

    def log_p(self, logits: mx.array) -> mx.array:
        return logits - (self.top + mx.log(self.plain))[:, None]

    def warm_p(self, logits: mx.array) -> mx.array:
        return mx.exp((logits - self.top[:, None]) / self.temperature) / self.warm[:, None]


@dataclass
class Seen:
    """The states of one side.

    Args:
        body: after the final norm, [N, D].
        head: the MTP head's, [M, D]; None without one.
    """

    side: Side
    body: mx.array
    head: mx.array | None


def judge(
    source: Seen, build: Seen, targets: np.ndarray, judged: np.ndarray, temperature: float
) -> tuple[Words, Words, np.ndarray]:
    """Compares what two models say at N positions.

    Args:
        targets: int [N], the token that follows; -1 where none does.
        judged: int [M], the position at which the body says the same token as the head at its m-th position.
        temperature: of the softmaxes p and q.
    Returns:
        The source's words, the build's, and KL(source || build) in nats, float64 [N].
    """
    seen, vocabulary = (source, build), source.side.vocabulary
    bodies = [Softmax(len(s.body), temperature) for s in seen]
    heads = [Softmax(len(s.head), temperature) if s.head is not None else None for s in seen]
    target, following = mx.array(targets), [mx.zeros((len(targets),)) for _ in seen]
    for start in range(0, vocabulary, BLOCK):
        for i, s in enumerate(seen):
            rows = _rows(s.side, start, vocabulary)
            logits = _logits(s.body, rows)
            bodies[i].add(logits, start)
            inside = (target >= start) & (target < start + logits.shape[1])
            place = mx.clip(target - start, 0, logits.shape[1] - 1)[:, None]
            following[i] = mx.where(inside, mx.take_along_axis(logits, place, axis=-1)[:, 0], following[i])
            if heads[i]:
                heads[i].add(_logits(s.head, rows), start)
            mx.eval(following[i])

    divergence, place = mx.zeros((len(targets),)), mx.array(judged)
    shared = [mx.zeros((len(judged),)) if h else None for h in heads]
    for start in range(0, vocabulary, BLOCK):
        logs = []
        for i, s in enumerate(seen):
            rows = _rows(s.side, start, vocabulary)
            logits = _logits(s.body, rows)
            logs.append(bodies[i].log_p(logits))
            if heads[i]:
                p, q = bodies[i].warm_p(logits)[place], heads[i].warm_p(_logits(s.head, rows))
                shared[i] = shared[i] + mx.minimum(p, q).sum(axis=-1)
        divergence = divergence + kl_terms(*logs).sum(axis=-1)
        mx.eval(divergence, [x for x in shared if x is not None])

    words = []
    for i in range(2):
        body, head = bodies[i], heads[i]
        loss = np.array(body.top + mx.log(body.plain) - following[i]).astype(np.float64)
        found = Words(np.where(targets < 0, np.nan, loss), np.array(body.first))
        if head:
            found.agree = np.array(head.first) == found.first[judged]
            found.shared = np.array(shared[i]).astype(np.float64)
        words.append(found)
    return words[0], words[1], np.array(divergence).astype(np.float64)


def kl_terms(log_p: mx.array, log_q: mx.array) -> mx.array:
    """Terms p ln(p / q) + q - p of a KL divergence, whose second half sums to nothing.

    Each is at least 0, and of the second order in ln q - ln p, so that rounding of the normalizers does not show where
    p and q are nearly the same: the terms p ln(p / q) alone leave some 1e-7.
    """
    p, q, d = mx.exp(log_p), mx.exp(log_q), log_q - log_p
    return mx.where(mx.abs(d) < 1, p * (mx.expm1(mx.clip(d, -1, 1)) - d), q - p - p * d)


def _rows(side: Side, start: int, vocabulary: int) -> np.ndarray:
    """Rows of the output head from `start` on, [v, D]."""
    return side.dense.some("lm_head.weight", start, min(BLOCK, vocabulary - start))


def _logits(states: mx.array, rows: np.ndarray) -> mx.array:
    return product(states, rows).astype(mx.float32)
