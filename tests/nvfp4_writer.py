"""Packs float experts into the vendor's NVFP4 layout; the tests' own, apart from all that reads it."""

import json
from pathlib import Path

import numpy as np
from conftest import read_safetensors, write_safetensors

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def e4m3_values() -> np.ndarray:
    """The 127 finite non-negative E4M3 values, by their bits 0x00 to 0x7E."""
    return np.array([(b & 7) / 8 * 2.0**-6 if b < 8 else (1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 7) for b in range(127)])


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest of an ascending grid, ties to the even index."""
    high = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    low = high - 1
    down, up = values - grid[low], grid[high] - values
    return np.where((down < up) | ((down == up) & (low % 2 == 0)), low, high)


def pack(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float [E, R, K] -> codes uint8 [E, R, K / 2], block scales uint8 [E, R, K / 16], scales float32 [E]."""
    experts, rows, width = weights.shape
    scale = (np.abs(weights).max(axis=(1, 2)) / (448 * 6)).astype(np.float32)
    blocks = weights.astype(np.float64).reshape(experts, rows, width // 16, 16)
    wanted = np.abs(blocks).max(axis=-1) / 6 / scale[:, None, None]
    bits = nearest(np.minimum(wanted, 448), e4m3_values())
    step = e4m3_values()[bits] * scale[:, None, None]
    ratio = np.abs(blocks) / np.where(step == 0, 1, step)[..., None]
    codes = nearest(np.minimum(ratio, 6), MAGNITUDES) | (np.signbit(blocks) << 3)
    codes = np.where(step[..., None] == 0, 0, codes).reshape(experts, rows, width // 2, 2).astype(np.uint8)
    return codes[..., 0] | codes[..., 1] << 4, bits.astype(np.uint8), scale


def unpack(codes: np.ndarray, bits: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The float32 values that a packed stack stands for: exact product, one rounding."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*bits.shape, 16)
    values = MAGNITUDES[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0) * e4m3_values()[bits][..., None]
    product = values.astype(np.float32) * scale.astype(np.float32).reshape(*scale.shape, *(1,) * (values.ndim - 1))
    return product.reshape(*bits.shape[:-1], -1)


def write_nvfp4(source: Path, folder: Path, shards: int = 4, seed: int = 0) -> Path:
    """A BF16 checkpoint as an NVFP4 one, its tensors scattered over the shards at random."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, (dtype, shape, data) in read_safetensors(source).items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            raw = np.frombuffer(data, "<u2").reshape(shape)
            codes, bits, scale = pack((raw.astype(np.uint32) << 16).view(np.float32))
            tensors[name] = ("U8", codes.shape, codes.tobytes())
            tensors[f"{name}_weight_scale"] = ("F8_E4M3", bits.shape, bits.tobytes())
            tensors[f"{name}_weight_scale_2"] = ("F32", scale.shape, scale.tobytes())
        else:
            tensors[name] = (dtype, shape, data)
    rng = np.random.default_rng(seed)
    home = {name: int(rng.integers(shards)) for name in tensors}
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = {n: t for n, t in tensors.items() if home[n] == i}
        write_safetensors(folder / shard, mine)
        weight_map |= dict.fromkeys(mine, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt_nvfp4", "group_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    for extra in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / extra).exists():
            (folder / extra).write_bytes((source / extra).read_bytes())
    return folder
