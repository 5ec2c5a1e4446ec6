"""Whether a recorded result can be read on: the keys and the types that the rest relies on, however it was edited."""

import math

COUNT, NUMBER, TEXT, FLAG = "count", "number", "text", "flag"


class Maybe:
    """A shape, or null."""

    def __init__(self, shape: object):
        self.shape = shape


ROW = {
    "family": TEXT,
    "precisions": [TEXT],
    "elements": COUNT,
    "compared": COUNT,
    "groups": COUNT,
    "differing": COUNT,
    "worst_steps": Maybe(NUMBER),
    "worst_share": Maybe(NUMBER),
    "snr_db": Maybe(NUMBER),
}
RATES = {"drafted": COUNT, "accepted": COUNT, "acceptance": Maybe(NUMBER)}
MEASURED = RATES | {"acceptance": NUMBER, "interval": (NUMBER, NUMBER), "tokens_per_step": NUMBER}
FORCED = {"positions": COUNT, "agreement": NUMBER, "expected_acceptance": NUMBER}
SHIFT = {"value": NUMBER, "interval": (NUMBER, NUMBER)}
WORDS = {"bits_per_byte": NUMBER, "perplexity": NUMBER}
WORDS |= {"forced_agreement": Maybe(NUMBER), "expected_acceptance": Maybe(NUMBER)}
SPEED = dict.fromkeys(("plain_tokens_per_second", "drafting_tokens_per_second", "speed_up", "at_best"), NUMBER)
SUSPECTS = [{"layer": COUNT, "what": TEXT, "error": NUMBER, "best": NUMBER}]
DIVERGENCE = {"kl": {"mean": NUMBER, "median": NUMBER, "p99": NUMBER}, "top1_agreement": NUMBER, "suspects": SUSPECTS}
EVAL = DIVERGENCE | {
    "passed": FLAG,
    "failures": [TEXT],
    "tokens": COUNT,
    "window": COUNT,
    "dtype": TEXT,
    "temperature": NUMBER,
    "source": WORDS,
    "build": WORDS,
    "differences": {"bits_per_byte": SHIFT, "kl": SHIFT, "forced_agreement": Maybe(SHIFT)}
    | {"expected_acceptance": Maybe(SHIFT)},
    "layers": [{"layer": COUNT, "kind": TEXT, "error": NUMBER, "local": NUMBER, "local_p99": NUMBER}],
}
SHAPES = {
    "verify": {
        "passed": FLAG,
        "sampled": NUMBER,
        "other_source": FLAG,
        "problems": [TEXT],
        "offenders_total": COUNT,
        "families": [ROW],
        "layers": [ROW | {"layer": Maybe(COUNT)}],
    },
    "smoke": {
        "passed": FLAG,
        "failures": [TEXT],
        "lossless": FLAG,
        "device": TEXT,
        "dtype": TEXT,
        "drafts": COUNT,
        "temperature": NUMBER,
        "min_acceptance": Maybe(NUMBER),
        "greedy": MEASURED,
        "sampled": MEASURED,
        "forced": FORCED,
        "speed": SPEED,
        "prompts": [{"name": TEXT, "greedy": RATES, "sampled": RATES}],
    },
    "eval": EVAL,
    "eval_torch": EVAL | {"other_engine": DIVERGENCE},
    "heads": [
        {
            "policy": TEXT,
            "acceptance": NUMBER,
            "interval": (NUMBER, NUMBER),
            "forced": FORCED,
            "tokens_per_second": NUMBER,
        }
    ],
}


def fits(value: object, shape: object) -> bool:
    """Whether JSON has a shape: a dict's keys (it may have more), a list's items, a tuple's places, or a kind."""
    if isinstance(shape, Maybe):
        return value is None or fits(value, shape.shape)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(k in value and fits(value[k], s) for k, s in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(v, shape[0]) for v in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(fits, value, shape))
    if shape == TEXT:
        return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)  # so that it can be written
    if shape == FLAG:
        return isinstance(value, bool)
    if type(value) is int:
        return abs(value) < 1 << 63 and (shape == NUMBER or value >= 0)
    return shape == NUMBER and type(value) is float and math.isfinite(value)
