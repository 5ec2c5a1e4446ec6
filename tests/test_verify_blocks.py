"""Verify: contents of more than one block, and rounding, errors and steps against plain formulas."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, SMALL_CONFIG, motif_convert, random_weights, write_checkpoint
from matplotlib.figure import Figure
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize.errors import MotifConvertError, SourceError
from motif_convert.quantize.oracle import affine_quantize
from motif_convert.quantize.precision import Quantized
from motif_convert.validate import evidence
from motif_convert.validate.arithmetic import Expected, decoded_error
from motif_convert.validate.layout import Comparison, Part
from motif_convert.validate.rounding import round_to
from motif_convert.validate.verify import verify_repo
from spoiled import DOWN, UP, Build, converted, verify

# --- more than one block ---


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[Path, Path]:
    """A source and its build with tensors of several blocks and slices: embeddings of 10 MB, stacks of 5 MB whose
    blocks reach across experts."""
    folder = tmp_path_factory.mktemp("wide")
    config = SMALL_CONFIG | {"vocab_size": 5000, "hidden_size": 1024, "moe_intermediate_size": 512}
    config |= {"num_hidden_layers": 2, "q_lora_rank": 64, "intermediate_size": 64, "mhc_expansion_rate": 2}
    source = write_checkpoint(folder / "wide-motif3", config, random_weights(config))
    return source, converted(source, "bf16", folder / "out").folder


def test_blocks_and_processes(wide, tmp_path):
    wide, made = wide
    build = Build(Path(shutil.copytree(made, tmp_path / "copy")))
    assert verify(build.folder, wide).passed
    build["lm_head.weight"][4321 * 1024 + 1000] ^= 1  # 8 bits a code
    build[f"{UP}.weight"][(4 * 512 + 511) * 512 + 511] ^= 1  # 4 bits a code
    build[f"{DOWN}.biases"][(2 * 1024 + 600) * 16 + 14] ^= 1  # 8 groups a row
    alone = verify(build.seal().folder, wide, workers=1)
    assert {(o.tensor, o.expert, o.row, o.group) for o in alone.offenders} == {
        ("lm_head.weight", None, 4321, 15),
        (f"{UP}.weight", 4, 511, 15),
        (f"{DOWN}.biases", 2, 600, 7),
    }
    build[f"{UP}.weight"][(2 * 512 + 5) * 512 :: 512][:1000] ^= 1  # the first group of 1,000 rows, to expert 3, row 492
    alone = verify(build.seal().folder, wide, workers=1)
    assert {o.expert: o.groups for o in alone.offenders if o.tensor == f"{UP}.weight"} == {2: 507, 3: 493, 4: 1}
    assert sum(f.differing for f in alone.families) == 1003
    together = verify(build.folder, wide, workers=2)
    assert together.as_dict() == alone.as_dict()


def test_the_source_goes_away(wide, tmp_path):
    source = Path(shutil.copytree(wide[0], tmp_path / "source"))
    with open_checkpoint(source) as checkpoint:
        (source / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors: .* could not be read"):
            verify_repo(wide[1], checkpoint, workers=2)


def test_a_worker_that_is_killed(wide):
    source, out = wide

    def kill(_):
        for worker in multiprocessing.active_children()[:1]:  # none may be left for a second result
            worker.kill()

    with open_checkpoint(source) as checkpoint, pytest.raises(MotifConvertError, match="a worker process was killed"):
        verify_repo(out, checkpoint, workers=2, progress=kill)


SCRIPT = """
import os, time
from motif_convert.validate.pool import results

if __name__ == "__main__":
    with results([(abs, -1)] + [(time.sleep, 100)] * 9, workers=4) as done:  # some still starting
        print("working", next(done), flush=True)
        next(done)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path, how):
    """The workers hold the parent's output open: it ends only when they do."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, script], **pipes) as process:
        assert process.stdout.readline() == "working 1\n"
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: the workers get it too
        else:
            os.kill(process.pid, how)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -how
    assert errors.count("Traceback") == (how == signal.SIGINT)  # the parent's own KeyboardInterrupt


def test_workers_never_see_mlx():
    modules = "import sys, motif_convert.validate.contents; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", modules], capture_output=True, text=True, check=True).stdout.split()
    used = {m for m in found if m.startswith(("mlx", "motif_convert.quantize.kernels", "motif_convert.convert.rows"))}
    assert used == set()


# --- the arithmetic ---


def test_rounding_is_that_of_numpy():
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    rng = np.random.default_rng(0)
    x = np.concatenate([every, rng.integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)])
    halves = np.concatenate([x, (np.arange(1 << 16, dtype=np.uint16).view(np.float16)).astype(np.float32)])
    ties = halves.view(np.uint32) & 0xFFFFF000 | 0x1000
    x = np.concatenate([halves, ties.view(np.float32), (ties + 1).view(np.float32)])
    x = x[~np.isnan(x)]
    with np.errstate(all="ignore"):
        half = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(round_to(x, "F16"), half)
    assert np.array_equal(round_to(x, "BF16"), np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16)))
    assert np.array_equal(round_to(x, "F32"), x.view(np.uint32))
    assert np.isnan(round_to(np.array([np.nan], "f4"), "F16").view(np.float16))[0]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_bound_holds_and_is_tight(bits, dtype):
    """The quantizer's codes are within it, and nearly use it up; a group with a wrong code is not within it."""
    rng = np.random.default_rng(bits)
    x = (rng.standard_normal((64, 256)) * 10.0 ** rng.uniform(-3, 2, (64, 1))).astype("f4")
    raw = {"BF16": round_to(x, "BF16"), "F16": x.astype("f2"), "F32": x}[dtype]
    exact = (raw.astype(np.uint32) << 16).view("f4") if dtype == "BF16" else raw.astype("f4")
    stored = tuple(Part("", d, Path(), 0, 1) for d in ("U32", dtype, dtype))
    how = Quantized("affine", bits, 64)
    module = Comparison("", None, how, dtype, stored, (), (64, 256), 1, 64, 256, 64, 0, False)
    made = affine_quantize(raw, bits, 64, dtype)
    unsigned = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}[dtype]
    found = [made[0], *(a.view(unsigned) for a in made[1:])]
    error = decoded_error(module, Expected(found, exact, exact), found)
    assert 0.5 < error.share <= 1
    assert error.shares is None
    worse = [(made[0] ^ np.uint32(1 << bits - 1)), *found[1:]]  # the high bit of the first code of each word
    assert decoded_error(module, Expected(found, exact, exact), worse).share > 1


def test_a_look_at_another_source_takes_nothing_from_a_whole_verification(built, small, tmp_path):
    """It fails and says so, and the picture of a build that was never compared does not speak of equal bits."""
    out = tmp_path / "out"
    shutil.copytree(built(small), out)
    other = REFERENCE / "tiny-motif3"
    assert motif_convert("verify", out, "--source", other).returncode == 1
    assert not json.loads((out / "validation.json").read_text())["passed"]
    assert motif_convert("verify", out, "--source", small).returncode == 0
    whole = (out / "validation.json").read_bytes()
    for options in (("--source", other), ("--source", small, "--sample", 0.01)):
        result = motif_convert("verify", out, *options)
        assert "keeps the whole verification" in result.stderr
        assert (out / "validation.json").read_bytes() == whole


def test_the_picture_says_when_nothing_was_compared(monkeypatch):
    said = []
    monkeypatch.setattr(evidence, "_nothing", lambda axes, text: said.append(text))
    evidence._draw_error(Figure().subplots(), {"sampled": 0, "passed": False, "layers": [], "families": []})
    assert said == ["nothing was compared"]
