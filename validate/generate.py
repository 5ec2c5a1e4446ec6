"""The build, loaded by an unmodified mlx-lm, writes a few words."""

import os
from collections.abc import Iterator
from pathlib import Path

from .loading import has_tokenizer, load

PROMPT = "This function returns the number of"


def why_not(folder: Path, total_bytes: int) -> str | None:
    """Why a build can't be tried here, or None: it has no tokenizer, or the memory is too small."""
    if not has_tokenizer(folder):
        return "the source has no tokenizer"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total_bytes > 0.9 * memory:
        return f"the build needs {total_bytes / 1e9:.0f} GB of memory, this machine has {memory / 1e9:.0f}"
    return None


def generate(folder: Path, prompt: str, max_tokens: int) -> Iterator[str]:
    """Loads the repository with `mlx_lm.load` and yields the text it writes after `prompt`, greedily.

    The repository's own `motif.py` is run: give it folders that this program has written.
    """
    from mlx_lm import stream_generate

    model, tokenizer, _ = load(folder)
    for response in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
        yield response.text
