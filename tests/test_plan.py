"""The plan: every byte of every output tensor, computed here a second time from the inventory of the real model."""

import json
import re
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
from conftest import REFERENCE, SMALL_CONFIG, motif_convert
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.convert.names import entries
from motif_convert.convert.planner import make_plan
from motif_convert.quantize.errors import RecipeError, SourceError
from motif_convert.quantize.precision import Quantized
from motif_convert.recipes.recipe import load_recipe, parse_recipe
from test_checkpoint import INDEX, file_of, refused, sparse_checkpoint
from test_names import MATRIX, REAL_CONFIG, family_of, inventory, mlx_names

GIB = 1 << 30
REAL_BYTES, REAL_PARAMETERS = 629_683_551_500, 314_841_775_750
RECIPES, POLICIES = ("4.5bit", "8bit", "bf16"), ("bf16", "fp16", "8", "4.5", "drop")
EVERY_BUILD = [(recipe, mtp) for recipe in RECIPES for mtp in POLICIES]


# --- a second way of computing a plan ---


def is_head(source: str) -> bool:
    return source.startswith("model.mtp_layers.")


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


def planned_tensors(plan: dict) -> dict[str, tuple]:
    for tensor in plan["tensors"]:
        quantized = {"mode": "affine", "group_size": 64} if tensor["bits"] else {"mode": None, "group_size": None}
        assert {key: tensor[key] for key in quantized} == quantized
    return {t["name"]: (*t["sources"], t["dtype"], tuple(t["shape"]), t["bits"], t["bytes"]) for t in plan["tensors"]}


def parameters(tensors: dict, mtp: str = "bf16") -> int:
    return sum(prod(shape) for name, (_, shape, *_) in tensors.items() if not (is_head(name) and mtp == "drop"))


# --- plans ---


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


# --- tensors that do not fit ---


def write_small(folder: Path, drop: tuple = (), add: dict | None = None, **change) -> Path:
    """A sparse SMALL_CONFIG checkpoint with keys changed, tensors dropped and others added or replaced."""
    tensors = {name: info for name, info in small_tensors(**change).items() if not name.startswith(drop or "\0")}
    return sparse_checkpoint(folder, SMALL_CONFIG | change, tensors | (add or {}))


SHARD = "model-00001-of-00001.safetensors"


def test_every_tensor_that_does_not_fit_is_listed(tmp_path):
    folder = write_small(
        tmp_path / "source",
        drop=("model.layers.1.mhc_attn.alpha_pre", "model.layers.2.self_attn.wo"),
        add={
            "model.layers.0.self_attn.wq_c.weight": ("BF16", (64, 64), SHARD),
            "model.layers.7.input_layernorm.weight": ("BF16", (64,), SHARD),
            "model.layers.1.moe.experts.down_proj": ("BF16", (5, 128, 64), SHARD),
            "model.norm.weight": ("BF16", (1, 64), SHARD),
            "model.layers.0.mlp.up_proj.weight": ("I32", (192, 64), SHARD),
            "lm_head.weight": ("U8", (160, 64), SHARD),
        },
    )
    work = tmp_path / "work"
    work.mkdir()
    message = refused(work, "plan", "--source", folder)
    for line in (
        "model.layers.1.mhc_attn.alpha_pre: missing",
        "model.layers.2.self_attn.wo.weight: missing",
        f"model.layers.0.self_attn.wq_c.weight: not a tensor of this model ({SHARD})",
        f"model.layers.7.input_layernorm.weight: not a tensor of this model ({SHARD})",
        f"model.layers.1.moe.experts.down_proj: shape [5, 128, 64], config.json means [5, 64, 128] ({SHARD})",
        f"model.norm.weight: shape [1, 64], config.json means [64] ({SHARD})",
        f"model.layers.0.mlp.up_proj.weight: dtype I32, not one of BF16, F16, F32 ({SHARD})",
        f"lm_head.weight: dtype U8, not one of BF16, F16, F32 ({SHARD})",
    ):
        assert f"  - {line}\n" in message
    assert message.count("\n  - ") == 8


