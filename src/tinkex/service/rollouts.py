"""Keeps samples of runs, and what training made of them: an observer that no request waits for.

Only what a run's owner draws with a sampler of a session is kept: others may sample from its checkpoints too,
and their prompts are not the owner's to see. A share of the prompts is kept (`rate`), in files of the run's
directory, up to `budget` bytes of each run; the oldest are dropped then. A later pass is matched by its token
ids; it adds advantages and the trainer's logprobs to the samples that it trains on. One thread does all the
work; what is too much for it is dropped.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from tinkex.service.activity import run_of_adapter
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.rollout_files import DIRECTORY, Record, packed, write
from tinkex.service.rows import SamplerRow
from tinkex.service.runs.execution import Execution
from tinkex.types.data import Datum, EncodedTextChunk, LossFnOutput
from tinkex.types.outputs import SampledSequence, SampleResponse
from tinkex.types.sampling import SampleRequest

log = logging.getLogger("tinkex.service")
WAITING, WAITING_TOKENS = 4096, 8_000_000  # items, and tokens in them, that the thread may be behind
GATHERED = 0.2  # seconds in which items are collected, to be written together
ENDING = 5.0  # seconds in which the thread may write what waits at the end
KNOWN = 20_000  # samples of a run that a pass can be joined with
RUNS = 256  # of which the samples are known
LIKELY = 5  # tokens of each position that are kept of those that were asked for


class _Item(NamedTuple):
    run_id: str
    tokens: int
    records: Callable[[], Iterable[Record]]  # called on the thread


class _Known(NamedTuple):
    """Where a sample is: the record's id, its index there, the sampler's step, and the answer's length."""

    record: int
    sample: int
    step: int
    answer: int
    joined: bool = False  # with a pass that trained on it


