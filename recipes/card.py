"""README.md of a build: the model card, as the Hub reads it.

All of it follows from motif-convert.json, the sizes of the families and validation.json, so that it can be written
again when there is more to say.
"""

import os
import re
import shlex
from itertools import count
from pathlib import Path

import yaml

from ..convert.checkpoint import Checkpoint, read_json, read_whole
from ..convert.journal import sole_run
from ..convert.repo import CARD, PROVENANCE
from ..convert.shards import Written, as_json, write_file
from ..quantize.errors import RecipeError, SourceError
from ..validate.evidence import evidence_of
from ..validate.inspect import inspect_repo
from ..validate.provenance import read_provenance
from .card_text import evidence_section, plain
from .recipe import built_in, load_recipe, recipe_yaml
from .show import experts_sentence, families_table, human_bytes, markdown_table, mtp_sentence

DEMO_ID = "demo-motif3"
BEFORE = ".README.md.before"  # a card that was changed by hand, kept when it is written anew
MAX_CARD_BYTES = 4 << 20
MAX_FRONT_MATTER = 64 << 10
TAKEN = ("license", "license_name", "license_link", "language")  # of the source's own card
DRAFTING = (
    "\n\n`mlx_lm.generate` decodes without it. Runtimes that draft call `model.mtp_forward`, as `motif.py` describes."
)
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})(.*)$", re.MULTILINE)


def source_metadata(checkpoint: Checkpoint) -> dict:
    """License and languages, as the YAML front matter of the source's README.md has them; empty where it has none."""
    path = checkpoint.folder / CARD
    if not path.is_file():
        return {}
    try:
        found = _front_matter(read_whole(path, MAX_CARD_BYTES).decode("utf-8"))
        if (
            found is None
            or len(found) > MAX_FRONT_MATTER
            or any(isinstance(token, yaml.AliasToken) for token in yaml.scan(found, yaml.SafeLoader))
        ):
            return {}
        meta = yaml.safe_load(found)
        known = {k: meta[k] for k in TAKEN if k in meta} if isinstance(meta, dict) else {}
        as_json(known)
    except (SourceError, ValueError, TypeError, yaml.YAMLError, RecursionError):
        return {}
    return known


def _front_matter(text: str) -> str | None:
    """What the Hub takes for a card's metadata: the lines between two of `---` at its head; None without."""
    lines = text.lstrip().splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return None
    return "\n".join(lines[1 : lines.index("---", 1)])


def read_extra(path: Path) -> str:
    """A user's own text for the card.

    Raises:
        RecipeError: it can't be read, or would make the rest render wrong.
    """
    try:
        text = read_whole(path, MAX_CARD_BYTES).decode("utf-8").strip()
    except SourceError as e:
        raise RecipeError(f"--card-extra: {e}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"--card-extra {path}: not a text file in UTF-8") from None
    if not text:
        raise RecipeError(f"--card-extra {path}: is empty")
    if _front_matter(text) is not None:
        raise RecipeError(f"--card-extra {path}: begins with front matter (---); the card has its own: leave it out")
    if not all(c.isprintable() or c in "\n\r\t" for c in text):
        raise RecipeError(f"--card-extra {path}: holds control characters")
    if text.rfind("<!--") > text.rfind("-->"):
        raise RecipeError(f"--card-extra {path}: a comment (<!--) is not closed, and would hide the rest of the card")
    if not _closes_fences(text):
        raise RecipeError(f"--card-extra {path}: a code fence is not closed, and would swallow the rest of the card")
    return text


def _closes_fences(text: str) -> bool:
    opened = ""
    for mark, after in FENCE.findall(text):
        if not opened:
            opened = mark
        elif mark[0] == opened[0] and len(mark) >= len(opened) and not after.strip():
            opened = ""
    return not opened


def make_card(made: dict, families: list[dict], evidence: dict) -> str:
    """The card's text.

    Args:
        made: motif-convert.json, with `card`: the source's license and languages, `name`, `extra`, and once published
            `repo` and `branch` (None for main); nothing is assumed of what is not there.
        families: see `Plan.families` and `inspect_repo`.
        evidence: validation.json; empty where nothing was measured yet.
    """
    source, recipe, card = made["source"], made["recipe"], made["card"]
    on_the_hub = "/" in source["id"]
    meta = {k: card[k] for k in TAKEN if k in card}
    meta |= {"library_name": "mlx", "pipeline_tag": "text-generation", "tags": ["mlx", "motif"]}
    if on_the_hub:
        meta |= {"base_model": source["id"], "base_model_relation": "quantized"}
    front = yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)
    made_from = f"[{source['id']}](https://huggingface.co/{source['id']})" if on_the_hub else plain(source["id"])
    revision = f" at commit `{source['revision']}`" if source["revision"] else ""
    parts = [
        f"---\n{front}---",
        f"# {plain(source['id'].rsplit('/', 1)[-1])} {recipe['name']} for MLX",
        f"Made from {made_from}{revision} by `motif-convert` {made['converter']['version']} with the recipe "
        f"`{recipe['name']}`:\n{plain(recipe['description']) or 'see below.'}",
        f"{made['total_parameters']:,} parameters in {made['total_bytes']:,} bytes "
        f"({human_bytes(made['total_bytes'])}), {made['bits_per_weight']:.3f} bits per weight. "
        "Loading it takes as much memory.",
    ]
    if "license" not in card:
        parts.append("The source states no license in its card; ask its authors before you publish.")
    if card.get("extra"):
        parts.append(card["extra"])
    total = ("total", f"{made['total_parameters']:,}", human_bytes(made["total_bytes"]))
    total += (f"{made['bits_per_weight']:.3f}", "")
    model = card["repo"] or card["name"]
    download = ""
    if card["repo"] and card["branch"]:
        model = card["name"]
        download = f"hf download {card['repo']} --revision {shlex.quote(card['branch'])} --local-dir {model}\n"
    parts += [
        f"""## Use

```sh
pip install mlx-lm
{download}mlx_lm.generate --model {model} --trust-remote-code --prompt "Hello" --max-tokens 200
```

mlx-lm does not know Motif-3 itself: it takes the architecture from `motif.py` in this repository, and
`--trust-remote-code` allows that. The file needs nothing but mlx and mlx-lm; read it first.""",
        f"## MTP head\n\n{mtp_sentence(made)}{DRAFTING if made['mtp']['policy'] not in ('none', 'drop') else ''}",
        f"## Precision\n\n{markdown_table([*families_table(families), total])}",
    ]
    if made["experts"]["from"].startswith("NVFP4"):
        parts.append(experts_sentence(made))
    parts += [_how_it_was_made(made), evidence_section(evidence)]
    return "\n\n".join(parts) + "\n"


