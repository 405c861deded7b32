"""Keeps samples of runs, and what training made of them: an observer that no request waits for.

A share of the prompts is kept (`rate`), in files of the run's directory, up to `budget` bytes of each run;
the oldest are dropped then. A later pass is matched by its token ids; it adds advantages and the trainer's
logprobs to the samples that it trains on. One thread does all the work; what is too much for it is dropped.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
import zlib
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tinkex.service.activity import run_of_adapter
from tinkex.service.home import Home
from tinkex.service.rows import SamplerRow
from tinkex.service.runs.execution import Execution
from tinkex.types.data import Datum, LossFnOutput
from tinkex.types.outputs import SampleResponse
from tinkex.types.sampling import SampleRequest

log = logging.getLogger("tinkex.service")
DIRECTORY = "rollouts"  # of a run
PARTS = 8  # files that a run's budget is split into; the oldest is dropped
WAITING = 512  # items that the thread may be behind
GATHERED = 0.05  # seconds in which items are collected, to be written together
KNOWN = 20_000  # samples of a run that a pass can be joined with
RUNS = 256  # whose samples are known
_JSON = orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True)
class _Sampled:
    run_id: str
    step: int
    request: SampleRequest
    response: SampleResponse
    at: float
    sampler: str


@dataclass(frozen=True)
class _Trained:
    run_id: str
    step: int
    data: Sequence[Datum]
    outputs: Sequence[LossFnOutput]


@dataclass(frozen=True)
class _Known:
    """Where a sample is: the record's id, its index there, and the lengths of prompt and answer."""

    record: int
    index: int
    prompt: int
    answer: int


