"""The installed command as its users meet it: exit codes, streams, folders, pipes and terminals."""

import json
import os
import pty
import re
import subprocess
import termios
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from conftest import REFERENCE, contents, motif_convert
from motif_convert.recipes.cli import cli
from warm import COMMAND

ROOT = Path(__file__).resolve().parents[1]
TINY, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "demo-motif3"
COMMANDS = {"": cli, **cli.commands}
OPTIONS = sorted(
    {
        option
        for command in COMMANDS.values()
        for param in command.params
        if isinstance(param, click.Option)
        for option in param.opts
        if option.startswith("--")
    }
)


def assert_refused(result: subprocess.CompletedProcess, *fragments: str) -> None:
    """Exit code 2, and on stderr alone what is wrong."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for fragment in fragments:
        assert fragment in result.stderr


# --- help and documents ---


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", COMMANDS, ids=lambda n: n or "bare")
def test_help(name, flag):
    result = motif_convert(*filter(None, [name]), flag)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: motif-convert {name}".rstrip())
    for param in COMMANDS[name].params:
        if isinstance(param, click.Option):
            assert param.opts[0] in result.stdout
            assert param.help, f"{param.opts[0]} is not explained"


def test_help_names_every_command():
    text = motif_convert("--help").stdout
    assert [name for name in cli.commands if not re.search(rf"^  {name}  +\S", text, re.M)] == []


def test_version():
    result = motif_convert("--version")
    assert (result.returncode, result.stdout) == (0, f"motif-convert {version('motif-convert')}\n")


@pytest.mark.parametrize("name", cli.commands)
def test_readme_documents_the_command(name):
    assert f"motif-convert {name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("option", OPTIONS)
def test_readme_documents_the_option(option):
    assert re.search(rf"(?<![\w-]){option}(?![\w-])", (ROOT / "README.md").read_text())


# --- wrong use ---


@pytest.mark.parametrize(
    ("args", "fragments"),
    [
        (["frobnicate"], ["No such command 'frobnicate'"]),
        (["plan", "--frobnicate"], ["No such option", "--frobnicate"]),
        (["plan", "--bits", "5"], ["--bits", "4.5", "8"]),
        (["plan", "--mtp", "4"], ["--mtp", "fp16", "bf16", "drop"]),
        (["--max-tokens", "0"], ["--max-tokens"]),
        (["inspect"], ["DIR"]),
        (["plan", "--source", "demo", "--bits", "8", "--recipe", "bf16"], ["--bits and --recipe"]),
        (["--source", "demo", "--bits", "8", "--recipe", "bf16"], ["--bits and --recipe"]),
        (["convert", "--source", "demo", "--keep-mtp-fp16", "--mtp", "drop"], ["--keep-mtp-fp16", "--mtp drop"]),
        (["--bits", "8", "convert", "--source", "demo"], ["--bits", "before convert"]),
        (["--source", "demo", "plan"], ["--source", "before plan"]),
        (["--keep-mtp-fp16", "convert"], ["--keep-mtp-fp16", "before convert"]),
        (["--max-tokens", "3", "inspect", "x"], ["--max-tokens", "before inspect"]),
    ],
    ids=" ".join,
)
def test_wrong_use(args, fragments, tmp_path):
    assert_refused(motif_convert(*args, cwd=tmp_path), *fragments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["plan"], ["convert", "--out", "out"], ["--out", "out"]], ids=" ".join)
@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        ("./no-such-folder", "no such folder"),
        ("a/b/c", "no such folder"),
        ("Nobody/no-such-model", "not in the local Hub cache"),
        ("a-file", "not a folder"),
        ("an-empty-folder", "config.json"),
    ],
)
def test_source_that_is_not_there(command, source, fragment, tmp_path):
    (tmp_path / "a-file").touch()
    (tmp_path / "an-empty-folder").mkdir()
    result = motif_convert(*command, "--source", source, cwd=tmp_path)
    assert_refused(result, fragment)
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_recipe_that_is_not_there(tmp_path):
    result = motif_convert("plan", "--source", TINY, "--recipe", "5bit", cwd=tmp_path)
    assert_refused(result, "recipe 5bit", "4.5bit", "8bit", "bf16")
    assert len(result.stderr.splitlines()) == 1


# --- what is printed ---


def test_plan_as_json_and_as_text(tmp_path):
    result = motif_convert("plan", "--source", TINY, "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    assert sum(t["bytes"] for t in plan["tensors"]) == plan["total_bytes"]
    text = motif_convert("plan", "--source", TINY, cwd=tmp_path)
    assert (text.returncode, text.stderr) == (0, "")
    assert f"{plan['total_parameters']:,}" in text.stdout
    assert {t["family"] for t in plan["tensors"]} <= {line.split("  ")[0] for line in text.stdout.splitlines()}
    assert not list(tmp_path.iterdir())


def test_keep_mtp_fp16_is_mtp_fp16():
    long, short = (
        motif_convert("plan", "--source", TINY, "--json", *o) for o in (["--mtp", "fp16"], ["--keep-mtp-fp16"])
    )
    assert json.loads(long.stdout) == json.loads(short.stdout)
    assert json.loads(long.stdout)["mtp"] == "fp16"


def test_dropped_head_is_announced():
    text = motif_convert("plan", "--source", TINY, "--mtp", "drop").stdout
    names = json.loads((TINY / "model.safetensors.index.json").read_text())["weight_map"]
    count = sum(name.startswith("model.mtp_layers.") for name in names)
    assert f"{count} tensors" in text


def test_inspect_as_json(built):
    result = motif_convert("inspect", built(TINY), "--json")
    assert (result.returncode, result.stderr) == (0, "")
    sizes = [p.stat().st_size for p in built(TINY).glob("model*.safetensors")]
    assert json.loads(result.stdout)["shards"] == len(sizes)


def test_no_control_characters_when_stderr_is_not_a_terminal(built, tmp_path):
    """And the folder's parents are made."""
    out = tmp_path / "a" / "b" / "out"
    result = motif_convert("convert", "--source", TINY, "--out", out)
    assert (result.returncode, result.stdout) == (0, "")
    assert [line for line in result.stderr.split("\n") if not line.isprintable()] == []
    assert f"Written: {out}" in result.stderr.splitlines()
    assert contents(out) == contents(built(TINY))


