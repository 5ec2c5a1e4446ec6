"""What the tests of interrupted conversions share."""

import json
import subprocess
from pathlib import Path

from conftest import REFERENCE, contents
from motif_convert.recipes.cli import cli

TINY = REFERENCE / "tiny-motif3"
JOURNAL = ".motif-convert.json"
SHARD = "model-00001-of-00001.safetensors"


def differing(folder: Path, whole: Path) -> list[str]:
    """Names of the files that are not the same, or that only one of the folders has."""
    found, expected = contents(folder), contents(whole)
    return [name for name in sorted(found | expected) if found.get(name) != expected.get(name)]


def convert(source: Path, out: Path, *options: str) -> None:
    cli.main(["convert", "--source", str(source), "--out", str(out), *options], standalone_mode=False)


def assert_refused(result: subprocess.CompletedProcess, *fragments: str) -> None:
    assert (result.returncode, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("motif-convert: error: ")
    for fragment in fragments:
        assert fragment in last


def headers(folder: Path) -> dict[str, dict]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            found |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found.pop("__metadata__", None)
    return found
