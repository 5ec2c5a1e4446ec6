"""Publishing, from outside in: what goes to the test Hub, and where it goes."""

import hashlib
import json
import re
import sys
from pathlib import Path

import launch
from conftest import REFERENCE, motif_convert
from hub_server import Fault
from publishing import (
    EVIDENCE,
    INDEX,
    PROVENANCE,
    REPO,
    TINY,
    assert_refused,
    assert_said,
    commits,
    ours,
    run,
    tree_of,
    writes,
)

# --- what goes there ---


def test_upload_and_download_again(target, upload, builds, unpublished, small, tmp_path):
    (unpublished / ".env").write_text("SECRET=1")
    result = upload(unpublished, REPO)
    assert_said(result, 0, "Uploaded", f"{target.url}/{REPO}", "sizes and hashes equal")
    there, before = tree_of(unpublished), tree_of(builds["many"])
    assert ours(target) == there
    assert {name for name in there if there[name] != before.get(name)} == {"README.md", PROVENANCE}
    assert f"mlx_lm.generate --model {REPO} " in (unpublished / "README.md").read_text()
    assert commits(target) == 1
    head = target.repo(REPO).find("main")
    assert head.title.startswith("4.5bit build of small-motif3 by motif-convert")
    assert json.loads((unpublished / PROVENANCE).read_text())["plan_hash"] in head.description
    assert "--force" not in head.description
    code = f"from huggingface_hub import snapshot_download as d; d({REPO!r}, local_dir={str(tmp_path / 'again')!r})"
    got = run(sys.executable, "-c", code, env=target.env(tmp_path / "other"))
    assert got.returncode == 0, got.stderr
    again = tmp_path / "again"
    assert tree_of(again) == there
    found = run(*launch.small_shards(200_000, "verify", again, "--source", small))
    assert "Verified: every weight compared" in found.stdout
    code = f"from mlx_lm.utils import load_model as l; m, _ = l({again!r}, trust_remote_code=True); print(m.model_type)"
    loaded = run(sys.executable, "-c", f"from pathlib import PosixPath; {code}")
    assert loaded.stdout.strip() == "Motif", loaded.stderr


def test_made_and_published_in_one_command(target, token, tmp_path):
    """Into a repository that is made, and private."""
    env = target.env(tmp_path / "home", token)
    out, repo = tmp_path / "out", "someone/tiny-mlx"
    result = motif_convert("--source", TINY, "--out", out, "--upload", repo, "--private", env=env)
    assert_said(result, 0, f"Uploaded: {target.url}/{repo}")
    assert target.repo(repo).private
    assert ours(target, repo) == tree_of(out)
    assert json.loads(target.repo(repo).read(EVIDENCE))["passed"]
    assert target.requests[0].path == "/api/whoami-v2"


def test_from_the_hub_to_the_hub_in_one_command(target, token, tmp_path):
    """And what is there, downloaded again, is the model, and is what its source gives."""
    target.add_repo("acme/demo-motif3", files={p.name: p for p in (REFERENCE / "demo-motif3").iterdir()})
    env = target.env(tmp_path / "home", token) | {"HF_HUB_OFFLINE": "0"}
    options = ("--source", "acme/demo-motif3", "--stream", "--out", tmp_path / "out", "--upload", "someone/demo-mlx")
    options += ("--recipe", "bf16")  # decodes ten times as fast on the CPU; test_cli.py has the default one
    assert_said(motif_convert(*options, env=env), 0, f"Uploaded: {target.url}/someone/demo-mlx")
    assert ours(target, "someone/demo-mlx") == tree_of(tmp_path / "out")
    card = target.repo("someone/demo-mlx").read("README.md").decode()
    assert "base_model: acme/demo-motif3\n" in card
    assert "bit for bit" in card
    assert "accepted" in card
    other = target.env(tmp_path / "other") | {"HF_HUB_OFFLINE": "0"}
    again = str(tmp_path / "again")
    code = f"from huggingface_hub import snapshot_download as d; d('someone/demo-mlx', local_dir={again!r})"
    assert run(sys.executable, "-c", code, env=other).returncode == 0
    assert tree_of(Path(again)) == tree_of(tmp_path / "out")
    assert_said(motif_convert("verify", again, env=other), 0, "Verified: every weight compared")
    generate = str(Path(sys.executable).with_name("mlx_lm.generate"))
    said = run(generate, "--model", again, "--trust-remote-code", "--prompt", "def f(", "--max-tokens", 4, env=other)
    assert said.returncode == 0, said.stderr
    assert "Generation: 4 tokens" in said.stdout


