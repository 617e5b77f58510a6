"""What many unit tests need: the bundled model and its tokenizer, loaded once, and one of single bytes."""

import pytest

import kvcourse as kv
from kvcourse.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model():
    return kv.load_model("austen-gpt2")


@pytest.fixture(scope="session")
def tokenizer():
    return kv.load_tokenizer("austen-gpt2")


@pytest.fixture(scope="session")
def bytes_tokenizer():
    """bytes_tokenizer(*joined): one token a byte, ChatML's two control tokens, and the tokens `joined`, in
    the order of their merges. Without `joined` <|im_start|> is 256 and <|im_end|> 257."""

    def make(*joined):
        ranks = {bytes([b]): b for b in range(256)} | {token: 256 + i for i, token in enumerate(joined)}
        special = {token: len(ranks) + i for i, token in enumerate(("<|im_start|>", "<|im_end|>"))}
        return Tokenizer("bytes", pat_str=r"\p{N}+|[^\p{N}]", mergeable_ranks=ranks, special_tokens=special)

    return make
