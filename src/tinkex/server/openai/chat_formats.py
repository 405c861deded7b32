"""How families write thoughts and tool calls in their replies, and the parser that reads them back.

`chat_format` recognises a family by its chat template. A `ReplyParser` takes a reply's text in pieces of any
size and gives its parts: reasoning, text, and whole tool calls. What looks like a call and cannot be read
stays text. Knows no HTTP and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tinkex.server.json_values import as_list, as_object


@dataclass(frozen=True)
class ParsedCall:
    """A call of a tool; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ReplyPart:
    """A piece of one kind, or a whole call."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ParsedCall | None = None


Calls = list[ParsedCall]
Texts = Mapping[str, Collection[str]]  # by function: its parameters that are strings
ParseBlock = Callable[[str, Texts], Calls]
Functions = Sequence[Mapping[str, Any]]  # as OpenAI describes them: name, description, parameters


@dataclass(frozen=True)
class ChatFormat:
    """Tool calls lie between `begin` and `end` ("": the end of the reply)."""

    name: str
    begin: str = ""
    end: str = ""
    parse: ParseBlock = lambda block, texts: []
    markers: tuple[str, ...] = ()  # special tokens that the parser must see
    thinks: bool = False  # writes thoughts before "</think>"
    opens_bare: bool = False  # a reply that begins with "{" is a call too
    takes_tools: bool = True  # the template renders tools by itself


# -- blocks of calls -------------------------------------------------------------------------------------


def _call(name: Any, arguments: Any) -> Calls:
    if not isinstance(name, str) or not name:
        return []
    if isinstance(arguments, str):
        try:
            json.loads(arguments)
        except ValueError:
            return []
        return [ParsedCall(name, arguments.strip())]
    return [ParsedCall(name, json.dumps({} if arguments is None else arguments, ensure_ascii=False))]


def _from_json(text: str, texts: Texts) -> Calls:
    """One object, or a list of them; some models write several, separated by ";"."""
    try:
        given: Any = json.loads(text)
    except ValueError:
        parts = re.split(r"(?<=\})\s*;\s*(?=\{)", text)
        return [call for part in parts for call in _from_json(part, texts)] if len(parts) > 1 else []
    calls: Calls = []
    for one in as_list(given) or [given]:
        call = as_object(as_object(one).get("function")) or as_object(one)
        calls += _call(call.get("name"), call.get("arguments", call.get("parameters")))
    return calls


def _value(text: str, is_text: bool) -> Any:
    """An argument without quotes: if it is no string, JSON, or Python's spelling, as some templates write."""
    if is_text:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _tagged(block: str, texts: Texts) -> Calls:
    """Inside <tool_call>: JSON (Qwen3, Hermes), <function=…> (Qwen3.5, Nemotron 3) or <arg_key> (GLM)."""
    block = block.strip()
    if block.startswith("{"):
        return _from_json(block, texts)
    if found := re.match(r"<function=([^>\n]+)>", block):
        return _untyped(found[1].strip(), _PARAMETER.findall(block), texts)
    name = re.split(r"\n|<arg_key>", block, maxsplit=1)[0].strip()
    if re.fullmatch(r"[\w.-]+", name):
        return _untyped(name, _ARGUMENT.findall(block), texts)
    return []


def _untyped(name: str, arguments: Sequence[tuple[str, str]], texts: Texts) -> Calls:
    strings = texts.get(name, ())
    return _call(name, {key.strip(): _value(value, key.strip() in strings) for key, value in arguments})


def _deepseek(block: str, texts: Texts) -> Calls:
    calls: Calls = []
    for one in re.findall("<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", block, re.DOTALL):
        name, _, rest = one.partition("<｜tool▁sep｜>")
        if fenced := re.match(r"([^\n]+)\n```json\n(.*?)\n?```", rest, re.DOTALL):  # V3 and R1
            name, rest = fenced[1], fenced[2]
        calls += _call(name.strip(), rest)
    return calls


def _kimi(block: str, texts: Texts) -> Calls:
    pattern = r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)(?:<\|tool_call_end\|>|$)"
    found = re.findall(pattern, block, re.DOTALL)
    stripped = ((name.strip(), text) for name, text in found)  # functions.NAME:INDEX
    named = ((name.removeprefix("functions.").rpartition(":")[0] or name, text) for name, text in stripped)
    return [call for name, text in named for call in _call(name, text)]


