"""A corpus of bad inputs, each a right one with one defect: every one is refused at once, in one line, by name.

The whole command runs on each. What is tested here is that no way leads past the checks; the checks themselves have
tests of their own, with many more values.
"""

import os
from pathlib import Path

import pytest
from broken import INDEX, Folder
from conftest import REFERENCE
from defects import (
    DOWN,
    GATE_UP,
    HEAD,
    INF,
    LFS,
    MTP_PROJ,
    NAN,
    NORM,
    SHARD,
    WQ,
    Case,
    as_i16,
    drop_tensor,
    header_length,
    instead,
    link,
    other_dtype,
    rename,
    transposed,
    twice,
    with_file,
)
from refusals import refused, said

TINY, NVFP4 = REFERENCE / "tiny-motif3", REFERENCE / "tiny-motif3-nvfp4"

# --- shards ---

SHARDS: dict[str, Case] = {
    "a shard is missing": (lambda f: f.remove(SHARD[4]), (SHARD[4], "No such file")),
    "the first shard is missing": (lambda f: f.remove(SHARD[1]), (SHARD[1],)),
    "a shard is empty": (lambda f: f.write(SHARD[3], b""), (SHARD[3], "not a safetensors file")),
    "a shard has 7 bytes": (lambda f: f.write(SHARD[3], b"1234567"), (SHARD[3], "not a safetensors file")),
    "a shard is a git-lfs pointer": (lambda f: f.write(SHARD[3], LFS), (SHARD[3], "git lfs pull")),
    "a shard is a web page": (lambda f: f.write(SHARD[3], "<!DOCTYPE html><html>"), (SHARD[3],)),
    "a shard is a zip file": (lambda f: f.write(SHARD[3], b"PK\3\4" + bytes(5000)), (SHARD[3],)),
    "a shard is a pickle": (lambda f: f.write(SHARD[3], b"\x80\x04\x95" + bytes(5000)), (SHARD[3],)),
    "a shard is cut by a byte": (lambda f: f.cut(SHARD[5], -1), (SHARD[5], "cut off", "download it again")),
    "a shard is cut in half": (lambda f: f.cut(SHARD[5], 262144), (SHARD[5], "cut off")),
    "a shard is cut in its header": (lambda f: f.cut(SHARD[3], 500), (SHARD[3], "cut off inside its header")),
    "a shard is cut after the length": (lambda f: f.cut(SHARD[3], 8), (SHARD[3],)),
    "a shard has a byte more": (
        lambda f: f.write(SHARD[4], (f.path / SHARD[4]).read_bytes() + b"\0"),
        (SHARD[4], "longer than its header says"),
    ),
    "a shard is a folder": (instead(Path.mkdir, SHARD[4]), (SHARD[4], "not a regular file")),
    "a shard is a pipe": (instead(os.mkfifo, SHARD[4]), (SHARD[4], "not a regular file")),
    "a shard is a link to itself": (lambda f: link(f, SHARD[4], SHARD[4]), (SHARD[4], "symbolic links")),
    "a shard is a link to nothing": (lambda f: link(f, SHARD[4], "gone"), (SHARD[4], "No such file")),
    "a shard is a device": (lambda f: link(f, SHARD[4], "/dev/zero"), (SHARD[4], "not a regular file")),
    "two shards are one file": (
        lambda f: link(f, SHARD[5], SHARD[4]),
        (SHARD[5], SHARD[4], "layers.2.moe.experts.gate_up_proj"),
    ),
    "a shard that the index lacks": (
        lambda f: f.write("model-00006-of-00006.safetensors", (f.path / SHARD[4]).read_bytes()),
        ("model-00006-of-00006.safetensors", "not in"),
    ),
    "a single file beside the shards": (
        lambda f: f.write("model.safetensors", (f.path / SHARD[4]).read_bytes()),
        ("model.safetensors", "not in"),
    ),
}

# --- headers ---

