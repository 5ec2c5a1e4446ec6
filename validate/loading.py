"""A build loaded by an unmodified mlx-lm, in quiet, and only if it is what motif-convert wrote."""

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..convert.checkpoint import read_json, read_whole
from ..convert.config import MODEL_FILE
from ..convert.repo import PROVENANCE
from ..quantize.errors import SourceError, quoted

TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZERS)


def encoder(folder: Path) -> Callable[[str], list[int]] | None:
    """What turns text into a build's tokens, with no special ones added; None if it has no tokenizer.

    Raises:
        SourceError: the tokenizer can't be loaded.
    """
    if not has_tokenizer(folder):
        return None
    from mlx_lm.utils import load_tokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        tokenizer = load_tokenizer(folder, {"trust_remote_code": False})
    except Exception as e:  # whatever a damaged file makes transformers raise
        raise SourceError(f"{folder}: its tokenizer can't be loaded: {quoted(e)}") from None
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def check_small_files(folder: Path) -> None:
    """Compares all but the shards with motif-convert.json, since `motif.py` is about to be run.

    Raises:
        SourceError: not a build, or a file that is another than the one written.
    """
    if not (folder / PROVENANCE).exists():
        raise SourceError(f"{folder}: not a build of motif-convert: it has no {PROVENANCE}")
    recorded = read_json(folder / PROVENANCE)[0].get("files")
    for name in (MODEL_FILE, "config.json"):
        if not isinstance(recorded, dict) or name not in recorded:
            raise SourceError(f"{folder / PROVENANCE}: does not list {name}; verify says what is wrong")
    for name, entry in recorded.items():
        if name.endswith(".safetensors") or name == "README.md":
            continue
        found = hashlib.sha256(read_whole(folder / name)).hexdigest()
        if not isinstance(entry, dict) or found != entry.get("sha256"):
            raise SourceError(f"{folder / name}: not the file that motif-convert wrote; verify says what changed")


@contextmanager
def compiled_anew() -> Iterator[None]:
    """While a build's `motif.py` is imported: Python neither runs nor leaves a `__pycache__`.

    One that came with a build need not be of the `motif.py` beside it, whose hash alone is known.
    """
    before = sys.pycache_prefix, sys.dont_write_bytecode
    sys.pycache_prefix, sys.dont_write_bytecode = os.devnull, True
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def load(folder: Path, group=None) -> tuple:
    """`mlx_lm.load` of a build: model, tokenizer, config. The build's own `motif.py` is run.

    Args:
        group: mx.distributed.Group; of several ranks, each loads its own layers (`mlx_lm.utils.sharded_load`).
    Raises:
        SourceError: see `check_small_files`; no tokenizer; or mlx-lm can't load it, with its reason.
    """
    check_small_files(folder)
    if not has_tokenizer(folder):
        raise SourceError(f"{folder}: has no tokenizer, since its source has none; there is nothing to decode with")
    from mlx_lm.utils import load as load_whole
    from mlx_lm.utils import sharded_load
    from transformers.utils import logging

    logging.set_verbosity_error()  # transformers does not know the model type, and does not need to
    try:
        with compiled_anew(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            plain = {"trust_remote_code": False}  # of a tokenizer; `motif.py` is ours
            if group is None or group.size() == 1:
                return load_whole(str(folder), plain, trust_remote_code=True, return_config=True)
            shared = {"tokenizer_config": plain, "trust_remote_code": True}
            return sharded_load(str(folder), pipeline_group=group, return_config=True, **shared)
    except Exception as e:  # whatever a damaged build makes mlx, transformers or motif.py raise
        raise SourceError(f"{folder}: mlx-lm can't load it: {quoted(e)}") from None
