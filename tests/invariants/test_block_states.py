"""BlockManager and RadixTree under operations drawn at random, beside models that hold the contents.

`block_contents.Contents` compares each answer of the manager: hits, tables, copies, the free queue, what a
sequence reads through its table, and that a refused call changes nothing.
"""

import random

import pytest
from block_contents import Contents
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcourse.paging import BlockManager, RadixTree

HASHERS = {
    "SHA-256": None,
    "all collide": lambda parent, tokens, salt, adapter: 0,
    "many collide": lambda parent, tokens, salt, adapter: sum(tokens) % 3,
    "no parent": lambda parent, tokens, salt, adapter: (tokens, salt, adapter),
    "no salt": lambda parent, tokens, salt, adapter: (parent, tokens, adapter),
    "no adapter": lambda parent, tokens, salt, adapter: (parent, tokens, salt),
}
LABELS = st.sampled_from([None, None, None, "a", b"a", 1, "1"])  # of a salt or an adapter
TOKENS = st.integers(0, 2)


class Operations(RuleBasedStateMachine):
    """All operations on a pool of few and small blocks, with few different tokens, so that much is shared."""

    @initialize(
        num_blocks=st.integers(1, 12),
        size=st.integers(1, 4),
        hasher=st.sampled_from(["SHA-256", *HASHERS]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def make(self, num_blocks, size, hasher, caching):
        manager = BlockManager(num_blocks, size, prefix_caching=caching, hasher=HASHERS[hasher])
        self.contents = Contents(manager, exact=hasher == "SHA-256" or not caching)

    def some(self, data):
        return data.draw(st.sampled_from(self.contents.sequences), "sequence")

    @rule(ids=st.lists(TOKENS, max_size=14), salt=LABELS, adapter=LABELS)
    def allocate(self, ids, salt, adapter):
        self.contents.allocate(ids, salt, adapter)

    @rule(ids=st.lists(TOKENS, max_size=14), salt=LABELS, adapter=LABELS, free=st.booleans())
    def compute_a_prompt(self, ids, salt, adapter, free):
        seq = self.contents.allocate(ids, salt, adapter)
        if seq is not None:
            self.contents.commit(seq, ids[seq.num_tokens :])
            if free:
                self.contents.free(seq)

    @precondition(lambda self: self.contents.sequences)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=3))
    def ask_for_the_same_again(self, data, more):
        seq = self.some(data)
        ids = [0 if token is None else token for token in seq.token_ids] + more
        other = data.draw(st.sampled_from(["same", "salt", "adapter"]), "what differs")
        salt = "another" if other == "salt" else seq.salt
        adapter = "another" if other == "adapter" else seq.adapter
        again = self.contents.allocate(ids, salt, adapter)
        assert again is None or other == "same" or again.num_cached_tokens == 0

    @precondition(lambda self: self.contents.sequences)
    @rule(data=st.data(), n=st.sampled_from([1, 1, 1, 2, 5]), tokens=st.lists(TOKENS | st.none(), max_size=5))
    def append_and_commit(self, data, n, tokens):
        seq = self.some(data)
        if self.contents.append(seq, n):
            assert self.contents.commit(seq, tokens[:n])

    @precondition(lambda self: self.contents.sequences)
    @rule(data=st.data(), n=st.integers(1, 30))
    def append(self, data, n):
        self.contents.append(self.some(data), n)

    @precondition(lambda self: self.contents.sequences)
    @rule(data=st.data(), tokens=st.lists(TOKENS, max_size=6))
    def commit_what_may_have_no_room(self, data, tokens):
        self.contents.commit(self.some(data), tokens)

    @precondition(lambda self: self.contents.sequences)
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data, share):
        seq = self.some(data)
        self.contents.truncate(seq, round(share * seq.num_tokens))

    @precondition(lambda self: 0 < len(self.contents.sequences) < 12)
    @rule(data=st.data())
    def fork(self, data):
        self.contents.fork(self.some(data))

    @precondition(lambda self: self.contents.sequences)
    @rule(data=st.data())
    def free(self, data):
        self.contents.free(self.some(data))

    @precondition(lambda self: self.contents.sequences)
    @rule(data=st.data())
    def refused(self, data):
        seq, manager, refused = self.some(data), self.contents.manager, self.contents.refused
        refused(ValueError, manager.truncate, seq, seq.num_tokens + 1)
        refused(ValueError, manager.truncate, seq, -1)
        refused(ValueError, manager.append_slots, seq, 0)
        refused(ValueError, manager.slot_mapping, seq, 0, len(seq.block_table) * manager.block_size + 1)
        refused(TypeError, manager.commit, seq, ["one"])
        refused(ValueError, manager.commit, seq, [-1])
        refused(TypeError, manager.allocate, [1, None])
        refused(TypeError, manager.allocate, [1], ["a list as a salt"])
        refused(ValueError, BlockManager(1).free, seq)

    @invariant()
    def all_holds(self):
        if hasattr(self, "contents"):
            self.contents.check()

    def teardown(self):
        if hasattr(self, "contents"):
            for seq in list(self.contents.sequences):
                self.contents.free(seq)
            self.contents.check()
            assert self.contents.manager.num_free == self.contents.manager.num_blocks


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=150, stateful_step_count=40)


