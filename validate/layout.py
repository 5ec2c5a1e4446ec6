"""Where the rows of a build come from, by the documented names, and in which blocks they are compared.

Apart from what the converter uses to find and to cut its source, so that a mistake there is seen here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..convert.checkpoint import Checkpoint
from ..convert.headers import TensorInfo
from ..convert.plan import Module
from ..quantize.precision import DTYPE_BYTES, Precision

BLOCK_BYTES = 8 << 20  # of source, as floats: what a process compares at a time
SAMPLE_BYTES = 4 << 20  # the same in a sample, to spread it
GOLDEN = 0.6180339887498949  # multiples of it, less their whole parts, spread evenly however many there are


@dataclass(frozen=True)
class Part:
    """One tensor: `row_bytes` bytes for each row from `offset` of `file` on (0: one number an expert)."""

    name: str
    dtype: str
    file: Path
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Comparison:
    """A module of a build beside its source: all that is needed to compare any of its rows.

    Args:
        stored, sources: their tensors; of quantized modules `.weight` first, of NVFP4 stacks the codes.
        source_dtype: "NVFP4" for experts in that layout.
        shape: of the parameter.
        matrices: how many it is a stack of, each of `rows` rows of `width` numbers.
        source_rows: rows of a matrix of the source, of which this module is those from `first_row` on.
        stacked: whether the matrices are experts.
        layer: of the body; None outside it.
    """

    family: str
    layer: int | None
    precision: Precision
    source_dtype: str
    stored: tuple[Part, ...]
    sources: tuple[Part, ...]
    shape: tuple[int, ...]
    matrices: int
    rows: int
    width: int
    source_rows: int
    first_row: int
    stacked: bool


@dataclass(frozen=True)
class Block:
    """Rows [first, first + count) of all rows of a module, its matrices one after the other."""

    module: Comparison
    first: int
    count: int


def source_name(name: str) -> tuple[str, int, int]:
    """The source tensor that an MLX tensor is made of, and which of how many equal parts of its rows: (name, 1, 2)
    for an `up_proj` of routed experts, the second half of `gate_up_proj`."""
    if name.startswith("mtp."):
        return "model.mtp_layers.0." + name.removeprefix("mtp."), 0, 1
    if not (match := re.fullmatch(r"(model\.layers\.\d+\.)mlp\.(.+)", name)):
        return name, 0, 1
    layer, rest = match.groups()
    fixed = {
        "gate.weight": ("moe.router.gate.weight", 0, 1),
        "gate.expert_bias": ("moe.expert_bias", 0, 1),
        "switch_mlp.gate_proj.weight": ("moe.experts.gate_up_proj", 0, 2),
        "switch_mlp.up_proj.weight": ("moe.experts.gate_up_proj", 1, 2),
        "switch_mlp.down_proj.weight": ("moe.experts.down_proj", 0, 1),
        "switch_mlp.act_fn.weight": ("moe.experts.act_fn.weight", 0, 1),
        "switch_mlp.act_fn.bias": ("moe.experts.act_fn.bias", 0, 1),
    }
    if rest in fixed:
        source, part, parts = fixed[rest]
        return layer + source, part, parts
    if rest.startswith("shared_experts."):
        return f"{layer}moe.{rest}", 0, 1
    return name, 0, 1


def layer_of(name: str) -> int | None:
    """The layer of the body that an MLX tensor belongs to."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def misplaced(module: Module, checkpoint: Checkpoint) -> str | None:
    """Why a planned module can't be a part of the source that its name means; None if it can."""
    target = module.stored[0].name
    source, _, parts = source_name(target)
    if source not in checkpoint.tensors:
        return f"{target}: the source has no {source}, of which it should be made"
    info = checkpoint.tensors[source]
    if prod(info.shape) * (2 if info.dtype == "U8" else 1) != module.parameters * parts:
        return f"{target}: {list(module.shape)} is not 1 of {parts} parts of {source}, {info.dtype} {list(info.shape)}"
    return None


def comparison(module: Module, found: dict[str, TensorInfo], out: Path, checkpoint: Checkpoint) -> Comparison:
    """A planned module, once its tensors are found in the build with the dtypes and shapes of the plan.

    Args:
        found: the build's tensors by name.
    """
    target = module.stored[0].name
    source, part, parts = source_name(target)
    stacked = ".switch_mlp." in target
    matrices = module.shape[0] if stacked else 1
    rows, width = prod(module.shape[1 if stacked else 0 : -1]), module.shape[-1]
    nvfp4 = checkpoint.tensors[source].dtype == "U8"
    source_rows = rows * parts

    def as_part(info: TensorInfo, folder: Path, rows: int) -> Part:
        row_bytes = 0 if info.shape == (matrices,) and stacked else info.nbytes // (matrices * rows)
        return Part(info.name, info.dtype, folder / info.shard, info.offset, row_bytes)

    names = [source + s for s in ("", "_weight_scale", "_weight_scale_2")] if nvfp4 else [source]
    return Comparison(
        family=module.family,
        layer=layer_of(target),
        precision=module.precision,
        source_dtype="NVFP4" if nvfp4 else checkpoint.tensors[source].dtype,
        stored=tuple(as_part(found[t.name], out, rows) for t in module.stored),
        sources=tuple(as_part(checkpoint.tensors[n], checkpoint.shard_folder, source_rows) for n in names),
        shape=tuple(module.shape),
        matrices=matrices,
        rows=rows,
        width=width,
        source_rows=source_rows,
        first_row=part * rows,
        stacked=stacked,
    )


def blocks(modules: list[Comparison], sample: float | None) -> Iterator[Block]:
    """The blocks of all modules in order, or a fraction of them, the same ones every time.

    A sample takes whole experts, always the first, the middle and the last of every stack, and blocks of all else: the
    first of every tensor, and more as the fraction allows.
    """
    drawn = 0

    def draw() -> bool:
        nonlocal drawn
        drawn += 1
        return sample is None or drawn * GOLDEN % 1 < sample

    for module in modules:
        itemsize = 2 if module.source_dtype == "NVFP4" else DTYPE_BYTES[module.source_dtype]
        step = max(1, (BLOCK_BYTES if sample is None else SAMPLE_BYTES) // (module.width * itemsize))
        total = module.matrices * module.rows
        if sample is None or not module.stacked:
            runs = [(0, total)]
        else:
            always = {0, module.matrices // 2, module.matrices - 1}
            chosen = [e for e in range(module.matrices) if draw() or e in always]
            runs = [(e * module.rows, (e + 1) * module.rows) for e in chosen]
        for start, end in runs:
            for first in range(start, end, step):
                if module.stacked or first == start or draw():
                    yield Block(module, first, min(step, end - first))
