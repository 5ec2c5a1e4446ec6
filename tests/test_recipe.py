"""Recipes: what ships, and what a file may say."""

import json

import pytest
from checkpoints import refused
from conftest import REFERENCE, SMALL_CONFIG, motif_convert
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.convert.names import entries
from motif_convert.convert.planner import make_plan
from motif_convert.quantize.errors import RecipeError
from motif_convert.quantize.policy import MTP_POLICIES, Rule
from motif_convert.quantize.precision import Float, Quantized
from motif_convert.recipes.recipe import built_in, load_recipe, parse_recipe
from recipe_texts import RIGHT, edited, with_rule
from test_checkpoint import sparse_checkpoint

TINY = REFERENCE / "tiny-motif3"


# --- what is right ---


def test_a_right_recipe():
    recipe = parse_recipe(RIGHT, "r.yaml")
    assert (recipe.name, recipe.description, recipe.mtp, recipe.file) == ("mine", "For me.", "fp16", "r.yaml")
    assert recipe.rules == (
        Rule(("*.mlp.switch_mlp.*",), Quantized("affine", 3, 128), 5, True),
        Rule(("lm_head", "*.embed_tokens"), Float(), 9),
        Rule(("*",), Quantized("affine", 8, 32), 11),
    )


def test_what_may_be_left_out():
    recipe = parse_recipe(with_rule("match: '*'", "dtype: source"), "r.yaml")
    assert (recipe.description, recipe.mtp) == ("", "bf16")
    assert recipe.rules == (Rule(("*",), Float(), 3, False),)


@pytest.mark.parametrize(("name", "dtype"), [("source", None), ("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_dtypes(name, dtype):
    (rule,) = parse_recipe(with_rule("match: '*'", f"dtype: {name}"), "r.yaml").rules
    assert rule.precision == Float(dtype)


@pytest.mark.parametrize("mtp", MTP_POLICIES)
def test_policies_of_the_head_need_no_quotes(mtp):
    assert parse_recipe(f"mtp: {mtp}\n" + with_rule("match: '*'", "dtype: source"), "r.yaml").mtp == mtp


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False)])
def test_optional(text, value):
    (rule,) = parse_recipe(with_rule("match: '*'", "dtype: source", f"optional: {text}"), "r.yaml").rules
    assert rule.optional is value


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + RIGHT,
        RIGHT.replace("\n", "\r\n"),
        "# a comment\n" + RIGHT,
        "---\n" + RIGHT,
        RIGHT.replace("bits: 8", "bits: '8'"),
        json.dumps({"name": "r", "rules": [{"match": "*", "bits": 4, "group_size": 64}]}),
    ],
    ids=["byte order mark", "CRLF", "comment", "document start", "quoted number", "JSON"],
)
def test_other_spellings(text):
    assert parse_recipe(text, "r.yaml").rules[-1].patterns == ("*",)


def test_an_alias_means_what_it_stands_for():
    text = "name: r\nrules:\n- match: &a ['*.wo', lm_head]\n  dtype: source\n- match: *a\n  bits: 4\n  group_size: 64\n"
    assert [rule.patterns for rule in parse_recipe(text, "r.yaml").rules] == [("*.wo", "lm_head")] * 2


# --- files ---


def wrong_file(path) -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    assert str(path) in str(error.value)
    return str(error.value)


def test_missing_file(tmp_path):
    message = wrong_file(tmp_path / "none.yaml")
    assert "No such file" in message
    assert "the built-in ones are 4.5bit, 8bit, bf16" in message


def test_directory(tmp_path):
    assert "Is a directory" in wrong_file(tmp_path)


def test_binary_file(tmp_path):
    (tmp_path / "r.yaml").write_bytes(bytes(range(256)))
    assert "not a text file in UTF-8" in wrong_file(tmp_path / "r.yaml")


def test_large_file(tmp_path):
    (tmp_path / "r.yaml").write_bytes(RIGHT.encode() + b"#" * (1 << 18))
    assert "larger than a recipe can be (262144 bytes)" in wrong_file(tmp_path / "r.yaml")


def test_endless_file():
    assert "larger than a recipe can be" in wrong_file("/dev/zero")


def test_wrong_values_of_a_file_name_the_file(tmp_path):
    (tmp_path / "my.yaml").write_text(edited("fp16", "fp8"))
    with pytest.raises(RecipeError, match=r"recipe my\.yaml, line 3: mtp 'fp8'"):
        load_recipe(str(tmp_path / "my.yaml"))


# --- the recipes that ship ---


def test_built_in_names():
    assert built_in() == ["4.5bit", "8bit", "bf16"]


