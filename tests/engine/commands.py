"""Commands executed to their end, on a bare `TorchTrainer` or on an engine's trainer."""

from __future__ import annotations

from typing import Any

from tinkex.engine.protocol import Command, ContinuePasses, PassProgress, Trainer
from tinkex.engine.torch.trainer import TorchTrainer


def do(trainer: TorchTrainer | Trainer, command: Command[Any]) -> Any:
    bare = isinstance(trainer, TorchTrainer)
    outcome = trainer.execute(command) if bare else trainer.submit(command).result(60)
    while isinstance(outcome, PassProgress):
        outcome = do(trainer, ContinuePasses(outcome.ticket))
    return outcome
