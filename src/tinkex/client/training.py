"""TrainingClient: one run.

Promises: the official names, parameters and defaults; the server executes requests in the order of the
calls; a call validates its input, puts the request into the run's queue (queue.py) and returns a future.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from tinkex.client import custom_loss, passes
from tinkex.client.base_client import ModelClient, check_ttl, warn_caller
from tinkex.client.custom_loss import CustomLoss
from tinkex.client.future import APIFuture
from tinkex.client.polling import QueueStats
from tinkex.client.queue import LossConfig, RunQueue, after
from tinkex.client.retry import RetryConfig, check_sampler_settings
from tinkex.client.sampling import SamplingClient, open_sampler
from tinkex.client.session import Session
from tinkex.client.transport import CallContext
from tinkex.client.twins import awaited, blocking, queued
from tinkex.errors import InvalidInputError, TinkerError
from tinkex.types.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinkex.types.data import Datum
from tinkex.types.optimizers import OptimParams
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LossFnType
from tinkex.types.training import (
    GetInfoRequest,
    GetInfoResponse,
    LogRunMetricsRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from tinkex.wire import ops
from tinkex.wire.ops import Op


class TrainingClient(ModelClient):
    """One run: a LoRA adapter in training. `ServiceClient.create_lora_training_client` creates one.

    >>> run = service.create_lora_training_client("Qwen/Qwen3-8B")      # doctest: +SKIP
    >>> loss = run.forward_backward(data, "cross_entropy")
    >>> run.optim_step(AdamParams(learning_rate=1e-4))
    >>> loss.result().metrics["loss:sum"]
    """

    def __init__(self, session: Session, model_id: str) -> None:
        super().__init__(session)
        self.model_id = model_id
        self.queue = RunQueue(session, model_id)

    # -- passes ------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute logprobs and the loss, without gradients.

        >>> output = run.forward(data, "cross_entropy").result()        # doctest: +SKIP
        >>> output.loss_fn_outputs[0]["logprobs"].tolist()
        """
        self._check_pass(data, loss_fn, loss_fn_config)
        return self.queue.submit_pass("forward", list(data), loss_fn, loss_fn_config, forward_only=True)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradients of a loss, summed over all tokens and datums, to the run's gradients.

        data: the datums, each a ModelInput and the inputs of the loss, such as target_tokens and weights.
        loss_fn: the name of a loss: "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", …
        loss_fn_config: the parameters of the loss, such as {"clip_low_threshold": 0.8} of "ppo".

        >>> future = run.forward_backward(data, "cross_entropy")        # doctest: +SKIP
        >>> run.optim_step()                                            # queued behind it, without waiting
        >>> future.result().metrics["loss:sum"]
        """
        self._check_pass(data, loss_fn, loss_fn_config)
        # The list is copied: the caller may change theirs while the request waits.
        return self.queue.submit_pass(
            "forward_backward", list(data), loss_fn, loss_fn_config, forward_only=False
        )

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss, *, loss_type_input: str | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Like forward_backward, with a loss of your own.

        `loss_fn` is a torch function `fn(data, logprobs) -> (loss, metrics)`, which runs on the client; a
        LossHandle from `ServiceClient.create_custom_loss`; or an object that computes its own gradients
        (tinkex.regularizers). `loss_type_input` is in the official signature and has no effect.

        >>> def loss(data, logprobs):                                   # doctest: +SKIP
        ...     return sum((x ** 2).sum() for x in logprobs), {}
        >>> run.forward_backward_custom(data, loss).result().metrics["loss:sum"]
        """
        return custom_loss.submit(self.queue, data, loss_fn)

    def _check_pass(self, data: Sequence[Datum], loss_fn: str, config: LossConfig | None) -> None:
        passes.check_pass(data, loss_fn, config)
        if loss_fn == "custom" and "loss_id" not in (config or {}):
            raise InvalidInputError(
                "the loss_fn 'custom' needs loss_fn_config={'loss_id': …}; for a loss of your own call "
                "forward_backward_custom"
            )

    # -- steps -------------------------------------------------------------------------------------------

    def optim_step(
        self,
        optim_params: OptimParams | Mapping[str, Any] | None = None,
        *,
        adam_params: AdamParams | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """Update the weights with the gradients accumulated since the last step.

        >>> run.optim_step(AdamParams(learning_rate=1e-4)).result()     # doctest: +SKIP
        """
        if optim_params is not None and adam_params is not None:
            raise InvalidInputError("give optim_params or adam_params, not both")
        params = optim_params if optim_params is not None else adam_params
        params = AdamParams() if params is None else params
        request = OptimStepRequest(optim_params=params, model_id=self.model_id)  # type: ignore[arg-type]
        return self.queue.submit_step(request)

    # -- checkpoints -------------------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state, to resume training from.

        >>> path = run.save_state("step-100").result().path             # doctest: +SKIP
        """
        if not isinstance(overwrite, bool):
            raise InvalidInputError(f"overwrite must be True or False, got {overwrite!r:.80}")
        return self._save(
            "save_state", ops.SAVE_WEIGHTS, SaveWeightsResponse, name, ttl_seconds,
            overwrite=overwrite, user_metadata=user_metadata,
        )  # fmt: skip

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Replace the weights by saved ones and reset the optimizer (deprecated).

        Use `ServiceClient.create_training_client_from_state`.

        >>> run.load_state("tinker://…/weights/step-100").result()      # doctest: +SKIP
        """
        _deprecated("load_state", "ServiceClient.create_training_client_from_state")
        return self._load(path, optimizer=False, token=weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Replace weights and optimizer state by saved ones (deprecated).

        Use `ServiceClient.create_training_client_from_state_with_optimizer`.

        >>> run.load_state_with_optimizer("tinker://…/weights/step-100").result()  # doctest: +SKIP
        """
        _deprecated(
            "load_state_with_optimizer", "ServiceClient.create_training_client_from_state_with_optimizer"
        )
        return self._load(path, optimizer=True, token=weights_access_token)

    def _load(self, path: str, *, optimizer: bool, token: str | None) -> APIFuture[LoadWeightsResponse]:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        request = LoadWeightsRequest(
            model_id=self.model_id, path=path, optimizer=optimizer, weights_access_token=token
        )
        return self.queue.submit("load_state", ops.LOAD_WEIGHTS, request)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Publish the adapter under a name, for sampling.

        >>> path = run.save_weights_for_sampler("v1").result().path     # doctest: +SKIP
        >>> sampler = run.create_sampling_client(path)
        """
        return self._save(
            "save_weights_for_sampler", ops.SAVE_WEIGHTS_FOR_SAMPLER, SaveWeightsForSamplerResponse, name,
            ttl_seconds, user_metadata=user_metadata,
        )  # fmt: skip

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Export the adapter as files to download, encrypted if recipients are given.

        >>> path = run.save_weights_external("export").result().path    # doctest: +SKIP
        >>> rest.get_external_weights_urls(path).result().urls
        """
        return self._save(
            "save_weights_external", ops.SAVE_WEIGHTS_EXTERNAL, SaveWeightsExternalResponse, name,
            ttl_seconds, age_encryption_recipients=age_encryption_recipients,
        )  # fmt: skip

    def _save(
        self, what: str, op: Op[Any, Any], kind: type[Any], name: str, ttl_seconds: int | None, **fields: Any
    ) -> APIFuture[Any]:
        if not isinstance(name, str) or not name or "/" in name:
            raise InvalidInputError(f"a checkpoint's name must be a string without '/', got {name!r}")
        request = op.request(model_id=self.model_id, path=name, ttl_seconds=check_ttl(ttl_seconds), **fields)

        def convert(reply: Any) -> Any:
            if not reply.path:
                raise TinkerError("the server saved the weights, but gave no path for them")
            return reply if isinstance(reply, kind) else kind(path=reply.path)

        return self.queue.submit(what, op, request, convert)

    # -- sampling ----------------------------------------------------------------------------------------

    @blocking
    def create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> APIFuture[SamplingClient]:
        """Create a sampler of a published adapter.

        >>> path = run.save_weights_for_sampler("v2").result().path     # doctest: +SKIP
        >>> sampler = run.create_sampling_client(path)
        """
        return open_sampler(
            self.session, model_path=model_path, retry_config=retry_config,
            record_stability_info=record_stability_info,
        )  # fmt: skip

    @blocking
    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Publish the adapter as it is after every call made so far, and create a sampler of it.

        `name` is in the official signature and has no effect.

        >>> sampler = run.save_weights_and_get_sampling_client()        # doctest: +SKIP
        >>> sampler.sample(prompt, 1, SamplingParams(max_tokens=16)).result()
        """
        check_sampler_settings(retry_config, record_stability_info)

        def open_published(reply: Any) -> SamplingClient:
            if not reply.sampling_session_id:
                raise TinkerError("the server published the adapter, but named no sampling session for it")
            return SamplingClient(
                self.session, reply.sampling_session_id,
                retry_config=retry_config, record_stability_info=record_stability_info,
            )  # fmt: skip

        async def send() -> Awaitable[SamplingClient]:
            # The sampler's number is assigned here, so that a cancelled call leaves no gap.
            seq_id = next(self.session.sampling_seq)
            request = SaveWeightsForSamplerRequest(model_id=self.model_id, sampling_session_seq_id=seq_id)
            return after(await self.queue.send(ops.SAVE_WEIGHTS_FOR_SAMPLER, request), open_published)

        return self.queue.enqueue("save_weights_and_get_sampling_client", send)

    # -- metrics of one's own ----------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> APIFuture[None]:
        """Add your own numbers to the run's metrics; its console page plots them. Tinkex servers only.

        `step` is the step that they belong to; None: the last one taken. Values that are not finite are left
        out.

        >>> run.log({"reward": 0.5, "accuracy": 0.25}, step=10)         # doctest: +SKIP
        """
        if not isinstance(metrics, Mapping):
            raise InvalidInputError(f"metrics must be a dict of numbers, got {type(metrics).__name__}")
        numbers = {str(name): _number(name, value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        request = LogRunMetricsRequest(training_run_id=self.model_id, metrics=finite, step=step)
        return self._connection.submit(ops.LOG_RUN_METRICS, request, CallContext("log"))

    # -- about the run -----------------------------------------------------------------------------------

    @blocking
    def get_info(self) -> APIFuture[GetInfoResponse]:
        """Return the run's base model, rank and tokenizer id.

        >>> run.get_info().model_data.model_name                        # doctest: +SKIP
        """
        return self._connection.submit(ops.GET_INFO, GetInfoRequest(model_id=self.model_id))

    async def _model(self) -> tuple[str, str | None]:
        info = await self.get_info_async()
        name, tokenizer_id = info.model_data.model_name or info.model_name, info.model_data.tokenizer_id
        if not name and not tokenizer_id:
            raise TinkerError(
                "the server does not say which model this run is based on: no tokenizer can be chosen"
            )
        return name or "", tokenizer_id

    def get_console_url(self) -> str:
        """Return the URL of this run's console page; embedded, of the directory that holds all runs."""
        return self._connection.console_url(f"training_runs/{self.model_id}")

    # -- the same, to await ------------------------------------------------------------------------------

    forward_async = queued(forward)
    forward_backward_async = queued(forward_backward)
    forward_backward_custom_async = queued(forward_backward_custom)
    optim_step_async = queued(optim_step)
    save_state_async = queued(save_state)
    load_state_async = queued(load_state)
    load_state_with_optimizer_async = queued(load_state_with_optimizer)
    save_weights_for_sampler_async = queued(save_weights_for_sampler)
    save_weights_external_async = queued(save_weights_external)
    create_sampling_client_async = awaited(create_sampling_client)
    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client)
    get_info_async = awaited(get_info)

    @property
    def queue_stats(self) -> QueueStats:
        """How often the server paused this run, why, and for how long."""
        return self.queue.queue_stats()

    def __repr__(self) -> str:
        return f"TrainingClient({self.model_id!r})"

    def __reduce__(self):
        raise TypeError("a TrainingClient cannot be pickled: its requests have one order, in one process")


def _number(name: object, value: object) -> float:
    """A metric as a number; numpy's and torch's scalars are."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    raise InvalidInputError(f"the metric {name!r} must be a number, got {value!r:.80}")


def _deprecated(name: str, instead: str) -> None:
    warn_caller(f"{name} is deprecated; use {instead}", DeprecationWarning)
