"""Images in sequences: features in place of the embeddings of placeholder tokens.

Knows nothing of how features are made, and nothing of requests.

Shapes: N positions of images, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.torch.kv import PAGE
from tinkex.engine.torch.models.attend import Spans


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image of a sequence, from position `start` on."""

    start: int
    features_ND: Tensor
    digest: bytes  # of the image and of how it was processed, 32 bytes
    deeper: tuple[Tensor, ...] = ()  # features [N, D] to add to what leaves each of the first layers

    @property
    def stop(self) -> int:
        return self.start + len(self.features_ND)


class FeatureRows(NamedTuple):
    """The rows of a packed batch that images fill, and with what."""

    rows_N: Tensor
    features_ND: Tensor
    deeper: tuple[Tensor, ...] = ()

    def dense(self, layer: int, x_TD: Tensor) -> Tensor:
        """What is to be added to `x_TD`, which leaves `layer`: zeros in all other rows."""
        return torch.zeros_like(x_TD).index_copy_(0, self.rows_N, self.deeper[layer])


def feature_rows(
    batch: Iterable[tuple[Sequence[PlacedImage], int, int]], device: torch.device
) -> FeatureRows | None:
    """Of a packed batch, given each sequence's images, its first position in the batch, and its tokens there.

    None if no image is in it.
    """
    rows: list[Tensor] = []
    parts: list[tuple[Tensor, ...]] = []
    shift = 0  # from a sequence's positions to rows
    for images, begin, count in batch:
        shift -= begin
        for image in images:
            first, last = max(image.start, begin), min(image.stop, begin + count)
            if first < last:
                inside = slice(first - image.start, last - image.start)
                rows.append(torch.arange(first + shift, last + shift))
                parts.append(tuple(x[inside] for x in (image.features_ND, *image.deeper)))
        shift += begin + count
    if not rows:
        return None
    features, *deeper = (torch.cat(each) for each in zip(*parts, strict=True))
    return FeatureRows(torch.cat(rows).to(device), features, tuple(deeper))


def spans_of(images: Iterable[PlacedImage]) -> list[tuple[int, int]]:
    return [(image.start, image.stop) for image in images]


def whole_chunk(spans: Spans, start: int, count: int) -> int:
    """How many tokens to compute from `start` on: about `count`, so that the chunk ends within no span."""
    for begin, end in spans:
        if begin < start + count < end:
            return begin - start if begin > start else end - start
    return count


def page_extras(images: Iterable[PlacedImage]) -> dict[int, bytes]:
    """By page: what its digest covers in addition to token ids: which images are in it, and where."""
    extras: dict[int, bytes] = {}
    for image in images:
        for page in range(image.start // PAGE, (image.stop - 1) // PAGE + 1):
            offset = (image.start - page * PAGE).to_bytes(8, "little", signed=True)
            extras[page] = extras.get(page, b"") + image.digest + offset
    return extras
