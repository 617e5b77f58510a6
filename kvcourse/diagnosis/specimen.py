"""The specimen: a GPT-2 that reads through a plain cache. `bugs` changes one line of this file at a time.

Equal to the package's model with a ContiguousCache, by test. Written to be read: nothing is checked.
"""

import math

import numpy as np

from kvcourse.ops import gelu, layer_norm, softmax


class Cache:
    """Room for max_tokens rows in every layer; only the first seq_len of them count."""

    def __init__(self, config, max_tokens):
        shape = (config.num_layers, config.num_heads, max_tokens, config.head_dim)
        dtype = np.float32
        self.k, self.v = np.zeros(shape, dtype), np.zeros(shape, dtype)
        self.seq_len = 0  # an empty cache

    def reset(self):
        self.seq_len = 0

    def truncate(self, seq_len):
        self.seq_len = seq_len

    def update(self, layer, k, v):
        start, stop = self.seq_len, self.seq_len + k.shape[1]
        keys, values = self.k[layer, :, :stop], self.v[layer, :, :stop]  # views: they see the two lines below
        self.k[layer, :, start:stop] = k
        self.v[layer, :, start:stop] = v
        return keys, values  # each (heads, stop, head_dim)


def attend(q, keys, values, start):
    scores = q @ keys.transpose(0, 2, 1) / math.sqrt(q.shape[-1])  # (heads, T, keys)
    mask = np.tri(q.shape[1], keys.shape[1], start, dtype=bool)  # row r sees keys 0 … start + r
    return softmax(np.where(mask, scores, np.float32(-np.inf))) @ values  # (heads, T, head_dim)


def linear(x, p, name):
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def norm(x, p, name):
    return layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"])


def attention(x, p, layer, heads, cache):
    T, d = x.shape
    qkv = linear(x, p, f"h.{layer}.attn.c_attn")  # (T, 3d)
    q, k, v = qkv.reshape(T, 3, heads, d // heads).transpose(1, 2, 0, 3)  # 3 × (heads, T, head_dim)
    keys, values = cache.update(layer, k, v)
    out = attend(q, keys, values, cache.seq_len)  # (heads, T, head_dim)
    merged = out.transpose(1, 0, 2).reshape(T, d)
    return linear(merged, p, f"h.{layer}.attn.c_proj")


def gpt2(ids, p, config, cache):
    start, stop = cache.seq_len, cache.seq_len + len(ids)
    x = p["wte.weight"][ids] + p["wpe.weight"][start:stop]  # (T, d)
    for layer in range(config.num_layers):
        x = x + attention(norm(x, p, f"h.{layer}.ln_1"), p, layer, config.num_heads, cache)
        inner = gelu(linear(norm(x, p, f"h.{layer}.ln_2"), p, f"h.{layer}.mlp.c_fc"))  # (T, 4d)
        x = x + linear(inner, p, f"h.{layer}.mlp.c_proj")
    cache.seq_len += len(ids)
    return norm(x, p, "ln_f") @ p["wte.weight"].T  # (T, vocab)
