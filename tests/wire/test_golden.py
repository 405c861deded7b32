"""What official SDKs said and understood, against our codec. Recorded by tests/golden/record.py."""

import json
from urllib.parse import parse_qsl

import pytest

from tests.golden import flows, values
from tests.golden.recorded import GOLDEN, VERSIONS, recorded, stored_replies, view
from tinkex import types as t
from tinkex.types.outputs import SampleResponse
from tinkex.wire import codec, ops, proto_codec
from tinkex.wire import tinkex_pb2 as pb


def views(version):
    return json.loads((GOLDEN / f"views-{version}.json").read_text())


def without_nulls(value):
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def contains(whole, part):
    """Every non-null leaf of `part` stands in `whole`, too."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_request_is_understood(version):
    requests = [r.decode() for r in recorded(version)]
    assert len(requests) > 35
    assert all(isinstance(value, r.op.request) for value, r in zip(requests, recorded(version), strict=True))


def test_the_recording_covers_the_protocol():
    seen = {r.op.name for r in recorded("0.36.0")}
    only_older = {"forward", "unload_model", "get_checkpoint_archive_url"}
    not_called_by_an_sdk = {
        "get_health", "get_api_key", "delete_api_key", "get_tokenizer_file", "get_run_metrics",
        "delete_session", "upload_weights", "import_weights",
        "log_run_metrics", "update_run", "delete_run",
    }  # fmt: skip
    assert set(ops.OPS) - seen == only_older | not_called_by_an_sdk
    assert {"forward", "get_checkpoint_archive_url"} <= {r.op.name for r in recorded("0.4.1")}


def test_we_say_what_the_newest_sdk_says():
    """Decoded and encoded again, each request is the one that was recorded."""
    for r in recorded("0.36.0"):
        again = codec.encode_request(r.op, r.decode(), compress="content-encoding" in r.headers)
        assert again.path == r.path
        assert dict(parse_qsl(again.query)) == r.query
        if r.headers.get("content-type") == codec.PROTO:
            theirs, ours = (
                codec.unpack(b, again.headers.get("content-encoding", ""), 1 << 20)
                for b in (r.body, again.body)
            )
            assert pb.ForwardBackwardRequest.FromString(ours) == pb.ForwardBackwardRequest.FromString(theirs)
            assert len(ours) == len(theirs)
        elif r.body:
            assert json.loads(again.body) == json.loads(r.body), r.path
        else:
            assert not again.body


@pytest.mark.parametrize("version", ["0.13.1", "0.4.1"])
def test_json_only_requests_lose_nothing(version):
    """Encoded again, a request of an old SDK says all it said, and the defaults besides."""
    for r in recorded(version):
        again = codec.encode_request(r.op, r.decode(), proto=False)
        assert again.path == r.path
        if r.body:
            assert contains(json.loads(again.body), without_nulls(json.loads(r.body))), r.path


def test_old_requests_get_the_defaults_of_their_time():
    requests = {r.op.name: r.decode() for r in recorded("0.4.1")}
    assert requests["optim_step"].optim_params == t.AdamParams(learning_rate=1e-3)
    assert requests["load_weights"].optimizer is True  # 0.4.1 has no word for it, and restored both
    assert requests["sample"].sampling_params.temperature == 1.0
    assert requests["create_model"].lora_config.train_mlp is True
    assert requests["forward"].forward_only
    assert not requests["forward_backward"].forward_only
    assert {r.op.name: r.decode() for r in recorded("0.13.1")}["load_weights"].optimizer is False


def test_a_pass_built_by_hand_is_byte_for_byte_the_recorded_one():
    """One tensor a datum, because protobuf leaves the order of a map's entries open."""
    prompt = t.ModelInput(
        [t.EncodedTextChunk([1]), t.ImageChunk(flows.PNG, "png", 4), t.DmelChunk(flows.DMEL)]
    )
    work = t.ForwardBackwardInput([t.Datum(prompt, {"target_tokens": [1]})], "cross_entropy")
    theirs = [r for r in recorded("0.36.0") if r.op is ops.FORWARD_BACKWARD]
    (theirs,) = [r for r in theirs if r.decode().forward_backward_input == work]
    request = t.ForwardBackwardRequest(work, "S:train:0", theirs.decode().seq_id)
    assert codec.encode_request(ops.FORWARD_BACKWARD, request).body == theirs.body


