"""What differs from the source, named: tensor, expert, row, group, what should be there and what is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..quantize.oracle import affine_codes, e4m3_to_f32
from .layout import Comparison, Part
from .rounding import widen


@dataclass(frozen=True)
class Offender:
    """A tensor of a build, or one expert of it, that is not what its source gives, with the worst place in it.

    Args:
        tensor: of the build.
        expert, row, group: the worst place: row of the expert's matrix, group of `group_size` weights in that row;
            where a tensor has no groups, the number of the value in its row. None where there is no such thing.
        groups: how many groups of this tensor and expert differ.
        expected, found: there.
        error: the largest difference of the weights of that group over the largest of them; infinite where one of
            them is not finite.
    """

    tensor: str
    expert: int | None
    row: int | None
    group: int | None
    groups: int
    expected: str
    found: str
    error: float

    def __str__(self) -> str:
        places = (("expert", self.expert), ("row", self.row), ("group", self.group))
        where = "".join(f", {name} {value}" for name, value in places if value is not None)
        more = f" ({self.groups:,} groups of it differ)" if self.groups > 1 else ""
        return f"{self.tensor}{where}: expected {self.expected}, found {self.found}{more}"

    @property
    def order(self) -> tuple:
        """Worst first, then by place."""
        return -self.error, self.tensor, self.expert or 0, self.row or 0, self.group or 0

    def as_dict(self) -> dict:
        error = self.error if np.isfinite(self.error) else None
        return vars(self) | {"error": error}


Offenders = dict[tuple[str, int | None], Offender]


def add_offenders(known: Offenders, more: Iterable[Offender]) -> None:
    """Keeps one for each tensor and expert: the worst, with all groups counted."""
    for new in more:
        key = new.tensor, new.expert
        old = known.get(key)
        if old is None:
            known[key] = new
        else:
            groups = 1 if new.row is None else old.groups + new.groups
            known[key] = replace(min(old, new, key=lambda o: o.order), groups=groups)


def relative_errors(expected: np.ndarray, found: np.ndarray, group_size: int) -> np.ndarray:
    """float32 [n, K] twice -> float64 [n, K / group_size]: the `error` of each group."""
    shape = (len(expected), -1, group_size)
    with np.errstate(all="ignore"):
        off = np.abs(found.astype(np.float64) - expected).reshape(shape).max(axis=-1)
        size = np.abs(expected.astype(np.float64)).reshape(shape).max(axis=-1)
        error = np.where(off == 0, 0, off / size)
    return np.where(np.isfinite(error), error, np.inf)


def name_offenders(
    module: Comparison, part: Part, first: int, mask: np.ndarray, errors: np.ndarray, texts: Callable
) -> Iterable[Offender]:
    """One offender for each expert with a group that the mask marks.

    Args:
        first: which of all rows of the module the arrays begin with.
        mask: bool [n, groups], or [n] for a tensor with one number an expert.
        errors: float64 [n, groups].
        texts: (row, group) of the arrays -> what was expected and what was found.
    """
    rows = np.arange(first, first + len(mask))
    experts = rows // module.rows
    wide = mask if mask.ndim == 2 else np.broadcast_to(mask[:, None], errors.shape)
    for expert in np.unique(experts[wide.any(axis=1)]):
        here = wide & (experts == expert)[:, None]
        row, group = np.unravel_index(np.argmax(np.where(here, errors, -1)), here.shape)
        expected, found = texts(row, group)
        yield Offender(
            tensor=part.name,
            expert=int(expert) if module.stacked else None,
            row=int(rows[row] % module.rows) if mask.ndim == 2 else None,
            group=int(group) if mask.ndim == 2 else None,
            groups=int(here.sum()) if mask.ndim == 2 else 1,
            expected=expected,
            found=found,
            error=float(errors[row, group]),
        )


def describe(
    module: Comparison, part: Part, expected: np.ndarray, found: np.ndarray, row: int, group: int
) -> tuple[str, str]:
    """What a group of raw rows should be and what it is: its first code that differs, or its number and the bits."""
    if part.dtype == "U32":
        bits, size = module.precision.bits, module.precision.group_size
        words = slice(group * size * bits // 32, (group + 1) * size * bits // 32)
        want, got = (affine_codes(rows[row, words], bits, size) for rows in (expected, found))
        at = np.flatnonzero(want != got)
        more = f" ({len(at)} of its {size} codes differ)" if len(at) > 1 else ""
        return f"code {want[at[0]]} at {at[0]}", f"{got[at[0]]}{more}"
    place = (row, group) if expected.ndim == 2 else row
    return _number(part.dtype, expected[place]), _number(part.dtype, found[place])


def beyond_bound(shares: np.ndarray, row: int, group: int) -> tuple[str, str]:
    """For a group that has the right bits, and yet decodes to what the arithmetic does not allow."""
    return "a decoded error within half a step and the rounding", f"{shares[row, group]:.3f} times that"


def _number(dtype: str, raw: np.integer) -> str:
    value = e4m3_to_f32(raw) if dtype == "U8" else widen(np.array([raw]), dtype)[0]
    return f"{value:.6g} (0x{int(raw):0{2 * raw.itemsize}X})"
