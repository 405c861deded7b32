"""Rollouts by the training client of `verifiers`: it renders, asks for tokens, gets ids and logprobs back."""

from __future__ import annotations

import asyncio
import os
import sys

from renderers.configs import DefaultRendererConfig
from report import done, say
from verifiers.v1.clients import TrainClient, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

PROMPT = [{"role": "user", "content": "Say a."}]


async def main(model: str, tokenizer: str, count: int) -> None:
    client = TrainClient(
        TrainClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY",
            renderer=DefaultRendererConfig(), renderer_model_name=tokenizer,
        )
    )  # fmt: skip
    sampling = SamplingConfig(temperature=1.0, max_tokens=6)
    body = {"model": model, "messages": PROMPT}
    replies = await asyncio.gather(
        *(client.get_response(ChatDialect(), body, sampling) for _ in range(count))
    )
    for reply in replies:
        assert reply.tokens is not None
        tokens = reply.tokens
        say(
            f"rollout {id(reply)}", prompt=list(tokens.prompt_ids), tokens=list(tokens.completion_ids),
            logprobs=list(tokens.completion_logprobs), text=reply.message.content or "",
        )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    done()
