"""A build's layers shared by ranks over the loopback, by stock mlx-lm under mlx.launch: as one process, bit for bit."""

import json
import sys
import urllib.request
from pathlib import Path

import launch
import mlx.core as mx
import mlx_lm
import pipeline_rank
import pytest
from conftest import REFERENCE, SMALL_CONFIG, random_weights, write_checkpoint
from test_generate import SCRIPTS, wait_until_healthy

DEMO = REFERENCE / "demo-motif3"
BUILDS = {"bf16": ("--recipe", "bf16"), "4.5 bits": ("--bits", "4.5", "--mtp", "fp16")}
COMPARED = ("generated", "drafted", "values")


@pytest.fixture(scope="module")
def shallow(built, tmp_path_factory):
    """A build of two layers."""
    config = SMALL_CONFIG | {"num_hidden_layers": 2}
    source = write_checkpoint(tmp_path_factory.mktemp("shallow") / "source", config, random_weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((DEMO / name).read_bytes())
    return built(source, "--recipe", "bf16")


@pytest.fixture(scope="module")
def folders(built):
    return {name: str(built(DEMO, *options)) for name, options in BUILDS.items()}


@pytest.fixture(scope="module")
def one(folders, shallow):
    """What one process computes, with stock `mlx_lm.load`."""
    return pipeline_rank.facts(list(folders.values()), str(shallow), mx.distributed.init())


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, folders, shallow, tmp_path_factory):
    """What each rank of a pipeline says, rank 0 first."""
    out = tmp_path_factory.mktemp("ranks")
    script = Path(pipeline_rank.__file__)
    _, err = launch.start(request.param, [sys.executable, script, out, shallow, *folders.values()]).finish()
    assert len(list(out.iterdir())) == request.param, err
    return [json.loads((out / f"{request.param}-{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("build", BUILDS)
def test_every_rank_computes_what_one_process_does(build, ranks, one, folders):
    """Tokens of mlx-lm's loop, and of ours with drafts; drafts that hold; logits, hidden states, the head's values."""
    whole = json.loads(json.dumps(one[folders[build]]))
    for rank, found in enumerate(ranks):
        for what in COMPARED:
            assert found[folders[build]][what] == whole[what], f"rank {rank}: {what}"


def test_every_rank_reports_the_smoke_of_one_process(ranks, one):
    assert one["smoked"]["lossless"]
    assert ranks == [found | {"smoked": json.loads(json.dumps(one["smoked"]))} for found in ranks]


@pytest.mark.parametrize("build", BUILDS)
def test_layers_are_shared_and_rank_0_has_the_head(build, ranks, one, folders, record_property):
    whole = one[folders[build]]["held"]
    parts = [found[folders[build]] for found in ranks]
    per_layer = []
    for rank, part in enumerate(parts):
        held = part["held"]
        assert held == {name: whole[name] for name in held}
        own = sorted({int(name.split(".")[2]) for name in held if name.startswith("model.layers.")})
        assert part["layers"] == part["caches"] == len(own)
        per_layer = own + per_layer  # rank 0 has the last
        assert any(name.startswith("mtp.") for name in held) == (rank == 0)
        common = {name for name in whole if not name.startswith(("model.layers.", "mtp."))}
        assert common <= set(held)
        record_property(f"bytes of rank {rank} of {len(parts)}, {build}", sum(held.values()))
    assert per_layer == list(range(one[folders[build]]["layers"]))
    assert {name for part in parts for name in part["held"]} == set(whole)
    assert max(sum(part["held"].values()) for part in parts) < sum(whole.values())


def test_more_ranks_than_layers_are_refused_in_one_line(ranks, one, shallow):
    assert one["refusal"] is None
    said = [found["refusal"] for found in ranks]
    if len(ranks) == 2:
        assert said == [None, None]
    else:
        assert len(set(said)) == 1
        assert said[0].startswith(str(shallow))
        assert "3 ranks are too many: the model has 2 layers" in said[0]
        assert "\n" not in said[0]


def test_mlx_lm_serves_from_two_ranks(folders):
    prompt = bytes(pipeline_rank.PROMPTS[3]).decode()
    model, tokenizer = mlx_lm.load(folders["4.5 bits"], trust_remote_code=True)
    expected = mlx_lm.generate(model, tokenizer, prompt=prompt, max_tokens=12)
    port = launch.ports(1)
    options = ["--host", "127.0.0.1", "--port", port, "--trust-remote-code", "--pipeline"]
    command = [sys.executable, SCRIPTS / "mlx_lm.server", "--model", folders["4.5 bits"], *options]
    body = json.dumps({"prompt": prompt, "max_tokens": 12, "temperature": 0}).encode()
    server, address = launch.start(2, command), f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(address, server.process, lambda: server.err)
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=launch.SECONDS) as response:
            answer = json.load(response)
    finally:
        server.end()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == 12
