"""What a process is at its start: its signals and its streams."""

import os
import signal
import sys

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # exit code
PATIENCE = 10  # seconds that an interrupted run has to clear up


def be_sturdy() -> None:
    """A polite kill and a closed terminal end a run as Ctrl-C does; closed streams lead nowhere."""
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed; its number would go to the next file, and mlx takes 0 for a failure
            fd = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(fd if fd == number else os.dup2(fd, number), "r" if number == 0 else "w"))


def be_deaf() -> None:
    """All is done: what is left is the interpreter's own end."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(*_) -> None:
    """Raises KeyboardInterrupt. It may hit a callback, which swallows it, or leave a lock held for which the way out
    waits for ever: the process ends all the same."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(INTERRUPTED))
    signal.alarm(PATIENCE)
    raise KeyboardInterrupt
