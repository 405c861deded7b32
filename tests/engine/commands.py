"""Commands executed to their end, on a bare `TorchTrainer` or on an engine's trainer."""

from __future__ import annotations

from typing import Any

from tinkex.engine.protocol import Command, ForwardBackward, Trainer, run_passes
from tinkex.engine.torch.trainer import TorchTrainer


def do(trainer: TorchTrainer | Trainer, command: Command[Any]) -> Any:
    if isinstance(command, ForwardBackward):
        bare = isinstance(trainer, TorchTrainer)
        return trainer.run_passes(command.passes) if bare else run_passes(trainer, command.passes)
    if isinstance(trainer, TorchTrainer):
        return trainer.execute(command)
    return trainer.submit(command).result(60)
