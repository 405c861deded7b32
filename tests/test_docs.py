"""Run every ```python block of README.md and docs/, and check links, file names and commands in all pages.

A block runs as a reader would run it, copied into a file: in a fresh interpreter with no key and no server,
so models run in the process. A block that begins with `# goes on from "HEADING"` runs after the last block
under that heading, in the same file. Names and paths of models are those of a tiny model. A block that begins
with `# NAME.py` is that file; the `$ python …` lines of a page's ```console blocks run beside those files,
and print what stands below them. Only `<!-- not run: REASON -->` on the line above leaves a block out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from tests.compat import table
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tinkex.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", *ROOT.glob("bench/*.md"), *sorted(ROOT.glob("src/**/*.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
SKIP = re.compile(r"<!-- not run:(.*?)-->\n+\Z", re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
ANY_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
GOES_ON = re.compile(r"# goes on from \"(.+)\"\n")
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
WRITTEN = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*.py")),
]
NAMED_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|json|jsonl|toml|txt|svg|proto))`")
# Between backticks, or a line of a console; whatever follows a comment or a pipe is not the command's.
NAMED_COMMAND = re.compile(
    r"`tinkex ([a-z][^`#|\n]*)`|^ *(?:\$ )?tinkex ([a-z][^`#|\n]*?)(?: *[#|].*)?$", re.MULTILINE
)
SOURCES = [page for page in sorted(ROOT.glob("src/tinkex/**/*.py")) if "`tinkex " in page.read_text()]
MODEL_NAME = re.compile(r"""["']([\w.-]+(?:/[\w.-]+)+|SmolLM2-135M-Instruct)["']""")

# Runs the blocks given on stdin; an error's traceback has the page's own line numbers.
DRIVER = """
import json, sys
page, blocks = json.load(sys.stdin)
names = {"__name__": "__main__"}
for line, code in blocks:
    exec(compile("\\n" * line + code, page, "exec"), names)
"""


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, from 0
    code: str
    skipped: str | None  # why it is not run
    heading: str = ""  # above it


def blocks_of(text: str) -> list[Block]:
    found = []
    prose = ANY_BLOCK.sub(lambda block: " " * len(block[0]), text)  # a comment in code is no heading
    for match in BLOCK.finditer(text):
        reason = SKIP.search(text, 0, match.start())
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].split("\n"))
        line = text.count("\n", 0, match.start("code"))
        above = HEADING.findall(prose, 0, match.start())
        found.append(Block(line, code, reason[1].strip() if reason else None, above[-1] if above else ""))
    return found


def chains_of(blocks: list[Block]) -> list[list[Block]]:
    """What a reader copies into one file each: a block, after those that it goes on from."""
    chains: list[list[Block]] = []
    last: dict[str, list[Block]] = {}  # under each heading
    for block in blocks:
        before: list[Block] = []
        if (goes_on := GOES_ON.match(block.code)) is not None:
            assert goes_on[1] in last, f"no block stands under {goes_on[1]!r} above line {block.line}"
            before = last[goes_on[1]]
            chains = [chain for chain in chains if chain is not before]  # it is run as a part of the longer
        last[block.heading] = [*before, block]
        chains.append(last[block.heading])
    return chains


SAMPLES = [
    pytest.param(page, chain, id=f"{page.relative_to(ROOT)}:{chain[-1].line}")
    for page in PAGES
    for chain in chains_of(blocks_of(page.read_text()))
    if all(block.skipped is None for block in chain) and not FILE.match(chain[-1].code)
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "chain"), SAMPLES)
def test_a_sample_runs(page: Path, chain: list[Block], tmp_path: Path) -> None:
    environment = reader(chain, tmp_path)
    given = json.dumps([str(page.relative_to(ROOT)), [(block.line, block.code) for block in chain]])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=given, env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


