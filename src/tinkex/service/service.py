"""The service: every operation behind one `call`, for the HTTP server and for embedded mode.

`call` answers, or raises Refusal. One process serves a home directory at a time, and what was acknowledged
before a crash is there after it. The table of operations is at the end of `Service.__init__`. Knows neither
HTTP nor torch.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tinkex import tracing
from tinkex.engine.protocol import Engine, EngineConfig, build_engine
from tinkex.errors import InvalidInputError
from tinkex.service.access import Access, OpenedBy
from tinkex.service.activity import Activity
from tinkex.service.adapter_cache import AdapterCaches
from tinkex.service.archive import Archives, Link
from tinkex.service.billing import Billing
from tinkex.service.capabilities import Capabilities
from tinkex.service.checkpoints import Checkpoints
from tinkex.service.config import ServiceConfig
from tinkex.service.custom_losses import CustomLosses
from tinkex.service.futures import SAMPLES, Completions, Futures
from tinkex.service.group_commit import GroupCommit, replay
from tinkex.service.home import Home
from tinkex.service.imports import Imports
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerError, LedgerFullError
from tinkex.service.mirrors import MetricMirrors
from tinkex.service.peers import Peers
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rollouts import RolloutRecorder
from tinkex.service.rows import RunRow, Scope
from tinkex.service.run_listing import RunListing
from tinkex.service.run_metrics import RunMetrics
from tinkex.service.run_upkeep import RunUpkeep
from tinkex.service.runs.accept import TrainingRequests
from tinkex.service.runs.execution import Barriers
from tinkex.service.runs.journal import JournalError
from tinkex.service.runs.manager import RunManager
from tinkex.service.runs.saving import SAVES, Saves
from tinkex.service.runs.snapshots import Snapshots
from tinkex.service.runs.training_loop import TrainingObserver
from tinkex.service.sample_events import SampleEvents
from tinkex.service.samplers import SampleObserver, Samplers
from tinkex.service.saved_files import SavedFiles
from tinkex.service.served_models import ServedModels
from tinkex.service.sessions import Sessions, SessionTraces
from tinkex.service.upkeep import Upkeep
from tinkex.store import DamagedError, StoreError
from tinkex.types import futures as polls
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.sampling import SampleRequest
from tinkex.wire import ops
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex.service")
# What adds to the ledger and does not look at the quota itself, as passes, saves, copies and losses do.
GROWS = {
    "create_session", "create_model", "load_weights", "create_sampling_session", "assign_session_project",
    "export_session_trace",
}  # fmt: skip
# Operations that promise nothing to be kept over a power cut, besides those that only GET something.
_UNKEPT = {
    "session_heartbeat", "search_sessions", "get_client_config", "get_dynamic_config", "send_telemetry",
    "get_info", "get_weights_info", "unload_model", "sample", "log_run_metrics",
    "retrieve_future", "retrieve_futures", "cancel_future",
    # These wait for the disk by themselves.
    "create_model", "load_weights", "forward", "forward_backward", "optim_step", *SAVES,
}  # fmt: skip

Method = Callable[[Any, Caller], Awaitable[Any]]


class Observer(TrainingObserver, SampleObserver, Protocol):
    """Counts finished work, as a server's metrics do."""


@dataclass(frozen=True)
class ServerHooks:
    """What a server gives to its service: download links, weights access tokens, metrics, who else serves."""

    link: Link
    opened_by: OpenedBy
    observer: Observer
    peers: Peers | None = None


