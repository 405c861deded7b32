"""Content negotiation, compression, refusals and errors: what the codec decides by itself."""

import json
from datetime import UTC, datetime

import numpy as np
import pytest
from backports import zstd

from tinkex import types as t
from tinkex.errors import InvalidInputError
from tinkex.wire import codec, ops, proto_codec
from tinkex.wire import tinkex_pb2 as pb

TEXT = t.ModelInput.from_ints([1, 2, 3])
PASS = t.ForwardBackwardRequest(
    t.ForwardBackwardInput([t.Datum(TEXT, {"target_tokens": [2, 3, 4]})], "ppo", {"beta": 2, "mode": "x"}),
    "m",
    7,
)
OUTPUT = t.ForwardBackwardOutput("T", [], {"loss:sum": 1.0})


def decode(op, body, **headers):
    headers = {k.replace("_", "-"): v for k, v in headers.items()}
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return codec.decode_request(op, headers=headers, body=body)


# -- what is sent ----------------------------------------------------------------------------------------


def test_a_pass_is_protobuf_and_for_json_servers_json():
    assert codec.encode_request(ops.FORWARD_BACKWARD, PASS).headers["content-type"] == codec.PROTO
    sent = codec.encode_request(ops.FORWARD_BACKWARD, PASS, proto=False)
    assert sent.headers["content-type"] == codec.JSON
    assert sent.path == "/api/v1/forward_backward"
    assert json.loads(sent.body)["forward_backward_input"]["data"][0]["loss_fn_inputs"] == {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
    }


def test_a_pass_without_gradients_has_its_own_path_on_json_servers():
    request = t.ForwardBackwardRequest(PASS.forward_backward_input, "m", 7, forward_only=True)
    assert codec.encode_request(ops.FORWARD_BACKWARD, request).path == "/api/v1/forward_backward"
    sent = codec.encode_request(ops.FORWARD_BACKWARD, request, proto=False)
    assert sent.path == "/api/v1/forward"
    assert "forward_input" in json.loads(sent.body)
    assert codec.decode_request(ops.FORWARD, body=sent.body).forward_only


@pytest.mark.parametrize("length", [0, 1, 100, 1_000, 20_000])
def test_a_datum_of_any_size_is_what_the_generated_classes_read(length):
    """Whether its arrays are copied or sent from where they are; and from the second on by frames kept."""
    tokens, ones = np.arange(length), np.ones((length, 2), np.float32)
    model_input = t.ModelInput([t.EncodedTextChunk(tokens), t.EncodedTextChunk([7])])
    inputs = {
        "target_tokens": tokens,
        "weights": ones,
        "scale": np.array(2.0, np.float32),
        "flat": t.TensorData([1]),
    }
    datum = t.Datum(model_input, inputs)
    request = t.ForwardBackwardRequest(t.ForwardBackwardInput([datum] * 2, "cross_entropy"), "m", 1)
    message = pb.ForwardBackwardRequest.FromString(codec.encode_request(ops.FORWARD_BACKWARD, request).body)
    assert len(message.data) == 2
    for read in message.data:
        text = [np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist() for chunk in read.model_input]
        assert text == [tokens.tolist(), [7]]
        assert {key: list(tensor.shape) for key, tensor in read.loss_fn_inputs.items()} == {
            "target_tokens": [length], "weights": [length, 2], "scale": [], "flat": [],
        }  # fmt: skip
        assert read.loss_fn_inputs["target_tokens"].dense == tokens.tobytes()
        assert read.loss_fn_inputs["weights"].dense == ones.tobytes()
        assert read.loss_fn_inputs["flat"].dense == np.int64(1).tobytes()


def _message(**given):
    text = [pb.Chunk(encoded_text={"tokens": given.pop("tokens", b"\1\0\0\0")})]
    return pb.Datum(model_input=text * given.pop("chunks", 1), loss_fn_inputs=given)


