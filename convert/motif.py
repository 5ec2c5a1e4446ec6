"""Motif-3 for mlx-lm: the architecture file that every converted repository carries.

`config.json` names this file as `model_file`; mlx-lm then takes `Model` and `ModelArgs` from
it (`--trust-remote-code`). It needs nothing but mlx and mlx_lm.

What is in here, from the bottom up: PolyNorm and the MLPs, the mixture of experts, GDLA
(grouped differential latent attention), mHC (manifold-constrained hyper-connections over
several residual streams), the decoder layer, and the MTP (multi-token prediction) head.

Interface for runtimes that decode speculatively with the MTP head:

    logits, hidden = model(tokens, cache=cache, return_hidden=True)
    draft = model.mtp_forward(hidden, next_token_ids, mtp_cache=mtp_cache)

`hidden[:, t]` is the state after `model.norm`, `next_token_ids[:, t]` is token t + 1, and
`draft[:, t]` predicts token t + 2. `make_cache()` and `make_mtp_cache()` are separate lists.
A rotating cache that has wrapped can't be trimmed (mlx-lm's `trim_prompt_cache` then returns
0), so a loop that drafts must keep what it needs to take rejected rows back.

Under `mlx.launch` mlx-lm's `sharded_load` splits the layers over machines as a pipeline: rank 0
holds the last ones and the MTP head. Every rank calls the functions above in the same order with
the same tokens, and gets the same values.
"""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.pipeline import PipelineMixin
from mlx_lm.models.switch_layers import SwitchLinear

# Facts of the architecture that no config key carries.
MHC_EPS = 1e-6  # RMSNorm of the flattened streams
MHC_GATE_CLIP = 10.0  # logits of h_pre and h_post
MHC_RES_CLIP = 20.0  # logits of h_res
SINKHORN_FLOOR = 1e-8  # smallest row or column sum to divide by
POLYNORM_EPS = 1e-6
NVFP4_SPAN = 448 * 6  # global_scale is what E4M3 and E2M1 span, times the per-expert scale
HIDDEN_CLAMP_INERT = 1e6  # the published value; a smaller one could act and is not implemented

DTYPES = ("bfloat16", "float16", "float32")

# key -> the one value this file implements. A config without the key means that value.
FIXED = {
    "model_type": "Motif",
    "attention_cls": "gdla",
    "diff_v2": True,
    "k_ratio": 1,
    "headwise_attn_output_gate": False,
    "elementwise_attn_output_gate": True,
    "hidden_act": "poly_norm",
    "polynorm_sigmoid_weight": True,
    "interleave_moe_layer_step": 1,
    "score_func": "sigmoid",
    "score_before_experts": False,
    "_debug_force_load_balance": False,
    "mhc_enabled": True,
    "use_sliding_window": True,
    "sliding_window_pattern": "interleave",
    "tie_word_embeddings": False,
}


