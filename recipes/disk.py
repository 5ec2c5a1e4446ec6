"""What a conversion needs of the disks, known before anything starts."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..convert.fetch import blob_path
from ..convert.parts import part_of
from ..convert.ranks import ALONE, Ranks
from ..convert.supply import Itinerary, itinerary, shard_needs
from ..quantize.errors import OutputError
from .pipeline import STREAMED, Job
from .show import human_bytes


@dataclass(frozen=True)
class Demand:
    """Bytes that are to be written on one disk, and those that are free there."""

    folder: Path
    nbytes: int
    free: int

    @property
    def is_met(self) -> bool:
        return self.nbytes <= self.free


@dataclass(frozen=True)
class Download:
    """A Hub source's shards: how many, their bytes, and the bytes that are here already."""

    shards: int
    nbytes: int
    here: int


def needs_of(job: Job, ranks: Ranks) -> dict[str, frozenset[str]]:
    """`shard_needs` of this rank's part."""
    mine = set(part_of(job.plan, ranks))
    return {name: shards for name, shards in shard_needs(job.plan, job.checkpoint).items() if name in mine}


def download_of(job: Job, out: Path, stream: bool, ranks: Ranks = ALONE) -> Download | None:
    """What has to be fetched on this rank; None for a local source."""
    if not job.source.files:
        return None
    needed = frozenset().union(*needs_of(job, ranks).values())
    sizes = {name: job.source.files[name].size for name in needed}
    here = sum(min(_bytes_here(job, name, out / STREAMED if stream else None), size) for name, size in sizes.items())
    return Download(len(needed), sum(sizes.values()), here)


def _bytes_here(job: Job, name: str, into: Path | None) -> int:
    blob = blob_path(job.source, name)
    places = [blob, into / name if into else blob]
    partial = places[1].with_name(f"{places[1].name}.motif-convert.incomplete")
    return max((p.stat().st_size for p in (*places, partial) if p.exists()), default=0)


def itinerary_of(job: Job, ranks: Ranks = ALONE) -> Itinerary:
    """The order of this rank's part of a streamed conversion, and what it needs."""
    sizes = {name: file.size for name, file in job.source.files.items()}
    outputs = {name: sum(m.nbytes for m in modules) for name, modules in job.plan.shards.items()}
    return itinerary(needs_of(job, ranks), sizes, outputs)


def demands(job: Job, out: Path, stream: bool, ranks: Ranks = ALONE) -> list[Demand]:
    """What a conversion into `out` will write, a disk at a time; what an interrupted run has written is not counted.

    Where ranks share the folder, this is what all of them write there.
    """
    found = [p for p in out.rglob("*") if p.is_file() and not p.name.endswith(".partial")] if out.is_dir() else []
    there = sum(p.stat().st_size for p in found)
    mine = part_of(job.plan, ranks) if ranks.local else job.plan.shards
    nbytes = sum(m.nbytes for name in mine for m in job.plan.shards[name])
    if stream:
        way = itinerary_of(job, ranks)
        nbytes = nbytes + ranks.size * way.source_peak if ranks.several and not ranks.local else way.peak
    wanted = [(out, max(0, nbytes - there))]
    if not stream and (download := download_of(job, out, stream, ranks)):
        wanted.append((job.source.folder, download.nbytes - download.here))
    disks: dict[int, list[tuple[Path, int]]] = {}
    for folder, nbytes in wanted:
        existing = next(p for p in (folder.resolve(), *folder.resolve().parents) if p.exists())
        disks.setdefault(os.stat(existing).st_dev, []).append((existing, nbytes))
    return [Demand(d[0][0], sum(nbytes for _, nbytes in d), shutil.disk_usage(d[0][0]).free) for d in disks.values()]


def check_space(job: Job, out: Path, stream: bool, ranks: Ranks = ALONE) -> None:
    """Refuses a conversion that the disks can't hold. Raises OutputError."""
    hint = "" if stream or not job.source.files else "; --stream keeps few source shards at a time"
    for demand in demands(job, out, stream, ranks):
        _refuse_unmet(demand, hint)


def check_space_to_verify(job: Job, folder: Path) -> None:
    """Refuses a streamed verification that the build's disk can't hold. Raises OutputError."""
    _refuse_unmet(Demand(folder, itinerary_of(job).source_peak, shutil.disk_usage(folder).free), "")


def _refuse_unmet(demand: Demand, hint: str) -> None:
    if not demand.is_met:
        raise OutputError(
            f"{demand.folder}: {human_bytes(demand.nbytes)} are needed there and "
            f"{human_bytes(demand.free)} are free; free some space{hint}"
        )


def disk_lines(job: Job, out: Path, stream: bool) -> list[str]:
    """What `plan` says of download and disks."""
    lines = []
    if download := download_of(job, out, stream):
        lines.append(
            f"To download: {download.shards} shards, {human_bytes(download.nbytes)}, of which "
            f"{human_bytes(download.here)} are here."
        )
        way = itinerary_of(job)
        lines.append(
            f"With --stream at most {human_bytes(way.peak)} lie on the disk at once, "
            f"{human_bytes(way.source_peak)} of them source shards."
        )
        if stream:
            lines.append(f"Output shards in the order in which they are made: {order_text(way.order)}.")
    for demand in demands(job, out, stream):
        enough = "" if demand.is_met else ": NOT enough"
        lines.append(
            f"Disk: {human_bytes(demand.nbytes)} to write in {demand.folder}, {human_bytes(demand.free)} free{enough}."
        )
    return lines


def order_text(names: Iterable[str]) -> str:
    """The numbers of shards, runs of them as `first to last`."""
    runs: list[list[int]] = []
    for number in (int(name.split("-")[1]) for name in names):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def disk_json(job: Job, out: Path, stream: bool) -> dict:
    """The same as JSON: `download` (null for a local source), `stream`, `disks`."""
    download, way = download_of(job, out, stream), itinerary_of(job) if job.source.files else None
    return {
        "source": {"id": job.source.id, "revision": job.source.revision},
        "download": download and {"shards": download.shards, "bytes": download.nbytes, "here": download.here},
        "stream": way and {"peak": way.peak, "source_peak": way.source_peak, "order": list(way.order)},
        "disks": [{"folder": str(d.folder), "bytes": d.nbytes, "enough": d.is_met} for d in demands(job, out, stream)],
    }
