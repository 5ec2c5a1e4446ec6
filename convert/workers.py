"""Threads that work ahead on runs of rows, in buffers that are used again; results come in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import cycle
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
Result = TypeVar("Result")


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Two more than processors, since some always wait: for the disk, or for their turn to write."""
    return processors() + 2


class Buffers:
    """Arrays by use, kept and handed out again: fresh memory costs as much as the reading."""

    def __init__(self):
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, use: str, dtype: np.dtype | type, shape: tuple[int, ...]) -> np.ndarray:
        """An array with any content; it is the same memory at the next call for this use."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize * int(np.prod(shape))
        if use not in self._arrays or self._arrays[use].nbytes < nbytes:
            self._arrays[use] = np.empty(nbytes, np.uint8)
        return self._arrays[use][:nbytes].view(dtype).reshape(shape)


class Workers:
    """Threads for work that lets go of the GIL: reading, quantizing.

    Args:
        count: threads; one more piece of work than that is under way or done ahead of its use.
    """

    def __init__(self, count: int):
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="rows")
        self._ahead = count + 1
        self._buffers = cycle([Buffers() for _ in range(self._ahead)])

    def in_order(self, work: Callable[[Item, Buffers], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yields work(item, buffers) for every item, in order, whichever is done first.

        What lies in the buffers stays as it is until the next result is asked for.
        """
        pending: deque[Future] = deque()
        try:
            for item in items:
                if len(pending) == self._ahead:
                    yield pending.popleft().result()
                pending.append(self._pool.submit(work, item, next(self._buffers)))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            wait(pending)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)
