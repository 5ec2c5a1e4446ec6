"""Publishing a build as planned: contents first, to where nobody sees them, then one commit of everything."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from huggingface_hub import CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from ..quantize.errors import OutputError
from .account import MAIN, PULLS, Target, head_of
from .patience import AGAIN, patiently
from .publish import Counted, LocalFile, Push, Say, differences, remote_files

AT_ONCE = 10  # files that are asked about and sent together
NOTHING_IGNORED = "!*\n"  # in place of the .gitignore that the repository may hold


@dataclass(frozen=True)
class Pushed:
    """Where it is: the commit, what to load it by, and its address; `made` is False where it was there already."""

    commit: str
    revision: str
    url: str
    made: bool


def push(plan: Push, message: str, description: str, say: Say, progress: Counted | None) -> Pushed:
    """Makes the repository as planned: contents first, to where nobody sees them, then one commit of everything.

    What has arrived is not sent again when it is called again, and no second commit or pull request is made of what
    one has done.

    Args:
        message, description: of the commit.
        progress: called with bytes sent and a name; None for huggingface_hub's own bars.
    Raises:
        OutputError: refused, or not to be reached; it says what to do.
    """
    target, api = plan.target, HfApi()
    if not plan.needed:
        return Pushed(target.head, target.branch, _address(api, target), made=False)
    if target.pull_request and (found := _standing_pull(api, plan, say)):
        return found
    head = _make_room(api, target, say)
    files = plan.to_send
    for group in (files[i : i + AT_ONCE] for i in range(0, len(files), AT_ONCE)):
        names = group[0].path if len(group) == 1 else f"{group[0].path} to {group[-1].path}"
        if progress:
            progress(0, names)
        patiently(target.repo, lambda group=group: _send(api, target, group), say)
        if progress:
            progress(sum(f.size for f in group), names)
    return _commit(api, plan, head, message, description, say)


def _make_room(api: HfApi, target: Target, say: Say) -> str:
    """Makes the repository and the branch where they are missing, and gives the commit that the branch is at."""
    head = target.head
    if head is None:
        patiently(target.repo, lambda: api.create_repo(target.repo, private=target.private, exist_ok=True), say)
        head = head_of(target.repo, MAIN, say)
    if target.new_branch:
        patiently(
            target.repo,
            lambda: api.create_branch(target.repo, branch=target.branch, revision=head, exist_ok=True),
            say,
        )
        head = head_of(target.repo, target.branch, say)
    return head


def _send(api: HfApi, target: Target, group: Iterable[LocalFile]) -> None:
    api.preupload_lfs_files(
        target.repo,
        [f.addition for f in group],
        revision=target.branch,
        create_pr=target.pull_request,
        gitignore_content=NOTHING_IGNORED,
    )


def _commit(api: HfApi, plan: Push, head: str, message: str, description: str, say: Say) -> Pushed:
    """The one commit. Before it is asked for again, the Hub is asked whether it was made and the answer lost."""
    target, tries = plan.target, 0
    gone = [CommitOperationDelete(c.path) for c in plan.changes if c.action == "delete"]

    def commit() -> Pushed:
        nonlocal tries
        tries += 1
        if tries > 1 and (found := _standing(api, plan, head, say)):
            return found
        try:
            made = api.create_commit(
                target.repo,
                [*gone, *(f.addition for f in plan.to_send)],
                commit_message=message,
                commit_description=description,
                revision=target.branch,
                create_pr=target.pull_request,
                parent_commit=head,
            )
        except HfHubHTTPError as e:
            if e.response.status_code == 412 and (found := _standing(api, plan, head, say)):
                return found
            raise
        return Pushed(made.oid, made.pr_revision or target.branch, made.pr_url or _address(api, target), made=True)

    return patiently(target.repo, commit, say)


def _standing(api: HfApi, plan: Push, head: str, say: Say) -> Pushed | None:
    """The commit that an earlier try has made.

    Raises:
        OutputError: the branch has moved, and not by this.
    """
    target = plan.target
    if target.pull_request:
        found = _standing_pull(api, plan, say)
        return replace(found, made=True) if found else None
    now = head_of(target.repo, target.branch, say)
    if now == head:
        return None
    if differences(plan, remote_files(target, now, say)):
        raise OutputError(f"{target.repo}: somebody else has changed {target.branch} meanwhile; {AGAIN}")
    return Pushed(now, target.branch, _address(api, target), made=True)


def _standing_pull(api: HfApi, plan: Push, say: Say) -> Pushed | None:
    """An open pull request of the same user's with just this content."""
    repo = plan.target.repo

    def opened() -> list:
        mine = {"author": plan.target.user, "discussion_type": "pull_request", "discussion_status": "open"}
        return list(api.get_repo_discussions(repo, **mine))

    numbers = {f"{PULLS}{found.num}": found for found in patiently(repo, opened, say)}
    if not numbers:
        return None
    refs = patiently(repo, lambda: api.list_repo_refs(repo, include_pull_requests=True), say)
    for ref in refs.pull_requests:
        if ref.ref in numbers and not differences(plan, remote_files(plan.target, ref.target_commit, say)):
            return Pushed(ref.target_commit, ref.ref, numbers[ref.ref].url, made=False)
    return None


def _address(api: HfApi, target: Target) -> str:
    return f"{api.endpoint}/{target.repo}" + ("" if target.branch == MAIN else f"/tree/{target.branch}")
