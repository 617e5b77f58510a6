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


class LlamaStepProducts:
    """Replays the matrix products of one cached decode step, on the model's own weights and cache.

    model  a Llama
    cache  a cache that holds the step's tokens already: its rows are the keys and values read

    As `StepProducts`: the step's own six products a layer (q, k and v joined, gate and up joined;
    attention grouped) and the logits, each into an array made beforehand.
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


def step_products(model, cache):
    """The replay that fits a model: of a GPT2 or a Llama."""
    kind = StepProducts if model.config.architecture == "gpt2" else LlamaStepProducts
    return kind(model, cache)


class TorchStepProducts:
    """`StepProducts` of a batch in PyTorch, on the weights and the cache of a `kv.torch_models.GPT2`.

    net    a kvcourse.torch_models.GPT2
    cache  its BatchCache, every sequence as long as the others: the rows of the step that follows

    The same products as `net.decode(tokens, cache, attention="written")`, each into a tensor made
    beforehand.
    """

    def __init__(self, net, cache):
        import torch

        self._torch = torch
        c, p = net.config, net.params
        batch, rows = cache.batch, cache.longest + 1
        like = {"dtype": net.dtype, "device": net.device}

        def random(*shape):
            return torch.randn(shape).to(**like)

        self._x, self._inner = random(batch, c.hidden_size), random(batch, c.intermediate_size)
        self._qkv, self._out = random(batch, 3 * c.hidden_size), random(batch, c.hidden_size)
        self._q = random(batch * c.num_heads, 1, c.head_dim)
        self._scores = torch.full((batch * c.num_heads, 1, rows), 1 / rows, **like)
        self._mixed = torch.empty_like(self._q)
        self._layers = [
            [p[f"h.{i}.{name}.weight"] for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
            + [held.view(-1, rows, c.head_dim) for held in cache.rows(i, rows)]
            for i in range(c.num_layers)
        ]
        self._embedding = p["wte.weight"]
        self._logits = random(batch, c.vocab_size)

    def __call__(self):
        mm, bmm = self._torch.mm, self._torch.bmm
        with self._torch.no_grad():
            for qkv, proj, fc, out, keys, values in self._layers:
                mm(self._x, qkv, out=self._qkv)  # (B, 3d)
                bmm(self._q, keys.transpose(1, 2), out=self._scores)  # (B·heads, 1, rows)
                bmm(self._scores, values, out=self._mixed)  # (B·heads, 1, head_dim)
                mm(self._x, proj, out=self._out)  # (B, d)
                mm(self._x, fc, out=self._inner)  # (B, 4d)
                mm(self._inner, out, out=self._out)  # (B, d)
            mm(self._x, self._embedding.T, out=self._logits)  # (B, vocab)
