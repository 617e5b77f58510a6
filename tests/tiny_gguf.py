"""A tiny made-up Llama as a GGUF file, written by the gguf package the way llama.cpp's converter does it."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS, POSITIONS = 4, 2, 16, 64, 96, 2, 128
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ċ Ċ", "1 2"]  # the last one joins digits, which are never in one piece
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass
class Tiny:
    """path of the file; params: what it means, {Hugging Face name: float32, decoded by the gguf package}."""

    path: Path
    params: dict
    tokens: list


def permuted(weight, heads):
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute, word for word."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def vocabulary(lacking=()):
    """Control tokens, the 256 bytes as GPT-2 writes them but those in `lacking`, and the merged pairs."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [*CONTROL, *(letter[b] for b in sorted(letter) if b not in lacking),
            *(merge.replace(" ", "") for merge in MERGES)]  # fmt: skip


def write(path, tied=True, kind="Q4_1", lacking=(), seed=0, **fields):
    """Write the file and return Tiny. `fields` replace strings: architecture, pre (the pre-tokenizer)."""
    random = np.random.default_rng(seed)
    tokens = vocabulary(lacking)
    writer = gguf.GGUFWriter(path, fields.get("architecture", "llama"))
    _describe(writer, tokens, fields.get("pre", "smollm"), fields.get("merges", MERGES))
    params = {}

    def add(name, hub_name, shape, stored_as, heads=None):
        stored_as = gguf.GGMLQuantizationType[stored_as]
        if len(shape) == 1:
            weight = random.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            weight = random.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
        blocks = weight if stored_as.name == "F32" else gguf.quantize(weight, stored_as)
        params[f"{hub_name}.weight"] = gguf.dequantize(blocks, stored_as)
        rows = permuted(blocks, heads) if heads else blocks  # a row is whole blocks: its order is untouched
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=stored_as)

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (queries, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, queries), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    add("token_embd", TOP_NAMES["token_embd"], (len(tokens), HIDDEN), "Q8_0")
    for i in range(LAYERS):
        for name, hub_name in LAYER_NAMES.items():
            shape = shapes.get(name, (HIDDEN,))
            stored_as = kind if name in shapes else "F32"
            add(f"blk.{i}.{name}", f"model.layers.{i}.{hub_name}", shape, stored_as, heads.get(name))
    add("output_norm", TOP_NAMES["output_norm"], (HIDDEN,), "F32")
    if not tied:
        add("output", TOP_NAMES["output"], (len(tokens), HIDDEN), "Q8_0")
    if "extra_tensor" in fields:
        writer.add_tensor(fields["extra_tensor"], np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tiny(Path(path), params, tokens)


def _describe(writer, tokens, pre, merges):
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])  # 3: control, 1: normal
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
