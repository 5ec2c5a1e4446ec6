"""The MLX repository: shards, and all that stands beside them. It looks whole only when it is."""

import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

from ..quantize.errors import OutputError, SourceError, quoted
from .checkpoint import INDEX, Checkpoint, read_json, read_whole
from .config import MODEL_FILE, built_config, own_model_file
from .fingerprint import fingerprint
from .hub import Source
from .journal import (
    JOURNAL,
    OF_A_RANK,
    check_unused,
    fresh_journal,
    open_journal,
    other_run,
    part_of_run,
    share_run,
    sole_run,
)
from .losses import Losses, cast_modules, check_casts, requantization, requantization_errors
from .nvfp4 import check_expert_scales
from .parts import part_of
from .plan import Plan
from .ranks import ALONE, Ranks, check_shared
from .shards import Written, as_json, index_json, write_file
from .stream import Inspection, write_shards
from .supply import AtHand, Downloads

PROVENANCE, CARD = "motif-convert.json", "README.md"
PROVENANCE_FORMAT = 1

# What is copied byte for byte; nothing else of a source is.
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "*.tiktoken", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "LICENSE*", "LICENCE*", "NOTICE*",
)  # fmt: skip


def write_repo(
    plan: Plan,
    checkpoint: Checkpoint,
    source: Source,
    out: Path,
    card: Callable[[dict], str],
    card_facts: dict,
    progress: Callable[[int, str], None],
    workers: int | None = None,
    supply: AtHand | Downloads | None = None,
    inspection: Inspection | None = None,
    recheck: Callable[[str], None] | None = None,
    ranks: Ranks = ALONE,
) -> dict:
    """Converts `checkpoint` into the MLX repository `out`, or goes on with an interrupted run.

    config.json is written last: without it no loader takes the folder for a model. Several ranks, of which each calls
    this, write a part of the shards each; rank 0 writes all else, or, if each has its own folder, each of them does.

    Args:
        card: makes the model card of motif-convert.json, which has all but `files` then.
        card_facts: JSON that the card needs beside, kept in motif-convert.json as `card`.
        progress: called with bytes of source done and the name of the shard.
        workers: threads that read and quantize; None for `default_threads`.
        supply: brings the source's shards; None where they are at hand.
        inspection, recheck: see `write_shards`.
        ranks: this process among those that share the work.
    Returns:
        motif-convert.json.
    Raises:
        SourceError: the source could not be read, or holds a value that does not fit.
        OutputError: the folder is in use, or could not be written.
        CheckError: by the inspection.
    """
    if checkpoint.folder.resolve() in out.resolve().parents:
        raise OutputError(f"{out}: lies in the folder of the source; choose another --out")
    supply, mine = supply or AtHand(), part_of(plan, ranks)
    if not ranks.first and not ranks.local:
        return _write_part(plan, checkpoint, source, out, mine, progress, workers, supply, recheck, ranks)
    if isinstance(supply, AtHand):  # else every output's scales before it is written
        check_expert_scales(checkpoint, sorted({m.source for m in plan.modules if m.source_dtype == "NVFP4"}))
    check_unused(out)
    origin = origin_of(source, checkpoint)
    with sole_run(out) as lock:
        if not ranks.local:
            check_shared(ranks, out)
        journal = open_journal(out, plan, version("motif-convert"), origin)
        try:
            supply.have(frozenset(checkpoint.tensors[s].shard for m in cast_modules(plan) for s in m.sources))
            casts = check_casts(plan, checkpoint)
            copied = {p.name: read_whole(p) for p in _to_copy(checkpoint.folder)}
            if ranks.several and not ranks.local:
                share_run(lock)
                ranks.told(journal.done)
            write_shards(plan, checkpoint, journal, progress, workers, supply, inspection, recheck, mine)
        except SourceError:
            journal.discard()
            raise
        supply.close()
        for done in ranks.gather(journal.done):
            journal.add(done)
        if not ranks.local:
            journal.take_in([out / OF_A_RANK.format(rank) for rank in range(1, ranks.size)])
        losses = Losses(casts, requantization(plan, journal.requantized))
        made = _provenance(plan, origin, losses) | {"card": card_facts}
        contents = copied | {
            MODEL_FILE: own_model_file(),
            CARD: card(made).encode(),
            INDEX: index_json(plan),
        }
        if not journal.finishing:
            _check_no_strangers(out, [*contents, PROVENANCE, "config.json"])
            journal.finishing = True
            journal.save()
        config = as_json(built_config(checkpoint.config, plan.quantized, plan.dominant, plan.config_keys()))
        written = journal.shards | {name: write_file(out / name, data) for name, data in contents.items()}
        written["config.json"] = Written.of(config)
        made["files"] = {name: written[name].as_dict() for name in sorted(written)}
        write_file(out / PROVENANCE, as_json(made))
        write_file(out / "config.json", config)
        journal.remove()
        for name in made["files"]:  # of a run that was killed while it made one of them anew
            (out / f".{name}.partial").unlink(missing_ok=True)
    return ranks.told(made)


def _write_part(
    plan: Plan,
    checkpoint: Checkpoint,
    source: Source,
    out: Path,
    mine: list[str],
    progress: Callable[[int, str], None],
    workers: int | None,
    supply: AtHand | Downloads,
    recheck: Callable[[str], None] | None,
    ranks: Ranks,
) -> dict:
    """What a rank other than the first does of `write_repo`."""
    origin = origin_of(source, checkpoint)
    check_shared(ranks, out)
    before = ranks.told()
    with part_of_run(out):
        journal = fresh_journal(out, plan, version("motif-convert"), origin, ranks.rank)
        journal.add(before, mine)
        write_shards(plan, checkpoint, journal, progress, workers, supply, None, recheck, mine)
        supply.close()
        ranks.gather(journal.done)
    return ranks.told()


