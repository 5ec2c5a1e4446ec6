"""Publishing, from outside in: the installed command against the test Hub, killed, refused, and done again."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import launch
import pytest
from conftest import REFERENCE, SMALL_CONFIG, motif_convert, random_weights, write_checkpoint
from hub_server import READ, WRITE, Fault, HubServer, storage_exceeded
from warm import COMMAND

TINY = REFERENCE / "tiny-motif3"
REPO = "acme/small-mlx"
INDEX, PROVENANCE, EVIDENCE = "model.safetensors.index.json", "motif-convert.json", "validation.json"
NOW = {"Retry-After": "0"}  # a test need not wait


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
def server(tmp_path):
    with HubServer(tmp_path / "server") as server:
        yield server


@pytest.fixture
def token(server) -> str:
    return server.add_token("owner", orgs=("acme",))


@pytest.fixture
def upload(server, token, tmp_path):
    """Runs `motif-convert upload`; with the owner's token unless another is given."""

    def upload(*args: object, token: str = token, **env: str) -> subprocess.CompletedProcess:
        return motif_convert("upload", *args, env=server.env(tmp_path / "home", token) | env)

    return upload


@pytest.fixture
def build(builds, tmp_path) -> Path:
    return Path(shutil.copytree(builds["many"], tmp_path / "build"))


