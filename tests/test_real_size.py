"""One layer of the real size, through the installed command."""

import json
import shutil
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import REAL_SIZES, SMALL_CONFIG
from interrupted import headers
from motif_convert.convert.names import entries
from warm import COMMAND

REAL_EXPERTS = (0, 205, 383)  # the first, one from where Metal goes wrong in others' builds, the last
ONE_REAL_LAYER = {"vocab_size": 512, "num_hidden_layers": 1, "n_dense_first_layers": 0, "mhc_expansion_rate": 4}
REAL_CONFIG = SMALL_CONFIG | REAL_SIZES | ONE_REAL_LAYER | {"num_nextn_predict_layers": 0}
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
sys.exit(code)
"""


def expert_weights(name: str, expert: int) -> np.ndarray:
    """BF16 bits [rows, K] of an expert: random, or zeros where nothing was written."""
    rows, width = {"gate_up_proj": (2560, 4096), "down_proj": (4096, 1280)}[name]
    if expert not in REAL_EXPERTS:
        return np.zeros((rows, width), np.uint16)
    rng = np.random.default_rng([expert, rows])
    return rng.integers(0x3800, 0x3D00, (rows, width), np.uint16) | (rng.integers(0, 2, (rows, width), np.uint16) << 15)


def small_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """BF16 bits: norms are 1, matrices random and of unit gain, all else random."""
    if "norm" in name:
        return np.full(shape, 0x3F80, np.uint16)
    rng = np.random.default_rng(shape)
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture
def real_layer(tmp_path) -> Path:
    """12 GB that take little room: a sparse file with three experts in it. It and the build are removed.

    Linux reads holes many times faster from memory than from a disk; 100 MB of it are used.
    """
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 1e9
    source = Path(tempfile.mkdtemp(dir=memory if fits else tmp_path))
    try:
        write_real_layer(source)
        yield source
    finally:
        shutil.rmtree(source)
        shutil.rmtree(tmp_path)


def write_real_layer(source: Path) -> None:
    (source / "config.json").write_text(json.dumps(REAL_CONFIG))
    header, end = {}, 0
    for entry in entries(REAL_CONFIG):
        start, end = end, end + 2 * prod(entry.shape)
        header[entry.source] = {"dtype": "BF16", "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries(REAL_CONFIG):
            if ".experts.gate_up" not in entry.source and ".experts.down" not in entry.source:
                file.seek(8 + len(text) + header[entry.source]["data_offsets"][0])
                file.write(small_values(entry.source, entry.shape).tobytes())
        for name in ("gate_up_proj", "down_proj"):
            (first, _) = header[f"model.layers.0.moe.experts.{name}"]["data_offsets"]
            for expert in REAL_EXPERTS:
                data = expert_weights(name, expert).tobytes()
                file.seek(8 + len(text) + first + expert * len(data))
                file.write(data)
        file.truncate(8 + len(text) + end)


def quantized_expert(name: str, expert: int) -> dict[str, dict[str, bytes]]:
    """What mlx makes of one expert: for gate and up, or for down, the bytes of its three parts."""
    w = mx.array(expert_weights(name, expert)).view(mx.bfloat16)
    parts = mx.quantize(w, group_size=64, bits=4, stream=mx.cpu)
    arrays = [np.array(x if x.dtype == mx.uint32 else x.view(mx.uint16, stream=mx.cpu)) for x in parts]
    made = {}
    for i, projection in enumerate(("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)):
        rows = slice(1280 * i, 1280 * (i + 1)) if name == "gate_up_proj" else slice(None)
        made[projection] = {k: x[rows].tobytes() for k, x in zip(("weight", "scales", "biases"), arrays, strict=True)}
    return made


def memory_of(*args: object) -> int:
    """Bytes that the command takes at most; its exit code is 0."""
    command = [sys.executable, "-c", MEASURE, COMMAND, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1])


def test_layer_of_the_real_size(real_layer, tmp_path):
    """Stacks of over 2^31 elements, in less memory than a tenth of one, and every expert right."""
    out = tmp_path / "out"
    assert memory_of("convert", "--source", real_layer, "--out", out) < 1e9
    (shard,) = out.glob("*.safetensors")
    data = np.memmap(shard, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    places = headers(out)
    expected = {e: quantized_expert("gate_up_proj", e) | quantized_expert("down_proj", e) for e in (1, *REAL_EXPERTS)}
    wrong = []
    for projection, parts in expected[1].items():
        for part in parts:
            place = places[f"model.layers.0.mlp.switch_mlp.{projection}.{part}"]
            first, last = place["data_offsets"]
            stack = data[start + first : start + last].reshape(place["shape"][0], -1)
            for expert, found in enumerate(stack):
                right = expected[expert if expert in REAL_EXPERTS else 1][projection][part]
                if not np.array_equal(found, np.frombuffer(right, np.uint8)):
                    wrong.append((projection, part, expert))
    assert wrong == []

    assert memory_of("eval", out, "--source", real_layer, "--tokens", 510) < 3e9
    (layer,) = json.loads((out / "validation.json").read_text())["eval"]["layers"]
    assert 0 < layer["error"] < 0.2
    assert layer["rerouted"] < 0.1
