"""The options of `--model NAME=PLACE,OPTION=N`."""

from __future__ import annotations

import pytest

from tinkex.cli.model_options import read_placement, split_options
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
    assert read_placement("m", {}, "") is None
    assert read_placement("m", {}, "auto") == Placement("auto")
    given = {"trainers": "2", "samplers": "1-6", "gpus": "0.5"}
    assert read_placement("m", given, "h:1") == Placement("h:1", 2, 1, 1, 6, 0.5)
    assert read_placement("m", {"samplers": "4"}, "auto") == Placement("auto", samplers=4, max_samplers=4)


@pytest.mark.parametrize(
    ("options", "cluster", "message"),
    [
        ({"trainers": "2"}, "", "trainers= needs --cluster"),
        ({"sampler": "2"}, "auto", "no option 'sampler'; allowed: trainers, data, samplers, gpus"),
        ({"trainers": "0"}, "auto", "trainers=0 must be a whole number from 1"),
        ({"samplers": "4-2"}, "auto", "samplers=4-2 must be N or N-M"),
        ({"gpus": "1.5"}, "auto", "gpus=1.5 must be 0, a part of one GPU"),
        ({"gpus": "many"}, "auto", "gpus=many must be"),
    ],
)
def test_a_mistake_is_named(options: dict[str, str], cluster: str, message: str):
    with pytest.raises(InvalidInputError, match=message):
        read_placement("m", options, cluster)
