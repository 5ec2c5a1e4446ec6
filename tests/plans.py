"""What the tests of plans share: the real checkpoint's headers, small ones, and a second way of computing a plan."""

from functools import cache
from pathlib import Path

import pytest
from conftest import SMALL_CONFIG
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.convert.names import entries
from motif_convert.convert.planner import make_plan
from motif_convert.recipes.recipe import load_recipe
from test_checkpoint import sparse_checkpoint
from test_names import REAL_CONFIG, inventory

RECIPES, POLICIES = ("4.5bit", "8bit", "bf16"), ("bf16", "fp16", "8", "4.5", "drop")
EVERY_BUILD = [(recipe, mtp) for recipe in RECIPES for mtp in POLICIES]


def is_head(source: str) -> bool:
    return source.startswith("model.mtp_layers.")


def planned_tensors(plan: dict) -> dict[str, tuple]:
    for tensor in plan["tensors"]:
        quantized = {"mode": "affine", "group_size": 64} if tensor["bits"] else {"mode": None, "group_size": None}
        assert {key: tensor[key] for key in quantized} == quantized
    return {t["name"]: (*t["sources"], t["dtype"], tuple(t["shape"]), t["bits"], t["bytes"]) for t in plan["tensors"]}


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The real checkpoint's 155 shards: true headers, and holes for weights."""
    return sparse_checkpoint(tmp_path_factory.mktemp("real") / "motif-3", REAL_CONFIG, inventory())


@pytest.fixture(scope="module")
def real_plan(real):
    """real_plan(recipe, mtp) -> its plan, made once."""
    with open_checkpoint(real) as checkpoint:
        yield cache(lambda recipe, mtp: make_plan(checkpoint, load_recipe(recipe), mtp))


def small_tensors(dtype: str = "BF16", shard: str = "model-00001-of-00001.safetensors", **change) -> dict:
    return {e.source: (dtype, e.shape, shard) for e in entries(SMALL_CONFIG | change)}


def plan_of(folder: Path, recipe: str = "bf16", mtp: str | None = None):
    with open_checkpoint(folder) as checkpoint:
        return make_plan(checkpoint, load_recipe(recipe), mtp)


def write_small(folder: Path, drop: tuple = (), add: dict | None = None, **change) -> Path:
    """A sparse SMALL_CONFIG checkpoint with keys changed, tensors dropped and others added or replaced."""
    tensors = {name: info for name, info in small_tensors(**change).items() if not name.startswith(drop or "\0")}
    return sparse_checkpoint(folder, SMALL_CONFIG | change, tensors | (add or {}))
