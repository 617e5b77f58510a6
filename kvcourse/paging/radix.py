"""`RadixTree`: prompts' beginnings in a tree, as SGLang keeps them. Token ids and page ids, no tensors.

The other way to find a cached prefix. The block manager names every block by a hash of all tokens up to its
end and looks names up in a table. Here the tokens themselves lead the way: an edge is a run of pages, and a
prompt is followed from the root for as long as its tokens agree. After SGLang's `RadixCache`
(python/sglang/srt/mem_cache/radix_cache.py; Zheng et al. 2024, "SGLang: Efficient Execution of Structured
Language Model Programs", section 3).

Same hits as `BlockManager` with page_size = block_size, for requests one after the other, each asked for with
at most len − 1 tokens and inserted whole: always, as long as nothing is evicted. With eviction the hits are
still the same where both evict page by page in the same order, which takes all of this:

- every node holds one page (prompts inserted page by page, as a prefill in chunks of one page does), because
  the tree evicts a whole leaf and the manager one block;
- every block that a request gives back is findable: lengths are whole pages, and no request's tokens are all
  in the cache. Otherwise the manager gets blank blocks back (a partly filled last one, a second copy of the
  last page, which at most len − 1 forces it to compute again). It queues them after the kept ones and so
  takes kept blocks while blank ones are free; the tree's owner takes free pages first.

Other differences: `match` makes what it meets the newest, also the rest of a node that agrees in its first
page only, and splits nodes, while `BlockManager.lookup` changes nothing; the manager can find an answer's
blocks while the answer is still being written, SGLang inserts an answer when it is finished; the tree
compares tokens and has no collisions; SGLang's page is one token (`--page-size`, unless an attention kernel
needs larger ones), so that 1,800 equal tokens are 1,800 reused, where blocks of 16 reuse 1,792.
"""

import heapq

from kvcourse.arguments import count
from kvcourse.paging.prefix import checked_ids


class Node:
    """A run of pages that every prompt through it shares. Read it; only the tree changes it.

    key        for each page the tuple of its token ids; the first one after the root comes with extra_key
    pages      the page ids, as many
    children   first entry of a child's key → child
    lock_ref   running requests that need this node, here or farther down
    last_used  of two nodes, the larger one was used later
    """

    __slots__ = ("key", "pages", "parent", "children", "lock_ref", "last_used")

    def __init__(self, key, pages, parent):
        self.key, self.pages, self.parent = key, pages, parent
        self.children = {}
        self.lock_ref = self.last_used = 0


