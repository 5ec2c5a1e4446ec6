"""Source shards as a conversion needs them: all at hand, or on their way from the Hub while others are converted."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from ..quantize.errors import OutputError
from .checkpoint import Checkpoint
from .fetch import fetch
from .hub import Source
from .plan import Plan

PARALLEL = 4  # downloads side by side


def shard_needs(plan: Plan, checkpoint: Checkpoint) -> dict[str, frozenset[str]]:
    """Output shard -> the source shards that hold what it is made of, in the plan's order."""
    return {
        name: frozenset(checkpoint.tensors[source].shard for m in modules for source in m.sources)
        for name, modules in plan.shards.items()
    }


@dataclass(frozen=True)
class Itinerary:
    """The order in which outputs are made so that few source bytes lie on the disk at once.

    Args:
        order: output shards.
        peak: bytes of source shards and finished outputs at the worst moment, the next output's shards on their way.
        source_peak: of these, source shards.
    """

    order: tuple[str, ...]
    peak: int
    source_peak: int


def order_of_work(needs: dict[str, frozenset[str]], sizes: dict[str, int]) -> list[str]:
    """Orders outputs: always the one next that needs the fewest new source bytes, the first of equals.

    Args:
        needs: see `shard_needs`.
        sizes: bytes of source shards.
    """
    order, held, left = [], frozenset(), dict(needs)
    while left:
        name = min(left, key=lambda n: sum(sizes[s] for s in left[n] - held))
        order.append(name)
        held |= left.pop(name)
        held &= frozenset().union(*left.values())
    return order


def itinerary(needs: dict[str, frozenset[str]], sizes: dict[str, int], outputs: dict[str, int]) -> Itinerary:
    """What working in `order_of_work` takes.

    Args:
        outputs: bytes of output shards.
    """

    def nbytes(shards: frozenset[str]) -> int:
        return sum(sizes[s] for s in shards)

    order = order_of_work(needs, sizes)
    peak = source_peak = written = 0
    held = frozenset()
    for place, name in enumerate(order):
        here = held | needs[name].union(*(needs[n] for n in order[place + 1 : place + 2]))
        written += outputs[name]
        peak, source_peak = max(peak, nbytes(here) + written), max(source_peak, nbytes(here))
        held = here & frozenset().union(*(needs[n] for n in order[place + 1 :]))
    return Itinerary(tuple(order), peak, source_peak)


class AtHand:
    """A source that lies on this machine whole."""

    def begin(self, needs: dict[str, frozenset[str]]) -> list[str]:
        return list(needs)

    def have(self, shards: frozenset[str]) -> None:
        pass

    def need(self, output: str) -> None:
        pass

    def release(self, output: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Stopped(Exception):
    """Ends a download that nobody waits for any more."""


class Downloads:
    """Source shards that are fetched ahead of the conversion.

    Args:
        source: a repository at a commit.
        progress: called with bytes that arrived and a shard's name, empty until it is whole; from several threads.
        into: a folder to hold shards in only as long as an unfinished output needs them; None keeps all of them in
            the Hub cache.
    """

    def __init__(self, source: Source, progress: Callable[[int, str], None], into: Path | None):
        if into and into.is_symlink():
            raise OutputError(f"{into}: is a link, and what is fetched for a while would be removed there; remove it")
        self.source, self.progress, self.into = source, progress, into
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="download")
        self._arriving: dict[str, Future] = {}
        self._needs: dict[str, frozenset[str]] = {"": frozenset()}  # until `begin` says which
        self._order: list[str] = []
        self._stop = Event()

    def begin(self, needs: dict[str, frozenset[str]]) -> list[str]:
        """Says which outputs are to be made; returns the order to make them in."""
        sizes = {name: file.size for name, file in self.source.files.items()}
        self._needs = dict(needs)
        self._order = order_of_work(needs, sizes) if self.into else list(needs)
        if not self.into:
            for name in self._order:
                self._send_for(needs[name])
        return self._order

    def have(self, shards: frozenset[str]) -> None:
        """Waits for some shards, before the outputs are begun."""
        self._send_for(shards)
        for shard in sorted(shards):
            self._arriving[shard].result()

    def need(self, output: str) -> None:
        """Waits for what an output is made of, and sends for what the next one is.

        Raises:
            SourceError: it could not be had.
        """
        place = self._order.index(output)
        for name in self._order[place : place + 2]:
            self._send_for(self._needs[name])
        for shard in sorted(self._needs[output]):
            self._arriving[shard].result()

    def release(self, output: str) -> None:
        """Tells that an output is finished: what no other needs may go."""
        done = self._needs.pop(output)
        if self.into:
            for shard in done - frozenset().union(*self._needs.values()):
                self._arriving.pop(shard, None)
                (self.into / shard).unlink(missing_ok=True)

    def close(self) -> None:
        """Ends all downloads; what was held for a while goes when every output is finished."""
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.into and not self._needs:
            shutil.rmtree(self.into, ignore_errors=True)

    def _send_for(self, shards: frozenset[str]) -> None:
        for shard in sorted(shards - self._arriving.keys()):
            self._arriving[shard] = self._pool.submit(self._fetch, shard)

    def _fetch(self, shard: str) -> None:
        fetch(self.source, shard, self._arrived, self.into)
        self.progress(0, shard)

    def _arrived(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self.progress(count, "")
