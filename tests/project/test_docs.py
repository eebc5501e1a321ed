"""The documentation: every metric and public name, settings that exist. ``make docs`` checks links and navigation."""

import ast
import re
from pathlib import Path

import pytest

import pql
import pql.contract.optional
from pql.config.compose import known_settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SETTING = re.compile(
    r"(?<![\w./:-])(?:algo|task|replay|eval|budget|placement|logger|checkpoint)\.(?!py\b)[a-z_][\w.]*\b"
)
METRIC = re.compile(r"[a-z_]+/[a-z_]+")
NO_METRICS = {"text/plain", "restarts/mask", "restarts/step"}  # a MIME type, and columns of a recorded failure
WITHOUT = ("reports", "cli", "config", "envs")  # packages that log nothing


def logged():
    """Names of metrics in the code: constant keys of dictionaries with a slash."""
    names = set()
    for path in (ROOT / "pql").rglob("*.py"):
        if path.relative_to(ROOT / "pql").parts[0] in WITHOUT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
            values = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            names |= {value for value in values if METRIC.fullmatch(value)}
    return names - NO_METRICS


def test_every_metric_is_documented():
    text = (DOCS / "reference" / "metrics.md").read_text()
    documented = set(re.findall(r"`([a-z_]+/[a-z_]+)`", text))
    names = logged()
    assert len(names) > 40
    assert names - documented == set()
    written = {"train/return_mean", "train/length_mean", "eval/return_mean", "eval/return_median", "eval/return_iqm"}
    assert documented - names - written == {"eval/length_mean", "eval/success"}  # of these, the code joins the parts


def test_the_python_reference_has_every_public_name():
    listed = set(re.findall(r"^::: ([\w.]+)$", (DOCS / "reference" / "api.md").read_text(), re.M))
    optional = {
        f"pql.contract.optional.{name}" for name, found in vars(pql.contract.optional).items() if offered(name, found)
    }
    wraps = {"pql.wrap.rsl_rl", "pql.wrap.sb3", "pql.wrap.gymnasium"}
    names = {f"pql.{name}" for name in {*pql.__all__} - {"__version__", "wrap"}}
    robots = {f"pql.deploy.{name}" for name in ("Controller", "Limits", "JointCommand")}
    stacks = {"pql.lab.vec.from_rsl_rl", "pql.lab.learner.LabLearner", "pql.lab.runner.LabRunner"}
    more = robots | stacks | {"pql.contract.env.VecEnv", "pql.run.driven.Driven"}
    assert listed == names | optional | wraps | more


def offered(name, found):
    """Return True if a module defines this protocol."""
    return isinstance(found, type) and found.__module__ == "pql.contract.optional" and not name.startswith("_")


def test_every_metric_has_a_healthy_range_or_is_a_counter():
    rows = re.findall(r"^\| (`[a-z].*) \|$", (DOCS / "reference" / "metrics.md").read_text(), re.M)
    assert len(rows) > 40
    assert [row for row in rows if not row.split(" | ")[-1].strip(" |")] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_settings_named_in_the_text_exist(page):
    known = {".".join(one.split(".")[: i + 1]) for one in known_settings() for i in range(one.count(".") + 1)}
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        for name in SETTING.findall(code):
            assert name in known or name.startswith(("task.kwargs.", "task.remote.", "task.process.")), code


def test_troubleshooting_names_documented_metrics():
    documented, named = (
        set(re.findall(r"`([a-z_]+/[a-z_]+)`", (DOCS / page).read_text()))
        for page in ("reference/metrics.md", "troubleshooting.md")
    )
    others = ("busy/", "skipped/", "checkpoints/")  # a name for each worker; a folder
    assert len(named) > 25
    assert {name for name in named - documented if not name.startswith(others)} == set()


def test_the_reference_of_the_command_line_is_up_to_date(tool):
    assert (DOCS / "reference" / "commands.md").read_text() == tool("pages").commands_page()
