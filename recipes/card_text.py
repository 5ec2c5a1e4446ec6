"""The evidence of a build as a section of its card, with what each number means."""

import re

from .eval_text import divergence_sentence, model_rows, suspect_lines
from .show import draft_row, markdown_table, percent, variety

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def plain(text: object) -> str:
    """Foreign text as Markdown that renders as that text, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def evidence_section(evidence: dict) -> str:
    """`## Evidence`, from validation.json; it says of what is missing that it is."""
    verified, smoked, heads = (evidence.get(k) for k in ("verify", "smoke", "heads"))
    parts = ["## Evidence"]
    if evidence.get("forced"):
        parts.append(f"**Published with `--force`, though it had not passed:** {plain(evidence['forced'])}.")
    if verified:
        parts.append("**Passed.**" if evidence["passed"] else "**Not passed.**")
    parts += _verification(verified) if verified else ["Not verified: its weights were not compared with the source."]
    parts += _drafting(smoked) if smoked else ["The drafts of the MTP head were not measured."]
    if heads:
        parts += _heads(heads)
    if measured := evidence.get("eval"):
        parts += _divergence(measured)
    if second := evidence.get("eval_torch"):
        parts.append(_second_route(second))
    if verified or smoked or measured or second:
        parts.append(
            "![Error by layer and family, acceptance of the drafts, size by family, what eval saw](validation.png)\n\n"
            "[validation.json](validation.json) has all of it."
        )
    return "\n\n".join(parts)


def _verification(found: dict) -> list[str]:
    compared = sum(f["compared"] for f in found["families"])
    groups = sum(f["groups"] for f in found["families"])
    if not found["passed"]:
        counts = f"{len(found['problems'])} problems, {found['offenders_total']} tensors or experts that differ"
        lead = f"**The verification failed**: {counts}."
    elif found["sampled"] == 1:
        lead = (
            f"Every weight was compared with what the source gives, by a computation of its own, bit for bit: "
            f"{compared:,} weights in {groups:,} groups, of which none differs."
        )
    else:
        lead = f"Of the weights {percent(found['sampled'])} were compared with what the source gives: none differs."
    rows = [("weights", "compared", "groups differ", "worst step", "SNR", "precision")]
    rows += [
        (
            f["family"],
            f"{f['compared']:,}",
            f"{f['differing']:,}",
            "-" if f["worst_steps"] is None else f"{f['worst_steps']:.3f}",
            "-" if f["snr_db"] is None else f"{f['snr_db']:.1f} dB",
            "; ".join(f["precisions"]),
        )
        for f in found["families"]
    ]
    meaning = (
        "Worst step is the largest error of a decoded weight, in steps of its group's scale: rounding takes half a "
        "step, and up to 1.5 where a code sits at its end stop so that zero stays exact. SNR is the power of the "
        "weights over that of their errors, where something was rounded."
    )
    return [lead, markdown_table(rows), meaning]


def _drafting(smoked: dict) -> list[str]:
    speed, forced = smoked["speed"], smoked["forced"]
    drafts = "one draft" if smoked["drafts"] == 1 else f"{smoked['drafts']} chained drafts"
    lead = (
        f"The MTP head proposes {drafts} a step, and the body confirms or rejects each. Acceptance is accepted drafts "
        "over drafts made, with its 95 % Wilson interval. Greedy: a draft is accepted if it is the body's own most "
        f"likely token. Sampled: by speculative sampling at temperature {smoked['temperature']:g}."
    )
    rows = [("prompt", "drafted", "accepted", "acceptance", "95 % interval", "tokens/step", "4-grams")]
    for kind in ("greedy", "sampled"):
        named = [(plain(p["name"]), p[kind]) for p in smoked["prompts"]] + [("all", smoked[kind])]
        rows += [(*draft_row(f"{name} ({kind})", rates), variety(rates)) for name, rates in named]
    same = "the tokens of decoding without drafts" if smoked["lossless"] else "**not** the tokens without drafts"
    lines = [
        "- 4-grams: different runs of four tokens over all of them. A text that repeats itself has few, and drafts are "
        "easy in it.",
        f"- With drafts it writes {same}.",
        f"- Over {forced['positions']:,} tokens of given text, the head's most likely token is the body's at "
        f"{percent(forced['agreement'])} of the places; at temperature {smoked['temperature']:g} "
        f"{percent(forced['expected_acceptance'])} of its drafts would be accepted (the mean overlap of the two "
        "distributions).",
        f"- {speed['drafting_tokens_per_second']:.1f} tokens/s with drafts, {speed['plain_tokens_per_second']:.1f} "
        f"without: {speed['speed_up']:.2f} times, on {plain(smoked['device'])} in {smoked['dtype']}.",
    ]
    if smoked["failures"]:
        lines.append(f"- **Failed**: {plain('; '.join(smoked['failures']))}.")
    return [lead, markdown_table(rows), "\n".join(lines)]


def _heads(heads: list[dict]) -> list[str]:
    rows = [("head", "acceptance", "95 % interval", "agreement", "expected acceptance", "tokens/s")]
    for row in heads:
        low, high = row["interval"]
        rows.append(
            (
                plain(row["policy"]),
                percent(row["acceptance"]),
                f"{100 * low:.0f} to {100 * high:.0f} %",
                percent(row["forced"]["agreement"]),
                percent(row["forced"]["expected_acceptance"]),
                f"{row['tokens_per_second']:.1f}",
            )
        )
    return ["Other precisions of the head, on this body:", markdown_table(rows)]


def _divergence(result: dict) -> list[str]:
    lead = (
        f"Source and build were run side by side, layer by layer, on the same {result['tokens']:,} tokens (windows of "
        f"{result['window']}, {result['dtype']}). {divergence_sentence(result)} Intervals are 95 %, by bootstrap; "
        f"acceptance is the expected one at temperature {result['temperature']:g}, each head on its own body."
    )
    lines = [f"- **Suspect**: {plain(line)}." for line in suspect_lines(result)]
    lines += [f"- **Failed**: {plain(f)}." for f in result["failures"]]
    return [lead, markdown_table(model_rows(result)), *(["\n".join(lines)] if lines else [])]


def _second_route(result: dict) -> str:
    other, tokens = result["other_engine"], f"{result['tokens']:,}"
    found = [f"**Failed**: {plain(f)}." for f in result["failures"]]
    found += [f"**Layer {s['layer']} is computed otherwise.**" for s in other["suspects"]]
    return " ".join(
        (
            "The forward pass was written a second time, in plain PyTorch, from the description of the model. On "
            f"{tokens} tokens with the source's weights, this build's `motif.py` and that one differ by a mean KL of "
            f"{other['kl']['mean']:.1e} nats a token (99 % below {other['kl']['p99']:.1e}) and make the same first "
            f"choice in {percent(other['top1_agreement'])}.",
            *found,
        )
    )
