"""Motif-3's forward pass in plain PyTorch: the second way of computing what `eval` computes.

Written from the text that describes the model; it shares no code with motif.py, nor with mlx, and favours being read:
attention is expanded to full keys and values under an explicit mask, and there are no caches. Config keys are the
source's own, weights have their MLX names, and whatever dtype they have is computed in.

Tokens of several windows stand one after the other, N in all; `lengths` says how long the windows are, each of which
is its own context.
"""

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

MHC_EPS = POLYNORM_EPS = 1e-6
SINKHORN_FLOOR = 1e-8
NESTED = {"rope_factor": "factor", "original_seq_len": "original_max_position_embeddings"}


class Weights(Protocol):
    """The weights of a model."""

    def __call__(self, name: str) -> Tensor:
        """A parameter by its MLX name, in its own shape."""

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding: ids [N] -> [N, D]."""

    def experts(self, prefix: str, chosen: list[int]) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        """The matrices gate, up and down of some experts of a layer, one expert after the other."""


def rms_norm(x: Tensor, gamma: Tensor | float, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * gamma


def polynorm(config: dict, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(s(w0) N(g^3) + s(w1) N(g^2) + s(w2) N(g) + b) * up * the output scale; weight [3], bias [1]."""
    poly = sum(weight[i].sigmoid() * rms_norm(gate ** (3 - i), 1.0, POLYNORM_EPS) for i in range(3)) + bias
    return poly * up * config["polynorm_output_scale"]


def sinkhorn(logits: Tensor, rounds: int) -> Tensor:
    """[..., n, n] logits -> doubly stochastic matrices: rows are normalised first, then columns."""
    m = logits.clamp(-20, 20).exp()
    for _ in range(rounds):
        m = m / m.sum(dim=-1, keepdim=True).clamp_min(SINKHORN_FLOOR)
        m = m / m.sum(dim=-2, keepdim=True).clamp_min(SINKHORN_FLOOR)
    return m


def is_sliding(config: dict, layer: int) -> bool:
    return layer % config["sliding_window_period"] != 0


def yarn_fact(config: dict, key: str, default: float) -> float:
    """A key of YaRN: nested, as the source has it, or flat, as builds have it."""
    nested = config.get("rope_scaling") or {}
    return nested.get(NESTED.get(key, key), config.get(key, default))


