"""`tinkex chat`: talk to a base model or an adapter in the terminal, through its chat template.

Text appears while it is sampled. Ctrl-C stops the answer, not the conversation; the part that was printed
stays in the conversation. From a pipe each line is answered, with nothing else on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import Finite, Integer, Whole, note
from tinkex.cli.target import explain, is_local, where
from tinkex.config import LOCAL
from tinkex.models import DEFAULT

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.types.params import SamplingParams

HELP = "/reset starts a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@click.command()
@click.argument("model", default=DEFAULT, metavar="[MODEL|tinker://…]")
@click.option("--system", help="A system prompt.")
@click.option("--max-tokens", default=512, show_default=True, type=Whole(1), help="Length of an answer.")
@click.option("--temperature", default=0.7, show_default=True, type=Finite(0), help="0: greedy.")
@click.option("--seed", type=Integer(), help="The same seed gives the same answers.")
@click.option("--local", is_flag=True, help="Run in this process, even if a key or a server is set.")
def chat(model: str, system: str | None, local: bool, **params: Any) -> None:
    """Talk to a base MODEL, or to an adapter by its tinker:// path or its run's directory.

    \b
    tinkex chat
    tinkex chat tinker://RUN/sampler_weights/NAME
    tinkex chat runs/sft-chats

    Without a MODEL it is SmolLM2-135M-Instruct, fetched if it is not here. In the chat, /reset starts a new
    conversation, /quit or Ctrl-D ends, and Ctrl-C stops an answer.
    """
    import tinkex
    from tinkex.recipes.run_directory import trained

    local = local or is_local()
    model = trained(model)
    path = model if model.startswith("tinker://") else None
    with tinkex.ServiceClient(base_url=LOCAL if local else None) as service:
        sampler = service.create_sampling_client(path, base_model=None if path else model)
        conversation = Conversation(sampler, sampler.get_tokenizer(), tinkex.SamplingParams(**params), system)
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


def _lines() -> Iterator[str]:
    """The user's lines; with a prompt if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    with suppress(ImportError):
        import_module("readline")  # arrow keys and history; not on Windows
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            click.echo()  # discard the line
        except EOFError:
            click.echo()
            return


def _answer(conversation: Conversation, line: str) -> None:
    from tinkex.errors import APIStatusError, RequestFailedError
    from tinkex.recipes.progress import printable

    try:
        conversation.say(line, lambda piece: click.echo(printable(piece), nl=False))
        click.echo()
    except (APIStatusError, RequestFailedError) as error:
        if not sys.stdin.isatty():
            raise
        note(f"\nError: {explain(error)}. Your line was not kept; /reset starts a new conversation")


class Conversation:
    """The messages so far, and the sampler that continues them."""

    def __init__(
        self, sampler: SamplingClient, tokenizer: Any, params: SamplingParams, system: str | None
    ) -> None:
        self._sampler, self._tokenizer, self._params = sampler, tokenizer, params
        self._first = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._first)

    def say(self, line: str, write: Callable[[str], None]) -> None:
        """Answer `line`, writing the text while it is sampled. Ctrl-C ends the answer."""
        from tinkex.server.openai.detokenizer import Detokenizer
        from tinkex.tokenizers import render_chat
        from tinkex.types.data import ModelInput

        messages = [*self.messages, {"role": "user", "content": line}]
        prompt = ModelInput.from_ints(render_chat(self._tokenizer, messages))
        text = Detokenizer(self._tokenizer)
        with suppress(KeyboardInterrupt):
            for tokens in self._tokens(prompt):
                write(text.add(tokens))
        write(text.finish())
        self.messages = [*messages, {"role": "assistant", "content": text.text}]

    def _tokens(self, prompt: Any) -> Iterator[list[int]]:
        """The answer's tokens while they are sampled; all at once from a server without streaming."""
        from tinkex.errors import StreamingUnsupportedError

        try:
            with self._sampler.sample_stream(prompt, self._params) as stream:
                for new in stream:
                    yield new.tokens
        except StreamingUnsupportedError:
            (sequence,) = self._sampler.sample(prompt, 1, self._params).result().sequences
            yield sequence.tokens
