"""Recipes: what ships, what a file may say, and that every wrong value is named with its line."""

import json

import pytest
from conftest import REFERENCE, SMALL_CONFIG, motif_convert
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.convert.names import entries
from motif_convert.convert.planner import make_plan
from motif_convert.quantize.errors import RecipeError
from motif_convert.quantize.policy import MTP_POLICIES, Rule
from motif_convert.quantize.precision import Float, Quantized
from motif_convert.recipes.recipe import built_in, load_recipe, parse_recipe
from test_checkpoint import refused, sparse_checkpoint

TINY = REFERENCE / "tiny-motif3"

RIGHT = """\
name: mine
description: For me.
mtp: fp16
rules:
  - match: "*.mlp.switch_mlp.*"
    bits: 3
    group_size: 128
    optional: true
  - match: [lm_head, "*.embed_tokens"]
    dtype: source
  - match: "*"
    mode: affine
    bits: 8
    group_size: 32
"""


def refusal(text: str) -> str:
    """Why a recipe is refused; one line, and short."""
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, "r.yaml")
    message = str(error.value)
    assert message.startswith("recipe r.yaml")
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    return message


def with_rule(*lines: str) -> str:
    """A recipe of one rule, whose first line is line 3."""
    return "name: r\nrules:\n  - " + "\n    ".join(lines) + "\n"


def edited(old: str, new: str) -> str:
    """RIGHT with something else in one place."""
    assert RIGHT.count(old) == 1
    return RIGHT.replace(old, new)


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


# --- wrong values, named with their line ---

WRONG_VALUES = {
    "unknown key": (
        edited("mtp: fp16", "mpt: fp16"),
        3,
        "unknown key 'mpt'; a recipe has description, min_acceptance, mtp, name, rules",
    ),
    "unknown key of a rule": (edited("mode: affine", "moode: affine"), 12, "unknown key 'moode'; a rule has bits"),
    "null as key": (edited("mtp: fp16", "~: fp16"), 3, "unknown key '~'"),
    "list as key": (edited("mtp: fp16", "? [mtp]\n: fp16"), 3, "key"),
    "mapping as key of a rule": (edited("mode: affine", "{mode: a}: affine"), 12, "key"),
    "key twice": (edited("mtp: fp16", "name: other"), 3, "key 'name' twice"),
    "key of a rule twice": (edited("mode: affine", "match: lm_head"), 12, "key 'match' twice"),
    "merge key": (edited("mode: affine", "<<: {bits: 4}"), 12, "unknown key '<<'"),
    "mtp": (edited("fp16", "fp8"), 3, "mtp 'fp8' is not one of bf16, fp16, 8, 4.5, drop"),
    "mtp empty": (edited(" fp16", ""), 3, "mtp '' is not one of"),
    "mtp a list": (edited("fp16", "[fp16]"), 3, "`mtp` must be one value"),
    "description a mapping": (edited("For me.", "{a: b}"), 2, "`description` must be one value"),
    "name empty": (edited("mine", ""), 1, "name '' may have"),
    "name with a slash": (edited("mine", "../mine"), 1, "name '../mine' may have letters, digits"),
    "name with a space": (edited("mine", "my own"), 1, "name 'my own' may have"),
    "name hidden": (edited("mine", ".mine"), 1, "name '.mine' may have"),
    "name with NUL": (edited("mine", r'"a\0b"'), 1, r"name 'a\x00b' may have"),
    "name a list": (edited("mine", "[mine]"), 1, "`name` must be one value"),
    "rules a word": ("name: r\nrules: all\n", 2, "`rules` must be a list of rules"),
    "rules a mapping": ("name: r\nrules: {match: a}\n", 2, "`rules` must be a list of rules"),
    "rules null": ("name: r\nrules:\n", 2, "`rules` must be a list of rules"),
    "no rules": ("name: r\nrules: []\n", 2, "`rules` must be a list of rules"),
    "a rule that is a word": (edited('- match: "*"\n', "- all\n  -\n"), 11, "a rule must be"),
    "a rule that is null": ("name: r\nrules:\n  - match: '*'\n    dtype: source\n  -\n", 5, "a rule must be"),
    "a rule that is all rules": ("name: r\nrules: &all\n  - *all\n", 2, "a rule must be"),
    "no match": (with_rule("bits: 4", "group_size: 64"), 3, "a rule needs `match`"),
    "match empty": (with_rule("match: ''", "dtype: source"), 3, "`match` must be a pattern or a list of patterns"),
    "match null": (with_rule("dtype: source", "match:"), 4, "`match` must be a pattern"),
    "match without patterns": (with_rule("dtype: source", "match: []"), 4, "`match` must be a pattern"),
    "match with an empty pattern": (with_rule("dtype: source", "match: [a, '']"), 4, "`match` must be a pattern"),
    "match a mapping": (with_rule("dtype: source", "match: {a: b}"), 4, "`match` must be one value"),
    "match nested": (with_rule("dtype: source", "match: [a, [b]]"), 4, "`match` must be one value"),
    "match itself": (with_rule("dtype: source", "match: &m [*m]"), 4, "`match` must be one value"),
    "no bits": (with_rule("match: a", "group_size: 64"), 3, "no `bits`"),
    "no group size": (with_rule("match: a", "bits: 4"), 3, "no `group_size`"),
    "no precision": (with_rule("match: a"), 3, "a rule needs `bits` and `group_size`, or `dtype: source`"),
    "mode alone": (with_rule("match: a", "mode: affine"), 3, "a rule needs `bits` and `group_size`"),
    "bits unknown": (with_rule("match: a", "bits: 7", "group_size: 64"), 3, "bits 7 is not one of 2, 3, 4, 5, 6, 8"),
    "bits zero": (with_rule("match: a", "bits: 0", "group_size: 64"), 3, "bits 0 is not one of"),
    "bits negative": (with_rule("match: a", "bits: -4", "group_size: 64"), 4, "bits '-4' is not a whole number"),
    "bits a fraction": (with_rule("match: a", "bits: 4.5", "group_size: 64"), 4, "bits '4.5' is not a whole number"),
    "bits a word": (with_rule("match: a", "bits: four", "group_size: 64"), 4, "bits 'four' is not a whole number"),
    "bits null": (with_rule("match: a", "bits:", "group_size: 64"), 4, "bits '' is not a whole number"),
    "bits true": (with_rule("match: a", "bits: true", "group_size: 64"), 4, "bits 'true' is not a whole number"),
    "bits superscript": (with_rule("match: a", "bits: ²", "group_size: 64"), 4, "bits '²' is not a whole number"),
    "bits a list": (with_rule("match: a", "bits: [4]", "group_size: 64"), 4, "`bits` must be one value"),
    "bits of 5000 digits": (with_rule("match: a", f"bits: {'9' * 5000}", "group_size: 64"), None, "bits "),
    "group size unknown": (
        with_rule("match: a", "bits: 4", "group_size: 16"),
        3,
        "group_size 16 is not one of 32, 64, 128",
    ),
    "group size a word": (
        with_rule("match: a", "bits: 4", "group_size: all"),
        5,
        "group_size 'all' is not a whole number",
    ),
    "mode unknown": (
        with_rule("match: a", "bits: 4", "group_size: 64", "mode: int"),
        3,
        "mode 'int' is not known; use affine",
    ),
    "mode a list": (with_rule("match: a", "bits: 4", "group_size: 64", "mode: []"), 6, "`mode` must be one value"),
    "dtype unknown": (with_rule("match: a", "dtype: BF16"), 4, "is not one of source, float, bf16, fp16, fp32"),
    "dtype null": (with_rule("match: a", "dtype:"), 4, "dtype '' is not one of"),
    "dtype a list": (with_rule("match: a", "dtype: [source]"), 4, "`dtype` must be one value"),
    "dtype and bits": (with_rule("match: a", "dtype: source", "bits: 4"), 3, "`bits` does not go with it"),
    "dtype and mode": (with_rule("match: a", "dtype: source", "mode: affine"), 3, "`mode` does not go with it"),
    "optional a word": (
        with_rule("match: a", "dtype: source", "optional: yes"),
        5,
        "optional 'yes' must be true or false",
    ),
    "optional null": (with_rule("match: a", "dtype: source", "optional:"), 5, "optional '' must be true or false"),
}


