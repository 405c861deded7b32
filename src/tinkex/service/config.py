"""The settings of a service, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tinkex.engine.protocol import EngineConfig, Placement

Durability = Literal["power", "process"]
HOUR, DAY = 3600.0, 24 * 3600.0


@dataclass(frozen=True)
class ServiceConfig:
    """Where state lives, which base models there are, and what the limits are. Times are in seconds."""

    home: Path
    models: Mapping[str, str] = field(default_factory=dict[str, str])  # name -> directory or GGUF file
    models_directory: Path | None = None  # more models: directories or GGUF files, ORG/NAME or ORG--NAME
    any_path: bool = False  # a base model may also be named by its path: for embedded mode only
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))  # `model` is filled in
    placements: Mapping[str, Placement] = field(default_factory=dict[str, Placement])  # models on a cluster
    tensor: Mapping[str, int] = field(default_factory=dict[str, int])  # models that are over several GPUs
    preload: bool = False  # load every model at start, instead of on first use
    offline: bool = False  # never ask a hub for a model or tokenizer

    # what survives
    ledger: str | None = None  # a Postgres URL that several servers share, with `store`; None: SQLite
    lease: float = 10.0  # how long a server of a shared ledger may be silent before others take over
    store: str | None = None  # where saved adapters are (`tinkex.store`); None: in the home
    resume: bool = True  # continue the runs of an earlier process: its clients are still there
    durability: Durability = "process"  # what was acknowledged survives a killed process, or a power cut too
    snapshot_steps: int = 20  # optimizer steps between two snapshots of a run
    snapshot_seconds: float = 120.0
    snapshot_bytes: int = 256 * 1024 * 1024  # of passes since the last one, of a run that takes no steps

    # how long things are kept
    session_lapse: float = 300.0  # without a heartbeat, before a session's runs are evicted
    session_expiry: float = 7 * DAY  # without a heartbeat, before a session ends and its runs are deleted
    keep_results: float = HOUR  # results that no client fetched
    keep_delivered: float = 300.0  # results that were fetched: the answer may have been lost
    keep_superseded: float = HOUR  # an unused unnamed sampler of a run that has a newer one
    keep_unused: float = DAY  # an unused unnamed sampler
    long_poll: float = 30.0
    gap_patience: float = 60.0

    # how much
    samples_in_flight: int = 288  # sequences of one base model; beyond that, requests wait, fairly by owner
    disk_quota: int | None = None  # bytes of all that is kept in the home; None: what the disk has
    disk_per_user: int | None = None  # bytes of the sessions of one user; None: no limit per user
    runs_per_user: int = 256  # live at a time, of one user
    queue_memory: int | None = None  # bytes of passes that wait to be executed; None: no limit
    queue_memory_per_user: int | None = None  # the same, of one user
    custom_losses: bool = True  # clients may upload losses; tests turn it off, as other servers have none

    # what the console shows besides metrics
    keep_rollouts: float = 0.0  # the share of prompts whose samples are kept, from 0 to 1
    rollout_bytes: int = 64 * 1024 * 1024  # of one run; beyond that the oldest are dropped
    mirrors: tuple[str, ...] = ()  # trackers that get the metrics of every run too: wandb, trackio