WITH_COMMANDS = [page for page in PAGES if "$ python " in page.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_say_what_stands_below_them(page: Path, tmp_path: Path) -> None:
    files = [(match[1], block) for block in blocks_of(page.read_text()) if (match := FILE.match(block.code))]
    environment = reader([block for _, block in files], tmp_path)
    for name, block in files:
        (tmp_path / name).write_text(block.code)
    for command, says in commands_of(page.read_text()):
        done = subprocess.run(
            [sys.executable, *command.split()[1:]], env=environment, cwd=tmp_path,
            capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, says), f"{command}\n{done.stderr[-4000:]}"


def reader(blocks: list[Block], place: Path) -> dict[str, str]:
    """The environment of somebody who has nothing set, and the models named, in the directory `place`."""
    model = tiny_tokenizer(tiny_model(place / "model", "llama3"))
    for name in {name for block in blocks for name in MODEL_NAME.findall(block.code)}:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if not (place / name).exists():
            (place / name).symlink_to(model)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER", "TINKEX"))}
    home = {"HOME": str(place), "TINKEX_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
    return {**clean, **home, "HF_HUB_OFFLINE": "1"}


def commands_of(text: str) -> list[tuple[str, str]]:
    """The `$ python …` lines of a page's console blocks, each with what stands below it."""
    prompts = [part for block in CONSOLE.findall(text) for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    said = [part.partition("\n") for part in prompts]
    return [(command, output) for command, _, output in said if command.startswith("python ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_is_left_out_only_with_a_reason(page: Path) -> None:
    text = page.read_text()
    skipped = [block for block in blocks_of(text) if block.skipped is not None]
    assert all(block.skipped for block in skipped), "a reason is missing"
    assert text.count("<!-- not run") == len(skipped), "a 'not run' comment stands above no block"
    assert text.count("```python") == len(blocks_of(text)), "a block has no end"


def test_blocks_are_found_with_their_lines_and_reasons() -> None:
    """What the tests above rest on: a page whose blocks were overlooked would pass."""
    text = "a\n```python\nx = 1\n```\n<!-- not run: needs a GPU -->\n```python\ny\n```\n"
    text += "- b\n  ```python\n  z = 2\n  ```\n"
    first, second, third = blocks_of(f"# Title\n{text}")
    assert first == Block(3, "x = 1\n", None, "Title")
    assert second == Block(7, "y\n", "needs a GPU", "Title")
    assert third == Block(11, "z = 2\n", None, "Title")
    console = "```console\n$ python -m a b.py\n1\n2\n$ tinkex serve\n$ python c\n```\n"
    assert commands_of(console) == [("python -m a b.py", "1\n2\n"), ("python c", "")]


def test_a_block_that_goes_on_is_run_after_what_it_names_and_no_other_is() -> None:
    go_on = '# goes on from "{}"\n'
    codes = [("A", "a"), ("A", "b"), ("B", go_on.format("A") + "c"), ("C", go_on.format("B")), ("C", "d")]
    blocks = [Block(n, code, None, heading) for n, (heading, code) in enumerate(codes)]
    assert [[block.line for block in chain] for chain in chains_of(blocks)] == [[0], [1, 2, 3], [4]]
    with pytest.raises(AssertionError, match="no block stands under 'Z'"):
        chains_of([Block(0, go_on.format("Z"), None, "A")])


def test_both_command_lines_of_compat_are_on_a_page() -> None:
    told = [command for page in PAGES for command, _ in commands_of(page.read_text())]
    assert any(re.search(r"tinkex\.compat \w+\.py", command) for command in told)
    assert any(re.search(r"tinkex\.compat -m \w+", command) for command in told)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)|src=\"([^\"]+)\"", page.read_text())
    missing = [one for pair in targets for one in pair if one and "://" not in one]
    assert [one for one in missing if not (page.parent / one).exists()] == []


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page: Path) -> None:
    wrong = []
    for file, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / file if file else page
        if anchor not in anchors(target.read_text()):
            wrong.append(f"{file}#{anchor}")
    assert wrong == []


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    prose = ANY_BLOCK.sub("", text)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose))
    return {heading.strip().replace(" ", "-") for heading in plain}