HEADERS: dict[str, Case] = {
    "a header of 2^63 bytes": (lambda f: header_length(f, SHARD[3], 2**63), (SHARD[3], "not a safetensors file")),
    "a header of 2^64 - 1 bytes": (lambda f: header_length(f, SHARD[3], 2**64 - 1), (SHARD[3],)),
    "a header of 0 bytes": (lambda f: header_length(f, SHARD[3], 0), (SHARD[3],)),
    "a header of 100 MB": (lambda f: header_length(f, SHARD[3], 100_000_000), (SHARD[3], "cut off")),
    "a header that ends early": (lambda f: header_length(f, SHARD[3], 100), (SHARD[3], "not valid JSON")),
    "a header that is no JSON": (lambda f: f.header(SHARD[3], lambda h: b"weights"), (SHARD[3], "not valid JSON")),
    "a header that is a list": (lambda f: f.header(SHARD[3], lambda h: b"[]"), (SHARD[3], "not a JSON object")),
    "a header in Latin-1": (lambda f: f.header(SHARD[3], lambda h: b'{"\xe9": 1}'), (SHARD[3], "not valid JSON")),
    "a header nested 100,000 deep": (
        lambda f: f.header(SHARD[3], lambda h: b'{"a": ' + b"[" * 100_000),
        (SHARD[3], "not valid JSON"),
    ),
    "a header with a key twice": (lambda f: f.header(SHARD[3], twice), (SHARD[3], NORM, "twice")),
    "a tensor without dtype": (lambda f: f.header(SHARD[3], lambda h: h[NORM].pop("dtype")), (SHARD[3], NORM)),
    "a tensor without offsets": (
        lambda f: f.header(SHARD[3], lambda h: h[NORM].pop("data_offsets")),
        (SHARD[3], NORM, "data_offsets"),
    ),
    "a tensor that is null": (lambda f: f.header(SHARD[3], lambda h: h.update({NORM: None})), (SHARD[3], NORM)),
    "a dtype that is none": (lambda f: f.entry(NORM, dtype="F12"), (SHARD[3], NORM, "F12")),
    "a dtype that is a number": (lambda f: f.entry(NORM, dtype=16), (SHARD[3], NORM, "dtype")),
    "a shape that is a word": (lambda f: f.entry(NORM, shape="128"), (SHARD[3], NORM, "shape")),
    "a shape with a negative size": (lambda f: f.entry(NORM, shape=[-128]), (SHARD[3], NORM, "shape")),
    "a shape with a fraction": (lambda f: f.entry(NORM, shape=[128.0]), (SHARD[3], NORM, "shape")),
    "a shape of 2^62 elements": (lambda f: f.entry(NORM, shape=[2**62]), (SHARD[3], NORM, "takes")),
    "a shape of nine axes": (lambda f: f.entry(NORM, shape=[128] + [1] * 8), (SHARD[3], NORM, "shape")),
    "offsets reversed": (
        lambda f: f.header(SHARD[3], lambda h: h[NORM]["data_offsets"].reverse()),
        (SHARD[3], NORM, "data_offsets"),
    ),
    "offsets negative": (lambda f: f.entry(NORM, data_offsets=[-256, 0]), (SHARD[3], NORM, "data_offsets")),
    "offsets beyond the file": (
        lambda f: f.entry(NORM, data_offsets=[2**40, 2**40 + 256]),
        (SHARD[3], NORM, "gap"),
    ),
    "two tensors on the same bytes": (
        lambda f: f.header(
            SHARD[3], lambda h: h[NORM].update(data_offsets=h["model.mtp_layers.0.embed_norm.weight"]["data_offsets"])
        ),
        (SHARD[3], "overlaps"),
    ),
    "a tensor with fewer bytes than its shape": (lambda f: f.entry(NORM, shape=[129]), (SHARD[3], NORM, "takes 258")),
    "a name with a newline": (lambda f: rename(f, NORM, "model.norm\nweight"), (SHARD[3], "norm\\nweight")),
    "a name with an escape": (lambda f: rename(f, NORM, "model\x1b[2J.norm"), ("\\x1b[2J",)),
    "a name of 10 MB": (lambda f: rename(f, NORM, "n" * 10_000_000), (SHARD[3], "nnn", NORM)),
}

# --- the index ---

