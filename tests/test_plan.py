"""The plan: every byte of every output tensor, computed here a second time from the inventory of the real model."""

import json
import re
from math import prod

import pytest
from checkpoints import INDEX, file_of
from conftest import SMALL_CONFIG, motif_convert
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize.errors import SourceError
from motif_convert.quantize.precision import Quantized
from plans import EVERY_BUILD, POLICIES, RECIPES, is_head, plan_of, planned_tensors, small_tensors, write_small
from test_checkpoint import sparse_checkpoint
from test_names import MATRIX, family_of, inventory, mlx_names

REAL_BYTES, REAL_PARAMETERS = 629_683_551_500, 314_841_775_750


# --- a second way of computing a plan ---


def bits_of(source: str, recipe: str, mtp: str) -> int | None:
    """Bits of a code, or None where a tensor is not quantized."""
    if not MATRIX.fullmatch(source):
        return None
    if is_head(source):
        return {"8": 8, "4.5": 4}.get(mtp)
    return {"bf16": None, "8bit": 8, "4.5bit": 4 if ".experts." in source else 8}[recipe]


def expected_tensors(tensors: dict, recipe: str, mtp: str) -> dict[str, tuple]:
    """Output name -> (source, dtype, shape, bits, bytes) of a BF16 checkpoint's (dtype, shape, ...)."""
    expected = {}
    for source, (_, shape, *_) in tensors.items():
        if is_head(source) and mtp == "drop":
            continue
        names = mlx_names(source)
        if len(names) == 2:
            shape = (shape[0], shape[1] // 2, shape[2])
        bits = bits_of(source, recipe, mtp)
        for name in names:
            if bits is None:
                dtype = "F16" if is_head(source) and mtp == "fp16" else "BF16"
                expected[name] = (source, dtype, shape, None, 2 * prod(shape))
                continue
            packed, groups = (*shape[:-1], shape[-1] * bits // 32), (*shape[:-1], shape[-1] // 64)
            expected[name] = (source, "U32", packed, bits, prod(shape) * bits // 8)
            for part in ("scales", "biases"):
                expected[name.removesuffix("weight") + part] = (source, "BF16", groups, bits, prod(shape) // 32)
    return expected


def parameters(tensors: dict, mtp: str = "bf16") -> int:
    return sum(prod(shape) for name, (_, shape, *_) in tensors.items() if not (is_head(name) and mtp == "drop"))


# --- plans ---


def json_plan(source: object, *options: str, **environment: str) -> dict:
    """What `plan --json` prints."""
    result = motif_convert("plan", "--source", source, "--json", *options, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_the_real_checkpoint_is_as_large_as_published(real):
    shards = list(real.glob("model-*.safetensors"))
    assert len(shards) == 155
    payload = 0
    for shard in shards:
        with shard.open("rb") as file:
            payload += shard.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    assert payload == REAL_BYTES


@pytest.mark.parametrize(("recipe", "mtp"), EVERY_BUILD)
def test_every_tensor_of_the_real_model(real_plan, recipe, mtp):
    plan, tensors = real_plan(recipe, mtp).as_dict(), inventory()
    expected = expected_tensors(tensors, recipe, mtp)
    assert (plan["recipe"]["name"], plan["mtp"]) == (recipe, mtp)
    assert planned_tensors(plan) == expected
    assert len(plan["tensors"]) == len(expected)
    assert plan["total_bytes"] == sum(size for *_, size in expected.values())
    assert plan["total_parameters"] == parameters(tensors, mtp)
    assert plan["bits_per_weight"] == 8 * plan["total_bytes"] / plan["total_parameters"]
    assert {t["family"] == family_of(t["sources"][0]) for t in plan["tensors"]} == {True}


def test_published_totals(real_plan):
    for recipe in RECIPES:
        assert real_plan(recipe, "bf16").total_parameters == REAL_PARAMETERS
    assert real_plan("bf16", "bf16").total_bytes == REAL_BYTES
    assert real_plan("bf16", "fp16").total_bytes == REAL_BYTES
    head = sum(prod(shape) for name, (_, shape, _) in inventory().items() if is_head(name))
    assert real_plan("bf16", "drop").total_bytes == REAL_BYTES - 2 * head
    assert real_plan("4.5bit", "drop").total_parameters == REAL_PARAMETERS - head


@pytest.mark.parametrize("mtp", POLICIES)
def test_what_is_dropped_is_listed(real_plan, mtp):
    head = [name for name in inventory() if is_head(name)]
    assert sorted(real_plan("4.5bit", mtp).as_dict()["dropped"]) == (sorted(head) if mtp == "drop" else [])


@pytest.mark.parametrize(
    ("options", "recipe", "mtp"),
    [((), "4.5bit", "bf16"), (("--bits", "8", "--keep-mtp-fp16"), "8bit", "fp16")],
)
def test_the_command_prints_the_plan_and_its_hash(real, real_plan, options, recipe, mtp):
    """Another process, in which strings hash otherwise, makes the same plan."""
    printed = json_plan(real, *options, PYTHONHASHSEED="1")
    plan = real_plan(recipe, mtp)
    assert re.fullmatch("[0-9a-f]{64}", plan.plan_hash)
    assert printed.pop("source") == {"id": real.name, "revision": None}
    assert printed.pop("download") is printed.pop("stream") is None
    assert [disk["bytes"] for disk in printed.pop("disks")] == [plan.total_bytes]
    assert printed == json.loads(json.dumps(plan.as_dict())) | {"plan_hash": plan.plan_hash}


def test_the_table_sums_up_the_real_model(real):
    result = motif_convert("plan", "--source", real, "--mtp", "drop")
    assert result.returncode == 0, result.stderr
    total = next(line for line in result.stdout.splitlines() if line.startswith("total"))
    expected = expected_tensors(inventory(), "4.5bit", "drop")
    assert f"{parameters(inventory(), 'drop'):,}" in total
    assert f"{sum(size for *_, size in expected.values()) / 1e9:.2f} GB" in total
    assert "Dropped on purpose: 19 tensors" in result.stdout


# --- what the plan says of itself ---


def test_the_quantized_modules(tmp_path):
    folder = write_small(tmp_path / "source")
    plan = plan_of(folder, "4.5bit", "8")
    expected = expected_tensors(small_tensors(), "4.5bit", "8")
    bits = {name.removesuffix(".weight"): bits for name, (*_, bits, _) in expected.items() if name.endswith(".weight")}
    assert {path: p.bits for path, p in plan.quantized.items()} == {path: b for path, b in bits.items() if b}
    assert plan_of(folder, "bf16").quantized == {}
    assert plan_of(folder, "bf16").dominant is None


def test_the_dominant_precision_is_that_of_most_parameters(real_plan):
    plan = real_plan("4.5bit", "8")
    modules, weights = {4: 0, 8: 0}, {4: 0, 8: 0}
    for _, dtype, shape, bits, _ in expected_tensors(inventory(), "4.5bit", "8").values():
        if dtype == "U32":
            modules[bits] += 1
            weights[bits] += prod(shape) * 32 // bits
    assert modules[8] > modules[4]
    assert weights[4] > weights[8]
    assert plan.dominant == Quantized("affine", 4, 64)
    assert real_plan("8bit", "4.5").dominant == Quantized("affine", 8, 64)


def test_families_sum_up_to_the_plan(real):
    plan = plan_of(real, "4.5bit", "fp16")
    families = {f["family"]: f for f in plan.families()}
    expected = expected_tensors(inventory(), "4.5bit", "fp16")
    for name, row in families.items():
        mine = {source: shape for source, (_, shape, _) in inventory().items() if family_of(source) == name}
        assert row["parameters"] == sum(map(prod, mine.values()))
        assert row["source_bytes"] == 2 * row["parameters"]
        assert row["bytes"] == sum(size for source, *_, size in expected.values() if source in mine)
    assert sum(f["parameters"] for f in families.values()) == REAL_PARAMETERS
    assert families["routed experts"]["precisions"] == ["affine 4-bit, group 64", "BF16"]
    assert families["MTP head"]["precisions"] == ["F16"]


def test_a_single_file_checkpoint(tmp_path):
    tensors = small_tensors(shard="model.safetensors")
    folder = sparse_checkpoint(tmp_path / "single", SMALL_CONFIG, tensors)
    (folder / INDEX).unlink()
    plan = plan_of(folder, "8bit")
    assert plan.index_sha256 is None
    assert planned_tensors(plan.as_dict()) == expected_tensors(tensors, "8bit", "bf16")


def test_a_folder_without_weights_is_refused_before_anything_else(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG))
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(file_of({}))
    with pytest.raises(SourceError, match=INDEX):
        open_checkpoint(tmp_path)
