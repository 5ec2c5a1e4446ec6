"""The test Hub against huggingface_hub itself, unpatched and in a process of its own."""

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hub_server import READ, WRITE, Fault, HubServer, storage_exceeded

REPO = "acme/model"
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {"config.json": b'{"a": 1}\n', "model.safetensors": WEIGHTS, "extra/notes.txt": b"some notes\n"}
PREAMBLE = """
import json, sys
from pathlib import Path
import huggingface_hub as hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
api, out = HfApi(), None
"""


@pytest.fixture
def server(tmp_path):
    with HubServer(tmp_path / "server") as server:
        server.add_repo(REPO, FILES)
        yield server


@pytest.fixture
def owner(server) -> str:
    return server.add_token("owner", user="someone", orgs=("acme",))


@pytest.fixture
def client(server, tmp_path):
    """Runs a script with huggingface_hub and gives what it leaves in `out`; what it raises as [class, message]."""

    def client(script: str, token: str = "", **env: str):
        body = textwrap.indent(textwrap.dedent(script), "    ")
        code = f"{PREAMBLE}\ntry:\n{body}\nexcept Exception as error:\n    out = [type(error).__name__, str(error)]\n"
        result = subprocess.run(
            [sys.executable, "-c", f"{code}\nprint(json.dumps(out))"],
            env={**os.environ, **server.env(tmp_path / "home", token), **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return client


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_oid(data: bytes, tmp_path: Path) -> str:
    (tmp_path / "blob").write_bytes(data)
    return subprocess.check_output(["git", "hash-object", tmp_path / "blob"], text=True).strip()


# Reading


def test_downloads_a_small_file_and_an_lfs_file(server, client):
    small, large = client("""
        names = "config.json", "model.safetensors"
        out = [Path(hf_hub_download("acme/model", name)).resolve().name for name in names]
    """)
    assert large == sha256(WEIGHTS)
    assert len(small) == 40
    (got,) = server.seen("model.safetensors", "GET")
    assert (got.cdn, got.status, got.sent, got.token) == (True, 200, len(WEIGHTS), None)
    (asked,) = server.seen("model.safetensors", "HEAD")
    assert (asked.cdn, asked.status, asked.sent) == (False, 302, 0)


def test_token_goes_to_the_hub_and_not_to_the_cdn(server, client, owner):
    client("out = hf_hub_download('acme/model', 'model.safetensors')", owner)
    (asked, got) = server.seen("model.safetensors")
    assert (asked.authorization, asked.token) == (True, "owner")
    assert (got.authorization, got.token) == (False, None)


def test_cut_body_is_resumed(server, client):
    """By the library, in steps of its own 10 MiB: what came after the last full step is fetched again."""
    step, large = 10 * 2**20, WEIGHTS * 40
    server.commit(REPO, {"model.safetensors": large})
    server.fail(Fault("GET", "model.safetensors", cut=step + 100_000))
    assert client("out = Path(hf_hub_download('acme/model', 'model.safetensors')).resolve().name") == sha256(large)
    first, second = server.seen("model.safetensors", "GET")
    assert first.sent == step + 100_000
    assert (second.status, second.range, second.sent) == (206, f"bytes={step}-", len(large) - step)


def test_snapshot_by_branch_and_by_commit(server, client):
    old = server.repo(REPO).find("main").oid
    new = server.commit(REPO, {"config.json": b'{"a": 2}\n', "extra/notes.txt": None})
    main, pinned = client(f"""
        out = []
        for revision in ("main", "{old}"):
            folder = Path(snapshot_download("acme/model", revision=revision))
            paths = [path for path in folder.rglob("*") if path.is_file()]
            out.append([folder.name, {{str(path.relative_to(folder)): path.read_bytes().hex() for path in paths}}])
    """)
    for (name, files), revision in ((main, new), (pinned, old)):
        assert name == revision
        assert {p: (len(c) // 2, sha256(bytes.fromhex(c))) for p, c in files.items()} == server.repo(REPO).tree(
            revision
        )
    assert len(server.seen("model.safetensors", "GET")) == 1


def test_corrupt_body_is_taken_for_good_by_the_library(server, client):
    server.fail(Fault("GET", "model.safetensors", corrupt=True))
    got = client("out = Path(hf_hub_download('acme/model', 'model.safetensors')).read_bytes().hex()")
    assert len(got) == 2 * len(WEIGHTS)
    assert got != WEIGHTS.hex()
    (mismatch,) = client("out = api.verify_repo_checksums('acme/model').mismatches")
    assert mismatch["path"] == "model.safetensors"


def test_info_tree_and_paths(server, client, tmp_path):
    head = server.repo(REPO).find("main")
    sha, siblings, tree, paths, folder = client("""
        def row(f):
            return [f.blob_id, f.size, f.lfs and [f.lfs.sha256, f.lfs.size]]
        info = api.repo_info("acme/model", files_metadata=True)
        tree = api.list_repo_tree("acme/model", recursive=True, expand=True)
        paths = api.get_paths_info("acme/model", ["model.safetensors", "extra", "no-such-file"], expand=True)
        out = [
            info.sha,
            {f.rfilename: row(f) for f in info.siblings},
            {f.path: row(f) for f in tree if isinstance(f, hub.RepoFile) if f.last_commit.oid == info.sha},
            {f.path: row(f) if isinstance(f, hub.RepoFile) else None for f in paths},
            [f.path for f in api.list_repo_tree("acme/model", "extra")],
        ]
    """)
    assert sha == head.oid
    assert siblings == tree
    assert siblings["model.safetensors"][1:] == [len(WEIGHTS), [sha256(WEIGHTS), len(WEIGHTS)]]
    assert siblings["config.json"] == [git_oid(FILES["config.json"], tmp_path), len(FILES["config.json"]), None]
    assert set(siblings) == {*FILES, ".gitattributes"}
    assert paths == {"model.safetensors": tree["model.safetensors"], "extra": None}
    assert folder == ["extra/notes.txt"]


def test_tree_comes_in_pages(server, client):
    server.page_size = 2
    assert set(client("out = api.list_repo_files('acme/model')")) == {*FILES, ".gitattributes"}
    assert len(server.seen("/tree/main")) == 3


def test_ranges(client):
    answers = client("""
        url = hub.hf_hub_url("acme/model", "model.safetensors")
        out = []
        for wanted in ("10-19", "299990-", "-5", "299999-400000", "300000-"):
            got = hub.get_session().get(url, headers={"Range": f"bytes={wanted}"})
            content = got.content.hex() if got.status_code == 206 else ""
            out.append([got.status_code, got.headers.get("Content-Range"), content])
        out.append(hub.HfFileSystem().open("acme/model/model.safetensors").read(64).hex())
    """)
    assert answers == [
        [206, "bytes 10-19/300000", WEIGHTS[10:20].hex()],
        [206, "bytes 299990-299999/300000", WEIGHTS[-10:].hex()],
        [206, "bytes 299995-299999/300000", WEIGHTS[-5:].hex()],
        [206, "bytes 299999-299999/300000", WEIGHTS[-1:].hex()],
        [416, "bytes */300000", ""],
        WEIGHTS[:64].hex(),
    ]


def test_whoami_and_what_tokens_may_do(server, client):
    fine = server.add_token("fine", "fineGrained", orgs=("acme",), scoped={REPO: (READ, WRITE)})
    me = client("out = api.whoami()", fine)
    assert me["name"] == "someone"
    assert [org["name"] for org in me["orgs"]] == ["acme"]
    access = me["auth"]["accessToken"]
    assert (access["displayName"], access["role"]) == ("fine", "fineGrained")
    (scope,) = access["fineGrained"]["scoped"]
    assert (scope["entity"]["name"], scope["permissions"]) == (REPO, [READ, WRITE])
    assert client("out = api.whoami()", "hf_nonsense")[0] == "HfHubHTTPError"
    assert client("out = api.auth_check('acme/model', write=True)", fine) is None
    assert client("out = api.create_repo('acme/other')", fine)[1].startswith("403 Forbidden")


@pytest.mark.parametrize(
    ("call", "raised"),
    [
        ("hf_hub_download('acme/missing', 'config.json')", "RepositoryNotFoundError"),
        ("hf_hub_download('acme/model', 'missing.json')", "RemoteEntryNotFoundError"),
        ("hf_hub_download('acme/model', 'config.json', revision='missing')", "RevisionNotFoundError"),
        ("hf_hub_download('acme/hidden', 'config.json')", "RepositoryNotFoundError"),
        ("hf_hub_download('acme/gated', 'config.json')", "GatedRepoError"),
        ("snapshot_download('acme/gated')", "GatedRepoError"),
        ("snapshot_download('acme/missing')", "RepositoryNotFoundError"),
        ("api.repo_info('acme/model', revision='missing').sha", "RevisionNotFoundError"),
        ("list(api.list_repo_tree('acme/model', 'missing'))", "RemoteEntryNotFoundError"),
    ],
)
@pytest.mark.parametrize("signed_in", [False, True])
def test_refusals(call, raised, signed_in, server, client):
    server.add_repo("acme/hidden", FILES, private=True)
    server.add_repo("acme/gated", FILES, gated=True)
    stranger = server.add_token("stranger", user="nobody") if signed_in else ""
    assert client(f"out = {call}", stranger)[0] == raised


def test_private_and_gated_repositories_open_to_whom_they_should(server, client, owner):
    server.add_repo("acme/hidden", FILES, private=True)
    server.add_repo("acme/gated", FILES, gated=True)
    let_in = server.add_token("let in", "read", user="nobody", gated=("acme/gated",))
    script = "out = Path(hf_hub_download('{}', 'config.json')).read_text()"
    assert client(script.format("acme/hidden"), owner) == FILES["config.json"].decode()
    assert client(script.format("acme/gated"), let_in) == FILES["config.json"].decode()


def test_renamed_repository_is_found_under_its_old_name(server, client, owner):
    server.rename_repo(REPO, "acme/renamed")
    name, content, oid = client(
        """
        out = [api.repo_info("acme/model").id]
        out.append(Path(hf_hub_download("acme/model", "model.safetensors")).read_bytes().hex())
        out.append(api.create_commit("acme/model", [CommitOperationAdd("new.txt", b"new")], commit_message="more").oid)
        """,
        owner,
    )
    assert (name, content) == ("acme/renamed", WEIGHTS.hex())
    assert server.repo("acme/renamed").find("main").oid == oid


# Faults


def test_rate_limit_is_waited_for_and_tried_again(server, client):
    server.fail(Fault("GET", "model.safetensors", times=2, status=429, headers={"Retry-After": "0"}))
    server.fail(Fault("GET", "/tree/", status=503))
    assert client("out = Path(snapshot_download('acme/model'), 'model.safetensors').stat().st_size") == len(WEIGHTS)
    assert [r.status for r in server.seen("model.safetensors", "GET")] == [429, 429, 200]
    assert [r.status for r in server.seen("/tree/")] == [503, 200]


def test_reset_is_not_retried_while_a_file_is_asked_for(server, client):
    server.fail(Fault("GET", "model.safetensors", drop="before"))
    assert client("out = hf_hub_download('acme/model', 'model.safetensors')")[0] == "ReadError"
    (record,) = server.seen("model.safetensors", "GET")
    assert record.status is None


def test_killed_client_leaves_the_server_well(server, client, tmp_path, capfd):
    server.fail(Fault("GET", "model.safetensors", pause=0.2, chunk=1000))
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from huggingface_hub import hf_hub_download as d; d('acme/model', 'model.safetensors')",
        ],
        env={**os.environ, **server.env(tmp_path / "home")},
    )
    server.wait_for("model.safetensors", "GET", sent=3000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    script = "out = Path(hf_hub_download('acme/model', 'model.safetensors')).read_bytes().hex()"
    assert client(script) == WEIGHTS.hex()
    killed, again = server.seen("model.safetensors", "GET")
    assert killed.sent < len(WEIGHTS)
    assert (again.range, again.sent) == (None, len(WEIGHTS))
    assert "Traceback" not in capfd.readouterr().err


def test_server_is_for_this_machine_alone(tmp_path, server):
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        HubServer(tmp_path / "other", host="0.0.0.0")
    for url in (server.url, server.cdn_url):
        assert url.startswith("http://127.0.0.1:")


def test_nonsense_does_not_upset_the_server(server, client):
    port = int(server.url.rpartition(":")[2])
    for message in (b"", b"\x16\x03\x01\x02\n\r\n", b"POST /api/repos/create HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(message)
    assert client("out = api.repo_info('acme/model').id") == REPO


# Writing


def test_creates_a_repository_a_branch_and_a_tag(server, client, owner):
    first = server.repo(REPO).find("main").oid
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
    assert server.repo("acme/new").private
    assert set(server.repo("acme/new").tree()) == {".gitattributes"}
    assert refs == [["main", first], ["work", first]]
    assert (tag, server.repo(REPO).find("v1").oid) == ("v1", first)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS[::-1])
    (folder / "sub" / "more.safetensors").write_bytes(WEIGHTS[:1000])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    (folder / "empty.safetensors").touch()
    return folder


UPLOAD = "out = api.upload_folder(repo_id='acme/model', folder_path='folder', delete_patterns='extra/*').oid"


@pytest.mark.parametrize("part_size", [None, 70_000])
def test_uploads_a_folder(part_size, server, client, owner, folder):
    server.part_size = part_size
    before = server.repo(REPO).tree()
    assert client(UPLOAD, owner) == server.repo(REPO).find("main").oid
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    expected = {path: (len(c), sha256(c)) for path, c in files.items()}
    expected |= {path: before[path] for path in ("config.json", ".gitattributes")}
    assert server.repo(REPO).tree() == expected
    sent = server.seen("", "PUT")
    assert len(sent) == (2 if part_size is None else 6)
    assert sum(r.received for r in sent) == 301_000
    assert not any(r.authorization for r in sent)


def test_nothing_is_sent_twice(server, client, owner, folder):
    head = client(UPLOAD, owner)
    puts, commits = len(server.seen("", "PUT")), len(server.seen("/commit/"))
    assert client("out = api.upload_folder(repo_id='acme/model', folder_path='folder').oid", owner) == head
    assert (len(server.seen("", "PUT")), len(server.seen("/commit/"))) == (puts, commits)


def test_objects_that_arrived_before_the_upload_died_are_not_sent_again(server, client, owner, folder):
    server.fail(Fault("POST", "/commit/", status=403))
    assert client(UPLOAD, owner)[0] == "HfHubHTTPError"
    puts = len(server.seen("", "PUT"))
    assert client(UPLOAD, owner) == server.repo(REPO).find("main").oid
    assert len(server.seen("", "PUT")) == puts


def test_upload_that_is_cut_is_sent_again_whole(server, client, owner, folder):
    server.fail(Fault("PUT", sha256(WEIGHTS[::-1]), cut_upload=100_000))
    client(UPLOAD, owner)
    assert server.repo(REPO).read("model.safetensors") == WEIGHTS[::-1]
    cut, whole = server.seen(sha256(WEIGHTS[::-1]), "PUT")
    assert cut.status is None
    assert (whole.status, whole.received) == (200, 300_000)


def test_killed_upload_is_sent_again(server, client, owner, folder, tmp_path):
    """More bytes than a socket's buffers hold: those would arrive even after the client's death."""
    large = WEIGHTS * 40
    (folder / "model.safetensors").write_bytes(large)
    server.fail(Fault("PUT", sha256(large), pause=0.05))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from huggingface_hub import HfApi; api = HfApi(); {UPLOAD}"],
        env={**os.environ, **server.env(tmp_path / "home", owner)},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    server.wait_for(sha256(large), "PUT", received=200_000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert client(UPLOAD, owner) == server.repo(REPO).find("main").oid
    assert server.repo(REPO).tree()["model.safetensors"] == (len(large), sha256(large))
    killed, again = server.seen(sha256(large), "PUT")
    assert (killed.status, again.status, again.received) == (None, 200, len(large))


def test_lost_answer_of_a_commit(server, client, owner):
    """The commit is made; create_commit does not ask again, and the same call later finds nothing to do."""
    server.fail(Fault("POST", "/commit/", drop="after"))
    script = "out = api.create_commit('acme/model', [CommitOperationAdd('a.txt', b'a')], commit_message='a').oid"
    assert client(script, owner)[0] in ("ReadError", "RemoteProtocolError")
    assert client(script, owner) == server.repo(REPO).find("main").oid
    assert len(server.seen("/commit/")) == 1


def test_commit_on_a_parent_that_is_not_the_head_any_more(server, client, owner):
    old = server.repo(REPO).find("main").oid
    head = server.commit(REPO, {"config.json": b"{}"})
    script = "api.create_commit('acme/model', [{}], commit_message='m', parent_commit='{}')"
    kind, message = client("out = " + script.format("CommitOperationAdd('a.txt', b'a')", old), owner)
    assert kind == "HfHubHTTPError"
    assert "412" in message
    assert server.repo(REPO).find("main").oid == head
    client(script.format("CommitOperationDelete('extra/')", head), owner)
    assert "extra/notes.txt" not in server.repo(REPO).tree()


def test_pull_request(server, client):
    head = server.repo(REPO).find("main")
    stranger = server.add_token("stranger", user="nobody")
    script = (
        "info = api.create_commit('acme/model', [CommitOperationAdd('new.safetensors', b'new')], commit_message='n'{})"
    )
    assert "create_pr=1" in client(script.format(""), stranger)[1]
    script = script.format(", create_pr=True") + "; out = [info.pr_revision, info.pr_num, info.oid]"
    revision, number, oid = client(script, stranger)
    assert (revision, number) == ("refs/pr/1", 1)
    assert server.repo(REPO).find(revision).oid == oid
    assert server.repo(REPO).read("new.safetensors", revision) == b"new"
    assert server.repo(REPO).find("main") == head
    assert (
        client(f"out = Path(hf_hub_download('acme/model', 'new.safetensors', revision='{revision}')).read_text()")
        == "new"
    )


def test_read_only_and_full(server, client, owner, folder):
    reader = server.add_token("reader", "read", orgs=("acme",))
    assert "403 Forbidden" in client(UPLOAD, reader)[1]
    server.fail(storage_exceeded())
    kind, message = client(UPLOAD, owner)
    assert kind == "HfHubHTTPError"
    assert "storage limit" in message


def test_object_that_is_not_what_its_name_says_is_refused(server, client, owner):
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
    assert "a.safetensors" not in server.repo(REPO).tree()


def test_card_with_bad_metadata(client, owner):
    script = (
        "api.create_commit('acme/model', [CommitOperationAdd('README.md', b'---\\na: [\\n---\\n')], commit_message='m')"
    )
    kind, message = client(script, owner)
    assert kind == "ValueError"
    assert "Invalid metadata in README.md" in message


def test_upload_by_xet_is_refused(server, client, owner, folder):
    """What a client does that lacks a variable of `HubServer.env`; for downloads, it needs none."""
    before = server.repo(REPO).tree()
    assert client(UPLOAD, owner, HF_HUB_DISABLE_XET="0")[0] == "ConnectionError"
    assert server.repo(REPO).tree() == before
    script = "out = Path(hf_hub_download('acme/model', 'model.safetensors')).read_bytes().hex()"
    assert client(script, HF_HUB_DISABLE_XET="0") == WEIGHTS.hex()
