"""Verify: clean builds pass, and every fault that was put into one is found and named."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from math import prod
from pathlib import Path
from py_compile import PycInvalidationMode
from py_compile import compile as compile_file

import mlx.core as mx
import numpy as np
import pytest
from conftest import (
    REFERENCE,
    SMALL_CONFIG,
    motif_convert,
    random_weights,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)
from matplotlib.figure import Figure
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize.errors import MotifConvertError, SourceError
from motif_convert.quantize.oracle import affine_quantize
from motif_convert.quantize.precision import Quantized
from motif_convert.recipes import pipeline
from motif_convert.validate import evidence
from motif_convert.validate.arithmetic import Expected, decoded_error
from motif_convert.validate.layout import Comparison, Part
from motif_convert.validate.rounding import round_to
from motif_convert.validate.verify import verify_repo

TINY, NVFP4, DEMO = (REFERENCE / name for name in ("tiny-motif3", "tiny-motif3-nvfp4", "demo-motif3"))
INDEX, PROVENANCE = "model.safetensors.index.json", "motif-convert.json"
GATE, UP, DOWN = (f"model.layers.1.mlp.switch_mlp.{p}_proj" for p in ("gate", "up", "down"))
PARTS = (".weight", ".scales", ".biases")
ROUTER = "model.layers.2.mlp.gate.weight"

# small: stacks of 5 experts, [5, 128, 64] for gate and up, [5, 64, 128] for down, in groups of 64
EXPERTS, ROWS, GROUPS = 5, {GATE: 128, UP: 128, DOWN: 64}, {GATE: 1, UP: 1, DOWN: 2}


def verify(out: Path, source: Path, **options):
    with open_checkpoint(source) as checkpoint:
        return verify_repo(out, checkpoint, **options)


class Build:
    """A copy of a build, to put faults into."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.place: dict[str, tuple] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with path.open("rb") as f:
                start = 8 + int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(start - 8))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                self.place[name] = (path, start + first, last - first, entry["dtype"], tuple(entry["shape"]))

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8, written through to the file."""
        path, offset, size, _, _ = self.place[name]
        return np.memmap(path, np.uint8, "r+", offset, (size,))

    def array(self, name: str) -> np.ndarray:
        """The same by matrices: uint8 [E, bytes of one] for a stack, else [1, bytes]."""
        return self[name].reshape(EXPERTS if ".switch_mlp." in name else 1, -1)

    def json(self, name: str, change) -> None:
        """change(dict) edits a JSON file."""
        path = self.folder / name
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value, indent=2))

    def seal(self) -> "Build":
        """Sizes and hashes in motif-convert.json as they are now, so that they don't give the fault away."""

        def change(made):
            for name in made["files"]:
                data = (self.folder / name).read_bytes()
                made["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

        self.json(PROVENANCE, change)
        return self


@pytest.fixture
def copy(built, tmp_path):
    """copy(source, *options): a build that may be spoiled."""
    return lambda source, *options: Build(Path(shutil.copytree(built(source, *options), tmp_path / "copy")))


@pytest.fixture
def spoiled(copy, small) -> Build:
    """A build of `small` with 4-bit experts, 8-bit attention, BF16 routers and a float16 head."""
    return copy(small, "--keep-mtp-fp16")


def named(result) -> dict[str, set]:
    """Tensor -> the experts of it that were found wrong."""
    found: dict[str, set] = {}
    for o in result.offenders:
        found.setdefault(o.tensor, set()).add(o.expert)
    return found


# --- clean builds ---

CLEAN = {
    "tiny": (TINY, "--keep-mtp-fp16"),
    "small": ("small", "--keep-mtp-fp16"),
    "nvfp4": (NVFP4,),
    "nvfp4-8bit": (NVFP4, "--bits", "8"),
    "nvfp4-bf16": (NVFP4, "--recipe", "bf16"),
    "nvfp4-affine": (NVFP4, "--experts", "affine"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_build_passes(built, small, name):
    source, *options = CLEAN[name]
    source = small if source == "small" else source
    out, read = built(source, *options), []
    result = verify(out, source, progress=read.append)
    assert (result.problems, result.offenders, result.offenders_total) == ([], [], 0)
    assert result.passed
    assert result.sampled == 1.0
    weights = {n: prod(t[1]) * (2 if t[0] == "U8" else 1) for n, t in read_safetensors(source).items()}
    scales = [n for n in weights if n.endswith(("_weight_scale", "_weight_scale_2"))]
    expected = sum(n for name, n in weights.items() if name not in scales)
    read_once = sum(len(t[2]) for n, t in read_safetensors(source).items() if not n.endswith("_weight_scale_2"))
    assert sum(f.compared for f in result.families) == sum(f.elements for f in result.families) == expected
    assert sum(r.compared for r in result.layers) == expected
    assert result.files == result.hashed == len(json.loads((out / PROVENANCE).read_text())["files"])
    assert sum(read) == read_once
    for row in result.layers:
        assert row.worst_share is None or 0.3 < row.worst_share <= 1
        assert row.worst_steps is None or 0.4 < row.worst_steps < 2.5


def test_the_json_is_strict_and_as_documented(built, small):
    found = verify(built(small, "--keep-mtp-fp16"), small).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(found) == [
        *("format", "passed", "plan_hash", "other_source", "sampled", "files", "problems", "families", "layers"),
        *("offenders_total", "offenders"),
    ]
    assert (found["format"], found["passed"]) == (1, True)
    row = [
        "family",
        "precisions",
        "elements",
        "compared",
        "groups",
        "differing",
        "worst_steps",
        "worst_share",
        "snr_db",
    ]
    assert [list(f) for f in found["families"]] == [row] * 10
    assert all(sorted(r) == sorted([*row, "layer"]) for r in found["layers"])
    made = json.loads((built(small, "--keep-mtp-fp16") / PROVENANCE).read_text())
    assert found["plan_hash"] == made["plan_hash"]


def noise_and_steps(made: dict, exact: dict[str, np.ndarray], bits: int) -> tuple[float, float]:
    """SNR in dB and the worst step of affine modules, decoded by mlx: path -> the source's float32 weights, which
    BF16 holds once more before they are quantized."""
    signal = noise = worst = 0.0
    for path, weights in exact.items():
        scales, biases = (made[path + s].astype(mx.float32) for s in (".scales", ".biases"))
        decoded = np.array(mx.dequantize(made[path + ".weight"], scales, biases, 64, bits, stream=mx.cpu), np.float64)
        signal, noise = signal + (weights.astype("f8") ** 2).sum(), noise + ((decoded - weights) ** 2).sum()
        rounded = np.array(mx.array(weights).astype(mx.bfloat16).astype(mx.float32))
        worst = max(worst, (np.abs(decoded - rounded) / np.abs(np.array(scales)).repeat(64, -1)).max())
    return 10 * np.log10(signal / noise), worst


def load(folder: Path) -> dict[str, mx.array]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= mx.load(str(path))
    return tensors


def test_noise_and_steps_by_a_second_way(built, small):
    out, source = built(small, "--keep-mtp-fp16"), load(small)
    row = next(r for r in verify(out, small).layers if (r.family, r.layer) == ("routed experts", 1))
    fused, down = (
        np.array(source[f"model.layers.1.moe.experts.{name}"].astype(mx.float32))
        for name in ("gate_up_proj", "down_proj")
    )
    snr, worst = noise_and_steps(load(out), {GATE: fused[:, :128], UP: fused[:, 128:], DOWN: down}, 4)
    assert row.snr_db == pytest.approx(snr, abs=1e-3)
    assert row.worst_steps == pytest.approx(worst, rel=1e-4)


def test_noise_of_nvfp4_experts_is_against_their_exact_weights(built):
    out, source = built(NVFP4, "--bits", "8"), mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors"))
    row = next(r for r in verify(out, NVFP4).layers if (r.family, r.layer) == ("routed experts", 3))
    fused, down = (np.array(source[f"model.layers.3.moe.experts.{name}"]) for name in ("gate_up_proj", "down_proj"))
    base = "model.layers.3.mlp.switch_mlp."
    exact = {f"{base}gate_proj": fused[:, :64], f"{base}up_proj": fused[:, 64:], f"{base}down_proj": down}
    snr, worst = noise_and_steps(load(out), exact, 8)
    assert row.snr_db == pytest.approx(snr, abs=1e-3)
    assert row.worst_steps == pytest.approx(worst, rel=1e-4)


def converted(source: Path, mtp: str, out: Path, recipe: str = "4.5bit") -> Build:
    """A build made in this process."""
    job = pipeline.prepare(str(source), recipe, mtp)
    with job.checkpoint:
        pipeline.convert(job, out, lambda *_: None)
    return Build(out)


@pytest.mark.parametrize(
    ("source", "recipe", "policy"),
    [
        ("small", "8bit", "bf16"),
        (TINY, "4.5bit", "8"),
        (DEMO, "bf16", "4.5"),
        (TINY, "8bit", "drop"),
        (DEMO, "8bit", "fp16"),
    ],
)
def test_every_policy_for_the_head(small, tmp_path, source, recipe, policy):
    source = small if source == "small" else source
    build = converted(source, policy, tmp_path / "out", recipe)
    result = verify(build.folder, source)
    assert result.passed, result
    assert [f.family for f in result.families].count("MTP head") == (policy != "drop")
    if policy != "drop":
        build["mtp.final_layernorm.weight"][9] ^= 128
        (found,) = verify(build.seal().folder, source).offenders
        assert (found.tensor, found.row, found.group) == ("mtp.final_layernorm.weight", 0, 4)


def write_floats(folder: Path, config: dict, weights: dict[str, np.ndarray], dtype: str) -> Path:
    """A checkpoint of one shard in F16 or F32, or of raw BF16 bits."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {n: (dtype, w.shape, w.tobytes()) for n, w in weights.items()})
    return folder


def floats(kind: str) -> dict[str, np.ndarray]:
    return {
        n: (w.astype(np.uint32) << 16).view(np.float32).astype(kind) for n, w in random_weights(SMALL_CONFIG).items()
    }


def test_float32_source_and_a_head_rounded_to_float16(tmp_path):
    """Ties, subnormals, values that vanish and both zeros, so that rounding is more than cutting off."""
    weights = floats("f4")
    rng = np.random.default_rng(0)
    for name in (n for n in weights if ".mtp_layers." in n):
        w = weights[name].reshape(-1)
        w *= 2.0 ** rng.integers(-20, 3, w.size).astype("f4")
        near = w.astype(np.float16).astype("f4")
        tie = (near + np.nextafter(near.astype(np.float16), np.float16(9)).astype("f4")) / 2
        w[::3] = tie[::3]
        w[:3] = [0.0, -0.0, 2.0**-25][: w.size]
    source = write_floats(tmp_path / "source", SMALL_CONFIG, weights, "F32")
    result = verify(converted(source, "fp16", tmp_path / "out").folder, source)
    assert result.passed, result
    head = next(f for f in result.families if f.family == "MTP head")
    assert 60 < head.snr_db < 80  # float16 keeps 11 bits: 6.02 * 11 + 5 or so


def test_float16_source_and_a_head_rounded_to_bfloat16(tmp_path):
    source = write_floats(tmp_path / "source", SMALL_CONFIG, floats("f2"), "F16")
    build = converted(source, "bf16", tmp_path / "out")
    result = verify(build.folder, source)
    assert result.passed, result
    build["mtp.input_proj.weight"][130] ^= 1  # value 65, of 128 a row
    (found,) = verify(build.seal().folder, source).offenders
    assert (found.tensor, found.expert, found.row, found.group) == ("mtp.input_proj.weight", None, 0, 65)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_any_finite_bits_can_be_verified(tmp_path, dtype):
    """Matrices of random bits: zeros of both signs, subnormals, groups that overflow."""
    rng = np.random.default_rng(1)
    infinity, odd = {"BF16": (0x7F80, 0x80), "F16": (0x7C00, 0x400), "F32": (0x7F800000, 0x800000)}[dtype]
    bits = np.uint32 if dtype == "F32" else np.uint16
    weights = random_weights(SMALL_CONFIG) if dtype == "BF16" else floats("f4" if dtype == "F32" else "f2")
    for name, w in weights.items():
        if w.ndim > 1:
            x = weights[name] = rng.integers(0, np.iinfo(bits).max, w.shape, bits, endpoint=True)
            x[x & infinity == infinity] ^= odd  # the exponent below: the largest of finite numbers
    source = write_floats(tmp_path / "source", SMALL_CONFIG, weights, dtype)
    result = verify(converted(source, "4.5", tmp_path / "out").folder, source)
    assert result.passed, result
    json.dumps(result.as_dict(), allow_nan=False)
    assert all(f.worst_steps is None or 0.4 < f.worst_steps < 3 for f in result.families)


# --- faults in the contents ---


@pytest.mark.parametrize(
    ("tensor", "byte", "bit", "place"),
    [
        (f"{GATE}.weight", (3 * 128 + 17) * 32 + 9, 2, (3, 17, 0)),  # 64 codes of 4 bits a row
        (f"{DOWN}.scales", (4 * 64 + 63) * 4 + 2, 0, (4, 63, 1)),  # 2 groups of 2 bytes a row
        (f"{UP}.biases", 1, 7, (0, 0, 0)),
        ("model.layers.0.self_attn.wo.weight", 5 * 384 + 100, 0, (None, 5, 1)),  # 384 codes of 8 bits a row
        (ROUTER, 4 * 128 + 2 * 63, 0, (None, 4, 63)),
        ("model.layers.1.mlp.switch_mlp.act_fn.weight", 2 * 6 + 4, 3, (2, 0, 2)),  # 3 values an expert
        ("model.norm.weight", 11, 6, (None, 0, 5)),
        ("mtp.input_proj.weight", (7 * 128 + 127) * 2, 0, (None, 7, 127)),
    ],
)
def test_one_flipped_bit_is_named(spoiled, small, tensor, byte, bit, place):
    before = spoiled[tensor][byte]
    spoiled[tensor][byte] ^= 1 << bit
    by_hash = verify(spoiled.folder, small)
    assert "sha256" in by_hash.problems[0]
    result = verify(spoiled.seal().folder, small)
    assert not result.passed
    assert result.problems == []
    (found,) = result.offenders
    assert (found.tensor, (found.expert, found.row, found.group), found.groups) == (tensor, place, 1)
    assert sum(f.differing for f in result.families) == 1
    if spoiled.place[tensor][3] != "U32":
        after = spoiled[tensor][byte]
        assert [f"{before:02X}" in found.expected, f"{after:02X}" in found.found] == [True, True]
    line = str(found)
    assert line.startswith(f"{tensor}, " + (f"expert {place[0]}, row" if place[0] is not None else "row"))
    assert found.expected in line
    assert found.found in line


def test_the_code_that_differs_is_shown(spoiled, small):
    row = spoiled.array(f"{GATE}.weight")[1, 7 * 32 : 8 * 32]
    low, high = int(row[20]) & 15, int(row[20]) >> 4
    row[20] = (low ^ 5) | high << 4
    (found,) = verify(spoiled.seal().folder, small).offenders
    assert (found.expected, found.found) == (f"code {low} at 40", f"{low ^ 5}")


def swap_experts(build: Build) -> dict[str, set]:
    for part in PARTS:
        a = build.array(GATE + part)
        a[[1, 3]] = a[[3, 1]]
    return {GATE + part: {1, 3} for part in PARTS}


def swap_gate_and_up(build: Build) -> dict[str, set]:
    for part in PARTS:
        gate, up = build[GATE + part], build[UP + part]
        gate[:], up[:] = up.copy(), gate.copy()
    return {path + part: set(range(EXPERTS)) for path in (GATE, UP) for part in PARTS}


def shift_rows_by_a_group(build: Build) -> dict[str, set]:
    for part, size in zip(PARTS, (32, 2, 2), strict=True):
        a = build[DOWN + part]
        a[:] = np.roll(a, size)
    return {DOWN + part: set(range(EXPERTS)) for part in PARTS}


def shuffle_rows(build: Build) -> dict[str, set]:
    order = np.random.default_rng(0).permutation(128)
    for part in PARTS:
        a = build.array(UP + part)[2].reshape(128, -1)
        a[:] = a[order]
    return {UP + part: {2} for part in PARTS}


def zero_past_an_offset(build: Build) -> dict[str, set]:
    """As a tensor of over 2^31 elements goes wrong: right up to the middle of an expert, then nothing."""
    for part in PARTS:
        a = build.array(DOWN + part)
        a[3, a.shape[1] // 3 :] = 0
        a[4] = 0
    return {DOWN + part: {3, 4} for part in PARTS}


def repeat_an_expert(build: Build) -> dict[str, set]:
    for part in PARTS:
        a = build.array(GATE + part)
        a[4] = a[3]
    return {GATE + part: {4} for part in PARTS}


def scales_of_the_neighbour(build: Build) -> dict[str, set]:
    build[f"{GATE}.scales"][:] = build[f"{UP}.scales"]
    return {f"{GATE}.scales": set(range(EXPERTS))}


def negate_a_group(build: Build) -> dict[str, set]:
    """Scale and bias with the sign turned round: the range is the same."""
    for part in PARTS[1:]:
        build.array(DOWN + part)[2, 1] ^= 0x80
    return {DOWN + part: {2} for part in PARTS[1:]}


def cut_to_fp8(build: Build) -> dict[str, set]:
    """3 bits of mantissa left of 7."""
    build[ROUTER].view("<u2")[:] &= 0xFFF0
    return {ROUTER: {None}}


def head_of_another_dtype(build: Build) -> dict[str, set]:
    """The bits of BF16 where float16 is said to be."""
    name = "mtp.self_attn.wo.weight"
    a = build[name].view("<u2")
    a[:] = (a.view(np.float16).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {name: {None}}


FAULTS = (
    *(swap_experts, swap_gate_and_up, shift_rows_by_a_group, shuffle_rows, zero_past_an_offset, repeat_an_expert),
    *(scales_of_the_neighbour, negate_a_group, cut_to_fp8, head_of_another_dtype),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_what_is_only_plausible_is_found(spoiled, small, fault):
    expected = fault(spoiled)
    result = verify(spoiled.seal().folder, small)
    assert result.problems == []
    assert not result.passed
    assert named(result) == expected
    assert result.offenders_total == sum(map(len, expected.values()))
    errors = [o.error for o in result.offenders]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("part", "byte", "place"),
    [
        (".weight", (5 * 64 + 33) * 64 + 63, (5, 33, 7)),  # 128 codes of 4 bits a row, 8 a group
        (".scales", (2 * 64 + 1) * 8 + 6, (2, 1, 6)),
        (".global_scale", 7 * 4, (7, None, None)),
    ],
)
def test_nvfp4_experts(copy, part, byte, place):
    build = copy(NVFP4)
    path = "model.layers.3.mlp.switch_mlp.up_proj"
    build[path + part][byte] ^= 1
    result = verify(build.seal().folder, NVFP4)
    (found,) = result.offenders
    assert (found.tensor, (found.expert, found.row, found.group)) == (path + part, place)


def test_nvfp4_experts_decoded(copy):
    build = copy(NVFP4, "--recipe", "bf16")
    name = "model.layers.3.mlp.switch_mlp.up_proj.weight"  # [8, 64, 128]
    build[name][((6 * 64 + 2) * 128 + 77) * 2] ^= 1
    (found,) = verify(build.seal().folder, NVFP4).offenders
    assert (found.tensor, found.expert, found.row, found.group) == (name, 6, 2, 77)


def test_200_random_flipped_bits(copy, small):
    """Drawn over all bits of all tensors; those that fall into different tensors or experts are verified together."""
    build = copy(small, "--keep-mtp-fp16")
    rng = np.random.default_rng(4)
    names = list(build.place)
    sizes = np.array([build.place[n][2] for n in names])
    batches: list[dict] = []
    for at in rng.choice(8 * sizes.sum(), 200, replace=False):
        byte, bit = divmod(int(at), 8)
        index = int(np.searchsorted(np.cumsum(sizes), byte, side="right"))
        name, byte = names[index], byte - int(sizes[:index].sum())
        expert, row, group = where(build, name, byte)
        batch = next((b for b in batches if (name, expert) not in b), None)
        if batch is None:
            batches.append(batch := {})
        batch[name, expert] = (byte, 1 << bit, row, group)
    assert sum(map(len, batches)) == 200
    assert max(map(len, batches)) <= 100
    hits = 0
    for batch in batches:
        for (name, _), (byte, mask, _, _) in batch.items():
            build[name][byte] ^= mask
        result = verify(build.seal().folder, small)
        assert {(o.tensor, o.expert): (o.row, o.group, o.groups) for o in result.offenders} == {
            key: (row, group, 1) for key, (_, _, row, group) in batch.items()
        }
        hits += result.offenders_total
        for (name, _), (byte, mask, _, _) in batch.items():
            build[name][byte] ^= mask
    assert hits == 200
    assert verify(build.seal().folder, small).passed


def where(build: Build, name: str, byte: int) -> tuple[int | None, int, int]:
    """Expert, row and group of a byte of a tensor, from its shape alone."""
    _, _, size, dtype, shape = build.place[name]
    stacked = ".switch_mlp." in name
    experts, *rest = shape if stacked else (1, *shape)
    rows = prod(rest[:-1])
    row_bytes = size // experts // rows
    expert, row = divmod(byte // row_bytes, rows)
    groups = build.place[name.removesuffix(".weight") + ".scales"][4][-1] if dtype == "U32" else rest[-1]
    return (expert if stacked else None), row, byte % row_bytes // (row_bytes // groups)


# --- more than one block ---


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[Path, Path]:
    """A source and its build with tensors of several blocks and slices: embeddings of 10 MB, stacks of 5 MB whose
    blocks reach across experts."""
    folder = tmp_path_factory.mktemp("wide")
    config = SMALL_CONFIG | {"vocab_size": 5000, "hidden_size": 1024, "moe_intermediate_size": 512}
    config |= {"num_hidden_layers": 2, "q_lora_rank": 64, "intermediate_size": 64, "mhc_expansion_rate": 2}
    source = write_checkpoint(folder / "wide-motif3", config, random_weights(config))
    return source, converted(source, "bf16", folder / "out").folder


def test_blocks_and_processes(wide, tmp_path):
    wide, made = wide
    build = Build(Path(shutil.copytree(made, tmp_path / "copy")))
    assert verify(build.folder, wide).passed
    build["lm_head.weight"][4321 * 1024 + 1000] ^= 1  # 8 bits a code
    build[f"{UP}.weight"][(4 * 512 + 511) * 512 + 511] ^= 1  # 4 bits a code
    build[f"{DOWN}.biases"][(2 * 1024 + 600) * 16 + 14] ^= 1  # 8 groups a row
    alone = verify(build.seal().folder, wide, workers=1)
    assert {(o.tensor, o.expert, o.row, o.group) for o in alone.offenders} == {
        ("lm_head.weight", None, 4321, 15),
        (f"{UP}.weight", 4, 511, 15),
        (f"{DOWN}.biases", 2, 600, 7),
    }
    build[f"{UP}.weight"][(2 * 512 + 5) * 512 :: 512][:1000] ^= 1  # the first group of 1,000 rows, to expert 3, row 492
    alone = verify(build.seal().folder, wide, workers=1)
    assert {o.expert: o.groups for o in alone.offenders if o.tensor == f"{UP}.weight"} == {2: 507, 3: 493, 4: 1}
    assert sum(f.differing for f in alone.families) == 1003
    together = verify(build.folder, wide, workers=2)
    assert together.as_dict() == alone.as_dict()


def test_the_source_goes_away(wide, tmp_path):
    source = Path(shutil.copytree(wide[0], tmp_path / "source"))
    with open_checkpoint(source) as checkpoint:
        (source / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors: .* could not be read"):
            verify_repo(wide[1], checkpoint, workers=2)


def test_a_worker_that_is_killed(wide):
    source, out = wide

    def kill(_):
        for worker in multiprocessing.active_children()[:1]:  # none may be left for a second result
            worker.kill()

    with open_checkpoint(source) as checkpoint, pytest.raises(MotifConvertError, match="a worker process was killed"):
        verify_repo(out, checkpoint, workers=2, progress=kill)


SCRIPT = """
import os, time
from motif_convert.validate.pool import results

if __name__ == "__main__":
    with results([(abs, -1)] + [(time.sleep, 100)] * 9, workers=4) as done:  # some still starting
        print("working", next(done), flush=True)
        next(done)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path, how):
    """The workers hold the parent's output open: it ends only when they do."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, script], **pipes) as process:
        assert process.stdout.readline() == "working 1\n"
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: the workers get it too
        else:
            os.kill(process.pid, how)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -how
    assert errors.count("Traceback") == (how == signal.SIGINT)  # the parent's own KeyboardInterrupt


def test_workers_never_see_mlx():
    modules = "import sys, motif_convert.validate.contents; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", modules], capture_output=True, text=True, check=True).stdout.split()
    used = {m for m in found if m.startswith(("mlx", "motif_convert.quantize.kernels", "motif_convert.convert.rows"))}
    assert used == set()


# --- samples ---


@pytest.mark.parametrize("expert", [0, 2, 4])
@pytest.mark.parametrize("path", [GATE, UP, DOWN])
def test_a_sample_has_the_first_the_middle_and_the_last_expert(spoiled, small, path, expert):
    spoiled.array(f"{path}.weight")[expert, -1] ^= 16
    result = verify(spoiled.folder, small, sample=1e-6)
    assert named(result) == {f"{path}.weight": {expert}}
    assert result.sampled < 1


def test_a_sample_is_a_sample(spoiled, small):
    names = [f"{path}.weight" for path in (GATE, UP, DOWN)]
    for name in names:
        spoiled.array(name)[[1, 3], 0] ^= 1
    result = verify(spoiled.folder, small, sample=1e-6)
    assert result.passed
    assert result.hashed == result.files - 1  # all but the shard
    results = [verify(spoiled.folder, small, sample=s) for s in (0.2, 0.8, 0.8, 1.0)]
    assert results[0].sampled < results[1].sampled < 1.0
    assert results[1] == results[2]
    assert results[3].sampled == 1.0
    assert named(results[3]) == {name: {1, 3} for name in names}
    assert any("sha256" in p for p in results[3].problems)


@pytest.mark.parametrize("options", [(), ("--bits", "8")])
def test_a_sample_of_nvfp4(copy, options):
    build = copy(NVFP4, *options)
    assert verify(build.folder, NVFP4, sample=1e-6).passed
    if not options:
        build["model.layers.5.mlp.switch_mlp.down_proj.global_scale"][4 * 7] ^= 1  # of the last of 8 experts
        (found,) = verify(build.folder, NVFP4, sample=1e-6).offenders
        assert (found.expert, found.row, found.groups) == (7, None, 1)
        assert str(found).startswith("model.layers.5.mlp.switch_mlp.down_proj.global_scale, expert 7: expected ")


@pytest.mark.parametrize("sample", [0, -0.1, 1.1, float("nan")])
def test_a_sample_is_a_fraction(built, small, sample):
    with pytest.raises(ValueError, match="sample"):
        verify(built(small, "--keep-mtp-fp16"), small, sample=sample)


# --- faults in the structure ---


def the_shard(build: Build) -> Path:
    return next(build.folder.glob("model*.safetensors"))


def edit_header(build: Build, change) -> None:
    """change(dict of entries) edits the shard's header; data stays."""
    path = the_shard(build)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])


