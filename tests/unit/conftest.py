"""What most unit tests of the pages need: the bundled model and its tokenizer, loaded once."""

import pytest

import kvcourse as kv


@pytest.fixture(scope="session")
def model():
    return kv.load_model("austen-gpt2")


@pytest.fixture(scope="session")
def tokenizer():
    return kv.load_tokenizer("austen-gpt2")
