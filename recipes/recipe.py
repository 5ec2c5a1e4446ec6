"""Recipes: YAML files of ordered rules. Every wrong value is named, with its line and what would be right."""

from importlib.resources import files
from pathlib import Path

import yaml

from ..quantize.errors import RecipeError
from ..quantize.policy import MTP_POLICIES, Recipe, Rule
from ..quantize.precision import UNPACKED, Float, Precision, Quantized

BITS = {"4.5": "4.5bit", "8": "8bit"}  # what --bits chooses
KEPT_DTYPES = {"source": None, "float": UNPACKED, "bf16": "BF16", "fp16": "F16", "fp32": "F32"}
RULE_KEYS = {"match", "mode", "bits", "group_size", "dtype", "optional"}
RECIPE_KEYS = {"name", "description", "mtp", "min_acceptance", "rules"}
MAX_RECIPE_BYTES = 1 << 18
MAX_RULES = 1000  # and patterns of a rule


def built_in() -> list[str]:
    """Names of the recipes that ship in the package."""
    return sorted(p.name.removesuffix(".yaml") for p in files(__package__).iterdir() if p.name.endswith(".yaml"))


def load_recipe(name_or_file: str) -> Recipe:
    """A built-in recipe by name, or any from a file.

    Raises:
        RecipeError: no such recipe, or the file is not a valid one.
    """
    if name_or_file in built_in():
        resource = files(__package__) / f"{name_or_file}.yaml"
        return parse_recipe(resource.read_text(encoding="utf-8"), f"{name_or_file}.yaml")
    path = Path(name_or_file)
    try:
        with path.open("rb") as f:
            raw = f.read(MAX_RECIPE_BYTES + 1)
    except OSError as e:
        known = ", ".join(built_in())
        raise RecipeError(f"recipe {name_or_file}: {e.strerror}; the built-in ones are {known}") from None
    if len(raw) > MAX_RECIPE_BYTES:
        raise RecipeError(f"recipe {name_or_file}: larger than a recipe can be ({MAX_RECIPE_BYTES} bytes)")
    try:
        return parse_recipe(raw.decode("utf-8"), path.name)
    except UnicodeDecodeError:
        raise RecipeError(f"recipe {name_or_file}: not a text file in UTF-8") from None


