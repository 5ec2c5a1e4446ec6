"""The vendor's NVFP4 layout of the routed experts, and what must hold of it.

A stack that BF16 checkpoints hold as one tensor `S` [E, R, K] is three here, which may lie in different shards:

    S                   U8       [E, R, K / 2]    two E2M1 codes a byte, even k in the low nibble
    S + _weight_scale   F8_E4M3  [E, R, K / 16]   one block scale for 16 inputs
    S + _weight_scale_2 F32      [E]              one scale an expert, amax / (448 * 6)

    w[e, r, k] = E2M1(code) * E4M3(weight_scale[e, r, k // 16]) * weight_scale_2[e]
"""

import numpy as np

from ..quantize.errors import SourceError, listing
from .checkpoint import Checkpoint

QUANT_METHOD = "modelopt_nvfp4"
GROUP_SIZE = 16
BLOCK_SCALES, EXPERT_SCALES = "_weight_scale", "_weight_scale_2"
SIDECAR = "nvfp4_act_scales.safetensors"  # activation scales for a GPU kernel; a weight-only build has no use for them

# The largest weight that E2M1 (6) and E4M3 (448) span is global_scale = weight_scale_2 * 2688. A weight's
# magnitude outside this range means another convention, such as the reciprocal that compressed-tensors stores.
SPAN = np.float32(448 * 6)
SMALLEST_AMAX, LARGEST_AMAX = 1e-5, 1e3

E4M3_NAN = 0x7F  # above it, all bytes are negative: the sign is the high bit


def is_marked(config: dict) -> bool:
    """Whether config.json says that the experts are NVFP4."""
    scheme = config.get("quantization_config")
    return isinstance(scheme, dict) and scheme.get("quant_method") == QUANT_METHOD


def is_nvfp4(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is NVFP4, by its config marker and its tensors together.

    Raises:
        SourceError: one without the other, or a group size that the layout does not have.
    """
    tensors = any(n.endswith((BLOCK_SCALES, EXPERT_SCALES)) for n in checkpoint.tensors)
    marked = is_marked(checkpoint.config)
    if marked and not tensors:
        raise SourceError(
            f"config.json: quantization_config says {QUANT_METHOD}, but there are no *{EXPERT_SCALES} tensors; "
            "take config.json and the shards from one repository"
        )
    if tensors and not marked:
        raise SourceError(
            f"there are *{EXPERT_SCALES} tensors, but config.json has no quantization_config with quant_method "
            f"{QUANT_METHOD!r}; take config.json and the shards from one repository"
        )
    if marked and (size := checkpoint.config["quantization_config"].get("group_size", GROUP_SIZE)) != GROUP_SIZE:
        raise SourceError(f"config.json: quantization_config.group_size is {size!r}; NVFP4 has {GROUP_SIZE}")
    return marked


def stack_tensors(name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The three source tensors of an expert stack [E, R, K]: name -> (dtype, shape)."""
    experts, rows, width = shape
    return {
        name: ("U8", (experts, rows, width // 2)),
        name + BLOCK_SCALES: ("F8_E4M3", (experts, rows, width // GROUP_SIZE)),
        name + EXPERT_SCALES: ("F32", (experts,)),
    }


def expert_scales(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """`weight_scale_2` of a stack: float32 [E]."""
    info = checkpoint.tensors[name + EXPERT_SCALES]
    return checkpoint.read(info.name, 0, info.nbytes).view("<f4")


def check_expert_scales(checkpoint: Checkpoint, stacks: list[str]) -> None:
    """Refuses per-expert scales that can't be amax / 2688: small tensors, read before anything is written.

    Raises:
        SourceError: with every tensor and expert that is at fault.
    """
    problems = []
    for name in stacks:
        for expert, scale in enumerate(expert_scales(checkpoint, name)):
            with np.errstate(over="ignore"):
                amax = scale * SPAN
            where = f"{name}{EXPERT_SCALES}: expert {expert}: scale {scale:.6g}"
            if not np.isfinite(scale) or scale <= 0:
                problems.append(f"{where} is not positive and finite")
            elif not SMALLEST_AMAX <= amax <= LARGEST_AMAX:
                problems.append(
                    f"{where} means weights up to {amax:.3g}; a reciprocal scale (compressed-tensors) looks like this"
                )
    if problems:
        raise SourceError(listing("the NVFP4 experts have unusable scales", problems))


def check_block_scales(scales: np.ndarray, name: str, expert: int, first_row: int) -> None:
    """Refuses a NaN or negative block scale.

    Args:
        scales: E4M3 bits, uint8 [rows, K / 16], of one expert from `first_row` on.
    Raises:
        SourceError: naming the tensor, the expert and the place.
    """
    if scales.size and scales.max() >= E4M3_NAN:
        row, block = np.argwhere(scales >= E4M3_NAN)[0]
        byte = int(scales[row, block])
        what = "NaN" if byte & 0x7F == E4M3_NAN else "negative"
        raise SourceError(
            f"{name}{BLOCK_SCALES}: expert {expert}, row {first_row + int(row)}, block {int(block)}: "
            f"{what} block scale (0x{byte:02X}); download the shard again"
        )
