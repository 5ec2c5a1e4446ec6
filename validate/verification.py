"""What verifying a build found: values that print, add up and turn into JSON."""

import math
from dataclasses import asdict, dataclass, field

from ..convert.names import FAMILIES
from .contents import Result
from .offenders import Offender

FORMAT = 1


@dataclass(frozen=True)
class Row:
    """What was compared of a family, or of a family in one layer.

    Args:
        layer: of the body; None for a whole family, and for what is in no layer.
        precisions: in which its tensors are stored.
        elements, compared: weights that there are, and that were compared.
        groups, differing: groups compared (single values in tensors without groups), and those that differ.
        worst_steps: the largest decoded error of an affine tensor, in steps of its stored scale.
        worst_share: the largest share that a code inside its range uses of half a step and the rounding of scale and
            bias (`allowed_error`); over 1 is an offender.
        snr_db: signal-to-noise ratio of the weights that were rounded; None where none was, or nothing was lost.
    """

    family: str
    layer: int | None
    precisions: list[str]
    elements: int
    compared: int
    groups: int
    differing: int
    worst_steps: float | None
    worst_share: float | None
    snr_db: float | None


@dataclass(frozen=True)
class Verification:
    """What verifying a build found.

    Args:
        problems: of the structure, one line each, naming file or tensor.
        families: what was compared, in the order of the model.
        layers: the same for each layer of each family.
        offenders: tensors, or experts of tensors, whose contents differ: the worst of `offenders_total`.
        sampled: the fraction of all weights that was compared.
        files, hashed: how many files motif-convert.json lists, and how many of them were hashed.
        other_source: whether all that is wrong is the source: it is another one.
        plan_hash: of the plan that the source and the recorded recipe give; None if nothing could be planned.
    """

    problems: list[str]
    families: list[Row]
    layers: list[Row]
    offenders: list[Offender]
    offenders_total: int
    sampled: float
    files: int
    hashed: int
    plan_hash: str | None
    other_source: bool = False

    @property
    def passed(self) -> bool:
        return not self.problems and not self.offenders_total

    def as_dict(self) -> dict:
        """The result as JSON has it.

        format           1; another number where a key changes its meaning
        passed           whether there are no problems and no offenders
        plan_hash        text, or null if the source and the recorded recipe could not be planned
        other_source     whether nothing is wrong but that the source given is another one
        sampled          fraction of the weights that was compared; 1.0 for all
        files            {"listed", "hashed"}: numbers of files; a sample does not hash shards
        problems         [text], one line each
        families         [{"family", "precisions", "elements", "compared", "groups", "differing",
                           "worst_steps", "worst_share", "snr_db"}], null where a number has no meaning; see Row
        layers           the same with "layer", null for what is in no layer of the body
        offenders_total  number of tensors, or experts of tensors, that differ
        offenders        [{"tensor", "expert", "row", "group", "groups", "expected", "found", "error"}], the worst
                         first, not all of them where there are many; see Offender, whose infinite error is null
        """
        return {
            "format": FORMAT,
            "passed": self.passed,
            "plan_hash": self.plan_hash,
            "other_source": self.other_source,
            "sampled": self.sampled,
            "files": {"listed": self.files, "hashed": self.hashed},
            "problems": list(self.problems),
            "families": [{k: v for k, v in asdict(row).items() if k != "layer"} for row in self.families],
            "layers": [asdict(row) for row in self.layers],
            "offenders_total": self.offenders_total,
            "offenders": [o.as_dict() for o in self.offenders],
        }


@dataclass
class Tally:
    """The sums of one row. Terms of float sums are kept, so that the order in which they come does not show."""

    precisions: dict[str, None] = field(default_factory=dict)
    elements: int = 0
    compared: int = 0
    groups: int = 0
    differing: int = 0
    steps: float | None = None
    share: float | None = None
    signal: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)

    def expect(self, elements: int, precision: str) -> None:
        self.elements += elements
        self.precisions[precision] = None

    def add(self, r: Result) -> None:
        self.compared += r.elements
        self.groups += r.groups
        self.differing += r.differing
        self.steps = _larger(self.steps, r.steps)
        self.share = _larger(self.share, r.share)
        self.signal.append(r.signal)
        self.noise.append(r.noise)

    def merge(self, other: "Tally") -> None:
        self.precisions |= other.precisions
        for name in ("elements", "compared", "groups", "differing", "signal", "noise"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.steps, self.share = _larger(self.steps, other.steps), _larger(self.share, other.share)

    def row(self, family: str, layer: int | None) -> Row:
        signal, noise = math.fsum(self.signal), math.fsum(self.noise)
        snr = 10 * math.log10(signal / noise) if signal and noise else None
        return Row(
            family=family,
            layer=layer,
            precisions=list(self.precisions),
            elements=self.elements,
            compared=self.compared,
            groups=self.groups,
            differing=self.differing,
            worst_steps=self.steps,
            worst_share=self.share,
            snr_db=snr,
        )


def _larger(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


class Tallies:
    """A tally for each family of each layer."""

    def __init__(self):
        self._rows: dict[tuple[str, int | None], Tally] = {}

    def of(self, family: str, layer: int | None) -> Tally:
        return self._rows.setdefault((family, layer), Tally())

    @property
    def sampled(self) -> float:
        elements = sum(t.elements for t in self._rows.values())
        return sum(t.compared for t in self._rows.values()) / elements if elements else 0.0

    def layers(self) -> list[Row]:
        order = sorted(self._rows, key=lambda key: (FAMILIES.index(key[0]), -1 if key[1] is None else key[1]))
        return [self._rows[key].row(*key) for key in order]

    def families(self) -> list[Row]:
        whole: dict[str, Tally] = {}
        for (family, _), tally in self._rows.items():
            whole.setdefault(family, Tally()).merge(tally)
        return [whole[family].row(family, None) for family in FAMILIES if family in whole]
