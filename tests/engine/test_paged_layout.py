"""How a step's tokens are laid out for the paged kernels, against the same written as loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.cuda.attention_hooks import layout_of
from tinkex.engine.torch.kv import PAGE, TokenSpan

pytestmark = pytest.mark.slow

SHAPES = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 50), st.integers(0, 2)), min_size=1, max_size=12
)


def pieces_of(shapes: list[tuple[int, int, int]]) -> list[TokenSpan]:
    """Pieces from `start` of `new` tokens, with so many more pages than they need, all of them shuffled."""
    needed = [-(-(start + new) // PAGE) + more for start, new, more in shapes]
    pages = iter(np.random.default_rng(sum(needed)).permutation(sum(needed)).tolist())
    return [
        TokenSpan([next(pages) for _ in range(count)], start, new)
        for (start, new, _), count in zip(shapes, needed, strict=True)
    ]


@given(SHAPES, st.sampled_from([1, 16]))
def test_every_token_has_its_place(shapes: list[tuple[int, int, int]], tile: int):
    pieces = pieces_of(shapes)
    layout = layout_of(pieces, tile)
    at = [(piece, piece.start + i) for piece in pieces for i in range(piece.new)]
    assert layout.positions.tolist() == [position for _, position in at]
    assert layout.slots.tolist() == [p.pages[position // PAGE] * PAGE + position % PAGE for p, position in at]
    assert layout.pages.tolist() == [page for piece in pieces for page in piece.pages]
    assert {part.dtype for part in layout[:4]} == {np.dtype(np.int32)}


@given(SHAPES, st.sampled_from([1, 16]))
def test_tiles_are_cut_from_one_piece_each(shapes: list[tuple[int, int, int]], tile: int):
    pieces = pieces_of(shapes)
    tiles, row, page = [], 0, 0
    for piece in pieces:
        for done in range(0, piece.new, tile):
            tiles.append([row + done, min(tile, piece.new - done), piece.start + done, page])
        row, page = row + piece.new, page + len(piece.pages)
    layout = layout_of(pieces, tile)
    assert layout.tiles.T.tolist() == tiles
    assert layout.tile == tile
