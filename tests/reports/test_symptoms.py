"""Symptoms in a run's metrics: seen where they are, not seen next to the limit, and linked to their sections."""

import inspect
import re

import pytest
from run_files import write_run

from pql import reports
from pql.reports import symptoms as found
from pql.reports.symptoms import PAGE, SYMPTOMS, symptoms

FLAT = [{"train/return_mean": 10.0 + (i % 2), "updates/v": 200.0 * i} for i in range(60)]
ATOMS = {"algo.critic.atoms": 11, "algo.critic.v_min": -5.0, "algo.critic.v_max": 5.0}


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
        (17, [{"replay/bootstrap_lost": 1200.0}], [{"replay/bootstrap_lost": 0.0}], "1,200 time limits"),
        (18, [{"skipped/v": 0.0, "skipped/p": 0.25}], [{"skipped/v": 0.0}], "25% of the policy's updates"),
        (21, [{"remote/actors": 8.0}, {"remote/actors": 6.0}], [{"remote/actors": 8.0}], "6, there were 8"),
    ],
)
def test_a_symptom_is_seen_where_it_is(section, rows, well, text):
    settings = ATOMS if section == 4 else {}
    assert text in seen(rows, settings)[section]
    assert seen(well, settings) == {}


def test_only_the_newest_value_counts_and_an_empty_run_has_no_symptom():
    assert seen([{"policy/frozen": 0.9}, {"policy/frozen": 0.1}]) == {}
    assert seen([]) == {}


def test_each_section_names_its_metrics():
    for section, check in SYMPTOMS.items():
        (text,) = re.findall(rf"^### {section}\. .*?(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
        metrics = {*re.findall(r"\w+/\w+", inspect.getsource(check))} - {"updates/v"}
        assert [metric for metric in metrics if f"`{metric}`" not in text] == []


def test_a_report_shows_symptoms_with_their_place_in_the_documentation(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    more = [{"time/seconds": 2.0, "steps/env": 20, "env/dropped": 3.0}]
    path = write_run(tmp_path / "run", [(1.0, 10, 5.0)], rows=more)
    (path / "videos").mkdir()
    (path / "videos" / "steps-1.mp4").write_bytes(b"frames")
    monkeypatch.setattr(found, "SITE", tmp_path / "troubleshooting.html")
    page, analysis = reports.write([str(path)], single=True)
    assert f'<a href="{PAGE.as_uri()}">what to change</a>' in page.read_text()
    assert 'src="../videos/steps-1.mp4"' in page.read_text()
    found.SITE.touch()
    reports.write([str(path)], single=True)
    assert f'<a href="{found.SITE.as_uri()}#17-rows-are-dropped">' in page.read_text()
    monkeypatch.setattr(found, "PAGE", tmp_path / "none.md")
    reports.write([str(path)], single=True)
    assert "not finite: docs/troubleshooting.md, 17" in page.read_text()
    assert "symptoms" not in analysis  # of the run, in numbers.json only
