"""Rules over module paths: which wins, and what a recipe may not say of a checkpoint."""

import re

import pytest
from motif_convert.quantize.errors import RecipeError
from motif_convert.quantize.policy import MTP_POLICIES, Recipe, Rule, assign
from motif_convert.quantize.precision import Float, Quantized

Q4, Q8, KEEP = Quantized("affine", 4, 64), Quantized("affine", 8, 64), Float()

PROJECTIONS = {
    "model.embed_tokens": 256,
    "model.layers.0.self_attn.wo": 128,
    "model.layers.1.mlp.switch_mlp.up_proj": 256,
    "model.layers.10.mlp.switch_mlp.up_proj": 256,
    "lm_head": 256,
}
PROTECTED = ("model.norm", "model.layers.0.mlp.gate", "model.layers.0.mhc_attn.alpha_pre")


def recipe(*rules: tuple) -> Recipe:
    """A recipe of (pattern or patterns, precision[, optional]); rule i stands in line 10 * (i + 1)."""
    made = []
    for i, (patterns, precision, *optional) in enumerate(rules):
        patterns = (patterns,) if isinstance(patterns, str) else patterns
        made.append(Rule(patterns, precision, 10 * (i + 1), *optional))
    return Recipe("r", "", "bf16", tuple(made), "r.yaml")


def assigned(*rules: tuple) -> dict:
    return assign(recipe(*rules), PROJECTIONS, PROTECTED)


def complaint(*rules: tuple) -> list[str]:
    """What the error lists: a single problem on its line, several below it."""
    with pytest.raises(RecipeError) as refusal:
        assigned(*rules)
    head = "recipe r.yaml does not fit this checkpoint:"
    assert str(refusal.value).startswith(head)
    text = str(refusal.value).removeprefix(head)
    return text.split("\n  - ")[1:] if "\n" in text else [text.removeprefix(" ")]


# --- what wins ---


def test_a_rule_for_all():
    assert assigned(("*", Q8)) == dict.fromkeys(PROJECTIONS, Q8)


def test_the_first_rule_that_matches_wins():
    expected = dict.fromkeys(PROJECTIONS, Q8) | {"lm_head": KEEP, "model.layers.10.mlp.switch_mlp.up_proj": Q4}
    assert assigned(("lm_head", KEEP), ("model.layers.10.*", Q4), ("*", Q8)) == expected


def test_protected_modules_are_never_assigned():
    assert set(assigned(("*", Q4))) == set(PROJECTIONS)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("lm_head", ["lm_head"]),
        ("*.wo", ["model.layers.0.self_attn.wo"]),
        ("*.layers.?.*", ["model.layers.0.self_attn.wo", "model.layers.1.mlp.switch_mlp.up_proj"]),
        ("*.layers.1*", ["model.layers.1.mlp.switch_mlp.up_proj", "model.layers.10.mlp.switch_mlp.up_proj"]),
        ("*.layers.[0-9].mlp.*", ["model.layers.1.mlp.switch_mlp.up_proj"]),
        ("*.layers.[!1]*", ["model.layers.0.self_attn.wo"]),
        ("model*proj", ["model.layers.1.mlp.switch_mlp.up_proj", "model.layers.10.mlp.switch_mlp.up_proj"]),
        (("lm_head", "model.embed*"), ["model.embed_tokens", "lm_head"]),
        (("lm_head", "nothing"), ["lm_head"]),
    ],
)
def test_patterns(pattern, matched):
    found = assigned((pattern, Q4), ("*", Q8))
    assert [path for path, precision in found.items() if precision == Q4] == matched


@pytest.mark.parametrize("pattern", ["LM_HEAD", "lm_head.weight", "head", "layers.0", "model.layers", "lm.head"])
def test_patterns_match_whole_paths_as_they_are_written(pattern):
    assert complaint((pattern, Q4), ("*", Q8)) == [
        f"line 10 (match: {pattern}) matches no module of this checkpoint; mend the pattern, or add `optional: true`"
    ]


# --- rules that decide nothing ---


def test_an_optional_rule_may_match_nothing():
    assert assigned(("*.vision.*", Q4, True), ("*", Q8)) == dict.fromkeys(PROJECTIONS, Q8)


