"""`eval --engine torch`: the second way of computing all that eval computes, against the first."""

import json
from pathlib import Path

import pytest
from conftest import REFERENCE, SMALL_CONFIG, motif_convert, random_weights, write_checkpoint
from evaluating import compared
from test_eval_faults import rehash
from test_motif_shapes import VARIATIONS

TINY, NVFP4, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "tiny-motif3-nvfp4", REFERENCE / "demo-motif3"


@pytest.fixture(scope="session")
def source_of(tmp_path_factory):
    """A reference, or a checkpoint with random weights in one of the shapes that no reference has."""

    def source(name: str) -> Path:
        if (REFERENCE / name).is_dir():
            return REFERENCE / name
        config = SMALL_CONFIG | VARIATIONS[name]
        return write_checkpoint(tmp_path_factory.mktemp("shape") / "source", config, random_weights(config))

    return source


def assert_engines_agree(found: dict) -> None:
    """To the noise of float32, on the same weights."""
    other = found["other_engine"]
    assert other["top1_agreement"] == 1
    assert other["kl"]["p99"] < 1e-6
    assert other["suspects"] == []
    assert all(0 < x["error"] < 1e-4 for x in other["layers"])


@pytest.mark.parametrize("name", [TINY.name, NVFP4.name, DEMO.name, *VARIATIONS])
def test_both_engines(name, source_of, copied):
    """On a quantized build, and on the source that it is compared with."""
    source = source_of(name)
    out = copied(source)
    second, first = (
        compared(out, source, "--tokens", 150, "--window", 60, "--engine", engine) for engine in ("torch", "mlx")
    )
    assert_engines_agree(second)
    assert (first["other_engine"], first["engine"], second["engine"]) == (None, "mlx", "torch")
    for side in ("source", "build"):
        for key, value in first[side].items():
            assert second[side][key] == (value and pytest.approx(value, rel=1e-4)), key
    for key, value in first["kl"].items():
        assert second["kl"][key] == pytest.approx(value, rel=1e-2, abs=1e-8), key
    evidence = json.loads((out / "validation.json").read_text())
    assert evidence["eval"]["kl"] == first["kl"]
    assert evidence["eval_torch"]["other_engine"] == second["other_engine"]
    assert "written a second time, in plain PyTorch" in (out / "README.md").read_text()


def test_a_fault_of_motif_py(copied):
    """One in every layer alike: what PyTorch computes is right, what the build's own file computes is not."""
    out = copied(DEMO, "--recipe", "bf16")
    text = (out / "motif.py").read_text()
    (out / "motif.py").write_text(text.replace("self.post_scale = 1.0 +", "self.post_scale = 1.01 +"))
    rehash(out, "motif.py")
    result = motif_convert("eval", out, "--source", DEMO, "--engine", "torch", "--tokens", 100)
    assert result.returncode == 0, result.stderr
    named = [line for line in result.stdout.splitlines() if line.startswith("SUSPECT")]
    assert named[0].startswith("SUSPECT: layer 0 of motif.py is not what PyTorch computes")
    assert len(named) == 6


@pytest.mark.parametrize(
    ("options", "word"), [(("--tokens", 1025), "1024 tokens at most"), (("--dtype", "bfloat16"), "--dtype")], ids=str
)
def test_what_the_second_engine_does_not_do(options, word, copied):
    result = motif_convert("eval", copied(DEMO), "--source", DEMO, "--engine", "torch", *options)
    assert result.returncode == 2
    assert word in result.stderr.splitlines()[-1]


def test_without_pytorch(copied, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    args = ("eval", copied(DEMO), "--source", DEMO, "--engine", "torch", "--tokens", 20)
    result = motif_convert(*args, env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    assert "pip install 'motif-convert[torch]'" in result.stderr.splitlines()[-1]
