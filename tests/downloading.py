"""What the tests of downloads share: a Hub, the command that asks it, and what it has sent."""

import pytest
from conftest import REFERENCE, motif_convert
from hub_server import HubServer

REPO = "acme/demo-motif3"
DEMO = REFERENCE / "demo-motif3"
SHARDS = sorted(p.name for p in DEMO.glob("*.safetensors"))


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "server").mkdir()
    with HubServer(tmp_path / "server") as hub:
        hub.add_repo(REPO, files={p.name: p for p in DEMO.iterdir()})
        yield hub


@pytest.fixture
def run(hub, tmp_path):
    """Runs the command in a folder of its own, with the server as the Hub."""

    def command(*args, token=None, **env):
        env = hub.env(tmp_path / "home", token) | {"HF_HUB_OFFLINE": "0"} | env
        return motif_convert(*args, cwd=tmp_path, env=env)

    return command


def sent(hub, pattern: str = r"\.safetensors(\?|$)") -> int:
    """Bytes of files that went out, but for requests of the first 64 KiB, which read headers."""
    return sum(r.sent for r in hub.seen(pattern, "GET") if r.range != "bytes=0-65535")
