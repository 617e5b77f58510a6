"""The peers: GPT2LMHeadModel and LlamaForCausalLM of the transformers library, same weights and threads.

transformers is installed for tests only; `available()` says whether it is there.
"""

from importlib.util import find_spec

import numpy as np


def available():
    """True when both transformers and torch are installed. Imports neither."""
    return find_spec("transformers") is not None and find_spec("torch") is not None


class TransformersGPT2:
    """A GPT2LMHeadModel in eval mode with copies of a `GPT2`'s weights.

    threads  for PyTorch on the CPU; None leaves its own choice
    device   "cpu" or "cuda"
    dtype    "float32", "float16" or "bfloat16", of weights and computation

    The attention is the model's: a call made with one must not be used after another is made.
    """

    ATTENTION = ("sdpa", "eager")  # its own ways on a CPU

    def __init__(self, model, threads, device="cpu", dtype="float32"):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        if threads:
            torch.set_num_threads(threads)
        self._torch, self._transformers = torch, transformers
        self._model = self._empty(transformers, model.config).eval().requires_grad_(False)
        # Copies, into memory that PyTorch aligned for itself.
        self._model.load_state_dict(self._state(torch, model.params))
        self._model.to(device, getattr(torch, dtype))
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.threads = torch.get_num_threads()

    def _empty(self, transformers, c):
        described = transformers.GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.max_seq_len,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            n_inner=c.intermediate_size,
            layer_norm_epsilon=c.norm_eps,
        )
        return transformers.GPT2LMHeadModel(described)

    def _state(self, torch, params):
        state = {f"transformer.{name}": torch.from_numpy(array) for name, array in params.items()}
        return state | {"lm_head.weight": state["transformer.wte.weight"]}

    def uncached(self, ids, attention="sdpa"):
        """A call that computes a whole sequence without a cache: logits (T, vocab_size), a NumPy array."""
        self._model.set_attn_implementation(attention)
        rows = self._torch.tensor([ids])

        def call():
            with self._torch.inference_mode():
                return self._model(rows, use_cache=False).logits[0].numpy()

        return call

    def cached_step(self, ids, storage="dynamic", attention="sdpa"):
        """A call that computes logits (1, vocab_size) of the last id after the others, held in a cache.

        The cache is cropped after each call, so that each finds the same tokens. `storage`
        "dynamic" is the library's default cache, which grows by concatenation; "static" its
        preallocated one, here as long as the model has positions, like ours.
        """
        step = self.batched_step([ids], storage, attention)
        return lambda: step().numpy()

    def batched_step(self, prompts, storage="dynamic", attention="sdpa", max_seq_len=None):
        """A call that computes logits (B, vocab_size), a tensor on the device, of the last id of each of
        B prompts of one length after its others, held in a cache that is cropped after each call.

        max_seq_len  of a "static" cache (default: the model's positions)
        """
        self._model.set_attn_implementation(attention)
        config = self._model.config
        cache = (
            self._transformers.DynamicCache(config=config)
            if storage == "dynamic"
            else self._transformers.StaticCache(
                config=config, max_cache_len=max_seq_len or config.max_position_embeddings
            )
        )
        rows = self._torch.tensor(prompts, device=self._model.device)
        with self._torch.inference_mode():
            self._model(rows[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)

        def call():
            with self._torch.inference_mode():
                logits = self._model(rows[:, -1:], cache=cache, use_cache=True).logits[:, -1]
                cache.crop(-1)
                return logits

        return call


class TransformersLlama(TransformersGPT2):
    """The same with a LlamaForCausalLM and a `Llama`'s weights."""

    def _empty(self, transformers, c):
        described = transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_seq_len,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=c.tied_embeddings,
        )
        return transformers.LlamaForCausalLM(described)

    def _state(self, torch, params):
        state = {name: torch.tensor(array) for name, array in params.items()}
        return {"lm_head.weight": state["model.embed_tokens.weight"]} | state


def peer_of(model, threads):
    """The transformers model that computes the same as `model`, a GPT2 or a Llama."""
    kind = TransformersGPT2 if model.config.architecture == "gpt2" else TransformersLlama
    return kind(model, threads)


def same_answer(ours, theirs, tolerance=1e-3):
    """Raise ValueError unless two arrays of logits agree: both sides must have done the same work.

    The tolerance allows for sums in another order, float32, at logits of size about 1.
    """
    worst = float(np.abs(ours - theirs).max()) if ours.shape == theirs.shape else float("inf")
    if not worst <= tolerance:
        raise ValueError(f"the peers' logits differ by {worst:.2g}, not by ≤ {tolerance}: not the same work")