@pytest.mark.parametrize("first", [0, 1])
def test_no_tensor_may_be_missing(tmp_path, first):
    """Every other tensor is missing, so that the two runs name all."""
    present = dict(list(small_tensors().items())[1 - first :: 2])
    with pytest.raises(SourceError) as refusal:
        plan_of(sparse_checkpoint(tmp_path / "source", SMALL_CONFIG, present))
    assert re.findall(r"- (\S+): missing", str(refusal.value)) == list(small_tensors())[first::2]


def test_a_config_of_another_size_lists_what_it_means(tmp_path):
    folder = sparse_checkpoint(tmp_path / "source", SMALL_CONFIG | {"moe_intermediate_size": 64}, small_tensors())
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    expected = [n for n in small_tensors() if re.search(r"experts.*_proj", n)]
    assert re.findall(r"  - (\S+): shape ", str(refusal.value)) == expected


def test_a_config_of_many_more_layers_is_no_flood(tmp_path):
    """A mistyped number of layers is one mistake, not a line for each of a million tensors."""
    folder = write_small(tmp_path / "source")
    (folder / "config.json").write_text(json.dumps(SMALL_CONFIG | {"num_hidden_layers": 400}))
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    assert len(str(refusal.value)) < 100_000


def test_names_cannot_fake_a_message(tmp_path):
    folder = write_small(tmp_path / "source", add={"\x1b[2J\nmotif-convert: error: fine": ("U8", (1,), SHARD)})
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    assert all(line.isprintable() and not line.startswith("motif") for line in str(refusal.value).splitlines())


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_scales_have_the_dtype_of_the_source(tmp_path, dtype):
    folder = sparse_checkpoint(tmp_path / "source", SMALL_CONFIG, small_tensors(dtype))
    plan = plan_of(folder, "8bit", "8")
    found = {t.name: (t.dtype, t.nbytes) for m in plan.modules for t in m.stored}
    size = {"F16": 2, "F32": 4}[dtype]
    assert found["model.layers.1.mlp.switch_mlp.up_proj.weight"] == ("U32", 5 * 128 * 64)
    assert found["model.layers.1.mlp.switch_mlp.up_proj.scales"] == (dtype, 5 * 128 * size)
    assert found["mtp.input_proj.biases"] == (dtype, 64 * 2 * size)
    assert found["mtp.embed_norm.weight"] == found["model.norm.weight"] == (dtype, 64 * size)
    assert plan.config_keys()["torch_dtype"] == {"F16": "float16", "F32": "float32"}[dtype]


def test_a_tensor_of_another_float_dtype_keeps_it(tmp_path):
    name = "model.layers.1.moe.expert_bias"
    folder = write_small(tmp_path / "source", add={name: ("F32", (5,), SHARD)})
    plan = planned_tensors(plan_of(folder, "4.5bit").as_dict())
    assert plan["model.layers.1.mlp.gate.expert_bias"] == (name, "F32", (5,), None, 20)
    assert plan["model.layers.1.mlp.gate.weight"][1] == "BF16"


# --- the MTP head ---


def test_a_head_that_is_declared_but_absent(tmp_path):
    with pytest.raises(SourceError, match=r"num_nextn_predict_layers is 1, but .* no model\.mtp_layers\.0\.\* tensors"):
        plan_of(write_small(tmp_path / "source", drop=("model.mtp_layers",)))


def test_a_head_that_lacks_a_part(tmp_path):
    folder = write_small(tmp_path / "source", drop=("model.mtp_layers.0.embed_norm", "model.mtp_layers.0.self_attn.wo"))
    with pytest.raises(SourceError) as refusal:
        plan_of(folder)
    assert str(refusal.value).count("model.mtp_layers.0.embed_norm.weight: missing") == 1
    assert str(refusal.value).count("missing") == 2