def stale_shard(build):
    write_safetensors(build.folder / "model-00002-of-00002.safetensors", {"old": ("F32", (1,), b"\0" * 4)})


def listed_stale_shard(build):
    """Even where the index and motif-convert.json know it."""
    name = "model-00002-of-00002.safetensors"
    write_safetensors(build.folder / name, {"model.norm.weight": ("BF16", (64,), b"\0" * 128)})
    build.json(PROVENANCE, lambda made: made["files"].update({name: {}}))


def lost_shard(build):
    the_shard(build).unlink()


def cut_shard(build):
    path = the_shard(build)
    os.truncate(path, path.stat().st_size - 1)


def renamed_tensor(build):
    edit_header(build, lambda h: h.update({"mtp.input.weight": h.pop("mtp.input_proj.weight")}))


def other_dtype(build):
    edit_header(build, lambda h: h["mtp.input_proj.weight"].update(dtype="BF16"))


def other_shape(build):
    edit_header(build, lambda h: h[f"{GATE}.weight"].update(shape=[5, 64, 16]))


def index_lacks(build):
    build.json(INDEX, lambda index: index["weight_map"].pop(f"{DOWN}.biases"))


def index_adds(build):
    build.json(INDEX, lambda index: index["weight_map"].update({"model.extra": the_shard(build).name}))


