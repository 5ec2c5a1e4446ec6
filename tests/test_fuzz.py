"""Readers of foreign files, on files that nobody would write: each is refused in words, or is what it says.

Hypothesis makes them near to right ones, where mistakes are; in fuzz.py a fuzzer that watches the code looks for them.
"""

import json
from math import prod
from pathlib import Path

import pytest
import yaml
from conftest import REFERENCE, SMALL_CONFIG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from motif_convert.convert.checkpoint import INDEX, open_checkpoint
from motif_convert.convert.config import check_config
from motif_convert.convert.headers import header_tensors, parse_json
from motif_convert.convert.planner import make_plan
from motif_convert.quantize.errors import RecipeError, SourceError
from motif_convert.quantize.policy import Recipe
from motif_convert.quantize.precision import DTYPE_BYTES
from motif_convert.recipes.recipe import load_recipe, parse_recipe

MANY = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SOME = settings(MANY, max_examples=100)

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
anything = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3)
)
names = st.sampled_from(["a", "b", "model.norm.weight", "lm_head.weight"]) | st.text(max_size=12)
sizes = st.integers(0, 6) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**200, True, 1.0, "2", None])


def refused(error: Exception) -> None:
    """What a refusal has to be: a few printable lines."""
    assert 0 < len(str(error)) < 300_000
    assert all(line.isprintable() for line in str(error).splitlines())


# --- headers ---


@st.composite
def near_entries(draw) -> object:
    shape = draw(st.lists(sizes, max_size=4))
    dtype = draw(st.sampled_from([*DTYPE_BYTES, "F99", 7, None]))
    start = draw(st.integers(0, 20) | sizes)
    right = all(type(n) is int for n in (*shape, start)) and dtype in DTYPE_BYTES
    end = start + prod(shape) * DTYPE_BYTES[dtype] if right and draw(st.booleans()) else draw(sizes)
    made = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return draw(st.just(made) | st.just(made | {"more": 1}) | anything)


@st.composite
def near_files(draw) -> bytes:
    """A safetensors file, or nearly: a header with some truth in it, and more or less data than that says."""
    if draw(st.booleans()):
        header = draw(st.dictionaries(names, near_entries(), max_size=4))
    else:  # entries that follow each other as they should
        header, end = {}, 0
        for name in draw(st.lists(names, max_size=4, unique=True)):
            shape, dtype = draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.sampled_from(sorted(DTYPE_BYTES)))
            start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = draw(st.just(json.dumps(header).encode()) | st.binary(max_size=40))
    length = draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    most = max((e["data_offsets"][1] for e in header.values() if _placed(e)), default=0)
    data = draw(st.just(most if most < 10_000 else 0) | st.integers(0, 50))
    return length.to_bytes(8, "little") + text + bytes(data)


def _placed(entry: object) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int and offsets[1] >= 0


@MANY
@given(near_files() | st.binary(max_size=100))
def test_header(raw):
    """What is accepted covers the file behind the header, each byte once."""
    try:
        tensors = header_tensors("a.safetensors", len(raw), lambda start, count: raw[start : start + count])
    except SourceError as e:
        refused(e)
        return
    end = 8 + int.from_bytes(raw[:8], "little")
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        assert info.offset == end
        assert info.nbytes == prod(info.shape) * DTYPE_BYTES[info.dtype]
        end += info.nbytes
    assert end == len(raw)


# --- a folder ---


@SOME
@given(
    st.dictionaries(names, st.sampled_from(["a.safetensors", "b.safetensors"]) | st.text(max_size=10), max_size=4)
    | anything,
    near_files(),
    near_files(),
    st.binary(max_size=30) | st.none(),
)
def test_folder(tmp_path_factory, weight_map, first, second, instead):
    """What is accepted can be read: every byte of every tensor."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "config.json").write_text("{}")
    (folder / INDEX).write_bytes(json.dumps({"weight_map": weight_map}).encode() if instead is None else instead)
    (folder / "a.safetensors").write_bytes(first)
    (folder / "b.safetensors").write_bytes(second)
    try:
        checkpoint = open_checkpoint(folder)
    except SourceError as e:
        refused(e)
        return
    with checkpoint:
        assert {t.name: t.shard for t in checkpoint.tensors.values()} == weight_map
        for t in checkpoint.tensors.values():
            assert checkpoint.read(t.name, 0, t.nbytes).nbytes == t.nbytes


@MANY
@given(st.binary(max_size=200) | anything.map(lambda v: json.dumps(v).encode()))
def test_json(raw):
    """What is accepted is an object that Python's own reader takes for the same."""
    try:
        value = parse_json(raw, "config.json")
    except SourceError as e:
        refused(e)
        return
    assert value == json.loads(raw)


@MANY
@given(st.dictionaries(st.sampled_from(sorted(SMALL_CONFIG)) | st.text(max_size=8), anything, min_size=1, max_size=3))
def test_config(changes):
    """What is accepted can be planned, or is refused by the tensors that are there."""
    config = SMALL_CONFIG | changes
    try:
        check_config(config)
    except SourceError as e:
        refused(e)


# --- recipes ---

RIGHT = {"name": "r", "rules": [{"match": "*", "bits": 4, "group_size": 64}]}
values = st.sampled_from([2, 4, 8, 16, 32, 64, "affine", "nvfp4", "source", "*", "*.wo", ["lm_head", "*"], "fp16"])
rule_keys = st.sampled_from(["match", "bits", "group_size", "mode", "dtype", "optional", "more"])
rules = st.lists(st.dictionaries(rule_keys, values | scalars, max_size=5), min_size=1, max_size=4)
near_recipes = st.fixed_dictionaries(
    {}, optional={"name": st.just("r") | scalars, "mtp": values | scalars, "rules": rules | anything, "more": scalars}
)


@pytest.fixture(scope="module")
def checkpoint():
    with open_checkpoint(REFERENCE / "tiny-motif3-nvfp4") as found:
        yield found


@SOME
@given(
    near_recipes.map(lambda r: yaml.safe_dump(RIGHT | r))
    | near_recipes.map(yaml.safe_dump)
    | st.text(max_size=60)
    | st.text("-:[]{}&*!|>'\"% \n#?,name:rules", max_size=60)
)
def test_recipe(checkpoint, text):
    """What is accepted plans every tensor, or says which it does not fit."""
    try:
        recipe = parse_recipe(text, "r.yaml")
        assert isinstance(recipe, Recipe)
        plan = make_plan(checkpoint, recipe)
    except RecipeError as e:
        refused(e)
        return
    assert {s for m in plan.modules for s in m.sources} | {n for n, _ in plan.dropped} == set(checkpoint.tensors)


@SOME
@given(st.binary(max_size=100))
def test_recipe_file(tmp_path_factory, raw):
    path: Path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    path.write_bytes(raw)
    try:
        load_recipe(str(path))
    except RecipeError as e:
        refused(e)
