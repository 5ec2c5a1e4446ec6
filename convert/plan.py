"""The Plan: every output tensor, its sources, precision, size and shard, as frozen values."""

import hashlib
import json
from dataclasses import dataclass
from math import prod

from ..quantize.policy import MTP_POLICIES, Recipe
from ..quantize.precision import (
    DTYPE_BYTES,
    NVFP4,
    Float,
    Precision,
    Quantized,
    tensor_bytes,
)
from .config import TORCH_NAMES
from .names import FAMILIES

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
    def rows(self) -> int:
        return prod(self.shape[:-1])

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
    requantize: bool
    unused: tuple[str, ...]
    config_sha256: str
    index_sha256: str | None
    allow_nonfinite: bool = False  # in floats; it decides whether there is a build, and nothing of it

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

    @property
    def rounds_twice(self) -> bool:
        """Whether experts that are 4-bit already are quantized to 4 bits again."""
        return any(
            isinstance(m.precision, Quantized) and m.precision.mode == "affine" and m.precision.bits == 4
            for m in self.modules
            if m.source_dtype == "NVFP4"
        )

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
            # The gate of smoke decides nothing of the output.
            "recipe": {k: v for k, v in self.recipe.as_dict().items() if k != "min_acceptance"},
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
