"""Counts and rates of drafting, said precisely; and what a text looks like from outside."""

from math import sqrt

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a proportion (Wilson 1927).

    Raises:
        ValueError: no trials.
    """
    if trials <= 0:
        raise ValueError("nothing was drafted, so there is no acceptance rate")
    p, z2 = successes / trials, Z95 * Z95
    middle = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


def drafting(drafted: list[int], accepted: list[int], emitted: int, steps: int) -> dict:
    """The rates of one run, or of several added up.

    `acceptance` is accepted / drafted. `draft_share` is another number: accepted / emitted; with one draft a
    step it is a / (1 + a), but for the ends of runs.

    Args:
        drafted, accepted: per draft position.
        emitted: tokens emitted by the steps.
        steps: forward passes of the body.
    Raises:
        ValueError: nothing was drafted.
    """
    made, held = sum(drafted), sum(accepted)
    interval = wilson(held, made)
    return {
        "drafted": made,
        "accepted": held,
        "acceptance": held / made,
        "interval": list(interval),
        "positions": [
            {"drafted": d, "accepted": a, "acceptance": a / d if d else None}
            for d, a in zip(drafted, accepted, strict=True)
        ],
        "emitted": emitted,
        "draft_share": held / emitted if emitted else 0.0,
        "tokens_per_step": emitted / steps if steps else 0.0,
    }


def text_health(tokens: list[int], stopped: bool) -> dict:
    """Signs of garbage: few distinct 4-grams, a long repeated run.

    Returns:
        `distinct_4grams`, their share of all (None below four tokens); `longest_run`, the most tokens that repeat a
        period of at most 8; `reached_end`, whether an end-of-text token came.
    """
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    longest = 0
    for period in range(1, min(8, len(tokens) - 1) + 1):
        run = 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            longest = max(longest, run + period if run >= period else 0)
    return {
        "distinct_4grams": len(set(grams)) / len(grams) if grams else None,
        "longest_run": longest,
        "reached_end": stopped,
    }
