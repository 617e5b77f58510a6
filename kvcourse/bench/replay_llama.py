"""The floor of a cached Llama step: its matrix products and nothing else (see `replay.StepProducts`)."""

import numpy as np


class LlamaStepProducts:
    """Replays the matrix products of one cached decode step, on the model's own weights and cache.

    model  a Llama
    cache  a cache that holds the step's tokens already: its rows are the keys and values read

    Six products a layer (q, k and v joined, gate and up joined; attention grouped, as the step does
    it) and the logits, each into an array made beforehand.
    """

    def __init__(self, model, cache):
        c = model.config
        random = np.random.default_rng(0)

        def row(*shape):
            return random.standard_normal(shape, dtype=np.float32)

        group = c.num_heads // c.num_kv_heads
        self._x, self._inner = row(1, c.hidden_size), row(1, c.intermediate_size)
        self._heads, self._out = row(1, c.num_heads * c.head_dim), row(1, c.hidden_size)
        self._qkv = row(1, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        self._gate_up = row(1, 2 * c.intermediate_size)
        self._q = row(c.num_kv_heads, group, 1, c.head_dim)
        self._scores = np.full((c.num_kv_heads, group, 1, cache.seq_len), 1 / cache.seq_len, np.float32)
        self._mixed = np.empty_like(self._q)
        self._layers = [
            (layer["qkv"], layer["o"], layer["gate_up"], layer["down"], *cache.keys_values(i))
            for i, layer in enumerate(model._layers)
        ]
        self._head, self._logits = model._head, row(1, c.vocab_size)

    def __call__(self):
        for qkv, o, gate_up, down, keys, values in self._layers:
            np.matmul(self._x, qkv, out=self._qkv)
            np.matmul(self._q, keys.swapaxes(1, 2)[:, None], out=self._scores)
            np.matmul(self._scores, values[:, None], out=self._mixed)
            np.matmul(self._heads, o, out=self._out)
            np.matmul(self._x, gate_up, out=self._gate_up)
            np.matmul(self._inner, down, out=self._out)
        np.matmul(self._x, self._head.T, out=self._logits)
