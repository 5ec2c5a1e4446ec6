"""Runs commands and says what they took: time, processors, memory of all their processes together."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil


@dataclass(frozen=True)
class Run:
    """One run of one side: seconds, seconds of all processors, the most bytes in memory of its processes together."""

    side: str
    wall: float
    cpu: float
    peak: int


def run(side: str, command: list[object]) -> Run:
    """Runs a command to its end; memory counts file pages too, and is looked at 50 times a second."""
    start = time.perf_counter()
    with (Path(os.devnull)).open("w") as devnull:
        process = subprocess.Popen(list(map(str, command)), stdout=devnull, stderr=subprocess.PIPE)
    family, peak, ended = psutil.Process(process.pid), 0, 0
    while not ended:
        peak = max(peak, sum(_rss(p) for p in [family, *_children(family)]), _most(process.pid))
        time.sleep(0.02)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{side}: {process.stderr.read().decode()}")
    process.stderr.close()
    return Run(side, wall, used.ru_utime + used.ru_stime, peak)


def _most(pid: int) -> int:
    """The most that one process had, as Linux keeps it. Not `ru_maxrss`, which begins with what its parent had."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def put_out_of_memory(*folders: Path) -> None:
    """Clean pages only: what was written is synced before. Linux alone can do it."""
    os.sync()
    for path in (p for folder in folders for p in folder.glob("*.safetensors")):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bring_into_memory(*folders: Path) -> None:
    for path in (p for folder in folders for p in folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as f:
            while f.read(64 << 20):
                pass


def by_turns(
    sides: dict[str, Callable[[Path], list[object]]], rounds: int, folder: Path, before: Callable[[], None]
) -> Iterator[Run]:
    """Every side once a round, into a new folder each time."""
    for number in range(rounds):
        for side, command in sides.items():
            out = folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            before()
            found = run(side, command(out))
            print(f"round {number + 1}: {side}: {found.wall:.2f} s", file=sys.stderr)
            yield found
    shutil.rmtree(folder / "out", ignore_errors=True)


def memcpy_rate() -> float:
    """Bytes a second, of 84 MB from memory."""
    a, best = np.ones(84 << 20, np.uint8), float("inf")
    b = np.zeros_like(a)
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(b, a)
        best = min(best, time.perf_counter() - start)
    return len(a) / best
