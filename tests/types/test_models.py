"""The control plane's values: strict for whoever builds them, lenient with what arrives, frozen always."""

import copy
import pickle
import re
from dataclasses import FrozenInstanceError

import pytest
from pydantic import ValidationError

from tinkex import types as t
from tinkex.errors import InvalidInputError
from tinkex.strict import assemble
from tinkex.types.base import WIRE


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: t.SamplingParams(temprature=1),
            "SamplingParams has no 'temprature'; did you mean 'temperature'",
        ),
        (lambda: t.AdamParams(lr=1e-3), "AdamParams has no 'lr'. It takes: learning_rate"),
        (lambda: t.LoraConfig(rnk=8), "LoraConfig has no 'rnk'; did you mean 'rank'"),
        (lambda: t.SaveWeightsRequest(model_id="m", pth="x"), "has no 'pth'; did you mean 'path'"),
        (lambda: t.UserSearchOwner(owner_urn=["u"]), "did you mean 'owner_urns'"),
        (lambda: t.SampleRequest(t.ModelInput.empty(), num_sample=2), "did you mean 'num_samples'"),
        (lambda: t.DimuonParams(lerning_rate=1), "did you mean 'learning_rate'"),
    ],
)
def test_unknown_names_are_refused_with_a_guess(build, message):
    with pytest.raises(InvalidInputError, match=message.replace(".", r"\.")):
        build()


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (t.SamplingParams, {"max_tokens": 3, "stop": (7, 8)}),
        (t.AdamParams, {}),
        (t.LoraConfig, {"rank": 8}),
        (t.LoraConfig, {"seed": 1}),  # no rank
        (t.SampleRequest, {"prompt": t.ModelInput.from_ints([1])}),  # its parameters are made for it
        (t.SamplingParams, {"top_p": 2.0}),
    ],
)
def test_assembled_is_what_the_constructor_makes(cls, fields):
    """Checked alike, refused alike, and frozen."""
    try:
        wanted = cls(**fields)
    except InvalidInputError as error:
        with pytest.raises(InvalidInputError, match=f"^{re.escape(str(error))}$"):
            assemble(cls, fields)
        return
    made = assemble(cls, fields)
    assert made == wanted
    assert vars(made) == vars(wanted)
    with pytest.raises(FrozenInstanceError):
        setattr(made, next(iter(fields), "beta1"), 1)


EMPTY = t.ModelInput.empty()


def new_run(**fields):
    return t.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", **fields)


def search(**owner):
    return t.SessionSearchRequest(owner=owner)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: t.LoraConfig(), "LoraConfig needs 'rank'"),
        (lambda: t.GetInfoRequest(), r"GetInfoRequest\.model_id is missing"),
        (lambda: t.GetInfoRequest(model_id=5), r"GetInfoRequest\.model_id: .*string, got 5"),
        (lambda: t.GetInfoRequest("m"), "GetInfoRequest takes its fields by name: model_id, type"),
        (lambda: t.SessionSearchRequest(limit=201), r"limit.*less than or equal to 200, got 201"),
        (lambda: search(type="own", x=1), r"owner\.own: OwnSearchOwner has no 'x'"),
        (lambda: new_run(lora_config=8), "must be a LoraConfig, got int"),
        (lambda: new_run(lora_config={"rnk": 8}), "did you mean 'rank'"),
        (lambda: t.SampleRequest(EMPTY, num_samples=0), "num_samples must be .* from 1 on, got 0"),
        (lambda: t.SampleRequest([1, 2]), r"prompt must be a ModelInput, got list; ModelInput\.from_ints"),
        (lambda: t.Datum([1, 2], {}), r"must be a ModelInput, got list; ModelInput\.from_ints"),
        (lambda: t.ModelInput.from_ints("a b"), "got str; encode it with the model's tokenizer"),
        (lambda: t.ModelInput.from_ints({"input_ids": [1]}), r"got dict; take its \['input_ids'\]"),
        (lambda: t.SampleRequest(EMPTY, {"max_tokens": 1}), "must be SamplingParams, got dict"),
    ],
)
def test_wrong_values_are_refused_with_what_was_given(build, message):
    with pytest.raises(InvalidInputError, match=message):
        build()


