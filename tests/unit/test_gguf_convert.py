"""From GGUF to Hugging Face's layout: blocks decoded as gguf does it, Q and K put back, or refused."""

import json

import gguf
import numpy as np
import pytest
import tiny_gguf
from safetensors.numpy import load_file

import kvcourse as kv
from kvcourse import fetch, ggml_blocks, gguf_convert
from kvcourse.models.llama import Llama

KINDS = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_1": gguf.GGMLQuantizationType.Q4_1}


def same_bits(one, other):
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_weights_are_decoded_bit_for_bit_as_gguf_does(kind):
    weight = np.random.default_rng(0).standard_normal((48, 96), dtype=np.float32)
    blocks = gguf.quantize(weight, KINDS[kind])
    got = ggml_blocks.DECODERS[kind](blocks)
    assert got.shape == (48, 96) and same_bits(got, gguf.dequantize(blocks, KINDS[kind]))
    assert np.abs(got - weight).max() < 0.25  # 4 bits over a range of about 6: half a step is 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_any_block_is_decoded_bit_for_bit_as_gguf_does(kind):
    """Random bytes: every code, tiny, huge, negative and subnormal scales; infinities and NaNs left out."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = np.random.default_rng(1).integers(256, size=(5000, size), dtype=np.uint8)
    floats = 4 if kind == "q4_1" else 2  # bytes of float16 at the front
    finite = np.isfinite(blocks[:, :floats].copy().view(np.float16)).all(axis=1)
    blocks = blocks[finite][:4000].reshape(4, 1000, size)
    got = ggml_blocks.DECODERS[kind](blocks)
    assert got.shape == (4, 1000, 32) and same_bits(got, gguf.dequantize(blocks, KINDS[kind]))


def test_the_two_orders_of_rows_by_hand():
    """A head of 4 rows: Hugging Face turns (0, 2) and (1, 3); in a GGUF a pair's rows are neighbors."""
    rows = np.arange(8)[:, None]
    assert tiny_gguf.permuted(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_convert.unpermuted(tiny_gguf.permuted(rows, 2), 2).ravel().tolist() == list(range(8))


@pytest.mark.parametrize("heads, head_dim", [(1, 2), (3, 6), (9, 64)])
def test_every_row_comes_back(heads, head_dim):
    rows = np.random.default_rng(0).integers(256, size=(heads * head_dim, 5), dtype=np.uint8)
    back = gguf_convert.unpermuted(tiny_gguf.permuted(rows, heads), heads)
    assert np.array_equal(back, rows)
    assert head_dim == 2 or not np.array_equal(gguf_convert.unpermuted(rows, heads), rows)


def test_turning_neighbors_of_a_gguf_is_turning_halves_after_it():
    """The reason for it all: scores are the same with rows permuted and neighbors turned, or neither."""
    heads, head_dim, theta = 3, 8, 1e4
    random = np.random.default_rng(0)
    wq, wk = (random.standard_normal((heads * head_dim, 10)) for _ in "qk")
    x, positions = random.standard_normal((6, 10)), np.arange(6)
    rotate = kv.ops.Rotary(head_dim, theta)

    def split(rows):  # (T, heads · head_dim) → (heads, T, head_dim)
        return rows.reshape(6, heads, head_dim).swapaxes(0, 1)

    def neighbors_turned(rows):
        pairs = rows[..., 0::2] + 1j * rows[..., 1::2]
        pairs = pairs * np.exp(1j * positions[:, None] * theta ** (-2 * np.arange(head_dim // 2) / head_dim))
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(rows.shape)

    q, k = (rotate(split(x @ w.T), positions) for w in (wq, wk))
    in_gguf = [neighbors_turned(split(x @ tiny_gguf.permuted(w, heads).T)) for w in (wq, wk)]
    np.testing.assert_allclose(in_gguf[0] @ in_gguf[1].swapaxes(1, 2), q @ k.swapaxes(1, 2), atol=1e-10)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def converted(request, tmp_path):
    """(Tiny, the folder made of it, whether input and logits share a matrix)."""
    tiny = tiny_gguf.write(tmp_path / "tiny.gguf", tied=request.param)
    return tiny, gguf_convert.convert(tiny.path, tmp_path / "made", "tiny"), request.param


def test_the_folder_holds_what_loading_reads_and_no_more(converted):
    tiny, folder, tied = converted
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "encoding.json", "model.safetensors", "vocabulary.tiktoken",
    }  # fmt: skip
    described = json.loads((folder / "config.json").read_text())
    assert described["model_type"] == "llama" and described["rms_norm_eps"] == 1e-5
    config = kv.read_config(folder)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.hidden_size, config.intermediate_size, config.max_seq_len) == (64, 96, 128)
    assert (config.vocab_size, config.rope_theta, config.tied_embeddings) == (len(tiny.tokens), 1e5, tied)


def test_blocks_are_kept_as_they_are(converted):
    """4 bits stay 4 bits on disk: 20 bytes for 32 numbers, 34 in the embedding."""
    _, folder, tied = converted
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight.q4_1"].shape == (96, 64 // 32 * 20)
    assert stored["model.embed_tokens.weight.q8_0"].shape[1] == 64 // 32 * 34
    assert stored["model.norm.weight"].dtype == np.float32
    assert ("lm_head.weight.q8_0" in stored) is not tied


def test_params_are_bit_for_bit_what_the_gguf_means(converted):
    tiny, folder, _ = converted
    model = kv.load_model(folder)
    assert model.params.keys() == tiny.params.keys()
    assert all(same_bits(np.ascontiguousarray(model.params[n]), tiny.params[n]) for n in tiny.params)
    ids = np.arange(40)
    assert np.array_equal(model(ids), Llama(model.config, tiny.params)(ids))


def test_the_same_file_gives_the_same_bytes(tmp_path):
    tiny = tiny_gguf.write(tmp_path / "tiny.gguf")
    one, other = (gguf_convert.convert(tiny.path, tmp_path / name, "tiny") for name in ("one", "other"))
    for path in one.iterdir():
        assert fetch.sha256_of(path) == fetch.sha256_of(other / path.name), path.name


def test_the_tokenizer_by_hand(converted):
    tiny, folder, _ = converted
    tok = kv.load_tokenizer(folder)
    assert tok.name == "tiny" and tok.n_vocab == len(tiny.tokens) == 3 + 256 + 5
    assert tok.encode("<|im_end|>", allowed_special="all") == [2]
    assert tok.encode("the the\n\n") == [tok.encode_single_token(t) for t in ("t", "he", " the", "\n\n")]
    # " the" is made of " t" and "he"; its id is its place in the GGUF, which wrote it as "Ġthe".
    assert tok.encode_single_token(" the") == tiny.tokens.index("Ġthe")
    assert tok.encode("12") == [tok.encode_single_token("1"), tok.encode_single_token("2")]
    assert tok.decode(tok.encode_ordinary("Ünïcode 12 \x00\xff<|im_end|>")) == "Ünïcode 12 \x00\xff<|im_end|>"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(architecture="gpt2"), "holds a 'gpt2': only 'llama' converts here"),
        (dict(kind="Q5_0"), "stores blk.0.attn_q.weight as q5_0: f32, q4_1, q8_0 convert here"),
        (dict(extra_tensor="rope_freqs.weight"), "holds the tensor 'rope_freqs.weight', which no Llama"),
        (dict(extra_tensor="blk.0.attn_q.bias"), "holds the tensor 'blk.0.attn_q.bias', which no Llama"),
        (dict(pre="llama-bpe"), "pre-tokenizer is 'llama-bpe': only 'smollm' converts here"),
        (dict(merges=[*tiny_gguf.MERGES[1:], tiny_gguf.MERGES[0]]), "not in the order of its merges"),
    ],
)
def test_another_models_file_is_refused_in_one_line(tmp_path, options, words):
    tiny = tiny_gguf.write(tmp_path / "tiny.gguf", **options)
    with pytest.raises(ValueError, match=words) as caught:
        gguf_convert.convert(tiny.path, tmp_path / "made", "tiny")
    assert "\n" not in str(caught.value)


def test_fields_that_a_gguf_may_leave_out():
    """Without them: as many KV heads as query heads, and head_dim = width / heads."""
    fields = {
        "general.architecture": "llama", "llama.block_count": 3, "llama.attention.head_count": 4,
        "llama.embedding_length": 48, "llama.feed_forward_length": 80, "llama.context_length": 99,
        "llama.rope.freq_base": 10000.0, "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    config = gguf_convert.read_config(fields)
    assert (config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]) == (4, 12, 1e-6)
