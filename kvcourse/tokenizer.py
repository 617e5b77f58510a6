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
    panics, and `except Exception` does not catch that).
    """

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
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
        return super().encode(text, allowed_special=allowed, disallowed_special=())

    def encode_ordinary(self, text):
        self._check_bytes(text)
        return super().encode_ordinary(text)

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
    ValueError when the folder holds neither.
    """
    folder = Path(folder)
    if not (folder / "encoding.json").is_file():
        return _from_vocab_json(folder)
    described = json.loads((folder / "encoding.json").read_text(encoding="utf-8"))
    return Tokenizer(
        name=described["name"],
        pat_str=described["pattern"],
        mergeable_ranks=read_ranks(folder / "vocabulary.tiktoken"),
        special_tokens=described["special_tokens"],
    )


# GPT-2's pre-tokenizer (Radford et al. 2019; openai/gpt-2, src/encoder.py).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _from_vocab_json(folder):
    """GPT-2's vocab.json: {token: id}. Its ids are in the order of the merges, so they are the ranks."""
    path = folder / "vocab.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokenizer: expected encoding.json or GPT-2's vocab.json")
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    special = {t: i for t, i in vocabulary.items() if t == "<|endoftext|>"}
    byte_of = _bytes_by_character()
    ranks = {bytes(byte_of[c] for c in t): i for t, i in vocabulary.items() if t not in special}
    return Tokenizer(folder.name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def _bytes_by_character():
    """{character: byte} of GPT-2's files, which write each byte as one printable character.

    Source: openai/gpt-2, src/encoder.py, `bytes_to_unicode`: printable bytes stand for
    themselves, the others are moved up to 256 and on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}
