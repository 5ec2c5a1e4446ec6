"""Verification as steps, each with its progress and its words. What is heavy is imported where used."""

import json
from pathlib import Path

import click

from ..convert.ranks import Ranks, check_agreed, check_shared
from .steps import NOT_ON_THE_HUB, SAID, checkpoint_bytes, fetch, join_ranks, open_source_of, renew_card, say


def check(
    folder: Path,
    source: str | None,
    revision: str | None,
    stream: bool,
    local: bool,
    sample: float | None,
    workers: int | None,
    as_json: bool,
) -> bool:
    """The command `verify`: whether a build passes, which is recorded."""
    if stream and sample is not None:
        raise click.UsageError("--stream fetches every shard; it does not go with --sample")
    ranks = join_ranks(local)
    if ranks.several and sample is not None:
        raise click.UsageError("--sample is a quick look, by one process")
    origin, checkpoint = open_source_of(folder, source, revision)
    if stream and not origin.files:
        raise click.UsageError(NOT_ON_THE_HUB)
    if ranks.several:
        found, job = verify_with(ranks, folder, origin, checkpoint, workers, stream, quiet=as_json)
    elif stream:
        found, job = verify_streamed(folder, origin, checkpoint, workers, quiet=as_json)
    else:
        fetch(origin, checkpoint)
        job = None
        found = verify_build(folder, checkpoint, sample, workers, quiet=as_json)
    if found and as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
    if found:
        record_verification(folder, found.as_dict(), found.passed, job, local)
    return ranks.told(bool(found and found.passed))


def verify_build(folder: Path, checkpoint, sample: float | None, workers: int | None, quiet: bool = False):
    from ..validate.verify import verify_repo
    from .progress import Progress
    from .show import verification_text

    renew_card(folder, quiet=True)
    progress = Progress(checkpoint_bytes(checkpoint), "verify")
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


def verify_with(ranks: Ranks, folder: Path, source, checkpoint, workers: int | None, stream: bool, quiet: bool):
    """`verify_build` of several ranks: rank 0 has the result. Returns the job too."""
    from ..convert.parts import part_of
    from ..convert.repo import origin_of
    from ..validate.verify import verify_repo
    from . import pipeline
    from .progress import Progress
    from .show import verification_text

    if ranks.first:
        renew_card(folder, quiet=True)
    job = pipeline.job_of_build(folder, source, checkpoint)
    facts = {"source": origin_of(source, checkpoint)["fingerprint"]}
    check_agreed(ranks, facts | {"plan of this build": job and job.plan.plan_hash})
    if not ranks.local:
        check_shared(ranks, folder)
    if job is None:
        return (verify_repo(folder, checkpoint) if ranks.first else None), None  # says why, and compares nothing
    mine = [m for name in part_of(job.plan, ranks) for m in job.plan.shards[name]]
    shards = {checkpoint.tensors[s].shard for m in mine for s in m.sources}
    downloaded = Progress(sum(source.files[s].size for s in shards), "download") if source.files else None
    progress = Progress(sum(m.source_nbytes for m in mine), "verify")
    try:
        found = pipeline.verify_together(
            folder, job, ranks, stream, workers, lambda n: progress(n, "verify"), downloaded or (lambda n, name: None)
        )
    finally:
        progress.close()
        if downloaded:
            downloaded.close()
    if found and not quiet:
        click.echo(verification_text(found))
    return found, job


def record_verification(folder: Path, result: dict, passed: bool, job=None, local: bool = False) -> dict | None:
    """Puts a verification into the build's evidence; where that fails, a failed check still counts for more.

    Args:
        local: other ranks have folders, and so cards, of their own, which all stay the same.
    """
    from ..quantize.errors import MotifConvertError
    from ..validate.evidence import record

    try:
        evidence = record(folder, "verify", result)
        if not local:
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
