"""RadixTree by hand: match, insert, split, lock, evict; its errors; its hits beside the block manager's."""

import random

import pytest

from kvcourse.paging import BlockManager
from kvcourse.paging.radix import RadixTree


@pytest.fixture
def tree():
    """Pages of two tokens: 1 2 3 4 in pages 10 and 11, and 1 2 5 6 in pages 10 and 12."""
    tree = RadixTree(page_size=2)
    assert tree.insert([1, 2, 3, 4], [10, 11]) == 0
    assert tree.insert([1, 2, 5, 6], [20, 12]) == 2  # page 20 is a duplicate of page 10
    tree.check_invariants()
    return tree


def shape(node):
    """A subtree as nested tuples: (pages, lock_ref, children in the order of their pages)."""
    children = sorted(node.children.values(), key=lambda child: child.pages)
    return node.pages, node.lock_ref, [shape(child) for child in children]


# --- match and insert ------------------------------------------------------------------


def test_two_prompts_share_a_node_that_was_split_off(tree):
    assert shape(tree.root) == ([], 0, [([10], 0, [([11], 0, []), ([12], 0, [])])])
    assert tree.num_pages == tree.num_evictable == 3


@pytest.mark.parametrize(
    "ids, pages",
    [
        ([1, 2, 3, 4], [10, 11]),
        ([1, 2, 5, 6, 7, 8], [10, 12]),
        ([1, 2, 3, 4, 9], [10, 11]),  # a page that is not full is not looked for
        ([1, 2, 3], [10]),
        ([1, 2, 4, 4], [10]),
        ([1], []),
        ([], []),
        ([2, 1, 3, 4], []),
        ([3, 4], []),  # the same tokens at another place
    ],
)
def test_match(tree, ids, pages):
    found, node = tree.match(ids)
    assert found == pages
    assert node.pages == pages[-1:] and (node is tree.root) == (not pages)
    tree.check_invariants()


def test_match_splits_where_the_agreement_ends():
    tree = RadixTree(page_size=1)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    assert len(tree.nodes()) == 1
    pages, node = tree.match([1, 2, 9])
    assert pages == node.pages == [0, 1]
    assert shape(tree.root) == ([], 0, [([0, 1], 0, [([2, 3], 0, [])])])
    assert tree.match([1, 2, 3, 4])[0] == [0, 1, 2, 3]
    tree.check_invariants()


def test_insert_says_what_was_there_and_keeps_its_own_pages():
    tree = RadixTree(page_size=2)
    assert tree.insert([1, 2, 3, 4, 5], [0, 1]) == 0  # the fifth token fills no page
    assert tree.insert([1, 2, 3, 4], [0, 1]) == 4
    assert tree.insert([1, 2, 3, 4, 5, 6], [7, 8, 9]) == 4
    assert tree.match([1, 2, 3, 4, 5, 6])[0] == [0, 1, 9]
    assert tree.insert([], []) == 0
    assert tree.num_pages == 3


