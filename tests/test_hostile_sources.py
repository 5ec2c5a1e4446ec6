"""Sources that want to run, to hang, or to fill the memory."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import warm
from conftest import SMALL_CONFIG, environment_with, random_weights, write_checkpoint
from strangers import DEMO, TINY, quickly


def test_a_tokenizer_s_code_is_not_run(tmp_path):
    """transformers would ask on the terminal, in words that the source chooses; `yes` is what it would hear."""
    source = Path(shutil.copytree(DEMO, tmp_path / "source"))
    for path in source.iterdir():
        path.chmod(0o644)
    (source / "tokevil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast\nclass TokEvil(PreTrainedTokenizerFast): pass\n"
    )
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "TokEvil", "auto_map": {"AutoTokenizer": ["source--tokevil.TokEvil"] * 2}}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    command = [warm.COMMAND, "--source", "source", "--out", "out", "--max-tokens", "2", "--no-verify"]
    environment = environment_with({"HF_HUB_OFFLINE": "1"})
    result = subprocess.run(command, cwd=tmp_path, env=environment, input="y\n" * 9, capture_output=True, text=True)
    assert not (tmp_path / "ran").exists()
    assert "Do you wish to run" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "card",
    [
        "---" + "\n" * 3000 + "x" * 10,
        "---\nl0: &l0 [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"l{i}: &l{i} [{','.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 9))
        + "license: *l8\n---\n",
    ],
    ids=["lines without end", "a bomb of aliases"],
)
def test_a_card_that_takes_for_ever(card, tmp_path):
    source = write_checkpoint(tmp_path / "source", SMALL_CONFIG, random_weights(SMALL_CONFIG))
    (source / "README.md").write_text(card)
    assert quickly("convert", "--source", source, "--out", tmp_path / "out").returncode == 0


def test_many_rules(tmp_path):
    recipe = tmp_path / "many.yaml"
    recipe.write_text("name: r\nrules:\n" + "- {match: a, dtype: source}\n" * 6_000)
    result = quickly("plan", "--source", TINY, "--recipe", recipe)
    assert result.returncode == 2
    assert "6000 rules" in result.stderr


def test_numbers_of_a_build_that_would_fill_the_memory(built, tmp_path):
    out = shutil.copytree(built(TINY), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["quantization"]["model.embed_tokens"] = {"group_size": "x", "bits": 2_000_000_000, "mode": "affine"}
    (out / "config.json").write_text(json.dumps(config))
    assert quickly("inspect", out).returncode == 2


@pytest.mark.parametrize("where", ["config", "recipe"])
def test_half_a_surrogate(where, tmp_path):
    source = write_checkpoint(tmp_path / "source", SMALL_CONFIG, random_weights(SMALL_CONFIG))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text('name: r\ndescription: "\\ud83d"\nrules: [{match: "*", bits: 4, group_size: 64}]\n')
    if where == "config":
        (source / "config.json").write_text(json.dumps(SMALL_CONFIG | {"x": "\ud800"}))
    options = ["--recipe", recipe] if where == "recipe" else []
    result = quickly("convert", "--source", source, *options, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["folder", "license"])
def test_names_that_are_no_text(kind, tmp_path):
    source = write_checkpoint(tmp_path / "source", SMALL_CONFIG, random_weights(SMALL_CONFIG))
    if kind == "folder":
        source = source.rename(os.fsdecode(os.fsencode(tmp_path) + b"/n\xff"))
    else:
        (source / os.fsdecode(b"LICENSE\xff")).write_text("mine")
    environment = environment_with({"HF_HUB_OFFLINE": "1"})
    command = [warm.COMMAND, "convert", "--source", str(source), "--out", str(tmp_path / "out")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith("motif-convert: error: ")
    assert not (tmp_path / "out").exists()
