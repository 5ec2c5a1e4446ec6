"""The test Hub's endpoints for uploads: what goes to LFS, where its objects go, and commits."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from hub_api import open_repo, require_token, signed
from hub_faults import CHUNK
from hub_http import Body, Reply, Request, in_json
from hub_repos import PULLS, Blob, HubError, Pull, Repo


@dataclass
class Upload:
    """An LFS object that a client was told to send; a multipart one arrives in numbered parts."""

    repo: Repo
    oid: str
    size: int
    parts: dict[int, Body] = field(default_factory=dict)


def _open(request: Request, repo_id: str, by_pull_request: bool) -> Repo:
    """Whoever may write to anything may open a pull request."""
    repo = open_repo(request, repo_id, write=not by_pull_request)
    if require_token(request).role == "read":
        raise HubError(403, "Authorization error.")
    return repo


def preupload(request: Request, repo_id: str, revision: str) -> Reply:
    repo = _open(request, repo_id, by_pull_request=request.parameter("create_pr") == "1")
    known, wanted = repo.find(revision).files, request.body.json()
    hosted = known[".gitignore"].file.read_text() if ".gitignore" in known else ""
    ignored = (wanted.get("gitIgnore") or hosted).split()
    files = []
    for path, size in ((file["path"], file["size"]) for file in wanted["files"]):
        mode = "lfs" if request.hub.storage.is_lfs(path, size) else "regular"
        ignore = any(fnmatch(part, pattern) for pattern in ignored for part in (path, Path(path).name))
        oid = known[path].oid if path in known else None
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": ignore, "oid": oid})
    return in_json({"files": files})


def lfs_batch(request: Request, repo_id: str) -> Reply:
    """Where to send each object; nothing for one that is here already. Never the transfer `xet`."""
    wanted = request.body.json()
    repo = _open(request, repo_id, by_pull_request="ref" not in wanted)
    multipart = request.hub.part_size is not None and "multipart" in wanted["transfers"]
    objects = []
    for oid, size in ((entry["oid"], entry["size"]) for entry in wanted["objects"]):
        entry = {"oid": oid, "size": size, "authenticated": True}
        if oid not in repo.objects:
            verify = {"href": f"{request.hub.url}/{repo.id}.git/info/lfs/verify"}
            entry["actions"] = {"upload": _where(request, Upload(repo, oid, size), multipart), "verify": verify}
        objects.append(entry)
    return in_json({"transfer": "multipart" if multipart else "basic", "objects": objects})


def _where(request: Request, upload: Upload, multipart: bool) -> dict:
    hub, repo_id, signature = request.hub, upload.repo.id, request.hub.sign(upload)
    href = f"{hub.cdn_url}/{repo_id}/{upload.oid}?{signature}"
    if not multipart or upload.size <= hub.part_size:
        return {"href": href, "header": {}}
    count = -(-upload.size // hub.part_size)
    parts = {str(n): f"{href}&partNumber={n}" for n in range(1, count + 1)}
    complete = f"{hub.url}/{repo_id}.git/info/lfs/complete?{signature}"
    return {"href": complete, "header": {"chunk_size": str(hub.part_size), **parts}}


def put_object(request: Request, repo_id: str, oid: str) -> Reply:
    upload, number, body = signed(request, Upload), request.parameter("partNumber"), request.body
    if number:
        kept = body.file.replace(body.file.with_suffix(f".part{number}"))
        upload.parts[int(number)] = Body(kept, body.size, body.sha256)
    else:
        _accept(request, upload, body)
    return Reply(200, {"ETag": f'"{body.sha256}"'})


def complete_upload(request: Request, repo_id: str) -> Reply:
    upload, named = signed(request, Upload), request.body.json()["parts"]
    parts = [upload.parts.get(part["partNumber"]) for part in named]
    if any(p is None or part["etag"].strip('"') != p.sha256 for p, part in zip(parts, named, strict=True)):
        raise HubError(400, "InvalidPart")
    _accept(request, upload, _join(parts))
    return in_json({})


def _join(parts: list[Body]) -> Body:
    whole, digest = parts[0].file.with_suffix(".whole"), hashlib.sha256()
    with whole.open("wb") as out:
        for part in parts:
            with part.file.open("rb") as file:
                while chunk := file.read(CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
            part.file.unlink()
    return Body(whole, sum(part.size for part in parts), digest.hexdigest())


def _accept(request: Request, upload: Upload, body: Body) -> None:
    if (body.size, body.sha256) != (upload.size, upload.oid):
        got, wanted = f"{body.size} bytes of sha256 {body.sha256}", f"{upload.size} of {upload.oid}"
        raise HubError(400, f"BadDigest: got {got}, not {wanted}")
    upload.repo.objects[upload.oid] = request.hub.storage.move(body.file, body.size, body.sha256)


def verify_object(request: Request, repo_id: str) -> Reply:
    repo, named = open_repo(request, repo_id), request.body.json()
    if named["oid"] not in repo.objects or repo.objects[named["oid"]].size != named["size"]:
        raise HubError(404, f"no LFS object {named['oid']} of {named['size']} bytes")
    return in_json({})


def create_commit(request: Request, repo_id: str, revision: str) -> Reply:
    by_pull_request = request.parameter("create_pr") == "1"
    repo = _open(request, repo_id, by_pull_request)
    lines = [json.loads(line) for line in request.body.text().splitlines() if line.strip()]
    header, operations = lines[0]["value"], lines[1:]
    ref = repo.writable_ref(revision)
    head, parent = repo.refs[ref], header.get("parentCommit")
    if parent and by_pull_request:
        head = repo.find(parent)
    elif parent and not head.oid.startswith(parent):
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    files = dict(head.files)
    for operation in operations:
        _apply(request, repo, files, operation["key"], operation["value"])
    pull = None
    if by_pull_request:
        number = 1 + sum(r.startswith(PULLS) for r in repo.refs)
        ref, pull = f"{PULLS}{number}", f"{request.hub.url}/{repo.id}/discussions/{number}"
        repo.pulls[number] = Pull(header["summary"], require_token(request).user)
    commit = repo.commit(ref, head, header["summary"], files, header.get("description", ""))
    url = f"{request.hub.url}/{repo.id}/commit/{commit.oid}"
    return in_json({"success": True, "commitOid": commit.oid, "commitUrl": url, "pullRequestUrl": pull})


def _apply(request: Request, repo: Repo, files: dict[str, Blob], key: str, value: dict) -> None:
    path, storage = value["path"], request.hub.storage
    if key == "file":
        content = base64.b64decode(value["content"])
        if content and storage.is_lfs(path, len(content)):
            raise HubError(400, f"{path}: its name or its size asks for LFS, and it was sent as a regular file")
        files[path] = storage.copy(path, content)
    elif key == "lfsFile":
        blob = repo.objects.get(value["oid"])
        if blob is None or value.get("size", blob.size) != blob.size:
            raise HubError(400, f"{path}: LFS pointer pointed to a file that does not exist")
        files[path] = blob
    elif key in ("deletedFile", "deletedFolder"):
        folder = path.rstrip("/") + "/"
        gone = [p for p in files if (p.startswith(folder) if key == "deletedFolder" else p == path)]
        if not gone:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for p in gone:
            del files[p]
    else:
        raise HubError(400, f"unknown operation: {key}")


def no_xet(request: Request, repo_id: str) -> Reply:
    raise HubError(400, "the test Hub has no Xet storage; set HF_HUB_DISABLE_XET=1 in the client's environment")


ENDPOINTS = [
    ("POST", "/api/models/ID/preupload/([^/]+)", preupload),
    ("POST", "/api/models/ID/commit/([^/]+)", create_commit),
    ("GET", "/api/models/ID/xet-(?:read|write)-token/.+", no_xet),
    ("POST", "/ID[.]git/info/lfs/objects/batch", lfs_batch),
    ("POST", "/ID[.]git/info/lfs/complete", complete_upload),
    ("POST", "/ID[.]git/info/lfs/verify", verify_object),
]
CDN_ENDPOINTS = [("PUT", "/ID/([0-9a-f]{64})", put_object)]
