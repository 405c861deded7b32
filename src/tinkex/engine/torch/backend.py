"""The computations that have a plain implementation and a faster one on some device, as one strategy.

`choose_backend` picks it once, when a decoder is loaded; no other code checks device capabilities.
`Backend` is plain torch and runs anywhere. `CudaBackend` computes the same by kernels and captured graphs,
and `NativeBackend` decodes on the CPU by C; tests compare them. Knows nothing of requests or runs.

Shapes: T tokens, N rows, V padded vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch import plain
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.functions import linear
from tinkex.engine.torch.hooks import Attend, ForwardContext, PartialProjection
from tinkex.engine.torch.kv import KVCache, PagedAttend, TokenSpan
from tinkex.engine.torch.logprobs import logprob_chunk
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.models.moe import ExpertMlp, Routing, expert_linear
from tinkex.engine.torch.next_tokens import Choice, draw, scaled_logprobs
from tinkex.engine.torch.states import StateGroup, StatePool

if TYPE_CHECKING:
    from tinkex.engine.native.step import CompiledStep
    from tinkex.engine.torch.adapters import Adapter
    from tinkex.engine.torch.continuous_batch import StepLimits
    from tinkex.engine.torch.models.architecture import ModelConfig
    from tinkex.engine.torch.models.attention import Attention
    from tinkex.engine.torch.models.decoder import Decoder
    from tinkex.engine.torch.models.delta_net import DeltaNet
    from tinkex.engine.torch.sequences import Landed, RunningRequest, RunningSequence


class PlacedRows(NamedTuple):
    """The rows of a decode batch: what stays constant from step to step."""

    pages: np.ndarray  # int32 [rows, pages of a whole context]
    temperature: np.ndarray  # float32 [rows]
    adapters: Sequence[Adapter | None]
    keeps_logits: bool  # for rows with rules


class DecodeSteps(Protocol):
    """The device's part of `DecodeAhead`. Every rank has one, and those of all ranks do the same."""

    def place(self, rows: PlacedRows) -> None: ...

    def launch(self, orders: Tensor) -> None:
        """Launch a step of the placed rows; `orders` is int64, on the host."""
        ...

    def share_tokens(self) -> None:
        """Give the other ranks the tokens that rank 0 drew by rules."""
        ...


