"""The shape of the code: which room may import which, and what a room may not import at all."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("quantize", "convert", "validate", "recipes")  # each may import from those to its left
FILES = [path for room in ROOMS for path in sorted((ROOT / room).glob("**/*.py"))]
HEAVY = ("mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "tqdm")


def imported(path: Path) -> list[str]:
    """Dotted names of all that a file imports, wherever in the file; relative ones made absolute."""
    here = ["motif_convert", *path.relative_to(ROOT).with_suffix("").parts]
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: -node.level], *filter(None, [node.module])] if node.level else [node.module]
            names += [".".join([*base, alias.name]) for alias in node.names]
    return names


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def test_every_room_has_files():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = path.relative_to(ROOT).parts[0]
    allowed = ROOMS[: ROOMS.index(own) + 1]
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("motif_convert.")}
    assert rooms <= set(allowed)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_are_imported_by_their_full_name(path):
    """A plain `import convert` finds whatever else is installed under that name."""
    assert not roots(path) & set(ROOMS)


def test_who_talks_to_the_hub():
    """The first four for sources; the others for publishing: who may, what to do, the doing; patience for both."""
    found = {path.relative_to(ROOT).as_posix() for path in FILES if "huggingface_hub" in roots(path)}
    downloads, uploads = ("fetch", "hub", "sources"), ("account", "publish", "push")
    assert found == {f"convert/{name}.py" for name in (*downloads, *uploads, "patience")}


def test_the_architecture_file_needs_only_mlx_and_mlx_lm():
    path = ROOT / "convert" / "motif.py"
    assert roots(path) <= set(sys.stdlib_module_names) | {"mlx", "mlx_lm"}  # so nothing relative either


def test_the_command_line_starts_light():
    """--help and a wrong option must not wait for mlx, or for what mlx-lm brings along."""
    code = "import json, sys, motif_convert.recipes.cli; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert "click" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_no_command_waits_for_mlx_lm_without_need(command, tmp_path):
    """It takes a second and 60 MB to import."""
    words = [command, "--source", "demo"] + (["--out", str(tmp_path / "out")] if command == "convert" else [])
    code = f"""
import json, sys
sys.argv = ["motif-convert", *{words!r}]
from motif_convert.recipes.cli import main
main()
assert not {{"mlx", "mlx_lm", "transformers", "matplotlib"}} & {{name.partition(".")[0] for name in sys.modules}}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