def test_a_rule_that_is_never_reached():
    (line,) = complaint(("*", Q8), ("lm_head", Q4))
    assert line.startswith("line 20 (match: lm_head) is never reached")
    assert "move it up or remove it" in line


def test_a_rule_of_which_something_is_left_is_reached():
    assert assigned(("lm_head", KEEP), (("lm_head", "*.wo"), Q4), ("*", Q8))["model.layers.0.self_attn.wo"] == Q4


@pytest.mark.parametrize("pattern", PROTECTED)
def test_a_rule_for_a_protected_tensor(pattern):
    (line,) = complaint((pattern, Q8), ("*", Q8))
    assert line == (
        f"line 10 (match: {pattern}) matches only tensors that always keep their source bits, such as {pattern}; "
        "remove it"
    )


@pytest.mark.parametrize("pattern", ["mtp.*", "mtp", "mtp.self_attn.wo", ("mtp.input_proj", "mtp.mlp.*")])
def test_a_rule_for_the_mtp_head(pattern):
    (line,) = complaint((pattern, Q8), ("*", Q8))
    assert "line 10" in line
    assert "the key `mtp` or the option --mtp sets; remove it" in line


def test_a_rule_beside_the_mtp_head_is_not_taken_for_it():
    (line,) = complaint((("mtp.*", "vision.*"), Q8), ("*", Q8))
    assert "matches no module" in line


def test_modules_that_no_rule_matches():
    lines = complaint(("*.switch_mlp.*", Q4))
    uncovered = ["model.embed_tokens", "model.layers.0.self_attn.wo", "lm_head"]
    assert [line.split(";")[0] for line in lines] == [f"no rule matches {path}" for path in uncovered]
    assert "- match: '*'" in lines[0]
    assert "dtype: source" in lines[0]


# --- group sizes ---


def test_a_group_size_that_does_not_divide():
    by_128 = Quantized("affine", 4, 128)
    projections = PROJECTIONS | {"lm_head": 192, "model.embed_tokens": 64}
    with pytest.raises(RecipeError) as refusal:
        assign(recipe(("*", by_128)), projections, PROTECTED)
    lines = re.findall(
        r"line 10 \(match: \*\): group_size 128 does not divide the (\d+) inputs of (\S+)", str(refusal.value)
    )
    assert lines == [("64", "model.embed_tokens"), ("192", "lm_head")]


def test_a_kept_module_may_have_any_inputs():
    assert assign(recipe(("*", KEEP)), {"a": 7}, ())["a"] == KEEP


def test_only_the_rule_that_wins_has_to_divide():
    assert assign(recipe(("odd", KEEP), ("*", Q4)), {"odd": 7, "even": 64}, ()) == {"odd": KEEP, "even": Q4}


def test_all_problems_are_listed_at_once():
    lines = complaint(
        ("nothing", Q4), ("model.norm", Q4), ("mtp.*", Q4), ("lm_head", Quantized("affine", 4, 32)), ("lm_head", Q8)
    )
    assert len(lines) == 8  # four modules without a rule, four rules without a module
    assert [n for n in (10, 20, 30, 40, 50) if any(f"line {n} " in line for line in lines)] == [10, 20, 30, 50]


# --- the MTP head, and what goes into provenance ---


def test_mtp_policies():
    assert {
        "bf16": (Float("BF16"), Float("BF16")),
        "fp16": (Float("F16"), Float("F16")),
        "8": (Quantized("affine", 8, 64), Float()),
        "4.5": (Quantized("affine", 4, 64), Float()),
        "drop": None,
    } == MTP_POLICIES


def test_as_dict_is_the_whole_recipe():
    made = Recipe(
        "r", "what for", "fp16", recipe((("a", "b"), Q4), ("*", KEEP, True), ("c", Float("F32"))).rules, "f.yaml", 0.7
    )
    assert made.as_dict() == {
        "name": "r",
        "description": "what for",
        "mtp": "fp16",
        "min_acceptance": 0.7,
        "rules": [
            {"match": ["a", "b"], "group_size": 64, "bits": 4, "mode": "affine"},
            {"match": ["*"], "dtype": "source", "optional": True},
            {"match": ["c"], "dtype": "F32"},
        ],
    }
