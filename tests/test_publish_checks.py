"""Publishing: who may, and what is checked before anything goes."""

import json
import shutil
import sys
from pathlib import Path

import launch
import pytest
from conftest import motif_convert
from hub_server import READ, WRITE, Fault
from publishing import (
    EVIDENCE,
    INDEX,
    PROVENANCE,
    REPO,
    TINY,
    assert_refused,
    assert_said,
    commits,
    cut,
    flip,
    ours,
    run,
    tree_of,
    writes,
)

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
def test_no_right_to_write(made, fragments, target, upload, builds):
    """Told before anything is read or made."""
    result = upload(builds["one"], REPO, token=target.add_token("t", **made))
    assert_refused(result, *fragments)
    assert len(result.stderr.splitlines()) == 1
    assert [r.path for r in target.requests] == ["/api/whoami-v2"]


def test_the_hub_knows_better_than_whoami(target, upload, builds):
    target.add_repo(REPO)
    target.fail(Fault("GET", "/auth-check/write", status=403, message="Only admins"))
    assert_refused(upload(builds["one"], REPO), "refused: Only admins", "settings/tokens")
    assert writes(target) == []


def test_fine_grained_token_for_one_repository(target, upload, builds):
    target.add_repo(REPO)
    fine = target.add_token("fine", "fineGrained", orgs=("acme",), scoped={REPO: (READ, WRITE)})
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
def test_no_token_or_a_wrong_one(token, fragment, target, upload, builds):
    result = upload(builds["one"], REPO, token=token)
    assert_refused(result, fragment, "hf auth login", "HF_TOKEN")
    assert len(result.stderr.splitlines()) == 1
    assert "nonsense" not in result.stderr


@pytest.mark.parametrize("repo", ["noowner", "a/b/c", "-x/y", "a b/c"])
def test_no_name_of_a_repository(repo, target, upload, builds):
    assert_refused(upload(builds["one"], "--", repo) if repo[0] == "-" else upload(builds["one"], repo), "owner/name")
    assert not target.requests


def test_offline(upload, builds):
    assert_refused(upload(builds["one"], REPO, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")


def test_bare_command_asks_before_it_works(target, token, tmp_path):
    reader = target.add_token("reader", "read")
    env = target.env(tmp_path / "home", reader)
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


def test_bare_command_does_not_publish_what_failed(target, token, tmp_path):
    env, out = target.env(tmp_path / "home", token), tmp_path / "out"
    shard = out / "model-00001-of-00001.safetensors"
    command = (sys.executable, "-c", SPOILED, shard, "--source", TINY, "--out", out, "--upload", "someone/x")
    assert_said(run(*command, env=env), 1, "NOT verified", "Not uploaded to someone/x")
    assert writes(target) == []
    assert_said(motif_convert("upload", out, "someone/x", "--force", env=env), 1, f"{shard.name}: sha256 is")
    assert writes(target) == []


# --- what is checked here ---


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=2))


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
def test_a_build_that_is_not_what_it_says(damage, fragment, target, upload, unpublished):
    """--force does not help."""
    damage(unpublished)
    assert_said(upload(unpublished, REPO, "--force"), 1, "PROBLEM: ", fragment, "NOT uploaded.")
    assert writes(target) == []


def test_no_build_at_all(target, upload, tmp_path):
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
def test_without_a_passing_validation(change, fragment, target, upload, unpublished, small):
    if change:
        edit(unpublished / EVIDENCE, change)  # its `passed` stays true, and is not believed
    else:
        (unpublished / EVIDENCE).unlink()
    assert_said(upload(unpublished, REPO), 1, fragment, "--force")
    assert writes(target) == []
    assert_said(upload(unpublished, REPO, "--force"), 0, "Uploaded")
    evidence = json.loads(target.repo(REPO).read(EVIDENCE))
    assert fragment.partition(": ")[0] in evidence["forced"]
    assert not evidence["passed"]
    assert fragment in target.repo(REPO).find("main").description
    assert ours(target) == tree_of(unpublished)
    assert_said(upload(unpublished, REPO, "--force"), 0, "Nothing to do")


def test_what_is_measured_later_takes_forced_away(target, upload, builds, small, tmp_path):
    unpublished = Path(shutil.copytree(builds["bare"], tmp_path / "build"))
    upload(unpublished, REPO, "--force")
    assert json.loads((unpublished / EVIDENCE).read_text())["forced"]
    assert run(*launch.small_shards(200_000, "verify", unpublished, "--source", small)).returncode == 0
    assert json.loads((unpublished / EVIDENCE).read_text())["forced"] is None
    assert_said(upload(unpublished, REPO), 0)
    assert ours(target) == tree_of(unpublished)
    assert commits(target) == 2


def test_evidence_of_an_earlier_build_does_not_stay(target, upload, builds, tmp_path):
    upload(builds["one"], REPO)
    bare = Path(shutil.copytree(builds["bare"], tmp_path / "bare"))
    upload(bare, REPO, "--force")
    assert "validation.png" not in ours(target)
