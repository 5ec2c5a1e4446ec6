"""The command line: a thin layer. Exit codes: 0 done, 1 a check failed, 2 bad use or input, 130 interrupted."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from .options import Finite, build_options, given, hub_options, out_option, workers_option


class Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of the pipeline


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@build_options
@out_option
@workers_option
@click.option("--prompt", help="Text that the finished build continues.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of that text.")
@click.option("--no-verify", is_flag=True, help="Leave out the check of every group against the source.")
@click.option("--upload", metavar="REPO", callback=given, help="Publish the build on the Hub when all has passed.")
@hub_options
@click.version_option(package_name="motif-convert", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx, prompt, max_tokens, no_verify, upload, private, create_pr, **build):
    """Quantized MLX builds of Motif-3.

    Without a command: plan, convert, a short generation with the result, verify, smoke, and a table that says
    whether to ship.
    """
    if ctx.invoked_subcommand:
        misplaced = [p for p in ctx.params if ctx.get_parameter_source(p) is click.core.ParameterSource.COMMANDLINE]
        if misplaced:
            option = "--" + misplaced[0].replace("_", "-")
            raise click.UsageError(f"{option} stands before {ctx.invoked_subcommand}; put options after the command")
        return
    from ..validate.generate import PROMPT, why_not

    if build["stream"] and not no_verify:
        raise click.UsageError(
            "--stream keeps no source to verify against; add --no-verify, and run `motif-convert verify` when you "
            "have the room"
        )
    target = _target_of_build(no_verify, upload, private, create_pr)
    job, out = _convert(**build)
    reason = why_not(out, job.plan.total_bytes)
    if reason:
        _say(f"No text generated: {reason}.")
    else:
        _generate(out, PROMPT if prompt is None else prompt, max_tokens)
    evidence, failed = None, False
    if not no_verify:
        found = _verify(out, job.checkpoint, None, None)
        evidence, failed = _record(out, found.as_dict(), found.passed), not found.passed
    if not reason and job.plan.has_mtp:
        evidence = _smoke(out, job.plan.recipe.min_acceptance)
        failed |= not evidence["smoke"]["passed"]
    if evidence is not None:
        _show_evidence(out, evidence)
    if failed:
        if target:
            _say(f"Not uploaded to {target.repo}, since a check failed.")
        ctx.exit(1)
    if target:
        options = "".join([" --private" * private, " --create-pr" * create_pr])
        if not _upload(out, target, again=f"motif-convert upload {out} {target.repo}{options}"):
            ctx.exit(1)


@cli.command()
@build_options
@click.option("--json", "as_json", is_flag=True, help="Every tensor, as JSON.")
def plan(source, revision, stream, bits, recipe, mtp, keep_mtp_fp16, experts, as_json):
    """Show what would be downloaded and written, from headers alone."""
    from .disk import disk_json
    from .pipeline import default_out, prepare

    recipe, mtp = _recipe(bits, recipe), _mtp(mtp, keep_mtp_fp16)
    job = prepare(source, recipe, mtp, experts, revision)
    out = default_out(source, recipe, mtp)
    if as_json:
        disks = disk_json(job, out, stream)
        click.echo(json.dumps(job.plan.as_dict() | {"plan_hash": job.plan.plan_hash} | disks, indent=1))
    else:
        _show_plan(job, out, stream, click.echo)


@cli.command()
@build_options
@out_option
@workers_option
def convert(**build):
    """Write the MLX repository, or go on with an interrupted run."""
    _convert(**build)


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def inspect(folder, as_json):
    """Say what a converted repository holds."""
    from ..validate.inspect import inspect_repo
    from .show import build_text

    found = inspect_repo(folder)
    click.echo(json.dumps(found, indent=1) if as_json else build_text(found))


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--source", metavar="REPO|DIR|demo", help="What DIR was made from.  [default: what it names]")
@click.option("--revision", help="Branch, tag or commit of a Hub --source.")
@click.option("--sample", type=Finite(0, 1, min_open=True), help="Fraction to compare, for a quick look.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one a processor]")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@click.pass_context
def verify(ctx, folder, source, revision, sample, workers, as_json):
    """Check every group of a build against its source; record it in validation.json."""
    from .pipeline import open_source, source_of

    if revision and not source:
        raise click.UsageError("--revision goes with --source")
    origin, checkpoint = open_source(*((source, revision) if source else source_of(folder)))
    _fetch(origin, checkpoint)
    found = _verify(folder, checkpoint, sample, workers, quiet=as_json)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
    _record(folder, found.as_dict(), found.passed)
    if not found.passed:
        ctx.exit(1)


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens for each prompt.")
@click.option("--drafts", type=click.IntRange(1, 8), default=1, show_default=True, help="Chained drafts a step.")
@click.option(
    "--temperature", type=Finite(0, min_open=True), default=0.8, show_default=True, help="Of the sampled run."
)
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines: prompt, optional name, optional raw.")
@click.option("--text", type=click.Path(path_type=Path), help="Text for the teacher-forced count.")
@click.option("--dtype", type=click.Choice(["float32"]), help="Upcast all floats, for exact comparisons.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Of the sampling.")
@click.option("--min-acceptance", type=Finite(0, 1), help="Fail below it.  [default: the recipe's]")
@click.option("--compare-mtp", metavar="LIST", help="Policies to compare on one body, such as fp16,bf16,8,4.5.")
@click.option("--source", metavar="REPO|DIR|demo", help="For --compare-mtp.  [default: what DIR names]")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
@click.pass_context
def smoke(ctx, folder, as_json, **options):
    """Measure what the MTP head is worth, on this machine; record it in validation.json."""
    from .show import heads_text

    minimum = options.pop("min_acceptance")
    evidence = _smoke(folder, minimum, quiet=as_json, **options)
    result = evidence["smoke"]
    if as_json:
        click.echo(json.dumps(result | ({"heads": evidence["heads"]} if options["compare_mtp"] else {}), indent=1))
    elif options["compare_mtp"]:
        click.echo(heads_text(evidence["heads"]))
    if not result["passed"]:
        ctx.exit(1)


def _fetch(source, checkpoint) -> None:
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


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo", metavar="REPO")
@hub_options
@click.option(
    "--revision", metavar="BRANCH", callback=given, help="Branch to write to; made if missing.  [default: main]"
)
@click.option("--force", is_flag=True, help="Publish without a passing validation.json, and record that.")
@click.option("--dry-run", is_flag=True, help="Show every file, its size and what becomes of it; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="The plan and the result as JSON.")
@click.pass_context
def upload(ctx, folder, repo, private, create_pr, revision, force, dry_run, as_json):
    """Publish a checked build on the Hub, in one commit; the same command again goes on after an interruption."""
    from .upload import target_of

    if create_pr and revision is not None:
        raise click.UsageError("--create-pr proposes to main; it does not go with --revision")
    target = target_of(repo, revision, create_pr, private, _say)
    if not _upload(folder, target, "the same command", force, dry_run, as_json):
        ctx.exit(1)


def _target_of_build(no_verify: bool, upload: str | None, private: bool, create_pr: bool):
    """Where the build that is to be made goes, asked before hours of work; None if nowhere."""
    if upload is None:
        if private or create_pr:
            raise click.UsageError(f"{'--private' if private else '--create-pr'} goes with --upload REPO")
        return None
    if no_verify:
        raise click.UsageError("--upload publishes what was verified; it does not go with --no-verify")
    from .upload import target_of

    return target_of(upload, None, create_pr, private, _say)


def _upload(folder, target, again: str, force: bool = False, dry_run: bool = False, as_json: bool = False) -> bool:
    from .upload import ending_at_once, push_text, upload_text
    from .upload import upload as run

    with ending_at_once(f"Interrupted. Run {again} again to go on; what has arrived is not sent again."):
        done = run(folder, target, force, dry_run, _say, lambda p: None if as_json else click.echo(push_text(p)))
    click.echo(json.dumps(done.as_dict(), indent=1) if as_json else upload_text(done))
    if done.problems and done.plan and not done.pushed:
        _say("--force publishes it all the same, and records that.")
    return not done.problems


def _verify(folder: Path, checkpoint, sample: float | None, workers: int | None, quiet: bool = False):
    from ..validate.verify import verify_repo
    from .progress import Progress
    from .show import verification_text

    progress = Progress(sum(t.nbytes for t in checkpoint.tensors.values()), "verify")
    try:
        found = verify_repo(folder, checkpoint, sample, workers, lambda n: progress(n, "verify"))
    finally:
        progress.close()
    if not quiet:
        click.echo(verification_text(found))
    return found


def _record(folder: Path, result: dict, passed: bool) -> dict | None:
    """Puts a verification into the build's evidence; where that fails, a failed check still counts for more."""
    from ..quantize.errors import MotifConvertError
    from ..validate.evidence import record

    try:
        evidence = record(folder, "verify", result)
        if evidence["verify"] != result:
            _say("validation.json keeps the whole verification of before; this one does not renew it.")
        return evidence
    except MotifConvertError as e:
        if passed:
            raise
        _say(f"Not recorded: {e}")
        return None


