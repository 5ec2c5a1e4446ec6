"""The evidence that goes into a build: validation.json and validation.png.

`validation.json`, format 1: `plan_hash` of the build it speaks of; `verify` (see `Verification.as_dict`), `smoke`
(see `smoke.smoke`), `heads` (see `heads.compare_heads`), `eval` and `eval_torch` (see `divergence.report`), each null
until it was measured; `passed`, true when what was measured passed and the contents were verified whole; and `forced`,
null, or why it had not passed when the build was published all the same. Whatever is measured later takes `forced`
away, since it speaks of the evidence beside it; that the build was once published so stays in the description of that
commit.
"""

from pathlib import Path

from ..convert.checkpoint import read_json
from ..convert.journal import sole_run
from ..convert.repo import PROVENANCE
from ..convert.shards import as_json, write_file
from ..quantize.errors import SourceError
from .inspect import inspect_repo
from .shape import SHAPES, fits

EVIDENCE, PICTURE = "validation.json", "validation.png"
FORMAT = 1
PARTS = ("verify", "smoke", "heads", "eval", "eval_torch")


def record(out: Path, part: str, result: object) -> dict:
    """Puts one part's result into the build's evidence, and draws the picture again.

    Evidence of another plan is not kept.

    Args:
        part: one of PARTS.
        result: JSON.
    Returns:
        The evidence as it now is.
    Raises:
        SourceError: `out` is not a build. OutputError: it can't be written.
    """
    with sole_run(out, wait=True):
        evidence = evidence_of(out)
        whole = _verified_whole(evidence["verify"])
        if not (part == "verify" and whole and _says_nothing_new(result)):
            evidence[part] = result
        evidence |= {"passed": not what_lacks(evidence), "forced": None}
        write_file(out / EVIDENCE, as_json(evidence))
        draw(out, evidence)
    return evidence


def lacking(out: Path) -> list[str]:
    """Why the build's evidence does not say that it passed, a line each; none if it does. Raises SourceError."""
    if not (out / EVIDENCE).exists():
        return [f"verify not run: there is no {EVIDENCE}"]
    plan_hash, old = read_json(out / PROVENANCE)[0].get("plan_hash"), read_evidence(out)
    if old.get("format") == FORMAT and old.get("plan_hash") != plan_hash:
        return [f"verify not run: {EVIDENCE} is of another build"]
    return what_lacks(evidence_of(out))


def is_verified(out: Path) -> bool:
    """Whether all of this very build was compared with its source, and equal. Raises SourceError: not a build."""
    return _verified_whole(evidence_of(out)["verify"])


def what_lacks(evidence: dict) -> list[str]:
    """Why evidence does not amount to a passing one, a line each."""
    verified, smoked = evidence["verify"], evidence["smoke"]
    lines = []
    if verified is None:
        lines.append("verify not run")
    elif not verified["passed"]:
        found = [f"{len(verified['problems'])} problems"] if verified["problems"] else []
        found += [f"{verified['offenders_total']} tensors differ"] if verified["offenders_total"] else []
        lines.append(f"verify failed: {', '.join(found)}")
    elif verified["sampled"] != 1:
        lines.append(f"verify not run in full: {100 * verified['sampled']:.1f} % of the weights compared")
    for key, name in (("eval", "eval"), ("eval_torch", "eval --engine torch")):
        if (measured := evidence.get(key)) is not None and not measured["passed"]:
            lines.append(f"{name} failed: {'; '.join(measured['failures']) or 'it does not say why'}")
    if smoked is not None and not smoked["passed"]:
        lines.append(f"smoke failed: {'; '.join(smoked['failures']) or 'it does not say why'}")
    return lines


def evidence_of(out: Path) -> dict:
    """What was recorded of this very plan, in full; null where nothing was, or nothing that can be read.

    Raises:
        SourceError: `out` is not a build.
    """
    plan_hash = read_json(out / PROVENANCE)[0].get("plan_hash")
    evidence = {"format": FORMAT, "plan_hash": plan_hash, **dict.fromkeys(PARTS), "passed": False, "forced": None}
    old = read_evidence(out)
    if old.get("format") == FORMAT and old.get("plan_hash") == plan_hash:
        evidence |= {k: old.get(k) if fits(old.get(k), SHAPES[k]) else None for k in PARTS}
        evidence["forced"] = old.get("forced")
    return evidence | {"passed": not what_lacks(evidence)}


def read_evidence(out: Path) -> dict:
    """What validation.json says; nothing if it can't be read, for that proves nothing."""
    try:
        return read_json(out / EVIDENCE)[0] if (out / EVIDENCE).exists() else {}
    except SourceError:
        return {}


def _verified_whole(verified: dict | None) -> bool:
    return bool(verified and verified["passed"] and verified["sampled"] == 1)


def _says_nothing_new(verified: dict) -> bool:
    """A quick look that found nothing, or one at another source: neither speaks against a whole verification."""
    return (verified["passed"] and verified["sampled"] < 1) or verified["other_source"]


