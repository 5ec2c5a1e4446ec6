"""Decoding with and without the MTP head: greedy and sampled, lossless, one host synchronisation a step.

A step processes the last token and K drafts at once, keeps the drafts that the body confirms and one token
more, and takes the rejected rows back out of every cache. Right after an update of several rows a rotating
cache still holds, in order, the window before the first of them; so rows can be cut off its end even when it
has wrapped, which mlx-lm's own `trim` can't.

Of a pipeline (`mlx_lm.utils.sharded_load`) every rank runs the same steps, and has to evaluate collectives in the
same order: of what is evaluated at once, each has to depend on the one before.
"""

import time
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

PREFILL_CHUNK = 512


@dataclass
class Run:
    """One decoded continuation.

    Args:
        tokens: emitted ids.
        drafted, accepted: per draft position, K entries: drafts made there, and confirmed there.
        steps: forward passes of the body after prefill.
        prefill_seconds, decode_seconds: wall time.
        finite: whether every logit that was looked at was finite.
    """

    tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finite: bool = True


def take_back(caches: Iterable, rows: int) -> None:
    """Drops the last `rows` rows of caches whose last update wrote more than `rows`.

    Raises:
        ValueError: a rotating cache's last update wrote one row, over the oldest, which is lost.
    """
    if rows == 0:
        return
    for cache in caches:
        if not isinstance(cache, RotatingKVCache):
            cache.trim(rows)
        elif cache._idx != cache.keys.shape[2] or rows >= cache._idx:
            raise ValueError("a rotating cache can be taken back only right after an update of several rows")
        else:
            cache.keys, cache.values = cache.keys[..., :-rows, :], cache.values[..., :-rows, :]
            cache._idx -= rows
            cache.offset -= rows


def branch(cache: RotatingKVCache) -> RotatingKVCache:
    """A copy to write chained drafts into; what it writes never shows in `cache`."""
    twin = copy(cache)
    if cache.keys is None:  # of a head that another rank computes
        return twin
    twin.keys, twin.values = mx.array(cache.keys), mx.array(cache.values)
    return twin


class Decoder:
    """One sequence's caches, and the hidden state and token that the next step starts from.

    Args:
        model: a loaded Motif-3 (`motif.Model`).
        prompt: token ids, at least one.
        temperature: 0 for greedy decoding, else of the softmax that is sampled.
        drafts: drafts a step; 0 decodes without the head.
        seed: of the sampling.
    """

    def __init__(self, model, prompt: list[int], temperature: float = 0.0, drafts: int = 0, seed: int = 0):
        self.model, self.temperature, self.drafts = model, temperature, drafts
        self.key = mx.random.key(seed)
        self.cache = model.make_cache()
        self.head_cache = model.make_mtp_cache() if drafts else []
        self.run = Run(drafted=[0] * drafts, accepted=[0] * drafts)
        started = time.perf_counter()
        self._prefill(mx.array([prompt]))
        self.run.prefill_seconds = time.perf_counter() - started

    def _prefill(self, prompt: mx.array) -> None:
        """Runs body and head over the prompt in chunks, and chooses the first token."""
        length = prompt.shape[1]
        for start in range(0, length, PREFILL_CHUNK):
            hidden = self.model.model(prompt[:, start : start + PREFILL_CHUNK], self.cache)
            following = prompt[:, start + 1 : start + 1 + PREFILL_CHUNK]
            if self.drafts and following.shape[1]:
                self._head(hidden[:, : following.shape[1]], following, self.head_cache[0])
            # `hidden` too, which every rank has: the head's cache, which rank 0 alone fills, depends on it.
            mx.eval(hidden, [c.state for c in (*self.cache, *self.head_cache)])
        logits = self.model.lm_head(hidden[:, -1:])
        token = self._choose(logits)
        # What the head has not seen yet: hidden states, and the tokens after them.
        self.pending_hidden, self.pending_tokens = hidden[:, -1:], token
        self.last = token
        self._emit(token, logits)

    def _emit(self, token: mx.array, logits: mx.array) -> list[int]:
        finite = mx.isfinite(logits).all()
        mx.eval(token, finite)
        self.run.finite &= finite.item()
        self.run.tokens += token.tolist()[0]
        return token.tolist()[0]

    def _head(self, hidden: mx.array, tokens: mx.array, cache) -> mx.array:
        return self.model.mtp(hidden, self.model.model.embed_tokens(tokens), cache)

    def _next_key(self) -> mx.array:
        self.key, key = mx.random.split(self.key)
        return key

    def _choose(self, logits: mx.array) -> mx.array:
        """Logits [1, L, V] -> tokens [1, L]."""
        if self.temperature == 0:
            return mx.argmax(logits, axis=-1)
        return mx.random.categorical(log_probs(logits, self.temperature), key=self._next_key())

    def step(self) -> list[int]:
        """Decodes at least one token; returns those it emitted."""
        started = time.perf_counter()
        emitted = self._step_with_drafts() if self.drafts else self._step()
        self.run.decode_seconds += time.perf_counter() - started
        self.run.steps += 1
        return emitted

    def _step(self) -> list[int]:
        logits = self.model.lm_head(self.model.model(self.last, self.cache))
        self.last = self._choose(logits)
        return self._emit(self.last, logits)

    def _draft(self) -> tuple[mx.array, mx.array]:
        """K drafts [1, K] and the head's logits for them [1, K, V]; the head first catches up."""
        hidden = self._head(self.pending_hidden, self.pending_tokens, self.head_cache[0])[:, -1:]
        logits = [self.model.lm_head(hidden)]
        drafts = [self._choose(logits[0])]
        if self.drafts > 1:
            scratch = branch(self.head_cache[0])
            for _ in range(1, self.drafts):
                hidden = self._head(hidden, drafts[-1], scratch)
                logits.append(self.model.lm_head(hidden))
                drafts.append(self._choose(logits[-1]))
        return mx.concatenate(drafts, axis=1), mx.concatenate(logits, axis=1)

    def _step_with_drafts(self) -> list[int]:
        drafts, draft_logits = self._draft()
        # In a pipeline the body's first transfer depends on nothing, and must not go before those of the drafts.
        if getattr(self.model.model, "pipeline_size", 1) > 1:
            mx.eval(drafts, draft_logits)
        hidden = self.model.model(mx.concatenate([self.last, drafts], axis=1), self.cache)
        logits = self.model.lm_head(hidden)
        confirmed, tokens = confirm(drafts, draft_logits, logits, self.temperature, self._next_key())
        finite = mx.isfinite(logits).all()
        mx.eval(confirmed, tokens, finite)
        count, tokens_list = confirmed.item(), tokens.tolist()[0]
        self.run.finite &= finite.item()
        for position in range(self.drafts):
            # A draft behind a rejected one was never judged.
            self.run.drafted[position] += position <= count
            self.run.accepted[position] += position < count
        take_back(self.cache, self.drafts - count)
        self.pending_hidden, self.pending_tokens = hidden[:, : count + 1], tokens[:, : count + 1]
        self.last = tokens[:, count : count + 1]
        self.run.tokens += tokens_list[: count + 1]
        return tokens_list[: count + 1]