def tree_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of every file that is no part of another program's bookkeeping."""
    files = (p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return {p.name: (p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}


def ours(server: HubServer, repo: str = REPO, revision: str = "main") -> dict[str, tuple[int, str]]:
    tree = server.repo(repo).tree(revision)
    tree.pop(".gitattributes", None)
    return tree


def commits(server: HubServer, repo: str = REPO) -> int:
    """Commits but for the first, which the Hub makes."""
    return len(server.repo(repo).commits) - 1


def writes(server: HubServer) -> list[str]:
    return [f"{r.method} {r.path}" for r in server.requests if r.method not in ("GET", "HEAD")]


def assert_said(result: subprocess.CompletedProcess, code: int, *fragments: str) -> None:
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    for fragment in fragments:
        assert fragment in result.stdout + result.stderr


def assert_refused(result: subprocess.CompletedProcess, *fragments: str) -> None:
    """Exit code 2 and a line that says why."""
    assert_said(result, 2, "motif-convert: error: ", *fragments)


# --- what goes there ---


def test_upload_and_download_again(server, upload, builds, build, small, tmp_path):
    (build / ".env").write_text("SECRET=1")
    result = upload(build, REPO)
    assert_said(result, 0, "Uploaded", f"{server.url}/{REPO}", "sizes and hashes equal")
    there, before = tree_of(build), tree_of(builds["many"])
    assert ours(server) == there
    assert {name for name in there if there[name] != before.get(name)} == {"README.md", PROVENANCE}
    assert f"mlx_lm.generate --model {REPO} " in (build / "README.md").read_text()
    assert commits(server) == 1
    head = server.repo(REPO).find("main")
    assert head.title.startswith("4.5bit build of small-motif3 by motif-convert")
    assert json.loads((build / PROVENANCE).read_text())["plan_hash"] in head.description
    assert "--force" not in head.description
    code = f"from huggingface_hub import snapshot_download as d; d({REPO!r}, local_dir={str(tmp_path / 'again')!r})"
    got = run(sys.executable, "-c", code, env=server.env(tmp_path / "other"))
    assert got.returncode == 0, got.stderr
    again = tmp_path / "again"
    assert tree_of(again) == there
    found = run(*launch.small_shards(200_000, "verify", again, "--source", small))
    assert "Verified: every weight compared" in found.stdout
    code = f"from mlx_lm.utils import load_model as l; m, _ = l({again!r}, trust_remote_code=True); print(m.model_type)"
    loaded = run(sys.executable, "-c", f"from pathlib import PosixPath; {code}")
    assert loaded.stdout.strip() == "Motif", loaded.stderr


def test_made_and_published_in_one_command(server, token, tmp_path):
    """Into a repository that is made, and private."""
    env = server.env(tmp_path / "home", token)
    out, repo = tmp_path / "out", "someone/tiny-mlx"
    result = motif_convert("--source", TINY, "--out", out, "--upload", repo, "--private", env=env)
    assert_said(result, 0, f"Uploaded: {server.url}/{repo}")
    assert server.repo(repo).private
    assert ours(server, repo) == tree_of(out)
    assert json.loads(server.repo(repo).read(EVIDENCE))["passed"]
    assert server.requests[0].path == "/api/whoami-v2"


def test_from_the_hub_to_the_hub_in_one_command(server, token, tmp_path):
    """And what is there, downloaded again, is the model, and is what its source gives."""
    server.add_repo("acme/demo-motif3", files={p.name: p for p in (REFERENCE / "demo-motif3").iterdir()})
    env = server.env(tmp_path / "home", token) | {"HF_HUB_OFFLINE": "0"}
    options = ("--source", "acme/demo-motif3", "--stream", "--out", tmp_path / "out", "--upload", "someone/demo-mlx")
    options += ("--recipe", "bf16")  # decodes ten times as fast on the CPU; test_cli.py has the default one
    assert_said(motif_convert(*options, env=env), 0, f"Uploaded: {server.url}/someone/demo-mlx")
    assert ours(server, "someone/demo-mlx") == tree_of(tmp_path / "out")
    card = server.repo("someone/demo-mlx").read("README.md").decode()
    assert "base_model: acme/demo-motif3\n" in card
    assert "bit for bit" in card
    assert "accepted" in card
    other = server.env(tmp_path / "other") | {"HF_HUB_OFFLINE": "0"}
    again = str(tmp_path / "again")
    code = f"from huggingface_hub import snapshot_download as d; d('someone/demo-mlx', local_dir={again!r})"
    assert run(sys.executable, "-c", code, env=other).returncode == 0
    assert tree_of(Path(again)) == tree_of(tmp_path / "out")
    assert_said(motif_convert("verify", again, env=other), 0, "Verified: every weight compared")
    generate = str(Path(sys.executable).with_name("mlx_lm.generate"))
    said = run(generate, "--model", again, "--trust-remote-code", "--prompt", "def f(", "--max-tokens", 4, env=other)
    assert said.returncode == 0, said.stderr
    assert "Generation: 4 tokens" in said.stdout


def test_what_is_there_is_not_sent_again(server, upload, build):
    upload(build, REPO)
    sent, made = server.seen("", "PUT"), commits(server)
    result = upload(build, REPO)
    assert_said(result, 0, "Nothing to do, it is there")
    assert len(server.seen("", "PUT")) == len(sent)
    assert commits(server) == made
    assert len(server.seen("/commit/", "POST")) == 1
    assert " new" not in result.stdout


def test_fewer_shards_leave_no_orphan(server, upload, builds, build):
    """Nor evidence or files of the earlier build; what is not this program's stays."""
    upload(build, REPO)
    theirs = {"notes.txt": b"mine", "assets/model-00001-of-00002.safetensors": b"mine", "extra.safetensors": b"mine"}
    server.commit(REPO, {**theirs, "model-00009-of-00009.safetensors": b"stray"})
    before = commits(server)
    result = upload(builds["one"], REPO)
    assert_said(result, 0, "Uploaded", "notes.txt")
    tree = ours(server)
    assert {name for name in tree if name in theirs} == set(theirs)
    assert {k: v for k, v in tree.items() if k not in theirs} == tree_of(builds["one"])
    assert ".gitattributes" in server.repo(REPO).tree()
    assert commits(server) == before + 1
    old = [p.name for p in build.glob("model-*.safetensors")]
    assert len(old) > 2
    deleted = re.findall(r"^(\S+) +.* delete$", result.stdout, re.M)
    assert sorted(deleted) == sorted([*old, "model-00009-of-00009.safetensors"])


def test_a_list_that_is_nonsense_deletes_nothing(server, upload, builds):
    server.add_repo(REPO, {"notes.txt": b"mine", PROVENANCE: b'{"files": [1, 2]}'})
    assert_said(upload(builds["one"], REPO), 0)
    assert ours(server) == tree_of(builds["one"]) | {"notes.txt": (4, hashlib.sha256(b"mine").hexdigest())}


def test_ignored_files_are_pushed(server, upload, builds):
    server.add_repo(REPO, {".gitignore": b"*.safetensors\n*.py\n"})
    assert_said(upload(builds["one"], REPO), 0)
    assert tree_of(builds["one"]).items() <= ours(server).items()


def test_dry_run_touches_nothing(server, upload, builds, build, tmp_path):
    server.add_repo(REPO, {"config.json": b"{}", PROVENANCE: b'{"files": {"old.txt": {}}}', "old.txt": b"old"})
    before = {p: p.stat().st_mtime_ns for p in [build, *build.iterdir()]}
    (build / EVIDENCE).unlink()
    del before[build], before[build / EVIDENCE]
    result = upload(build, REPO, "--dry-run", "--force")
    assert_said(result, 0, "Nothing was changed.")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line and "  " in line}
    for name, (size, _) in tree_of(build).items():
        assert rows[name][-1] == ("replace" if name in ("config.json", PROVENANCE) else "new")
        assert float(rows[name][1]) <= size
    assert rows["old.txt"][-1] == "delete"
    assert rows[EVIDENCE][-1] == "new"
    assert writes(server) == []
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert not (build / EVIDENCE).exists()
    assert not list((tmp_path / "home").rglob("*.json"))
    result = upload(build, "someone/new", "--dry-run", "--force", "--revision", "dev", "--private", "--json")
    found = json.loads(result.stdout)
    assert {f["action"] for f in found["files"]} == {"new"}
    assert (found["commit"], found["passed"], found["revision"]) == (None, True, "dev")
    assert "someone/new" not in server.repos


def test_json(server, upload, build):
    found = json.loads(upload(build, REPO, "--json").stdout)
    assert {f["path"]: (f["size"], f["sha256"]) for f in found["files"]} == tree_of(build)
    assert (found["repo"], found["revision"], found["made"]) == (REPO, "main", True)
    assert found["commit"] == server.repo(REPO).find("main").oid
    assert [f["path"] for f in found["files"]][-2:] == [INDEX, "config.json"]


# --- where it goes ---


def test_branch(server, upload, builds):
    first = server.add_repo(REPO).find("main")
    assert_said(upload(builds["one"], REPO, "--revision", "v1/dev"), 0, "v1/dev")
    assert ours(server, revision="v1/dev") == tree_of(builds["one"])
    assert f"hf download {REPO} --revision v1/dev --local-dir " in (builds["one"] / "README.md").read_text()
    assert server.repo(REPO).find("main") == first
    server.repo(REPO).refs["refs/tags/v1"] = first
    assert_refused(upload(builds["one"], REPO, "--revision", "v1"), "v1 is a tag")
    assert_refused(upload(builds["one"], REPO, "--revision", "refs/pr/7"), "no refs/pr/7")


def test_pull_request(server, upload, builds):
    """By somebody who may not write there; opened once, whatever happens, and pushed to afterwards."""
    server.add_repo(REPO)
    stranger = server.add_token("stranger", user="nobody")
    server.fail(Fault("POST", "/commit/", drop="after"))
    result = upload(builds["one"], REPO, "--create-pr", token=stranger)
    assert_said(result, 0, f"Uploaded: {server.url}/{REPO}/discussions/1")
    assert ours(server, revision="refs/pr/1") == tree_of(builds["one"])
    assert ours(server) == {}
    result = upload(builds["one"], REPO, "--create-pr", token=stranger)
    assert_said(result, 0, f"it is there: {server.url}/{REPO}/discussions/1")
    assert list(server.repo(REPO).pulls) == [1]
    result = upload(builds["many"], REPO, "--revision", "refs/pr/1")
    assert_said(result, 0)
    assert ours(server, revision="refs/pr/1") == tree_of(builds["many"])
    assert f"mlx_lm.generate --model {REPO} " in (builds["many"] / "README.md").read_text(), "as it will be on main"
    server.repo(REPO).pulls[1].status = "closed"
    upload(builds["many"], REPO, "--create-pr", token=stranger)
    assert list(server.repo(REPO).pulls) == [1, 2]
    assert_refused(upload(builds["many"], "acme/missing", "--create-pr"), "is not there")


def test_renamed_repository(server, upload, builds):
    server.add_repo(REPO)
    server.rename_repo(REPO, "acme/renamed")
    assert_said(upload(builds["one"], REPO), 0, "acme/renamed")
    assert ours(server, "acme/renamed") == tree_of(builds["one"])


def test_a_public_repository_is_not_made_private(server, upload, builds):
    server.add_repo(REPO)
    assert_refused(upload(builds["one"], REPO, "--private"), "is public")
    assert writes(server) == []
    server.repo(REPO).private = True
    assert_said(upload(builds["one"], REPO, "--private"), 0)


def test_a_model_of_others_is_not_replaced(server, upload, builds):
    server.add_repo(REPO, {"config.json": b"{}", "model.safetensors": b"theirs"})
    assert_said(upload(builds["one"], REPO), 1, "not of motif-convert", "--force")
    assert writes(server) == []
    assert_said(upload(builds["one"], REPO, "--force"), 0)
    assert ours(server) == tree_of(builds["one"])
    assert "not of motif-convert" in server.repo(REPO).find("main").description


# --- who may ---


@pytest.mark.parametrize(
    ("made", "fragments"),
    [
        ({"role": "read", "orgs": ("acme",)}, ["may only read", "settings/tokens"]),
        ({"user": "nobody"}, ["nobody does not belong to acme", "--create-pr"]),
        ({"orgs": ("acme",), "org_role": "read"}, ["may only read in acme"]),
        ({"role": "fineGrained", "orgs": ("acme",), "scoped": {"acme": (READ,)}}, ["no write permission"]),
        ({"role": "fineGrained", "orgs": ("acme",), "scoped": {"someone": (WRITE,)}}, ["no write permission"]),
    ],
    ids=["read", "stranger", "org reader", "scoped to read", "scoped elsewhere"],
)
def test_no_right_to_write(made, fragments, server, upload, builds):
    """Told before anything is read or made."""
    result = upload(builds["one"], REPO, token=server.add_token("t", **made))
    assert_refused(result, *fragments)
    assert len(result.stderr.splitlines()) == 1
    assert [r.path for r in server.requests] == ["/api/whoami-v2"]


def test_the_hub_knows_better_than_whoami(server, upload, builds):
    server.add_repo(REPO)
    server.fail(Fault("GET", "/auth-check/write", status=403, message="Only admins"))
    assert_refused(upload(builds["one"], REPO), "refused: Only admins", "settings/tokens")
    assert writes(server) == []


def test_fine_grained_token_for_one_repository(server, upload, builds):
    server.add_repo(REPO)
    fine = server.add_token("fine", "fineGrained", orgs=("acme",), scoped={REPO: (READ, WRITE)})
    assert_said(upload(builds["one"], REPO, token=fine), 0)


@pytest.mark.parametrize(
    ("token", "fragment"),
    [
        ("", "no token"),
        ("hf_nonsense", "does not accept this token"),
        ("hf_nonsense\x0bnonsense", "no token has"),  # what h11 quotes in its error
        ("hf_nonsense\u0119", "no token has"),
    ],
    ids=["none", "unknown", "vertical tab", "not ASCII"],
)
def test_no_token_or_a_wrong_one(token, fragment, server, upload, builds):
    result = upload(builds["one"], REPO, token=token)
    assert_refused(result, fragment, "hf auth login", "HF_TOKEN")
    assert len(result.stderr.splitlines()) == 1
    assert "nonsense" not in result.stderr


@pytest.mark.parametrize("repo", ["noowner", "a/b/c", "-x/y", "a b/c"])
def test_no_name_of_a_repository(repo, server, upload, builds):
    assert_refused(upload(builds["one"], "--", repo) if repo[0] == "-" else upload(builds["one"], repo), "owner/name")
    assert not server.requests


def test_offline(upload, builds):
    assert_refused(upload(builds["one"], REPO, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")


def test_bare_command_asks_before_it_works(server, token, tmp_path):
    reader = server.add_token("reader", "read")
    env = server.env(tmp_path / "home", reader)
    out = ("--source", "demo", "--out", tmp_path / "out")
    assert_refused(motif_convert(*out, "--upload", "someone/x", env=env), "may only read")
    result = motif_convert(*out, "--upload", "someone/x", "--no-verify", env=env)
    assert result.returncode == 2
    assert "--no-verify" in result.stderr
    result = motif_convert(*out, "--create-pr", env=env)
    assert result.returncode == 2
    assert "--create-pr goes with --upload" in result.stderr
    result = motif_convert("upload", tmp_path, REPO, "--create-pr", "--revision", "dev", env=env)
    assert result.returncode == 2
    assert "--revision" in result.stderr
    assert not (tmp_path / "out").exists()


# The command on a machine that changes a bit of what it has just written: the first argument is the file.
SPOILED = """
import sys
from motif_convert.recipes import pipeline
from motif_convert.recipes.cli import main
file, convert = sys.argv.pop(1), pipeline.convert
def spoiled(*args):
    losses = convert(*args)
    with open(file, "r+b") as f:
        f.seek(-1, 2)
        byte = f.read(1)[0]
        f.seek(-1, 2)
        f.write(bytes([byte ^ 1]))
    return losses
pipeline.convert = spoiled
main()
"""


def test_bare_command_does_not_publish_what_failed(server, token, tmp_path):
    env, out = server.env(tmp_path / "home", token), tmp_path / "out"
    shard = out / "model-00001-of-00001.safetensors"
    command = (sys.executable, "-c", SPOILED, shard, "--source", TINY, "--out", out, "--upload", "someone/x")
    assert_said(run(*command, env=env), 1, "NOT verified", "Not uploaded to someone/x")
    assert writes(server) == []
    assert_said(motif_convert("upload", out, "someone/x", "--force", env=env), 1, f"{shard.name}: sha256 is")
    assert writes(server) == []


# --- what is checked here ---


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=2))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "fragment"),
    [  # of a build with six shards
        (lambda b: flip(b / "model-00002-of-00006.safetensors"), "model-00002-of-00006.safetensors: sha256 is"),
        (lambda b: flip(b / "motif.py"), "motif.py: not the file of this version"),
        (lambda b: cut(b / "model-00002-of-00006.safetensors"), "model-00002-of-00006.safetensors: "),
        (lambda b: (b / INDEX).unlink(), f"{INDEX}: missing"),
        (lambda b: (b / ".motif-convert.json").write_text("{}"), "has not finished"),
        (lambda b: (b / "run.log").write_text("x"), "run.log: not listed"),
        (lambda b: edit(b / "config.json", lambda c: c.update(torch_dtype="float32")), "config.json: "),
        (lambda b: edit(b / PROVENANCE, lambda p: p["files"].update({"../x": p["files"]["motif.py"]})), "'../x'"),
        (lambda b: edit(b / PROVENANCE, lambda p: p["files"].pop("motif.py")), "does not list motif.py"),
        (lambda b: (b / PROVENANCE).write_text("{"), PROVENANCE),
    ],
    ids=["shard", "motif.py", "cut", "index", "journal", "unlisted", "config", "outside", "not listed", "nonsense"],
)
def test_a_build_that_is_not_what_it_says(damage, fragment, server, upload, build):
    """--force does not help."""
    damage(build)
    assert_said(upload(build, REPO, "--force"), 1, "PROBLEM: ", fragment, "NOT uploaded.")
    assert writes(server) == []