def draw(out: Path, evidence: dict) -> None:
    """`validation.png`: error by layer and family, acceptance with its intervals, size by family, and, once measured,
    what `eval` saw of each layer."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    try:
        found = inspect_repo(out)
    except SourceError:
        found = None  # a build too damaged to be read has its findings all the same
    measured = evidence.get("eval")
    figure = Figure(figsize=(17 if measured else 13, 4.2), layout="constrained")
    error, acceptance, size, *more = figure.subplots(1, 4 if measured else 3)
    if measured:
        _draw_layers(more[0], measured)
    _draw_error(error, evidence["verify"])
    _draw_acceptance(acceptance, evidence)
    _draw_size(size, found)
    state = "passed" if evidence["passed"] else "NOT passed" if evidence["verify"] else "not done: not verified"
    bits = f"{found['bits_per_weight']:.3f} bits per weight, " if found else ""
    card = ((found and found["provenance"]) or {}).get("card")
    name = card["name"] if isinstance(card, dict) and "name" in card else out.resolve().name
    figure.suptitle(_plain(f"{name}: {bits}validation {state}"))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    write_file(out / PICTURE, buffer.getvalue())


def _plain(text: object) -> str:
    """Text in which matplotlib sees no formulas."""
    return str(text).replace("$", r"\$")


def _worth_drawing(row: dict) -> bool:
    """Whether a family lost anything that shows: a float16 head is 180 dB above its rounding."""
    return row["snr_db"] is not None and row["snr_db"] < 100


def _nothing(axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_error(axes, verified: dict | None) -> None:
    axes.set_title("Signal-to-noise ratio of the weights")
    if verified is None or verified["sampled"] == 0:
        _nothing(axes, "not verified" if verified is None else "nothing was compared")
        return
    families: dict[str, list] = {}
    for row in verified["layers"]:
        if _worth_drawing(row) and row["layer"] is not None:
            families.setdefault(row["family"], []).append((row["layer"], row["snr_db"]))
    for family, points in families.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=family)
    for row in verified["families"]:
        if _worth_drawing(row) and row["family"] not in families:
            axes.axhline(row["snr_db"], linestyle=":", linewidth=1, color="grey")
            axes.annotate(row["family"], (0, row["snr_db"]), fontsize=7, va="bottom")
    if not axes.has_data():
        _nothing(axes, "every bit is the source's" if _verified_whole(verified) else "nothing was rounded")
        return
    axes.set_xlabel("layer")
    axes.set_ylabel("dB")
    if families:
        axes.legend(fontsize=7)


def _draw_acceptance(axes, evidence: dict) -> None:
    axes.set_title("MTP drafts accepted, 95 % interval")
    smoked, heads = evidence["smoke"], evidence["heads"]
    points = []
    if smoked:
        for kind in ("greedy", "sampled"):
            points += [(f"{p['name']} ({kind})", p[kind]) for p in smoked["prompts"] if p[kind]["drafted"]]
            points.append((f"all ({kind})", smoked[kind]))
    points += [(f"head {row['policy']}", row) for row in heads or []]
    if not points:
        _nothing(axes, "not measured")
        return
    for y, (_, row) in enumerate(points):
        low, high = row["interval"]
        rate = row["acceptance"]
        axes.errorbar(rate, y, xerr=[[max(rate - low, 0)], [max(high - rate, 0)]], fmt="o", color="tab:blue", capsize=3)
    axes.set_yticks(range(len(points)), [_plain(label) for label, _ in points], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    if smoked and smoked["min_acceptance"] is not None:
        axes.axvline(smoked["min_acceptance"], color="tab:red", linestyle="--", linewidth=1)


def _draw_layers(axes, measured: dict) -> None:
    """Errors of the streams by layer; suspects are marked."""
    axes.set_title(_plain(f"Against the source: KL {measured['kl']['mean']:.4f} nats a token"))
    layers = [row["layer"] for row in measured["layers"]]
    for key, label in (("error", "on its own way"), ("local", "of this layer alone")):
        axes.plot(layers, [max(row[key], 1e-9) for row in measured["layers"]], marker=".", label=label)
    for suspect in measured["suspects"]:
        axes.axvline(suspect["layer"], color="tab:red", linestyle="--", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of the streams")
    axes.legend(fontsize=7)


def _draw_size(axes, found: dict | None) -> None:
    axes.set_title("Size by family")
    if found is None:
        _nothing(axes, "not readable")
        return
    rows = found["families"]
    unit, name = (1e9, "GB") if found["total_bytes"] > 2e9 else (1e6, "MB")
    bars = axes.barh([r["family"] for r in rows], [r["bytes"] / unit for r in rows], color="tab:green")
    axes.bar_label(bars, [f"{r['bits_per_weight']:.2f} bits" for r in rows], fontsize=7, padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel(name)
