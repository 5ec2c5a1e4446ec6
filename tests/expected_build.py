"""Builds, and what has to be in them, worked out from the source by other means."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, read_safetensors
from motif_convert.recipes.cli import cli

TINY, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "demo-motif3"
SOURCES = ("tiny", "demo", "small")
RECIPES = ("4.5bit", "8bit", "bf16")
POLICIES = ("fp16", "bf16", "8", "4.5", "drop")
GROUP = 64
ELEMENT = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4}
RAW = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
# Section 5 of the format's description: source name -> MLX names. What is not here keeps its name.
RENAMED = (
    (r"^(.*)\.moe\.router\.gate\.weight$", [r"\1.mlp.gate.weight"]),
    (r"^(.*)\.moe\.expert_bias$", [r"\1.mlp.gate.expert_bias"]),
    (
        r"^(.*)\.moe\.experts\.gate_up_proj$",
        [r"\1.mlp.switch_mlp.gate_proj.weight", r"\1.mlp.switch_mlp.up_proj.weight"],
    ),
    (r"^(.*)\.moe\.experts\.down_proj$", [r"\1.mlp.switch_mlp.down_proj.weight"]),
    (r"^(.*)\.moe\.experts\.act_fn\.(weight|bias)$", [r"\1.mlp.switch_mlp.act_fn.\2"]),
    (r"^(.*)\.moe\.shared_experts\.(.*)$", [r"\1.mlp.shared_experts.\2"]),
    (r"^model\.mtp_layers\.0\.(.*)$", [r"mtp.\1"]),
)


MATRIX = re.compile(
    r"(wq_a|wq_b|wq_b_gate|wkv_a|wkv_b|wo|gate_proj|up_proj|down_proj|input_proj|embed_tokens|lm_head)\.weight$"
)


def mlx_names(source: str) -> list[str]:
    for pattern, names in RENAMED:
        if found := re.match(pattern, source):
            return [found.expand(name) for name in names]
    return [source]


def bits(name: str, recipe: str, mtp: str) -> int | None:
    """Bits of a tensor's codes, or None if it is not quantized."""
    if not MATRIX.search(name):
        return None
    if name.startswith("mtp."):
        return {"8": 8, "4.5": 4}.get(mtp)
    return {"4.5bit": 4 if ".switch_mlp." in name else 8, "8bit": 8, "bf16": None}[recipe]


