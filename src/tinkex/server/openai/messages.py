"""A conversation in OpenAI's form as the tokens of a prompt, by the tokenizer's own chat template.

Tools go to the template, or into the system message if the template knows none. A conversation that ends
with an assistant's message is continued there. Knows OpenAI's messages and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tinkex.errors import InvalidInputError
from tinkex.server.json_values import as_list, as_object
from tinkex.server.openai.chat_formats import ChatFormat, chat_format
from tinkex.tokenizers import render_chat

Message = dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text")
_TOOLS = """You can call functions. Their signatures, as JSON:
<tools>
{tools}
</tools>
To call one, write an object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "…", "arguments": {{…}}}}
</tool_call>"""


@dataclass(frozen=True)
class RenderedChat:
    """The tokens of a conversation, and how the reply is to be read."""

    prompt: list[int]
    form: ChatFormat
    thinking: bool  # the reply begins inside a thought


def template_of(tokenizer: Any) -> str:
    """The chat template's source; "" if there is none."""
    template: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        named = cast("Mapping[str, Any]", template)
        template = named.get("tool_use") or named.get("default")
    return template if isinstance(template, str) else ""


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    goes_on: bool | None = None,
    **more: Any,
) -> RenderedChat:
    """`goes_on`: continue the last message; None: if it is an assistant's text. `more`: for the template."""
    template = template_of(tokenizer)
    form = chat_format(template)
    read = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if "developer" not in template:
        read = [{**m, "role": "system"} if m["role"] == "developer" else m for m in read]
    if not form.takes_tools:
        read = _without_tools(read, tools)
    elif tools:
        more["tools"] = list(tools)
    last = read[-1]
    continued = bool(last["role"] == "assistant" and not last.get("tool_calls") and last["content"])
    goes_on = continued if goes_on is None else goes_on
    if goes_on and not continued:
        raise InvalidInputError("continue_final_message needs an assistant's message with text at the end")
    if goes_on:
        more["continue_final_message"] = True
    prompt = render_chat(tokenizer, read, add_generation_prompt=not goes_on, **more)
    tail = last["content"] if goes_on else tokenizer.decode(prompt[-8:], skip_special_tokens=False)
    return RenderedChat(prompt, form, tail.rfind("<think>") > tail.rfind("</think>"))


def _message(message: Message, where: str) -> Message:
    """The message with its content as one text, and arguments as objects: what chat templates take."""
    if not isinstance(message.get("role"), str):
        raise InvalidInputError(f"{where} must be an object with a role, got {str(message)[:80]}")
    read: Message = {**message, "content": content_text(message.get("content"), where)}
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        read["reasoning_content"] = read["thinking"] = thought
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidInputError(f"{where}.tool_calls must be a list, got {str(calls)[:80]}")
        read["tool_calls"] = [_tool_call(as_object(call), where) for call in as_list(calls)]
    return read


def content_text(content: Any, where: str) -> str:
    """A message's content, a string or text parts, as one string."""
    text = ""
    for part in as_list(content) if isinstance(content, list) else [content or ""]:
        fields = {"type": "text", "text": part} if isinstance(part, str) else as_object(part)
        if fields.get("type") not in _TEXT_PARTS or not isinstance(fields.get("text"), str):
            raise InvalidInputError(
                f"{where}.content: this model reads a string or text parts, got {str(part)[:80]}"
            )
        text += fields["text"]
    return text


def _tool_call(call: Message, where: str) -> Message:
    function = as_object(call.get("function"))
    if not isinstance(function.get("name"), str):
        raise InvalidInputError(f"{where}.tool_calls needs objects with a function, got {str(call)[:80]}")
    arguments: Any = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # shown to the model as it is
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _without_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation for a template that knows no tools: they, their calls and results become text."""
    read: list[Message] = []
    for message in messages:
        text, role = message["content"], message["role"]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            written = json.dumps({"name": function["name"], "arguments": function["arguments"]})
            text += f"{chr(10) if text else ''}<tool_call>\n{written}\n</tool_call>"
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        read.append({"role": role, "content": text})
    if tools:
        about = _TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if read[0]["role"] == "system":
            read[0] = {"role": "system", "content": f"{read[0]['content']}\n\n{about}"}
        else:
            read.insert(0, {"role": "system", "content": about})
    return read


def special_id(tokenizer: Any) -> Callable[[str], int | None]:
    """The id of a text that is one special token; None for other texts."""
    special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return special.get