def index_points_elsewhere(build):
    build.json(INDEX, lambda index: index["weight_map"].update({ROUTER: "model-00003-of-00003.safetensors"}))


def index_total(build):
    build.json(INDEX, lambda index: index["metadata"].update(total_size=1))


def index_parameters(build):
    build.json(INDEX, lambda index: index["metadata"].update(total_parameters=1))


def index_is_text(build):
    (build.folder / INDEX).write_text("no index")


def config_key(**change):
    def edit(build):
        build.json("config.json", lambda config: config.update(change))

    edit.__name__ = f"config_{next(iter(change))}_{next(iter(change.values()))}"
    return edit


def both(config: dict, change) -> None:
    for key in ("quantization", "quantization_config"):
        change(config[key])


def entry_missing(build):
    build.json("config.json", lambda c: both(c, lambda q: q.pop(GATE)))


def entry_too_many(build):
    entry = {"group_size": 64, "bits": 8, "mode": "affine"}
    build.json("config.json", lambda c: both(c, lambda q: q.update({"model.layers.1.mlp.gate": entry})))


def entry_of_other_bits(build):
    build.json("config.json", lambda c: both(c, lambda q: q[GATE].update(bits=8)))


def entry_of_the_same_shapes(build):
    """8 bits in groups of 32 pack into the same shapes as 4 in groups of 64."""
    build.json("config.json", lambda c: both(c, lambda q: q[GATE].update(bits=8, group_size=32)))


