"""Sources by folder and by Hub cache, with the installed command and a cache of the Hub's own layout."""

import hashlib
import json
from pathlib import Path

import pytest
from conftest import motif_convert

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "Acme-Labs/small-motif3"


@pytest.fixture(scope="module")
def cache(small, tmp_path_factory) -> Path:
    """A Hub cache with one repository: blobs, a snapshot of links to them, and the branch that names it."""
    cache = tmp_path_factory.mktemp("hub")
    repo = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file in sorted(small.iterdir()):
        blob = repo / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return cache


@pytest.fixture
def snapshot(cache) -> Path:
    return next(cache.glob("models--*/snapshots/*"))


def recorded_source(out: Path) -> dict:
    return json.loads((out / "motif-convert.json").read_text())["source"]


@pytest.fixture(scope="module")
def by_id(cache, tmp_path_factory) -> Path:
    """The build of the cached repository, asked for by its id."""
    out = tmp_path_factory.mktemp("by-id") / "out"
    result = motif_convert("convert", "--source", REPO, "--out", out, env={"HF_HUB_CACHE": str(cache)})
    assert result.returncode == 0, result.stderr
    return out


def test_repo_id_in_the_cache(by_id):
    assert recorded_source(by_id)["id"] == REPO
    assert recorded_source(by_id)["revision"] == COMMIT
    card = (by_id / "README.md").read_text()
    assert f"base_model: {REPO}\n" in card
    assert COMMIT in card


def test_repository_and_its_snapshot_folder_give_the_same_build(by_id, snapshot, built):
    files = {p.name: p.read_bytes() for p in by_id.iterdir()}
    assert {p.name: p.read_bytes() for p in built(snapshot).iterdir()} == files


def test_cache_under_hf_home(cache, tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "hub").symlink_to(cache)
    result = motif_convert("plan", "--source", REPO, env={"HF_HOME": str(tmp_path)})
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("by_folder", [False, True])
def test_build_is_named_after_the_repository(by_folder, cache, snapshot, tmp_path):
    """And not after the commit, which is what a snapshot's folder is called."""
    (tmp_path / "small-motif3-mlx-4.5bit").mkdir()
    (tmp_path / "small-motif3-mlx-4.5bit" / "mine.txt").touch()
    source = snapshot if by_folder else REPO
    result = motif_convert("convert", "--source", source, cwd=tmp_path, env={"HF_HUB_CACHE": str(cache)})
    assert result.returncode == 2
    assert "small-motif3-mlx-4.5bit: is not empty" in result.stderr


def test_local_folder_is_known_by_its_name_alone(small, built):
    source = recorded_source(built(small))
    assert source["id"] == small.name
    assert source["revision"] is None
    assert source["config_sha256"] == hashlib.sha256((small / "config.json").read_bytes()).hexdigest()
    index = (small / "model.safetensors.index.json").read_bytes()
    assert source["index_sha256"] == hashlib.sha256(index).hexdigest()


def test_folder_named_by_a_relative_path(small, tmp_path):
    result = motif_convert("convert", "--source", ".", "--out", tmp_path / "out", cwd=small)
    assert result.returncode == 0, result.stderr
    assert recorded_source(tmp_path / "out")["id"] == small.name


@pytest.mark.parametrize("missing", ["Nobody/no-such-model", "Acme-Labs/small-motif"])
def test_repository_that_is_not_in_the_cache(missing, cache, tmp_path):
    result = motif_convert("convert", "--source", missing, cwd=tmp_path, env={"HF_HUB_CACHE": str(cache)})
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert missing in line
    assert f"hf download {missing}" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cached", [True, False])
def test_default_source_is_the_published_checkpoint(cached, cache, tmp_path):
    """Without --source, the cache is asked for Motif-3; here it does not have it."""
    env = {"HF_HUB_CACHE": str(cache if cached else tmp_path / "no-cache")}
    result = motif_convert("plan", cwd=tmp_path, env=env)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "Motif-Technologies/Motif-3" in line


def test_snapshot_that_lacks_a_shard(small, tmp_path):
    """An interrupted download: the snapshot is there, a link in it is not."""
    snapshot = tmp_path / "models--Acme--half" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "models--Acme--half" / "refs").mkdir()
    (tmp_path / "models--Acme--half" / "refs" / "main").write_text(COMMIT)
    files = sorted(small.iterdir())
    lost = next(f for f in files if f.name.startswith("model-"))
    for file in files:
        if file != lost:
            (snapshot / file.name).symlink_to(file)
    result = motif_convert("plan", "--source", "Acme/half", env={"HF_HUB_CACHE": str(tmp_path)})
    assert result.returncode == 2
    assert lost.name in result.stderr
    assert "Traceback" not in result.stderr