def test_no_build_at_all(server, upload, tmp_path):
    assert_refused(upload(tmp_path / "nothing", REPO), "no such folder")
    assert_refused(upload(tmp_path, REPO), "not a build")


RATES = {"drafted": 250, "accepted": 1, "acceptance": 0.004, "interval": [0.001, 0.022], "tokens_per_step": 1.004}
SMOKED = {
    "prompts": [],
    "greedy": RATES,
    "sampled": RATES,
    "forced": {"positions": 100, "agreement": 0.01, "expected_acceptance": 0.01},
    "speed": {"plain_tokens_per_second": 1.0, "drafting_tokens_per_second": 0.5, "speed_up": 0.5, "at_best": 1.004},
    **{"min_acceptance": 0.65, "lossless": True, "device": "x", "dtype": "bfloat16", "drafts": 1, "temperature": 0.8},
    **{"passed": False, "failures": ["acceptance 0.004 is below 0.65"]},
}


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (None, "verify not run"),
        (lambda e: e.update(plan_hash="0" * 64), "verify not run: validation.json is of another build"),
        (lambda e: e.update(verify=None), "verify not run"),
        (lambda e: e["verify"].update(sampled=0.25), "25.0 % of the weights"),
        (lambda e: e["verify"].update(passed=False, problems=["x", "y"]), "verify failed: 2 problems"),
        (lambda e: e.update(smoke=SMOKED), "smoke failed: acceptance 0.004 is below 0.65"),
    ],
    ids=["missing", "other", "not run", "sample", "verify", "smoke"],
)
def test_without_a_passing_validation(change, fragment, server, upload, build, small):
    if change:
        edit(build / EVIDENCE, change)  # its `passed` stays true, and is not believed
    else:
        (build / EVIDENCE).unlink()
    assert_said(upload(build, REPO), 1, fragment, "--force")
    assert writes(server) == []
    assert_said(upload(build, REPO, "--force"), 0, "Uploaded")
    evidence = json.loads(server.repo(REPO).read(EVIDENCE))
    assert fragment.partition(": ")[0] in evidence["forced"]
    assert not evidence["passed"]
    assert fragment in server.repo(REPO).find("main").description
    assert ours(server) == tree_of(build)
    assert_said(upload(build, REPO, "--force"), 0, "Nothing to do")