def test_a_head_that_is_not_declared(tmp_path):
    """The remedy is in config.json, so the message has to name the key."""
    head = {name: info for name, info in small_tensors().items() if is_head(name)}
    with pytest.raises(SourceError, match=r"model\.mtp_layers\.0\.") as refusal:
        plan_of(write_small(tmp_path / "source", add=head, num_nextn_predict_layers=0))
    assert "num_nextn_predict_layers" in str(refusal.value)


def test_two_heads(tmp_path):
    head = {name: info for name, info in small_tensors().items() if is_head(name)}
    second = {name.replace("layers.0.", "layers.1."): info for name, info in head.items()}
    with pytest.raises(SourceError, match=r"2 MTP layers \(model\.mtp_layers\.\*\); one is supported"):
        plan_of(write_small(tmp_path / "one", add=second))
    folder = write_small(tmp_path / "two", add=second)
    (folder / "config.json").write_text(json.dumps(SMALL_CONFIG | {"num_nextn_predict_layers": 2}))
    with pytest.raises(SourceError, match="num_nextn_predict_layers is 2; one MTP layer at most"):
        plan_of(folder)


@pytest.mark.parametrize("mtp", POLICIES)
def test_a_policy_for_a_head_that_is_not_there(tmp_path, mtp):
    folder = write_small(tmp_path / "source", num_nextn_predict_layers=0)
    with pytest.raises(RecipeError, match=f"--mtp {mtp}: this checkpoint has no MTP head"):
        plan_of(folder, mtp=mtp)


@pytest.mark.parametrize("recipe", ["mtp: drop", "mtp: fp16", "mtp: '8'", ""])
def test_a_recipe_may_name_a_policy_for_a_head_that_is_not_there(tmp_path, recipe):
    folder = write_small(tmp_path / "source", num_nextn_predict_layers=0)
    rules = parse_recipe(f"name: r\n{recipe}\nrules:\n  - match: '*'\n    dtype: source\n", "r.yaml")
    with open_checkpoint(folder) as checkpoint:
        plan = make_plan(checkpoint, rules)
    assert (plan.mtp, plan.has_mtp, plan.dropped) == ("none", False, ())
    assert plan.config_keys() == {"torch_dtype": "bfloat16", "num_nextn_predict_layers": 0}


CONFIG_KEYS = {
    "bf16": {"num_nextn_predict_layers": 1, "mtp_dtype": "bfloat16", "mtp_compute_dtype": "bfloat16"},
    "fp16": {"num_nextn_predict_layers": 1, "mtp_dtype": "float16", "mtp_compute_dtype": "bfloat16"},
    "8": {"num_nextn_predict_layers": 1},
    "4.5": {"num_nextn_predict_layers": 1},
    "drop": {"num_nextn_predict_layers": 0},
}


@pytest.mark.parametrize(("mtp", "keys"), CONFIG_KEYS.items())
def test_config_says_what_became_of_the_head(tmp_path, mtp, keys):
    plan = plan_of(write_small(tmp_path / "source"), mtp=mtp)
    assert plan.config_keys() == keys | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize(("mtp", "bits"), [("8", 8), ("4.5", 4)])
def test_inputs_of_the_head_that_groups_do_not_divide(tmp_path, mtp, bits):
    folder = write_small(tmp_path / "source", intermediate_size=200)
    message = f"MTP policy {mtp}: group_size 64 does not divide the inputs: mtp.mlp.down_proj has 200 inputs"
    with pytest.raises(RecipeError) as refusal:
        plan_of(folder, mtp=mtp)
    assert str(refusal.value) == message
    for fits in ("bf16", "fp16", "drop"):
        plan_of(folder, mtp=fits)


def test_quantized_sources_are_refused(tmp_path):
    folder = write_small(tmp_path / "source", quantization_config={"quant_method": "fp8", "bits": 8})
    work = tmp_path / "work"
    work.mkdir()
    message = refused(work, "plan", "--source", folder)
    assert "config.json" in message
    assert "quantization_config is 'fp8'; BF16 and modelopt_nvfp4 can be read" in message


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
