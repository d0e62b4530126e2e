"""The prefix tree and its keys."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.core.errors import InternalError
from camshaft.executor.kv import prefix
from camshaft.executor.kv.prefix import PrefixTree, chain_key, scope_key, shared_tokens
from camshaft.executor.messages import PrefixScope

PAGE = 4
SCOPE = PrefixScope(model="m")
CONTENTS = st.lists(st.integers(0, 300), min_size=1, max_size=PAGE)


def content(*tokens):
    return np.array(tokens, "<i4").tobytes()


def test_keys_chain_over_little_endian_token_ids():
    root = scope_key(SCOPE)
    first = hashlib.sha256(root + bytes((1, 0, 0, 0, 0, 1, 0, 0))).digest()
    assert chain_key(root, content(1, 256)) == first
    assert chain_key(first, content(7)) == hashlib.sha256(first + b"\x07\x00\x00\x00").digest()


def test_keys_of_scopes_are_typed_and_length_prefixed():
    texts = ["", "1", "12", "2", "s", "\x00", "a\x00"]
    scopes = [PrefixScope(model=model, adapter=adapter, salt=salt)
              for model, adapter, salt in itertools.product(texts, (0, 1, 2, 12), texts)]
    assert len({scope_key(scope) for scope in scopes}) == len(scopes)


def test_keys_do_not_change_between_processes():
    assert scope_key(PrefixScope(model="m", adapter=3, salt="x")).hex()[:16] == "468afd765b3ef512"


@given(CONTENTS, CONTENTS)
@settings(max_examples=50, deadline=None)
def test_shared_tokens_counts_equal_leading_tokens(left, right):
    expected = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
    assert shared_tokens(content(*left), content(*right)) == expected


@given(st.lists(CONTENTS, min_size=1, max_size=12, unique_by=tuple), st.lists(st.integers(0, 300), max_size=PAGE))
@settings(max_examples=100, deadline=None)
def test_the_closest_child_is_the_best_of_all(children, wanted):
    tree = PrefixTree(PAGE)
    root = tree.open_root(SCOPE)
    for page, tokens in enumerate(children, 1):
        tree.insert(root, content(*tokens), [page])
    found, shared = tree.closest_child(root, content(*wanted))
    assert shared == max(shared_tokens(content(*tokens), content(*wanted)) for tokens in children)
    assert (found is None) == (shared == 0)
    assert found is None or shared_tokens(found.content, content(*wanted)) == shared


def test_walk_follows_whole_pages_only():
    tree = PrefixTree(PAGE)
    root = tree.open_root(SCOPE)
    first = tree.insert(root, content(1, 2, 3, 4), [1])
    second = tree.insert(first, content(5, 6, 7, 8), [2])
    assert tree.walk(root, content(1, 2, 3, 4, 5, 6, 7, 8, 9)) == [first, second]
    assert tree.walk(root, content(1, 2, 3, 4, 5, 6, 7)) == [first]
    assert tree.walk(root, content(1, 2, 3, 9, 5, 6, 7, 8)) == []
    assert tree.walk(root, b"") == []


def test_a_root_goes_with_its_last_page():
    tree = PrefixTree(PAGE)
    first = tree.insert(tree.open_root(SCOPE), content(1, 2, 3, 4), [1])
    second = tree.insert(first, content(1), [2])
    assert tree.remove(second) is first
    assert not tree.holds(second)
    assert tree.remove(first) is None
    assert tree.root(SCOPE) is None
    assert len(tree) == 0


def test_only_leaves_are_removed_and_only_once():
    tree = PrefixTree(PAGE)
    root = tree.open_root(SCOPE)
    first = tree.insert(root, content(1, 2, 3, 4), [1])
    leaf = tree.insert(first, content(1), [2])
    for wrong in (root, first):
        with pytest.raises(InternalError):
            tree.remove(wrong)
    tree.remove(leaf)
    with pytest.raises(InternalError):
        tree.remove(leaf)
    assert tree.insert(leaf, content(2), [3]) is None, "its parent is gone"
    assert len(tree) == 1


def test_one_page_is_never_there_twice():
    tree = PrefixTree(PAGE)
    root = tree.open_root(SCOPE)
    node = tree.insert(root, content(1, 2), [1])
    assert tree.insert(root, content(1, 2), [2]) is None
    assert root.children == [node]
    assert node.pages == [1]


def test_a_hit_is_compared_so_that_equal_hashes_are_never_taken_for_equal_tokens(monkeypatch):
    monkeypatch.setattr(prefix, "chain_key", lambda parent_key, content: b"always the same")
    tree = PrefixTree(PAGE)
    root = tree.open_root(SCOPE)
    node = tree.insert(root, content(1, 2, 3, 4), [1])
    assert tree.child(root, content(1, 2, 3, 4)) is node
    with pytest.raises(InternalError, match="same SHA-256"):
        tree.child(root, content(9, 9, 9, 9))
    with pytest.raises(InternalError, match="same SHA-256"):
        tree.child(tree.open_root(PrefixScope(model="other")), content(1, 2, 3, 4))
