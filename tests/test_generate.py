"""Builds of the demo, run by an unmodified mlx-lm: its command, its server, and ours."""

import functools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import REFERENCE, motif_convert

DEMO = REFERENCE / "demo-motif3"
SCRIPTS = Path(sys.executable).parent
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1"}
PROMPT = "Return the"
RULE = "=" * 10


@functools.cache
def generated_by_mlx_lm(folder: Path) -> str:
    args = ["--model", folder, "--trust-remote-code", "--prompt", PROMPT, "--max-tokens", 24]
    command = [SCRIPTS / "mlx_lm.generate", *args]
    result = subprocess.run(list(map(str, command)), env=OFFLINE, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    _, text, _ = result.stdout.split(RULE)
    return text.strip("\n")


@pytest.mark.parametrize("mtp", ["fp16", "bf16", "8", "4.5", "drop"])
def test_mlx_lm_generates(mtp, built):
    assert generated_by_mlx_lm(built(DEMO, "--mtp", mtp)).strip()


def test_the_head_does_not_change_the_text(built):
    """Plain decoding never runs the MTP head, so that every policy has to give the same words."""
    texts = {generated_by_mlx_lm(built(DEMO, "--mtp", mtp)) for mtp in ("fp16", "drop")}
    assert len(texts) == 1


def test_unquantized_experts_generate(built):
    """mlx's gather_mm on the CPU knows float32 only."""
    assert generated_by_mlx_lm(built(DEMO, "--recipe", "bf16")).strip()


def test_the_bare_command_says_what_mlx_lm_says(tmp_path):
    options = ("--mtp", "drop", "--no-verify", "--prompt", PROMPT, "--max-tokens", 24)
    result = motif_convert("--source", DEMO, "--out", tmp_path / "out", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == PROMPT + generated_by_mlx_lm(tmp_path / "out") + "\n"


# --- the server ---


@contextmanager
def server(folder: Path, log: Path):
    """mlx_lm.server on a free port of the loopback; yields its address, and never outlives the block."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = ["--model", folder, "--host", "127.0.0.1", "--port", port, "--trust-remote-code"]
    with log.open("w") as out:
        command = [SCRIPTS / "mlx_lm.server", *args]
        process = subprocess.Popen(list(map(str, command)), env=OFFLINE, stdout=out, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(address, process, log.read_text)
        yield address
    finally:
        process.kill()
        process.wait()


def wait_until_healthy(address: str, process: subprocess.Popen, log: Callable[[], str], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, log()
            assert time.monotonic() < end, log()
            time.sleep(0.1)


@pytest.mark.parametrize("mtp", ["fp16", "drop"])
def test_mlx_lm_serves(mtp, built, tmp_path):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).encode()
    with server(built(DEMO, "--mtp", mtp), tmp_path / "log") as address:
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=90) as response:
            assert response.status == 200
            answer = json.load(response)
    assert answer["choices"][0]["text"].strip()
    assert answer["usage"]["completion_tokens"] == 24