def test_a_page_of_one_token_matches_to_the_token_and_one_of_16_to_the_block():
    """1,800 equal tokens: SGLang's page of one token reuses 1,800, blocks of 16 reuse 1,792."""
    shared = list(range(1800))
    for size, hit in ((1, 1800), (16, 1792)):
        tree = RadixTree(size)
        prompt = [*shared, *[1] * 200]
        tree.insert(prompt, range(len(prompt) // size))
        assert len(tree.match([*shared, *[2] * 200])[0]) * size == hit


def test_prompts_with_another_extra_key_never_match(tree):
    for key in ("a salt", 0, b"a salt", ("salt", "adapter")):
        assert tree.match([1, 2, 3, 4], extra_key=key) == ([], tree.root)
    tree.insert([1, 2], [50], extra_key=1)
    assert tree.match([1, 2], True)[0] == tree.match([1, 2], 1.0)[0] == [] != tree.match([1, 2], 1)[0]
    assert tree.insert([1, 2, 3, 4], [30, 31], extra_key="a salt") == 0
    assert tree.match([1, 2, 3, 4], extra_key="a salt")[0] == [30, 31]
    assert tree.match([1, 2, 3, 4])[0] == [10, 11]
    tree.check_invariants()


# --- locks and eviction ------------------------------------------------------------------


def test_the_leaf_used_longest_ago_goes_first_and_its_parent_after_it(tree):
    tree.match([1, 2, 3, 4])  # page 11 is newer than page 12 now
    assert tree.evict(1) == [12]
    assert tree.evict(2) == [11, 10]
    assert tree.evict(1) == [] and tree.num_pages == 0
    tree.check_invariants()


def test_a_leaf_goes_as_a_whole_its_last_page_first():
    tree = RadixTree(page_size=1)
    tree.insert([1, 2, 3], [0, 1, 2])
    tree.insert([7, 8], [5, 6])
    assert tree.evict(0) == []
    assert tree.evict(1) == [2, 1, 0]
    tree.check_invariants()


def test_locked_nodes_and_all_above_them_stay(tree):
    node = tree.match([1, 2, 3, 4])[1]
    tree.lock(node)
    assert tree.num_evictable == 1
    assert tree.evict(3) == [12]  # fewer than asked for: the others are locked
    tree.check_invariants()
    tree.unlock(node)
    assert tree.num_evictable == 2 and tree.evict(3) == [11, 10]


def test_a_locked_node_stays_when_all_below_it_went(tree):
    node = tree.match([1, 2])[1]
    tree.lock(node)
    assert tree.evict(3) == [11, 12]
    assert tree.match([1, 2, 3, 4])[0] == [10] and tree.evict(1) == []
    tree.unlock(node)
    assert tree.evict(1) == [10]


def test_a_split_keeps_the_lock_on_both_parts():
    tree = RadixTree(page_size=1)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    whole = tree.match([1, 2, 3, 4])[1]
    tree.lock(whole)
    tree.insert([1, 2, 9], [0, 1, 4])
    assert shape(tree.root) == ([], 0, [([0, 1], 1, [([2, 3], 1, []), ([4], 0, [])])])
    assert tree.evict(9) == [4]
    tree.unlock(whole)
    tree.check_invariants()
    assert tree.evict(9) == [3, 2, 1, 0]


def test_a_node_that_two_requests_lock_needs_two_unlocks(tree):
    node = tree.match([1, 2])[1]
    tree.lock(node)
    tree.lock(tree.match([1, 2, 3, 4])[1])
    tree.unlock(node)
    assert tree.evict(3) == [12]
    with pytest.raises(ValueError, match="not locked: unlock"):
        tree.unlock(node)  # the lock that is left belongs to the node below
    tree.check_invariants()


def test_the_root_can_be_locked_by_a_request_without_a_hit(tree):
    _, node = tree.match([9, 9])
    tree.lock(node)
    assert tree.num_evictable == 3
    tree.unlock(node)
    tree.check_invariants()


# --- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act, error, words",
    [
        (lambda t: RadixTree(0), ValueError, "page_size is 0: give at least 1"),
        (lambda t: RadixTree(1.5), TypeError, "page_size is 1.5: give a whole number"),
        (lambda t: t.match("text"), TypeError, "token ids are 'text'"),
        (lambda t: t.match([-1, 0]), ValueError, "token id -1 is outside"),
        (lambda t: t.match([1], []), TypeError, r"extra_key is \[\]: give something hashable"),
        (lambda t: t.insert([1, 2, 3, 4], [10]), ValueError, "1 pages for 2 whole pages of 2 tokens"),
        (lambda t: t.insert([1, 2, 3], [10, 11]), ValueError, "2 pages for 1 whole pages of 2 tokens"),
        (lambda t: t.insert([1, 2, 8, 8], [10, 11]), ValueError, "page 11 is given for two places"),
        (lambda t: t.insert([1, 2, 8, 8], [12, 40]), ValueError, "page 12 is given for two places"),
        (lambda t: t.insert([8, 8, 8, 8], [40, 40]), ValueError, "page 40 is given for two places"),
        (lambda t: t.insert([8, 8], [-1]), ValueError, "page is -1: give at least 0"),
        (lambda t: t.insert([8, 8], ["a"]), TypeError, "page is 'a': give a whole number"),
        (lambda t: t.unlock(t.match([1, 2])[1]), ValueError, "this node is not locked"),
        (lambda t: t.lock(None), ValueError, "this node was evicted, or belongs to another tree"),
        (
            lambda t: t.lock(RadixTree(2).root),
            ValueError,
            "this node was evicted, or belongs to another tree",
        ),
        (lambda t: t.evict(-1), ValueError, "n is -1: give at least 0"),
        (lambda t: t.evict("all"), TypeError, "n is 'all': give a whole number"),
    ],
)
def test_errors_are_one_line_and_change_nothing(tree, act, error, words):
    tree.match([1, 2])  # so that a look at this node splits nothing
    before = shape(tree.root), tree.num_pages, tree.num_evictable
    with pytest.raises(error, match=words) as caught:
        act(tree)
    assert "\n" not in str(caught.value)
    assert (shape(tree.root), tree.num_pages, tree.num_evictable) == before
    tree.check_invariants()


def test_an_evicted_node_is_refused(tree):
    node = tree.match([1, 2, 3, 4])[1]
    tree.evict(3)
    for act in (tree.lock, tree.unlock):
        with pytest.raises(ValueError, match="this node was evicted"):
            act(node)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.nodes()[0].pages.append(99),
        lambda t: t._owned.add(99),
        lambda t: t._leaves.clear(),
        lambda t: setattr(t.nodes()[-1], "lock_ref", 1),
        lambda t: t.root.children.update(other=t.nodes()[-1]),
        lambda t: t.nodes()[-1].pages.__setitem__(0, 10),
        lambda t: setattr(t.nodes()[-1], "key", [(3,)]),
    ],
)
def test_check_invariants_sees_damage(tree, damage):
    damage(tree)
    with pytest.raises(AssertionError):
        tree.check_invariants()


