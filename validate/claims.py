"""What config.json claims, against the tensors that are there and against the source's config.json."""

import json
from pathlib import Path

from ..convert.checkpoint import Checkpoint, read_json, read_whole
from ..convert.config import MODEL_FILE, TORCH_NAMES, built_config, own_model_file
from ..convert.headers import TensorInfo
from ..convert.losses import (
    cast_modules,
    check_casts,
    requantization,
    requantization_errors,
    requantized_modules,
)
from ..convert.plan import Plan
from ..convert.repo import PROVENANCE
from ..quantize.errors import SourceError, quoted
from .provenance import Provenance, one_line
from .structure import Shards, some

CONFIG = "config.json"


def check_claims(out: Path, shards: Shards, plan: Plan | None, checkpoint: Checkpoint | None) -> list[str]:
    """All that config.json says and that is not so; without a plan and its source, by the tensors alone."""
    try:
        config, _ = read_json(out / CONFIG)
    except SourceError as e:
        return [one_line(e)]
    tensors = {name: info for found in shards.values() for name, info in found.items()}
    problems = _quantization(config, tensors) + _head(config, tensors) + _dtype(config, tensors) + _model_file(out)
    if plan:
        expected = built_config(checkpoint.config, plan.quantized, plan.dominant, plan.config_keys())
        problems += _differences(json.loads(json.dumps(expected)), config, problems)
    return problems


def _model_file(out: Path) -> list[str]:
    """`motif.py` is what loaders run: it has to be this program's own."""
    try:
        ours = read_whole(out / MODEL_FILE) == own_model_file()
    except SourceError as e:
        return [one_line(e)]
    if not ours:
        return [f"{MODEL_FILE}: not the file of this version of motif-convert; loaders run it: do not trust it"]
    return []


def _quantization(config: dict, tensors: dict[str, TensorInfo]) -> list[str]:
    """`quantization` against the tensors, both ways; its own bits are those of most parameters."""
    paths = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    said = config.get("quantization")
    problems = []
    if config.get("quantization_config") != said:
        problems.append(f"{CONFIG}: quantization_config is not equal to quantization")
    if not paths and said is None:
        return problems
    if not isinstance(said, dict):
        return [
            *problems,
            f"{CONFIG}: quantization is {str(said)[:80]}, with {len(paths)} quantized modules in the shards",
        ]
    entries = {path: entry for path, entry in said.items() if isinstance(entry, dict)}
    faults = [f"{CONFIG}: quantization has no entry for {p}, which has .scales" for p in paths if p not in entries]
    unused = entries.keys() - paths
    faults += [f"{CONFIG}: quantization has an entry for {p}, which has no .scales" for p in sorted(unused)]
    weight: dict[tuple, int] = {}
    for path in (p for p in paths if p in entries):
        fault, how, count = _entry(path, entries[path], tensors)
        faults += [fault] if fault else []
        weight[how] = weight.get(how, 0) + count
    top = _said(said)
    if weight and weight.get(top, 0) != max(weight.values()):
        most = max(weight, key=weight.get)
        faults.append(f"{CONFIG}: quantization says {_how(top)} for the whole, most parameters have {_how(most)}")
    return problems + some(faults)


def _entry(path: str, entry: dict, tensors: dict[str, TensorInfo]) -> tuple[str | None, tuple, int]:
    """What is wrong with a module's entry, what the entry says, and the parameters that it is about."""
    size, bits, mode = how = _said(entry)
    packed, scales = tensors.get(f"{path}.weight"), tensors[f"{path}.scales"]
    groups = scales.nbytes // (1 if scales.dtype == "U8" else 2 if scales.dtype in ("BF16", "F16") else 4)
    count = groups * size if type(size) is int else 0
    parts = {part for part in ("biases", "global_scale") if f"{path}.{part}" in tensors}
    meant = {"affine": {"biases"}, "nvfp4": {"global_scale"}}.get(mode)
    if packed is None or packed.dtype != "U32":
        return f"{path}: has .scales, but no .weight of packed codes", how, count
    if meant != parts:
        return f"{CONFIG}: quantization calls {path} {mode!r}; beside .scales it has {sorted(parts)}", how, count
    if (mode == "nvfp4") != (entry.get("global_scale") is True):
        state = "lacks" if mode == "nvfp4" else "has"
        return f'{CONFIG}: quantization calls {path} {_how(how)}; the entry {state} "global_scale": true', how, count
    if type(bits) is not int or count * bits != 8 * packed.nbytes:
        return f"{CONFIG}: quantization calls {path} {_how(how)}; its shapes do not fit that", how, count
    return None, how, count


