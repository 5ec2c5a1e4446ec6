"""One of several processes that `mlx.launch` has started, on one machine or on many, and what they tell each other.

All of it goes through `mx.distributed`. A process that was started alone is the only rank, and imports nothing.
"""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..quantize.errors import MotifConvertError, OutputError
from .peers import Peer, neighbours

if TYPE_CHECKING:
    import numpy as np

JOIN_SECONDS = 40  # mlx gives up after 31 where it is refused
SEEN_SECONDS = 5  # that storage may take to show one machine what another has written
TOKEN = ".motif-convert.shared-"  # begins the name of a file that is there for a moment
LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # set by mlx.launch, or by the mpirun that it starts


@dataclass(frozen=True)
class Ranks:
    """This process among those that run the same command.

    Args:
        rank: from 0; rank 0 speaks, and writes what there is one of.
        size: how many there are.
        local: whether each keeps its own shards, in a folder of its own that the others do not see.
        peers: the neighbours in mlx's ring.
    """

    rank: int = 0
    size: int = 1
    local: bool = False
    peers: tuple[Peer, ...] = field(default=(), repr=False, compare=False)

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: object) -> list:
        """What every rank gives, JSON, by rank; waits for all.

        Raises:
            MotifConvertError: a rank is gone.
        """
        if not self.several:
            return [value]
        import numpy as np

        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self._all_gather(np.array([data.size], np.int32))
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: data.size] = data
        rows = self._all_gather(padded).reshape(self.size, -1)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def told(self, value: object = None) -> object:
        """What rank 0 gives, JSON, on every rank. Raises MotifConvertError."""
        return self.gather(value if self.first else None)[0]

    def added(self, array: "np.ndarray") -> "np.ndarray":
        """The sum of every rank's array of one shape. Raises MotifConvertError."""
        if not self.several:
            return array
        import mlx.core as mx
        import numpy as np

        with together(self.peers):
            total = mx.distributed.all_sum(mx.array(array), stream=mx.cpu)
            mx.eval(total)
        return np.array(total)

    def shared(self, array: "np.ndarray | None") -> "np.ndarray":
        """Rank 0's array, on every rank. Raises MotifConvertError."""
        if not self.several:
            return array
        import numpy as np

        shape, dtype = self.told(None if array is None else [list(array.shape), str(array.dtype)])
        return self.added(array if self.first else np.zeros(shape, dtype))

    @contextmanager
    def decoding(self) -> Iterator[object]:
        """While a model runs whose layers the ranks share: their `mx.distributed.Group`, None for one process.

        Raises:
            MotifConvertError: a rank is gone.
        """
        if not self.several:
            yield None
            return
        import mlx.core as mx

        with together(self.peers):
            yield mx.distributed.init()

    def _all_gather(self, array: "np.ndarray") -> "np.ndarray":
        import mlx.core as mx
        import numpy as np

        with together(self.peers):
            every = mx.distributed.all_gather(mx.array(array), stream=mx.cpu)
            mx.eval(every)
        return np.array(every)


ALONE = Ranks()


def join() -> Ranks:
    """This process among those that mlx.launch has started with it; alone if it was not mlx.launch that started it.

    Raises:
        MotifConvertError: the others can't be reached.
    """
    if not launched():
        return ALONE
    with _watched():  # begins with a fork, so before mlx is imported
        import mlx.core as mx

        with together():
            group = mx.distributed.init()
    return Ranks(group.rank(), group.size(), peers=neighbours(group.rank(), group.size()))


def launched() -> bool:
    """Whether mlx.launch has started this process together with others."""
    hosts = os.environ.get("MLX_HOSTFILE")  # empty where it has started one alone
    return any(name in os.environ for name in LAUNCHED) and not (hosts and os.path.getsize(hosts) < 2)


def name_of_rank() -> str:
    """Which rank this is, to begin an error with; empty for a process alone."""
    rank = next((os.environ[name] for name in LAUNCHED if name in os.environ), None)
    return f"rank {rank} ({socket.gethostname()}): " if rank is not None and launched() else ""


@contextmanager
def _watched() -> Iterator[None]:
    """Ends this process if it waits for ranks that do not come: mlx waits for ever, and holds the interpreter."""
    reader, writer = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(writer)
        if not select.select([reader], [], [], JOIN_SECONDS)[0]:
            text = f"motif-convert: error: {name_of_rank()}the other ranks have not come within {JOIN_SECONDS} s\n"
            os.write(2, text.encode())
            os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(watcher, 0)


@contextmanager
def together(peers: tuple[Peer, ...] = ()) -> Iterator[None]:
    """While this process waits for others in mlx, which no Python handler can interrupt, a signal ends it at once.

    Args:
        peers: whose connections say which rank is gone.
    Raises:
        MotifConvertError: another rank is gone.
    """
    import mlx.core  # noqa: F401, before the signals change: an import that is cut short is no harm, but is untidy

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        yield
    except RuntimeError as e:
        gone = next((peer for peer in peers if peer.gone), None)
        raise MotifConvertError(
            f"{gone or 'another rank'} is gone, or can't be reached ({e}); if it could, it has said why"
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check_agreed(ranks: Ranks, facts: dict[str, object]) -> None:
    """Refuses to work with ranks that have other facts, such as another version or another source.

    Args:
        facts: JSON by what it is of, in the words of the refusal.
    Raises:
        MotifConvertError: naming the first rank that differs from rank 0, and in what.
    """
    every = ranks.gather(facts | {"host": socket.gethostname()})
    for rank, theirs in enumerate(every):
        if differs := [name for name, value in facts.items() if theirs[name] != every[0][name]]:
            name = differs[0]
            raise MotifConvertError(
                f"rank {rank} ({theirs['host']}) has another {name} than rank 0 ({every[0]['host']}): "
                f"{theirs[name]}, not {every[0][name]}"
            )


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Refuses a folder that is another one, or none, on another rank.

    Raises:
        OutputError: naming the first rank that has another; or rank 0 may not write there.
    """
    seen = _see_token(ranks, folder, SEEN_SECONDS)
    for rank, (there, host) in enumerate(seen):
        if not there:
            raise OutputError(
                f"{folder}: on rank {rank} ({host}) it is not the folder of rank 0 ({seen[0][1]}); it must lie on "
                "storage that all ranks share"
            )


def check_own(ranks: Ranks, folder: Path) -> None:
    """Refuses a folder, which need not be there yet, that is the same one on another rank.

    Raises:
        OutputError: naming that rank; or rank 0 may not write there.
    """
    above = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    for rank, (there, host) in enumerate(_see_token(ranks, above, 0)):
        if there and rank:
            raise OutputError(
                f"{folder}: rank {rank} ({host}) has the same folder as rank 0; --local is for ranks with folders of "
                "their own: leave it out"
            )


def _see_token(ranks: Ranks, folder: Path, seconds: float) -> list[list]:
    """Whether each rank sees, within some seconds, a file that rank 0 makes in a folder, and each rank's host."""
    if not ranks.several:
        return []
    token, error = None, None
    if ranks.first:
        token = folder / f"{TOKEN}{os.urandom(8).hex()}"
        try:
            token.touch(exist_ok=False)
        except OSError as e:
            error = f"{folder}: rank 0 may not write there: {e.strerror}"
    try:
        name, error = ranks.told([token.name if token else None, error])
        if error:
            raise OutputError(error)
        return ranks.gather([_appears(folder / name, seconds), socket.gethostname()])
    finally:
        if token:
            token.unlink(missing_ok=True)


def _appears(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= until or not path.parent.is_dir():
            return False
        time.sleep(0.1)
    return True
