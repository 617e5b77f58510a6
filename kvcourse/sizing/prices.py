"""What requests cost through a hosted API that keeps the beginnings of prompts. Arithmetic, no price list.

Every amount is in the price of one uncached input token, so that it holds for a model of any price. What a
token of each kind costs in that unit are parameters of `Rules`; the ones given here are those that two
vendors' documents stated when they were read (`READ`). They change: look them up before you budget.
"""

from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral

READ = "November 2026"


@dataclass(frozen=True)
class Rules:
    """How a vendor charges. Prices in uncached input tokens, lengths in tokens, times in seconds.

    read      a token of a kept beginning
    write     a token that is kept from now on; 1.0 is no surcharge
    output    a token of the answer; no rule ever discounts it
    minimum   shortest beginning that is kept
    step      kept beginnings are counted in multiples of this
    lifetime  how long a beginning is kept after its last use
    automatic  True: every beginning of a prompt is kept. False: those that the request marks

    Raises ValueError for a negative price or lifetime, and for a minimum or step that is no whole number or
    below 1.
    """

    name: str
    read: float
    write: float
    lifetime: float
    output: float = 5.0
    minimum: int = 1024
    step: int = 1
    automatic: bool = True
    source: str = ""

    def __post_init__(self):
        for field in ("read", "write", "output", "lifetime"):
            if not getattr(self, field) >= 0:  # so that NaN is refused, too
                raise ValueError(f"{field} is {getattr(self, field)}: give 0 or more")
        for field in ("minimum", "step"):
            if not _whole(getattr(self, field), 1):
                raise ValueError(
                    f"{field} is {getattr(self, field)}: give a whole number of tokens, at least 1"
                )


def _whole(number, least):
    return isinstance(number, Integral) and number >= least


# Of each document the cheapest read and the shortest lifetime. Before the GPT-5.6 family: cached tokens count
# from 1,024 on, in steps of 128; 50 to 90 % off by model; typically kept for 5 to 10 minutes after the last
# use, one hour at most (some models can be set to 24 hours). From it on writes cost 1.25 and live 30 minutes
# at least.
_OPENAI = {
    "read": 0.1, "step": 128,
    "source": "developers.openai.com/api/docs/guides/prompt-caching; OpenAI Cookbook, Prompt Caching 201",
}  # fmt: skip
OPENAI_5_MINUTES = Rules("OpenAI, 5 minutes", write=1.0, lifetime=300, **_OPENAI)
OPENAI_30_MINUTES = Rules("OpenAI, 30 minutes", write=1.25, lifetime=1800, **_OPENAI)
# The least length is 512 to 4,096 tokens by model; a read costs less on the newest models. Each use starts
# the lifetime anew.
_ANTHROPIC = {
    "read": 0.1, "automatic": False,
    "source": "platform.claude.com/docs/en: build-with-claude/prompt-caching, about-claude/pricing",
}  # fmt: skip
ANTHROPIC_5_MINUTES = Rules("Anthropic, 5 minutes", write=1.25, lifetime=300, **_ANTHROPIC)
ANTHROPIC_1_HOUR = Rules("Anthropic, 1 hour", write=2.0, lifetime=3600, **_ANTHROPIC)


