"""Checks a pass before it is sent, splits it into chunks, and joins the outputs of the chunks.

Promises: an error names the datum, the key, what was given and what is allowed; no metric can make a finished
pass fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tinkex.errors import InvalidInputError
from tinkex.strict import did_you_mean
from tinkex.types.chunks import EncodedTextChunk, ImageAssetPointerChunk
from tinkex.types.data import Datum
from tinkex.types.losses import check_inputs
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LOSS_NAMES


def check_pass(data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str] | None) -> None:
    """Raise InvalidInputError if this pass cannot succeed."""
    if isinstance(data, Datum) or not isinstance(data, Sequence):
        hint = "; put it into a list: [datum]" if isinstance(data, Datum) else ""
        raise InvalidInputError(f"data must be a list of Datum, got {type(data).__name__}{hint}")
    if not data:
        raise InvalidInputError("data is empty: a pass needs at least one Datum")
    if callable(loss_fn):
        raise InvalidInputError("loss_fn is a function: call forward_backward_custom, or name a loss here")
    if loss_fn not in LOSS_NAMES:
        hint = did_you_mean(str(loss_fn), LOSS_NAMES)
        raise InvalidInputError(f"no loss_fn is called {loss_fn!r}{hint} There are: {', '.join(LOSS_NAMES)}")
    if config is not None and not isinstance(config, Mapping):
        raise InvalidInputError(f"loss_fn_config must be a dict, got {type(config).__name__}")
    for key, value in (config or {}).items():
        if not isinstance(key, str):
            raise InvalidInputError(f"loss_fn_config has the key {key!r}; keys are strings")
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            raise InvalidInputError(f"loss_fn_config[{key!r}] must be a number or a string, got {value!r}")
        if not isinstance(value, str) and not abs(value) < math.inf:
            raise InvalidInputError(f"loss_fn_config[{key!r}] must be finite, got {value!r}")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise InvalidInputError(f"data[{index}] must be a Datum, got {type(datum).__name__}")
        try:
            length = _length(datum)
            check_inputs(loss_fn, datum.loss_fn_inputs, length, strict=False)
            if length == 0:
                raise InvalidInputError("model_input is empty: a model needs at least one token to read")
        except InvalidInputError as error:
            raise InvalidInputError(f"data[{index}].{error}") from None


def _length(datum: Datum) -> int | None:
    """The positions of the model input; None if an image does not state its own. Refuses asset pointers."""
    total = 0
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            total += chunk.tokens_np.size
        elif isinstance(chunk, ImageAssetPointerChunk):
            raise InvalidInputError(
                "model_input: an ImageAssetPointerChunk can be sampled from, not trained on; "
                "send an ImageChunk"
            )
        elif getattr(chunk, "expected_tokens", 0) is None:
            return None
        else:
            total += chunk.length
    return total


def split(data: Sequence[Datum], max_datums: int, max_bytes: int) -> list[list[Datum]]:
    """Split `data` into chunks within the server's limits; a datum over the limit gets its own chunk."""
    chunks: list[list[Datum]] = []
    room = 0
    for datum in data:
        if not chunks or len(chunks[-1]) >= max_datums or datum.nbytes > room:
            chunks.append([])
            room = max_bytes
        chunks[-1].append(datum)
        room -= datum.nbytes
    return chunks


def join(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[record for output in outputs for record in output.loss_fn_outputs],
        metrics=reduce_metrics([(o.metrics, len(o.loss_fn_outputs)) for o in outputs]),
    )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total


def _whole(values: Iterable[float]) -> list[int]:
    return [int(v) for v in values if math.isfinite(v)]


_REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "mean": _mean,
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": lambda values, _: float(sum(_whole(values)) % 2**64),
    "hash_unordered": lambda values, _: float(hash(tuple(sorted(_whole(values))))),
}


def reduce_metrics(chunks: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Reduce the metrics of several chunks, each given with its number of outputs.

    The suffix after a key's last colon selects the reduction: sum, min, max, mean (weighted by outputs),
    slack (max minus mean), hash2, hash_unordered. Any other key keeps each value, as key, key_1, key_2, …
    """
    reduced: dict[str, float] = {}
    for key in dict.fromkeys(key for metrics, _ in chunks for key in metrics):
        values = [metrics[key] for metrics, _ in chunks if key in metrics]
        weights = [float(count) for metrics, count in chunks if key in metrics]
        reduction = _REDUCTIONS.get(key.rpartition(":")[2])
        if reduction is not None:
            reduced[key] = reduction(values, weights)
        else:
            reduced.update({f"{key}_{n}" if n else key: value for n, value in enumerate(values)})
    return reduced
