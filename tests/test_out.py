"""Where a build is written: what is refused, and what is left behind."""

import json
import shutil

import pytest
from conftest import REFERENCE, motif_convert


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
