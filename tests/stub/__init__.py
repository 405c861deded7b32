"""A stub Tinker server: every endpoint of the wire protocol, canned results, and a script for misbehaviour.

For tests: `with Stub() as stub:` serves on a free loopback port from a thread of its own; see `Stub` for what
can be scripted, held and looked at. For benchmarks: `python -m tests.stub` is a process of its own.
It keeps the protocol's promises (order by seq id, idempotent submits, long polls, batch retrieval) and knows
no models: logprobs are -0.5, sampled tokens are 1..n.
"""

from tests.stub.canned import Pass, read_pass
from tests.stub.http import Reply, Request
from tests.stub.script import Action, delay, drop, fail, garbage, hang, status
from tests.stub.server import Stub

__all__ = [
    "Action",
    "Pass",
    "Reply",
    "Request",
    "Stub",
    "delay",
    "drop",
    "fail",
    "garbage",
    "hang",
    "read_pass",
    "status",
]