def dominant_bits(build):
    build.json("config.json", lambda c: both(c, lambda q: q.update(bits=6)))


def quantization_differs(build):
    build.json("config.json", lambda c: c["quantization_config"].update(bits=2))


def no_quantization(build):
    build.json("config.json", lambda c: [c.pop("quantization"), c.pop("quantization_config")])


def no_config(build):
    (build.folder / "config.json").unlink()


def left_partial(build):
    (build.folder / ".model-00001-of-00001.safetensors.partial").write_bytes(b"")


def left_journal(build):
    (build.folder / ".motif-convert.json").write_text("{}")


def unlisted_file(build):
    (build.folder / "pytorch_model.bin").write_bytes(b"")


def unlisted_motif(build):
    build.json(PROVENANCE, lambda made: made["files"].pop("motif.py"))


def other_recipe(build):
    build.json(PROVENANCE, lambda made: made["recipe"]["rules"][0].update(bits=3))


def unusable_recipe(build):
    build.json(PROVENANCE, lambda made: made["recipe"]["rules"].pop())


def strange_recipe(build):
    build.json(PROVENANCE, lambda made: made["recipe"]["rules"][0].update(bits="four"))


def fractional_recipe(build):
    build.json(PROVENANCE, lambda made: made["recipe"]["rules"][0].update(bits=4.0))


