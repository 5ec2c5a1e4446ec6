"""Several ranks that download from a Hub: each its part alone, to the bytes of one process."""

import json
from pathlib import Path

import launch
import pytest
from conftest import SMALL_CONFIG, contents, random_weights, write_checkpoint
from hub_server import HubServer

REPO = "acme/six"
SHARD_BYTES = 50_000


@pytest.fixture
def source(tmp_path) -> Path:
    config = SMALL_CONFIG | {"num_hidden_layers": 6}
    return write_checkpoint(tmp_path / "six", config, random_weights(config), 10, dealt=False)


def test_streamed_by_two_ranks(source, tmp_path):
    """Converted and verified, without the whole source on the disk at any time; what both need is fetched by both."""
    (tmp_path / "server").mkdir()
    plain = launch.small_shards(SHARD_BYTES, "convert", "--source", source, "--out", tmp_path / "one")
    launch.start(1, plain).finish()
    with HubServer(tmp_path / "server") as server:
        server.add_repo(REPO, files={p.name: p for p in source.iterdir()})
        env = server.env(tmp_path / "home")
        command = ("convert", "--source", REPO, "--stream", "--out", tmp_path / "out")
        _, err = launch.start(2, launch.small_shards(SHARD_BYTES, *command), env=env).finish()
        size = sum(p.stat().st_size for p in source.glob("*.safetensors"))
        got = server.seen(r"\.safetensors(\?|$)", "GET")
        assert size <= sum(r.sent for r in got if r.range != "bytes=0-65535") < 1.5 * size  # of 10 shards a few twice
        found, expected = contents(tmp_path / "out"), contents(tmp_path / "one")
        for name in ("README.md", "motif-convert.json"):  # they name the source
            del found[name], expected[name]
        assert found == expected, err
        verify = launch.small_shards(SHARD_BYTES, "verify", tmp_path / "out", "--stream", "--json")
        out, err = launch.start(2, verify, env=env).finish()
    assert out, err
    assert json.loads(out)["passed"]
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file() and p.name.endswith(".safetensors")]
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
