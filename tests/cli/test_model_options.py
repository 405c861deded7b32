"""The options of `--model NAME=PLACE,OPTION=N`."""

from __future__ import annotations

import pytest

from tinkex.cli.model_options import read_model_options, split_options
from tinkex.engine.protocol import Placement
from tinkex.errors import InvalidInputError


@pytest.mark.parametrize(
    ("spec", "place", "options"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", {}),
        ("a=/models/x,y", "a=/models/x,y", {}),
        ("Qwen/Qwen3-8B,gpus=1", "Qwen/Qwen3-8B", {"gpus": "1"}),
        ("a=b,trainers=2,samplers=3", "a=b", {"trainers": "2", "samplers": "3"}),
    ],
)
def test_options_are_what_follows_the_place(spec: str, place: str, options: dict[str, str]):
    assert split_options(spec) == (place, options)


def test_a_placement_is_read():
    assert read_model_options("m", {}, "") == (1, None)
    assert read_model_options("m", {"tensor": "4"}, "") == (4, None)
    assert read_model_options("m", {}, "auto") == (1, Placement("auto"))
    given = {"trainers": "2", "samplers": "1-6", "gpus": "0.5"}
    assert read_model_options("m", given, "h:1") == (1, Placement("h:1", 2, 1, 1, 6, 0.5))
    four = Placement("auto", samplers=4, max_samplers=4)
    assert read_model_options("m", {"samplers": "4"}, "auto") == (1, four)
    assert read_model_options("m", {"tensor": "2", "gpus": "2"}, "auto") == (2, Placement("auto", gpus=2.0))


@pytest.mark.parametrize(
    ("options", "cluster", "message"),
    [
        ({"trainers": "2"}, "", "trainers= needs --cluster"),
        ({"sampler": "2"}, "auto", "no option 'sampler'; allowed: tensor, trainers, data, samplers, gpus"),
        ({"tensor": "0"}, "", "tensor=0 must be a whole number from 1 to 16"),
        ({"tensor": "4", "gpus": "2"}, "auto", "tensor=4 needs gpus=4, and gpus is 2"),
        ({"tensor": "2", "data": "2"}, "auto", "data= and tensor= do not go together yet"),
        ({"trainers": "0"}, "auto", "trainers=0 must be a whole number from 1"),
        ({"samplers": "4-2"}, "auto", "samplers=4-2 must be N or N-M"),
        ({"gpus": "1.5"}, "auto", "gpus=1.5 must be 0, a part of one GPU"),
        ({"gpus": "many"}, "auto", "gpus=many must be"),
    ],
)
def test_a_mistake_is_named(options: dict[str, str], cluster: str, message: str):
    with pytest.raises(InvalidInputError, match=message):
        read_model_options("m", options, cluster)
