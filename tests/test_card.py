"""The model card: what it says, that it renders, and that it is always a part of the build and of its hashes."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import REFERENCE, motif_convert
from huggingface_hub import ModelCard
from motif_convert.recipes.card import make_card, renewed
from motif_convert.recipes.card_text import plain
from motif_convert.recipes.recipe import built_in, load_recipe, parse_recipe, recipe_yaml

TINY, NVFP4 = REFERENCE / "tiny-motif3", REFERENCE / "tiny-motif3-nvfp4"
CARD, PROVENANCE, EVIDENCE = "README.md", "motif-convert.json", "validation.json"


@pytest.fixture
def build(built, tmp_path) -> Path:
    return Path(shutil.copytree(built(TINY), tmp_path / "build"))


@pytest.fixture(scope="module")
def measured(built, tmp_path_factory) -> Path:
    """A build that was verified and smoked, with a prompt of an awkward name."""
    folder = tmp_path_factory.mktemp("measured")
    out = Path(shutil.copytree(built("demo"), folder / "out"))
    assert motif_convert("verify", out).returncode == 0
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "abc", "name": "a|b `c` <d> ~e~ *f*", "raw": True}))
    (folder / "text.txt").write_text("The words of which the head guesses the next. " * 3)
    options = ("--prompts", folder / "prompts.jsonl", "--text", folder / "text.txt", "--tokens", "16")
    result = motif_convert("smoke", out, *options, "--min-acceptance", "0")
    assert result.returncode == 0, result.stderr
    return out


def recorded(out: Path) -> str:
    return json.loads((out / PROVENANCE).read_text())["files"][CARD]["sha256"]


def is_recorded(out: Path) -> bool:
    return hashlib.sha256((out / CARD).read_bytes()).hexdigest() == recorded(out)


def prose(card: str) -> str:
    """A card without its front matter, code and escapes."""
    text = card.split("---\n", 2)[2]
    text = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\\.", "", re.sub(r"`[^`\n]+`", "", text))


# --- what it says ---


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (TINY, ()),
        (TINY, ("--mtp", "fp16")),
        (TINY, ("--mtp", "drop")),
        (TINY, ("--bits", "8", "--mtp", "4.5")),
        (NVFP4, ()),
        (NVFP4, ("--experts", "affine", "--mtp", "8")),
    ],
)
def test_from_the_plan_as_from_what_was_written(source, options, built):
    """Two routes to the same text: the plan before there was a build, and headers afterwards."""
    out = built(source, *options)
    for name, data in renewed(out, {}).items():
        assert (out / name).read_bytes() == data


def test_its_command_makes_the_same_bytes(built, tmp_path):
    out = built("demo", "--bits", "8", "--mtp", "fp16")
    command = re.search(r"## How it was made\n\n```sh\nmotif-convert (.*)\n```", (out / CARD).read_text())[1].split()
    result = motif_convert(*command, "--out", tmp_path / "again")
    assert result.returncode == 0, result.stderr
    for path in out.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", built_in())
def test_recipe_reads_back_the_same(name):
    recipe = load_recipe(name)
    assert parse_recipe(recipe_yaml(recipe.as_dict()), name).as_dict() == recipe.as_dict()


def test_recipe_of_ones_own(tmp_path):
    """With whatever a recipe may hold, in a fence that its own backquotes do not close."""
    text = """
name: mine
description: "```\\n# <b> ~~x~~"
mtp: drop
rules:
  - {match: ["*q_proj*", "*gate_proj*"], dtype: float, optional: true}
  - {match: "*o_proj*", dtype: bf16, optional: true}
  - {match: "*", bits: 8, group_size: 32}
"""
    (tmp_path / "mine.yaml").write_text(text)
    options = ("--source", TINY, "--recipe", "mine.yaml", "--out", "out")
    assert motif_convert("convert", *options, cwd=tmp_path).returncode == 0
    card = (tmp_path / "out" / CARD).read_text()
    assert "--recipe mine.yaml" in card
    shown = re.search(r"^(`{4,})yaml\n(.*?)\n\1$", card, re.DOTALL | re.MULTILINE)[2]
    assert parse_recipe(shown, "mine").as_dict() == parse_recipe(text, "mine").as_dict()
    assert "<b>" not in prose(card)


def test_evidence_is_in_it_when_it_is_there(built, measured):
    fresh, card = (built("demo") / CARD).read_text(), (measured / CARD).read_text()
    assert "Not verified" in fresh
    assert "not measured" in fresh
    assert card.split("## Evidence")[0] == fresh.split("## Evidence")[0]
    evidence = json.loads((measured / EVIDENCE).read_text())
    found, smoked = evidence["verify"], evidence["smoke"]
    assert f"{sum(f['compared'] for f in found['families']):,} weights" in card
    for kind in ("greedy", "sampled"):
        row = re.search(rf"^\| all \({kind}\) \| (\d+) \| (\d+) \|", card, re.MULTILINE)
        assert (int(row[1]), int(row[2])) == (smoked[kind]["drafted"], smoked[kind]["accepted"])
    assert plain(smoked["device"]) in card
    assert "Wilson" in card
    assert is_recorded(measured)
    assert motif_convert("verify", measured).returncode == 0


def test_it_renders(measured):
    card = (measured / CARD).read_text()
    assert ModelCard(card).data.to_dict()["library_name"] == "mlx"
    assert not re.search("[<>~]", prose(card))
    assert "a\\|b \\`c\\` \\<d\\> \\~e\\~ \\*f\\*" in card
    for line in prose(card).splitlines():
        assert line.count("|") in (0, 6, 7, 8), "a table's row has as many cells as its head"


def test_a_failed_verification_is_in_it(build):
    shard = build / "model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert motif_convert("verify", build, "--source", TINY).returncode == 1
    assert "**The verification failed**: 1 problems, 1 tensors" in (build / CARD).read_text()


def test_names_from_elsewhere_are_only_text():
    source = {"id": "a<script>`x`_b", "revision": None}
    made = {
        "source": source,
        "recipe": load_recipe("4.5bit").as_dict(),
        "converter": {"version": "1"},
        "card": {"name": "n", "repo": None, "branch": None, "extra": None},
        "mtp": {"policy": "none"},
        "allow_nonfinite": False,
        "experts": {"from": "BF16", "requantize": False, "requantized": None},
        "total_parameters": 1,
        "total_bytes": 2,
        "bits_per_weight": 16.0,
    }
    text = prose(make_card(made, [], {}))
    assert "<script>" not in text
    assert "`x`" not in text
