"""The steps that commands are made of, each with its progress and its words. What is heavy is imported where used."""

import importlib.metadata
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from ..convert.ranks import ALONE, Ranks, check_agreed, check_shared, join, name_of_rank

SAID = "said"  # of an interruption
MOST_TORCH = 1024  # tokens; it is the slow engine
NOT_ON_THE_HUB = "--stream is for a source on the Hub; this one is on this machine already"


def generate_text(out: Path, prompt: str, max_tokens: int) -> None:
    from ..validate.generate import generate

    click.echo(prompt, nl=False)
    for text in generate(out, prompt, max_tokens):
        click.echo(text, nl=False)
    click.echo()


def rewrite_card(out: Path, extra: str | None) -> None:
    """Writes the card anew."""
    from .card import replace_card

    say_kept(replace_card(out, extra))


def say_kept(name: str | None) -> None:
    from ..convert.repo import CARD

    if name:
        say(f"{CARD} had been changed by hand; that one is kept as {name}.")


def renew_card(out: Path, quiet: bool = False) -> None:
    """Puts all the evidence there is into the card, or ends what a kill has left half done of that."""
    from ..convert.repo import CARD
    from ..quantize.errors import MotifConvertError
    from .card import renew_card as renew

    try:
        done = renew(out)
    except MotifConvertError as e:
        if not quiet:
            say(f"{CARD} is left as it is: {e}")
        return
    if not done and not quiet:
        say(f"{CARD} was changed by hand and is left as it is; `motif-convert card {out}` writes it anew.")


def open_source_of(folder: Path, source: str | None, revision: str | None):
    """Finds and opens what a build was made from: as given, or as the build names it."""
    from .pipeline import open_source, source_of

    if revision and not source:
        raise click.UsageError("--revision goes with --source")
    return open_source(*((source, revision) if source else source_of(folder)))


def fetch(source, checkpoint) -> None:
    """Brings what a Hub source lacks here."""
    from .pipeline import fetch_shards
    from .progress import Progress

    shards = {t.shard for t in checkpoint.tensors.values()}
    if source.files:
        progress = Progress(sum(source.files[s].size for s in shards), "download")
        try:
            fetch_shards(source, shards, progress)
        finally:
            progress.close()


def smoke_build(folder: Path, minimum: float | None, ranks: Ranks = ALONE, quiet: bool = False, **options) -> dict:
    from ..validate.provenance import check_is_build, read_provenance
    from .show import smoke_text
    from .smoking import smoke as run

    if ranks.several:
        if options["compare_mtp"]:
            raise click.UsageError("--compare-mtp is for one process")
        check_is_build(folder)
        check_agreed(ranks, {"build": read_provenance(folder).made["plan_hash"]})
    evidence = run(folder, minimum, say, ranks=ranks, **options)
    if ranks.first:
        renew_card(folder)
    if not quiet:
        click.echo(smoke_text(evidence["smoke"]))
    return evidence


def evaluate_build(
    folder: Path,
    origin,
    checkpoint,
    text: Path | None,
    tokens: int | None,
    window: int,
    max_kl: float | None,
    min_top1: float | None,
    ranks: Ranks,
    **options,
) -> dict | None:
    """Compares a build's words with its source's, and records it; of several ranks the first does."""
    if options["engine"] == "torch":
        if ranks.several:
            raise click.UsageError("--engine torch is for one process")
        if options["dtype"] != "float32":
            raise click.UsageError("--engine torch computes in float32; it does not go with --dtype")
        tokens = MOST_TORCH // 2 if tokens is None else tokens
        if tokens > MOST_TORCH:
            raise click.UsageError(f"--engine torch is a second opinion on {MOST_TORCH} tokens at most; give --tokens")
    from ..convert.repo import origin_of
    from ..validate.corpus import make_corpus, read_texts
    from ..validate.eval_state import forget
    from ..validate.evaluation import evaluate, gated, kept_folder, memory_needed, parameters_of
    from ..validate.evidence import record
    from ..validate.loading import encoder
    from .progress import Progress
    from .show import human_bytes

    parameters = parameters_of(folder, checkpoint)
    source = origin_of(origin, checkpoint)["fingerprint"]
    facts = {"source": source, "plan of this build": parameters.plan.plan_hash}
    check_agreed(ranks, facts | {f"--{name}": value for name, value in options.items()})
    check_shared(ranks, folder)
    encode, vocabulary = encoder(folder), checkpoint.config["vocab_size"]
    if encode is None:
        say("The source has no tokenizer: the bytes of the text stand for tokens.")
    encode = encode or (lambda t: [b % vocabulary for b in t.encode()])
    corpus = make_corpus(read_texts(text), encode, vocabulary, window, tokens)
    check_agreed(ranks, {"text": corpus.digest})
    *windows, single = corpus.batches
    say(
        f"{sum(b.size for b in windows):,} tokens in {sum(map(len, windows)):,} windows, {single.size} alone; about "
        f"{human_bytes(memory_needed(checkpoint, corpus, options['dtype'], options['engine']))} of memory."
    )
    sources = 2 if options["engine"] == "torch" else 1
    total = sources * checkpoint_bytes(checkpoint) + sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    asked = {name: options[name] for name in ("engine", "dtype", "lens")}
    kept = kept_folder(folder, source, parameters.plan, corpus, **asked)
    progress = Progress(total, "eval")
    try:
        result = evaluate(
            folder, checkpoint, parameters, corpus, kept, say=say, progress=progress, ranks=ranks, **options
        )
    except KeyboardInterrupt:
        say("Interrupted. Run the same command again to go on after the last layer.")
        raise KeyboardInterrupt(SAID) from None
    finally:
        progress.close()
    if result is None:
        return None
    result = gated(result, max_kl, min_top1)
    record(folder, "eval_torch" if options["engine"] == "torch" else "eval", result)
    forget(kept)
    renew_card(folder)
    return result