@dataclass
class ModelArgs(BaseModelArgs):
    """The keys of `config.json` that the forward pass depends on.

    Raises:
        ValueError: a key has a value that this file does not implement.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_noise_heads: int
    head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int
    kv_lora_rank: int
    moe_intermediate_size: int
    num_experts: int
    experts_top_k: int
    n_dense_first_layers: int
    sliding_window: int
    mhc_expansion_rate: int
    mhc_sinkhorn_iters: int
    polynorm_output_scale: float
    sliding_window_period: int
    rms_norm_eps: float
    rope_theta: float
    swa_rope_theta: float
    route_norm: bool
    route_scale: float
    polynorm_bias_clamp: float | None
    num_shared_experts: int = 1
    num_nextn_predict_layers: int = 0
    mhc_h_post_alpha_end: float = 0.0
    hidden_clamp: float | None = None
    rope_factor: float = 1.0
    original_seq_len: int = 4096
    mscale: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mtp_compute_dtype: str | None = None

    @classmethod
    def from_dict(cls, params):
        for key, value in FIXED.items():
            if params.get(key, value) != value:
                raise ValueError(f"{key} is {params[key]!r}; only {value!r} is implemented")
        if params.get("rope_scaling"):
            params = _with_flat_rope_keys(params)
        missing = [k for k in cls.__dataclass_fields__ if k not in params and k not in vars(cls)]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        return super().from_dict(params)

    def __post_init__(self):
        for why, wrong in {
            "num_noise_heads must equal num_key_value_heads": self.num_noise_heads != self.num_key_value_heads,
            "num_attention_heads must be a multiple of num_key_value_heads, with two or more heads a group": (
                self.num_attention_heads % self.num_key_value_heads
                or self.num_attention_heads < 2 * self.num_key_value_heads
            ),
            "qk_rope_head_dim must be even and smaller than head_dim": (
                self.qk_rope_head_dim % 2 or not 0 < self.qk_rope_head_dim < self.head_dim
            ),
            "num_shared_experts must be 0 or 1": self.num_shared_experts not in (0, 1),
            "num_nextn_predict_layers must be 0 or 1": self.num_nextn_predict_layers not in (0, 1),
            "experts_top_k must be at most num_experts": (
                self.n_dense_first_layers < self.num_hidden_layers and not 0 < self.experts_top_k <= self.num_experts
            ),
            f"hidden_clamp below {HIDDEN_CLAMP_INERT:g} is not implemented": (
                self.hidden_clamp is not None and self.hidden_clamp < HIDDEN_CLAMP_INERT
            ),
            f"mtp_compute_dtype must be one of {', '.join(DTYPES)}": (
                self.mtp_compute_dtype is not None and self.mtp_compute_dtype not in DTYPES
            ),
        }.items():
            if wrong:
                raise ValueError(why)

    @property
    def qk_nope_head_dim(self) -> int:
        return self.head_dim - self.qk_rope_head_dim

    @property
    def num_signal_heads(self) -> int:
        return self.num_attention_heads - self.num_noise_heads

    @property
    def window(self) -> int:
        """Keys that a sliding layer sees, the query's own among them."""
        return self.sliding_window + 1

    def slides(self, layer: int) -> bool:
        return layer % self.sliding_window_period != 0


def _with_flat_rope_keys(params):
    """The YaRN facts that a source config nests in `rope_scaling`, as the flat keys that a converted
    repository carries alone (transformers rejects Motif's `rope_scaling`)."""
    scaling = params["rope_scaling"]
    if scaling.get("rope_type", scaling.get("type", "yarn")) != "yarn" or scaling.get("apply_yarn_scaling"):
        raise ValueError("rope_scaling must be yarn without apply_yarn_scaling")
    flat = {
        flat: scaling[nested]
        for flat, nested in {
            "rope_factor": "factor",
            "original_seq_len": "original_max_position_embeddings",
            "mscale": "mscale",
            "rope_theta": "rope_theta",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
        }.items()
        if nested in scaling
    }
    for key, value in flat.items():
        if params.get(key, value) != value:
            raise ValueError(f"rope_scaling says {key} {value!r}, the flat key {params[key]!r}")
    return {**params, **flat}


def plain_frequencies(dims: int, theta: float) -> mx.array:
    """Wavelength over 2 pi of each rotary pair, `theta^(2i/dims)`; float32 [dims / 2]."""
    return theta ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)


def yarn_frequencies(
    dims: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float
) -> mx.array:
    """YaRN's wavelengths (Peng et al. 2023, "NTK-by-parts"); float32 [dims / 2].

    Pairs that turn more than `beta_fast` times within `original` positions keep their
    frequency, those that turn less than `beta_slow` times are slowed by `factor`, and
    between the two the frequency is interpolated linearly in the pair's index.
    """

    def pair_that_turns(times):
        return dims * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), dims - 1)
    span = high - low if high != low else 0.001
    slowed = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / span, 0, 1)
    plain = plain_frequencies(dims, theta)
    return 1 / (slowed / (factor * plain) + (1 - slowed) / plain)


