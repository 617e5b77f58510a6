"""SmolLM2's tokenizer: digits stand alone, text equals Hugging Face's, six control characters are refused."""

import json

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from kvcourse.tokenizer import bytes_by_character

# Bytes without a token: six control characters, and what never begins or never stands in a character's
# UTF-8: c0 c1 f5 … ff in none at all, f1 f2 only in the unassigned planes U+40000 … U+BFFFF.
CONTROL_CHARACTERS = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}
MISSING = CONTROL_CHARACTERS | {0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@pytest.fixture(scope="module")
def reference(smollm2_tokenizer):
    """Hugging Face's tokenizers library on the same tokens, merges derived from their order.

    A token's two parts are what byte-pair encoding makes of its bytes with the earlier tokens only.
    The sequence of pre-tokenizers is SmolLM's: every digit apart, then GPT-2's pattern.
    """
    ranks = smollm2_tokenizer._mergeable_ranks
    letter = {byte: character for character, byte in bytes_by_character().items()}

    def written(token):
        return "".join(letter[byte] for byte in token)

    merges = [tuple(map(written, parts_of(t, ranks))) for t in sorted(ranks, key=ranks.get) if len(t) > 1]
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = ByteLevel()
    return made


def parts_of(token, ranks):
    """The two parts that the merge of `token` joins."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks) + 17) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


PIECES = (
    "a the| the|'s|'ll|’s| |  |   |\n|\n\n|\t|\r\n|1|12|2024|3.14|½|²|Ⅷ|٣|é|ß|Ω|日本|中|"
    "한국|𝟙|𝔘|😀|👩‍👩‍👧|🇫🇷|!|...|--|"
    "—|(|)|{|}|def f(x):|    return|\u00a0|\u2003|\u200b|\u0301|e\u0301|a1b2|x=1|$5|50%|#7|@a|_|"
    "__init__|CamelCase|<b>|<|\\|/|\"|'|'S|don't|I'M|"
    "\x00|\x01|\x1f|\x7f|ÿ|İ|ı|ﬁ|ـ|אב|हिन्दी|ไทย|᠎|\u2028|\u3000| 1| 12|  1|"
    "   12\n|\n 1|\t1|1st|v2.0|३४|१ २|12:30|\u00a01"
).split("|")
FUZZ = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.text(st.sampled_from("ab 12\n\t.,'sé٣"), max_size=30),
    st.text(st.characters(codec="utf-8"), max_size=20),
)


@given(FUZZ)
@example("    return x12 ")
@example("I'll be there at 12:30, in 2024.")
def test_text_is_cut_as_the_reference_cuts_it(smollm2_tokenizer, reference, text):
    if MISSING.intersection(text.encode()):
        with pytest.raises(ValueError, match="which the vocabulary of smollm2-135m lacks"):
            smollm2_tokenizer.encode_ordinary(text)
        return
    ids = smollm2_tokenizer.encode_ordinary(text)
    assert ids == reference.encode(text).ids
    assert smollm2_tokenizer.decode(ids) == text


def test_every_digit_is_a_token_of_its_own(smollm2_tokenizer):
    digits = {str(d): smollm2_tokenizer.encode_single_token(str(d)) for d in range(10)}
    blank = smollm2_tokenizer.encode_single_token(" ")
    assert smollm2_tokenizer.encode("2024") == [digits[d] for d in "2024"]
    # A blank goes in front of a word, but never in front of a digit.
    assert smollm2_tokenizer.encode("a 7")[1:] == [blank, digits["7"]]
    assert len(smollm2_tokenizer.encode(" word")) == 1


def test_the_vocabulary(smollm2_tokenizer):
    assert smollm2_tokenizer.name == "smollm2-135m"
    assert smollm2_tokenizer.n_vocab == 49_152
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert len(smollm2_tokenizer.special_tokens_set) == 17
    assert {t: smollm2_tokenizer.encode_single_token(t) for t in special} == special


def test_special_tokens_must_be_meant(smollm2_tokenizer):
    text = "<|im_start|>user"
    with pytest.raises(ValueError, match=r"special token <\|im_start\|> at character 0: use encode_ordinary"):
        smollm2_tokenizer.encode(text)
    assert smollm2_tokenizer.encode(text, allowed_special={"<|im_start|>"})[0] == 1
    plain = smollm2_tokenizer.encode_ordinary(text)
    assert min(plain) >= 17 and smollm2_tokenizer.decode(plain) == text


def test_exactly_these_21_bytes_are_missing(smollm2_tokenizer):
    assert smollm2_tokenizer._missing_bytes == MISSING and len(MISSING) == 21


@pytest.mark.parametrize("byte", sorted(CONTROL_CHARACTERS))
def test_a_control_character_without_a_token_is_one_line(smollm2_tokenizer, byte):
    with pytest.raises(ValueError) as caught:
        smollm2_tokenizer.encode(f"ab{chr(byte)}c")
    assert str(caught.value) == (
        f"{chr(byte)!r} at character 2 needs byte 0x{byte:02x}, "
        f"which the vocabulary of smollm2-135m lacks: leave it out"
    )


@pytest.mark.parametrize("code, byte", [(0x40000, 0xF1), (0xBFFFF, 0xF2)])
def test_an_unassigned_character_without_tokens_is_one_line(smollm2_tokenizer, code, byte):
    with pytest.raises(ValueError, match=f"at character 1 needs byte 0x{byte:02x}"):
        smollm2_tokenizer.encode("a" + chr(code))
    for assigned in (chr(0x3FFFF), chr(0xC0000), "\U0001f600", "\U00020000"):
        assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(assigned)) == assigned


def test_the_catalogue_knows_the_model(smollm2_tokenizer):
    """Field for field: what the GGUF says is the published shape."""
    import kvcourse as kv

    folder = kv.weights.tokenizer_folder("smollm2-135m")
    assert kv.weights.available()["smollm2-135m"].folder == folder
    described = json.loads((folder / "config.json").read_text())
    assert kv.hub_config.from_huggingface(described, "smollm2-135m") == kv.catalogue()["smollm2-135m"]
