"""Makes the kernel refuse system calls of this process, as a disk that fails or is full would: Linux only."""

import ctypes
import platform
import struct
from threading import Timer

NUMBERS = {
    "x86_64": {"pwrite64": 18, "fsync": 74, "rename": 82, "preadv2": 327, "seccomp": 317},
    "aarch64": {"pwrite64": 68, "fsync": 82, "rename": 38, "preadv2": 286, "seccomp": 277},
}
PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER, ALL_THREADS = 38, 1, 1
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ERROR, ALLOW = 0x00050000, 0x7FFF0000


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(call: str, error: int, after: float) -> None:
    """From `after` seconds on, every such call fails with this errno."""
    timer = Timer(after, _install, (NUMBERS[platform.machine()], call, error))
    timer.daemon = True
    timer.start()


def _install(numbers: dict[str, int], call: str, error: int) -> None:
    """A filter of four instructions: seccomp(2), and linux/filter.h for their layout."""
    code = [(LOAD_WORD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, numbers[call]), (RETURN, 0, 0, ERROR | error)]
    packed = b"".join(struct.pack("HBBI", *line) for line in [*code, (RETURN, 0, 0, ALLOW)])
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = Program(4, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = failed or libc.syscall(numbers["seccomp"], SECCOMP_SET_MODE_FILTER, ALL_THREADS, ctypes.byref(program))
    if failed:
        raise OSError(ctypes.get_errno(), "seccomp")
