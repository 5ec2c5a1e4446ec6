"""Runs small tasks in processes: numpy's threads would wait for each other's turn at the interpreter."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection

from ..convert.workers import processors
from ..quantize.errors import MotifConvertError

Task = tuple[Callable, object]  # a function of a module, and its one argument
MOST_WORKERS = 12  # 65 MB each: what keeps up with a fast disk, and stays below 1 GB in all
AHEAD = 4  # tasks that wait for each worker


def default_workers() -> int:
    """As many as there are processors for this process, up to MOST_WORKERS."""
    return min(processors(), MOST_WORKERS)


@contextmanager
def results(tasks: Iterable[Task], workers: int) -> Iterator[Iterator[object]]:
    """What the tasks return, as they end; with one worker, here and in order.

    The workers are spawned, never forked, so that nothing of this process's threads comes along; a script that calls
    this needs the usual `if __name__ == "__main__":`. They end with the block, and at once if it is left by an
    exception or if this process is killed.

    Raises:
        MotifConvertError: a worker was killed. Besides, whatever a task raises.
    """
    if workers <= 1:
        yield (function(argument) for function, argument in tasks)
        return
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _start, (reader,))
    try:
        yield _as_they_end(pool, iter(tasks), AHEAD * workers)
    except BaseException:
        writer.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        writer.close()
        reader.close()


def _as_they_end(pool: ProcessPoolExecutor, tasks: Iterator[Task], ahead: int) -> Iterator[object]:
    pending = set()
    more = True
    try:
        while more or pending:
            while more and len(pending) < ahead:
                task = next(tasks, None)
                more = task is not None
                if more:
                    pending.add(_submit(pool, task))
            if pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
    except BrokenProcessPool:
        raise MotifConvertError(
            "a worker process was killed, perhaps for want of memory; run again with fewer workers"
        ) from None


def _submit(pool: ProcessPoolExecutor, task: Task) -> Future:
    """Submits a task, which may start a worker: with Ctrl-C held back, so that workers inherit that and leave it to
    this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(*task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(reader: Connection) -> None:
    """In a worker: it goes when the parent closes its end of the pipe or dies."""
    threading.Thread(target=_leave_with_parent, args=(reader,), daemon=True).start()


def _leave_with_parent(reader: Connection) -> None:
    try:
        reader.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
