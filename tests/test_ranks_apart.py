"""Ranks that do not do the same, and folders that are not the one they should be: refused, with nothing left behind."""

import json
import shutil
from pathlib import Path

import launch
import pytest
from conftest import REFERENCE, contents, motif_convert

TINY, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "demo-motif3"


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ("--bits 8", "another recipe than rank 0"),
        ("--mtp drop", "another MTP policy than rank 0"),
        (f"--source {TINY}", "another source than rank 0"),
        ("--source /nowhere", "/nowhere: no such folder"),
    ],
    ids=["recipe", "MTP policy", "source", "no source"],
)
def test_ranks_that_do_not_agree(other, word, tmp_path):
    out = tmp_path / "out"
    command = f"{launch.COMMAND} convert --source {DEMO} --out {out}"
    _, err = launch.start(2, launch.each(command, f"{command} {other}")).finish()
    lines = [line for line in err.splitlines() if line.startswith("motif-convert: error: rank 1 (")]
    assert len(lines) == 1, err
    assert word in lines[0]
    assert not out.exists() or not list(out.iterdir())


def test_a_folder_that_is_not_shared(tmp_path):
    """Each rank in a working folder of its own, as on two machines without common storage."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    command = f"{launch.COMMAND} convert --source {DEMO} --out out"
    cases = launch.each(*(f"env -C {tmp_path / str(rank)} {command}" for rank in (0, 1)))
    _, err = launch.start(2, cases).finish()
    assert "must lie on storage that all ranks share" in err
    assert not (tmp_path / "1" / "out").exists()


def test_an_empty_folder_that_is_not_shared(tmp_path):
    """It stands on both machines; half a build would look whole."""
    for rank in (0, 1):
        (tmp_path / str(rank) / "out").mkdir(parents=True)
    command = f"{launch.COMMAND} convert --source {DEMO} --out out"
    _, err = launch.start(2, launch.each(*(f"env -C {tmp_path / str(rank)} {command}" for rank in (0, 1)))).finish()
    assert "out: on rank 1 (" in err
    assert "must lie on storage that all ranks share" in err
    assert not list((tmp_path / "0" / "out").iterdir()) + list((tmp_path / "1" / "out").iterdir())


@pytest.mark.parametrize("command", ["verify", "eval"])
def test_a_build_of_which_each_has_a_copy(command, built, tmp_path):
    """What is checked has to be what is read: a copy may be another."""
    for rank in (0, 1):
        shutil.copytree(built(DEMO), tmp_path / str(rank) / "build")
    line = f"{launch.COMMAND} {command} build --source {DEMO} --json"
    out, err = launch.start(2, launch.each(*(f"env -C {tmp_path / str(rank)} {line}" for rank in (0, 1)))).finish()
    assert out == ""
    assert "must lie on storage that all ranks share" in err
    assert contents(tmp_path / "0" / "build") == contents(built(DEMO))


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ("eval {build} --tokens 9 --dtype bfloat16", "another --dtype than rank 0"),
        ("eval {build} --tokens 8", "another text than rank 0"),
        ("verify {build}", "another command than rank 0"),
    ],
    ids=["options", "text", "command"],
)
def test_ranks_that_do_not_check_the_same(other, word, built, tmp_path):
    build = Path(shutil.copytree(built(DEMO), tmp_path / "build"))
    lines = [f"{launch.COMMAND} {x} --source {DEMO}" for x in (f"eval {build} --tokens 9", other.format(build=build))]
    out, err = launch.start(2, launch.each(*lines)).finish()
    assert out == ""
    assert word in err
    assert not (build / "validation.json").exists()


@pytest.mark.parametrize("args", [(), ("plan",), ("upload", "x", "y/z")], ids=str)
def test_what_ranks_do_not_do(args):
    _, err = launch.run(2, *args)
    assert "mlx.launch is for convert, verify, smoke, eval" in err


# --- each rank with a disk of its own ---


@pytest.mark.parametrize("holder", [0, 1])
def test_a_local_shard_that_both_have_and_one_has_damaged(holder, built, tmp_path):
    for rank in (0, 1):
        shutil.copytree(built(DEMO), tmp_path / str(rank) / "out")
    shard = tmp_path / str(holder) / "out" / "model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    line = f"{launch.COMMAND} verify out --source {DEMO} --local --json"
    out, err = launch.start(2, launch.each(*(f"env -C {tmp_path / str(rank)} {line}" for rank in (0, 1)))).finish()
    assert out, err
    problems = json.loads(out)["problems"]
    assert [p for p in problems if p.startswith(f"rank {holder}: {shard.name}: sha256 is ")], problems


def test_local_in_one_folder(tmp_path):
    out = tmp_path / "new" / "out"
    _, err = launch.run(2, "convert", "--source", DEMO, "--local", "--out", out)
    assert "has the same folder as rank 0; --local is for ranks with folders of their own: leave it out" in err
    assert not list(tmp_path.iterdir())


def test_local_alone(tmp_path):
    result = motif_convert("convert", "--source", TINY, "--local", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "--local is for several ranks" in result.stderr
