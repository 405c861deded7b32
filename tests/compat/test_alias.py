"""Programs written for the official package, on ours: the cookbook's unit tests tell no difference."""

from __future__ import annotations

import pytest

from tests.compat.alias import COOKBOOK, compare
from tests.compat.environments import interpreter


@pytest.mark.timeout(3000)
def test_the_cookbooks_unit_tests_pass_on_ours_where_they_pass_on_the_official_package() -> None:
    interpreter("cookbook"), interpreter("cookbook-tinkex")
    assert COOKBOOK.is_dir(), "`make cookbook-env` unpacks it"
    official, ours = compare()
    assert len(official) > 900, "most of them need no network"
    assert ours == official
