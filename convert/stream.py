"""Runs a Plan: weights are read once, transformed, and written once, shard by shard.

Memory is bounded by one block of rows, and by the scales and biases of one module, which stand behind
its codes in the file.
"""

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from math import prod

import numpy as np

from ..quantize.kernels import RAW_DTYPES, affine_quantize, cast, why_not_compiled
from ..quantize.precision import NVFP4, Quantized
from .checkpoint import Checkpoint
from .journal import Journal
from .nvfp4 import SPAN, expert_scales
from .plan import Module, Plan
from .rows import BLOCK_BYTES, blocks, read_block_scales, read_rows, row_runs
from .shards import HashedFile, new_file, shard_header


def write_shards(plan: Plan, checkpoint: Checkpoint, journal: Journal, progress: Callable[[int, str], None]) -> None:
    """Writes every shard of the plan that the journal lacks.

    Args:
        progress: called with bytes of source done and the shard's name.
    Raises:
        SourceError, OutputError.
    """
    for name, modules in plan.shards.items():
        path = journal.path.parent / name
        done = journal.shards.get(name)
        if done and path.is_file() and path.stat().st_size == done.size:
            progress(sum(m.source_nbytes for m in modules), name)
            continue
        with new_file(path) as file:
            file.write(shard_header(modules))
            for module in modules:
                _write_module(module, checkpoint, file, lambda n, name=name: progress(n, name))
        journal.shards[name] = file.written()
        journal.save()


def left_to_mlx(plan: Plan) -> dict[str, int]:
    """What the compiled kernels can't do of a plan: the reason, and the bytes of source that `mx.quantize` gets."""
    reasons = Counter()
    for m in plan.modules:
        if isinstance(m.precision, Quantized) and m.precision.mode == "affine":
            reasons[why_not_compiled(m.float_dtype, m.precision)] += m.source_nbytes
    del reasons[""]
    return dict(reasons)


def _write_module(module: Module, checkpoint: Checkpoint, file: HashedFile, progress) -> None:
    if module.precision == NVFP4:
        _write_nvfp4(module, checkpoint, file, progress)
    elif isinstance(module.precision, Quantized):
        _write_quantized(module, checkpoint, file, progress)
    else:
        (stored,) = module.stored
        for block in blocks(module, checkpoint):
            if stored.dtype != module.float_dtype:
                block, _ = cast(block, module.float_dtype, stored.dtype)
            file.write(block)
            progress(block.size * module.source_nbytes // module.parameters)


def _write_quantized(module: Module, checkpoint: Checkpoint, file: HashedFile, progress) -> None:
    later = {t.name: np.empty(prod(t.shape), RAW_DTYPES[t.dtype]) for t in module.stored[1:]}
    at = 0
    for block in blocks(module, checkpoint):
        made = affine_quantize(block, module.float_dtype, module.precision)
        file.write(made[".weight"])
        groups = made[".scales"].size
        for suffix in (".scales", ".biases"):
            later[module.path + suffix][at : at + groups] = made[suffix].reshape(-1)
        at += groups
        progress(block.size * module.source_nbytes // module.parameters)
    for values in later.values():
        file.write(values)


def _write_nvfp4(module: Module, checkpoint: Checkpoint, file: HashedFile, progress) -> None:
    """Codes and block scales byte for byte: MLX packs both as the vendor does."""
    width = module.source_shape[-1]
    # Two buffers in turn: while one is written and hashed, the next is read.
    buffers = cycle([np.empty(max(BLOCK_BYTES, width), np.uint8) for _ in range(2)])
    for run in row_runs(module, width // 2):
        codes = read_rows(checkpoint, module, module.source, width // 2, run, next(buffers))
        file.write(codes)
        progress(codes.nbytes)
    file.write(expert_scales(checkpoint, module.source) * SPAN)
    for run in row_runs(module, width // NVFP4.group_size):
        scales = read_block_scales(checkpoint, module, run)
        file.write(scales)
        progress(scales.nbytes)
