"""The fault matrix: every row has tests, and the table counts what the log says."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from fault_rows import ROWS, Place, cases_of, numbers, places_of

from tools import faults

ROOT = Path(__file__).resolve().parents[2]


def counts(items):
    """Return (row, form) -> faults that these tests inject."""
    found = defaultdict(int)
    for item in items:
        for place in places_of(item):
            found[place] += cases_of(item)
    return found


def test_every_row_has_a_short_test_in_the_suite(request):
    """Of the tests that were collected with this one: all, in ``make test``."""
    marked = {file for file in (ROOT / "tests").rglob("test_*.py") if "mark.fault(" in file.read_text()}
    if not marked <= {item.path for item in request.session.items}:
        pytest.skip("needs the whole suite")
    short = [i for i in request.session.items if not (i.get_closest_marker("slow") or i.get_closest_marker("gpu"))]
    found = {row for row, form in counts(short) if form is not None}
    assert ROWS.keys() - found == set()


COUNTED = """
import json, sys, pytest
sys.path[:0] = ["tests/project", "tests", "tests/support", "."]

class Collected:
    def pytest_collection_finish(self, session):
        from test_faults import counts
        self.found = [[*place, count] for place, count in counts(session.items).items()]

found = Collected()
assert pytest.main(["tests", "--collect-only", "-q", "-m", "fault and not gpu", "--faults"], plugins=[found]) == 0
print("\\n" + json.dumps(found.found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_counts_of_all_rows_and_forms_are_reached():
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, cwd=ROOT, timeout=800)
    found = {(row, form): count for row, form, count in json.loads(done.stdout.splitlines()[-1])}
    reached = {(n, form): found.get((n, form), 0) for n, row in ROWS.items() for form in row.forms}
    assert {place: count for place, count in reached.items() if count < ROWS[place[0]].count} == {}


def test_rows_are_selected_by_numbers_and_ranges():
    assert numbers("1,3-5 9") == {1, 3, 4, 5, 9}
    assert numbers("") == set()
    with pytest.raises(pytest.UsageError, match=r"--fault-rows 37: rows 1 to 36 are allowed"):
        numbers("37")


class Item:
    """A test with marks and parameters."""

    nodeid = "a test"

    def __init__(self, *marks, **params):
        self.marks, self.callspec = [mark.mark for mark in marks], type("CallSpec", (), {"params": params})

    def iter_markers(self, name):
        return [mark for mark in self.marks if mark.name == name]


def test_a_mark_names_the_form_and_what_is_not_repeated_is_a_further_test():
    fault = pytest.mark.fault
    assert places_of(Item(fault(1, 12))) == [Place(1, None), Place(12, None)]
    assert places_of(Item(fault(1, count=20))) == [Place(1, "")]
    assert places_of(Item(fault(12, cases=(1, 9)))) == [Place(12, "")]
    assert places_of(Item(fault(15))) == [Place(15, "")]  # whose count is 1
    assert places_of(Item(fault(8, form="{when}"), fault(count=50), when="twice")) == [Place(8, "twice")]
    assert places_of(Item(fault(8, form=lambda given: given["when"]), when="once")) == [Place(8, "once")]
    assert places_of(Item(fault(9), fault(8, form="once"), fault(count=50))) == [Place(8, "once"), Place(9, "")]
    assert places_of(Item(fault(8, count=5))) == [Place(8, None)]
    assert places_of(Item(pytest.mark.slow)) == []
    for mark, why in ((fault(37), "rows 1 to 36"), (fault(8, form="thrice"), "'once', 'twice'"), (fault(), "no row")):
        with pytest.raises(pytest.UsageError, match=why):
            places_of(Item(mark))


def run(test, outcome, cases, seconds, *places, commit="abc", source="s"):
    about = {"places": [list(place) for place in places], "test": test, "outcome": outcome, "cases": cases}
    return {**about, "seconds": seconds, "commit": commit, "source": source, "load": 1.5, "why": ""}


RUNS = [
    run("a", "failed", 3, 1.0, (1, ""), (2, ""), source="older"),
    run("a", "failed", 3, 1.0, (1, ""), (2, "")),
    run("a", "passed", 3, 2.0, (1, ""), (2, "")),
    run("b", "failed", 97, 0.5, (1, "")),
    run("c", "skipped", 9, 9.0, (1, "")),
    run("d", "passed", 10, 0.1, (36, ""), commit="def+"),
    run("e", "passed", 1, 0.3, (36, None)),
    run("f", "passed", 60, 0.3, (8, "once")),
    run("g", "passed", 7, 0.4, (8, "twice")),
    run("deleted", "failed", 7, 0.4, (36, "")),
]


def test_the_table_counts_injected_faults_by_the_outcomes_with_the_last_sources(tmp_path, capsys, monkeypatch):
    """A failure counts although the test passed when it was repeated; a page keeps its other sections."""
    monkeypatch.setattr(faults, "collected", lambda: {*"abcdefg"})
    log, page = tmp_path / "log.jsonl", tmp_path / "page.md"
    log.write_text("".join(json.dumps(one) + "\n" for one in RUNS) + '{"cut')
    page.write_text("# Quality\n\n## Faults\n\nreplaced\n\n## Long runs\n\nsame\n")
    assert faults.main(["--table", "--log", str(log), "--page", str(page)]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2].endswith("| 100 | 103 (*) | 3 |  | 2.0 | abc |")  # row 1: one test failed
    assert lines[3].endswith("| 100 | 6 (*) | 3 |  | 2.0 | abc |")  # row 2: fewer than asked for
    assert lines[9].endswith("| 50 of 2 forms each | 7 (*) | 7 |  | 0.4 | abc |")
    assert lines[37].endswith("| 10 | 10 | 10 | 1 of 1 | 0.3 | def+, abc |")
    assert err.startswith("failed: a\nfailed: b\nrow 1: 3 of 100\nrow 2: 3 of 100\nrow 3: 0 of 20\n")
    assert err.endswith("\n7 tests were last run with other sources (see the commits in the table)\n")
    assert "row 8, twice: 7 of 50\n" in err
    assert "row 36" not in err
    page = page.read_text()
    assert page.startswith("# Quality\n\n## Faults\n\n")
    assert page.endswith("\n\n## Long runs\n\nsame\n")
    assert "replaced" not in page
    assert "| 8 | once | 50 | 60 | 60 | 0.3 |\n| 8 | twice | 50 | 7 (*) | 7 | 0.4 |\n" in out
    assert "7 tests took 0 minutes in all, several at a time (load average 1.5 in the median, at most 1.5)." in page
    assert ("nothing here was measured on a GPU" in page) != torch.cuda.is_available()
