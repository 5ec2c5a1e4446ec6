"""Plans: how modules are dealt out to shards, and what the hash of a plan knows."""

import json
from itertools import pairwise
from math import prod

import pytest
from checkpoints import INDEX
from conftest import REFERENCE, SMALL_CONFIG
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.convert.planner import make_plan
from motif_convert.recipes.recipe import parse_recipe
from plans import EVERY_BUILD, POLICIES, RECIPES, is_head, plan_of, small_tensors, write_small
from test_checkpoint import sparse_checkpoint

GIB = 1 << 30


# --- shards ---


def shards_of(plan: dict) -> dict[str, list[dict]]:
    shards: dict[str, list[dict]] = {}
    for tensor in plan["tensors"]:
        shards.setdefault(tensor["shard"], []).append(tensor)
    return shards


def shard_names(count: int) -> list[str]:
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def file_size(tensors: list[dict]) -> int:
    """Size of a safetensors file of these tensors, header included."""
    header, end = {"__metadata__": {"format": "mlx"}}, 0
    for t in tensors:
        header[t["name"]] = {"dtype": t["dtype"], "shape": t["shape"], "data_offsets": [end, end + t["bytes"]]}
        end += t["bytes"]
    text = json.dumps(header, separators=(",", ":"))
    return 8 + len(text) + -len(text) % 8 + end


@pytest.mark.parametrize(("recipe", "mtp"), EVERY_BUILD)
def test_shards_of_the_real_model(real_plan, recipe, mtp):
    shards = shards_of(real_plan(recipe, mtp).as_dict())
    sizes = [file_size(tensors) for tensors in shards.values()]
    assert list(shards) == shard_names(len(shards))
    assert max(sizes) <= 5 * GIB
    assert all(a + b > 5 * GIB for a, b in pairwise(sizes))  # else one file would do for two


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_lies_in_one_shard(real_plan, recipe):
    where: dict[str, set] = {}
    for tensor in real_plan(recipe, "4.5").as_dict()["tensors"]:
        where.setdefault(tensor["name"].rpartition(".")[0], set()).add(tensor["shard"])
    assert {path for path, shards in where.items() if len(shards) > 1} == set()


def vocabulary_for(size: int) -> int:
    """How large a vocabulary makes all tensors of SMALL_CONFIG, without MTP head, `size` bytes or just less."""
    rest = sum(2 * prod(shape) for name, (_, shape, _) in small_tensors().items() if not is_head(name))
    vocabulary, hidden = SMALL_CONFIG["vocab_size"], SMALL_CONFIG["hidden_size"]
    row = 2 * hidden * 2  # of the embedding and of lm_head, in BF16
    return vocabulary + (size - rest) // row


@pytest.mark.parametrize("room", [-(1 << 20), -(1 << 15), -(1 << 14), -12_000, -8192, -512, 0, 256, 1 << 20])
def test_shards_at_the_limit(tmp_path, room):
    """A payload of 5 GiB and a little less or more: header and all, no file is larger than 5 GiB."""
    change = {"vocab_size": vocabulary_for(5 * GIB + room), "num_nextn_predict_layers": 0}
    folder = sparse_checkpoint(tmp_path / "limit", SMALL_CONFIG | change, small_tensors(**change))
    plan = plan_of(folder).as_dict()
    shards = shards_of(plan)
    assert abs(plan["total_bytes"] - 5 * GIB - room) <= 256
    assert max(file_size(tensors) for tensors in shards.values()) <= 5 * GIB
    if file_size(plan["tensors"]) + 100 * len(plan["tensors"]) <= 5 * GIB:  # a header is not known to the byte
        assert len(shards) == 1


@pytest.mark.parametrize("rows", range(-4, 3))
def test_two_tensors_at_the_limit(tmp_path, rows):
    """One expert, whose up and down projections are 5 GiB together, give or take a row each, and nearly no header."""
    row = 2 * SMALL_CONFIG["hidden_size"]
    change = {"moe_intermediate_size": 5 * GIB // (2 * row) + rows, "num_experts": 1, "experts_top_k": 1}
    change["n_dense_first_layers"] = SMALL_CONFIG["num_hidden_layers"] - 1
    folder = sparse_checkpoint(tmp_path / "limit", SMALL_CONFIG | change, small_tensors(**change))
    assert all(file_size(tensors) <= 5 * GIB for tensors in shards_of(plan_of(folder).as_dict()).values())


def test_a_tensor_larger_than_a_shard_lies_alone(tmp_path):
    """A safetensors file can't hold a part of a tensor; no other tensor makes the file larger still."""
    change = {"vocab_size": 6 * GIB // (4 * SMALL_CONFIG["hidden_size"])}
    folder = sparse_checkpoint(tmp_path / "large", SMALL_CONFIG | change, small_tensors("F32", **change))
    shards = shards_of(plan_of(folder).as_dict())
    large = [[t["name"] for t in tensors] for tensors in shards.values() if file_size(tensors) > 5 * GIB]
    assert large == [["model.embed_tokens.weight"], ["lm_head.weight"]]
    assert list(shards) == shard_names(len(shards))


# --- the hash ---


def test_the_hash_does_not_know_the_folder(tmp_path):
    folders = [sparse_checkpoint(tmp_path / name, SMALL_CONFIG, small_tensors()) for name in ("one", "other")]
    assert len({plan_of(folder).plan_hash for folder in folders}) == 1


ONE_RULE = "name: r\nrules:\n  - match: '*'\n    bits: 8\n    group_size: 64\n"
OTHER_RECIPES = {
    "bits": ONE_RULE.replace("8", "6"),
    "group size": ONE_RULE.replace("64", "32"),
    "name": ONE_RULE.replace("name: r", "name: s"),
    "policy": "mtp: fp16\n" + ONE_RULE,
    "a rule more": ONE_RULE + "  - match: nothing\n    dtype: source\n    optional: true\n",
}


@pytest.mark.parametrize("text", OTHER_RECIPES.values(), ids=OTHER_RECIPES)
def test_another_recipe_has_another_hash(text):
    with open_checkpoint(REFERENCE / "tiny-motif3") as checkpoint:
        one, other = (make_plan(checkpoint, parse_recipe(t, "r.yaml")).plan_hash for t in (ONE_RULE, text))
    assert one != other


def test_every_policy_has_another_hash():
    assert len({plan_of(REFERENCE / "tiny-motif3", "8bit", mtp).plan_hash for mtp in POLICIES}) == len(POLICIES)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_another_byte_in_the_source_is_another_hash(tmp_path, name):
    folder = write_small(tmp_path / "source")
    before = plan_of(folder).plan_hash
    with (folder / name).open("a") as file:
        file.write("\n")
    assert plan_of(folder).plan_hash != before