def test_what_is_measured_later_takes_forced_away(server, upload, builds, small, tmp_path):
    build = Path(shutil.copytree(builds["bare"], tmp_path / "build"))
    upload(build, REPO, "--force")
    assert json.loads((build / EVIDENCE).read_text())["forced"]
    assert run(*launch.small_shards(200_000, "verify", build, "--source", small)).returncode == 0
    assert json.loads((build / EVIDENCE).read_text())["forced"] is None
    assert_said(upload(build, REPO), 0)
    assert ours(server) == tree_of(build)
    assert commits(server) == 2


def test_evidence_of_an_earlier_build_does_not_stay(server, upload, builds, tmp_path):
    upload(builds["one"], REPO)
    bare = Path(shutil.copytree(builds["bare"], tmp_path / "bare"))
    upload(bare, REPO, "--force")
    assert "validation.png" not in ours(server)


# --- refusals and faults of the Hub ---


@pytest.mark.parametrize(
    ("fault", "fragments"),
    [
        (storage_exceeded(), ["no room", "storage limit", "billing", "not sent again"]),
        (Fault("POST", "/commit/", None, status=403, message="Forbidden"), ["refused: Forbidden", "settings/tokens"]),
        (Fault("PUT", "", None, status=403, message="SignatureDoesNotMatch"), ["refused", "SignatureDoesNotMatch"]),
        (Fault("POST", "/repos/create", None, status=402, message="Payment required"), ["no room", "billing"]),
        (Fault("POST", "/preupload/", None, status=404, message="gone"), ["not there", "gone"]),
    ],
    ids=["quota", "commit", "put", "create", "404"],
)
def test_refused_for_good(fault, fragments, server, upload, builds):
    """At once, in a line, and nothing is there to be seen."""
    server.fail(fault)
    result = upload(builds["one"], REPO)
    assert_refused(result, *fragments)
    assert "trying again" not in result.stderr
    assert "Signature=" not in result.stderr
    assert len([r for r in server.seen(fault.path, fault.method) if r.status == fault.status]) == 1
    assert REPO not in server.repos or not ours(server)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_waited_for(status, server, upload, builds):
    for path in ("/whoami-v2", "/repos/create", "/refs", "/preupload/", "/commit/", "/tree/"):
        server.fail(Fault("GET|POST", path, status=status, headers=NOW))
    assert_said(upload(builds["one"], REPO), 0, "Uploaded")
    assert ours(server) == tree_of(builds["one"])
    assert commits(server) == 1


