"""The smoke test as a stage: a build is loaded, decodes, and what that shows is recorded."""

from collections.abc import Callable
from pathlib import Path

from ..convert.planner import make_plan
from ..convert.ranks import ALONE, Ranks
from ..quantize.errors import RecipeError
from ..quantize.policy import MTP_POLICIES
from ..validate.provenance import check_is_build, read_provenance
from .pipeline import fetch_shards, open_source, source_of


def smoke(
    folder: Path,
    minimum: float | None,
    say: Callable[[str], None],
    tokens: int = 64,
    drafts: int = 1,
    temperature: float = 0.8,
    prompts: Path | None = None,
    text: Path | None = None,
    dtype: str | None = None,
    seed: int = 0,
    compare_mtp: str | None = None,
    source: str | None = None,
    ranks: Ranks = ALONE,
) -> dict:
    """Decodes with a build on this machine's default device and records what that shows.

    Args:
        minimum: acceptance to fail below; None for the recipe's.
        compare_mtp: MTP policies, separated by commas, to compare on the build's body.
        ranks: those that share the build's layers; all of them decode, rank 0 records.
    Returns:
        The build's evidence; on ranks other than the first what was measured.
    """
    from ..validate.evidence import record
    from ..validate.smoke import load_build, read_prompts, read_text
    from ..validate.smoke import smoke as run

    check_is_build(folder)
    recipe = read_provenance(folder).recipe
    minimum = recipe.min_acceptance if minimum is None else minimum
    asked, corpus = read_prompts(prompts), read_text(text)
    policies = _policies(compare_mtp)
    checkpoint = None
    if policies:
        found, checkpoint = open_source(*((source, None) if source else source_of(folder)))
        head = {t.shard for t in checkpoint.tensors.values() if ".mtp_layers." in t.name}
        fetch_shards(found, head, lambda count, name: say(f"{name}: downloaded") if name else None)
    with ranks.decoding() as group:
        build = load_build(folder, dtype, group)
        result = run(build, asked, corpus, tokens, drafts, temperature, minimum, seed, say)
    if ranks.several:
        result["device"] = f"{ranks.size} x {result['device']}"
    if not ranks.first:
        return {"smoke": result}
    evidence = record(folder, "smoke", result)
    if policies:
        from ..validate.heads import compare_heads

        plans = {policy: make_plan(checkpoint, recipe, policy) for policy in policies}
        rows = compare_heads(build, plans, checkpoint, asked, corpus, tokens, drafts, temperature, say)
        evidence = record(folder, "heads", rows)
    return evidence


def _policies(listed: str | None) -> list[str]:
    known = [p for p in MTP_POLICIES if p != "drop"]
    policies = [] if listed is None else [p.strip() for p in listed.split(",")]
    if wrong := [p for p in policies if p not in known]:
        raise RecipeError(f"--compare-mtp: {wrong[0]!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(policies))