def _check_no_strangers(out: Path, names: list[str]) -> None:
    if strangers := [name for name in names if os.path.lexists(out / name)]:
        raise OutputError(
            f"{out / strangers[0]}: stands where this run has to write, and is not its own; move it away and run the "
            "same command again"
        )


def open_again(out: Path, plan: Plan, checkpoint: Checkpoint, origin: dict, wrong: list[str]) -> None:
    """Makes an interrupted run of a finished build of which some files are not what was written: they are removed.

    Args:
        wrong: names of files that `write_repo` writes.
    Raises:
        OutputError: the folder could not be written.
    """
    made, _ = read_json(out / PROVENANCE)
    with sole_run(out):
        journal = fresh_journal(out, plan, version("motif-convert"), origin)
        journal.finishing = True
        for name, modules in plan.shards.items():
            if name not in wrong:
                journal.shards[name] = Written(**made["files"][name])
                journal.requantized |= requantization_errors(modules, checkpoint)
        journal.save()
        for name in ("config.json", PROVENANCE, *wrong):
            (out / name).unlink(missing_ok=True)


def origin_of(source: Source, checkpoint: Checkpoint) -> dict:
    """`id`, `revision` and `fingerprint` of a source, as journal and provenance have them. Raises SourceError."""
    shards = {t.shard for t in checkpoint.tensors.values()}
    return {"id": source.id, "revision": source.revision, "fingerprint": fingerprint(source, shards)}


def begun_at(out: Path, source: str) -> str | None:
    """The commit of a Hub repository at which a build of it was begun, or finished, in a folder; None if none was."""
    for path in (p for p in (out / JOURNAL, out / PROVENANCE) if p.is_file()):
        try:
            origin = read_json(path)[0]["source"]
            if origin["id"] == source:
                return str(origin["revision"]) if origin["revision"] else None
        except (SourceError, KeyError, TypeError):
            continue
    return None


def is_finished(out: Path) -> bool:
    """Whether a folder holds a build that a conversion has finished."""
    return not (out / JOURNAL).exists() and (out / PROVENANCE).is_file()


def check_is_build_of(out: Path, plan: Plan, origin: dict, damaged: Sequence[str] = ()) -> None:
    """Refuses a finished build that this version would not have written by this plan, or that lacks files.

    Args:
        origin: see `origin_of`.
        damaged: files that may be missing or of another size.
    Raises:
        OutputError: naming the folder.
    """
    made, _ = read_json(out / PROVENANCE)
    try:
        theirs = {"recipe": made["recipe"]["name"], "mtp": made["mtp"]["policy"], "plan_hash": made["plan_hash"]}
        theirs["source"] = {"fingerprint": made["source"]["fingerprint"]}
        theirs["allow_nonfinite"] = made["allow_nonfinite"]
        theirs["version"], sizes = made["converter"]["version"], {n: f["size"] for n, f in made["files"].items()}
    except (KeyError, TypeError, AttributeError):
        raise OutputError(f"{out}: its {PROVENANCE} is not what motif-convert writes; choose another --out") from None
    mine = {"version": version("motif-convert"), "recipe": plan.recipe.name, "mtp": plan.mtp}
    mine["allow_nonfinite"] = plan.allow_nonfinite
    if differs := other_run(theirs, mine | {"plan_hash": plan.plan_hash, "source": origin}):
        raise OutputError(
            f"{out}: holds a finished build with {differs}, and nothing in it is overwritten; choose another --out"
        )
    for name, size in sizes.items():
        if name in damaged or (name == CARD and (out / CARD).is_file()):  # that may be changed by hand
            continue
        if not (out / name).is_file() or (out / name).stat().st_size != size:
            raise OutputError(
                f"{out}: a finished build whose {name} is missing or of another size; the same command with --recheck "
                "makes it again"
            )


def _to_copy(folder: Path) -> list[Path]:
    try:
        found = (p for p in folder.iterdir() if any(fnmatchcase(p.name, pattern) for pattern in COPIED))
        paths = sorted(p for p in found if not p.is_dir())
        if odd := [p.name for p in paths if not p.name.isprintable()]:
            raise SourceError(f"{folder}: the name of {quoted(odd[0])} is no plain text; rename or remove it")
        return paths
    except OSError as e:
        raise OutputError(f"{folder}: could not be read: {e.strerror}") from None


def _provenance(plan: Plan, origin: dict, losses: Losses) -> dict:
    keys = plan.config_keys()
    return {
        "format": PROVENANCE_FORMAT,
        "converter": {"name": "motif-convert", "version": version("motif-convert")},
        "source": origin | {"config_sha256": plan.config_sha256, "index_sha256": plan.index_sha256},
        "recipe": plan.recipe.as_dict(),
        "mtp": {
            "policy": plan.mtp,
            "dtype": keys.get("mtp_dtype"),
            "compute_dtype": keys.get("mtp_compute_dtype"),
            "dropped": [name for name, _ in plan.dropped],
            "casts": losses.casts.as_dict() if losses.casts else None,
        },
        "experts": {
            "from": plan.experts_from,
            "requantize": plan.requantize,
            "requantized": losses.requantized.as_dict() if losses.requantized else None,
        },
        "allow_nonfinite": plan.allow_nonfinite,
        "plan_hash": plan.plan_hash,
        "total_bytes": plan.total_bytes,
        "total_parameters": plan.total_parameters,
        "bits_per_weight": plan.bits_per_weight,
    }
