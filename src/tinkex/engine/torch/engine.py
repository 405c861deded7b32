"""The PyTorch engine: one base model, its trainer, its sampler, and the thread they share.

Builds the parts, plans the memory, and turns the blocking `Trainer` and the asynchronous `Sampler` of the
contract into work for that thread. Knows neither the arithmetic nor how requests are batched.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from tinkex.engine.native.step import compiled_step
from tinkex.engine.protocol import (
    Command,
    CustomLoss,
    EngineConfig,
    EngineLost,
    ExportedAdapter,
    Heartbeat,
    Location,
    ModelInfo,
    Progress,
    R,
    SampledTokens,
    SampleWork,
    run_to_the_end,
)
from tinkex.engine.request import needs_token_bytes, user_error
from tinkex.engine.token_bytes import TokenTable
from tinkex.engine.torch import memory
from tinkex.engine.torch.backend import choose_backend
from tinkex.engine.torch.engine_thread import EngineThread
from tinkex.engine.torch.kv import PAGE, KVCache, page_bytes
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.loss_graph import read_loss_graph
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.sampler import Batch, Limits
from tinkex.engine.torch.sequences import Listener, Published, Request
from tinkex.engine.torch.threads import SHARED, ComputeThreads, apart, usable_cores
from tinkex.engine.torch.trainer import SUPPORTED_LOSSES, TorchTrainer
from tinkex.types.outputs import SampleResponse

_CHUNK_FLOPS = 1.2e14  # of a chunk of prompt on a GPU: 0.2 s on a large one
_PACKED_SHARE = 0.25  # of the memory that is free once the weights are loaded
_KV_SHARE, _ADAPTER_SHARE = 0.25, 0.25  # of what is free after that


class TorchEngine:
    """An engine on the CPU or on one CUDA device.

    >>> engine = TorchEngine(EngineConfig("models/SmolLM2-135M-Instruct"))    # doctest: +SKIP
    """

    def __init__(self, config: EngineConfig, decoder: Decoder | None = None) -> None:
        """`decoder` stands for the model that `config` names, if it is there already."""
        apart(lambda: self._load(config, decoder))

    def _load(self, config: EngineConfig, decoder: Decoder | None) -> None:
        device, dtype = choose_device(config)
        decoder = decoder or load_decoder(config.model, device, dtype)
        decoder = decoder.with_backend(choose_backend(device, dtype, deterministic=config.deterministic))
        if config.deterministic and device.type == "cuda":
            check_deterministic(decoder)
        room = memory.free_bytes(device) * _PACKED_SHARE
        compiled = compiled_step(decoder, room)
        if compiled is None:
            decoder.pack(room)
        context = min(config.max_context or decoder.config.max_context, decoder.config.max_context)
        self.memory = plan_memory(config, decoder, context)
        self.memory["weights"] += compiled.nbytes if compiled else 0
        shape = decoder.config
        pages = self.memory["kv"] // page_bytes(shape.layers, shape.kv_heads, shape.head_dim, dtype)
        cache = KVCache(
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            pages,
            device,
            dtype,
            clears=decoder.backend.clears_pages,
        )
        limits = Limits(context, config.max_batch, **_large_steps(decoder))
        pipeline, prefill = decoder.backend.captured_steps(decoder, cache, limits)
        lost = lambda: probe(device)  # noqa: E731
        self._batch = Batch(decoder, cache, limits, pipeline, compiled, prefill, lost)
        # Sums depend on how many threads share them: a deterministic engine does not change that under way.
        threads = config.threads or (usable_cores() if config.deterministic else None)
        self._trainer = TorchTrainer(
            decoder,
            config.name or config.model,
            max_context=context,
            max_pass_tokens=config.max_pass_tokens,
            share_from=0 if config.deterministic else SHARED,
        )
        self._published: dict[str, Published] = {}
        self._thread = EngineThread(self._batch, lambda: ComputeThreads(threads).adjust, lost, self.stats)
        self.trainer = _Trainer(self._thread, self._trainer)
        self.sampler = _Sampler(self._thread, self._trainer, self._batch, self._published, TokenTable(config))
        self.info = ModelInfo(
            arch=shape.arch,
            vocab_size=shape.vocab_size,
            max_context=context,
            eos_ids=shape.eos_ids,
            parameters=sum(p.numel() for p in decoder.parameters()),
            layers=shape.layers,
            losses=SUPPORTED_LOSSES,
            fingerprint=self._trainer.base.fingerprint,
        )

    def check_loss(self, loss: CustomLoss) -> None:
        """Refuse an uploaded loss with anything in it that is not on the allow-list."""
        read_loss_graph(loss)

    def heartbeat(self) -> Heartbeat:
        trouble = self._thread.trouble
        return Heartbeat(not trouble, trouble, self._thread.stats, self.memory)

    @property
    def working(self) -> bool:
        return not self._thread.trouble

    def stats(self) -> dict[str, float]:
        pages = self._batch.cache.pages
        return {
            "adapters_live": self._trainer.adapters,
            "adapters_published": len(self._published),
            "adapter_bytes": self._trainer.adapter_bytes,
            "kv_pages_total": pages.count,
            "kv_pages_used": pages.count - pages.available,
            "kv_pages_free": pages.available,
            "sequences_running": len(self._batch.running),
            "sequences_waiting": len(self._batch.waiting),
            "preemptions": self._batch.preemptions,
        }

    def close(self) -> None:
        self._thread.close()


def probe(device: torch.device) -> None:
    """Raise if the device cannot be used any more: what it was given to do is done, or fails here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_device(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `config` asks for, or the best there is."""
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda" if cuda else "cpu") if config.device == "auto" else torch.device(config.device)
    )
    if device.type == "cuda" and not cuda:
        raise user_error(f"device {config.device!r} was asked for, and this machine has no CUDA device")
    if config.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, getattr(torch, config.dtype)


def check_deterministic(decoder: Decoder) -> None:
    """Refuse what cannot be the same to the last bit alone and in any batch on CUDA."""
    weight, shape = decoder.unembed_weight, decoder.config
    odd = [
        part.name
        for in_features, parts in decoder.sites().values()
        for part in parts
        if in_features % 8 or (part.kind != "unembed" and part.out_features % 8)
    ]
    problem = None
    if weight.dtype != torch.bfloat16:
        problem = f"this one is in {str(weight.dtype).removeprefix('torch.')}"
    elif shape.experts is not None:
        problem = f"{shape.arch} has experts"
    elif odd:
        problem = f"the sizes of {odd[0]} are not multiples of 8"
    elif not decoder.backend.invariant:
        problem = "its kernels need Triton, which is not installed"
    if problem:
        raise user_error(f"deterministic on CUDA is for dense models in bfloat16, and {problem}")


def plan_memory(config: EngineConfig, decoder: Decoder, context: int) -> dict[str, int]:
    """Bytes for each use, from what is free now that the weights are loaded.

    KV pages for one full context at least, and never more than `max_batch` of them.
    """
    shape, weight = decoder.config, decoder.unembed_weight
    free = int(memory.free_bytes(weight.device))
    page = page_bytes(shape.layers, shape.kv_heads, shape.head_dim, weight.dtype)
    one = -(-context // PAGE)
    wanted = (int(free * _KV_SHARE) if config.kv_bytes is None else config.kv_bytes) // page
    pages = max(1, wanted) if config.kv_bytes is not None else min(max(wanted, one), one * config.max_batch)
    tokens = config.max_pass_tokens or memory.pass_tokens(shape, weight.dtype.itemsize, weight.device)
    return {
        "free": free,
        "weights": sum(p.nbytes for p in decoder.parameters()) + decoder.packed_bytes,
        "kv": pages * page,
        "adapters": int(free * _ADAPTER_SHARE) if config.adapter_bytes is None else config.adapter_bytes,
        "activations": tokens * memory.activation_bytes(shape, weight.dtype.itemsize, recompute=True),
    }


def _large_steps(decoder: Decoder) -> dict[str, int]:
    """On a GPU, prompts in chunks that are large enough for it and short for those who decode meanwhile."""
    if decoder.unembed_weight.device.type != "cuda":
        return {}
    parameters = sum(p.numel() for p in decoder.parameters())
    chunk = int(min(8192, max(512, _CHUNK_FLOPS / (2 * parameters)))) // 256 * 256
    return {"prefill_alone": chunk, "prefill_beside": chunk, "logits": 1 << 27}


class _Trainer:
    """The contract's trainer: any thread may submit."""

    def __init__(self, thread: EngineThread, trainer: TorchTrainer) -> None:
        self._thread, self._trainer = thread, trainer

    def submit(self, command: Command[R]) -> Future[R]:
        return self._thread.submit(lambda: self._trainer.execute(command))

    def run(self, command: Command[Any], progress: Progress | None = None) -> Any:
        return run_to_the_end(self, command, progress)


class _Sampler:
    """The contract's sampler. Everything but waiting happens on the engine's thread."""

    def __init__(
        self,
        thread: EngineThread,
        trainer: TorchTrainer,
        batch: Batch,
        published: dict[str, Published],
        table: TokenTable,
    ) -> None:
        self._thread, self._trainer, self._batch, self._table = thread, trainer, batch, table
        self._published = published
        self._serial = itertools.count()

    async def sample(self, work: SampleWork) -> SampleResponse:
        table = await self._table.get() if needs_token_bytes(work) else ()
        with self._submitted(work, table) as future:
            return await asyncio.wrap_future(future)

    async def stream(self, work: SampleWork) -> AsyncIterator[SampledTokens | SampleResponse]:
        table = await self._table.get() if needs_token_bytes(work) else ()
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        pieces: deque[SampledTokens] = deque()

        def wake(*_: object) -> None:  # on the engine's thread
            if not ready.is_set():
                loop.call_soon_threadsafe(ready.set)

        def listen(index: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
            pieces.append(SampledTokens(index, tokens, logprobs))
            wake()

        with self._submitted(work, table, listen) as future:
            future.add_done_callback(wake)
            done = False
            while not done:
                await ready.wait()
                ready.clear()
                done = future.done()  # asked before the pieces are read: then none is missed
                while pieces:
                    yield pieces.popleft()
            yield future.result()

    @contextlib.contextmanager
    def _submitted(
        self, work: SampleWork, token_bytes: Sequence[bytes], listener: Listener | None = None
    ) -> Iterator[Future[SampleResponse]]:
        """Submit a request; leaving before it is done cancels it."""
        max_tokens = self._batch.check_work(work)  # refused at once, even while a command runs
        future: Future[SampleResponse] = Future()
        admitted: list[Request] = []

        def submit() -> None:
            if not future.cancelled():
                try:
                    published = self._find(work.adapter)
                    request = self._batch.submit(work, max_tokens, published, future, token_bytes, listener)
                    admitted.append(request)
                except Exception as error:
                    future.set_exception(error)

        self._thread.post(submit)
        try:
            yield future
        finally:
            if not future.done() or future.cancelled():
                future.cancel()
                with contextlib.suppress(EngineLost):  # nothing is held any more
                    self._thread.post(lambda: [self._batch.cancel(request) for request in admitted])

    def _find(self, name: str | None) -> Published | None:
        if name is not None and name not in self._published:
            raise user_error(f"there is no published adapter {name!r} on this engine")
        return None if name is None else self._published[name]

    async def publish(self, name: str, source: Location | ExportedAdapter) -> None:
        def publish() -> None:
            if name not in self._published:
                adapter = self._trainer.published(source)
                root = f"adapter {next(self._serial)}".encode()  # a name may come back with other weights
                self._published[name] = Published(name, adapter, root)

        await asyncio.wrap_future(self._thread.submit(publish))

    async def retire(self, name: str) -> None:
        done: Future[None] = Future()

        def retire() -> None:
            published = self._published.pop(name, None)
            if published is None:
                done.set_result(None)
            else:
                published.retired.append(done)
                published.settle()

        self._thread.post(retire)
        await asyncio.wrap_future(done)