def poly_norm(gate, up, weight, bias, output_scale):
    """PolyNorm(gate) * up * output_scale, computed in float32 (Zhuo et al. 2024).

    Args:
        gate, up: [..., I].
        weight: [..., 3], the logits of the coefficients of gate^3, gate^2, gate.
        bias: [..., 1].
    Returns:
        [..., I] in gate's dtype.
    """
    x = gate.astype(mx.float32)
    w = mx.sigmoid(weight.astype(mx.float32))

    def normed(v):
        return v * mx.rsqrt(mx.mean(v * v, axis=-1, keepdims=True) + POLYNORM_EPS)

    x2 = x * x
    y = w[..., 0:1] * normed(x2 * x) + w[..., 1:2] * normed(x2) + w[..., 2:3] * normed(x) + bias.astype(mx.float32)
    return (y * up.astype(mx.float32) * output_scale).astype(gate.dtype)


class PolyNorm(nn.Module):
    """The coefficients of one PolyNorm, or of one for each of `num_experts` routed experts."""

    def __init__(self, num_experts: int | None = None):
        super().__init__()
        lead = () if num_experts is None else (num_experts,)
        self.weight = mx.zeros((*lead, 3))
        self.bias = mx.zeros((*lead, 1))


class MLP(nn.Module):
    """Dense and shared experts: `down(PolyNorm(gate x) * up x)`."""

    def __init__(self, args: ModelArgs, hidden_dims: int):
        super().__init__()
        self.output_scale = args.polynorm_output_scale
        self.gate_proj = nn.Linear(args.hidden_size, hidden_dims, bias=False)
        self.up_proj = nn.Linear(args.hidden_size, hidden_dims, bias=False)
        self.down_proj = nn.Linear(hidden_dims, args.hidden_size, bias=False)
        self.act_fn = PolyNorm()

    def __call__(self, x):
        act = poly_norm(self.gate_proj(x), self.up_proj(x), self.act_fn.weight, self.act_fn.bias, self.output_scale)
        return self.down_proj(act)


class ExpertLinear(SwitchLinear):
    """One matrix for each routed expert. mlx's `gather_mm` takes float32 alone on the CPU, so
    half-precision experts are upcast there: the chosen ones if they are few, else the stack."""

    def __init__(self, input_dims, output_dims, num_experts):
        super().__init__(input_dims, output_dims, num_experts, bias=False)

    def __call__(self, x, indices, sorted_indices=False):
        weight = self.weight
        if mx.default_device() == mx.gpu or weight.dtype == mx.float32:
            return super().__call__(x, indices, sorted_indices)
        if indices.size < weight.shape[0]:
            weight = weight[indices.flatten()]
            indices = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        weight = weight.astype(mx.float32).swapaxes(-1, -2)
        y = mx.gather_mm(x.astype(mx.float32), weight, rhs_indices=indices, sorted_indices=sorted_indices)
        return y.astype(x.dtype)


def expert_matmul(linear, x, indices, sorted_indices):
    """x @ W_e^T. mlx's `gather_qmm` takes the per-expert scale of nvfp4 on a GPU alone; elsewhere it is
    multiplied in afterwards."""
    scale = getattr(linear, "global_scale", None)
    if scale is None or mx.default_device() == mx.gpu:
        return linear(x, indices, sorted_indices)
    y = mx.gather_qmm(
        x,
        linear["weight"],
        linear["scales"],
        rhs_indices=indices,
        transpose=True,
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
        sorted_indices=sorted_indices,
    )
    scale = (scale / NVFP4_SPAN)[indices].reshape(*indices.shape, *(1,) * (y.ndim - indices.ndim))
    return (y.astype(mx.float32) * scale).astype(x.dtype)


