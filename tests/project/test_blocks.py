"""Code blocks of README, docs and examples, all of them.

Executed here: ``pql list`` and ``pql completion``. Executed by other tests: the Python blocks, by tests that name
their page, and the commands, by ``test_commands_run``. Everything is validated, so that a wrong setting
is found without running anything:

* ``pql ...``, also after ``taskset``, ``torchrun`` or ``eval``: parsed to the end; every run of ``train`` (with ``-m``
  each one), ``resume`` and ``sweep`` (both ends of each space) is composed and checked, except that files
  and CUDA devices need not exist; the settings of other commands are checked by name and type.
* ``make`` by its targets, ``python tools/...`` by the script's options, ``pip install`` by this project's extras.
* Python: compiled; imports and names of ``pql`` resolved; calls of functions of ``pql`` fit their signatures.
* TOML and YAML: parsed. Other programs are only compared with ``FOREIGN``.

Capital letters stand for a reader's own names (``PLACEHOLDERS``).
"""

import ast
import functools
import importlib
import inspect
import re
import shlex
import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import pql
from pql.cli import parser as command_line
from pql.cli.commands import parse_pairs
from pql.cli.multirun import plan
from pql.cli.sweep_plan import make_plan
from pql.config.compose import compose

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
SHELL = ("", "sh", "bash", "console")
PLACEHOLDERS = {"T": "halfcheetah", "A": "pql", "S": "1", "N": "1000000", "K": "0", "SETTINGS": "", "...": ""}
FOREIGN = {"git", "source", "bazel", "openssl", "ray", "uv", "/opt/lab/bin/pip", "cd", "pip download"}
FOREIGN |= {"train", "play", "isaaclab", "./isaaclab.sh"}  # of robot stacks
DRAWINGS = ("tick k", "row  ", "group 0")


class Block(NamedTuple):
    """A fenced block: its file, the line of its fence, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks():
    for path in FILES:
        page, text = str(path.relative_to(ROOT)), path.read_text()
        for m in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.M | re.S):
            yield Block(page, text.count("\n", 0, m.start()) + 1, m[2], textwrap.dedent(m[3]))


BLOCKS = [*blocks()]


def of(*languages):
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in languages], ids=str)


def commands(text):
    """The words of each command of a shell block: without comments, lines joined, placeholders filled in."""
    for line in re.sub(r"\\\n\s*", "", text).replace("--task ...", "--task ant").splitlines():
        line = re.sub(r'^eval "\$\((.*)\)"', r"\1", line).replace("$(which python)", "python")
        words = [fill(word) for word in shlex.split(line, comments=True)]
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        yield [word for word in words if word]


def fill(word):
    key, equals, value = word.rpartition("=")
    return PLACEHOLDERS[value] and f"{key}{equals}{PLACEHOLDERS[value]}" if value in PLACEHOLDERS else word


@functools.cache
def planned(*words):
    """Return the number of runs that a command with ``-m`` makes; pages share commands."""
    return len(plan(words)[1])


def check_command(words):
    """Raises or asserts if a command is wrong. ``words``: not empty."""
    while re.match(r"[A-Z_]+=", words[0]) or words[0] == "export":
        words = words[1:]
        if not words:
            return
    if words[0] == "taskset":
        words = words[3:]
    if words[0] == "torchrun":
        words = ["pql", *words[words.index("pql.cli.main") + 1 :]]
    if words[0] == "pql":
        check_pql(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert [w for w in words[1:] if "=" not in w and w not in targets] == []
    elif words[0] in ("python", "pytest"):
        check_script(words[1:])
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [e for w in words for found in re.findall(r"^(?:pql-rl|\.)\[(.*)\]$", w) for e in found.split(",")]
        assert [e for e in named if e not in extras] == []
    elif not words[0].startswith("./bazel-bin"):
        assert {words[0], " ".join(words[:2])} & FOREIGN, words


def check_script(words):
    path = ROOT / words[0]
    if not (path.exists() or words[0].startswith("fast_td3/")):
        raise AssertionError(f"{words[0]}: no such file")
    if words[0].startswith("tools/"):
        text = path.read_text()
        if "options(__doc__" in text:  # whose options all scripts share
            text += (ROOT / "tools" / "bench" / "common.py").read_text()
        assert [w for w in words if w.startswith("--") and f'"{w.partition("=")[0]}"' not in text] == []


def check_pql(words):
    args = command_line.parser().parse_args(command_line.presets_as_setting(words))
    command, rest = words[0], [*(getattr(args, "overrides", None) or getattr(args, "words", None) or [])]
    own = command_line.COMMANDS[command].own
    if command == "train" and args.multirun:
        assert planned(*without_paths(rest)) > 1
    elif command == "sweep":
        assert make_plan(rest, args.pbt).spaces
    elif command in ("train", "resume"):
        compose(without_paths([w for w in rest if w.partition("=")[0] not in own]), resolve=lambda device: "cpu")
        parse_pairs([w for w in rest if w.partition("=")[0] in own], own)
    elif command == "list" or (command == "completion" and args.shell):
        assert args.run(args) == 0
    elif own:
        parse_pairs([w for w in rest if "=" in w], own)
    elif command == "doctor" and args.env:
        keywords = [w if w.startswith(("task.", "device=")) else f"task.kwargs.{w}" for w in rest]
        compose([f"task.name={args.env}", *without_paths(keywords)])


def without_paths(words):
    """Without a reader's own folders and devices."""
    return [w for w in words if not w.startswith(("run_dir=", "presets=", "device=cuda"))]