class StepLead:
    """Called before `DecodeSteps` does something, so that other ranks do it too. Here there are none."""

    def place(self, rows: PlacedRows) -> AbstractContextManager[None]:
        return nullcontext()

    def launch(self, orders: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def share_tokens(self) -> AbstractContextManager[None]:
        return nullcontext()


class DecodeAhead(Protocol):
    """Decodes running sequences one step ahead of the host: a call returns the results of the step before."""

    @property
    def steps(self) -> DecodeSteps: ...

    def serves(self, request: RunningRequest) -> bool: ...

    def step(self, sequences: Sequence[RunningSequence]) -> Landed:
        """Launch the next step of `sequences`, which hold their pages; returns the last step's results."""
        ...

    def land(self) -> Landed:
        """Wait for the step in flight; returns its results."""
        ...

    def draw(self) -> None:
        """Draw, in the step in flight, for requests whose rules need the tokens of the step before.

        Called once those have been appended to their sequences.
        """
        ...

    def drop(self) -> None: ...


class PrefillSteps(Protocol):
    """Computes the tokens of prefill and mixed steps by captured graphs."""

    min_split_keys: int  # what `Backend.paged_attend` takes where no graph serves a step

    def __call__(
        self,
        tokens: np.ndarray,
        pieces: Sequence[TokenSpan],
        lora: LoraBatch | None,
        states: Sequence[int] = (),
    ) -> Tensor | None:
        """The final hidden states [T, D], valid until the next call; None if no graph serves the step.

        `states` are the slots of the pieces' states, if the model has recurrent layers.
        """
        ...


class Backend:
    """How a decoder, its trainer and its sampler compute: here in plain torch."""

    elementwise: ModuleType = plain  # of a decoder: the functions of `plain`
    invariant = False  # batch-invariant: a row's result is bitwise identical in any batch
    reads_codes = False  # quantised weights are kept in the layout that kernels read
    clears_pages = True  # attention multiplies masked keys by 0, so reused pages must hold no NaN

    logprob_chunk = staticmethod(logprob_chunk)
    expert_linear = staticmethod(expert_linear)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None, packed: Tensor | None) -> Tensor:
        """x @ weight.T + bias for a frozen weight; `packed` is what `functions.pack` made of it."""
        return linear(x, weight, bias, packed)

    def route(
        self, experts: ExpertMlp, x_TD: Tensor, known_TK: Tensor | None, context: ForwardContext
    ) -> Routing:
        """`ExpertMlp.route`."""
        return experts.route(x_TD, known_TK)

    def routed_experts(
        self, experts: ExpertMlp, x_TD: Tensor, routing: Routing, context: ForwardContext
    ) -> Tensor:
        """`ExpertMlp.routed`."""
        return experts.routed(x_TD, routing, context)

    def add_gated(self, y_TD: Tensor, shared_TD: Tensor, x_TD: Tensor, gate_1D: Tensor) -> Tensor:
        """The experts' results and the shared expert's, times the sigmoid of x · gate."""
        return y_TD + shared_TD * F.linear(x_TD, gate_1D).sigmoid()

    def few_outputs(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """A product with a small matrix [O, I], rows contiguous."""
        return F.linear(x_TI, weight_OI)

    def split_heads(
        self, attention: Attention, qkv: Tensor | PartialProjection, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`Attention.split`."""
        return attention.split(qkv, context)

    def gated_heads(self, o_THC: Tensor, gate_THC: Tensor) -> Tensor:
        return o_THC * gate_THC.sigmoid()

    def mixed_delta(self, net: DeltaNet, qkvz: Tensor, rates: Tensor, states: Sequence[StateGroup]) -> Tensor:
        """`DeltaNet.mixed`; `states` are what `packed_states` or `slot_states` gave."""
        return net.mixed(qkvz, rates, states)

    def packed_states(
        self, config: ModelConfig, lengths: Sequence[int], device: torch.device
    ) -> Sequence[StateGroup]:
        """Of packed sequences that are computed from their starts; none where the model needs none."""
        return [StateGroup(lengths, device)] if config.state_shapes else []

    def slot_states(
        self, pool: StatePool, slots: Sequence[int], counts: Sequence[int]
    ) -> Sequence[StateGroup]:
        """Of one step in which the sequence of slots[i] advances by counts[i] tokens."""
        return pool.groups(slots, counts)

    def lora(
        self, adapters: Sequence[Adapter | None], lengths: Sequence[int], *, train: bool = False
    ) -> LoraBatch:
        return LoraBatch(adapters, lengths, train=train)

    def packed_attend(self, lengths: Sequence[int], windows: Sequence[int | None]) -> Attend:
        return PackedAttend(lengths, windows)

    def paged_attend(
        self,
        cache: KVCache,
        pieces: Sequence[TokenSpan],
        windows: Sequence[int | None],
        min_split_keys: int = 0,
    ) -> Attend:
        """Attention of a step's tokens over the paged cache; `min_split_keys` is that of `PrefillSteps`."""
        return PagedAttend(cache, pieces, windows, cache.device)

    def draw(self, logits_NV: Tensor, choice: Choice, vocab: int) -> tuple[list[int], list[float]]:
        """One token and its logprob for each row, without top-k and top-p."""
        logprobs_NV = self.logprobs(logits_NV, to_device(choice.temperature, logits_NV.device), vocab)
        tokens_N = draw(logprobs_NV, choice)
        return tokens_N.tolist(), logprobs_NV.gather(1, tokens_N[:, None])[:, 0].tolist()

    def logprobs(self, logits_NV: Tensor, temperature_N: Tensor, vocab: int) -> Tensor:
        """log_softmax(logits / temperature) in fp32, -inf from id `vocab` on; 0 counts as 1."""
        return scaled_logprobs(logits_NV, temperature_N, vocab)

    def captured_steps(
        self, decoder: Decoder, cache: KVCache, limits: StepLimits, states: StatePool | None = None,
        lead: StepLead | None = None,
    ) -> tuple[DecodeAhead | None, PrefillSteps | None]:  # fmt: skip
        """What the sampler uses instead of eager steps; None where there is no such thing."""
        return None, None

    def compiled_step(self, decoder: Decoder, room: float) -> Callable[[KVCache], CompiledStep] | None:
        """Makes a decode step in C over a cache, if a second copy of the decoder's weights fits `room`."""
        return None


def choose_backend(
    device: str | torch.device, dtype: torch.dtype, *, kernels: bool = True, deterministic: bool = False
) -> Backend:
    """The fastest backend for `device` and `dtype`. On CUDA a deterministic one is batch-invariant.

    `kernels`: whether kernels serve the model (`Decoder.kernels_serve`).
    """
    device = torch.device(device)
    if device.type == "cpu" and dtype == torch.float32:
        from tinkex.engine.native.step import NativeBackend

        return NativeBackend()
    kernels = kernels and importlib.util.find_spec("triton") is not None
    if device.type == "cuda" and dtype == torch.bfloat16 and kernels:
        from tinkex.engine.cuda.cuda_backend import CudaBackend

        return CudaBackend(device, dtype, invariant=deterministic)
    return Backend()
