"""FLOPs, bytes and times of a pass: by hand, and by loops that really count."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourse import config as configs
from kvcourse import sizing
from kvcourse.figures import chapter_c

LLAMA_8B, GPT2, MISTRAL = (configs.lookup(key) for key in ("llama-3.1-8b", "gpt2", "mistral-7b-v0.1"))
V3, H100 = configs.lookup("deepseek-v3"), sizing.device("h100-sxm")


def test_flops_of_a_gated_mlp_and_grouped_heads_by_hand():
    flops = sizing.forward_flops(LLAMA_8B, new_tokens=2, past_tokens=10)
    layer = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
    assert flops.linear == 2 * (32 * 2 * layer + 4096 * 128_256)
    assert flops.attention == 32 * 32 * (11 + 12) * (2 * 128 + 2 * 128)


@given(new=st.integers(1, 40), past=st.integers(0, 40), window=st.integers(1, 40))
def test_a_window_limits_the_pairs(new, past, window):
    config = replace(MISTRAL, sliding_window=window)
    pairs = sum(min(past + i + 1, window) for i in range(new))
    assert sizing.forward_flops(config, new, past).attention == 32 * 32 * pairs * (2 * 128 + 2 * 128)


def test_experts_and_latent_by_hand():
    flops = sizing.forward_flops(V3, new_tokens=1, past_tokens=0)
    attention = 1536 * (7168 + 128 * 192) + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    layers = 61 * attention + 3 * dense + 58 * (7168 * 256 + 9 * expert)  # 8 chosen and 1 shared
    assert flops.linear == 2 * (layers + 7168 * 129_280)
    assert flops.attention == 61 * 128 * (2 * 192 + 2 * 128)


def test_bytes_of_a_step():
    moved = sizing.pass_bytes(LLAMA_8B, 1, 2300, batch=64)
    assert moved.weights == 2 * (8_030_261_248 - 128_256 * 4096)
    assert moved.cache_read == 64 * 287.5 * 1024**2
    assert moved.cache_written == 64 * 131_072
    assert moved.total == moved.weights + moved.cache_read + moved.cache_written
    assert sizing.pass_bytes(LLAMA_8B, 1, 2300, weights_dtype="fp8").weights * 2 == moved.weights


@given(past=st.integers(0, 9000), new=st.integers(1, 9000))
def test_windowed_layers_read_and_write_at_most_their_window(past, new):
    moved = sizing.pass_bytes(MISTRAL, new, past)
    assert moved.cache_read == 131_072 * min(past, 4096)
    assert moved.cache_written == 131_072 * min(new, 4096)


def test_more_tokens_meet_more_experts():
    one = sizing.pass_bytes(V3, 1).weights
    assert one == 2 * V3.step_parameters
    many = sizing.pass_bytes(V3, 1, batch=10_000).weights
    assert many == 2 * (V3.num_parameters - 129_280 * 7168)  # all experts, still one row of the embedding
    expert, layers = 3 * 7168 * 2048, 58
    two = one + 2 * layers * expert * (8 - 8 * 8 / 256)  # of 8 more, 1 in 32 was chosen before
    assert sizing.pass_bytes(V3, 1, batch=2).weights == two


def test_weights_are_read_once_and_caches_once_a_sequence():
    """C38 and C44: at 54 requests of 2,300 tokens the caches outweigh 16 GB of weights."""
    step = [sizing.pass_bytes(LLAMA_8B, 1, 2300, batch) for batch in (1, 8)]
    assert step[0].weights == step[1].weights
    assert 8 * step[0].cache_read == step[1].cache_read
    assert 53 * step[0].cache_read < 16e9 < 54 * step[0].cache_read


def test_a_single_decode_step_does_about_one_flop_a_byte_and_prefill_thousands():
    assert 0.99 < sizing.work(GPT2, 1, 500).intensity < 1.01
    assert sizing.work(LLAMA_8B, 2000).intensity > 1000
    assert sizing.work(LLAMA_8B, 200, 1800).intensity < H100.ridge  # a short warm prefill is memory bound


def test_the_roofline():
    assert H100.ridge == pytest.approx(989.4e12 / 3.35e12)
    assert sizing.roofline(H100, 1) == 3.35e12
    assert sizing.roofline(H100, H100.ridge) == pytest.approx(989.4e12)
    assert sizing.roofline(H100, 10_000) == 989.4e12
    assert sizing.roofline(H100, 10_000, "fp8") == 1978.9e12
    assert sizing.roofline(sizing.device("a100-80gb"), 10_000, "fp8") == 312e12  # no fp8 arithmetic
    with pytest.raises(ValueError, match="intensity is 0"):
        sizing.roofline(H100, 0)
    with pytest.raises(ValueError, match="no peak in float16 is published for Apple M4"):
        sizing.roofline(sizing.device("apple-m4"), 1)


def test_a_step_on_the_h100_by_hand():
    step = sizing.step_time(LLAMA_8B, H100, context=2300)
    assert step.weights == 2 * (8_030_261_248 - 128_256 * 4096) / 3.35e12
    assert step.caches * 1e6 == pytest.approx(90.03, abs=0.01)  # 89.99 read, 0.04 written
    assert step.bound == "memory" and step.total == step.memory == step.weights + step.caches
    launched = sizing.step_time(GPT2, H100, context=512, launch_seconds=0.001)
    assert launched.bound == "launches" and launched.total == 0.001
    assert sizing.step_time(LLAMA_8B, sizing.device("apple-m4"), 2300).compute is None


def test_time_to_first_token():
    first = sizing.time_to_first_token(LLAMA_8B, H100, prompt=2000)
    assert first.bound == "compute"
    assert first.compute == sizing.forward_flops(LLAMA_8B, 2000).total / 989.4e12
    assert sizing.time_to_first_token(LLAMA_8B, H100, prompt=2000, cached=1800).bound == "memory"
    with pytest.raises(ValueError, match="cached 2,000 is not below prompt 2,000"):
        sizing.time_to_first_token(LLAMA_8B, H100, prompt=2000, cached=2000)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: sizing.pass_bytes(LLAMA_8B, 0), "new_tokens is 0"),
        (lambda: sizing.pass_bytes(LLAMA_8B, 1, batch=0), "batch is 0"),
        (lambda: sizing.pass_bytes(LLAMA_8B, 1, weights_dtype="int4"), "format 'int4' is not known"),
        (lambda: sizing.step_time(LLAMA_8B, H100, 5, launch_seconds=-1.0), "launch_seconds is -1"),
    ],
)
def test_impossible_passes_give_one_line(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_every_device_says_where_its_figures_come_from():
    for key, found in sizing.devices().items():
        assert found.key == key and found.bandwidth > 1e9 and found.source
        assert found.memory_bytes is None or found.memory_bytes > 2**30
        assert found.peak() is None or found.ridge > 5
        assert (found.multiprocessors is None) == (found.multiprocessors_source is None)
    assert sizing.device("h200").bandwidth > H100.bandwidth
    assert H100.multiprocessors == chapter_c.H100_MULTIPROCESSORS == 132
    assert sizing.device("rtx-3060-laptop").multiprocessors == 3840 // 128  # CUDA cores, as the maker counts
    with pytest.raises(KeyError, match="no device 'h300' in the table: use one of h100-sxm"):
        sizing.device("h300")


def test_all_tokens_of_a_prefill_choose_experts():
    assert sizing.pass_bytes(V3, 64).weights == sizing.pass_bytes(V3, 1, batch=64).weights


def test_a_device_without_a_16_bit_peak_computes_in_32():
    cpu = sizing.device("cpu-laptop")
    assert cpu.peak() == cpu.peak("float32") == 0.9e12
    assert sizing.roofline(cpu, 1000) == 0.9e12


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: sizing.step_time(LLAMA_8B, "l4", 10), TypeError, r"give a Device, such as kv.sizing.device"),
        (lambda: sizing.roofline("l4", 10), TypeError, "device is 'l4'"),
        (lambda: sizing.roofline(H100, 1, "fp4"), ValueError, "format 'fp4' is not known"),
        (lambda: sizing.pass_bytes(LLAMA_8B, 1, dtype=["a"]), ValueError, "format \\['a'\\] is not known"),
    ],
)
def test_a_key_or_a_format_that_is_none(call, error, words):
    with pytest.raises(error, match=words):
        call()
