"""The test Hub's endpoints for accounts, repositories, revisions and files, as huggingface_hub 2 calls them."""

import re
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode

import yaml
from hub_http import Reply, Request, Span, in_json
from hub_repos import HEADS, PULLS, READ, TAGS, WRITE, Blob, Commit, HubError, Repo, Token, sha1


def open_repo(request: Request, repo_id: str, write: bool = False) -> Repo:
    """The repository, for a request that may see it and, with `write`, change it.

    Raises:
        HubError: 307 to the new name; 401 or 404 where it is missing or hidden, which the Hub does not tell apart;
            403 where the token may only read.
    """
    hub, token = request.hub, request.token
    if repo_id in hub.moved:
        target = request.path.replace(repo_id, hub.moved[repo_id], 1)
        query = urlencode(request.query, doseq=True)
        raise HubError(307, "Moved", headers={"Location": f"{target}?{query}" if query else target})
    repo = hub.repos.get(repo_id)
    if repo is None or (repo.private and not (token and token.may(READ, repo_id))):
        raise HubError(404 if token else 401, "Repository not found", "RepoNotFound")
    if write:
        require_token(request)
        if not token.may(WRITE, repo_id):
            raise HubError(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
    return repo


def require_token(request: Request) -> Token:
    if request.token is None:
        raise HubError(401, "Invalid username or password.")
    return request.token


def check_gate(repo: Repo, token: Token | None) -> None:
    if repo.gated and not (token and (repo.id in token.gated or token.may(READ, repo.id))):
        message = f"Access to model {repo.id} is restricted and you are not in the authorized list."
        raise HubError(403 if token else 401, message, "GatedRepo")


def signed(request: Request, kind: type):
    """What the signature of a URL stands for. As S3, it refuses an Authorization header beside it."""
    if request.authorization:
        raise HubError(400, "Only one auth mechanism allowed")
    target = request.hub.signed.get(request.parameter("Signature"))
    if not isinstance(target, kind):
        raise HubError(403, "SignatureDoesNotMatch")
    return target


# Accounts and repositories


def whoami(request: Request) -> Reply:
    token = require_token(request)
    access = {"displayName": token.name, "role": token.role, "createdAt": "2026-01-01T00:00:00.000Z"}
    if token.role == "fineGrained":
        kinds = {name: "model" if "/" in name else "user" if name == token.user else "org" for name in token.scoped}
        scoped = [
            {"entity": {"_id": sha1(name.encode())[:24], "type": kinds[name], "name": name}, "permissions": [*allowed]}
            for name, allowed in token.scoped.items()
        ]
        access["fineGrained"] = {"canReadGatedRepos": bool(token.gated), "global": [], "scoped": scoped}
    orgs = [{"type": "org", "name": org, "roleInOrg": token.org_role} for org in token.orgs]
    auth = {"type": "access_token", "accessToken": access}
    return in_json({"type": "user", "name": token.user, "orgs": orgs, "isPro": False, "canPay": False, "auth": auth})


def validate_yaml(request: Request) -> Reply:
    match = re.match(r"---\n(.*?)\n---\s*(\n|$)", request.body.json()["content"], re.DOTALL)
    try:
        empty = match is None or not yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return in_json({"errors": [{"message": str(error)}], "warnings": []}, 400)
    warning = {"message": "empty or missing yaml metadata in repo card"}
    return in_json({"errors": [], "warnings": [warning] if empty else []})


def create_repo(request: Request) -> Reply:
    token, wanted = require_token(request), request.body.json()
    owner = wanted.get("organization") or token.user
    repo_id = f"{owner}/{wanted['name']}"
    if not token.may(WRITE, repo_id):
        raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
    url = f"{request.hub.url}/{repo_id}"
    if repo_id in request.hub.repos:
        return in_json({"error": "You already created this model repo", "url": url, "name": repo_id}, 409)
    request.hub.add_repo(repo_id, private=wanted.get("visibility") == "private")
    return in_json({"url": url, "name": repo_id})


def check_access(request: Request, repo_id: str, write: str | None) -> Reply:
    check_gate(open_repo(request, repo_id, write=bool(write)), request.token)
    return in_json({})


def repo_info(request: Request, repo_id: str, revision: str | None) -> Reply:
    repo = open_repo(request, repo_id)
    commit = repo.find(revision or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    for sibling in siblings if request.parameter("blobs") == "true" else ():
        blob = commit.files[sibling["rfilename"]]
        lfs = {"size": blob.size, "sha256": blob.sha256, "pointerSize": blob.pointer_size}
        sibling |= {"size": blob.size, "blobId": blob.git_oid, **({"lfs": lfs} if blob.lfs else {})}
    info = {"id": repo.id, "author": repo.id.partition("/")[0], "sha": commit.oid, "lastModified": commit.date}
    info |= {"private": repo.private, "gated": "manual" if repo.gated else False, "siblings": siblings}
    if request.parameter("securityStatus") == "true":
        info["securityRepoStatus"] = {"scansDone": True, "filesWithIssues": []}
    return in_json(info)


# Revisions


def list_refs(request: Request, repo_id: str) -> Reply:
    refs = open_repo(request, repo_id).refs
    kinds = {"branches": HEADS, "tags": TAGS, "converts": "refs/convert/", "pullRequests": PULLS}
    answer = {}
    for kind, prefix in kinds.items():
        names = [ref.removeprefix(prefix) for ref in refs if ref.startswith(prefix)]
        answer[kind] = [{"name": n, "ref": prefix + n, "targetCommit": refs[prefix + n].oid} for n in names]
    return in_json(answer)


def create_branch(request: Request, repo_id: str, branch: str) -> Reply:
    repo = open_repo(request, repo_id, write=True)
    if branch.startswith("refs/"):
        raise HubError(400, f"Invalid reference for a branch: {branch}")
    return _create_ref(repo, HEADS + branch, request.body.json().get("startingPoint") or "main")


def create_tag(request: Request, repo_id: str, revision: str) -> Reply:
    repo = open_repo(request, repo_id, write=True)
    return _create_ref(repo, TAGS + request.body.json()["tag"], revision)


def _create_ref(repo: Repo, ref: str, revision: str) -> Reply:
    if ref in repo.refs:
        raise HubError(409, f"Reference already exists: {ref}")
    repo.refs[ref] = repo.find(revision)
    return in_json({}, 201)


def list_commits(request: Request, repo_id: str, revision: str) -> Reply:
    commit, commits = open_repo(request, repo_id).find(revision), []
    while commit:
        commits.append({"id": commit.oid, "title": commit.title, "message": "", "authors": [], "date": commit.date})
        commit = commit.parent
    return in_json(commits)


def list_discussions(request: Request, repo_id: str) -> Reply:
    """Pull requests alone: the test Hub has no other discussions."""
    repo = open_repo(request, repo_id)
    status, author = request.parameter("status"), request.parameter("author")
    found = [
        {
            "num": number,
            "title": pull.title,
            "author": {"name": pull.author},
            "createdAt": repo.find(f"{PULLS}{number}").date,
            "status": pull.status,
            "repo": {"name": repo.id, "type": "model"},
            "isPullRequest": True,
        }
        for number, pull in repo.pulls.items()
        if status in (None, pull.status) and author in (None, pull.author)
    ]
    return in_json({"count": len(found), "start": 0, "discussions": found})


# Files


def list_tree(request: Request, repo_id: str, revision: str, folder: str | None) -> Reply:
    commit = open_repo(request, repo_id).find(revision)
    inside = f"{folder}/" if folder else ""
    paths = sorted(path for path in (*commit.files, *_folders(commit)) if path.startswith(inside))
    if folder and not paths:
        raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    if request.parameter("recursive") != "true":
        paths = [path for path in paths if "/" not in path[len(inside) :]]
    start = int(request.parameter("cursor") or 0)
    stop = start + request.hub.page_size
    headers = {}
    if stop < len(paths):
        query = urlencode({**request.query, "cursor": stop}, doseq=True)
        headers["Link"] = f'<{request.hub.url}{request.path}?{query}>; rel="next"'
    expand = request.parameter("expand") == "true"
    return in_json([_entry(commit, path, expand) for path in paths[start:stop]], headers=headers)


def paths_info(request: Request, repo_id: str, revision: str) -> Reply:
    commit = open_repo(request, repo_id).find(revision)
    form = parse_qs(request.body.text())
    known, expand = {*commit.files, *_folders(commit)}, form.get("expand") == ["true"]
    return in_json([_entry(commit, path, expand) for path in form.get("paths", []) if path in known])


def _folders(commit: Commit) -> set[str]:
    return {str(parent) for path in commit.files for parent in Path(path).parents} - {"."}


def _entry(commit: Commit, path: str, expand: bool) -> dict:
    last = {"lastCommit": {"id": commit.oid, "title": commit.title, "date": commit.date}} if expand else {}
    blob = commit.files.get(path)
    if blob is None:
        return {"type": "directory", "oid": sha1(path.encode()), "size": 0, "path": path, **last}
    lfs = {"lfs": {"oid": blob.sha256, "size": blob.size, "pointerSize": blob.pointer_size}} if blob.lfs else {}
    return {"type": "file", "oid": blob.git_oid, "size": blob.size, "path": path, **lfs, **last}


def resolve(request: Request, repo_id: str, revision: str, path: str) -> Reply:
    """A small file itself, or the way to an LFS file on the CDN. No X-Xet-Hash, so no client downloads by Xet."""
    repo, hub = open_repo(request, repo_id), request.hub
    check_gate(repo, request.token)
    commit = repo.find(revision)
    headers = {"X-Repo-Commit": commit.oid}
    blob = commit.files.get(path)
    if blob is None:
        raise HubError(404, "Entry not found", "EntryNotFound", headers)
    if not blob.lfs:
        return _send_blob(request, blob, headers)
    headers |= {"ETag": f'"{blob.oid}"', "X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(blob.size)}
    headers["Location"] = f"{hub.cdn_url}/{repo.id}/{blob.sha256}/{quote(path)}?{hub.sign(blob)}"
    return Reply(302, headers)


def get_object(request: Request, repo_id: str, sha256: str, path: str) -> Reply:
    return _send_blob(request, signed(request, Blob), {})


def _send_blob(request: Request, blob: Blob, headers: dict[str, str]) -> Reply:
    headers = {**headers, "ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes", "Content-Type": "binary/octet-stream"}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.range or "")
    if not match or not any(match.groups()):
        return Reply(200, headers, Span(blob.file, 0, blob.size))
    first, last = match.groups()
    start = int(first) if first else max(0, blob.size - int(last))
    stop = min(int(last) + 1, blob.size) if first and last else blob.size
    if start >= stop:
        raise HubError(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{blob.size}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.size}"
    return Reply(206, headers, Span(blob.file, start, stop - start))


ENDPOINTS = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", "/api/repos/create", create_repo),
    ("GET", "/api/models/ID/auth-check(/write)?", check_access),
    ("GET", "/api/models/ID(?:/revision/([^/]+))?", repo_info),
    ("GET", "/api/models/ID/refs", list_refs),
    ("POST", "/api/models/ID/branch/([^/]+)", create_branch),
    ("POST", "/api/models/ID/tag/([^/]+)", create_tag),
    ("GET", "/api/models/ID/commits/([^/]+)", list_commits),
    ("GET", "/api/models/ID/discussions", list_discussions),
    ("GET", "/api/models/ID/tree/([^/]+)(?:/(.+))?", list_tree),
    ("POST", "/api/models/ID/paths-info/([^/]+)", paths_info),
    ("GET", "/ID/resolve/([^/]+)/(.+)", resolve),
]
CDN_ENDPOINTS = [("GET", "/ID/([0-9a-f]{64})/(.+)", get_object)]