def write_variant(folder, **change):
    config = SMALL_CONFIG | change
    shard = "model-00001-of-00001.safetensors"
    return sparse_checkpoint(folder, config, {e.source: ("BF16", e.shape, shard) for e in entries(config)})


VARIANTS = {
    "small": {},
    "all dense": {"n_dense_first_layers": SMALL_CONFIG["num_hidden_layers"]},
    "no dense layer": {"n_dense_first_layers": 0},
    "no shared expert": {"num_shared_experts": 0},
    "no MTP head": {"num_nextn_predict_layers": 0},
}


@pytest.mark.parametrize("recipe", ["4.5bit", "8bit", "bf16"])
@pytest.mark.parametrize("source", ["tiny-motif3", "demo-motif3", *VARIANTS])
def test_built_in_recipes_fit(tmp_path, recipe, source):
    variant = VARIANTS.get(source)
    folder = REFERENCE / source if variant is None else write_variant(tmp_path / "source", **variant)
    with open_checkpoint(folder) as checkpoint:
        plan = make_plan(checkpoint, load_recipe(recipe))
    for path, precision in plan.quantized.items():
        assert precision.bits == (4 if recipe == "4.5bit" and ".switch_mlp." in path else 8), path
    assert (plan.quantized == {}) == (recipe == "bf16")


def test_a_recipe_may_not_cast_what_it_keeps():
    text = "name: r\nrules:\n  - match: lm_head\n    dtype: fp16\n  - match: '*'\n    dtype: bf16\n"
    with open_checkpoint(TINY) as checkpoint, pytest.raises(RecipeError) as error:
        make_plan(checkpoint, parse_recipe(text, "r.yaml"))
    assert "r.yaml" in str(error.value)
    assert str(error.value).endswith(": lm_head is BF16, not F16; write `dtype: source`")


def test_a_group_size_that_does_not_divide_names_every_module():
    """The inputs of tiny that 128 does not divide: 64 (latents, experts) and 192 (the dense MLP)."""
    text = "name: r\nrules:\n  - match: '*'\n    bits: 4\n    group_size: 128\n"
    with open_checkpoint(TINY) as checkpoint, pytest.raises(RecipeError) as error:
        make_plan(checkpoint, parse_recipe(text, "r.yaml"))
    names = [f"model.layers.{n}.self_attn.{p}" for n in range(6) for p in ("wq_b", "wq_b_gate", "wkv_b")]
    names += [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)]
    names += [f"model.layers.{n}.mlp.{p}.down_proj" for n in range(2, 6) for p in ("switch_mlp", "shared_experts")]
    found = [line.rsplit(" ", 1)[1] for line in str(error.value).split("\n  - ")[1:]]
    assert sorted(found) == sorted(names)


# --- from outside ---


def test_bits_choose_a_built_in_recipe():
    plans = []
    for options in (("--bits", "8"), ("--recipe", "8bit")):
        result = motif_convert("plan", "--source", TINY, "--json", *options)
        assert result.returncode == 0, result.stderr
        plans.append(json.loads(result.stdout))
    assert plans[0] == plans[1]
    assert plans[0]["recipe"]["name"] == "8bit"


@pytest.mark.parametrize("recipe", ["8bit", ""])
def test_bits_and_a_recipe_are_refused(recipe):
    result = motif_convert("plan", "--source", TINY, "--bits", "8", "--recipe", recipe)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "--bits and --recipe both choose the recipe; give one of them" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_empty_recipe_name_is_not_the_default(tmp_path):
    """As from a script whose variable is not set."""
    assert "recipe" in refused(tmp_path, "plan", "--source", TINY, "--recipe", "")


def test_a_recipe_file_decides_the_plan(tmp_path):
    (tmp_path / "mine.yaml").write_text(edited("group_size: 128", "group_size: 32"))
    result = motif_convert("plan", "--source", TINY, "--recipe", "mine.yaml", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["recipe"]["name"] == "mine"
    assert plan["mtp"] == "fp16"
    bits = {t["name"]: (t["bits"], t["group_size"], t["dtype"]) for t in plan["tensors"]}
    assert bits["model.layers.2.mlp.switch_mlp.gate_proj.weight"] == (3, 32, "U32")
    assert bits["lm_head.weight"] == (None, None, "BF16")
    assert bits["model.layers.0.self_attn.wo.weight"] == (8, 32, "U32")
    assert bits["mtp.input_proj.weight"] == (None, None, "F16")


def test_the_command_names_file_and_line(tmp_path):
    (tmp_path / "mine.yaml").write_text(edited("bits: 3", "bits: 7"))
    message = refused(tmp_path, "plan", "--source", TINY, "--recipe", "mine.yaml")
    assert message == "motif-convert: error: recipe mine.yaml, line 5: bits 7 is not one of 2, 3, 4, 5, 6, 8\n"