def as_float32(dtype: str, data: bytes) -> np.ndarray:
    raw = np.frombuffer(data, RAW[dtype])
    return (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else raw.astype(np.float32)


def quantized(name: str, dtype: str, shape: tuple, data: bytes, count: int) -> dict[str, tuple]:
    """The three tensors that mlx makes of a whole source tensor; two arrays are not compared but bytes."""
    w = mx.array(np.frombuffer(data, RAW[dtype]).reshape(shape))
    w = w.view(mx.bfloat16) if dtype == "BF16" else w
    made = {}
    for part, x in zip(
        ("weight", "scales", "biases"), mx.quantize(w, group_size=GROUP, bits=count, stream=mx.cpu), strict=True
    ):
        x = np.array(x.view(mx.uint16, stream=mx.cpu) if x.dtype == mx.bfloat16 else x)
        made[part] = ("U32" if part == "weight" else dtype, x)
    names = mlx_names(name)
    return {
        target.removesuffix("weight") + part: (kind, half.shape, half.tobytes())
        for part, (kind, x) in made.items()
        for target, half in zip(names, np.split(x, len(names), axis=-2), strict=True)
    }


CASTS = {  # by numpy, and by mlx where numpy lacks the dtype
    "fp16": ("F16", lambda x: x.astype(np.float16)),
    "bf16": ("BF16", lambda x: np.array(mx.array(x).astype(mx.bfloat16, stream=mx.cpu).view(mx.uint16, stream=mx.cpu))),
}


def expected_tensors(source: dict[str, tuple], recipe: str, mtp: str) -> dict[str, tuple]:
    tensors = {}
    for name, (dtype, shape, data) in source.items():
        targets = mlx_names(name)
        head = targets[0].startswith("mtp.")
        if head and mtp == "drop":
            continue
        if count := bits(targets[0], recipe, mtp):
            tensors |= quantized(name, dtype, shape, data, count)
            continue
        if head and mtp in CASTS:
            dtype, data = CASTS[mtp][0], CASTS[mtp][1](as_float32(dtype, data)).tobytes()
        elements = np.frombuffer(data, f"V{ELEMENT[dtype]}").reshape(shape)
        halves = [elements] if len(targets) == 1 else np.split(elements, len(targets), axis=-2)
        tensors |= {t: (dtype, h.shape, h.tobytes()) for t, h in zip(targets, halves, strict=True)}
    return tensors


def differing(found: dict[str, tuple], expected: dict[str, tuple]) -> list[str]:
    """Names of the tensors that are not the same, so that a failure prints these and not megabytes."""
    return [name for name in sorted(found | expected) if found.get(name) != expected.get(name)]


@dataclass(frozen=True)
class Build:
    source: Path
    out: Path
    recipe: str
    mtp: str

    @functools.cached_property
    def tensors(self) -> dict[str, tuple]:
        return read_safetensors(self.out)

    @functools.cached_property
    def modules(self) -> dict[str, dict]:
        """Each quantized module's entry, from the shapes of its tensors on disk."""
        entries = {}
        for name, (_, shape, _) in self.tensors.items():
            if name.endswith(".scales"):
                path = name.removesuffix(".scales")
                count = 32 * self.tensors[path + ".weight"][1][-1] // (GROUP * shape[-1])
                entries[path] = {"group_size": GROUP, "bits": count, "mode": "affine"}
        return entries

    def json(self, name: str = "config.json") -> dict:
        return json.loads((self.out / name).read_text())


def convert(source: Path, out: Path, *options: str) -> None:
    cli.main(["convert", "--source", str(source), "--out", str(out), *options], standalone_mode=False)


@pytest.fixture(
    scope="module",
    params=[(s, r, m) for s in SOURCES for r in RECIPES for m in POLICIES],
    ids=lambda p: " ".join(p),
)
def every_build(request, tmp_path_factory, small) -> Build:
    name, recipe, mtp = request.param
    source = {"tiny": TINY, "demo": DEMO, "small": small}[name]
    out = tmp_path_factory.mktemp("repo") / "out"
    convert(source, out, "--recipe", recipe, "--mtp", mtp)
    return Build(source, out, recipe, mtp)


def read_header(path: Path) -> dict:
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def assert_shards_have_mlx_metadata_and_aligned_tensors(build: Build) -> None:
    for path in build.out.glob("*.safetensors"):
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        header = read_header(path)
        assert header.pop("__metadata__") == {"format": "mlx"}
        assert start % 8 == 0
        assert [n for n, t in header.items() if (start + t["data_offsets"][0]) % ELEMENT[t["dtype"]]] == []


def assert_config_describes_the_head(build: Build) -> None:
    config = build.json()
    head = {name: dtype for name, (dtype, _, _) in build.tensors.items() if name.startswith("mtp.")}
    assert config["num_nextn_predict_layers"] == bool(head)
    unpacked = bool(head) and not any(name.endswith(".scales") for name in head)
    named = {"float16": "F16", "bfloat16": "BF16"}
    assert ("mtp_dtype" in config) is ("mtp_compute_dtype" in config) is unpacked
    if unpacked:
        assert {named[config["mtp_dtype"]]} == set(head.values())
        assert named[config["mtp_compute_dtype"]] == build.tensors["model.norm.weight"][0]
    assert named[config["torch_dtype"]] == build.tensors["model.norm.weight"][0]