WEIGHT_MAP = "weight_map"
INDICES: dict[str, Case] = {
    "no index, and shards": (lambda f: f.remove(INDEX), (INDEX,)),
    "an index that is no JSON": (lambda f: f.write(INDEX, "{"), (INDEX, "not valid JSON")),
    "an index that is a list": (lambda f: f.write(INDEX, "[]"), (INDEX, "not a JSON object")),
    "an index that is a git-lfs pointer": (lambda f: f.write(INDEX, LFS), (INDEX, "git lfs pull")),
    "an index that is empty": (lambda f: f.write(INDEX, ""), (INDEX, "not valid JSON")),
    "an index that is a folder": (instead(Path.mkdir, INDEX), (INDEX, "not a regular file")),
    "an index of 3 GB": (lambda f: os.truncate(f.own(INDEX), 3 << 30), (INDEX, "3221225472 bytes")),
    "an index without a weight map": (lambda f: f.json(INDEX, lambda i: {}), (INDEX, WEIGHT_MAP)),
    "an index with an empty weight map": (lambda f: f.json(INDEX, lambda i: {WEIGHT_MAP: {}}), (INDEX, "empty")),
    "an index with a list as a file": (lambda f: with_file(f, "", [SHARD[1]]), (INDEX, WEIGHT_MAP)),
    "a key of the index twice": (
        lambda f: f.write(INDEX, '{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}'),
        (INDEX, "'a' twice"),
    ),
    "a file in the folder above": (lambda f: with_file(f, f"../{SHARD[1]}"), (INDEX, f"../{SHARD[1]}", "plain")),
    "a file with an absolute path": (
        lambda f: with_file(f, "/etc/passwd.safetensors"),
        (INDEX, "/etc/passwd", "plain"),
    ),
    "a file in a folder below": (lambda f: with_file(f, "a/b.safetensors"), (INDEX, "a/b.safetensors", "plain")),
    "a file with a NUL": (lambda f: with_file(f, "a\0.safetensors"), (INDEX, "plain")),
    "a file with control characters": (lambda f: with_file(f, "\x1b[2J.safetensors"), (INDEX, "\\x1b", "plain")),
    "a file that is a pickle": (lambda f: with_file(f, "pytorch_model.bin"), (INDEX, "pytorch_model.bin", "plain")),
    "a file name of 10 MB": (lambda f: with_file(f, "m" * 10_000_000 + ".safetensors"), (INDEX, "mmm", "plain")),
    "a tensor in a shard that is not there": (
        lambda f: with_file(f, "model-00009-of-00009.safetensors"),
        ("model-00009-of-00009.safetensors", "No such file"),
    ),
    "a tensor placed in another shard": (lambda f: with_file(f, SHARD[1]), (NORM, SHARD[3], SHARD[1])),
    "a tensor that no shard has": (
        lambda f: f.json(INDEX, lambda i: i[WEIGHT_MAP].update({"model.more": SHARD[1]})),
        ("model.more", SHARD[1], "lacks"),
    ),
    "a tensor that the index lacks": (
        lambda f: f.json(INDEX, lambda i: i[WEIGHT_MAP].pop(NORM) and None),
        (NORM, SHARD[3], "is not in"),
    ),
}

# --- tensors that are not the model's ---


TENSORS: dict[str, Case] = {
    "a tensor under another name": (lambda f: drop_tensor(f, NORM), (NORM,)),
    "an expert stack under another name": (lambda f: drop_tensor(f, GATE_UP), (GATE_UP,)),
    "one tensor of the MTP head under another name": (lambda f: drop_tensor(f, MTP_PROJ), (MTP_PROJ,)),
    "a matrix transposed": (lambda f: transposed(f, WQ), (WQ,)),
    "an expert stack transposed": (lambda f: transposed(f, DOWN), (DOWN,)),
    "a vector as a matrix": (lambda f: f.entry(NORM, shape=[1, 128]), (NORM,)),
    "a matrix as a vector": (lambda f: f.entry(WQ, shape=[64 * 128]), (WQ,)),
    "a matrix of integers": (as_i16, (WQ, "I16")),
    "a norm of integers": (lambda f: other_dtype(f, NORM, "U16"), (NORM, "U16")),
    "two shapes exchanged": (
        lambda f: f.header(SHARD[3], lambda h: h[MTP_PROJ].update(shape=h[MTP_PROJ]["shape"][::-1])),
        (MTP_PROJ,),
    ),
}

# --- config.json ---