def test_what_does_not_pass_is_given_up(server, upload, builds):
    server.fail(Fault("POST", "/commit/", None, status=503, message="busy", headers=NOW))
    result = upload(builds["one"], REPO)
    assert_refused(result, "still answers 503 after 6 tries: busy", "not sent again")
    assert len(server.seen("/commit/")) == 6
    assert result.stderr.count("trying again in 0 s") == 5


@pytest.mark.parametrize("drop", ["before", "after"])
@pytest.mark.parametrize("path", ["/repos/create", "/branch/", "/commit/", "/[0-9a-f]{64}$"])
def test_connection_that_is_lost(path, drop, server, upload, builds):
    """Before anything is done, or after it: the answer alone is lost then. One commit in any case."""
    for lost in ("/whoami-v2", path, "/tree/"):
        server.fail(Fault(".*", lost, drop=drop))
    assert_said(upload(builds["one"], REPO, "--revision", "dev"), 0, "Uploaded")
    assert ours(server, revision="dev") == tree_of(builds["one"])
    assert commits(server) == 1
    assert len(server.seen("/commit/")) == (2 if (path, drop) == ("/commit/", "before") else 1)


def test_somebody_else_commits_meanwhile(server, token, upload, builds, tmp_path):
    server.add_repo(REPO)
    server.fail(Fault("POST", "/commit/", drop="before"))
    refused = []
    thread = threading.Thread(target=lambda: refused.append(upload(builds["one"], REPO)))
    thread.start()
    server.wait_for("/commit/")
    server.commit(REPO, {"notes.txt": b"mine"})
    thread.join()
    assert_refused(refused[0], "somebody else has changed main", "not sent again")
    sent = len(server.seen("", "PUT"))
    assert_said(upload(builds["one"], REPO), 0)
    assert len(server.seen("", "PUT")) == sent
    assert "notes.txt" in ours(server)