class RolloutRecorder:
    """Observes samples and passes. `steps_of` is how many steps a run has taken."""

    def __init__(self, home: Home, rate: float, budget: int, steps_of: Callable[[str], int]) -> None:
        self._home, self._rate, self._budget, self._steps_of = home, rate, budget, steps_of
        self._queue: queue.Queue[_Sampled | _Trained | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._steps: OrderedDict[str, int] = OrderedDict()  # at which samplers were made, about
        self._kept: set[str] = set()  # runs of which anything is known
        self.dropped = 0
        # Of the thread alone:
        self._known: OrderedDict[str, OrderedDict[bytes, list[_Known]]] = OrderedDict()
        self._next: defaultdict[str, int] = defaultdict(int)

    # -- on the event loop: nothing but a look and a put --------------------------------------------------

    def sampled(self, row: SamplerRow, seconds: float, outcome: Any, request: SampleRequest) -> None:
        if not self._rate or not isinstance(outcome, SampleResponse):
            return
        run_id = run_of_adapter(row.adapter_dir)
        if run_id is None or not _chosen(request, row.sampler_id, self._rate):
            return
        step = self._steps.get(row.sampler_id)
        if step is None:
            step = self._steps[row.sampler_id] = self._steps_of(run_id)
            if len(self._steps) > KNOWN:
                self._steps.popitem(last=False)
        self._kept.add(run_id)
        self._put(_Sampled(run_id, step, request, outcome, time.time(), row.sampler_id))

    def worked(self, work: Execution, seconds: float) -> None:
        if (
            work.backward
            and work.run.id in self._kept
            and not work.future.failed
            and work.one_pass is not None
        ):
            outputs = work.future.outcome.loss_fn_outputs
            self._put(_Trained(work.run.id, self._steps_of(work.run.id), work.one_pass.data, outputs))

    def _put(self, item: _Sampled | _Trained) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._record, name="tinkex-rollouts", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def stop(self) -> None:
        """Write what waits, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5.0)

    def flush(self, seconds: float = 5.0) -> None:
        """Wait until what was put so far is written; for tests and for a page that was asked for anew."""
        deadline = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    # -- on the thread -----------------------------------------------------------------------------------

    def _record(self) -> None:
        """Take what has come, a batch at a time: looking at a run's files costs more than a record does."""
        ended = False
        while not ended:
            items = [self._queue.get()]
            if items[0] is not None:
                time.sleep(GATHERED)
            while len(items) < WAITING and not self._queue.empty():  # nobody else takes from it
                items.append(self._queue.get_nowait())
            lines = defaultdict[str, list[bytes]](list)
            for item in items:
                if item is None:
                    ended = True
                    continue
                with _warning(item.run_id):
                    records = [self._sample(item)] if isinstance(item, _Sampled) else self._joins(item)
                    lines[item.run_id] += [orjson.dumps(record, option=_JSON) + b"\n" for record in records]
            for run_id, written in lines.items():
                with _warning(run_id):
                    self._write(run_id, written)
            for _ in items:
                self._queue.task_done()

    def _sample(self, item: _Sampled) -> dict[str, Any]:
        number, prompt = self._number(item.run_id), item.request.prompt.to_numpy().astype(np.int32)
        known, samples = self._known_of(item.run_id), list[dict[str, Any]]()
        for index, sequence in enumerate(item.response.sequences):
            tokens = np.zeros(0, np.int32) if sequence.tokens_np is None else sequence.tokens_np
            fields: dict[str, Any] = {"tokens": tokens.astype(np.int32), "stop": sequence.stop_reason}
            if sequence.logprobs_np is not None:
                fields["logprobs"] = _rounded(sequence.logprobs_np)
            if sequence.topk_logprobs_np is not None:
                fields["topk"] = [row and row[:5] for row in sequence.topk_logprobs_np.rows()]
            samples.append(fields)
            whole = np.concatenate([prompt, tokens.astype(np.int32)])
            known.setdefault(_digest(whole), []).append(_Known(number, index, len(prompt), len(tokens)))
        while len(known) > KNOWN:
            known.popitem(last=False)
        params = item.request.sampling_params
        return {
            "kind": "sample", "id": number, "time": round(item.at, 3), "step": item.step,
            "group": _digest(prompt)[:6].hex(), "prompt": prompt, "samples": samples,
            "temperature": params.temperature, "sampler": item.sampler,
        }  # fmt: skip

    def _joins(self, item: _Trained) -> Iterator[dict[str, Any]]:
        known = self._known_of(item.run_id)
        for datum, output in zip(item.data, item.outputs, strict=False):
            targets, trainer = datum.loss_fn_inputs.get("target_tokens"), output.get("logprobs")
            if (
                targets is None
                or trainer is None
                or targets.values_np.ndim != 1
                or not targets.values_np.size
            ):
                continue
            last = targets.values_np[-1:].astype(np.int32)
            whole = np.concatenate([datum.model_input.to_numpy().astype(np.int32), last])
            given = datum.loss_fn_inputs.get("advantages")
            advantages = None if given is None else given.values_np
            for length in _ends(advantages, len(whole)):
                same = known.get(_digest(whole[:length]), [])  # answers may be equal: one after the other
                if not same or same[0].answer == 0:
                    continue
                same.append(found := same.pop(0))
                answer = slice(length - 1 - found.answer, length - 1)  # targets are one position behind
                fields: dict[str, Any] = {"trainer": _rounded(trainer.values_np[answer])}
                if advantages is not None:
                    part = advantages[answer]
                    fields["advantage"] = round(float(part.mean()), 6)
                    if part.size and (part != part[0]).any():
                        fields["advantages"] = _rounded(part)
                yield {
                    "kind": "joined",
                    "id": found.record,
                    "sample": found.index,
                    "step": item.step,
                    **fields,
                }

    def _known_of(self, run_id: str) -> OrderedDict[bytes, list[_Known]]:
        known = self._known.setdefault(run_id, OrderedDict())
        self._known.move_to_end(run_id)
        if len(self._known) > RUNS:
            self._known.popitem(last=False)
        return known

    def _number(self, run_id: str) -> int:
        if run_id not in self._next:
            self._next[run_id] = time.time_ns() // 1000  # above those of an earlier process
        self._next[run_id] += 1
        return self._next[run_id]

    def _write(self, run_id: str, lines: list[bytes]) -> None:
        directory = self._home.run_dir(run_id) / DIRECTORY
        if not lines or not directory.parent.is_dir():
            return  # nothing was joined, or the run was deleted
        directory.mkdir(exist_ok=True)
        parts = sorted(directory.glob("*.jsonl"))
        sizes, most = [part.stat().st_size for part in parts], self._budget // PARTS
        while lines:
            if not parts or sizes[-1] + len(lines[0]) > most:
                parts.append(directory / f"{int(parts[-1].stem) + 1 if parts else 1:06}.jsonl")
                sizes.append(0)
            fit = max(1, bisect_right(list(accumulate(map(len, lines), initial=sizes[-1])), most) - 1)
            _append(parts[-1], b"".join(lines[:fit]))
            sizes[-1] += sum(map(len, lines[:fit]))
            lines = lines[fit:]
            while sum(sizes) > self._budget and len(parts) > 1:
                parts.pop(0).unlink(missing_ok=True)
                sizes.pop(0)


@contextmanager
def _warning(run_id: str) -> Generator[None]:
    """Nothing that fails here may end the thread."""
    try:
        yield
    except Exception as error:
        log.warning("a rollout of %s was not kept: %s", run_id, error)


def _append(path: Path, lines: bytes) -> None:
    """Add whole lines or nothing."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        if file.write(lines) < len(lines):
            file.truncate(size)
            raise OSError("no space is left for it")


def _chosen(request: SampleRequest, sampler: str, rate: float) -> bool:
    """The same for every sample of one prompt from one sampler: groups stay whole."""
    return rate >= 1 or zlib.crc32(sampler.encode() + request.prompt.to_numpy().tobytes()) < rate * 2**32


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=16).digest()


def _rounded(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=-99999.0)
    return np.round(values, 5)


def _ends(advantages: np.ndarray | None, length: int) -> list[int]:
    """Where samples may end in a datum of so many tokens: after a stretch of advantages, and at the end."""
    ends = {length}
    if advantages is not None and advantages.size:
        active = np.append(advantages != 0, False)
        ends |= {int(i) + 2 for i in np.flatnonzero(active[:-1] & ~active[1:])}
    return sorted(end for end in ends if end <= length)
