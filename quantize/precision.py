"""Precisions: how a tensor is stored, in which shapes, and what it costs."""

from dataclasses import dataclass
from math import prod

from .errors import RecipeError

# Bytes of one element, by safetensors dtype name.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
FLOAT_DTYPES = ("BF16", "F16", "F32")  # what a kept or quantized source tensor may be

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)


UNPACKED = "float"


@dataclass(frozen=True)
class Float:
    """Kept, not quantized.

    Args:
        dtype: "BF16", "F16" or "F32"; None for the source's own bits, be they NVFP4; UNPACKED for the source's
            own floats, NVFP4 decoded.
    """

    dtype: str | None = None

    def __str__(self) -> str:
        return self.dtype or "source"


@dataclass(frozen=True)
class Quantized:
    """MLX group quantization along the last axis.

    Args:
        mode: "affine", which stores a scale and a bias a group, or "nvfp4", which stores an E4M3 scale a
            group of 16 and a float32 scale a matrix, and which this program passes through but never makes.
        bits: bits of a code.
        group_size: elements that share a scale and a bias.
    Raises:
        RecipeError: a mode, a number of bits or a group size that MLX does not have.
    """

    mode: str
    bits: int
    group_size: int

    def __post_init__(self):
        if self.mode == "nvfp4" and (self.bits, self.group_size) == (4, 16):
            return
        if self.mode == "nvfp4":
            raise RecipeError("mode nvfp4 has bits 4 and group_size 16")
        if self.mode != "affine":
            raise RecipeError(f"mode {self.mode!r} is not known; use affine, or nvfp4 for NVFP4 experts")
        for name, value, known in (
            ("bits", self.bits, AFFINE_BITS),
            ("group_size", self.group_size, AFFINE_GROUP_SIZES),
        ):
            if value not in known:
                raise RecipeError(f"{name} {value!r} is not one of {', '.join(map(str, known))}")

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit, group {self.group_size}"

    def as_config(self) -> dict:
        """What the `quantization` map of config.json says of a precision."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


Precision = Float | Quantized
NVFP4 = Quantized("nvfp4", 4, 16)


def stored_tensors(shape: tuple[int, ...], source_dtype: str, precision: Precision) -> dict[str, tuple]:
    """What one source tensor becomes in an MLX repository.

    Args:
        shape: of the unpacked tensor; its last axis is the input dimension.
        source_dtype: safetensors name.
    Returns:
        suffix -> (dtype, shape), in file order. A float has the suffix ""; a quantized module has `.weight`
        (uint32, `32 / bits` codes in each), and `.scales` and `.biases` (in the source's dtype), or for nvfp4
        `.global_scale` (float32, one for each matrix) and `.scales` (E4M3 bits).
    """
    if isinstance(precision, Float):
        return {"": (precision.dtype or source_dtype, shape)}
    *lead, width = shape
    per_group = (*lead, width // precision.group_size)
    weight = ("U32", (*lead, width * precision.bits // 32))
    if precision == NVFP4:
        return {".weight": weight, ".global_scale": ("F32", tuple(lead[:-1])), ".scales": ("U8", per_group)}
    return {
        ".weight": weight,
        ".scales": (source_dtype, per_group),
        ".biases": (source_dtype, per_group),
    }


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPE_BYTES[dtype] * prod(shape)
