"""A short speculative decode on this machine's accelerator: what the MTP head is worth, and whether it is lossless."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..convert.checkpoint import read_whole
from ..quantize.errors import OutputError, SourceError
from .loading import load
from .statistics import drafting, text_health

TEMPERATURE = 0.8
TOKENS = 64
CPU_TOKENS = 512
MAX_TEXT_BYTES = 16 << 20
SCHEMA = 1


@dataclass(frozen=True)
class Prompt:
    """Text to continue; `raw` skips the chat template."""

    name: str
    text: str
    raw: bool = False


@dataclass(frozen=True)
class Build:
    """A loaded build: mlx-lm's model and tokenizer, and config.json."""

    model: object
    tokenizer: object
    config: dict

    @property
    def stop(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids)

    def windows(self, text: str | None) -> list[list[int]]:
        """A text's tokens, cut into windows for teacher forcing; the shipped text for None.

        mlx's quantized products are slow on the CPU, so there only the start of the shipped text is used.
        """
        import mlx.core as mx

        from .forced import windows_of

        if text is not None:
            return windows_of(self.tokenizer.encode(text))
        tokens = self.tokenizer.encode((files(__package__) / "text.txt").read_text(encoding="utf-8"))
        return windows_of(tokens if mx.default_device() == mx.gpu else tokens[:CPU_TOKENS])

    def encode(self, prompt: Prompt) -> list[int]:
        if prompt.raw or not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(prompt.text)
        message = [{"role": "user", "content": prompt.text}]
        return self.tokenizer.apply_chat_template(message, add_generation_prompt=True)


def load_build(folder: Path, dtype: str | None = None, group=None) -> Build:
    """Loads a build with stock mlx-lm; its own `motif.py` is run.

    Args:
        dtype: "float32" upcasts all floats, for exact comparisons; None keeps them.
        group: mx.distributed.Group; its ranks share the layers, and then run the same steps.
    Raises:
        SourceError: mlx-lm can't load it.
    """
    import mlx.core as mx
    from mlx.utils import tree_map

    model, tokenizer, config = load(folder, group)
    if dtype == "float32":

        def upcast(array):
            return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array

        model.update(tree_map(upcast, model.parameters()))
        mx.eval(model.parameters())
    return Build(model, tokenizer, config)


def read_prompts(path: Path | None) -> list[Prompt]:
    """Prompts from JSON lines: `prompt`, optional `name`, optional `raw`; the shipped ones for None.

    Raises:
        SourceError: naming the line.
    """
    name = "prompts.jsonl" if path is None else path.name
    try:
        raw = (files(__package__) / name).read_bytes() if path is None else read_whole(path, MAX_TEXT_BYTES)
        lines = raw.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise SourceError(f"{path}: not a text file in UTF-8") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text, label, is_raw = entry["prompt"], entry.get("name", f"prompt {number}"), entry.get("raw", False)
            if not (isinstance(text, str) and text and isinstance(label, str) and isinstance(is_raw, bool)):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SourceError(
                f'{name}, line {number}: needs {{"prompt": "text"}}, and may have "name": "text" and "raw": true'
            ) from None
        prompts.append(Prompt(label, text, is_raw))
    if not prompts:
        raise SourceError(f"{name}: holds no prompt")
    return prompts