CONFIGS: dict[str, Case] = {
    "no config.json": (lambda f: f.remove("config.json"), ("config.json", "No such file")),
    "config.json is empty": (lambda f: f.write("config.json", ""), ("config.json", "not valid JSON")),
    "config.json is a list": (lambda f: f.write("config.json", "[1]"), ("config.json", "not a JSON object")),
    "config.json is a web page": (lambda f: f.write("config.json", "<html>"), ("config.json", "not valid JSON")),
    "config.json is a git-lfs pointer": (lambda f: f.write("config.json", LFS), ("config.json", "git lfs pull")),
    "config.json in UTF-16": (lambda f: f.write("config.json", "{}".encode("utf-16")), ("config.json",)),
    "config.json with a key twice": (
        lambda f: f.write("config.json", '{"hidden_size": 1, "hidden_size": 2}'),
        ("config.json", "'hidden_size' twice"),
    ),
    "config.json with NaN": (lambda f: f.write("config.json", '{"rms_norm_eps": NaN}'), ("config.json", "NaN")),
    "config.json with 1e999": (lambda f: f.write("config.json", '{"rope_theta": 1e999}'), ("config.json", "1e999")),
    "config.json nested deeply": (
        lambda f: f.write("config.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("config.json", "not valid JSON"),
    ),
    "another model": (lambda f: f.config(model_type="llama"), ("config.json", "'llama'", "'Motif'")),
    "no model type": (lambda f: f.json("config.json", lambda c: c.pop("model_type") and None), ("model_type",)),
    "no hidden size": (lambda f: f.json("config.json", lambda c: c.pop("hidden_size") and None), ("hidden_size",)),
    "hidden size 0": (lambda f: f.config(hidden_size=0), ("config.json", "hidden_size is 0")),
    "hidden size negative": (lambda f: f.config(hidden_size=-128), ("config.json", "hidden_size is -128")),
    "hidden size enormous": (lambda f: f.config(hidden_size=10**30), ("config.json", "hidden_size")),
    "hidden size a word": (lambda f: f.config(hidden_size="128"), ("config.json", "hidden_size")),
    "hidden size a fraction": (lambda f: f.config(hidden_size=128.0), ("config.json", "hidden_size")),
    "hidden size doubled": (lambda f: f.config(hidden_size=256), ("256",)),
    "a layer more": (lambda f: f.config(num_hidden_layers=7), ("model.layers.6",)),
    "a layer less": (lambda f: f.config(num_hidden_layers=5), ("model.layers.5",)),
    "a billion layers": (lambda f: f.config(num_hidden_layers=10**9), ("num_hidden_layers",)),
    "an expert more": (lambda f: f.config(num_experts=9), ("experts",)),
    "an expert less": (lambda f: f.config(num_experts=7), ("experts",)),
    "more chosen experts than there are": (lambda f: f.config(experts_top_k=9), ("experts_top_k",)),
    "another vocabulary": (lambda f: f.config(vocab_size=513), ("513",)),
    "a dense layer more": (lambda f: f.config(n_dense_first_layers=3), ("model.layers.2",)),
    "no MTP layer, though it is there": (lambda f: f.config(num_nextn_predict_layers=0), ("mtp_layers",)),
    "two MTP layers": (lambda f: f.config(num_nextn_predict_layers=2), ("num_nextn_predict_layers is 2",)),
    "two shared experts": (lambda f: f.config(num_shared_experts=2), ("shared_experts",)),
    "epsilon negative": (lambda f: f.config(rms_norm_eps=-1e-5), ("rms_norm_eps",)),
    "epsilon a word": (lambda f: f.config(rms_norm_eps="1e-5"), ("rms_norm_eps",)),
    "theta 0": (lambda f: f.config(rope_theta=0), ("rope_theta",)),
    "a rope that is a word": (lambda f: f.config(rope_scaling="yarn"), ("rope_scaling",)),
    "another rope": (lambda f: f.config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), ("rope",)),
    "another attention": (lambda f: f.config(attention_cls="mla"), ("attention_cls",)),
    "another activation": (lambda f: f.config(hidden_act="silu"), ("hidden_act",)),
    "another score of the router": (lambda f: f.config(score_func="softmax"), ("score_func",)),
    "tied embeddings": (lambda f: f.config(tie_word_embeddings=True), ("tie_word_embeddings",)),
    "weights in GPTQ": (lambda f: f.config(quantization_config={"quant_method": "gptq"}), ("'gptq'",)),
    "weights in FP8": (lambda f: f.config(quantization_config={"quant_method": "fp8"}), ("'fp8'",)),
    "weights of MLX": (lambda f: f.config(quantization={"bits": 4, "group_size": 64}), ("quantization_config",)),
    "a scheme that is a word": (lambda f: f.config(quantization_config="int4"), ("'int4'",)),
    "NVFP4 said of BF16 weights": (
        lambda f: f.config(quantization_config={"quant_method": "modelopt_nvfp4"}),
        ("modelopt_nvfp4", "_weight_scale_2"),
    ),
}

