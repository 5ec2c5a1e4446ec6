"""Which of several ranks makes which shards of a plan."""

import re

from .plan import Module, Plan
from .ranks import Ranks


def part_of(plan: Plan, ranks: Ranks) -> list[str]:
    """The shards that are this rank's to write, in order.

    A run of them, by the bytes that they are made of; or, if each rank keeps its own, those that mlx-lm's pipeline
    looks for on it: of `PipelineMixin.pipeline`'s layers, the last ones on rank 0, and of what is in no layer.
    """
    if not (ranks.local and ranks.several):
        return share_of({name: sum(m.source_nbytes for m in modules) for name, modules in plan.shards.items()}, ranks)
    layers = sorted({layer for m in plan.modules if (layer := _layer(m)) is not None})
    fewest, more = divmod(len(layers), ranks.size)
    counts = [fewest + (rank < more) for rank in range(ranks.size)]
    start = sum(counts[ranks.rank + 1 :])
    mine = {None, *layers[start : start + counts[ranks.rank]]}
    return [name for name, modules in plan.shards.items() if any(_layer(m) in mine for m in modules)]


def _layer(module: Module) -> int | None:
    match = re.match(r"model\.layers\.(\d+)\.", module.path)
    return int(match[1]) if match else None


def share_of(sizes: dict[str, int], ranks: Ranks) -> list[str]:
    """This rank's part of things in order, by bytes: a run of them, so that neighbours stay together.

    Args:
        sizes: bytes of each.
    Returns:
        Names; the parts of all ranks are all names. A thing goes to the rank in whose part its middle lies.
    """
    total, start, mine = max(1, sum(sizes.values())), 0, []
    for name, size in sizes.items():
        if min(ranks.size - 1, (2 * start + size) * ranks.size // (2 * total)) == ranks.rank:
            mine.append(name)
        start += size
    return mine