def test_what_is_there_is_not_sent_again(target, upload, unpublished):
    upload(unpublished, REPO)
    sent, made = target.seen("", "PUT"), commits(target)
    result = upload(unpublished, REPO)
    assert_said(result, 0, "Nothing to do, it is there")
    assert len(target.seen("", "PUT")) == len(sent)
    assert commits(target) == made
    assert len(target.seen("/commit/", "POST")) == 1
    assert " new" not in result.stdout


def test_fewer_shards_leave_no_orphan(target, upload, builds, unpublished):
    """Nor evidence or files of the earlier build; what is not this program's stays."""
    upload(unpublished, REPO)
    theirs = {"notes.txt": b"mine", "assets/model-00001-of-00002.safetensors": b"mine", "extra.safetensors": b"mine"}
    target.commit(REPO, {**theirs, "model-00009-of-00009.safetensors": b"stray"})
    before = commits(target)
    result = upload(builds["one"], REPO)
    assert_said(result, 0, "Uploaded", "notes.txt")
    tree = ours(target)
    assert {name for name in tree if name in theirs} == set(theirs)
    assert {k: v for k, v in tree.items() if k not in theirs} == tree_of(builds["one"])
    assert ".gitattributes" in target.repo(REPO).tree()
    assert commits(target) == before + 1
    old = [p.name for p in unpublished.glob("model-*.safetensors")]
    assert len(old) > 2
    deleted = re.findall(r"^(\S+) +.* delete$", result.stdout, re.M)
    assert sorted(deleted) == sorted([*old, "model-00009-of-00009.safetensors"])


def test_a_list_that_is_nonsense_deletes_nothing(target, upload, builds):
    target.add_repo(REPO, {"notes.txt": b"mine", PROVENANCE: b'{"files": [1, 2]}'})
    assert_said(upload(builds["one"], REPO), 0)
    assert ours(target) == tree_of(builds["one"]) | {"notes.txt": (4, hashlib.sha256(b"mine").hexdigest())}


def test_ignored_files_are_pushed(target, upload, builds):
    target.add_repo(REPO, {".gitignore": b"*.safetensors\n*.py\n"})
    assert_said(upload(builds["one"], REPO), 0)
    assert tree_of(builds["one"]).items() <= ours(target).items()


def test_dry_run_touches_nothing(target, upload, builds, unpublished, tmp_path):
    target.add_repo(REPO, {"config.json": b"{}", PROVENANCE: b'{"files": {"old.txt": {}}}', "old.txt": b"old"})
    before = {p: p.stat().st_mtime_ns for p in [unpublished, *unpublished.iterdir()]}
    (unpublished / EVIDENCE).unlink()
    del before[unpublished], before[unpublished / EVIDENCE]
    result = upload(unpublished, REPO, "--dry-run", "--force")
    assert_said(result, 0, "Nothing was changed.")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line and "  " in line}
    for name, (size, _) in tree_of(unpublished).items():
        assert rows[name][-1] == ("replace" if name in ("config.json", PROVENANCE) else "new")
        assert float(rows[name][1]) <= size
    assert rows["old.txt"][-1] == "delete"
    assert rows[EVIDENCE][-1] == "new"
    assert writes(target) == []
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert not (unpublished / EVIDENCE).exists()
    assert not list((tmp_path / "home").rglob("*.json"))
    result = upload(unpublished, "someone/new", "--dry-run", "--force", "--revision", "dev", "--private", "--json")
    found = json.loads(result.stdout)
    assert {f["action"] for f in found["files"]} == {"new"}
    assert (found["commit"], found["passed"], found["revision"]) == (None, True, "dev")
    assert "someone/new" not in target.repos


