"""What a recorded result may look like and be read on: card and picture can be made of all that is taken."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REFERENCE, motif_convert
from matplotlib.figure import Figure
from motif_convert.recipes.card_text import evidence_section
from motif_convert.validate.evidence import _draw_acceptance, _draw_error, _draw_layers
from motif_convert.validate.shape import SHAPES, fits

TINY = REFERENCE / "tiny-motif3"
GONE = object()
ODD = (GONE, None, "x", -1, [], {}, 10**400)


@pytest.fixture(scope="module")
def evidence(built, tmp_path_factory) -> dict:
    """validation.json of a build that was verified and evaluated."""
    out = Path(shutil.copytree(built(TINY), tmp_path_factory.mktemp("shape") / "out"))
    assert motif_convert("verify", out, "--source", TINY).returncode == 0
    assert motif_convert("eval", out, "--source", TINY, "--tokens", 60, "--lens").returncode == 0
    found = json.loads((out / "validation.json").read_text())
    found["eval"]["suspects"] = [{"layer": 2, "what": "median", "error": 0.5, "best": 0.1}]
    found["eval"]["failures"] = ["mean KL 3 is above 2"]
    return found


def places(value: object) -> Iterator[tuple]:
    """The way to everything in JSON, of lists to the first item alone."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, child in children:
        yield (key,)
        yield from ((key, *rest) for rest in places(child))


def changed(value: object, place: tuple, to: object) -> object:
    made = copy.deepcopy(value)
    at = made
    for key in place[:-1]:
        at = at[key]
    if to is GONE:
        del at[place[-1]]
    else:
        at[place[-1]] = to
    return made


@pytest.mark.parametrize("part", ["verify", "eval"])
def test_what_fits_can_be_shown(part, evidence):
    assert fits(evidence[part], SHAPES[part])
    taken = refused = 0
    for place in places(evidence[part]):
        for odd in ODD:
            made = evidence | {part: changed(evidence[part], place, odd)}
            if not fits(made[part], SHAPES[part]):
                refused += 1
                continue
            taken += 1
            axes = Figure().subplots()
            try:
                evidence_section(made)
                _draw_error(axes, made["verify"])
                _draw_acceptance(axes, made)
                _draw_layers(axes, made["eval"])
            except Exception as e:
                pytest.fail(f"{place} {odd!r}: {type(e).__name__}: {e}")
    assert taken
    assert refused


def test_text_of_a_stranger_is_text_in_the_card(evidence):
    made = copy.deepcopy(evidence)
    made["eval"]["failures"] = ["<b>x</b>\n# all is well"]
    made["eval"]["suspects"][0]["what"] = "[x](http://y)"
    card = evidence_section(made)
    assert "<b>" not in card
    assert "\n# all" not in card
    assert "[x](" not in card