# The front page has a table of all pages instead.
@pytest.mark.parametrize("page", LINKED[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_lists_its_headings(page: Path) -> None:
    """A page of three sections or more names them in a list above the first, in their order."""
    listed, headings = contents_of(page.read_text())
    assert listed == headings or (len(headings) < 3 and not listed)


def contents_of(text: str) -> tuple[list[str], list[str]]:
    """What the list above the first section names, and the headings of the sections."""
    head, *sections = re.split(r"^## ", ANY_BLOCK.sub("", text), flags=re.MULTILINE)
    listed = re.findall(r"^- \[(.+?)\]\(#", head, flags=re.MULTILINE)
    return listed, [section.partition("\n")[0] for section in sections]


def test_a_missing_heading_is_found() -> None:
    text = "# Page\n- [A](#a): of it\n\n```\n## no heading\n```\n## A\n### part\n## B's `b`\n- [C](#c)\n"
    assert contents_of(text) == (["A"], ["A", "B's `b`"])


# The changelog speaks of files as they were.
@pytest.mark.parametrize(
    "page",
    [page for page in WRITTEN if page.name != "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_files_that_are_named_are_there(page: Path) -> None:
    """`engine/protocol.py` and the like: from the root, or from the package."""
    named = NAMED_FILE.findall(page.read_text())
    assert [
        name for name in named if not any((ROOT / base / name).is_file() for base in (".", "src/tinkex"))
    ] == []


@pytest.mark.parametrize("page", [*WRITTEN, *SOURCES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_named_exist(page: Path) -> None:
    """In prose, in console blocks, in docstrings, and in what errors advise."""
    lines = [words for pair in NAMED_COMMAND.findall(page.read_text()) for words in pair if words]
    assert [problem for line in lines if (problem := misspelt(line))] == []


def misspelt(line: str) -> str | None:
    """What is wrong with the words after `tinkex`: a command or an option that there is not."""
    command: click.Command | None = main
    words = line.split()
    while isinstance(command, click.Group) and words and words[0][0].isalpha():
        command = command.get_command(click.Context(command), words.pop(0))
    if command is None:
        return f"no such command: tinkex {line}"
    known = {name for parameter in command.params for name in parameter.opts} | {"--help", "-h", "--version"}
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return next((f"tinkex {line}: no option {option}" for option in options if option not in known), None)


def test_headings_have_the_names_that_links_use() -> None:
    text = "# A run's metrics\n```\n# no heading\n```\n## Queue states, tracing\n### `--deterministic`\n"
    assert anchors(text) == {"a-runs-metrics", "queue-states-tracing", "--deterministic"}


def test_a_misspelt_command_is_found() -> None:
    text = (
        "`tinkex server keys create me`\n$ tinkex demo --stepps 3  # x\n`tinkex model pull {name}`, tinkex as"
    )
    lines = [words for pair in NAMED_COMMAND.findall(text) for words in pair if words]
    assert [misspelt(line) for line in lines] == [
        "no such command: tinkex server keys create me",
        "tinkex demo --stepps 3: no option --stepps",
        None,
    ]


def test_the_tables_of_what_works_are_what_was_recorded() -> None:
    """`python -m tests.compat.table` writes them."""
    outcomes = json.loads(table.RESULTS.read_text())
    for page, rows in table.PAGES.items():
        assert page.read_text() == table.placed(page.read_text(), rows, outcomes)
    assert "failed" not in outcomes.values()
    for name in outcomes:  # the short table counts what the long one does
        long, short = (any(re.search(r, name) for *_, r in rows) for rows in (table.ROWS, table.SHORT))
        assert long == short, name
