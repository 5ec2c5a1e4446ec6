"""names x recipe -> Plan, or all that can't be placed, at once."""

import re
from collections.abc import Iterator
from dataclasses import replace

from ..quantize.errors import RecipeError, SourceError, listing, quoted
from ..quantize.policy import MTP_POLICIES, Recipe, assign
from ..quantize.precision import FLOAT_DTYPES, NVFP4, UNPACKED, Float, Precision, Quantized, stored_tensors
from .checkpoint import Checkpoint
from .config import check_config
from .names import FIXED, PROJECTION, Entry, entries
from .nvfp4 import EXPERT_SCALES, SIDECAR, is_nvfp4, stack_tensors
from .plan import Module, Plan, Stored

MAX_SHARD_BYTES = 5 << 30
HEADER_BYTES_PER_TENSOR = 160  # beside the name: dtype, shape and offsets as JSON, at the most


def make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    mtp: str | None = None,
    requantize: bool = False,
    allow_nonfinite: bool = False,
) -> Plan:
    """Places every tensor of the source, or stops with all that can't be placed.

    Args:
        mtp: a key of MTP_POLICIES that overrides the recipe's.
        requantize: whether a recipe's affine 4-bit rule holds for experts that are NVFP4 too; they keep
            their own 4 bits otherwise.
        allow_nonfinite: whether NaN and infinite values may stay in tensors that are kept as floats.
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
    if (layers := checkpoint.config["num_hidden_layers"]) > len(checkpoint.tensors):
        raise SourceError(f"config.json: num_hidden_layers is {layers}; the checkpoint has too few tensors for that")
    table = list(entries(checkpoint.config))
    stacks = {e.source for e in table if nvfp4 and e.family == "routed experts" and e.kind == PROJECTION}
    _check_tensors(checkpoint, table, stacks)

    body = [e for e in table if e.family != "MTP head"]
    head = [e for e in table if e.family == "MTP head"]
    chosen = assign(recipe, _inputs(body, PROJECTION), _inputs(body, FIXED))
    stack_paths = {_module_path(t) for e in body if e.source in stacks for t in e.targets}
    unpacked = [p for p, precision in chosen.items() if precision == Float(UNPACKED)]
    chosen |= {p: Float("BF16") if p in stack_paths else Float() for p in unpacked}
    if requantize and not any(isinstance(chosen[p], Quantized) and chosen[p].mode == "affine" for p in stack_paths):
        raise RecipeError(f"--experts affine: recipe {recipe.name} quantizes no experts affinely; leave the option out")
    chosen |= _kept_nvfp4([e for e in body if e.source in stacks], chosen, requantize)
    _check_kept(recipe, body, checkpoint, chosen, stacks)
    if mtp == "drop" and not head:
        raise RecipeError("--mtp drop: this checkpoint has no MTP head to drop; leave the option out")
    if mtp not in (None, "drop") and not head:
        raise RecipeError(f"--mtp {mtp}: this checkpoint has no MTP head (num_nextn_predict_layers is 0)")
    chosen |= _head_precisions(head, policy)

    dropping = MTP_POLICIES[policy] is None
    kept = body if dropping else table
    modules = [m for e in kept for m in make_modules(e, checkpoint, e.source in stacks, chosen)]
    return Plan(
        recipe=recipe,
        mtp=policy if head else "none",
        modules=tuple(place(modules)),
        dropped=tuple((e.source, checkpoint.tensors[e.source].nbytes) for e in head if dropping),
        body_dtype=checkpoint.tensors["model.norm.weight"].dtype,
        has_mtp=bool(head) and not dropping,
        nvfp4=nvfp4,
        requantize=requantize,
        unused=tuple(f for f in (SIDECAR,) if nvfp4 and f in checkpoint.others),
        config_sha256=checkpoint.config_sha256,
        index_sha256=checkpoint.index_sha256,
        allow_nonfinite=allow_nonfinite,
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
    if layers and not head:
        problems.append("model.mtp_layers.*: config.json's num_nextn_predict_layers is 0; set it to 1")
    for name, info in found.items():
        if name not in expected:
            problems.append(f"{quoted(name)}: not a tensor of this model ({info.shard})")
            continue
        dtypes, shape = expected[name]
        if info.shape != shape:
            problems.append(f"{name}: shape {list(info.shape)}, config.json means {list(shape)} ({info.shard})")
        elif info.dtype not in dtypes:
            wanted = dtypes[0] if len(dtypes) == 1 else "one of " + ", ".join(dtypes)
            problems.append(f"{name}: dtype {info.dtype}, not {wanted} ({info.shard})")
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


def make_modules(entry: Entry, checkpoint: Checkpoint, nvfp4: bool, chosen: dict[str, Precision]) -> Iterator[Module]:
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


def place(modules: list[Module]) -> Iterator[Module]:
    """Fills shards in the model's order; a module's tensors stay together, since one pass makes them."""
    numbers, used, number = [], 0, 0
    for m in modules:
        size = m.nbytes + sum(len(t.name) + HEADER_BYTES_PER_TENSOR for t in m.stored)
        if used and used + size > MAX_SHARD_BYTES:
            number, used = number + 1, 0
        used += size
        numbers.append(number)
    for m, n in zip(modules, numbers, strict=True):
        yield replace(m, shard=f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors")
