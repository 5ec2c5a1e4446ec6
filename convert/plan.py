"""names x recipe -> Plan: every output tensor, its sources, precision, size and shard, from headers alone."""

import hashlib
import json
import re
from dataclasses import dataclass
from math import prod

from ..quantize.errors import RecipeError, SourceError, listing
from ..quantize.policy import MTP_POLICIES, Recipe, assign
from ..quantize.precision import (
    DTYPE_BYTES,
    FLOAT_DTYPES,
    NVFP4,
    Float,
    Precision,
    Quantized,
    stored_tensors,
    tensor_bytes,
)
from .checkpoint import Checkpoint
from .config import TORCH_NAMES, check_config
from .names import FAMILIES, FIXED, PROJECTION, Entry, entries
from .nvfp4 import EXPERT_SCALES, SIDECAR, is_nvfp4, stack_tensors

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
        source: source tensor; of NVFP4 experts, the codes.
        sources: all source tensors it needs: three for NVFP4 experts.
        source_dtype: as the source's header has it; "NVFP4" for experts in that layout.
        source_shape: unpacked.
        source_nbytes: bytes to read; what both halves of a stack share counts for the first.
        part, parts: which of how many equal parts of the rows (the last axis but one).
        shape: of this part, unpacked.
        precision: how it is stored.
        stored: what is written, in this order.
        shard: file name.
    """

    path: str
    source: str
    sources: tuple[str, ...]
    source_dtype: str
    source_shape: tuple[int, ...]
    source_nbytes: int
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
    def parameters(self) -> int:
        return prod(self.shape)

    @property
    def origin(self) -> str | None:
        """What was done to a stack of NVFP4 experts; None for all else."""
        if self.source_dtype != "NVFP4":
            return None
        if self.precision == NVFP4:
            return "NVFP4, codes and scales of the source byte for byte"
        return "NVFP4 decoded to BF16" + (", then quantized" if isinstance(self.precision, Quantized) else "")

    @property
    def float_dtype(self) -> str:
        """The dtype that a source has when it is read as floats: NVFP4 decodes to BF16."""
        return "BF16" if self.source_dtype == "NVFP4" else self.source_dtype


@dataclass(frozen=True)
class Plan:
    """All that a conversion does, decided before one weight is read."""

    recipe: Recipe
    mtp: str
    modules: tuple[Module, ...]
    dropped: tuple[tuple[str, int], ...]
    body_dtype: str
    has_mtp: bool
    nvfp4: bool
    unused: tuple[str, ...]
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

    @property
    def experts_from(self) -> str:
        """Where the bits of the routed experts' matrices come from."""
        origins = dict.fromkeys(m.origin for m in self.modules if m.family == "routed experts" and m.origin)
        return "; ".join(origins) or self.body_dtype

    def config_keys(self) -> dict:
        """What config.json has to say of dtypes and of the MTP head, so that it follows the bytes."""
        keys = {"torch_dtype": TORCH_NAMES[self.body_dtype], "num_nextn_predict_layers": int(self.has_mtp)}
        if self.nvfp4:
            keys["experts_from"] = self.experts_from
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
                    "sources": list(m.sources),
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
            "experts_from": self.experts_from,
            "dropped": [name for name, _ in self.dropped],
            "unused": list(self.unused),
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


def make_plan(checkpoint: Checkpoint, recipe: Recipe, mtp: str | None = None, requantize: bool = False) -> Plan:
    """Places every tensor of the source, or stops with all that can't be placed.

    Args:
        mtp: a key of MTP_POLICIES that overrides the recipe's.
        requantize: whether a recipe's affine 4-bit rule holds for experts that are NVFP4 too; they keep
            their own 4 bits otherwise.
    Returns:
        The plan; its `mtp` is "none" for a checkpoint without a head.
    Raises:
        SourceError: config.json or the tensors are not those of a Motif-3 that can be converted.
        RecipeError: the recipe does not fit the checkpoint.
    """
    policy = mtp or recipe.mtp
    check_config(checkpoint.config)
    nvfp4 = is_nvfp4(checkpoint)
    if requantize and not nvfp4:
        raise RecipeError("--experts affine is for an NVFP4 source; the recipe alone decides for this one")
    table = list(entries(checkpoint.config))
    stacks = {e.source for e in table if nvfp4 and e.family == "routed experts" and e.kind == PROJECTION}
    _check_tensors(checkpoint, table, stacks)

    body = [e for e in table if e.family != "MTP head"]
    head = [e for e in table if e.family == "MTP head"]
    chosen = assign(recipe, _inputs(body, PROJECTION), _inputs(body, FIXED))
    chosen |= _kept_nvfp4([e for e in body if e.source in stacks], chosen, requantize)
    _check_kept(recipe, body, checkpoint, chosen, stacks)
    if mtp == "drop" and not head:
        raise RecipeError("--mtp drop: this checkpoint has no MTP head to drop; leave the option out")
    if mtp not in (None, "drop") and not head:
        raise RecipeError(f"--mtp {mtp}: this checkpoint has no MTP head (num_nextn_predict_layers is 0)")
    chosen |= _head_precisions(head, policy)

    dropping = MTP_POLICIES[policy] is None
    kept = body if dropping else table
    modules = [m for e in kept for m in _modules(e, checkpoint, e.source in stacks, chosen)]
    return Plan(
        recipe=recipe,
        mtp=policy if head else "none",
        modules=tuple(_place(modules)),
        dropped=tuple((e.source, checkpoint.tensors[e.source].nbytes) for e in head if dropping),
        body_dtype=checkpoint.tensors["model.norm.weight"].dtype,
        has_mtp=bool(head) and not dropping,
        nvfp4=nvfp4,
        unused=tuple(f for f in (SIDECAR,) if nvfp4 and (checkpoint.folder / f).exists()),
        config_sha256=checkpoint.config_sha256,
        index_sha256=checkpoint.index_sha256,
    )


