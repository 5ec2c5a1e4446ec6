"""`eval`: planted faults are named, gates fail, interrupted runs go on, and bad texts are refused."""

import hashlib
import json
import subprocess
import tempfile
import time
from pathlib import Path

import launch
import numpy as np
import pytest
import warm
from conftest import environment_with, motif_convert
from evaluating import DEMO, compared

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def home(tmp_path) -> dict[str, str]:
    """Where unfinished evaluations are kept."""
    return {"HF_HOME": str(tmp_path / "home")}


# --- planted faults ---


def damage(out: Path, tensor: str, edit) -> None:
    """Edits a tensor's bytes in a build's shard."""
    data = bytearray((out / SHARD).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    first, last = (start + end for end in header[tensor]["data_offsets"])
    shape = header[tensor]["shape"]
    array = np.frombuffer(data[first:last], np.uint8).reshape(shape[0], -1).copy()
    edit(array)
    data[first:last] = array.tobytes()
    (out / SHARD).write_bytes(data)


def rehash(out: Path, name: str) -> None:
    """Makes a build say that a changed file is its own, as a converter with that fault would."""
    path = out / "motif-convert.json"
    made = json.loads(path.read_text())
    content = (out / name).read_bytes()
    made["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(made))


def zero_expert(array: np.ndarray) -> None:
    array[1] = 0


def swap_rows(array: np.ndarray) -> None:
    array[[0, 1, 2, 3]] = array[[2, 3, 0, 1]]


@pytest.mark.parametrize("bits", ["bf16", "8bit"])
@pytest.mark.parametrize(
    ("tensor", "edit", "layer"),
    [
        ("model.layers.3.mlp.switch_mlp.down_proj.{}", zero_expert, 3),
        ("model.layers.4.self_attn.wkv_b.{}", swap_rows, 4),
        ("model.layers.1.mlp.down_proj.{}", swap_rows, 1),
    ],
    ids=["an expert zeroed", "rows of attention swapped", "rows of a dense layer swapped"],
)
def test_the_layer_at_fault_is_named(tensor, edit, layer, bits, copied):
    out = copied(DEMO, "--recipe", bits)
    damage(out, tensor.format("scales" if bits == "8bit" and edit is zero_expert else "weight"), edit)
    result = motif_convert("eval", out, "--source", DEMO, "--tokens", 300)
    assert result.returncode == 0, result.stderr
    named = [line for line in result.stdout.splitlines() if line.startswith("SUSPECT")]
    assert named[0].startswith(f"SUSPECT: layer {layer} ")


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ("model.layers.3.self_attn.wo.scales", "layer 3"),
        ("lm_head.scales", "the output head"),
        ("mtp.final_layernorm.weight", "the MTP head"),
    ],
)
def test_what_gives_nan_is_named(tensor, what, copied):
    out = copied(DEMO)
    damage(out, tensor, lambda array: array.view(np.uint16).__setitem__(..., 0x7FFF))
    result = motif_convert("eval", out, "--source", DEMO, "--tokens", 60, "--json")
    assert result.returncode == 1, result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"motif-convert: error: {what} of the build gives NaN")


def test_a_shifted_window_is_named(copied):
    """The build's own motif.py is run: its first sliding layer is the first to differ."""
    out = copied(DEMO, "--recipe", "bf16")
    text = (out / "motif.py").read_text()
    (out / "motif.py").write_text(text.replace("return self.sliding_window + 1", "return self.sliding_window"))
    refused = motif_convert("eval", out, "--source", DEMO)
    assert refused.returncode == 2
    assert "motif.py: not the file that motif-convert wrote" in refused.stderr
    rehash(out, "motif.py")
    found = compared(out, DEMO, "--tokens", 300)
    assert [s["layer"] for s in found["suspects"]] == [1, 2, 3, 5]


# --- gates, interruptions, refusals ---


@pytest.mark.parametrize(
    ("gate", "word"), [(("--max-kl", "1e-9"), "mean KL"), (("--min-top1", "1"), "top-1 agreement")], ids=str
)
def test_gates(gate, word, copied):
    out = copied(DEMO)
    result = motif_convert("eval", out, "--source", DEMO, "--tokens", 100, *gate)
    assert result.returncode == 1
    assert f"FAILED: {word}" in result.stdout
    evidence = json.loads((out / "validation.json").read_text())
    assert not evidence["eval"]["passed"]
    assert not evidence["passed"]
    compared(out, DEMO, "--tokens", 100, "--max-kl", 9, "--min-top1", 0)
    assert json.loads((out / "validation.json").read_text())["eval"]["passed"]


