"""What some tests need and not every machine has: SmolLM2, loaded once, and Triton; or how to get it."""

import os

import pytest

import kvcourse as kv

NAME = "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2():
    """The loaded model, float32. Nobody changes it."""
    _must_be_here()
    return kv.load_model(NAME)


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """SmolLM2's tokenizer, a `tiktoken.Encoding`."""
    _must_be_here()
    return kv.load_tokenizer(NAME)


@pytest.fixture(scope="session")
def skip_without():
    """skip_without(text): skip, or fail, when the text names SmolLM2 and the model is not here."""

    def check(text):
        if NAME in text:
            _must_be_here()

    return check


@pytest.fixture(scope="session")
def kernel_device():
    """Device on which the Triton kernel runs: "cpu" in its interpreter, else "cuda".

    Skips without Triton; fails there when KVCOURSE_REQUIRE_TRITON is set.
    """
    if not kv.kernels.available():
        line = "needs Triton: on Linux `make test` or `pip install -e '.[kernels]'` brings it"
        if os.environ.get("KVCOURSE_REQUIRE_TRITON"):
            pytest.fail(line, pytrace=False)
        pytest.skip(line)
    from kvcourse.kernels import triton_decode

    return "cpu" if triton_decode.INTERPRETED else "cuda"


def _must_be_here():
    """Skip where the model was not fetched; fail there when KVCOURSE_REQUIRE_SMOLLM2 is set."""
    if kv.weights.available()[NAME].folder is not None:
        return
    line = f"{NAME} is not on this machine: run `kvcourse weights fetch {NAME}` (93 MB) for this test"
    if os.environ.get("KVCOURSE_REQUIRE_SMOLLM2"):
        pytest.fail(line, pytrace=False)
    pytest.skip(line)
