"""What people read: tables and sentences about a plan and about a build."""

from ..convert.plan import Plan
from ..quantize.errors import quoted

HEADINGS = ("tensors", "parameters", "source", "output", "bits/weight", "precision")


def human_bytes(count: float) -> str:
    """Decimal units, as the Hub and disks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def family_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The plan's families and the total, as cells under HEADINGS."""
    rows = [
        (
            f["family"],
            f"{f['parameters']:,}",
            human_bytes(f["source_bytes"]),
            human_bytes(f["bytes"]),
            f"{8 * f['bytes'] / f['parameters']:.3f}",
            "; ".join(f["precisions"]),
        )
        for f in plan.families()
    ]
    total = (
        "total",
        f"{plan.total_parameters:,}",
        human_bytes(sum(m.source_nbytes for m in plan.modules)),
        human_bytes(plan.total_bytes),
        f"{plan.bits_per_weight:.3f}",
        "",
    )
    return [HEADINGS, *rows, total]


def text_table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns: names left, numbers right, the last column left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    rule = "|---" + "|---:" * (len(rows[0]) - 2) + "|---|"
    return "\n".join([head, rule, *body])


def mtp_sentence(made: dict) -> str:
    """What became of the MTP head, by motif-convert.json."""
    mtp = made["mtp"]
    match mtp["policy"]:
        case "none":
            return "The source has no MTP head; config.json says `num_nextn_predict_layers: 0`."
        case "drop":
            return (
                f"The MTP head was left out on purpose ({len(mtp['dropped'])} tensors); "
                "config.json says `num_nextn_predict_layers: 0`. This build can't draft."
            )
        case "8" | "4.5":
            return (
                f"The MTP head is kept under `mtp.*`, its projections quantized to {mtp['policy']} bits, its norms as "
                "in the source. Measure its acceptance rate before you rely on it."
            )
    casts = mtp["casts"]
    if casts is None:
        return f"The MTP head is kept under `mtp.*` with the source's own bits ({mtp['dtype']})."
    changed = (
        "every value exactly"
        if not casts["changed"]
        else f"{casts['changed']:,} of {casts['values']:,} values rounded, by at most {casts['max_change']:.3g} "
        f"(`{casts['tensor']}`)"
    )
    return (
        f"The MTP head is kept under `mtp.*` as {mtp['dtype']}: {changed}. It computes in {mtp['compute_dtype']}, as "
        "the body does."
    )


def experts_sentence(made: dict) -> str:
    """Where the routed experts of an NVFP4 source went, and what that cost, by motif-convert.json."""
    experts = made["experts"]
    text = f"Routed experts: from {experts['from']}."
    if report := experts["requantized"]:
        text += (
            f" That rounds twice: {100 * report['relative_rms']:.2f} % relative rms error against the NVFP4 values, "
            f"{100 * report['worst_rms']:.2f} % at worst (`{report['worst']}`), in a sample of {report['experts']} "
            "matrices."
        )
    return text


def families_table(families: list[dict]) -> list[tuple[str, ...]]:
    """The families of a build and their precisions, as rows."""
    rows = [("weights", "parameters", "bytes", "bits/weight", "precision")]

    def precisions(listed: list[str]) -> str:
        """Quantized ones first, whatever comes first in the files."""
        return "; ".join(sorted(listed, key=lambda p: (" " not in p, p)))

    return rows + [
        (
            f["family"],
            f"{f['parameters']:,}",
            human_bytes(f["bytes"]),
            f"{8 * f['bytes'] / f['parameters']:.3f}",
            precisions(f["precisions"]),
        )
        for f in families
    ]


def build_text(found: dict) -> str:
    """What `inspect_repo` found, as a page of text."""
    rows = families_table(found["families"])
    total = (f"{found['total_parameters']:,}", human_bytes(found["total_bytes"]), f"{found['bits_per_weight']:.3f}")
    rows.append(("total", *total, f"{found['shards']} shard{'s' if found['shards'] > 1 else ''}"))
    head, made = found["mtp"], found["provenance"]
    lines = [text_table(rows), ""]
    policy = f", policy {head['policy']}" if head["policy"] else ""
    lines.append(f"MTP head: {'; '.join(head['precisions']) if head['present'] else 'none'}{policy}")
    if head["present"] != head["declared"]:
        lines.append(f"WARNING: config.json says the build has {'an' if head['declared'] else 'no'} MTP head")
    if found["experts_from"]:
        lines.append(f"Routed experts: from {found['experts_from']}")
    if made is None:
        lines.append("Provenance: none (no motif-convert.json)")
    else:
        source = made["source"]
        revision = f" at {source['revision']}" if source["revision"] else ""
        lines += [
            f"Source: {quoted(source['id'])}{quoted(revision)}",
            f"Recipe: {made['recipe']['name']}",
            f"Made by: {made['converter']['name']} {made['converter']['version']}",
            f"Plan: {made['plan_hash']}",
        ]
    return "\n".join(lines)


