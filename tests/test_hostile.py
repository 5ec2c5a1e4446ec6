"""What a stranger may have prepared: folders with planted links and states, streams that are closed."""

import json
import os
import platform
import shutil
import subprocess
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from py_compile import compile as compile_file

import numpy as np
import pytest
import warm
from conftest import SMALL_CONFIG, contents, environment_with, motif_convert, random_weights, write_checkpoint
from strangers import DEMO, TINY, quickly

SHARD, JOURNAL = "model-00001-of-00001.safetensors", ".motif-convert.json"
SMALL_FILES = ("motif.py", "README.md", "config.json", "motif-convert.json", "model.safetensors.index.json")
SMOKE = ("smoke", "--tokens", 4, "--prompts", "prompts.jsonl", "--text", "text.txt")


@pytest.fixture
def unfinished(built, tmp_path):
    """The folder that a kill leaves after the shard, with changes to the state file."""

    def make(source: Path = TINY, options: tuple = (), **changes: object) -> Path:
        whole, out = built(source, *options), tmp_path / "unfinished"
        out.mkdir()
        made = json.loads((whole / "motif-convert.json").read_text())
        shutil.copy(whole / SHARD, out)
        state = {
            "plan_hash": made["plan_hash"],
            "version": made["converter"]["version"],
            "recipe": made["recipe"]["name"],
            "mtp": made["mtp"]["policy"],
            "allow_nonfinite": made["allow_nonfinite"],
            "source": {k: made["source"][k] for k in ("id", "revision", "fingerprint")},
            "shards": {SHARD: made["files"][SHARD]},
            "requantized": {},
            "finishing": False,
        }
        (out / JOURNAL).write_text(json.dumps(state | changes))
        return out

    return make


def test_an_unfinished_folder_is_gone_on_with(unfinished, built):
    out = unfinished()
    before = (out / SHARD).stat().st_ino
    assert quickly("convert", "--source", TINY, "--out", out).returncode == 0
    assert contents(out) == contents(built(TINY))
    assert (out / SHARD).stat().st_ino == before


