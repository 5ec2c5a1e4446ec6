"""Weights of a source or of a build as float32, any rows of any tensor, straight from the shards."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..convert.checkpoint import Checkpoint
from ..convert.headers import TensorInfo
from ..convert.plan import Plan
from ..convert.workers import processors
from ..quantize import oracle
from ..quantize.errors import SourceError
from .arithmetic import weights
from .contents import read_rows
from .layout import Block, Comparison, comparison
from .rounding import widen

PIECE = 1 << 20  # weights that a thread decodes at a time
MOST_AHEAD = 4  # experts that are read before they are needed
EXPERTS = tuple(f"switch_mlp.{projection}." for projection in ("gate_proj", "up_proj", "down_proj"))


def modules_of(plan: Plan, tensors: dict[str, TensorInfo], out, checkpoint: Checkpoint) -> dict[str, Comparison]:
    """Every parameter of a build by its MLX name, with where it and its source lie.

    Args:
        tensors: the build's, by name, with the dtypes and shapes of the plan.
        out: the build's folder.
    """
    return {m.stored[0].name: comparison(m, tensors, out, checkpoint) for m in plan.modules}


class Dense:
    """The weights of one side: of the source, decoded exactly, or of a build, decoded in float32.

    Args:
        modules: see `modules_of`.
        build: whether the build's side is meant.
    """

    def __init__(self, modules: dict[str, Comparison], build: bool):
        self.modules, self.build = modules, build
        self._pool = ThreadPoolExecutor(min(processors(), MOST_AHEAD), thread_name_prefix="weights")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._ahead: dict[str, Future[np.ndarray]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.modules

    def nbytes(self, name: str) -> int:
        """Bytes of a parameter where it is stored."""
        m = self.modules[name]
        rows = m.matrices * m.rows
        return sum(p.row_bytes * rows for p in (m.stored if self.build else m.sources))

    def rows(self, name: str, first: int, count: int) -> np.ndarray:
        """Rows [first, first + count) of all rows of a parameter: float32 [count, K].

        Raises:
            SourceError: they can't be read.
        """
        m = self.modules[name]
        parts, place = (m.stored, (m.rows, 0)) if self.build else (m.sources, (m.source_rows, m.first_row))
        raw, block = [], Block(m, first, count)
        for part in parts:
            try:
                raw.append(read_rows(part, block, *place, np.empty(count * part.row_bytes, np.uint8)))
            except OSError as e:
                raise SourceError(f"{part.file.name}: {part.name} could not be read: {e.strerror}") from None
        if self.build:
            return weights(m, raw)
        if m.source_dtype == "NVFP4":
            return oracle.nvfp4_dequantize(raw[0], raw[1], raw[2].view("<f4")[:, None])
        return widen(raw[0], m.source_dtype)

    def some(self, name: str, first: int, count: int) -> np.ndarray:
        """`rows`, decoded by several threads."""
        width = self.modules[name].width
        whole, step = np.empty((count, width), np.float32), max(1, PIECE // width)

        def decode(start: int) -> None:
            end = min(start + step, count)
            whole[start:end] = self.rows(name, first + start, end - start)

        for _ in self._pool.map(decode, range(0, count, step)):
            pass
        return whole

    def whole(self, name: str) -> np.ndarray:
        """A parameter, float32 in its own shape."""
        m = self.modules[name]
        ahead = self._ahead.pop(name, None)
        return (ahead.result() if ahead else self.some(name, 0, m.matrices * m.rows)).reshape(m.shape)

    def read_ahead(self, layer: int) -> None:
        """Has a thread read all of a layer but its routed experts; `whole` then finds it."""
        for name, m in self.modules.items():
            if m.layer == layer and not any(e in name for e in EXPERTS):
                self._ahead[name] = self._reader.submit(self.rows, name, 0, m.matrices * m.rows)

    def experts(self, names: tuple[str, ...], chosen: Iterable[int]) -> Iterator[tuple[int, list[np.ndarray]]]:
        """The matrices of some experts, one expert at a time, each of these stacks: read and decoded ahead."""

        def decode(expert: int) -> tuple[int, list[np.ndarray]]:
            every = [(n, self.modules[n].rows) for n in names]
            return expert, [self.rows(name, expert * rows, rows) for name, rows in every]

        pending = deque()
        for expert in chosen:
            if len(pending) == MOST_AHEAD:
                yield pending.popleft().result()
            pending.append(self._pool.submit(decode, expert))
        while pending:
            yield pending.popleft().result()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
