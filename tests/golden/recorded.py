"""Requests and replies of official SDKs, read from the recordings beside this file."""

import base64
import json
import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from tests.golden import values
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.wire import codec, ops

GOLDEN = Path(values.__file__).parent
VERSIONS = ("0.36.0", "0.13.1", "0.4.1")


class Recorded:
    """One recorded request, and the op whose route it takes."""

    def __init__(self, row):
        self.method, self.headers = row["method"], row["headers"]
        self.path, _, query = row["path"].partition("?")
        self.query = dict(parse_qsl(query))
        self.body = base64.b64decode(row["body"])
        self.op, self.path_params = route(self.method, self.path)

    def decode(self):
        return codec.decode_request(
            self.op, path_params=self.path_params, query=self.query, headers=self.headers, body=self.body
        )


def route(method, path):
    """The first op that a router mounting them in order would choose."""
    for op in ops.OPS.values():
        pattern = re.sub(r"{(\w+):path}", r"(?P<\1>.+)", op.path)
        pattern = re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", pattern)
        if op.method == method and (match := re.fullmatch(pattern, path)):
            return op, {k: unquote(v) for k, v in match.groupdict().items()}
    raise AssertionError(f"no op for {method} {path}")


def recorded(version):
    lines = (GOLDEN / f"requests-{version}.jsonl").read_text().splitlines()
    return [Recorded(json.loads(line)) for line in lines]


def floats(array):
    return None if array is None else [None if x != x else x for x in array.tolist()]


def tensor_view(tensor):
    if tensor is None:
        return None
    array = tensor.to_numpy()
    return {"dtype": tensor.dtype, "shape": list(array.shape), "data": floats(array.reshape(-1))}


def output_view(value):
    return {
        "loss_fn_output_type": value.loss_fn_output_type,
        "loss_fn_outputs": [{k: tensor_view(v) for k, v in r.items()} for r in value.loss_fn_outputs],
        "metrics": value.metrics,
    }


def samples_view(value):
    alt = value.prompt_alt_tokens
    return {
        "sequences": [
            {
                "stop_reason": s.stop_reason,
                "tokens": s.tokens_np.tolist(),
                "logprobs": floats(s.logprobs_np),
                "topk_logprobs": s.topk_logprobs and [r and [list(p) for p in r] for r in s.topk_logprobs],
            }
            for s in value.sequences
        ],
        "prompt_logprobs": floats(value.prompt_logprobs_np),
        "topk_prompt_logprobs": value.topk_prompt_logprobs
        and [r and [list(p) for p in r] for r in value.topk_prompt_logprobs],
        "target_prompt_logprobs": tensor_view(value.target_prompt_logprobs),
        "prompt_cache_hit_tokens": value.prompt_cache_hit_tokens,
        "prompt_alt_tokens": alt and [tensor_view(alt.tokens), tensor_view(alt.logprobs)],
    }


def view(value):
    return output_view(value) if isinstance(value, ForwardBackwardOutput) else samples_view(value)


def stored_replies():
    lines = (GOLDEN / "replies.jsonl").read_text().splitlines()
    return [{**row, "body": base64.b64decode(row["body"])} for row in map(json.loads, lines)]
