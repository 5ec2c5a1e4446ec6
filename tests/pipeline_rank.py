"""One rank of a pipeline: what it holds and what it computes. `mlx.launch` starts it; alone it is one process."""

import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import REFERENCE
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import sharded_load
from motif_convert.quantize.errors import SourceError
from motif_convert.validate.decode import decode
from motif_convert.validate.smoke import Prompt, load_build, smoke

# The window is 33 keys. mlx's quantized products are slow on the CPU, hence no more tokens than these.
PROMPTS = [p["prompt_ids"][-36:] for p in json.loads((REFERENCE / "demo-goldens.json").read_text())["prompts"]]
CHUNK = 20


def digest(array: mx.array) -> str:
    return hashlib.sha256(np.array(array.astype(mx.float32)).tobytes()).hexdigest()


def load(folder: str, group: mx.distributed.Group):
    """As stock mlx-lm loads it: on one process, or a share of the layers on each."""
    if group.size() == 1:
        return mlx_lm.load(folder, trust_remote_code=True)[0]
    return sharded_load(folder, pipeline_group=group, trust_remote_code=True)[0]


def held(model) -> dict[str, int]:
    """Bytes of each parameter that is in this rank's memory."""
    return {name: array.nbytes for name, array in tree_flatten(model.parameters()) if isinstance(array, mx.array)}


def generated(model) -> list[int]:
    """By mlx-lm, the prompt in pieces."""
    steps = generate_step(mx.array(PROMPTS[0]), model, max_tokens=10, prefill_step_size=CHUNK)
    return [int(token) for token, _ in steps]


def drafted(model) -> list[list]:
    """By our own loop, the prompt in pieces; a prompt of one token leaves the head's cache empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("motif_convert.validate.decode.PREFILL_CHUNK", CHUNK)
        runs = [decode(model, PROMPTS[1], 10, drafts=drafts) for drafts in (1, 3)]
        runs += [decode(model, [65], 3, drafts=1)]
    return [[run.tokens, run.drafted, run.accepted, run.steps, run.finite] for run in runs]


def values(model) -> dict[str, str]:
    """Logits, hidden states and drafts of two rows at once, without caches and with."""
    ids = mx.array([prompt[:16] for prompt in PROMPTS[:2]])
    logits, hidden = model(ids, return_hidden=True)
    cache, head_cache = model.make_cache(), model.make_mtp_cache()
    draft, chained = model.mtp_forward(hidden[:, :-1], ids[:, 1:], head_cache, return_hidden=True)
    again = model.mtp_forward(chained[:, -1:], draft[:, -1:].argmax(axis=-1), head_cache)
    mx.eval(logits, again)
    cached = [model(ids[:, :10], cache), model(ids[:, 10:], cache)]
    found = {"logits": logits, "hidden": hidden, "draft": draft, "chained": chained, "again": again}
    made = {name: digest(array) for name, array in found.items()}
    return made | {f"cached {i}": digest(array) for i, array in enumerate(cached)}


def smoked(folder: str, group: mx.distributed.Group) -> dict:
    """The smoke report in float32, less its speeds."""
    build = load_build(Path(folder), "float32", group)
    prompt, text = (bytes(ids).decode() for ids in PROMPTS[2:])
    report = smoke(build, [Prompt("prompt", prompt, raw=True)], text, 8, 2)
    del report["speed"]
    return report


def refusal(folder: str, group: mx.distributed.Group) -> str | None:
    try:
        load_build(Path(folder), None, group)
    except SourceError as e:
        return str(e)
    return None


def facts(folders: list[str], shallow: str, group: mx.distributed.Group) -> dict:
    """All that is compared, of every build; `shallow` is one with fewer layers than some pipelines have ranks."""
    found = {"refusal": refusal(shallow, group), "smoked": smoked(folders[0], group)}
    for folder in folders:
        model = load(folder, group)
        found[folder] = {
            "layers": len(model.layers),
            "caches": len(model.make_cache()),
            "held": held(model),
            "generated": generated(model),
            "drafted": drafted(model),
            "values": values(model),
        }
    return found


if __name__ == "__main__":
    out, shallow, *folders = sys.argv[1:]
    group = mx.distributed.init()
    Path(out, f"{group.size()}-{group.rank()}.json").write_text(json.dumps(facts(folders, shallow, group)))
