"""The test Hub against huggingface_hub itself, unpatched and in a process of its own: downloads, rights, faults."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub_clients import FILES, REPO, WEIGHTS, sha256
from hub_server import READ, WRITE, Fault, HubServer


def git_oid(data: bytes, tmp_path: Path) -> str:
    (tmp_path / "blob").write_bytes(data)
    return subprocess.check_output(["git", "hash-object", tmp_path / "blob"], text=True).strip()


# Reading


def test_downloads_a_small_file_and_an_lfs_file(model_hub, client):
    small, large = client("""
        names = "config.json", "model.safetensors"
        out = [Path(hf_hub_download("acme/model", name)).resolve().name for name in names]
    """)
    assert large == sha256(WEIGHTS)
    assert len(small) == 40
    (got,) = model_hub.seen("model.safetensors", "GET")
    assert (got.cdn, got.status, got.sent, got.token) == (True, 200, len(WEIGHTS), None)
    (asked,) = model_hub.seen("model.safetensors", "HEAD")
    assert (asked.cdn, asked.status, asked.sent) == (False, 302, 0)


def test_token_goes_to_the_hub_and_not_to_the_cdn(model_hub, client, owner):
    client("out = hf_hub_download('acme/model', 'model.safetensors')", owner)
    (asked, got) = model_hub.seen("model.safetensors")
    assert (asked.authorization, asked.token) == (True, "owner")
    assert (got.authorization, got.token) == (False, None)


def test_cut_body_is_resumed(model_hub, client):
    """By the library, in steps of its own 10 MiB: what came after the last full step is fetched again."""
    step, large = 10 * 2**20, WEIGHTS * 40
    model_hub.commit(REPO, {"model.safetensors": large})
    model_hub.fail(Fault("GET", "model.safetensors", cut=step + 100_000))
    assert client("out = Path(hf_hub_download('acme/model', 'model.safetensors')).resolve().name") == sha256(large)
    first, second = model_hub.seen("model.safetensors", "GET")
    assert first.sent == step + 100_000
    assert (second.status, second.range, second.sent) == (206, f"bytes={step}-", len(large) - step)


def test_snapshot_by_branch_and_by_commit(model_hub, client):
    old = model_hub.repo(REPO).find("main").oid
    new = model_hub.commit(REPO, {"config.json": b'{"a": 2}\n', "extra/notes.txt": None})
    main, pinned = client(f"""
        out = []
        for revision in ("main", "{old}"):
            folder = Path(snapshot_download("acme/model", revision=revision))
            paths = [path for path in folder.rglob("*") if path.is_file()]
            out.append([folder.name, {{str(path.relative_to(folder)): path.read_bytes().hex() for path in paths}}])
    """)
    for (name, files), revision in ((main, new), (pinned, old)):
        assert name == revision
        assert {p: (len(c) // 2, sha256(bytes.fromhex(c))) for p, c in files.items()} == model_hub.repo(REPO).tree(
            revision
        )
    assert len(model_hub.seen("model.safetensors", "GET")) == 1


def test_corrupt_body_is_taken_for_good_by_the_library(model_hub, client):
    model_hub.fail(Fault("GET", "model.safetensors", corrupt=True))
    got = client("out = Path(hf_hub_download('acme/model', 'model.safetensors')).read_bytes().hex()")
    assert len(got) == 2 * len(WEIGHTS)
    assert got != WEIGHTS.hex()
    (mismatch,) = client("out = api.verify_repo_checksums('acme/model').mismatches")
    assert mismatch["path"] == "model.safetensors"


def test_info_tree_and_paths(model_hub, client, tmp_path):
    head = model_hub.repo(REPO).find("main")
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


def test_tree_comes_in_pages(model_hub, client):
    model_hub.page_size = 2
    assert set(client("out = api.list_repo_files('acme/model')")) == {*FILES, ".gitattributes"}
    assert len(model_hub.seen("/tree/main")) == 3


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


def test_whoami_and_what_tokens_may_do(model_hub, client):
    fine = model_hub.add_token("fine", "fineGrained", orgs=("acme",), scoped={REPO: (READ, WRITE)})
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
def test_refusals(call, raised, signed_in, model_hub, client):
    model_hub.add_repo("acme/hidden", FILES, private=True)
    model_hub.add_repo("acme/gated", FILES, gated=True)
    stranger = model_hub.add_token("stranger", user="nobody") if signed_in else ""
    assert client(f"out = {call}", stranger)[0] == raised


def test_private_and_gated_repositories_open_to_whom_they_should(model_hub, client, owner):
    model_hub.add_repo("acme/hidden", FILES, private=True)
    model_hub.add_repo("acme/gated", FILES, gated=True)
    let_in = model_hub.add_token("let in", "read", user="nobody", gated=("acme/gated",))
    script = "out = Path(hf_hub_download('{}', 'config.json')).read_text()"
    assert client(script.format("acme/hidden"), owner) == FILES["config.json"].decode()
    assert client(script.format("acme/gated"), let_in) == FILES["config.json"].decode()


def test_renamed_repository_is_found_under_its_old_name(model_hub, client, owner):
    model_hub.rename_repo(REPO, "acme/renamed")
    name, content, oid = client(
        """
        out = [api.repo_info("acme/model").id]
        out.append(Path(hf_hub_download("acme/model", "model.safetensors")).read_bytes().hex())
        out.append(api.create_commit("acme/model", [CommitOperationAdd("new.txt", b"new")], commit_message="more").oid)
        """,
        owner,
    )
    assert (name, content) == ("acme/renamed", WEIGHTS.hex())
    assert model_hub.repo("acme/renamed").find("main").oid == oid


# Faults


def test_rate_limit_is_waited_for_and_tried_again(model_hub, client):
    model_hub.fail(Fault("GET", "model.safetensors", times=2, status=429, headers={"Retry-After": "0"}))
    model_hub.fail(Fault("GET", "/tree/", status=503))
    assert client("out = Path(snapshot_download('acme/model'), 'model.safetensors').stat().st_size") == len(WEIGHTS)
    assert [r.status for r in model_hub.seen("model.safetensors", "GET")] == [429, 429, 200]
    assert [r.status for r in model_hub.seen("/tree/")] == [503, 200]


def test_reset_is_not_retried_while_a_file_is_asked_for(model_hub, client):
    model_hub.fail(Fault("GET", "model.safetensors", drop="before"))
    assert client("out = hf_hub_download('acme/model', 'model.safetensors')")[0] == "ReadError"
    (record,) = model_hub.seen("model.safetensors", "GET")
    assert record.status is None


def test_killed_client_leaves_the_server_well(model_hub, client, tmp_path, capfd):
    model_hub.fail(Fault("GET", "model.safetensors", pause=0.2, chunk=1000))
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from huggingface_hub import hf_hub_download as d; d('acme/model', 'model.safetensors')",
        ],
        env={**os.environ, **model_hub.env(tmp_path / "home")},
    )
    model_hub.wait_for("model.safetensors", "GET", sent=3000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    script = "out = Path(hf_hub_download('acme/model', 'model.safetensors')).read_bytes().hex()"
    assert client(script) == WEIGHTS.hex()
    killed, again = model_hub.seen("model.safetensors", "GET")
    assert killed.sent < len(WEIGHTS)
    assert (again.range, again.sent) == (None, len(WEIGHTS))
    assert "Traceback" not in capfd.readouterr().err


def test_server_is_for_this_machine_alone(tmp_path, model_hub):
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        HubServer(tmp_path / "other", host="0.0.0.0")
    for url in (model_hub.url, model_hub.cdn_url):
        assert url.startswith("http://127.0.0.1:")


def test_nonsense_does_not_upset_the_server(model_hub, client):
    port = int(model_hub.url.rpartition(":")[2])
    for message in (b"", b"\x16\x03\x01\x02\n\r\n", b"POST /api/repos/create HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(message)
    assert client("out = api.repo_info('acme/model').id") == REPO
