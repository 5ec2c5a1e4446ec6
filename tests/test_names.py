"""The name tables against the real inventory and the reference checkpoints, and against the MLX names in use."""

import gzip
import json
import re
from math import prod

import pytest
from conftest import REAL_SIZES, REFERENCE, SMALL_CONFIG, read_safetensors
from motif_convert.convert.names import FAMILIES, FIXED, PROJECTION, entries

TINY_CONFIG = json.loads((REFERENCE / "tiny-motif3" / "config.json").read_text())

REAL_CONFIG = TINY_CONFIG | REAL_SIZES


def inventory() -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Name -> (dtype, shape, shard) of every tensor of the real checkpoint."""
    with gzip.open(REFERENCE / "motif3-inventory.tsv.gz", "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    return {name: (dtype, tuple(map(int, shape.split("x"))), shard) for name, dtype, shape, shard in rows}


def mlx_names(source: str) -> list[str]:
    """The MLX names of a source tensor, by the table of names that published builds and loaders use."""
    name = re.sub(r"^model\.mtp_layers\.0\.", "mtp.", source)
    name = re.sub(r"\.moe\.router\.gate\.weight$", ".mlp.gate.weight", name)
    name = re.sub(r"\.moe\.expert_bias$", ".mlp.gate.expert_bias", name)
    name = re.sub(r"\.moe\.shared_experts\.", ".mlp.shared_experts.", name)
    name = re.sub(r"\.moe\.experts\.act_fn\.", ".mlp.switch_mlp.act_fn.", name)
    name = re.sub(r"\.moe\.experts\.down_proj$", ".mlp.switch_mlp.down_proj.weight", name)
    stack = re.sub(r"\.moe\.experts\.gate_up_proj$", ".mlp.switch_mlp", name)
    return [name] if stack == name else [f"{stack}.gate_proj.weight", f"{stack}.up_proj.weight"]


# A recipe decides on these; norms, routers, lambda_proj, mHC and activations keep their bits.
MATRIX = re.compile(
    r"lm_head\.weight|model\.embed_tokens\.weight"
    r"|.*\.self_attn\.(wq_a|wq_b|wq_b_gate|wkv_a|wkv_b|wo)\.weight"
    r"|.*\.(mlp|moe\.shared_experts)\.(gate|up|down)_proj\.weight"
    r"|.*\.moe\.experts\.(gate_up|down)_proj"
    r"|model\.mtp_layers\.0\.input_proj\.weight"
)

FAMILY = {
    "MTP head": r"model\.mtp_layers\.",
    "embedding": r"model\.embed_tokens\.",
    "lm_head": r"lm_head\.",
    "attention": r".*\.self_attn\.",
    "dense MLP": r".*\.mlp\.",
    "routed experts": r".*\.moe\.experts\.",
    "shared expert": r".*\.moe\.shared_experts\.",
    "router": r".*\.moe\.(router\.|expert_bias)",
    "mHC": r".*\.mhc_(attn|ffn)\.",
    "norms": r".*norm\.weight",
}


def family_of(source: str) -> str:
    return next(family for family, pattern in FAMILY.items() if re.match(pattern, source))


def shapes(tensors: dict) -> dict[str, tuple]:
    return {name: shape for name, (_, shape, _) in tensors.items()}


CHECKPOINTS = {
    "real": (REAL_CONFIG, inventory),
    "tiny": (TINY_CONFIG, lambda: read_safetensors(REFERENCE / "tiny-motif3")),
    "demo": (
        json.loads((REFERENCE / "demo-motif3" / "config.json").read_text()),
        lambda: read_safetensors(REFERENCE / "demo-motif3"),
    ),
}


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request):
    """A config, and (dtype, shape, ...) of every tensor of its checkpoint."""
    config, tensors = CHECKPOINTS[request.param]
    return config, tensors()


def test_the_inventory_is_the_published_one():
    tensors = inventory()
    assert len(tensors) == 2236
    assert sum(prod(shape) for _, shape, _ in tensors.values()) == 314_841_775_750
    assert {dtype for dtype, _, _ in tensors.values()} == {"BF16"}


def test_every_name_and_shape(checkpoint):
    config, tensors = checkpoint
    table = list(entries(config))
    assert {e.source: e.shape for e in table} == shapes(tensors)
    assert len(table) == len(tensors)  # none twice


def test_mlx_names_are_those_in_use(checkpoint):
    config, tensors = checkpoint
    assert {e.source: list(e.targets) for e in entries(config)} == {name: mlx_names(name) for name in tensors}


def test_no_mlx_name_twice(checkpoint):
    targets = [t for e in entries(checkpoint[0]) for t in e.targets]
    assert len(set(targets)) == len(targets)


def test_only_the_gate_up_stack_is_cut(checkpoint):
    for entry in entries(checkpoint[0]):
        assert (len(entry.targets) == 2) == entry.source.endswith("gate_up_proj")
        assert len(entry.targets) == 1 or entry.shape[-2] % 2 == 0


def test_recipes_decide_on_the_matrices_and_nothing_else(checkpoint):
    for entry in entries(checkpoint[0]):
        assert entry.kind == (PROJECTION if MATRIX.fullmatch(entry.source) else FIXED), entry.source


def test_families(checkpoint):
    config, _ = checkpoint
    assert {e.source: e.family for e in entries(config)} == {e.source: family_of(e.source) for e in entries(config)}
    assert {e.family for e in entries(config)} == set(FAMILIES) == set(FAMILY)


def test_routed_experts_are_nearly_all_of_the_real_model():
    routed = sum(prod(e.shape) for e in entries(REAL_CONFIG) if e.family == "routed experts")
    assert round(100 * routed / 314_841_775_750, 2) == 97.84


def test_the_mtp_head_is_19_tensors():
    head = {e.source for e in entries(REAL_CONFIG) if e.family == "MTP head"}
    assert head == {name for name in inventory() if name.startswith("model.mtp_layers.0.")}
    assert len(head) == 19


@pytest.mark.parametrize("change", [{"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": None}])
def test_without_an_mtp_head(change):
    config = {k: v for k, v in (TINY_CONFIG | change).items() if v is not None}
    expected = {n: s for n, s in shapes(read_safetensors(REFERENCE / "tiny-motif3")).items() if "mtp_layers" not in n}
    assert {e.source: e.shape for e in entries(config)} == expected


def test_without_a_shared_expert():
    config = TINY_CONFIG | {"num_shared_experts": 0}
    tiny = shapes(read_safetensors(REFERENCE / "tiny-motif3"))
    assert {e.source: e.shape for e in entries(config)} == {n: s for n, s in tiny.items() if "shared_experts" not in n}


def test_a_config_that_does_not_count_shared_experts_has_one():
    config = {k: v for k, v in TINY_CONFIG.items() if k != "num_shared_experts"}
    assert list(entries(config)) == list(entries(TINY_CONFIG))


@pytest.mark.parametrize(("dense", "moe_layers"), [(0, [0, 1, 2]), (1, [1, 2]), (3, []), (9, [])])
def test_the_first_layers_are_dense(dense, moe_layers):
    names = [e.source for e in entries(SMALL_CONFIG | {"n_dense_first_layers": dense})]
    assert [n for n in range(3) if f"model.layers.{n}.moe.experts.down_proj" in names] == moe_layers
    assert [n for n in range(3) if f"model.layers.{n}.mlp.down_proj.weight" not in names] == moe_layers


# Every dimension of SMALL_CONFIG differs from what it could be mistaken for in the real one.
SMALL_SHAPES = {
    "model.embed_tokens.weight": (160, 64),
    "model.layers.2.mhc_ffn.proj_res.weight": (9, 192),
    "model.layers.2.mhc_ffn.proj_pre.weight": (3, 192),
    "model.layers.2.mhc_ffn.bias_res": (3, 3),
    "model.layers.2.self_attn.wq_a.weight": (64, 64),
    "model.layers.2.self_attn.wq_b.weight": (9 * 40, 64),
    "model.layers.2.self_attn.wq_b_gate.weight": (6 * 64, 64),
    "model.layers.2.self_attn.wkv_a.weight": (128 + 8, 64),
    "model.layers.2.self_attn.wkv_b.weight": (3 * (32 + 64), 128),
    "model.layers.2.self_attn.lambda_proj.weight": (6, 64),
    "model.layers.2.self_attn.wo.weight": (64, 6 * 64),
    "model.layers.2.moe.router.gate.weight": (5, 64),
    "model.layers.2.moe.expert_bias": (5,),
    "model.layers.2.moe.experts.gate_up_proj": (5, 256, 64),
    "model.layers.2.moe.experts.down_proj": (5, 64, 128),
    "model.layers.2.moe.experts.act_fn.weight": (5, 3),
    "model.layers.2.moe.experts.act_fn.bias": (5, 1),
    "model.layers.2.moe.shared_experts.down_proj.weight": (64, 128),
    "model.layers.0.mlp.up_proj.weight": (192, 64),
    "model.mtp_layers.0.input_proj.weight": (64, 128),
    "model.mtp_layers.0.mlp.down_proj.weight": (64, 192),
}


@pytest.mark.parametrize(("name", "shape"), SMALL_SHAPES.items())
def test_shapes_follow_the_config(name, shape):
    assert next(e.shape for e in entries(SMALL_CONFIG) if e.source == name) == shape