class RadixTree:
    """Which pages hold the keys and values of which tokens. It owns the pages that were inserted.

    page_size  tokens of a page. Only whole pages are kept and found.

        pages, node = tree.match(prompt[:-1])       # the last token is computed: its logits are needed
        tree.lock(node)                             # eviction passes these pages by
        # … compute the rest into pages of your own; tree.evict(n) gives some back when none are free
        there = tree.insert(prompt, pages + own)    # tokens that the tree had already, in its own pages
        # … your own pages of those are duplicates: give them back
        tree.unlock(node)

    Raises TypeError or ValueError for a page_size that is no whole number of at least 1.
    """

    def __init__(self, page_size=16):
        self.page_size = count(page_size, "page_size")
        self.root = Node([], [], None)
        self._owned = set()  # page ids in the tree
        self._leaves = set()
        self._num_locked = 0  # pages
        self._clock = 0

    def match(self, ids, extra_key=None):
        """The longest cached beginning: (page ids, node where it ends); ([], root) for none.

        All of `ids` may match, so give prompt[:-1] for a prompt whose next token is wanted. The nodes on
        the way become the newest ones. A node that agrees only in its first pages is split there.
        Prompts with another extra_key (a salt, an adapter: anything hashable; 1, 1.0 and True are three keys)
        never match.
        Raises TypeError or ValueError for token ids of another kind, TypeError for an extra_key without hash.
        """
        path = self._walk(self._key(ids, extra_key))
        return [page for node in path for page in node.pages], path[-1] if path else self.root

    def insert(self, ids, pages, extra_key=None):
        """These pages hold these tokens; returns how many tokens the tree had already.

        pages  one page id for each whole page of ids; what is left of ids is ignored
        For the tokens that were there the tree keeps its own pages: those of the caller that differ are
        duplicates, and stay the caller's. The others now belong to the tree.
        Raises ValueError for another number of pages and for a new page that is in the tree already,
        TypeError or ValueError as `match`. The tree is as before then.
        """
        key = self._key(ids, extra_key)
        pages = [count(page, "page", least=0) for page in pages]
        if len(pages) != len(key):
            raise ValueError(
                f"{len(pages)} pages for {len(key)} whole pages of {self.page_size} tokens: give one for each"
            )
        path, depth, _ = self._find(key)
        there = [page for node in path for page in node.pages][:depth]
        foreign = (page for i, page in enumerate(pages) if page in self._owned and there[i : i + 1] != [page])
        twice = next(foreign, None) if len(set(pages)) == len(pages) else _first_repeated(pages)
        if twice is not None:
            raise ValueError(
                f"page {twice} is given for two places in the tree: a page holds one place's tokens"
            )
        path = self._walk(key)
        if depth < len(key):
            parent = path[-1] if path else self.root
            leaf = parent.children[key[depth]] = Node(key[depth:], pages[depth:], parent)
            self._touch(leaf)
            self._owned.update(leaf.pages)
            self._leaves.discard(parent)
            self._leaves.add(leaf)
        return depth * self.page_size

    def lock(self, node):
        """A request runs on this node: it and all above it cannot be evicted until `unlock`.

        Raises ValueError for a node that is not, or no longer, in the tree.
        """
        self._check_present(node)
        for above in self._path(node):
            self._num_locked += len(above.pages) if above.lock_ref == 0 else 0
            above.lock_ref += 1

    def unlock(self, node):
        """Takes one `lock(node)` back. Raises ValueError for a node that is not locked."""
        self._check_present(node)
        held_below = sum(child.lock_ref for child in node.children.values())
        if node is not self.root and node.lock_ref <= held_below:
            raise ValueError("this node is not locked: unlock() once for each lock()")
        for above in self._path(node):
            above.lock_ref -= 1
            self._num_locked -= len(above.pages) if above.lock_ref == 0 else 0

    def evict(self, n):
        """Throw out leaves, the one used longest ago first, until n pages or more are free; returns these.

        A leaf goes as a whole, so it may be more than n; it is fewer when all others are locked. The
        pages belong to the caller again, each leaf's last one first.
        Raises TypeError or ValueError unless n is a whole number of at least 0.
        """
        n, given_back = count(n, "n", least=0), []
        heap = [(leaf.last_used, leaf) for leaf in self._leaves if leaf.lock_ref == 0]  # no two are equal
        heapq.heapify(heap)
        while heap and len(given_back) < n:
            _, leaf = heapq.heappop(heap)
            parent = leaf.parent
            self._remove(leaf)
            given_back += reversed(leaf.pages)
            if parent in self._leaves and parent.lock_ref == 0:
                heapq.heappush(heap, (parent.last_used, parent))
        return given_back

    @property
    def num_pages(self):
        """Pages in the tree."""
        return len(self._owned)

    @property
    def num_evictable(self):
        """Pages in the tree that no running request needs."""
        return len(self._owned) - self._num_locked

    def nodes(self):
        """All nodes but the root, each before those under it."""
        found, at = [], [self.root]
        while at:
            children = list(at.pop().children.values())
            found += children
            at += children
        return found

    def check_invariants(self):
        """Raise AssertionError unless nodes, pages, locks and leaves agree. For tests; reads everything."""
        nodes = self.nodes()
        for node in nodes:
            assert node.parent.children.get(node.key[0]) is node, "a child is listed under another key"
            assert len(node.key) == len(node.pages) > 0, "a node without pages, or pages without tokens"
            first = node.key[0][1] if node.parent is self.root else node.key[0]
            for tokens in [first, *node.key[1:]]:
                assert len(tokens) == self.page_size, "a page is not full"
            below = sum(child.lock_ref for child in node.children.values())
            assert node.lock_ref >= below, "a locked node under one that can be evicted"
        pages = [page for node in nodes for page in node.pages]
        assert len(pages) == len(set(pages)) and set(pages) == self._owned, "a page stands twice, or is lost"
        assert self._leaves == {node for node in nodes if not node.children}, "leaves are not the leaves"
        assert self._num_locked == sum(len(node.pages) for node in nodes if node.lock_ref), "locked pages"

    # --- inside -------------------------------------------------------------------------

    def _key(self, ids, extra_key):
        """The whole pages of `ids` as tuples, the first one together with extra_key and its type."""
        try:
            hash(extra_key)
        except TypeError:
            raise TypeError(f"extra_key is {extra_key!r}: give something hashable, such as a str") from None
        ids, size = checked_ids(ids), self.page_size
        key = [tuple(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
        if key:
            key[0] = (type(extra_key), extra_key), key[0]
        return key

    def _find(self, key):
        """(nodes down along `key`, pages that agree in all of them, pages that agree in the last one)."""
        path, depth, agree, node = [], 0, 0, self.root
        while depth < len(key) and (node := node.children.get(key[depth])) is not None:
            agree = _agreement(node.key, key, depth)
            path.append(node)
            depth += agree
            if agree < len(node.key):
                break
        return path, depth, agree

    def _walk(self, key):
        """The nodes that hold the beginning of `key`: made the newest, the last one split where it ends."""
        path, _, agree = self._find(key)
        for node in path:
            self._touch(node)
        if path and agree < len(path[-1].key):
            path[-1] = self._split(path[-1], agree)
        return path

    def _split(self, node, at):
        """A new node above `node` takes its first `at` pages, and its locks; returns the new one."""
        upper = Node(node.key[:at], node.pages[:at], node.parent)
        upper.lock_ref = node.lock_ref
        node.parent.children[node.key[0]] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[at:], upper
        upper.children[node.key[0]] = node
        self._touch(upper)
        return upper

    def _remove(self, leaf):
        del leaf.parent.children[leaf.key[0]]
        self._leaves.remove(leaf)
        self._owned.difference_update(leaf.pages)
        if not leaf.parent.children and leaf.parent is not self.root:
            self._leaves.add(leaf.parent)
        leaf.parent = None

    def _touch(self, node):
        self._clock += 1
        node.last_used = self._clock

    def _path(self, node):
        """The node and all above it, without the root."""
        while node is not self.root:
            yield node
            node = node.parent

    def _check_present(self, node):
        top = node
        while isinstance(top, Node) and top is not self.root:
            top = top.parent
        if top is not self.root:
            raise ValueError("this node was evicted, or belongs to another tree: match() again")


def _agreement(run, key, start):
    """How many entries of `run` are those of `key` from `start` on."""
    most = min(len(run), len(key) - start)
    return next((i for i in range(most) if run[i] != key[start + i]), most)


def _first_repeated(pages):
    return next(page for i, page in enumerate(pages) if page in pages[:i])
