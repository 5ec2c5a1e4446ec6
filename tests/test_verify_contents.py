"""Verify: every fault in the contents of a build is found and named."""

from math import prod

import numpy as np
import pytest
from spoiled import DOWN, EXPERTS, GATE, NVFP4, ROUTER, UP, Build, named, verify

PARTS = (".weight", ".scales", ".biases")


@pytest.mark.parametrize(
    ("tensor", "byte", "bit", "place"),
    [
        (f"{GATE}.weight", (3 * 128 + 17) * 32 + 9, 2, (3, 17, 0)),  # 64 codes of 4 bits a row
        (f"{DOWN}.scales", (4 * 64 + 63) * 4 + 2, 0, (4, 63, 1)),  # 2 groups of 2 bytes a row
        (f"{UP}.biases", 1, 7, (0, 0, 0)),
        ("model.layers.0.self_attn.wo.weight", 5 * 384 + 100, 0, (None, 5, 1)),  # 384 codes of 8 bits a row
        (ROUTER, 4 * 128 + 2 * 63, 0, (None, 4, 63)),
        ("model.layers.1.mlp.switch_mlp.act_fn.weight", 2 * 6 + 4, 3, (2, 0, 2)),  # 3 values an expert
        ("model.norm.weight", 11, 6, (None, 0, 5)),
        ("mtp.input_proj.weight", (7 * 128 + 127) * 2, 0, (None, 7, 127)),
    ],
)
def test_one_flipped_bit_is_named(spoiled, small, tensor, byte, bit, place):
    before = spoiled[tensor][byte]
    spoiled[tensor][byte] ^= 1 << bit
    by_hash = verify(spoiled.folder, small)
    assert "sha256" in by_hash.problems[0]
    result = verify(spoiled.seal().folder, small)
    assert not result.passed
    assert result.problems == []
    (found,) = result.offenders
    assert (found.tensor, (found.expert, found.row, found.group), found.groups) == (tensor, place, 1)
    assert sum(f.differing for f in result.families) == 1
    if spoiled.place[tensor][3] != "U32":
        after = spoiled[tensor][byte]
        assert [f"{before:02X}" in found.expected, f"{after:02X}" in found.found] == [True, True]
    line = str(found)
    assert line.startswith(f"{tensor}, " + (f"expert {place[0]}, row" if place[0] is not None else "row"))
    assert found.expected in line
    assert found.found in line


def test_the_code_that_differs_is_shown(spoiled, small):
    row = spoiled.array(f"{GATE}.weight")[1, 7 * 32 : 8 * 32]
    low, high = int(row[20]) & 15, int(row[20]) >> 4
    row[20] = (low ^ 5) | high << 4
    (found,) = verify(spoiled.seal().folder, small).offenders
    assert (found.expected, found.found) == (f"code {low} at 40", f"{low ^ 5}")


def swap_experts(build: Build) -> dict[str, set]:
    for part in PARTS:
        a = build.array(GATE + part)
        a[[1, 3]] = a[[3, 1]]
    return {GATE + part: {1, 3} for part in PARTS}


def swap_gate_and_up(build: Build) -> dict[str, set]:
    for part in PARTS:
        gate, up = build[GATE + part], build[UP + part]
        gate[:], up[:] = up.copy(), gate.copy()
    return {path + part: set(range(EXPERTS)) for path in (GATE, UP) for part in PARTS}


def shift_rows_by_a_group(build: Build) -> dict[str, set]:
    for part, size in zip(PARTS, (32, 2, 2), strict=True):
        a = build[DOWN + part]
        a[:] = np.roll(a, size)
    return {DOWN + part: set(range(EXPERTS)) for part in PARTS}


def shuffle_rows(build: Build) -> dict[str, set]:
    order = np.random.default_rng(0).permutation(128)
    for part in PARTS:
        a = build.array(UP + part)[2].reshape(128, -1)
        a[:] = a[order]
    return {UP + part: {2} for part in PARTS}


