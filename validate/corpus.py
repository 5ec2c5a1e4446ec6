"""What two models are compared on: texts, cut into windows of tokens, and single tokens."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np

from ..convert.checkpoint import read_whole
from ..quantize.errors import SourceError

MAX_TEXT_BYTES = 16 << 20
SINGLES = 64  # tokens that are looked at alone


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens, each its own context.

    Args:
        batches: int [B, L] each; the windows of one length together, single tokens last.
        names: for each batch the slice of the text that each of its windows is of; single tokens are of none.
        tokens_per_byte: by slice.
    """

    batches: tuple[np.ndarray, ...]
    names: tuple[tuple[str, ...], ...]
    tokens_per_byte: dict[str, float]

    @property
    def count(self) -> int:
        return sum(b.size for b in self.batches)

    @property
    def digest(self) -> str:
        """A hex sha256 of the tokens and how they are cut."""
        return hashlib.sha256(json.dumps([b.tolist() for b in self.batches]).encode()).hexdigest()

    @cached_property
    def targets(self) -> np.ndarray:
        """The token after each position, all windows one after the other; -1 at the last of a window."""
        following = [np.concatenate([b[:, 1:], np.full((len(b), 1), -1)], axis=1) for b in self.batches]
        return np.concatenate([f.ravel() for f in following])

    @cached_property
    def judged(self) -> np.ndarray:
        """The positions at which the body says what the MTP head, a position earlier, has said: all but each first."""
        first = np.concatenate([np.tile(np.arange(b.shape[1]) == 0, len(b)) for b in self.batches])
        return np.flatnonzero(~first)

    @cached_property
    def slices(self) -> np.ndarray:
        """The slice's name at each position; empty for single tokens."""
        every = zip(self.batches, self.names, strict=True)
        return np.concatenate([np.repeat(names or ("",) * len(b), b.shape[1]) for b, names in every])


def read_texts(path: Path | None) -> dict[str, str]:
    """Texts by name: of a text file, of `.jsonl` lines with `text` and perhaps `name`, or those that ship.

    Raises:
        SourceError: naming the file and the line.
    """
    name = "eval.jsonl" if path is None else str(path)
    raw = (files(__package__) / name).read_bytes() if path is None else read_whole(path, MAX_TEXT_BYTES)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise SourceError(f"{path}: not a text file in UTF-8") from None
    if not name.endswith(".jsonl"):
        return {"text": text}
    texts: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            content, label = entry["text"], entry.get("name", "text")
            content.encode()  # a lone surrogate is no text
            if not (isinstance(content, str) and isinstance(label, str) and label and label.isprintable()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise SourceError(f'{name}, line {number}: needs {{"text": "..."}}, and may have "name": "..."') from None
        texts[label] = texts[label] + "\n" + content if label in texts else content
    return texts


def make_corpus(
    texts: dict[str, str], encode: Callable[[str], list[int]], vocabulary: int, window: int, most: int | None
) -> Corpus:
    """Cuts texts into windows; of `most` tokens every text gives its share.

    Raises:
        SourceError: no text makes a window of two tokens, or a token is not in the vocabulary.
    """
    taken: list[tuple[str, list[int]]] = []
    rates, left = {}, most
    for name, text in texts.items():
        tokens = encode(text)
        if any(not 0 <= t < vocabulary for t in tokens):
            raise SourceError(f"the tokenizer gives a token that config.json's vocab_size {vocabulary} does not have")
        rates[name] = len(tokens) / max(1, len(text.encode()))
        if most is not None:
            tokens = tokens[: min(left, max(2, most // len(texts)))]
            left -= len(tokens)
        cut = (tokens[i : i + window] for i in range(0, len(tokens), window))
        taken += [(name, w) for w in cut if len(w) > 1]
    if not taken:
        raise SourceError("--text: too short; a window needs two tokens or more")
    lengths = sorted({len(t) for _, t in taken}, reverse=True)
    batches = [np.array([t for _, t in taken if len(t) == n], np.int32) for n in lengths]
    names = [tuple(name for name, t in taken if len(t) == n) for n in lengths]
    singles = list(dict.fromkeys(t for _, tokens in taken for t in tokens))[:SINGLES]
    batches.append(np.array(singles, np.int32)[:, None])
    return Corpus(tuple(batches), (*names, ()), {n: rates[n] for n in dict.fromkeys(n for n, _ in taken)})
