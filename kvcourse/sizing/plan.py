"""`Plan`: a model, a card and its users on paper: what it takes, how many requests fit, what to change."""

import dataclasses
import math
import re
from dataclasses import dataclass
from decimal import Decimal

from kvcourse.config import ModelConfig, lookup
from kvcourse.sizing import memory as sizes
from kvcourse.sizing.hardware import devices
from kvcourse.sizing.units import at_least, parse_bytes

_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True)
class Plan:
    """A server on paper. Checked when made, never changed after; every amount is in whole bytes.

    model          a name of the catalogue, or a ModelConfig
    memory         a key of `devices()`, or an amount such as "80 GB" or "81,559 MiB"
    weights        a number format, or their size as an amount such as "16 GB"
    cache_dtype    the number format of keys and values
    context        tokens of one request, prompt and answer together, when it is longest
    users          requests at the same time
    shared_prefix  the first tokens that are the same in all requests, stored once
    keep_free      for everything else (activations, workspace): an amount, or a share such as "8 %"
    block_size     rows are taken in whole blocks of that many tokens

    A plan that does not fit is a plan (`fits` is False, `changes()` says what would help). Raises
    ValueError, TypeError or KeyError in one line for a value that means nothing: an unknown name, an
    amount without a unit, 0 users.
    """

    model: str | ModelConfig = "llama-3.1-8b"
    memory: str = "h100-sxm"
    weights: str = "float16"
    cache_dtype: str = "float16"
    context: int = 2300
    users: int = 64
    shared_prefix: int = 0
    keep_free: str = "4 GB"
    block_size: int = 1

    def __post_init__(self):
        for field in ("memory", "weights", "cache_dtype", "keep_free"):
            # One way to write an amount, so that equal plans have equal texts.
            value = getattr(self, field)
            written = (
                " ".join(value.split()) if isinstance(value, str) else f"{at_least(0, **{field: value})[0]} B"
            )
            object.__setattr__(self, field, written)
        for field, least in (("context", 1), ("users", 1), ("shared_prefix", 0), ("block_size", 1)):
            object.__setattr__(self, field, at_least(least, **{field: getattr(self, field)})[0])
        # Everything that could be refused is computed once, so that a bad value is met here.
        _ = self.memory_bytes, self.total_bytes, self.request_bytes

    # --- what it takes -------------------------------------------------------------------

    @property
    def config(self):
        """The model's ModelConfig."""
        return self.model if isinstance(self.model, ModelConfig) else lookup(self.model)

    @property
    def memory_bytes(self):
        """The card's memory."""
        if self.memory not in devices():
            return _amount(self.memory, "memory", f"a card's name ({', '.join(devices())})")
        found = devices()[self.memory].memory_bytes
        if found is None:
            raise ValueError(
                f"memory of {self.memory} comes in several sizes: give an amount, such as '16 GB'"
            )
        return found

    @property
    def weight_bytes(self):
        """The weights, once for the whole server."""
        if self.weights in sizes.NUMBER_FORMATS:
            return sizes.weight_bytes(self.config, self.weights)
        return _amount(self.weights, "weights", f"a format ({', '.join(sizes.NUMBER_FORMATS)})")

    @property
    def kept_bytes(self):
        """Memory kept free for everything that is neither weights nor cache, rounded up."""
        share = _PERCENT.fullmatch(self.keep_free)
        if not share:
            return _amount(self.keep_free, "keep_free", "a share such as '8 %'")
        if Decimal(share[1]) > 100:
            raise ValueError(f"keep_free is {self.keep_free!r}: a share is at most 100 %")
        return math.ceil(Decimal(share[1]) * self.memory_bytes / 100)

    @property
    def bytes_per_token(self):
        """Keys and values of one token; ValueError for a model with sliding windows."""
        return sizes.kv_bytes_per_token(self.config, self.cache_dtype)

    @property
    def request_bytes(self):
        """The cache of one request on its own, nothing shared."""
        return sizes.kv_bytes_reserved(
            self.config, self.context, self.cache_dtype, block_size=self.block_size
        )

    @property
    def shared_bytes(self):
        """The cache of the shared prefix, stored once."""
        return self._shared_and_own[0]

    @property
    def own_bytes(self):
        """What every request needs besides the shared prefix."""
        return self._shared_and_own[1]

    @property
    def cache_bytes(self):
        """All users' caches together."""
        shared, own = self._shared_and_own
        return shared + self.users * own

    @property
    def total_bytes(self):
        """Weights, caches and what is kept free."""
        return self.weight_bytes + self.kept_bytes + self.cache_bytes

    @property
    def _shared_and_own(self):
        return sizes.shared_and_own_bytes(
            self.config, self.context, self.cache_dtype, self.block_size, self.shared_prefix
        )

    # --- whether it fits -----------------------------------------------------------------

    @property
    def free_bytes(self):
        """Memory for caches: the card less weights and what is kept free. Below 0 where those do not fit."""
        return self.memory_bytes - self.weight_bytes - self.kept_bytes

    @property
    def spare_bytes(self):
        """What is left when all users are there; below 0 by how much the plan does not fit."""
        return self.memory_bytes - self.total_bytes

    @property
    def fits(self):
        """Whether all users' caches fit beside the weights."""
        return self.spare_bytes >= 0

    @property
    def requests_that_fit(self):
        """Requests of `context` tokens that fit at once; 0 where the weights alone do not."""
        return max(self.free_bytes - self.shared_bytes, 0) // self.own_bytes

    @property
    def tokens_that_fit(self):
        """Tokens of all requests together that fit, in whole blocks; not for models with sliding windows."""
        return sizes.tokens_that_fit(self.config, max(self.free_bytes, 0), self.cache_dtype, self.block_size)

    def replace(self, **changes):
        """The same plan with some fields changed."""
        return dataclasses.replace(self, **changes)

    def changes(self):
        """What makes a plan fit that does not, one change at a time: {field: value}, only what is enough.

        Fewer users or shorter requests: the most that fit. A smaller format of cache or weights: the
        largest that is enough. Another card: the smallest of `devices()`. Empty for a plan that fits.
        """
        if self.fits:
            return {}
        found = {"users": self.requests_that_fit, "context": self._longest_context()}
        for field in ("cache_dtype", "weights"):
            found[field] = self._first_that_fits(field, _smaller_formats(getattr(self, field)))
        # Cards: what has a published 16-bit peak and one size of memory.
        known = {key: d.memory_bytes for key, d in devices().items() if d.memory_bytes and d.flops_16bit}
        found["memory"] = self._first_that_fits("memory", sorted(known, key=known.get))
        return {field: value for field, value in found.items() if value}

    def _first_that_fits(self, field, values):
        return next((value for value in values if self._would_fit(**{field: value})), None)

    def _would_fit(self, **changes):
        try:
            return self.replace(**changes).fits
        except ValueError:  # a format that this model's heads cannot be stored in
            return False

    def _longest_context(self):
        """The longest requests with which all users fit, or None. A longer request never takes less."""
        low, high = self.shared_prefix, self.context  # low: not tried or fits; high: does not fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.replace(context=middle).fits else (low, middle)
        return low if low > self.shared_prefix else None

    # --- as text -------------------------------------------------------------------------

    def text(self):
        """The plan in one line that `from_text` reads: "model=llama-3.1-8b; memory=80 GB; …".

        Nothing shared and rows taken one by one are left out. A model of your own is written by its
        name: give `from_text` the same `models`.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["model"] = self.config.name
        if re.search(r"[;=\n]|^\s|\s$", values["model"]):
            raise ValueError(
                f"model name {values['model']!r} holds ';' or '=': rename it to write it in one line"
            )
        unused = {"shared_prefix": 0, "block_size": 1}
        return "; ".join(f"{name}={value}" for name, value in values.items() if unused.get(name) != value)

    @classmethod
    def from_text(cls, text, models=None):
        """The plan of a line like `text()` writes it. Fields may be left out and stand in any order.

        models  {name: ModelConfig} besides the catalogue's

        Raises ValueError in one line that names the part it cannot read.
        """
        if not isinstance(text, str):
            raise ValueError(f"{text!r:.60} is no text: give a line as Plan.text() writes it")
        known, given = {field.name: field.type for field in dataclasses.fields(cls)}, {}
        for part in filter(None, (part.strip() for part in text.split(";"))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in known or not value:
                raise ValueError(
                    f"cannot read {part!r:.60}: write field=value, with one of {', '.join(known)}"
                )
            if name in given:
                raise ValueError(f"{name} is given twice: {given[name]!r} and {value!r}")
            given[name] = _whole_number(name, value) if known[name] is int else value
        if not given:
            raise ValueError(f"the text holds no plan: write field=value, with one of {', '.join(known)}")
        if models and given.get("model") in models:
            given["model"] = models[given["model"]]
        try:
            return cls(**given)
        except KeyError as error:
            raise ValueError(error.args[0]) from None


def _amount(text, field, other):
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}; or {other}") from None


def _smaller_formats(dtype):
    """Formats that take less than this one, the largest first; none for a size given as an amount."""
    size = {name: Decimal(count) / group for name, (count, group) in sizes.NUMBER_FORMATS.items()}
    smaller = [name for name in size if dtype in size and size[name] < size[dtype] and name != "bfloat16"]
    return sorted(smaller, key=size.get, reverse=True)


def _whole_number(name, value):
    if not re.fullmatch(r"\d{1,3}(,\d{3}){1,5}|\d{1,18}", value, re.ASCII):
        raise ValueError(f"{name} is {value!r:.60}: write a whole number, such as 2300")
    return int(value.replace(",", ""))
