"""The engine on one GPU against its goals: `bench/engine.py --device cuda --shape qwen3-8b`, one table.

Random weights in real architectures, made on the device; rank 32 on every linear layer, an adapter always
active; prompts of 128 and answers of 128 tokens. Everything goes through the engine's contract. A goal that
is missed never fails the run; a crash fails its row alone. Tells nothing about learning or a network.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import PACKED, RANK, SHAPES, expert_count, step_bytes, training_flops

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from tinkex.engine.protocol import (  # noqa: E402
    ContinuePasses,
    CreateAdapter,
    EngineConfig,
    ExportAdapter,
    ForwardBackward,
    OptimStep,
    Pass,
    PassProgress,
    SampledTokens,
    SampleWork,
    run_passes,
)
from tinkex.engine.torch.backend import choose_backend  # noqa: E402
from tinkex.engine.torch.engine import TorchEngine  # noqa: E402
from tinkex.engine.torch.load import empty_decoder  # noqa: E402
from tinkex.engine.torch.models.decoder import Decoder  # noqa: E402
from tinkex.engine.torch.models.families import model_config  # noqa: E402
from tinkex.engine.torch.quantised import FP4, NF4, QuantisedWeight  # noqa: E402
from tinkex.engine.torch.trainer import TorchTrainer  # noqa: E402
from tinkex.types.data import Datum, ModelInput  # noqa: E402
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse  # noqa: E402
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams  # noqa: E402
from tinkex.types.tensor import TensorData  # noqa: E402

PROMPT, ANSWER, LONG = 128, 128, 32_768
AT_ONCE = (1, 16, 64, 128, 256)  # requests whose logprobs are compared
ADAM = AdamParams(learning_rate=1e-4)
LENGTHS = np.random.default_rng(0).permutation(np.geomspace(32, 2048, 32).round().astype(int)).tolist()
FLOPS, BANDWIDTH = 790e12, 4.25e12  # of an H200: a large bf16 product, a copy

# What each measure is to reach; shares are of another measure's figure.
GOALS = {
    "qwen3-8b": {
        "train": 14_000, "train recomputed": 10_000, "memory": 26, "decode 1": 180, "decode 64": 9_000,
        "decode 256": 22_000, "end to end 256": 14_000, "publish": 50, "one sequence of 32k": 5_200,
        "memory of 32k": 33,
    },
    "qwen3-0.6b": {
        "train": 130_000, "memory": 8, "decode 1": 700, "decode 64": 35_000,
        "decode 256": 80_000, "end to end 256": 55_000, "publish": 50,
    },
    "qwen3-30b-a3b": {
        "train": 20_000, "train recomputed": 15_000, "adapter": 8.5, "decode 1": 250, "decode 64": 2_500,
        "decode 256": 8_000,
    },
    "qwen3.5-9b": {
        "train": 12_000, "decode 1": 160, "decode 64": 6_500, "decode 256": 14_000, "shared prompt": 2.2,
    },
    "qwen3.5-35b-a3b": {
        "train": 16_000, "adapter": 9.6, "decode 1": 220, "decode 64": 1_800, "decode 256": 5_000,
    },
    "gpt-oss-20b": {
        "train": 20_000, "weights": 16, "decode 1": 350, "decode 64": 7_000, "decode 256": 18_000,
    },
    "gpt-oss-120b": {"train": 8_000, "decode 1": 200, "decode 64": 2_000, "decode 256": 7_000},
    "qwen3-8b-nf4": {
        "train": 11_000, "weights": 6, "decode 1": 250, "decode 64": 9_000, "decode 256": 18_000,
    },
    "qwen3-8b-fp8": {
        "train": 11_000, "weights": 9, "decode 1": 250, "decode 64": 9_000, "decode 256": 18_000,
    },
}  # fmt: skip
AGREEMENT = {"mean |Δlogprob|": 5e-3, "KL": 1e-3, "|Δlogprob|, deterministic": 0}  # of sampler and trainer
SHARES = {
    "train, 16 runs": ("train", dict.fromkeys(GOALS, 0.80) | {"qwen3-8b": 0.85}),
    "decode 256, 16 adapters": ("decode 256", dict.fromkeys(GOALS, 0.75)),
}
AT_MOST = ("memory", "memory of 32k", "weights", "adapter", "publish", "shared prompt", *AGREEMENT)
UNITS = {
    "memory": "GiB",
    "memory of 32k": "GiB",
    "weights": "GiB",
    "adapter": "GiB",
    "publish": "ms",
    "shared prompt": "s",
} | dict.fromkeys(AGREEMENT, "nats")


@dataclass
class Bench:
    """One shape's decoder, the rounds, and what was found so far."""

    shape: str
    rounds: int
    decoder: Decoder
    found: dict[str, float]

    def sequences(self, lengths: list[int], turn: int) -> list[np.ndarray]:
        draw = np.random.default_rng([turn + 1000, len(lengths)])
        return [draw.integers(3, SHAPES[self.shape]["vocab_size"], n).astype(np.int32) for n in lengths]