def test_json(target, upload, unpublished):
    found = json.loads(upload(unpublished, REPO, "--json").stdout)
    assert {f["path"]: (f["size"], f["sha256"]) for f in found["files"]} == tree_of(unpublished)
    assert (found["repo"], found["revision"], found["made"]) == (REPO, "main", True)
    assert found["commit"] == target.repo(REPO).find("main").oid
    assert [f["path"] for f in found["files"]][-2:] == [INDEX, "config.json"]


# --- where it goes ---


def test_branch(target, upload, builds):
    first = target.add_repo(REPO).find("main")
    assert_said(upload(builds["one"], REPO, "--revision", "v1/dev"), 0, "v1/dev")
    assert ours(target, revision="v1/dev") == tree_of(builds["one"])
    assert f"hf download {REPO} --revision v1/dev --local-dir " in (builds["one"] / "README.md").read_text()
    assert target.repo(REPO).find("main") == first
    target.repo(REPO).refs["refs/tags/v1"] = first
    assert_refused(upload(builds["one"], REPO, "--revision", "v1"), "v1 is a tag")
    assert_refused(upload(builds["one"], REPO, "--revision", "refs/pr/7"), "no refs/pr/7")


def test_pull_request(target, upload, builds):
    """By somebody who may not write there; opened once, whatever happens, and pushed to afterwards."""
    target.add_repo(REPO)
    stranger = target.add_token("stranger", user="nobody")
    target.fail(Fault("POST", "/commit/", drop="after"))
    result = upload(builds["one"], REPO, "--create-pr", token=stranger)
    assert_said(result, 0, f"Uploaded: {target.url}/{REPO}/discussions/1")
    assert ours(target, revision="refs/pr/1") == tree_of(builds["one"])
    assert ours(target) == {}
    result = upload(builds["one"], REPO, "--create-pr", token=stranger)
    assert_said(result, 0, f"it is there: {target.url}/{REPO}/discussions/1")
    assert list(target.repo(REPO).pulls) == [1]
    result = upload(builds["many"], REPO, "--revision", "refs/pr/1")
    assert_said(result, 0)
    assert ours(target, revision="refs/pr/1") == tree_of(builds["many"])
    assert f"mlx_lm.generate --model {REPO} " in (builds["many"] / "README.md").read_text(), "as it will be on main"
    target.repo(REPO).pulls[1].status = "closed"
    upload(builds["many"], REPO, "--create-pr", token=stranger)
    assert list(target.repo(REPO).pulls) == [1, 2]
    assert_refused(upload(builds["many"], "acme/missing", "--create-pr"), "is not there")


def test_renamed_repository(target, upload, builds):
    target.add_repo(REPO)
    target.rename_repo(REPO, "acme/renamed")
    assert_said(upload(builds["one"], REPO), 0, "acme/renamed")
    assert ours(target, "acme/renamed") == tree_of(builds["one"])


def test_a_public_repository_is_not_made_private(target, upload, builds):
    target.add_repo(REPO)
    assert_refused(upload(builds["one"], REPO, "--private"), "is public")
    assert writes(target) == []
    target.repo(REPO).private = True
    assert_said(upload(builds["one"], REPO, "--private"), 0)


def test_a_model_of_others_is_not_replaced(target, upload, builds):
    target.add_repo(REPO, {"config.json": b"{}", "model.safetensors": b"theirs"})
    assert_said(upload(builds["one"], REPO), 1, "not of motif-convert", "--force")
    assert writes(target) == []
    assert_said(upload(builds["one"], REPO, "--force"), 0)
    assert ours(target) == tree_of(builds["one"])
    assert "not of motif-convert" in target.repo(REPO).find("main").description
