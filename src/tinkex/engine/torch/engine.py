"""The PyTorch engine: one base model, its trainer, its sampler, and the thread that they share.

Builds the parts and plans the memory. Knows neither the arithmetic nor how requests are batched.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from tinkex.engine.grammar import Grammars
from tinkex.engine.protocol import (
    Command,
    EngineConfig,
    EngineError,
    EngineLost,
    Heartbeat,
    ModelInfo,
    SaveAdapter,
)
from tinkex.engine.request import user_error
from tinkex.engine.token_bytes import TokenTable
from tinkex.engine.torch import memory
from tinkex.engine.torch.backend import choose_backend
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.cpu_threads import SHARED, ComputeThreads, apart, usable_cores
from tinkex.engine.torch.engine_thread import EngineThread, settle
from tinkex.engine.torch.kv import PAGE, KVCache, page_bytes
from tinkex.engine.torch.load import load_decoder, wanted_dtype
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.sampler import TorchSampler
from tinkex.engine.torch.sampler_files import SamplerCopy
from tinkex.engine.torch.sequences import PublishedAdapter
from tinkex.engine.torch.states import StatePool, slot_bytes
from tinkex.engine.torch.trainer import SUPPORTED_LOSSES, TorchTrainer
from tinkex.engine.warm_up import WarmUp, sample_once, warm_up
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.torch.backend import CompiledStep
    from tinkex.engine.torch.tensor_parallel.ranks import Ranks

    StepOverCache = Callable[[KVCache], CompiledStep]

log = logging.getLogger("tinkex")
_CHUNK_FLOPS = 1.2e14  # of one prefill chunk on a GPU: about 0.2 s
_PACKED_SHARE = 0.25  # of the free memory after loading, for a second copy of the weights
_KV_SHARE, _STATE_SHARE, ADAPTER_SHARE = 0.25, 0.25, 0.25  # of the free memory after that
KV_SHARE_ALONE = 0.6  # instead of _KV_SHARE, if the engine does not train


class TorchEngine:
    """An engine on the CPU or on CUDA devices."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder | None = None, ranks: Ranks | None = None
    ) -> None:
        """`decoder` is used instead of loading the model that `config` names; `ranks` are its parts'."""
        self._ranks = ranks if ranks is not None or config.tensor == 1 else start_ranks(config)
        try:
            apart(lambda: self._build(config, decoder))
        except BaseException as error:
            if self._ranks is not None:
                self._ranks.close()
            if isinstance(error, InvalidInputError):  # of the model's files
                raise user_error(str(error)) from error
            raise
        if config.warm_up and choose_device(config)[0].type == "cuda":
            self._warm_up(config)
        elif config.warm_up:
            apart(lambda: sample_once(self))

    def _build(self, config: EngineConfig, decoder: Decoder | None) -> None:
        device, dtype = choose_device(config)
        ranks = self._ranks
        decoder, compiled = self._load(config, decoder, device, dtype)
        context = min(config.max_context or decoder.config.max_context, decoder.config.max_context)
        free = memory.free_bytes(device)
        self._memory = plan_memory(config, decoder, context, free if ranks is None else ranks.free(free))
        self._memory["weights"] += decoder.multiplied_bytes if compiled else 0
        shape = decoder.config
        limits = StepLimits(context, config.max_batch, **_large_steps(decoder))
        lost = (lambda: probe(device)) if ranks is None else ranks.check
        self._batch = self._make_batch(decoder, compiled, limits, lost, device, dtype)
        # Sums depend on the number of threads, so a deterministic engine keeps it fixed.
        threads = config.threads or (usable_cores() if config.deterministic else None)
        if ranks is not None:  # ranks on a CPU share its cores
            threads = config.threads or max(1, usable_cores() // config.tensor)
        bounds = {"max_context": context, "max_pass_tokens": config.max_pass_tokens}
        share_from = 0 if config.deterministic else SHARED
        make = TorchTrainer if ranks is None else ranks.trainer
        self._thread = thread = EngineThread(self._batch, lambda: ComputeThreads(threads).adjust, lost)
        self._trainer = make(
            decoder, config.name or config.model, **bounds, share_from=share_from,
            stopping=lambda: thread.trouble, rest=thread.rest,
        )  # fmt: skip
        self._published: dict[str, PublishedAdapter] = {}
        self.trainer = QueuedTrainer(thread, self._trainer)
        table = TokenTable(config)
        self._grammars = Grammars(config, table, shape.vocab_size, shape.eos_ids)
        self.sampler = TorchSampler(
            thread, self._trainer, self._batch, self._published, table, self._grammars
        )
        self.info = ModelInfo(
            arch=shape.arch,
            vocab_size=shape.vocab_size,
            max_context=context,
            eos_ids=shape.eos_ids,
            parameters=(decoder if ranks is None else ranks.plan.whole).parameter_count,
            layers=shape.layers,
            losses=SUPPORTED_LOSSES,
            fingerprint=self._trainer.base.fingerprint,
        )
        thread.start(self._stats)
        if ranks is not None:
            ranks.lost.add_done_callback(self._lose)

    def _load(
        self, config: EngineConfig, decoder: Decoder | None, device: torch.device, dtype: torch.dtype
    ) -> tuple[Decoder, StepOverCache | None]:
        """The decoder, its weights laid out for its steps, and what makes its step in C if it has one."""
        if self._ranks is not None:  # a rank has the backend that its part was loaded for
            decoder = self._ranks.load(config, device, dtype)
        else:
            decoder = decoder or load_decoder(config.model, device, dtype, config.quantize)
            suited = {"kernels": decoder.kernels_serve, "deterministic": config.deterministic}
            decoder = decoder.with_backend(choose_backend(device, dtype, **suited))
        if config.deterministic and device.type == "cuda":
            check_deterministic(decoder)
        room = memory.free_bytes(device) * _PACKED_SHARE
        compiled = decoder.backend.compiled_step(decoder, room) if self._ranks is None else None
        if compiled is None:
            decoder.pack(room)
        return decoder, compiled

    def _make_batch(
        self, decoder: Decoder, compiled: StepOverCache | None, limits: StepLimits,
        lost: Callable[[], None], device: torch.device, dtype: torch.dtype,
    ) -> ContinuousBatch:  # fmt: skip
        """Continuous batching over as many KV pages and states as the plan of the memory has room for."""
        shape = decoder.config
        pages = self._memory["kv"] // page_bytes(shape.kv_shapes, dtype)
        slots = self._memory["states"] // slot_bytes(shape.state_shapes) if shape.state_shapes else 0
        if self._ranks is not None:
            return self._ranks.batch(decoder, pages, slots, limits)
        cache = KVCache(shape.kv_shapes, pages, device, dtype, clears=decoder.backend.clears_pages)
        states = StatePool(shape.state_shapes, slots, device) if slots else None
        pipeline, prefill = decoder.backend.captured_steps(decoder, cache, limits, states)
        step = None if compiled is None else compiled(cache)
        return ContinuousBatch(decoder, cache, limits, pipeline, step, prefill, lost, states)

    def _warm_up(self, config: EngineConfig) -> None:
        work = WarmUp(batch=config.max_batch, pass_tokens=self._trainer.pass_tokens())
        try:
            seconds = apart(lambda: warm_up(self, work))
        except BaseException:
            self.close()
            raise
        log.info("kernels are compiled and steps captured (%.0f s)", seconds)

    def _lose(self, lost: Future[str]) -> None:
        """A rank is lost: a failure on the thread makes it probe the ranks, and end."""

        def fail() -> None:
            raise RuntimeError(lost.result())

        with contextlib.suppress(EngineLost):
            self._thread.post(fail)

    def heartbeat(self) -> Heartbeat:
        trouble = self._thread.trouble
        return Heartbeat(not trouble, trouble, self._thread.stats, self._memory)

    def _stats(self) -> dict[str, float]:
        pages = self._batch.cache.pages
        return {
            "adapters_live": len(self._trainer.adapters),
            "adapters_published": len(self._published),
            "adapter_bytes": self._trainer.adapter_bytes,
            "kv_pages_total": pages.count,
            "kv_pages_used": pages.count - pages.available,
            "kv_pages_free": pages.available,
            "batch_slots": self._batch.limits.sequences,
            "sequences_running": len(self._batch.running),
            "sequences_waiting": len(self._batch.waiting),
            "preemptions": self._batch.preemptions,
        }

    def close(self) -> None:
        self._thread.close()
        self.trainer.close()
        self._grammars.close()
        if self._ranks is not None:
            self._ranks.close()


def start_ranks(config: EngineConfig) -> Ranks:
    from tinkex.engine.torch.tensor_parallel.ranks import Ranks
    from tinkex.engine.torch.tensor_parallel.team import ProcessTeam

    device, _ = choose_device(config)
    if device.type == "cuda" and (device.index or 0) + config.tensor > (count := torch.cuda.device_count()):
        raise user_error(f"tensor={config.tensor} needs as many GPUs, and this machine has {count}")
    return Ranks(ProcessTeam(config, device))


def probe(device: torch.device) -> None:
    """Wait for the device; raises if it failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_device(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `config` asks for, or the best there is."""
    cuda, asked = torch.cuda.is_available(), config.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", asked):
        raise user_error(f"there is no device {asked!r}; allowed: auto, cpu, cuda, cuda:N")
    device = torch.device(asked) if asked != "auto" else torch.device("cuda" if cuda else "cpu")
    if device.type == "cuda" and not cuda:
        raise user_error(f"device {asked!r} was asked for, and this machine has no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise user_error(f"device {asked!r} was asked for, and this machine has {count} CUDA devices")
    return device, wanted_dtype(config.dtype, device)


def check_deterministic(decoder: Decoder) -> None:
    """Refuse a model that cannot be batch-invariant on CUDA."""
    weight, shape = decoder.unembed_weight, decoder.config
    parts = [(part, i) for i, site in decoder.sites().values() for part in site]
    odd = [part.name for part, i in parts if i % 8 or (part.kind != "unembed" and part.out_features % 8)]
    problem = None
    if weight.dtype != torch.bfloat16:
        problem = f"this one is in {str(weight.dtype).removeprefix('torch.')}"
    elif decoder.slots():
        problem = "the weights of this one are kept quantised"
    elif shape.experts is not None:
        problem = f"{shape.arch} has experts"
    elif odd:
        problem = f"the sizes of {odd[0]} are not multiples of 8"
    elif shape.state_shapes:
        problem = f"{shape.arch} has recurrent layers"
    elif decoder.shards is not None:
        problem = "this one is on several GPUs"
    elif not shape.kernels_serve:
        problem = f"no kernels suit {shape.arch}"
    elif not decoder.backend.invariant:
        problem = "its kernels need Triton, which is not installed"
    if problem:
        raise user_error(f"deterministic on CUDA is for dense models in bfloat16, and {problem}")


def plan_memory(config: EngineConfig, decoder: Decoder, context: int, room: float) -> dict[str, int]:
    """Bytes for each use, from the `room` that is free after loading the weights.

    KV pages for one full context at least, and never more than `max_batch` of them.
    """
    shape, weight = decoder.config, decoder.unembed_weight
    free = int(room)
    page = page_bytes(shape.kv_shapes, weight.dtype)
    one = -(-context // PAGE)
    # An engine that only samples needs no room for passes, and one that only trains no KV pages.
    share = {"both": _KV_SHARE, "sampler": KV_SHARE_ALONE, "trainer": 0.0}[config.role]
    wanted = (int(free * share) if config.kv_bytes is None else config.kv_bytes) // page
    pages = max(1, wanted) if config.kv_bytes is not None else min(max(wanted, one), one * config.max_batch)
    # A slot for each of `max_batch` sequences and as many snapshots, as far as there is room; two at least.
    slot = slot_bytes(shape.state_shapes)
    slots = max(2, min(2 * config.max_batch, int(free * _STATE_SHARE) // slot)) if slot else 0
    tokens = config.max_pass_tokens or memory.pass_tokens(shape, weight.dtype.itemsize, weight.device)
    return {
        "free": free,
        "weights": decoder.weight_bytes + decoder.packed_bytes,
        "kv": pages * page,
        "states": slots * slot,
        "adapters": int(free * ADAPTER_SHARE) if config.adapter_bytes is None else config.adapter_bytes,
        "activations": tokens * memory.activation_bytes(shape, weight.dtype.itemsize, recompute=True),
    }


def _large_steps(decoder: Decoder) -> dict[str, int]:
    """On a GPU, prefill chunks that fill it without delaying decoding sequences for long."""
    if decoder.unembed_weight.device.type != "cuda":
        return {}
    parameters = decoder.parameter_count
    chunk = int(min(8192, max(512, _CHUNK_FLOPS / (2 * parameters)))) // 256 * 256
    return {"prefill_alone": chunk, "prefill_beside": chunk, "logits": 1 << 27}


class QueuedTrainer:
    """The contract's trainer: commands wait for their turn on the engine's thread."""

    def __init__(self, thread: EngineThread, trainer: TorchTrainer) -> None:
        self._thread, self._trainer = thread, trainer
        self._writer = ThreadPoolExecutor(1, "tinkex-writer")

    def submit(self, command: Command[Any]) -> Future[Any]:
        if isinstance(command, SaveAdapter) and command.sampling:
            return self._written_beside(command)
        return self._thread.submit(lambda: self._trainer.execute(command))

    def _written_beside(self, command: SaveAdapter) -> Future[int]:
        """The copy is taken in command order, and written while the engine's thread continues."""
        written: Future[int] = Future()

        def write(copy: SamplerCopy) -> None:
            if written.set_running_or_notify_cancel():
                try:
                    settle(written, copy.write())
                except Exception as error:
                    settle(written, error if isinstance(error, EngineError) else EngineError(str(error)))

        def taken(taking: Future[SamplerCopy]) -> None:
            if (error := taking.exception()) is not None:
                settle(written, error)
            else:
                self._writer.submit(write, taking.result())

        self._thread.submit(lambda: self._trainer.sampler_copy(command)).add_done_callback(taken)
        return written

    def close(self) -> None:
        """What is being written gets written."""
        self._writer.shutdown()
