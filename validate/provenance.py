"""motif-convert.json read back: what a build says of itself, and the plan that this means."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..convert.checkpoint import INDEX, Checkpoint, read_json
from ..convert.config import MODEL_FILE
from ..convert.journal import JOURNAL
from ..convert.plan import Plan
from ..convert.planner import make_plan
from ..convert.repo import PROVENANCE, PROVENANCE_FORMAT
from ..convert.shards import Written
from ..quantize.errors import MotifConvertError, RecipeError, SourceError, quoted
from ..quantize.policy import MTP_POLICIES, Recipe, Rule
from ..quantize.precision import FLOAT_DTYPES, UNPACKED, Float, Quantized


@dataclass(frozen=True)
class Provenance:
    """What verify needs of motif-convert.json, in types that can be relied on.

    Args:
        made: all of it.
        mtp: the policy; None for a source without a head.
        requantize: whether NVFP4 experts were to be quantized again.
        files: name -> size and sha256.
    """

    made: dict
    recipe: Recipe
    mtp: str | None
    requantize: bool
    files: dict[str, Written]


def check_is_build(out: Path) -> None:
    """Refuses what is not a build at all, not even a broken one. Raises SourceError."""
    if not out.is_dir():
        raise SourceError(f"{out}: no such folder")
    if not os.path.lexists(out / PROVENANCE):
        if os.path.lexists(out / JOURNAL):
            raise SourceError(f"{out}: an unfinished build; run the command that makes it again")
        raise SourceError(f"{out}: not a build of motif-convert: it has no {PROVENANCE}")


def read_provenance(out: Path) -> Provenance:
    """Reads motif-convert.json.

    Raises:
        SourceError: it can't be read, or lacks what it has to say.
    """
    made, _ = read_json(out / PROVENANCE)
    try:
        if made["format"] != PROVENANCE_FORMAT:
            raise SourceError(f"{PROVENANCE}: format {made['format']!r}; this version reads {PROVENANCE_FORMAT}")
        policy = made["mtp"]["policy"]
        if policy not in (*MTP_POLICIES, "none"):
            raise SourceError(f"{PROVENANCE}: mtp policy {policy!r} is not known")
        made["source"]["config_sha256"], made["source"]["index_sha256"]
        if odd := [name for name in made["files"] if "/" in name or name.startswith(".") or not name.isprintable()]:
            raise SourceError(f"{PROVENANCE}: lists '{quoted(odd[0])}', which is no file of a build")
        return Provenance(
            made=made,
            recipe=_recipe(made["recipe"]),
            mtp=None if policy == "none" else policy,
            requantize=bool(made["experts"].get("requantize", False)),
            files={str(name): Written(int(f["size"]), str(f["sha256"])) for name, f in made["files"].items()},
        )
    except (RecipeError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        what = f"no {e}" if isinstance(e, KeyError) else e
        raise SourceError(f"{PROVENANCE}: is not what motif-convert writes ({what})") from None


def _recipe(recorded: dict) -> Recipe:
    rules = []
    for number, rule in enumerate(recorded["rules"], 1):
        if "dtype" in rule:
            if rule["dtype"] not in ("source", UNPACKED, *FLOAT_DTYPES):
                raise ValueError(f"dtype {rule['dtype']!r} in its recipe")
            precision = Float(None if rule["dtype"] == "source" else rule["dtype"])
        else:
            precision = Quantized(rule["mode"], rule["bits"], rule["group_size"])
            if type(precision.bits) is not int or type(precision.group_size) is not int:
                raise ValueError(f"rule {number} of its recipe has numbers that are not whole")
        rules.append(Rule(tuple(map(str, rule["match"])), precision, number, bool(rule.get("optional", False))))
    if recorded["mtp"] not in MTP_POLICIES:
        raise ValueError(f"mtp {recorded['mtp']!r} in its recipe")
    least = recorded.get("min_acceptance")
    if least is not None and not (type(least) in (int, float) and 0 <= least <= 1):
        raise ValueError(f"min_acceptance {least!r} in its recipe")
    return Recipe(
        name=str(recorded["name"]),
        description=str(recorded["description"]),
        mtp=recorded["mtp"],
        rules=tuple(rules),
        file=PROVENANCE,
        min_acceptance=least,
    )


def other_source(provenance: Provenance, checkpoint: Checkpoint) -> list[str]:
    """Why the checkpoint is not the one that the build was made from, by its recorded hashes."""
    source = provenance.made["source"]
    name, revision = source.get("id"), source.get("revision")
    made_from = f"{name}{f' at {revision}' if revision else ''}"
    folder = checkpoint.folder.resolve().name
    return [
        f"{folder}: another source: {file} has sha256 {found}, the build was made from {recorded} ({made_from})"
        for file, recorded, found in (
            ("config.json", source["config_sha256"], checkpoint.config_sha256),
            ("the index", source["index_sha256"], checkpoint.index_sha256),
        )
        if recorded != found
    ]


def planned(provenance: Provenance, checkpoint: Checkpoint) -> tuple[Plan | None, list[str]]:
    """The plan of the source with the recorded recipe and policies, and what motif-convert.json says otherwise."""
    try:
        plan = make_plan(checkpoint, provenance.recipe, provenance.mtp, provenance.requantize)
    except MotifConvertError as e:
        return None, [f"{PROVENANCE}: its recipe can't be planned again: {one_line(e)}"]
    made = provenance.made
    claims = (
        ("plan_hash", made.get("plan_hash"), plan.plan_hash),
        ("mtp.policy", made["mtp"]["policy"], plan.mtp),
        ("mtp.dtype", made["mtp"].get("dtype"), plan.config_keys().get("mtp_dtype")),
        ("mtp.compute_dtype", made["mtp"].get("compute_dtype"), plan.config_keys().get("mtp_compute_dtype")),
        ("mtp.dropped", made["mtp"].get("dropped"), [name for name, _ in plan.dropped]),
        ("experts.from", made["experts"].get("from"), plan.experts_from),
        ("total_bytes", made.get("total_bytes"), plan.total_bytes),
        ("total_parameters", made.get("total_parameters"), plan.total_parameters),
        ("bits_per_weight", made.get("bits_per_weight"), plan.bits_per_weight),
    )
    problems = [
        f"{PROVENANCE}: {key} is {said!r}, source and recipe give {true!r}"
        for key, said, true in claims
        if said != true
    ]
    needed = (*plan.shards, INDEX, "config.json", MODEL_FILE)
    return plan, problems + [f"{PROVENANCE}: does not list {f}" for f in needed if f not in provenance.files]


def one_line(error: Exception) -> str:
    """A message and what it lists, in one line."""
    return " ".join(str(error).split()).replace(": - ", ": ").replace(" - ", "; ")