def test_a_plain_datum_is_read_as_any_other():
    """Most datums go another way, which must neither differ nor let pass what is refused."""
    ints, floats = np.arange(6).tobytes(), np.linspace(-1, 1, 6, dtype=np.float32).tobytes()
    dense = [
        pb.Tensor(dtype=pb.DTYPE_INT64, dense=ints),
        pb.Tensor(dtype=pb.DTYPE_INT64, dense=ints, shape=[6]),
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=floats, shape=[2, 3]),
    ]
    for tensor in dense:
        message = _message(target_tokens=tensor)
        plain, general = proto_codec._read_plain(message), proto_codec._read_datum(message, "data[0]")
        assert plain is not None
        assert plain.model_input.to_ints() == general.model_input.to_ints() == [1]
        one, other = (d.loss_fn_inputs["target_tokens"] for d in (plain, general))
        assert (one.dtype, one.shape, one.dense_shape) == (other.dtype, other.shape, other.dense_shape)
        assert one.tolist() == other.tolist()
        assert not one.values_np.flags.writeable
    wrong = [
        _message(tokens=b"\1\0\0"), _message(tokens=b"\xff\xff\xff\xff"),
        _message(x=pb.Tensor(dtype=pb.DTYPE_INT64, dense=b"123")),
        _message(x=pb.Tensor(dtype=99, dense=ints)),
        _message(x=pb.Tensor(dtype=pb.DTYPE_INT64, dense=ints, shape=[5])),
        _message(x=pb.Tensor(dtype=pb.DTYPE_INT64, dense=ints, shape=[-6, -1])),
    ]  # fmt: skip
    for message in wrong:
        assert proto_codec._read_plain(message) is None
        with pytest.raises(InvalidInputError, match=r"data\[0\]"):
            proto_codec._read_datum(message, "data[0]")
    assert proto_codec._read_plain(_message(chunks=2)) is None


def test_zstd_is_one_frame_that_names_its_size():
    sent = codec.encode_request(ops.FORWARD_BACKWARD, PASS, compress=True)
    plain = codec.encode_request(ops.FORWARD_BACKWARD, PASS)
    assert sent.headers["content-encoding"] == "zstd"
    assert zstd.decompress(sent.body) == plain.body
    assert zstd.get_frame_info(sent.body).decompressed_size == len(plain.body)


def test_nulls_are_left_out_and_defaults_are_said():
    request = t.SaveWeightsRequest(model_id="m", path="p", seq_id=1, ttl_seconds=None)
    sent = json.loads(codec.encode_request(ops.SAVE_WEIGHTS, request).body)
    expected = {"model_id": "m", "path": "p", "seq_id": 1, "overwrite": False, "type": "save_weights"}
    assert sent == expected


@pytest.mark.parametrize("seconds", [None, 3600])
def test_a_ttl_of_none_is_said_as_null(seconds):
    request = t.SetCheckpointTTLRequest(training_run_id="r", checkpoint_id="weights/a", ttl_seconds=seconds)
    sent = codec.encode_request(ops.SET_CHECKPOINT_TTL, request)
    assert json.loads(sent.body) == {"ttl_seconds": seconds}
    assert sent.path == "/api/v1/training_runs/r/checkpoints/weights/a/ttl"


def test_nulls_inside_metadata_and_loss_graphs_stay():
    node = t.CustomLossNode(op="output", name="n", target="t", args=[None, 1], kwargs={"dim": None})
    request = t.CreateCustomLossRequest(
        session_id="s", custom_loss_seq_id=0, name="n", inputs=[], graph=t.CustomLossGraph(nodes=[node])
    )
    sent = json.loads(codec.encode_request(ops.CREATE_CUSTOM_LOSS, request).body)
    assert sent["graph"]["nodes"][0]["args"] == [None, 1]
    assert sent["graph"]["nodes"][0]["kwargs"] == {"dim": None}


def test_ids_are_quoted_in_paths_but_for_colons_and_the_slash_of_a_checkpoint():
    request = t.CheckpointRequest(training_run_id="s:train:0/../x", checkpoint_id="weights/a b?c")
    path = codec.encode_request(ops.DELETE_CHECKPOINT, request).path
    assert path == "/api/v1/training_runs/s:train:0%2F..%2Fx/checkpoints/weights/a%20b%3Fc"


