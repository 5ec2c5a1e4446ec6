"""The options that several commands share, the types of their values, and the order of the commands."""

import math
from collections.abc import Callable
from pathlib import Path

import click

BITS = ("4.5", "8")
MTP = ("fp16", "bf16", "8", "4.5", "drop")


class Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of the pipeline


class Finite(click.FloatRange):
    """A number in a range; click's own lets NaN through."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class Folder(click.Path):
    """A path that has a name, and no `..` in it: to write to new/../out does not take a folder called new."""

    def convert(self, value, param, ctx):
        if not str(value):
            self.fail("is empty", param, ctx)
        path = super().convert(value, param, ctx)
        return path.resolve() if ".." in path.parts else path


def given(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuses an empty value, such as a shell variable that is not set."""
    if value is not None and not str(value):
        raise click.BadParameter("is empty", ctx, param)
    return value


card_extra_option = click.option(
    "--card-extra", type=click.Path(path_type=Path), metavar="FILE", help="Text of your own for the model card."
)


local_option = click.option(
    "--local", is_flag=True, help="Under mlx.launch: each rank keeps, on its own disk, the shards of its own layers."
)


def build_options(command: Callable) -> Callable:
    """The options that decide a build."""
    for option in reversed(
        (
            click.option(
                "--source",
                metavar="REPO|DIR|demo",
                default="Motif-Technologies/Motif-3",
                show_default=True,
                callback=given,
                help="Hub repo id, local folder, or the small trained checkpoint that ships with this program.",
            ),
            click.option("--revision", callback=given, help="Branch, tag or commit of a Hub source."),
            click.option("--stream", is_flag=True, help="Keep a Hub source's shards only as long as they are needed."),
            click.option("--bits", type=click.Choice(BITS), help="Built-in recipe.  [default: 4.5]"),
            click.option("--recipe", metavar="NAME|FILE", help="Any recipe: 4.5bit, 8bit, bf16, or a YAML file."),
            click.option(
                "--mtp", type=click.Choice(MTP), help="What becomes of the MTP head.  [default: the recipe's policy]"
            ),
            click.option("--keep-mtp-fp16", is_flag=True, help="The same as --mtp fp16."),
            click.option(
                "--experts",
                type=click.Choice(["affine"]),
                help="Quantize the experts of an NVFP4 source again, instead of keeping their own 4 bits.",
            ),
        )
    ):
        command = option(command)
    return command


def convert_options(command: Callable) -> Callable:
    """The options of a conversion proper."""
    for option in reversed(
        (
            click.option(
                "--out",
                type=Folder(path_type=Path),
                help="Folder to write; must be new, empty, or an interrupted run.  [default: <source>-mlx-<recipe>]",
            ),
            click.option(
                "--workers",
                type=click.IntRange(1, 256),
                help="Threads; the bytes do not depend on it.  [default: two more than processors]",
            ),
            click.option(
                "--allow-nonfinite",
                is_flag=True,
                help="Keep NaN and infinite values in tensors that are not quantized.",
            ),
            click.option(
                "--recheck",
                is_flag=True,
                help="Read what an interrupted run has finished, instead of trusting size and state file.",
            ),
            card_extra_option,
        )
    ):
        command = option(command)
    return command


def eval_options(command: Callable) -> Callable:
    """What two models are compared on, how, and what is asked of the result."""
    for option in reversed(
        (
            click.option("--text", type=click.Path(path_type=Path), help="Text, or .jsonl lines: text, optional name."),
            click.option("--tokens", type=click.IntRange(2), help="Tokens at most.  [default: all of the text]"),
            click.option(
                "--window", type=click.IntRange(2), default=512, show_default=True, help="Tokens of one context."
            ),
            click.option(
                "--engine",
                type=click.Choice(["mlx", "torch"]),
                default="mlx",
                show_default=True,
                help="torch: a second opinion from plain PyTorch, on few tokens.",
            ),
            click.option(
                "--dtype",
                type=click.Choice(["float32", "bfloat16"]),
                default="float32",
                show_default=True,
                help="To compute in.",
            ),
            click.option(
                "--temperature",
                type=Finite(0.01, 100),
                default=0.8,
                show_default=True,
                help="Of the expected acceptance.",
            ),
            click.option("--lens", is_flag=True, help="Look through the output head after every layer."),
            click.option("--max-kl", type=Finite(0), help="Fail above this mean divergence, in nats."),
            click.option("--min-top1", type=Finite(0, 1), help="Fail below this share of equal first choices."),
        )
    ):
        command = option(command)
    return command


def source_of_build_options(command: Callable) -> Callable:
    """What a build was made from, where it does not say so itself."""
    source = click.option("--source", metavar="REPO|DIR|demo", help="What DIR was made from.  [default: what it names]")
    revision = click.option("--revision", help="Branch, tag or commit of a Hub --source.")
    return source(revision(command))


def hub_options(command: Callable) -> Callable:
    """How a build is published."""
    private = click.option("--private", is_flag=True, help="Make the Hub repository private, where it is made.")
    create_pr = click.option("--create-pr", is_flag=True, help="Open a pull request instead of writing to the branch.")
    return private(create_pr(command))