def _said(entry: dict) -> tuple[int | str, ...]:
    """Group size, bits and mode; as text where they are neither a number nor a word."""
    values = (entry.get(k) for k in ("group_size", "bits", "mode"))
    return tuple(v if type(v) in (int, str) else repr(v) for v in values)


def _how(how: tuple) -> str:
    size, bits, mode = how
    return f"{mode} {bits}-bit, group {size}"


def _head(config: dict, tensors: dict[str, TensorInfo]) -> list[str]:
    """What is claimed of the MTP head."""
    head = {name: t for name, t in tensors.items() if name.startswith("mtp.")}
    said, dtype = config.get("num_nextn_predict_layers", 0), config.get("mtp_dtype")
    if bool(head) != (said == 1) or said not in (0, 1):
        return [f"{CONFIG}: num_nextn_predict_layers is {said!r}, the shards have {len(head)} tensors mtp.*"]
    true = None
    if head and not any(name.endswith(".scales") for name in head):
        true = ", ".join(sorted({TORCH_NAMES.get(t.dtype, t.dtype) for t in head.values()}))
    problems = []
    if dtype != true:
        problems.append(f"{CONFIG}: mtp_dtype is {dtype!r}, the tensors mtp.* are {true or 'not all floats'}")
    if config.get("mtp_compute_dtype") != (config.get("torch_dtype") if true else None):
        problems.append(f"{CONFIG}: mtp_compute_dtype is {config.get('mtp_compute_dtype')!r}, not torch_dtype")
    return problems


def _dtype(config: dict, tensors: dict[str, TensorInfo]) -> list[str]:
    norm = tensors.get("model.norm.weight")
    if norm is None or config.get("torch_dtype") == TORCH_NAMES.get(norm.dtype):
        return []
    return [f"{CONFIG}: torch_dtype is {config.get('torch_dtype')!r}, model.norm.weight is {norm.dtype}"]


def _differences(expected: dict, config: dict, known: list[str]) -> list[str]:
    """Keys that are not what the source's config.json and the plan give, less those that are known to be wrong."""
    known_keys = {key for key in config if any(problem.startswith(f"{CONFIG}: {key} ") for problem in known)}
    want, got = (_flat(c, skip={*known_keys, "quantization_config"}) for c in (expected, config))  # quantization again
    return some(
        f"{CONFIG}: {key} is {got.get(key, 'absent')[:80]}, source and recipe give {want.get(key, 'absent')[:80]}"
        for key in sorted(want.keys() | got.keys())
        if want.get(key) != got.get(key)
    )


def _flat(config: dict, skip: set[str]) -> dict[str, str]:
    """Keys and the JSON of their values, in which 1, 1.0 and true differ; `quantization` by its entries."""
    flat = {}
    for key, value in config.items():
        if key == "quantization" and isinstance(value, dict):
            flat |= {f"{key}.{k}": json.dumps(v, sort_keys=True) for k, v in value.items() if key not in skip}
        elif key not in skip:
            flat[key] = json.dumps(value, sort_keys=True)
    return flat


def check_losses(provenance: Provenance, plan: Plan, checkpoint: Checkpoint) -> list[str]:
    """What motif-convert.json says was lost by casting the head and by quantizing NVFP4 experts again: that it says
    so, and, where the source's shards are here, that it is so."""
    made = provenance.made
    cast = cast_modules(plan)
    again = requantized_modules(plan.modules)
    problems = []
    for key, said, modules, measured in (
        ("mtp.casts", made["mtp"].get("casts"), cast, lambda: check_casts(plan, checkpoint)),
        (
            "experts.requantized",
            made["experts"].get("requantized"),
            again,
            lambda: requantization(plan, requantization_errors(again, checkpoint)),
        ),
    ):
        shards = {checkpoint.tensors[s].shard for m in modules for s in m.sources}
        if bool(said) != bool(modules):
            problems.append(f"{PROVENANCE}: {key} is {'missing' if modules else 'there'}, the plan means otherwise")
        elif modules and all((checkpoint.shard_folder / shard).exists() for shard in shards):
            try:
                true = measured().as_dict()
            except SourceError as e:
                problems.append(one_line(e))
                continue
            if said != true:
                problems.append(f"{PROVENANCE}: {key} is {quoted(said)}, source and plan give {quoted(true)}")
    return problems
