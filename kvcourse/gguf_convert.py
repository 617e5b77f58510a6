"""A llama-family GGUF file → a folder in Hugging Face layout. Done once, after the download.

The folder holds `config.json`, the course's own tokenizer files and `model.safetensors` under
Hugging Face's names. Quantized matrices stay in ggml's blocks, byte for byte, and carry the kind
of block at the end of their name ("….q4_1"): a fifth of float32 on disk, and as fast to read.
"""

import base64
import json
from pathlib import Path

import numpy as np

from kvcourse import ggml_blocks
from kvcourse.tokenizer import bytes_by_character

# GGUF's tensor names (gguf.constants.TENSOR_NAMES) → transformers' LlamaForCausalLM.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# GPT-2's pattern, but every digit is a piece of its own (llama.cpp: LLAMA_VOCAB_PRE_TYPE_SMOLLM).
SMOLLM_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
_CONTROL = 3  # gguf.TokenType.CONTROL


def convert(path, folder, name):
    """Write config.json, model.safetensors, encoding.json and vocabulary.tiktoken into `folder`.

    path  a GGUF file of the architecture "llama" with a "smollm" pre-tokenizer
    name  what the tokenizer is called

    Returns `folder`. Raises ValueError, in one line, for a file that is another model's.
    """
    import gguf
    from safetensors.numpy import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(path)
    wanted = {k: f for k, f in reader.fields.items() if k.startswith(("general.", "llama.", "tokenizer."))}
    fields = {key: field.contents() for key, field in wanted.items()}
    config = read_config(fields)
    weights = read_weights(reader.tensors, config)
    config["tie_word_embeddings"] = not any(key.startswith("lm_head.weight") for key in weights)
    # Not save_file: its files can be read by their owner alone, and a class shares this one.
    (folder / "model.safetensors").write_bytes(save(weights))
    (folder / "model.safetensors").chmod(0o644)  # save_file keeps others out: a class shares this folder
    _write_json(folder / "config.json", config)
    write_tokenizer(fields, folder, name)
    return folder


def read_config(fields):
    """The dict of a `config.json` from a GGUF's fields, {name: value}."""
    if fields["general.architecture"] != "llama":
        raise ValueError(f"the GGUF holds a {fields['general.architecture']!r}: only 'llama' converts here")
    get = {key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")}
    heads = get["attention.head_count"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": get["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": get.get("attention.head_count_kv", heads),
        "head_dim": get.get("rope.dimension_count", get["embedding_length"] // heads),
        "hidden_size": get["embedding_length"],
        "intermediate_size": get["feed_forward_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": get["context_length"],
        # Stored as float32: 9.999999747378752e-06 is 1e-05.
        "rms_norm_eps": float(f"{get['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": get["rope.freq_base"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def read_weights(tensors, config):
    """{Hugging Face name: float32 array, or name + "." + kind of block: uint8 (rows, bytes of a row)}.

    Rows of Q and K are put back in Hugging Face's order; a row is whole blocks, so none is opened.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tensors:
        name, short = _hub_name(tensor.name)
        kind = tensor.tensor_type.name.lower()
        if kind in ggml_blocks.DECODERS:
            name = f"{name}.{kind}"
        elif kind != "f32":
            known = ", ".join(ggml_blocks.DECODERS)
            raise ValueError(f"the GGUF stores {tensor.name} as {kind}: f32, {known} convert here")
        rows = unpermuted(tensor.data, heads[short]) if short in heads else tensor.data
        weights[name] = np.ascontiguousarray(rows)
    return weights


def unpermuted(rows, num_heads):
    """Rows of a Q or K matrix (num_heads · head_dim, width), from GGUF's order back to Hugging Face's.

    llama.cpp's Llama rotates neighboring pairs (2j, 2j + 1), Hugging Face's the halves
    (j, j + head_dim / 2). So the conversion to GGUF interleaves the halves of every head
    (llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute); this takes it back.
    """
    count, width = rows.shape
    pairs = rows.reshape(num_heads, count // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(count, width)


def _hub_name(name):
    parts = name.removesuffix(".weight").split(".")  # blk.3.attn_q.weight, or output_norm.weight
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight", parts[2]
    if len(parts) == 1 and parts[0] in _OTHER_NAMES:
        return f"{_OTHER_NAMES[parts[0]]}.weight", parts[0]
    raise ValueError(f"the GGUF holds the tensor {name!r}, which no Llama here has")


def write_tokenizer(fields, folder, name):
    """encoding.json and vocabulary.tiktoken of a GGUF's byte-level BPE."""
    kind = fields.get("tokenizer.ggml.pre")
    if kind != "smollm":
        raise ValueError(f"the GGUF's pre-tokenizer is {kind!r}: only 'smollm' converts here")
    control = [i for i, t in enumerate(fields["tokenizer.ggml.token_type"]) if t == _CONTROL]
    ranks, special = read_ranks(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"], control)
    lines = (b"%s %d\n" % (base64.b64encode(t), r) for t, r in sorted(ranks.items(), key=lambda x: x[1]))
    (folder / "vocabulary.tiktoken").write_bytes(b"".join(lines))
    _write_json(
        folder / "encoding.json", {"name": name, "pattern": SMOLLM_PATTERN, "special_tokens": special}
    )


def read_ranks(tokens, merges, control):
    """({token bytes: rank}, {special token: id}) of a byte-level BPE.

    tiktoken wants one number that is a token's id and its merge priority at once. That holds where
    ids are in the order of the merges, as GPT-2's and SmolLM2's are; ValueError where they are not.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    merged = [ids[merge.replace(" ", "", 1)] for merge in merges]  # "Ġ t": a blank is never in a token
    if merged != sorted(merged):
        raise ValueError("the GGUF's tokens are not in the order of its merges: tiktoken cannot read it")
    byte_of = bytes_by_character()
    special = {tokens[i]: i for i in control}
    ranks = {bytes(byte_of[c] for c in t): i for t, i in ids.items() if t not in special}
    return ranks, special


def _write_json(path, described):
    # Bytes, so that Windows does not turn line ends: the file's hash is recorded.
    path.write_bytes((json.dumps(described, indent=1) + "\n").encode())
