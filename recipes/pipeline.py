"""The stages, composed: plan, convert, and a short generation. Later stages go where they are named."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from ..convert.checkpoint import Checkpoint, open_checkpoint
from ..convert.hub import Source, find_source
from ..convert.journal import check_unused
from ..convert.losses import Losses
from ..convert.plan import Plan
from ..convert.planner import make_plan
from ..convert.repo import write_repo
from .card import make_card
from .recipe import load_recipe

DEFAULT_SOURCE = "Motif-Technologies/Motif-3"
DEMO = "demo"
STAGES = ("plan", "convert", "generate")  # to come: verify and smoke after convert, then upload


@dataclass(frozen=True)
class Job:
    """A plan with its open source."""

    source: Source
    checkpoint: Checkpoint
    plan: Plan

    @property
    def source_bytes(self) -> int:
        return sum(m.source_nbytes for m in self.plan.modules)


def prepare(source: str, recipe: str, mtp: str | None, experts: str | None = None) -> Job:
    """Finds and opens the source, and plans its conversion; headers only.

    Args:
        source: "demo", a folder, or a Hub repo id.
        recipe: a built-in recipe's name, or a file.
        mtp: an MTP policy that overrides the recipe's.
        experts: "affine" to quantize NVFP4 experts again where the recipe gives them 4 bits.
    Raises:
        SourceError, RecipeError.
    """
    rules = load_recipe(recipe)
    found = _demo() if source == DEMO else find_source(source)
    checkpoint = open_checkpoint(found.folder)
    return Job(found, checkpoint, make_plan(checkpoint, rules, mtp, experts == "affine"))


def _demo() -> Source:
    with as_file(files(__package__) / "demo-motif3") as folder:
        return Source("demo-motif3", None, Path(folder))


def default_out(source: str, recipe: str, mtp: str | None) -> Path:
    """`<source>-mlx-<recipe>`, with the MTP policy where it is not the recipe's own."""
    name = "demo-motif3" if source == DEMO else Path(source).resolve().name
    rules = load_recipe(recipe)
    suffix = f"-mtp-{mtp}" if mtp not in (None, rules.mtp) else ""
    return Path(f"{name}-mlx-{rules.name}{suffix}")


def convert(job: Job, out: Path, progress: Callable[[int, str], None]) -> Losses:
    """Writes the MLX repository; see `write_repo`."""
    return write_repo(
        job.plan,
        job.checkpoint,
        job.source,
        out,
        lambda losses: make_card(job.plan, job.source, job.checkpoint, losses),
        progress,
    )


__all__ = ["DEFAULT_SOURCE", "Job", "check_unused", "convert", "default_out", "prepare"]
