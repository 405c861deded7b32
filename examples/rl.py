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

PROMPTS = [
    "Name a colour.", "Name an animal.", "What is the capital of France?", "Name a fruit.",
    "What do bees make?", "Name a country.", "What is frozen water called?", "Name a metal.",
]  # fmt: skip


def reward(text: str) -> float:
    """1 for one word; less the more words there are."""
    return 1.0 / max(1, len(text.split()))


def read_datum(prompt: list[int], sequence: tinkex.SampledSequence, advantage: float) -> tinkex.Datum:
    """The prompt has advantage 0: only what was sampled is learnt from."""
    tokens = [*prompt, *sequence.tokens]
    nothing = np.zeros(len(prompt) - 1, np.float32)
    return tinkex.Datum(
        tinkex.ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.concatenate([nothing, np.array(sequence.logprobs, np.float32)]),
            "advantages": np.concatenate([nothing, np.full(len(sequence.tokens), advantage, np.float32)]),
        },
    )


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
                group = np.array(
                    [reward(tokenizer.decode(s.tokens, skip_special_tokens=True)) for s in sequences]
                )
                rewards.extend(group)
                for sequence, advantage in zip(sequences, group - group.mean(), strict=True):
                    if advantage:  # a group that agrees teaches nothing
                        data.append(read_datum(prompt, sequence, float(advantage)))
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
