"""GPT-2 in PyTorch: a ragged batch of prompts, then one token of every sequence a step.

The same computation as `kvcourse.models.gpt2`, with a batch axis. Source: Radford et al. 2019 and
the released TensorFlow code (`openai/gpt-2`, `src/model.py`).
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from kvcourse.caches import CacheFull
from kvcourse.models.base import check_ids
from kvcourse.models.gpt2 import GPT2 as NumpyGPT2
from kvcourse.torch_models.cache import BatchCache
from kvcourse.torch_models.devices import parsed_device

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ATTENTIONS = ("sdpa", "written")


class GPT2:
    """A copy of a NumPy GPT-2's weights on a device, and the passes that need a cache there.

    model   a kvcourse.models.gpt2.GPT2
    device  "cpu", "cuda", "cuda:1" …, or "meta": every shape is computed, no number is, and no
            memory is taken (for counting launches and bytes)
    dtype   "float32", "float16" or "bfloat16", of weights, cache and computation

    Raises TypeError for a model that is not the NumPy GPT-2, ValueError for an unknown dtype and for a
    device that this machine lacks.
    """

    def __init__(self, model, device="cpu", dtype="float32"):
        if not isinstance(model, NumpyGPT2):
            raise TypeError(
                f"a {type(model).__name__} is given: give a GPT-2, as kv.load_model(name) returns"
            )
        self.config = model.config
        self.dtype = _dtype(dtype)
        self.device = _device(device)
        self.params = {
            name: torch.from_numpy(array).to(self.device, self.dtype, copy=True)
            for name, array in model.params.items()
        }
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        self._layers = [
            {name: [self.params[f"h.{i}.{name}.{part}"] for part in ("weight", "bias")] for name in names}
            for i in range(self.config.num_layers)
        ]

    @property
    def nbytes(self):
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.params.values())

    # --- the two passes ----------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, prompts, cache):
        """Compute `prompts` into an empty cache; logits (batch, vocab_size) of each one's last token.

        prompts  one list of token ids a sequence, of any lengths ≥ 1; a list or any other iterable

        Shorter prompts are padded at their end. So row r of every sequence is position r, all share
        the positions 0 … T − 1 and the plain causal mask keeps the padding out of sight: it stands
        after every real token. What it leaves in the cache lies at the sequence's length and
        after, does not count, and is overwritten as the sequence grows.

        Raises, with the cache unchanged: ValueError (another number of prompts than the cache has
        sequences, an empty one, an unknown id, a cache that is not empty or not this model's),
        TypeError (ids that are not whole numbers, no BatchCache), CacheFull (a prompt longer than the cache),
        torch.OutOfMemoryError.
        """
        self.check_cache(cache)
        ids, lengths = self._padded(prompts, cache)  # (B, T), list
        B, T = ids.shape
        cache.reserve_prompts(lengths)
        x = F.embedding(ids, self.params["wte.weight"]) + self.params["wpe.weight"][:T]  # (B, T, d)

        def attend(layer, qkv):
            q, k, v = self._split_heads(qkv, B, T)  # each (B, H, T, head_dim)
            cache.write_prompt(layer, k, v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, head_dim)
            return out.transpose(1, 2).reshape(B * T, -1)  # (B·T, d)

        x = self._run_layers(x.view(B * T, -1), attend)
        last = torch.tensor([row * T + n - 1 for row, n in enumerate(lengths)], device=self.device)
        logits = self._logits(x[last])
        cache.set_lengths(lengths)
        return logits  # (B, vocab)

    @torch.no_grad()
    def decode(self, tokens, cache, attention="sdpa"):
        """One more token of every sequence; logits (batch, vocab_size) that predict the next ones.

        tokens     (batch,) ids, one a sequence: a list, or an integer tensor on any device. Ids of a
                   tensor on a GPU are not compared with the vocabulary: that would wait for the GPU.
        attention  "sdpa", PyTorch's scaled_dot_product_attention, or "written", its formula

        Each sequence's token takes that sequence's next position, its keys and values are written
        in place there, and attention reads rows up to the longest sequence.

        Raises, with the cache unchanged: ValueError, TypeError, CacheFull, torch.OutOfMemoryError.
        """
        if attention not in ATTENTIONS:
            raise ValueError(f"attention {attention!r} is unknown: use 'sdpa' or 'written'")
        self.check_cache(cache)
        tokens = self.next_tokens(tokens, cache)
        cache.check_room()
        span = cache.longest + 1
        mask = cache.mask(span) if cache.ragged else None  # equal lengths: every row read is seen
        logits = self.step(tokens, cache, span, mask, attention)
        cache.grow()
        return logits

    def step(self, tokens, cache, span, mask, attention="sdpa"):
        """The device's part of `decode`, without a check and without counting the new tokens.

        tokens int64 (batch,) on the device; attention reads `span` rows under `mask`. Nothing here
        reads a number back from the device, so that a CUDA graph can record it.
        """
        attended = F.scaled_dot_product_attention if attention == "sdpa" else written_attention
        B = len(tokens)
        x = F.embedding(tokens, self.params["wte.weight"])  # (B, d)
        x = x + F.embedding(cache.lengths, self.params["wpe.weight"])  # each at its own position

        def attend(layer, qkv):
            q, k, v = self._split_heads(qkv, B, 1)  # each (B, H, 1, head_dim)
            cache.write_next(layer, k[:, :, 0], v[:, :, 0])
            return cache.attend(layer, q, span, mask, attended).reshape(B, -1)  # (B, d)

        return self._logits(self._run_layers(x, attend))

    # --- one layer after the other -------------------------------------------------------

    def _run_layers(self, x, attend):
        """x (n, d) through all layers; attend(layer, qkv (n, 3d)) → (n, d)."""
        for number, layer in enumerate(self._layers):
            h = self._norm(x, layer["ln_1"])
            h = attend(number, _linear(h, layer["attn.c_attn"]))  # (n, 3d) → (n, d)
            x = x + _linear(h, layer["attn.c_proj"])
            h = self._norm(x, layer["ln_2"])
            h = F.gelu(_linear(h, layer["mlp.c_fc"]), approximate="tanh")  # (n, 4d)
            x = x + _linear(h, layer["mlp.c_proj"])
        return x

    def _logits(self, x):
        """x (n, d) of the last layer → (n, vocab_size)."""
        x = self._norm(x, [self.params["ln_f.weight"], self.params["ln_f.bias"]])
        return x @ self.params["wte.weight"].T

    def _norm(self, x, weight_bias):
        return F.layer_norm(x, x.shape[-1:], *weight_bias, self.config.norm_eps)

    def _split_heads(self, qkv, B, T):
        """(B·T, 3d) → q, k, v, each a view (B, num_heads, T, head_dim)."""
        c = self.config
        return qkv.view(B, T, 3, c.num_heads, c.head_dim).permute(2, 0, 3, 1, 4).unbind(0)

    # --- what comes in ---------------------------------------------------------------------

    def check_cache(self, cache):
        if not isinstance(cache, BatchCache):
            raise TypeError(
                f"the cache is a {type(cache).__name__}: make one with BatchCache(net, batch, max_seq_len)"
            )
        c = self.config
        mine = (cache.shape_for(c), self.dtype, self.device)
        found = (tuple(cache.keys.shape), cache.dtype, cache.device)
        if found != mine:
            raise ValueError(
                f"a cache of {_described(*found)} does not fit {c.name}, {_described(*mine)}: "
                f"make one with BatchCache(net, batch, max_seq_len)"
            )
        if cache.max_seq_len > c.max_seq_len:
            raise ValueError(
                f"the cache has {cache.max_seq_len:,} rows a sequence, {c.name} only {c.max_seq_len:,} "
                f"positions: make one with BatchCache(net, batch, max_seq_len)"
            )
        cache.settle()

    def _padded(self, prompts, cache):
        """Prompts as ids (B, T) on the device, padded at the end with 0, and their lengths as a list."""
        if cache.longest:
            raise ValueError(f"the cache holds up to {cache.longest:,} tokens already: reset() it first")
        single = not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0
        if single or isinstance(prompts, str):
            raise TypeError(f"prompts are {prompts!r:.40}: give one list of token ids a sequence")
        prompts = list(prompts)  # a generator can be read only once
        if any(isinstance(prompt, str) or not hasattr(prompt, "__len__") for prompt in prompts):
            raise TypeError(f"prompts are {prompts!r:.40}: give one list of token ids a sequence")
        prompts = [self._ids(prompt) for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]
        if len(prompts) != cache.batch:
            raise ValueError(f"{len(prompts)} prompts for a cache of {cache.batch} sequences: give one each")
        if max(lengths) > cache.max_seq_len:
            raise CacheFull(
                f"a prompt of {max(lengths):,} tokens does not fit in a cache of {cache.max_seq_len:,}: "
                f"shorten it, or make the cache larger (max_seq_len)"
            )
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.from_numpy(prompt)
        return ids.to(self.device), lengths

    def next_tokens(self, tokens, cache):
        """Ids int64 (batch,) on the device, checked as far as that needs no waiting."""
        if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
            if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
                raise TypeError(f"tokens are {tokens.dtype}: token ids are whole numbers")
            if tokens.is_meta and self.device.type != "meta":
                raise ValueError(f"tokens are on meta, which holds no numbers: give them on {self.device}")
        else:
            tokens = torch.from_numpy(self._ids(tokens))
        if tuple(tokens.shape) != (cache.batch,):
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} for a batch of {cache.batch}: give one a sequence"
            )
        return tokens.to(self.device, torch.int64)

    def _ids(self, ids):
        """check_ids, which sees no True among numbers: NumPy has made a 1 of it by then."""
        if isinstance(ids, (list, tuple)) and any(isinstance(i, (bool, np.bool_)) for i in ids):
            raise TypeError(f"ids are {ids!r:.40}: token ids are whole numbers, not True or False")
        return check_ids(ids, self.config)


def written_attention(q, k, v, attn_mask=None):
    """softmax(q·kᵀ/√head_dim + mask)·v, written out: one operation, and one launch, a step of the formula.

    q (B, H, 1, head_dim); k, v (B, H, rows, head_dim); attn_mask broadcasts to (B, H, 1, rows).
    Source: Vaswani et al. 2017, equation 1.
    """
    q = q * (1.0 / math.sqrt(q.shape[-1]))  # (B, H, 1, head_dim): fewer numbers to scale than the scores
    scores = q @ k.transpose(-1, -2)  # (B, H, 1, rows)
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, dim=-1) @ v  # (B, H, 1, head_dim)


def _linear(x, weight_bias):
    weight, bias = weight_bias  # stored (in, out)
    return torch.addmm(bias, x, weight)


def _dtype(name):
    known = {**DTYPES, **{dtype: dtype for dtype in DTYPES.values()}}
    if not isinstance(name, (str, torch.dtype)) or name not in known:
        raise ValueError(f"dtype {name!r} is not supported: use one of {', '.join(DTYPES)}")
    return known[name]


def _device(name):
    device = parsed_device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {str(name)!r}: PyTorch finds no CUDA device here, use 'cpu'")
        if device.index is None:  # tensors carry the number, so the comparison with a cache needs it
            device = torch.device("cuda", torch.cuda.current_device())
        elif device.index >= (found := torch.cuda.device_count()):
            raise ValueError(f"device {str(name)!r}: CUDA devices here have the numbers 0 … {found - 1}")
    return device


def _described(shape, dtype, device):
    return f"shape {shape}, {str(dtype).removeprefix('torch.')} on {device}"
