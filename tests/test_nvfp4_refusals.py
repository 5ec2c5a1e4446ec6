"""NVFP4 sources whose scales, shapes or marker can't be right; and plans of the real layout."""

import gzip
import json
import shutil
from math import prod
from pathlib import Path

import numpy as np
import pytest
from conftest import REFERENCE, motif_convert
from nvfp4_sources import TINY


def edit(folder: Path, name: str, change) -> None:
    """Changes a tensor's bytes in place: change(uint8 array)."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / weight_map[name]
    path.chmod(0o644)
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    first, last = json.loads(raw[8:start])[name]["data_offsets"]
    data = np.frombuffer(raw[start + first : start + last], "u1").copy()
    change(data)
    raw[start + first : start + last] = data.tobytes()
    path.write_bytes(raw)


def scale_setter(expert: int, value):
    def change(data):
        scales = data.view("<f4")
        scales[expert] = value(scales[expert]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (0.0, "not positive"),
        (-1e-4, "not positive"),
        (np.inf, "finite"),
        (np.nan, "finite"),
        (lambda s: 1 / s, "reciprocal"),
        (lambda s: s * np.float32(1e6), "reciprocal"),
        (lambda s: s * np.float32(1e-6), "reciprocal"),
    ],
)
def test_unusable_expert_scales_are_refused(source, tmp_path, value, word):
    name = "model.layers.4.moe.experts.down_proj_weight_scale_2"
    edit(source, name, scale_setter(5, value))
    result = motif_convert("convert", "--source", source, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert f"{name}: expert 5" in result.stderr
    assert word in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("byte", "word"), [(0x7F, "NaN"), (0xFF, "NaN"), (0xB8, "negative"), (0x80, "negative")])
@pytest.mark.parametrize("options", [(), ("--bits", "8")])
def test_unusable_block_scales_are_refused(source, tmp_path, byte, word, options):
    name = "model.layers.3.moe.experts.gate_up_proj_weight_scale"  # [8, 128, 8]
    edit(source, name, lambda data: data.__setitem__((6 * 128 + 100) * 8 + 3, byte))
    result = motif_convert("convert", "--source", source, *options, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert f"{name}: expert 6, row 100, block 3: {word}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_zero_blocks_are_fine(source, tmp_path):
    edit(source, "model.layers.3.moe.experts.gate_up_proj_weight_scale", lambda data: data.__setitem__(slice(64), 0))
    assert motif_convert("convert", "--source", source, "--out", tmp_path / "out").returncode == 0


def test_marker_without_tensors(tmp_path):
    source = Path(shutil.copytree(REFERENCE / "tiny-motif3", tmp_path / "source"))
    shutil.copyfile(TINY / "config.json", tmp_path / "config.json")
    (tmp_path / "config.json").replace(source / "config.json")
    result = motif_convert("plan", "--source", source)
    assert result.returncode == 2
    assert "config.json: quantization_config says modelopt_nvfp4, but there are no" in result.stderr


def test_tensors_without_marker(source):
    (source / "config.json").unlink()
    shutil.copyfile(REFERENCE / "tiny-motif3" / "config.json", source / "config.json")
    result = motif_convert("plan", "--source", source)
    assert result.returncode == 2
    assert "config.json has no quantization_config" in result.stderr


def test_a_scale_of_another_shape_is_refused(source):
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.2.moe.experts.down_proj_weight_scale"  # [8, 128, 4]
    path = source / index[name]
    path.chmod(0o644)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header[name]["shape"] = [8, 64, 8]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    result = motif_convert("plan", "--source", source)
    assert result.returncode == 2
    assert f"{name}: shape [8, 64, 8]" in result.stderr


def test_plan_of_the_real_layout_is_exact(real_config, tmp_path):
    """Headers derived from the inventory: 2,440 tensors, 186,891,034,892 payload bytes (the published sizes)."""
    source = tmp_path / "Motif-3-NVFP4"
    source.mkdir()
    shards: dict[str, dict] = {}
    expected = 0
    inventory = gzip.decompress((REFERENCE / "motif3-inventory.tsv.gz").read_bytes()).decode().splitlines()[1:]
    for name, _, size, shard in (line.split("\t") for line in inventory):
        shape = [int(n) for n in size.split("x")]
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            experts, rows, width = shape
            shards.setdefault(shard, {})[name] = ("U8", [experts, rows, width // 2], 1)
            other = f"model-{(hash_of(name) % 155) + 1:05d}-of-00155.safetensors"
            shards.setdefault(other, {})[f"{name}_weight_scale"] = ("F8_E4M3", [experts, rows, width // 16], 1)
            shards.setdefault(shard, {})[f"{name}_weight_scale_2"] = ("F32", [experts], 4)
            # codes and block scales as they are, the global scale once for each half of a fused stack
            expected += experts * rows * (width // 2 + width // 16) + 4 * experts * (1 + name.endswith("gate_up_proj"))
        else:
            shards.setdefault(shard, {})[name] = ("BF16", shape, 2)
            expected += quantized_bytes(name, shape)
    weight_map, payload = {}, 0
    for shard, tensors in shards.items():
        header, end = {}, 0
        for name, (dtype, shape, size) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + size * prod(shape)]}
            weight_map[name] = shard
        text = json.dumps(header).encode()
        with (source / shard).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + end)
        payload += end
    assert (len(weight_map), payload) == (2440, 186_891_034_892)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    marker = {"quantization_config": {"quant_method": "modelopt_nvfp4", "group_size": 16}}
    (source / "config.json").write_text(json.dumps(real_config | marker))

    plan = json.loads(motif_convert("plan", "--source", source, "--json").stdout)
    assert plan["total_bytes"] == expected
    assert plan["total_parameters"] == 314_841_775_750
    assert sum(t["bytes"] for t in plan["tensors"]) == expected


def hash_of(name: str) -> int:
    return sum(name.encode())


def quantized_bytes(name: str, shape: list[int]) -> int:
    """Bytes of a tensor outside the routed experts in the 4.5bit recipe: 8.5 bits a weight, or BF16 as it is."""
    projections = (
        "embed_tokens", "lm_head", "wq_a", "wq_b", "wq_b_gate", "wkv_a", "wkv_b", "wo",
        "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    is_projection = name.split(".")[-2] in projections and ".mtp_layers." not in name
    return prod(shape) + prod(shape) // 64 * 4 if is_projection else 2 * prod(shape)
