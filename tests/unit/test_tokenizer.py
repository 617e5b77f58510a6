"""The bundled vocabulary gives every text back; text it cannot take is refused in one line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourse import loading, paths, tokenizer

AUSTEN = loading.load_tokenizer("austen-gpt2")


@given(st.text())
def test_every_text_comes_back(text):
    assert AUSTEN.decode(AUSTEN.encode_ordinary(text)) == text


def test_all_256_bytes_and_2048_tokens():
    assert AUSTEN.n_vocab == 2048
    assert sorted(AUSTEN.encode_single_token(bytes([b])) for b in range(256)) == list(range(256))
    assert AUSTEN.eot_token == 2047


def test_both_bundled_models_share_one_vocabulary():
    draft = loading.load_tokenizer("austen-gpt2-draft")
    assert draft.encode("She was sensible and clever.") == AUSTEN.encode("She was sensible and clever.")


def test_a_special_token_typed_into_a_text():
    text = "the end<|endoftext|>"
    with pytest.raises(ValueError, match="special token <|endoftext|> at character 7") as caught:
        AUSTEN.encode(text)
    assert "\n" not in str(caught.value)
    assert AUSTEN.encode(text, allowed_special={"<|endoftext|>"})[-1] == 2047
    assert AUSTEN.decode(AUSTEN.encode_ordinary(text)) == text
    assert 2047 not in AUSTEN.encode(text, disallowed_special=())


def test_a_byte_the_vocabulary_lacks_is_a_value_error():
    ranks = {bytes([b]): b for b in range(128)}
    ascii_only = tokenizer.Tokenizer("ascii", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={})
    assert ascii_only.encode("plain") == list(b"plain")
    for encode in (
        ascii_only.encode,
        ascii_only.encode_ordinary,
        ascii_only.encode_to_numpy,
        ascii_only.encode_with_unstable,
        lambda text: ascii_only.encode_batch([text]),
        lambda text: ascii_only.encode_ordinary_batch([text]),
    ):
        with pytest.raises(
            ValueError, match="'é' at character 3 needs byte 0xa9, which the vocabulary of ascii"
        ):
            encode("café")


def test_every_way_to_encode_refuses_a_special_token_in_one_line():
    for encode in (AUSTEN.encode_to_numpy, AUSTEN.encode_with_unstable, lambda t: AUSTEN.encode_batch([t])):
        with pytest.raises(ValueError, match="use encode_ordinary") as caught:
            encode("<|endoftext|>")
        assert "\n" not in str(caught.value)
    array = AUSTEN.encode_to_numpy("She<|endoftext|>", allowed_special="all")
    assert array.dtype == "uint32" and array.tolist() == [*AUSTEN.encode("She"), 2047]


def test_vocabulary_files_are_not_changed_by_a_checkout():
    """A checkout that turned LF into CRLF would add a byte to each line."""
    raw = (paths.data_dir() / "models" / "austen-gpt2" / "vocabulary.tiktoken").read_bytes()
    assert b"\r" not in raw


def test_a_broken_vocabulary_names_file_and_line(tmp_path):
    (tmp_path / "ranks").write_bytes(b"YQ== 0\nnonsense\n")
    with pytest.raises(ValueError, match="line 2: expected a base64 token"):
        tokenizer.read_ranks(tmp_path / "ranks")


ENCODING = dict(name="x", pattern=r"\w+|\W", special_tokens={})


@pytest.mark.parametrize(
    "encoding, vocabulary, words",
    [
        ("{", "YQ== 0\n", "encoding.json is not JSON"),
        ("[]", "YQ== 0\n", "encoding.json holds \\[\\]"),
        ('{"name": "x"}', "YQ== 0\n", "encoding.json lacks pattern, special_tokens"),
        (json.dumps(ENCODING), None, "no vocabulary.tiktoken"),
        (json.dumps(ENCODING), "", "no usable tokenizer"),
        (json.dumps(ENCODING), "YQ== 0\nYg== 0\n", "two tokens of the vocabulary have one rank"),
        (json.dumps(ENCODING), "YQ== 0\nYg== -1\n", "no usable tokenizer"),
        (json.dumps(ENCODING | {"pattern": "("}), "YQ== 0\n", "no usable tokenizer .*parenthesis"),
        (json.dumps(ENCODING | {"pattern": 5}), "YQ== 0\n", "no usable tokenizer"),
        (json.dumps(ENCODING | {"special_tokens": []}), "YQ== 0\n", "no usable tokenizer"),
    ],
)
def test_broken_tokenizer_files_are_one_line(tmp_path, encoding, vocabulary, words):
    (tmp_path / "encoding.json").write_text(encoding)
    if vocabulary is not None:
        (tmp_path / "vocabulary.tiktoken").write_text(vocabulary)
    with pytest.raises(ValueError, match=words) as caught:
        tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "is not JSON"),
        ("null", "holds None"),
        ('{"a": 0, "b": 0}', "have one rank"),
        ('{"a": "0"}', "no usable tokenizer"),
        ('{"☃": 0}', "holds '☃'"),
    ],
)
def test_a_broken_vocab_json_is_one_line(tmp_path, content, words):
    (tmp_path / "vocab.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=words) as caught:
        tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_gpt2_vocab_json_of_a_folder(tmp_path):
    """Ġ is GPT-2's way of writing a space; ids in merge order serve as ranks."""
    letters = {chr(b): b - 97 for b in range(97, 123)}
    (tmp_path / "vocab.json").write_text(json.dumps(letters | {"Ġ": 26, "Ġa": 27, "<|endoftext|>": 28}))
    folder = tokenizer.from_folder(tmp_path)
    assert folder.encode("b a") == [1, 27]
    assert folder.encode("b<|endoftext|>", allowed_special="all") == [1, 28]


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        tokenizer.from_folder(tmp_path)
