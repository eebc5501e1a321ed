"""Symptoms in a run's metrics: seen where they are, not seen next to the limit, each with the remedy of its section."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
from run_files import write_run

from pql import reports
from pql.config import leaves
from pql.config.compose import compose
from pql.reports.runs import shown
from pql.reports.symptoms import SYMPTOMS, anchor, symptoms

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
FLAT = [{"train/return_mean": 10.0 + (i % 2), "updates/v": 200.0 * i} for i in range(60)]
ATOMS = {"algo.critic.atoms": 11, "algo.critic.v_min": -5.0, "algo.critic.v_max": 5.0}
RATIOS = dict(leaves(compose(["task=pendulum", "algo=ddpg", "algo.v_per_step=8", "algo.p_per_v=0.5", "device=cpu"])))
N = 40


def run_of(returns=float, **metrics):
    """Rows of a run whose returns rise, with metrics as functions of the row's number."""
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    growing = {"train/return_mean": returns, "updates/v": lambda i: 500.0 * i, "steps/env": lambda i: 1000.0 * i}
    return [{name: value(i) for name, value in (growing | names).items()} for i in range(N)]


def learnt(i):
    """Values of a critic that approaches the return of the policy."""
    return 400.0 * (1 - math.exp(-0.05 * i))


def seen(rows, settings=None):
    return {s.section: s.text for s in symptoms(rows, settings or {})}


@pytest.mark.parametrize(
    ("section", "rows", "well", "text"),
    [
        (1, FLAT, [{**r, "train/return_mean": float(i)} for i, r in enumerate(FLAT)], "10.5 in the last third"),
        (1, FLAT, FLAT[:26], "train/return_mean"),  # too few rows and updates
        (2, [{"policy/frozen": 0.75}], [{"policy/frozen": 0.5}], "75% of the action components"),
        (4, [{"value/q": 4.5}], [{"value/q": 3.9}], "4.5 is at the end of the critic's range, -5 to 5"),
        (4, [{"value/q": -4.0}], [{"value/q": -3.9}], "-4 is at the end"),
        (
            5,
            [{"eval/return_mean": r} for r in (10.0, 900.0, 400.0)],
            [{"eval/return_mean": r} for r in (10.0, 900.0, 500.0)],
            "400, less than half of its best, 900",
        ),
        (
            10,
            [{"value/explained_variance": 0.01}] * 30,
            [{"value/explained_variance": 0.5}] * 30,
            "0.01, the values predict nothing",
        ),
        (
            12,
            [{"busy/collector": 0.97, "busy/v": 0.3, "busy/p": 0.2}],
            [{"busy/collector": 0.97, "busy/v": 0.6, "busy/p": 0.2}],
            "busy/collector: 97%, while busy/v and busy/p wait",
        ),
        (
            13,
            [{"busy/collector": 0.3, "busy/v": 0.6, "busy/p": 0.95}],
            [{"busy/collector": 0.3, "busy/v": 0.6, "busy/p": 0.8}],
            "busy/p: 95%, while busy/collector wait",
        ),
        (17, [{"env/dropped": 3.0}], [{"env/dropped": 0.0}], "env/dropped: 3 rows"),
        (17, [{"replay/bootstrap_lost": 1200.0}], [{"replay/bootstrap_lost": 0.0}], "1,200 windows"),
        (18, [{"skipped/v": 0.0, "skipped/p": 0.25}], [{"skipped/v": 0.0}], "25% of the policy's updates"),
        (3, run_of(value__q=lambda i: 2.0 ** (i / 4)), run_of(value__q=learnt), "times the values of the run's second"),
        (3, run_of(value__q=lambda i: -(2.0 ** (i / 4))), run_of(value__q=lambda i: -learnt(i)), "value/q: -8"),
        (  # values grow with the returns
            3,
            run_of(value__q=lambda i: 2.0 ** (i / 4), returns=lambda i: 9.0 + i),
            run_of(value__q=lambda i: 2.0 ** (i / 4), returns=lambda i: 2.0 ** (i / 4)),
            "value/q",
        ),
        (
            16,
            run_of(ratio__v_per_step=lambda i: 4.0, ratio__p_per_v=lambda i: 0.5),
            run_of(ratio__v_per_step=lambda i: 8.0, ratio__p_per_v=lambda i: 0.501),
            "ratio/v_per_step: 4, configured: 8",
        ),
        (
            19,
            run_of(memory__host_gib=lambda i: 1.0 + 0.05 * i),
            run_of(memory__host_gib=lambda i: 1.0 + min(2.0, 0.2 * i)),
            "memory/host_gib: 2.95 GiB, 2.00 in the middle of the run",
        ),
        (
            21,
            run_of(lag__rows_max=lambda i: 1.0 + i),
            run_of(lag__rows_max=lambda i: 12.0 + i % 3),
            "lag/rows_max: 36 ticks in the last quarter of the run, 6 in the first",
        ),
        (21, [{"remote/actors": 8.0}, {"remote/actors": 6.0}], [{"remote/actors": 8.0}], "6, there were 8"),
    ],
)
def test_a_symptom_is_seen_where_it_is(section, rows, well, text):
    settings = {4: ATOMS, 16: RATIOS, 19: {"replay.capacity": 20_000}}.get(section, {})
    assert text in seen(rows, settings)[section]
    assert seen(well, settings) == {}


