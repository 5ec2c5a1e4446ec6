"""Where the compiled kernels are to be had, and what their callers may not do."""

import os
import subprocess
import sys

import numpy as np
import pytest
from affine_cases import CONFIGS, outputs
from motif_convert.quantize import affine

# --- availability ---


@pytest.mark.parametrize(("bits", "size"), CONFIGS)
def test_available_here(bits, size):
    assert affine.available(bits, size), affine.available(bits, size).reason


@pytest.mark.parametrize(
    ("before", "environment", "reason"),
    [
        ("import sys; sys.modules['numba'] = None", {}, "numba can't be imported"),
        ("pass", {"NUMBA_DISABLE_JIT": "1"}, "numba can't compile the kernel here"),
    ],
)
def test_unavailable_for_a_reason(before, environment, reason):
    ask = f"{before}; from motif_convert.quantize.affine import available; print(bool(available()), available().reason)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    answer = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith(f"False {reason}"), answer.stdout


# --- what callers may not do ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"size": 16}, "group_size must be one of"),
        ({"rows": np.zeros((4, 96), np.uint16)}, "K is a multiple of 64"),
        ({"rows": np.zeros(128, np.uint16)}, r"need \[N, K\]"),
        ({"rows": np.zeros((4, 128), np.float16)}, "rows is float16"),
        ({"rows": np.zeros((4, 256), np.uint16)[:, ::2]}, "rows is not C-contiguous"),
        ({"packed": np.zeros((4, 15), np.uint32)}, r"packed is uint32 \(4, 15\)"),
        ({"packed": np.zeros((4, 16), np.int32)}, "packed is int32"),
        ({"scales": np.zeros((4, 4), np.uint16)[:, ::2]}, "scales is not C-contiguous"),
        ({"biases": np.frombuffer(bytes(16), np.uint16).reshape(4, 2)}, "biases can't be written to"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    packed, scales, biases = outputs(4, 128, 4, 64)
    rows = np.zeros((4, 128), np.uint16)
    right = {"rows": rows, "bits": 4, "size": 64, "packed": packed, "scales": scales, "biases": biases}
    with pytest.raises(ValueError, match=message):
        affine.quantize_into(*(right | change).values())
