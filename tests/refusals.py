"""What the command says of bad input: at once, in one line, and nothing is left."""

from functools import cache
from pathlib import Path

import warm
from conftest import environment_with

SECONDS = 5


@cache
def warmed() -> None:
    """The first run waits for the imports."""
    warm.run(["--version"], environment_with({"HF_HUB_OFFLINE": "1"}))


def refused(tmp_path: Path, *args: object) -> str:
    """What the command says of bad input: exit code 2, one line (a list has a line for each item), nothing left."""
    warmed()
    work = tmp_path / "work"
    work.mkdir()
    before = sorted(tmp_path.rglob("*"))
    result = warm.run(args, environment_with({"HF_HUB_OFFLINE": "1"}), work, SECONDS)
    message = result.stderr
    assert result.returncode == 2, message
    assert result.stdout == ""
    assert "Traceback" not in message
    assert message.lower().count("error: ") == 1
    assert len(message) < 20_000
    assert all(line.isprintable() for line in message.splitlines())
    assert sorted(tmp_path.rglob("*")) == before
    return message


def said(message: str, fragments: tuple[str, ...]) -> None:
    missing = [f for f in fragments if f not in message]
    assert not missing, message