def test_a_tree_that_is_not_what_was_sent(server, upload, builds):
    server.fail(Fault("GET", "/tree/", drop="before"))  # of a new repository, the first tree is that after the push
    done = []
    thread = threading.Thread(target=lambda: done.append(upload(builds["one"], REPO)))
    thread.start()
    server.wait_for("/tree/")
    head = server.repo(REPO).find("main")
    del head.files["motif.py"]
    head.files["README.md"] = server.storage.copy("README.md", b"other")
    head.files["more.txt"] = head.files["config.json"]
    thread.join()
    assert_said(done[0], 1, "NOT equal", "motif.py: is not there", "README.md: has 5 bytes there", "more.txt: should")


# --- interrupted ---


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Several shards of more bytes than a socket's buffers hold: those would arrive even after a client's death."""
    config = SMALL_CONFIG | {"vocab_size": 110_000, "num_experts": 300, "num_nextn_predict_layers": 0}
    folder = tmp_path_factory.mktemp("large")
    source = write_checkpoint(folder / "large-motif3", config, random_weights(config))
    out = make_build(source, folder / "out", 15_000_000, "--recipe", "bf16")
    assert len(list(out.glob("model-*"))) >= 4
    return out


def test_ctrl_c(server, token, large, tmp_path):
    server.fail(Fault("PUT", "", times=None, pause=0.1))
    env = os.environ | server.env(tmp_path / "home", token)
    with subprocess.Popen([COMMAND, "upload", large, REPO], env=env, stderr=subprocess.PIPE, text=True) as process:
        server.wait_for("", "PUT", received=100_000)
        process.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        error = process.stderr.read()
    assert process.returncode == 130
    assert time.monotonic() - stopped < 5
    assert (
        error.splitlines()[-1]
        == "Interrupted. Run the same command again to go on; what has arrived is not sent again."
    )


KILLS = 20


def left_to_send(server: HubServer, build: Path) -> int:
    """Bytes of the shards that have not arrived whole."""
    there = server.repos[REPO].objects if REPO in server.repos else {}
    return sum(size for name, (size, sha256) in tree_of(build).items() if "model-" in name and sha256 not in there)


def settle(server: HubServer) -> None:
    """Waits until what a dead client's sockets still held has come in."""
    before = -1
    while before != received(server):
        before = received(server)
        time.sleep(0.1)


