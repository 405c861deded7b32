"""Which part of a model each rank of a tensor-parallel group has: pure, and without collectives.

Each rank has its own `ModelConfig`: fewer heads, narrower MLPs, a slice of the vocabulary. Comparing it with
the full model's shapes yields what to load and how to split adapters. KV heads (and key heads of delta nets,
groups of Mamba) are replicated when there are fewer than ranks. Shapes: E experts, R rank, I in-, O
out-features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tinkex.engine.torch.adapter_files import fingerprint
from tinkex.engine.torch.backend import Backend, choose_backend
from tinkex.engine.torch.hooks import Part, Sites
from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    RecurrentConfig,
)
from tinkex.engine.torch.models.attention import Attention
from tinkex.engine.torch.models.block import Slot
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.quantised import SCHEMES, QuantisedWeight, quantise
from tinkex.engine.torch.tensor_parallel.shards import Shards
from tinkex.errors import InvalidInputError

_ALIGNED = 8  # rows of the vocabulary that are not parted
Cut = tuple[tuple[slice, ...], ...]  # of each dimension, the pieces that a rank has, one after the other


def local_config(model: ModelConfig, count: int) -> ModelConfig:
    """What each of `count` ranks builds. A model that cannot be split so is refused, with what would do."""
    vocab = -(-model.padded_vocab // (count * _ALIGNED)) * _ALIGNED
    if (count - 1) * vocab >= model.padded_vocab:
        raise InvalidInputError(
            f"tensor={count} is too many for a vocabulary of {model.padded_vocab} ids; "
            f"each rank takes {_ALIGNED} at least"
        )
    stack = tuple(_local_layer(model, layer, count) for layer in model.stack)
    return replace(model, vocab_rows=vocab, stack=stack)


def _local_layer(model: ModelConfig, layer: LayerConfig, count: int) -> LayerConfig:
    def part(what: str, size: int) -> int:
        if size % count:
            fitting = [n for n in range(2, 17) if size % n == 0]
            raise InvalidInputError(
                f"tensor={count} does not divide the {size} {what} of {model.arch}; these do: "
                f"{', '.join(map(str, fitting)) or 'none up to 16'}"
            )
        return size // count

    def part_or_one(what: str, size: int) -> int:
        """Each rank has one of them if there are fewer than ranks."""
        return 1 if size < count and count % size == 0 else part(what, size)

    mixer, mlp = layer.mixer, layer.mlp
    match mixer:
        case AttentionConfig():
            heads, kv_heads = part("heads", mixer.heads), part_or_one("kv heads", mixer.kv_heads)
            mixer = replace(mixer, heads=heads, kv_heads=kv_heads)
        case LatentConfig():
            mixer = replace(mixer, heads=part("heads", mixer.heads))
        case DeltaConfig():
            keys = part_or_one("key heads", mixer.key_heads)
            mixer = replace(mixer, key_heads=keys, value_heads=part("value heads", mixer.value_heads))
        case MambaConfig():
            heads, groups = part("heads of Mamba", mixer.heads), part_or_one("groups of Mamba", mixer.groups)
            alone = mixer.norm_groups == 1  # all numbers are normed together, over the ranks
            norms = 1 if alone else part("norm groups of Mamba", mixer.norm_groups)
            mixer = replace(mixer, heads=heads, groups=groups, norm_groups=norms, norm_over_ranks=alone)
        case RecurrentConfig():
            raise InvalidInputError(f"tensor={count}: {model.arch} is computed by transformers, on one GPU")
        case None:
            pass
    match mlp:
        case MlpConfig():
            mlp = replace(mlp, width=part("numbers of the MLP", mlp.width))
        case ExpertsConfig():
            shared = mlp.shared
            if shared is not None:
                inner = shared.mlp
                if inner is not None:
                    inner = replace(inner, width=part("numbers of the shared expert", inner.width))
                width = part("numbers of the shared expert", shared.width)
                shared = shared._replace(width=width, mlp=inner)
            mlp = replace(mlp, width=part("numbers of an expert", mlp.width), shared=shared)
        case None:
            pass
    return replace(layer, mixer=mixer, mlp=mlp)


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """The whole model and one rank's, both without memory, and where the rank's weights are in the whole."""

    model: ModelConfig
    rank: int
    count: int

    @cached_property
    def local(self) -> ModelConfig:
        return local_config(self.model, self.count)

    @cached_property
    def whole(self) -> Decoder:
        with torch.device("meta"):
            return Decoder(self.model, Backend())

    @cached_property
    def part(self) -> Decoder:
        with torch.device("meta"):
            return Decoder(self.local, Backend())

    @cached_property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.Size]]:
        """Of each weight: in the whole, and in this rank's part."""
        parts = self.part.weights()
        return {name: (weight.shape, parts[name].shape) for name, weight in self.whole.weights().items()}

    @cached_property
    def _runs(self) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
        """Of modules with several matrices stacked along the output: their sizes, in the whole and here."""
        parts = _stacked(self.part)
        return {name: (sizes, parts[name]) for name, sizes in _stacked(self.whole).items()}

    def _pieces(self, module: str, whole: int, part: int, rank: int) -> tuple[slice, ...]:
        """The rows of the whole that a rank has, of `module`'s output."""
        if module in self._runs and whole == sum(self._runs[module][0]):
            sizes = zip(*self._runs[module], strict=True)
        else:
            sizes = [(whole, part)]
        pieces, base = [], 0
        for size, ours in sizes:
            start = base + rank * -(-size // ours) // self.count * ours
            pieces.append(slice(start, min(start + ours, base + size)))
            base += size
        return tuple(pieces)

    def cut(self, name: str) -> Cut | None:
        """Where this rank's part of a weight is in the whole; None: the rank has nothing of it, and zeros."""
        whole, part = self.shapes[name]
        module, _, kind = name.rpartition(".")
        if kind == "bias" and self.rank and self._split_in(f"{module}.weight"):
            return None  # added by one rank only, as its product is summed over them
        first = self._pieces(module, whole[0], part[0], self.rank)
        return first, *((_evenly(g, n, self.rank),) for g, n in zip(whole[1:], part[1:], strict=True))

    def _split_in(self, weight: str) -> bool:
        whole, part = self.shapes[weight]
        return len(whole) == 2 and whole[1] != part[1]

    # -- adapters ----------------------------------------------------------------------------------------

    @cached_property
    def sites(self) -> Sites:
        return self.whole.sites()

    @cached_property
    def halves(self) -> dict[str, tuple[int, int, int, int]]:
        """By the name of a part: in-features and out-features of the whole, and of this rank."""
        parts = {part.name: (i, part) for i, group in self.part.sites().values() for part in group}

        def sizes(i: int, part: Part) -> tuple[int, int, int, int]:
            ours = parts[part.name]
            return i, part.out_features, ours[0], ours[1].out_features

        return {part.name: sizes(i, part) for i, group in self.sites.values() for part in group}

    def columns(self, part: str, rank: int) -> slice:
        """Of A [R, I]: what a rank has."""
        whole, _, ours, _ = self.halves[part]
        return _evenly(whole, ours, rank)

    def rows(self, part: str, rank: int) -> tuple[slice, ...]:
        """Of B [O, R]: what a rank has, piece by piece."""
        _, whole, _, ours = self.halves[part]
        return self._pieces(part, whole, ours, rank)

    def stacked_rows(self, part: str, rank: int) -> Iterator[tuple[slice, slice]]:
        """Of B: each piece that a rank has, in the whole and in its own."""
        at = 0
        for rows in self.rows(part, rank):
            own = slice(at, at := at + rows.stop - rows.start)
            yield rows, own

    def a_is_ours(self, part: str) -> bool:
        """Whether no other rank has this rank's part of A."""
        whole, _, ours, _ = self.halves[part]
        return whole != ours

    def b_is_ours(self, part: str) -> bool:
        """Whether no other rank has this rank's part of B."""
        taken = [self.rows(part, rank) for rank in range(self.count)]
        return sum(piece.stop - piece.start for rows in taken for piece in rows) == self.halves[part][1]


def _stacked(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """`Block.stacked` of all blocks; of attention, what is stored as one matrix."""
    fused = [b for b in decoder.modules() if isinstance(b, Attention) and b.config.fused]
    return decoder.stacked() | {f"{block.name}.qkv_proj": block.sizes for block in fused}


def _evenly(whole: int, part: int, rank: int) -> slice:
    return slice(0, whole) if whole == part else slice(rank * part, (rank + 1) * part)


def taken(tensor: Tensor | QuantisedWeight, cut: Cut) -> Tensor | QuantisedWeight:
    """The pieces of a stored weight that `cut` names; quantised ones stay so where their blocks are whole."""
    if isinstance(tensor, QuantisedWeight):
        (rows, *rest) = cut
        cut_columns = tensor.columns(rest[0][0]) if rest else tensor
        if isinstance(cut_columns, QuantisedWeight):
            pieces = [cut_columns.select(piece) for piece in rows]
            if len(pieces) == 1:
                return pieces[0]
            tensor = torch.cat([p if isinstance(p, Tensor) else p.dequantise() for p in pieces])
            return tensor
        tensor, cut = cut_columns, (rows,)
    for dim, pieces in enumerate(cut):
        cuts = [tensor.narrow(dim, piece.start, piece.stop - piece.start) for piece in pieces]
        tensor = cuts[0] if len(cuts) == 1 else torch.cat(cuts, dim)
    return tensor


class LoadedPart:
    """What `load.fill` needs to load one rank's part, and what it saw of the whole while it did."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._plan: ShardPlan | None = None
        self._heads: dict[str, tuple[torch.Size, Tensor]] = {}  # the first numbers of each weight

    @property
    def plan(self) -> ShardPlan:
        assert self._plan is not None, "nothing was loaded yet"
        return self._plan

    def empty_part(
        self, model: ModelConfig, device: str | torch.device, dtype: torch.dtype, *, quantised: bool = False
    ) -> Decoder:
        """Like `load.empty_decoder`, for this rank's part."""
        self._plan = ShardPlan(model, self.shards.rank, self.shards.count)
        local = self._plan.local
        with torch.device("meta"):
            backend = choose_backend(device, dtype, kernels=local.kernels_serve)
            decoder = Decoder(local, backend, self.shards)
            if quantised:
                decoder.quantise(dtype)
        return decoder.to(dtype)._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device)).eval()

    def shape(self, name: str) -> torch.Size:
        """Of a weight of the whole model."""
        return self.plan.shapes[name][0]

    def put(
        self, name: str, tensor: Tensor | QuantisedWeight, place: Tensor | Slot | None, scheme: str,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Copy the rank's part of a weight to its place. What has no rows in the whole is zero."""
        assert place is not None
        quantised = isinstance(place, tuple)
        if quantised and scheme in SCHEMES and tensor.shape[-1] % 2 == 0:  # first: as without ranks
            plain = tensor if isinstance(tensor, Tensor) else tensor.dequantise()
            tensor = quantise(plain.to(device), scheme)
        elif isinstance(tensor, QuantisedWeight) and (not quantised or tensor.transposed):
            tensor = tensor.dequantise()
        if isinstance(tensor, Tensor):
            head = tensor.reshape(-1, tensor.shape[-1])[0, :16]
        else:
            head = tensor.rows(0, 1)[0, :16]
        head = head.to("cpu", dtype if isinstance(tensor, Tensor) else None, copy=True)  # not a view of it
        self._heads[name] = tensor.shape, head
        cut = self.plan.cut(name)
        piece = None if cut is None else taken(tensor, cut)
        if isinstance(place, tuple):
            assert piece is not None
            kept = "file" if isinstance(piece, QuantisedWeight) else scheme
            place[0].put(place[1], piece, kept, device)
        elif piece is None:
            place.zero_()
        else:
            assert isinstance(piece, Tensor)
            place[len(piece) :] = 0.0
            place[: len(piece)].copy_(piece)

    def fingerprint(self, decoder: Decoder) -> str:
        """The same as that of the whole model: adapters fit both."""
        kept = decoder.slots().keys()
        plain = {name: head for name, head in self._heads.items() if name not in kept}
        packed = {name: (shape, head.float()) for name, (shape, head) in self._heads.items() if name in kept}
        return fingerprint(self.plan.model.arch, plain, packed)
