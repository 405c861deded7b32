"""The processes of bench/server.py: our server, the echo it is compared with, and a sender of big bodies.

    server_child.py serve HOME ENGINE DURABILITY
                                           our server; prints its port once it is ready. ENGINE is "fake", or
                                           "instant": the fake one, but with one answer for every sample
    server_child.py echo N N               a bare Starlette application; prints its port
    server_child.py stream PORT RUN …      forward passes of 50 MB, one after another, for each of the runs

bench/server.py measures them.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
from raw_http import PROTO, Client, Connection, request

MODEL = "m/base"
PROMPT = list(range(2, 66))
PARAMS = {"max_tokens": 1, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
BODY_BYTES = 50_000_000
DATUM_TOKENS = 2048


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def serve(home: str, engine_name: str, durability: str) -> None:
    """As `tinkex serve` does it, but for shorter intervals between snapshots: journals are trimmed soon."""
    if engine_name == "instant":
        answer_at_once()
    from tinkex.engine.protocol import EngineConfig
    from tinkex.server.serve import ServerConfig
    from tinkex.server.serve import serve as serve_it
    from tinkex.service.config import ServiceConfig

    def heard(line: str) -> None:
        if found := re.search(r" serves http://[^:]+:(\d+)", line):
            say(port=int(found.group(1)))

    engine = EngineConfig("", kind="fake", max_context=2 * DATUM_TOKENS)
    service = ServiceConfig(
        Path(home), models={MODEL: "fake"}, engine=engine, preload=True, snapshot_steps=2, gap_patience=600.0,
        durability=durability,  # type: ignore[arg-type]
    )  # fmt: skip
    serve_it(ServerConfig(service, port=0), heard)


def answer_at_once() -> None:
    from tinkex.engine.fake.sampler import FakeSampler
    from tinkex.types.outputs import SampledSequence, SampleResponse

    one = SampledSequence("length", tokens_np=np.array([5], np.int32), logprobs_np=np.array([-1], np.float32))

    async def sample(self: Any, work: Any) -> SampleResponse:
        return SampleResponse([one])

    FakeSampler.sample = sample  # type: ignore[method-assign]


def echo(*sizes: str) -> None:
    """Reads each request's body and answers with bytes of the size that our server answers with.

    The same uvicorn, event loop and settings as our server's; Starlette's router, Request and Response.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    def answering(size: int) -> Any:
        content = b"x" * size

        async def answer(http: Request) -> Response:
            await http.body()
            return Response(content, media_type="application/json")

        return answer

    paths = ("/api/v1/asample", "/api/v1/retrieve_future")
    routes = [
        Route(path, answering(int(size)), methods=["POST"]) for path, size in zip(paths, sizes, strict=True)
    ]
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    say(port=listener.getsockname()[1])
    config = uvicorn.Config(
        Starlette(routes=routes), http="httptools", loop="uvloop", ws="none", lifespan="off",
        log_config=None, access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=75,
    )  # fmt: skip
    uvicorn.Server(config).run([listener])


def big_pass(run: str) -> bytes:
    """A forward pass but for its seq id. Its last datum is wrong: all is read and checked, none computed."""
    from tinkex.types.data import Datum, ForwardBackwardInput, ModelInput
    from tinkex.types.training import ForwardBackwardRequest
    from tinkex.wire import codec, ops

    ids = np.arange(DATUM_TOKENS) % 300
    inputs = {"target_tokens": ids, "weights": np.ones(DATUM_TOKENS, np.float32)}
    good = Datum(ModelInput.from_ints(ids), inputs)
    bad = Datum(ModelInput.from_ints(ids + 10**6), inputs)
    count = BODY_BYTES // (DATUM_TOKENS * (4 + 8 + 4))
    work = ForwardBackwardInput([good] * count + [bad], "cross_entropy")
    encoded = codec.encode_request(ops.FORWARD_BACKWARD, ForwardBackwardRequest(work, run, 0, True))
    assert encoded.body is not None
    return encoded.body


def numbered(body: bytes, seq_id: int) -> list[bytes]:
    """The request in pieces, so that nothing large is copied here: a field may stand anywhere in protobuf."""
    seq_field = b"\x10" + (bytes([seq_id]) if seq_id < 128 else bytes([seq_id & 127 | 128, seq_id >> 7]))
    head = request("POST", "/api/v1/forward_backward", b"", PROTO, length=len(seq_field) + len(body))
    return [head + seq_field, body]


async def stream(port: str, runs: list[str]) -> None:
    """Runs until it is killed. Prints the number of accepted bodies after each."""
    taken = 0

    async def one(run: str) -> None:
        nonlocal taken
        body = big_pass(run)
        client = Client(await Connection.open("127.0.0.1", int(port)))
        for seq_id in range(1, 128 * 128, 2):
            await client.send(*numbered(body, seq_id))
            taken += 1
            say(taken=taken)
            step = {"model_id": run, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.1}}
            await client.result(await client.post("optim_step", **step))  # a snapshot can be taken after it

    await asyncio.gather(*map(one, runs))


def main() -> None:
    match sys.argv[1:]:
        case ["serve", home, engine_name, durability]:
            serve(home, engine_name, durability)
        case ["echo", *sizes]:
            echo(*sizes)
        case ["stream", port, *runs]:
            import uvloop  # asyncio's own sockets copy what is left of a big write again and again

            uvloop.run(stream(port, runs))


if __name__ == "__main__":
    main()
