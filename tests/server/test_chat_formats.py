"""Replies as families write them, read back: thoughts, text and calls, in pieces of any size."""

from __future__ import annotations

import itertools
import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.openai.chat_formats import ReplyPart, chat_format, parser_of
from tinkex.server.openai.tool_grammars import LarkWriter

# A piece of each family's template by which it is known, a reply, and what it says: thought, text, calls.
CALL = ("weather", {"city": "Bern", "days": 2})
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}}
TOOLS = [
    {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}},
    {"name": "noon"},
]
REPLIES: dict[str, tuple[str, str, tuple[str, str, list[Any]]]] = {
    "qwen3": (
        "{{ '<tool_call>' }}",
        '<think>\nShe asks for weather.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Bern", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "noon", "arguments": {}}\n'
        "</tool_call>",
        ("She asks for weather.\n", "I look.", [CALL, ("noon", {})]),
    ),
    "qwen3.5": (
        "<tool_call>\n<function=name>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        ("", "", [CALL]),
    ),
    "glm": (
        "<tool_call><arg_key>",
        "<think>Hm.</think>\nWait.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        ("Hm.", "Wait.", [CALL]),
    ),
    "llama": (
        "<|python_tag|>",
        '{"name": "weather", "parameters": {"city": "Bern", "days": 2}}',
        ("", "", [CALL]),
    ),
    "llama, several": (
        "<|python_tag|>",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Bern", "days": 2}}; {"name": "noon", '
        '"parameters": {}}',
        ("", "", [CALL, ("noon", {})]),
    ),
    "deepseek v3": (
        "<｜tool▁calls▁begin｜>```json",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Bern", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("", "Let me see.", [CALL]),
    ),
    "deepseek v3.1": (
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bern", "days": 2}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>noon<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [CALL, ("noon", {})]),
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Bern", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
        ("", "I look.", [CALL]),
    ),
    "mistral": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern", "days": 2}}]',
        ("", "", [CALL]),
    ),
    "mistral, new": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Bern", "days": 2}',
        ("", "", [CALL]),
    ),
    "gpt-oss": (
        "<|start|><|channel|>",
        "<|channel|>analysis<|message|>She asks.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Bern", "days": 2}',
        ("She asks.", "", [CALL]),
    ),
    "gpt-oss, an answer": (
        "<|start|><|channel|>",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It rains.",
        ("Easy.", "It rains.", []),
    ),
    "a call that is none": (
        "{{ '<tool_call>' }}",
        "So: <tool_call>\nnot JSON, no name\n</tool_call> and on",
        ("", "So:<tool_call>\nnot JSON, no name\n</tool_call> and on", []),
    ),
}


def joined(parts: list[ReplyPart]) -> tuple[str, str, list[Any]]:
    def text(kind: str) -> str:
        return "".join(part.text for part in parts if part.kind == kind)

    calls = [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call]
    return text("reasoning"), text("text"), calls


def read(template: str, pieces: list[str], **more: Any) -> tuple[str, str, list[Any]]:
    parser = parser_of(chat_format(template), **{"thinking": False, "tools": TOOLS, **more})
    parts = [part for piece in pieces for part in parser.add(piece)]
    return joined(parts + parser.finish())


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLIES)
@given(data=st.data())
def test_replies_are_read_in_pieces_of_any_size(name: str, data: st.DataObject) -> None:
    template, reply, expected = REPLIES[name]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(reply)), max_size=8)) | {0, len(reply)})
    pieces = [reply[a:b] for a, b in itertools.pairwise(cuts)]
    assert read(template, pieces) == expected


def test_values_without_quotes_are_what_the_schema_says() -> None:
    reply = (
        "<tool_call>\n<function=weather>\n<parameter=code>\n3000\n</parameter>\n<parameter=exact>\nTrue\n"
        "</parameter>\n<parameter=until>\nNone\n</parameter>\n</function>\n</tool_call>"
    )
    call = ("weather", {"code": "3000", "exact": True, "until": None})
    assert read("<tool_call>\n<function=name>", [reply]) == ("", "", [call])


def test_a_prompt_may_have_opened_the_thought() -> None:
    reply = "hm, 3 < 4\n</think>\n\nFour."
    assert read("<tool_call>", [reply], thinking=True) == ("hm, 3 < 4\n", "Four.", [])
    assert read("<tool_call>", ["hm"], thinking=True) == ("hm", "", [])  # it never came to an answer


def test_without_tools_a_call_is_text() -> None:
    _, reply, _ = REPLIES["qwen3.5"]
    assert read("<tool_call>", [reply], tools=()) == ("", reply, [])


def test_at_most_so_many_calls_are_read() -> None:
    template, reply, (thought, text, calls) = REPLIES["qwen3"]
    said, rest, some = read(template, [reply], most_calls=1)
    assert (said, some) == (thought, calls[:1])
    assert rest.startswith(text)


def test_text_is_streamed_while_it_comes() -> None:
    parser = parser_of(chat_format("<tool_call>"), thinking=False, tools=TOOLS)
    assert joined(parser.add("Hello there")) == ("", "Hello there", [])
    assert joined(parser.add(" <tool")) == ("", "", [])
    assert joined(parser.add("box>")) == ("", " <toolbox>", [])


# -- grammars --------------------------------------------------------------------------------------------

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
NOON = {"name": "noon"}


class ByteTokens:
    """Tokens that are bytes; then the end, and one special token."""

    tokens = (*(bytes([i]) for i in range(256)), b"<end>", b"<|special|>")
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256, 257)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def accepts(grammar: str, reply: list[int]) -> str:
    """ "" if the grammar takes the reply and may end there, else why not."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(reply)
    return "" if taken == len(reply) and matcher.is_accepting() else f"{taken} of {len(reply)}"


FORCED = [name for name, (*_, said) in REPLIES.items() if said[2] and name != "mistral, new"]


@pytest.mark.parametrize("name", FORCED)
def test_a_grammar_takes_the_calls_of_its_family_and_nothing_else(name: str) -> None:
    template, reply, (_, _, calls) = REPLIES[name]
    # The calls alone, and one of those that Llama separates by semicolons.
    reply = reply.removeprefix("<|python_tag|>").partition(";")[0].rpartition("<|start|>assistant")[2]
    reply = reply[max(0, reply.find(chat_format(template).begin)) :]
    writer = LarkWriter(chat_format(template), lambda text: None)
    grammar = writer.calls([WEATHER, NOON], most=len(calls))
    assert accepts(grammar, list(reply.encode())) == ""
    assert accepts(grammar, list(b"It rains.")) != ""
    assert accepts(grammar, list(reply.replace("weather", "wether").encode())) != ""
    assert accepts(grammar, list(reply.replace("days", "hours").encode())) != ""


def test_special_tokens_are_named_by_their_ids_and_thoughts_come_first() -> None:
    kimi = chat_format("<|tool_calls_section_begin|>")
    special = {"<|tool_call_begin|>": 257}.get
    grammar = LarkWriter(kimi, special).calls([NOON], most=1)
    around = [part.encode() for part in ("<|tool_calls_section_begin|>", "functions.noon:0")]
    rest = b"<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    assert accepts(grammar, [*around[0], 257, *around[1], *rest]) == ""
    thinking = LarkWriter(chat_format("<tool_call>"), lambda text: None, thinking=True)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    assert accepts(thinking.answer(schema), list(b'hm, {\n</think>\n\n{"ok": true}')) == ""
    assert accepts(thinking.answer(schema), list(b'hm</think>\n\n{"ok": 5}')) != ""
    assert accepts(thinking.matching("a/b|c"), list(b"hm</think>\n\na/b")) == ""
