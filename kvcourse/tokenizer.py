"""tiktoken `Encoding`s from files, offline, with one-line errors for text they cannot take."""

import base64
import json
import re
from pathlib import Path

import tiktoken


class Tokenizer(tiktoken.Encoding):
    """A `tiktoken.Encoding` that names the character it cannot encode.

    Two differences from tiktoken: the message for a special token typed into a text
    is one line, and a byte that the vocabulary lacks raises ValueError (tiktoken
    panics, and `except Exception` does not catch that). The batch methods call these.
    """

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        """Token ids of a text, a list of int.

        allowed_special     special tokens to read as such, or "all"
        disallowed_special  those that raise when the text holds them; "all": those not allowed

        Raises ValueError, in one line, for a disallowed special token and for a character
        with a byte that the vocabulary lacks.
        """
        allowed = self._check(text, allowed_special, disallowed_special)
        return super().encode(text, allowed_special=allowed, disallowed_special=())

    def encode_ordinary(self, text):
        """Token ids of a text, a list of int; special tokens in it are read as plain text.

        Raises ValueError, in one line, for a character with a byte that the vocabulary lacks.
        """
        self._check_bytes(text)
        return super().encode_ordinary(text)

    def encode_to_numpy(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        """As `encode`, but a uint32 array (T,)."""
        allowed = self._check(text, allowed_special, disallowed_special)
        return super().encode_to_numpy(text, allowed_special=allowed, disallowed_special=())

    def encode_with_unstable(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        """tiktoken's (stable ids, possible continuations), with the errors of `encode`."""
        allowed = self._check(text, allowed_special, disallowed_special)
        return super().encode_with_unstable(text, allowed_special=allowed, disallowed_special=())

    def _check(self, text, allowed_special, disallowed_special):
        """Raise ValueError for what `encode` refuses; returns the set of allowed special tokens."""
        allowed = self.special_tokens_set if allowed_special == "all" else set(allowed_special)
        disallowed = self.special_tokens_set - allowed if disallowed_special == "all" else disallowed_special
        for token in sorted(disallowed):
            if token in text:
                raise ValueError(
                    f"the text holds the special token {token} at character {text.index(token)}: "
                    f"use encode_ordinary(text) to read it as plain text, "
                    f"or allowed_special={{{token!r}}} to mean it"
                )
        self._check_bytes(text, allowed)
        return allowed

    def _check_bytes(self, text, allowed_special=()):
        """ValueError for the first character with a byte the vocabulary lacks, special tokens left out."""
        if not self._missing_bytes:
            return
        specials = "|".join(re.escape(token) for token in sorted(allowed_special))
        place = 0
        for piece in re.split(f"({specials})", text) if specials else [text]:
            for offset, character in enumerate(piece if piece not in allowed_special else ""):
                lacking = self._missing_bytes.intersection(character.encode("utf-8", "surrogatepass"))
                if lacking:
                    raise ValueError(
                        f"{character!r} at character {place + offset} needs byte 0x{min(lacking):02x}, "
                        f"which the vocabulary of {self.name} lacks: leave it out"
                    )
            place += len(piece)

    @property
    def _missing_bytes(self):
        if "_missing" not in self.__dict__:
            self._missing = {b for b in range(256) if bytes([b]) not in self._mergeable_ranks}
        return self._missing


def read_ranks(path):
    """{token bytes: rank} from tiktoken's text format: a base64 token and its rank a line."""
    ranks = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: expected a base64 token and a rank, found {line[:40]!r}"
            ) from None
    return ranks


def from_folder(folder):
    """The Tokenizer of a model folder.

    Either the course's own files, `encoding.json` (name, pattern, special tokens) beside
    `vocabulary.tiktoken`, or the `vocab.json` of a GPT-2 in Hugging Face layout. Raises
    ValueError, in one line, when the folder holds neither or a file in it is broken.
    """
    folder = Path(folder)
    if not (folder / "encoding.json").is_file():
        return _from_vocab_json(folder)
    described = _read_object(folder / "encoding.json")
    lacking = [key for key in ("name", "pattern", "special_tokens") if key not in described]
    if lacking:
        raise ValueError(f"{folder / 'encoding.json'} lacks {', '.join(lacking)}: copy the file again")
    if not (folder / "vocabulary.tiktoken").is_file():
        raise ValueError(f"{folder} holds encoding.json, but no vocabulary.tiktoken: copy it there, too")
    ranks = read_ranks(folder / "vocabulary.tiktoken")
    return _made(folder, described["name"], described["pattern"], ranks, described["special_tokens"])


def _read_object(path):
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy the file again") from None
    if not isinstance(described, dict):
        raise ValueError(f"{path} holds {described!r:.40}: it must hold an object, copy the file again")
    return described


def _made(folder, name, pattern, ranks, special):
    """The Tokenizer of these parts, or ValueError in one line that names the folder."""
    if len(set(ranks.values())) < len(ranks):  # checked here, because tiktoken panics
        raise ValueError(f"{folder}: two tokens of the vocabulary have one rank: copy the vocabulary again")
    try:
        return Tokenizer(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{folder} holds no usable tokenizer ({reason}): copy its files again") from None


# GPT-2's pre-tokenizer (Radford et al. 2019; openai/gpt-2, src/encoder.py).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _from_vocab_json(folder):
    """GPT-2's vocab.json: {token: id}. Its ids are in the order of the merges, so they are the ranks."""
    path = folder / "vocab.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokenizer: expected encoding.json or GPT-2's vocab.json")
    vocabulary = _read_object(path)
    special = {t: i for t, i in vocabulary.items() if t == "<|endoftext|>"}
    byte_of = bytes_by_character()
    foreign = sorted({c for t in vocabulary if t not in special for c in t if c not in byte_of})
    if foreign:
        raise ValueError(f"{path} holds {foreign[0]!r}, which GPT-2's never do: is it another model's?")
    ranks = {bytes(byte_of[c] for c in t): i for t, i in vocabulary.items() if t not in special}
    return _made(folder, folder.name, GPT2_PATTERN, ranks, special)


def bytes_by_character():
    """{character: byte} of GPT-2's files, which write each byte as one printable character.

    Source: openai/gpt-2, src/encoder.py, `bytes_to_unicode`: printable bytes stand for
    themselves, the others are moved up to 256 and on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}
