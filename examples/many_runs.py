"""Many concurrent runs in one process: a sweep over learning rates.

    python examples/many_runs.py --runs 32 --steps 10

Every run is one asyncio task. Runs share the client's connections and the server's batches fairly: the last
line shows how far the slowest run was when the fastest had finished. With no key set, models run in this
process; with TINKER_BASE_URL and TINKER_API_KEY set, on a server.
"""

import argparse
import asyncio
from collections import Counter

import tinkex
from tinkex.data import weighted_datum

TEXT = "the quick brown fox jumps over the lazy dog"


async def train(
    run: tinkex.TrainingClient, number: int, text: list[int], options: argparse.Namespace, done: Counter[int]
) -> tuple[float, float]:
    """One run of the sweep: its learning rate and its last loss."""
    rate = float(10 ** (-4 + 2 * number / max(1, options.runs - 1)))
    data = [weighted_datum(text)]
    loss = 0.0
    for _ in range(options.steps):
        passed = await run.forward_backward_async(data, "cross_entropy")
        stepped = await run.optim_step_async(tinkex.AdamParams(learning_rate=rate))
        loss = (await passed).metrics["loss:sum"] / data[0].model_input.length
        await stepped
        done[number] += 1
    sampler = await run.save_weights_and_get_sampling_client_async()
    prompt = tinkex.ModelInput.from_ints(text[:4])
    params = tinkex.SamplingParams(max_tokens=options.max_tokens, temperature=1.0)
    await asyncio.gather(*(sampler.sample_async(prompt, 1, params) for _ in range(options.samples)))
    return rate, loss


async def sweep(options: argparse.Namespace) -> None:
    done: Counter[int] = Counter(dict.fromkeys(range(options.runs), 0))
    slowest, told = None, 0
    async with tinkex.ServiceClient() as service:
        make = service.create_lora_training_client_async
        runs = await asyncio.gather(*(make(options.model, rank=8, seed=n) for n in range(options.runs)))
        text = (await runs[0].get_tokenizer_async()).encode(TEXT)
        tasks = [asyncio.create_task(train(run, n, text, options, done)) for n, run in enumerate(runs)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)
            if min(done.values()) > told:
                told = min(done.values())
                print(f"every run has made {told} of {options.steps} steps")
            if slowest is None and max(done.values()) == options.steps:
                slowest = min(done.values())
        results = [await task for task in tasks]
    for rate, loss in results:
        print(f"learning rate {rate:.1e}   loss {loss:.4f}")
    best_rate, best_loss = min(results, key=lambda result: result[1])
    print(f"best: {best_rate:.1e}, with a loss of {best_loss:.4f}")
    print(f"{options.runs} runs, {sum(done.values())} steps, {options.runs * options.samples} samples")
    print(f"when the first run was done, the slowest had made {slowest} of {options.steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--runs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=16, help="of each run, at its end")
    parser.add_argument("--max-tokens", type=int, default=8)
    asyncio.run(sweep(parser.parse_args()))


if __name__ == "__main__":
    main()
