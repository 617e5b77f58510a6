"""Llama folders that transformers wrote: the same logits and the same cache, or a refusal in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import kvcourse as kv
from kvcourse import fetch

# Both sides compute in float32 from the same weights, in other orders: up to 7e-5 at logits of about 9.
TOLERANCE = 1e-3

SHAPE = dict(
    vocab_size=97, hidden_size=72, intermediate_size=80, num_hidden_layers=3, max_position_embeddings=64,
    initializer_range=0.3,
    rms_norm_eps=0.5,  # with the usual 1e-5 in its place in any one norm, logits move by 0.0048 or more
)  # fmt: skip
KINDS = {  # query heads, KV heads, head_dim (72 / heads: usual), one matrix for input and logits, theta
    "one KV head a query head": (4, 4, 18, True, 1e4),
    "SmolLM2's heads, untied": (9, 3, 16, False, 1e5),
    "one KV head": (6, 1, 10, True, 5e5),
    "wide heads, untied": (8, 2, 32, False, 1e4),
    "narrow heads": (2, 1, 6, True, 1e4),
}
IDS = np.random.default_rng(0).integers(97, size=64)


def theirs(heads=4, kv_heads=2, head_dim=18, tied=True, theta=1e4):
    """A transformers Llama in float32 with uneven attention, and norms off 1."""
    torch.manual_seed(heads)
    config = transformers.LlamaConfig(
        **SHAPE, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def answer_of(model, ids=IDS):
    """(logits (T, vocab), [(keys, values) of each layer]) of transformers."""
    with torch.no_grad():
        output = model(torch.from_numpy(ids)[None], use_cache=True)
    held = output.cache if "cache" in output else output.past_key_values  # renamed within transformers 5
    return output.logits[0].numpy(), [(c.keys[0].numpy(), c.values[0].numpy()) for c in held.layers]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_cache_agree(kind, tmp_path):
    model = theirs(*KINDS[kind])
    model.save_pretrained(tmp_path)
    logits, held = answer_of(model)
    ours = kv.load_model(tmp_path)
    assert ours.config.num_parameters == sum(p.numel() for p in model.parameters())
    np.testing.assert_allclose(ours(IDS), logits, rtol=0, atol=TOLERANCE)
    cache, low = kv.ContiguousCache.for_model(ours), 0
    for n in (3, 2, 5, 1, 52, 1):
        got = ours(IDS[low : low + n], cache)
        np.testing.assert_allclose(got, logits[low : low + n], rtol=0, atol=TOLERANCE)
        low += n
    for layer, rows in enumerate(held):
        for mine, expected in zip(cache.keys_values(layer), rows, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=TOLERANCE)


def test_params_are_the_files_own(tmp_path):
    model = theirs(tied=False)
    model.save_pretrained(tmp_path)
    ours = kv.load_model(tmp_path).params
    expected = model.state_dict()
    assert ours.keys() == expected.keys()
    assert all(np.array_equal(ours[name], expected[name].numpy()) for name in ours)


@pytest.fixture
def folder(tmp_path):
    """A folder that transformers wrote, of a small grouped Llama."""
    theirs().save_pretrained(tmp_path)
    return tmp_path


def changed(folder, remove=(), **settings):
    """Rewrite the folder's config.json."""
    described = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in described.items() if key not in remove}
    (folder / "config.json").write_text(json.dumps(kept | settings))
    return folder


