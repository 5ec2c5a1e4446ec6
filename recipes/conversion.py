"""The conversion as a step: begun, gone on with, complete, or made again. What is heavy is imported where used."""

from collections.abc import Callable, Collection
from pathlib import Path

import click

from ..convert.ranks import ALONE, Ranks, check_agreed, check_own
from .steps import NOT_ON_THE_HUB, SAID, mtp_of, recipe_of, renew_card, rewrite_card, say, say_kept


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
    ranks: Ranks = ALONE,
):
    """Converts, or finds that this is done; with `compare`, each shard is compared with the source on the way.

    Of several ranks each calls it, and converts a part.

    Returns:
        The job, the folder, and whether the build is new.
    """
    from ..convert.journal import check_unused, finished_shards
    from ..convert.parts import part_of
    from ..convert.repo import CARD, begun_at, check_is_build_of, is_finished, open_again, origin_of
    from ..convert.stream import left_to_mlx
    from ..quantize.errors import OutputError
    from . import card, pipeline
    from .disk import check_space, download_of
    from .progress import Progress
    from .show import experts_sentence, human_bytes, mtp_sentence

    recipe, mtp = recipe_of(bits, recipe), mtp_of(mtp, keep_mtp_fp16)
    extra = card.read_extra(card_extra) if card_extra else None
    out = pipeline.default_out(source, recipe, mtp) if out is None else out
    finished = is_finished(out)
    try:
        if not finished:
            check_unused(out)
    except OutputError:
        finished = is_finished(out)  # by another run, between the two looks
        if not finished:
            raise
    if revision is None and (revision := begun_at(out, source)):
        say(f"{out} was begun at commit {revision} of {source}: going on with that one.")
    job = pipeline.prepare(source, recipe, mtp, experts, revision, allow_nonfinite)
    if stream and not job.source.files:
        raise click.UsageError(NOT_ON_THE_HUB)
    agree(ranks, job, finished)
    if ranks.local:
        check_own(ranks, out)
    wrong = []
    if finished and (ranks.first or ranks.local):
        renew_card(out, quiet=True)
        origin = origin_of(job.source, job.checkpoint)
        elsewhere = job.plan.shards.keys() - part_of(job.plan, ranks) if ranks.local else set()
        wrong = [n for n in damaged_files(out, elsewhere) if n != CARD] if recheck else []
        check_is_build_of(out, job.plan, origin, [*wrong, *elsewhere])
        if wrong:
            say_kept(card.put_aside(out))
            say(f"Complete, but not what was written any more, and made again: {', '.join(wrong)}.")
            with job.checkpoint as checkpoint:
                open_again(out, job.plan, checkpoint, origin, wrong)
    if not any(ranks.gather(bool(wrong) or not finished)):
        say(f"Complete already: {out}")
        if extra and (ranks.first or ranks.local):
            rewrite_card(out, extra)
        return job, out, False
    if finished and ranks.local and not wrong:  # here, but not on another rank
        with job.checkpoint as checkpoint:
            open_again(out, job.plan, checkpoint, origin, [])
    show_plan(job, out, stream, say)
    if (begun := finished_shards(out)) is not None:
        say(f"Going on with an interrupted run: {begun} of {len(job.plan.shards)} shards are finished.")
    check_space(job, out, stream, ranks)
    for reason, nbytes in left_to_mlx(job.plan).items():
        say(f"{human_bytes(nbytes)} of source go through mx.quantize, slowly and to the same bytes: {reason}.")
    download = download_of(job, out, stream, ranks)
    downloaded = Progress(download.nbytes, "download") if download else None
    compared = Progress(job.source_bytes, "verify") if compare else None
    mine = [m for name in part_of(job.plan, ranks) for m in job.plan.shards[name]]
    progress = Progress(sum(m.source_nbytes for m in mine), "convert")
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
            ranks,
        )
    except KeyboardInterrupt:
        say(f"Interrupted. Run the same command again (--out {out}) to go on.")
        raise KeyboardInterrupt(SAID) from None
    except OutputError:
        if not is_finished(out):
            raise
        check_is_build_of(out, job.plan, origin_of(job.source, job.checkpoint))
        say(f"Complete already, by another run: {out}")
        return job, out, False
    finally:
        for bar in (progress, downloaded, compared):
            if bar:
                bar.close()
    say(mtp_sentence(made))
    if made["experts"]["requantized"]:
        say(experts_sentence(made))
    say(f"Written: {out}")
    return job, out, True


def agree(ranks: Ranks, job, finished: bool) -> None:
    """Refuses ranks that would not make the same build."""
    from ..convert.repo import origin_of

    if ranks.several:
        facts = {"recipe": job.plan.recipe.name}
        facts |= {"MTP policy": job.plan.mtp, "source": origin_of(job.source, job.checkpoint)["fingerprint"]}
        facts |= {"plan": job.plan.plan_hash}
        if not ranks.local:
            facts["state of --out"] = "finished" if finished else "not finished"
        check_agreed(ranks, facts)


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


def verified_before(folder: Path) -> bool:
    """Whether the evidence says that all was compared, and the build is still what it was: structure and hashes."""
    from ..validate.evidence import is_verified
    from ..validate.ready import check_structure

    renew_card(folder, quiet=True)
    if not is_verified(folder) or check_structure(folder)[1]:
        return False
    same = not damaged_files(folder)
    if same:
        say("Compared with the source before, and its files have kept their hashes: validation.json stands.")
    return same


def damaged_files(folder: Path, elsewhere: Collection[str] = ()) -> list[str]:
    """The files of a build that are missing, or not what motif-convert.json says: all are read but those elsewhere."""
    from ..validate.contents import digest
    from ..validate.provenance import read_provenance
    from .progress import Progress

    files, wrong = {n: f for n, f in read_provenance(folder).files.items() if n not in elsewhere}, []
    progress = Progress(sum(f.size for f in files.values()), "check")
    try:
        for name, file in files.items():
            if digest(folder / name).sha256 != file.sha256:
                wrong.append(name)
            progress(file.size, name)
    finally:
        progress.close()
    return wrong