class RoutedExperts(nn.Module):
    """Every token through its own experts: `down_e(PolyNorm_e(gate_e x) * up_e x)`."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.output_scale = args.polynorm_output_scale
        self.bias_clamp = args.polynorm_bias_clamp
        dims, hidden, experts = args.hidden_size, args.moe_intermediate_size, args.num_experts
        self.gate_proj = ExpertLinear(dims, hidden, experts)
        self.up_proj = ExpertLinear(dims, hidden, experts)
        self.down_proj = ExpertLinear(hidden, dims, experts)
        self.act_fn = PolyNorm(experts)

    def __call__(self, x, indices):
        """x [N, D], indices [N, K] -> [N, K, D]."""
        tokens, top_k = indices.shape
        flat = indices.flatten()
        order = None
        if flat.size >= 64:  # neighbours then share an expert: fewer passes over the weights
            order = mx.argsort(flat)
            x, idx = x[order // top_k], flat[order]
        else:
            x, idx = mx.repeat(x, top_k, axis=0), flat
        x = x[:, None, :]
        is_sorted = order is not None
        gate = expert_matmul(self.gate_proj, x, idx, is_sorted)
        up = expert_matmul(self.up_proj, x, idx, is_sorted)
        weight, bias = self.act_fn.weight[idx][:, None], self.act_fn.bias[idx][:, None]
        if self.bias_clamp is not None:
            bias = mx.clip(bias, -self.bias_clamp, self.bias_clamp)
        act = poly_norm(gate, up, weight, bias, self.output_scale)
        y = expert_matmul(self.down_proj, act, idx, is_sorted).squeeze(-2)
        if order is not None:
            y = y[mx.argsort(order)]
        return y.reshape(tokens, top_k, -1)


class Router(nn.Module):
    """Sigmoid scores in float32; `expert_bias` steers the choice and not the weights."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.top_k = args.experts_top_k
        self.norm = args.route_norm
        self.scale = args.route_scale
        self.weight = mx.zeros((args.num_experts, args.hidden_size))
        self.expert_bias = mx.zeros((args.num_experts,))

    def __call__(self, x):
        """x [N, D] -> indices [N, K] uint32, weights [N, K] float32."""
        scores = mx.sigmoid(x.astype(mx.float32) @ self.weight.astype(mx.float32).T)
        biased = scores + self.expert_bias.astype(mx.float32)
        indices = mx.argpartition(-biased, kth=self.top_k - 1, axis=-1)[..., : self.top_k]
        weights = mx.take_along_axis(scores, indices, axis=-1)
        if self.norm:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return indices, weights * self.scale


