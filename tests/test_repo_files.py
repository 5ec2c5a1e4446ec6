"""The files of a build: provenance, what is copied, and the same bytes every time."""

import getpass
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import (
    SMALL_CONFIG,
    contents,
    motif_convert,
    random_weights,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)
from expected_build import (
    DEMO,
    POLICIES,
    TINY,
    Build,
    as_float32,
    assert_config_describes_the_head,
    assert_shards_have_mlx_metadata_and_aligned_tensors,
    convert,
    differing,
    expected_tensors,
)
from huggingface_hub import ModelCard

# --- provenance ---


def test_provenance_has_the_hash_of_every_file(every_build):
    made = every_build.json("motif-convert.json")
    files = {p.name: p.read_bytes() for p in every_build.out.iterdir() if p.name != "motif-convert.json"}
    assert made["files"] == {n: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()}
    assert not any(name.startswith(".") for name in files)


def test_provenance_tells_source_recipe_and_head(every_build):
    made = every_build.json("motif-convert.json")
    assert made["source"]["id"] == every_build.source.name
    for key, name in (("config_sha256", "config.json"), ("index_sha256", "model.safetensors.index.json")):
        assert made["source"][key] == hashlib.sha256((every_build.source / name).read_bytes()).hexdigest()
    assert made["recipe"]["name"] == every_build.recipe
    assert made["mtp"]["policy"] == every_build.mtp
    assert re.fullmatch("[0-9a-f]{64}", made["plan_hash"])
    head = {n: t for n, t in read_safetensors(every_build.source).items() if n.startswith("model.mtp_layers.")}
    assert sorted(made["mtp"]["dropped"]) == (sorted(head) if every_build.mtp == "drop" else [])
    if every_build.mtp != "fp16":
        assert made["mtp"]["casts"] is None
        return
    before = {name: as_float32(dtype, data) for name, (dtype, _, data) in head.items()}
    change = {name: np.abs(x - x.astype(np.float16).astype(np.float32)) for name, x in before.items()}
    assert made["mtp"]["casts"]["values"] == sum(x.size for x in before.values())
    assert made["mtp"]["casts"]["changed"] == sum(int(np.count_nonzero(c)) for c in change.values())
    assert made["mtp"]["casts"]["max_change"] == max(float(c.max()) for c in change.values())
    assert made["mtp"]["casts"]["tensor"] == max(change, key=lambda n: float(change[n].max()))


def test_nothing_tells_machine_user_or_time(every_build):
    for name in ("motif-convert.json", "README.md", "config.json", "model.safetensors.index.json"):
        text = (every_build.out / name).read_text()
        for path in (every_build.out, every_build.out.parent, every_build.source.parent, Path.home(), Path.cwd()):
            assert path == Path("/") or str(path) not in text
        assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
        assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d", text)


def test_card(every_build):
    front, body = (every_build.out / "README.md").read_text().removeprefix("---\n").split("\n---\n", 1)
    meta = yaml.safe_load(front)
    assert meta["library_name"] == "mlx"
    assert "license" not in meta  # the source has no card, so that nothing is known
    assert "license" in body
    assert "base_model" not in meta  # a local folder is not on the Hub
    assert f"{every_build.json('model.safetensors.index.json')['metadata']['total_size']:,} bytes" in body
    left_out = "left out" in body and "num_nextn_predict_layers: 0" in body
    assert left_out is (every_build.mtp == "drop")


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
    every_build = Build(source, out, "4.5bit", mtp)
    assert differing(every_build.tensors, expected_tensors(tensors, "4.5bit", mtp)) == []
    assert_shards_have_mlx_metadata_and_aligned_tensors(every_build)
    assert_config_describes_the_head(every_build)


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
