"""What `inspect` says of a build: against the plan, against the bytes, and of folders that are no build."""

import hashlib
import json
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from conftest import REFERENCE, motif_convert, read_safetensors
from motif_convert.recipes.cli import cli

TINY = REFERENCE / "tiny-motif3"
RECIPES = ("4.5bit", "8bit", "bf16")
POLICIES = ("fp16", "bf16", "8", "4.5", "drop")
FAMILY_MARKS = (  # the first mark in a tensor's MLX name tells its family
    ("mtp.", "MTP head"),
    ("mhc_", "mHC"),
    ("self_attn", "attention"),
    ("switch_mlp", "routed experts"),
    ("shared_experts", "shared expert"),
    ("mlp.gate.", "router"),
    ("mlp.", "dense MLP"),
    ("embed_tokens", "embedding"),
    ("lm_head", "lm_head"),
    ("norm", "norms"),
)


def family(name: str) -> str:
    return next(family for mark, family in FAMILY_MARKS if mark in name)


@pytest.fixture(scope="module", params=[(r, m) for r in RECIPES for m in POLICIES], ids=lambda p: f"{p[0]} {p[1]}")
def case(request, tmp_path_factory):
    """A build of every recipe with every policy: its folder and its options. One process makes them all."""
    recipe, mtp = request.param
    options = ["--source", str(TINY), "--recipe", recipe, "--mtp", mtp]
    out = tmp_path_factory.mktemp("inspected") / "out"
    cli.main(["convert", *options, "--out", str(out)], standalone_mode=False)
    return out, options


def printed(capsys, *args: str) -> str:
    capsys.readouterr()
    cli.main(list(args), standalone_mode=False)
    return capsys.readouterr().out


def test_agrees_with_the_plan(case, capsys):
    out, options = case
    found = json.loads(printed(capsys, "inspect", str(out), "--json"))
    plan = json.loads(printed(capsys, "plan", *options, "--json"))
    for key in ("total_bytes", "total_parameters", "bits_per_weight"):
        assert found[key] == plan[key]
    assert found["provenance"]["plan_hash"] == plan["plan_hash"]
    assert found["mtp"]["policy"] == plan["mtp"]
    families = [f["family"] for f in found["families"]]
    assert sorted(families) == sorted({t["family"] for t in plan["tensors"]})
    for row in found["families"]:
        tensors = [t for t in plan["tensors"] if t["family"] == row["family"]]
        assert row["tensors"] == len(tensors)
        assert row["bytes"] == sum(t["bytes"] for t in tensors)
        planned = {
            f"{t['mode']} {t['bits']}-bit, group {t['group_size']}" if t["bits"] else t["dtype"] for t in tensors
        }
        assert set(row["precisions"]) == planned


def test_agrees_with_the_bytes(case, capsys):
    out, _ = case
    found = json.loads(printed(capsys, "inspect", str(out), "--json"))
    size, count = {}, {}
    for name, (_, _, data) in read_safetensors(out).items():
        size[family(name)] = size.get(family(name), 0) + len(data)
        count[family(name)] = count.get(family(name), 0) + 1
    parameters = {}
    for name, (_, shape, _) in read_safetensors(TINY).items():
        mlx = name.replace("mtp_layers", "mtp.").replace("moe.router", "mlp").replace("moe.expert_bias", "mlp.gate.")
        mlx = mlx.replace("moe.experts", "switch_mlp")
        if family(mlx) in size:
            parameters[family(mlx)] = parameters.get(family(mlx), 0) + prod(shape)
    rows = {f["family"]: f for f in found["families"]}
    assert {f: row["bytes"] for f, row in rows.items()} == size
    assert {f: row["tensors"] for f, row in rows.items()} == count
    assert {f: row["parameters"] for f, row in rows.items()} == parameters
    for row in rows.values():
        assert row["bits_per_weight"] == pytest.approx(8 * row["bytes"] / row["parameters"])
    assert found["total_bytes"] == sum(size.values())
    assert found["bits_per_weight"] == pytest.approx(8 * sum(size.values()) / sum(parameters.values()))
    assert found["mtp"]["present"] is found["mtp"]["declared"] is ("MTP head" in size)


def test_text_has_the_numbers_of_the_json(case, capsys):
    out, options = case
    found = json.loads(printed(capsys, "inspect", str(out), "--json"))
    text = printed(capsys, "inspect", str(out))
    for row in found["families"]:
        (line,) = [line for line in text.splitlines() if line.startswith(row["family"] + "  ")]
        assert f"{row['parameters']:,}" in line
        assert f"{row['bits_per_weight']:.3f}" in line
        assert all(p in line for p in row["precisions"])
    assert f"{found['total_parameters']:,}" in text
    assert f"Recipe: {options[3]}" in text
    assert f"policy {options[5]}" in text
    assert "WARNING" not in text


def test_one_shard_is_not_plural(built):
    assert "1 shards" not in motif_convert("inspect", built(TINY)).stdout


