"""A Hugging Face Hub on this machine, for tests: huggingface_hub, unpatched, downloads from it and uploads to it.

    with HubServer(tmp_path / "server") as server:
        server.add_repo("org/name", files={"config.json": b"{}", "model.safetensors": Path("weights")})
        server.fail(Fault("GET", "model.safetensors", cut=1000))
        motif_convert("--source", "org/name", env=server.env(tmp_path / "home"))

Two ports of 127.0.0.1: the Hub, and the CDN where LFS files lie. A second port because huggingface_hub takes a file's
metadata from a redirect, and leaves its token behind, only where the redirect goes to another origin.

Who decides on Xet: for a download the server, by X-Xet-Hash, which this one never sends; for an upload the client
alone, by HF_HUB_DISABLE_XET, which `env` sets.
"""

import re
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import hub_api
import hub_uploads
from hub_faults import Fault, Faults
from hub_http import Listener, Record, Reply, Request
from hub_repos import HEADS, READ, WRITE, HubError, Repo, Storage, Token

__all__ = ["READ", "WRITE", "Fault", "HubServer", "Record", "storage_exceeded"]


def storage_exceeded(method: str = "POST", path: str = "/lfs/objects/batch", times: int | None = None) -> Fault:
    """The Hub's refusal where an account's storage is full."""
    message = (
        "Private repository storage limit reached, please upgrade your plan to increase your private storage limit"
    )
    return Fault(method, path, times, status=403, message=message)


class HubServer:
    """See the module. LFS is for files whose name fits a pattern or whose size in bytes is above the threshold;
    LFS objects larger than `part_size` bytes are asked for as multipart uploads; a page of a tree has `page_size`
    entries."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        lfs_patterns: tuple[str, ...] = ("*.safetensors", "*.bin", "*.gguf", "*.npz"),
        lfs_threshold: int = 10_000_000,
        part_size: int | None = None,
        page_size: int = 1000,
    ):
        if host != "127.0.0.1":
            raise ValueError(f"{host}: the test Hub is for this machine alone; its host is 127.0.0.1")
        self.storage = Storage(folder / "objects", lfs_patterns, lfs_threshold)
        self.incoming = folder / "incoming"
        self.incoming.mkdir()
        self.part_size, self.page_size = part_size, page_size
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.tokens: dict[str, Token] = {}
        self.signed: dict[str, object] = {}
        self.faults = Faults()
        self.requests: list[Record] = []
        self.errors: list[BaseException] = []
        self.stopping = threading.Event()
        self.lock = threading.RLock()
        self._listeners = [Listener(self, cdn=False), Listener(self, cdn=True)]
        self.url, self.cdn_url = (f"http://{host}:{listener.server_port}" for listener in self._listeners)

    def __enter__(self) -> "HubServer":
        for listener in self._listeners:
            threading.Thread(target=listener.serve_forever, args=(0.02,)).start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.stopping.set()
        for listener in self._listeners:
            listener.stop()
        if self.errors and kind is None:
            raise self.errors[0]

    # What a test sets up

    def add_repo(
        self,
        repo_id: str,
        files: Mapping[str, bytes | Path] | None = None,
        *,
        private: bool = False,
        gated: bool = False,
    ) -> Repo:
        """A repository as the Hub makes it, its first commit holding .gitattributes alone; then `files`, copied."""
        repo = self.repos[repo_id] = Repo(repo_id, private, gated)
        first = {".gitattributes": self.storage.copy(".gitattributes", self.storage.gitattributes())}
        repo.commit(f"{HEADS}main", None, "initial commit", first)
        if files:
            self.commit(repo_id, files)
        return repo

    def commit(self, repo_id: str, files: Mapping[str, bytes | Path | None], branch: str = "main") -> str:
        """Commits files beside those of a branch, as if somebody else had; None removes one. Gives the commit."""
        with self.lock:
            repo = self.repos[repo_id]
            ref = repo.writable_ref(branch)
            blobs = {path: self.storage.copy(path, content) for path, content in files.items() if content is not None}
            repo.objects |= {blob.sha256: blob for blob in blobs.values() if blob.lfs}
            kept = {path: blob for path, blob in repo.refs[ref].files.items() if path not in files}
            return repo.commit(ref, repo.refs[ref], "Upload", kept | blobs).oid

    def rename_repo(self, old: str, new: str) -> None:
        with self.lock:
            repo = self.repos[new] = self.repos.pop(old)
            repo.id, self.moved[old] = new, new

    def repo(self, repo_id: str) -> Repo:
        return self.repos[repo_id]

    def add_token(
        self,
        name: str,
        role: str = "write",
        *,
        user: str = "someone",
        orgs: tuple[str, ...] = (),
        scoped: Mapping[str, tuple[str, ...]] | None = None,
        gated: tuple[str, ...] = (),
        org_role: str = "write",
    ) -> str:
        """A new token's value. Roles: `read` and `write`, for all that `user` and `orgs` own; `fineGrained`, for what
        `scoped` allows (READ, WRITE) by owner or repo id. `gated` are others' gated repos that let the user in;
        `org_role` is the user's in `orgs`."""
        token = Token(name, f"hf_{secrets.token_hex(17)}", role, user, orgs, scoped or {}, gated, org_role)
        self.tokens[token.value] = token
        return token.value

    def env(self, home: Path, token: str = "") -> dict[str, str]:
        """The environment of a client process: this Hub, a home of its own, and no token but the given one."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_XET_CACHE": str(home / "xet"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_TOKEN": token,
            "HUGGING_FACE_HUB_TOKEN": "",
            "HF_OIDC_RESOURCE": "",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def fail(self, fault: Fault) -> None:
        self.faults.add(fault)

    def heal(self) -> None:
        self.faults.clear()

    # What a test looks at

    def seen(self, path: str, method: str = ".*") -> list[Record]:
        """The requests of a method (a regex for the whole of it) whose path a regex finds."""
        return [r for r in list(self.requests) if re.fullmatch(method, r.method) and re.search(path, r.path)]

    def wait_for(
        self, path: str, method: str = ".*", *, sent: int = 0, received: int = 0, seconds: float = 30
    ) -> Record:
        """Waits until such a request is there and so many bytes of its body have gone out or come in."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for record in self.seen(path, method):
                if record.sent >= sent and record.received >= received:
                    return record
            time.sleep(0.01)
        raise TimeoutError(f"no {method} {path} within {seconds} s")

    # What the endpoints need

    def answer(self, request: Request, cdn: bool) -> Reply:
        """Finds the endpoint and calls it. Its arguments are unquoted after the split: a revision may hold a slash."""
        method = "GET" if request.method == "HEAD" else request.method
        for known, pattern, endpoint in (m for module in (hub_api, hub_uploads) for m in _endpoints(module, cdn)):
            match = re.fullmatch(pattern.replace("ID", "([^/]+/[^/]+?)"), request.path)
            if match and known == method:
                if request.authorization and request.token is None and not cdn:
                    raise HubError(401, "Invalid credentials in Authorization header")
                return endpoint(request, *(unquote(group) if group else group for group in match.groups()))
        raise HubError(404, f"the test Hub has no {request.method} {request.path}")

    def sign(self, target: object) -> str:
        signature = secrets.token_hex(16)
        self.signed[signature] = target
        return f"Signature={signature}"


def _endpoints(module, cdn: bool) -> list:
    return module.CDN_ENDPOINTS if cdn else module.ENDPOINTS