def read_text(path: Path | None) -> str | None:
    """A text for the teacher-forced count; None stands for the shipped one. Raises SourceError."""
    try:
        return None if path is None else read_whole(path, MAX_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise SourceError(f"{path}: not a text file in UTF-8") from None


def smoke(
    build: Build,
    prompts: list[Prompt],
    text: str | None,
    tokens: int = TOKENS,
    drafts: int = 1,
    temperature: float = TEMPERATURE,
    min_acceptance: float | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> dict:
    """Decodes every prompt plainly, with drafts, and sampled with drafts; and forces drafts over a text.

    Args:
        text: for the forced count; None for the shipped one.
        tokens: emitted for each prompt.
        drafts: chained drafts a step.
        min_acceptance: greedy acceptance below it fails.
        say: progress, a line at a time.
    Returns:
        JSON: `device`, `lossless`, `greedy`, `sampled` (see `statistics.drafting`), `forced`, `speed`, `prompts`,
        `first_token`, `passed` and `failures`.
    Raises:
        OutputError: the build has no MTP head, or nothing was drafted.
    """

    from .decode import decode
    from .forced import forced_acceptance, forced_positions

    model = build.model
    if "mtp" not in model:
        raise OutputError("the build has no MTP head (num_nextn_predict_layers is 0); there is nothing to measure")
    encoded = [(p, build.encode(p)) for p in prompts]
    windows = build.windows(text)
    if not windows:
        raise SourceError("--text: too short; the teacher-forced count needs two tokens or more")
    decode(model, encoded[0][1], min(tokens, 8), drafts)  # warm-up: kernels compile, weights arrive
    decode(model, encoded[0][1], min(tokens, 8))
    rows, runs = [], {"plain": [], "greedy": [], "sampled": []}
    for number, (prompt, ids) in enumerate(encoded):
        say(f"{prompt.name}: {len(ids)} tokens")
        order = ("plain", "greedy") if number % 2 == 0 else ("greedy", "plain")  # in alternation: machines warm up
        made = {}
        for kind in order:
            made[kind] = decode(model, ids, tokens, drafts if kind == "greedy" else 0, stop=build.stop)
        made["sampled"] = decode(model, ids, tokens, drafts, temperature, seed + number, build.stop)
        for kind, run in made.items():
            runs[kind].append(run)
        rows.append(_prompt_row(model, prompt, ids, made, build.stop))

    forced = forced_acceptance(*forced_positions(model, windows, temperature))
    greedy, sampled = _added(runs["greedy"]), _added(runs["sampled"])
    lossless = all(row["lossless"] for row in rows)
    failures = []
    if not lossless:
        failures.append("drafting changed the greedy text: " + ", ".join(r["name"] for r in rows if not r["lossless"]))
    if not all(run.finite for kind in runs.values() for run in kind):
        failures.append("NaN or infinite logits")
    if min_acceptance is not None and greedy["acceptance"] < min_acceptance:
        failures.append(f"acceptance {greedy['acceptance']:.3f} is below {min_acceptance}")
    return {
        "format": SCHEMA,
        "device": _device(),
        "dtype": str(model.model.norm.weight.dtype).removeprefix("mlx.core."),
        "drafts": drafts,
        "temperature": temperature,
        "tokens": tokens,
        "seed": seed,
        "lossless": lossless,
        "greedy": greedy,
        "sampled": sampled,
        "forced": forced,
        "speed": _speed(runs),
        "first_token": _first_token(model, encoded[0][1]),
        "prompts": rows,
        "min_acceptance": min_acceptance,
        "failures": failures,
        "passed": not failures,
    }


def _device() -> str:
    """Its name, and which kind of mlx's devices it is."""
    import mlx.core as mx

    return f"{mx.device_info()['device_name']} ({str(mx.default_device().type).rpartition('.')[2]})"


def _prompt_row(model, prompt: Prompt, ids: list[int], made: dict, stop: frozenset[int]) -> dict:
    row = {"name": prompt.name, "prompt_tokens": len(ids)}
    row |= _compared(model, ids, made["plain"].tokens, made["greedy"].tokens, stop)
    for kind in ("greedy", "sampled"):
        run = made[kind]
        row[kind] = {
            **_added([run], strict=False),
            "tokens": run.tokens,
            "text": text_health(run.tokens, bool(stop & set(run.tokens))),
        }
    return row


def _compared(model, ids: list[int], plain: list[int], drafted: list[int], stop: frozenset[int]) -> dict:
    """Whether drafting left the greedy text as it is.

    Several rows at once round otherwise than one, so where the two best logits are nearly equal the choice may turn
    without any fault of the loop. Such a place is a tie: it is counted, and both go on from there.

    Returns:
        `lossless`, `ties` (their places), and `differs_at` where it is not lossless.
    """
    from .decode import decode

    done, ties = 0, []
    while plain[done:] != drafted[done:]:
        pairs = zip(plain, drafted, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None or not _is_tie(model, ids + plain[:place], plain[place], drafted[place]):
            return {"lossless": False, "ties": ties, "differs_at": done if place is None else place}
        ties.append(place)
        done = place + 1
        left = len(drafted) - done
        plain = drafted[:done] + (decode(model, ids + drafted[:done], left, stop=stop).tokens if left else [])
    return {"lossless": True, "ties": ties}


def _is_tie(model, context: list[int], one: int, other: int) -> bool:
    """Whether two tokens' logits after a context differ by no more than rounding in the build's dtype."""
    import mlx.core as mx

    logits = model(mx.array([context]))[0, -1]
    a, b = (logits[t].astype(mx.float32).item() for t in (one, other))
    return abs(a - b) <= max(1e-4, 4 * mx.finfo(logits.dtype).eps * max(abs(a), abs(b)))


def _added(runs: list, strict: bool = True) -> dict:
    """Rates over several runs. The prefill's token is not a step's."""
    drafted = [sum(column) for column in zip(*(r.drafted for r in runs), strict=True)]
    accepted = [sum(column) for column in zip(*(r.accepted for r in runs), strict=True)]
    if not sum(drafted):
        if strict:
            raise OutputError("nothing was drafted: every prompt ended at its first token; give other prompts")
        return {"drafted": 0, "accepted": 0, "acceptance": None}
    steps = sum(r.steps for r in runs)
    return drafting(drafted, accepted, steps + sum(accepted), steps)


def _speed(runs: dict) -> dict:
    """Tokens a second of the steps alone, with and without drafts, and what acceptance allows at best."""
    rates = {}
    for kind in ("plain", "greedy"):
        count = sum(r.steps + sum(r.accepted) for r in runs[kind])
        rates[kind] = count / max(sum(r.decode_seconds for r in runs[kind]), 1e-9)
    steps = sum(r.steps for r in runs["greedy"])
    return {
        "plain_tokens_per_second": rates["plain"],
        "drafting_tokens_per_second": rates["greedy"],
        "speed_up": rates["greedy"] / rates["plain"] if rates["plain"] else 0.0,
        "at_best": (steps + sum(sum(r.accepted) for r in runs["greedy"])) / max(steps, 1),
    }


def _first_token(model, ids: list[int]) -> dict:
    """One token in, its logits out: garbage here points at norms, activations or names, not at attention."""
    import mlx.core as mx

    logits = model(mx.array([ids[:1]]))[0, 0].astype(mx.float32)
    probabilities = mx.softmax(logits)
    entropy = -(probabilities * mx.log(mx.maximum(probabilities, 1e-30))).sum()
    return {
        "finite": bool(mx.isfinite(logits).all().item()),
        "entropy_bits": entropy.item() / 0.6931471805599453,
        "uniform_bits": float(mx.log2(mx.array(float(logits.size))).item()),
    }
