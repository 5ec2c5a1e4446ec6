"""Recipes with wrong values, each named with its line."""

import pytest
from motif_convert.quantize.errors import RecipeError
from motif_convert.recipes.recipe import parse_recipe
from recipe_texts import edited, with_rule


def refusal(text: str) -> str:
    """Why a recipe is refused; one line, and short."""
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, "r.yaml")
    message = str(error.value)
    assert message.startswith("recipe r.yaml")
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    return message


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