@pytest.mark.parametrize("value", ["", ".", ".."])
def test_an_id_that_would_change_the_path_is_refused(value):
    with pytest.raises(InvalidInputError, match="session_id must not be"):
        codec.encode_request(ops.GET_SESSION, t.GetSessionRequest(session_id=value))


def test_queries_leave_out_what_was_not_given():
    sent = codec.encode_request(ops.LIST_TRAINING_RUNS, t.ListTrainingRunsRequest(limit=5))
    assert sent.query == "limit=5&offset=0&access_scope=owned"
    assert sent.body is None


def test_the_access_token_is_a_header_not_a_field():
    request = t.CopyWeightsRequest(source_path="tinker://r/weights/a", weights_access_token="secret")
    sent = codec.encode_request(ops.COPY_WEIGHTS, request)
    assert b"secret" not in sent.body
    assert codec.decode_request(ops.COPY_WEIGHTS, headers=sent.headers, body=sent.body) == request


def test_an_image_that_only_the_server_has_cannot_be_trained_on():
    chunk = t.ImageAssetPointerChunk("png", "asset://1", 4)
    datum = t.Datum(t.ModelInput([chunk]), {"target_tokens": [1, 2, 3, 4]})
    request = t.ForwardBackwardRequest(
        t.ForwardBackwardInput([PASS.forward_backward_input.data[0], datum], "ppo"), "m", 1
    )
    with pytest.raises(InvalidInputError, match=r"data\[1\].*ImageAssetPointerChunk"):
        codec.encode_request(ops.FORWARD_BACKWARD, request)


@pytest.mark.parametrize("value", [object(), "\ud800", 2**70, {"b": ["x", "\ud800"]}])
def test_what_json_cannot_say_is_refused_when_it_is_built_and_before_it_is_sent(value):
    with pytest.raises(InvalidInputError, match=r"CreateSessionRequest\.user_metadata\.a"):
        t.CreateSessionRequest(user_metadata={"a": value})
    unchecked = t.CreateSessionRequest().model_copy(update={"user_metadata": {"a": value}})
    with pytest.raises(InvalidInputError, match="create_session"):
        codec.encode_request(ops.CREATE_SESSION, unchecked)


def test_the_size_of_a_request_is_known_before_it_is_encoded():
    array = np.zeros(1000, np.float32)
    datum = t.Datum(t.ModelInput.from_ints(np.arange(1000)), {"weights": array})
    request = t.ForwardBackwardRequest(t.ForwardBackwardInput([datum] * 3, "ppo"), "m", 1)
    assert codec.request_size(request) == pytest.approx(
        len(codec.encode_request(ops.FORWARD_BACKWARD, request).body), rel=0.05
    )
    sample = t.SampleRequest(t.ModelInput.from_ints(np.arange(1000) + 100000))
    assert codec.request_size(sample) == pytest.approx(
        len(codec.encode_request(ops.SAMPLE, sample).body), rel=0.1
    )


# -- what is read ----------------------------------------------------------------------------------------


def test_null_is_not_given():
    body = {
        "sampling_session_id": "s", "seq_id": None, "num_samples": None, "prompt_logprobs": None,
        "prompt": {"chunks": [{"tokens": [1], "type": None}]},
        "sampling_params": {"temperature": None, "stop": None, "seed": None}, "model_path": None,
    }  # fmt: skip
    assert decode(ops.SAMPLE, body) == t.SampleRequest(t.ModelInput.from_ints([1]), sampling_session_id="s")
    body = {"model_id": "m", "path": "p", "optimizer": None, "seq_id": 1, "type": None}
    assert decode(ops.LOAD_WEIGHTS, body) == t.LoadWeightsRequest(model_id="m", path="p", seq_id=1)
    body = {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "b",
        "lora_config": {"rank": 8, "train_mlp": None},
    }
    assert decode(ops.CREATE_MODEL, body).lora_config == t.LoraConfig(8)


