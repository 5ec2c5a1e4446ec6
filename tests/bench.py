"""make bench: conversion and verification next to mlx-lm, to a pipeline that does nothing, to cp and to memcpy.

Builds its sources, a real-size expert layer of Motif-3 and a model of an architecture that mlx-lm knows, then runs the
sides of each comparison by turns in processes of their own, and prints medians, and ratios within each round. Raw
numbers go to bench.json, a picture to bench.png. Hot: the source's files are in memory; cold: they were put out of it.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import bench_kernels
import numpy as np
import psutil
from bench_measure import Run, bring_into_memory, by_turns, memcpy_rate, put_out_of_memory, run
from conftest import REAL_SIZES, REFERENCE, SMALL_CONFIG
from motif_convert.convert.names import entries
from motif_convert.quantize.kernels import f32_to_bf16
from motif_convert.recipes.show import human_bytes, text_table

BIN = Path(sys.executable).parent
SIDES = [sys.executable, str(Path(__file__).with_name("bench_sides.py"))]
LAYER = SMALL_CONFIG | REAL_SIZES | {"num_hidden_layers": 1, "n_dense_first_layers": 0, "vocab_size": 4096}
LAYER |= {"num_nextn_predict_layers": 0, "mhc_expansion_rate": 4, "mhc_sinkhorn_iters": 20}
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 11,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHARD_BYTES = 2 << 30


# --- sources ---


def write_source(folder: Path, config: dict, tensors: list[tuple[str, tuple[int, ...]]]) -> int:
    """A checkpoint of normal random numbers in BF16; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    noise = memoryview(f32_to_bf16(np.random.default_rng(0).standard_normal(32 << 20, np.float32) * 0.02)).cast("B")
    shards, weight_map, total = [[]], {}, 0
    for name, shape in tensors:
        if sum(2 * int(np.prod(s)) for _, s in shards[-1]) > SHARD_BYTES:
            shards.append([])
        shards[-1].append((name, shape))
    for number, shard in enumerate(shards, 1):
        file, header, end = f"model-{number:05d}-of-{len(shards):05d}.safetensors", {}, 0
        for name, shape in shard:
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            left = end
            while left:
                skip = 2 * (left % 9973)  # so that blocks differ
                left -= f.write(noise[skip : skip + min(left, len(noise) - skip)])
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return total


def layer_source(folder: Path, experts: int) -> int:
    config = LAYER | {"num_experts": experts, "experts_top_k": min(8, experts)}
    return write_source(folder, config, [(e.source, e.shape) for e in entries(config)])


def model_source(folder: Path, layers: int, hidden: int = MODEL["hidden_size"]) -> int:
    """A Llama, with the demo's tokenizer, which mlx_lm.convert wants to see."""
    config = MODEL | {"num_hidden_layers": layers, "hidden_size": hidden}
    wide, words = config["intermediate_size"], config["vocab_size"]
    tensors = [("model.embed_tokens.weight", (words, hidden)), ("lm_head.weight", (words, hidden))]
    tensors.append(("model.norm.weight", (hidden,)))
    for i in range(layers):
        at = f"model.layers.{i}."
        tensors += [(f"{at}self_attn.{p}_proj.weight", (hidden, hidden)) for p in "qkvo"]
        tensors += [(f"{at}mlp.{p}_proj.weight", (wide, hidden)) for p in ("gate", "up")]
        tensors.append((f"{at}mlp.down_proj.weight", (hidden, wide)))
        tensors += [(f"{at}{p}_layernorm.weight", (hidden,)) for p in ("input", "post_attention")]
    total = write_source(folder, config, tensors)
    for path in (REFERENCE / "demo-motif3").glob("tokenizer*"):
        shutil.copy(path, folder)
    return total


# --- what is compared ---


def bench_model(folder: Path, rounds: int, layers: int) -> dict:
    source = folder / "model"
    nbytes = model_source(source, layers)
    sides = {
        "mlx_lm.convert": lambda out: [
            *(BIN / "mlx_lm.convert", "--hf-path", source, "--mlx-path", out),
            *("-q", "--q-bits", 4, "--q-group-size", 64),
        ],
        "motif-convert's pipeline": lambda out: [*SIDES, "quantize", source, out],
        "null pipeline": lambda out: [*SIDES, "null", source, out],
        "cp": lambda out: ["cp", "-r", source, out],
    }
    runs = list(by_turns(sides, rounds, folder, lambda: bring_into_memory(source)))
    shutil.rmtree(source)
    return report(f"A Llama of {human_bytes(nbytes)} to 4 bits, hot", nbytes, runs, "motif-convert's pipeline")


def bench_layer(folder: Path, rounds: int, experts: int, cold: bool) -> dict:
    source = folder / "layer"
    nbytes = layer_source(source, experts)
    sides = {
        "motif-convert convert": lambda out: [BIN / "motif-convert", "convert", "--source", source, "--out", out],
        "null pipeline": lambda out: [*SIDES, "null", source, out],
    }
    before = (lambda: put_out_of_memory(source)) if cold else (lambda: bring_into_memory(source))
    runs = list(by_turns(sides, rounds, folder, before))
    title = f"A layer of Motif-3 of {human_bytes(nbytes)} by the recipe 4.5bit, {'cold' if cold else 'hot'}"
    found = report(title, nbytes, runs, "motif-convert convert")
    shutil.rmtree(source)
    return found


