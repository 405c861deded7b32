"""The service: every operation behind one `call`, for the HTTP server and for embedded mode.

`call` answers, or raises Refusal. One process serves a home directory at a time, and what was acknowledged
before a crash is there after it. The table of operations is at the end of `Service.__init__`. Knows neither
HTTP nor torch.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterable
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
from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import Home, prepare
from tinkex.service.imports import Imports
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerError
from tinkex.service.mirrors import MetricMirrors
from tinkex.service.peers import Peers
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rollouts import RolloutRecorder
from tinkex.service.run_listing import RunListing
from tinkex.service.run_metrics import RunMetrics
from tinkex.service.run_upkeep import RunUpkeep
from tinkex.service.runs.accept import TrainingRequests
from tinkex.service.runs.crash_recovery import recover
from tinkex.service.runs.execution import Barriers
from tinkex.service.runs.journal import JournalError
from tinkex.service.runs.manager import RunManager
from tinkex.service.runs.saving import Saves
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
# Operations that add to the ledger and do not check the quota themselves.
_GROWS = {
    ops.CREATE_SESSION, ops.CREATE_MODEL, ops.LOAD_WEIGHTS, ops.CREATE_SAMPLING_SESSION,
    ops.ASSIGN_SESSION_PROJECT, ops.EXPORT_SESSION_TRACE,
}  # fmt: skip
# Operations after which `call` does not wait for the disk.
_NOT_SYNCED = {
    # They promise nothing that must survive a power cut.
    *(op for op in ops.OPS.values() if op.method == "GET"),
    ops.SESSION_HEARTBEAT, ops.SEARCH_SESSIONS, ops.GET_CLIENT_CONFIG, ops.GET_DYNAMIC_CONFIG,
    ops.SEND_TELEMETRY, ops.GET_INFO, ops.GET_WEIGHTS_INFO, ops.UNLOAD_MODEL, ops.SAMPLE,
    ops.LOG_RUN_METRICS, ops.RETRIEVE_FUTURE, ops.RETRIEVE_FUTURES, ops.CANCEL_FUTURE,
    # They wait by themselves.
    ops.CREATE_MODEL, ops.LOAD_WEIGHTS, ops.FORWARD, ops.FORWARD_BACKWARD, ops.OPTIM_STEP,
    ops.SAVE_WEIGHTS, ops.SAVE_WEIGHTS_FOR_SAMPLER, ops.SAVE_WEIGHTS_EXTERNAL,
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
        if peers is None:
            root = config.home
            prepare(root)
            disk = GroupCommit(root, power=config.durability == "power")
            ledger = Ledger(root / "ledger.sqlite", disk.wrote)
            for directory in (root, root.parent):  # they name the ledger's files, and the home
                disk.wrote(directory)
        else:
            root, disk, ledger = peers.directory, peers.commit, peers.ledger
        self.disk, self.ledger = disk, ledger
        location = config.store or str(config.home)
        # In a store, checkpoints count by their rows; in the home, their files are measured.
        stored: Callable[[str], int] = (lambda user: 0) if location == str(root) else ledger.checkpoint_bytes
        self.home = home = Home(root, config.disk_quota, config.disk_per_user, ledger.sessions_of, stored)
        owns: Callable[[str], bool] = (lambda session_id: True) if peers is None else peers.owns
        wrote: Callable[[Path], None] = (lambda path: None) if peers is None else peers.commit.wrote
        self.models = models = ServedModels(config, build)
        self.futures = futures = Futures("" if peers is None else peers.server)
        self.archives = archives = Archives(home)
        link = archives.link if server is None else server.link
        observers = [] if server is None else [server.observer]
        self.files = files = SavedFiles(home, location, link)
        self.activity = activity = Activity(ledger)
        self.access = access = Access(
            ledger, activity, (lambda token: None) if server is None else server.opened_by
        )
        self.traces = traces = SessionTraces(home, files, access, activity)
        self.mirrors = mirrors = MetricMirrors(config.mirrors, home.root)
        self.metrics = metrics = RunMetrics(home, access, ledger, wrote, mirrors)
        self.rollouts = rollouts = RolloutRecorder(
            home, ledger, config.keep_rollouts, config.rollout_bytes, metrics.steps_of
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
            [traces, metrics, rollouts, *observers],
        )  # fmt: skip
        self._losses = losses = CustomLosses(ledger, home, access, models, futures)
        self.sessions = sessions = Sessions(
            config, ledger, access, activity, models, self.runs, self.flush, owns
        )
        self.checkpoints = checkpoints = Checkpoints(
            ledger, home, disk, access, activity, archives, files, owns
        )
        imports = Imports(ledger, home, files, access, activity, models)
        listing = RunListing(config, ledger, access, activity, models, self.runs, samplers, metrics)
        changes = RunUpkeep(ledger, home, disk, access, activity, self.runs, metrics, checkpoints, files)
        self.billing = billing = Billing(ledger, activity)
        self.upkeep = Upkeep(
            ledger, home, disk, access, activity, archives, files, self.runs, samplers, sessions, checkpoints,
            metrics, traces, billing, peers, self.flush, self.expire_results,
        )  # fmt: skip
        capabilities = Capabilities(config, models, server is not None)
        self._methods: dict[Op[Any, Any], Method] = {
            ops.CREATE_SESSION: sessions.create_session,
            ops.SESSION_HEARTBEAT: sessions.session_heartbeat,
            ops.FINISH_SESSION: sessions.finish_session,
            ops.LIST_SESSIONS: sessions.list_sessions,
            ops.GET_SESSION: sessions.get_session,
            ops.SEARCH_SESSIONS: sessions.search_sessions,
            ops.ASSIGN_SESSION_PROJECT: sessions.assign_session_project,
            ops.DELETE_SESSION: self.upkeep.delete_session,
            ops.EXPORT_SESSION_TRACE: traces.export_session_trace,
            ops.CREATE_MODEL: training.create_model,
            ops.UNLOAD_MODEL: training.unload_model,
            ops.FORWARD: training.forward,
            ops.FORWARD_BACKWARD: training.forward_backward,
            ops.OPTIM_STEP: training.optim_step,
            ops.SAVE_WEIGHTS: training.save,
            ops.SAVE_WEIGHTS_FOR_SAMPLER: training.save,
            ops.SAVE_WEIGHTS_EXTERNAL: training.save,
            ops.LOAD_WEIGHTS: training.load_weights,
            ops.CREATE_CUSTOM_LOSS: losses.create_custom_loss,
            ops.GET_INFO: listing.get_info,
            ops.GET_TRAINING_RUN: listing.get_training_run,
            ops.LIST_TRAINING_RUNS: listing.list_training_runs,
            ops.GET_RUN_METRICS: metrics.get_run_metrics,
            ops.LOG_RUN_METRICS: metrics.log_run_metrics,
            ops.UPDATE_RUN: changes.update_run,
            ops.DELETE_RUN: changes.delete_run,
            ops.UPLOAD_WEIGHTS: imports.upload_weights,
            ops.IMPORT_WEIGHTS: imports.import_weights,
            ops.GET_WEIGHTS_INFO: checkpoints.get_weights_info,
            ops.COPY_WEIGHTS: checkpoints.copy_weights,
            ops.LIST_CHECKPOINTS: checkpoints.list_checkpoints,
            ops.LIST_USER_CHECKPOINTS: checkpoints.list_user_checkpoints,
            ops.PUBLISH_CHECKPOINT: checkpoints.publish_checkpoint,
            ops.UNPUBLISH_CHECKPOINT: checkpoints.unpublish_checkpoint,
            ops.SET_CHECKPOINT_TTL: checkpoints.set_checkpoint_ttl,
            ops.DELETE_CHECKPOINT: checkpoints.delete_checkpoint,
            ops.GET_EXTERNAL_WEIGHTS_URLS: checkpoints.get_external_weights_urls,
            ops.GET_CHECKPOINT_ARCHIVE_URL: checkpoints.get_checkpoint_archive_url,
            ops.CREATE_SAMPLING_SESSION: samplers.create_sampling_session,
            ops.JOIN_SAMPLING_SESSION: samplers.join_sampling_session,
            ops.GET_SAMPLER: samplers.get_sampler,
            ops.SAMPLE: samplers.sample,
            ops.RETRIEVE_FUTURE: self.retrieve_future,
            ops.RETRIEVE_FUTURES: self.retrieve_futures,
            ops.CANCEL_FUTURE: self.cancel_future,
            ops.GET_AUDIT_LOG: billing.get_audit_log,
            ops.GET_BILLING_USAGE: billing.get_billing_usage,
            ops.GET_CURRENT_CHECKPOINT_STORAGE_USAGE: billing.get_current_checkpoint_storage_usage,
            ops.GET_CLIENT_CONFIG: capabilities.get_client_config,
            ops.GET_DYNAMIC_CONFIG: capabilities.get_dynamic_config,
            ops.GET_HEALTH: capabilities.get_health,
            ops.GET_SERVER_CAPABILITIES: capabilities.get_server_capabilities,
            ops.GET_TOKENIZER_FILE: capabilities.get_tokenizer_file,
            ops.SEND_TELEMETRY: capabilities.send_telemetry,
            ops.GET_AUTH_TOKEN: capabilities.no_keys,
            ops.GET_API_KEY: capabilities.no_keys,
            ops.DELETE_API_KEY: capabilities.no_keys,
        }

    async def start(self) -> None:
        """Take the home, and go on with what an earlier process left."""
        try:
            self.home.lock()
            await recover(self)
        except BaseException:
            self.home.unlock()
            raise
        self._rounds = asyncio.get_running_loop().create_task(self.upkeep.run())
        self.home.keep_spare()
        self.ready = True

    async def look(self) -> None:
        """Use a home that another process serves: to list and tidy up, not to compute."""
        self.ready = True

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
        method = self._methods.get(op)
        if method is None:
            raise Refusal(404, f"this service does not offer {op.name}")
        try:
            if self.peers is not None:
                await self.peers.check(op, request)
            if op in _GROWS and self.home.limited:
                await self._check_quota(request, caller)
            if not tracing.is_on():
                answer = await method(request, caller)
            else:
                with tracing.span(f"service {op.name}", within=True):
                    answer = await method(request, caller)
            if op not in _NOT_SYNCED:
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
        return future.fetch()

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
