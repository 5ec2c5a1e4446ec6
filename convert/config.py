"""config.json: what a source may say, and what the converted repository says."""

import math
from importlib.resources import files

from ..quantize.errors import SourceError, listing, quoted
from ..quantize.precision import NVFP4, Quantized
from .model_args import model_args
from .nvfp4 import QUANT_METHOD, is_marked

MODEL_FILE = "motif.py"
MAX_SIZE = 2**31 - 1

TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

# Keys that are true of the source and not of what we write: another quantization scheme, code that
# is not in the repository, a folder of the machine that saved it.
MISLEADING = (
    "quantization", "quantization_config", "auto_map", "_name_or_path", "model_file", "mtp_dtype", "mtp_compute_dtype",
    "experts_from",
)  # fmt: skip

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_noise_heads", "head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
    "kv_lora_rank", "moe_intermediate_size", "num_experts", "experts_top_k", "sliding_window",
    "sliding_window_period", "mhc_expansion_rate", "mhc_sinkhorn_iters",
)  # fmt: skip
NULLABLE = ("polynorm_bias_clamp", "hidden_clamp")
POSITIVE = ("rms_norm_eps", "rope_theta", "swa_rope_theta", "rope_factor", "original_seq_len")
NESTED = {  # key of rope_scaling -> flat key
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_seq_len",
    **{key: key for key in ("mscale", "rope_theta", "beta_fast", "beta_slow")},
}
COUNTS = ("n_dense_first_layers", "num_shared_experts", "num_nextn_predict_layers")  # may be 0
NUMBERS = (
    "rms_norm_eps", "rope_theta", "swa_rope_theta", "route_scale", "polynorm_output_scale", "polynorm_bias_clamp",
    "mhc_h_post_alpha_end", "hidden_clamp", "rope_factor", "original_seq_len", "mscale", "beta_fast", "beta_slow",
)  # fmt: skip


def check_config(config: dict) -> None:
    """Refuses a config.json that is not a Motif-3's, or that `motif.py` could not run.

    Raises:
        SourceError: with every key that is at fault.
    """
    if config.get("model_type") != "Motif":
        raise SourceError(
            f"config.json: model_type is {quoted(repr(config.get('model_type')))}, not 'Motif'; not a Motif-3"
        )
    problems = []
    for key in SIZES:
        if type(config.get(key)) is not int or not 0 < config[key] <= MAX_SIZE:
            problems.append(f"{key} is {quoted(repr(config.get(key)))}, not a positive whole number")
    scaling = config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        problems.append("rope_scaling is not an object")
    for key, value in (scaling if isinstance(scaling, dict) else {}).items():
        if key in NESTED and (type(value) not in (int, float) or (NESTED[key] in POSITIVE and value <= 0)):
            problems.append(f"rope_scaling.{key} ({NESTED[key]}) is {quoted(repr(value))}, not a number")
    if type(config.get("route_norm", True)) is not bool:
        problems.append("route_norm is not true or false")
    for key in COUNTS:
        if type(config.get(key, 0)) is not int or not 0 <= config.get(key, 0) <= MAX_SIZE:
            problems.append(f"{key} is {quoted(repr(config[key]))}, not a whole number")
    for key in NUMBERS:
        if key not in config or (config[key] is None and key in NULLABLE):
            continue
        value = config[key]
        if (type(value) not in (int, float) or not math.isfinite(value)) or (key in POSITIVE and value <= 0):
            problems.append(f"{key} is {quoted(repr(value))}, not a number")
    if config.get("num_nextn_predict_layers", 0) not in (0, 1):
        count = quoted(repr(config["num_nextn_predict_layers"]))
        problems.append(f"num_nextn_predict_layers is {count}; one MTP layer at most")
    scheme = config.get("quantization_config") or config.get("quantization")
    if scheme and not is_marked(config):
        method = scheme.get("quant_method", scheme) if isinstance(scheme, dict) else scheme
        problems.append(f"quantization_config is {quoted(repr(method))}; BF16 and {QUANT_METHOD} can be read")
    if not problems:
        problems = _refused_by_model(config)
    if problems:
        raise SourceError(listing("config.json: not a Motif-3 that can be converted", problems))


def _refused_by_model(config: dict) -> list[str]:
    try:
        model_args().from_dict(config)
    except (ValueError, TypeError, AttributeError) as e:
        return [quoted(e)]
    return []


def own_model_file() -> bytes:
    """The `motif.py` that goes into every build."""
    return (files(__package__) / MODEL_FILE).read_bytes()


def built_config(source: dict, quantized: dict[str, Quantized], dominant: Quantized | None, mtp: dict) -> dict:
    """config.json of the converted repository: the source's keys less what would mislead.

    Args:
        source: a config that `check_config` has passed.
        quantized: module path -> precision, for the modules that are quantized and no other.
        dominant: the precision of most quantized parameters; the Hub's badge shows its bits.
        mtp: what the plan says of dtypes and of the MTP head; it overrides the source's keys.
    """
    config = {k: v for k, v in source.items() if k not in MISLEADING}
    if "rope_scaling" in config:
        args = model_args().from_dict(source)
        flat = ("rope_factor", "original_seq_len", "mscale", "rope_theta", "beta_fast", "beta_slow")
        config |= {key: getattr(args, key) for key in flat}
        del config["rope_scaling"]  # transformers >= 5.14 rejects Motif's
    config |= mtp
    config["model_file"] = MODEL_FILE
    if quantized:
        modules = {
            path: precision.as_config() | ({"global_scale": True} if precision == NVFP4 else {})
            for path, precision in quantized.items()
        }
        config["quantization"] = {**dominant.as_config(), **modules}
        config["quantization_config"] = config["quantization"]
    return config
