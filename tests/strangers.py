"""What the tests of hostile files share."""

import subprocess
from functools import cache
from pathlib import Path

import warm
from conftest import REFERENCE, environment_with, motif_convert

TINY, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "demo-motif3"
SECONDS = 5


@cache
def warmed() -> None:
    motif_convert("--version")


def quickly(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    warmed()
    return warm.run(args, environment_with({"HF_HUB_OFFLINE": "1"}), cwd, SECONDS)
