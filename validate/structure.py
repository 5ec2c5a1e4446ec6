"""What a build is made of, against the plan: files, shards, index, tensors. Headers alone."""

import hashlib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from ..convert.checkpoint import INDEX, Checkpoint, read_json, read_whole
from ..convert.config import MODEL_FILE
from ..convert.headers import TensorInfo, read_header
from ..convert.journal import JOURNAL
from ..convert.plan import Plan
from ..convert.repo import CARD, COPIED, PROVENANCE
from ..convert.shards import Written
from ..quantize.errors import SourceError, quoted
from .provenance import one_line

WRITTEN = (INDEX, "config.json", MODEL_FILE, CARD)  # beside the shards, and what is copied
EVIDENCE = ("validation.json", "validation.png")  # made by verify and smoke, after motif-convert.json
RENEWED = {f".{name}.partial" for name in (PROVENANCE, CARD, *EVIDENCE)}  # of a kill; written again in time
PYCACHE = "__pycache__"
NONE: Mapping[str, int] = MappingProxyType({})
MOST = 20  # lines about one kind of fault

Shards = dict[str, dict[str, TensorInfo]]  # file -> its tensors by name


def some(problems: Iterable[str]) -> list[str]:
    """The first of many problems of one kind, and how many more there are."""
    lines = list(problems)
    if len(lines) <= MOST:
        return lines
    return [*lines[:MOST], f"and {len(lines) - MOST:,} more like: {lines[MOST]}"]


def check_files(out: Path, files: dict[str, Written] | None, elsewhere: Mapping[str, int] = NONE) -> list[str]:
    """Files that are missing, of another size, or that motif-convert.json does not list.

    Files whose names begin with a dot, such as those that Git, the Hub and macOS leave, are no part of a model, and
    neither is a `__pycache__` as Python leaves it; but a conversion's own journal and unfinished files mean that it
    did not end.

    Args:
        files: as motif-convert.json lists them; None if that is not known.
        elsewhere: sizes of files that other ranks have.
    """
    problems = []
    for name, recorded in (files or {}).items():
        path = out / name
        there = path.stat().st_size if path.is_file() else elsewhere.get(name)
        if not name.endswith(".safetensors") and not any(fnmatchcase(name, p) for p in (*WRITTEN, *COPIED)):
            problems.append(f"{PROVENANCE}: lists {quoted(name)}, which is no file of a build")
        if there is None:
            problems.append(f"{name}: missing, and {PROVENANCE} lists it")
        elif there != recorded.size:
            problems.append(f"{name}: {there:,} bytes, {PROVENANCE} says {recorded.size:,}")
    for path in sorted(out.iterdir()):
        if path.name == JOURNAL:
            problems.append(f"{JOURNAL}: the journal of a conversion that has not finished; run the same command again")
        elif path.name in RENEWED:
            continue
        elif path.name == PYCACHE:
            problems += _compiled(path)
        elif path.name.startswith(".") and path.name.endswith(".partial"):
            problems.append(f"{path.name}: left over from a conversion that was interrupted; remove it")
        elif files is None or path.name in files or path.name in (PROVENANCE, *EVIDENCE) or path.name.startswith("."):
            continue
        elif path.name.endswith(".safetensors"):
            problems.append(f"{path.name}: a stray shard, not listed in {PROVENANCE}; loaders read it: remove it")
        else:
            problems.append(f"{path.name}: not listed in {PROVENANCE}; remove it")
    return problems


def _compiled(folder: Path) -> list[str]:
    """Compiled files that Python runs whatever the source's time and size are. It writes none itself: see PEP 552."""
    problems = []
    for path in sorted(folder.glob("*.pyc")):
        if path.is_file() and any(path.read_bytes()[4:8]):  # 4 bytes of magic, 4 of flags
            name = quoted(f"{PYCACHE}/{path.name}")
            problems.append(f"{name}: not as Python leaves it, and loaders run it instead of its source: remove it")
    return problems


def check_copied(files: dict[str, Written], checkpoint: Checkpoint) -> list[str]:
    """Tokenizer, chat template, generation config and license against the source's."""
    problems = []
    for path in sorted(checkpoint.folder.iterdir()):
        if not any(fnmatchcase(path.name, pattern) for pattern in COPIED):
            continue
        if path.name not in files:
            problems.append(f"{path.name}: the source has it, the build does not")
        elif hashlib.sha256(read_whole(path)).hexdigest() != files[path.name].sha256:
            problems.append(f"{path.name}: not the source's, byte for byte")
    return problems


def read_shards(out: Path) -> tuple[Shards, list[str]]:
    """The header of every shard that a loader would read."""
    shards, problems, home = {}, [], {}
    for path in sorted(p for p in out.glob("*.safetensors") if not p.name.startswith(".")):
        try:
            found = read_header(path)
        except SourceError as e:
            problems.append(one_line(e))
            continue
        shards[path.name] = {t.name: t for t in found}
        problems += [f"{t.name}: in both {home[t.name]} and {path.name}" for t in found if t.name in home]
        home |= {t.name: path.name for t in found}
    return shards, some(problems)


def check_tensors(plan: Plan, shards: Shards, out: Path) -> list[str]:
    """Every tensor against the plan: there, in its shard, of its dtype and shape, and no other."""
    problems, wanted = [], {(m.shard, t.name): t for m in plan.modules for t in m.stored}
    for name, modules in plan.shards.items():
        if name not in shards:
            count = sum(len(m.stored) for m in modules)
            state = "can't be read" if (out / name).exists() else "missing"
            problems.append(f"{name}: {state}, with {count} tensors of the plan")
    for (shard, name), stored in wanted.items():
        found = shards.get(shard, {}).get(name)
        if shard not in shards:
            continue
        if found is None:
            problems.append(f"{name}: not in {shard}, where the plan has it")
        elif (found.dtype, found.shape) != (stored.dtype, stored.shape):
            problems.append(
                f"{name}: {found.dtype} {list(found.shape)} in {shard}, the plan has {stored.dtype} "
                f"{list(stored.shape)}"
            )
    extra = [(s, n) for s, tensors in shards.items() for n in tensors if (s, n) not in wanted]
    return some(problems) + some(f"{name}: in {shard}, where the plan has no such tensor" for shard, name in extra)


def check_index(out: Path, shards: Shards, plan: Plan | None) -> list[str]:
    """The index against the shards, both ways, and its totals."""
    try:
        index, _ = read_json(out / INDEX)
    except SourceError as e:
        return [one_line(e)]
    weight_map, totals = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not isinstance(totals, dict):
        return [f"{INDEX}: has no weight_map and metadata"]
    problems = []
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in shards:
            problems.append(f"{INDEX}: {name}: in {shard}, which is not a shard that can be read")
        elif name not in shards[shard]:
            problems.append(f"{INDEX}: {name}: not in {shard}")
    tensors = [t for found in shards.values() for t in found.values()]
    problems += [f"{INDEX}: lacks {t.name}, which is in {t.shard}" for t in tensors if t.name not in weight_map]
    true = {"total_size": sum(t.nbytes for t in tensors)}
    if plan:
        true["total_parameters"] = plan.total_parameters
    problems += [
        f"{INDEX}: {key} is {totals.get(key)!r}, the tensors have {value:,}"
        for key, value in true.items()
        if totals.get(key) != value
    ]
    return some(problems)