def confirm(
    drafts: mx.array, draft_logits: mx.array, logits: mx.array, temperature: float, key: mx.array
) -> tuple[mx.array, mx.array]:
    """How many drafts hold, and the tokens to emit: that many drafts, then the body's own.

    At a temperature: draft x holds with probability min(1, p(x) / q(x)); the first that does not is replaced by a
    sample of (p - q)+ (Leviathan et al. 2023), which makes the whole a sample of p.

    Args:
        drafts: [B, K], sampled from q (at temperature 0: the head's first choices).
        draft_logits: [B, K, V] of q.
        logits: [B, K + 1, V] of p, the last after all drafts.
    Returns:
        int32 [B], and [B, K + 1], of which the first [B] + 1 count.
    """
    k = drafts.shape[1]
    if temperature == 0:
        own = mx.argmax(logits, axis=-1)
        holds = drafts == own[:, :k]
    else:
        key_holds, key_own = mx.random.split(key)
        log_p, log_q = log_probs(logits, temperature), log_probs(draft_logits, temperature)
        ratio = mx.take_along_axis(log_p[:, :k] - log_q, drafts[..., None], axis=-1)[..., 0]
        holds = mx.log(mx.random.uniform(shape=drafts.shape, key=key_holds)) < ratio
        left = mx.maximum(mx.exp(log_p[:, :k]) - mx.exp(log_q), 0)
        left = mx.concatenate([left, mx.exp(log_p[:, k:])], axis=1)
        own = mx.random.categorical(mx.log(left), key=key_own)
    confirmed = mx.cumprod(holds.astype(mx.int32), axis=1).sum(axis=1)
    padded = mx.concatenate([drafts, drafts[:, -1:]], axis=1)
    return confirmed, mx.where(mx.arange(k + 1)[None] < confirmed[:, None], padded, own)


def log_probs(logits: mx.array, temperature: float) -> mx.array:
    """Log of the softmax at a temperature, float32."""
    logits = logits.astype(mx.float32) / temperature
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def decode(
    model,
    prompt: list[int],
    tokens: int,
    drafts: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
) -> Run:
    """Continues a prompt by `tokens` tokens, or up to and with one of `stop`.

    Args:
        model: a loaded Motif-3.
        prompt: token ids.
        drafts: drafts a step by the MTP head, chained; 0 decodes without it.
        temperature: 0 for greedy.
    Raises:
        ValueError: an empty prompt, or drafts from a build without a head.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    if drafts and "mtp" not in model:
        raise ValueError("this build has no MTP head to draft with")
    decoder = Decoder(model, prompt, temperature, drafts, seed)
    run = decoder.run
    while len(run.tokens) < tokens and not stop & set(run.tokens):
        decoder.step()
    end = next((i + 1 for i, t in enumerate(run.tokens) if t in stop), len(run.tokens))
    del run.tokens[min(end, tokens) :]
    return run