def test_unknown_fields_of_newer_clients_are_ignored_everywhere():
    body = {"model_id": "m", "adam_params": {"learning_rate": 0.5, "amsgrad": True}, "seq_id": 1, "new": 1}
    assert decode(ops.OPTIM_STEP, body).optim_params == t.AdamParams(learning_rate=0.5)
    body = {"prompt": {"chunks": []}, "sampling_params": {"mirostat": 0.5}, "new": {}}
    assert decode(ops.SAMPLE, body).sampling_params == t.SamplingParams()


def test_params_that_were_read_before_are_read_as_carefully():
    """1, 1.0 and true are equal to Python, and only the first is a number of tokens."""

    def read(**params):
        return decode(ops.SAMPLE, {"prompt": {"chunks": []}, "sampling_params": params}).sampling_params

    for _ in range(2):
        assert read(max_tokens=1, temperature=1) == t.SamplingParams(max_tokens=1, temperature=1)
        assert read(temperature=1, max_tokens=None) == t.SamplingParams()
        assert read(top_k=1).top_k == 1
        for wrong in (True, 1.0, 0):
            with pytest.raises(InvalidInputError, match="max_tokens"):
                read(max_tokens=wrong, temperature=1)


def test_an_unknown_optimizer_is_kept_whole():
    body = {"model_id": "m", "optimizer_params": {"type": "lion", "beta": 0.5}, "seq_id": 1}
    step = decode(ops.OPTIM_STEP, body)
    assert (
        json.loads(codec.encode_request(ops.OPTIM_STEP, step).body)["optimizer_params"]
        == body["optimizer_params"]
    )


def test_pictures_of_old_clients():
    old = {"data": "aGk=", "format": "png", "height": 2, "width": 3, "tokens": 6}
    pointer = {"location": "a://1", "format": "jpeg", "height": 2, "width": 3, "tokens": 6}
    body = {"prompt": {"chunks": [old, {**old, "type": "image"}, pointer, {"dmel": "aGk="}]}}
    image = t.ImageChunk(b"hi", "png", 6)
    expected = [image, image, t.ImageAssetPointerChunk("jpeg", "a://1", 6), t.DmelChunk(b"hi")]
    assert decode(ops.SAMPLE, body).prompt.chunks == expected


def test_both_content_types_on_forward_backward():
    for proto in (True, False):
        sent = codec.encode_request(ops.FORWARD_BACKWARD, PASS, proto=proto)
        assert decode(ops.FORWARD_BACKWARD, sent.body, content_type=sent.headers["content-type"]) == PASS


def test_the_older_config_map_is_read_where_the_newer_is_absent():
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo", loss_fn_config={"beta": 0.5})
    request = decode(ops.FORWARD_BACKWARD, message.SerializeToString(), content_type=codec.PROTO)
    assert request.forward_backward_input.loss_fn_config == {"beta": 0.5}
    message.loss_fn_config_v2["beta"].number = 0.75
    request = decode(ops.FORWARD_BACKWARD, message.SerializeToString(), content_type=codec.PROTO)
    assert request.forward_backward_input.loss_fn_config == {"beta": 0.75}
    assert request.seq_id == 0


def test_a_zstd_bomb_is_refused_before_it_unpacks():
    bomb = zstd.compress(bytes(1 << 26))
    assert len(bomb) < 10_000
    headers = {"content-encoding": "zstd"}
    with pytest.raises(InvalidInputError, match="more than 1024 bytes"):
        codec.decode_request(ops.FORWARD_BACKWARD, headers=headers, body=bomb, max_body=1024)


@pytest.mark.parametrize("body", [b"junk", zstd.compress(b"{}")[:-2], zstd.compress(b"{}") + b"x"])
def test_a_broken_zstd_body_is_refused(body):
    with pytest.raises(InvalidInputError, match="zstd"):
        decode(ops.CREATE_SESSION, body, content_encoding="zstd")


