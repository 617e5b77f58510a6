"""Pure functions on float32 arrays: norms, gelu, softmax, masks, attention.

Nothing here may promote to float64: under NumPy 2 one float64 scalar (such as
`np.sqrt(2 / np.pi)`) turns every float32 array it touches into float64 and makes
a decode step several times slower. Constants are Python floats for that reason.
"""

import math

import numpy as np

QUERY_CHUNK = 128  # queries attended to at once in a long pass: bounds the scores' memory


def layer_norm(x, weight, bias, eps=1e-5):
    """Center and scale each row of x (T, d), then apply weight and bias (d,).

    Source: Ba et al. 2016, "Layer Normalization", section 3. Returns a new array.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = np.einsum("...d,...d->...", centered, centered)[..., None] / x.shape[-1]
    centered /= np.sqrt(variance + eps)
    centered *= weight
    centered += bias
    return centered


def gelu(x):
    """GPT-2's gelu, the tanh form: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).

    Source: Hendrycks and Gimpel 2016, section 2. `x * x * x`, because `x**3` goes
    through a general power function and is far slower. Returns a new array.
    """
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def gelu_inplace(x):
    """`gelu` written into x itself: one scratch array instead of six. Returns x."""
    inner = x * x
    inner *= 0.044715 * math.sqrt(2 / math.pi)
    inner += math.sqrt(2 / math.pi)
    inner *= x
    np.tanh(inner, out=inner)
    inner += 1.0
    x *= 0.5
    x *= inner
    return x


def softmax(x):
    """Softmax over the last axis; the row's maximum is taken away first, so exp cannot overflow."""
    return softmax_inplace(x.copy())


def softmax_inplace(x):
    """`softmax` written into x itself. Returns x."""
    x -= x.max(axis=-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(axis=-1, keepdims=True)
    return x


def causal_mask(start, T):
    """Boolean (T, start + T): row r belongs to position start + r and sees keys 0 … start + r."""
    return np.arange(start + T)[None, :] <= (start + np.arange(T))[:, None]


def attention(q, k, v, start, scale=None):
    """Causal attention of T queries, at positions start … start + T − 1, over all keys.

    q (num_heads, T, head_dim); k, v (num_kv_heads, start + T, head_dim), all float32.
    Query heads h·G … h·G + G − 1 share KV head h, where G = num_heads / num_kv_heads;
    k and v are never repeated in memory. Returns (num_heads, T, head_dim). Values may be
    of another width than keys; scores are multiplied by `scale`, by default 1/√head_dim.

    Source: Vaswani et al. 2017, equation 1, with the mask of `causal_mask`. Queries
    go in chunks of QUERY_CHUNK, and a chunk reads only the keys its last query may
    see: about half the work and a bounded score matrix. `tests/unit/test_ops.py`
    proves it equal to the written-out form.
    """
    num_heads, T, head_dim = q.shape
    num_kv_heads = k.shape[0]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    scaled = (q * scale).reshape(num_kv_heads, -1, T, head_dim)
    keys = k.swapaxes(1, 2)[:, None]  # (num_kv_heads, 1, head_dim, start + T)
    values = v[:, None]
    if T == 1:  # decode: the newest token may see everything, so the mask has no work
        return (softmax_inplace(scaled @ keys) @ values).reshape(num_heads, 1, v.shape[-1])
    out = np.empty((*scaled.shape[:3], v.shape[-1]), scaled.dtype)
    for low in range(0, T, QUERY_CHUNK):
        high = min(low + QUERY_CHUNK, T)
        scores = scaled[:, :, low:high] @ keys[..., : start + high]
        # Only the last high − low columns hold a key that some query of the chunk may not see.
        scores[..., start + low :][..., ~causal_mask(0, high - low)] = -np.inf
        out[:, :, low:high] = softmax_inplace(scores) @ values[:, :, : start + high]
    return out.reshape(num_heads, T, v.shape[-1])


def round_to_bfloat16(x):
    """x, float32 of any shape, rounded to the nearest bfloat16, as a new float32 array.

    A bfloat16 is the upper 16 bits of a float32: sign, 8 exponent bits, 7 fraction bits.
    A tie goes to the neighbor whose last bit is 0, as in IEEE 754. Infinities and NaNs stay
    what they are, and a number beyond the largest bfloat16 (about 3.39e38) becomes infinite.
    Raises TypeError for any other dtype: float64 would be rounded twice.
    """
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"dtype {x.dtype}: give a float32 array, for example x.astype(np.float32)")
    bits = np.atleast_1d(x).view(np.uint32)
    # Half of the last kept bit, less 1 where that bit is 0, so that a tie carries only out of odd numbers.
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    rounded = np.where(np.isnan(x), bits | 0x00400000, rounded)  # a carry would turn a NaN into -0
    return (rounded & 0xFFFF0000).view(np.float32).reshape(x.shape)


