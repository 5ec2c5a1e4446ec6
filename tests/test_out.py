"""Where a build is written: what is refused, and what is left behind."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import REFERENCE, contents, motif_convert
from test_cli import DEMO, TINY, assert_refused


def test_out_inside_the_source_is_refused(small, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(small, source)
    before = sorted(p.name for p in source.iterdir())
    result = motif_convert("convert", "--source", source, "--out", source / "build" / "mlx")
    assert result.returncode == 2
    assert "lies in the folder of the source" in result.stderr
    assert sorted(p.name for p in source.iterdir()) == before


def test_a_way_through_a_folder_that_is_not_there_does_not_make_it(small, tmp_path):
    result = motif_convert("convert", "--source", small, "--out", "nowhere/../build", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["build"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_refused_source_leaves_no_folder_of_ours_and_takes_none_of_yours(existing, tmp_path):
    """NaN block scales show only when the bytes are read: by then the folder is there."""
    source = tmp_path / "source"
    shutil.copytree(REFERENCE / "tiny-motif3-nvfp4", source)
    for shard in source.glob("model-*.safetensors"):
        raw = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name.endswith("_weight_scale"):
                raw[start + entry["data_offsets"][0]] = 0x7F
        shard.write_bytes(raw)
    out = tmp_path / "a" / "b" / "c"
    if existing:
        out.mkdir(parents=True)
    result = motif_convert("convert", "--source", source, "--out", out)
    assert result.returncode == 2
    assert "NaN block scale" in result.stderr
    assert out.is_dir() == existing
    assert (tmp_path / "a").exists() == existing
    assert not existing or not list(out.iterdir())


def test_a_place_below_a_file_is_refused_before_the_source_is_read(tmp_path):
    (tmp_path / "file").write_text("mine")
    result = motif_convert("convert", "--source", tmp_path / "no-source", "--out", tmp_path / "file" / "out")
    assert result.returncode == 2
    assert f"can't be made: {tmp_path / 'file'} is not a folder" in result.stderr


@pytest.mark.parametrize("command", [["convert"], []], ids=["convert", "bare"])
def test_folder_in_use_is_refused_before_the_source_is_looked_for(command, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    before = contents(out)
    result = motif_convert(*command, "--source", "Nobody/no-such-model", "--out", out)
    assert_refused(result, str(out), "--out")
    assert len(result.stderr.splitlines()) == 1
    assert contents(out) == before


def test_finished_build_is_not_overwritten(built, tmp_path):
    """The same command has nothing left to do; one that would write something else is refused."""
    out = built(TINY)
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    again = motif_convert("convert", "--source", TINY, "--out", out)
    assert again.returncode == 0
    assert again.stderr == f"Complete already: {out}\n"
    for options, word in (
        (("--source", TINY, "--bits", "8"), "another recipe"),
        (("--source", TINY, "--mtp", "drop"), "another mtp"),
        (("--source", DEMO), "another source"),
    ):
        result = motif_convert("convert", *options, "--out", out)
        assert_refused(result, str(out))
        assert word in result.stderr
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before
    damaged = Path(shutil.copytree(out, tmp_path / "damaged"))
    (damaged / "motif.py").unlink()
    assert_refused(motif_convert("convert", "--source", TINY, "--out", damaged), "motif.py is missing")


def test_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "out").write_text("a file")
    assert_refused(motif_convert("convert", "--source", TINY, "--out", tmp_path / "out"), "not a folder")
    assert (tmp_path / "out").read_text() == "a file"


def test_link_to_nothing_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    assert_refused(motif_convert("convert", "--source", TINY, "--out", tmp_path / "out"), "link")
    assert not (tmp_path / "nothing").exists()


# The superuser may write everywhere, so that only the first says something then.
@pytest.mark.parametrize("parent", ["a file", "read-only"] if os.geteuid() else ["a file"])
def test_parent_that_cannot_be_written(parent, tmp_path):
    folder = tmp_path / "parent"
    if parent == "a file":
        folder.touch()
    else:
        folder.mkdir(mode=0o555)
    result = motif_convert("convert", "--source", TINY, "--out", folder / "out")
    assert_refused(result, str(folder / "out"))
    assert result.stderr.splitlines()[-1].startswith("motif-convert: error: ")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--source", "demo"], "demo-motif3-mlx-4.5bit"),
        (["--source", TINY, "--bits", "8"], "tiny-motif3-mlx-8bit"),
        (["--source", TINY, "--recipe", "bf16", "--mtp", "drop"], "tiny-motif3-mlx-bf16-mtp-drop"),
        (["--source", TINY, "--keep-mtp-fp16"], "tiny-motif3-mlx-4.5bit-mtp-fp16"),
        (["--source", TINY, "--mtp", "bf16"], "tiny-motif3-mlx-4.5bit"),  # the recipe's own
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_default_folder(options, name, tmp_path):
    """Told from the refusal of a folder in use, which costs no conversion."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").touch()
    assert_refused(motif_convert("convert", *options, cwd=tmp_path), f"{name}: is not empty")
    assert [p.name for p in tmp_path.iterdir()] == [name]
