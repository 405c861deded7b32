"""Supervised fine-tuning from a JSONL file: {"messages": [{"role": …, "content": …}, …]} a line.

    python examples/sft.py src/tinkex/demo/pirate.jsonl --steps 20       # or a file of your own
    python examples/sft.py data.jsonl --track wandb                      # or trackio

The loss covers the assistant's tokens only. With no key set, models run in this process; with TINKER_BASE_URL
and TINKER_API_KEY set, on a server. Metrics go to metrics.jsonl.
"""

import argparse
import importlib
import json
import random
from pathlib import Path

import tinkex
from tinkex.data import chat_datum, learnt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--track", choices=["wandb", "trackio"], help="log metrics there too")
    options = parser.parse_args()
    tracker = importlib.import_module(options.track) if options.track else None  # both have these functions

    with tinkex.ServiceClient() as service:
        run = service.create_lora_training_client(options.model, rank=options.rank)
        tokenizer = run.get_tokenizer()
        lines = options.data.read_text().splitlines()
        data = [chat_datum(tokenizer, json.loads(line)["messages"]) for line in lines if line.strip()]
        random.seed(0)
        if tracker:
            tracker.init(project="sft", config={name: str(value) for name, value in vars(options).items()})
        for step in range(options.steps):
            batch = random.sample(data, min(options.batch, len(data)))
            passed = run.forward_backward(batch, "cross_entropy")
            stepped = run.optim_step(tinkex.AdamParams(learning_rate=options.learning_rate))  # pipelined
            row = {"step": step, "nll": passed.result().metrics["loss:sum"] / learnt_tokens(batch)}
            stepped.result()
            with Path("metrics.jsonl").open("a") as log:
                print(json.dumps(row), file=log)
            if tracker:
                tracker.log({"nll": row["nll"]}, step=step)
            print(f"step {step:4d}   nll {row['nll']:.4f}")
        if tracker:
            tracker.finish()
        print("adapter:", run.save_weights_for_sampler("sft").result().path)
        print("go on training from:", run.save_state("sft").result().path)


if __name__ == "__main__":
    main()