def test_a_sparse_bomb_is_refused():
    tensor = {
        "data": [],
        "dtype": "float32",
        "shape": [1, 2**40],
        "sparse_crow_indices": [0, 0],
        "sparse_col_indices": [],
    }
    body = {"prompt": {"chunks": []}, "target_prompt_logprobs": tensor}
    with pytest.raises(InvalidInputError, match=r"target_prompt_logprobs.*cells"):
        decode(ops.SAMPLE, body)


EMPTY = {"chunks": []}
RUN = {"session_id": "s", "base_model": "m"}


def chunk(**fields):
    return {"prompt": {"chunks": [fields]}}


def forward(**datum):
    return {"forward_input": {"data": [datum], "loss_fn": "ppo"}, "model_id": "m"}


@pytest.mark.parametrize(
    ("op", "body", "message"),
    [
        (ops.SAMPLE, chunk(tokens=[1, -5]), r"prompt\.chunks\[0\]\.tokens.*position 1 is -5"),
        (ops.SAMPLE, chunk(tokens=[1, 2.5]), r"whole numbers; position 1 is 2\.5"),
        (ops.SAMPLE, chunk(type="video"), r"prompt\.chunks\[0\]\.type must be .*'video'"),
        (ops.SAMPLE, chunk(data="!", format="png"), r"chunks\[0\]\.data: not base64"),
        (ops.SAMPLE, {"sampling_params": {}}, r"prompt is missing"),
        (ops.SAMPLE, {"prompt": EMPTY, "sampling_params": {"top_p": 2}}, r"top_p must be in \[0, 1\], got 2"),
        (ops.SAMPLE, {"prompt": EMPTY, "num_samples": True}, r"num_samples must be int, got bool"),
        (ops.SAMPLE, {"prompt": EMPTY, "seq_id": 2**63}, r"seq_id must be from 0"),
        (ops.FORWARD, forward(), r"data\[0\]\.model_input is missing"),
        (
            ops.FORWARD,
            forward(model_input=EMPTY, loss_fn_inputs={"w": {"data": ["a"]}}),
            r"data\[0\]\.loss_fn_inputs\['w'\]",
        ),
        (ops.CREATE_MODEL, RUN, r"CreateModelRequest\.model_seq_id is missing"),
        (ops.CREATE_MODEL, {**RUN, "model_seq_id": -1}, r"model_seq_id.*got -1"),
        (
            ops.CREATE_MODEL,
            {**RUN, "model_seq_id": 0, "lora_config": {"rank": 0}},
            r"lora_config\.rank must be positive, got 0",
        ),
        (ops.OPTIM_STEP, {"model_id": "m", "seq_id": 1}, r"optim_params is missing"),
        (
            ops.OPTIM_STEP,
            {"model_id": "m", "adam_params": {"beta1": 1.0}},
            r"beta1 must be in \[0, 1\), got 1",
        ),
        (ops.CREATE_SESSION, [1], r"JSON object was expected, got list"),
        (ops.CREATE_SESSION, b"{", r"not JSON"),
    ],
)
def test_refusals_name_the_place(op, body, message):
    with pytest.raises(InvalidInputError, match=message):
        decode(op, body)


# -- results ---------------------------------------------------------------------------------------------


def result(body, op=ops.OPTIM_STEP, status=200, content_type=codec.JSON):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return codec.decode_result(op, status, {"content-type": content_type}, body)


def test_the_order_of_the_checks():
    everything = {
        "type": "try_again",
        "status": "complete_metadata",
        "error": "x",
        "response_payload_size": 5,
    }
    assert isinstance(result(everything), t.PendingFuture)
    assert result({k: v for k, v in everything.items() if k != "type"}) == t.MetadataOnly(5)
    assert isinstance(result({"error": "x", "metrics": {}}), t.RequestFailedResponse)
    assert result({"metrics": {"a": 1}}) == t.OptimStepResponse(metrics={"a": 1.0})


@pytest.mark.parametrize(
    ("said", "meant"), [("User", "user"), ("server", "server"), ("odd", "unknown"), (None, "unknown")]
)
def test_whose_fault_a_failure_is_is_read_without_regard_to_case(said, meant):
    assert result({"error": "x", "category": said}).category == meant


