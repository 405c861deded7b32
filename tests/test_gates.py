"""Each check of tests/gates.py that reads sources finds what it is for, and nothing else."""

from __future__ import annotations

from tests import gates


def test_words_of_our_own_are_found() -> None:
    texts = {
        "a.md": "A run is evicted.\nIt has the trainer's bits.",
        "b.py": "class Lane: ...\nlane = Laneless",
    }
    assert [found.partition(" is")[0] for found in gates.odd_words(texts)] == [
        "a.md:2: \"trainer's bits\"", "b.py:1: 'Lane'",
    ]  # fmt: skip


def test_callbacks_assigned_after_construction_are_found() -> None:
    wired = """
class Queue:
    def push(self): ...
    def __init__(self, listener):
        self.listener = self.push
        self.one, self.size = lambda: None, 1

def link(queue, other):
    queue.size = other.size
    queue.listener = {value}
"""
    for value in ("lambda: None", "link", "partial(link, 1)", "functools.partial(link)", "other.push"):
        found = list(gates.callables_assigned_from_outside({"q.py": wired.format(value=value)}, ()))
        assert found == [f"q.py:10: queue.listener = {value}: give it to the constructor"]
    source = {"q.py": wired.format(value="other.push")}
    assert not list(gates.callables_assigned_from_outside(source, ["q.py: queue.listener"]))
    source = {"q.py": wired.format(value="other.size")}
    assert not list(gates.callables_assigned_from_outside(source, ()))
    (stale,) = gates.callables_assigned_from_outside(source, ["q.py: queue.listener"])
    assert "take it off the list" in stale


def test_names_that_nothing_uses_are_found() -> None:
    code = """
LIMIT, USED = 1, 2

class Unused:
    @property
    def shown(self): return USED
    @app.command()
    def registered(self): ...
    def on_header(self): ...

def helper(): return Tested
"""
    found = gates.names_never_used({"m.py": code}, ["Tested = m.helper()"])
    assert sorted(found) == [
        "m.py:2: LIMIT is used nowhere", "m.py:4: Unused is used nowhere", "m.py:6: shown is used nowhere",
    ]  # fmt: skip


def test_files_that_do_not_exist_are_found() -> None:
    code = '"""See gone.py, client/here.py and docs/page.md."""\n\nx = "not/read.py"  # as in lost.md\n'
    found = list(gates.files_that_are_not_there({"m.py": code}, ["src/client/here.py", "docs/page.md"]))
    assert found == [
        "m.py:3: names lost.md, which does not exist",
        "m.py:1: names gone.py, which does not exist",
    ]
