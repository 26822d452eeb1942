"""Kimi-K3 from its released tensors in float64, one token after the other: nothing is chunked,
cached, converted or shared with the model under test.

`weights` are named as in the released checkpoint, `config` is the released `text_config`.
"""

import torch

LOW_RANK_NORM_EPS = 1e-6  # of the norms inside latent attention; the config's eps is for the others


def logits(weights, config, ids):
    """[B, T, vocabulary] for `ids` [B, T]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    table = w["language_model.model.embed_tokens.weight"]
    head = w.get("language_model.lm_head.weight", table)
    return torch.stack([body(w, config, table[row]) @ head.T for row in ids])


def body(w, config, x_TD):
    linear = config["linear_attn_config"]
    total, starts = x_TD, []
    for i in range(config["num_hidden_layers"]):
        p = f"language_model.model.layers.{i}."
        if i % config["attn_res_block_size"] == 0:
            starts.append(total)
            total = None
        mixed = residual(w, config, f"{p}self_attention_res", starts, total)
        x = norm(mixed, w[f"{p}input_layernorm.weight"], config["rms_norm_eps"])
        mixer = delta_attention if i + 1 in linear["kda_layers"] else latent_attention
        y = mixer(w, config, f"{p}self_attn.", x)
        total = y if total is None else total + y
        mixed = residual(w, config, f"{p}mlp_res", starts, total)
        x = norm(mixed, w[f"{p}post_attention_layernorm.weight"], config["rms_norm_eps"])
        routed = i >= config["first_k_dense_replace"] and i % config["moe_layer_freq"] == 0
        feed = (
            experts(w, config, f"{p}block_sparse_moe.", x)
            if routed
            else mlp(w, config, f"{p}mlp.{{}}_proj.weight", x)
        )
        total = total + feed
    mixed = residual(w, config, "language_model.model.output_attn_res", starts, total)
    return norm(mixed, w["language_model.model.norm.weight"], config["rms_norm_eps"])


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def residual(w, config, p, starts, total):
    values = starts if total is None else [*starts, total]
    keys = [norm(v, w[f"{p}_norm.weight"], config["rms_norm_eps"]) for v in values]
    shares = torch.stack([k @ w[f"{p}_proj.weight"][0] for k in keys]).softmax(0)
    return sum(s[:, None] * v for s, v in zip(shares, values, strict=True))


def delta_attention(w, config, p, x_TD):
    linear = config["linear_attn_config"]
    heads, dim, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    streams = []
    for name in "qkv":
        y = x_TD @ w[f"{p}{name}_proj.weight"].T
        kernel = w[f"{p}{name}_conv1d.weight"][:, 0]  # [channels, taps], the last on the present
        padded = torch.cat([y.new_zeros(taps - 1, y.shape[1]), y])
        y = sum(padded[j : j + len(y)] * kernel[:, j] for j in range(taps))
        streams.append(torch.nn.functional.silu(y).unflatten(-1, (heads, dim)))
    q, k, v = streams
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    f = x_TD @ w[f"{p}f_a_proj.weight"].T @ w[f"{p}f_b_proj.weight"].T
    f = (f + w[f"{p}dt_bias"].flatten()).unflatten(-1, (heads, dim))
    rate = w[f"{p}A_log"].flatten()[:heads, None].exp()
    bound = linear["gate_lower_bound"]
    decay = (-rate * (1 + f.exp()).log() if bound is None else bound * (rate * f).sigmoid()).exp()
    beta = (x_TD @ w[f"{p}b_proj.weight"].T).sigmoid()
    if linear["use_full_rank_gate"]:
        gate = x_TD @ w[f"{p}g_proj.weight"].T
    else:
        gate = x_TD @ w[f"{p}g_a_proj.weight"].T @ w[f"{p}g_b_proj.weight"].T
    state = x_TD.new_zeros(heads, dim, dim)
    out = []
    for t in range(len(x_TD)):
        state = state * decay[t, :, :, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + beta[t, :, None, None] * k[t, :, :, None] * error[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * dim**-0.5)
    out = norm(torch.stack(out), w[f"{p}o_norm.weight"], config["rms_norm_eps"])
    return (out.flatten(1) * gate.sigmoid()) @ w[f"{p}o_proj.weight"].T


def latent_attention(w, config, p, x_TD):
    heads = config["num_attention_heads"]
    nope, shared, value_dim = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    latent = None
    if config["q_lora_rank"] is None:
        q = x_TD @ w[f"{p}q_proj.weight"].T
    else:
        latent = x_TD @ w[f"{p}q_a_proj.weight"].T
        latent = norm(latent, w[f"{p}q_a_layernorm.weight"], LOW_RANK_NORM_EPS)
        q = latent @ w[f"{p}q_b_proj.weight"].T
    q = q.unflatten(-1, (heads, nope + shared))
    kv = x_TD @ w[f"{p}kv_a_proj_with_mqa.weight"].T
    kv, k_shared = kv.split([config["kv_lora_rank"], shared], dim=-1)
    kv = norm(kv, w[f"{p}kv_a_layernorm.weight"], LOW_RANK_NORM_EPS) @ w[f"{p}kv_b_proj.weight"].T
    k, v = kv.unflatten(-1, (heads, nope + value_dim)).split([nope, value_dim], dim=-1)
    k = torch.cat([k, k_shared[:, None].expand(-1, heads, -1)], dim=-1)
    out = []
    for t in range(len(x_TD)):
        kept = list(range(t + 1))
        if config.get("dsa_config"):
            kept = selected(w, config, f"{p}indexer.", x_TD, latent, t)
        scores = torch.einsum("hd,shd->hs", q[t], k[kept]) * (nope + shared) ** -0.5
        out.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v[kept]))
    out = torch.stack(out).flatten(1)
    if config["mla_use_output_gate"]:
        out = out * (x_TD @ w[f"{p}g_proj.weight"].T).sigmoid()
    return out @ w[f"{p}o_proj.weight"].T


def index_scores(w, config, p, x_TD, latent, t):
    """`I[t, s]` for s = 0..t, pair by pair."""
    dsa = config["dsa_config"]
    heads, dim = dsa["index_n_heads"], dsa["index_head_dim"]
    q = (w[f"{p}wq_b.weight"] @ latent[t]).unflatten(0, (heads, dim))
    shares = w[f"{p}weights_proj.weight"] @ x_TD[t] * heads**-0.5
    scores = []
    for s in range(t + 1):
        k = w[f"{p}wk.weight"] @ x_TD[s]
        k = (k - k.mean()) / (k.var(unbiased=False) + config["rms_norm_eps"]).sqrt()
        k = k * w[f"{p}k_norm.weight"] + w[f"{p}k_norm.bias"]
        scores.append(
            sum(c * max(0.0, float(h @ k) * dim**-0.5) for c, h in zip(shares, q, strict=True))
        )
    return torch.stack(scores)


def selected(w, config, p, x_TD, latent, t):
    scores = index_scores(w, config, p, x_TD, latent, t)
    return scores.topk(min(config["dsa_config"]["index_topk"], t + 1)).indices.tolist()


def situ(config, gate, up):
    a, b = config["activation_situ_beta"], config["activation_situ_linear_beta"]
    return a * (gate / a).tanh() * gate.sigmoid() * b * (up / b).tanh()


def mlp(w, config, name, x):
    gate, up = (x @ w[name.format(n)].T for n in ("gate", "up"))
    return situ(config, gate, up) @ w[name.format("down")].T


def experts(w, config, p, x_TD):
    latent = config["routed_expert_hidden_size"]
    scores = (x_TD @ w[f"{p}gate.weight"].T).sigmoid()
    biased = scores + w[f"{p}gate.e_score_correction_bias"]
    z = x_TD if latent is None else x_TD @ w[f"{p}routed_expert_down_proj.weight"].T
    rows = []
    for t in range(len(x_TD)):
        chosen = choose(biased[t].tolist(), config)
        weights = scores[t, chosen]
        if config["moe_renormalize"]:
            weights = weights / weights.sum()
        row = torch.zeros_like(z[t])
        for e, share in zip(chosen, weights * config["routed_scaling_factor"], strict=True):
            gate, up, down = (w[f"{p}experts.{e}.{n}.weight"] for n in ("w1", "w3", "w2"))
            row = row + share * (down @ situ(config, gate @ z[t], up @ z[t]))
        rows.append(row)
    y = torch.stack(rows)
    if latent is not None:
        if config["latent_moe_use_norm"]:
            y = norm(y, w[f"{p}routed_expert_norm.weight"], config["rms_norm_eps"])
        y = y @ w[f"{p}routed_expert_up_proj.weight"].T
    return y + mlp(w, config, f"{p}shared_experts.{{}}_proj.weight", x_TD)


def choose(biased, config):
    """The best experts of those `topk_group` groups whose two best are best together."""
    size = len(biased) // config["num_expert_group"]
    groups = [range(i, i + size) for i in range(0, len(biased), size)]
    groups.sort(key=lambda g: sum(sorted(biased[e] for e in g)[-2:]))
    allowed = [e for group in groups[-config["topk_group"] :] for e in group]
    return sorted(allowed, key=lambda e: biased[e])[-config["num_experts_per_token"] :]
