"""OpenAI's own Python client against /v1. Argument: the tinker:// path of a published adapter."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from report import MODEL, done, error_of, say

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
DRAW: Any = {"max_tokens": 12, "seed": 7, "temperature": 1.0}


def completions(client: openai.OpenAI, path: str) -> None:
    one = client.completions.create(model=MODEL, prompt="Once upon", n=2, logprobs=3, **DRAW)
    say(
        "completion", texts=[c.text for c in one.choices], reasons=[c.finish_reason for c in one.choices],
        usage=[one.usage.prompt_tokens, one.usage.completion_tokens, one.usage.total_tokens],
        logprobs=[len(c.logprobs.token_logprobs) for c in one.choices], model=one.model, object=one.object,
        top=[max(len(t) for t in c.logprobs.top_logprobs) for c in one.choices],
    )  # fmt: skip
    parts: dict[int, str] = {0: "", 1: ""}
    chunks = list(client.completions.create(model=MODEL, prompt="Once upon", n=2, stream=True, **DRAW))
    for chunk in chunks:
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    say("streamed completion", texts=list(parts.values()), chunks=len(chunks))
    adapted = client.completions.create(
        model=path, prompt="Once upon", max_tokens=12, temperature=0.0, logprobs=1
    )
    scored = adapted.choices[0].logprobs.token_logprobs
    say("adapter", text=adapted.choices[0].text, model=adapted.model, logprobs=scored)


def chats(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **DRAW
    )
    say(
        "chat", texts=[c.message.content for c in chat.choices], roles=[c.message.role for c in chat.choices],
        logprobs=[[len(t.top_logprobs) for t in c.logprobs.content] for c in chat.choices],
        usage=[chat.usage.prompt_tokens, chat.usage.completion_tokens], object=chat.object,
    )  # fmt: skip
    parts: dict[int, str] = {0: "", 1: ""}
    usage, ends = None, []
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}, **DRAW
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                parts[choice.index] += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
    say("streamed chat", texts=list(parts.values()), usage=usage and usage.completion_tokens, ends=ends)
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **DRAW).choices[0].message.content
    stop = next(c for c in whole[2:] if c.isascii() and c.isprintable())
    cut = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=stop, **DRAW).choices[0]
    say("stopped", whole=whole, stop=stop, text=cut.message.content, reason=cut.finish_reason)


def errors(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_tokens": 4, **fields}
        )

    nobody = openai.OpenAI(api_key="no key", max_retries=0)
    calls: dict[str, Any] = {
        "unknown model": lambda: ask(model="gpt-4"),
        "unknown adapter": lambda: ask(model="tinker://none:train:0/sampler_weights/x"),
        "too long": lambda: ask(max_tokens=1000),
        "hot": lambda: ask(temperature=-1),
        "no messages": lambda: ask(messages=[]),
        "no key": lambda: nobody.models.list(),
    }
    for name, call in calls.items():
        say(name, error=error_of(call), code=_code(call))


def _code(call: Any) -> Any:
    try:
        call()
    except openai.APIStatusError as error:
        return error.code
    return None


async def many() -> list[str]:
    async with openai.AsyncOpenAI() as client:
        answers = await asyncio.gather(
            *(client.completions.create(model=MODEL, prompt="Once upon", **DRAW) for _ in range(16))
        )
        return [answer.choices[0].text for answer in answers]


def main(path: str) -> None:
    client = openai.OpenAI(max_retries=0)
    say("models", ids=[m.id for m in client.models.list()], one=client.models.retrieve(MODEL).id)
    completions(client, path)
    chats(client)
    errors(client)
    say("many", texts=asyncio.run(many()))


if __name__ == "__main__":
    main(sys.argv[1])
    done()
