"""The official SDK's samplers, pickled or by handle, work in other processes."""

from __future__ import annotations

from tests.compat.conftest import Served


def test_a_sampler_is_the_same_in_every_process(served: Served) -> None:
    facts = served.run("tinker-0.36.0", "clones.py")
    here = facts["here"]["tokens"]
    assert here == [here[0]] * 4
    assert here != facts["base"]["tokens"]  # it is the adapter's
    assert facts["elsewhere"]["tokens"] == [here] * 3
    assert facts["here again"]["tokens"] == here