@pytest.mark.parametrize(("text", "line", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_wrong_value(text, line, message):
    found = refusal(text)
    assert message in found
    if line is not None:
        assert found.startswith(f"recipe r.yaml, line {line}: ")


@pytest.mark.parametrize("key", ["name", "rules"])
def test_a_key_that_a_recipe_needs(key):
    text = "".join(line + "\n" for line in ("name: r", "rules: [{match: '*', dtype: source}]") if key not in line)
    assert refusal(text) == f"recipe r.yaml: has no `{key}`"


WRONG_YAML = {
    "a tab": ("name: r\n\trules: all\n", 2),
    "a quote without end": ("name: 'r\nrules: []\n", 3),
    "a bracket without end": ("name: r\nrules: [a, b\n", 3),
    "an indent too far": ("name: r\n  mtp: fp16\n", 2),
    "an alias without anchor": ("name: *r\n", 1),
    "two documents": ("name: r\n---\nname: s\n", 2),
    "another version": ("%YAML 9.9\n---\nname: r\n", 1),
    "a tag": ("name: !<\n", 1),
    "NUL": ("name: r\nmtp: \0\n", None),
    "a control character": ("name: r\nmtp: \x1b[2J\n", None),
    "100,000 brackets": ("rules: " + "[" * 100_000, None),
}


@pytest.mark.parametrize(("text", "line"), WRONG_YAML.values(), ids=WRONG_YAML)
def test_not_yaml(text, line):
    message = refusal(text)
    assert "not valid YAML" in message
    if line is not None:
        assert message.startswith(f"recipe r.yaml, line {line}: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "recipe", "5", "~", "[]"])
def test_not_a_mapping(text):
    assert "a recipe must be `key: value` lines" in refusal(text)


@pytest.mark.parametrize("place", ["name: {}", "rules: {}", "rules: [{{match: {}, dtype: source}}]", "mtp: {}"])
def test_a_bomb_of_aliases_stays_small(place):
    """Nine lists of nine of the one before: 9^9 words, if anybody spelled them out."""
    bomb = "&a0 [x, x, x, x, x, x, x, x, x]"
    for i in range(1, 9):
        bomb = f"&a{i} [{bomb}, " + ", ".join([f"*a{i - 1}"] * 8) + "]"
    key, _, _ = place.partition(":")
    others = {"name": "name: r\n", "rules": "rules: [{match: '*', dtype: source}]\n"}
    assert "must be" in refusal("".join(others[k] for k in others if k != key) + place.format(bomb) + "\n")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/object/new:os.system"])
def test_tags_build_nothing(tag):
    assert "`name` must be one value" in refusal(edited("mine", f"{tag} [exit 3]"))


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