def inverse_frequencies(config: dict, sliding: bool) -> Tensor:
    """Radians a position, float64 [qk_rope_head_dim / 2]: plain where it slides, else YaRN (Peng et al. 2023)."""
    dim = config["qk_rope_head_dim"]
    theta = config["swa_rope_theta"] if sliding else yarn_fact(config, "rope_theta", math.nan)
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if sliding:
        return plain

    def pair_that_turns(rotations: float) -> float:
        """The pair, real-valued, that makes this many rotations over the original context."""
        context = yarn_fact(config, "original_seq_len", 4096)
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn_fact(config, "beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(yarn_fact(config, "beta_slow", 1))), dim - 1)
    slow = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - slow) + plain / yarn_fact(config, "rope_factor", 1) * slow


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Half-split rotation of x [N, heads, dim]."""
    angles = positions[:, None, None].double() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(
    config: dict, w: Weights, prefix: str, x: Tensor, lengths: list[int], sliding: bool, offset: int = 0
) -> Tensor:
    """Grouped differential latent attention, x [N, D] -> [N, D], each window's first position at `offset`."""
    count, eps = len(x), config["rms_norm_eps"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, rope_dim, v_dim = config["head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    nope_dim, per_group = head_dim - rope_dim, heads // groups

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ w(f"{prefix}.{name}.weight").T

    positions = offset + torch.cat([torch.arange(n) for n in lengths])
    frequencies = inverse_frequencies(config, sliding)
    factor, scale = yarn_fact(config, "rope_factor", 1), head_dim**-0.5
    if not sliding and factor > 1:
        scale *= (0.1 * yarn_fact(config, "mscale", 1) * math.log(factor) + 1) ** 2

    q_latent = rms_norm(linear("wq_a", x), w(f"{prefix}.q_norm.weight"), eps)
    q = linear("wq_b", q_latent).reshape(count, heads, head_dim)
    q = torch.cat([q[..., :nope_dim], rotate(q[..., nope_dim:], positions, frequencies)], dim=-1)
    q = q.reshape(count, groups, per_group, head_dim)

    latent, k_rope = linear("wkv_a", x).split([config["kv_lora_rank"], rope_dim], dim=-1)
    k_rope = rotate(k_rope[:, None], positions, frequencies)
    kv = linear("wkv_b", rms_norm(latent, w(f"{prefix}.kv_norm.weight"), eps))
    kv = kv.reshape(count, groups, nope_dim + v_dim)
    k = torch.cat([kv[..., :nope_dim], k_rope.expand(count, groups, rope_dim)], dim=-1)
    v = kv[..., nope_dim:]

    outs = []
    for q_window, k_window, v_window in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        age = torch.arange(len(q_window))[:, None] - torch.arange(len(q_window))
        hidden = (age < 0) | (age > config["sliding_window"]) if sliding else age < 0
        scores = torch.einsum("qgjd,kgd->gjqk", q_window, k_window) * scale
        p = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outs.append(torch.einsum("gjqk,kgd->qgjd", p, v_window))
    out = torch.cat(outs)
    signal, noise = out[:, :, :-1], out[:, :, -1:]
    lam = linear("lambda_proj", x).sigmoid().reshape(count, groups, per_group - 1, 1)
    gate = linear("wq_b_gate", q_latent).sigmoid().reshape(signal.shape)
    return linear("wo", (gate * (signal - lam * noise)).reshape(count, -1))


def dense_mlp(config: dict, w: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ w(f"{prefix}.gate_proj.weight").T, x @ w(f"{prefix}.up_proj.weight").T
    act = polynorm(config, gate, up, w(f"{prefix}.act_fn.weight"), w(f"{prefix}.act_fn.bias"))
    return act @ w(f"{prefix}.down_proj.weight").T


def routed(config: dict, w: Weights, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Experts [N, K] of tokens x [N, D], chosen with the bias, and their shares [N, K], without it."""
    scores = (x @ w(f"{prefix}.gate.weight").T).sigmoid()
    chosen = (scores + w(f"{prefix}.gate.expert_bias")).topk(config["experts_top_k"], dim=-1).indices
    shares = scores.gather(-1, chosen)
    if config["route_norm"]:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares * config["route_scale"]


def moe(config: dict, w: Weights, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Routed and shared experts of x [N, D]: what they make of it, and the choices [N, K]."""
    chosen, shares = routed(config, w, prefix, x)
    clamp, out = config["polynorm_bias_clamp"], torch.zeros_like(x)
    weights, biases = (w(f"{prefix}.switch_mlp.act_fn.{kind}") for kind in ("weight", "bias"))
    for expert, (gate, up, down) in w.experts(prefix, chosen.unique().tolist()):
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        y, bias = x[tokens], biases[expert]
        bias = bias if clamp is None else bias.clamp(-clamp, clamp)
        act = polynorm(config, y @ gate.T, y @ up.T, weights[expert], bias)
        out.index_add_(0, tokens, shares[tokens, ranks, None] * (act @ down.T))
    if config.get("num_shared_experts", 1):
        out = out + dense_mlp(config, w, f"{prefix}.shared_experts", x)
    return out, chosen


def hyper_connected(
    config: dict, w: Weights, prefix: str, streams: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """Manifold-constrained hyper-connection: streams [N, n, D] -> [N, n, D] around sublayer([N, D])."""
    count, n, _ = streams.shape
    flat = rms_norm(streams.flatten(1), w(f"{prefix}.rms_norm.weight"), MHC_EPS)

    def logits(kind: str) -> Tensor:
        bias = w(f"{prefix}.bias_{kind}")
        p = (flat @ w(f"{prefix}.proj_{kind}.weight").T).reshape(count, *bias.shape)
        return w(f"{prefix}.alpha_{kind}") * p + bias

    h_pre = logits("pre").clamp(-10, 10).sigmoid()
    h_post = (1 + config.get("mhc_h_post_alpha_end", 0)) * logits("post").clamp(-10, 10).sigmoid()
    h_res = sinkhorn(logits("res").reshape(count, n, n), config["mhc_sinkhorn_iters"])
    out = sublayer(torch.einsum("sn,snd->sd", h_pre, streams))
    return h_res @ streams + h_post[:, :, None] * out[:, None, :]


def embedded(config: dict, w: Weights, ids: Tensor) -> Tensor:
    """Ids [N] -> the residual streams before the first layer, [N, n, D]."""
    return w.embed(ids)[:, None].repeat(1, config["mhc_expansion_rate"], 1)


def decoder_layer(
    config: dict, w: Weights, layer: int, streams: Tensor, lengths: list[int], offset: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Streams [N, n, D] before a layer -> behind it, and its router's choices [N, K]; None where it is dense."""
    p, eps, choices = f"model.layers.{layer}", config["rms_norm_eps"], None

    def attend(x: Tensor) -> Tensor:
        x = rms_norm(x, w(f"{p}.input_layernorm.weight"), eps)
        return attention(config, w, f"{p}.self_attn", x, lengths, is_sliding(config, layer), offset)

    def feed_forward(x: Tensor) -> Tensor:
        nonlocal choices
        x = rms_norm(x, w(f"{p}.post_attention_layernorm.weight"), eps)
        if layer < config["n_dense_first_layers"]:
            return dense_mlp(config, w, f"{p}.mlp", x)
        made, choices = moe(config, w, f"{p}.mlp", x)
        return made

    streams = hyper_connected(config, w, f"{p}.mhc_attn", streams, attend)
    return hyper_connected(config, w, f"{p}.mhc_ffn", streams, feed_forward), choices


def last_hidden(config: dict, w: Weights, streams: Tensor) -> Tensor:
    """Streams [N, n, D] behind the last layer -> the state that the output head and the MTP head take, [N, D]."""
    return rms_norm(streams.mean(dim=1), w("model.norm.weight"), config["rms_norm_eps"])


def mtp_hidden(config: dict, w: Weights, hidden: Tensor, ids: Tensor, lengths: list[int], offset: int = 0) -> Tensor:
    """Hidden [N, D] and the token after each [N] -> the MTP head's own state, [N, D], before the shared output head."""
    eps = config["rms_norm_eps"]
    following = rms_norm(w.embed(ids), w("mtp.embed_norm.weight"), eps)
    x = torch.cat([hidden, following], dim=-1) @ w("mtp.input_proj.weight").T
    y = rms_norm(x, w("mtp.input_layernorm.weight"), eps)
    x = x + attention(config, w, "mtp.self_attn", y, lengths, True, offset)
    y = rms_norm(x, w("mtp.post_attention_layernorm.weight"), eps)
    return rms_norm(x + dense_mlp(config, w, "mtp.mlp", y), w("mtp.final_layernorm.weight"), eps)
