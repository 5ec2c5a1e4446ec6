"""What `eval` found, as a page of text."""

from .show import percent, text_table

MODELS = (
    ("bits_per_byte", "bits per byte"),
    ("perplexity", "perplexity"),
    ("forced_agreement", "MTP forced agreement"),
    ("expected_acceptance", "MTP expected acceptance"),
)


def model_rows(result: dict) -> list[tuple[str, ...]]:
    """Both models' numbers, and their difference with its interval."""
    rows = [("", "source", "build", "difference", "95 % interval")]
    for key, name in MODELS:
        one, other, d = result["source"][key], result["build"][key], result["differences"].get(key)
        if one is None or other is None:
            continue
        ends = f"{d['interval'][0]:+.4f} to {d['interval'][1]:+.4f}" if d else ""
        rows.append((name, f"{one:.4f}", f"{other:.4f}", f"{other - one:+.4f}", ends))
    return rows


def divergence_sentence(result: dict) -> str:
    kl, (low, high) = result["kl"], result["differences"]["kl"]["interval"]
    return (
        f"KL(source || build) a token: mean {kl['mean']:.5f} ({low:.5f} to {high:.5f}), median {kl['median']:.5f}, "
        f"99 % below {kl['p99']:.5f} nats. Same first choice: {percent(result['top1_agreement'])}."
    )


def engines_lines(result: dict) -> list[str]:
    """What two engines make of the source, where there were two."""
    if (other := result.get("other_engine")) is None:
        return []
    kl = other["kl"]
    lines = [
        "PyTorch against mlx, which runs the build's motif.py on the source's weights: KL mean "
        f"{kl['mean']:.1e}, 99 % below {kl['p99']:.1e} nats; same first choice {percent(other['top1_agreement'])}."
    ]
    return lines + [
        f"SUSPECT: layer {s['layer']} of motif.py is not what PyTorch computes: local error {s['error']:.2e}"
        for s in other["suspects"]
    ]


def suspect_lines(result: dict) -> list[str]:
    return [
        f"layer {s['layer']} is further from the source's than others of its kind: local error ({s['what']}) "
        f"{s['error']:.2e}, where the best has {s['best']:.2e}"
        for s in result["suspects"]
    ]


def evaluation_text(result: dict) -> str:
    """All of it."""
    single = result["single_tokens"]
    slices = [("slice", "tokens", "source bits/byte", "build bits/byte", "KL", "same first choice")]
    for name, s in result["slices"].items():
        bits = (f"{s[f'{side}_bits_per_byte']:.4f}" for side in ("source", "build"))
        slices.append((name, f"{s['tokens']:,}", *bits, f"{s['kl']:.5f}", percent(s["top1_agreement"])))
    lens = any(x["lens"] for x in result["layers"])
    head = ("layer", "error", "of single tokens", "local error", "99 % below", "rerouted")
    layers = [head + ("lens: source", "build", "KL") * lens]
    for x in result["layers"]:
        numbers = [f"{x[k]:.2e}" for k in ("error", "single", "local", "local_p99")]
        if lens:
            seen = [f"{x['lens'][k]:.2f}" for k in ("source_loss", "build_loss")] + [f"{x['lens']['kl']:.4f}"]
        layers.append((f"{x['layer']} ({x['kind']})", *numbers, percent(x["rerouted"]), *(seen if lens else ())))
    lines = [
        text_table(model_rows(result)),
        "",
        divergence_sentence(result),
        f"Single tokens, each its own context: KL {single['kl']:.5f}, same first choice "
        f"{percent(single['top1_agreement'])}.",
        *engines_lines(result),
        "",
        text_table(slices),
        "",
        text_table(layers),
        "Error: of the streams behind a layer, each model on its own way. Local error: what the build's layer makes of "
        "the source's streams, against what the source's layer changes in them.",
        *["Lens: nats a token if the output head stood behind that layer."] * lens,
        f"{result['tokens']:,} tokens, windows of {result['window']}, {result['dtype']} in {result['engine']}, "
        f"temperature {result['temperature']:g}.",
    ]
    lines += [f"SUSPECT: {line}" for line in suspect_lines(result)]
    lines += [f"FAILED: {f}" for f in result["failures"]]
    return "\n".join(lines)
