"""The written repository, bit for bit: tensors against mlx and numpy, config.json against them."""

import json
import shutil
from collections import Counter
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from conftest import read_safetensors
from expected_build import (
    DEMO,
    GROUP,
    assert_config_describes_the_head,
    assert_shards_have_mlx_metadata_and_aligned_tensors,
    convert,
    differing,
    expected_tensors,
    read_header,
)

# --- tensors ---


def test_every_tensor(every_build):
    expected = expected_tensors(read_safetensors(every_build.source), every_build.recipe, every_build.mtp)
    assert differing(every_build.tensors, expected) == []


def test_index(every_build):
    index = every_build.json("model.safetensors.index.json")
    assert list(index["weight_map"]) == sorted(every_build.tensors)
    headers = {path.name: read_header(path) for path in every_build.out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == set(headers)
    assert [name for name, shard in index["weight_map"].items() if name not in headers[shard]] == []
    kept = [
        t for t in read_safetensors(every_build.source).items() if every_build.mtp != "drop" or "mtp_layers" not in t[0]
    ]
    assert index["metadata"] == {
        "total_size": sum(len(data) for _, _, data in every_build.tensors.values()),
        "total_parameters": sum(prod(shape) for _, (_, shape, _) in kept),
    }


def test_shards_have_mlx_metadata_and_aligned_tensors(every_build):
    assert_shards_have_mlx_metadata_and_aligned_tensors(every_build)


def test_other_readers_agree(every_build):
    """The safetensors library and mlx find the bytes that the test's own reader finds."""
    (path,) = every_build.out.glob("*.safetensors")
    library = {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for name, t in safetensors.deserialize(path.read_bytes())
    }
    assert differing(library, every_build.tensors) == []
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "mlx"}
        for name in [n for n, (dtype, _, _) in every_build.tensors.items() if dtype != "BF16"]:  # which numpy lacks
            assert file.get_tensor(name).tobytes() == every_build.tensors[name][2]
    loaded = {name: np.array(x.view(mx.uint8, stream=mx.cpu)).tobytes() for name, x in mx.load(str(path)).items()}
    assert differing(loaded, {name: data for name, (_, _, data) in every_build.tensors.items()}) == []


# --- config.json ---


def test_config_describes_the_quantized_modules(every_build):
    config = every_build.json()
    if not every_build.modules:
        assert "quantization" not in config
        assert "quantization_config" not in config
        return
    assert config["quantization"] == config["quantization_config"]
    top = {k: v for k, v in config["quantization"].items() if not isinstance(v, dict)}
    assert {k: v for k, v in config["quantization"].items() if isinstance(v, dict)} == every_build.modules
    weight = Counter()
    for path, entry in every_build.modules.items():
        weight[entry["bits"]] += prod(every_build.tensors[path + ".scales"][1]) * GROUP
    assert top == {"group_size": GROUP, "bits": weight.most_common(1)[0][0], "mode": "affine"}


def test_config_describes_the_head(every_build):
    assert_config_describes_the_head(every_build)


def test_config_keeps_the_source_keys(every_build):
    source, config = json.loads((every_build.source / "config.json").read_text()), every_build.json()
    for key in ("auto_map", "rope_scaling"):
        source.pop(key, None)
        assert key not in config
    for key in ("num_nextn_predict_layers", "torch_dtype"):
        source.pop(key, None)
    assert {k: config.get(k) for k in source} == source
    assert {"rope_factor", "original_seq_len", "mscale", "rope_theta", "swa_rope_theta"} <= set(config)


def test_architecture_file_is_the_one_that_is_tested(every_build):
    assert every_build.json()["model_file"] == "motif.py"
    ours = Path(__file__).resolve().parents[1] / "convert" / "motif.py"
    assert (every_build.out / "motif.py").read_bytes() == ours.read_bytes()


@pytest.mark.parametrize("mtp", ["8", "drop"])
def test_config_carries_nothing_stale(mtp, tmp_path):
    """Keys of an earlier conversion, of another scheme, or of somebody's machine."""
    source = shutil.copytree(DEMO, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    stale = {
        "quantization_config": None,
        "quantization": {},
        "auto_map": {"AutoModel": "modeling_motif.M"},
        "_name_or_path": "/data/checkpoints/step-1000",
        "model_file": "modeling_motif.py",
        "mtp_dtype": "float32",
        "mtp_compute_dtype": "float32",
    }
    (source / "config.json").write_text(json.dumps(config | stale))
    convert(source, tmp_path / "out", "--recipe", "bf16", "--mtp", mtp)
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: v for k, v in made.items() if k in stale and made[k] == stale[k]} == {}
    assert made["model_file"] == "motif.py"
    assert "_name_or_path" not in made
    assert ("quantization" in made) is ("quantization_config" in made) is (mtp == "8")


def test_rope_facts_that_only_rope_scaling_has(tmp_path):
    """They move to the flat keys, since rope_scaling itself has to go."""
    source = shutil.copytree(DEMO, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    scaling = {"factor": 32.0, "original_max_position_embeddings": 2048, "mscale": 0.5, "rope_theta": 5000.0}
    flat = ("rope_factor", "original_seq_len", "mscale", "rope_theta")
    config = {k: v for k, v in config.items() if k not in flat}
    config["rope_scaling"] = {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, **scaling}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", "--recipe", "bf16")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [made[k] for k in flat] == list(scaling.values())
    assert (made["beta_fast"], made["beta_slow"]) == (16.0, 2.0)
    assert "rope_scaling" not in made
