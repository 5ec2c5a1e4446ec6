"""The command line: a thin layer. Exit codes: 0 done, 1 a check failed, 2 bad use or input, 130 interrupted."""

import json
import os
import sys
from pathlib import Path

import click

from ..convert.ranks import launched
from .checks import check, record_verification, verify_build, verify_streamed
from .conversion import convert_source, show_plan, verified_before
from .options import (
    Finite,
    Group,
    build_options,
    card_extra_option,
    convert_options,
    eval_options,
    given,
    hub_options,
    local_option,
    source_of_build_options,
)
from .process import INTERRUPTED, be_deaf, be_sturdy
from .steps import (
    NOT_ON_THE_HUB,
    SAID,
    evaluate_build,
    fetch,
    generate_text,
    join_ranks,
    mtp_of,
    open_source_of,
    recipe_of,
    rewrite_card,
    say,
    say_error,
    show_evidence,
    smoke_build,
    target_of_build,
    upload_build,
)

SHARED = ("convert", "verify", "smoke", "eval")  # what several ranks do together
ONLY_SHOWN = ("plan", "inspect")  # nothing is lost if nobody reads what they print


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@build_options
@convert_options
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
    if launched() and ctx.invoked_subcommand not in SHARED:
        raise click.UsageError(f"mlx.launch is for {', '.join(SHARED)}; run this as one process")
    if ctx.invoked_subcommand:
        misplaced = [p for p in ctx.params if ctx.get_parameter_source(p) is click.core.ParameterSource.COMMANDLINE]
        if misplaced:
            option = "--" + misplaced[0].replace("_", "-")
            raise click.UsageError(f"{option} stands before {ctx.invoked_subcommand}; put options after the command")
        return
    from ..validate.evidence import evidence_of
    from ..validate.generate import PROMPT, why_not

    target = target_of_build(no_verify, upload, private, create_pr)
    stream = build["stream"]
    job, out, new = convert_source(**build, compare=stream and not no_verify)
    reason = why_not(out, job.plan.total_bytes)
    if reason:
        say(f"No text generated: {reason}.")
    else:
        generate_text(out, PROMPT if prompt is None else prompt, max_tokens)
    evidence, failed = None, False
    if not no_verify and not new and verified_before(out):
        evidence = evidence_of(out)
    elif not no_verify:
        if stream:
            found, told = verify_streamed(out, job.source, job.checkpoint, None)
        else:
            if not new:
                fetch(job.source, job.checkpoint)  # what a conversion just now has fetched is here
            found, told = verify_build(out, job.checkpoint, None, None), None
        evidence, failed = record_verification(out, found.as_dict(), found.passed, told), not found.passed
    if not new and (before := evidence_of(out))["smoke"]:
        say("Drafts measured before: validation.json stands.")
        evidence, failed = before, failed or not before["smoke"]["passed"]
    elif not reason and job.plan.has_mtp:
        evidence = smoke_build(out, job.plan.recipe.min_acceptance)
        failed |= not evidence["smoke"]["passed"]
    if evidence is not None:
        show_evidence(out, evidence)
    if failed:
        if target:
            say(f"Not uploaded to {target.repo}, since a check failed.")
        ctx.exit(1)
    if target:
        options = "".join([" --private" * private, " --create-pr" * create_pr])
        if not upload_build(out, target, again=f"motif-convert upload {out} {target.repo}{options}"):
            ctx.exit(1)


@cli.command()
@build_options
@click.option("--json", "as_json", is_flag=True, help="Every tensor, as JSON.")
def plan(source, revision, stream, bits, recipe, mtp, keep_mtp_fp16, experts, as_json):
    """Show what would be downloaded and written, from headers alone."""
    from .disk import disk_json
    from .pipeline import default_out, prepare

    recipe, mtp = recipe_of(bits, recipe), mtp_of(mtp, keep_mtp_fp16)
    job = prepare(source, recipe, mtp, experts, revision)
    if stream and not job.source.files:
        raise click.UsageError(NOT_ON_THE_HUB)
    out = default_out(source, recipe, mtp)
    if as_json:
        disks = disk_json(job, out, stream)
        click.echo(json.dumps(job.plan.as_dict() | {"plan_hash": job.plan.plan_hash} | disks, indent=1))
    else:
        show_plan(job, out, stream, click.echo)


