"""The floor of a cached step: its matrix products and nothing else."""

import numpy as np


class StepProducts:
    """Replays the matrix products of one cached decode step, on the model's own weights and cache.

    model  a GPT2
    cache  a cache that holds the step's tokens already: its rows are the keys and values read

    The same seven products a layer and the same logits as `model([id], cache)`, in the same
    order and shapes, each into an array made beforehand. No norms, no gelu, no softmax, no
    biases, no writes to the cache, nothing allocated. What a step takes beyond this is the
    price of everything that is not a matrix product.
    """

    def __init__(self, model, cache):
        c, p = model.config, model.params
        random = np.random.default_rng(0)

        def row(width):
            return random.standard_normal((1, width), dtype=np.float32)

        self._x, self._inner = row(c.hidden_size), row(c.intermediate_size)
        self._qkv, self._out = row(3 * c.hidden_size), row(c.hidden_size)
        self._q = random.standard_normal((c.num_heads, 1, c.head_dim), dtype=np.float32)
        self._scores = np.full((c.num_heads, 1, cache.seq_len), 1 / cache.seq_len, np.float32)
        self._mixed = np.empty_like(self._q)
        self._layers = [
            [p[f"h.{i}.{name}.weight"] for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
            + list(cache.keys_values(i))
            for i in range(c.num_layers)
        ]
        self._embedding = p["wte.weight"]
        self._logits = row(c.vocab_size)

    def __call__(self):
        for qkv, proj, fc, out, keys, values in self._layers:
            np.matmul(self._x, qkv, out=self._qkv)  # (1, 3d)
            np.matmul(self._q, keys.swapaxes(1, 2), out=self._scores)  # (heads, 1, rows)
            np.matmul(self._scores, values, out=self._mixed)  # (heads, 1, head_dim)
            np.matmul(self._x, proj, out=self._out)  # (1, d)
            np.matmul(self._x, fc, out=self._inner)  # (1, 4d)
            np.matmul(self._inner, out, out=self._out)  # (1, d)
        np.matmul(self._x, self._embedding.T, out=self._logits)  # (1, vocab)
