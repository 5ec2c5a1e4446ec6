"""The tensor names of Motif-3 and of its MLX tree: data, total, nothing else.

A row reads: source name, MLX name, shape, kind. `{}` is the layer index. Two MLX names mean that
the source's rows (its last axis but one) are cut in two equal halves. A recipe decides the precision
of a PROJECTION; all that is FIXED keeps its source dtype and bits. Shapes are written in the
dimensions that `dimensions` derives from config.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PROJECTION, FIXED = "projection", "fixed"

EMBEDDING = (("model.embed_tokens.weight", "model.embed_tokens.weight", "V D", PROJECTION),)

ATTENTION = (
    ("self_attn.wq_a.weight", "self_attn.wq_a.weight", "q_lora D", PROJECTION),
    ("self_attn.q_norm.weight", "self_attn.q_norm.weight", "q_lora", FIXED),
    ("self_attn.wq_b.weight", "self_attn.wq_b.weight", "queries q_lora", PROJECTION),
    ("self_attn.wq_b_gate.weight", "self_attn.wq_b_gate.weight", "outputs q_lora", PROJECTION),
    ("self_attn.wkv_a.weight", "self_attn.wkv_a.weight", "kv_lora+rope D", PROJECTION),
    ("self_attn.kv_norm.weight", "self_attn.kv_norm.weight", "kv_lora", FIXED),
    ("self_attn.wkv_b.weight", "self_attn.wkv_b.weight", "keys+values kv_lora", PROJECTION),
    ("self_attn.lambda_proj.weight", "self_attn.lambda_proj.weight", "signal D", FIXED),
    ("self_attn.wo.weight", "self_attn.wo.weight", "D outputs", PROJECTION),
)

NORMS = (
    ("input_layernorm.weight", "input_layernorm.weight", "D", FIXED),
    ("post_attention_layernorm.weight", "post_attention_layernorm.weight", "D", FIXED),
)

MHC = tuple(
    (f"{block}.{name}", f"{block}.{name}", shape, FIXED)
    for block in ("mhc_attn", "mhc_ffn")
    for name, shape in (
        ("rms_norm.weight", "nD"),
        ("proj_pre.weight", "n nD"),
        ("proj_post.weight", "n nD"),
        ("proj_res.weight", "n*n nD"),
        ("alpha_pre", "1"),
        ("alpha_post", "1"),
        ("alpha_res", "1"),
        ("bias_pre", "n"),
        ("bias_post", "n"),
        ("bias_res", "n n"),
    )
)


def _mlp(source: str, target: str, hidden: str) -> tuple:
    return (
        (f"{source}.gate_proj.weight", f"{target}.gate_proj.weight", f"{hidden} D", PROJECTION),
        (f"{source}.up_proj.weight", f"{target}.up_proj.weight", f"{hidden} D", PROJECTION),
        (f"{source}.down_proj.weight", f"{target}.down_proj.weight", f"D {hidden}", PROJECTION),
        (f"{source}.act_fn.weight", f"{target}.act_fn.weight", "3", FIXED),
        (f"{source}.act_fn.bias", f"{target}.act_fn.bias", "1", FIXED),
    )


DENSE_MLP = _mlp("mlp", "mlp", "I")
SHARED_EXPERT = _mlp("moe.shared_experts", "mlp.shared_experts", "M")

ROUTER = (
    ("moe.router.gate.weight", "mlp.gate.weight", "experts D", FIXED),
    ("moe.expert_bias", "mlp.gate.expert_bias", "experts", FIXED),
)

ROUTED_EXPERTS = (
    (
        "moe.experts.gate_up_proj",
        ("mlp.switch_mlp.gate_proj.weight", "mlp.switch_mlp.up_proj.weight"),
        "experts 2M D",
        PROJECTION,
    ),
    ("moe.experts.down_proj", "mlp.switch_mlp.down_proj.weight", "experts D M", PROJECTION),
    ("moe.experts.act_fn.weight", "mlp.switch_mlp.act_fn.weight", "experts 3", FIXED),
    ("moe.experts.act_fn.bias", "mlp.switch_mlp.act_fn.bias", "experts 1", FIXED),
)

OUTPUT_NORM = (("model.norm.weight", "model.norm.weight", "D", FIXED),)
LM_HEAD = (("lm_head.weight", "lm_head.weight", "V D", PROJECTION),)

MTP = (
    ("embed_norm.weight", "embed_norm.weight", "D", FIXED),
    ("input_proj.weight", "input_proj.weight", "D 2D", PROJECTION),
    *NORMS,
    *ATTENTION,
    *DENSE_MLP,
    ("final_layernorm.weight", "final_layernorm.weight", "D", FIXED),
)

FAMILIES = (
    "embedding", "lm_head", "attention", "dense MLP", "routed experts", "shared expert",
    "router", "mHC", "norms", "MTP head",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One source tensor: its name, its MLX names, its shape, its family and its kind."""

    source: str
    targets: tuple[str, ...]
    shape: tuple[int, ...]
    family: str
    kind: str


def dimensions(config: dict) -> dict[str, int]:
    """The symbols of the shape column, from the keys of config.json."""
    heads, head_dim, v_dim = config["num_attention_heads"], config["head_dim"], config["v_head_dim"]
    signal = heads - config["num_noise_heads"]
    rope, kv_lora = config["qk_rope_head_dim"], config["kv_lora_rank"]
    dim, streams, expert = config["hidden_size"], config["mhc_expansion_rate"], config["moe_intermediate_size"]
    return {
        "V": config["vocab_size"],
        "D": dim,
        "2D": 2 * dim,
        "I": config["intermediate_size"],
        "M": expert,
        "2M": 2 * expert,
        "experts": config["num_experts"],
        "q_lora": config["q_lora_rank"],
        "queries": heads * head_dim,
        "kv_lora": kv_lora,
        "kv_lora+rope": kv_lora + rope,
        "keys+values": config["num_key_value_heads"] * (head_dim - rope + v_dim),
        "signal": signal,
        "outputs": signal * v_dim,
        "n": streams,
        "n*n": streams * streams,
        "nD": streams * dim,
        "1": 1,
        "3": 3,
    }


def entries(config: dict) -> Iterator[Entry]:
    """Every tensor that a checkpoint with this config.json has, in the order it is computed in."""
    dims = dimensions(config)

    def rows(table: tuple, family: str, source: str = "", target: str | None = None) -> Iterator[Entry]:
        target = source if target is None else target
        for name, mlx, shape, kind in table:
            targets = (mlx,) if isinstance(mlx, str) else mlx
            sizes = tuple(dims[axis] for axis in shape.split())
            yield Entry(source + name, tuple(target + t for t in targets), sizes, family, kind)

    yield from rows(EMBEDDING, "embedding")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield from rows(MHC, "mHC", at)
        yield from rows(NORMS, "norms", at)
        yield from rows(ATTENTION, "attention", at)
        if layer < config["n_dense_first_layers"]:
            yield from rows(DENSE_MLP, "dense MLP", at)
        else:
            yield from rows(ROUTER, "router", at)
            yield from rows(ROUTED_EXPERTS, "routed experts", at)
            if config.get("num_shared_experts", 1):
                yield from rows(SHARED_EXPERT, "shared expert", at)
    yield from rows(OUTPUT_NORM, "norms")
    yield from rows(LM_HEAD, "lm_head")
    for layer in range(config.get("num_nextn_predict_layers", 0)):
        yield from rows(MTP, "MTP head", f"model.mtp_layers.{layer}.", "mtp.")