def bench_verify(folder: Path, rounds: int, experts: int, cold: bool) -> dict:
    source, build = folder / "layer", folder / "build"
    nbytes = layer_source(source, experts)
    run("convert", [BIN / "motif-convert", "convert", "--source", source, "--out", build])
    sides = {
        "motif-convert verify": lambda out: [BIN / "motif-convert", "verify", build, "--source", source],
        "plain read of both": lambda out: [*SIDES, "read", source, build],
    }
    before = (lambda: put_out_of_memory(source, build)) if cold else (lambda: bring_into_memory(source, build))
    runs = list(by_turns(sides, rounds, folder, before))
    for used in (source, build):
        shutil.rmtree(used)
    title = f"Verifying a layer of {human_bytes(nbytes)}, {'cold' if cold else 'hot'}"
    return report(title, nbytes, runs, "motif-convert verify")


def report(title: str, nbytes: int, runs: list[Run], ours: str) -> dict:
    """Prints medians, and the medians of the ratios within rounds."""
    sides = list(dict.fromkeys(r.side for r in runs))
    rounds = [{r.side: r for r in runs[i : i + len(sides)]} for i in range(0, len(runs), len(sides))]
    rows = [("side", "wall", "GB/s of source", "CPU", "peak memory", "wall / ours", "memory / ours")]
    summary = {}
    for side in sides:
        wall = statistics.median(r[side].wall for r in rounds)
        found = {
            "wall": wall,
            "cpu": statistics.median(r[side].cpu for r in rounds),
            "peak": max(r[side].peak for r in rounds),
            "rate": nbytes / wall,
            "wall_over_ours": statistics.median(r[side].wall / r[ours].wall for r in rounds),
            "peak_over_ours": statistics.median(r[side].peak / r[ours].peak for r in rounds),
        }
        summary[side] = found
        rows.append(
            (
                side,
                f"{wall:.2f} s",
                f"{found['rate'] / 1e9:.2f}",
                f"{found['cpu']:.1f} s",
                human_bytes(found["peak"]),
                f"{found['wall_over_ours']:.2f}",
                f"{found['peak_over_ours']:.2f}",
            )
        )
    print(f"\n{title}\n{text_table(rows)}", flush=True)
    return {"title": title, "bytes": nbytes, "ours": ours, "sides": summary, "runs": [asdict(r) for r in runs]}


def draw(found: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(found), 5), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, part in enumerate(found):
        sides = part["sides"]
        for row, (key, unit, scale) in enumerate((("wall", "s", 1), ("peak", "MB", 1e6))):
            at = axes[row][column]
            values = [s[key] / scale for s in sides.values()]
            bars = at.barh(list(sides), values, color=["tab:blue" if s == part["ours"] else "silver" for s in sides])
            at.bar_label(bars, [f"{v:,.{0 if v >= 100 else 1}f} {unit}" for v in values], padding=2, fontsize=8)
            at.invert_yaxis()
            at.margins(x=0.25)
            at.set_title(f"{part['title']}\nwall" if row == 0 else "peak memory", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def machine() -> dict:
    names = ("motif-convert", "mlx", "mlx-lm", "numba", "numpy")
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), processor)
    return {
        "processor": processor,
        "processors": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="needs 30 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=11, help="of the Llama; 0.4 GB each, and 0.5 GB")
    parser.add_argument("--experts", type=int, default=384, help="of the layer; 31 MB each")
    parser.add_argument("--no-kernels", action="store_true", help="whole conversions alone")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(", ".join(f"{k} {v}" for k, v in about.items() if k != "versions"))
    if not options.no_kernels:
        bench_kernels.main()
    about["memcpy"] = memcpy_rate()
    print(f"\nmemcpy of 84 MB: {about['memcpy'] / 1e9:.1f} GB/s")
    can_be_cold = hasattr(os, "posix_fadvise")
    folder, rounds = options.folder, options.rounds
    found = [bench_model(folder, rounds, options.layers)]
    found.append(bench_layer(folder, 1, max(8, options.experts // 6), cold=False))
    found.append(bench_layer(folder, rounds, options.experts, cold=False))
    if can_be_cold:
        found.append(bench_layer(folder, rounds, options.experts, cold=True))
    found.append(bench_verify(folder, rounds, options.experts, cold=can_be_cold))
    small, large = (f["sides"]["motif-convert convert"]["peak"] for f in found[1:3])
    print(f"\nPeak memory of a conversion, large layer against small: {large / small:.3f}")
    (folder / "bench.json").write_text(json.dumps({"machine": about, "comparisons": found}, indent=1))
    draw(found, folder / "bench.png")
    print(f"{folder / 'bench.json'}, {folder / 'bench.png'}")


if __name__ == "__main__":
    main()
