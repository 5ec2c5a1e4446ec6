"""The written repository, bit for bit: tensors against mlx and numpy, files against what they claim."""

import functools
import getpass
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors
import yaml
from conftest import (
    REFERENCE,
    SMALL_CONFIG,
    contents,
    motif_convert,
    random_weights,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)
from huggingface_hub import ModelCard
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


# --- what has to be written, worked out from the source by other means ---


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


# --- the builds: one process makes them all ---


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
def build(request, tmp_path_factory, small) -> Build:
    name, recipe, mtp = request.param
    source = {"tiny": TINY, "demo": DEMO, "small": small}[name]
    out = tmp_path_factory.mktemp("repo") / "out"
    convert(source, out, "--recipe", recipe, "--mtp", mtp)
    return Build(source, out, recipe, mtp)


# --- tensors ---


def test_every_tensor(build):
    expected = expected_tensors(read_safetensors(build.source), build.recipe, build.mtp)
    assert differing(build.tensors, expected) == []


def read_header(path: Path) -> dict:
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def test_index(build):
    index = build.json("model.safetensors.index.json")
    assert list(index["weight_map"]) == sorted(build.tensors)
    headers = {path.name: read_header(path) for path in build.out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == set(headers)
    assert [name for name, shard in index["weight_map"].items() if name not in headers[shard]] == []
    kept = [t for t in read_safetensors(build.source).items() if build.mtp != "drop" or "mtp_layers" not in t[0]]
    assert index["metadata"] == {
        "total_size": sum(len(data) for _, _, data in build.tensors.values()),
        "total_parameters": sum(prod(shape) for _, (_, shape, _) in kept),
    }


def test_shards_have_mlx_metadata_and_aligned_tensors(build):
    for path in build.out.glob("*.safetensors"):
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        header = read_header(path)
        assert header.pop("__metadata__") == {"format": "mlx"}
        assert start % 8 == 0
        assert [n for n, t in header.items() if (start + t["data_offsets"][0]) % ELEMENT[t["dtype"]]] == []


def test_other_readers_agree(build):
    """The safetensors library and mlx find the bytes that the test's own reader finds."""
    (path,) = build.out.glob("*.safetensors")
    library = {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for name, t in safetensors.deserialize(path.read_bytes())
    }
    assert differing(library, build.tensors) == []
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "mlx"}
        for name in [n for n, (dtype, _, _) in build.tensors.items() if dtype != "BF16"]:  # which numpy lacks
            assert file.get_tensor(name).tobytes() == build.tensors[name][2]
    loaded = {name: np.array(x.view(mx.uint8, stream=mx.cpu)).tobytes() for name, x in mx.load(str(path)).items()}
    assert differing(loaded, {name: data for name, (_, _, data) in build.tensors.items()}) == []


# --- config.json ---


def test_config_describes_the_quantized_modules(build):
    config = build.json()
    if not build.modules:
        assert "quantization" not in config
        assert "quantization_config" not in config
        return
    assert config["quantization"] == config["quantization_config"]
    top = {k: v for k, v in config["quantization"].items() if not isinstance(v, dict)}
    assert {k: v for k, v in config["quantization"].items() if isinstance(v, dict)} == build.modules
    weight = Counter()
    for path, entry in build.modules.items():
        weight[entry["bits"]] += prod(build.tensors[path + ".scales"][1]) * GROUP
    assert top == {"group_size": GROUP, "bits": weight.most_common(1)[0][0], "mode": "affine"}


def test_config_describes_the_head(build):
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


def test_config_keeps_the_source_keys(build):
    source, config = json.loads((build.source / "config.json").read_text()), build.json()
    for key in ("auto_map", "rope_scaling"):
        source.pop(key, None)
        assert key not in config
    for key in ("num_nextn_predict_layers", "torch_dtype"):
        source.pop(key, None)
    assert {k: config.get(k) for k in source} == source
    assert {"rope_factor", "original_seq_len", "mscale", "rope_theta", "swa_rope_theta"} <= set(config)


def test_architecture_file_is_the_one_that_is_tested(build):
    assert build.json()["model_file"] == "motif.py"
    ours = Path(__file__).resolve().parents[1] / "convert" / "motif.py"
    assert (build.out / "motif.py").read_bytes() == ours.read_bytes()


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


# --- provenance ---


def test_provenance_has_the_hash_of_every_file(build):
    made = build.json("motif-convert.json")
    files = {p.name: p.read_bytes() for p in build.out.iterdir() if p.name != "motif-convert.json"}
    assert made["files"] == {n: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()}
    assert not any(name.startswith(".") for name in files)