def _check_tensors(checkpoint: Checkpoint, table: list[Entry], stacks: set[str]) -> None:
    found = checkpoint.tensors
    expected: dict[str, tuple] = {}  # name -> (dtypes it may have, shape)
    for e in table:
        if e.source in stacks:
            expected |= {name: ((dtype,), shape) for name, (dtype, shape) in stack_tensors(e.source, e.shape).items()}
        else:
            expected[e.source] = (FLOAT_DTYPES, e.shape)
    head = [e.source for e in table if e.family == "MTP head"]
    if head and not any(n in found for n in head):
        raise SourceError(
            "config.json: num_nextn_predict_layers is 1, but the checkpoint has no model.mtp_layers.0.* tensors; "
            "get the whole checkpoint"
        )
    layers = {m[1] for n in found if (m := re.match(r"model\.mtp_layers\.(\d+)\.", n))}
    if len(layers) > 1:
        raise SourceError(f"the checkpoint has {len(layers)} MTP layers (model.mtp_layers.*); one is supported")
    problems = [f"{n}: missing" for n in expected if n not in found]
    for name, info in found.items():
        if name not in expected:
            problems.append(f"{name}: not a tensor of this model ({info.shard})")
            continue
        dtypes, shape = expected[name]
        if info.shape != shape:
            problems.append(f"{name}: shape {list(info.shape)}, config.json means {list(shape)} ({info.shard})")
        elif info.dtype not in dtypes:
            problems.append(f"{name}: dtype {info.dtype}, not {' or '.join(dtypes)} ({info.shard})")
    if problems:
        raise SourceError(listing("the tensors are not those that config.json describes", problems))


def _kept_nvfp4(stacks: list[Entry], chosen: dict[str, Precision], requantize: bool) -> dict[str, Precision]:
    """NVFP4 experts keep their codes where the recipe asks for the source's bits, for nvfp4, or for 4 bits."""
    paths = [_module_path(t) for e in stacks for t in e.targets]
    if odd := [e.source for e in stacks if e.shape[-1] % NVFP4.group_size]:
        raise SourceError(listing(f"NVFP4 needs inputs in groups of {NVFP4.group_size}", odd))

    def keeps(precision: Precision) -> bool:
        if isinstance(precision, Float):
            return precision.dtype is None
        return precision == NVFP4 or (precision.bits == 4 and not requantize)

    return {p: NVFP4 for p in paths if keeps(chosen[p])}


def _module_path(target: str) -> str:
    return target.removesuffix(".weight")


def _inputs(table: list[Entry], kind: str) -> dict[str, int]:
    return {_module_path(t): e.shape[-1] for e in table if e.kind == kind for t in e.targets}


def _check_kept(
    recipe: Recipe, body: list[Entry], checkpoint: Checkpoint, chosen: dict[str, Precision], stacks: set[str]
) -> None:
    """A rule may name the dtype that it keeps; the body is never cast, since mlx would promote what meets it."""
    problems = []
    for e in body:
        dtype = "BF16" if e.source in stacks else checkpoint.tensors[e.source].dtype
        for path in map(_module_path, e.targets):
            precision = chosen.get(path)
            if isinstance(precision, Float) and precision.dtype not in (None, dtype):
                problems.append(f"{path} is {dtype}, not {precision}; write `dtype: source`")
            if precision == NVFP4 and e.source not in stacks:
                problems.append(f"{path} is {dtype}; mode nvfp4 is for the experts of an NVFP4 source")
    if problems:
        raise RecipeError(listing(f"recipe {recipe.file} does not fit this checkpoint", problems))


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


def _modules(entry: Entry, checkpoint: Checkpoint, nvfp4: bool, chosen: dict[str, Precision]):
    """The module of a source tensor, or of each part of one."""
    sources = tuple(stack_tensors(entry.source, entry.shape)) if nvfp4 else (entry.source,)
    dtype = "NVFP4" if nvfp4 else checkpoint.tensors[entry.source].dtype
    parts = len(entry.targets)
    for part, target in enumerate(entry.targets):
        path = _module_path(target)
        precision = chosen.get(path, Float())
        shape = entry.shape
        if parts > 1:
            shape = (*shape[:-2], shape[-2] // parts, shape[-1])
        if isinstance(precision, Float):
            path = target
        made = stored_tensors(shape, "BF16" if nvfp4 else dtype, precision)
        shared = [s for s in sources if s.endswith(EXPERT_SCALES)]
        nbytes = sum(checkpoint.tensors[s].nbytes // parts for s in sources if s not in shared)
        yield Module(
            path=path,
            source=entry.source,
            sources=sources,
            source_dtype=dtype,
            source_shape=entry.shape,
            source_nbytes=nbytes + sum(checkpoint.tensors[s].nbytes for s in shared if part == 0),
            part=part,
            parts=parts,
            shape=shape,
            family=entry.family,
            precision=precision,
            stored=tuple(Stored(path + suffix, *kind) for suffix, kind in made.items()),
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
