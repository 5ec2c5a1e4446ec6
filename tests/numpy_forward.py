"""Motif-3's forward pass in plain numpy, float64, one sequence, no cache: a second way of computing the logits.

Written from the text that describes the model, not from convert/motif.py, and shares no code with it. It favours
being read: attention is expanded to full keys and values under an explicit mask, experts run one token at a time.
Configs are the source's own (config.json of a checkpoint) and so are the weight names.
"""

import numpy as np

MHC_EPS = POLYNORM_EPS = 1e-6
SINKHORN_FLOOR = 1e-8
YARN_BETA_FAST, YARN_BETA_SLOW = 32, 1


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


def rms_norm(x, gamma, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gamma


def polynorm(gate, up, weight, bias, config):
    """s(w0) N(g^3) + s(w1) N(g^2) + s(w2) N(g) + b, times up, times the output scale; weight [3], bias [1]."""
    poly = sum(sigmoid(weight[i]) * rms_norm(gate ** (3 - i), 1, POLYNORM_EPS) for i in range(3)) + bias
    return poly * up * config["polynorm_output_scale"]


def sinkhorn(logits, rounds):
    """[..., n, n] logits -> doubly stochastic matrices: rows are normalised first, then columns."""
    m = np.exp(np.clip(logits, -20, 20))
    for _ in range(rounds):
        m = m / np.maximum(m.sum(axis=-1, keepdims=True), SINKHORN_FLOOR)
        m = m / np.maximum(m.sum(axis=-2, keepdims=True), SINKHORN_FLOOR)
    return m


def is_sliding(config, layer):
    return layer % config["sliding_window_period"] != 0


def inverse_frequencies(config, sliding):
    """[qk_rope_head_dim / 2] radians a position: plain for sliding layers, YaRN for global ones."""
    dim = config["qk_rope_head_dim"]
    theta = config["swa_rope_theta" if sliding else "rope_theta"]
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if sliding:
        return plain

    def pair_that_turns(rotations):
        """Index of the pair that makes this many rotations over the original context (real-valued)."""
        return dim * np.log(config["original_seq_len"] / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low = max(np.floor(pair_that_turns(YARN_BETA_FAST)), 0)
    high = min(np.ceil(pair_that_turns(YARN_BETA_SLOW)), dim - 1)
    slow = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain * (1 - slow) + plain / config["rope_factor"] * slow


def rotate(x, positions, frequencies):
    """Half-split rotation of x [S, heads, dim]."""
    angles = positions[:, None, None] * frequencies
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def attention(config, w, prefix, x, offset, sliding):
    """Grouped differential latent attention, x [S, D] -> [S, D]."""
    length, eps = len(x), config["rms_norm_eps"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, rope_dim, v_dim = config["head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    nope_dim, per_group = head_dim - rope_dim, heads // groups

    def linear(name, y):
        return y @ w[f"{prefix}.{name}.weight"].T

    positions = offset + np.arange(length)
    frequencies = inverse_frequencies(config, sliding)
    scale = head_dim**-0.5
    if not sliding and config["rope_factor"] > 1:
        scale *= (0.1 * config["mscale"] * np.log(config["rope_factor"]) + 1) ** 2

    q_latent = rms_norm(linear("wq_a", x), w[f"{prefix}.q_norm.weight"], eps)
    q = linear("wq_b", q_latent).reshape(length, heads, head_dim)
    q = np.concatenate([q[..., :nope_dim], rotate(q[..., nope_dim:], positions, frequencies)], axis=-1)

    latent, k_rope = np.split(linear("wkv_a", x), [config["kv_lora_rank"]], axis=-1)
    k_rope = rotate(k_rope[:, None], positions, frequencies)[:, 0]
    kv = linear("wkv_b", rms_norm(latent, w[f"{prefix}.kv_norm.weight"], eps))
    kv = kv.reshape(length, groups, nope_dim + v_dim)

    age = np.arange(length)[:, None] - np.arange(length)
    visible = (age >= 0) & (age <= config["sliding_window"]) if sliding else age >= 0

    out = np.zeros((length, heads, v_dim))
    for head in range(heads):
        group = head // per_group
        keys = np.concatenate([kv[:, group, :nope_dim], k_rope], axis=-1)
        scores = np.where(visible, q[:, head] @ keys.T * scale, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = p / p.sum(axis=-1, keepdims=True) @ kv[:, group, nope_dim:]

    out = out.reshape(length, groups, per_group, v_dim)
    signal, noise = out[:, :, :-1], out[:, :, -1:]
    lam = sigmoid(linear("lambda_proj", x)).reshape(length, groups, per_group - 1, 1)
    gate = sigmoid(linear("wq_b_gate", q_latent)).reshape(signal.shape)
    return linear("wo", (gate * (signal - lam * noise)).reshape(length, -1))


def dense_mlp(config, w, prefix, x):
    gate, up = x @ w[f"{prefix}.gate_proj.weight"].T, x @ w[f"{prefix}.up_proj.weight"].T
    act = polynorm(gate, up, w[f"{prefix}.act_fn.weight"], w[f"{prefix}.act_fn.bias"], config)
    return act @ w[f"{prefix}.down_proj.weight"].T


def moe(config, w, prefix, x):
    """Routed experts, chosen with the bias and weighted without it, plus the shared experts."""
    scores = sigmoid(x @ w[f"{prefix}.router.gate.weight"].T)
    chosen = np.argsort(-(scores + w[f"{prefix}.expert_bias"]), axis=-1)[:, : config["experts_top_k"]]
    clamp = config["polynorm_bias_clamp"]
    out = np.zeros_like(x)
    for t in range(len(x)):
        share = scores[t, chosen[t]]
        if config["route_norm"]:
            share = share / share.sum()
        for e, s in zip(chosen[t], share * config["route_scale"], strict=True):
            gate, up = np.split(w[f"{prefix}.experts.gate_up_proj"][e] @ x[t], 2)
            bias = w[f"{prefix}.experts.act_fn.bias"][e]
            bias = bias if clamp is None else np.clip(bias, -clamp, clamp)
            act = polynorm(gate, up, w[f"{prefix}.experts.act_fn.weight"][e], bias, config)
            out[t] += s * (w[f"{prefix}.experts.down_proj"][e] @ act)
    return out + dense_mlp(config, w, f"{prefix}.shared_experts", x) if config["num_shared_experts"] else out


def hyper_connected(config, w, prefix, streams, sublayer):
    """Manifold-constrained hyper-connection: streams [S, n, D] -> [S, n, D] around sublayer([S, D])."""
    length, n, _ = streams.shape
    flat = rms_norm(streams.reshape(length, -1), w[f"{prefix}.rms_norm.weight"], MHC_EPS)

    def coefficients(kind):
        p = (flat @ w[f"{prefix}.proj_{kind}.weight"].T).reshape(length, *w[f"{prefix}.bias_{kind}"].shape)
        return w[f"{prefix}.alpha_{kind}"] * p + w[f"{prefix}.bias_{kind}"]

    h_pre = sigmoid(np.clip(coefficients("pre"), -10, 10))
    h_post = (1 + config.get("mhc_h_post_alpha_end", 0)) * sigmoid(np.clip(coefficients("post"), -10, 10))
    h_res = sinkhorn(coefficients("res").reshape(length, n, n), config["mhc_sinkhorn_iters"])
    out = sublayer(np.einsum("sn,snd->sd", h_pre, streams))
    return h_res @ streams + h_post[:, :, None] * out[:, None, :]


def as_float64(weights):
    return {name: np.asarray(weight, np.float64) for name, weight in weights.items()}


def forward(config, weights, token_ids, offset=0):
    """token_ids [S] at positions offset.. -> logits [S, V] and the hidden [S, D] that the MTP head takes."""
    w, eps = as_float64(weights), config["rms_norm_eps"]
    embedded = w["model.embed_tokens.weight"][np.asarray(token_ids)]
    x = np.repeat(embedded[:, None], config["mhc_expansion_rate"], axis=1)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"

        def attend(y, p=p, layer=layer):
            y = rms_norm(y, w[f"{p}.input_layernorm.weight"], eps)
            return attention(config, w, f"{p}.self_attn", y, offset, is_sliding(config, layer))

        def feed_forward(y, p=p, layer=layer):
            y = rms_norm(y, w[f"{p}.post_attention_layernorm.weight"], eps)
            if layer < config["n_dense_first_layers"]:
                return dense_mlp(config, w, f"{p}.mlp", y)
            return moe(config, w, f"{p}.moe", y)

        x = hyper_connected(config, w, f"{p}.mhc_attn", x, attend)
        x = hyper_connected(config, w, f"{p}.mhc_ffn", x, feed_forward)
    hidden = rms_norm(x.mean(axis=1), w["model.norm.weight"], eps)
    return hidden @ w["lm_head.weight"].T, hidden


def mtp_forward(config, weights, hidden, next_ids, offset=0):
    """hidden [S, D] of positions offset.., the token after each [S] -> logits [S, V] of the token after that."""
    w, p, eps = as_float64(weights), "model.mtp_layers.0", config["rms_norm_eps"]
    embedded = rms_norm(w["model.embed_tokens.weight"][np.asarray(next_ids)], w[f"{p}.embed_norm.weight"], eps)
    x = np.concatenate([hidden, embedded], axis=-1) @ w[f"{p}.input_proj.weight"].T
    y = rms_norm(x, w[f"{p}.input_layernorm.weight"], eps)
    x = x + attention(config, w, f"{p}.self_attn", y, offset, sliding=True)
    y = rms_norm(x, w[f"{p}.post_attention_layernorm.weight"], eps)
    x = x + dense_mlp(config, w, f"{p}.mlp", y)
    return rms_norm(x, w[f"{p}.final_layernorm.weight"], eps) @ w["lm_head.weight"].T
