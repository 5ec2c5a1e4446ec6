"""The model card as a part of the build: its hash, what was edited, kills, other processes."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import motif_convert
from motif_convert.quantize.errors import RecipeError
from motif_convert.recipes.card import read_extra
from motif_convert.validate.shape import TEXT, fits
from test_card import CARD, EVIDENCE, PROVENANCE, TINY, is_recorded
from warm import COMMAND


@pytest.fixture
def build(built, tmp_path) -> Path:
    return Path(shutil.copytree(built(TINY), tmp_path / "build"))


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
    command = [COMMAND, "verify", str(build), "--source", str(TINY)]
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
