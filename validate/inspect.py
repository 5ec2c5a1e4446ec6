"""What a converted repository holds, read from its headers, its config and its provenance."""

from math import prod
from pathlib import Path

from ..convert.checkpoint import Checkpoint, open_checkpoint, read_json
from ..convert.headers import TensorInfo
from ..convert.journal import JOURNAL
from ..convert.names import FAMILIES, entries
from ..convert.repo import PROVENANCE
from ..quantize.errors import SourceError

PROVENANCE_KEYS = {
    "source": {"id", "revision"},
    "recipe": {"name"},
    "mtp": {"policy"},
    "converter": {"name", "version"},
}
PARTS = (".scales", ".biases", ".global_scale")


def inspect_repo(folder: Path) -> dict:
    """Families, precisions, sizes, MTP policy and provenance of an MLX repository of Motif-3.

    Returns:
        A dict that is JSON: `families` (family, tensors, parameters, bytes, bits_per_weight,
        precisions), `total_bytes`, `total_parameters`, `bits_per_weight`, `shards`, `mtp` (policy,
        present, precisions), `experts_from` (for builds from NVFP4), and `provenance` (motif-convert.json
        less its file list, or None).
    Raises:
        SourceError: not such a repository, not whole, or an interrupted run's.
    """
    if not folder.is_dir():
        raise SourceError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    if (folder / JOURNAL).exists():
        raise SourceError(f"{folder}: an unfinished build; run the command that makes it again")
    if not (folder / "config.json").exists():
        raise SourceError(f"{folder}: not a build: it has no config.json")
    repo = open_checkpoint(folder)
    quantization = repo.config.get("quantization") or {}
    if repo.config.get("model_type") != "Motif" or not isinstance(quantization, dict):
        raise SourceError(f"{folder}: config.json is not that of a Motif-3 in MLX format")
    try:
        whole = repo.config | {"num_nextn_predict_layers": 1}  # a head that config.json denies is to be seen, too
        family_of = {target: e.family for e in entries(whole) for target in e.targets}
    except (KeyError, TypeError, ValueError) as e:
        what = f"no {e}" if isinstance(e, KeyError) else f"unusable sizes ({e})"
        raise SourceError(f"{folder}: config.json has {what}") from None

    table: dict[str, dict] = {}
    for info in repo.tensors.values():
        owner = _owner(info.name)
        family = family_of.get(owner)
        if family is None:
            hint = "; a source? `motif-convert plan --source` shows those" if ".moe." in info.name else ""
            raise SourceError(f"{folder}: {info.name} ({info.shard}) is not an MLX tensor of Motif-3{hint}")
        row = table.setdefault(family, {"tensors": 0, "parameters": 0, "bytes": 0, "precisions": []})
        parameters, precision = _stored_as(info, repo, quantization)
        row["tensors"] += 1
        row["parameters"] += parameters
        row["bytes"] += info.nbytes
        if precision and precision not in row["precisions"]:
            row["precisions"].append(precision)

    families = [
        {"family": f, **table[f], "bits_per_weight": 8 * table[f]["bytes"] / table[f]["parameters"]}
        for f in FAMILIES
        if f in table
    ]
    total_bytes = sum(f["bytes"] for f in families)
    total_parameters = sum(f["parameters"] for f in families)
    provenance = _provenance(folder) if (folder / PROVENANCE).exists() else None
    head = table.get("MTP head")
    return {
        "folder": folder.resolve().name,
        "families": families,
        "total_bytes": total_bytes,
        "total_parameters": total_parameters,
        "bits_per_weight": 8 * total_bytes / total_parameters,
        "shards": len({t.shard for t in repo.tensors.values()}),
        "mtp": {
            "present": head is not None,
            "declared": bool(repo.config.get("num_nextn_predict_layers")),
            "policy": provenance["mtp"]["policy"] if provenance else None,
            "precisions": head["precisions"] if head else [],
        },
        "experts_from": repo.config.get("experts_from"),
        "provenance": {k: v for k, v in provenance.items() if k != "files"} if provenance else None,
    }


def _provenance(folder: Path) -> dict:
    found, _ = read_json(folder / PROVENANCE)
    for part, keys in PROVENANCE_KEYS.items():
        if not isinstance(found.get(part), dict) or not keys <= found[part].keys():
            raise SourceError(f"{folder / PROVENANCE}: has no usable `{part}`; restore the file, or remove it")
    return found


def _owner(name: str) -> str:
    """The weight that a tensor is, or is a part of."""
    for part in PARTS:
        if name.endswith(part):
            return name.removesuffix(part) + ".weight"
    return name


def _stored_as(info: TensorInfo, repo: Checkpoint, quantization: dict) -> tuple[int, str | None]:
    """Parameters that a stored tensor stands for, and the precision it shows (None for a part)."""
    if info.name.endswith(PARTS):
        return 0, None
    path = info.name.removesuffix(".weight")
    scales = repo.tensors.get(path + ".scales")
    if scales is None:
        return prod(info.shape), info.dtype
    how = quantization.get(path, quantization)
    try:
        if not all(type(how[k]) is int and 0 < how[k] < 1 << 20 for k in ("group_size", "bits")):
            raise TypeError
        if 32 * info.shape[-1] != scales.shape[-1] * how["group_size"] * how["bits"]:
            stated = f"{how['bits']}-bit with group {how['group_size']}"
            raise SourceError(f"config.json: {path} is not {stated}, by the shapes of its tensors")
        return prod(scales.shape) * how["group_size"], f"{how['mode']} {how['bits']}-bit, group {how['group_size']}"
    except (KeyError, TypeError):
        raise SourceError(f"config.json: `quantization` does not say how {path} is quantized") from None