def test_provenance_tells_source_recipe_and_head(build):
    made = build.json("motif-convert.json")
    assert made["source"]["id"] == build.source.name
    for key, name in (("config_sha256", "config.json"), ("index_sha256", "model.safetensors.index.json")):
        assert made["source"][key] == hashlib.sha256((build.source / name).read_bytes()).hexdigest()
    assert made["recipe"]["name"] == build.recipe
    assert made["mtp"]["policy"] == build.mtp
    assert re.fullmatch("[0-9a-f]{64}", made["plan_hash"])
    head = {n: t for n, t in read_safetensors(build.source).items() if n.startswith("model.mtp_layers.")}
    assert sorted(made["mtp"]["dropped"]) == (sorted(head) if build.mtp == "drop" else [])
    if build.mtp != "fp16":
        assert made["mtp"]["casts"] is None
        return
    before = {name: as_float32(dtype, data) for name, (dtype, _, data) in head.items()}
    change = {name: np.abs(x - x.astype(np.float16).astype(np.float32)) for name, x in before.items()}
    assert made["mtp"]["casts"]["values"] == sum(x.size for x in before.values())
    assert made["mtp"]["casts"]["changed"] == sum(int(np.count_nonzero(c)) for c in change.values())
    assert made["mtp"]["casts"]["max_change"] == max(float(c.max()) for c in change.values())
    assert made["mtp"]["casts"]["tensor"] == max(change, key=lambda n: float(change[n].max()))


def test_nothing_tells_machine_user_or_time(build):
    for name in ("motif-convert.json", "README.md", "config.json", "model.safetensors.index.json"):
        text = (build.out / name).read_text()
        for path in (build.out, build.out.parent, build.source.parent, Path.home(), Path.cwd()):
            assert path == Path("/") or str(path) not in text
        assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
        assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d", text)


def test_card(build):
    front, body = (build.out / "README.md").read_text().removeprefix("---\n").split("\n---\n", 1)
    meta = yaml.safe_load(front)
    assert meta["library_name"] == "mlx"
    assert "license" not in meta  # the source has no card, so that nothing is known
    assert "license" in body
    assert "base_model" not in meta  # a local folder is not on the Hub
    assert f"{build.json('model.safetensors.index.json')['metadata']['total_size']:,} bytes" in body
    left_out = "left out" in body and "num_nextn_predict_layers: 0" in body
    assert left_out is (build.mtp == "drop")


# --- what is copied ---

COPIED = {
    "chat_template.jinja": b"{{ messages }}\r\n\xc3\xa9",
    "LICENSE": b"MIT \xff not UTF-8",
    "LICENCE.md": b"",
    "NOTICE": b"notice",
    "special_tokens_map.json": b'{"eos_token" : "x"}',
    "added_tokens.json": b"{ }",
    "vocab.json": b"{}",
    "merges.txt": b"#version\n",
    "tokenizer.model": bytes(range(256)),
}
NOT_COPIED = {
    "modeling_motif.py": b"raise SystemExit('run')",
    "configuration_motif.py": b"",
    "pytorch_model.bin": b"\x80\x04",
    "training_args.bin": b"\x80\x04",
    "scheduler.pkl": b"\x80\x04",
    "optimizer.pt": b"\x80\x04",
    ".gitattributes": b"*.safetensors filter=lfs",
    "nvfp4_act_scales.safetensors": b"",
    "tokenizer.json.bak": b"{}",
    "trainer_state.json": b"{}",
    "assets.png": b"\x89PNG",
    "README.md": b"---\nlicense: mit\nlanguage: [ko, en]\nlibrary_name: torch\ntags: [theirs]\n---\n# Their card\n",
}


@pytest.fixture(scope="module")
def stuffed(tmp_path_factory) -> tuple[Path, Path]:
    """A source with all kinds of files beside its weights, and its build."""
    folder = tmp_path_factory.mktemp("stuffed")
    source = shutil.copytree(DEMO, folder / "source")
    for name, data in (COPIED | NOT_COPIED).items():
        (source / name).write_bytes(data)
    (source / "original").mkdir()
    (source / "original" / "tokenizer.json").write_text("{}")
    convert(source, folder / "out")
    return source, folder / "out"


def test_copied_byte_for_byte_and_nothing_else(stuffed):
    source, out = stuffed
    copied = {*COPIED, "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    for name in copied:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    written = {"config.json", "motif-convert.json", "motif.py", "README.md", "model.safetensors.index.json"}
    assert {p.name for p in out.iterdir()} == copied | written | {"model-00001-of-00001.safetensors"}


def test_card_takes_license_and_languages_alone_from_the_source(stuffed):
    meta = yaml.safe_load((stuffed[1] / "README.md").read_text().split("---\n")[1])
    assert (meta["license"], meta["language"]) == ("mit", ["ko", "en"])
    assert meta["library_name"] == "mlx"
    assert "theirs" not in meta["tags"]
    assert "Their card" not in (stuffed[1] / "README.md").read_text()


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: other\nlicense_name: x-1\nlicense_link: LICENSE\n---\n\nText\n",
        "---\r\nlicense: other\r\nlicense_name: x-1\r\nlicense_link: LICENSE\r\n---\r\n\r\nText\r\n",
        "---\nlicense: other\nlicense_name: x-1\nlicense_link: LICENSE\n---",
        "\n---\ntitle: a ---\nlicense: other\nlicense_name: x-1\nlicense_link: LICENSE\n---\n",
    ],
    ids=["plain", "windows line ends", "no line end after it", "blank line before, dashes within"],
)
def test_license_is_found_wherever_the_hub_finds_it(card, tmp_path):
    assert ModelCard(card).data.license == "other"  # what the Hub's own client reads
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / "README.md").write_bytes(card.encode())
    convert(source, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    meta = yaml.safe_load(text.split("---\n")[1])
    assert (meta.get("license"), meta.get("license_name"), meta.get("license_link")) == ("other", "x-1", "LICENSE")
    assert "states no license" not in text


@pytest.mark.parametrize("card", ["", "---\n", "---\n[\n---\n", "---\n- mit\n---\n", "no front matter", "\xff"])
def test_card_without_a_license(card, tmp_path):
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / "README.md").write_bytes(card.encode("latin-1"))
    convert(source, tmp_path / "out")
    assert "states no license" in (tmp_path / "out" / "README.md").read_text()