def test_a_category_that_nobody_knows_is_kept_in_the_words():
    """What a newer server calls it is for people to read."""
    assert result({"error": "x", "category": "Quota"}).error == "x (category 'Quota')"
    assert result({"error": "x", "category": 7}).error == "x (category 7)"
    for known in ("user", "Server", "UNKNOWN", "", None):
        assert result({"error": "x", "category": known}).error == "x"


@pytest.mark.parametrize("body", [b"", b"junk", b"[]", b"{}"])
def test_408_is_pending_with_or_without_a_body(body):
    assert result(body, status=408) == t.PendingFuture()


def test_pending_says_why():
    body = {"queue_state": "paused_capacity", "queue_state_reason": "busy"}
    assert result(body, status=408) == t.PendingFuture("", "paused_capacity", "busy")


@pytest.mark.parametrize(
    "value", [t.PendingFuture("r", "paused_rate_limit", "slow down"), t.PendingFuture("r"), t.MetadataOnly(7)]
)
def test_what_is_not_a_result_travels_as_json_whatever_is_accepted(value):
    kind, body = codec.encode_result(value, codec.PROTO)
    assert kind == codec.JSON
    assert result(body) == value


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/x-protobuf", codec.PROTO),
        ("application/x-protobuf, application/json", codec.PROTO),
        ("application/json", codec.JSON),
        ("", codec.JSON),
    ],
)
def test_protobuf_for_whoever_accepts_it(accept, kind):
    assert codec.encode_result(OUTPUT, accept)[0] == kind


@pytest.mark.parametrize(
    ("said", "meant"),
    [("max_tokens", "length"), ("stop_sequence", "stop"), ("eos", "stop"), ("length", "length")],
)
def test_other_spellings_of_why_a_sequence_ended(said, meant):
    read = result({"sequences": [{"stop_reason": said, "tokens": [1]}]}, ops.SAMPLE)
    assert read.sequences[0].stop_reason == meant
    assert read.sequences[0].stop_detail == (None if said == meant else said)


def test_more_of_why_a_sequence_ended_is_not_in_the_official_field():
    response = t.SampleResponse(
        [t.SampledSequence("stop", tokens_np=np.array([1], np.int32), stop_detail="eos", stop_match=0)]
    )
    (sequence,) = json.loads(codec.encode_result(response, codec.JSON)[1])["sequences"]
    assert (sequence["stop_reason"], sequence["stop_detail"], sequence["stop_match"]) == ("stop", "eos", 0)
    message = pb.SampleResponse.FromString(codec.encode_result(response, codec.PROTO)[1])
    assert message.sequences[0].stop_reason == pb.STOP_REASON_STOP


def test_logprobs_that_are_no_number_are_null_in_json():
    response = t.SampleResponse(
        [
            t.SampledSequence(
                "stop", tokens_np=np.array([1], np.int32), logprobs_np=np.array([-np.inf], np.float32)
            )
        ],
        prompt_logprobs_np=np.array([np.nan, -1], np.float32),
    )
    body = json.loads(codec.encode_result(response, codec.JSON)[1])
    assert body["prompt_logprobs"] == [None, -1.0]
    assert body["sequences"][0]["logprobs"] == [None]


def test_bfloat16_and_int32_outputs_are_widened():
    message = pb.ForwardBackwardOutput(loss_fn_output_type="pkg:Kind")
    record = message.loss_fn_outputs.add(num_datums=2)
    upper = (np.array([1.5, -2.0, 0.25], np.float32).view(np.uint32) >> 16).astype("<u2")
    offsets = np.array([0, 2, 6], "<i8").tobytes()
    record.fields["logprobs"].MergeFrom(
        pb.BatchedTensor(data=upper.tobytes(), offsets=offsets, dtype=pb.DTYPE_BFLOAT16)
    )
    ranks = np.array([1, 2, 3], "<i4").tobytes()
    offsets = np.array([0, 4, 12], "<i8").tobytes()
    record.fields["rank"].MergeFrom(pb.BatchedTensor(data=ranks, offsets=offsets, dtype=pb.DTYPE_INT32))
    read = result(message.SerializeToString(), ops.FORWARD, content_type=codec.PROTO)
    assert read.loss_fn_output_type == "Kind"
    assert [r["logprobs"].tolist() for r in read.loss_fn_outputs] == [[1.5], [-2.0, 0.25]]
    assert [r["rank"].tolist() for r in read.loss_fn_outputs] == [[1], [2, 3]]
    assert read.loss_fn_outputs[0]["rank"].dtype == "int64"