class MoE(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.gate = Router(args)
        self.switch_mlp = RoutedExperts(args)
        if args.num_shared_experts:
            self.shared_experts = MLP(args, args.moe_intermediate_size)

    def __call__(self, x):
        flat = x.reshape(-1, x.shape[-1])
        indices, weights = self.gate(flat)
        y = self.switch_mlp(flat, indices).astype(mx.float32)
        y = (y * weights[..., None]).sum(axis=-2).astype(x.dtype).reshape(x.shape)
        if "shared_experts" in self:
            y = y + self.shared_experts(x)
        return y


def head_matmul(linear, heads, rows, x, transpose):
    """x @ W_g^T (or x @ W_g) with head g's own rows of a linear layer's weight.

    Args:
        linear: nn.Linear or nn.QuantizedLinear with weight [G * heads' rows, R].
        heads: G.
        rows: slice of the rows of each head.
        x: [B, G, L, rows if not transpose else R].
    """

    def part(w):
        return w.reshape(heads, -1, w.shape[-1])[:, rows]

    if isinstance(linear, nn.QuantizedLinear):
        biases = linear.get("biases")
        return mx.quantized_matmul(
            x,
            part(linear.weight),
            part(linear.scales),
            None if biases is None else part(biases),
            transpose=transpose,
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
        )
    weight = part(linear.weight)
    return x @ (weight.swapaxes(-1, -2) if transpose else weight)


class Attention(nn.Module):
    """Grouped differential latent attention.

    The heads of a group share one key/value head; its last head is noise, subtracted from the
    others' outputs by a learned share. The cache holds the normed latent (as keys) and the
    rotary key (as values), kv_lora_rank + qk_rope_head_dim numbers a token. Few queries attend
    to the latents themselves ("absorbed"), many to the keys and values expanded from them.
    """

    def __init__(self, args: ModelArgs, slides: bool):
        super().__init__()
        self.num_heads = args.num_attention_heads
        self.num_kv_heads = args.num_key_value_heads
        self.nope_dim = args.qk_nope_head_dim
        self.rope_dim = args.qk_rope_head_dim
        self.v_dim = args.v_head_dim
        self.kv_rank = args.kv_lora_rank
        self.scale = args.head_dim**-0.5
        if slides:
            self._frequencies = plain_frequencies(self.rope_dim, args.swa_rope_theta)
        elif args.rope_factor <= 1:
            self._frequencies = plain_frequencies(self.rope_dim, args.rope_theta)
        else:
            self._frequencies = yarn_frequencies(
                self.rope_dim,
                args.rope_theta,
                args.rope_factor,
                args.original_seq_len,
                args.beta_fast,
                args.beta_slow,
            )
            self.scale *= (0.1 * args.mscale * math.log(args.rope_factor) + 1) ** 2

        dims, signal = args.hidden_size, args.num_signal_heads
        self.wq_a = nn.Linear(dims, args.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(args.q_lora_rank, args.rms_norm_eps)
        self.wq_b = nn.Linear(args.q_lora_rank, self.num_heads * args.head_dim, bias=False)
        self.wq_b_gate = nn.Linear(args.q_lora_rank, signal * self.v_dim, bias=False)
        self.wkv_a = nn.Linear(dims, self.kv_rank + self.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(self.kv_rank, args.rms_norm_eps)
        self.wkv_b = nn.Linear(self.kv_rank, self.num_kv_heads * (self.nope_dim + self.v_dim), bias=False)
        self.lambda_proj = nn.Linear(dims, signal, bias=False)
        self.wo = nn.Linear(signal * self.v_dim, dims, bias=False)

    def _rope(self, x, offset):
        return mx.fast.rope(
            x, self.rope_dim, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._frequencies
        )

    def __call__(self, x, mask=None, cache=None):
        """x [B, L, D] -> [B, L, D]."""
        B, L, _ = x.shape
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).reshape(B, L, self.num_heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_rope = mx.split(q, [self.nope_dim], axis=-1)
        latent, k_rope = mx.split(self.wkv_a(x), [self.kv_rank], axis=-1)
        latent, k_rope = self.kv_norm(latent)[:, None], k_rope[:, None]
        offset = 0 if cache is None else cache.offset
        q_rope, k_rope = self._rope(q_rope, offset), self._rope(k_rope, offset)
        if cache is not None:
            latent, k_rope = cache.update_and_fetch(latent, k_rope)

        out = (self._absorbed if self._absorbs(L) else self._expanded)(q_nope, q_rope, latent, k_rope, mask)
        out = out.transpose(0, 2, 1, 3).reshape(B, L, self.num_kv_heads, -1, self.v_dim)
        share = mx.sigmoid(self.lambda_proj(x)).reshape(B, L, self.num_kv_heads, -1, 1)
        out = (out[..., :-1, :] - share * out[..., -1:, :]).reshape(B, L, -1)
        return self.wo(out * mx.sigmoid(self.wq_b_gate(q_latent)))

    def _absorbs(self, queries: int) -> bool:
        """Whether latents cost fewer multiplications a cached token than expanded keys and values."""
        wider = self.num_heads * (2 * self.kv_rank - self.nope_dim - self.v_dim)
        return queries * wider < self.kv_rank * self.num_kv_heads * (self.nope_dim + self.v_dim)

    def _grouped(self, x):
        """[B, H, L, d] -> [B, G, H / G * L, d]: the queries of a group beside each other."""
        return x.reshape(x.shape[0], self.num_kv_heads, -1, x.shape[-1])

    def _absorbed(self, q_nope, q_rope, latent, k_rope, mask):
        B, H, L, _ = q_nope.shape
        keys, values = slice(0, self.nope_dim), slice(self.nope_dim, None)
        q = head_matmul(self.wkv_b, self.num_kv_heads, keys, self._grouped(q_nope), transpose=False)
        q = q.reshape(B, H, L, self.kv_rank)
        scores = (q_rope * self.scale) @ k_rope.swapaxes(-1, -2)
        if isinstance(mask, str):
            mask = create_causal_mask(L, latent.shape[2] - L) if L > 1 else None
        if mask is not None:
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        out = mx.fast.scaled_dot_product_attention(q, latent, latent, scale=self.scale, mask=scores)
        out = head_matmul(self.wkv_b, self.num_kv_heads, values, self._grouped(out), transpose=True)
        return out.reshape(B, H, L, self.v_dim)

    def _expanded(self, q_nope, q_rope, latent, k_rope, mask):
        B, T = latent.shape[0], latent.shape[2]
        kv = self.wkv_b(latent[:, 0]).reshape(B, T, self.num_kv_heads, -1).transpose(0, 2, 1, 3)
        k_nope, v = mx.split(kv, [self.nope_dim], axis=-1)
        k = mx.concatenate([k_nope, mx.broadcast_to(k_rope, (*k_nope.shape[:3], self.rope_dim))], axis=-1)
        q = mx.concatenate([q_nope, q_rope], axis=-1)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)


def sinkhorn(m, iterations: int):
    """Makes positive matrices [..., n, n] doubly stochastic: rows, then columns, `iterations` times."""
    for _ in range(iterations):
        m = m / mx.maximum(m.sum(axis=-1, keepdims=True), SINKHORN_FLOOR)
        m = m / mx.maximum(m.sum(axis=-2, keepdims=True), SINKHORN_FLOOR)
    return m


class HyperConnection(nn.Module):
    """mHC around one sublayer: what it reads from the streams, and how they mix after it."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        n = args.mhc_expansion_rate
        self.streams = n
        self.iterations = args.mhc_sinkhorn_iters
        self.post_scale = 1.0 + args.mhc_h_post_alpha_end
        width = n * args.hidden_size
        self.rms_norm = nn.RMSNorm(width, MHC_EPS)
        self.proj_pre = nn.Linear(width, n, bias=False)
        self.proj_post = nn.Linear(width, n, bias=False)
        self.proj_res = nn.Linear(width, n * n, bias=False)
        for name, shape in {"pre": (n,), "post": (n,), "res": (n, n)}.items():
            self[f"alpha_{name}"] = mx.zeros((1,))
            self[f"bias_{name}"] = mx.zeros(shape)

    def _logits(self, name, x, clip):
        f32 = mx.float32
        p = x @ self[f"proj_{name}"].weight.astype(f32).T
        bias = self[f"bias_{name}"].astype(f32)
        p = self[f"alpha_{name}"].astype(f32) * p.reshape(*p.shape[:-1], *bias.shape) + bias
        return mx.clip(p, -clip, clip)

    def gates(self, streams):
        """streams [B, L, n, D] -> h_pre, h_post [B, L, n] and h_res [B, L, n, n], float32."""
        x = streams.astype(mx.float32).flatten(-2)
        x = mx.fast.rms_norm(x, self.rms_norm.weight.astype(mx.float32), MHC_EPS)
        h_pre = mx.sigmoid(self._logits("pre", x, MHC_GATE_CLIP))
        h_post = self.post_scale * mx.sigmoid(self._logits("post", x, MHC_GATE_CLIP))
        h_res = sinkhorn(mx.exp(self._logits("res", x, MHC_RES_CLIP)), self.iterations)
        return h_pre, h_post, h_res

    def __call__(self, streams, sublayer):
        h_pre, h_post, h_res = self.gates(streams)
        x = streams.astype(mx.float32)
        out = sublayer((h_pre[..., None, :] @ x).squeeze(-2).astype(streams.dtype))
        mixed = h_res @ x + h_post[..., None] * out[..., None, :].astype(mx.float32)
        return mixed.astype(streams.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        self.slides = args.slides(index)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.mhc_attn = HyperConnection(args)
        self.mhc_ffn = HyperConnection(args)
        self.self_attn = Attention(args, self.slides)
        self.mlp = MLP(args, args.intermediate_size) if index < args.n_dense_first_layers else MoE(args)

    def __call__(self, streams, mask=None, cache=None):
        """streams [B, L, n, D] -> the same."""
        streams = self.mhc_attn(streams, lambda x: self.self_attn(self.input_layernorm(x), mask, cache))
        return self.mhc_ffn(streams, lambda x: self.mlp(self.post_attention_layernorm(x)))


def from_rank_0(x, group):
    """Rank 0's x [B, ...] on every rank; the others' is of the same shape and dtype, and not looked at."""
    return mx.distributed.all_gather(x, group=group)[: x.shape[0]]


class MotifModel(PipelineMixin, nn.Module):
    """The body. Of a pipeline, `layers` keeps its length and holds None for the layers of other ranks."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self._group = self._split_head = None
        self.streams = args.mhc_expansion_rate
        self.window = args.window
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)

    def pipeline(self, group, split=None):
        """Keeps this rank's layers alone: rank 0 has the last ones. Called once, by mlx-lm's `sharded_load`.

        Args:
            group: mx.distributed.Group.
            split: layers of each rank; even if None.
        Raises:
            ValueError: more ranks than layers, or a split that is not one.
        """
        if group.size() > len(self.layers):
            raise ValueError(f"{group.size()} ranks are too many: the model has {len(self.layers)} layers to share")
        super().pipeline(group, split)
        self._group = group
        if self._split_head is not None:
            self._split_head(group)

    def __call__(self, inputs, cache=None, input_embeddings=None):
        """Token ids [B, L] -> hidden states after the final norm [B, L, D]."""
        h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        layers, rank, last = self.pipeline_layers, self.pipeline_rank, self.pipeline_size - 1
        cache = [None] * len(layers) if cache is None else cache
        masks = {}
        for layer, c in zip(layers, cache, strict=True):
            if layer.slides not in masks:
                window = self.window if layer.slides else None
                masks[layer.slides] = create_attention_mask(h, c, window_size=window)
        h = mx.repeat(h[..., None, :], self.streams, axis=-2)
        if rank < last:
            h = mx.distributed.recv_like(h, rank + 1, group=self._group)
        for layer, c in zip(layers, cache, strict=True):
            h = layer(h, masks[layer.slides], c)
        if rank == 0:
            h = self.norm(h.astype(mx.float32).mean(axis=-2).astype(h.dtype))
        else:
            h = mx.distributed.send(h, rank - 1, group=self._group)
            if cache[-1] is not None:  # a prefill evaluates the caches alone, and must send all the same
                cache[-1].keys = mx.depends(cache[-1].keys, h)
            h = h[..., 0, :]
        return from_rank_0(h, self._group) if last else h


class MTPHead(nn.Module):
    """One plain pre-norm block that reads a hidden state and the token after it.

    Of a pipeline, rank 0 computes it. On the other ranks it has no parameters and leaves its cache
    empty, and has to be called all the same.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self._group = None
        dims, eps = args.hidden_size, args.rms_norm_eps
        self.window = args.window
        self.embed_norm = nn.RMSNorm(dims, eps)
        self.input_proj = nn.Linear(2 * dims, dims, bias=False)
        self.input_layernorm = nn.RMSNorm(dims, eps)
        self.self_attn = Attention(args, slides=True)
        self.post_attention_layernorm = nn.RMSNorm(dims, eps)
        self.mlp = MLP(args, args.intermediate_size)
        self.final_layernorm = nn.RMSNorm(dims, eps)

    def pipeline(self, group):
        """Keeps the parameters on rank 0 of a mx.distributed.Group alone."""
        self._group = group
        if group.rank() != 0:
            self.clear()

    def __call__(self, hidden, embedding, cache=None):
        """hidden, embedding [B, L, D] -> [B, L, D], computed in the head's own dtype."""
        if self._group is None:
            return self._block(hidden, embedding, cache)
        if self._group.rank() != 0:  # dependent on what rank 0's depends on: all run their collectives in one order
            return from_rank_0(mx.depends(hidden, embedding), self._group)
        return from_rank_0(self._block(hidden, embedding, cache), self._group)

    def _block(self, hidden, embedding, cache):
        dtype = self.embed_norm.weight.dtype
        x = mx.concatenate([hidden.astype(dtype), self.embed_norm(embedding.astype(dtype))], axis=-1)
        x = self.input_proj(x)
        mask = create_attention_mask(x, cache, window_size=self.window)
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.final_layernorm(x).astype(hidden.dtype)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = "Motif"
        self.model = MotifModel(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if args.num_nextn_predict_layers:
            self.mtp = MTPHead(args)
            self.model._split_head = self.mtp.pipeline

    def __call__(self, inputs, cache=None, return_hidden: bool = False, input_embeddings=None):
        """Token ids [B, L] -> logits [B, L, V], or (logits, hidden [B, L, D]).

        `hidden` is the state after the final norm, which `mtp_forward` takes.
        """
        hidden = self.model(inputs, cache, input_embeddings)
        logits = self.lm_head(hidden)
        return (logits, hidden) if return_hidden else logits

    def mtp_forward(self, hidden, next_token_ids, mtp_cache=None, return_hidden: bool = False):
        """Draft logits for token t + 2 from the hidden state at t and token t + 1.

        Args:
            hidden: [B, L, D], of `__call__` or of an earlier draft (to chain).
            next_token_ids: [B, L].
            mtp_cache: the list of `make_mtp_cache()`, or None.
        Returns:
            logits [B, L, V], or (logits, the hidden [B, L, D] to chain).
        Raises:
            ValueError: the repository holds no MTP head.
        """
        if "mtp" not in self:
            raise ValueError("this build has no MTP head (num_nextn_predict_layers is 0)")
        embedding = self.model.embed_tokens(next_token_ids)
        hidden = self.mtp(hidden, embedding, mtp_cache[0] if mtp_cache else None)
        logits = self.lm_head(hidden)
        return (logits, hidden) if return_hidden else logits

    def make_cache(self) -> list[Any]:
        """One cache for each layer of this rank: sliding layers keep `sliding_window + 1` rows, the others all."""
        return [RotatingKVCache(self.args.window) if layer.slides else KVCache() for layer in self.layers]

    def make_mtp_cache(self) -> list[Any]:
        """The MTP head's own cache: one sliding cache, or nothing without a head."""
        return [RotatingKVCache(self.args.window)] if "mtp" in self else []

    def sanitize(self, weights):
        """A float16 head under a bfloat16 body would promote every product to float32: its
        weights take the dtype that config.json states, `mtp_compute_dtype`."""
        name = self.args.mtp_compute_dtype
        dtype = getattr(mx, name) if name else None
        if dtype is None:
            return weights
        return {k: v.astype(dtype) if k.startswith("mtp.") and v.dtype == mx.float16 else v for k, v in weights.items()}

    @property
    def layers(self):
        return self.model.pipeline_layers
