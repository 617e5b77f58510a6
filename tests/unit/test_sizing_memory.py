"""Bytes of caches and weights against products written out by hand, for every model of the catalogue."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import config as configs
from kvcourse import sizing

LLAMA_8B = configs.lookup("llama-3.1-8b")
GIB, GB = 1024**3, 1000**3
# 2 (keys and values) · layers · KV heads · head_dim · 2 bytes, or layers · (latent + rotated key) · 2 bytes
BY_HAND = {
    "gpt2": 2 * 12 * 12 * 64 * 2,
    "gpt2-medium": 2 * 24 * 16 * 64 * 2,
    "gpt2-large": 2 * 36 * 20 * 64 * 2,
    "gpt2-xl": 2 * 48 * 25 * 64 * 2,
    "llama-2-7b": 524_288,
    "llama-2-13b": 819_200,
    "llama-2-70b": 327_680,
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "llama-3.1-405b": 2 * 126 * 8 * 128 * 2,
    "qwen2.5-1.5b": 2 * 28 * 2 * 128 * 2,
    "qwen2.5-3b": 36_864,
    "qwen3-4b": 147_456,
    "deepseek-v2-lite": 27 * (512 + 64) * 2,
    "deepseek-v3": 70_272,
    "smollm2-135m": 2 * 30 * 3 * 64 * 2,
}
# 16 bits: bytes of one row in one layer, layers that see everything, layers with a window, the window
WINDOWED = {
    "mistral-7b-v0.1": (2 * 8 * 128 * 2, 0, 32, 4096),
    "gemma-3-1b": (2 * 1 * 256 * 2, 4, 22, 512),
    "gemma-3-4b": (2 * 4 * 256 * 2, 5, 29, 1024),
    "gemma-3-27b": (2 * 16 * 128 * 2, 10, 52, 1024),
}


def test_every_entry_of_the_catalogue_is_here():
    assert set(BY_HAND) | set(WINDOWED) == set(configs.catalogue())


@pytest.mark.parametrize("key", BY_HAND)
def test_bytes_per_token_by_hand(key):
    config = configs.lookup(key)
    assert sizing.kv_bytes_per_token(config) == sizing.kv_bytes_per_token(config, "float16") == BY_HAND[key]
    assert sizing.kv_bytes_per_token(config, 4) == 2 * BY_HAND[key]
    assert sizing.kv_bytes_per_token(config, "fp8") * 2 == BY_HAND[key]
    assert sizing.kv_bytes_per_token(config, "q8_0") * 64 == BY_HAND[key] * 34  # 34 bytes per 32 numbers
    assert sizing.kv_bytes_per_token(config, "q4_0") * 64 == BY_HAND[key] * 18
    assert sizing.kv_bytes(config, 1000) == 1000 * BY_HAND[key]


@pytest.mark.parametrize("key", WINDOWED)
@pytest.mark.parametrize("seq_len", [0, 1, 511, 512, 1024, 4096, 4097, 131_072])
def test_windowed_layers_stop_growing(key, seq_len):
    row, full, windowed, window = WINDOWED[key]
    expected = row * (full * seq_len + windowed * min(seq_len, window))
    assert sizing.kv_bytes(configs.lookup(key), seq_len) == expected
    with pytest.raises(ValueError, match="use kv_bytes"):
        sizing.kv_bytes_per_token(configs.lookup(key))


@given(seq_len=st.integers(1, 60), reserved=st.integers(0, 40))
def test_the_formula_is_what_the_arrays_take(seq_len, reserved):
    config = configs.lookup("gpt2")
    cache = kv.ContiguousCache(config, max_seq_len=seq_len + reserved)
    assert cache.nbytes == sizing.kv_bytes_reserved(
        config, seq_len, "float32", max_seq_len=seq_len + reserved
    )
    assert cache.nbytes == sizing.kv_bytes(config, seq_len + reserved, "float32")


def test_the_published_figures():
    mib = 1024**2
    assert sizing.kv_bytes(configs.lookup("gpt2"), 1000, "float32") / mib == 70.3125  # C24
    assert sizing.kv_bytes(configs.lookup("llama-2-7b"), 4096) == 2 * GIB  # C25
    assert sizing.kv_bytes(LLAMA_8B, 131_072) == 16 * GIB
    assert sizing.kv_bytes(configs.lookup("llama-3.1-70b"), 131_072) == 40 * GIB
    assert sizing.kv_bytes(LLAMA_8B, 2300) == 287.5 * mib  # C26
    assert 64 * sizing.kv_bytes(LLAMA_8B, 2300) == 17.96875 * GIB
    assert sizing.tokens_that_fit(LLAMA_8B, 60 * GIB) == 491_520  # C27
    assert sizing.tokens_that_fit(LLAMA_8B, 60 * GB) == 457_763
    assert sizing.requests_that_fit(LLAMA_8B, 60 * GIB, 2300) == 213
    assert sizing.requests_that_fit(LLAMA_8B, 60 * GB, 2300) == 199
    assert sizing.requests_that_fit(LLAMA_8B, 60 * GIB, 2300, block_size=16) == 213
    assert sizing.requests_that_fit(LLAMA_8B, 60 * GB, 2300, block_size=16) == 198
    assert sizing.kv_bytes_per_token(configs.lookup("qwen2.5-3b"), "q8_0") == 19_584  # C28
    assert 32 * sizing.kv_bytes(LLAMA_8B, 8192) == 32 * GIB  # C30


@given(
    key=st.sampled_from(sorted(configs.catalogue())),
    free=st.integers(0, 10**11),
    seq_len=st.integers(2, 9000),
    share=st.floats(0, 0.99),
    block_size=st.integers(1, 64),
)
def test_requests_fit_and_one_more_does_not(key, free, seq_len, share, block_size):
    config, prefix = configs.lookup(key), int(share * seq_len)
    fit = sizing.requests_that_fit(config, free, seq_len, "fp8", block_size, prefix)
    shared, own = sizing.shared_and_own_bytes(config, seq_len, "fp8", block_size, prefix)
    assert fit == 0 or shared + fit * own <= free
    assert shared + (fit + 1) * own > free
    if block_size == 1 and config.sliding_window is None:
        assert shared + own == sizing.kv_bytes(config, seq_len, "fp8")


def test_a_shared_prefix_is_stored_once_and_in_whole_blocks():
    shared, own = sizing.shared_and_own_bytes(LLAMA_8B, 100, block_size=16, shared_prefix=40)
    assert (shared, own) == (32 * 131_072, 80 * 131_072)  # 2 whole blocks of 40 tokens; 68 rows in 5 blocks
    with pytest.raises(ValueError, match="shared_prefix 100 is not below"):
        sizing.shared_and_own_bytes(LLAMA_8B, 100, shared_prefix=100)


def test_reserved_against_held():
    assert sizing.kv_bytes_reserved(LLAMA_8B, 2300, block_size=16) == 2304 * 131_072
    assert sizing.kv_bytes_reserved(LLAMA_8B, 2300, max_seq_len=131_072) == 16 * GIB
    with pytest.raises(ValueError, match="seq_len 2,300 is above max_seq_len 2,000"):
        sizing.kv_bytes_reserved(LLAMA_8B, 2300, max_seq_len=2000)


def test_weights():
    assert sizing.weight_bytes(LLAMA_8B) == 16_060_522_496
    assert sizing.weight_bytes(LLAMA_8B, "q8_0") == 8_030_261_248 // 32 * 34
    gpt2 = configs.lookup("gpt2")  # 124,439,808 numbers are whole groups of 32 too
    assert sizing.weight_bytes(gpt2, "q4_0") == 124_439_808 // 32 * 18
    odd = configs.lookup("deepseek-v2-lite")
    assert 0 <= sizing.weight_bytes(odd, "q4_0") - odd.num_parameters * 18 / 32 < 18
    assert sizing.free_after_weights(LLAMA_8B, 80 * GB, keep_free=4 * GB) == 80 * GB - 16_060_522_496 - 4 * GB


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: sizing.bytes_of(32, "int8"), "format 'int8' is not known: use one of float32"),
        (lambda: sizing.bytes_of(33, "q8_0"), "33 numbers are not whole groups of 32"),
        (lambda: sizing.kv_bytes(LLAMA_8B, -1), "seq_len is -1"),
        (lambda: sizing.kv_bytes(LLAMA_8B, 5, "fp16"), "format 'fp16' is not known"),
        (lambda: sizing.requests_that_fit(LLAMA_8B, -1, 5), "free_bytes is -1"),
        (lambda: sizing.requests_that_fit(LLAMA_8B, 5, 0), "seq_len is 0"),
        (
            lambda: sizing.free_after_weights(
                configs.lookup("llama-2-70b"), sizing.device("l4").memory_bytes
            ),
            "llama-2-70b in float16 takes 137.95 GB, the memory is 24.15 GB: use fewer bits",
        ),
    ],
)
def test_impossible_input_gives_one_line(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_head_that_is_no_whole_group():
    narrow = kv.ModelConfig("narrow", "llama", 1, 4, 2, 48, 64, 64, 64, 64)
    with pytest.raises(ValueError, match="a head of 48 numbers is not whole groups of 32"):
        sizing.kv_bytes(narrow, 1, "q8_0")


def test_numpy_lengths_do_not_overflow():
    large = np.int32(2**30)
    assert sizing.kv_bytes(LLAMA_8B, large) == 2**30 * 131_072
    with pytest.raises(TypeError, match="seq_len is 1.5"):
        sizing.kv_bytes(LLAMA_8B, 1.5)


@pytest.mark.parametrize(
    "text, count",
    [
        ("80 GB", 80 * GB), ("80GiB", 80 * GIB), ("81,559 MiB", 81_559 * 1024**2), ("0.5 kB", 500),
        ("1.5 TiB", 3 * 1024**4 // 2), (7, 7), ("12 B", 12),
    ],
)  # fmt: skip
def test_amounts_as_people_write_them(text, count):
    assert sizing.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80", "80 G", "80 gb", "-1 GB", "GB", "1e3 GB", "", "0.3 B", -5])
def test_amounts_that_say_nothing_clear(text):
    with pytest.raises(ValueError, match="memory|whole number of bytes|at least 0"):
        sizing.parse_bytes(text)


@given(st.integers(0, 2**60), st.sampled_from(sorted(sizing.UNITS)))
def test_formatted_whole_bytes_come_back(count, unit):
    assert sizing.parse_bytes(sizing.format_bytes(count, "B")) == count
    assert sizing.format_bytes(3 * sizing.UNITS[unit], unit, 0) == f"3 {unit}"


@pytest.mark.parametrize(
    "text", ["7,5 GB", "1,50 GB", "80,000,0 MB", "1,.5 GB", "８０ GB", "1" * 5000 + " GB"]
)
def test_a_decimal_comma_or_endless_digits_are_no_amount(text):
    with pytest.raises(ValueError, match="is no amount of memory") as caught:
        sizing.parse_bytes(text)
    assert len(str(caught.value)) < 200


def test_numpy_numbers_are_numbers():
    assert sizing.format_bytes(np.int64(1024), "KiB", 0) == "1 KiB"
    assert sizing.kv_bytes_per_token(LLAMA_8B, np.int64(2)) == 131_072
    with pytest.raises(ValueError, match="bytes_per_number is True"):
        sizing.kv_bytes_per_token(LLAMA_8B, True)


def test_what_does_not_fit_at_all_and_what_fits_exactly():
    prefix, own = sizing.shared_and_own_bytes(LLAMA_8B, 2300, shared_prefix=2000)
    assert sizing.requests_that_fit(LLAMA_8B, prefix - 2 * own, 2300, shared_prefix=2000) == 0
    weights = sizing.weight_bytes(LLAMA_8B)
    assert sizing.free_after_weights(LLAMA_8B, weights + 5, keep_free=5) == 0
    with pytest.raises(ValueError, match="and 0.00 GB are kept free"):
        sizing.free_after_weights(LLAMA_8B, weights + 5, keep_free=6)


def test_groups_of_a_latent_run_along_the_latent():
    latent = configs.Latent(kv_lora_rank=20, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
    small = kv.ModelConfig("small", "deepseek", 1, 2, 2, 96, 64, 64, 64, 64, latent=latent)
    with pytest.raises(ValueError, match="a head of 20 numbers is not whole groups of 32"):
        sizing.kv_bytes(small, 1, "q8_0")
