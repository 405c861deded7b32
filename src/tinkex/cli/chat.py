"""`tinkex chat`: talk to a base model or an adapter in the terminal, by its own chat template.

Promises: words appear as they are sampled; Ctrl-C stops the answer and not the conversation, and what was
said of it stays in memory. From a pipe it answers each line and says nothing else on stdout.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.numbers import Finite, Whole
from tinkex.cli.output import CONTEXT, note
from tinkex.cli.place import is_local, where
from tinkex.config import LOCAL
from tinkex.models import DEFAULT

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import RemoteServiceClient
    from tinkex.types.params import SamplingParams

# Control characters, but for tab and newline: a model may say what terminals obey.
_OBEYED = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10})
HELP = "/reset begins anew, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"


@click.command(context_settings=CONTEXT)
@click.argument("model", default=DEFAULT, metavar="[MODEL|tinker://…]")
@click.option("--system", help="What the model is told before the conversation.")
@click.option("--max-tokens", default=512, show_default=True, type=Whole(1), help="Of an answer.")
@click.option("--temperature", default=0.7, show_default=True, type=Finite(0), help="0: greedy.")
@click.option("--seed", type=Whole(), help="For answers that can be repeated.")
@click.option("--local", is_flag=True, help="Run in this process, even if a key or a server is set.")
def chat(
    model: str, system: str | None, max_tokens: int, temperature: float, seed: int | None, local: bool
) -> None:
    """Talk to a base MODEL, or to an adapter by its tinker:// path.

    \b
    tinkex chat
    tinkex chat tinker://RUN/sampler_weights/NAME

    Without a MODEL it is SmolLM2-135M-Instruct, fetched if it is not here.
    /reset begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer.
    """
    import tinkex

    params = tinkex.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    local = local or is_local()
    with tinkex.ServiceClient(base_url=LOCAL if local else None) as service:
        sampler = _sampler(service, model)
        conversation = Conversation(sampler, sampler.get_tokenizer(), params, system)
        if sys.stdin.isatty():
            note(f"{model} {'in this process' if local else where()}\n{HELP}")
        for line in _lines():
            if line == "/quit":
                return
            if line == "/reset":
                conversation.reset()
                note("A new conversation.")
            elif line.startswith("/"):
                note(f"There is no {line.split()[0]}: {HELP}")
            elif line:
                _answer(conversation, line)


def _sampler(service: RemoteServiceClient, model: str) -> SamplingClient:
    if model.startswith("tinker://"):
        return service.create_sampling_client(model_path=model)
    return service.create_sampling_client(base_model=model)


def _lines() -> Iterator[str]:
    """What the user types, line by line; at a prompt if there is someone to prompt."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    try:
        importlib.import_module("readline")  # arrow keys and history, where there is one
    except ImportError:
        pass
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            click.echo()  # the line is given up, not the conversation
        except EOFError:
            click.echo()
            return


def _answer(conversation: Conversation, line: str) -> None:
    from tinkex.errors import APIStatusError, RequestFailedError

    try:
        conversation.say(line, lambda piece: click.echo(piece.translate(_OBEYED), nl=False))
        click.echo()
    except (APIStatusError, RequestFailedError) as error:
        if not sys.stdin.isatty():
            raise  # nobody is there to try another line
        note(f"\nError: {error}; the line was not kept, and /reset begins anew")


class Conversation:
    """Messages so far, and a sampler to go on with."""

    def __init__(
        self, sampler: SamplingClient, tokenizer: Any, params: SamplingParams, system: str | None
    ) -> None:
        self._sampler, self._tokenizer, self._params = sampler, tokenizer, params
        self._begin = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._begin)

    def reset(self) -> None:
        self.messages = list(self._begin)

    def say(self, line: str, tell: Callable[[str], None]) -> None:
        """Tell the model's answer to `line`, piece by piece; Ctrl-C ends it where it is."""
        from tinkex.server.openai.detokenizer import Detokenizer
        from tinkex.tokenizers import render_chat
        from tinkex.types.data import ModelInput

        asked = [*self.messages, {"role": "user", "content": line}]
        prompt = ModelInput.from_ints(render_chat(self._tokenizer, asked))
        text = Detokenizer(self._tokenizer)
        try:
            for tokens in self._tokens(prompt):
                tell(text.add(tokens))
        except KeyboardInterrupt:
            pass
        tell(text.finish())
        self.messages = [*asked, {"role": "assistant", "content": text.text}]

    def _tokens(self, prompt: Any) -> Iterator[list[int]]:
        """The answer's tokens as they come or, from a server that has no streams, all at once."""
        from tinkex.errors import StreamingUnsupportedError

        try:
            with self._sampler.sample_stream(prompt, self._params) as stream:
                for new in stream:
                    yield new.tokens
        except StreamingUnsupportedError:
            (sequence,) = self._sampler.sample(prompt, 1, self._params).result().sequences
            yield sequence.tokens