def percent(share: float | None) -> str:
    """A share with one decimal, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def verification_text(found) -> str:
    """A `Verification` as a table, its problems and its worst offenders."""
    rows = [("weights", "compared", "groups differ", "worst step", "SNR", "precision")]
    for f in found.families:
        rows.append(
            (
                f.family,
                f"{f.compared:,}",
                f"{f.differing:,}",
                "-" if f.worst_steps is None else f"{f.worst_steps:.3f}",
                "-" if f.snr_db is None else f"{f.snr_db:.1f} dB",
                "; ".join(f.precisions),
            )
        )
    lines = [text_table(rows), ""]
    lines += [f"PROBLEM: {p}" for p in found.problems]
    lines += [f"DIFFERS: {o}" for o in found.offenders[:20]]
    if found.offenders_total > 20:
        lines.append(f"and {found.offenders_total - 20} more tensors or experts that differ")
    share = "every weight" if found.sampled == 1 else f"{percent(found.sampled)} of the weights"
    word = ("Verified" if found.sampled == 1 else "Nothing found in a sample") if found.passed else "NOT verified"
    lines.append(f"{word}: {share} compared, {found.hashed} files hashed.")
    return "\n".join(lines)


def smoke_text(result: dict) -> str:
    """What `smoke` found, as a page of text."""
    rows = [("prompt", "drafted", "accepted", "acceptance", "95 % interval", "tokens/step", "4-grams", "lossless")]
    for kind in ("greedy", "sampled"):
        for p in result["prompts"]:
            lossless = p["lossless"] if kind == "greedy" else None
            rows.append(draft_row(f"{p['name']} ({kind})", p[kind]) + _text_cells(p[kind], lossless))
        rows.append(draft_row(f"all ({kind})", result[kind]) + _text_cells(result[kind], None))
    forced, speed, greedy = result["forced"], result["speed"], result["greedy"]
    lines = [
        text_table(rows),
        "",
        f"Device: {result['device']}, {result['dtype']}, {result['drafts']} draft(s) a step, "
        f"temperature {result['temperature']}",
        f"Acceptance is accepted / drafted = {greedy['accepted']} / {greedy['drafted']} = "
        f"{percent(greedy['acceptance'])}; of the emitted tokens {percent(greedy['draft_share'])} were drafts, "
        "which is another number.",
        f"Teacher-forced: agreement {forced['agreement']:.4f}, expected acceptance {forced['expected_acceptance']:.4f} "
        f"over {forced['positions']:,} positions",
        f"Speed: {speed['plain_tokens_per_second']:.1f} tokens/s without drafts, "
        f"{speed['drafting_tokens_per_second']:.1f} with: {speed['speed_up']:.2f} times, "
        f"{speed['at_best']:.2f} at best with this acceptance",
        f"One token in: {result['first_token']['entropy_bits']:.1f} bits of entropy, "
        f"{result['first_token']['uniform_bits']:.1f} would be noise",
    ]
    lines += [f"FAILED: {f}" for f in result["failures"]]
    lines.append("Drafting passed." if result["passed"] else "Drafting NOT passed.")
    return "\n".join(lines)


def draft_row(name: str, rates: dict) -> tuple[str, ...]:
    """Drafted, accepted, acceptance, its interval, tokens a step."""
    if not rates["drafted"]:
        return (name, "0", "0", "-", "-", "-")
    low, high = rates["interval"]
    return (
        name,
        str(rates["drafted"]),
        str(rates["accepted"]),
        percent(rates["acceptance"]),
        f"{100 * low:.0f} to {100 * high:.0f} %",
        f"{rates['tokens_per_step']:.2f}",
    )


def variety(rates: dict) -> str:
    """The share of different 4-grams in a run's text; a dash for several runs together."""
    return percent(rates.get("text", {}).get("distinct_4grams"))


def _text_cells(rates: dict, lossless: bool | None) -> tuple[str, str]:
    if not rates["drafted"]:
        return "-", "-"
    return variety(rates), "-" if lossless is None else "yes" if lossless else "NO"


def heads_text(rows: list[dict]) -> str:
    """`compare_heads` as a table, and which differences are real."""
    table = [("head", "bytes", "acceptance", "95 % interval", "forced", "expected", "tokens/s")]
    lines = []
    for r in rows:
        low, high = r["interval"]
        table.append(
            (
                r["policy"],
                human_bytes(r["bytes"]),
                percent(r["acceptance"]),
                f"{100 * low:.0f} to {100 * high:.0f} %",
                f"{r['forced']['agreement']:.4f}",
                f"{r['forced']['expected_acceptance']:.4f}",
                f"{r['tokens_per_second']:.1f}",
            )
        )
        for other, d in r["against"].items():
            word = "real" if d["real"] else "not told from chance"
            low, high = d["interval"]
            lines.append(
                f"{r['policy']} against {other}: agreement {d['agreement']:+.4f} ({low:+.4f} to {high:+.4f}), {word}"
            )
    return "\n".join([text_table(table), "", *lines])


def evidence_rows(found: dict, evidence: dict) -> list[tuple[str, str]]:
    """Ten lines that say whether to ship."""
    verified, smoked = evidence["verify"], evidence["smoke"]
    rows = [
        ("build", found["folder"]),
        ("size", f"{human_bytes(found['total_bytes'])}, {found['bits_per_weight']:.3f} bits per weight"),
        ("MTP head", found["mtp"]["policy"] or ("kept" if found["mtp"]["present"] else "none")),
    ]
    if verified is None:
        rows.append(("contents", "not verified"))
    else:
        worst = [f["worst_steps"] for f in verified["families"] if f["worst_steps"] is not None]
        state = "equal the source's, group by group" if verified["passed"] else "DIFFER"
        rows += [
            ("contents", f"{state} ({percent(verified['sampled'])} compared)"),
            ("problems", str(len(verified["problems"]) + verified["offenders_total"])),
            ("worst rounding", f"{max(worst):.3f} steps" if worst else "none"),
        ]
    if smoked is None:
        rows.append(("drafting", "not measured"))
    else:
        greedy, speed = smoked["greedy"], smoked["speed"]
        low, high = greedy["interval"]
        rows += [
            ("acceptance", f"{percent(greedy['acceptance'])} per draft ({100 * low:.0f} to {100 * high:.0f} %)"),
            ("lossless", "yes" if smoked["lossless"] else "NO"),
            ("speed-up", f"{speed['speed_up']:.2f} times on {smoked['device']}"),
        ]
    rows.append(("ship", "yes" if evidence["passed"] else "NO"))
    return rows