def test_only_the_newest_value_counts_and_an_empty_run_has_no_symptom():
    assert seen([{"policy/frozen": 0.9}, {"policy/frozen": 0.1}]) == {}
    assert seen([]) == {}


def test_values_that_are_zero_or_rows_without_steps_are_no_error():
    assert seen(run_of(value__q=lambda i: float(10 <= i < 20 or i > 35))) == {}
    assert seen([{"memory/host_gib": 1.0}] * N, {"replay.capacity": 20_000}) == {}


def test_memory_may_grow_while_replay_fills():
    rows = run_of(memory__host_gib=lambda i: 1.0 + 0.05 * i)
    assert seen(rows, {"replay.capacity": 30_000}) == {}


def section_of(number):
    (text,) = re.findall(rf"^### {number}\. .*?(?=^##|\Z)", PAGE, re.M | re.S)
    return text


@pytest.mark.parametrize("number", SYMPTOMS)
def test_a_symptom_agrees_with_its_section(number):
    known, text = SYMPTOMS[number], section_of(number)
    assert text.startswith(f"### {number}. {known.title}\n")
    metrics = {*re.findall(r"\w+/\w+", inspect.getsource(known.check))} - {"updates/v", "steps/env", "checkpoints/best"}
    metrics -= {"train/return_mean"} if number == 3 else set()
    assert [metric for metric in metrics if f"`{metric}`" not in text] == []
    exploding = section_of(3) if number == 18 else ""
    settings = {*re.findall(r"\b(?:algo|task|placement|replay)\.[\w.]*\w", known.remedy)}
    assert [name for name in settings if name not in text + exploding] == []


def test_a_report_has_symptoms_with_remedies_and_no_path_of_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    more = [{"time/seconds": 2.0, "steps/env": 20, "env/dropped": 3.0}]
    path = write_run(tmp_path / "run", [(1.0, 10, 5.0)], rows=more)
    (path / "videos").mkdir()
    (path / "videos" / "steps-1.mp4").write_bytes(b"frames")
    page, analysis = reports.write([str(path)], single=True)
    text, numbers = page.read_text(), (page.parent / "numbers.json").read_text()
    assert "env/dropped: 3 rows were left out" in text
    assert SYMPTOMS[17].remedy in text
    assert "docs/troubleshooting.md#17-rows-are-dropped" in text
    assert 'src="../videos/steps-1.mp4"' in text
    for local in (str(tmp_path), str(Path.cwd()), str(Path.home()), "file:"):
        assert local not in text
        assert local not in numbers
    (found,) = json.loads(numbers)["symptoms"]
    assert (found["section"], found["anchor"]) == (17, anchor(17))
    assert "symptoms" not in analysis  # of the run, in numbers.json only


def test_a_path_is_shown_without_the_folders_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [shown(Path(p)) for p in ("runs/x", "/", "/x", "/home/somebody/runs/x")] == ["runs/x", "/", "x", "runs/x"]
    assert shown(tmp_path / "runs" / "x") == "runs/x"
