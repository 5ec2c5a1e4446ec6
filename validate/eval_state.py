"""Where an evaluation stands, and how it is kept on the disk between two layers."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from ..convert.hub import private_folder
from ..convert.shards import sha256_of
from ..quantize.errors import OutputError
from .divergence import Layer


@dataclass
class State:
    """Where an evaluation stands.

    Args:
        done: layers that every model has passed.
        streams: residual streams of each batch, [B, L, n, D], by model: "source", and those compared with it.
        layers: what was seen at each of those layers, by model that was compared.
    """

    done: int
    streams: dict[str, list[mx.array]]
    layers: dict[str, list[Layer]]


def keep(folder: Path, state: State) -> None:
    """Writes the streams, then, in one step, what says which they are and their hash.

    Raises:
        OutputError: the disk is full, or the folder can't be written.
    """
    private_folder(folder)
    path, partial = folder / f"streams-{state.done}.safetensors", folder / "state.json.partial"
    arrays = {f"{model}.{i}": a for model, every in state.streams.items() for i, a in enumerate(every)}
    layers = {model: [asdict(layer) for layer in every] for model, every in state.layers.items()}
    try:
        mx.save_safetensors(str(path), arrays)
        record = {"done": state.done, "sha256": sha256_of(path), "layers": layers}
        partial.write_text(json.dumps(record | {"digest": _digest(record)}))
        partial.replace(folder / "state.json")
    except (OSError, RuntimeError) as e:  # the second is mlx's
        for unfinished in (path, partial):
            unfinished.unlink(missing_ok=True)
        reason = getattr(e, "strerror", None) or e
        raise OutputError(
            f"{folder}: what is kept between two layers could not be written: {reason}; make room, or set HF_HOME to a "
            "disk that has it"
        ) from None
    (folder / f"streams-{state.done - 1}.safetensors").unlink(missing_ok=True)


def _digest(record: dict) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def restored(folder: Path) -> State | None:
    """What an earlier run has kept; None if nothing, or nothing whole."""
    try:
        record = json.loads((folder / "state.json").read_text())
        if record.pop("digest") != _digest(record):
            return None
        path = folder / f"streams-{record['done']}.safetensors"
        if sha256_of(path) != record["sha256"]:
            return None
        arrays = mx.load(str(path))
        models = ("source", *record["layers"])
        streams = {m: [arrays[f"{m}.{i}"] for i in range(len(arrays) // len(models))] for m in models}
        layers = {model: [Layer(**layer) for layer in every] for model, every in record["layers"].items()}
        return State(record["done"], streams, layers)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError):
        return None


def forget(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()
    if folder.exists():
        folder.rmdir()
