"""One layer of multi-head latent attention, expanded and absorbed.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; parameter names as in transformers'
`DeepseekV3Attention`, weights stored (out, in). The norms on the latents are in its section 3.1.2.
Rotation pairs halves of a vector, as everywhere here; DeepSeek's files pair neighbors
(`rope_interleave`), which is another order of the same rows.
"""

import numpy as np

from kvcourse import ops


class LatentAttention:
    """`expanded(x, positions)` is the definition; `absorbed(x, cache, layer)` reads only latents.

    config  ModelConfig with `latent` and `rope_theta`
    params  q_a_proj, q_a_layernorm, q_b_proj (or q_proj where queries are not compressed),
            kv_a_proj_with_mqa (rank + rope, d), kv_a_layernorm (rank,),
            kv_b_proj (heads · (nope + v), rank), o_proj (d, heads · v): see `param_shapes`

    Both give the same (T, d) up to rounding. Raises ValueError for a config or params that do not fit.
    """

    def __init__(self, config, params):
        check_params(config, params)
        self.config, self.params, self.sizes = config, params, config.latent
        self.rotate = ops.Rotary(self.sizes.qk_rope_head_dim, config.rope_theta)
        up = params["kv_b_proj"].reshape(config.num_heads, -1, self.sizes.kv_lora_rank)
        self.up_keys = up[:, : self.sizes.qk_nope_head_dim]  # (heads, nope, rank)
        self.up_values = up[:, self.sizes.qk_nope_head_dim :]  # (heads, v, rank)

    def compressed(self, x):
        """x (T, d) → the normed latent (T, rank) and the shared key, un-rotated (T, rope)."""
        both = x @ self.params["kv_a_proj_with_mqa"].T
        latent, key = np.split(both, [self.sizes.kv_lora_rank], axis=1)
        return ops.rms_norm(latent, self.params["kv_a_layernorm"], self.config.norm_eps), key

    def queries(self, x):
        """x (T, d) → per head the part without rotation (heads, T, nope) and with (heads, T, rope)."""
        p = self.params
        if self.sizes.q_lora_rank is None:
            q = x @ p["q_proj"].T
        else:
            q = ops.rms_norm(x @ p["q_a_proj"].T, p["q_a_layernorm"], self.config.norm_eps) @ p["q_b_proj"].T
        q = q.reshape(len(x), self.config.num_heads, -1).swapaxes(0, 1)
        return np.split(q, [self.sizes.qk_nope_head_dim], axis=2)

    def expanded(self, x, positions):
        """The definition: every head gets keys and values of its own, as in plain attention.

        x (T, d) of a whole text, positions (T,). Returns (T, d)."""
        latent, key = self.compressed(x)
        plain, turning = self.queries(x)
        shared = self.rotate(key[None], positions)  # (1, T, rope)
        keys = latent @ self.up_keys.swapaxes(1, 2)  # (heads, T, nope)
        keys = np.concatenate([keys, np.repeat(shared, len(keys), axis=0)], axis=2)
        values = latent @ self.up_values.swapaxes(1, 2)  # (heads, T, v)
        q = np.concatenate([plain, self.rotate(turning, positions)], axis=2)
        return self._merged(ops.attention(q, keys, values, start=0))

    def absorbed(self, x, cache, layer=0):
        """q · (W c) = (Wᵀ q) · c: the up-projection of keys moves to the query, that of values to the end.

        x (T, d), the tokens of the pass that is open: between `cache.begin(T)` and `cache.commit()`.
        cache  a LatentCache. Returns (T, d). Raises ValueError for an x of another shape."""
        if np.shape(x) != (cache.pending, self.config.hidden_size):
            raise ValueError(
                f"x has shape {np.shape(x)}: give the tokens of the open pass, one a row, "
                f"{cache.pending, self.config.hidden_size}"
            )
        latent, key = self.compressed(x)
        plain, turning = self.queries(x)
        q = np.concatenate([plain @ self.up_keys, turning], axis=2)  # (heads, T, rank + rope)
        mixed = cache.attend(layer, q, key[None], latent[None], self.rotate)  # (heads, T, rank)
        return self._merged(mixed @ self.up_values.swapaxes(1, 2))

    def _merged(self, out):
        return out.swapaxes(0, 1).reshape(out.shape[1], -1) @ self.params["o_proj"].T


def check_params(config, params):
    """Raise ValueError, in one line, unless params has the names and shapes of `param_shapes`."""
    for name, shape in param_shapes(config).items():
        if name not in params:
            raise ValueError(f"{config.name}: the weights lack {name}, of shape {shape}")
        if params[name].shape != shape:
            raise ValueError(f"{config.name}: {name} has shape {params[name].shape}, the config says {shape}")


def param_shapes(config):
    """{name: shape} of one layer. Raises ValueError for a config without latents or rotary positions."""
    if not config.latent or config.rope_theta is None:
        raise ValueError(f"{config.name} has no latent attention: give a config with latent and rope_theta")
    s, d, heads = config.latent, config.hidden_size, config.num_heads
    key = s.qk_nope_head_dim + s.qk_rope_head_dim
    if s.q_lora_rank is None:
        shapes = {"q_proj": (heads * key, d)}
    else:
        shapes = {
            "q_a_proj": (s.q_lora_rank, d),
            "q_a_layernorm": (s.q_lora_rank,),
            "q_b_proj": (heads * key, s.q_lora_rank),
        }
    return shapes | {
        "kv_a_proj_with_mqa": (s.kv_lora_rank + s.qk_rope_head_dim, d),
        "kv_a_layernorm": (s.kv_lora_rank,),
        "kv_b_proj": (heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank),
        "o_proj": (d, heads * s.v_head_dim),
    }
