"""The benchmark compares like with like: what mlx_lm.convert writes, our pipeline writes."""

import subprocess
import sys
from pathlib import Path

import bench
import bench_measure
from conftest import read_safetensors


def test_mlx_lm_convert_and_the_pipeline_write_the_same_tensors(tmp_path):
    source = tmp_path / "model"
    bench.model_source(source, layers=1, hidden=64)
    converter = Path(sys.executable).with_name("mlx_lm.convert")
    options = ["--hf-path", source, "--mlx-path", tmp_path / "theirs", "-q", "--q-bits", "4", "--q-group-size", "64"]
    result = subprocess.run([converter, *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    result = subprocess.run([*bench.SIDES, "quantize", source, tmp_path / "ours"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    theirs, ours = read_safetensors(tmp_path / "theirs"), read_safetensors(tmp_path / "ours")
    assert len(ours) == 3 * 9 + 3
    assert ours == theirs


def test_the_null_pipeline_reads_and_writes_as_much(tmp_path):
    source = tmp_path / "model"
    bench.model_source(source, layers=1, hidden=64)
    for side in ("quantize", "null"):
        subprocess.run([*bench.SIDES, side, source, tmp_path / side], check=True)
    sizes = [{p.name: p.stat().st_size for p in (tmp_path / s).glob("*.safetensors")} for s in ("quantize", "null")]
    assert sizes[0] == sizes[1]
    subprocess.run([*bench.SIDES, "read", source, tmp_path / "quantize"], check=True)


def test_a_run_is_measured(tmp_path):
    code = "import time; data = bytearray(b'x') * (100 << 20); time.sleep(0.3)"
    found = bench_measure.run("a side", [sys.executable, "-c", code])
    assert 100 << 20 < found.peak < 200 << 20
    assert found.wall >= 0.3
    assert 0 < found.cpu < found.wall
