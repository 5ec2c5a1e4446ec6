"""Verify: files that are damaged, edited, left by others, or of another source."""

import hashlib
import json
import shutil
from py_compile import PycInvalidationMode
from py_compile import compile as compile_file

import numpy as np
import pytest
from conftest import SMALL_CONFIG, random_weights, write_checkpoint
from motif_convert.quantize.errors import SourceError
from spoiled import NVFP4, PROVENANCE, TINY, both, verify

# --- files ---


def test_every_file_may_be_damaged(spoiled, small):
    """Cut, emptied, of random bytes, a folder, a link to nothing: each is found, none raises."""
    damages = (
        lambda path, data: path.write_bytes(data[: len(data) // 2]),
        lambda path, data: path.write_bytes(b""),
        lambda path, data: path.write_bytes(np.random.default_rng(0).bytes(len(data))),
        lambda path, data: path.mkdir(),
        lambda path, data: path.symlink_to("nothing"),
    )
    for path in sorted(spoiled.folder.iterdir()):
        data = path.read_bytes()
        for damage in damages:
            path.unlink()
            damage(path, data)
            result = verify(spoiled.folder, small)
            assert not result.passed
            assert any(path.name in line for line in result.problems)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.write_bytes(data)
    assert verify(spoiled.folder, small).passed


@pytest.mark.parametrize("name", ["motif.py", "README.md"])
def test_an_edited_file(spoiled, small, name):
    path = spoiled.folder / name
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    *more, problem = verify(spoiled.folder, small).problems
    assert problem.startswith(f"{name}: sha256 is ")
    assert len(more) == (name == "motif.py")


def test_another_motif_py_that_calls_itself_the_build_s(spoiled, small):
    """What loaders run is known, whatever motif-convert.json says of it; and nothing else may be listed."""
    made = json.loads((spoiled.folder / PROVENANCE).read_text())
    for name, content in (("motif.py", b"print('mine')\n"), ("tokenization.py", b"print(1)\n")):
        (spoiled.folder / name).write_bytes(content)
        made["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (spoiled.folder / PROVENANCE).write_text(json.dumps(made))
    problems = verify(spoiled.folder, small).problems
    assert any(p.startswith("motif.py: not the file of this version") for p in problems)
    assert any("lists tokenization.py, which is no file of a build" in p for p in problems)


def test_files_that_others_leave_are_no_fault(spoiled, small):
    for name in (".gitattributes", ".DS_Store", "validation.json", "validation.png"):
        (spoiled.folder / name).write_text("{}")
    for name in (".git", ".cache", "__pycache__"):
        (spoiled.folder / name).mkdir()
    compile_file(spoiled.folder / "motif.py", invalidation_mode=PycInvalidationMode.TIMESTAMP)
    assert verify(spoiled.folder, small).passed


@pytest.mark.parametrize("mode", [PycInvalidationMode.UNCHECKED_HASH, PycInvalidationMode.CHECKED_HASH])
def test_compiled_files_that_python_does_not_leave(spoiled, small, mode):
    """It would run them, though `motif.py` is another."""
    compile_file(spoiled.folder / "motif.py", invalidation_mode=mode)
    (problem,) = verify(spoiled.folder, small).problems
    assert "__pycache__/motif." in problem
    assert "remove it" in problem


def test_copied_files_are_the_sources(copy):
    build = copy(NVFP4)
    build.json("generation_config.json", lambda config: config.update(temperature=9))
    problems = verify(build.seal().folder, NVFP4).problems
    assert problems == ["generation_config.json: not the source's, byte for byte"]


def test_an_entry_without_its_global_scale(copy):
    build, path = copy(NVFP4), "model.layers.3.mlp.switch_mlp.up_proj"
    build.json("config.json", lambda c: both(c, lambda q: q[path].pop("global_scale")))
    problems = verify(build.seal().folder, NVFP4).problems
    assert problems == [
        f'config.json: quantization calls {path} nvfp4 4-bit, group 16; the entry lacks "global_scale": true'
    ]


# --- another source, no build ---


def test_another_source(built, small):
    result = verify(built(small, "--keep-mtp-fp16"), TINY)
    assert not result.passed
    digest = hashlib.sha256((TINY / "config.json").read_bytes()).hexdigest()
    assert any(p.startswith(f"tiny-motif3: another source: config.json has sha256 {digest}") for p in result.problems)
    assert any("nothing was compared" in p for p in result.problems)
    assert (result.sampled, result.offenders, result.plan_hash) == (0, [], None)


def test_another_source_of_the_same_shapes(built, small, tmp_path):
    """The same config and index; only the weights tell, and all that was random differs."""
    other = write_checkpoint(tmp_path / "other", SMALL_CONFIG, random_weights(SMALL_CONFIG, seed=1))
    result = verify(built(small, "--keep-mtp-fp16"), other)
    (problem,) = result.problems
    assert "mtp.casts" in problem, "the other head loses other values to float16"
    assert all(f.differing > 0.9 * f.groups for f in result.families if f.family != "norms")
    assert result.offenders_total > len(result.offenders) == 100


def test_no_build(small, tmp_path):
    with pytest.raises(SourceError, match="no such folder"):
        verify(tmp_path / "nothing", small)
    with pytest.raises(SourceError, match="not a build of motif-convert"):
        verify(tmp_path, small)
    with pytest.raises(SourceError, match="not a build of motif-convert"):
        verify(small, small)


def test_an_unfinished_build(spoiled, small):
    shutil.copy(spoiled.folder / PROVENANCE, spoiled.folder / ".motif-convert.json")
    result = verify(spoiled.folder, small)
    assert not result.passed
    assert any("has not finished" in p for p in result.problems)
    (spoiled.folder / PROVENANCE).unlink()
    with pytest.raises(SourceError, match="an unfinished build; run the command that makes it again"):
        verify(spoiled.folder, small)