def test_they_are_frozen():
    with pytest.raises(ValidationError):
        t.GetInfoRequest(model_id="m").model_id = "n"
    with pytest.raises(ValidationError):
        t.HealthResponse().status = "ok"
    with pytest.raises(AttributeError):
        t.AdamParams().beta1 = 0.5


def test_replies_ignore_what_they_do_not_know():
    reply = t.CreateModelResponse.model_validate({"model_id": "m", "new": {"a": 1}})
    assert reply == t.CreateModelResponse(model_id="m")


def test_none_is_not_given():
    """It takes the default, and does not travel."""
    request = t.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", optimizer_config=None)
    assert request.optimizer_config == t.AdamOptimizerConfig()
    assert "user_metadata" not in request.to_wire()
    run = {"training_run_id": "r", "base_model": "b", "model_owner": "o", "is_lora": True, "corrupted": None}
    assert (
        t.TrainingRun.model_validate({**run, "last_request_time": "2026-01-02T03:04:05Z"}).corrupted is False
    )


def test_the_fields_that_say_null():
    """Where absence would mean something else."""
    finish = t.FinishSessionRequest(session_id="s", reason=t.ClientSessionFinishSuccess())
    assert finish.to_wire()["detail"] is None
    ttl = t.SetCheckpointTTLRequest(training_run_id="r", checkpoint_id="weights/a", ttl_seconds=None)
    assert ttl.to_wire()["ttl_seconds"] is None
    with pytest.raises(InvalidInputError, match="ttl_seconds is missing"):
        t.SetCheckpointTTLRequest(training_run_id="r", checkpoint_id="weights/a")


def test_only_two_classes_say_null():
    said = [n for n in t.__all__ if getattr(getattr(t, n), "sent_as_null", None)]
    assert said == ["FinishSessionRequest", "SetCheckpointTTLRequest"]


@pytest.mark.parametrize("word", ["user", "User", "USER"])
def test_whose_fault_it_is(word):
    """Written in lower case, read in any."""
    failed = t.RequestFailedResponse(error="x", category=word)
    assert failed.category is t.RequestErrorCategory.User
    assert failed.to_wire() == {"error": "x", "category": "user"}


def test_optimizer_steps_travel_under_two_names():
    adam = t.OptimStepRequest(optim_params=t.AdamParams(), model_id="m", seq_id=1)
    assert set(adam.to_wire()["adam_params"]) == {
        "learning_rate",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "grad_clip_norm",
    }
    dimuon = t.OptimStepRequest(optim_params=t.DimuonParams(learning_rate=0.5), model_id="m", seq_id=1)
    assert dimuon.to_wire()["optimizer_params"] == {
        "type": "dimuon", "learning_rate": 0.5, "grad_clip_norm": 0.0, "beta1": 0.9,
    }  # fmt: skip
    for step in (adam, dimuon):
        assert t.OptimStepRequest.model_validate(step.to_wire(), context=WIRE) == step


def test_models_can_be_pickled_and_copied():
    for value in (
        t.OptimStepRequest(optim_params=t.AdamParams(), model_id="m", seq_id=1),
        t.GetServerCapabilitiesResponse(supported_models=[t.SupportedModel(model_name="m")]),
        t.SampleRequest(t.ModelInput.from_ints([1, 2]), t.SamplingParams(stop=["x"])),
        t.Datum(t.ModelInput.from_ints([1]), {"weights": [1.0]}),
        t.PromptProvenanceSpan(sequence_id="q", length=3),
    ):
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value


# -- checkpoint paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")],
)
def test_a_checkpoint_path(folder, kind):
    path = f"tinker://s:train:0/{folder}/step-10"
    parsed = t.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed == t.ParsedCheckpointTinkerPath(
        tinker_path=path, training_run_id="s:train:0", checkpoint_type=kind, checkpoint_id=f"{folder}/step-10"
    )


@pytest.mark.parametrize(
    "path",
    [
        "", "s/weights/a", "http://s/weights/a", "tinker://s/weights", "tinker://s/weights/a/b",
        "tinker://s/models/a", "tinker:///weights/a", "tinker://s/weights/", None, 5,
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_path_is_told_what_one_looks_like(path):
    with pytest.raises(InvalidInputError, match="looks like tinker://RUN/weights/NAME") as caught:
        t.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert repr(path) in str(caught.value)