def test_killed_at_twenty_moments(server, token, upload, large, tmp_path):
    """Between any two requests and any two bytes. Each object that has arrived whole is sent once, in all the runs."""
    rng = random.Random(20)
    env = os.environ | server.env(tmp_path / "home", token)
    for i, shard in enumerate(sorted(large.glob("model-*"))):  # at several speeds, so that some arrive before others
        sha256 = tree_of(large)[shard.name][1]
        server.fail(Fault("PUT", sha256, times=None, pause=0.0015 * (i + 1)))
    first, last = ["/whoami-v2", "/repos/create"], ["/lfs/verify", "/commit/", "/tree/"]
    moments: list = ["/auth-check/write", "/refs", "/preupload/", "/objects/batch"]
    moments += [rng.uniform(0, 0.45) for _ in range(KILLS - len([*moments, *first, *last]))]  # of the bytes left
    rng.shuffle(moments)
    killed, arrived = 0, []
    for at in first + moments + last:
        left, before, seen = left_to_send(server, large), received(server), len(server.requests)
        with subprocess.Popen(
            [COMMAND, "upload", large, REPO], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while process.poll() is None:
                if isinstance(at, float):
                    now = received(server) - before > at * left
                else:
                    now = any(re.search(at, r.path) for r in server.requests[seen:])
                if now:
                    killed += 1
                    process.kill()
                    break
                time.sleep(0.002)
        settle(server)
        arrived.append(left_to_send(server, large))
    assert killed == KILLS, arrived
    result = upload(large, REPO)
    assert_said(result, 0, "equal")
    assert ours(server) == tree_of(large)
    shards, puts = len(list(large.glob("model-*"))), server.seen("", "PUT")
    whole = Counter(r.path for r in puts if r.status == 200)
    assert len(whole) == shards
    assert set(whole.values()) == {1}
    assert commits(server) == 1
    assert len([r for r in server.seen("/commit/") if r.status == 200]) == 1
    sent, cut = (sum(r.received for r in puts if (r.status is None) == is_cut) for is_cut in (False, True))
    assert sent == sum(p.stat().st_size for p in large.glob("model-*"))
    print(f"{killed} kills: {len(puts)} PUTs, {shards} whole of {sent:,} bytes, {cut:,} bytes cut off; left {arrived}")


def received(server: HubServer) -> int:
    return sum(r.received for r in server.seen("", "PUT"))


# --- the token ---


def test_the_token_is_nowhere(server, token, upload, builds, build, tmp_path):
    """Not in what is printed, in no file, in no list of processes, whether all goes well or not."""
    server.fail(Fault("PUT", "", times=None, pause=0.05))
    seen, stop = [], threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.append(path.read_bytes())
                except OSError:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    results = [upload(build, REPO)]
    stop.set()
    thread.join()
    flip(build / "motif.py")
    results.append(upload(build, REPO))
    for status in (400, 401, 403, 412, 500):
        server.fail(Fault("POST", "/commit/", times=None, status=status, message="no", headers=NOW))
        results.append(upload(builds["one"], REPO))
        server.heal()
    server.fail(Fault("PUT", "", times=None, status=501, message="no", headers=NOW))
    results.append(upload(builds["bare"], "acme/other", "--force", HF_HUB_VERBOSITY="debug", HF_DEBUG="1"))
    results.append(upload(builds["one"], REPO, token=token + "\x0b"))
    outputs = [r.stdout + r.stderr for r in results]
    assert not any(token in text for text in outputs)
    assert not any("Traceback" in text for text in outputs)
    assert any(b"upload" in line for line in seen)
    assert not any(token.encode() in line for line in seen)
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        assert token.encode() not in path.read_bytes(), path