@dataclass(frozen=True)
class Request:
    """One request.

    at      seconds since the first one
    parts   the prompt from its front: pairs (content, tokens); equal content is equal text
    output  tokens of the answer
    marks   after how many parts a beginning is to be kept, for rules that are not automatic; None: after all
    """

    at: float
    parts: tuple
    output: int = 0
    marks: tuple | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of one request by what they cost: read from the cache, written to it, neither, answered."""

    read: int
    written: int
    plain: int
    output: int

    @property
    def prompt(self):
        """Tokens of the whole prompt."""
        return self.read + self.written + self.plain


def bill(requests, rules=None):
    """What each request uses: a list of Usage, in the given order.

    requests  in the order of their times
    rules     None: nothing is kept

    A beginning can be read by later requests until `lifetime` seconds after its last use. Two prompts share
    their leading equal parts; where parts differ, in content or length, they are taken to differ from the
    first token.
    Raises ValueError for requests that go back in time, for a part or an answer whose length is negative or
    no whole number, and for a mark outside 0 … the number of parts.
    """
    last_use, usages, now = {}, [], 0.0
    for request in requests:
        if not request.at >= now:
            raise ValueError(f"a request at {request.at} s after one at {now} s: give them in order of time")
        _check_lengths(request)
        now = request.at
        contents = tuple((content, tokens) for content, tokens in request.parts)
        lengths = list(accumulate((tokens for _, tokens in contents), initial=0))
        read = written = 0
        if rules is not None:
            read, written = _kept(request, rules, last_use, contents, lengths)
        usages.append(Usage(read, written, lengths[-1] - read - written, request.output))
    return usages


def _check_lengths(request):
    for what, tokens in [("a part", tokens) for _, tokens in request.parts] + [("an answer", request.output)]:
        if not _whole(tokens, 0):
            raise ValueError(f"{what} has {tokens} tokens: give a whole number, at least 0")
    parts = len(request.parts)
    if any(not 0 <= mark <= parts for mark in request.marks or ()):
        raise ValueError(f"marks are {request.marks}: give numbers of parts from 0 to {parts}")


def _kept(request, rules, last_use, contents, lengths):
    """Tokens read and written by one request; notes in `last_use` what is kept from now on."""

    def countable(parts):
        tokens = lengths[parts] // rules.step * rules.step
        return tokens if tokens >= rules.minimum else 0

    marks = _marks(request, rules)
    alive = [
        parts
        for parts in range(1, len(contents) + 1)
        if request.at - last_use.get(contents[:parts], -rules.lifetime - 1) <= rules.lifetime
    ]
    found = max(alive, default=0, key=lambda parts: lengths[parts])
    read = countable(found)
    keeps = max((countable(parts) for parts in marks), default=0)
    for parts in {*marks, found} if read else marks:
        if countable(parts):
            last_use[contents[:parts]] = request.at
    return read, max(0, keeps - read)


def _marks(request, rules):
    parts = len(request.parts)
    if rules.automatic:
        return range(1, parts + 1)
    return (parts,) if request.marks is None else request.marks


def cost(usage, rules=None, output=5.0):
    """What one request costs, in uncached input tokens. Without rules every token of the prompt costs 1.

    output  price of a token of the answer without rules; with rules theirs counts
    """
    if rules is None:
        return usage.prompt + usage.output * output
    return usage.read * rules.read + usage.written * rules.write + usage.plain + usage.output * rules.output


def conversation(turns, prefix, question, answer, gap):
    """Requests of a conversation that sends everything so far with each question.

    prefix    tokens before the first question (system text, tools, documents)
    question, answer  tokens of each
    gap       seconds from one request to the next
    Raises ValueError for fewer than 0 turns.
    """
    if turns < 0:
        raise ValueError(f"turns is {turns}: give 0 or more")
    parts, requests = (("prefix", prefix),), []
    for turn in range(turns):
        parts += ((f"question {turn}", question),)
        requests.append(Request(turn * gap, parts, answer))
        parts += ((f"answer {turn}", answer),)
    return requests


def read_per_request(order, parts):
    """Tokens of a prompt in this order that are the same as in the request before, on average.

    parts  {name: (tokens, probability that it changes from one request to the next)}, independent
    """
    still, tokens = 1.0, 0.0
    for name in order:
        length, changes = parts[name]
        still *= 1 - changes
        tokens += still * length
    return tokens


def openai_fields(usage):
    """The usage as the Chat Completions API reports it: cached tokens are part of prompt_tokens."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.read},
    }


def anthropic_fields(usage):
    """The usage as the Messages API reports it: input_tokens are only those neither read nor written."""
    return {
        "input_tokens": usage.plain,
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.read,
        "output_tokens": usage.output,
    }
