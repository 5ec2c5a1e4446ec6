"""A copy of a build, to put faults into, and what verifying it says."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import REFERENCE
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.recipes import pipeline
from motif_convert.validate.verify import verify_repo

TINY, NVFP4, DEMO = (REFERENCE / name for name in ("tiny-motif3", "tiny-motif3-nvfp4", "demo-motif3"))


INDEX, PROVENANCE = "model.safetensors.index.json", "motif-convert.json"
GATE, UP, DOWN = (f"model.layers.1.mlp.switch_mlp.{p}_proj" for p in ("gate", "up", "down"))
ROUTER = "model.layers.2.mlp.gate.weight"
# small: stacks of 5 experts, [5, 128, 64] for gate and up, [5, 64, 128] for down, in groups of 64
EXPERTS, ROWS, GROUPS = 5, {GATE: 128, UP: 128, DOWN: 64}, {GATE: 1, UP: 1, DOWN: 2}


def verify(out: Path, source: Path, **options):
    with open_checkpoint(source) as checkpoint:
        return verify_repo(out, checkpoint, **options)


class Build:
    """A copy of a build, to put faults into."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.place: dict[str, tuple] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with path.open("rb") as f:
                start = 8 + int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(start - 8))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                self.place[name] = (path, start + first, last - first, entry["dtype"], tuple(entry["shape"]))

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8, written through to the file."""
        path, offset, size, _, _ = self.place[name]
        return np.memmap(path, np.uint8, "r+", offset, (size,))

    def array(self, name: str) -> np.ndarray:
        """The same by matrices: uint8 [E, bytes of one] for a stack, else [1, bytes]."""
        return self[name].reshape(EXPERTS if ".switch_mlp." in name else 1, -1)

    def json(self, name: str, change) -> None:
        """change(dict) edits a JSON file."""
        path = self.folder / name
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value, indent=2))

    def seal(self) -> "Build":
        """Sizes and hashes in motif-convert.json as they are now, so that they don't give the fault away."""

        def change(made):
            for name in made["files"]:
                data = (self.folder / name).read_bytes()
                made["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

        self.json(PROVENANCE, change)
        return self


@pytest.fixture
def copy(built, tmp_path):
    """copy(source, *options): a build that may be spoiled."""
    return lambda source, *options: Build(Path(shutil.copytree(built(source, *options), tmp_path / "copy")))


@pytest.fixture
def spoiled(copy, small) -> Build:
    """A build of `small` with 4-bit experts, 8-bit attention, BF16 routers and a float16 head."""
    return copy(small, "--keep-mtp-fp16")


def named(result) -> dict[str, set]:
    """Tensor -> the experts of it that were found wrong."""
    found: dict[str, set] = {}
    for o in result.offenders:
        found.setdefault(o.tensor, set()).add(o.expert)
    return found


def converted(source: Path, mtp: str, out: Path, recipe: str = "4.5bit") -> Build:
    """A build made in this process."""
    job = pipeline.prepare(str(source), recipe, mtp)
    with job.checkpoint:
        pipeline.convert(job, out, lambda *_: None)
    return Build(out)


def both(config: dict, change) -> None:
    for key in ("quantization", "quantization_config"):
        change(config[key])
