"""What people read: tables and sentences about a plan and about a build."""

from ..convert.losses import Losses
from ..convert.plan import Plan

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


def mtp_sentence(plan: Plan, losses: Losses) -> str:
    """What became of the MTP head."""
    match plan.mtp:
        case "none":
            return "The source has no MTP head; config.json says `num_nextn_predict_layers: 0`."
        case "drop":
            return (
                f"The MTP head was left out on purpose ({len(plan.dropped)} tensors); "
                "config.json says `num_nextn_predict_layers: 0`. This build can't draft."
            )
        case "8" | "4.5":
            return (
                f"The MTP head is kept under `mtp.*`, its projections quantized to {plan.mtp} bits, its norms as in "
                "the source. Measure its acceptance rate before you rely on it."
            )
    dtype = plan.config_keys()["mtp_dtype"]
    casts = losses.casts
    if casts is None:
        return f"The MTP head is kept under `mtp.*` with the source's own bits ({dtype})."
    changed = (
        "every value exactly"
        if not casts.changed
        else f"{casts.changed:,} of {casts.values:,} values rounded, by at most {casts.max_change:.3g} ({casts.tensor})"
    )
    compute = plan.config_keys()["mtp_compute_dtype"]
    return f"The MTP head is kept under `mtp.*` as {dtype}: {changed}. It computes in {compute}, as the body does."


def experts_sentence(plan: Plan, losses: Losses) -> str:
    """Where the routed experts of an NVFP4 source went, and what that cost."""
    text = f"Routed experts: from {plan.experts_from}."
    if report := losses.requantized:
        text += (
            f" That rounds twice: {100 * report.relative_rms:.2f} % relative rms error against the NVFP4 values, "
            f"{100 * report.worst_rms:.2f} % at worst ({report.worst}), over {report.experts} experts' matrices."
        )
    return text


def build_text(found: dict) -> str:
    """What `inspect_repo` found, as a page of text."""
    rows = [("tensors", "parameters", "bytes", "bits/weight", "precision")]
    rows += [
        (
            f["family"],
            f"{f['parameters']:,}",
            human_bytes(f["bytes"]),
            f"{f['bits_per_weight']:.3f}",
            "; ".join(f["precisions"]),
        )
        for f in found["families"]
    ]
    total = (f"{found['total_parameters']:,}", human_bytes(found["total_bytes"]), f"{found['bits_per_weight']:.3f}")
    rows.append(("total", *total, f"{found['shards']} shards"))
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
            f"Source: {source['id']}{revision}",
            f"Recipe: {made['recipe']['name']}",
            f"Made by: {made['converter']['name']} {made['converter']['version']}, mlx {made['quantizer']['mlx']}",
            f"Plan: {made['plan_hash']}",
        ]
    return "\n".join(lines)