def refusal(folder, error=ValueError):
    with pytest.raises(error) as caught:
        kv.load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_config_as_transformers_4_wrote_it(folder):
    """theta beside the sizes, `rope_scaling` null, no head_dim where it is the usual one."""
    expected = kv.load_model(folder)(IDS)
    changed(folder, remove=("rope_parameters", "head_dim"), rope_theta=10000.0, rope_scaling=None)
    assert np.array_equal(kv.load_model(folder)(IDS), expected)
    changed(folder, rope_theta=20000.0)
    assert not np.allclose(kv.load_model(folder)(IDS), expected, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights(tmp_path, dtype):
    """As the hub stores nearly every Llama. Read back by both sides as float32, bit for bit."""
    theirs().to(dtype).save_pretrained(tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = kv.load_model(tmp_path)
    assert {array.dtype for array in ours.params.values()} == {np.dtype(np.float32)}
    expected = read.state_dict()
    assert all(np.array_equal(array, expected[name].numpy()) for name, array in ours.params.items())
    np.testing.assert_allclose(ours(IDS), answer_of(read)[0], rtol=0, atol=TOLERANCE)


def test_weights_in_several_files(tmp_path):
    model = theirs()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    np.testing.assert_allclose(kv.load_model(tmp_path)(IDS), answer_of(model)[0], rtol=0, atol=TOLERANCE)
    parts[1].unlink()
    assert f"{parts[1].name} is missing" in refusal(tmp_path, fetch.DamagedFile)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "lists no files in weight_map" in refusal(tmp_path, fetch.DamagedFile)


def test_a_second_copy_of_the_tied_matrix_is_left_out(folder):
    from safetensors.numpy import load_file, save_file

    expected = kv.load_model(folder)(IDS)
    params = load_file(folder / "model.safetensors")
    params["lm_head.weight"] = params["model.embed_tokens.weight"].copy()
    save_file(params, folder / "model.safetensors")
    ours = kv.load_model(folder)
    assert np.array_equal(ours(IDS), expected) and "lm_head.weight" not in ours.params


ROPES = {
    "llama3": dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32),
}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, **ROPES.pop("llama3")}


@pytest.mark.parametrize("head_dim", [18, 16])
def test_the_rotations_of_llama_3(tmp_path, head_dim):
    """Pairs of all three kinds: kept, mixed and divided. Wavelengths 6 … 2π · 10,000^(7/8); 32 positions."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    config = transformers.LlamaConfig(**SHAPE, **heads, rope_parameters=LLAMA3)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ours = kv.load_model(tmp_path)
    ratios = ours.rotate.frequencies / kv.ops.rotary_frequencies(head_dim, 1e4)
    assert (ratios == 1).any() and np.isclose(ratios, 1 / 8).any()
    assert ((ratios > 0.13) & (ratios < 0.9)).any()
    np.testing.assert_allclose(ours(IDS), answer_of(model)[0], rtol=0, atol=TOLERANCE)
    plain = type(ours)(replace(ours.config, rope_scaling=None), ours.params)
    assert not np.allclose(ours(IDS), plain(IDS), atol=0.01)
    changed(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0})
    assert "lacks low_freq_factor, high_freq_factor" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling", "rope_scaling of old files"])
def test_stretched_rotations_are_refused(folder, kind, where):
    """They change the frequencies; this course computes the plain ones. Sizes do not depend on it."""
    if where == "rope_parameters":
        rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
        changed(folder, rope_parameters=rope)
    else:
        key = "type" if "old" in where else "rope_type"
        rope = {key: kind, **ROPES[kind]}
        changed(folder, remove=("rope_parameters",), rope_theta=10000.0, rope_scaling=rope)
    message = refusal(folder)
    assert folder.name in message and kind in message and "rope" in message
    assert kv.read_config(folder).rope_theta == 10000.0


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(attention_bias=True), ("attention_bias", "True")),
        (dict(mlp_bias=True), ("mlp_bias", "True")),
        (dict(hidden_act="gelu"), ("hidden_act", "gelu")),
        (dict(rope_parameters="default"), ("rope_parameters", "default")),
        (dict(rope_scaling=[1]), ("rope_scaling", "[1]")),
        (
            dict(
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            ),
            ("partial_rotary_factor", "0.5"),
        ),
        (dict(head_dim=17), ("head_dim", "17")),
        (dict(num_key_value_heads=3), ("num_heads 4", "num_kv_heads 3")),
        (dict(num_hidden_layers=4), ("lack model.layers.3.",)),
        (dict(vocab_size=98), ("model.embed_tokens.weight", "98")),
        (dict(tie_word_embeddings=False), ("lack lm_head.weight",)),
    ],
)
def test_settings_that_are_not_computed_are_refused(folder, settings, words):
    message = refusal(changed(folder, **settings))
    assert folder.name in message and all(word in message for word in words)


@pytest.mark.parametrize("content", ["[]", "null", '"llama"'])
def test_a_config_that_is_no_object(folder, content):
    (folder / "config.json").write_text(content)
    assert "config.json holds" in refusal(folder)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Mistral", "Gemma3Text"])
def test_relatives_of_llama_are_refused(kind, tmp_path):
    """Their own parts, such as biases, norms of queries and keys, or windows, are not computed here."""
    config = getattr(transformers, f"{kind}Config")(
        **SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=18
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert f"model_type {config.model_type!r} is not supported" in message and "llama" in message