# --- links ---


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
@pytest.mark.parametrize("name", ["motif.py", "README.md", SHARD, JOURNAL])
def test_planted_links_are_not_written_through(name, link, unfinished, built, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    out = unfinished()
    if name == SHARD:
        (out / SHARD).unlink()
    link(precious, out / f".{name}.partial")
    assert quickly("convert", "--source", TINY, "--out", out).returncode == 0
    assert precious.read_text() == "precious"
    assert contents(out) == contents(built(TINY))
    assert not any(p.is_symlink() for p in out.iterdir())


def test_planted_links_of_the_evidence(built, tmp_path):
    out, precious = shutil.copytree(built(TINY), tmp_path / "out"), tmp_path / "precious"
    precious.write_text("precious")
    (out / ".validation.json.partial").symlink_to(precious)
    assert quickly("verify", out, "--source", TINY).returncode in (0, 1)
    assert precious.read_text() == "precious"
    assert not (out / "validation.json").is_symlink()


@pytest.mark.parametrize("name", SMALL_FILES)
def test_files_of_a_user_are_not_taken_for_the_run_s(name, unfinished):
    out = unfinished()
    (out / name).write_text("mine")
    before = contents(out)
    result = quickly("convert", "--source", TINY, "--out", out)
    assert result.returncode == 2
    assert f"{out / name}: stands where this run has to write" in result.stderr
    assert {k: v for k, v in contents(out).items() if k != JOURNAL} == {k: v for k, v in before.items() if k != JOURNAL}


def test_every_card_of_a_user_is_kept(built, tmp_path):
    out = shutil.copytree(built(TINY), tmp_path / "out")
    for text in ("first", "second"):
        (out / "README.md").write_text(text)
        assert quickly("card", out).returncode == 0
    assert {p.read_text() for p in out.glob(".README.md.before*")} == {"first", "second"}


# --- states ---


STATES = {
    "deep": "[" * 100_000,
    "an empty object": "{}",
    "no hash": {"shards": {SHARD: {"size": 3, "sha256": None}}},
    "a size that is none": {"shards": {SHARD: {"size": float("nan"), "sha256": "0" * 64}}},
    "a size in fractions": {"shards": {SHARD: {"size": 3.5, "sha256": "0" * 64}}},
    "shards in a list": {"shards": [SHARD]},
    "errors that are none": {"requantized": {"model.layers.2.mlp.switch_mlp.gate_proj expert 0": [1, "x"]}},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_state_that_no_run_writes(state, unfinished):
    out = unfinished(**(state if isinstance(state, dict) else {}))
    if isinstance(state, str):
        (out / JOURNAL).write_text(state)
    result = quickly("convert", "--source", TINY, "--out", out)
    assert result.returncode == 2
    assert "not readable as the state of a run" in result.stderr
    assert not (out / "config.json").exists()


def test_a_state_that_is_a_pipe(unfinished):
    out = unfinished()
    (out / JOURNAL).unlink()
    os.mkfifo(out / JOURNAL)
    assert quickly("convert", "--source", TINY, "--out", out).returncode == 2


def test_a_state_with_shards_of_no_plan(unfinished, built):
    """They come into no file of the build."""
    entry = {"size": 1, "sha256": "0" * 64}
    made = json.loads((built(TINY) / "motif-convert.json").read_text())
    shards = {SHARD: made["files"][SHARD], "../../evil.py": entry, "extra.py": entry}
    out = unfinished(shards=shards, requantized={"a expert 1": [1, 10**400]})
    assert quickly("convert", "--source", TINY, "--out", out).returncode == 0
    assert contents(out) == contents(built(TINY))


def test_a_run_that_kept_nan_is_not_gone_on_with_without_it(unfinished, tmp_path):
    weights = random_weights(SMALL_CONFIG)
    weights["model.norm.weight"][0] = 0x7FC0
    source = write_checkpoint(tmp_path / "source", SMALL_CONFIG, weights)
    out = unfinished(source, ("--allow-nonfinite",))
    result = quickly("convert", "--source", source, "--out", out)
    assert result.returncode == 2
    assert "another allow_nonfinite (True, not False)" in result.stderr
    assert quickly("convert", "--source", source, "--out", out, "--allow-nonfinite").returncode == 0
    again = quickly("convert", "--source", source, "--out", out)
    assert again.returncode == 2
    assert "another allow_nonfinite" in again.stderr


# --- what is published ---


def test_a_build_tells_nothing_of_its_maker(tmp_path):
    """Neither build nor evidence, be it of success or of failure."""
    home = tmp_path / "home of bobsecret"
    home.mkdir()
    names = {"HOME": str(home), "USER": "bobsecret", "LOGNAME": "bobsecret", "TZ": "Asia/Kolkata"}
    source, out = home / "demo", home / "out"
    shutil.copytree(DEMO, source)
    for args in (
        ["convert", "--source", source, "--out", out, "--recipe", "bf16"],
        ["verify", out, "--source", source],
        ["eval", out, "--source", source, "--tokens", 30],
        ["smoke", out, "--tokens", 2],
        ["card", out],
    ):
        result = motif_convert(*args, cwd=home, env=names)
        assert result.returncode == 0, result.stderr
    _says_nothing(out, home)
    (out / "model.safetensors.index.json").unlink()
    (out / "model.safetensors.index.json").mkdir()
    (out / "config.json").unlink()
    assert motif_convert("verify", out, "--source", source, cwd=home, env=names).returncode == 1
    _says_nothing(out, home)


def _says_nothing(out: Path, home: Path) -> None:
    secrets = ["bobsecret", str(home), str(home.parent), "Kolkata", "+05:30", "+0530"]
    secrets += [platform.node()] if len(platform.node()) > 5 else []
    for path in (p for p in out.iterdir() if p.is_file()):
        content = path.read_bytes()
        assert [s for s in secrets if s.encode() in content] == [], path.name


# --- streams and readers ---


def shell(line: str, **names: object) -> int:
    """The exit code of a line of bash, in which $M is the command."""
    environment = environment_with({"HF_HUB_OFFLINE": "1", "M": warm.COMMAND} | {k: str(v) for k, v in names.items()})
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams(closed, tmp_path):
    assert shell(f'"$M" convert --source "$TINY" --out "$OUT" {closed}', TINY=TINY, OUT=tmp_path / "out") == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_a_reader_that_goes_away_hides_no_failure(built, tmp_path):
    out = shutil.copytree(built(TINY), tmp_path / "out")
    data = np.fromfile(out / SHARD, np.uint8)
    data[-5] ^= 1
    data.tofile(out / SHARD)
    line = '"$M" verify "$OUT" --source "$TINY" | true; exit ${PIPESTATUS[0]}'
    assert shell(line, TINY=TINY, OUT=out) == 1


@pytest.mark.parametrize("command", [SMOKE, ("eval", "--tokens", 8)], ids=lambda c: c[0])
def test_a_compiled_motif_is_not_run(command, built, tmp_path):
    """Python would take it for the code of the `motif.py` beside it, whose hash is right."""
    build, ran = Path(shutil.copytree(built(DEMO, "--recipe", "bf16"), tmp_path / "build")), tmp_path / "ran"
    cached = Path(cache_from_source(str(build / "motif.py")))
    cached.parent.mkdir()
    (tmp_path / "motif.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit(3)\n")
    compile_file(tmp_path / "motif.py", cached, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    (tmp_path / "text.txt").write_text("def f(x):")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def f(x):", "raw": True}))
    result = motif_convert(command[0], build, "--source", DEMO, *command[1:], cwd=tmp_path)
    assert result.returncode in (0, 1), result.stderr
    assert not ran.exists()
