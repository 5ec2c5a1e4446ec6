"""The command in processes that start warm: forked from a server that has imported all that takes long.

What runs is the entry point of the installed command, in a process of its own, with its own environment, working
directory and streams. Importing takes a second or three; a fork takes 30 ms. On macOS, where forking is not safe, and
for environments that libraries look at when they are imported, the command is started as ever.
"""

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import trouble

COMMAND = str(Path(sys.executable).with_name("motif-convert"))
WITH_MODELS, WITHOUT = "with models", "without"  # kinds of servers
MAX_MESSAGE = 1 << 18
# Read when a library is imported: a run in which one of them is not the server's needs a process from the start.
READ_AT_IMPORT = ("HF_", "HUGGING", "PYTHON", "NUMBA", "MLX", "OMP_", "OPENBLAS", "LD_", "MPL", "XDG_", "TRANSFORMERS")


# --- the server ---


def load(kind: str) -> None:
    """Imports what commands import, less mlx, whose threads do not outlive a fork, and loads the compiled kernels.

    Those that load models import more of transformers too.
    """
    from motif_convert.validate.pytorch import keep_out

    keep_out()
    import huggingface_hub  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import numpy as np
    import transformers.utils  # noqa: F401
    from motif_convert.quantize.kernels import affine_quantize
    from motif_convert.quantize.precision import Quantized
    from motif_convert.recipes import cli, pipeline, show, upload  # noqa: F401

    if kind == WITH_MODELS:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    for bits in (4, 8):
        affine_quantize(np.zeros((1, 64), np.uint16), "BF16", Quantized("affine", bits, 64))
    assert not any(name.startswith("mlx") for name in sys.modules)


def serve(requests: socket.socket) -> dict | None:
    """Forks a process for every request; returns in such a process, with what it asks for, and None in the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, ancillary, *_ = requests.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(3 * 4))
        if not message:
            return None
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        if os.fork() == 0:
            requests.close()
            return keep(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def keep(request: dict, answers: int, out: int, err: int) -> dict:
    """Tells the process's id, and how it ended; returns in that process alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        os.write(answers, b"%d\n" % pid)
        status = os.waitpid(pid, 0)[1]
        with suppress(BrokenPipeError):
            os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in (answers, out, err):
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return request


def prepare(request: dict) -> None:
    """What a test asks for beside the command: `set`, constants by their dotted names; `refuse`, see trouble.py."""
    for name, value in request.get("set", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(import_module(module), constant, value)
    if "refuse" in request:
        trouble.refuse(*request["refuse"])


def end(code: object) -> None:
    """What an interpreter does at its end, less taking apart every module, which takes 600 ms."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


# --- its client ---


class Process:
    """A run of the command; as `subprocess.Popen` where both have a method."""

    def __init__(self, answers: socket.socket):
        self._answers = answers.makefile("r")
        answers.close()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        ready = self.returncode is None and select.select([self._answers], [], [], 0)[0]
        return self.wait() if ready else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(COMMAND, timeout)
            self.returncode = int(self._answers.readline())
        return self.returncode


@cache
def server(kind: str) -> socket.socket:
    """The socket of a server of this process; it ends with it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, __file__, kind], stdin=its, env=environment, stdout=subprocess.DEVNULL)
    its.close()
    atexit.register(stop, process, ours)
    return ours


def stop(process: subprocess.Popen, requests: socket.socket) -> None:
    requests.close()
    process.wait()


def serves(environment: dict[str, str]) -> bool:
    """Whether a run in an environment may be forked."""
    mine = os.environ | {"HF_HUB_OFFLINE": "1"}
    differs = {k for k in mine.keys() | environment.keys() if mine.get(k) != environment.get(k)}
    return sys.platform == "linux" and not any(k.startswith(READ_AT_IMPORT) for k in differs)


def start(args: Sequence[object], environment: dict[str, str], cwd: Path | None, out, err, more=None) -> Process:
    """Starts the command.

    Args:
        out, err: open files.
        more: see `prepare`.
    """
    request = {"args": [COMMAND, *map(str, args)], "cwd": str(cwd or Path.cwd()), "environment": environment}
    request |= more or {}
    if not serves(environment):
        cold = [sys.executable, __file__, json.dumps(request)] if more else request["args"]
        return subprocess.Popen(cold, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    ours, its = socket.socketpair()
    command = str(next(iter(args), "-"))
    loads = command in ("eval", "smoke") or command.startswith("-")  # the command by itself makes text
    socket.send_fds(
        server(WITH_MODELS if loads else WITHOUT),
        [json.dumps(request).encode()],
        [its.fileno(), out.fileno(), err.fileno()],
    )
    its.close()
    return Process(ours)


def run(
    args: Sequence[object], environment: dict[str, str], cwd: Path | None = None, timeout: float = 600, more=None
) -> subprocess.CompletedProcess:
    """As `subprocess.run` of the command, with its output as text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(args, environment, cwd, out, err, more)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(list(args), process.returncode, *texts)


if __name__ == "__main__":
    if sys.argv[1] not in (WITH_MODELS, WITHOUT):
        wanted = json.loads(sys.argv[1])
    else:
        load(sys.argv[1])
        wanted = serve(socket.socket(fileno=0))
    if wanted is not None:
        from motif_convert.recipes.cli import main

        prepare(wanted)
        sys.argv = wanted["args"]
        try:
            main()
        except SystemExit as e:
            end(e.code)
        end(0)
