"""Reinforcement learning with your own reward function and `importance_sampling`.

    python examples/rl.py --steps 20
    python examples/rl.py --track wandb         # or trackio

Each prompt is sampled several times; a sample's advantage is its reward minus the mean of its group. The
reward here is for answers of a single word. Change `PROMPTS` and `reward` for your own experiment.
"""

import argparse
import importlib

import numpy as np

import tinkex
from tinkex.rl import group_advantages, has_signal, rl_datum

PROMPTS = [
    "Name a colour.", "Name an animal.", "What is the capital of France?", "Name a fruit.",
    "What do bees make?", "Name a country.", "What is frozen water called?", "Name a metal.",
]  # fmt: skip


def reward(text: str) -> float:
    """1 for one word; less the more words there are."""
    return 1.0 / max(1, len(text.split()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--track", choices=["wandb", "trackio"], help="log metrics there too")
    options = parser.parse_args()
    tracker = importlib.import_module(options.track) if options.track else None  # both have these functions
    if tracker:
        tracker.init(project="rl", config=vars(options))

    with tinkex.ServiceClient() as service:
        run = service.create_lora_training_client(options.model, rank=16)
        tokenizer = run.get_tokenizer()
        prompts = [tinkex.render_chat(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
        params = tinkex.SamplingParams(max_tokens=options.max_tokens, temperature=1.0)
        for step in range(options.steps):
            sampler = run.save_weights_and_get_sampling_client()
            asked = [sampler.sample(tinkex.ModelInput.from_ints(p), options.group, params) for p in prompts]
            rewards, data = [], []
            for prompt, future in zip(prompts, asked, strict=True):
                sequences = future.result().sequences
                group = [reward(tokenizer.decode(s.tokens, skip_special_tokens=True)) for s in sequences]
                rewards += group
                if has_signal(group):  # a group that agrees teaches nothing
                    pairs = zip(sequences, group_advantages(group), strict=True)
                    data += [rl_datum(prompt, sequence, float(advantage)) for sequence, advantage in pairs]
            print(f"step {step:3d}   reward {np.mean(rewards):.3f}   {len(data)} answers to learn from")
            if tracker:
                tracker.log({"reward": float(np.mean(rewards)), "answers": len(data)}, step=step)
            if data:
                run.forward_backward(data, "importance_sampling")
                run.optim_step(tinkex.AdamParams(learning_rate=options.learning_rate)).result()
        if tracker:
            tracker.finish()
        print("adapter:", run.save_weights_for_sampler("rl").result().path)


if __name__ == "__main__":
    main()
