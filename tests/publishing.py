"""What the tests of publishing share: builds, a Hub, and what may be said of either."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import launch
import pytest
from conftest import REFERENCE, motif_convert
from hub_server import HubServer

TINY = REFERENCE / "tiny-motif3"
REPO = "acme/small-mlx"
INDEX, PROVENANCE, EVIDENCE = "model.safetensors.index.json", "motif-convert.json", "validation.json"


def run(*args: object, env: dict | None = None) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {})
    return subprocess.run(list(map(str, args)), env=environment, capture_output=True, text=True, timeout=120)


def make_build(source: object, out: Path, size: int, *options: str, verified: bool = True) -> Path:
    """A build with shards of at most `size` bytes, verified."""
    made = run(*launch.small_shards(size, "convert", "--source", source, "--out", out, *options))
    assert made.returncode == 0, made.stderr
    if verified:
        found = run(*launch.small_shards(size, "verify", out, "--source", source))
        assert found.returncode == 0, found.stdout
    return out


@pytest.fixture(scope="module")
def builds(small, tmp_path_factory) -> dict[str, Path]:
    """The small checkpoint in many shards and in one; and in many that are not verified."""
    folder = tmp_path_factory.mktemp("builds")
    make_build(small, folder / "bare", 200_000, verified=False)
    shutil.copytree(folder / "bare", folder / "many")
    assert run(*launch.small_shards(200_000, "verify", folder / "many", "--source", small)).returncode == 0
    make_build(small, folder / "one", 5 << 30)
    return {name: folder / name for name in ("bare", "many", "one")}


@pytest.fixture
def target(tmp_path):
    with HubServer(tmp_path / "server") as target:
        yield target


@pytest.fixture
def token(target) -> str:
    return target.add_token("owner", orgs=("acme",))


@pytest.fixture
def upload(target, token, tmp_path):
    """Runs `motif-convert upload`; with the owner's token unless another is given."""

    def upload(*args: object, token: str = token, **env: str) -> subprocess.CompletedProcess:
        return motif_convert("upload", *args, env=target.env(tmp_path / "home", token) | env)

    return upload


@pytest.fixture
def unpublished(builds, tmp_path) -> Path:
    return Path(shutil.copytree(builds["many"], tmp_path / "build"))


def tree_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of every file that is no part of another program's bookkeeping."""
    files = (p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return {p.name: (p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}


def ours(target: HubServer, repo: str = REPO, revision: str = "main") -> dict[str, tuple[int, str]]:
    tree = target.repo(repo).tree(revision)
    tree.pop(".gitattributes", None)
    return tree


def commits(target: HubServer, repo: str = REPO) -> int:
    """Commits but for the first, which the Hub makes."""
    return len(target.repo(repo).commits) - 1


def writes(target: HubServer) -> list[str]:
    return [f"{r.method} {r.path}" for r in target.requests if r.method not in ("GET", "HEAD")]


def assert_said(result: subprocess.CompletedProcess, code: int, *fragments: str) -> None:
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    for fragment in fragments:
        assert fragment in result.stdout + result.stderr


def assert_refused(result: subprocess.CompletedProcess, *fragments: str) -> None:
    """Exit code 2 and a line that says why."""
    assert_said(result, 2, "motif-convert: error: ", *fragments)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
