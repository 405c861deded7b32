"""Pages: none lost, none in two hands; attention over them against attention written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.stepping import check_pages
from tinkex.engine.torch.kv import PAGE, KVCache, PagedAttend, Pages, TokenSpan, chain, group_pieces
from tinkex.engine.torch.models.architecture import KvShape

CPU = torch.device("cpu")


# -- bookkeeping -------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from(["take", "share", "release", "find", "remember"]), st.integers(0, 9)))
)
@settings(deadline=None, max_examples=300)
def test_no_page_is_lost_whatever_happens(operations: list[tuple[str, int]]):
    pages, holders = Pages(12), [[] for _ in range(4)]
    digests = [bytes([n]) for n in range(6)]
    for operation, n in operations:
        holder = holders[n % len(holders)]
        match operation:
            case "take":
                before = pages.available
                taken = pages.take(n)
                assert (taken is None) == (n > before)
                holder += taken or []
            case "share":
                other = holders[(n + 1) % len(holders)]
                pages.share(other)
                holder += other
            case "release":
                pages.release(holder)
                holder.clear()
            case "find":
                holder += pages.find(digests[: n % 7])
            case "remember":
                if holder:
                    pages.remember(holder[0], digests[n % 6])
        check_pages(pages, holders)
    for holder in holders:
        pages.release(holder)
    assert pages.available == 12


def test_releasing_twice_is_noticed():
    pages = Pages(4)
    taken = pages.take(2) or []
    pages.release(taken)
    with pytest.raises(AssertionError, match="twice"):
        pages.release(taken)


def test_a_leak_is_noticed():
    pages = Pages(4)
    pages.take(1)
    with pytest.raises(AssertionError, match="leak"):
        check_pages(pages, [])


def test_the_cache_gives_up_the_oldest_first_and_ends_before_beginnings():
    pages = Pages(4)
    old, new = pages.take(2) or [], pages.take(2) or []
    for page, digest in zip([*old, *new], [b"a", b"ab", b"c", b"cd"], strict=True):
        pages.remember(page, digest)
    pages.release(old)
    pages.release(new)
    assert pages.take(1) == [old[1]]
    assert pages.find([b"a", b"ab"]) == [old[0]]
    pages.take(1)
    assert pages.find([b"c", b"cd"]) == [new[0]]


def test_a_page_in_use_is_never_given_up():
    pages = Pages(3)
    taken = pages.take(2) or []
    pages.remember(taken[0], b"a")
    pages.release(taken)
    assert pages.find([b"a"]) == [taken[0]]
    assert pages.take(3) is None
    assert taken[0] not in (pages.take(2) or [])


def test_a_digest_stands_for_the_adapter_and_all_tokens_so_far():
    tokens = np.arange(3 * PAGE + 5, dtype=np.int32)
    links = chain(b"base", tokens, [])
    assert len(links) == 3
    assert chain(b"base", tokens[: 2 * PAGE], []) == links[:2]
    assert not set(chain(b"other", tokens, [])) & set(links)
    changed = tokens.copy()
    changed[0] += 1
    assert not set(chain(b"base", changed, [])) & set(links)
    changed = tokens.copy()
    changed[2 * PAGE] += 1
    assert chain(b"base", changed, [])[:2] == links[:2]
    assert chain(b"base", changed, [])[2] != links[2]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 600), st.sampled_from([1, 1, 1, 7])), min_size=1, max_size=40))
def test_groups_cover_every_piece_once_with_bounded_padding(shapes: list[tuple[int, int]]):
    pieces = [TokenSpan([], start, new) for start, new in shapes]
    groups = group_pieces(pieces)
    assert sorted(i for group in groups for i in group) == list(range(len(pieces)))
    for group in groups:
        lengths = [pieces[i].start + 1 for i in group]
        assert len({pieces[i].new for i in group}) == 1
        assert max(lengths) * len(group) <= 1.5 * sum(lengths) + 8 * PAGE or len(group) == 1


# -- attention ---------------------------------------------------------------------------------------------


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """The last len(q) of len(k) positions attend: [S, H, C] over [L, G, C]."""
    (s, h, c), (length, g, _) = q.shape, k.shape
    out = np.empty_like(q)
    for i in range(s):
        at = length - s + i
        seen = slice(0 if window is None else max(0, at - window + 1), at + 1)
        for head in range(h):
            scores = k[seen, head * g // h] @ q[i, head] / np.sqrt(c)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[seen, head * g // h] / weights.sum()
    return out


@pytest.mark.parametrize("window", [None, 5, 20])
def test_paged_attention_equals_attention_written_out(window: int | None):
    rng = np.random.default_rng(0)
    heads, kv_heads, dim = 6, 2, 8
    cache = KVCache([KvShape(kv_heads, dim, dim)] * 2, 40, CPU, torch.float32)
    lengths = [1, 16, 33, 50, 17, 90]
    full = [rng.normal(size=(n, heads + 2 * kv_heads, dim)).astype(np.float32) for n in lengths]
    tables = [cache.pages.take(-(-n // PAGE)) or [] for n in lengths]
    # each sequence in its own chunks, several sequences in every step, down to single tokens
    chunks = [[1], [16], [16, 16, 1], [20, 29, 1], [5, 11, 1], [1, 1, 40, 47, 1]]
    done = [0] * len(lengths)
    for step in range(5):
        active = [i for i, sizes in enumerate(chunks) if step < len(sizes)]
        pieces = [TokenSpan(tables[i], done[i], chunks[i][step]) for i in active]
        new = np.concatenate([full[i][done[i] : done[i] + chunks[i][step]] for i in active])
        q, k, v = (torch.from_numpy(part) for part in np.split(new, [heads, heads + kv_heads], axis=1))
        attend = PagedAttend(cache, pieces, [None, window], CPU)
        outputs = attend(1, q, k, v).numpy()
        at = 0
        for i in active:
            size = chunks[i][step]
            done[i] += size
            known = full[i][: done[i]]
            expected = plain_attention(
                known[-size:, :heads],
                known[:, heads : heads + kv_heads],
                known[:, heads + kv_heads :],
                window,
            )
            np.testing.assert_allclose(outputs[at : at + size], expected, atol=2e-6)
            at += size
    assert done == lengths


def test_a_copied_page_is_a_page_of_its_own():
    cache = KVCache([KvShape(1, 4, 4)] * 2, 3, CPU, torch.float32)
    source, target = cache.pages.take(2) or []
    first = torch.randn(PAGE, 1, 4)
    slots = torch.arange(PAGE)
    for layer in range(2):
        cache.write(layer, source * PAGE + slots, first, 2 * first)
    cache.copy_page(source, target)
    cache.write(0, source * PAGE + slots, first * 0, first * 0)
    k, v = cache.read(0, torch.tensor([[target]]))
    torch.testing.assert_close(k[0, 0], first[:, 0])
    torch.testing.assert_close(v[0, 0], 2 * first[:, 0])
