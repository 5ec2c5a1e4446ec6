"""README.md of a build: the model card, as the Hub reads it."""

import re

import yaml

from ..convert.checkpoint import Checkpoint, read_whole
from ..convert.hub import Source
from ..convert.losses import Losses
from ..convert.plan import Plan
from ..quantize.errors import SourceError
from .show import experts_sentence, family_rows, markdown_table, mtp_sentence

MAX_CARD_BYTES = 4 << 20
FRONT_MATTER = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:[\r\n]|$)", re.DOTALL)  # what the Hub takes for it


def source_metadata(checkpoint: Checkpoint) -> dict:
    """The YAML front matter of the source's README.md; empty where there is none to read."""
    path = checkpoint.folder / "README.md"
    if not path.is_file():
        return {}
    try:
        found = FRONT_MATTER.match(read_whole(path, MAX_CARD_BYTES).decode("utf-8"))
        meta = yaml.safe_load(found[1]) if found else None
    except (SourceError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return meta if isinstance(meta, dict) else {}


def make_card(plan: Plan, source: Source, checkpoint: Checkpoint, losses: Losses) -> str:
    """The card's text. License and languages are the source's own; nothing is assumed."""
    theirs = source_metadata(checkpoint)
    meta = {k: theirs[k] for k in ("license", "license_name", "license_link", "language") if k in theirs}
    meta |= {"library_name": "mlx", "pipeline_tag": "text-generation", "tags": ["mlx", "motif"]}
    if "/" in source.id:
        meta |= {"base_model": source.id, "base_model_relation": "quantized"}
    front = yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)
    name = f"{source.name} {plan.recipe.name}"
    made_from = f"[{source.id}](https://huggingface.co/{source.id})" if "/" in source.id else f"`{source.id}`"
    revision = f" at `{source.revision}`" if source.revision else ""
    license_line = (
        ""
        if "license" in theirs
        else "\nThe source states no license in its card; ask its authors before you publish.\n"
    )
    experts = f"\n{experts_sentence(plan, losses)}\n" if plan.nvfp4 else ""
    return f"""---
{front}---

# {name} for MLX

Made from {made_from}{revision} by `motif-convert` with the recipe `{plan.recipe.name}`:
{plan.total_parameters:,} parameters in {plan.total_bytes:,} bytes, {plan.bits_per_weight:.3f} bits per weight.
`motif-convert.json` holds the recipe, the source's hashes and the hash of every file here.
{license_line}
## Use

```sh
pip install mlx-lm
mlx_lm.generate --model <this repository> --trust-remote-code --prompt "Hello"
```

mlx-lm does not know Motif-3 itself: it takes the architecture from `motif.py` in this repository, and
`--trust-remote-code` allows that. The file needs nothing but mlx and mlx-lm; read it first.

## MTP head

{mtp_sentence(plan, losses)}

## Precision

{markdown_table(family_rows(plan))}
{experts}
## Evidence

![Error by layer and family, acceptance of the drafts, size by family](validation.png)

`motif-convert verify` compares every group of every tensor with the source; `motif-convert smoke` counts the drafts
that the body confirms. [validation.json](validation.json) has what they found.
"""
