"""What acceptance tells: a broken head shows in it, and NVFP4 experts do not lower it."""

import pytest
from head_faults import FAULTS
from motif_convert.validate.decode import decode
from motif_convert.validate.forced import forced_acceptance, forced_positions, windows_of
from nvfp4_writer import write_nvfp4
from test_smoke import DEMO, GOLDENS, HELDOUT, loaded

WINDOWS = windows_of(HELDOUT[:512])


@pytest.fixture(scope="module")
def demo(built):
    return loaded(built(DEMO, "--recipe", "bf16"))


@pytest.fixture(scope="module")
def good(demo):
    return forced(demo)


def forced(model):
    return forced_acceptance(*forced_positions(model, WINDOWS, 0.8))


def looped(model, drafts: int, tokens: int) -> list[tuple[int, int]]:
    """Drafts and accepted ones of the four reference prompts, for each draft position."""
    runs = [decode(model, p["prompt_ids"], tokens, drafts=drafts) for p in GOLDENS["prompts"]]
    return [(sum(r.drafted[i] for r in runs), sum(r.accepted[i] for r in runs)) for i in range(drafts)]


@pytest.mark.parametrize("fault", ["[e ; h]", "pre-norm hidden", "full attention", "scales dropped"])
def test_a_broken_head_shows(demo, good, fault):
    with FAULTS[fault](demo):
        bad = forced(demo)
    assert bad["agreement"] < good["agreement"] - 0.05
    assert bad["expected_acceptance"] < good["expected_acceptance"] - 0.05


def test_a_shift_of_all_positions_is_no_fault(demo, good):
    """Rotary attention sees differences of positions alone."""
    with FAULTS["position t + 1"](demo):
        shifted = forced(demo)
    assert shifted["agreement"] == pytest.approx(good["agreement"], abs=0.002)
    assert shifted["expected_acceptance"] == pytest.approx(good["expected_acceptance"], abs=1e-4)


def test_a_second_norm_of_chained_drafts_spares_the_first_draft(demo):
    """On the demo it also spares the others: its final norm changes little of what is normed already."""
    with FAULTS["none"](demo):
        right = looped(demo, 2, 24)
    with FAULTS["chained draft normed twice"](demo):
        wrong = looped(demo, 2, 24)
    assert abs(right[0][1] / right[0][0] - wrong[0][1] / wrong[0][0]) < 0.05


def test_nvfp4_experts_keep_the_acceptance(built, tmp_path):
    """The demo packed to NVFP4, all else in BF16: within 5 points of the BF16 demo's 208 of 233."""
    recipe = tmp_path / "experts-only.yaml"
    recipe.write_text(
        "name: experts-only\nrules:\n"
        "  - {match: '*.switch_mlp.*', mode: affine, bits: 4, group_size: 64}\n"
        "  - {match: '*', dtype: source}\n"
    )
    packed = loaded(built(write_nvfp4(DEMO, tmp_path / "packed"), "--recipe", str(recipe)))
    ((drafted, accepted),) = looped(packed, 1, 111)
    assert accepted / drafted == pytest.approx(GOLDENS["k1_spec_accepted"] / GOLDENS["k1_spec_drafts"], abs=0.05)