def test_folder_of_licenses(tmp_path):
    """As the REUSE convention has it; only files are copied."""
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / "LICENSES").mkdir()
    (source / "LICENSES" / "MIT.txt").write_text("MIT")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_no_file_stays_open(tmp_path):
    """Many conversions in one process would else run out of descriptors."""
    convert(TINY, tmp_path / "first")  # and with it all that is loaded once
    before = set(os.listdir("/dev/fd"))
    convert(TINY, tmp_path / "second")
    assert set(os.listdir("/dev/fd")) - before == set()


# --- the same bytes, every time ---


def test_two_runs_give_the_same_bytes(built, tmp_path):
    """Two processes, and a third that has converted other things before."""
    options = ("--bits", "8")
    first = contents(built(DEMO, *options))
    result = motif_convert("convert", "--source", DEMO, *options, "--out", tmp_path / "second")
    assert result.returncode == 0, result.stderr
    convert(DEMO, tmp_path / "third", *options)
    assert differing(contents(tmp_path / "second"), first) == []
    assert differing(contents(tmp_path / "third"), first) == []


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_layout_of_the_source_does_not_matter(shards, small, built, tmp_path):
    weights = random_weights(SMALL_CONFIG)
    if shards == 1:  # one file without an index, its tensors in another order
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "config.json").write_text(json.dumps(SMALL_CONFIG))
        tensors = {n: ("BF16", weights[n].shape, weights[n].tobytes()) for n in reversed(weights)}
        write_safetensors(tmp_path / "source" / "model.safetensors", tensors)
    else:
        write_checkpoint(tmp_path / "source", SMALL_CONFIG, weights, shards)
    convert(tmp_path / "source", tmp_path / "out")
    made, other = contents(tmp_path / "out"), contents(built(small))
    same = [name for name in other if name not in ("README.md", "motif-convert.json")]  # which name the source
    assert {n: made[n] for n in same} == {n: other[n] for n in same}


# --- sources of other kinds ---


@pytest.mark.parametrize("mtp", POLICIES)
def test_source_of_mixed_dtypes(mtp, tmp_path):
    """F32 and F16 tensors among the BF16 ones: kept as they are, or quantized with scales of their dtype."""
    tensors = {}
    for name, raw in random_weights(SMALL_CONFIG).items():
        x = as_float32("BF16", raw.tobytes()) * np.float32(1.001)  # a value that is not BF16's
        dtype, data = "BF16", raw
        if re.search(r"mtp_layers|mhc_|router|expert_bias|lm_head|wkv_a", name):
            dtype, data = "F32", x
        elif re.search(r"act_fn|lambda_proj|wo\.|down_proj", name):
            dtype, data = "F16", x.astype(np.float16)
        tensors[name] = (dtype, raw.shape, data.tobytes())
    assert {dtype for dtype, _, _ in tensors.values()} == {"BF16", "F16", "F32"}
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(SMALL_CONFIG))
    write_safetensors(source / "model.safetensors", tensors)
    convert(source, out, "--mtp", mtp)
    build = Build(source, out, "4.5bit", mtp)
    assert differing(build.tensors, expected_tensors(tensors, "4.5bit", mtp)) == []
    test_shards_have_mlx_metadata_and_aligned_tensors(build)
    test_config_describes_the_head(build)


def test_source_without_a_head(tmp_path):
    config = {k: v for k, v in SMALL_CONFIG.items() if k != "num_nextn_predict_layers"}
    write_checkpoint(tmp_path / "source", config, random_weights(config))
    convert(tmp_path / "source", tmp_path / "out")
    out = tmp_path / "out"
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert json.loads((out / "motif-convert.json").read_text())["mtp"]["policy"] == "none"
    assert "no MTP head" in (out / "README.md").read_text()
    assert differing(read_safetensors(out), expected_tensors(read_safetensors(tmp_path / "source"), "4.5bit", "")) == []


@pytest.mark.parametrize(
    "options", [["--mtp", "fp16"], ["--mtp", "drop"], ["--bits", "8"], ["--recipe", "bf16"]], ids=" ".join
)
def test_model_doctor_finds_no_fault(options, built):
    doctor = Path(sys.executable).with_name("mlx-model-doctor")
    command = [str(doctor), "check", "local", str(built(DEMO, *options)), "--fail-on", "error"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "fail: 0" in result.stdout
