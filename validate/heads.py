"""The same body with the MTP head quantized each way: which policy is worth its bytes."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..convert.checkpoint import Checkpoint
from ..convert.plan import Module, Plan
from ..convert.rows import blocks
from ..quantize.kernels import affine_quantize, cast
from ..quantize.precision import Quantized
from .decode import decode
from .forced import forced_acceptance, forced_positions
from .smoke import Build, Prompt
from .statistics import Z95, wilson

MLX_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32}


def build_head(model, plan: Plan, checkpoint: Checkpoint) -> nn.Module:
    """An MTP head as a plan would write it, computing in the body's dtype.

    Args:
        model: the loaded build, whose head has the same dimensions.
        plan: of the same source, with the policy in question.
    """
    modules = [m for m in plan.modules if m.family == "MTP head"]
    precisions = {m.path.removeprefix("mtp."): m.precision for m in modules if isinstance(m.precision, Quantized)}
    head = type(model.mtp)(model.args)
    nn.quantize(head, class_predicate=lambda path, _: precisions[path].as_config() if path in precisions else False)
    dtype = model.model.norm.weight.dtype
    weights = [
        (name.removeprefix("mtp."), array if array.dtype == mx.uint32 else array.astype(dtype))
        for m in modules
        for name, array in _stored(m, checkpoint)
    ]
    head.load_weights(weights, strict=True)
    mx.eval(head.parameters())
    return head


def _stored(module: Module, checkpoint: Checkpoint) -> list[tuple[str, mx.array]]:
    """What a plan writes of a module, as arrays."""
    if isinstance(module.precision, Quantized):
        made = [affine_quantize(b, module.float_dtype, module.precision) for b in blocks(module, checkpoint)]
        raw = [np.concatenate([part[t.name.removeprefix(module.path)] for part in made]) for t in module.stored]
    else:
        target = module.stored[0].dtype
        raw = [np.concatenate([cast(b, module.float_dtype, target)[0] for b in blocks(module, checkpoint)])]
    arrays = []
    for tensor, values in zip(module.stored, raw, strict=True):
        array = mx.array(values.reshape(tensor.shape))
        arrays.append((tensor.name, array.view(mx.bfloat16) if tensor.dtype == "BF16" else array))
    return arrays


def compare_heads(
    build: Build,
    plans: dict[str, Plan],
    checkpoint: Checkpoint,
    prompts: list[Prompt],
    text: str | None,
    tokens: int,
    drafts: int,
    temperature: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict]:
    """Acceptance, speed and size of each policy's head on one loaded body; the build's own head is put back.

    Returns:
        A row for each policy: `policy`, `bytes`, `drafted`, `accepted`, `acceptance`, `interval`,
        `tokens_per_second`, `forced`, and `against`: for every earlier policy, the difference in forced agreement
        with its 95 % interval (paired, normal approximation) and whether it is `real`, that is, excludes 0.
    """
    model, own = build.model, build.model.mtp
    rows, agreements = [], {}
    try:
        for policy, plan in plans.items():
            say(f"MTP head {policy}")
            model.mtp = build_head(model, plan, checkpoint)
            decode(model, build.encode(prompts[0]), min(tokens, 8), drafts)  # warm-up
            runs = [decode(model, build.encode(p), tokens, drafts, stop=build.stop) for p in prompts]
            made, held = sum(sum(r.drafted) for r in runs), sum(sum(r.accepted) for r in runs)
            agree, shared = forced_positions(model, build.windows(text), temperature)
            seconds = sum(r.decode_seconds for r in runs)
            rows.append(
                {
                    "policy": policy,
                    "bytes": sum(m.nbytes for m in plan.modules if m.family == "MTP head"),
                    "drafted": made,
                    "accepted": held,
                    "acceptance": held / made,
                    "interval": list(wilson(held, made)),
                    "tokens_per_second": sum(r.steps + sum(r.accepted) for r in runs) / max(seconds, 1e-9),
                    "forced": forced_acceptance(agree, shared),
                    "against": {other: _difference(agree, theirs) for other, theirs in agreements.items()},
                }
            )
            agreements[policy] = agree
    finally:
        model.mtp = own
    return rows


def _difference(mine: np.ndarray, theirs: np.ndarray) -> dict:
    """Mean of a paired difference of two yes-or-no series, and its 95 % interval."""
    d = mine.astype(np.float64) - theirs.astype(np.float64)
    half = Z95 * float(d.std()) / max(len(d), 1) ** 0.5
    mean = float(d.mean())
    return {"agreement": mean, "interval": [mean - half, mean + half], "real": abs(mean) > half}
