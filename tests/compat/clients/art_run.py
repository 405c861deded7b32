"""`openpipe-art[tinker]`: its native Tinker backend rolls out through its own server and trains in steps."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

os.environ["WANDB_MODE"] = "disabled"

import art
from art.tinker_native import TinkerNativeBackend
from report import done, say

ARGUMENTS = art.dev.TinkerNativeArgs(renderer_name="qwen3_instruct", training_client_args={"rank": 8})
MESSAGES = [{"role": "user", "content": "Say a."}]


async def rollout(model: art.TrainableModel) -> art.Trajectory:
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=MESSAGES, max_completion_tokens=6, temperature=1.0
    )
    text = reply.choices[0].message.content or ""
    reward = sum(char.isascii() for char in text) / max(1, len(text))
    return art.Trajectory(messages_and_choices=[*MESSAGES, reply.choices[0]], reward=reward)


async def main(name: str, directory: Path) -> None:
    backend = TinkerNativeBackend(path=str(directory))
    model = art.TrainableModel(
        name="plain", project="compat", base_model=name,
        _internal_config=art.dev.InternalModelConfig(tinker_native_args=ARGUMENTS),
    )  # fmt: skip
    await model.register(backend, _openai_client_config={"server_args": {"host": "127.0.0.1"}})
    rewards, steps = [], []
    for _ in range(4):
        group = await art.TrajectoryGroup([rollout(model) for _ in range(32)])
        rewards.append(sum(one.reward for one in group.trajectories) / 32)
        trained = await backend.train(model, [group], learning_rate=2e-2, save_checkpoint=True)
        steps.append(trained.step)
    await backend.close()
    again = TinkerNativeBackend(path=str(directory))
    await again.register(model)  # finds its checkpoints and goes on
    say("art", rewards=rewards, steps=steps, resumed=await again._get_step(model))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
    done()
