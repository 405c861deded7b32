"""A Modelfile for Ollama next to a GGUF file: the chat template in Go's language, and the stop strings.

The template is derived from what the model's own Jinja template writes for some conversations, and is kept
only if it writes the same for others. A template that is not a sequence of messages between
fixed texts is left out: Ollama then uses the one in the GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tinkex.engine.torch.gguf_vocab import _ends, _json, adds_first, chat_template

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
_S, _U, _A, _V, _B = "sysTEXTone", "userTEXTone", "assistantTEXTone", "userTEXTtwo", "assistantTEXTtwo"


class MessageFormat(NamedTuple):
    """Each role's texts before and after a message, and what an answer begins with."""

    around: dict[str, tuple[str, str]]
    answer: str
    system: str  # the model's own system prompt, where none is given

    def write(self, messages: Sequence[Message]) -> str:
        texts = [f"{self.around[m['role']][0]}{m['content']}{self.around[m['role']][1]}" for m in messages]
        return "".join(texts) + self.answer

    def go(self) -> str:
        """The same as a template of Go's."""
        branches = [
            f'{"if" if i == 0 else "else if"} eq .Role "{role}" }}}}{_literal(before)}{{{{ .Content }}}}'
            f"{_literal(after)}{{{{ "
            for i, (role, (before, after)) in enumerate(self.around.items())
        ]
        return (
            f"{{{{ range .Messages }}}}{{{{ {''.join(branches)}end }}}}{{{{ end }}}}{_literal(self.answer)}"
        )


def _literal(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if "{{" in text or "}}" in text else text


def modelfile(base_dir: Path, gguf: str) -> str:
    """The Modelfile of the GGUF file `gguf` in the same directory."""
    lines, format = [f"FROM ./{gguf}"], chat_format(base_dir)
    if format is not None:
        lines.append(f'TEMPLATE """{format.go()}"""')
        if format.system:
            lines.append(f'SYSTEM """{format.system}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops(base_dir)]
    return "\n".join(lines) + "\n"


def stops(base_dir: Path) -> list[str]:
    """The texts of the tokens that end an answer."""
    saved = _json(base_dir / "tokenizer.json")
    texts = {number: token for token, number in saved.get("model", {}).get("vocab", {}).items()}
    texts |= {added["id"]: added["content"] for added in saved.get("added_tokens") or ()}
    eos = _json(base_dir / "tokenizer_config.json").get("eos_token")
    named = eos.get("content") if isinstance(eos, dict) else eos
    found = [named, *(texts.get(number) for number in _ends(base_dir))]
    return list(dict.fromkeys(text for text in found if text))


def chat_format(base_dir: Path) -> MessageFormat | None:
    """How the model writes conversations; None if it has no template, or one that cannot be said in Go."""
    if not (template := chat_template(base_dir)):
        return None
    settings = _json(base_dir / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(base_dir / "tokenizer.json"))
        found = _derive(_renderer(template, settings, tokenizer))
    except Exception:  # a template may do, and raise, anything
        return None
    return found


def _renderer(template: str, settings: dict[str, Any], tokenizer: Tokenizer) -> Render:
    """The Jinja template as a function; without the text's first mark if the tokenizer adds it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        given = settings.get(name)
        special[name] = (given.get("content") if isinstance(given, dict) else given) or ""

    bos = special["bos_token"]
    added = bos if adds_first(tokenizer, tokenizer.token_to_id(bos)) else ""

    def render(messages: Sequence[Message], answer: bool) -> str:
        texts, _ = render_jinja_template(
            [list(messages)], chat_template=template, add_generation_prompt=answer, **special
        )
        return texts[0].removeprefix(added)

    return render


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _derive(render: Render) -> MessageFormat | None:
    user, assistant = _message("user", _U), _message("assistant", _A)
    system = _system(render, user)
    start = [system] if system else []
    asked = render([*start, user], False)
    after_user = asked.partition(_U)[2]
    answered = render([*start, user, assistant], False)
    again = render([*start, user, assistant, _message("user", _V)], False)
    if not answered.startswith(asked) or not again.startswith(answered):
        return None
    before_answer, _, after_answer = answered.removeprefix(asked).partition(_A)
    before_user = again.removeprefix(answered).partition(_V)[0]
    around = {"user": (before_user, after_user), "assistant": (before_answer, after_answer)}
    default = ""
    if system:
        before, _, rest = asked.partition(_S)
        between = rest.partition(_U)[0]
        if not between.endswith(before_user):
            return None
        around = {"system": (before, between.removesuffix(before_user)), **around}
        alone = render([user], False)
        if not alone.startswith(before_user):
            default = alone.removeprefix(before).partition(around["system"][1] + before_user)[0]
    answer = render([*start, user], True).removeprefix(asked)
    found = MessageFormat(around, answer, default)
    return found if _agrees(found, render, start) else None


def _system(render: Render, user: Message) -> Message | None:
    """A system message, if the template takes one and writes it before the first turn."""
    system = _message("system", _S)
    try:
        written = render([system, user], False)
    except Exception:
        return None
    return system if _S in written and written.index(_S) < written.index(_U) else None


def _agrees(found: MessageFormat, render: Render, start: list[Message]) -> bool:
    turns = [
        _message("user", _V),
        _message("assistant", _B),
        _message("user", "a b\nc"),
        _message("assistant", _A),
    ]
    default = [_message("system", found.system)] if found.system else []
    return all(
        found.write([*start, *turns[:n]]) == render([*start, *turns[:n]], True)
        and found.write([*default, *turns[:n]]) == render(turns[:n], True)
        for n in (1, 3)
    )