class RolloutRecorder:
    """Observes samples and passes. `steps_of` is how many steps a run has taken."""

    def __init__(
        self, home: Home, ledger: Ledger, rate: float, budget: int, steps_of: Callable[[str], int]
    ) -> None:
        self._home, self._ledger = home, ledger
        self._rate, self._budget, self._steps_of = rate, budget, steps_of
        self._waiting = deque[_Item]()
        self._awake, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._step_of = lru_cache(KNOWN)(self._first_step)
        self._kept: set[str] = set()  # runs of which anything is known
        self._put_tokens = self.dropped = 0
        # Used only by the thread; others read the first:
        self._written_tokens = 0
        self._known_of = lru_cache(RUNS)(_nothing_known)
        self._number = 0  # of the last record

    # -- on the event loop: nothing but a look and a put --------------------------------------------------

    def sampled(self, row: SamplerRow, seconds: float, outcome: Any, request: SampleRequest) -> None:
        if not self._rate or not row.sampler_id or not isinstance(outcome, SampleResponse):
            return
        run_id = run_of_adapter(row.adapter_dir)
        if run_id is None or (step := self._step_of(run_id, row.sampler_id, row.owner)) is None:
            return
        if not all(isinstance(one, EncodedTextChunk) for one in request.prompt.chunks):
            return
        prompt = request.prompt.to_numpy()
        if not _chosen(prompt, row.sampler_id, self._rate):
            return
        self._kept.add(run_id)
        answers = outcome.sequences
        drawn = sum(len(one.tokens_np) for one in answers if one.tokens_np is not None)
        fields: Record = {
            "time": round(time.time(), 3), "step": step,
            "sampler": row.sampler_id, "temperature": request.sampling_params.temperature,
        }  # fmt: skip
        tokens = len(prompt) + drawn * (1 + request.topk_sample_logprobs)
        self._put(_Item(run_id, tokens, partial(self._sample, run_id, prompt, answers, fields)))

    def _first_step(self, run_id: str, sampler: str, owner: str) -> int | None:
        """At which a sampler was made, about; None if it is not of the run's owner."""
        run = self._ledger.run(run_id)
        return None if run is None or run.owner != owner else self._steps_of(run_id)

    def worked(self, work: Execution, seconds: float) -> None:
        run_id, one_pass = work.run.id, work.one_pass
        if work.backward and run_id in self._kept and not work.future.failed and one_pass is not None:
            outputs, step = work.future.outcome.loss_fn_outputs, self._steps_of(run_id)
            self._put(_Item(run_id, work.tokens, partial(self._joins, run_id, one_pass.data, outputs, step)))

    def _put(self, item: _Item) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._record, name="tinkex-rollouts", daemon=True)
            self._thread.start()
        behind = self._put_tokens - self._written_tokens
        if len(self._waiting) >= WAITING or (behind and behind + item.tokens > WAITING_TOKENS):
            self.dropped += 1
            return
        self._put_tokens += item.tokens
        self._waiting.append(item)
        if not self._awake.is_set():
            self._awake.set()

    def stop(self) -> None:
        """Write what waits, and end."""
        self._ended.set()
        self._awake.set()
        if self._thread is not None:
            self._thread.join(ENDING)

    def flush(self, seconds: float = 5.0) -> None:
        """Wait until what was put so far is written; for tests."""
        deadline, put = time.monotonic() + seconds, self._put_tokens
        while self._written_tokens < put and time.monotonic() < deadline:
            time.sleep(0.005)

    # -- on the thread -----------------------------------------------------------------------------------

    def _record(self) -> None:
        """Take what has come, a batch at a time: waking up and opening files cost more than a record does."""
        while not self._ended.is_set() or self._waiting:
            self._awake.wait()
            self._ended.wait(GATHERED)
            self._awake.clear()  # what is put from here on sets it again
            self._write([self._waiting.popleft() for _ in range(len(self._waiting))])

    def _write(self, items: list[_Item]) -> None:
        found = defaultdict[str, list[bytes]](list)
        for item in items:
            with _warning(item.run_id):
                found[item.run_id] += map(packed, item.records())
        for run_id, records in found.items():
            with _warning(run_id):
                write(self._home.run_dir(run_id) / DIRECTORY, self._budget, records)
        self._written_tokens += sum(item.tokens for item in items)

    def _sample(
        self, run_id: str, prompt: np.ndarray, answers: Sequence[SampledSequence], fields: Record
    ) -> Iterable[Record]:
        self._number = number = max(self._number + 1, time.time_ns() // 1000)  # above an earlier process's
        known, samples, before = self._known_of(run_id), list[Record](), _hash(prompt)
        for index, answer in enumerate(answers):
            tokens = np.empty(0, np.int32) if answer.tokens_np is None else answer.tokens_np
            sample: Record = {"tokens": tokens, "stop": answer.stop_reason}
            if answer.logprobs_np is not None:
                sample["logprobs"] = answer.logprobs_np
            if (likely := answer.topk_logprobs_np) is not None:
                sample["top_tokens"] = likely.token_ids[:, :LIKELY]
                sample["top_logprobs"] = likely.logprobs[:, :LIKELY]
            samples.append(sample)
            whole = _hash(tokens, before.copy()).digest()
            # The same answer of an older policy is not what a later pass trains on.
            same = [one for one in known.pop(whole, ()) if one.step == fields["step"]]
            known[whole] = [*same, _Known(number, index, fields["step"], len(tokens))]
        while len(known) > KNOWN:
            known.popitem(last=False)
        group = before.hexdigest()[:12]
        return [
            {"kind": "sample", "id": number, "group": group, "prompt": prompt, "samples": samples, **fields}
        ]

    def _joins(
        self, run_id: str, data: Sequence[Datum], outputs: Sequence[LossFnOutput], step: int
    ) -> Iterable[Record]:
        known = self._known_of(run_id)
        for datum, output in zip(data, outputs, strict=False):
            targets, trainer = datum.loss_fn_inputs.get("target_tokens"), output.get("logprobs")
            if (
                targets is None
                or trainer is None
                or targets.values_np.ndim != 1
                or not targets.values_np.size
            ):
                continue
            last = targets.values_np[-1:].astype(np.int32)
            whole = np.concatenate((datum.model_input.to_numpy(), last))
            given = datum.loss_fn_inputs.get("advantages")
            advantages = None if given is None or given.values_np.size < len(whole) - 1 else given.values_np
            hashed, begin = _hash(), 0
            for end in _ends(advantages, len(whole)):
                hashed, begin = _hash(whole[begin:end], hashed), end
                same = known.get(hashed.digest(), [])  # answers may be equal: one after the other
                if not same or same[0].answer == 0:
                    continue
                first = next((n for n, one in enumerate(same) if not one.joined), 0)
                found = same.pop(first)
                same.append(found._replace(joined=True))
                answer = slice(end - 1 - found.answer, end - 1)  # targets are one position behind
                record: Record = {"kind": "joined", "step": step, "id": found.record, "sample": found.sample}
                record["trainer"] = trainer.values_np[answer]
                if advantages is not None:
                    part = advantages[answer]
                    if differ := bool((part != part[0]).any()):
                        record["advantages"] = part
                    record["advantage"] = round(float(part.mean() if differ else part[0]), 6)
                yield record


def _nothing_known(run_id: str) -> OrderedDict[bytes, list[_Known]]:
    return OrderedDict()


@contextmanager
def _warning(run_id: str) -> Generator[None]:
    """Nothing that fails here may end the thread."""
    try:
        yield
    except Exception as error:
        log.warning("a rollout of %s was not kept: %s", run_id, error)


def _chosen(prompt: np.ndarray, sampler: str, rate: float) -> bool:
    """The same for every sample of one prompt from one sampler: groups stay whole."""
    return rate >= 1 or zlib.crc32(prompt.tobytes(), zlib.crc32(sampler.encode())) < rate * 2**32


def _hash(tokens: Sequence[int] | np.ndarray = (), before: Any = None) -> Any:
    """Of token ids that follow those `before`."""
    hashed = before or hashlib.blake2b(digest_size=16)
    hashed.update(np.ascontiguousarray(tokens, np.int32).data)
    return hashed


def _ends(advantages: np.ndarray | None, length: int) -> list[int]:
    """Where samples may end in a datum of so many tokens: after a stretch of advantages, and at the end."""
    if advantages is None:
        return [length]
    active = advantages != 0
    falls: list[int] = np.flatnonzero(active[:-1] > active[1:]).tolist()
    return [at + 2 for at in falls if at + 2 < length] + [length]
