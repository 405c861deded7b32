"""The tree of exceptions: the official one's shape, and all of them travel between processes."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from tests.stub import Stub
from tinkex import errors

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.TinkerError) and kind.__module__ == errors.__name__
]
RESPONSE = errors.FailedResponse(
    418, {"x": "y"}, "short and stout", errors.FailedRequest("GET", "http://h/teapot")
)


def made(kind: type[errors.TinkerError]) -> errors.TinkerError:
    """One of this kind, from whatever its constructor needs."""
    given: dict[str, Any] = {
        "message": "what happened", "response": RESPONSE, "request_id": "r1", "run_id": "s:train:0",
        "reason": "gone", "category": errors.RequestErrorCategory.User,
    }  # fmt: skip
    if not inspect.isfunction(kind.__init__):  # Exception's own
        return kind("what happened")
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters if name in given})


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_one_of_them_travels(kind: type[errors.TinkerError]) -> None:
    error = made(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error)


def test_the_shape_is_the_official_one() -> None:
    statuses = {
        400: "BadRequestError", 401: "AuthenticationError", 402: "BillingError", 403: "PermissionDeniedError",
        404: "NotFoundError", 409: "ConflictError", 422: "UnprocessableEntityError", 429: "RateLimitError",
        500: "InternalServerError", 503: "InternalServerError",
    }  # fmt: skip
    for status, name in statuses.items():
        error = errors.status_error("what happened", errors.FailedResponse(status))
        assert (type(error).__name__, error.status_code) == (name, status)
        assert [base.__name__ for base in type(error).__mro__[1:4]] == [
            "APIStatusError",
            "APIError",
            "TinkerError",
        ]
    assert errors.APITimeoutError.__mro__[1:4] == (
        errors.APIConnectionError, errors.APIError, errors.TinkerError,
    )  # fmt: skip
    assert errors.APIResponseValidationError.__base__ is errors.APIError
    assert errors.RequestFailedError.__base__ is errors.TinkerError


LOGGING = """
import logging, sys
from tinkex import ServiceClient
if "configured" in sys.argv:
    logging.basicConfig(stream=sys.stdout, format="mine %(message)s")
ServiceClient(base_url=sys.argv[1])
logging.getLogger("tinkex").info("a detail")
logging.getLogger("tinkex").debug("a trifle")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "said"), [("", 0), ("info", 1), ("debug", 2)])
def test_the_environment_says_how_much_is_logged(level: str, said: int) -> None:
    """TINKER_LOG, but not over the head of a program that has set its own logging up."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    with Stub() as stub:
        for how, lines in ((), said), (("configured",), 0):
            done = subprocess.run(
                [sys.executable, "-c", LOGGING, stub.url, *how], env={**clean, "TINKER_LOG": level},
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert len(done.stderr.splitlines()) == lines
