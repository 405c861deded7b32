"""Lark grammars of replies: JSON that matches a schema, or calls of tools in a family's own format.

A reply that begins in a thought may think first. Markers that are special tokens are named by their ids, as
llguidance wants them. Knows formats and schemas, and nothing of requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinkex.server.json_values import as_list, as_object
from tinkex.server.openai.chat_formats import ChatFormat

Schema = Mapping[str, Any] | bool
SpecialId = Callable[[str], int | None]
_SPACES = r"[\x20\x0A\x0D\x09]{0,16}"  # between the parts of JSON; bounded, since a weak model may never stop
_ONE_SPACE = r"\x20?"  # in calls, as templates write them
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANYTHING = r"TEXT: /(.|\n)*/"


class LarkWriter:
    """Writes grammars for one format and tokenizer."""

    def __init__(self, form: ChatFormat, special_id: SpecialId, *, thinking: bool = False) -> None:
        self._form, self._special_id, self._thinking = form, special_id, thinking

    def answer(self, schema: Schema) -> str:
        """The reply is JSON that matches `schema`, after a thought if it begins with one."""
        return self._whole(f"answer: {self._final()}{_json(_closed(schema), lenient=False)}")

    def matching(self, regex: str) -> str:
        """The reply matches a regex, after a thought."""
        escaped = re.sub(r"(?<!\\)/", r"\/", regex)
        return self._whole(f"answer: {self._final()}/{escaped}/")

    def calls(self, tools: Sequence[Mapping[str, Any]], most: int) -> str:
        """The reply is one call of these functions, or up to `most`."""
        calls = [self._call(tool["name"], _closed(tool.get("parameters") or _NO_ARGUMENTS)) for tool in tools]
        rules = [f"call{i}: {call}" for i, call in enumerate(calls)]
        one = " | ".join(f"call{i}" for i in range(len(calls)))
        begin, end = self._around()
        again = "" if most == 1 or self._form.name in ("llama", "harmony", "mistral") else ' ("\\n"? one)*'
        return self._whole(f"answer: {begin}one{again}{end}", f"one: {one}", *rules)

    def _whole(self, *rules: str) -> str:
        start = "start: answer"
        extra: list[str] = []
        if self._form.name == "harmony":
            start = "start: thought? answer"
            end, begin = self._literal("<|end|>"), self._literal("<|start|>")
            channel, message = self._literal("<|channel|>"), self._literal("<|message|>")
            extra = [f'thought: {channel} "analysis" {message} TEXT {end} {begin} "assistant"', _ANYTHING]
        elif self._thinking:
            start = r"start: thought (/\n{1,2}/)? answer"
            closing = self._special_id("</think>")
            if closing is None:
                extra = [r"thought[lazy]: /(.|\n)*<\/think>/"]
            else:
                extra = [f"thought: TEXT <[{closing}]>", _ANYTHING]
        return "\n".join([start, *rules, *extra])

    def _final(self) -> str:
        if self._form.name != "harmony":
            return ""
        return f'{self._literal("<|channel|>")} "final" {self._literal("<|message|>")} '

    def _literal(self, text: str) -> str:
        found = self._special_id(text)
        return json.dumps(text) if found is None else f"<[{found}]>"

    def _around(self) -> tuple[str, str]:
        match self._form.name:
            case "deepseek" | "deepseek-fenced":
                begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
                return self._literal(begin) + " ", " " + self._literal(end)
            case "kimi":
                begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
                return self._literal(begin) + " ", " " + self._literal(end)
            case "mistral":
                return self._literal("[TOOL_CALLS]") + " ", ""
            case _:
                return "", ""

    def _call(self, name: str, parameters: Schema) -> str:
        literal, arguments = self._literal, _json(parameters)
        match self._form.name:
            case "harmony":
                to = json.dumps(f"commentary to=functions.{name} ")
                constrain, message = literal("<|constrain|>"), literal("<|message|>")
                return f'{literal("<|channel|>")} {to} {constrain} "json" {message} {arguments}'
            case "deepseek":
                begin, sep, end = map(
                    literal, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
                )
                return f"{begin} {json.dumps(name)} {sep} {arguments} {end}"
            case "deepseek-fenced":
                begin, sep, end = map(
                    literal, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
                )
                opened = json.dumps(f"{name}\n```json\n")
                return f'{begin} "function" {sep} {opened} {arguments} "\\n```" {end}'
            case "kimi":
                begin, argument, end = map(
                    literal, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
                )
                return f"{begin} {json.dumps(f'functions.{name}:')} /[0-9]/ {argument} {arguments} {end}"
            case "llama":
                return _json(_named(name, "parameters", parameters))
            case "mistral":
                return f'"[" {_json(_named(name, "arguments", parameters))} "]"'
            case "qwen-xml":
                fields = _fields(parameters, "<parameter={}>\n", "\n</parameter>\n")
                opened = json.dumps(f"<tool_call>\n<function={name}>\n")
                return f'{opened} {fields} "</function>\\n</tool_call>"'
            case "glm":
                fields = _fields(parameters, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
                return f'{json.dumps(f"<tool_call>{name}{chr(10)}")} {fields} "</tool_call>"'
            case _:
                called = _json(_named(name, "arguments", parameters))
                return f'"<tool_call>\\n" {called} "\\n</tool_call>"'


def _closed(schema: Any) -> Any:
    """The schema without arguments that it does not name, unless it says that there may be others."""
    if isinstance(schema, list):
        return [_closed(one) for one in as_list(schema)]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {name: _closed(value) for name, value in as_object(schema).items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _named(name: str, key: str, parameters: Schema) -> dict[str, Any]:
    """The schema of an object with a function's name and its arguments."""
    properties: dict[str, Any] = {"name": {"const": name}, key: parameters}
    named: dict[str, Any] = {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip
    if isinstance(parameters, Mapping) and "$defs" in parameters:  # references are from the root
        named["$defs"] = parameters["$defs"]
    return named


def _json(schema: Schema, *, lenient: bool = True) -> str:
    """Tools' schemas may have keywords that no grammar expresses, and that models know as hints."""
    rooted: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {}
    spaces = {"whitespace_flexible": True, "whitespace_pattern": _ONE_SPACE if lenient else _SPACES}
    rooted["x-guidance"] = {**spaces, "lenient": lenient}
    return f"%json {json.dumps(rooted)}"


def _fields(parameters: Schema, before: str, after: str) -> str:
    """Arguments as tagged text: the required ones in order, the others if the model likes."""
    known: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
    rules: list[str] = []
    for name, given in as_object(known.get("properties")).items():
        schema = as_object(given)
        if schema.get("type") == "string" and "enum" not in schema:
            closing = re.escape(after).replace("/", r"\/").replace("\n", "n")
            rest = f"/[^<]*{closing}/"  # one lexeme: the text may end like the tag begins
        else:
            rest = f"{_json({**schema, '$defs': as_object(known.get('$defs'))})} {json.dumps(after)}"
        field = f"{json.dumps(before.format(name))} {rest}"
        rules.append(field if name in known.get("required", ()) else f"({field})?")
    return " ".join(rules)