def zero_past_an_offset(build: Build) -> dict[str, set]:
    """As a tensor of over 2^31 elements goes wrong: right up to the middle of an expert, then nothing."""
    for part in PARTS:
        a = build.array(DOWN + part)
        a[3, a.shape[1] // 3 :] = 0
        a[4] = 0
    return {DOWN + part: {3, 4} for part in PARTS}


def repeat_an_expert(build: Build) -> dict[str, set]:
    for part in PARTS:
        a = build.array(GATE + part)
        a[4] = a[3]
    return {GATE + part: {4} for part in PARTS}


def scales_of_the_neighbour(build: Build) -> dict[str, set]:
    build[f"{GATE}.scales"][:] = build[f"{UP}.scales"]
    return {f"{GATE}.scales": set(range(EXPERTS))}


def negate_a_group(build: Build) -> dict[str, set]:
    """Scale and bias with the sign turned round: the range is the same."""
    for part in PARTS[1:]:
        build.array(DOWN + part)[2, 1] ^= 0x80
    return {DOWN + part: {2} for part in PARTS[1:]}


def cut_to_fp8(build: Build) -> dict[str, set]:
    """3 bits of mantissa left of 7."""
    build[ROUTER].view("<u2")[:] &= 0xFFF0
    return {ROUTER: {None}}


def head_of_another_dtype(build: Build) -> dict[str, set]:
    """The bits of BF16 where float16 is said to be."""
    name = "mtp.self_attn.wo.weight"
    a = build[name].view("<u2")
    a[:] = (a.view(np.float16).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {name: {None}}


FAULTS = (
    *(swap_experts, swap_gate_and_up, shift_rows_by_a_group, shuffle_rows, zero_past_an_offset, repeat_an_expert),
    *(scales_of_the_neighbour, negate_a_group, cut_to_fp8, head_of_another_dtype),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_what_is_only_plausible_is_found(spoiled, small, fault):
    expected = fault(spoiled)
    result = verify(spoiled.seal().folder, small)
    assert result.problems == []
    assert not result.passed
    assert named(result) == expected
    assert result.offenders_total == sum(map(len, expected.values()))
    errors = [o.error for o in result.offenders]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("part", "byte", "place"),
    [
        (".weight", (5 * 64 + 33) * 64 + 63, (5, 33, 7)),  # 128 codes of 4 bits a row, 8 a group
        (".scales", (2 * 64 + 1) * 8 + 6, (2, 1, 6)),
        (".global_scale", 7 * 4, (7, None, None)),
    ],
)
def test_nvfp4_experts(copy, part, byte, place):
    build = copy(NVFP4)
    path = "model.layers.3.mlp.switch_mlp.up_proj"
    build[path + part][byte] ^= 1
    result = verify(build.seal().folder, NVFP4)
    (found,) = result.offenders
    assert (found.tensor, (found.expert, found.row, found.group)) == (path + part, place)


def test_nvfp4_experts_decoded(copy):
    build = copy(NVFP4, "--recipe", "bf16")
    name = "model.layers.3.mlp.switch_mlp.up_proj.weight"  # [8, 64, 128]
    build[name][((6 * 64 + 2) * 128 + 77) * 2] ^= 1
    (found,) = verify(build.seal().folder, NVFP4).offenders
    assert (found.tensor, found.expert, found.row, found.group) == (name, 6, 2, 77)


def test_200_random_flipped_bits(copy, small):
    """Drawn over all bits of all tensors; those that fall into different tensors or experts are verified together."""
    build = copy(small, "--keep-mtp-fp16")
    rng = np.random.default_rng(4)
    names = list(build.place)
    sizes = np.array([build.place[n][2] for n in names])
    batches: list[dict] = []
    for at in rng.choice(8 * sizes.sum(), 200, replace=False):
        byte, bit = divmod(int(at), 8)
        index = int(np.searchsorted(np.cumsum(sizes), byte, side="right"))
        name, byte = names[index], byte - int(sizes[:index].sum())
        expert, row, group = where(build, name, byte)
        batch = next((b for b in batches if (name, expert) not in b), None)
        if batch is None:
            batches.append(batch := {})
        batch[name, expert] = (byte, 1 << bit, row, group)
    assert sum(map(len, batches)) == 200
    assert max(map(len, batches)) <= 100
    hits = 0
    for batch in batches:
        for (name, _), (byte, mask, _, _) in batch.items():
            build[name][byte] ^= mask
        result = verify(build.seal().folder, small)
        assert {(o.tensor, o.expert): (o.row, o.group, o.groups) for o in result.offenders} == {
            key: (row, group, 1) for key, (_, _, row, group) in batch.items()
        }
        hits += result.offenders_total
        for (name, _), (byte, mask, _, _) in batch.items():
            build[name][byte] ^= mask
    assert hits == 200
    assert verify(build.seal().folder, small).passed


def where(build: Build, name: str, byte: int) -> tuple[int | None, int, int]:
    """Expert, row and group of a byte of a tensor, from its shape alone."""
    _, _, size, dtype, shape = build.place[name]
    stacked = ".switch_mlp." in name
    experts, *rest = shape if stacked else (1, *shape)
    rows = prod(rest[:-1])
    row_bytes = size // experts // rows
    expert, row = divmod(byte // row_bytes, rows)
    groups = build.place[name.removesuffix(".weight") + ".scales"][4][-1] if dtype == "U32" else rest[-1]
    return (expert if stacked else None), row, byte % row_bytes // (row_bytes // groups)