# --- weights ---

WEIGHTS: dict[str, Case] = {
    "NaN in an expert": (lambda f: f.poke(GATE_UP, 2 * (128 * 128 + 5), NAN), (SHARD[4], f"{GATE_UP}[1, 0, 5] is nan")),
    "NaN at the end of a stack": (lambda f: f.poke(DOWN, 2 * (8 * 128 * 64 - 1), NAN), (f"{DOWN}[7, 127, 63] is nan",)),
    "infinity in a matrix": (lambda f: f.poke(WQ, 0, INF), (SHARD[2], f"{WQ}[0, 0] is -inf")),
    "NaN in a norm": (lambda f: f.poke(NORM, 10, NAN), (SHARD[3], f"{NORM}[5] is nan", "--allow-nonfinite")),
    "NaN in the MTP head": (lambda f: f.poke(MTP_PROJ, 0, NAN), (SHARD[3], f"{MTP_PROJ}[0, 0] is nan")),
    "NaN in the output head": (lambda f: f.poke(HEAD, 2, NAN), (SHARD[3], f"{HEAD}[0, 1] is nan")),
}

SCALE_2, SCALE = GATE_UP + "_weight_scale_2", GATE_UP + "_weight_scale"
EXPERTS: dict[str, Case] = {
    "no marker of the scheme": (
        lambda f: f.json("config.json", lambda c: c.pop("quantization_config") and None),
        ("quantization_config", "modelopt_nvfp4"),
    ),
    "groups of 32": (
        lambda f: f.json("config.json", lambda c: c["quantization_config"].update(group_size=32)),
        ("group_size is 32",),
    ),
    "no expert scales": (lambda f: drop_tensor(f, SCALE_2), (SCALE_2,)),
    "no block scales": (lambda f: drop_tensor(f, SCALE), (SCALE,)),
    "no codes": (lambda f: drop_tensor(f, GATE_UP), (GATE_UP,)),
    "an expert scale NaN": (lambda f: f.poke(SCALE_2, 8, b"\0\0\xc0\x7f"), (SCALE_2, "expert 2", "nan")),
    "an expert scale negative": (lambda f: f.poke(SCALE_2, 8, b"\0\0\x80\xbf"), (SCALE_2, "expert 2", "-1")),
    "an expert scale 0": (lambda f: f.poke(SCALE_2, 0, bytes(4)), (SCALE_2, "expert 0", "scale 0")),
    "an expert scale reciprocal": (lambda f: f.poke(SCALE_2, 0, b"\0\0\x7a\x46"), (SCALE_2, "expert 0", "reciprocal")),
    "a block scale NaN": (lambda f: f.poke(SCALE, 128 * 8 + 3, b"\x7f"), (SCALE, "expert 1, row 0, block 3", "NaN")),
    "a block scale negative": (lambda f: f.poke(SCALE, 9, b"\xb8"), (SCALE, "expert 0, row 1, block 1", "negative")),
    "codes as signed bytes": (lambda f: other_dtype(f, GATE_UP, "I8"), (GATE_UP, "I8")),
    "block scales as bytes": (lambda f: other_dtype(f, SCALE, "U8"), (SCALE, "U8")),
    "expert scales as integers": (lambda f: other_dtype(f, SCALE_2, "I32"), (SCALE_2, "I32")),
    "expert scales of another shape": (lambda f: f.entry(SCALE_2, shape=[8, 1]), (SCALE_2,)),
}


@pytest.mark.parametrize(
    ("original", "defect", "fragments"),
    [
        pytest.param(original, *case, id=name)
        for original, table in (
            (TINY, SHARDS | HEADERS | INDICES | TENSORS | CONFIGS | WEIGHTS),
            (NVFP4, EXPERTS),
        )
        for name, case in table.items()
    ],
)
def test_bad_source(original, defect, fragments, tmp_path):
    folder = Folder(tmp_path / "source", original)
    defect(folder)
    said(refused(tmp_path, "convert", "--source", folder.path, "--out", "out"), fragments)
