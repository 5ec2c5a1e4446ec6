"""What the tests of the test Hub share: the server, its clients, and hashes."""

import hashlib
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hub_server import HubServer

REPO = "acme/model"
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {"config.json": b'{"a": 1}\n', "model.safetensors": WEIGHTS, "extra/notes.txt": b"some notes\n"}
PREAMBLE = """
import json, sys
from pathlib import Path
import huggingface_hub as hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
api, out = HfApi(), None
"""


@pytest.fixture
def model_hub(tmp_path):
    with HubServer(tmp_path / "server") as model_hub:
        model_hub.add_repo(REPO, FILES)
        yield model_hub


@pytest.fixture
def owner(model_hub) -> str:
    return model_hub.add_token("owner", user="someone", orgs=("acme",))


@pytest.fixture
def client(model_hub, tmp_path):
    """Runs a script with huggingface_hub and gives what it leaves in `out`; what it raises as [class, message]."""

    def client(script: str, token: str = "", **env: str):
        body = textwrap.indent(textwrap.dedent(script), "    ")
        code = f"{PREAMBLE}\ntry:\n{body}\nexcept Exception as error:\n    out = [type(error).__name__, str(error)]\n"
        result = subprocess.run(
            [sys.executable, "-c", f"{code}\nprint(json.dumps(out))"],
            env={**os.environ, **model_hub.env(tmp_path / "home", token), **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return client


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS[::-1])
    (folder / "sub" / "more.safetensors").write_bytes(WEIGHTS[:1000])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    (folder / "empty.safetensors").touch()
    return folder
