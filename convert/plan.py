"""names x recipe -> Plan: every output tensor, its sources, precision, size and shard, from headers alone."""

import hashlib
import json
import re
from dataclasses import dataclass
from math import prod

from ..quantize.errors import RecipeError, SourceError, listing, quoted
from ..quantize.policy import MTP_POLICIES, Recipe, assign
from ..quantize.precision import (
    DTYPE_BYTES,
    FLOAT_DTYPES,
    Float,
    Precision,
    Quantized,
    stored_tensors,
    tensor_bytes,
)
from .checkpoint import Checkpoint
from .config import TORCH_NAMES, check_config
from .names import FAMILIES, FIXED, PROJECTION, Entry, entries

MAX_SHARD_BYTES = 5 << 30
HEADER_BYTES_PER_TENSOR = 160  # beside the name: dtype, shape and offsets as JSON, at the most
PLAN_FORMAT = 1


@dataclass(frozen=True)
class Stored:
    """One tensor of the output: `nbytes` of `dtype`, in a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Module:
    """One source tensor, or one part of its rows, on its way into the output.

    Args:
        path: MLX module path (for a float: the parameter's own path).
        source: source tensor.
        source_dtype, source_shape: as the source's header has them.
        part, parts: which of how many equal parts of the rows (the last axis but one).
        shape: of this part, unpacked.
        precision: how it is stored.
        stored: what is written, in this order.
        shard: file name.
    """

    path: str
    source: str
    source_dtype: str
    source_shape: tuple[int, ...]
    part: int
    parts: int
    shape: tuple[int, ...]
    family: str
    precision: Precision
    stored: tuple[Stored, ...]
    shard: str = ""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.stored)

    @property
    def source_nbytes(self) -> int:
        return tensor_bytes(self.source_dtype, self.shape)

    @property
    def parameters(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """All that a conversion does, decided before one weight is read."""

    recipe: Recipe
    mtp: str
    modules: tuple[Module, ...]
    dropped: tuple[tuple[str, int], ...]
    body_dtype: str
    has_mtp: bool
    config_sha256: str
    index_sha256: str | None

    @property
    def shards(self) -> dict[str, list[Module]]:
        """File name -> its modules in file order: four-byte elements first, so that all are aligned."""
        files: dict[str, list[Module]] = {}
        for module in self.modules:
            files.setdefault(module.shard, []).append(module)
        return {name: sorted(mods, key=lambda m: -DTYPE_BYTES[m.stored[0].dtype]) for name, mods in files.items()}

    @property
    def total_bytes(self) -> int:
        return sum(m.nbytes for m in self.modules)

    @property
    def total_parameters(self) -> int:
        return sum(m.parameters for m in self.modules)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.total_bytes / self.total_parameters

    @property
    def quantized(self) -> dict[str, Quantized]:
        return {m.path: m.precision for m in self.modules if isinstance(m.precision, Quantized)}

    @property
    def dominant(self) -> Quantized | None:
        """The precision that most quantized parameters have."""
        weight: dict[Quantized, int] = {}
        for m in self.modules:
            if isinstance(m.precision, Quantized):
                weight[m.precision] = weight.get(m.precision, 0) + m.parameters
        return max(weight, key=weight.get, default=None)

    def config_keys(self) -> dict:
        """What config.json has to say of dtypes and of the MTP head, so that it follows the bytes."""
        keys = {"torch_dtype": TORCH_NAMES[self.body_dtype], "num_nextn_predict_layers": int(self.has_mtp)}
        if self.has_mtp and isinstance(MTP_POLICIES[self.mtp][0], Float):
            keys["mtp_dtype"] = TORCH_NAMES[MTP_POLICIES[self.mtp][0].dtype]
            keys["mtp_compute_dtype"] = TORCH_NAMES[self.body_dtype]
        return keys

    def as_dict(self) -> dict:
        """The plan as JSON has it; a float tensor has no mode, bits and group_size."""
        tensors = []
        for m in self.modules:
            how = m.precision.as_config() if isinstance(m.precision, Quantized) else {}
            tensors += [
                {
                    "name": t.name,
                    "sources": [m.source],
                    "family": m.family,
                    "shape": list(t.shape),
                    "dtype": t.dtype,
                    "mode": how.get("mode"),
                    "bits": how.get("bits"),
                    "group_size": how.get("group_size"),
                    "bytes": t.nbytes,
                    "shard": m.shard,
                }
                for t in m.stored
            ]
        return {
            "format": PLAN_FORMAT,
            "recipe": self.recipe.as_dict(),
            "mtp": self.mtp,
            "source_config_sha256": self.config_sha256,
            "source_index_sha256": self.index_sha256,
            "total_bytes": self.total_bytes,
            "total_parameters": self.total_parameters,
            "bits_per_weight": self.bits_per_weight,
            "dropped": [name for name, _ in self.dropped],
            "tensors": tensors,
        }

    @property
    def plan_hash(self) -> str:
        """sha256 of the plan's canonical JSON: same source, recipe and policies, same hash."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def families(self) -> list[dict]:
        """Parameters, source bytes and output bytes of each family, in the order of the model."""
        table = []
        for family in FAMILIES:
            mods = [m for m in self.modules if m.family == family]
            if mods:
                precisions = dict.fromkeys(
                    m.stored[0].dtype if isinstance(m.precision, Float) else str(m.precision) for m in mods
                )
                table.append(
                    {
                        "family": family,
                        "parameters": sum(m.parameters for m in mods),
                        "source_bytes": sum(m.source_nbytes for m in mods),
                        "bytes": sum(m.nbytes for m in mods),
                        "precisions": list(precisions),
                    }
                )
        return table


def make_plan(checkpoint: Checkpoint, recipe: Recipe, mtp: str | None = None) -> Plan:
    """Places every tensor of the source, or stops with all that can't be placed.

    Args:
        mtp: a key of MTP_POLICIES that overrides the recipe's.
    Returns:
        The plan; its `mtp` is "none" for a checkpoint without a head.
    Raises:
        SourceError: config.json or the tensors are not those of a Motif-3 that can be converted.
        RecipeError: the recipe does not fit the checkpoint.
    """
    policy = mtp or recipe.mtp
    check_config(checkpoint.config)
    if (layers := checkpoint.config["num_hidden_layers"]) > len(checkpoint.tensors):
        raise SourceError(
            f"config.json: num_hidden_layers is {layers}, the checkpoint has {len(checkpoint.tensors)} tensors"
        )
    table = list(entries(checkpoint.config))
    _check_tensors(checkpoint, table)
    body_dtype = checkpoint.tensors["model.norm.weight"].dtype

    body = [e for e in table if e.family != "MTP head"]
    chosen = assign(recipe, _inputs(body, PROJECTION), _inputs(body, FIXED))
    _check_kept(recipe, body, checkpoint, chosen)
    head = [e for e in table if e.family == "MTP head"]
    if mtp == "drop" and not head:
        raise RecipeError("--mtp drop: this checkpoint has no MTP head to drop; leave the option out")
    if mtp not in (None, "drop") and not head:
        raise RecipeError(f"--mtp {mtp}: this checkpoint has no MTP head (num_nextn_predict_layers is 0)")
    chosen |= _head_precisions(head, policy)

    dropping = MTP_POLICIES[policy] is None
    kept = body if dropping else table
    modules = [m for e in kept for m in _modules(e, checkpoint.tensors[e.source].dtype, chosen)]
    return Plan(
        recipe=recipe,
        mtp=policy if head else "none",
        modules=tuple(_place(modules)),
        dropped=tuple((e.source, checkpoint.tensors[e.source].nbytes) for e in head if dropping),
        body_dtype=body_dtype,
        has_mtp=bool(head) and not dropping,
        config_sha256=checkpoint.config_sha256,
        index_sha256=checkpoint.index_sha256,
    )


def _check_tensors(checkpoint: Checkpoint, table: list[Entry]) -> None:
    found, expected = checkpoint.tensors, {e.source: e for e in table}
    missing = [n for n in expected if n not in found]
    head = [n for n in expected if expected[n].family == "MTP head"]
    if head and all(n in missing for n in head):
        raise SourceError(
            "config.json: num_nextn_predict_layers is 1, but the checkpoint has no model.mtp_layers.0.* tensors; "
            "get the whole checkpoint"
        )
    layers = {m[1] for n in found if (m := re.match(r"model\.mtp_layers\.(\d+)\.", n))}
    if len(layers) > 1:
        raise SourceError(f"the checkpoint has {len(layers)} MTP layers (model.mtp_layers.*); one is supported")
    problems = [f"{n}: missing" for n in missing]
    if layers and not head:
        problems.append("model.mtp_layers.*: config.json's num_nextn_predict_layers is 0; set it to 1")
    for name, info in found.items():
        if name not in expected:
            problems.append(f"{quoted(name)}: not a tensor of this model ({info.shard})")
        elif info.shape != expected[name].shape:
            problems.append(
                f"{name}: shape {list(info.shape)}, config.json means {list(expected[name].shape)} ({info.shard})"
            )
        elif info.dtype not in FLOAT_DTYPES:
            problems.append(f"{name}: dtype {info.dtype}, not one of {', '.join(FLOAT_DTYPES)} ({info.shard})")
    if problems:
        raise SourceError(listing("the tensors are not those that config.json describes", problems))


def _module_path(target: str) -> str:
    return target.removesuffix(".weight")


def _inputs(table: list[Entry], kind: str) -> dict[str, int]:
    return {_module_path(t): e.shape[-1] for e in table if e.kind == kind for t in e.targets}


def _check_kept(recipe: Recipe, body: list[Entry], checkpoint: Checkpoint, chosen: dict[str, Precision]) -> None:
    """A rule may name the dtype that it keeps; the body is never cast, since mlx would promote what meets it."""
    wrong = [
        f"{path} is {checkpoint.tensors[e.source].dtype}, not {chosen[path]}; write `dtype: source`"
        for e in body
        for path in map(_module_path, e.targets)
        if isinstance(chosen.get(path), Float) and chosen[path].dtype not in (None, checkpoint.tensors[e.source].dtype)
    ]
    if wrong:
        raise RecipeError(listing(f"recipe {recipe.file} would cast what it keeps", wrong))


def _head_precisions(head: list[Entry], policy: str) -> dict[str, Precision]:
    """MLX path -> precision of every tensor of the MTP head."""
    if MTP_POLICIES[policy] is None:
        return {}
    projection, other = MTP_POLICIES[policy]
    chosen = {_module_path(t): projection if e.kind == PROJECTION else other for e in head for t in e.targets}
    if isinstance(projection, Quantized):
        odd = [f"{p} has {k} inputs" for p, k in _inputs(head, PROJECTION).items() if k % projection.group_size]
        if odd:
            raise RecipeError(
                listing(f"MTP policy {policy}: group_size {projection.group_size} does not divide the inputs", odd)
            )
    return chosen


def _modules(entry: Entry, dtype: str, chosen: dict[str, Precision]):
    """The module of a source tensor, or of each part of one."""
    for part, target in enumerate(entry.targets):
        path = _module_path(target)
        precision = chosen.get(path, Float())
        shape = entry.shape
        if len(entry.targets) > 1:
            shape = (*shape[:-2], shape[-2] // len(entry.targets), shape[-1])
        if isinstance(precision, Float):
            path = target
        stored = tuple(Stored(path + suffix, *kind) for suffix, kind in stored_tensors(shape, dtype, precision).items())
        yield Module(
            path=path,
            source=entry.source,
            source_dtype=dtype,
            source_shape=entry.shape,
            part=part,
            parts=len(entry.targets),
            shape=shape,
            family=entry.family,
            precision=precision,
            stored=stored,
        )


def _place(modules: list[Module]):
    """Fills shards in the model's order; a module's tensors stay together, since one pass makes them."""
    numbers, used, number = [], 0, 0
    for m in modules:
        size = m.nbytes + sum(len(t.name) + HEADER_BYTES_PER_TENSOR for t in m.stored)
        if used and used + size > MAX_SHARD_BYTES:
            number, used = number + 1, 0
        used += size
        numbers.append(number)
    for m, n in zip(modules, numbers, strict=True):
        fields = {**m.__dict__, "shard": f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors"}
        yield Module(**fields)
