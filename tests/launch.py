"""The command in several processes that mlx.launch starts, over loopback."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from warm import COMMAND

LAUNCHER = str(Path(sys.executable).with_name("mlx.launch"))
SECONDS = 120
# mlx.launch waits until it can write to a rank's stdin, which nobody reads, and keeps a core busy until that is full.
PIPE = 1 << 16
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


@dataclass
class Launched:
    """mlx.launch at work, in a process group of its own, and what it has printed so far."""

    process: subprocess.Popen
    output: BinaryIO
    errors: BinaryIO

    @property
    def out(self) -> str:
        return _text(self.output)

    @property
    def err(self) -> str:
        return _text(self.errors)

    def end(self) -> None:
        """Nothing of the group is left afterwards."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for file in (self.process.stdin, self.output, self.errors):
            file.close()

    def finish(self, seconds: float = SECONDS) -> tuple[str, str]:
        """Waits for its end; what it printed."""
        try:
            self.process.wait(seconds)
            return self.out, self.err
        finally:
            self.end()


def _text(file: BinaryIO) -> str:
    """All of it; the place where others write stays where it is."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def start(ranks: int, command: list[object], cwd: Path | None = None, env: dict[str, str] | None = None) -> Launched:
    """mlx.launch with a command line, and variables that are added to the environment."""
    options = ["-n", ranks, "--backend", "ring", "--starting-port", ports(ranks)]
    files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115, they outlive this function
    process = subprocess.Popen(
        [LAUNCHER, *map(str, [*options, "--", *command])],
        stdin=subprocess.PIPE,
        stdout=files[0],
        stderr=files[1],
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {}),
        start_new_session=True,
    )
    with suppress(BrokenPipeError):
        process.stdin.write(bytes(PIPE))
        process.stdin.flush()
    return Launched(process, *files)


def run(ranks: int, *args: object, cwd: Path | None = None) -> tuple[str, str]:
    """The command in several ranks: what they printed. mlx.launch's own exit code is 0 whatever happens."""
    return start(ranks, [COMMAND, *args], cwd).finish()


def each(*commands: str) -> list[str]:
    """A command line of its own for each rank."""
    cases = " ".join(f"{rank}) exec {command};;" for rank, command in enumerate(commands))
    return ["bash", "-c", f"case $MLX_RANK in {cases} esac"]