def test_provenance(built):
    found = json.loads(motif_convert("inspect", built(TINY), "--json").stdout)
    assert found["provenance"]["source"]["id"] == "tiny-motif3"
    config = (TINY / "config.json").read_bytes()
    assert found["provenance"]["source"]["config_sha256"] == hashlib.sha256(config).hexdigest()
    assert found["provenance"]["recipe"]["name"] == "4.5bit"


def test_build_without_provenance(built, tmp_path):
    """Another program's build of Motif-3 has none; its tensors can still be told."""
    out = shutil.copytree(built(TINY), tmp_path / "out")
    (out / "motif-convert.json").unlink()
    found = json.loads(motif_convert("inspect", out, "--json").stdout)
    assert found["provenance"] is None
    assert found["mtp"]["policy"] is None
    assert found["total_bytes"] == json.loads(motif_convert("inspect", built(TINY), "--json").stdout)["total_bytes"]
    assert "Provenance: none" in motif_convert("inspect", out).stdout


# --- a config.json that does not say what the tensors are ---


def with_config(built_folder: Path, folder: Path, **keys: object) -> Path:
    out = shutil.copytree(built_folder, folder)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | keys))
    return out


def test_config_claims_a_head_that_is_not_there(built, tmp_path):
    out = with_config(built(TINY, "--mtp", "drop"), tmp_path / "out", num_nextn_predict_layers=1)
    head = json.loads(motif_convert("inspect", out, "--json").stdout)["mtp"]
    assert (head["present"], head["declared"]) == (False, True)
    assert "config.json says the build has an MTP head" in motif_convert("inspect", out).stdout


def test_config_denies_a_head_that_is_there(built, tmp_path):
    out = with_config(built(TINY), tmp_path / "out", num_nextn_predict_layers=0)
    result = motif_convert("inspect", out)
    assert "config.json says the build has no MTP head" in result.stdout + result.stderr


# --- folders that are no build ---


def assert_refused(folder: Path, *fragments: str) -> None:
    result = motif_convert("inspect", folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    for fragment in fragments:
        assert fragment in result.stderr


def test_interrupted_run(tmp_path):
    """Stopped for real, by a limit on the size of files that the one shard does not fit in."""
    command = f"ulimit -f 100; exec '{Path(sys.executable).with_name('motif-convert')}' \"$@\""
    args = ["bash", "-c", command, "bash", "convert", "--source", str(TINY), "--out", str(tmp_path / "out")]
    assert subprocess.run(args, capture_output=True).returncode == 2
    assert (tmp_path / "out").is_dir()
    assert_refused(tmp_path / "out", "interrupted")


def test_source_checkpoint():
    assert_refused(TINY, "not an MLX tensor of Motif-3")


def test_missing_folder(tmp_path):
    assert_refused(tmp_path / "nothing", "no such folder")


def test_empty_folder(tmp_path):
    assert_refused(tmp_path, "config.json")


def test_file(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert_refused(tmp_path / "model.safetensors", "not a folder")


def test_build_of_another_model(built, tmp_path):
    assert_refused(with_config(built(TINY), tmp_path / "out", model_type="llama"), "Motif-3")


def test_build_without_its_config(built, tmp_path):
    out = shutil.copytree(built(TINY), tmp_path / "out")
    (out / "config.json").unlink()
    assert_refused(out, "config.json")


def test_build_without_its_shard(built, tmp_path):
    out = shutil.copytree(built(TINY), tmp_path / "out")
    (shard,) = out.glob("model-*.safetensors")
    shard.unlink()
    assert_refused(out, shard.name)


def test_build_with_a_stray_shard(built, tmp_path):
    """mlx-lm would load it too."""
    out = shutil.copytree(built(TINY), tmp_path / "out")
    (shard,) = out.glob("model-*.safetensors")
    shutil.copy(shard, out / "model-00007-of-00009.safetensors")
    assert_refused(out, "model-00007-of-00009.safetensors")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"mtp": {}}', '{"mtp": {"policy": "bf16"}}'])
def test_damaged_provenance(text, built, tmp_path):
    out = shutil.copytree(built(TINY), tmp_path / "out")
    (out / "motif-convert.json").write_text(text)
    assert_refused(out, "motif-convert.json")


@pytest.mark.parametrize("value", [[], "8", {"bits": 8}, 4], ids=str)
def test_damaged_quantization(value, built, tmp_path):
    assert_refused(with_config(built(TINY), tmp_path / "out", quantization=value), "config.json")


def test_quantization_that_the_tensors_contradict(built, tmp_path):
    """4-bit experts that config.json calls 8-bit: a loader would read other weights."""
    config = json.loads((built(TINY) / "config.json").read_text())
    (path, how) = next((k, v) for k, v in config["quantization"].items() if "switch_mlp" in k)
    wrong = config["quantization"] | {path: how | {"bits": 8}}
    assert_refused(with_config(built(TINY), tmp_path / "out", quantization=wrong), path)
