"""The stages, composed: plan, convert, and a short generation. Later stages go where they are named."""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path

from ..convert.checkpoint import Checkpoint, open_checkpoint, read_json
from ..convert.headers import TensorInfo, read_header
from ..convert.hub import Source, own_folder
from ..convert.journal import sole_run
from ..convert.parts import part_of
from ..convert.plan import Plan
from ..convert.planner import make_plan
from ..convert.ranks import ALONE, Ranks
from ..convert.repo import PROVENANCE, origin_of, write_repo
from ..convert.sources import find_source, shard_reader, source_name
from ..convert.supply import AtHand, Downloads, shard_needs
from ..quantize.errors import SourceError
from ..quantize.policy import Recipe
from ..validate.comparisons import Compared, Comparisons
from ..validate.provenance import check_is_build, read_provenance
from ..validate.verification import Verification
from ..validate.verify import verify_repo, what_it_should_be
from .card import DEMO_ID, make_card, source_metadata
from .recipe import load_recipe

DEMO = "demo"
STREAMED = ".motif-convert.source"  # folder of a build in the making that holds source shards for a while


@dataclass(frozen=True)
class Job:
    """A plan with its open source."""

    source: Source
    checkpoint: Checkpoint
    plan: Plan

    @property
    def source_bytes(self) -> int:
        return sum(m.source_nbytes for m in self.plan.modules)

    @property
    def kept(self) -> Path:
        """Where comparisons of builds of this very job are kept; see `Comparisons`."""
        weights = origin_of(self.source, self.checkpoint)["fingerprint"]
        key = f"{version('motif-convert')} {self.plan.plan_hash} {weights}"
        return own_folder() / "compared" / hashlib.sha256(key.encode()).hexdigest()[:32]

    def forget(self) -> None:
        """Removes them: all of it is recorded."""
        shutil.rmtree(self.kept, ignore_errors=True)


def prepare(
    source: str,
    recipe: str,
    mtp: str | None,
    experts: str | None = None,
    revision: str | None = None,
    allow_nonfinite: bool = False,
) -> Job:
    """Finds and opens the source, and plans its conversion; headers only.

    Args:
        source: "demo", a folder, or a Hub repo id.
        recipe: a built-in recipe's name, or a file.
        mtp: an MTP policy that overrides the recipe's.
        experts: "affine" to quantize NVFP4 experts again where the recipe gives them 4 bits.
        revision: of a Hub repository: branch, tag or commit.
        allow_nonfinite: see `make_plan`.
    Raises:
        SourceError, RecipeError.
    """
    rules = load_recipe(recipe)
    found, checkpoint = open_source(source, revision)
    return Job(found, checkpoint, make_plan(checkpoint, rules, mtp, experts == "affine", allow_nonfinite))


def open_source(source: str, revision: str | None = None) -> tuple[Source, Checkpoint]:
    """Finds a source and opens it, headers only. Raises SourceError."""
    if source == DEMO and revision is not None:
        raise SourceError("demo: has no revisions; --revision goes with a Hub repo id")
    found = _demo() if source == DEMO else find_source(source, revision)
    try:
        return found, open_checkpoint(found.folder, shard_reader(found), found.files)
    except SourceError as e:
        raise SourceError(str(e).replace(str(found.folder), found.id)) if found.files else e from None


def fetch_shards(source: Source, shards: Iterable[str], progress: Callable[[int, str], None]) -> None:
    """Brings shards of a Hub repository into the Hub cache, checked; nothing to do for a local source.

    Raises:
        SourceError: one could not be had.
    """
    if source.files:
        with closing(Downloads(source, progress, None)) as downloads:
            downloads.have(frozenset(shards))


def source_of(folder: Path) -> tuple[str, str | None]:
    """The source that a build's motif-convert.json names, as --source and --revision take it.

    Raises:
        SourceError: it names none that can be found from here.
    """
    check_is_build(folder)
    made = read_json(folder / PROVENANCE)[0]
    stated = made.get("source") if isinstance(made.get("source"), dict) else {}
    name, revision = stated.get("id"), stated.get("revision")
    if name == _demo().id:
        return DEMO, None
    if isinstance(name, str) and "/" in name:
        return name, revision if isinstance(revision, str) else None
    raise SourceError(f"{folder}: made from the folder {name}; give it with --source")


def _demo() -> Source:
    with as_file(files(__package__) / "demo-motif3") as folder:
        return Source(DEMO_ID, None, Path(folder))


def default_out(source: str, recipe: str, mtp: str | None) -> Path:
    """`<source>-mlx-<recipe>`, with the MTP policy where it is not the recipe's own."""
    return Path(_build_name(_demo().name if source == DEMO else source_name(source), load_recipe(recipe), mtp))


def _build_name(source: str, recipe: Recipe, mtp: str | None) -> str:
    suffix = f"-mtp-{mtp}" if mtp not in (None, "none", recipe.mtp) else ""
    return f"{source}-mlx-{recipe.name}{suffix}"


