"""What can go wrong between a client and the test Hub, when a test asks for it."""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CHUNK = 64 * 1024


@dataclass(frozen=True)
class Fault:
    """What goes wrong with requests of a method (a regex for the whole of it) whose path a regex finds.

    One of: `status`, with `message` and `headers`; `cut`, the connection ends after so many bytes of the answer's
    body; `cut_upload`, it is reset after so many bytes of the request's; `corrupt`, as many bytes but other ones;
    `pause`, seconds before each `chunk` bytes of either body; `drop`, the connection is reset "before" anything is
    done or "after" it, so that the answer alone is lost. The first `skip` requests are spared, then `times` are
    struck; None for all.
    """

    method: str
    path: str
    times: int | None = 1
    skip: int = 0
    status: int | None = None
    message: str = "a fault that the test asked for"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    cut_upload: int | None = None
    corrupt: bool = False
    pause: float = 0
    chunk: int = CHUNK
    drop: Literal["before", "after"] | None = None


class Faults:
    """The faults that are still to strike: of those that fit a request, the one that was asked for first."""

    def __init__(self) -> None:
        self._waiting: list[list] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append([fault, fault.skip, fault.times])

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()

    def take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for entry in self._waiting:
                fault, skip, times = entry
                if times == 0 or not (re.fullmatch(fault.method, method) and re.search(fault.path, path)):
                    continue
                if not skip:
                    entry[2] = None if times is None else times - 1
                    return fault
                entry[1] -= 1
        return None