@of(*SHELL)
def test_the_commands_of_a_shell_block_are_right(block, tmp_path, monkeypatch):
    if block.text.lstrip().startswith(DRAWINGS) or block.page == "docs/reference/commands.md":
        return
    monkeypatch.chdir(tmp_path)
    found = [words for words in commands(block.text) if words]
    assert found
    for words in found:
        check_command(words)


@of("python")
def test_the_names_of_a_python_block_exist(block):
    tree = ast.parse(block.text)
    compile(tree, str(block), "exec")
    scope = {"pql": pql}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pql":
            module = importlib.import_module(node.module)
            scope |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.name.startswith("pql."):
                    importlib.import_module(one.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := resolve(node.func, scope)):
            check_call(node, called)
        elif isinstance(node, ast.Attribute):
            resolve(node, scope)


def resolve(node, scope):
    """The object that a dotted name of ``pql`` means, or None. Raises ``AttributeError``: there is none."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, scope)
        return None if base is None else getattr(base, node.attr)
    return None


def check_call(node, called):
    if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
        return
    inspect.signature(called).bind(*node.args, **{k.arg: k.value for k in node.keywords})
    if called in (pql.train, pql.resume):
        words = [a.value for a in node.args if isinstance(a, ast.Constant) and "=" in str(a.value)]
        compose(without_paths(words), resolve=lambda device: "cpu")


@of("toml", "yaml")
def test_a_data_block_can_be_read(block):
    assert (tomllib.loads if block.language == "toml" else yaml.safe_load)(block.text)


def test_every_block_has_a_language_that_is_checked():
    assert {b.language for b in BLOCKS} <= {*SHELL, "python", "toml", "yaml", "text"}
    assert len(BLOCKS) > 80


@pytest.mark.parametrize(
    "wrong",
    [
        "pql train task=halfchetah",
        "pql train algo.n_steps=3",
        "pql train -m task=halfcheetah algo=pql,pqll",
        "pql eval runs/x episode=3",
        "pql sweep task=halfcheetah 'algo.critic.lrr=interval(1e-4,1e-2)'",
        "make tests",
        "python tools/peers/compare.py --contender x",
        "pip install 'pql-rl[mujocoo]'",
        "pqq train",
    ],
)
def test_a_wrong_command_is_seen(wrong):
    (words,) = commands(wrong)
    with pytest.raises((AssertionError, pql.ConfigError)):
        check_command(words)