class Service:
    """Everything behind the wire's operations. Building one opens the ledger; `start` takes the home."""

    def __init__(
        self,
        config: ServiceConfig,
        build: Callable[[EngineConfig], Engine] = build_engine,
        server: ServerHooks | None = None,
    ) -> None:
        self.config = config
        self.ready = False
        self.long_poll = config.long_poll
        self._rounds: asyncio.Task[None] | None = None
        self.peers = peers = None if server is None else server.peers
        if config.ledger is not None and peers is None:
            self.peers = peers = Peers(config, "")
        self.home = home = Home(
            config.home if peers is None else peers.directory, config.disk_quota, config.disk_per_user,
            self._sessions_of, self._stored_bytes,
        )  # fmt: skip
        home.free_spare()
        if peers is None:
            self.disk = disk = GroupCommit(config.home, power=config.durability == "power")
            self.ledger = ledger = Ledger(config.home / "ledger.sqlite", disk.wrote)
            for directory in (config.home, config.home.parent):  # they name the ledger's files, and the home
                disk.wrote(directory)
        else:
            self.disk, self.ledger = disk, ledger = peers.commit, peers.ledger
        owns: Callable[[str], bool] = (lambda session_id: True) if peers is None else peers.owns
        wrote: Callable[[Path], None] = (lambda path: None) if peers is None else peers.commit.wrote
        self.models = models = ServedModels(config, build)
        self.futures = futures = Futures("" if peers is None else peers.server)
        self.archives = archives = Archives(home)
        link = archives.link if server is None else server.link
        observers = [] if server is None else [server.observer]
        self.files = files = SavedFiles(home, config.store or str(config.home), link)
        self.activity = activity = Activity(ledger)
        self.access = access = Access(
            ledger, activity, (lambda token: None) if server is None else server.opened_by
        )
        self.traces = traces = SessionTraces(home, files, access, activity)
        self.mirrors = mirrors = MetricMirrors(config.mirrors, home.root)
        self.metrics = metrics = RunMetrics(home, access, ledger, wrote, mirrors)
        self.rollouts = rollouts = RolloutRecorder(
            home, config.keep_rollouts, config.rollout_bytes, metrics.steps_of
        )
        self.completions = Completions(home.root / SAMPLES if config.resume else None, wrote)
        adapters = AdapterCaches(home, files, access)
        saves = Saves(home, files, ledger, access, activity, adapters, disk)
        barriers = Barriers(saves, files, access)
        snapshots = Snapshots(home, files, disk, shared=peers is not None)
        self.runs = RunManager(
            config, ledger, home, disk, models, futures, barriers, snapshots,
            [traces, metrics, rollouts, *observers],
        )  # fmt: skip
        self.training = training = TrainingRequests(
            config, ledger, home, disk, access, activity, models, futures, self.runs
        )
        self.samplers = samplers = Samplers(
            config, ledger, files, disk, access, activity, models, futures, self.completions, adapters,
            [traces, rollouts, *observers],
        )  # fmt: skip
        self._losses = losses = CustomLosses(ledger, home, access, models, futures)
        self.sessions = sessions = Sessions(
            config, ledger, access, activity, models, self.runs, self.flush, owns
        )
        self.checkpoints = checkpoints = Checkpoints(
            ledger, home, disk, access, activity, archives, files, owns
        )
        imports = Imports(ledger, home, files, access, activity, models)
        listing = RunListing(config, ledger, access, activity, models, self.runs, metrics)
        changes = RunUpkeep(ledger, home, disk, access, activity, self.runs, metrics, checkpoints, files)
        self.billing = billing = Billing(ledger, activity)
        self.upkeep = Upkeep(
            ledger, home, disk, access, activity, archives, files, self.runs, samplers, sessions, checkpoints,
            metrics, traces, billing, peers, self.flush, self.expire_results,
        )  # fmt: skip
        capabilities = Capabilities(config, models, server is not None)
        methods: list[Method] = [
            sessions.create_session, sessions.session_heartbeat, sessions.finish_session,
            sessions.list_sessions, sessions.get_session, sessions.assign_session_project,
            sessions.search_sessions, traces.export_session_trace, metrics.get_run_metrics,
            metrics.log_run_metrics, changes.update_run, changes.delete_run,
            training.create_model, training.load_weights, training.forward, training.forward_backward,
            training.optim_step, training.unload_model, listing.get_info, listing.get_training_run,
            listing.list_training_runs, losses.create_custom_loss, samplers.sample, imports.upload_weights,
            samplers.create_sampling_session, samplers.join_sampling_session, samplers.get_sampler,
            self.upkeep.delete_session, self.retrieve_future, self.retrieve_futures, self.cancel_future,
            checkpoints.get_weights_info, checkpoints.copy_weights, checkpoints.list_checkpoints,
            checkpoints.list_user_checkpoints, checkpoints.publish_checkpoint, imports.import_weights,
            checkpoints.unpublish_checkpoint, checkpoints.set_checkpoint_ttl, checkpoints.delete_checkpoint,
            checkpoints.get_external_weights_urls, checkpoints.get_checkpoint_archive_url,
            billing.get_audit_log, billing.get_billing_usage, billing.get_current_checkpoint_storage_usage,
            capabilities.get_client_config, capabilities.get_dynamic_config, capabilities.get_health,
            capabilities.get_server_capabilities, capabilities.get_tokenizer_file,
            capabilities.send_telemetry,
        ]  # fmt: skip
        keys = dict.fromkeys(["get_auth_token", "get_api_key", "delete_api_key"], capabilities.no_keys)
        of_saves = dict.fromkeys(SAVES, training.save)
        self._methods: dict[str, Method] = {method.__name__: method for method in methods} | of_saves | keys
        self._looks = _UNKEPT | {op.name for op in ops.OPS.values() if op.method == "GET"}

    async def start(self) -> None:
        """Take the home, and go on with what an earlier process left."""
        try:
            self.home.lock()
            await asyncio.to_thread(replay, self.home.root)
            await asyncio.to_thread(self.home.clear_unfinished)
            await asyncio.to_thread(self.files.clear_unfinished)
            await asyncio.to_thread(self.archives.sweep)
            if self.config.preload:  # first: if it fails, unanswered requests must wait for a better start
                await self.models.load_all()
            self.completions.restore()
            if self.peers is None:
                await self._recover()
            else:  # with models loaded: a lease must be renewed from its beginning
                await self.peers.start()
                await self.peers.take_over(self._adopt)
                self.peers.keep(self._adopt)
        except BaseException:
            self.home.unlock()
            raise
        self._rounds = asyncio.get_running_loop().create_task(self.upkeep.run())
        self.home.keep_spare()
        self.ready = True

    async def look(self) -> None:
        """Use the home beside the process that serves it: to list and tidy up, not to compute."""
        self.ready = True

    async def _adopt(self, sessions: list[str], samples: list[Path]) -> None:
        """Go on with the sessions of another server, whose files are here now."""
        for path in samples:
            self.completions.adopt(path)
        for row in [run for session in sessions for run in self.ledger.runs_of_session(session)]:
            if self._is_over(row):
                self.sessions.ended.add(row.session_id)
            elif row.state == "live" and not row.corrupted:
                await self.runs.go_on(row)

    def _is_over(self, row: RunRow) -> bool:
        """Has its session ended, so that its files are to be deleted?"""
        session = self.ledger.session(row.session_id)
        return session is None or session.status["type"] != "active"

    async def _recover(self) -> None:
        """Open the runs with unanswered requests, and note which sessions' files are to be deleted.

        On a full disk the ledger is not told what became of a run: the next start finds it again.
        """
        if not self.config.resume:
            with suppress(LedgerFullError):
                self.sessions.end_all()
        for row in self.ledger.runs_in_state("live", "evicted"):
            if self._is_over(row):
                self.sessions.ended.add(row.session_id)
            elif row.state == "live" and not row.corrupted:
                with suppress(LedgerFullError):
                    await self.runs.recover(row)

    async def stop(self) -> None:
        """Finish what is being executed, snapshot runs, and let go of the home."""
        self.ready = False
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.gather(self._rounds, return_exceptions=True)
        await self.samplers.stop()
        try:
            await self.runs.stop()
        except Refusal as refusal:  # of a server that was taken over: others have its runs
            log.error("runs were not saved: %s", refusal)
        await asyncio.to_thread(self.rollouts.stop)
        await asyncio.to_thread(self.mirrors.stop)
        self.flush()
        if self.peers is not None:
            await self.peers.stop()
        self.disk.close()
        self.completions.close()
        self.archives.clear()
        await self.models.close()
        self.ledger.close()
        self.home.unlock()
        if self.peers is not None:
            self.peers.close()

    def flush(self) -> None:
        """Write what is collected in memory to the ledger."""
        self.activity.flush()
        self.metrics.flush()

    async def call(self, op: Op[Any, Any], request: Any, caller: Caller) -> Any:
        """Do one operation."""
        method = self._methods.get(op.name)
        if method is None:
            raise Refusal(404, f"this service does not offer {op.name}")
        try:
            if self.peers is not None:
                await self.peers.check(op, request)
            if op.name in GROWS and self.home.limited:
                await self._check_quota(request, caller)
            if not tracing.is_on():
                answer = await method(request, caller)
            else:
                with tracing.span(f"service {op.name}", within=True):
                    answer = await method(request, caller)
            if op.name not in self._looks:
                await self.disk.synced()
            return answer
        except (InvalidInputError, DamagedError) as error:
            raise Refusal(422, str(error)) from None
        except (LedgerError, JournalError, StoreError) as error:
            raise Refusal(503, str(error)) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise Refusal(503, f"the server's disk is full ({op.name}); nothing was lost") from error

    def _sessions_of(self, user: str) -> list[str]:
        return self.ledger.sessions_of(user)

    def _stored_bytes(self, user: str) -> int:
        """What a user's checkpoints take in a store; "": everybody's. In the home, its files are measured."""
        if not self.files.in_store:
            return 0
        return sum(one.size_bytes for one in self.ledger.storage(Scope(user or None)))

    async def _check_quota(self, request: Any, caller: Caller) -> None:
        size = len(repr(request))
        if why := await self.home.over_quota(size, caller.user):
            raise Refusal(422, why)
        self.home.count(caller.user, size)

    async def fail(self, op: str, run_id: str, seq_id: int, message: str, caller: Caller) -> UntypedAPIFuture:
        """Accept a request that cannot be read, only for its future to fail in its turn."""
        if self.peers is not None:
            await self.peers.check_session(run_id.partition(":")[0], fresh=False)
        return await self.training.fail(op, run_id, seq_id, message, caller)

    async def check_here(self, request: SampleRequest) -> None:
        """Elsewhere if another server is to draw this sample."""
        if self.peers is not None:
            await self.peers.check(ops.SAMPLE, request)

    def stream(self, request: SampleRequest, caller: Caller) -> SampleEvents:
        """Sample, and iterate over the tokens as they are drawn; Refusal if it is not accepted."""
        return SampleEvents(self.samplers, request, caller)

    async def retrieve_future(self, request: polls.FutureRetrieveRequest, caller: Caller) -> Any:
        """A long poll. A request id that is not in memory is looked for on disk: its run may be evicted."""
        request_id = request.request_id
        future = (
            self.futures.get(request_id)
            or self._losses.find_future(request_id)
            or await self.runs.find_future(request_id, caller)
        )
        # Not 404: on 410 official samplers sample again. Another user's id is as unknown as any.
        if future is None or future.owner != caller.user:
            raise Refusal(410, "this request's result is no longer kept")
        if not future.done and not await future.wait(self.long_poll):
            return polls.PendingFuture(request_id, *self.runs.queue_state(future))
        if future.mark:
            await self.disk.reached(future.mark)
        if future.delivered is None:
            future.delivered = time.monotonic()
        return future.outcome

    async def retrieve_futures(
        self, request: polls.FuturesRetrieveRequest, caller: Caller
    ) -> polls.FuturesRetrieveResponse:
        """What ended since the last poll of a sampler, or of one of its clones."""
        target = request.target
        self.access.sampler(target.sampling_session_id, caller)
        fetched = [self.futures.get(i) for i in request.retrieved_request_ids]
        self.drop_results(f.request_id for f in fetched if f is not None and f.owner == caller.user)
        feed = f"{target.sampling_session_id}#{target.cloned_sampler_id}"
        wait = self.long_poll if request.timeout is None else min(request.timeout, self.long_poll)
        if request.retrieved_request_ids and not self.completions.is_open(feed):
            wait = 0.0  # a client's last acknowledgement: it waits for nothing
        completions, cursor = await self.completions.poll(feed, request.prev_cursor, max(0.0, wait))
        return polls.FuturesRetrieveResponse(completions=completions, cursor=cursor)

    async def cancel_future(self, request: polls.CancelFutureRequest, caller: Caller) -> None:
        """Stop a sample. Training requests cannot be cancelled: they are journaled."""
        future = self.futures.get(request.request_id)
        if future is not None and future.owner == caller.user:
            self.samplers.cancel(future)

    def drop_results(self, request_ids: Iterable[str]) -> None:
        """Forget results that were delivered or have expired."""
        if dropped := self.futures.drop(request_ids):
            self.completions.fetched(dropped)
            self.runs.forget_results(dropped)

    def expire_results(self, now: float) -> None:
        self.drop_results(self.futures.expired(now, self.config.keep_results, self.config.keep_delivered))
        self.completions.expire(now, self.config.keep_results)
