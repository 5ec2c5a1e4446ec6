"""The steps that commands are made of, each with its progress and its words. What is heavy is imported where used."""

import json
from collections.abc import Callable
from pathlib import Path

import click

SAID = "said"  # of an interruption
NOT_ON_THE_HUB = "--stream is for a source on the Hub; this one is on this machine already"


def convert_source(
    source: str,
    revision: str | None,
    stream: bool,
    bits: str | None,
    recipe: str | None,
    mtp: str | None,
    keep_mtp_fp16: bool,
    experts: str | None,
    out: Path | None,
    workers: int | None,
    allow_nonfinite: bool,
    recheck: bool,
    card_extra: Path | None,
    compare: bool = False,
):
    """Converts, or finds that this is done; with `compare`, each shard is compared with the source on the way.

    Returns:
        The job, the folder, and whether the build is new.
    """
    from ..convert.journal import check_unused
    from ..convert.repo import begun_at, check_is_build_of, is_finished, origin_of
    from ..convert.stream import left_to_mlx
    from ..quantize.errors import CheckError, listing
    from . import card, pipeline
    from .disk import check_space, download_of
    from .progress import Progress
    from .show import experts_sentence, human_bytes, mtp_sentence

    recipe, mtp = recipe_of(bits, recipe), mtp_of(mtp, keep_mtp_fp16)
    extra = card.read_extra(card_extra) if card_extra else None
    out = pipeline.default_out(source, recipe, mtp) if out is None else out
    finished = is_finished(out)
    if not finished:
        check_unused(out)
    if revision is None and (revision := begun_at(out, source)):
        say(f"{out} was begun at commit {revision} of {source}: going on with that one.")
    job = pipeline.prepare(source, recipe, mtp, experts, revision, allow_nonfinite)
    if stream and not job.source.files:
        raise click.UsageError(NOT_ON_THE_HUB)
    if finished:
        renew_card(out, quiet=True)
        check_is_build_of(out, job.plan, origin_of(job.source, job.checkpoint))
        if recheck and (wrong := wrong_files(out)):
            raise CheckError(listing(f"{out}: damaged since it was finished; make it again in another --out", wrong))
        say(f"Complete already: {out}")
        if extra:
            rewrite_card(out, extra)
        return job, out, False
    show_plan(job, out, stream, say)
    check_space(job, out, stream)
    for reason, nbytes in left_to_mlx(job.plan).items():
        say(f"{human_bytes(nbytes)} of source go through mx.quantize, slowly and to the same bytes: {reason}.")
    download = download_of(job, out, stream)
    downloaded = Progress(download.nbytes, "download") if download else None
    compared = Progress(job.source_bytes, "verify") if compare else None
    progress = Progress(job.source_bytes, "convert")
    try:
        made = pipeline.convert(
            job,
            out,
            progress,
            workers,
            stream,
            downloaded or (lambda count, name: None),
            (lambda count: compared(count, "verify")) if compared else None,
            extra,
            (lambda name: say(f"{name} is not what was written any more: it is written again.")) if recheck else None,
        )
    except KeyboardInterrupt:
        say(f"Interrupted. Run the same command again (--out {out}) to go on.")
        raise KeyboardInterrupt(SAID) from None
    finally:
        for bar in (progress, downloaded, compared):
            if bar:
                bar.close()
    say(mtp_sentence(made))
    if made["experts"]["requantized"]:
        say(experts_sentence(made))
    say(f"Written: {out}")
    return job, out, True


def show_plan(job, out: Path, stream: bool, say: Callable[[str], None]) -> None:
    from .disk import disk_lines
    from .show import family_rows, text_table

    if job.source.revision:
        say(f"Source: {job.source.id} at commit {job.source.revision}")
    say(text_table(family_rows(job.plan)))
    shards = len(job.plan.shards)
    say(f"Recipe {job.plan.recipe.name}, MTP head {job.plan.mtp}, {shards} shard{'s' if shards > 1 else ''}.")
    if job.plan.nvfp4:
        say(f"Routed experts: from {job.plan.experts_from}.")
        if job.plan.rounds_twice:
            say("WARNING: --experts affine rounds the NVFP4 experts twice; without it they keep their codes.")
    for file in job.plan.unused:
        say(f"{file}: activation scales, which a weight-only build does not use; not copied.")
    if job.plan.dropped:
        say(f"Dropped on purpose: {len(job.plan.dropped)} tensors of the MTP head (model.mtp_layers.0.*).")
    for line in disk_lines(job, out, stream):
        say(line)


def generate_text(out: Path, prompt: str, max_tokens: int) -> None:
    from ..validate.generate import generate

    click.echo(prompt, nl=False)
    for text in generate(out, prompt, max_tokens):
        click.echo(text, nl=False)
    click.echo()