def _how_it_was_made(made: dict) -> str:
    source, recipe = made["source"], made["recipe"]
    text, name = recipe_yaml(recipe), recipe["name"]
    ships = name in built_in() and load_recipe(name).as_dict() == recipe
    words = ["motif-convert", "convert", "--source", "demo" if source["id"] == DEMO_ID else source["id"]]
    words += ["--revision", source["revision"]] if source["revision"] else []
    words += ["--recipe", name if ships else f"{name}.yaml"]
    words += ["--mtp", made["mtp"]["policy"]] if made["mtp"]["policy"] not in ("none", recipe["mtp"]) else []
    words += ["--experts", "affine"] if made["experts"]["requantize"] else []
    words += ["--allow-nonfinite"] if made["allow_nonfinite"] else []
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"""## How it was made

```sh
{shlex.join(words)}
```

with the recipe {f"`{name}`, which ships with motif-convert" if ships else f"in `{name}.yaml`"}:

{fence}yaml
{text.rstrip()}
{fence}

The same version makes the same bytes of it. `motif-convert.json` holds the recipe, the hashes of the source and the
hash of every file here."""


def renewed(out: Path, evidence: dict, facts: dict | None = None) -> dict[str, bytes]:
    """README.md as it now should be, and motif-convert.json with its hash.

    Args:
        evidence: validation.json.
        facts: what else is to be noted, such as `repo`, where the build is published.
    Raises:
        SourceError: not a build that can be read.
    """
    made, _ = read_json(out / PROVENANCE)
    try:
        made["card"] = made["card"] | (facts or {})
        card = make_card(made, inspect_repo(out)["families"], evidence).encode()
        made["files"] = made["files"] | {CARD: Written.of(card).as_dict()}
        return {CARD: card, PROVENANCE: as_json(made)}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise SourceError(f"{out}: {PROVENANCE} or validation.json is not what motif-convert writes") from None


def renew_card(out: Path) -> bool:
    """Writes the card with all the evidence there is, unless it was changed by hand; returns whether it was not.

    Raises:
        SourceError, OutputError.
    """
    files, path = renewed(out, evidence_of(out)), out / CARD
    killed_between = path.is_file() and path.read_bytes() == files[CARD]
    if not killed_between and not is_as_written(out):
        return False
    write_card(out, files)
    return True


def write_card(out: Path, files: dict[str, bytes]) -> None:
    """Writes what `renewed` gives, where it is not so already. Raises OutputError."""
    with sole_run(out, wait=True):
        for name, data in files.items():
            if not (out / name).is_file() or (out / name).read_bytes() != data:
                write_file(out / name, data)


def put_aside(out: Path) -> str | None:
    """Keeps a card that was changed by hand beside the one that is to be written; returns its new name.

    Raises:
        SourceError, OutputError.
    """
    if not (out / CARD).is_file() or is_as_written(out):
        return None
    names = (BEFORE + f"-{n}" * (n > 1) for n in count(1))
    name = next(n for n in names if not os.path.lexists(out / n))
    write_file(out / name, (out / CARD).read_bytes())
    return name


def replace_card(out: Path, extra: str | None) -> str | None:
    """Writes the card anew, whatever became of it; one that was changed by hand is kept beside it.

    Args:
        extra: a user's own text in place of what was there; None keeps that.
    Returns:
        What the card that was there is kept as, if it was changed by hand.
    Raises:
        SourceError, OutputError.
    """
    by_hand = None if renew_card(out) else put_aside(out)
    if extra is not None:
        note(out, {"extra": extra})
    write_card(out, renewed(out, evidence_of(out)))
    return by_hand


def note(out: Path, facts: dict) -> None:
    """Puts facts for the card into motif-convert.json: before the card has it, so that it can be made again.

    Raises:
        SourceError, OutputError.
    """
    made, _ = read_json(out / PROVENANCE)
    made["card"] = made["card"] | facts
    write_file(out / PROVENANCE, as_json(made))


def is_as_written(out: Path) -> bool:
    """Whether the card is the one that motif-convert.json records. Raises SourceError."""
    path, recorded = out / CARD, read_provenance(out).files.get(CARD)
    return path.is_file() and Written.of(path.read_bytes()) == recorded