def test_a_sparse_pass_was_read_as_what_it_was():
    sparse = [r.decode() for r in recorded("0.36.0") if r.op is ops.FORWARD_BACKWARD]
    tensors = [d.loss_fn_inputs for r in sparse for d in r.forward_backward_input.data]
    (weights,) = [x["weights"] for x in tensors if "weights" in x and x["weights"].is_sparse]
    assert weights.shape == [6, 8]
    assert weights.to_numpy()[2, 3] == 1.5
    assert weights.to_numpy().sum() == 1.5


def test_provenance_and_texts_in_the_config_survive():
    passes = {
        r.decode().forward_backward_input.loss_fn: r.decode()
        for r in recorded("0.36.0")
        if r.op is ops.FORWARD_BACKWARD
    }
    work = passes["stable_reinforce"].forward_backward_input
    assert work.loss_fn_config == {"kl_coeff": 0.5, "mode": "text"}
    assert work.data[0].model_input_spans == [
        t.PromptProvenanceSpan(sequence_id="q", length=1),
        t.SampledProvenanceSpan(sequence_id="q", offset=0, length=2),
    ]
    assert passes["custom"].forward_backward_input.loss_fn_config == {"loss_id": "L1"}


# -- our replies, as they read them ----------------------------------------------------------------------


RESULTS = {**values.OUTPUTS, **values.SAMPLES}


@pytest.mark.parametrize("name", RESULTS)
def test_the_newest_sdk_read_our_protobuf_as_we_meant_it(name):
    assert views("0.36.0")[name] == view(RESULTS[name])


@pytest.mark.parametrize("version", ["0.13.1", "0.4.1"])
@pytest.mark.parametrize("name", RESULTS)
def test_old_sdks_read_our_json_as_we_meant_it(version, name):
    theirs, ours = views(version)[name], view(RESULTS[name])
    for sequence in theirs.get("sequences", []):
        sequence.pop("topk_logprobs")  # nothing that they know
    for sequence in ours.get("sequences", []):
        sequence.pop("topk_logprobs")
    assert theirs == {key: ours[key] for key in theirs}


def test_what_was_shown_to_them_is_what_we_write_now():
    """The views above speak of the stored bytes; this ties the stored bytes to today's code."""
    for row in stored_replies():
        if row["name"] in RESULTS:
            kind, body = codec.encode_result(RESULTS[row["name"]], row["content_type"])
            assert (kind, body) == (row["content_type"], row["body"])
    models = [row["body"] for row in stored_replies() if row["type"] == "model"]
    assert models == [codec.encode_reply(value)[1] for value in values.REPLIES]


@pytest.mark.parametrize("version", VERSIONS)
def test_official_models_read_ours(version):
    theirs = views(version)
    compared = 0
    for value in values.REPLIES:
        shown = theirs.get(type(value).__name__)
        if shown is None:
            continue
        ours = json.loads(codec.encode_reply(value)[1])
        view = without_nulls(shown.pop(0))
        assert contains(ours, {k: v for k, v in view.items() if k in ours}), type(value)
        if version == "0.36.0":
            assert contains(view, ours), type(value)
        compared += 1
    assert compared == (len(values.REPLIES) if version == "0.36.0" else compared)
    assert compared >= 15


def test_our_client_reads_our_own_results_back():
    for row in stored_replies():
        if row["name"] in RESULTS:
            op = ops.SAMPLE if row["type"] == "SampleResponse" else ops.FORWARD_BACKWARD
            read = codec.decode_result(op, 200, {"content-type": row["content_type"]}, row["body"])
            assert view(read) == view(RESULTS[row["name"]])


def test_the_two_writers_of_a_pass_agree():
    """The hand-written one against the generated classes, on what an official SDK sent."""
    for r in recorded("0.36.0"):
        if r.op is ops.FORWARD_BACKWARD and "content-encoding" not in r.headers:
            message = pb.ForwardBackwardRequest.FromString(b"".join(proto_codec.write_pass(r.decode())))
            assert message == pb.ForwardBackwardRequest.FromString(r.body)


def test_empty_bodies_are_results():
    empty = codec.decode_result(ops.SAMPLE, 200, {"content-type": codec.PROTO}, b"")
    assert isinstance(empty, SampleResponse)
    assert list(empty.sequences) == []
