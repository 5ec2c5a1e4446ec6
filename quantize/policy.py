"""Which precision a module gets: ordered rules over MLX module paths, and the MTP head's policy."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .errors import RecipeError, listing
from .precision import Float, Precision, Quantized

# The head's policies: what its projections become, and what its other tensors are stored as.
# None instead of a pair: the head is left out.
MTP_POLICIES: dict[str, tuple[Precision, Float] | None] = {
    "bf16": (Float("BF16"), Float("BF16")),
    "fp16": (Float("F16"), Float("F16")),
    "8": (Quantized("affine", 8, 64), Float()),
    "4.5": (Quantized("affine", 4, 64), Float()),
    "drop": None,
}


@dataclass(frozen=True)
class Rule:
    """The modules that one of `patterns` matches get `precision`.

    Args:
        patterns: shell-style (`*`, `?`, `[0-9]`); `*` also crosses dots.
        precision: Quantized, or Float to keep the source's bits (with a dtype: which they have to be in).
        line: where the rule stands in its file, for messages.
        optional: whether the rule may match nothing.
    """

    patterns: tuple[str, ...]
    precision: Precision
    line: int
    optional: bool = False

    def matches(self, path: str) -> bool:
        return any(fnmatchcase(path, p) for p in self.patterns)

    def __str__(self) -> str:
        return f"line {self.line} (match: {', '.join(self.patterns)})"

    def as_dict(self) -> dict:
        what = self.precision.as_config() if isinstance(self.precision, Quantized) else {"dtype": str(self.precision)}
        return {"match": list(self.patterns), **what, **({"optional": True} if self.optional else {})}


@dataclass(frozen=True)
class Recipe:
    """A named build: rules for the body's projections and a policy for the MTP head.

    Args:
        file: the name that messages give it.
        min_acceptance: drafts that smoke must see accepted, per draft; None for no such gate.
    """

    name: str
    description: str
    mtp: str
    rules: tuple[Rule, ...]
    file: str
    min_acceptance: float | None = None

    def as_dict(self) -> dict:
        """The whole recipe, for provenance and for the plan's hash."""
        return {
            "name": self.name,
            "description": self.description,
            "mtp": self.mtp,
            "min_acceptance": self.min_acceptance,
            "rules": [r.as_dict() for r in self.rules],
        }


def assign(recipe: Recipe, projections: dict[str, int], protected: Iterable[str]) -> dict[str, Precision]:
    """The precision of every projection of the body; the first rule that matches wins.

    Args:
        projections: MLX module path -> input dimension.
        protected: module paths that no recipe may touch.
    Raises:
        RecipeError: with all offenders: a rule that matches nothing, a group size that does
            not divide an input dimension, a projection that no rule matches.
    """
    first = {path: next((i for i, rule in enumerate(recipe.rules) if rule.matches(path)), None) for path in projections}
    problems = [
        f"no rule matches {path}; end the rules with `- match: '*'` and `dtype: source`"
        for path, index in first.items()
        if index is None
    ]
    for index, rule in enumerate(recipe.rules):
        paths = [path for path, i in first.items() if i == index]
        if not paths and not rule.optional:
            problems.append(f"{rule} {_why_unused(rule, projections, protected)}")
        if isinstance(rule.precision, Quantized):
            problems += [
                f"{rule}: group_size {rule.precision.group_size} does not divide the {projections[p]} inputs of {p}"
                for p in paths
                if projections[p] % rule.precision.group_size
            ]
    if problems:
        raise RecipeError(listing(f"recipe {recipe.file} does not fit this checkpoint", problems))
    return {path: recipe.rules[index].precision for path, index in first.items()}


def _why_unused(rule: Rule, projections: dict[str, int], protected: Iterable[str]) -> str:
    if any(rule.matches(p) for p in projections):
        return "is never reached, since earlier rules match all its modules; move it up or remove it"
    if hit := next((p for p in protected if rule.matches(p)), None):
        return f"matches only tensors that always keep their source bits, such as {hit}; remove it"
    if all(p == "mtp" or p.startswith("mtp.") for p in rule.patterns):
        return "is about the MTP head, whose precision the key `mtp` or the option --mtp sets; remove it"
    return "matches no module of this checkpoint; mend the pattern, or add `optional: true`"
