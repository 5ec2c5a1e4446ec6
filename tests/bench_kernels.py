"""How fast the quantization kernels are, next to mlx and to memcpy, all measured in this one run.

GB/s count BF16, which NVFP4 only stands for. The candidates of a table take turns, each of several runs in a row; the
best run of each is given. Where there are two threads, each has arrays of its own, as large as those of one.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from motif_convert.quantize import affine, fp4

K = 4096
CONFIGS = [(4, 64), (8, 64), (4, 32), (4, 128)]


@dataclass(frozen=True)
class Place:
    name: str
    rows: int  # of 8 KB
    turns: int
    runs: int  # in a turn
    repeats: int  # in a run: what a thread does before it asks for more

    @property
    def n_bytes(self):
        return self.rows * K * 2


PLACES = [
    Place("4 MB, in cache", rows=512, turns=8, runs=4, repeats=4),
    Place("84 MB, from memory", rows=10_240, turns=4, runs=1, repeats=1),
]


def table(title, place, candidates):
    """Prints the speed of each candidate, and how many times that of the first; candidate: (name, threads, run)."""
    best = dict.fromkeys((name for name, _, _ in candidates), float("inf"))
    for _ in range(place.turns):
        for name, _, run in candidates:
            for _ in range(place.runs):
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
    first = candidates[0][0]
    print(f"\n{title + ', ' + place.name:56} GB/s   times {first}")
    for name, threads, _ in candidates:
        times = threads * best[first] / best[name]
        print(f"  {name:52} {threads * place.repeats * place.n_bytes / best[name] / 1e9:6.2f} {times:8.1f}")


def candidate(place, name, function, *args):
    def run():
        for _ in range(place.repeats):
            function(*args)

    return name, 1, run


def two_threads(place, pool, name, function, *args):
    """Two of a candidate side by side; the second works on copies of its arrays."""
    runs = [candidate(place, name, function, *own)[2] for own in (args, [np.copy(array) for array in args])]

    def run():
        for job in [pool.submit(run) for run in runs]:
            job.result()

    return f"{name}, two threads", 2, run


def outputs(n, bits, group_size):
    parts = (np.uint32, K * bits // 32), (np.uint16, K // group_size), (np.uint16, K // group_size)
    return [np.zeros((n, width), dtype) for dtype, width in parts]


def random_rows(n):
    x = np.random.default_rng(0).standard_normal((n, K), np.float32) * np.float32(0.02)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def bench_affine(place, pool, bits, size, rows, title):
    parts, copy = outputs(place.rows, bits, size), np.zeros_like(rows)
    in_mlx = mx.array(rows).view(mx.bfloat16)

    def with_mlx():
        mx.eval(mx.quantize(in_mlx, group_size=size, bits=bits, stream=mx.cpu))

    def kernel(rows, packed, scales, biases):
        affine.quantize_into(rows, bits, size, packed, scales, biases)

    table(
        title,
        place,
        [
            candidate(place, "mx.quantize", with_mlx),
            candidate(place, "kernel", kernel, rows, *parts),
            two_threads(place, pool, "kernel", kernel, rows, *parts),
            candidate(place, "memcpy", np.copyto, copy, rows),
            two_threads(place, pool, "memcpy", np.copyto, copy, rows),
        ],
    )


def bench_nvfp4(place, pool):
    n = place.rows
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (n, K // 2), np.uint8)
    block_scales = rng.integers(0x58, 0x7F, (n, K // 16), np.uint8)
    scale = np.float32(3.3e-5)
    out, parts = np.zeros((n, K), np.uint16), outputs(n, 4, 64)
    codes_in_mlx, scales_in_mlx = mx.array(codes.view(np.uint32)), mx.array(block_scales)
    scale_in_mlx = mx.array(scale * 2688)  # in mlx it is the largest weight: 448 * 6 times the scale

    def mlx_dequantize():
        return mx.dequantize(
            codes_in_mlx, scales_in_mlx, mode="nvfp4", global_scale=scale_in_mlx, dtype=mx.bfloat16, stream=mx.cpu
        )

    def decode(codes, block_scales, out):
        fp4.decode(codes, block_scales, scale, out)

    def decode_then_quantize(codes, block_scales, out, packed, scales, biases):
        decode(codes, block_scales, out)
        affine.quantize_into(out, 4, 64, packed, scales, biases)

    table(
        "NVFP4 to BF16",
        place,
        [
            candidate(place, "mx.dequantize", lambda: mx.eval(mlx_dequantize())),
            candidate(place, "decode", decode, codes, block_scales, out),
            two_threads(place, pool, "decode", decode, codes, block_scales, out),
        ],
    )
    table(
        "NVFP4 to 4 bits, groups of 64",
        place,
        [
            candidate(
                place,
                "mx.dequantize, mx.quantize",
                lambda: mx.eval(mx.quantize(mlx_dequantize(), group_size=64, bits=4, stream=mx.cpu)),
            ),
            candidate(place, "decode, kernel", decode_then_quantize, codes, block_scales, out, *parts),
            two_threads(place, pool, "decode, kernel", decode_then_quantize, codes, block_scales, out, *parts),
        ],
    )


def main():
    start = time.perf_counter()
    for bits, size in CONFIGS:
        if not (found := affine.available(bits, size)):
            raise SystemExit(found.reason)
    print(f"kernels compiled, or loaded, and checked in {time.perf_counter() - start:.2f} s")
    with ThreadPoolExecutor(2) as pool:
        for place in PLACES:
            rows = random_rows(place.rows)
            for bits, size in CONFIGS:
                bench_affine(place, pool, bits, size, rows, f"BF16 to {bits} bits, groups of {size}")
            bench_nvfp4(place, pool)
        rows = random_rows(PLACES[0].rows)
        rows[:, ::64] = 0x7FC0
        bench_affine(PLACES[0], pool, 4, 64, rows, "BF16 to 4 bits, a NaN in each group of 64")


if __name__ == "__main__":
    main()
