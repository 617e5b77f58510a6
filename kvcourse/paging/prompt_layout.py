"""In which order should the parts of a prompt stand? Requests sent through a `BlockManager`, and why a block
missed. Token ids are made up, one for each token of each text: which tokens agree is all that matters."""

from dataclasses import dataclass

from kvcourse.arguments import count
from kvcourse.paging.block_manager import BlockManager


@dataclass(frozen=True)
class Request:
    """A prompt, and what keeps it apart from others with the same tokens."""

    token_ids: list
    salt: object = None
    adapter: object = None


@dataclass(frozen=True)
class Part:
    """A piece of every prompt: `tokens` long, the same text each time or another one in each request."""

    name: str
    tokens: int
    changes: bool = False


@dataclass(frozen=True)
class Visit:
    """What one request found.

    tokens    of its prompt
    hit       … of which were cached
    miss      the first token that is not, always below `tokens`
    part      the name of the part that `miss` lies in
    reason    why the block of `miss` was not found, see `why_missed`
    """

    tokens: int
    hit: int
    miss: int
    part: str
    reason: str


def send(manager, request):
    """A request without an answer: allocate, commit what was not cached, free. Returns its cached tokens.

    Raises OutOfBlocks when the pool is smaller than the prompt.
    """
    seq = manager.allocate(request.token_ids, salt=request.salt, adapter=request.adapter)
    hit = seq.num_cached_tokens
    manager.commit(seq, request.token_ids[hit:])
    manager.free(seq)
    return hit


def shared_tokens(first, second):
    """How many tokens two lists agree in from the front."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def why_missed(request, hit, earlier, block_size=16):
    """Why no more than `hit` tokens of a request were cached, in one phrase.

    earlier   the requests before it, oldest first

    Looks for the reason in this order: nothing to compare with; another salt or adapter; evicted (an
    earlier request had the block); the last token is always computed; the prompt, or the earlier one, ends
    within the block; the tokens differ.
    """
    ids, apart = request.token_ids, (request.salt, request.adapter)
    if not earlier:
        return "nothing was cached yet"
    alike = [other.token_ids for other in earlier if (other.salt, other.adapter) == apart]
    best = max(alike, key=lambda other: shared_tokens(ids, other), default=[])
    shared = shared_tokens(ids, best)
    foreign = [other for other in earlier if shared_tokens(ids, other.token_ids) >= hit + block_size]
    if shared < hit + block_size and foreign:
        return "another adapter" if foreign[-1].adapter != request.adapter else "another salt"
    if hit < min(shared, len(ids) - 1) // block_size * block_size:
        return "evicted"
    if len(ids) < block_size:
        return "a prompt shorter than one block"
    if shared == len(ids):
        whole = len(ids) % block_size == 0
        return "the last token is always computed" if whole else "the last block is not full"
    if shared == len(best):
        return f"the earlier prompt ends at token {shared:,}"
    phrase = f"first difference at token {shared:,}"
    return phrase + (", so the shared beginning is shorter than one block" if 0 < shared < block_size else "")


def visits(parts, num_requests=3, others=0, other_tokens=1000, num_blocks=800, block_size=16):
    """Send `num_requests` prompts made of these parts, in this order, and say what each one found.

    parts         sequence of Part; a changing one has another text in each request
    others        prompts of strangers, `other_tokens` long, that come between two of ours
    num_blocks    blocks of the pool they all share

    Returns a list of Visit. Raises OutOfBlocks for a prompt that the pool cannot hold, ValueError or
    TypeError for sizes below 1 (`others`: below 0).
    """
    num_requests, others = count(num_requests, "num_requests"), count(others, "others", least=0)
    manager, text = BlockManager(num_blocks, block_size), _Texts()
    earlier, found = [], []
    for number in range(num_requests):
        versions = [number if part.changes else 0 for part in parts]
        pieces = [text(part.name, v, part.tokens) for part, v in zip(parts, versions, strict=True)]
        request = Request([token for piece in pieces for token in piece])
        hit = send(manager, request)
        reason = why_missed(request, hit, earlier, block_size)
        found.append(
            Visit(len(request.token_ids), hit, *_place(parts, request, earlier, hit, reason), reason)
        )
        earlier.append(request)
        for other in range(others):
            send(manager, Request(text("stranger", (number, other), other_tokens)))
    return found


def _place(parts, request, earlier, hit, reason):
    """The token that decides about the first missing block, and the name of its part."""
    token = hit
    if reason.startswith("first difference"):
        token = max(shared_tokens(request.token_ids, other.token_ids) for other in earlier)
    stop = 0
    for part in parts:
        stop += part.tokens
        if token < stop:
            return token, part.name
    raise ValueError(f"token {token} is outside a prompt of {stop} tokens: give parts that hold tokens")


class _Texts:
    """Made-up token ids: a text is a name, a version and a length; it gets the same ids, two share none."""

    def __init__(self):
        self._starts, self._next = {}, 0

    def __call__(self, name, version, tokens):
        key = name, version, tokens
        if key not in self._starts:
            self._starts[key] = self._next
            self._next += count(tokens, f"tokens of {name}")
        return list(range(self._starts[key], self._starts[key] + tokens))
