"""Other people's programs for OpenAI's and Anthropic's APIs, each used as its own documentation shows.

The model is tiny and random: what it says is noise, so every step asks for something that the server must
enforce (a call, a schema, a count) or that two ways of asking must agree on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import tempfile
from typing import Any, ClassVar, Literal

from report import MODEL, done, say

URL = os.environ["OPENAI_BASE_URL"]
ROOT = URL.removesuffix("/v1")
KEY = os.environ["OPENAI_API_KEY"]
ASKED = [{"role": "user", "content": "How is the weather in Bern?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Rome"]},
        "days": {"type": "integer", "enum": [1, 2]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}}


def use_openai() -> None:
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: Literal["Bern", "Rome"]
        days: Literal[1, 2]

    client = openai.OpenAI(max_retries=0)
    chat = client.chat.completions
    drawn = {"model": MODEL, "messages": ASKED, "max_tokens": 600, "seed": 1}
    whole = chat.create(**drawn, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls or ()
    with chat.stream(**drawn, tools=[TOOL], tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_completion().choices[0]
    (again,) = final.message.tool_calls or ()
    parsed = chat.parse(**drawn, response_format=Weather).choices[0].message.parsed
    asked = {"model": MODEL, "input": "hi", "max_output_tokens": 8}
    response = client.responses.create(**asked, temperature=0)
    events = client.responses.create(**asked, temperature=0, stream=True)
    streamed = [event.delta for event in events if event.type == "response.output_text.delta"]
    with client.responses.stream(model=MODEL, input="?", text_format=Weather) as stream:
        final_response = stream.get_final_response().output_parsed
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    called = client.responses.create(model=MODEL, input="?", tools=[tool], tool_choice="required")
    formatted = client.responses.parse(model=MODEL, input="?", text_format=Weather).output_parsed
    say(
        "openai",
        call=[call.function.name, json.loads(call.function.arguments), whole.choices[0].finish_reason],
        streamed=[again.function.name, json.loads(again.function.arguments), final.finish_reason],
        parsed=parsed.model_dump() if parsed else None,
        texts=[response.output_text, "".join(streamed)],
        responses=[
            json.loads(called.output[0].arguments),
            formatted.model_dump() if formatted else None,
            final_response.model_dump() if final_response else None,
        ],
    )


def use_anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0)
    hosted = anthropic.Anthropic(base_url=f"{ROOT}/anthropic/api", api_key=KEY, max_retries=0)
    drawn: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 16, "system": "Be brief."}
    drawn["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**drawn)
    with hosted.messages.stream(**drawn) as stream:
        streamed = stream.get_final_message()
    count = client.messages.count_tokens(model=MODEL, messages=ASKED, system="Be brief.")
    tool = {"name": "weather", "description": "Tell it.", "input_schema": SCHEMA}
    more = {
        **drawn,
        "max_tokens": 600,
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    used = client.messages.create(**more)
    with client.messages.stream(**more) as stream:
        again = stream.get_final_message()
    result = {"type": "tool_result", "tool_use_id": used.content[0].id, "content": "rain"}
    said = [*ASKED, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
    later = client.messages.create(model=MODEL, max_tokens=4, messages=said, tools=[tool])
    try:
        client.messages.create(model="claude-none", max_tokens=4, messages=ASKED)
        error = ""
    except anthropic.NotFoundError as refused:
        error = refused.body["error"]["type"]
    say(
        "anthropic",
        texts=[whole.content[0].text, streamed.content[0].text],
        stops=[whole.stop_reason, streamed.stop_reason, used.stop_reason, again.stop_reason],
        inputs=[used.content[0].input, again.content[0].input],
        counts=[count.input_tokens, whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)],
        later=later.usage.output_tokens,
        error=error,
    )


def use_litellm() -> None:
    import litellm

    asked = {
        "model": f"openai/{MODEL}",
        "api_base": URL,
        "api_key": KEY,
        "messages": ASKED,
        "max_tokens": 600,
    }
    call = litellm.completion(**asked, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
    chunks = litellm.completion(**{**asked, "max_tokens": 8}, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = litellm.completion(**{**asked, "max_tokens": 8}, temperature=0).choices[0].message.content
    spoken = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=ROOT, api_key=KEY, messages=ASKED, max_tokens=8, temperature=0
    )
    texts = [text, whole or "", spoken.choices[0].message.content or ""]
    say("litellm", arguments=json.loads(call.function.arguments), texts=texts)


def use_langchain() -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: Literal["Bern", "Rome"]) -> str:
        """Tell the weather of a city."""
        return f"rain in {city}"

    model = ChatOpenAI(model=MODEL, max_tokens=600, seed=1)
    (call,) = (
        model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke("?").tool_calls
    )
    result = weather.invoke(call)
    answer = (
        model.bind_tools([weather]).bind(max_tokens=8).invoke([("user", "?"), ("user", str(result.content))])
    )
    structured = model.with_structured_output(SCHEMA | {"title": "answer"}, method="json_schema").invoke("?")
    pieces = [chunk.content for chunk in ChatOpenAI(model=MODEL, max_tokens=8, temperature=0).stream("hi")]
    whole = ChatOpenAI(model=MODEL, max_tokens=8, temperature=0).invoke("hi").content
    say(
        "langchain", result=result.content, structured=structured, texts=["".join(pieces), whole],
        used=answer.usage_metadata["output_tokens"],
    )  # fmt: skip


def use_instructor() -> None:
    import instructor
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: Literal["Bern", "Rome"]
        days: Literal[1, 2]

    answers = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, response_model=Weather, max_tokens=600, max_retries=0
        )
        answers.append(answer.model_dump())
    say("instructor", answers=answers)


def use_inspect() -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def weather():
        async def execute(city: Literal["Bern", "Rome"]) -> str:
            """Tell the weather of a city.

            Args:
                city: The city.
            """
            return f"rain in {city}"

        return execute

    results: dict[str, Any] = {}
    for name, options in (("completions", {"responses_api": False}), ("responses", {"responses_api": True})):
        model = get_model(f"openai/{MODEL}", config=GenerateConfig(max_tokens=600, seed=1), **options)
        samples = [Sample(input="How is the weather?", target="rain")]
        task = Task(
            samples,
            solver=[use_tools(weather(), tool_choice="any"), generate(tool_calls="single")],
            scorer=includes(),
        )
        (log,) = eval(task, model=model, display="none", log_dir=tempfile.mkdtemp(), sandbox=None)
        roles = [message.role for message in log.samples[0].messages] if log.samples else []
        results[name] = [log.status, roles, str(log.error)[:300] if log.error else ""]
    say("inspect", **results)


def use_agents() -> None:
    from agents import Agent, ModelSettings, OpenAIProvider, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    calls: list[str] = []

    @function_tool
    def weather(city: Literal["Bern", "Rome"]) -> str:
        """Tell the weather of a city."""
        calls.append(city)
        return f"rain in {city}"

    settings = ModelSettings(tool_choice="required", max_tokens=600, parallel_tool_calls=False)
    model = OpenAIProvider(use_responses=True).get_model(MODEL)
    agent = Agent(
        name="a",
        model=model,
        tools=[weather],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    result = Runner.run_sync(agent, "How is the weather?", max_turns=4)

    async def streamed() -> int:
        running = Runner.run_streamed(agent, "How is the weather?", max_turns=4)
        return sum([1 async for _ in running.stream_events()])

    events = asyncio.run(streamed())
    say("agents", calls=calls, kinds=[item.type for item in result.new_items], events=events)


def use_pydantic_ai() -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    class Weather(BaseModel):
        city: Literal["Bern", "Rome"]
        days: Literal[1, 2]

    answers = []
    for model in (OpenAIChatModel(MODEL), OpenAIResponsesModel(MODEL)):
        agent = Agent(model, output_type=Weather, model_settings={"max_tokens": 600})
        answers.append(agent.run_sync("How is the weather?").output.model_dump())
    say("pydantic_ai", answers=answers)


def use_smolagents() -> None:
    from smolagents import OpenAIServerModel, Tool

    class Weather(Tool):
        name = "weather"
        description = "Tell the weather of a city."
        inputs: ClassVar = {"city": {"type": "string", "description": "The city.", "enum": ["Bern", "Rome"]}}
        output_type = "string"

        def forward(self, city: str) -> str:
            return f"rain in {city}"

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY, max_tokens=600)
    said = model.generate(
        [{"role": "user", "content": [{"type": "text", "text": "?"}]}], tools_to_call_from=[Weather()]
    )
    (call,) = said.tool_calls[:1]
    arguments = call.function.arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    say("smolagents", name=call.function.name, arguments=arguments)


def list_fields() -> None:
    """What the SDKs' methods can send."""
    import anthropic
    import openai

    ours, theirs = openai.OpenAI(), anthropic.Anthropic(api_key=KEY)
    methods = {
        "/v1/chat/completions": [ours.chat.completions.create],
        "/v1/completions": [ours.completions.create],
        "/v1/responses": [ours.responses.create],
        "/v1/messages": [theirs.messages.create, theirs.beta.messages.create],
        "/v1/messages/count_tokens": [theirs.messages.count_tokens, theirs.beta.messages.count_tokens],
    }
    # What the SDK does with a call, and two that it sends as headers.
    options = {"extra_headers", "extra_query", "extra_body", "timeout", "user_profile_id", "workspace_id"}
    names = {
        path: sorted({name for one in several for name in inspect.signature(one).parameters} - options)
        for path, several in methods.items()
    }
    say("fields", names=names)


PROGRAMS = {
    "fields": list_fields, "openai": use_openai, "anthropic": use_anthropic, "litellm": use_litellm,
    "langchain": use_langchain, "instructor": use_instructor, "inspect": use_inspect, "agents": use_agents,
    "pydantic_ai": use_pydantic_ai, "smolagents": use_smolagents,
}  # fmt: skip

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
    done()