def _smoke(folder: Path, minimum: float | None, quiet: bool = False, **options) -> dict:
    from .pipeline import smoke as run
    from .show import smoke_text

    evidence = run(folder, minimum, _say, **options)
    if not quiet:
        click.echo(smoke_text(evidence["smoke"]))
    return evidence


def _show_evidence(out: Path, evidence: dict) -> None:
    from ..validate.evidence import EVIDENCE, PICTURE
    from ..validate.inspect import inspect_repo
    from .show import evidence_rows, text_table

    click.echo(text_table(evidence_rows(inspect_repo(out), evidence)))
    _say(f"Evidence: {out / EVIDENCE} and {out / PICTURE}")


def _convert(source, revision, stream, bits, recipe, mtp, keep_mtp_fp16, experts, out, workers):
    from ..convert.journal import check_unused
    from ..convert.stream import left_to_mlx
    from . import pipeline
    from .disk import check_space, download_of
    from .progress import Progress
    from .show import experts_sentence, human_bytes, mtp_sentence

    recipe, mtp = _recipe(bits, recipe), _mtp(mtp, keep_mtp_fp16)
    out = pipeline.default_out(source, recipe, mtp) if out is None else out
    check_unused(out)
    job = pipeline.prepare(source, recipe, mtp, experts, revision)
    if stream and not job.source.files:
        raise click.UsageError("--stream is for a source on the Hub; this one is on this machine already")
    _show_plan(job, out, stream, _say)
    check_space(job, out, stream)
    for reason, nbytes in left_to_mlx(job.plan).items():
        _say(f"{human_bytes(nbytes)} of source go through mx.quantize, slowly and to the same bytes: {reason}.")
    download = download_of(job, out, stream)
    downloaded = Progress(download.nbytes, "download") if download else None
    progress = Progress(job.source_bytes, "convert")
    try:
        losses = pipeline.convert(job, out, progress, workers, stream, downloaded or (lambda count, name: None))
    except KeyboardInterrupt:
        _say(f"Interrupted. Run the same command again (--out {out}) to go on.")
        raise
    finally:
        progress.close()
        if downloaded:
            downloaded.close()
    _say(mtp_sentence(job.plan, losses))
    if losses.requantized:
        _say(experts_sentence(job.plan, losses))
    _say(f"Written: {out}")
    return job, out


