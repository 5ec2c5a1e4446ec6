"""Publishing, composed: rights, local checks, plan, push, and a comparison of what then is there."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..convert.account import MAIN, PULLS, Target, find_target
from ..convert.patience import keep_quiet
from ..convert.publish import Push, differences, earlier_files, hash_files, plan_push, remote_files
from ..convert.push import Pushed, push
from ..convert.repo import CARD, PROVENANCE
from ..convert.shards import as_json, write_file
from ..quantize.errors import SourceError, quoted
from ..validate.evidence import EVIDENCE, PICTURE, evidence_of, lacking, what_lacks
from ..validate.provenance import Provenance, check_is_build
from ..validate.ready import check_hashes, check_structure, files_of
from .card import is_as_written, note, renew_card, renewed
from .progress import Progress
from .show import human_bytes, text_table

Say = Callable[[str], None]


@dataclass(frozen=True)
class Upload:
    """What an upload found and did; `pushed` is None if it was refused, or only planned.

    Args:
        problems: what is wrong with the build, or, after the push, with what is on the Hub.
        forced: what --force passed over.
    """

    plan: Push | None
    pushed: Pushed | None
    problems: list[str]
    forced: list[str]

    def as_dict(self) -> dict:
        """As JSON: what `Push.as_dict` says, null before there is a plan; where it is now; problems, a line each."""
        at = {
            "commit": self.pushed.commit if self.pushed else None,
            "url": self.pushed.url if self.pushed else None,
            "made": bool(self.pushed and self.pushed.made),
        }
        planned = self.plan.as_dict() if self.plan else dict.fromkeys(("repo", "revision", "files", "kept"))
        return planned | at | {"passed": not self.problems, "problems": self.problems, "forced": self.forced}


def target_of(repo: str, branch: str | None, create_pr: bool, private: bool, say: Say) -> Target:
    """Whose the token is, what it may do, and what is there; see `find_target`. Raises OutputError."""
    keep_quiet(bars=sys.stderr.isatty())
    return find_target(repo, branch, create_pr, private, say)


def upload(folder: Path, target: Target, force: bool, dry_run: bool, say: Say, show: Callable[[Push], None]) -> Upload:
    """Publishes a build that is what it says it is and has passed, and compares.

    Args:
        force: publish though the evidence is missing or failed, which is recorded; never other bytes than recorded.
        dry_run: change nothing, here or there.
        show: called with the plan, before anything is done.
    Raises:
        SourceError: not a build. OutputError: refused, or not to be reached.
    """
    check_is_build(folder)
    if not dry_run:
        with suppress(SourceError):  # of which check_structure has more to say
            renew_card(folder)
    provenance, wrong = check_structure(folder)
    if not wrong and not is_as_written(folder):
        wrong = [f"{CARD}: changed by hand; `motif-convert card DIR --card-extra FILE` writes it with text of your own"]
    if wrong:
        return Upload(None, None, wrong, [])
    weak = lacking(folder)
    evidence = evidence_of(folder)
    contents = {}
    if weak and force:
        evidence["forced"] = "; ".join(what_lacks(evidence))
        contents[EVIDENCE] = as_json(evidence)
    if not evidence["smoke"] and provenance.mtp not in (None, "drop"):
        say("The drafts of the MTP head were not measured, and the card says so; `motif-convert smoke` measures them.")
    for_main = target.pull_request or target.branch == MAIN or target.branch.startswith(PULLS)
    facts = {"repo": target.repo, "branch": None if for_main else target.branch}
    contents |= renewed(folder, evidence, facts)
    names = list(dict.fromkeys([*files_of(folder, provenance), *contents]))
    progress = Progress(sum((folder / n).stat().st_size for n in names if n not in contents), "check")
    try:
        files = hash_files(folder, names, contents, progress)
    finally:
        progress.close()
    found = {f.path: f.sha256 for f in files}
    if wrong := check_hashes(provenance, found | {CARD: provenance.files[CARD].sha256}):
        return Upload(None, None, wrong, [])
    remote = remote_files(target, target.head, say)
    earlier = earlier_files(target, remote, say)
    plan = plan_push(target, files, remote, earlier | {EVIDENCE, PICTURE} if earlier else earlier)
    if not earlier and (lost := [c.path for c in plan.changes if c.action in ("replace", "delete")]):
        weak.append(f"{target.repo} holds files that are not of motif-convert; this would replace or delete {lost[0]}")
    show(plan)
    if weak and not force:
        return Upload(plan, None, weak, [])
    if dry_run:
        return Upload(plan, None, [], weak)
    note(folder, facts)
    for name, data in contents.items():
        write_file(folder / name, data)
    pushed = _push(plan, provenance, weak, say)
    return Upload(plan, pushed, differences(plan, remote_files(target, pushed.commit, say)), weak)


def _push(plan: Push, provenance: Provenance, weak: list[str], say: Say) -> Pushed:
    made = provenance.made
    message = (
        f"{provenance.recipe.name} build of {made['source'].get('id')} by motif-convert {version('motif-convert')}"
    )
    description = f"Plan {made.get('plan_hash')}; {PROVENANCE} has the sha256 of every file."
    if weak:
        description += f"\n\nPublished with --force: {'; '.join(weak)}"
    if sys.stderr.isatty():
        return push(plan, message, description, say, None)
    progress = Progress(sum(f.size for f in plan.to_send), "send")
    try:
        return push(plan, message, description, say, progress)
    finally:
        progress.close()


@contextmanager
def ending_at_once(text: str) -> Iterator[None]:
    """Lets Ctrl-C end the process with a text and exit code 130.

    huggingface_hub's threads can't be interrupted, and Python waits for them: for gigabytes that are under way.
    """

    def end(*_: object) -> None:
        os.write(2, f"\n{text}\n".encode())
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def push_text(plan: Push) -> str:
    """A `Push`: every file, its size, and what becomes of it."""
    rows = [("file", "size", "action"), *((quoted(c.path), human_bytes(c.size), c.action) for c in plan.changes)]
    target, sent = plan.target, plan.to_send
    new = "" if target.head else " (new, private)" if target.private else " (new)"
    where = f"{target.repo}{new}, branch {target.branch}{' (new)' if target.new_branch else ''}"
    lines = [text_table(rows), "", f"To {where}{', as a pull request' if target.pull_request else ''}."]
    if plan.kept:
        lines.append(f"Kept there, not of this program: {quoted(', '.join(plan.kept), 1000)}")
    gone = sum(c.action == "delete" for c in plan.changes)
    count = f"{len(sent)} of {len(plan.files)} files to send, {human_bytes(sum(f.size for f in sent))}"
    return "\n".join([*lines, f"{count}; {gone} to delete."])


def upload_text(done: Upload) -> str:
    """How an `Upload` ended."""
    lines = [f"PROBLEM: {p}" for p in done.problems] + [f"FORCED: {f}" for f in done.forced]
    if done.pushed is None and not done.problems:
        return "\n".join([*lines, "Nothing was changed."])
    if done.pushed is None:
        return "\n".join([*lines, "NOT uploaded."])
    files, at = done.plan.files, f"commit {done.pushed.commit[:12]}"
    size = human_bytes(sum(f.size for f in files))
    if done.problems:
        return "\n".join([*lines, f"Uploaded, and NOT equal: {done.pushed.url}, {at}"])
    word = "Uploaded" if done.pushed.made else "Nothing to do, it is there"
    what = f"{len(files)} files, {size}: names, sizes and hashes equal those here"
    return "\n".join([*lines, f"{word}: {done.pushed.url}, {at}; {what}."])