def entry_of_nonsense(build):
    build.json("config.json", lambda c: both(c, lambda q: q[GATE].update(bits=[4], mode={}, group_size=None)))


def key_of_nothing(build):
    build.json("config.json", lambda c: c.update(extra=None))


def name_of_two_lines(build):
    edit_header(build, lambda h: h.update({"mtp.\ninput": h.pop("mtp.input_proj.weight")}))


def other_policy(build):
    build.json(PROVENANCE, lambda made: made["mtp"].update(policy="bf16"))


def unknown_policy(build):
    build.json(PROVENANCE, lambda made: made["mtp"].update(policy=["fp16"]))


def other_plan(build):
    build.json(PROVENANCE, lambda made: made.update(plan_hash="0" * 64))


def other_size(build):
    build.json(PROVENANCE, lambda made: made.update(total_bytes=1))


def provenance_is_text(build):
    (build.folder / PROVENANCE).write_text("{")


def provenance_of_the_future(build):
    build.json(PROVENANCE, lambda made: made.update(format=2))


def provenance_without_files(build):
    build.json(PROVENANCE, lambda made: made.pop("files"))


STRUCTURE = [
    (stale_shard, "model-00002-of-00002.safetensors: a stray shard"),
    (listed_stale_shard, "model.norm.weight: in both model-00001-of-00001.safetensors and model-00002-of-00002"),
    (lost_shard, "model-00001-of-00001.safetensors: missing"),
    (cut_shard, "model-00001-of-00001.safetensors: cut off"),
    (renamed_tensor, "mtp.input_proj.weight: not in model-00001-of-00001.safetensors"),
    (renamed_tensor, "mtp.input.weight: in model-00001-of-00001.safetensors, where the plan has no such tensor"),
    (other_dtype, "mtp.input_proj.weight: BF16 [64, 128]"),
    (other_dtype, "mtp_dtype is 'float16', the tensors mtp.* are bfloat16, float16"),
    (other_shape, f"{GATE}.weight: U32 [5, 64, 16]"),
    (index_lacks, f"{INDEX}: lacks {DOWN}.biases"),
    (index_adds, f"{INDEX}: model.extra: not in model-00001"),
    (index_points_elsewhere, f"{INDEX}: {ROUTER}: in model-00003-of-00003.safetensors"),
    (index_total, "total_size is 1"),
    (index_parameters, "total_parameters is 1"),
    (index_is_text, f"{INDEX}: not valid JSON"),
    (config_key(rope_theta=1.0), "config.json: rope_theta is 1.0, source and recipe give 5000.0"),
    (config_key(extra=True), "config.json: extra is true"),
    (config_key(route_norm=1), "config.json: route_norm is 1, source and recipe give true"),
    (config_key(model_file="evil.py"), 'config.json: model_file is "evil.py"'),
    (config_key(torch_dtype="float16"), "config.json: torch_dtype is 'float16', model.norm.weight is BF16"),
    (config_key(mtp_dtype="bfloat16"), "config.json: mtp_dtype is 'bfloat16', the tensors mtp.* are float16"),
    (config_key(mtp_compute_dtype="float16"), "config.json: mtp_compute_dtype is 'float16'"),
    (config_key(num_nextn_predict_layers=0), "config.json: num_nextn_predict_layers is 0, the shards have 19"),
    (config_key(num_nextn_predict_layers="1"), "config.json: num_nextn_predict_layers is '1'"),
    (config_key(quantization=[]), "config.json: quantization is []"),
    (config_key(quantization_config=None), "config.json: quantization_config is not equal to quantization"),
    (entry_missing, f"config.json: quantization has no entry for {GATE}, which has .scales"),
    (entry_too_many, "config.json: quantization has an entry for model.layers.1.mlp.gate, which has no .scales"),
    (entry_of_other_bits, f"config.json: quantization calls {GATE} affine 8-bit, group 64; its shapes"),
    (entry_of_the_same_shapes, f"config.json: quantization.{GATE} is "),
    (dominant_bits, "config.json: quantization says affine 6-bit, group 64 for the whole, most parameters have affine"),
    (quantization_differs, "config.json: quantization_config is not equal to quantization"),
    (no_quantization, "config.json: quantization is None, with"),
    (no_config, "config.json: missing"),
    (left_partial, ".model-00001-of-00001.safetensors.partial: left over"),
    (left_journal, ".motif-convert.json: the journal of a conversion that has not finished"),
    (unlisted_file, "pytorch_model.bin: not listed"),
    (unlisted_motif, f"{PROVENANCE}: does not list motif.py"),
    (other_recipe, f"{PROVENANCE}: plan_hash is "),
    (other_recipe, f"{GATE}.weight: U32 [5, 128, 8] in model-00001-of-00001.safetensors, the plan has U32 [5, 128, 6]"),
    (unusable_recipe, f"{PROVENANCE}: its recipe can't be planned again: recipe {PROVENANCE} does not fit"),
    (strange_recipe, f"{PROVENANCE}: is not what motif-convert writes (bits 'four' is not one of"),
    (fractional_recipe, f"{PROVENANCE}: is not what motif-convert writes (rule 1 of its recipe"),
    (entry_of_nonsense, f"config.json: quantization calls {GATE} '{{}}'"),
    (key_of_nothing, "config.json: extra is null, source and recipe give absent"),
    (name_of_two_lines, "mtp. input: in model-00001-of-00001.safetensors, where the plan has no such tensor"),
    (other_policy, f"{PROVENANCE}: plan_hash is "),
    (other_policy, "mtp.input_proj.weight: F16 [64, 128] in model-00001-of-00001.safetensors, the plan has BF16"),
    (unknown_policy, f"{PROVENANCE}: mtp policy ['fp16'] is not known"),
    (other_plan, f"{PROVENANCE}: plan_hash is '0000"),
    (other_size, f"{PROVENANCE}: total_bytes is 1"),
    (provenance_is_text, f"{PROVENANCE}: not valid JSON"),
    (provenance_of_the_future, f"{PROVENANCE}: format 2"),
    (provenance_without_files, f"{PROVENANCE}: is not what motif-convert writes (no 'files')"),
]