# --- beside the block manager --------------------------------------------------------------


class Tree:
    """A radix tree with a pool of pages: free ones first, then leaves are evicted. One request at a time."""

    def __init__(self, num_pages, page_size, by_page=False):
        self.num_pages, self.free, self.by_page = num_pages, list(range(num_pages)), by_page
        self.tree = RadixTree(page_size)

    def run(self, ids, salt=None):
        """One request from its beginning to its end: how many of its tokens were found."""
        tree, size = self.tree, self.tree.page_size
        pages, node = tree.match(ids[:-1], salt)
        tree.lock(node)
        needed = -(-len(ids) // size) - len(pages)
        if needed > len(self.free):
            self.free += tree.evict(needed - len(self.free))
        own = [self.free.pop(0) for _ in range(needed)]
        whole = len(ids) // size
        for n in range(1, whole + 1) if self.by_page else [whole]:
            tree.insert(ids[: n * size], (pages + own)[:n], salt)
        kept = tree.match(ids, salt)[0]
        self.free += [page for page in own if page not in kept]  # duplicates, and a page that is not full
        tree.unlock(node)
        assert tree.num_pages + len(self.free) == self.num_pages
        return len(pages) * size

    def lookup(self, ids):
        return self.tree.match(ids[:-1])[0]


class Manager(BlockManager):
    def run(self, ids, salt=None):
        seq = self.allocate(ids, salt=salt)
        hit = seq.num_cached_tokens
        self.commit(seq, ids[hit:])
        self.free(seq)
        return hit


def prompts(seed, n, size, alphabet=3, longest=6, whole=False, fresh=False):
    """n prompts out of few different pages, so that beginnings repeat.

    whole: all lengths are whole pages. fresh: the last page is one that no other prompt has."""
    chance = random.Random(seed)
    parts = [[number] * size for number in range(alphabet)]
    for i in range(n):
        ids = [token for _ in range(chance.randrange(1, longest)) for token in chance.choice(parts)]
        ids += [1000 + i] * size if fresh else []
        yield ids if whole else ids[: len(ids) - chance.randrange(size)]


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_same_hits_as_the_block_manager_without_eviction(size):
    """Any lengths, prompts that are all there, salts: as long as nothing has to go, always the same."""
    tree, manager = Tree(5000, size), Manager(5000, size)
    chance, hits = random.Random(3), 0
    for ids in prompts(1, 1500, size):
        salt = chance.choice([None, "a", "b"])
        hit = tree.run(ids, salt)
        assert hit == manager.run(ids, salt)
        hits += hit
    tree.tree.check_invariants()
    manager.check_invariants()
    assert manager.evictions == 0 and hits > 1000 * size
    assert tree.tree.num_pages == manager.num_kept


@pytest.mark.parametrize("num_pages", [8, 20, 60])
def test_the_same_hits_with_eviction_where_the_order_agrees(num_pages):
    """One page a node, whole pages only, and no prompt is all there: the docstring's conditions."""
    tree, manager = Tree(num_pages, 4, by_page=True), Manager(num_pages, 4)
    hits = 0
    for ids in prompts(2, 2000, 4, whole=True, fresh=True):
        hit = tree.run(ids)
        assert hit == manager.run(ids)
        hits += hit
    assert hits > 1000 and manager.evictions > 1000
    assert all(len(node.pages) == 1 for node in tree.tree.nodes())
    assert tree.tree.num_pages == manager.num_kept == num_pages
    assert sorted(tree.tree.evict(num_pages)) == list(range(num_pages))


@pytest.mark.parametrize(
    "left_out",
    [{"by_page": False}, {"whole": False}, {"fresh": False}],
    ids=["whole leaves", "part pages", "prompts that are all there"],
)
def test_without_one_of_the_conditions_the_hits_differ(left_out):
    rules = {"by_page": True, "whole": True, "fresh": True} | left_out
    tree, manager = Tree(20, 4, rules.pop("by_page")), Manager(20, 4)
    assert any(tree.run(ids) != manager.run(ids) for ids in prompts(2, 2000, 4, **rules))


def test_a_leaf_of_two_pages_goes_as_a_whole_and_a_block_alone():
    """Five pages hold A (two pages) and B (one page); C needs three, one more than are free."""
    a, b, c = [1, 1, 2, 2], [3, 3], [5, 5, 6, 6, 7, 7]
    found = []
    for pool in (Tree(5, 2), Manager(5, 2)):
        for ids in (a, b, c):
            assert pool.run(ids) == 0
        found.append(pool.run([*a[:2], 9]))
    assert found == [0, 2]  # the tree lost all of A, the manager A's last block only


def test_blank_blocks_wait_behind_kept_ones_and_free_pages_do_not():
    """Four blocks, three prompts of a block and a half each, then the first one again."""
    found = []
    for pool in (Tree(4, 2), Manager(4, 2)):
        for token in (1, 2, 3):
            assert pool.run([token, token, 9]) == 0
        found.append(pool.run([1, 1, 9]))
    # The tree keeps one page a prompt, and the fourth serves all the halves. The manager gives the third
    # prompt the two blocks that were given back first: the first one's blank half and its kept block.
    assert found == [2, 0]


def test_a_partial_match_renews_the_rest_of_the_node_in_the_tree_only():
    """Four pages: A (1 1 2 2), then B (3 3), then a prompt that shares A's first page; one page has to go."""
    found = []
    for pool in (Tree(4, 2), Manager(4, 2)):
        for ids in ([1, 1, 2, 2], [3, 3], [1, 1, 8, 8], [4, 4]):
            pool.run(ids)
        found.append((len(pool.lookup([3, 3, 0])), len(pool.lookup([1, 1, 2, 2, 0]))))
    assert found == [(0, 2), (1, 1)]
