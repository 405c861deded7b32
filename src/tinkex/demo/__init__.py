"""Two demos that train a real model on a CPU, and check by program that it learned.

`fine_tune` teaches it to talk like a pirate (supervised), `reinforce` to tell stories of five words (RL).
Both are meant to be read and copied: they call only the public API. The shared part is here: evaluate, train,
evaluate again; Ctrl-C stops after the current step, and a bookmark says how to continue.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import tinkex
from tinkex.client.download import download_archive, new_directory
from tinkex.demo.screen import Screen
from tinkex.errors import InvalidInputError
from tinkex.files import replacing

_KEEP_SECONDS = 7 * 24 * 3600  # after which a bookmark's checkpoint is deleted


@dataclass(frozen=True)
class Bookmark:
    """Where a demo stopped: a checkpoint that has exactly the steps of its curve."""

    model: str
    checkpoint: str  # with optimizer state
    steps: int  # of the whole demo
    curve: list[float]  # the loss or reward of each step so far

    @classmethod
    def read(cls, out: Path, kind: str) -> Bookmark:
        try:
            fields = json.loads(_bookmark_file(out, kind).read_bytes())
            checksum = fields.pop("checksum", None)  # older ones have none
            bookmark = cls(**fields)
            if checksum in (None, bookmark.checksum()):
                return bookmark
        except FileNotFoundError:
            raise InvalidInputError(f"there is nothing to resume: no {_bookmark_file(out, kind)}") from None
        except (ValueError, TypeError, AttributeError):
            pass
        raise InvalidInputError(f"{_bookmark_file(out, kind)} is damaged: start the demo without --resume")

    def checksum(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def _bookmark_file(out: Path, kind: str) -> Path:
    return out / f"{kind}-stopped.json"


@dataclass(frozen=True)
class Demo:
    """What the model learns, how it trains, and where its files go."""

    kind: ClassVar[str]  # "sft" or "rl"
    curve: ClassVar[str]  # what is plotted: "loss" or "reward"
    tested: ClassVar[str]  # what the model is evaluated on
    enough: ClassVar[float]  # rise of the score that counts as learned

    model: str
    out: Path
    name: str  # of the adapter
    goal: str
    rule: str  # how a program checks the answers, in words
    steps: int
    rank: int
    learning_rate: float
    called: str = ""  # the run, in lists and in the console

    def evaluate(self, sampler: tinkex.SamplingClient, tokenizer: Any, screen: Screen) -> tuple[float, str]:
        """Show answers to held-out prompts; returns a score from 0 to 1, and a sentence about it."""
        raise NotImplementedError

    def train(self, run: tinkex.TrainingClient, tokenizer: Any, curve: list[float], screen: Screen) -> bool:
        """Take the remaining steps, appending to `curve`; False if Ctrl-C stopped it."""
        raise NotImplementedError

    def play(self, screen: Screen, bookmark: Bookmark | None = None) -> bool | None:
        """Did the model learn? None if Ctrl-C stopped it: then there is a bookmark in `out`."""
        if bookmark is not None:
            self = replace(self, model=bookmark.model, steps=bookmark.steps)
        curve = list(bookmark.curve) if bookmark else []
        with tinkex.ServiceClient(base_url="local") as service:
            if bookmark is not None:
                run = service.create_training_client_from_state_with_optimizer(
                    bookmark.checkpoint, name=self.called
                )
            else:  # PEFT and vLLM can load an adapter without an unembedding; with one, only PEFT can.
                run = service.create_lora_training_client(
                    self.model, self.rank, seed=1, train_unembed=False, name=self.called
                )
            tokenizer = run.get_tokenizer()
            screen.heading(f"Before: {self.tested}")
            sampler = service.create_sampling_client(base_model=self.model)
            before, before_text = self.evaluate(sampler, tokenizer, screen)
            finished = self.train(run, tokenizer, curve, screen)
            self._write_bookmark(run, curve)
            if not finished:
                return None
            try:
                screen.heading(f"After: the same {self.tested.split()[0]}")
                path = run.save_weights_for_sampler(self.name).result().path
                sampler = service.create_sampling_client(model_path=path)
                after, after_text = self.evaluate(sampler, tokenizer, screen)
                screen.curve(self.curve, curve, self.out / f"{self.curve}.png")
                rest = service.create_rest_client()
                url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
                with new_directory(self.out / self.name, overwrite=True) as directory:
                    download_archive(url, directory)
                screen.adapter(path, self.out / self.name)
            except KeyboardInterrupt:
                return None
        _bookmark_file(self.out, self.kind).unlink(missing_ok=True)
        learned = after - before >= self.enough
        screen.verdict(learned, f"{before_text} before, {after_text} after")
        return learned

    def _write_bookmark(self, run: tinkex.TrainingClient, curve: list[float]) -> None:
        name = f"{self.name}-{len(curve)}"
        saved = run.save_state(name, ttl_seconds=_KEEP_SECONDS, overwrite=True).result()
        self.out.mkdir(parents=True, exist_ok=True)
        file = _bookmark_file(self.out, self.kind)
        bookmark = Bookmark(self.model, saved.path, self.steps, curve)
        fields = asdict(bookmark) | {"checksum": bookmark.checksum()}
        with replacing(file) as out:
            out.write(f"{json.dumps(fields, indent=2)}\n".encode())