@pytest.mark.parametrize(("fault", "text"), STRUCTURE, ids=lambda v: getattr(v, "__name__", None))
def test_a_structure_that_does_not_fit_is_named(spoiled, small, fault, text):
    fault(spoiled)
    if not fault.__name__.startswith(("provenance", "lost", "no_config")):
        spoiled.seal()
    result = verify(spoiled.folder, small)
    assert not result.passed
    assert any(text in line for line in result.problems), result.problems
    assert not any("\n" in line for line in result.problems)
    assert result.offenders == []
    json.dumps(result.as_dict(), allow_nan=False)


# --- files ---


def test_every_file_may_be_damaged(spoiled, small):
    """Cut, emptied, of random bytes, a folder, a link to nothing: each is found, none raises."""
    damages = (
        lambda path, data: path.write_bytes(data[: len(data) // 2]),
        lambda path, data: path.write_bytes(b""),
        lambda path, data: path.write_bytes(np.random.default_rng(0).bytes(len(data))),
        lambda path, data: path.mkdir(),
        lambda path, data: path.symlink_to("nothing"),
    )
    for path in sorted(spoiled.folder.iterdir()):
        data = path.read_bytes()
        for damage in damages:
            path.unlink()
            damage(path, data)
            result = verify(spoiled.folder, small)
            assert not result.passed
            assert any(path.name in line for line in result.problems)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.write_bytes(data)
    assert verify(spoiled.folder, small).passed


@pytest.mark.parametrize("name", ["motif.py", "README.md"])
def test_an_edited_file(spoiled, small, name):
    path = spoiled.folder / name
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    *more, problem = verify(spoiled.folder, small).problems
    assert problem.startswith(f"{name}: sha256 is ")
    assert len(more) == (name == "motif.py")


def test_another_motif_py_that_calls_itself_the_build_s(spoiled, small):
    """What loaders run is known, whatever motif-convert.json says of it; and nothing else may be listed."""
    made = json.loads((spoiled.folder / PROVENANCE).read_text())
    for name, content in (("motif.py", b"print('mine')\n"), ("tokenization.py", b"print(1)\n")):
        (spoiled.folder / name).write_bytes(content)
        made["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (spoiled.folder / PROVENANCE).write_text(json.dumps(made))
    problems = verify(spoiled.folder, small).problems
    assert any(p.startswith("motif.py: not the file of this version") for p in problems)
    assert any("lists tokenization.py, which is no file of a build" in p for p in problems)


def test_files_that_others_leave_are_no_fault(spoiled, small):
    for name in (".gitattributes", ".DS_Store", "validation.json", "validation.png"):
        (spoiled.folder / name).write_text("{}")
    for name in (".git", ".cache", "__pycache__"):
        (spoiled.folder / name).mkdir()
    compile_file(spoiled.folder / "motif.py", invalidation_mode=PycInvalidationMode.TIMESTAMP)
    assert verify(spoiled.folder, small).passed


@pytest.mark.parametrize("mode", [PycInvalidationMode.UNCHECKED_HASH, PycInvalidationMode.CHECKED_HASH])
def test_compiled_files_that_python_does_not_leave(spoiled, small, mode):
    """It would run them, though `motif.py` is another."""
    compile_file(spoiled.folder / "motif.py", invalidation_mode=mode)
    (problem,) = verify(spoiled.folder, small).problems
    assert "__pycache__/motif." in problem
    assert "remove it" in problem


def test_copied_files_are_the_sources(copy):
    build = copy(NVFP4)
    build.json("generation_config.json", lambda config: config.update(temperature=9))
    problems = verify(build.seal().folder, NVFP4).problems
    assert problems == ["generation_config.json: not the source's, byte for byte"]


def test_an_entry_without_its_global_scale(copy):
    build, path = copy(NVFP4), "model.layers.3.mlp.switch_mlp.up_proj"
    build.json("config.json", lambda c: both(c, lambda q: q[path].pop("global_scale")))
    problems = verify(build.seal().folder, NVFP4).problems
    assert problems == [
        f'config.json: quantization calls {path} nvfp4 4-bit, group 16; the entry lacks "global_scale": true'
    ]


# --- another source, no build ---


def test_another_source(built, small):
    result = verify(built(small, "--keep-mtp-fp16"), TINY)
    assert not result.passed
    digest = hashlib.sha256((TINY / "config.json").read_bytes()).hexdigest()
    assert any(p.startswith(f"tiny-motif3: another source: config.json has sha256 {digest}") for p in result.problems)
    assert any("nothing was compared" in p for p in result.problems)
    assert (result.sampled, result.offenders, result.plan_hash) == (0, [], None)


def test_another_source_of_the_same_shapes(built, small, tmp_path):
    """The same config and index; only the weights tell, and all that was random differs."""
    other = write_checkpoint(tmp_path / "other", SMALL_CONFIG, random_weights(SMALL_CONFIG, seed=1))
    result = verify(built(small, "--keep-mtp-fp16"), other)
    (problem,) = result.problems
    assert "mtp.casts" in problem, "the other head loses other values to float16"
    assert all(f.differing > 0.9 * f.groups for f in result.families if f.family != "norms")
    assert result.offenders_total > len(result.offenders) == 100


def test_no_build(small, tmp_path):
    with pytest.raises(SourceError, match="no such folder"):
        verify(tmp_path / "nothing", small)
    with pytest.raises(SourceError, match="not a build of motif-convert"):
        verify(tmp_path, small)
    with pytest.raises(SourceError, match="not a build of motif-convert"):
        verify(small, small)


def test_an_unfinished_build(spoiled, small):
    shutil.copy(spoiled.folder / PROVENANCE, spoiled.folder / ".motif-convert.json")
    result = verify(spoiled.folder, small)
    assert not result.passed
    assert any("has not finished" in p for p in result.problems)
    (spoiled.folder / PROVENANCE).unlink()
    with pytest.raises(SourceError, match="an unfinished build; run the command that makes it again"):
        verify(spoiled.folder, small)


# --- the arithmetic ---


def test_rounding_is_that_of_numpy():
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    rng = np.random.default_rng(0)
    x = np.concatenate([every, rng.integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)])
    halves = np.concatenate([x, (np.arange(1 << 16, dtype=np.uint16).view(np.float16)).astype(np.float32)])
    ties = halves.view(np.uint32) & 0xFFFFF000 | 0x1000
    x = np.concatenate([halves, ties.view(np.float32), (ties + 1).view(np.float32)])
    x = x[~np.isnan(x)]
    with np.errstate(all="ignore"):
        half = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(round_to(x, "F16"), half)
    assert np.array_equal(round_to(x, "BF16"), np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16)))
    assert np.array_equal(round_to(x, "F32"), x.view(np.uint32))
    assert np.isnan(round_to(np.array([np.nan], "f4"), "F16").view(np.float16))[0]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_bound_holds_and_is_tight(bits, dtype):
    """The quantizer's codes are within it, and nearly use it up; a group with a wrong code is not within it."""
    rng = np.random.default_rng(bits)
    x = (rng.standard_normal((64, 256)) * 10.0 ** rng.uniform(-3, 2, (64, 1))).astype("f4")
    raw = {"BF16": round_to(x, "BF16"), "F16": x.astype("f2"), "F32": x}[dtype]
    exact = (raw.astype(np.uint32) << 16).view("f4") if dtype == "BF16" else raw.astype("f4")
    stored = tuple(Part("", d, Path(), 0, 1) for d in ("U32", dtype, dtype))
    how = Quantized("affine", bits, 64)
    module = Comparison("", None, how, dtype, stored, (), (64, 256), 1, 64, 256, 64, 0, False)
    made = affine_quantize(raw, bits, 64, dtype)
    unsigned = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}[dtype]
    found = [made[0], *(a.view(unsigned) for a in made[1:])]
    error = decoded_error(module, Expected(found, exact, exact), found)
    assert 0.5 < error.share <= 1
    assert error.shares is None
    worse = [(made[0] ^ np.uint32(1 << bits - 1)), *found[1:]]  # the high bit of the first code of each word
    assert decoded_error(module, Expected(found, exact, exact), worse).share > 1


def test_a_look_at_another_source_takes_nothing_from_a_whole_verification(built, small, tmp_path):
    """It fails and says so, and the picture of a build that was never compared does not speak of equal bits."""
    out = tmp_path / "out"
    shutil.copytree(built(small), out)
    other = REFERENCE / "tiny-motif3"
    assert motif_convert("verify", out, "--source", other).returncode == 1
    assert not json.loads((out / "validation.json").read_text())["passed"]
    assert motif_convert("verify", out, "--source", small).returncode == 0
    whole = (out / "validation.json").read_bytes()
    for options in (("--source", other), ("--source", small, "--sample", 0.01)):
        result = motif_convert("verify", out, *options)
        assert "keeps the whole verification" in result.stderr
        assert (out / "validation.json").read_bytes() == whole


def test_the_picture_says_when_nothing_was_compared(monkeypatch):
    said = []
    monkeypatch.setattr(evidence, "_nothing", lambda axes, text: said.append(text))
    evidence._draw_error(Figure().subplots(), {"sampled": 0, "passed": False, "layers": [], "families": []})
    assert said == ["nothing was compared"]
