"""The fault matrix: every row has tests, and the table counts what the log says."""

import json
import re
from pathlib import Path

import faults
import pytest
from fault_rows import ROWS, numbers

TESTS = Path(__file__).parent.parent


def test_every_row_has_tests():
    marked = [
        int(number)
        for file in TESTS.rglob("test_*.py")
        for numbers in re.findall(r"mark\.fault\(([\d, ]+)", file.read_text())
        for number in numbers.split(",")
        if number.strip()
    ]
    assert {*marked} == ROWS.keys()


def test_rows_are_selected_by_numbers_and_ranges():
    assert numbers("1,3-5 9") == {1, 3, 4, 5, 9}
    assert numbers("") == set()
    with pytest.raises(pytest.UsageError, match=r"--fault-rows 37: rows 1 to 36 are allowed"):
        numbers("37")


def test_the_table_counts_injected_faults_by_the_last_outcome_of_each_test(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    runs = [
        {"rows": [1, 2], "test": "a", "outcome": "failed", "cases": 3, "seconds": 1.0, "why": "x"},
        {"rows": [1, 2], "test": "a", "outcome": "passed", "cases": 3, "seconds": 2.0, "why": ""},
        {"rows": [1], "test": "b", "outcome": "failed", "cases": 97, "seconds": 0.5, "why": "x"},
        {"rows": [1], "test": "c", "outcome": "skipped", "cases": 9, "seconds": 9.0, "why": ""},
        {"rows": [36], "test": "d", "outcome": "passed", "cases": 10, "seconds": 0.1, "why": ""},
    ]
    log.write_text("".join(json.dumps(run) + "\n" for run in runs) + '{"cut')
    assert faults.main(["--table", "--log", str(log)]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2].endswith("| 100 | 100 (*) | 3 | 2.0 |")  # row 1: one test failed
    assert lines[3].endswith("| 100 | 3 (*) | 3 | 2.0 |")  # row 2: fewer than asked for
    assert lines[37].endswith("| 10 | 10 | 10 | 0.1 |")
    assert err == "failed: b\n"
