"""GPT-2 in NumPy, with a cache as an argument.

Source: Radford et al. 2019 and the released TensorFlow code (`openai/gpt-2`,
`src/model.py`); parameter names are Hugging Face's.
"""

from functools import cached_property

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import CacheFull


class GPT2:
    """`model(ids)` → logits float32 (T, vocab_size); `model(ids, cache)` continues a sequence.

    config  ModelConfig with architecture "gpt2"
    params  {"wte.weight": (vocab, d), "wpe.weight": (positions, d), "h.0.ln_1.weight": (d,),
            "h.0.attn.c_attn.weight": (d, 3d), …}, float32, weights stored (in, out)
    """

    def __init__(self, config, params):
        check_params(config, params)
        self.config = config
        self.params = params

    def __call__(self, ids, cache=None, rows=None):
        """Logits of the given tokens, float32 (T, vocab_size), or of the chosen `rows` only.

        ids    T ≥ 1 token ids, a list or a 1-D integer array
        cache  a KVCache or BatchView; the tokens follow those already in it. Without
               one they are positions 0 … T − 1 and nothing is kept.
        rows   which of the T rows to return logits for, such as [-1]

        Raises, with the cache unchanged: ValueError (no tokens, an id outside the
        vocabulary, a row outside T, a cache of another shape, too many tokens without
        a cache), TypeError (ids that are not whole numbers), CacheFull.
        """
        ids = check_ids(ids, self.config)
        rows = check_rows(rows, len(ids))
        if cache is None:
            return self._forward(ids, _no_cache_positions(ids, self.config), _attend_without_cache, rows)
        if cache.config.cache_shape != self.config.cache_shape:
            raise ValueError(
                f"a cache of shape {cache.config.cache_shape} (layers, KV heads, head_dim) does not fit "
                f"{self.config.name}, {self.config.cache_shape}: make one with for_model(model)"
            )
        positions = cache.begin(len(ids))
        try:
            self._check_positions(positions)
            logits = self._forward(ids, positions, cache.attend, rows)
            cache.commit()
        except BaseException:  # an interrupted cell too must leave the cache as it was
            cache.abort()
            raise
        return logits

    def _check_positions(self, positions):
        """A cache made for another model of the same shape may have more positions than this one."""
        last, limit = int(positions.max()), self.config.max_seq_len
        if last >= limit:
            raise CacheFull(
                f"position {last:,} is outside the {limit:,} positions of {self.config.name}: "
                f"shorten the prompt, or reset() the cache and keep the last tokens"
            )

    def _forward(self, ids, positions, attend, rows):
        p, eps = self.params, self.config.norm_eps
        x = p["wte.weight"][ids] + p["wpe.weight"][positions]  # (T, d)
        for number, layer in enumerate(self._layers):
            h = ops.layer_norm(x, *layer["ln_1"], eps)
            q, k, v = self._split_heads(_linear(h, *layer["attn.c_attn"]))
            out = attend(number, q, k, v)  # (heads, T, head_dim)
            merged = out.swapaxes(0, 1).reshape(len(ids), -1)  # (T, d)
            x += _linear(merged, *layer["attn.c_proj"])
            h = ops.layer_norm(x, *layer["ln_2"], eps)
            h = ops.gelu_inplace(_linear(h, *layer["mlp.c_fc"]))  # (T, 4d)
            x += _linear(h, *layer["mlp.c_proj"])
        if rows is not None:
            x = x[rows]
        x = ops.layer_norm(x, p["ln_f.weight"], p["ln_f.bias"], eps)
        return x @ p["wte.weight"].T  # (T, vocab)

    def _split_heads(self, qkv):
        """(T, 3d) → q, k, v, each a view (heads, T, head_dim)."""
        return qkv.reshape(len(qkv), 3, self.config.num_heads, self.config.head_dim).transpose(1, 2, 0, 3)

    @cached_property
    def _layers(self):
        """Each layer's (weight, bias) pairs by short name: looked up once, not at every step."""
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        return [
            {
                name: tuple(self.params[f"h.{i}.{name}.{part}"] for part in ("weight", "bias"))
                for name in names
            }
            for i in range(self.config.num_layers)
        ]