def test_a_number_of_datums_without_datums_is_refused():
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=1 << 60)
    with pytest.raises(InvalidInputError, match="datums"):
        result(message.SerializeToString(), ops.FORWARD, content_type=codec.PROTO)


def test_arrays_of_a_result_are_views_not_copies():
    tokens = np.arange(5, dtype=np.int32)
    kind, body = codec.encode_result(
        t.SampleResponse([t.SampledSequence("stop", tokens_np=tokens)]), codec.PROTO
    )
    (sequence,) = result(body, ops.SAMPLE, content_type=kind).sequences
    assert not sequence.tokens_np.flags.owndata


def test_protobuf_where_json_belongs_is_refused():
    with pytest.raises(InvalidInputError, match="answered in JSON"):
        result(b"", ops.OPTIM_STEP, content_type=codec.PROTO)


# -- replies ---------------------------------------------------------------------------------------------


def test_a_reply_may_say_more_than_we_know_but_not_less():
    reply = codec.decode_reply(ops.CREATE_SESSION, 200, {}, b'{"session_id":"s","new":1,"info_message":null}')
    assert reply == t.CreateSessionResponse(session_id="s")
    with pytest.raises(InvalidInputError, match=r"CreateSessionResponse\.session_id is missing"):
        codec.decode_reply(ops.CREATE_SESSION, 200, {}, b"{}")


def test_bytes_are_bytes_whatever_they_were_read_into():
    body = codec.decode_reply(ops.GET_RUN_METRICS, 200, {}, bytearray(b"{}\n"))  # type: ignore[arg-type]
    assert (type(body), body) == (bytes, b"{}\n")


def test_void_answers_are_not_read():
    assert codec.decode_reply(ops.DELETE_CHECKPOINT, 204, {}, b"whatever") is None
    assert codec.encode_reply(None) == ("", b"")


def test_an_archive_may_be_a_redirect_or_a_reply():
    headers = {"location": "https://x/a.tar", "expires": "Fri, 02 Jan 2026 03:04:05 GMT"}
    expected = t.CheckpointArchiveUrlResponse(
        url="https://x/a.tar", expires=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    )
    assert codec.decode_reply(ops.GET_CHECKPOINT_ARCHIVE_URL, 302, headers, b"") == expected
    body = b'{"url":"https://x/a.tar","expires":"2026-01-02T03:04:05Z"}'
    assert codec.decode_reply(ops.GET_CHECKPOINT_ARCHIVE_URL, 200, {}, body) == expected
    no_date = codec.decode_reply(ops.GET_CHECKPOINT_ARCHIVE_URL, 302, {"location": "https://x"}, b"")
    assert no_date.expires is None
    with pytest.raises(InvalidInputError, match="location"):
        codec.decode_reply(ops.GET_CHECKPOINT_ARCHIVE_URL, 302, {}, b"")


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (422, b'{"detail": "rank must be positive"}', "rank must be positive"),
        (422, b'{"detail": [{"loc": ["body", "rank"], "msg": "too small"}]}', "body.rank: too small"),
        (500, b'{"error": {"message": "out of memory"}}', "out of memory"),
        (502, b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (503, b"", "Service Unavailable"),
        (799, b"", "no explanation"),
        (400, b'{"odd": 1}', '{"odd": 1}'),
        (400, b"x" * 5000, "x" * codec.MAX_ERROR_TEXT + "…"),
    ],
)
def test_the_words_of_an_error(status, body, text):
    assert codec.decode_error(status, {}, body)[0] == text
