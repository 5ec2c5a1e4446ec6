"""Verify: clean builds pass, whole and in samples; broken kernels and other faults of ours do not."""

import json
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import REFERENCE, SMALL_CONFIG, random_weights, read_safetensors, write_safetensors
from spoiled import DEMO, DOWN, GATE, NVFP4, PROVENANCE, TINY, UP, converted, named, verify

# --- clean builds ---


CLEAN = {
    "tiny": (TINY, "--keep-mtp-fp16"),
    "small": ("small", "--keep-mtp-fp16"),
    "nvfp4": (NVFP4,),
    "nvfp4-8bit": (NVFP4, "--bits", "8"),
    "nvfp4-bf16": (NVFP4, "--recipe", "bf16"),
    "nvfp4-affine": (NVFP4, "--experts", "affine"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_build_passes(built, small, name):
    source, *options = CLEAN[name]
    source = small if source == "small" else source
    out, read = built(source, *options), []
    result = verify(out, source, progress=read.append)
    assert (result.problems, result.offenders, result.offenders_total) == ([], [], 0)
    assert result.passed
    assert result.sampled == 1.0
    weights = {n: prod(t[1]) * (2 if t[0] == "U8" else 1) for n, t in read_safetensors(source).items()}
    scales = [n for n in weights if n.endswith(("_weight_scale", "_weight_scale_2"))]
    expected = sum(n for name, n in weights.items() if name not in scales)
    read_once = sum(len(t[2]) for n, t in read_safetensors(source).items() if not n.endswith("_weight_scale_2"))
    assert sum(f.compared for f in result.families) == sum(f.elements for f in result.families) == expected
    assert sum(r.compared for r in result.layers) == expected
    assert result.files == result.hashed == len(json.loads((out / PROVENANCE).read_text())["files"])
    assert sum(read) == read_once
    for row in result.layers:
        assert row.worst_share is None or 0.3 < row.worst_share <= 1
        assert row.worst_steps is None or 0.4 < row.worst_steps < 2.5


def test_the_json_is_strict_and_as_documented(built, small):
    found = verify(built(small, "--keep-mtp-fp16"), small).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(found) == [
        *("format", "passed", "plan_hash", "other_source", "sampled", "files", "problems", "families", "layers"),
        *("offenders_total", "offenders"),
    ]
    assert (found["format"], found["passed"]) == (1, True)
    row = [
        "family",
        "precisions",
        "elements",
        "compared",
        "groups",
        "differing",
        "worst_steps",
        "worst_share",
        "snr_db",
    ]
    assert [list(f) for f in found["families"]] == [row] * 10
    assert all(sorted(r) == sorted([*row, "layer"]) for r in found["layers"])
    made = json.loads((built(small, "--keep-mtp-fp16") / PROVENANCE).read_text())
    assert found["plan_hash"] == made["plan_hash"]


def noise_and_steps(made: dict, exact: dict[str, np.ndarray], bits: int) -> tuple[float, float]:
    """SNR in dB and the worst step of affine modules, decoded by mlx: path -> the source's float32 weights, which
    BF16 holds once more before they are quantized."""
    signal = noise = worst = 0.0
    for path, weights in exact.items():
        scales, biases = (made[path + s].astype(mx.float32) for s in (".scales", ".biases"))
        decoded = np.array(mx.dequantize(made[path + ".weight"], scales, biases, 64, bits, stream=mx.cpu), np.float64)
        signal, noise = signal + (weights.astype("f8") ** 2).sum(), noise + ((decoded - weights) ** 2).sum()
        rounded = np.array(mx.array(weights).astype(mx.bfloat16).astype(mx.float32))
        worst = max(worst, (np.abs(decoded - rounded) / np.abs(np.array(scales)).repeat(64, -1)).max())
    return 10 * np.log10(signal / noise), worst


def load(folder: Path) -> dict[str, mx.array]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= mx.load(str(path))
    return tensors


def test_noise_and_steps_by_a_second_way(built, small):
    out, source = built(small, "--keep-mtp-fp16"), load(small)
    row = next(r for r in verify(out, small).layers if (r.family, r.layer) == ("routed experts", 1))
    fused, down = (
        np.array(source[f"model.layers.1.moe.experts.{name}"].astype(mx.float32))
        for name in ("gate_up_proj", "down_proj")
    )
    snr, worst = noise_and_steps(load(out), {GATE: fused[:, :128], UP: fused[:, 128:], DOWN: down}, 4)
    assert row.snr_db == pytest.approx(snr, abs=1e-3)
    assert row.worst_steps == pytest.approx(worst, rel=1e-4)


def test_noise_of_nvfp4_experts_is_against_their_exact_weights(built):
    out, source = built(NVFP4, "--bits", "8"), mx.load(str(REFERENCE / "tiny-nvfp4-dequant.safetensors"))
    row = next(r for r in verify(out, NVFP4).layers if (r.family, r.layer) == ("routed experts", 3))
    fused, down = (np.array(source[f"model.layers.3.moe.experts.{name}"]) for name in ("gate_up_proj", "down_proj"))
    base = "model.layers.3.mlp.switch_mlp."
    exact = {f"{base}gate_proj": fused[:, :64], f"{base}up_proj": fused[:, 64:], f"{base}down_proj": down}
    snr, worst = noise_and_steps(load(out), exact, 8)
    assert row.snr_db == pytest.approx(snr, abs=1e-3)
    assert row.worst_steps == pytest.approx(worst, rel=1e-4)


@pytest.mark.parametrize(
    ("source", "recipe", "policy"),
    [
        ("small", "8bit", "bf16"),
        (TINY, "4.5bit", "8"),
        (DEMO, "bf16", "4.5"),
        (TINY, "8bit", "drop"),
        (DEMO, "8bit", "fp16"),
    ],
)
def test_every_policy_for_the_head(small, tmp_path, source, recipe, policy):
    source = small if source == "small" else source
    build = converted(source, policy, tmp_path / "out", recipe)
    result = verify(build.folder, source)
    assert result.passed, result
    assert [f.family for f in result.families].count("MTP head") == (policy != "drop")
    if policy != "drop":
        build["mtp.final_layernorm.weight"][9] ^= 128
        (found,) = verify(build.seal().folder, source).offenders
        assert (found.tensor, found.row, found.group) == ("mtp.final_layernorm.weight", 0, 4)


def write_floats(folder: Path, config: dict, weights: dict[str, np.ndarray], dtype: str) -> Path:
    """A checkpoint of one shard in F16 or F32, or of raw BF16 bits."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {n: (dtype, w.shape, w.tobytes()) for n, w in weights.items()})
    return folder


def floats(kind: str) -> dict[str, np.ndarray]:
    return {
        n: (w.astype(np.uint32) << 16).view(np.float32).astype(kind) for n, w in random_weights(SMALL_CONFIG).items()
    }


def test_float32_source_and_a_head_rounded_to_float16(tmp_path):
    """Ties, subnormals, values that vanish and both zeros, so that rounding is more than cutting off."""
    weights = floats("f4")
    rng = np.random.default_rng(0)
    for name in (n for n in weights if ".mtp_layers." in n):
        w = weights[name].reshape(-1)
        w *= 2.0 ** rng.integers(-20, 3, w.size).astype("f4")
        near = w.astype(np.float16).astype("f4")
        tie = (near + np.nextafter(near.astype(np.float16), np.float16(9)).astype("f4")) / 2
        w[::3] = tie[::3]
        w[:3] = [0.0, -0.0, 2.0**-25][: w.size]
    source = write_floats(tmp_path / "source", SMALL_CONFIG, weights, "F32")
    result = verify(converted(source, "fp16", tmp_path / "out").folder, source)
    assert result.passed, result
    head = next(f for f in result.families if f.family == "MTP head")
    assert 60 < head.snr_db < 80  # float16 keeps 11 bits: 6.02 * 11 + 5 or so


def test_float16_source_and_a_head_rounded_to_bfloat16(tmp_path):
    source = write_floats(tmp_path / "source", SMALL_CONFIG, floats("f2"), "F16")
    build = converted(source, "bf16", tmp_path / "out")
    result = verify(build.folder, source)
    assert result.passed, result
    build["mtp.input_proj.weight"][130] ^= 1  # value 65, of 128 a row
    (found,) = verify(build.seal().folder, source).offenders
    assert (found.tensor, found.expert, found.row, found.group) == ("mtp.input_proj.weight", None, 0, 65)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_any_finite_bits_can_be_verified(tmp_path, dtype):
    """Matrices of random bits: zeros of both signs, subnormals, groups that overflow."""
    rng = np.random.default_rng(1)
    infinity, odd = {"BF16": (0x7F80, 0x80), "F16": (0x7C00, 0x400), "F32": (0x7F800000, 0x800000)}[dtype]
    bits = np.uint32 if dtype == "F32" else np.uint16
    weights = random_weights(SMALL_CONFIG) if dtype == "BF16" else floats("f4" if dtype == "F32" else "f2")
    for name, w in weights.items():
        if w.ndim > 1:
            x = weights[name] = rng.integers(0, np.iinfo(bits).max, w.shape, bits, endpoint=True)
            x[x & infinity == infinity] ^= odd  # the exponent below: the largest of finite numbers
    source = write_floats(tmp_path / "source", SMALL_CONFIG, weights, dtype)
    result = verify(converted(source, "4.5", tmp_path / "out").folder, source)
    assert result.passed, result
    json.dumps(result.as_dict(), allow_nan=False)
    assert all(f.worst_steps is None or 0.4 < f.worst_steps < 3 for f in result.families)


# --- samples ---


@pytest.mark.parametrize("expert", [0, 2, 4])
@pytest.mark.parametrize("path", [GATE, UP, DOWN])
def test_a_sample_has_the_first_the_middle_and_the_last_expert(spoiled, small, path, expert):
    spoiled.array(f"{path}.weight")[expert, -1] ^= 16
    result = verify(spoiled.folder, small, sample=1e-6)
    assert named(result) == {f"{path}.weight": {expert}}
    assert result.sampled < 1


def test_a_sample_is_a_sample(spoiled, small):
    names = [f"{path}.weight" for path in (GATE, UP, DOWN)]
    for name in names:
        spoiled.array(name)[[1, 3], 0] ^= 1
    result = verify(spoiled.folder, small, sample=1e-6)
    assert result.passed
    assert result.hashed == result.files - 1  # all but the shard
    results = [verify(spoiled.folder, small, sample=s) for s in (0.2, 0.8, 0.8, 1.0)]
    assert results[0].sampled < results[1].sampled < 1.0
    assert results[1] == results[2]
    assert results[3].sampled == 1.0
    assert named(results[3]) == {name: {1, 3} for name in names}
    assert any("sha256" in p for p in results[3].problems)


@pytest.mark.parametrize("options", [(), ("--bits", "8")])
def test_a_sample_of_nvfp4(copy, options):
    build = copy(NVFP4, *options)
    assert verify(build.folder, NVFP4, sample=1e-6).passed
    if not options:
        build["model.layers.5.mlp.switch_mlp.down_proj.global_scale"][4 * 7] ^= 1  # of the last of 8 experts
        (found,) = verify(build.folder, NVFP4, sample=1e-6).offenders
        assert (found.expert, found.row, found.groups) == (7, None, 1)
        assert str(found).startswith("model.layers.5.mlp.switch_mlp.down_proj.global_scale, expert 7: expected ")


@pytest.mark.parametrize("sample", [0, -0.1, 1.1, float("nan")])
def test_a_sample_is_a_fraction(built, small, sample):
    with pytest.raises(ValueError, match="sample"):
        verify(built(small, "--keep-mtp-fp16"), small, sample=sample)