def _mistral(block: str, texts: Texts) -> Calls:
    if block.lstrip().startswith(("[", "{")):
        return _from_json(block, texts)
    pattern = r"([\w.-]+)\[ARGS\](.*?)(?=\[TOOL_CALLS\]|$)"
    return [call for name, text in re.findall(pattern, block, re.DOTALL) for call in _call(name, text)]


HERMES = ChatFormat("hermes", "<tool_call>", "</tool_call>", _tagged, thinks=True)
# For templates that know no tools: they are described in the system message (`messages.py`).
PLAIN = ChatFormat("plain", "<tool_call>", "</tool_call>", _tagged, thinks=True, takes_tools=False)
QWEN_XML = replace(HERMES, name="qwen-xml")
GLM = replace(HERMES, name="glm")
DEEPSEEK = ChatFormat(
    "deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek,
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
     "<｜tool▁sep｜>"),
    thinks=True,
)  # fmt: skip
DEEPSEEK_FENCED = replace(DEEPSEEK, name="deepseek-fenced")
KIMI = ChatFormat(
    "kimi", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi,
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
     "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    thinks=True,
)  # fmt: skip
MISTRAL = ChatFormat("mistral", "[TOOL_CALLS]", "", _mistral, ("[TOOL_CALLS]", "[ARGS]"), thinks=True)
LLAMA = ChatFormat("llama", "<|python_tag|>", "", _from_json, ("<|python_tag|>",), opens_bare=True)
HARMONY = ChatFormat(
    "harmony",
    markers=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
)
_SIGNS = (
    ("<|channel|>", HARMONY),
    ("<｜tool▁calls▁begin｜>", DEEPSEEK),
    ("<|tool_calls_section_begin|>", KIMI),
    ("[TOOL_CALLS]", MISTRAL),
    ("<arg_key>", GLM),
    ("<function=", QWEN_XML),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA),
)


def chat_format(template: str) -> ChatFormat:
    """The format of the family whose chat template this is."""
    found = next((known for sign, known in _SIGNS if sign in template), PLAIN)
    if found is DEEPSEEK and "```json" in template:
        return DEEPSEEK_FENCED
    # Llama 3.2's template takes tools and names no marker of its own.
    return LLAMA if found is PLAIN and "tools" in template and "ipython" in template else found