def _linear(x, weight, bias):
    out = x @ weight
    out += bias
    return out


def _attend_without_cache(layer, q, k, v):
    return ops.attention(q, k, v, start=0)


def _no_cache_positions(ids, config):
    if len(ids) > config.max_seq_len:
        raise ValueError(
            f"{len(ids):,} tokens are more than the {config.max_seq_len:,} positions of {config.name}: "
            f"shorten the prompt, or keep its last {config.max_seq_len:,} tokens"
        )
    return np.arange(len(ids))


def check_ids(ids, config):
    """Token ids as an int64 array (T,). One-line errors for no, wrong or unknown ids."""
    if isinstance(ids, str):
        raise TypeError(
            f"ids is the text {ids[:20]!r}: give the token ids that tokenizer.encode(text) returns"
        )
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        raise ValueError("ids are lists of different lengths: give one flat list of token ids") from None
    if array.ndim != 1:
        raise ValueError(f"ids have shape {array.shape}: give one flat list of token ids")
    if array.size == 0:
        raise ValueError("no token ids: give at least 1 (an empty text may start with <|endoftext|>)")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"ids are {array.dtype}, such as {array.tolist()[0]!r}: token ids are whole numbers, "
            f"as tokenizer.encode(text) gives"
        )
    for bad in (int(array.min()), int(array.max())):
        if not 0 <= bad < config.vocab_size:
            raise ValueError(
                f"token id {bad:,} is outside the vocabulary of {config.name}, "
                f"0 … {config.vocab_size - 1:,}: was the text encoded with another model's tokenizer?"
            )
    return array.astype(np.int64, copy=False)


def check_rows(rows, T):
    """`rows` as an int64 array, or None. Raises ValueError for a row outside −T … T − 1."""
    if rows is None:
        return None
    array = np.asarray(rows)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"rows is {rows!r}: give a list of row numbers, such as [-1]")
    for row in array.reshape(-1):
        if not -T <= row < T:
            raise ValueError(f"row {row} is outside {-T} … {T - 1}: the pass has {T} tokens")
    return array.reshape(-1).astype(np.int64)


def check_params(config, params):
    """Raise ValueError or TypeError, in one line, unless params has GPT-2's names, shapes and float32."""
    if config.num_kv_heads != config.num_heads or config.num_heads * config.head_dim != config.hidden_size:
        found = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} KV heads"
        raise ValueError(
            f"{config.name}: found {found} and width {config.hidden_size}: a GPT-2 has one KV head "
            f"per query head and heads · head_dim = hidden_size"
        )
    for name, shape in param_shapes(config).items():
        if name not in params:
            raise ValueError(f"{config.name}: the weights lack {name}: is this a GPT-2 model?")
        if params[name].shape != shape:
            raise ValueError(f"{config.name}: {name} has shape {params[name].shape}, the config says {shape}")
        if params[name].dtype != np.float32:
            raise TypeError(f"{config.name}: {name} is {params[name].dtype}: convert it to float32")


def param_shapes(config):
    """{parameter name: shape} of a GPT-2 of this config, in the order of the forward pass.

    Raises ValueError for a config of another architecture.
    """
    if config.architecture != "gpt2":
        raise ValueError(
            f"{config.name} is a {config.architecture} shape: this course sizes it, and computes GPT-2 only"
        )
    d, inner = config.hidden_size, config.intermediate_size
    shapes = {"wte.weight": (config.vocab_size, d), "wpe.weight": (config.max_seq_len, d)}
    parts = {
        "ln_1": (d,),
        "attn.c_attn": (d, 3 * d),
        "attn.c_proj": (d, d),
        "ln_2": (d,),
        "mlp.c_fc": (d, inner),
        "mlp.c_proj": (inner, d),
    }
    for i in range(config.num_layers):
        for name, shape in parts.items():
            shapes[f"h.{i}.{name}.weight"] = shape
            shapes[f"h.{i}.{name}.bias"] = shape[-1:]
    return shapes | {"ln_f.weight": (d,), "ln_f.bias": (d,)}
