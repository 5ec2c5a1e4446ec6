"""The model card: what it says, that it renders, and that it is always a part of the build and of its hashes."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REFERENCE, motif_convert
from huggingface_hub import ModelCard
from motif_convert.quantize.errors import RecipeError
from motif_convert.recipes.card import make_card, read_extra, renewed
from motif_convert.recipes.card_text import plain
from motif_convert.recipes.recipe import built_in, load_recipe, parse_recipe, recipe_yaml
from motif_convert.validate.shape import TEXT, fits

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


# --- a part of the build ---


def test_changed_by_hand_it_is_left_alone(build):
    mine = (build / CARD).read_text() + "\nMy words.\n"
    (build / CARD).write_text(mine)
    result = motif_convert("verify", build, "--source", TINY)
    assert result.returncode == 1
    assert "changed by hand" in result.stderr
    assert (build / CARD).read_text() == mine
    result = motif_convert("card", build)
    assert result.returncode == 0, result.stderr
    assert (build / ".README.md.before").read_text() == mine
    assert is_recorded(build)
    assert motif_convert("verify", build, "--source", TINY).returncode == 0


def test_text_of_ones_own(build, tmp_path):
    (tmp_path / "extra.md").write_text("## Mine\n\nWords.\n\n```sh\nls\n```\n")
    out = ("--source", TINY, "--out", tmp_path / "out")
    assert motif_convert("convert", *out, "--card-extra", tmp_path / "extra.md").returncode == 0
    assert motif_convert("card", build, "--card-extra", tmp_path / "extra.md").returncode == 0
    assert (build / CARD).read_bytes() == (tmp_path / "out" / CARD).read_bytes()
    assert "## Mine\n\nWords." in (build / CARD).read_text()
    assert not (build / ".README.md.before").exists()
    assert motif_convert("verify", build, "--source", TINY).returncode == 0
    assert "Words." in (build / CARD).read_text()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "UTF-8"),
        (b"---\nlicense: mit\n---\nx", "front matter"),
        (b"```sh\nls\n", "not closed"),
        (b"~~~\n```\n", "not closed"),
        (b"````\n```\n", "not closed"),
        (b"<!-- hidden\n", "not closed"),
        (b"a\0b", "control characters"),
        (b"```\n```sh\n", "not closed"),
    ],
)
def test_text_that_would_spoil_the_card(data, words, tmp_path):
    (tmp_path / "extra.md").write_bytes(data)
    result = motif_convert("convert", "--source", TINY, "--out", "out", "--card-extra", "extra.md", cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert words in line
    assert "extra.md" in line
    assert not (tmp_path / "out").exists()


def test_text_that_is_not_there(tmp_path):
    with pytest.raises(RecipeError, match=r"nothing.md"):
        read_extra(tmp_path / "nothing.md")


@pytest.mark.parametrize("text", ["```\n~~~\n```\n", "a ``` b", "````\n```\n````", "```sh\nls\n```\n\n~~~\nx\n~~~"])
def test_fences_that_are_closed(text, tmp_path):
    (tmp_path / "extra.md").write_text(text)
    assert read_extra(tmp_path / "extra.md") == text.strip()


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda made: made["mtp"].update(casts=None), "mtp.casts"),
        (lambda made: made["mtp"]["casts"].update(changed=0), "mtp.casts"),
        (lambda made: made["mtp"].update(compute_dtype="float16"), "mtp.compute_dtype"),
        (lambda made: made["experts"].update(requantized={"experts": 1}), "experts.requantized"),
    ],
)
def test_what_it_says_of_losses_is_checked(change, key, built, tmp_path):
    out = Path(shutil.copytree(built(TINY, "--mtp", "fp16"), tmp_path / "out"))
    edit(out / PROVENANCE, change)
    result = motif_convert("verify", out, "--source", TINY)
    assert result.returncode == 1
    assert f"PROBLEM: {PROVENANCE}: {key}" in result.stdout


HOSTILE = [
    (EVIDENCE, lambda e: e["verify"].update(passed=False, problems=5)),
    (EVIDENCE, lambda e: e["verify"].update(sampled="x")),
    (EVIDENCE, lambda e: e["verify"]["families"][0].update(worst_steps=10**400)),
    (EVIDENCE, lambda e: e.update(heads=[1])),
    (EVIDENCE, lambda e: e.update(smoke=dict.fromkeys(("passed", "prompts", "greedy", "sampled", "speed"), 5))),
    (PROVENANCE, lambda m: m.update(bits_per_weight=10**400)),
    (PROVENANCE, lambda m: m.update(total_bytes=10**400)),
    (PROVENANCE, lambda m: m["files"].update({"config.json": "\ud800"})),
    (PROVENANCE, lambda m: m["files"][CARD].update(sha256="\ud800")),
    (PROVENANCE, lambda m: m["source"].update(id="\ud800")),
    (PROVENANCE, lambda m: m["card"].update(name="a$\\x$b")),
    (PROVENANCE, lambda m: m.update(card=3)),
    (PROVENANCE, lambda m: m["files"].update({"../x": {"size": 1, "sha256": "0"}})),
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_edited_by_anybody(case, built, tmp_path):
    out = Path(shutil.copytree(built(TINY), tmp_path / "out"))
    assert motif_convert("verify", out, "--source", TINY).returncode == 0
    file, change = HOSTILE[case]
    edit(out / file, change)
    for command in (("card", out), ("inspect", out), ("verify", out, "--source", TINY)):
        result = motif_convert(*command)
        assert "Traceback" not in result.stderr, command
    if file == EVIDENCE:
        assert json.loads((out / EVIDENCE).read_text())["passed"], "the verification that was just made is what counts"


@pytest.mark.parametrize(("text", "readable"), [("a\nb", True), ("한국\u200b", True), ("\ud800", False), (5, False)])
def test_texts_that_can_be_written_again(text, readable):
    assert fits(text, TEXT) is readable


def test_a_failed_verification_does_not_leave_a_passed_one(build):
    assert motif_convert("verify", build, "--source", TINY).returncode == 0
    rules = [{"match": ["nothing*"], "bits": 8, "mode": "affine", "group_size": 64}]
    edit(build / PROVENANCE, lambda made: made["recipe"].update(rules=rules))
    assert motif_convert("verify", build, "--source", TINY).returncode == 1
    assert not json.loads((build / EVIDENCE).read_text())["passed"]


@pytest.mark.parametrize("name", [CARD, PROVENANCE, EVIDENCE, "validation.png"])
def test_what_a_kill_left_of_a_file_that_is_written_again(name, build):
    (build / f".{name}.partial").write_text("half")
    assert motif_convert("verify", build, "--source", TINY).returncode == 0


def test_three_verifications_at_once(build):
    command = [str(Path(sys.executable).with_name("motif-convert")), "verify", str(build), "--source", str(TINY)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(run.communicate(), run.returncode)[1] for run in runs] == [0, 0, 0]
    assert is_recorded(build)


# The command, killed as soon as it has written a file of the name that is its first argument.
KILLED = """
import os, signal, sys
from motif_convert.convert import shards
from motif_convert.recipes import card
name, write_file = sys.argv.pop(1), shards.write_file
def killed(path, data):
    write_file(path, data)
    if path.name == name:
        os.kill(os.getpid(), signal.SIGKILL)
card.write_file = killed
from motif_convert.recipes.cli import main
main()
"""


@pytest.mark.parametrize("file", [CARD, PROVENANCE])
def test_killed_between_the_card_and_its_hash(file, build):
    command = [sys.executable, "-c", KILLED, file, "verify", str(build), "--source", str(TINY)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert is_recorded(build) is (file == PROVENANCE)
    result = motif_convert("verify", build, "--source", TINY)
    assert result.returncode == 0, result.stdout
    assert "by hand" not in result.stderr
    assert is_recorded(build)
    assert yaml.safe_load((build / CARD).read_text().split("---\n")[1])["library_name"] == "mlx"
