"""What the tests of NVFP4 sources share."""

import shutil
from pathlib import Path

import pytest
from conftest import REFERENCE

TINY = REFERENCE / "tiny-motif3-nvfp4"
STACKS = [f"model.layers.{n}.moe.experts.{p}" for n in (2, 3, 4, 5) for p in ("gate_up_proj", "down_proj")]


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the tiny NVFP4 checkpoint to spoil."""
    return Path(shutil.copytree(TINY, tmp_path / "source"))