# --- NEW in step 4: what a Llama needs ---------------------------------------------------------


def rms_norm(x, weight, eps=1e-5):
    """Scale each row of x (T, d) to a root mean square of 1, then by weight (d,). Returns a new array.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4. Nothing is
    centered and nothing is added.
    """
    mean_square = np.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1]
    out = x / np.sqrt(mean_square + eps)
    out *= weight
    return out


def swiglu_inplace(gate_up):
    """silu(gate) · up, where gate_up (T, 2 · inner) holds both side by side; overwrites gate_up.

    silu(z) = z / (1 + exp(−z)). Returns (T, inner). Source: Shazeer 2020, "GLU Variants Improve
    Transformer", equation 6. exp overflows to inf below z ≈ −88, and z / inf is the right answer, −0.
    """
    inner = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :inner], gate_up[..., inner:]
    with np.errstate(over="ignore"):
        scale = np.exp(-gate)
    scale += 1.0
    gate /= scale
    gate *= up
    return gate


def rotary_frequencies(head_dim, theta, scaling=None):
    """Radians a position of each pair, float64 (head_dim / 2,): theta^(−2j / head_dim).

    scaling  a config's RopeScaling, or None
    """
    frequencies = float(theta) ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)  # 1: fast enough to stay as it is, 0: divided by the whole factor
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Rotary:
    """Rotary positions: `rotate(x, positions)` turns pair j of every vector by position · theta^(−2j/d).

    Source: Su et al. 2021, "RoFormer", equation 34. Pair j is (x[j], x[j + d/2]) as in Hugging Face's
    files; GGUF files pair neighbors, (x[2j], x[2j + 1]). Angles are computed in float64: in float32
    an angle near 8,000 is off by up to 0.0005.
    """

    TABLE = 16_384  # positions whose cosines and sines are kept: 4 MB for heads of 64

    def __init__(self, head_dim, theta, scaling=None):
        self.frequencies = rotary_frequencies(head_dim, theta, scaling)
        self._cos = self._sin = np.empty((0, head_dim // 2), np.float32)

    def __call__(self, x, positions):
        """x (heads, n, d), positions int (n,) → a new array, turned, of x's dtype."""
        cos, sin = self._tables(positions, x.dtype)  # (n, d/2)
        half = x.shape[-1] // 2
        low, high = x[..., :half], x[..., half:]
        out = np.empty(x.shape, x.dtype)
        np.subtract(low * cos, high * sin, out=out[..., :half])
        np.add(high * cos, low * sin, out=out[..., half:])
        return out

    def _tables(self, positions, dtype):
        last = positions.max()
        # Tests in float64, texts without end, and positions counted from a token further on.
        if dtype != np.float32 or last >= self.TABLE or positions.min() < 0:
            return self._computed(positions, dtype)
        if last >= len(self._cos):  # at least twice as many as before
            table = np.arange(min(max(256, 2 * len(self._cos), last + 1), self.TABLE))
            self._cos, self._sin = self._computed(table, dtype)
        return self._cos[positions], self._sin[positions]

    def _computed(self, positions, dtype):
        angles = positions[:, None] * self.frequencies
        return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
