"""Commands and code in README, docs and examples.

Every ``pql`` command in a code block is parsed; of ``pql train`` the settings are composed and validated as well.
Commands with placeholders in capitals (``task=T``) or an ellipsis are parsed only. Every
Python block is compiled; those that are complete programs are run by ``test_readme.py``, ``test_contributing.py``,
``test_migrate_pages.py`` and ``test_log.py``.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest

from pql.cli.main import parser, presets_as_setting
from pql.config.compose import compose

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACEHOLDER = re.compile(r"(^|=|/)[A-Z]+$|\.\.\.")  # of a word
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def commands(page):
    """Words of every ``pql`` command in a page's shell blocks."""
    for block in re.findall(r"^```(?:sh|bash|shell|console)?\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("pql "):
                yield shlex.split(re.sub(r"(\w)\|[\w|]+", r"\1", line), comments=True)[1:]  # a|b: the first


@each_page
def test_commands_are_valid(page):
    for words in commands(page):
        settings = [word for word in words[1:] if not word.startswith("-")]
        if words[0] != "train" or "-m" in words or any(PLACEHOLDER.search(word) for word in settings):
            parser().parse_args(presets_as_setting(words))
        else:
            on_cpu = [] if any(word.startswith("device=") for word in settings) else ["device=cpu"]
            compose([*settings, *on_cpu])


def test_there_are_commands():
    assert sum(1 for page in PAGES for _ in commands(page)) > 90


@each_page
def test_python_blocks_compile(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        ast.parse(block)