class Beginnings:
    """A radix tree beside a table of all its prompts' beginnings; each operation is compared."""

    def __init__(self, size):
        self.tree, self.size = RadixTree(size), size
        self.known = {}  # (extra key, tokens up to the end of a page) -> page
        self.locked = []  # (extra key, tokens, node)
        self.next_page = 0

    def beginnings(self, ids, extra_key):
        """The names of all whole pages of `ids`."""
        return [(extra_key, tuple(ids[:end])) for end in range(self.size, len(ids) + 1, self.size)]

    def match(self, ids, extra_key):
        pages, node = self.tree.match(ids, extra_key)
        expected = []
        for name in self.beginnings(ids, extra_key):
            if name not in self.known:
                break
            expected.append(self.known[name])
        assert pages == expected and node.pages == pages[len(pages) - len(node.pages) :]
        return pages, node

    def insert(self, ids, extra_key):
        names = self.beginnings(ids, extra_key)
        pages = range(self.next_page, self.next_page + len(names))
        self.next_page += len(names)
        there = sum(name in self.known for name in names)
        assert self.tree.insert(ids, pages, extra_key) == there * self.size
        self.known.update(zip(names[there:], pages[there:], strict=True))

    def lock(self, ids, extra_key):
        pages, node = self.match(ids, extra_key)
        self.tree.lock(node)
        self.locked.append((extra_key, ids[: len(pages) * self.size], node))

    def unlock(self, number):
        self.tree.unlock(self.locked.pop(number)[2])

    def evict(self, n):
        could, tree = self.tree.num_evictable, self.tree
        leaves = {leaf.pages[-1]: leaf.last_used for leaf in tree.nodes() if not leaf.children}
        gone = tree.evict(n)
        assert min(n, could) <= len(gone) <= could and len(set(gone)) == len(gone)
        assert not set(gone) & set(self.needed().values()), "a locked page was evicted"
        self.known = {name: page for name, page in self.known.items() if page not in gone}
        first = [leaves[page] for page in gone if page in leaves]
        left = [n.last_used for n in tree.nodes() if n.pages[-1] in leaves and not n.lock_ref]
        assert first == sorted(first) and (not first or not left or first[-1] < min(left)), "not the oldest"

    def needed(self):
        """The pages that running requests need."""
        names = (name for key, ids, _ in self.locked for name in self.beginnings(ids, key))
        return {name: self.known[name] for name in names}

    def check(self):
        self.tree.check_invariants()
        assert self.tree.num_pages == len(self.known)
        assert self.tree.num_evictable == len(self.known) - len(self.needed())
        for key, ids in self.known:
            assert len(ids) == self.size or (key, ids[: -self.size]) in self.known, "a page lost its parent"