def checkpoint_bytes(checkpoint) -> int:
    return sum(t.nbytes for t in checkpoint.tensors.values())


def show_evidence(out: Path, evidence: dict) -> None:
    from ..validate.evidence import EVIDENCE, PICTURE
    from ..validate.inspect import inspect_repo
    from .show import evidence_rows, text_table

    click.echo(text_table(evidence_rows(inspect_repo(out), evidence)))
    say(f"Evidence: {out / EVIDENCE} and {out / PICTURE}")


def upload_build(folder, target, again: str, force: bool = False, dry_run: bool = False, as_json: bool = False) -> bool:
    from .upload import ending_at_once, push_text, upload_text
    from .upload import upload as run

    with ending_at_once(f"Interrupted. Run {again} again to go on; what has arrived is not sent again."):
        done = run(folder, target, force, dry_run, say, lambda p: None if as_json else click.echo(push_text(p)))
    click.echo(json.dumps(done.as_dict(), indent=1) if as_json else upload_text(done))
    if done.problems and done.plan and not done.pushed:
        first = f"Run `motif-convert verify {folder}` first. " if "verify not run" in done.problems[0] else ""
        say(f"{first}--force publishes it all the same, and records that.")
    return not done.problems


def target_of_build(no_verify: bool, upload: str | None, private: bool, create_pr: bool):
    """Where the build that is to be made goes, asked before hours of work; None if nowhere."""
    if upload is None:
        if private or create_pr:
            raise click.UsageError(f"{'--private' if private else '--create-pr'} goes with --upload REPO")
        return None
    if no_verify:
        raise click.UsageError("--upload publishes what was verified; it does not go with --no-verify")
    from .upload import target_of

    return target_of(upload, None, create_pr, private, say)


def recipe_of(bits: str | None, recipe: str | None) -> str:
    from .recipe import BITS as RECIPES

    if bits and recipe is not None:
        raise click.UsageError("--bits and --recipe both choose the recipe; give one of them")
    return RECIPES[bits or "4.5"] if recipe is None else recipe


def mtp_of(mtp: str | None, keep_mtp_fp16: bool) -> str | None:
    if keep_mtp_fp16 and mtp not in (None, "fp16"):
        raise click.UsageError(f"--keep-mtp-fp16 is --mtp fp16; it does not go with --mtp {mtp}")
    return "fp16" if keep_mtp_fp16 else mtp


def join_ranks(local: bool = False) -> Ranks:
    """This process among those of mlx.launch, which run the same; of several only rank 0 speaks, but for errors.

    Args:
        local: see `Ranks`.
    """
    ranks = replace(join(), local=local)
    if local and not ranks.several:
        raise click.UsageError("--local is for several ranks, which mlx.launch starts")
    facts = {f"version of {name}": importlib.metadata.version(name) for name in ("motif-convert", "mlx")}
    check_agreed(ranks, facts | {"command": click.get_current_context().info_name})
    if not ranks.first:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, it stays open
    return ranks


def say(text: str) -> None:
    click.echo(text, err=True)


def say_error(what: object) -> None:
    """The last line; of a rank of several, which one it is."""
    click.echo(f"motif-convert: error: {name_of_rank()}{what}", file=sys.__stderr__)
