"""`kv.sizing.Plan`: the figures of the claims C24–C35 by hand, what helps, and the text both ways."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import sizing
from kvcourse.sizing import Plan

KIB, MIB, GIB, GB = 1024, 1024**2, 1024**3, 1000**3
MODELS = kv.catalogue()


# --- the figures of the claims ----------------------------------------------------------


def test_c24_gpt2_in_float32():
    plan = Plan("gpt2", weights="float32", cache_dtype="float32", context=1024, users=1)
    assert plan.bytes_per_token == 73_728 == 72 * KIB
    assert plan.request_bytes == 72 * MIB
    assert plan.replace(context=1000).request_bytes == 70.3125 * MIB
    cache = kv.ContiguousCache(MODELS["gpt2"])
    assert plan.cache_bytes == cache.nbytes


@pytest.mark.parametrize(
    "model, token, context, longest",
    [
        ("llama-2-7b", 512, 4096, 2),
        ("llama-3.1-8b", 128, 131_072, 16),
        ("llama-3.1-70b", 320, 131_072, 40),
    ],
)
def test_c25(model, token, context, longest):
    plan = Plan(model, context=context, users=1)
    assert plan.bytes_per_token == token * KIB and plan.request_bytes == longest * GIB


def test_c26():
    plan = Plan("llama-3.1-8b", context=2300, users=64)
    assert plan.bytes_per_token == 131_072
    assert plan.request_bytes == 287.5 * MIB
    assert plan.cache_bytes == 17.96875 * GIB and f"{plan.cache_bytes / GIB:.1f}" == "18.0"
    assert plan.replace(context=2000).request_bytes == 250 * MIB
    assert plan.replace(context=2048).request_bytes == 256 * MIB  # what the source prints for 2,000


@pytest.mark.parametrize(
    "unit, free, tokens, requests, in_blocks",
    [("GB", 60 * GB, 457_763, 199, 198), ("GiB", 60 * GIB, 491_520, 213, 213)],
)
def test_c27_in_both_units(unit, free, tokens, requests, in_blocks):
    plan = Plan(memory=f"80 {unit}", weights=f"16 {unit}", keep_free=f"4 {unit}", context=2300)
    assert plan.free_bytes == free
    assert plan.tokens_that_fit == tokens and plan.requests_that_fit == requests
    assert plan.replace(block_size=16).requests_that_fit == in_blocks


def test_c27_on_a_real_card():
    plan = Plan(memory="81,559 MiB", context=2300, keep_free="0 GB")
    assert plan.memory_bytes == 85_520_809_984 == Plan(memory="h100-sxm").memory_bytes
    assert plan.weight_bytes == 16_060_522_496
    assert plan.free_bytes == 69_460_287_488  # 64.69 GiB
    # An engine that takes 92 or 90 % of the card.
    assert plan.replace(keep_free="8 %").requests_that_fit == 207
    assert plan.replace(keep_free="10 %").requests_that_fit == 202


def test_c28_and_the_sizes_of_c29():
    plan = Plan("qwen2.5-3b", context=8000, users=1)
    assert plan.bytes_per_token == 36_864 and plan.request_bytes == 294_912_000
    small = plan.replace(cache_dtype="q8_0")
    assert small.bytes_per_token == 19_584 and small.request_bytes == 156_672_000
    assert small.bytes_per_token / plan.bytes_per_token == 0.53125
    assert small.replace(context=8192).request_bytes == 160_432_128  # nine tenths of 0.177 GB
    assert plan.replace(cache_dtype="q4_0").bytes_per_token == 10_368


def test_c30_and_c31():
    assert Plan("llama-3.1-8b", context=8192, users=32).cache_bytes == 32 * GIB
    plan = Plan("llama-2-7b", context=4096, users=32)
    assert (plan.bytes_per_token, plan.request_bytes, plan.cache_bytes) == (512 * KIB, 2 * GIB, 64 * GIB)


def test_c32_the_office():
    office = Plan("llama-2-7b", memory="80 GB", weights="16 GB", keep_free="4 GB", context=6000, users=40)
    assert office.cache_bytes == 125_829_120_000 and not office.fits
    eight = office.replace(cache_dtype="fp8")
    assert eight.cache_bytes == 62_914_560_000 and not eight.fits  # 60 GB are left
    in_gib = eight.replace(memory="80 GiB", weights="16 GiB", keep_free="4 GiB")
    assert in_gib.fits and not in_gib.replace(cache_dtype="q8_0").fits  # 66.8 GB into 64.4
    grouped = office.replace(model="llama-3.1-8b")
    assert grouped.cache_bytes == 31_457_280_000 and grouped.fits
    real = office.replace(memory="h100-sxm")
    assert real.changes() == {"users": 20, "context": 3124, "cache_dtype": "fp8", "memory": "h200"}


def test_c33_c34_c35():
    assert Plan("llama-2-13b").bytes_per_token == 819_200
    assert Plan("deepseek-v3", cache_dtype="bfloat16").bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    wide = replace(MODELS["llama-3.1-8b"], num_kv_heads=32)
    assert Plan(wide).bytes_per_token == 4 * Plan("llama-3.1-8b").bytes_per_token == 512 * KIB
    assert Plan(replace(wide, num_heads=64)).bytes_per_token == 512 * KIB
    assert Plan("qwen3-4b").bytes_per_token == 147_456


# --- what fits, and what helps ------------------------------------------------------------


def test_a_shared_prefix_is_stored_once():
    plan = Plan(context=8192, shared_prefix=6000, users=40)
    assert plan.shared_bytes == 6000 * 131_072 and plan.own_bytes == 2192 * 131_072
    assert plan.cache_bytes == (6000 + 40 * 2192) * 131_072
    assert plan.requests_that_fit == (plan.free_bytes - plan.shared_bytes) // plan.own_bytes


def test_the_sum_of_the_parts():
    plan = Plan(users=300)
    assert plan.total_bytes == plan.weight_bytes + plan.kept_bytes + plan.cache_bytes
    assert plan.spare_bytes == plan.memory_bytes - plan.total_bytes < 0
    assert Plan(users=plan.requests_that_fit).fits and not Plan(users=plan.requests_that_fit + 1).fits


def test_weights_larger_than_the_card():
    plan = Plan("llama-2-70b", memory="l4", users=1, context=1)
    assert plan.free_bytes < 0 and plan.requests_that_fit == 0 and not plan.fits
    assert plan.tokens_that_fit == 0
    assert plan.changes() == {"memory": "h200"}  # 138 GB of weights; in q4_0 they are 38.8 GB, the L4 has 24
    assert Plan("llama-3.1-405b", memory="l4").changes() == {}


plans = st.builds(
    Plan,
    model=st.sampled_from(sorted(MODELS)),
    memory=st.sampled_from(["h100-sxm", "l4", "rtx-3060", "80 GB", "80 GiB", "81,559 MiB", "1.5 TB"]),
    weights=st.sampled_from(["float32", "bfloat16", "q8_0", "16 GB"]),
    cache_dtype=st.sampled_from(sorted(sizing.NUMBER_FORMATS)),
    context=st.integers(100, 200_000),
    users=st.integers(1, 5000),
    shared_prefix=st.integers(0, 99),
    keep_free=st.sampled_from(["0 GB", "4.5 GiB", "8 %", "7.5 %"]),
    block_size=st.sampled_from([1, 16, 128]),
)


@settings(deadline=None, max_examples=60)
@given(plans)
def test_every_change_that_is_named_is_enough_and_one_more_is_too_many(plan):
    found = plan.changes()
    assert plan.fits == (plan.spare_bytes >= 0) and (not found or not plan.fits)
    for field, value in found.items():
        assert plan.replace(**{field: value}).fits
    if "users" in found:
        assert not plan.replace(users=found["users"] + 1).fits
    if "context" in found:
        assert not plan.replace(context=found["context"] + 1).fits
    if not plan.fits and "context" not in found:
        assert not plan.replace(context=plan.shared_prefix + 1).fits


# --- as text ------------------------------------------------------------------------------


@settings(deadline=None)
@given(plans)
def test_text_and_back(plan):
    text = plan.text()
    assert "\n" not in text and Plan.from_text(text) == plan
    assert Plan.from_text(f" ; {text.replace('; ', ' ;').replace('=', ' = ')};") == plan


@settings(deadline=None)
@given(plans, st.randoms(use_true_random=False))
def test_the_order_of_the_fields_does_not_matter(plan, random):
    parts = plan.text().split("; ")
    random.shuffle(parts)
    assert Plan.from_text("; ".join(parts)) == plan


@given(st.text())
def test_any_text_is_a_plan_or_one_line(text):
    try:
        Plan.from_text(text)
    except ValueError as error:
        assert "\n" not in str(error)


def test_what_is_left_out_is_the_default():
    assert Plan.from_text("users=3") == Plan(users=3)
    assert Plan(shared_prefix=0, block_size=1).text() == (
        "model=llama-3.1-8b; memory=h100-sxm; weights=float16; cache_dtype=float16; context=2300; users=64; "
        "keep_free=4 GB"
    )
    assert (
        Plan(shared_prefix=5, block_size=16).text().endswith("shared_prefix=5; keep_free=4 GB; block_size=16")
    )
    assert Plan(memory=" 80  GB ").text() == Plan(memory="80 GB").text()
    assert Plan(memory=80 * GB).memory == "80000000000 B"


def test_a_model_of_ones_own():
    mine = replace(MODELS["llama-3.1-8b"], name="mine", num_kv_heads=4)
    plan = Plan(mine)
    assert Plan.from_text(plan.text(), {"mine": mine}) == plan
    with pytest.raises(ValueError, match="no model 'mine' in the catalogue: use one of gpt2"):
        Plan.from_text(plan.text())
    with pytest.raises(ValueError, match="holds ';' or '='"):
        Plan(replace(mine, name="a;b")).text()


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "the text holds no plan: write field=value, with one of model, memory"),
        ("llama", "cannot read 'llama': write field=value"),
        ("users=", "cannot read 'users='"),
        ("card=l4", "cannot read 'card=l4'"),
        ("users=1; users=2", "users is given twice: 1 and '2'"),
        ("users=1.5", "users is '1.5': write a whole number"),
        ("context=2 300", "context is '2 300'"),
        ("users=0", "users is 0: it must be at least 1"),
        ("users=-3", "users is '-3': write a whole number"),
        ("block_size=0", "block_size is 0"),
        ("memory=80 G", "memory: '80 G' is no amount of memory"),
        ("memory=apple-m4", "memory of apple-m4 comes in several sizes: give an amount"),
        ("weights=int4", "weights: 'int4' is no amount of memory"),
        ("cache_dtype=int4", "format 'int4' is not known: use one of float32"),
        ("keep_free=101 %", "keep_free is '101 %': a share is at most 100 %"),
        ("keep_free=4", "keep_free: '4' is no amount of memory"),
        ("context=10; shared_prefix=10", "shared_prefix 10 is not below the sequence's 10 tokens"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(text, words):
    with pytest.raises(ValueError) as caught:
        Plan.from_text(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_values_of_another_kind():
    with pytest.raises(KeyError, match="no model 'llama-4'"):
        Plan("llama-4")
    with pytest.raises(TypeError, match="users is 1.5"):
        Plan(users=1.5)
    with pytest.raises(ValueError, match="at least 0"):
        Plan(memory=-1)
    with pytest.raises(AttributeError):
        Plan().users = 3


def test_a_share_is_rounded_up_and_may_be_all():
    assert Plan(keep_free="8 %").kept_bytes == 6_841_664_799  # 8 % of 85,520,809,984 is …798.72
    assert Plan(memory="1 B", weights="0 B", keep_free="8 %").kept_bytes == 1
    assert Plan(keep_free="100 %").kept_bytes == Plan().memory_bytes


def test_a_plan_that_fits_to_the_byte():
    tight = Plan(memory=str(Plan().total_bytes) + " B")
    assert tight.fits and tight.spare_bytes == 0 and tight.changes() == {}


def test_another_card_is_a_gpu():
    # 31 GB: the laptop's 34 GB of host memory would hold it, and is no card
    assert Plan(memory="l4", users=50, keep_free="0 B").changes()["memory"] == "h100-sxm"


@pytest.mark.parametrize(
    "text", ["users=" + "9" * 5000, "memory=" + "9" * 300 + " GB", "x" * 100_000, None, 5]
)
def test_hostile_texts_get_one_short_line(text):
    with pytest.raises(ValueError) as caught:
        Plan.from_text(text)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
