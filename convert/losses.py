"""What a plan's roundings cost, measured before anything is written."""

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from ..quantize.errors import SourceError
from ..quantize.kernels import affine_quantize, cast
from ..quantize.oracle import affine_dequantize, nvfp4_dequantize
from ..quantize.precision import NVFP4, Quantized
from .checkpoint import Checkpoint
from .nvfp4 import expert_scales
from .plan import Module, Plan
from .rows import blocks, float_runs, read_block_scales, read_rows
from .workers import Buffers


@dataclass
class CastReport:
    """What casts cost: values cast, values changed, the largest change and its tensor."""

    values: int = 0
    changed: int = 0
    max_change: float = 0.0
    tensor: str = ""

    def as_dict(self) -> dict:
        return asdict(self)

    def add(self, name: str, change: np.ndarray) -> None:
        self.values += change.size
        self.changed += int(np.count_nonzero(change))
        if change.size and float(change.max()) > self.max_change:
            self.max_change, self.tensor = float(change.max()), name


def cast_modules(plan: Plan) -> list[Module]:
    """The modules whose values are cast: the MTP head's alone, as a rule."""
    return [m for m in plan.modules if not isinstance(m.precision, Quantized) and m.stored[0].dtype != m.float_dtype]


def check_casts(plan: Plan, checkpoint: Checkpoint) -> CastReport | None:
    """What the plan's casts will cost, or None if it has none.

    Read before anything is written, since a value that does not fit has to stop the run: it is
    the MTP head alone, a thousandth of the model.

    Raises:
        SourceError: naming the tensor with a finite value that overflows.
    """
    report = CastReport()
    for module in cast_modules(plan):
        (stored,), row = module.stored, 0
        for block in blocks(module, checkpoint):
            _, change = cast(block, module.float_dtype, stored.dtype)
            if (over := np.argwhere(np.isinf(change))).size:
                at = [int(over[0][0]) + row, int(over[0][1])]
                raise SourceError(
                    f"{module.source}: the value at {at} is too large for {stored.dtype}; choose --mtp bf16"
                )
            report.add(module.source, change)
            row += len(block)
    return report if report.values else None


@dataclass(frozen=True)
class RequantizationReport:
    """The error that a second quantization adds to NVFP4 experts, over a sample of them.

    Args:
        experts: matrices that were looked at: the first, the middle and the last of every stack.
        relative_rms: root of sum (made - NVFP4)^2 over sum NVFP4^2.
        worst_rms, worst: the largest of any one matrix, and which it is.
    """

    experts: int
    relative_rms: float
    worst_rms: float
    worst: str

    def as_dict(self) -> dict:
        return asdict(self)


def requantized_modules(modules: Iterable[Module]) -> list[Module]:
    """NVFP4 experts that are quantized again."""
    return [
        m for m in modules if m.source_dtype == "NVFP4" and isinstance(m.precision, Quantized) and m.precision != NVFP4
    ]


def requantization_errors(modules: Iterable[Module], checkpoint: Checkpoint) -> dict[str, list[float]]:
    """What quantizing NVFP4 experts again costs, of the first, the middle and the last expert of every stack.

    Returns:
        matrix -> sum of squared errors, and of squares; empty for modules that are not quantized again.
    Raises:
        SourceError: a block scale is unusable.
    """
    return {
        f"{module.path} expert {expert}": list(_requantization_error(module, checkpoint, expert))
        for module in requantized_modules(modules)
        for expert in sorted({0, module.shape[0] // 2, module.shape[0] - 1})
    }


def requantization(plan: Plan, errors: dict[str, list[float]]) -> RequantizationReport | None:
    """Adds up `requantization_errors` of all modules, in the plan's order; None where there are none."""
    places = {m.path: i for i, m in enumerate(plan.modules)}
    ordered = dict(sorted(errors.items(), key=lambda e: (places[e[0].split(" ")[0]], int(e[0].split(" ")[-1]))))
    if not ordered:
        return None
    relative = {k: math.sqrt(error / power) if power else 0.0 for k, (error, power) in ordered.items()}
    worst = max(relative, key=relative.get)
    total = math.sqrt(
        sum(e for e, _ in ordered.values()) / max(sum(p for _, p in ordered.values()), sys.float_info.min)
    )
    return RequantizationReport(len(ordered), total, relative[worst], worst)


def _requantization_error(module: Module, checkpoint: Checkpoint, expert: int) -> tuple[float, float]:
    """Sum of squared errors, and of squares, of one expert's matrix."""
    scales = expert_scales(checkpoint, module.source)
    width, precision = module.source_shape[-1], module.precision
    error = power = 0.0
    decoded = blocks(module, checkpoint, expert)
    for run, block in zip(float_runs(module, expert), decoded, strict=True):
        codes = read_rows(checkpoint, module, module.source, width // 2, run)
        exact = nvfp4_dequantize(codes, read_block_scales(checkpoint, module, run, Buffers()), scales[expert])
        made = affine_quantize(block, "BF16", precision)
        values = affine_dequantize(
            made[".weight"], made[".scales"], made[".biases"], precision.bits, precision.group_size, "BF16"
        )
        error += float(np.sum((values - exact).astype(np.float64) ** 2))
        power += float(np.sum(exact.astype(np.float64) ** 2))
    return error, power


@dataclass(frozen=True)
class Losses:
    """All that a plan rounds beside its quantization proper; None where it does no such thing."""

    casts: CastReport | None
    requantized: RequantizationReport | None
