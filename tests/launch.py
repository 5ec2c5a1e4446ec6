"""The command in several processes that mlx.launch starts, over loopback."""

import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LAUNCHER = str(Path(sys.executable).with_name("mlx.launch"))
COMMAND = str(Path(sys.executable).with_name("motif-convert"))
SECONDS = 120
# As the installed command, with shards of a size that a small checkpoint has several of.
SMALL_SHARDS = """
import sys
from motif_convert.convert import planner
from motif_convert.recipes.cli import main
planner.MAX_SHARD_BYTES = int(sys.argv.pop(1))
main()
"""


def small_shards(nbytes: int, *args: object) -> list[str]:
    """A command line that writes shards of at most some bytes."""
    return [sys.executable, "-c", SMALL_SHARDS, str(nbytes), *map(str, args)]


def ports(count: int) -> int:
    """The first of some ports in a row that are free."""
    while True:
        first = random.randrange(20_000, 60_000)
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            return first


def start(ranks: int, command: list[object], cwd: Path | None = None) -> subprocess.Popen:
    """mlx.launch with a command line, in a process group of its own; its output is text."""
    launch = [LAUNCHER, "-n", str(ranks), "--starting-port", str(ports(ranks)), "--", *map(str, command)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(launch, **pipes, text=True, cwd=cwd, env=environment, start_new_session=True)


def finish(process: subprocess.Popen, seconds: float = SECONDS) -> tuple[str, str]:
    """What it printed. All of the group is gone afterwards."""
    try:
        return process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(ranks: int, *args: object, cwd: Path | None = None) -> tuple[str, str]:
    """The command in several ranks: what they printed. mlx.launch's own exit code is 0 whatever happens."""
    return finish(start(ranks, [COMMAND, *args], cwd))
