"""Checkpoints with one defect: a right one, of which a file is edited. Files that are not edited are links."""

import json
import os
from collections.abc import Callable
from pathlib import Path

INDEX = "model.safetensors.index.json"


class Folder:
    """A checkpoint's folder to break; all else in it is the original's."""

    def __init__(self, path: Path, original: Path):
        self.path = path
        path.mkdir()
        for file in original.iterdir():
            (path / file.name).symlink_to(file)

    def own(self, name: str) -> Path:
        """A file of this folder's own, with the original's content if it had one."""
        path = self.path / name
        if path.is_symlink():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
        return path

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def write(self, name: str, content: bytes | str) -> None:
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def cut(self, name: str, size: int) -> None:
        """Leaves the first bytes of a file; of a negative size, all but so many."""
        path = self.own(name)
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)

    def json(self, name: str, edit: Callable[[dict], object]) -> None:
        """Edits a JSON file in place; what `edit` returns, unless None, stands in its stead."""
        content = json.loads((self.path / name).read_bytes())
        changed = edit(content)
        self.write(name, json.dumps(content if changed is None else changed))

    def config(self, **changes: object) -> None:
        self.json("config.json", lambda config: config | changes)

    def shard_of(self, tensor: str) -> str:
        return json.loads((self.path / INDEX).read_bytes())["weight_map"][tensor]

    def header(self, shard: str, edit: Callable[[dict], object]) -> None:
        """Edits a shard's header; the data stays as it is. Returned bytes stand for the header's text."""
        raw = (self.path / shard).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        changed = edit(header)
        text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
        self.write(shard, len(text).to_bytes(8, "little") + text + raw[start:])

    def entry(self, tensor: str, **changes: object) -> None:
        """Edits what the header says of one tensor."""
        self.header(self.shard_of(tensor), lambda header: header[tensor].update(changes))

    def poke(self, tensor: str, place: int, data: bytes) -> None:
        """Writes bytes at a place of a tensor's."""
        shard = self.own(self.shard_of(tensor))
        with shard.open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            first = json.loads(file.read(length))[tensor]["data_offsets"][0]
            file.seek(8 + length + first + place)
            file.write(data)
