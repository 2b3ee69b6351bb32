"""The page pool and the prefix tree against naive models."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.pages import PageError, PagePool
from scheduler.prefix import Path, PrefixTree
from tests.scheduler_fakes import i32

PAGE = 4


def make_tree(pages: int = 16, enabled: bool = True) -> PrefixTree:
    return PrefixTree(PagePool(pages, PAGE), enabled)


def compute(tree: PrefixTree, ids: list[int], salt: str = "", leave: bool = True) -> Path:
    """A row prefills ids and, by default, leaves: its full pages stay cached."""
    path = Path(salt)
    tree.match(path, i32(ids), len(ids) - 1)
    shared = np.array(path.pages, np.int32)
    tree.pool.retain(shared)
    table = np.concatenate([shared, tree.allocate(tree.pool.pages_of(len(ids)) - len(shared))])
    tree.extend(path, i32(ids), table, len(ids) // PAGE)
    if leave:
        tree.release(table)
    return path


def test_a_pool_gives_each_page_once_and_takes_it_back_once() -> None:
    pool = PagePool(8, PAGE)
    first, second = pool.take(3), pool.take(5)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(8))
    with pytest.raises(PageError, match="1 pages wanted, 0 free"):
        pool.take(1)
    pool.push(pool.release(first, distinct=True))
    assert pool.free == 3
    with pytest.raises(PageError, match="released twice"):
        pool.release(first[:1], distinct=True)


def test_rows_that_share_a_page_release_it_together() -> None:
    pool = PagePool(4, PAGE)
    page = pool.take(1)
    pool.retain(page)
    assert pool.release(np.concatenate([page, page]), distinct=False) == page.tolist()


def test_a_match_takes_whole_pages_and_stops_at_the_first_difference() -> None:
    tree = make_tree()
    compute(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for ids, pages in [
        ([1, 2, 3, 4, 5, 6, 7, 8], 2),
        ([1, 2, 3, 4, 5, 6, 7], 1),
        ([1, 2, 3, 4, 0, 6, 7, 8], 1),
        ([0, 2, 3, 4], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], 2),
    ]:
        path = Path("")
        tree.match(path, i32(ids), len(ids))
        assert len(path) == pages, ids


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    """K35: a prompt of exactly two pages, sent again, hits one page only."""
    tree = make_tree()
    ids = list(range(8))
    compute(tree, ids)
    path = Path("")
    tree.match(path, i32(ids), len(ids) - 1)
    assert len(path) == 1


def test_salts_and_a_disabled_tree_share_nothing() -> None:
    tree = make_tree()
    compute(tree, [1, 2, 3, 4, 5], salt="a")
    for salt in ("", "b"):
        path = Path(salt)
        tree.match(path, i32([1, 2, 3, 4, 5]), 4)
        assert not len(path)
    off = make_tree(enabled=False)
    compute(off, [1, 2, 3, 4, 5])
    assert not len(off)
    assert off.pool.free == 16


def test_the_least_recently_used_page_goes_first_and_children_before_parents() -> None:
    tree = make_tree(pages=6)
    old = compute(tree, [1] * 8)
    new = compute(tree, [2] * 8)
    again = compute(tree, [1] * 9)  # uses the old path once more
    assert again.pages == old.pages
    tree.allocate(3)  # two pages are free
    for path, ids, left in [(new, [2] * 8, 1), (old, [1] * 8, 2)]:
        tree.match(path, i32(ids), 8)
        assert len(path) == left
    tree.check()


def test_pages_in_use_and_pinned_pages_are_never_evicted() -> None:
    tree = make_tree(pages=6)
    pinned = compute(tree, [1] * 8)
    tree.pin(pinned)
    compute(tree, [2] * 8, leave=False)
    tree.allocate(2)
    with pytest.raises(PageError):
        tree.allocate(1)
    tree.unpin(pinned)
    tree.allocate(2)
    tree.check()


def test_an_evicted_node_is_noticed_however_its_page_is_used_since() -> None:
    tree = make_tree(pages=4)
    path = compute(tree, [1] * 16)
    compute(tree, [2] * 16)
    assert set(path.pages) == {0, 1, 2, 3}
    tree.match(path, i32([1] * 16), 16)
    assert not len(path)


def test_a_row_that_finds_its_page_entered_by_another_adds_nothing_below_it() -> None:
    """Otherwise its pages would hang below a node that it does not use and that may be evicted first."""
    tree = make_tree()
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    late, late_table = Path(""), tree.allocate(2)
    compute(tree, ids[:4])
    tree.extend(late, i32(ids), late_table, 2)
    assert len(tree) == 1
    tree.check()
    tree.extend(late, i32(ids), late_table, 2, leaving=True)
    tree.release(late_table)
    assert len(tree) == 2
    tree.check()


def test_flush_drops_what_nobody_uses() -> None:
    tree = make_tree()
    compute(tree, [1] * 8)
    used = compute(tree, [2] * 8, leave=False)
    assert tree.flush() == 2
    assert len(tree) == len(used) == 2
    tree.check()


def test_the_list_of_leaves_stays_in_proportion_to_the_tree() -> None:
    tree = make_tree()
    for _ in range(20_000):
        compute(tree, [1] * 9)
    assert len(tree._leaves) < 2000
    tree.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 24), st.integers(0, 3)), max_size=60), st.integers(6, 30))
def test_random_rows_read_what_they_should(rows: list[tuple[int, int, int]], pages: int) -> None:
    """Each page's content is modelled: whatever is matched must hold exactly the matched ids."""
    tree = make_tree(pages)
    content: dict[int, tuple[str, tuple[int, ...]]] = {}  # page → salt and all ids up to its end
    held: list[tuple[np.ndarray, Path]] = []
    for stem, length, tail in rows:
        salt = "ab"[stem % 2]
        ids = [stem // 2] * length + [9] * tail
        path = Path(salt)
        tree.match(path, i32(ids), len(ids) - 1)
        for number, page in enumerate(path.pages):
            assert content[page] == (salt, tuple(ids[: (number + 1) * PAGE]))
        shared = np.array(path.pages, np.int32)
        revived = int(np.count_nonzero(tree.pool.users[shared] == 0))
        need = tree.pool.pages_of(len(ids)) - len(shared)
        while held and tree.pool.available - revived < need:
            tree.release(held.pop(0)[0])
            revived = int(np.count_nonzero(tree.pool.users[shared] == 0))
        if tree.pool.available - revived < need:
            continue
        tree.pool.retain(shared)
        table = np.concatenate([shared, tree.allocate(need)])
        for number, page in enumerate(table.tolist()):
            wanted = (salt, tuple(ids[: (number + 1) * PAGE]))
            assert number >= len(shared) or content[page] == wanted
            content[page] = wanted
        tree.extend(path, i32(ids), table, len(ids) // PAGE)
        held.append((table, path))
        tree.check()
    for table, _ in held:
        tree.release(table)
    tree.check()
    assert tree.pool.available == pages
