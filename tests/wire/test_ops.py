"""The table of operations is whole and consistent."""

import dataclasses

import pytest

from tests.golden.recorded import route
from tinkex.types import UntypedAPIFuture
from tinkex.types.base import WireModel
from tinkex.wire import ops

ROWS = list(ops.OPS.values())

# The endpoints of the protocol's description, one a line: method, path.
ENDPOINTS = """
POST client/config
POST client/dynamic_config
POST auth/token
GET auth/apikey/me
DELETE auth/apikey/me
GET healthz
GET get_server_capabilities
GET models/org/name/tokenizer/tokenizer.json
POST telemetry
POST create_session
POST session_heartbeat
POST sessions/S/finish
GET sessions
GET sessions/S
PUT sessions/S/project
GET sessions/S/trace_export
POST sessions/search
POST create_model
POST unload_model
POST get_info
POST forward_backward
POST forward
POST optim_step
POST save_weights
POST save_weights_for_sampler
POST save_weights_external
POST load_weights
POST weights_info
POST copy_weights
PUT uploads/U/adapter_config.json
POST import_weights
POST create_sampling_session
POST join_sampling_session
POST asample
GET samplers/S:sample:0
POST cancel_future
POST retrieve_future
POST retrieve_futures
GET training_runs
GET training_runs/S:train:0
GET training_runs/S:train:0/metrics
POST training_runs/S:train:0/metrics
PUT training_runs/S:train:0
DELETE training_runs/S:train:0
DELETE sessions/S
GET training_runs/S:train:0/checkpoints
GET checkpoints
DELETE training_runs/S:train:0/checkpoints/weights/a
POST training_runs/S:train:0/checkpoints/weights/a/publish
DELETE training_runs/S:train:0/checkpoints/weights/a/publish
PUT training_runs/S:train:0/checkpoints/weights/a/ttl
GET training_runs/S:train:0/checkpoints/external_weights/a/external_weights_urls
GET training_runs/S:train:0/checkpoints/weights/a/archive
GET audit
GET billing/usage/events
GET billing/usage/checkpoints/current
POST create_custom_loss
""".strip().splitlines()


def test_every_endpoint_has_one_row():
    found = []
    for method, path in map(str.split, ENDPOINTS):
        op, _ = route(method, f"/api/v1/{path}")
        found.append(op.name)
    assert sorted(found) == sorted(ops.OPS)


def test_a_name_is_the_name_of_its_constant():
    constants = {name.lower(): op for name, op in vars(ops).items() if isinstance(op, ops.Op)}
    assert constants == ops.OPS | {"stream_sample": ops.STREAM_SAMPLE}
    assert all(op.name == name for name, op in constants.items())


@pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)
def test_the_placeholders_are_fields_of_the_request(op):
    fields = (
        op.request.model_fields
        if issubclass(op.request, WireModel)
        else [f.name for f in dataclasses.fields(op.request)]
    )
    assert set(op.placeholders) <= set(fields)


def test_promises_have_a_result_and_its_type_name():
    promises = [op for op in ROWS if op.reply is UntypedAPIFuture]
    assert len(promises) == 11
    for op in ROWS:
        assert op.has_future == (op in promises) == bool(op.request_type)
