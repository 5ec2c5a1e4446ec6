"""The test Hub takes uploads, as the real one does, by the real client library."""

import os
import signal
import subprocess
import sys

import pytest
from hub_clients import REPO, WEIGHTS, sha256
from hub_server import Fault, storage_exceeded

# Writing


def test_creates_a_repository_a_branch_and_a_tag(model_hub, client, owner):
    first = model_hub.repo(REPO).find("main").oid
    again, refs, tag = client(
        f"""
        api.create_repo("acme/new", private=True)
        api.create_repo("acme/new", exist_ok=True)
        try:
            api.create_repo("acme/new")
        except hub.errors.HfHubHTTPError as error:
            again = error.response.status_code
        api.create_branch("acme/model", branch="work", revision="{first}")
        api.create_branch("acme/model", branch="work", exist_ok=True)
        api.create_tag("acme/model", tag="v1")
        refs = api.list_repo_refs("acme/model")
        out = [again, [[b.name, b.target_commit] for b in refs.branches], refs.tags[0].name]
        """,
        owner,
    )
    assert again == 409
    assert model_hub.repo("acme/new").private
    assert set(model_hub.repo("acme/new").tree()) == {".gitattributes"}
    assert refs == [["main", first], ["work", first]]
    assert (tag, model_hub.repo(REPO).find("v1").oid) == ("v1", first)


UPLOAD = "out = api.upload_folder(repo_id='acme/model', folder_path='folder', delete_patterns='extra/*').oid"


@pytest.mark.parametrize("part_size", [None, 70_000])
def test_uploads_a_folder(part_size, model_hub, client, owner, folder):
    model_hub.part_size = part_size
    before = model_hub.repo(REPO).tree()
    assert client(UPLOAD, owner) == model_hub.repo(REPO).find("main").oid
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    expected = {path: (len(c), sha256(c)) for path, c in files.items()}
    expected |= {path: before[path] for path in ("config.json", ".gitattributes")}
    assert model_hub.repo(REPO).tree() == expected
    sent = model_hub.seen("", "PUT")
    assert len(sent) == (2 if part_size is None else 6)
    assert sum(r.received for r in sent) == 301_000
    assert not any(r.authorization for r in sent)


def test_nothing_is_sent_twice(model_hub, client, owner, folder):
    head = client(UPLOAD, owner)
    puts, commits = len(model_hub.seen("", "PUT")), len(model_hub.seen("/commit/"))
    assert client("out = api.upload_folder(repo_id='acme/model', folder_path='folder').oid", owner) == head
    assert (len(model_hub.seen("", "PUT")), len(model_hub.seen("/commit/"))) == (puts, commits)


def test_objects_that_arrived_before_the_upload_died_are_not_sent_again(model_hub, client, owner, folder):
    model_hub.fail(Fault("POST", "/commit/", status=403))
    assert client(UPLOAD, owner)[0] == "HfHubHTTPError"
    puts = len(model_hub.seen("", "PUT"))
    assert client(UPLOAD, owner) == model_hub.repo(REPO).find("main").oid
    assert len(model_hub.seen("", "PUT")) == puts


def test_upload_that_is_cut_is_sent_again_whole(model_hub, client, owner, folder):
    model_hub.fail(Fault("PUT", sha256(WEIGHTS[::-1]), cut_upload=100_000))
    client(UPLOAD, owner)
    assert model_hub.repo(REPO).read("model.safetensors") == WEIGHTS[::-1]
    cut, whole = model_hub.seen(sha256(WEIGHTS[::-1]), "PUT")
    assert cut.status is None
    assert (whole.status, whole.received) == (200, 300_000)


