"""Recipes as text, and what is said of wrong ones."""

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


def with_rule(*lines: str) -> str:
    """A recipe of one rule, whose first line is line 3."""
    return "name: r\nrules:\n  - " + "\n    ".join(lines) + "\n"


def edited(old: str, new: str) -> str:
    """RIGHT with something else in one place."""
    assert RIGHT.count(old) == 1
    return RIGHT.replace(old, new)
