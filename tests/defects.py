"""Ways to damage a checkpoint, each one defect."""

from collections.abc import Callable
from pathlib import Path

from broken import INDEX, Folder

SHARD = [f"model-{i:05d}-of-00005.safetensors" for i in range(6)]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5001\n"
GATE_UP = "model.layers.2.moe.experts.gate_up_proj"
DOWN = "model.layers.2.moe.experts.down_proj"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
MTP_PROJ = "model.mtp_layers.0.input_proj.weight"
WQ = "model.layers.2.self_attn.wq_a.weight"
NAN, INF = b"\xc0\x7f", b"\x80\xff"  # BF16


Defect = Callable[[Folder], object]
Case = tuple[Defect, tuple[str, ...]]  # and what the message has to say


def rename(f: Folder, old: str, new: str) -> None:
    shard = f.shard_of(old)
    f.header(shard, lambda h: h.update({new: h.pop(old)}))
    f.json(INDEX, lambda i: i["weight_map"].update({new: i["weight_map"].pop(old)}))


def link(f: Folder, name: str, target: str) -> None:
    f.remove(name)
    (f.path / name).symlink_to(target)


def instead(make: Callable[[Path], object], name: str) -> Defect:
    def defect(f: Folder) -> None:
        f.remove(name)
        make(f.path / name)

    return defect


def with_file(f: Folder, name: str, weight_map_name: str | None = None) -> None:
    f.json(INDEX, lambda i: i["weight_map"].update({NORM: name if weight_map_name is None else weight_map_name}))


def swap_offsets(h: dict) -> None:
    a, b = list(h)[1:3]
    h[a]["data_offsets"], h[b]["data_offsets"] = h[b]["data_offsets"], h[a]["data_offsets"]


def twice(h: dict) -> bytes:
    import json

    text = json.dumps(h)
    return (text[:-1] + f', "{NORM}": {json.dumps(h[NORM])}' + "}").encode()


def header_length(f: Folder, shard: str, length: int) -> None:
    path = f.own(shard)
    with path.open("r+b") as file:
        file.write(length.to_bytes(8, "little"))


def transposed(f: Folder, tensor: str) -> None:
    f.header(f.shard_of(tensor), lambda h: h[tensor].update(shape=h[tensor]["shape"][::-1]))


def other_dtype(f: Folder, tensor: str, dtype: str) -> None:
    f.entry(tensor, dtype=dtype)


def as_i16(f: Folder) -> None:
    other_dtype(f, WQ, "I16")


def drop_tensor(f: Folder, tensor: str) -> None:
    """A tensor under a name that no Motif-3 has, in header and index."""
    rename(f, tensor, tensor + "_old")
