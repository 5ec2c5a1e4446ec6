"""What bench.py runs in processes of its own: python bench_sides.py SIDE SOURCE OUT.

null      what a conversion of SOURCE with the recipe 4.5bit reads and writes, in the same pieces and threads, and
          nothing in between
quantize  a model of any architecture, through the converter's own pipeline: every matrix to 4 bits
read      all that is in SOURCE, and in OUT
"""

import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from motif_convert.convert.checkpoint import Checkpoint, open_checkpoint
from motif_convert.convert.journal import open_journal
from motif_convert.convert.names import FIXED, PROJECTION, Entry
from motif_convert.convert.plan import Module, Plan
from motif_convert.convert.planner import make_modules, place
from motif_convert.convert.rows import float_reader, float_runs
from motif_convert.convert.shards import index_json, shard_header, sync_folder
from motif_convert.convert.stream import write_shards
from motif_convert.convert.workers import Workers, default_threads
from motif_convert.quantize.precision import Quantized
from motif_convert.recipes.pipeline import prepare
from motif_convert.recipes.recipe import load_recipe

FOUR_BITS = Quantized("affine", 4, 64)


def name_table(checkpoint: Checkpoint) -> list[Entry]:
    """For an architecture whose names are the same in MLX: what is a matrix is quantized."""
    return [
        Entry(t.name, (t.name,), t.shape, "norms" if len(t.shape) < 2 else "attention", kind)
        for t in checkpoint.tensors.values()
        for kind in [FIXED if len(t.shape) < 2 else PROJECTION]
    ]


def plan_of(checkpoint: Checkpoint) -> Plan:
    table = name_table(checkpoint)
    chosen = {e.source.removesuffix(".weight"): FOUR_BITS for e in table if e.kind == PROJECTION}
    modules = [m for e in table for m in make_modules(e, checkpoint, False, chosen)]
    return Plan(
        recipe=load_recipe("4.5bit"),
        mtp="none",
        modules=tuple(place(modules)),
        dropped=(),
        body_dtype="BF16",
        has_mtp=False,
        nvfp4=False,
        requantize=False,
        unused=(),
        config_sha256=checkpoint.config_sha256,
        index_sha256=checkpoint.index_sha256,
    )


def quantize(source: Path, out: Path) -> None:
    with open_checkpoint(source) as checkpoint:
        plan = plan_of(checkpoint)
        out.mkdir()
        journal = open_journal(out, plan, "bench", {"fingerprint": ""})
        write_shards(plan, checkpoint, journal, lambda count, name: None)
        (out / "model.safetensors.index.json").write_bytes(index_json(plan))
        how = FOUR_BITS.as_config()
        config = checkpoint.config | {"quantization": how, "quantization_config": how}
        (out / "config.json").write_text(json.dumps(config))
        for path in source.glob("tokenizer*"):
            shutil.copy(path, out)
        journal.remove()
    sync_folder(out)


@contextmanager
def written(path: Path):
    """A file descriptor, synced and closed in the end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def null(source: Path, out: Path) -> None:
    with open_checkpoint(source) as checkpoint:
        plan = prepare(str(source), "4.5bit", None).plan if checkpoint.config["model_type"] == "Motif" else None
        plan = plan or plan_of(checkpoint)
        out.mkdir()
        for name, modules in plan.shards.items():
            with written(out / name) as fd, Workers(default_threads()) as threads:
                os.write(fd, shard_header(modules))
                for module in modules:
                    _pass(module, checkpoint, fd, threads)


def _pass(module: Module, checkpoint: Checkpoint, fd: int, threads: Workers) -> None:
    left, read = module.nbytes, float_reader(module, checkpoint)
    share = module.nbytes / (module.parameters * 2)
    for rows in threads.in_order(lambda run, buffers: read(run, buffers), float_runs(module)):
        data = memoryview(np.ascontiguousarray(rows)).cast("B")
        count = min(left, len(data), round(len(data) * share) + 1)
        left -= os.write(fd, data[:count])
    os.write(fd, b"\0" * left)


def read(source: Path, out: Path) -> None:
    files = [p for folder in (source, out) for p in folder.glob("*.safetensors")]
    pieces = [(p, start) for p in files for start in range(0, p.stat().st_size, 2 << 20)]
    opened = {p: os.open(p, os.O_RDONLY) for p in files}

    def piece(place, buffers):
        path, start = place
        return os.preadv(opened[path], [buffers.array("piece", np.uint8, (2 << 20,))], start)

    with Workers(default_threads()) as threads:
        total = sum(threads.in_order(piece, pieces))
    assert total == sum(p.stat().st_size for p in files)


if __name__ == "__main__":
    side, source, out = sys.argv[1:]
    {"null": null, "quantize": quantize, "read": read}[side](Path(source), Path(out))