def random_decoder(shape: str) -> Decoder:
    scheme = PACKED.get(shape)
    decoder = empty_decoder(model_config(SHAPES[shape]), "cuda", torch.bfloat16, quantised=scheme is not None)
    torch.manual_seed(0)
    for name, weight in decoder.weights().items():
        plain = not (decoder.config.norm.kind == "offset" and not name.endswith("linear_attn.norm.weight"))
        weight.fill_(float(plain)) if name.endswith("norm.weight") else weight.normal_(std=0.02)
    for name, (matrix, part) in decoder.slots().items():
        if scheme is not None and (scheme != "mxfp4" or ".experts." in name):
            weight = random_codes(scheme, *matrix.part_shape(part))
        else:
            weight = torch.empty(matrix.part_shape(part), dtype=torch.bfloat16, device="cuda").normal_(
                std=0.02
            )
        matrix.put(part, weight, "file", torch.device("cuda"))
    decoder.settle(decoder.backend.reads_codes)
    return decoder


def random_codes(scheme: str, rows: int, columns: int) -> QuantisedWeight:
    """A matrix whose values have a standard deviation of about 0.02."""
    if scheme == "fp8":
        codes = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        return QuantisedWeight(codes, torch.full((rows, 1), 0.02, device="cuda"), (1, columns))
    wide, table, size = (64, NF4, 0.036) if scheme == "nf4" else (32, FP4, 2.0**-7)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scale = torch.full((rows, columns // wide), size, device="cuda")
    return QuantisedWeight(codes, scale, (1, wide), torch.tensor(table))


# -- training ------------------------------------------------------------------------------------------


def passes(bench: Bench, lengths: list[int], runs: int, turn: int) -> tuple[Pass, ...]:
    """The round's sequences, dealt out to the runs."""
    datums = [
        Datum(ModelInput.from_ints(ids), {"target_tokens": TensorData.from_numpy(np.append(ids[1:], 3))})
        for ids in bench.sequences(lengths, turn)
    ]
    return tuple(Pass(f"run{i}", datums[i::runs], "cross_entropy") for i in range(runs))


def run_bare(trainer: TorchTrainer, passes: Sequence[Pass]) -> Any:
    outcome: Any = trainer.execute(ForwardBackward(tuple(passes)))
    while isinstance(outcome, PassProgress):
        outcome = trainer.execute(ContinuePasses(outcome.ticket))
    return outcome


def rank_of(bench: Bench, runs: int) -> int:
    """16 adapters of rank 32 on experts do not fit."""
    return 8 if runs > 1 and expert_count(bench.shape) else RANK


def new_trainer(bench: Bench, runs: int, deterministic: bool = False, **settings: Any) -> TorchTrainer:
    decoder = bench.decoder.with_backend(choose_backend("cuda", torch.bfloat16, deterministic=deterministic))
    tokens = 16_384 if rank_of(bench, runs) == RANK else 8192  # beside 16 adapters on experts
    trainer = TorchTrainer(decoder, bench.shape, **{"max_pass_tokens": tokens, **settings})
    for i in range(runs):
        trainer.execute(CreateAdapter(f"run{i}", LoraConfig(rank=rank_of(bench, runs), seed=i)))
    return trainer


def train(bench: Bench, runs: int, recompute: bool, deterministic: bool = False) -> float:
    """Tokens a second of a pass; a step is part of it where one run has it all."""
    trainer = new_trainer(bench, runs, deterministic, recompute=recompute)

    def one(turn: int) -> float:
        work = passes(bench, LENGTHS, runs, turn)
        begin = now()
        for outcome in run_bare(trainer, work):
            assert not hasattr(outcome, "category"), outcome
        if runs == 1:
            trainer.execute(OptimStep("run0", ADAM))
        seconds = now() - begin
        for each in work if runs > 1 else ():
            trainer.execute(OptimStep(each.run, ADAM))
        return sum(LENGTHS) / seconds

    return median(one, bench.rounds)


def memory(bench: Bench) -> float:
    """GiB at the peak of a pass of 16 x 1024 tokens with recomputation and its step, weights included."""
    trainer = new_trainer(bench, 1, recompute=True)
    for turn in range(2):
        torch.cuda.reset_peak_memory_stats()
        run_bare(trainer, passes(bench, [1024] * 16, 1, turn))
        trainer.execute(OptimStep("run0", ADAM))
    return torch.cuda.max_memory_allocated() / 2**30


def long_sequence(bench: Bench) -> float:
    """Tokens a second of one sequence of 32k tokens with recomputation and its step; and the peak memory."""
    trainer = new_trainer(bench, 1, recompute=True, max_pass_tokens=LONG)

    def one(turn: int) -> float:
        torch.cuda.reset_peak_memory_stats()
        begin = now()
        run_bare(trainer, passes(bench, [LONG], 1, turn))
        trainer.execute(OptimStep("run0", ADAM))
        return LONG / (now() - begin)

    found = median(one, bench.rounds)
    bench.found["memory of 32k"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def adapter(bench: Bench) -> float:
    """GiB of one adapter of rank 32 with its gradients, optimizer state and copy in bf16."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = new_trainer(bench, 1)
    run_bare(trainer, passes(bench, [64], 1, 0))
    trainer.execute(OptimStep("run0", ADAM))
    return (torch.cuda.memory_allocated() - before) / 2**30


# -- sampling ------------------------------------------------------------------------------------------


def new_engine(bench: Bench, adapters: int, deterministic: bool = False, context: int = 4096) -> TorchEngine:
    config = EngineConfig(
        bench.shape, device="cuda", kv_bytes=24 << 30, max_context=context, deterministic=deterministic
    )
    engine = TorchEngine(config, bench.decoder)
    try:
        for i in range(adapters):
            lora = LoraConfig(rank=rank_of(bench, adapters), seed=i)
            engine.trainer.submit(CreateAdapter(f"run{i}", lora)).result()
            exported = engine.trainer.submit(ExportAdapter(f"run{i}")).result()
            asyncio.run(engine.sampler.publish(f"published{i}", exported))
    except BaseException:
        engine.close()
        raise
    return engine


def sample(bench: Bench, engine: TorchEngine, requests: int, adapters: int, turn: int) -> tuple[float, float]:
    """Return tokens per second while all requests decode, and over the whole run."""
    params = SamplingParams(max_tokens=ANSWER, stop=[], temperature=1.0)
    works = [
        SampleWork(ids, params, adapter=f"published{i % adapters}")
        for i, ids in enumerate(bench.sequences([PROMPT] * requests, turn))
    ]
    first_arrivals: list[float] = []  # of the first request's tokens, and of the last one's
    last_arrivals: list[float] = []

    async def one(i: int, work: SampleWork) -> None:
        # Two requests stream: enough to see the steps. Streaming all of them would measure the event loop.
        arrived = {0: first_arrivals, requests - 1: last_arrivals}.get(i)
        if arrived is None:
            await engine.sampler.sample(work)
            return
        async for piece in engine.sampler.stream(work):
            if isinstance(piece, SampledTokens):
                arrived.extend([time.perf_counter()] * len(piece.tokens))

    async def everything() -> None:
        await asyncio.gather(*(one(i, work) for i, work in enumerate(works)))

    begin = now()
    asyncio.run(everything())
    seconds = now() - begin
    first_arrivals = first_arrivals or last_arrivals  # a single request is both
    start, end = last_arrivals[0], first_arrivals[-1]  # prompts are read in order: all decode between these
    steps = sum(1 for when in first_arrivals if start < when <= end)
    return steps * requests / (end - start), requests * ANSWER / seconds


def decode(bench: Bench, requests: int, adapters: int, deterministic: bool = False) -> float:
    engine = new_engine(bench, adapters, deterministic)
    try:
        rounds = [sample(bench, engine, requests, adapters, turn) for turn in range(-2, bench.rounds)][2:]
    finally:
        engine.close()
    if adapters == 1 and requests == 256 and not deterministic:
        bench.found["end to end 256"] = statistics.median(whole for _, whole in rounds)
    return statistics.median(rate for rate, _ in rounds)


def shared_prompt(bench: Bench) -> float:
    """Seconds that 64 requests with one prompt of 8,000 tokens take for 64 new tokens each."""
    engine, params = new_engine(bench, 1, context=8192), SamplingParams(max_tokens=64, stop=[])

    def one(turn: int) -> float:
        (ids,) = bench.sequences([8000], turn)

        async def everything() -> None:
            works = [SampleWork(ids, params, adapter="published0") for _ in range(64)]
            await asyncio.gather(*(engine.sampler.sample(work) for work in works))

        begin = now()
        asyncio.run(everything())
        return now() - begin

    try:
        return median(one, bench.rounds)
    finally:
        engine.close()


def publish(bench: Bench) -> float:
    """Milliseconds from the end of a step to the first token from the new weights."""
    engine = new_engine(bench, 1)

    def one(turn: int) -> float:
        run_passes(engine.trainer, passes(bench, [PROMPT] * 4, 1, turn))
        engine.trainer.submit(OptimStep("run0", ADAM)).result()
        (ids,) = bench.sequences([PROMPT], turn + 100)
        work = SampleWork(ids, SamplingParams(max_tokens=1, stop=[]), adapter=f"step{turn}")

        async def first_token() -> None:
            await engine.sampler.publish(f"step{turn}", engine.trainer.submit(ExportAdapter("run0")).result())
            await engine.sampler.sample(work)

        begin = now()
        asyncio.run(first_token())
        return 1e3 * (now() - begin)

    try:
        return median(one, bench.rounds)
    finally:
        engine.close()


def agreement(bench: Bench, deterministic: bool = False) -> float:
    """Mean |Δlogprob| between sampler and trainer, of the number of requests where they agree least."""
    engine = new_engine(bench, 1, deterministic)
    try:
        run_passes(engine.trainer, passes(bench, [PROMPT] * 4, 1, 0))
        engine.trainer.submit(OptimStep("run0", AdamParams(learning_rate=1e-3))).result()
        asyncio.run(engine.sampler.publish("trained", engine.trainer.submit(ExportAdapter("run0")).result()))
        differences = [agreed(bench, engine, requests) for requests in AT_ONCE]
    finally:
        engine.close()
    if not deterministic:
        bench.found["KL"] = max(float(np.mean(np.expm1(d) - d)) for d in differences)
    return max(float(np.abs(d).mean()) for d in differences)


def agreed(bench: Bench, engine: TorchEngine, requests: int) -> np.ndarray:
    """`difference` of so many requests at once, again and again until 16 were answered."""
    d = np.concatenate([difference(bench, engine, requests, turn) for turn in range(0, 16, requests)])
    print(f"{requests} requests: mean |Δlogprob| {np.abs(d).mean():.2g}", file=sys.stderr, flush=True)
    return d


def difference(bench: Bench, engine: TorchEngine, requests: int, turn: int) -> np.ndarray:
    """What the trainer gives for the answers to so many requests, less what the sampler reported."""
    prompts = bench.sequences([PROMPT] * requests, turn)
    params = SamplingParams(max_tokens=ANSWER, stop=[], temperature=1.0)

    async def everything() -> list[SampleResponse]:
        works = [SampleWork(ids, params, adapter="trained") for ids in prompts]
        return await asyncio.gather(*(engine.sampler.sample(work) for work in works))

    sampled = [response.sequences[0] for response in asyncio.run(everything())]
    whole = [np.append(ids, one.tokens_np) for ids, one in zip(prompts, sampled, strict=True)]
    datums = [
        Datum(
            ModelInput.from_ints(ids[:-1]), {"target_tokens": TensorData.from_numpy(ids[1:].astype(np.int64))}
        )
        for ids in whole
    ]
    (output,) = run_passes(engine.trainer, [Pass("run0", datums, "cross_entropy", backward=False)])
    assert isinstance(output, ForwardBackwardOutput), output
    trained = [one["logprobs"].to_numpy()[PROMPT - 1 :] for one in output.loss_fn_outputs]
    return np.concatenate(trained) - np.concatenate([one.logprobs_np for one in sampled])


MEASURES: dict[str, Callable[[Bench], float]] = {
    "decode 1": lambda bench: decode(bench, 1, 1),
    "decode 64": lambda bench: decode(bench, 64, 1),
    "decode 256": lambda bench: decode(bench, 256, 1),
    "decode 256, 16 adapters": lambda bench: decode(bench, 256, 16),
    "shared prompt": shared_prompt,
    "publish": publish,
    "mean |Δlogprob|": agreement,
    "train": lambda bench: train(bench, 1, recompute=False),
    "train, 16 runs": lambda bench: train(bench, 16, recompute=False),
    "train recomputed": lambda bench: train(bench, 1, recompute=True),
    "memory": memory,
    "one sequence of 32k": long_sequence,
    "weights": lambda bench: bench.decoder.weight_bytes / 2**30,
    "adapter": adapter,
    "decode 64, deterministic": lambda bench: decode(bench, 64, 1, deterministic=True),
    "decode 256, deterministic": lambda bench: decode(bench, 256, 1, deterministic=True),
    "train, deterministic": lambda bench: train(bench, 1, recompute=False, deterministic=True),
    "|Δlogprob|, deterministic": lambda bench: agreement(bench, deterministic=True),
}


COMPARED = (  # what `compare` measures unless told otherwise
    "decode 1", "decode 64", "decode 256", "decode 256, 16 adapters",
    "train", "train, 16 runs", "train recomputed",
)  # fmt: skip


# -- running and telling -------------------------------------------------------------------------------


def now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def median(one: Callable[[int], float], rounds: int) -> float:
    """The middle of `rounds` after two that warm up."""
    return statistics.median([one(turn) for turn in range(-2, rounds)][2:])


def row(bench: Bench, name: str) -> dict[str, Any]:
    value = bench.found.get(name)
    unit, goal, of = UNITS.get(name, "tokens/s"), (GOALS[bench.shape] | AGREEMENT).get(name), ""
    if name in SHARES:
        base, shares = SHARES[name]
        goal = shares[bench.shape] * bench.found[base] if base in bench.found else None
        of = f"{shares[bench.shape]:.0%} of {base}"
    met = None
    if value is not None and goal is not None:
        met = value <= goal if name in AT_MOST else value >= goal
    return {"measure": name, "unit": unit, "value": value, "goal": goal, "of": of, "met": met} | share(
        bench, name
    )


def share(bench: Bench, name: str) -> dict[str, float]:
    """Of what the hardware could do at best, by the products or by the bytes read."""
    value = bench.found.get(name)
    if value is None or name in UNITS or name.startswith(("end", "one")):
        return {}
    if name.startswith("train"):
        return {"share": value * training_flops(bench.shape) / FLOPS}
    requests = int(name.split()[1].rstrip(","))
    bytes_read = step_bytes(bench.shape, 2, requests * (PROMPT + ANSWER / 2), requests)
    least = max(bytes_read / BANDWIDTH, requests * training_flops(bench.shape) / 2 / FLOPS)
    return {"share": value / requests * least}


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'measure':<26}{'unit':<10}{'transformers':>14}{'ours':>10}{'goal':>10}  {'met':<5}"
    head += f"{'of the limit':>14}"
    lines = [head, "-" * len(head)]
    for each in rows:
        peer, ours, goal = (
            "-" if each[key] is None else number(each[key]) for key in ("transformers", "value", "goal")
        )
        met = {True: "yes", False: "NO", None: ""}[each["met"]]
        limit = f"{each['share']:.0%}" if "share" in each else ""
        lines.append(
            f"{each['measure']:<26}{each['unit']:<10}{peer:>14}{ours:>10}{goal:>10}  {met:<5}{limit:>14}"
            f"  {each['of']}"
        )
    return "\n".join(line.rstrip() for line in lines)


def number(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def beside(shape: str, names: list[str]) -> dict[str, float]:
    """What plain transformers has in a process of its own, where one GPU holds the shape in bf16."""
    names = [name for name in names if name in ("train", "decode 1", "decode 64", "decode 256")]
    if not names or (shape in PACKED and shape != "gpt-oss-20b"):
        return {}
    command = [sys.executable, str(HERE / "engine_cuda_peer.py"), shape, *names]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found = [json.loads(line) for line in told]
    return {one["measure"]: one["value"] for one in found if one["value"] is not None}


def run(
    shape: str, only: list[str] | None, rounds: int, *, as_json: bool = False, peers: bool = True
) -> None:
    """Every measure whose name begins with one of `only`; prints the table, transformers beside ours."""
    bench = Bench(shape, rounds, random_decoder(shape), {})
    for name, measure in MEASURES.items():
        if only and not name.startswith(tuple(only)):
            continue
        begin = time.perf_counter()
        try:
            bench.found[name] = measure(bench)
        except Exception:
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        seconds = time.perf_counter() - begin
        print(f"{name}: {bench.found.get(name)} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    names = [*MEASURES, "memory of 32k", "end to end 256", "KL"]
    bench.decoder = None  # type: ignore[assignment]  # the other side needs the memory
    gc.collect()
    torch.cuda.empty_cache()
    peer = beside(shape, list(bench.found)) if peers else {}
    rows = [row(bench, name) | {"transformers": peer.get(name)} for name in names if name in bench.found]
    about = f"{shape}, {torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit()}"
    print(json.dumps({"about": about, "rows": rows}) if as_json else f"{about}\n\n{table(rows)}")


# -- side by side with another checkout ----------------------------------------------------------------


class Checkout:
    """A process with one checkout's own bench/engine_cuda.py and engine, which stays for all measures."""

    def __init__(self, tree: Path, shape: str) -> None:
        self.tree = tree
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_cuda_child.py"), str(tree), shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def measure(self, name: str) -> float:
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return self._answer()["value"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.tree}: exit status {self._process.wait()}")
        return json.loads(line)


def compare(shape: str, only: list[str] | None, rounds: int, tree: Path) -> None:
    """This checkout and `tree`, taking turns; prints medians and the median of the ratios."""
    ours, other = Checkout(HERE.parent, shape), Checkout(tree, shape)
    print(f"{shape}, {torch.cuda.get_device_name()}, torch {torch.__version__}; {HERE.parent} / {tree}")
    print(f"{'measure':<28}{'other':>12}{'ours':>12}{'ratio':>9}  lowest and highest of {rounds} rounds")
    for name in [name for name in MEASURES if (name.startswith(tuple(only)) if only else name in COMPARED)]:
        pairs = []
        for turn in range(rounds):
            first, second = (ours, other) if turn % 2 else (other, ours)  # neither always goes first
            found = {first: first.measure(name), second: second.measure(name)}
            pairs.append((found[ours], found[other]))
        ratios = [mine / base if base else float("nan") for mine, base in pairs]
        mine, base, ratio = (statistics.median(column) for column in (*zip(*pairs, strict=True), ratios))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{name:<28}{number(base):>12}{number(mine):>12}{ratio:>9.3f}  {spread}", flush=True)
    ours.close()
    other.close()


def commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"