def rewrite_card(out: Path, extra: str | None) -> None:
    """Writes the card anew."""
    from ..convert.repo import CARD
    from .card import BEFORE, replace_card

    if replace_card(out, extra):
        say(f"{CARD} had been changed by hand; that one is kept as {BEFORE}.")


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


def verify_build(folder: Path, checkpoint, sample: float | None, workers: int | None, quiet: bool = False):
    from ..validate.verify import verify_repo
    from .progress import Progress
    from .show import verification_text

    renew_card(folder, quiet=True)
    progress = Progress(sum(t.nbytes for t in checkpoint.tensors.values()), "verify")
    try:
        found = verify_repo(folder, checkpoint, sample, workers, lambda n: progress(n, "verify"))
    finally:
        progress.close()
    if not quiet:
        click.echo(verification_text(found))
    return found


def verify_streamed(folder: Path, source, checkpoint, workers: int | None, quiet: bool = False):
    """The same, while the source's shards come and go; returns the job too, None if the build's can't be told."""
    from ..validate.verify import verify_repo
    from . import pipeline
    from .disk import check_space_to_verify
    from .progress import Progress
    from .show import verification_text

    renew_card(folder, quiet=True)
    job = pipeline.job_of_build(folder, source, checkpoint)
    if job is None:
        found = verify_repo(folder, checkpoint)  # says why, and compares nothing
    else:
        check_space_to_verify(job, folder)
        shards = {t.shard for t in checkpoint.tensors.values()}
        downloaded = Progress(sum(source.files[s].size for s in shards), "download")
        progress = Progress(job.source_bytes, "verify")
        try:
            found = pipeline.verify_streamed(folder, job, workers, lambda n: progress(n, "verify"), downloaded)
        except KeyboardInterrupt:
            say("Interrupted. Run the same command again to go on.")
            raise KeyboardInterrupt(SAID) from None
        finally:
            progress.close()
            downloaded.close()
    if not quiet:
        click.echo(verification_text(found))
    return found, job


def verified_before(folder: Path) -> bool:
    """Whether the evidence says that all was compared, and the build is still what it was: structure and hashes."""
    from ..validate.evidence import is_verified
    from ..validate.ready import check_structure

    renew_card(folder, quiet=True)
    if not is_verified(folder) or check_structure(folder)[1]:
        return False
    same = not wrong_files(folder)
    if same:
        say("Compared with the source before, and its files have kept their hashes: validation.json stands.")
    return same


def wrong_files(folder: Path) -> list[str]:
    """What motif-convert.json says of a build's files and is not so any more: all are read."""
    from ..validate.contents import digest
    from ..validate.provenance import read_provenance
    from ..validate.ready import check_hashes
    from .progress import Progress

    provenance = read_provenance(folder)
    progress, found = Progress(sum(f.size for f in provenance.files.values()), "check"), {}
    try:
        for name, file in provenance.files.items():
            found[name] = digest(folder / name).sha256
            progress(file.size, name)
    finally:
        progress.close()
    return check_hashes(provenance, found)


def record_verification(folder: Path, result: dict, passed: bool, job=None) -> dict | None:
    """Puts a verification into the build's evidence; where that fails, a failed check still counts for more."""
    from ..quantize.errors import MotifConvertError
    from ..validate.evidence import record

    try:
        evidence = record(folder, "verify", result)
        renew_card(folder)
        if passed and job:
            job.forget()
        if evidence["verify"] != result:
            say("validation.json keeps the whole verification of before; this one does not renew it.")
        return evidence
    except MotifConvertError as e:
        if passed:
            raise
        say(f"Not recorded: {e}")
        return None


def smoke_build(folder: Path, minimum: float | None, quiet: bool = False, **options) -> dict:
    from .pipeline import smoke as run
    from .show import smoke_text

    evidence = run(folder, minimum, say, **options)
    renew_card(folder)
    if not quiet:
        click.echo(smoke_text(evidence["smoke"]))
    return evidence


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


def recipe_of(bits: str | None, recipe: str | None) -> str:
    from .recipe import BITS as RECIPES

    if bits and recipe is not None:
        raise click.UsageError("--bits and --recipe both choose the recipe; give one of them")
    return RECIPES[bits or "4.5"] if recipe is None else recipe


def mtp_of(mtp: str | None, keep_mtp_fp16: bool) -> str | None:
    if keep_mtp_fp16 and mtp not in (None, "fp16"):
        raise click.UsageError(f"--keep-mtp-fp16 is --mtp fp16; it does not go with --mtp {mtp}")
    return "fp16" if keep_mtp_fp16 else mtp


def say(text: str) -> None:
    click.echo(text, err=True)
