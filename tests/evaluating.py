"""What the tests of `eval` share."""

import json
from pathlib import Path

from conftest import REFERENCE, motif_convert

TINY, NVFP4, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "tiny-motif3-nvfp4", REFERENCE / "demo-motif3"


def compared(out: Path, source: Path, *args: object) -> dict:
    """`eval --json` of a build, whose exit code is 0."""
    result = motif_convert("eval", out, "--source", source, *args, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