def parse_recipe(text: str, file: str) -> Recipe:
    """YAML text to a Recipe.

    Args:
        file: the name that messages give it.
    Raises:
        RecipeError: with file and line.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(e, "problem", None) or e).splitlines()[0]
        if "alphabetic or numeric" in problem:  # *.mlp.* is an alias to YAML
            problem += "; a pattern that begins with * stands in quotes"
        raise RecipeError(f"recipe {file}{where}: not valid YAML ({problem})") from None
    top = _mapping(root, file, RECIPE_KEYS, "a recipe")
    for key in ("name", "rules"):
        if key not in top:
            raise RecipeError(f"recipe {file}: has no `{key}`")
    if not isinstance(top["rules"], yaml.SequenceNode) or not top["rules"].value:
        raise _error(file, top["rules"], "`rules` must be a list of rules")
    if len(top["rules"].value) > MAX_RULES:
        raise _error(file, top["rules"], f"{len(top['rules'].value)} rules, more than {MAX_RULES}")
    mtp = _scalar(top["mtp"], file, "mtp") if "mtp" in top else "bf16"
    if mtp not in MTP_POLICIES:
        raise _error(file, top["mtp"], f"mtp {mtp!r} is not one of {', '.join(MTP_POLICIES)}")
    name = _scalar(top["name"], file, "name")
    if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
        raise _error(file, top["name"], f"name {name[:50]!r} may have letters, digits, dot, dash and underscore only")
    return Recipe(
        name=name,
        description=_scalar(top["description"], file, "description") if "description" in top else "",
        mtp=mtp,
        rules=tuple(_rule(node, file) for node in top["rules"].value),
        file=file,
        min_acceptance=_share(top["min_acceptance"], file) if "min_acceptance" in top else None,
    )


def _share(node: yaml.Node, file: str) -> float:
    text = _scalar(node, file, "min_acceptance")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise _error(file, node, f"min_acceptance {text[:50]!r} is not a share from 0 to 1")
    return value


def _rule(node: yaml.Node, file: str) -> Rule:
    keys = _mapping(node, file, RULE_KEYS, "a rule")
    if "match" not in keys:
        raise _error(file, node, "a rule needs `match`")
    match = keys["match"]
    nodes = match.value if isinstance(match, yaml.SequenceNode) else [match]
    if len(nodes) > MAX_RULES:
        raise _error(file, match, f"{len(nodes)} patterns, more than {MAX_RULES}")
    patterns = tuple(_scalar(n, file, "match") for n in nodes)
    if not patterns or not all(patterns):
        raise _error(file, match, "`match` must be a pattern or a list of patterns")
    optional = _scalar(keys["optional"], file, "optional") if "optional" in keys else "false"
    if optional not in ("true", "false"):
        raise _error(file, keys["optional"], f"optional {optional!r} must be true or false")
    return Rule(patterns, _precision(keys, node, file), node.start_mark.line + 1, optional == "true")


def _precision(keys: dict[str, yaml.Node], node: yaml.Node, file: str) -> Precision:
    if "dtype" in keys:
        if also := {"mode", "bits", "group_size"} & keys.keys():
            raise _error(file, node, f"`dtype` keeps a tensor as it is; `{sorted(also)[0]}` does not go with it")
        dtype = _scalar(keys["dtype"], file, "dtype")
        if dtype not in KEPT_DTYPES:
            raise _error(file, keys["dtype"], f"dtype {dtype!r} is not one of {', '.join(KEPT_DTYPES)}")
        return Float(KEPT_DTYPES[dtype])
    if missing := {"bits", "group_size"} - keys.keys():
        raise _error(file, node, f"a rule needs `bits` and `group_size`, or `dtype: source`; no `{min(missing)}`")
    numbers = {}
    for key in ("bits", "group_size"):
        text = _scalar(keys[key], file, key)
        if not text.isdecimal() or len(text) > 9:
            raise _error(file, keys[key], f"{key} {text[:50]!r} is not a whole number")
        numbers[key] = int(text)
    mode = _scalar(keys["mode"], file, "mode") if "mode" in keys else "affine"
    try:
        return Quantized(mode, **numbers)
    except RecipeError as e:
        raise _error(file, node, str(e)) from None


def _mapping(node: yaml.Node | None, file: str, known: set[str], what: str) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        at = f", line {node.start_mark.line + 1}" if node and what == "a rule" else ""
        raise RecipeError(f"recipe {file}{at}: {what} must be `key: value` lines")
    keys = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error(file, key, "a key must be one word")
        if key.value not in known:
            raise _error(file, key, f"unknown key {key.value!r}; {what} has {', '.join(sorted(known))}")
        if key.value in keys:
            raise _error(file, key, f"key {key.value!r} twice")
        keys[key.value] = value
    return keys


def _scalar(node: yaml.Node, file: str, key: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _error(file, node, f"`{key}` must be one value")
    if any("\ud800" <= c <= "\udfff" for c in node.value):
        raise _error(file, node, f"`{key}` holds half a surrogate, which is no character")
    return node.value


def _error(file: str, node: yaml.Node, text: str) -> RecipeError:
    return RecipeError(f"recipe {file}, line {node.start_mark.line + 1}: {text}")


def recipe_yaml(recorded: dict) -> str:
    """A recipe, as motif-convert.json records it, as a file that `parse_recipe` reads back as the same."""
    names = {str(Float(dtype)): name for name, dtype in KEPT_DTYPES.items()}
    rules = [rule | ({"dtype": names[rule["dtype"]]} if "dtype" in rule else {}) for rule in recorded["rules"]]
    kept = {k: v for k, v in recorded.items() if v is not None}
    return yaml.safe_dump(kept | {"rules": rules}, sort_keys=False, allow_unicode=True, width=100)
