"""make fuzz: a fuzzer that watches which lines its inputs reach looks for one that a reader does not survive.

Each reader of foreign files runs in a process of its own, from right files on. It may refuse what it is given, in its
own words; any other exception, 5 seconds for one input, or more than 200 MB of memory end the run with that input.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
REFERENCE = HERE.parents[1] / "shared" / "reference"
RECIPES = HERE.parent / "recipes"
MEMORY_MB, SECONDS_EACH = 200, 5
HEADER_BYTES = 4096  # of a seed's: a start, and an end as it was


# --- what is fuzzed: how to read an input, and the error that refuses it; what is watched is imported there ---

Target = tuple[Callable[[bytes], object], type[Exception]]


def header() -> Target:
    from motif_convert.convert.headers import header_tensors
    from motif_convert.quantize.errors import SourceError

    def read(data: bytes) -> None:
        raw = len(data).to_bytes(8, "little") + data if data[:1] == b"{" else data  # else nearly all ends at the length
        header_tensors("model.safetensors", len(raw), lambda start, count: raw[start : start + count])

    return read, SourceError


def index() -> Target:
    from motif_convert.convert.checkpoint import INDEX, open_checkpoint
    from motif_convert.quantize.errors import SourceError

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text("{}")
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    text = json.dumps({"a": entry}).encode()
    (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))

    def read(data: bytes) -> None:
        (folder / INDEX).write_bytes(data)
        open_checkpoint(folder).close()

    return read, SourceError


def config() -> Target:
    from motif_convert.convert.config import check_config
    from motif_convert.convert.headers import parse_json
    from motif_convert.quantize.errors import SourceError

    return lambda data: check_config(parse_json(data, "config.json")), SourceError


def recipe() -> Target:
    from motif_convert.quantize.errors import RecipeError
    from motif_convert.recipes.recipe import parse_recipe

    return lambda data: parse_recipe(data.decode("utf-8", "replace"), "r.yaml"), RecipeError


TARGETS = {f.__name__: f for f in (header, index, config, recipe)}
WORDS = {
    "header": ('"dtype":', '"BF16"', '"F8_E4M3"', '"shape":', '"data_offsets":', '"__metadata__"', "[0,", "e999"),
    "index": ('"weight_map":', '"a.safetensors"', '"a":', '"../a.safetensors"', "\\u0000", "\\ud800"),
    "config": ('"model_type":', '"Motif"', '"rope_scaling":', "null", "true", "-1", "1e999", "NaN"),
    "recipe": ("name: ", "rules:", "- match: ", "bits: ", "group_size: ", "dtype: ", "&a ", "*a", "!!python/", "<<: "),
}


def seeds(target: str) -> list[bytes]:
    """Right inputs, and small ones."""
    if target == "recipe":
        return [p.read_bytes() for p in RECIPES.glob("*.yaml")]
    folders = [p for p in REFERENCE.iterdir() if (p / "config.json").exists()]
    if target == "config":
        return [(p / "config.json").read_bytes() for p in folders]
    if target == "index":
        small = b'{"metadata": {"total_size": 4}, "weight_map": {"a": "a.safetensors"}}'
        return [small, *((p / "model.safetensors.index.json").read_bytes()[:HEADER_BYTES] for p in folders)]
    small = json.dumps({"a": {"dtype": "U8", "shape": [2, 0], "data_offsets": [0, 0]}}).encode()
    return [small, *(next(p.glob("*.safetensors")).read_bytes()[8 : 8 + HEADER_BYTES] for p in folders)]


def watch(target: str, arguments: list[str]) -> None:
    """Runs the fuzzer on one target; it ends this process."""
    import atheris

    with atheris.instrument_imports(include=["motif_convert", "yaml", "json"]):
        read, refusal = TARGETS[target]()

    def survived(data: bytes) -> None:
        with suppress(refusal):
            read(data)

    atheris.Setup([sys.argv[0], *arguments], survived)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--keep", type=Path, help="folder for what is found and what reached new lines")
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.target:
        watch(options.target, arguments)
    if find_spec("atheris") is None:
        print("There is no atheris for this Python: tests/test_fuzz.py is what looks for such inputs here.")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        for target in TARGETS:
            folder = (options.keep or Path(scratch)) / target
            folder.mkdir(parents=True, exist_ok=True)
            for number, seed in enumerate(seeds(target)):
                (folder / f"seed-{number}").write_bytes(seed)
            words = folder.with_suffix(".dict")
            quoted = (w.replace("\\", "\\\\").replace('"', '\\"') for w in WORDS[target])
            words.write_text("".join(f'"{w}"\n' for w in quoted))
            limits = [
                f"-max_total_time={max(1, options.seconds // len(TARGETS))}",
                f"-rss_limit_mb={MEMORY_MB}",
                f"-timeout={SECONDS_EACH}",
                f"-dict={words}",
                f"-artifact_prefix={folder}/found-",
                "-max_len=8192",
                "-print_final_stats=1",
                "-verbosity=0",
            ]
            print(f"{target}:", flush=True)
            command = [sys.executable, __file__, "--target", target, *limits, str(folder)]
            if code := subprocess.run(command, env=os.environ | {"TMPDIR": scratch}).returncode:
                sys.exit(f"{target}: the fuzzer ended with {code}; see above, and --keep for the input")


if __name__ == "__main__":
    main()
