"""Verify: a build whose files, headers, index, config or provenance do not fit."""

import json
import os
from pathlib import Path

import pytest
from conftest import write_safetensors
from spoiled import DOWN, GATE, INDEX, PROVENANCE, ROUTER, Build, both, verify


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