def test_killed_upload_is_sent_again(model_hub, client, owner, folder, tmp_path):
    """More bytes than a socket's buffers hold: those would arrive even after the client's death."""
    large = WEIGHTS * 40
    (folder / "model.safetensors").write_bytes(large)
    model_hub.fail(Fault("PUT", sha256(large), pause=0.05))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from huggingface_hub import HfApi; api = HfApi(); {UPLOAD}"],
        env={**os.environ, **model_hub.env(tmp_path / "home", owner)},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    model_hub.wait_for(sha256(large), "PUT", received=200_000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert client(UPLOAD, owner) == model_hub.repo(REPO).find("main").oid
    assert model_hub.repo(REPO).tree()["model.safetensors"] == (len(large), sha256(large))
    killed, again = model_hub.seen(sha256(large), "PUT")
    assert (killed.status, again.status, again.received) == (None, 200, len(large))


def test_lost_answer_of_a_commit(model_hub, client, owner):
    """The commit is made; create_commit does not ask again, and the same call later finds nothing to do."""
    model_hub.fail(Fault("POST", "/commit/", drop="after"))
    script = "out = api.create_commit('acme/model', [CommitOperationAdd('a.txt', b'a')], commit_message='a').oid"
    assert client(script, owner)[0] in ("ReadError", "RemoteProtocolError")
    assert client(script, owner) == model_hub.repo(REPO).find("main").oid
    assert len(model_hub.seen("/commit/")) == 1


def test_commit_on_a_parent_that_is_not_the_head_any_more(model_hub, client, owner):
    old = model_hub.repo(REPO).find("main").oid
    head = model_hub.commit(REPO, {"config.json": b"{}"})
    script = "api.create_commit('acme/model', [{}], commit_message='m', parent_commit='{}')"
    kind, message = client("out = " + script.format("CommitOperationAdd('a.txt', b'a')", old), owner)
    assert kind == "HfHubHTTPError"
    assert "412" in message
    assert model_hub.repo(REPO).find("main").oid == head
    client(script.format("CommitOperationDelete('extra/')", head), owner)
    assert "extra/notes.txt" not in model_hub.repo(REPO).tree()


def test_pull_request(model_hub, client):
    head = model_hub.repo(REPO).find("main")
    stranger = model_hub.add_token("stranger", user="nobody")
    script = (
        "info = api.create_commit('acme/model', [CommitOperationAdd('new.safetensors', b'new')], commit_message='n'{})"
    )
    assert "create_pr=1" in client(script.format(""), stranger)[1]
    script = script.format(", create_pr=True") + "; out = [info.pr_revision, info.pr_num, info.oid]"
    revision, number, oid = client(script, stranger)
    assert (revision, number) == ("refs/pr/1", 1)
    assert model_hub.repo(REPO).find(revision).oid == oid
    assert model_hub.repo(REPO).read("new.safetensors", revision) == b"new"
    assert model_hub.repo(REPO).find("main") == head
    assert (
        client(f"out = Path(hf_hub_download('acme/model', 'new.safetensors', revision='{revision}')).read_text()")
        == "new"
    )


def test_read_only_and_full(model_hub, client, owner, folder):
    reader = model_hub.add_token("reader", "read", orgs=("acme",))
    assert "403 Forbidden" in client(UPLOAD, reader)[1]
    model_hub.fail(storage_exceeded())
    kind, message = client(UPLOAD, owner)
    assert kind == "HfHubHTTPError"
    assert "storage limit" in message


def test_object_that_is_not_what_its_name_says_is_refused(model_hub, client, owner):
    wrong, missing = client(
        """
        def action(oid, size):
            answer = hub.get_session().post(
                f"{api.endpoint}/acme/model.git/info/lfs/objects/batch",
                headers=api._build_hf_headers(),
                json={"transfers": ["basic"], "objects": [{"oid": oid, "size": size}], "ref": {"name": "main"}},
            )
            return answer.json()["objects"][0]["actions"]["upload"]["href"]
        line = lambda key, value: json.dumps({"key": key, "value": value}) + "\\n"
        oid = "0" * 64
        lfs = line("lfsFile", {"path": "a.safetensors", "algo": "sha256", "oid": oid, "size": 3})
        out = [
            hub.get_session().put(action(oid, 3), content=b"abc").status_code,
            hub.get_session().post(
                f"{api.endpoint}/api/models/acme/model/commit/main",
                headers=api._build_hf_headers(),
                content=line("header", {"summary": "s"}) + lfs,
            ).status_code,
        ]
        """,
        owner,
    )
    assert (wrong, missing) == (400, 400)
    assert "a.safetensors" not in model_hub.repo(REPO).tree()


def test_card_with_bad_metadata(client, owner):
    script = (
        "api.create_commit('acme/model', [CommitOperationAdd('README.md', b'---\\na: [\\n---\\n')], commit_message='m')"
    )
    kind, message = client(script, owner)
    assert kind == "ValueError"
    assert "Invalid metadata in README.md" in message


def test_upload_by_xet_is_refused(model_hub, client, owner, folder):
    """What a client does that lacks a variable of `HubServer.env`; for downloads, it needs none."""
    before = model_hub.repo(REPO).tree()
    assert client(UPLOAD, owner, HF_HUB_DISABLE_XET="0")[0] == "ConnectionError"
    assert model_hub.repo(REPO).tree() == before
    script = "out = Path(hf_hub_download('acme/model', 'model.safetensors')).read_bytes().hex()"
    assert client(script, HF_HUB_DISABLE_XET="0") == WEIGHTS.hex()
