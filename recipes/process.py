"""What a process is at its start: its signals and its streams."""

import os
import signal
import sys


def be_sturdy() -> None:
    """A polite kill and a closed terminal end a run as Ctrl-C does; closed streams lead nowhere."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed; its number would go to the next file, and mlx takes 0 for a failure
            fd = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(fd if fd == number else os.dup2(fd, number), "r" if number == 0 else "w"))
