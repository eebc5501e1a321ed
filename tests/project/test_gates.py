"""The learning gate and the tool that measures how often its tests pass."""

import pytest
from gates import SEED, LearningGate

from tools import pass_rates


def test_a_gate_tries_seeds_until_one_reaches_the_goal(monkeypatch):
    monkeypatch.delenv(SEED, raising=False)
    tried, notes = [], []
    gate = LearningGate(lambda name, value: notes.append((name, value)))
    gate(lambda seed: tried.append(seed) or float(seed), goal=0.5)
    assert tried == [0, 1]
    assert notes == [("learned", "0 of 0.5"), ("learned", "1 of 0.5")]
    with pytest.raises(AssertionError, match=r"seeds \[0, 1, 2\] reach \[0.0, 1.0, 2.0\]; the goal is 2"):
        gate(lambda seed: float(seed), goal=2)


def test_a_seed_from_outside_is_the_only_one_tried(monkeypatch):
    monkeypatch.setenv(SEED, "7")
    tried = []
    with pytest.raises(AssertionError, match=r"seeds \[7\] reach"):
        LearningGate(lambda *_: None)(lambda seed: tried.append(seed) or 0.0, goal=0)
    assert tried == [7]


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_x" name="test_a" time="2.5"><properties>
<property name="learned" value="0.8 of 0.9" /></properties><failure message="no">no</failure></testcase>
<testcase classname="tests.test_x" name="test_b" time="1"><properties>
<property name="learned" value="-150 of -200" /></properties></testcase>
<testcase classname="tests.test_x" name="test_c" time="0"><skipped message="sb3" /></testcase>
</testsuite></testsuites>"""


def test_pass_rates_come_from_the_report_of_every_seed(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    results = pass_rates.read_report(tmp_path / "report.xml")
    assert results == {
        "test_x::test_a": {"passed": False, "seconds": 2.5, "reached": 0.8, "goal": 0.9},
        "test_x::test_b": {"passed": True, "seconds": 1.0, "reached": -150.0, "goal": -200.0},
    }
    good = {**results, "test_x::test_a": {**results["test_x::test_a"], "passed": True, "reached": 0.95}}
    lines = pass_rates.table({str(seed): results if seed == 0 else good for seed in range(9)})
    assert lines[1].split()[:5] == ["8", "/", "9", "0.9", "0.8"]
    assert lines[1].endswith("test_x::test_a  <- too few")
    assert lines[2].endswith("test_x::test_b")
