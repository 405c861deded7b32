"""`python -m tests.stub`: print the URL, then serve until killed; --help lists the options."""

import argparse
import threading

from tests.stub import Stub

parser = argparse.ArgumentParser(prog="python -m tests.stub", description="A stub Tinker server on loopback.")
parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
parser.add_argument("--latency", type=float, default=0.0, help="seconds from a request's turn to its result")
parser.add_argument("--batch-retrieval", action="store_true", help="offer retrieve_futures")
options = parser.parse_args()
with Stub(port=options.port, record=False, sample_use_retrieve_futures=options.batch_retrieval) as stub:
    stub.latency = options.latency
    print(stub.url, flush=True)
    threading.Event().wait()
