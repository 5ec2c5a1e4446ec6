"""Bad recipes and options, while the source is right: every one is refused at once, in one line, by name."""

import pytest
from conftest import REFERENCE
from refusals import refused, said

TINY = REFERENCE / "tiny-motif3"
RULES = "rules:\n  - match: '*'\n    bits: 4\n    group_size: 64\n"
RECIPES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "an empty recipe": ("", ("must be `key: value` lines",)),
    "a recipe that is no YAML": ("name: 'r\n", ("not valid YAML",)),
    "a recipe that is binary": (b"\xff\xfe\0\0", ("not a text file",)),
    "a recipe of 2 MB": ("# " + "x" * (2 << 20), ("larger than a recipe",)),
    "a recipe without a name": (RULES, ("has no `name`",)),
    "a recipe without rules": ("name: r\n", ("has no `rules`",)),
    "a recipe with an unknown key": ("name: r\nbits: 4\n" + RULES, ("line 2", "unknown key 'bits'")),
    "a rule with an unknown key": ("name: r\nrules:\n  - match: '*'\n    bit: 4\n", ("line 4", "unknown key 'bit'")),
    "a recipe with code in it": ("name: !!python/object/apply:os.getcwd []\n" + RULES, ("line 1", "`name`")),
    "7 bits": ("name: r\n" + RULES.replace("4\n", "7\n", 1), ("line 3", "bits 7")),
    "groups of 48": ("name: r\n" + RULES.replace("64", "48"), ("line 3", "group_size 48")),
    "a rule that matches nothing": (
        "name: r\nrules:\n  - match: '*.wx'\n    bits: 4\n    group_size: 64\n  - match: '*'\n    dtype: source\n",
        ("line 3", "*.wx"),
    ),
    "modules that no rule matches": (
        "name: r\nrules:\n  - match: 'lm_head'\n    bits: 4\n    group_size: 64\n",
        ("no rule",),
    ),
    "groups that do not divide a width": ("name: r\n" + RULES.replace("64", "128"), ("128", "mlp")),
    "an unknown policy for the head": ("name: r\nmtp: fp8\n" + RULES, ("line 2", "mtp 'fp8'")),
    "an acceptance above 1": ("name: r\nmin_acceptance: 80\n" + RULES, ("line 2", "'80'")),
    "an alias of itself": ("name: r\nrules: &a [*a]\n", ("line 2", "a rule")),
}

OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bits that are not there": (("--bits", "5"), ("--bits", "5")),
    "a recipe that is not there": (("--recipe", "6bit"), ("6bit", "4.5bit")),
    "a recipe that is a folder": (("--recipe", "."), ("Is a directory",)),
    "bits and a recipe": (("--bits", "8", "--recipe", "4.5bit"), ("--bits and --recipe",)),
    "an unknown policy": (("--mtp", "fp32"), ("--mtp", "fp32")),
    "two policies": (("--mtp", "drop", "--keep-mtp-fp16"), ("--keep-mtp-fp16", "drop")),
    "no workers": (("--workers", "0"), ("--workers", "0")),
    "a word for workers": (("--workers", "all"), ("--workers", "all")),
    "a revision of a folder": (("--revision", "main"), ("--revision",)),
    "streaming a folder": (("--stream",), ("--stream",)),
    "experts that are not NVFP4": (("--experts", "affine"), ("--experts affine",)),
    "a card that is not there": (("--card-extra", "gone.md"), ("gone.md",)),
    "an option that is none": (("--quantize",), ("--quantize",)),
    "an argument that is none": (("more",), ("more",)),
}


@pytest.mark.parametrize(("text", "fragments"), RECIPES.values(), ids=RECIPES)
def test_bad_recipe(text, fragments, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused(tmp_path, "convert", "--source", TINY, "--recipe", path, "--out", "out")
    said(message, ("mine.yaml", *fragments) if b"dtype" not in path.read_bytes() else fragments)


@pytest.mark.parametrize(("options", "fragments"), OPTIONS.values(), ids=OPTIONS)
def test_bad_option(options, fragments, tmp_path):
    said(refused(tmp_path, "convert", "--source", TINY, *options, "--out", "out"), fragments)
