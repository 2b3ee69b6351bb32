"""The page pool and the prefix tree against naive models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import ID_BYTES, column
from scheduler.pages import PageError, PagePool
from scheduler.prefix import Path, PrefixTree
from tests.builders import i32

PAGE = 4


def make_tree(pages: int = 16, enabled: bool = True) -> PrefixTree:
    return PrefixTree(PagePool(pages, PAGE), enabled)


def place(tree: PrefixTree, ids: list[int], salt: str = "") -> tuple[Path, bytes]:
    """A row gets pages for its ids, those that the tree has first; returns its path and page table."""
    path = Path(salt)
    tree.match(path, i32(*ids), len(ids) - 1)
    return path, tree.hold(path) + tree.allocate(tree.pool.pages_of(len(ids)) - len(path))


def compute(tree: PrefixTree, ids: list[int], salt: str = "", leave: bool = True) -> Path:
    """A row prefills ids and, by default, leaves: its full pages stay cached."""
    path, table = place(tree, ids, salt)
    tree.extend(path, i32(*ids), table, len(ids) // PAGE)
    if leave:
        tree.release_row(path, table)
    return path


def cached(tree: PrefixTree, ids: list[int], salt: str = "") -> int:
    """Pages that the tree has of these ids."""
    path = Path(salt)
    tree.match(path, i32(*ids), len(ids))
    return len(path)


def test_a_pool_gives_each_page_once_and_takes_it_back_once() -> None:
    pool = PagePool(8, PAGE)
    first, second = pool.pop(3), pool.pop(5)
    assert sorted(column(first + second).tolist()) == list(range(8))
    with pytest.raises(PageError, match="1 pages wanted, 0 free"):
        pool.pop(1)
    pool.release(first)
    assert pool.free == 3
    pool.check(second)
    with pytest.raises(PageError, match="twice"):
        pool.check(second + first[:4])
    with pytest.raises(PageError, match="lost"):
        pool.check(second[4:])
    pool.release(second)
    with pytest.raises(PageError, match="released twice"):
        pool.release(first)


def test_a_page_stays_used_until_the_last_of_its_rows_leaves() -> None:
    tree = make_tree()
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    compute(tree, ids)
    (first, first_table), (second, second_table) = place(tree, ids), place(tree, ids)
    assert first_table[:8] == second_table[:8]
    assert first_table[8:] != second_table[8:]
    tree.release_row(first, first_table)
    assert tree.pool.idle == 0
    tree.release_row(second, second_table)
    assert tree.pool.idle == 2
    tree.check(b"")
    with pytest.raises(PageError, match="released twice"):
        tree.unpin(second)


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
        assert cached(tree, ids) == pages, ids
        tree.check(b"")


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    """K35: a prompt of exactly two pages, sent again, hits one page only."""
    tree = make_tree()
    ids = list(range(8))
    compute(tree, ids)
    path = Path("")
    tree.match(path, i32(*ids), len(ids) - 1)
    assert len(path) == 1


def test_salts_and_a_disabled_tree_share_nothing() -> None:
    tree = make_tree()
    compute(tree, [1, 2, 3, 4, 5], salt="a")
    assert [cached(tree, [1, 2, 3, 4, 5], salt) for salt in ("", "b", "a")] == [0, 0, 1]
    off = make_tree(enabled=False)
    compute(off, [1, 2, 3, 4, 5])
    assert not off.cached
    assert off.pool.free == 16


def test_the_least_recently_used_page_goes_first_and_children_before_parents() -> None:
    tree = make_tree(pages=6)
    old = compute(tree, [1] * 8)
    new = compute(tree, [2] * 8)
    again = compute(tree, [1] * 9)  # uses the old path once more
    assert again.pages == old.pages
    tree.allocate(3)  # two pages are free
    for path, ids, left in [(new, [2] * 8, 1), (old, [1] * 8, 2)]:
        tree.match(path, i32(*ids), 8)
        assert len(path) == left


def test_pages_in_use_and_pinned_pages_are_never_evicted() -> None:
    tree = make_tree(pages=6)
    pinned = compute(tree, [1] * 8)
    tree.hold(pinned)
    compute(tree, [2] * 8, leave=False)
    tree.allocate(2)
    with pytest.raises(PageError):
        tree.allocate(1)
    tree.unpin(pinned)
    tree.allocate(2)
    assert tree.evictions == 2


def test_an_evicted_node_is_noticed_however_its_page_is_used_since() -> None:
    tree = make_tree(pages=4)
    path = compute(tree, [1] * 16)
    assert sorted(column(path.pages).tolist()) == [0, 1, 2, 3]
    compute(tree, [2] * 16)
    tree.match(path, i32(*[1] * 16), 16)
    assert not len(path)


def test_a_row_that_finds_its_page_entered_by_another_adds_nothing_below_it() -> None:
    """Otherwise its pages would hang below a node that it does not use and that may be evicted first."""
    tree = make_tree()
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    late, late_table = place(tree, ids)
    compute(tree, ids[:4])
    tree.extend(late, i32(*ids), late_table, 2)
    assert tree.cached == 1
    tree.check(late_table)
    tree.release_row(late, late_table, i32(*ids), 2)
    assert tree.cached == cached(tree, ids) == 2
    tree.check(b"")


def test_nodes_split_where_requests_diverge_and_grow_while_one_row_has_them() -> None:
    tree = make_tree()
    path, table = place(tree, [1] * 12 + [2] * 4)
    ids = i32(*[1] * 12 + [2] * 4)
    tree.extend(path, ids, table, 1)
    tree.extend(path, ids, table, 4)
    assert len(list(tree.nodes())) == 1
    other = compute(tree, [1] * 8 + [3] * 5, leave=False)
    assert [column(node.pages).tolist() for node in other.nodes][1] == column(table)[:2].tolist()
    assert [node.users for node in other.nodes] == [1, 2]
    assert [node.users for node in path.nodes] == [1, 2]
    assert path.pages == table
    waiting = Path("")
    tree.match(waiting, i32(*[1] * 12 + [2] * 8), 20)
    tree.release_row(path, table + tree.allocate(1), i32(*[1] * 12 + [2] * 8), 5)
    assert len(waiting) == 4
    tree.match(waiting, i32(*[1] * 12 + [2] * 8), 20)
    assert len(waiting) == 5


def test_a_path_does_not_trust_what_its_tip_grew_by() -> None:
    tree = make_tree(pages=8)
    ids = i32(*[1] * 8)
    path, table = place(tree, [1] * 24)
    tree.extend(path, i32(*[1] * 24), table, 2)
    waiting = Path("")
    tree.match(waiting, ids + i32(*[2] * 16), 24)
    assert len(waiting) == 2
    tree.release_row(path, table, i32(*[1] * 24), 6)
    tree.allocate(3)  # one page of the grown node goes
    tree.match(waiting, ids + i32(*[2] * 16), 24)
    assert len(waiting) == 2


def test_a_long_run_is_evicted_from_its_end() -> None:
    tree = make_tree(pages=8)
    compute(tree, [1] * 32)
    tree.allocate(3)
    assert cached(tree, [1] * 32) == 5


def test_flush_drops_what_nobody_uses() -> None:
    tree = make_tree()
    compute(tree, [1] * 8)
    used = compute(tree, [2] * 8, leave=False)
    assert tree.flush() == 2
    assert tree.cached == len(used) == 2
    tree.check(b"")


def test_the_list_of_leaves_stays_in_proportion_to_the_tree() -> None:
    tree = make_tree()
    for _ in range(20_000):
        compute(tree, [1] * 9)
    assert len(tree._leaves) < 2000
    tree.check(b"")


def test_a_path_is_not_held_once_its_tip_has_grown() -> None:
    tree = make_tree(16)
    ids = i32(*[1] * (3 * PAGE))
    row, other = Path(""), Path("")
    tree.match(row, ids, 3 * PAGE)
    table = tree.hold(row) + tree.allocate(3)
    tree.extend(row, ids, table, 1)
    tree.match(other, ids, 3 * PAGE)
    tree.extend(row, ids, table, 2)
    with pytest.raises(PageError, match="matched again"):
        tree.hold(other)
    tree.match(other, ids, 3 * PAGE)
    assert tree.hold(other) == table[: 2 * ID_BYTES]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 24), st.integers(0, 3)), max_size=60), st.integers(6, 30))
def test_random_rows_read_what_they_should(rows: list[tuple[int, int, int]], pages: int) -> None:
    """Each page's content is modelled: whatever is matched must hold exactly the matched ids."""
    tree = make_tree(pages)
    content: dict[int, tuple[str, tuple[int, ...]]] = {}  # page → salt and all ids up to its end
    held: list[tuple[Path, bytes, list[int]]] = []
    for stem, length, tail in rows:
        salt = "ab"[stem % 2]
        ids = [stem // 2] * length + [9] * tail
        path = Path(salt)
        tree.match(path, i32(*ids), len(ids) - 1)
        for number, page in enumerate(column(path.pages).tolist()):
            assert content[page] == (salt, tuple(ids[: (number + 1) * PAGE]))
        need = tree.pool.pages_of(len(ids)) - len(path)
        while held and tree.pool.available - path.idle_pages < need:
            left, table, left_ids = held.pop(0)
            # Every other one leaves its pages to the tree only now.
            tree.release_row(left, table, i32(*left_ids), len(left_ids) // PAGE)
            tree.match(path, i32(*ids), len(ids) - 1)
            need = tree.pool.pages_of(len(ids)) - len(path)
        if tree.pool.available - path.idle_pages < need:
            continue
        table = tree.hold(path) + tree.allocate(need)
        for number, page in enumerate(column(table).tolist()):
            wanted = (salt, tuple(ids[: (number + 1) * PAGE]))
            assert number >= len(path) or content[page] == wanted
            content[page] = wanted
        if length % 2:
            tree.extend(path, i32(*ids), table, len(ids) // PAGE)
        held.append((path, table, ids))
        tree.check(b"".join(table[4 * len(path) :] for path, table, _ in held))
    for path, table, ids in held:
        tree.release_row(path, table, i32(*ids), len(ids) // PAGE)
    tree.check(b"")
    assert tree.pool.available == pages
