"""Whether a build may go where it is to go: the account, its rights, and the repository as it stands. Reads only."""

from collections.abc import Callable
from dataclasses import dataclass

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..quantize.errors import OutputError
from .patience import patiently

MAIN = "main"
PULLS = "refs/pr/"
WRITE = "repo.write"  # the permission of a fine-grained token


@dataclass(frozen=True)
class Target:
    """Where a build goes.

    Args:
        repo: owner/name, as the Hub spells it.
        user: whose token it is.
        branch: the branch, or `refs/pr/<number>`, that is written to, or that a pull request is made against.
        head: the commit there; of main where the branch is still to be made, None where the repository is.
        new_branch: whether the branch is still to be made.
        pull_request: whether to open a pull request instead of writing to the branch.
        private: whether the repository is, or is to be made, private; None for its owner's default.
    """

    repo: str
    user: str
    branch: str
    head: str | None
    new_branch: bool
    pull_request: bool
    private: bool | None


def find_target(
    repo: str,
    branch: str | None,
    pull_request: bool,
    private: bool,
    say: Callable[[str], None],
) -> Target:
    """Asks the Hub whose the token is, whether it may write to `repo`, and what is there.

    Raises:
        OutputError: no token, no right, or nothing that can be written to.
    """
    api, branch = HfApi(), branch or MAIN
    _check_name(repo)
    me = patiently(repo, api.whoami, say)
    _check_rights(me, repo, pull_request)
    info = patiently(repo, lambda: _existing(api, repo), say)
    if info is None:
        if pull_request:
            raise OutputError(f"{repo}: is not there, so there is nothing to make a pull request to")
        if branch.startswith("refs/"):
            raise OutputError(f"{repo}: is not there, so it has no {branch}")
        return Target(repo, me["name"], branch, None, branch != MAIN, False, private or None)
    if private and not info.private:
        raise OutputError(
            f"{repo}: is public, and --private does not change what is there; make it private in its settings first, "
            "or leave --private out"
        )
    repo = info.id  # its new name, where it was renamed
    if not pull_request:
        patiently(repo, lambda: api.auth_check(repo, write=True), say)
    head, new = _head(api, repo, branch, say)
    return Target(repo, me["name"], branch, head, new, pull_request, info.private)


def head_of(repo: str, branch: str, say: Callable[[str], None]) -> str:
    """The commit that a branch is at. Raises OutputError."""
    head, new = _head(HfApi(), repo, branch, say)
    if new:
        raise OutputError(f"{repo}: has no branch {branch} any more")
    return head


def _check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo = ""
    if repo.count("/") != 1:
        raise OutputError("the repository to upload to is named as owner/name, such as someone/Motif-3-MLX-4.5bit")


def _existing(api: HfApi, repo: str):
    try:
        return api.model_info(repo)
    except RepositoryNotFoundError:
        return None


def _check_rights(me: dict, repo: str, pull_request: bool) -> None:
    """What the account and its token say of themselves; what they leave open, the Hub decides later."""
    owner, access = repo.partition("/")[0].lower(), (me.get("auth") or {}).get("accessToken") or {}
    token = f"the token {access.get('displayName') or ''}".rstrip()
    remedy = "see https://huggingface.co/settings/tokens"
    if access.get("role") == "read":
        raise OutputError(f"{repo}: {token} may only read; use one that may write, {remedy}")
    if pull_request:
        return
    if access.get("role") == "fineGrained" and not _scope_allows(access.get("fineGrained") or {}, owner, repo.lower()):
        raise OutputError(f"{repo}: {token} has no write permission there; give it one, {remedy}")
    roles = {me["name"].lower(): "admin"}
    roles |= {org["name"].lower(): org.get("roleInOrg") for org in me.get("orgs") or []}
    if owner not in roles:
        raise OutputError(
            f"{repo}: {me['name']} does not belong to {owner}; upload to {me['name']}/{repo.partition('/')[2]}, "
            "or propose it with --create-pr"
        )
    if roles[owner] == "read":
        raise OutputError(f"{repo}: {me['name']} may only read in {owner}; ask there for the role `write`")


def _scope_allows(scopes: dict, owner: str, repo: str) -> bool:
    """Whether a fine-grained token may write there, or may do so for what whoami does not tell, such as a group."""
    for scope in scopes.get("scoped") or []:
        entity = scope.get("entity") or {}
        if WRITE not in (scope.get("permissions") or []):
            continue
        if entity.get("type") in ("user", "org", "model", "dataset", "space"):
            if str(entity.get("name", "")).lower() in (owner, repo) and entity["type"] not in ("dataset", "space"):
                return True
        else:
            return True
    return WRITE in (scopes.get("global") or [])


def _head(api: HfApi, repo: str, branch: str, say: Callable[[str], None]) -> tuple[str, bool]:
    """The commit of a branch, or of main if there is no such branch yet, and whether that is so."""
    pulls = branch.startswith(PULLS)
    refs = patiently(repo, lambda: api.list_repo_refs(repo, include_pull_requests=pulls), say)
    known = {ref.name: ref.target_commit for ref in refs.branches}
    if pulls:
        known |= {ref.ref: ref.target_commit for ref in refs.pull_requests}
    if branch in known:
        return known[branch], False
    if branch.startswith("refs/"):
        raise OutputError(f"{repo}: has no {branch}; name a branch, or a pull request that is there")
    if branch in {tag.name for tag in refs.tags}:
        raise OutputError(f"{repo}: {branch} is a tag, and tags do not move; name a branch with --revision")
    if MAIN not in known:
        raise OutputError(f"{repo}: has no branch {MAIN} to start {branch} from")
    return known[MAIN], True
