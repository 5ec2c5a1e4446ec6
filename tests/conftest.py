"""What tests share: reference data, checkpoints of any size, and the installed command."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import warm
from motif_convert.convert.names import entries
from motif_convert.quantize.kernels import f32_to_bf16

# Helpers of several test modules that have fixtures.
pytest_plugins = (
    "checkpoints",
    "downloading",
    "expected_build",
    "hub_clients",
    "nvfp4_sources",
    "plans",
    "publishing",
    "spoiled",
)
# Files that take long are begun first, so that no worker is left with one of them in the end.
LONG = (
    "download",
    "download_streamed",
    "real_size",
    "publish",
    "publish_faults",
    "eval",
    "eval_faults",
    "stream",
    "stream_large",
    "ranks",
    "ranks_apart",
    "pipeline",
    "cli",
    "engines",
    "smoke",
    "survival",
    "acceptance",
    "motif_decode",
)
REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"

# A Motif-3 of other proportions than the real one, the tiny and the demo: keys to override as needed.
SMALL_CONFIG = {
    "architectures": ["MotifForCausalLM"],
    "model_type": "Motif",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_noise_heads": 3,
    "head_dim": 40,
    "qk_rope_head_dim": 8,
    "v_head_dim": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "moe_intermediate_size": 128,
    "num_experts": 5,
    "experts_top_k": 3,
    "num_shared_experts": 1,
    "n_dense_first_layers": 1,
    "route_norm": True,
    "route_scale": 1.5,
    "mhc_enabled": True,
    "mhc_expansion_rate": 3,
    "mhc_sinkhorn_iters": 7,
    "polynorm_output_scale": 0.25,
    "polynorm_bias_clamp": 0.3,
    "rms_norm_eps": 1e-5,
    "use_sliding_window": True,
    "sliding_window": 5,
    "sliding_window_pattern": "interleave",
    "sliding_window_period": 2,
    "max_position_embeddings": 4096,
    "original_seq_len": 32,
    "rope_factor": 8.0,
    "mscale": 0.7,
    "rope_theta": 5000.0,
    "swa_rope_theta": 1000.0,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}


# The published sizes of the real Motif-3, under the keys of config.json.
REAL_SIZES = {
    "vocab_size": 220160,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 53,
    "num_attention_heads": 80,
    "num_key_value_heads": 16,
    "num_noise_heads": 16,
    "head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1280,
    "num_experts": 384,
    "experts_top_k": 8,
    "n_dense_first_layers": 2,
    "sliding_window": 128,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """BF16 weights (as uint16) of every tensor that the config describes; norms near 1, matrices scaled."""
    rng = np.random.default_rng(seed)
    weights = {}
    for entry in entries(config):
        x = rng.standard_normal(entry.shape).astype(np.float32)
        x = x / np.float32(entry.shape[-1] ** 0.5) if len(entry.shape) > 1 else x
        weights[entry.source] = f32_to_bf16(1 + 0.1 * x if "norm" in entry.source else x)
    return weights


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple, bytes]]) -> None:
    """A safetensors file from (dtype, shape, bytes); written by hand, apart from the code under test."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def write_checkpoint(
    folder: Path, config: dict, weights: dict[str, np.ndarray], shards: int = 3, dealt: bool = True
) -> Path:
    """A sharded BF16 checkpoint; tensors are dealt round, so that those of a layer lie in different shards, or
    shards follow the layers, as in the real one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    ends = np.cumsum([w.nbytes for w in weights.values()])
    home = (
        np.arange(len(weights)) % shards
        if dealt
        else np.unique((ends - 1) * shards // ends[-1], return_inverse=True)[1]
    )
    shards = int(home.max()) + 1  # fewer where a tensor is larger than a shard would be
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        names = [name for name, where in zip(weights, home, strict=True) if where == i]
        write_safetensors(folder / shard, {n: ("BF16", weights[n].shape, weights[n].tobytes()) for n in names})
        weight_map |= dict.fromkeys(names, shard)
    total = sum(w.nbytes for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_safetensors(folder: Path) -> dict[str, tuple[str, tuple, bytes]]:
    """Every tensor of a folder's model*.safetensors as (dtype, shape, bytes), parsed by hand."""
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), raw[start + first : start + last])
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def motif_convert(*args: object, cwd: Path | None = None, env: dict | None = None) -> subprocess.CompletedProcess:
    """Runs the command, warm where it can be; its output is text."""
    return warm.run(args, environment_with({"HF_HUB_OFFLINE": "1"} | (env or {})), cwd)


def environment_with(changes: dict[str, str | None]) -> dict[str, str]:
    """This process's environment with some variables set, and those that are None taken out."""
    return {k: v for k, v in (os.environ | changes).items() if v is not None}


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A random checkpoint of SMALL_CONFIG."""
    return write_checkpoint(
        tmp_path_factory.mktemp("small") / "small-motif3", SMALL_CONFIG, random_weights(SMALL_CONFIG)
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Converts a source once for all tests: built(source, *options) -> folder."""
    made: dict[tuple, Path] = {}

    def build(source: object, *options: str) -> Path:
        key = (str(source), *options)
        if key not in made:
            out = tmp_path_factory.mktemp("built") / "out"
            result = motif_convert("convert", "--source", source, *options, "--out", out)
            assert result.returncode == 0, result.stderr
            made[key] = out
        return made[key]

    return build


@pytest.fixture(scope="session")
def real_config() -> dict:
    """config.json of the real Motif-3: the tiny one's keys, the published sizes."""
    return json.loads((REFERENCE / "tiny-motif3" / "config.json").read_text()) | REAL_SIZES


@pytest.fixture(scope="session")
def tiny(built):
    """mlx-lm's model of the tiny checkpoint's bf16 build, in float32."""
    from motif_goldens import load

    return load(built(REFERENCE / "tiny-motif3", "--recipe", "bf16"))


@pytest.fixture(scope="session")
def demo(built):
    """The same of the demo checkpoint."""
    from motif_goldens import load

    return load(built(REFERENCE / "demo-motif3", "--recipe", "bf16"))


@pytest.fixture(scope="session")
def architecture(built):
    """The module that a repository carries, for its functions."""
    spec = importlib.util.spec_from_file_location(
        "carried", built(REFERENCE / "tiny-motif3", "--recipe", "bf16") / "motif.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied(built, tmp_path):
    """copied(source, *options): a build to write evidence into, or to damage."""
    return lambda *args: Path(shutil.copytree(built(*args), tmp_path / "build"))