# -- parsers ---------------------------------------------------------------------------------------------


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` could begin one of the markers."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


def _strings(function: Mapping[str, Any]) -> frozenset[str]:
    """The parameters of a function that are strings."""
    properties = as_object(as_object(function.get("parameters")).get("properties"))
    return frozenset(name for name, schema in properties.items() if as_object(schema).get("type") == "string")


class ReplyParser:
    """The parts of one reply, of any format but harmony.

    `thinking` says that the prompt has opened "<think>" already; without `tools`, calls stay text; at most
    `most_calls` calls are read.
    """

    def __init__(
        self, form: ChatFormat, *, thinking: bool = False, tools: Functions = (), most_calls: int = 128
    ) -> None:
        self._form, self._tools, self._left = form, bool(tools), most_calls
        self._texts = {function["name"]: _strings(function) for function in tools}
        self._mode: Literal["thinking", "text", "call"] = "thinking" if thinking else "text"
        self._pending = ""
        self._begun = False  # some text or thought was given
        self._parts: list[ReplyPart] = []

    def add(self, text: str) -> list[ReplyPart]:
        """The parts that `text` makes certain."""
        self._pending += text
        while self._advance(final=False):
            pass
        return self._taken()

    def finish(self) -> list[ReplyPart]:
        """The rest, when no more text comes."""
        while self._advance(final=True):
            pass
        if self._mode == "call":
            self._calls(self._pending, "")
        elif self._pending:
            self._say(self._pending)
        self._pending = ""
        return self._taken()

    def _taken(self) -> list[ReplyPart]:
        parts, self._parts = self._parts, []
        return parts

    def _say(self, text: str) -> None:
        if not self._begun or (self._parts and self._parts[-1].kind == "call"):
            text = text.lstrip()
        if text:
            self._begun = True
            self._parts.append(ReplyPart("reasoning" if self._mode == "thinking" else "text", text))

    def _advance(self, *, final: bool) -> bool:
        """Read on to the next marker; False if there is none yet."""
        match self._mode:
            case "thinking":
                return self._until("</think>", final)
            case "call":
                end = self._form.end
                if not end or end not in self._pending:
                    return False
                block, _, self._pending = self._pending.partition(end)
                self._mode = "text"
                self._calls(block, end)
                return True
            case "text":
                return self._text(final)

    def _until(self, marker: str, final: bool) -> bool:
        if marker in self._pending:
            text, _, self._pending = self._pending.partition(marker)
            self._say(text)
            self._mode, self._begun = "text", False
            return True
        if not final:
            self._emit([marker])
        return False

    def _text(self, final: bool) -> bool:
        stripped = self._pending.lstrip()
        if self._form.thinks and not self._begun:
            if stripped.startswith("<think>"):
                self._pending, self._mode = stripped.removeprefix("<think>"), "thinking"
                return True
            if not final and (not stripped or "<think>".startswith(stripped)):
                return False
        if not self._tools or self._left == 0:
            if not final:
                self._say(self._pending)
                self._pending = ""
            return False
        if self._form.opens_bare and not self._begun and stripped.startswith("{"):
            self._mode = "call"
            return True
        if self._form.begin in self._pending:
            text, _, self._pending = self._pending.partition(self._form.begin)
            self._say(text.rstrip())
            self._mode = "call"
            return True
        if not final:
            self._emit([self._form.begin], spaces=True)
        return False

    def _emit(self, markers: Sequence[str], spaces: bool = False) -> None:
        """Emit the pending text, except for an end that may begin a marker, and spaces before one."""
        keep = len(self._pending) - held_back(self._pending, markers)
        if spaces:
            keep = len(self._pending[:keep].rstrip())
        self._say(self._pending[:keep])
        self._pending = self._pending[keep:]

    def _calls(self, block: str, end: str) -> None:
        calls = self._form.parse(block, self._texts)[: self._left]
        if not calls:
            opened = "" if self._form.opens_bare and block.lstrip().startswith("{") else self._form.begin
            self._mode = "text"
            return self._say(f"{opened}{block}{end}")
        self._left -= len(calls)
        self._parts += [ReplyPart("call", call=call) for call in calls]


_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class HarmonyParser:
    """The parts of a reply of gpt-oss: messages with a channel and a recipient each."""

    def __init__(self, *, tools: Functions = (), most_calls: int = 128) -> None:
        self._tools, self._left = bool(tools), most_calls
        self._pending, self._header = "", ""
        self._in_body = False

    def add(self, text: str) -> list[ReplyPart]:
        self._pending += text
        return self._read(final=False)

    def finish(self) -> list[ReplyPart]:
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        while True:
            if not self._in_body:
                if "<|message|>" not in self._pending:
                    return parts
                self._header, _, self._pending = self._pending.partition("<|message|>")
                self._in_body = True
            ends = [(at, end) for end in _HARMONY_ENDS if (at := self._pending.find(end)) >= 0]
            if not ends:
                return parts + self._rest(final)
            at, end = min(ends)
            parts += self._body(self._pending[:at], whole=True)
            self._pending, self._in_body = self._pending[at + len(end) :], False

    def _rest(self, final: bool) -> list[ReplyPart]:
        if final or not self._recipient():
            keep = len(self._pending) - (0 if final else held_back(self._pending, _HARMONY_ENDS))
            body, self._pending = self._pending[:keep], self._pending[keep:]
            return self._body(body, whole=final)
        return []

    def _recipient(self) -> str:
        found = re.search(r"to=([\w.-]+)", self._header)
        return found[1].removeprefix("functions.") if found and self._tools and self._left else ""

    def _body(self, body: str, *, whole: bool) -> list[ReplyPart]:
        name = self._recipient()
        if name and whole and (calls := _call(name, body.strip() or "{}")):
            self._left -= 1
            return [ReplyPart("call", call=calls[0])]
        if not body:
            return []
        thought = "analysis" in self._header
        return [ReplyPart("reasoning" if thought else "text", body)]


AnyParser = ReplyParser | HarmonyParser


def parser_of(form: ChatFormat, *, thinking: bool, tools: Functions, most_calls: int = 128) -> AnyParser:
    if form is HARMONY:
        return HarmonyParser(tools=tools, most_calls=most_calls)
    return ReplyParser(form, thinking=thinking, tools=tools, most_calls=most_calls)