def _generate(out: Path, prompt: str, max_tokens: int) -> None:
    from ..validate.generate import generate

    click.echo(prompt, nl=False)
    for text in generate(out, prompt, max_tokens):
        click.echo(text, nl=False)
    click.echo()


def _show_plan(job, out: Path, stream: bool, say: Callable[[str], None]) -> None:
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


def _recipe(bits: str | None, recipe: str | None) -> str:
    from .recipe import BITS as RECIPES

    if bits and recipe is not None:
        raise click.UsageError("--bits and --recipe both choose the recipe; give one of them")
    return RECIPES[bits or "4.5"] if recipe is None else recipe


def _mtp(mtp: str | None, keep_mtp_fp16: bool) -> str | None:
    if keep_mtp_fp16 and mtp not in (None, "fp16"):
        raise click.UsageError(f"--keep-mtp-fp16 is --mtp fp16; it does not go with --mtp {mtp}")
    return "fp16" if keep_mtp_fp16 else mtp


def _say(text: str) -> None:
    click.echo(text, err=True)


def main() -> None:
    """Entry point: runs a command, and turns what a user can mend into one line."""
    from ..quantize.errors import MotifConvertError

    try:
        # Not cli.main(): it ends a broken pipe with exit code 1, whatever standalone_mode says.
        with cli.make_context("motif-convert", sys.argv[1:]) as context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MotifConvertError as e:
        _say(f"motif-convert: error: {e}")
        sys.exit(2)
    except OSError as e:
        _say(f"motif-convert: error: {e.filename or ''}: {e.strerror or e}".replace(": :", ":"))
        sys.exit(2)
