"""Progress of long work: a bar on a terminal, one line a shard elsewhere."""

import sys
import time
from threading import Lock

from .show import human_bytes


class Progress:
    """Counts bytes of source done, from any thread.

    Args:
        total: bytes of source in all.
        stage: the word before the bar.
    """

    def __init__(self, total: int, stage: str):
        self.total, self.done, self.label = total, 0, ""
        self.started = time.monotonic()
        self.bar = None
        self.lock = Lock()  # downloads call from several threads
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit="B", unit_scale=True, desc=stage, dynamic_ncols=True)

    def __call__(self, count: int, label: str) -> None:
        with self.lock:
            self.done += count
            if self.bar is not None:
                self.bar.update(count)
            elif label != self.label:
                self._line()
            self.label = label

    def _line(self) -> None:
        if self.label:
            rate = self.done / max(time.monotonic() - self.started, 1e-9)
            share = 100 * self.done / max(self.total, 1)
            print(f"{self.label}: {share:.0f} %, {human_bytes(rate)}/s", file=sys.stderr)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        else:
            self._line()