@cli.command()
@build_options
@convert_options
@local_option
def convert(local, **build):
    """Write the MLX repository, or go on with an interrupted run."""
    convert_source(**build, ranks=join_ranks(local))


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
@source_of_build_options
@click.option("--stream", is_flag=True, help="Keep a Hub source's shards only as long as they are needed.")
@local_option
@click.option("--sample", type=Finite(0, 1, min_open=True), help="Fraction to compare, for a quick look.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one a processor]")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@click.pass_context
def verify(ctx, folder, source, revision, stream, local, sample, workers, as_json):
    """Check every group of a build against its source; record it in validation.json."""
    if not check(folder, source, revision, stream, local, sample, workers, as_json):
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
    ranks = join_ranks()
    evidence = smoke_build(folder, minimum, ranks, quiet=as_json, **options)
    result = evidence["smoke"]
    if as_json:
        click.echo(json.dumps(result | ({"heads": evidence["heads"]} if options["compare_mtp"] else {}), indent=1))
    elif options["compare_mtp"]:
        click.echo(heads_text(evidence["heads"]))
    if not result["passed"]:
        ctx.exit(1)


@cli.command("eval")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@source_of_build_options
@eval_options
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
@click.pass_context
def evaluate(ctx, folder, source, revision, as_json, **options):
    """Compare what a build says with its source, layer by layer, in little memory; record it in validation.json."""
    from .eval_text import evaluation_text

    ranks = join_ranks()
    origin, checkpoint = open_source_of(folder, source, revision)
    fetch(origin, checkpoint)
    result = evaluate_build(folder, origin, checkpoint, ranks=ranks, **options)
    if result:
        click.echo(json.dumps(result, indent=1) if as_json else evaluation_text(result))
    ctx.exit(0 if ranks.told(result and result["passed"]) else 1)


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@card_extra_option
def card(folder, card_extra):
    """Write README.md anew, the model card, with the evidence as it is now."""
    from ..convert.repo import CARD
    from ..validate.provenance import check_is_build
    from .card import read_extra

    check_is_build(folder)
    rewrite_card(folder, read_extra(card_extra) if card_extra else None)
    say(f"Written: {folder / CARD}")


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
    target = target_of(repo, revision, create_pr, private, say)
    if not upload_build(folder, target, "the same command", force, dry_run, as_json):
        ctx.exit(1)


def main() -> None:
    """Entry point: runs a command, and turns what a user can mend into one line."""
    from ..convert.ranks import launched
    from ..quantize.errors import CheckError, MotifConvertError
    from ..validate.pytorch import keep_out

    be_sturdy()
    keep_out()
    context = None
    try:
        # Not cli.main(): it ends a broken pipe with exit code 1, whatever standalone_mode says.
        with cli.make_context("motif-convert", sys.argv[1:]) as context:
            cli.invoke(context)
        sys.stdout.flush()
        be_deaf()
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        if launched():
            say_error(e.format_message())
        else:
            e.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt) as e:
        if SAID not in e.args:
            say("Interrupted, or another rank ended; the same command goes on." if launched() else "Interrupted.")
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # not after what threads still wait for
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0 if context is None or context.invoked_subcommand in ONLY_SHOWN else 1)
    except MotifConvertError as e:
        say_error(e)
        sys.exit(1 if isinstance(e, CheckError) else 2)
    except OSError as e:
        say_error(f"{e.filename or ''}: {e.strerror or e}".replace(": :", ":").removeprefix(": "))
        sys.exit(2)