def convert(
    job: Job,
    out: Path,
    progress: Callable[[int, str], None],
    workers: int | None = None,
    stream: bool = False,
    downloaded: Callable[[int, str], None] = lambda count, name: None,
    compared: Callable[[int], None] | None = None,
    extra: str | None = None,
    recheck: Callable[[str], None] | None = None,
    ranks: Ranks = ALONE,
) -> dict:
    """Writes the MLX repository; see `write_repo`.

    Args:
        stream: hold a Hub source's shards only as long as an unfinished output needs them.
        downloaded: called with bytes that arrived from the Hub, and a shard's name once it is whole.
        compared: called with bytes that were compared, if each shard is to be compared with the source as soon as it
            is written; see `verify_streamed`, which then needs no download. None: not now.
        extra: a user's own text for the card.
        recheck: see `write_shards`.
        ranks: see `write_repo`.
    """
    into = streamed_into(out, ranks) if stream else None
    name = _build_name(job.source.name, job.plan.recipe, job.plan.mtp)
    supply = Downloads(job.source, downloaded, into) if job.source.files else AtHand()
    with job.checkpoint as checkpoint, closing(supply):
        checkpoint.shard_folder = into or checkpoint.folder
        inspection = Comparisons(out, job.plan, checkpoint, job.kept, workers, compared) if compared else None
        made = write_repo(
            job.plan,
            checkpoint,
            job.source,
            out,
            lambda made: make_card(made, job.plan.families(), {}),
            source_metadata(checkpoint) | {"name": name, "extra": extra, "repo": None, "branch": None},
            progress,
            workers,
            supply,
            inspection,
            recheck,
            ranks,
        )
        if not stream:  # what an interrupted run with it has left
            shutil.rmtree(streamed_into(out, ranks), ignore_errors=True)
        return made


def streamed_into(out: Path, ranks: Ranks) -> Path:
    """Where source shards lie for a while: each rank has its own."""
    return out / (STREAMED if ranks.first else f"{STREAMED}-{ranks.rank}")


def job_of_build(folder: Path, source: Source, checkpoint: Checkpoint) -> Job | None:
    """The job that makes a build again; None if its motif-convert.json does not tell, or tells of another source.

    Raises:
        SourceError: not a build.
    """
    check_is_build(folder)
    plan = what_it_should_be(folder, checkpoint)[1]
    return Job(source, checkpoint, plan) if plan else None


def verify_streamed(
    folder: Path,
    job: Job,
    workers: int | None,
    progress: Callable[[int], None],
    downloaded: Callable[[int, str], None],
) -> Verification:
    """Checks a build as `verify_repo` does, with few of a Hub source's shards here at a time.

    What was compared before, by an interrupted run of this or in the course of the conversion, is not fetched again.

    Args:
        job: as `job_of_build` has it.
        progress: called with bytes of source that were compared since the last call.
        downloaded: called with bytes that arrived from the Hub, and a shard's name once it is whole.
    Raises:
        SourceError, OutputError.
    """
    recorded = {name: file.sha256 for name, file in read_provenance(folder).files.items()}
    needs = shard_needs(job.plan, job.checkpoint)
    into = folder / STREAMED
    with sole_run(folder), job.checkpoint as checkpoint, closing(Downloads(job.source, downloaded, into)) as supply:
        checkpoint.shard_folder = into
        compared = Comparisons(folder, job.plan, checkpoint, job.kept, workers, progress)
        for name in supply.begin({n: s for n, s in needs.items() if compared.lacks(n, recorded.get(n))}):
            supply.need(name)
            compared.compare(name)
            supply.release(name)
    return verify_repo(folder, checkpoint, workers=workers, compared=compared)


def verify_together(
    folder: Path,
    job: Job,
    ranks: Ranks,
    stream: bool,
    workers: int | None,
    progress: Callable[[int], None],
    downloaded: Callable[[int, str], None],
) -> Verification | None:
    """Checks a build as `verify_repo` does, each rank a part of the shards; rank 0 has the result.

    Where each rank has a folder of its own, problems of a shard name the rank; of several that hold it, one that is at
    fault.

    Args:
        job: as `job_of_build` has it.
        stream: hold a Hub source's shards only as long as they are needed.
        progress: called with bytes of source that this rank has compared since the last call.
        downloaded: called with bytes that arrived from the Hub, and a shard's name once it is whole.
    Raises:
        SourceError, OutputError. MotifConvertError: a rank is gone.
    """
    mine = set(part_of(job.plan, ranks))
    into = streamed_into(folder, ranks) if stream else None
    supply = Downloads(job.source, downloaded, into) if job.source.files else AtHand()
    with job.checkpoint as checkpoint, closing(supply):
        checkpoint.shard_folder = into or checkpoint.folder
        compared = Comparisons(folder, job.plan, checkpoint, None, workers, progress)
        for name in supply.begin({n: s for n, s in shard_needs(job.plan, checkpoint).items() if n in mine}):
            supply.need(name)
            compared.compare(name)
            supply.release(name)
        tensors = {name: _tensors(folder / name) for name in compared.of} if ranks.local else {}
        elsewhere: dict[str, list[TensorInfo]] = {}
        found = {name: one.as_dict() for name, one in compared.of.items()}
        written = {name: w.sha256 for name, w in read_provenance(folder).files.items()} if ranks.local else {}
        holders: dict[str, int] = {}
        for rank, (theirs, headers) in enumerate(ranks.gather([found, tensors])):
            for name, one in theirs.items():
                sound = not one["faults"] and one["sha256"] == written.get(name)
                if name not in holders or not sound:
                    compared.of[name], holders[name] = Compared.of(one), rank
            elsewhere |= {name: [_tensor(t) for t in every] for name, every in headers.items() if name not in mine}
        if not ranks.first:
            return None
        result = verify_repo(folder, checkpoint, workers=workers, compared=compared, fresh=True, elsewhere=elsewhere)
        if not ranks.local:
            return result
        named = {f"{name}:": f"rank {rank}: {name}:" for name, rank in holders.items()}
        parted = (p.partition(" ") for p in result.problems)
        return replace(result, problems=[named.get(file, file) + space + rest for file, space, rest in parted])


def _tensors(shard: Path) -> list[dict]:
    """Its header as JSON; nothing where it can't be read, which its comparison says."""
    try:
        return [asdict(t) for t in read_header(shard)]
    except SourceError:
        return []


def _tensor(told: dict) -> TensorInfo:
    return TensorInfo(**told | {"shape": tuple(told["shape"])})