def killed_at(file: str, args: list, home: dict[str, str]) -> None:
    """A run that is killed as soon as it has kept a file."""
    environment = environment_with({"HF_HUB_OFFLINE": "1"} | home)
    with tempfile.TemporaryFile() as output:
        process = warm.start(args, environment, None, output, output)
        while process.poll() is None and not list(Path(home["HF_HOME"]).rglob(file)):
            time.sleep(0.001)
        process.kill()
        process.wait()


def test_killed_and_gone_on_with(copied, home, tmp_path):
    """The same numbers, from the last layer that was finished."""
    out = copied(DEMO)
    args = ["eval", out, "--source", DEMO, "--tokens", 100, "--json"]
    undisturbed = motif_convert(*args, env=home)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert not list((tmp_path / "home").rglob("streams*"))
    killed_at("streams-3.safetensors", args, home)
    again = motif_convert(*args, env=home)
    assert again.returncode == 0, again.stderr
    assert "Going on after layer" in again.stderr
    assert json.loads(again.stdout) == json.loads(undisturbed.stdout)
    assert not list((tmp_path / "home").rglob("streams*"))


def test_a_damaged_state_is_not_gone_on_with(copied, home, tmp_path):
    out = copied(DEMO)
    args = ["eval", out, "--source", DEMO, "--tokens", 60, "--json"]
    killed_at("state.json", args, home)
    for path in (tmp_path / "home").rglob("streams-*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    again = motif_convert(*args, env=home)
    assert again.returncode == 0, again.stderr
    assert "Going on" not in again.stderr


def test_an_edited_state_is_not_gone_on_with(copied, home, tmp_path):
    out = copied(DEMO)
    args = ["eval", out, "--source", DEMO, "--tokens", 60, "--json"]
    killed_at("state.json", args, home)
    (path,) = (tmp_path / "home").rglob("state.json")
    record = json.loads(path.read_text())
    record["layers"]["build"][0]["error"] = 9.0
    path.write_text(json.dumps(record))
    again = motif_convert(*args, env=home)
    assert again.returncode == 0, again.stderr
    assert "Going on" not in again.stderr


def test_no_room_for_the_state(copied, home, tmp_path):
    command = [launch.COMMAND, "eval", copied(DEMO), "--source", DEMO, "--tokens", 200]
    line = f"ulimit -f 64; exec {' '.join(map(str, command))}"
    environment = environment_with({"HF_HUB_OFFLINE": "1"} | home)
    result = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "set HF_HOME to a disk that has it" in result.stderr.splitlines()[-1]
    assert not list((tmp_path / "home").rglob("streams*"))


def test_a_result_that_can_not_be_recorded_is_not_lost(copied, home, tmp_path):
    """The streams of the last layer stay, so that the same command only has to record."""
    out = copied(DEMO)
    (out / "validation.json").mkdir()
    args = ["eval", out, "--source", DEMO, "--tokens", 60]
    assert motif_convert(*args, env=home).returncode == 2
    (out / "validation.json").rmdir()
    again = motif_convert(*args, env=home)
    assert again.returncode == 0, again.stderr
    assert "Going on after layer 5" in again.stderr
    assert not list((tmp_path / "home").rglob("streams*"))


def test_another_source(copied, small):
    out = copied(DEMO)
    result = motif_convert("eval", out, "--source", small)
    assert result.returncode == 2
    assert "can't be evaluated against this source" in result.stderr
    assert not (out / "validation.json").exists()


@pytest.mark.parametrize("content", [b"", b"a", b"\xff\xfe"], ids=["empty", "one token", "no UTF-8"])
def test_text_that_is_none(content, copied, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    result = motif_convert("eval", copied(DEMO), "--source", DEMO, "--text", path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("motif-convert: error: ")


@pytest.mark.parametrize(
    "line",
    [
        '{"txt": "wrong"}',
        r'{"text": "\ud800 is half a character"}',
        r'{"text": "right", "name": "\ud800"}',
        r'{"text": "right", "name": "two\nlines"}',
        "[" * 200_000,
    ],
    ids=["no text", "a surrogate", "a surrogate in a name", "a newline in a name", "endless nesting"],
)
def test_lines_without_text(line, copied, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "right"}\n' + line + "\n")
    result = motif_convert("eval", copied(DEMO), "--source", DEMO, "--text", path)
    assert result.returncode == 2
    assert "mine.jsonl, line 2" in result.stderr
