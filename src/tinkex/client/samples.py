"""A sample, seen from the client: checked before it is sent, and its response when it comes.

Promises: what is wrong with a request is said at the call, with what was given and what is allowed; a
response that lacks what was asked for is an error. Pure functions; knows nothing of how a sample travels.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.errors import InvalidInputError, TinkerError
from tinkex.types.data import EncodedTextChunk, ModelInput
from tinkex.types.outputs import SampleResponse
from tinkex.types.sampling import SampleRequest


def check_request(request: SampleRequest) -> None:
    """Refuse what cannot be sampled from; what its fields look like they checked themselves."""
    if _is_empty(request.prompt):
        raise InvalidInputError("prompt is empty: sampling needs at least one token to go on from")
    if (targets := request.target_prompt_logprobs) is not None:
        positions, shape = request.prompt.length - 1, targets.dense_shape
        if targets.dtype != "int64" or len(shape) != 2 or shape[0] != positions:
            raise InvalidInputError(
                f"target_prompt_logprobs must be int64 of shape [{positions}, K] (a row for each prompt "
                f"token but the first), got {targets.dtype} {list(shape)}"
            )


def _is_empty(prompt: ModelInput) -> bool:
    return all(isinstance(chunk, EncodedTextChunk) and not chunk.length for chunk in prompt.chunks)


def checked(
    response: SampleResponse, request: SampleRequest, sequence_ids: Sequence[str] | None = None
) -> SampleResponse:
    """The response, with its sequences' ids; what was asked for must be there."""
    if len(response.sequences) != request.num_samples:
        raise TinkerError(
            f"the server returned {len(response.sequences)} sequences for num_samples={request.num_samples}"
        )
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise TinkerError("this server does not support prompt_alt_tokens_k")
    if not sequence_ids or len(sequence_ids) != len(response.sequences):
        return response  # servers before 0.26 have none
    for sequence, sequence_id in zip(response.sequences, sequence_ids, strict=True):
        object.__setattr__(sequence, "sequence_id", sequence_id)  # nobody else has seen it yet
    return response


def prompt_logprobs(response: SampleResponse) -> list[float | None]:
    if response.prompt_logprobs is None:
        raise TinkerError("the server did not return the prompt's logprobs")
    return response.prompt_logprobs
