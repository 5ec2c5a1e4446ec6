"""A checkpoint's files that are no files, and JSON that is none."""

import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoints import FIRST, INDEX, LFS_POINTER, SECOND, problem, refused, write_folder
from motif_convert.convert.checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("no_hang")

# --- files that are not files ---


def _directory(path: Path):
    path.mkdir()


def _pipe(path: Path):
    os.mkfifo(path)


def _loop(path: Path):
    path.symlink_to(path.name)


def _dangling(path: Path):
    path.symlink_to("nowhere")


def _device(path: Path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_directory, _pipe, _loop, _dangling, _device])
@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_not_a_regular_file(two, name, make):
    (two / name).unlink()
    make(two / name)
    assert f"{name}: " in problem(two)


@pytest.mark.parametrize("make", [_directory, _pipe, _loop, _dangling, _device])
def test_index_that_is_not_a_regular_file(two, make):
    (two / INDEX).unlink()
    make(two / INDEX)
    assert INDEX in problem(two)


def test_links_to_files_are_followed(two):
    """As in the Hub's cache, where every file of a snapshot is a link."""
    blobs = two.parent / "blobs"
    blobs.mkdir()
    for name in (FIRST, SECOND, INDEX, "config.json"):
        shutil.move(two / name, blobs / name)
        (two / name).symlink_to(blobs / name)
    with open_checkpoint(two) as checkpoint:
        assert bytes(checkpoint.read("a", 0, 12)) == b"\7" * 12


# --- JSON files ---


WRONG_JSON = {
    "empty": (b"", "not valid JSON"),
    "not JSON": (b"weights: none", "not valid JSON"),
    "cut off": (b'{"weight_map": {"a": ', "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "UTF-16": ("{}".encode("utf-16"), "not valid JSON"),
    "nested": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
    "a key twice": (b'{"hidden_size": 1, "hidden_size": 2}', "key 'hidden_size' twice"),
    "a nested key twice": (b'{"weight_map": {"a": "x", "a": "y"}}', "key 'a' twice"),
    "half a surrogate": (b'{"x": "\\ud800"}', "not valid JSON"),
    "a list": (b"[]", "not a JSON object"),
    "a number": (b"1", "not a JSON object"),
    "git-lfs pointer": (LFS_POINTER, "git-lfs pointer"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_JSON.values(), ids=WRONG_JSON)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_wrong_json(two, name, content, message):
    write_folder(two, {name: content})
    found = problem(two)
    assert found.startswith(f"{name}: ")
    assert message in found


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_number_that_json_does_not_have(two, number):
    """It would be copied into the config.json of the build, which other readers then reject."""
    write_folder(two, {"config.json": f'{{"model_type": "Motif", "initializer_range": {number}}}'.encode()})
    assert "config.json: " in problem(two)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_of_gigabytes(two, name):
    os.truncate(two / name, 3 << 30)
    assert f"{name}: 3221225472 bytes, more than" in problem(two)


@pytest.mark.parametrize(
    "weight_map", [[], "all", 5, {"a": 1}, {"a": None}, {"a": [FIRST]}, {}], ids=lambda value: json.dumps(value)[:20]
)
def test_index_without_a_weight_map(two, weight_map):
    write_folder(two, {}, weight_map)
    message = problem(two)
    assert INDEX in message
    assert "weight_map" in message


def test_index_without_the_key(two):
    write_folder(two, {INDEX: b'{"metadata": {}}'})
    assert f"{INDEX}: has no weight_map" in problem(two)


def test_no_config(two):
    (two / "config.json").unlink()
    assert "config.json: No such file" in problem(two)


def test_no_weights(tmp_path):
    message = problem(write_folder(tmp_path, {"tokenizer.json": b"{}"}))
    assert message.startswith(f"{tmp_path}: ")
    assert INDEX in message


def test_the_command_says_it_once(two):
    os.truncate(two / FIRST, (two / FIRST).stat().st_size - 1)
    work = two.parent / "work"
    work.mkdir()
    before = sorted(two.iterdir())
    message = refused(work, "plan", "--source", two)
    assert f"{FIRST}: cut off" in message
    assert sorted(two.iterdir()) == before
