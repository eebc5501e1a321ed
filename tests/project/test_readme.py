"""The README's Python examples run as printed, and its commands exist."""

import re
import tomllib
from pathlib import Path

import pytest

import pql
from pql.cli.parser import COMMANDS
from pql.config.layers import Presets

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def blocks(page):
    """Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def test_the_example_simulator_passes_the_conformance_test_and_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = next(b for b in blocks("docs/start/own-simulator.md") if "class Drift" in b)
    scope: dict = {"__name__": "drift"}  # imported, as by pql doctor --env drift:Drift
    exec(code, scope)
    assert not (tmp_path / "runs").exists()
    report = pql.check_env(scope["Drift"](64, "cpu"), steps=250)
    assert report.ok, str(report)
    assert "pql.train(" in code
    # 12 steps of learning are enough to see it run; that it learns is another test's business
    small = ["budget.seconds=null", "budget.env_steps=2816", "algo.warmup_steps=32", "algo.batch_size=64"]
    run = pql.train("algo=pql", *small, "algo.critic.hidden=[16]", env=scope["Drift"](64, "cpu"), quiet=True)
    assert run.env_steps == 2816
    assert run.episodes == 64


def test_the_python_example_runs(tmp_path, monkeypatch):
    """Line by line, with a small budget; the last two lines need extras."""
    pytest.importorskip("mujoco")
    pytest.importorskip("onnxscript")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code = next(b for b in blocks("README.md") if "pql.make_env" in b)
    small = '"scale=cpu", "num_envs=4", "budget.seconds=null", "budget.env_steps=600", "algo.batch_size=16"'
    for old, new in (
        ('"budget.seconds=60"', f'{small}, "algo.warmup_steps=16", "device=cpu", "run_dir=runs/x", quiet=True'),
        ("episodes=100", "episodes=2, num_envs=2"),
        ('{"budget": {"seconds": 120}}', '{"budget": {"env_steps": 700}}, quiet=True'),
    ):
        assert old in code
        code = code.replace(old, new)
    scope: dict = {}
    exec(code, scope)
    assert scope["action"].shape == (64, 6)
    assert scope["run"].env_steps == 600
    assert (tmp_path / "comparison" / "index.html").exists()
    assert {path.suffix for path in (tmp_path / "runs" / "x" / "export").iterdir()} >= {".onnx", ".pt2"}


def test_the_readme_is_short_and_its_links_exist():
    assert len(TEXT.splitlines()) <= 120
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    assert (ROOT / "docs" / "policies.gif").stat().st_size < 3_000_000


def test_every_preset_and_command_is_documented():
    algorithms, tasks = ((ROOT / "docs" / page).read_text() for page in ("algorithms.md", "tasks/README.md"))
    for algo in Presets().names("algo"):
        assert f"`{algo}`" in algorithms
    for task in Presets().names("task"):
        assert re.search(rf"`[^`]*\b{task}\b", tasks), task
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for command in COMMANDS:
        assert f"\n## pql {command}\n" in commands


def test_the_page_of_installation_lists_every_extra_and_which_of_them_make_installs():
    text = (ROOT / "docs" / "start" / "first-run.md").read_text()
    table = text[text.index("| extra | for |") :].partition("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[2:]]
    listed = {extra: last.strip() for first, _, last in rows for extra in re.findall(r"`(\w+)`", first)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed.keys() == project["optional-dependencies"].keys()
    (installed,) = re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert {extra for extra, by in listed.items() if by == "make"} == {*installed.split(",")}
