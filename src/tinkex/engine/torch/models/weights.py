"""The weights of a decoder: their names, sizes and sites, and how they are kept. No arithmetic of a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tinkex.engine.torch.functions import pack
from tinkex.engine.torch.hooks import Part, Site, Sites
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.block import Block, Slot, frozen_parameter
from tinkex.engine.torch.models.projection import Projection
from tinkex.engine.torch.quantised import QuantisedMatrix

if TYPE_CHECKING:
    from tinkex.engine.torch.tensor_parallel.shards import Shards

UNEMBED = Site(-1, "unembed")


class DecoderWeights(Block):
    """The embedding, the final norm and the head; and, by way of its blocks, all other weights."""

    def __init__(self, config: ModelConfig, shards: Shards | None = None) -> None:
        super().__init__()
        self.config, self.shards = config, shards
        self.vocab_rows = config.vocab_rows or config.padded_vocab
        self.embedding = frozen_parameter(self.vocab_rows, config.width)
        self.norm = frozen_parameter(config.width)
        self.head: nn.Parameter | None = None
        if not config.tied:
            self.head = frozen_parameter(self.vocab_rows, config.width)
        self.packed_head: Tensor | None = None

    @property
    def unembed_weight(self) -> Tensor:
        """[V, D]: the embedding itself when tied."""
        return self.embedding if self.head is None else self.head

    def pack(self, room: float) -> None:
        """Keep a second copy of the weights in a layout that samples faster, if it fits in `room` bytes.

        For a decoder on the CPU whose weights will not change any more; elsewhere there is nothing to gain.
        """
        if self.multiplied_bytes <= room:
            for projection in self.projections():
                weight = projection.weight
                projection.packed = pack(weight) if isinstance(weight, Tensor) else None
            self.packed_head = pack(self.unembed_weight)

    def projections(self) -> list[Projection]:
        return [module for module in self.modules() if isinstance(module, Projection)]

    @property
    def uniform(self) -> bool:
        """Whether compiled steps that read the weights themselves suit it."""
        return self.config.uniform and not self.slots()

    @property
    def kernels_serve(self) -> bool:
        """Whether kernels that read the weights themselves compute it on a GPU."""
        return self.config.kernels_serve

    def quantise(self, dtype: torch.dtype) -> None:
        for block in self._blocks():
            block.quantise(dtype)

    def slots(self) -> dict[str, Slot]:
        return {name: slot for block in self._blocks() for name, slot in block.slots().items()}

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return {name: sizes for block in self._blocks() for name, sizes in block.stacked().items()}

    def settle(self, for_kernels: bool = False) -> None:
        for block in self._blocks():
            block.settle(for_kernels)

    def _matrices(self) -> set[QuantisedMatrix]:
        return {matrix for matrix, _ in self.slots().values()}

    @property
    def parameter_count(self) -> int:
        return sum(weight.numel() for weight in (*self.parameters(), *self._matrices()))

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.parameters(), *self._matrices()))

    @property
    def multiplied_bytes(self) -> int:
        """Bytes of the weights that are multiplied with tokens, without experts."""
        return self.unembed_weight.nbytes + sum(p.weight.nbytes for p in self.projections())

    @property
    def packed_bytes(self) -> int:
        packed = [self.packed_head, *(projection.packed for projection in self.projections())]
        return sum(copy.numel() * copy.dtype.itemsize for copy in packed if copy is not None)

    def sites(self) -> Sites:
        """Every site that an adapter can train."""
        sites = {site: shape for block in self._blocks() for site, shape in block.sites().items()}
        return sites | {UNEMBED: (self.config.width, (Part("lm_head", self.vocab_rows, "unembed"),))}

    def weights(self) -> dict[str, Tensor]:
        """Views of all weights by their Hugging Face names. A tied head has no entry."""
        own = {"model.embed_tokens": self.embedding, "model.norm": self.norm, "lm_head": self.head}
        named = {f"{name}.weight": weight.detach() for name, weight in own.items() if weight is not None}
        return named | {name: view for block in self._blocks() for name, view in block.weights().items()}

    def _blocks(self) -> list[Block]:
        return [block for block in self.modules() if isinstance(block, Block) and block is not self]