def test_bar_on_a_terminal(built, tmp_path):
    """And an empty folder is used."""
    out = tmp_path / "out"
    out.mkdir()
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    args = [COMMAND, "convert", "--source", str(TINY), "--out", str(out)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        try:
            while data := os.read(ours, 4096):
                seen += data
        except OSError:  # how Linux says that the other side is closed
            pass
        os.close(ours)
        assert process.stdout.read() == b""
    assert process.returncode == 0
    assert b"\rconvert:" in seen
    assert b"100%|" in seen
    assert contents(out) == contents(built(TINY))


# --- pipes ---


@pytest.mark.parametrize(
    "args",
    [["--help"], ["plan", "--source", TINY], ["plan", "--source", TINY, "--json"]],
    ids=["help", "plan", "plan --json"],
)
def test_reader_that_has_gone(args):
    """As after `| head -1`; code 1 would mean a check that failed."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([COMMAND, *map(str, args)], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_plan_through_head():
    command = f"set -o pipefail; '{COMMAND}' plan --source '{TINY}' --json | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("{\n", "")
    assert result.returncode == 0


# --- the bare command ---


def test_bare_command_on_the_demo(built, tmp_path):
    """The demo that ships is the reference's. In BF16, since mlx's quantized products take most of a smoke here."""
    result = motif_convert("--source", "demo", "--recipe", "bf16", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    prompt = "This function returns the number of"
    assert result.stdout.startswith(prompt)
    assert result.stdout.splitlines()[-1].split() == ["ship", "yes"]
    made = contents(tmp_path / "demo-motif3-mlx-bf16")
    evidence = json.loads(made.pop("validation.json"))
    assert evidence["passed"]
    assert evidence["verify"]["sampled"] == 1
    assert evidence["smoke"]["lossless"]
    assert made.pop("validation.png").startswith(b"\x89PNG")
    fresh = contents(built(DEMO, "--recipe", "bf16"))
    assert {n for n in made if made[n] != fresh.get(n)} == {"README.md", "motif-convert.json"}  # they tell of it
    again = motif_convert("--source", "demo", "--recipe", "bf16", "--max-tokens", "2", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "Complete already" in again.stderr
    assert again.stdout.splitlines()[-1].split() == ["ship", "yes"]


def test_bare_command_without_a_tokenizer(tmp_path):
    result = motif_convert("--source", TINY, "--out", tmp_path / "out")
    assert result.returncode == 0
    assert "no tokenizer" in result.stderr
    assert result.stdout.splitlines()[-1].split() == ["ship", "yes"]
    assert (tmp_path / "out" / "config.json").exists()
