"""The reference's numbers, and what compares a loaded model with them."""

import json
from fnmatch import fnmatch

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE
from mlx.utils import tree_map
from mlx_lm.utils import load_model

TINY, DEMO = REFERENCE / "tiny-motif3", REFERENCE / "demo-motif3"
TINY_CONFIG = json.loads((TINY / "config.json").read_text())
TINY_FACTS = json.loads((REFERENCE / "tiny-goldens.json").read_text())
DEMO_FACTS = json.loads((REFERENCE / "demo-goldens.json").read_text())
GOLDENS = TINY_FACTS["goldens"]
# Goldens that the taps below don't show: compared in tests of their own, or hidden inside of a module.
APART = ("bf16.*", "rope.*", "unit.*", "decode.*", "long.*", "nvfp4.*", "offset5000.*", "input_ids", "*.router.[iw]*s")
HIDDEN = ("*.attn_heads", "*.diff", "*.router.logits", "*.router.scores")
TAPPED = [name for name in GOLDENS if not any(fnmatch(name, p) for p in APART + HIDDEN)]
GOLDEN = {name: np.array(x) for name, x in mx.load(str(REFERENCE / "tiny-goldens.safetensors")).items()}
DEMO_GOLDEN = {name: np.array(x) for name, x in mx.load(str(REFERENCE / "demo-goldens.safetensors")).items()}
HELDOUT = np.frombuffer((REFERENCE / "demo-heldout.txt").read_bytes(), np.uint8).reshape(32, 512)
WINDOW_BPB = np.array(DEMO_FACTS["heldout_bpb_per_window"])
LOGITS_ATOL = TINY_FACTS["tolerances"]["logits"]


def load(folder, dtype=mx.float32):
    """The model of a built repository, its floating-point parameters upcast (dtype None: as stored)."""
    model, _ = load_model(folder, trust_remote_code=True)
    if dtype:
        upcast = tree_map(lambda p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
        model.update(upcast)
    return model


def f64(x):
    return np.array(x.astype(mx.float32) if isinstance(x, mx.array) else x).astype(np.float64)


def off_by(ours, theirs):
    """The largest difference; NaN if there is one anywhere, so that no comparison with it holds."""
    return np.abs(f64(ours).reshape(np.shape(theirs)) - f64(theirs)).max()


def assert_golden(ours, name):
    worst = off_by(ours, GOLDEN[name])
    assert worst <= GOLDENS[name]["atol"], f"{name} is off by {worst:.2e}"


def rows(ids):
    """[S] token ids -> [1, S]."""
    return mx.array(np.asarray(ids)[None])


def relative(ours, theirs):
    return off_by(ours, theirs) / np.abs(theirs).max()


def record(model, run):
    """Runs and returns {module path: (arguments, result)} of every module's last call."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls = {}
    with pytest.MonkeyPatch.context() as patch:
        for cls in {type(module) for module in model.modules()}:

            def call(self, *args, original=cls.__call__, **kwargs):
                result = original(self, *args, **kwargs)
                calls[paths.get(id(self))] = args, result
                return result

            patch.setattr(cls, "__call__", call)
        run()
    return calls