class TreeOperations(RuleBasedStateMachine):
    """A radix tree, small pages, few different tokens."""

    @initialize(size=st.integers(1, 3))
    def make(self, size):
        self.contents = Beginnings(size)

    def prompt(self, data):
        """(ids, extra key): any, or one that begins as one that is there."""
        if self.contents.known and data.draw(st.booleans(), "known"):
            extra_key, ids = data.draw(st.sampled_from(list(self.contents.known)), "beginning")
            ids = ids[: data.draw(st.integers(0, len(ids)), "cut")]
            return [*ids, *data.draw(st.lists(TOKENS, max_size=5), "more")], extra_key
        keys = st.sampled_from([None, None, "a", 1])
        return data.draw(st.lists(TOKENS, max_size=12), "ids"), data.draw(keys, "extra key")

    @rule(data=st.data())
    def match(self, data):
        self.contents.match(*self.prompt(data))

    @rule(data=st.data())
    def insert(self, data):
        self.contents.insert(*self.prompt(data))

    @rule(data=st.data())
    def lock(self, data):
        self.contents.lock(*self.prompt(data))

    @precondition(lambda self: self.contents.locked)
    @rule(data=st.data())
    def unlock(self, data):
        self.contents.unlock(data.draw(st.integers(0, len(self.contents.locked) - 1), "locked"))

    @rule(n=st.integers(0, 6))
    def evict(self, n):
        self.contents.evict(n)

    @invariant()
    def all_holds(self):
        if hasattr(self, "contents"):
            self.contents.check()


TestTreeOperations = TreeOperations.TestCase
TestTreeOperations.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_many_operations_on_a_tree(size):
    """3,000 operations: locks and evictions on a tree that is never empty for long."""
    chance = random.Random(size)
    contents = Beginnings(size)
    for _ in range(3_000):
        ids = [chance.choice([0, 0, 0, 1]) for _ in range(chance.randrange(8 * size))]
        extra_key = chance.choice([None, None, "a"])
        kind = chance.choice(["insert", "insert", "match", "lock", "unlock", "evict"])
        if kind == "evict":
            contents.evict(chance.randrange(5))
        elif kind != "unlock":
            getattr(contents, kind)(ids, extra_key)
        elif contents.locked:
            contents.unlock(chance.randrange(len(contents.locked)))
        contents.check()


@pytest.mark.parametrize("hasher", ["SHA-256", "many collide"])
def test_many_operations(hasher):
    """50,000 operations each, on a pool that is nearly always full."""
    chance = random.Random(hasher)
    manager = BlockManager(48, 4, hasher=HASHERS[hasher])
    contents = Contents(manager, exact=hasher == "SHA-256")
    kinds = ["prompt"] * 4 + ["decode"] * 8 + ["free"] * 3 + ["fork", "truncate", "refused"]
    done = dict.fromkeys([*kinds, "no room"], 0)
    for step in range(50_000):
        kind, seqs = chance.choice(kinds), contents.sequences
        if kind != "prompt" and not seqs:
            continue
        seq = chance.choice(seqs) if seqs else None
        done[one_operation(contents, chance, kind, seq)] += 1
        if step % 250 == 0:
            contents.check()
    contents.check()
    assert min(done.values()) > 500, done  # nothing that happens only now and then
    assert manager.hits > 2_000 and manager.evictions > 1_000


def one_operation(contents, chance, kind, seq):
    """Do one; returns what it was, or "no room"."""
    if kind == "prompt":
        ids = [chance.randrange(2) for _ in range(chance.randrange(1, 40))]
        ids[:12] = [7] * min(12, len(ids)) if chance.random() < 0.5 else ids[:12]
        new = contents.allocate(ids, chance.choice([None, None, "a"]), chance.choice([None, None, 1]))
        if new is None:
            return "no room"
        contents.commit(new, ids[new.num_tokens :])
    elif kind == "decode":
        n = chance.choice([1, 1, 1, 6])
        tokens = [chance.choice([0, 1, 1, None] if chance.random() < 0.1 else [0, 1]) for _ in range(n)]
        if not contents.append(seq, n):
            return "no room"
        assert contents.commit(seq, tokens[: chance.randrange(n + 1)] if n > 1 else tokens)
    elif kind == "truncate":
        contents.truncate(seq, chance.randrange(seq.num_tokens + 1))
    elif kind == "refused":
        contents.refused(ValueError, contents.manager.truncate, seq, seq.num_tokens + 1)
        contents.commit(seq, [1, 0] * chance.randrange(1, 4))  # there may be room, or the block be shared
    else:
        getattr(contents, kind)(seq)
    return kind
