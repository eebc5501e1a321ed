"""TensorBoard on runs: rows are copied while others write them, within bounds, and only this machine is answered."""

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from run_files import run, words

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pql.cli.main import main
from pql.reports import watch
from pql.reports.watch import Feed, Feeds, serving


def write_run(path, rows=3):
    """A run directory with ``rows`` rows of training and one evaluation."""
    path.mkdir(parents=True)
    evaluation = {"time/seconds": rows, "steps/env": 32 * rows, "eval/return_mean": 7.5}
    lines = [*map(row, range(rows)), evaluation]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def row(i):
    return {"time/seconds": i, "steps/env": 32 * i, "train/return_mean": i**2, "busy/v": 0.5}


def shown(out, name):
    """(step, value) pairs that TensorBoard reads."""
    board = EventAccumulator(str(out)).Reload()
    return [(one.step, one.value) for one in board.Scalars(name)] if name in board.Tags()["scalars"] else []


def updated(feeds):
    feeds.update()
    return {str(feed.path.relative_to(feeds.root)) for feed in feeds.feeds.values()}


def test_rows_are_copied_as_they_are_written_also_in_halves(tmp_path):
    one, out = Feed(write_run(tmp_path / "run"), tmp_path / "out"), tmp_path / "out"
    one.update()
    assert shown(out, "train/return_mean") == [(0, 0), (32, 1), (64, 4)]
    assert shown(out, "eval/return_mean") == [(96, 7.5)]
    line = json.dumps(row(3)) + "\n"
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        one.update()
        assert len(shown(out, "train/return_mean")) == 3
        file.write(line[20:] + "no json\n")
    one.update()
    assert shown(out, "train/return_mean")[-1] == (96, 9)
    (tmp_path / "run" / "metrics.jsonl").write_text(line)  # a new run in the same place
    one.update()
    one.close()
    assert shown(out, "train/return_mean") == [(96, 9)]
    assert EventAccumulator(str(out)).Reload().Scalars("busy/v")[0].wall_time == 3  # relative to the run's start


def test_a_long_run_is_thinned_evenly_but_for_its_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "WHOLE", 10_000)
    one = Feed(write_run(tmp_path / "run", rows=1000), tmp_path / "out")
    one.update()
    one.close()
    steps = [step / 32 for step, _ in shown(tmp_path / "out", "busy/v")]
    assert {b - a for a, b in itertools.pairwise(steps)} == {one._every}
    assert 5 < one._every < 12
    assert len(shown(tmp_path / "out", "eval/return_mean")) == 1


def test_numbers_that_an_event_cannot_hold_are_left_out():
    line = b'{"a": NaN, "b": Infinity, "c": 1e999, "d": "text", "e": 2, "\\ud800": 1, "f": 1e300}'
    assert watch.numbers(line) == {"e": 2.0}
    assert watch.numbers(b"[1]") == watch.numbers(b"\xff") == {}


def test_new_runs_below_a_folder_appear_and_links_are_not_followed(tmp_path):
    root = tmp_path / "runs"
    write_run(root / "deep" / "a")
    write_run(tmp_path / "elsewhere")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    feeds = Feeds(root, tmp_path / "out")
    assert updated(feeds) == {"deep/a"}
    write_run(root / "b")
    assert updated(feeds) == {"deep/a", "b"}
    feeds.close()
    assert len(shown(tmp_path / "out" / "runs" / "deep" / "a", "busy/v")) == 3
    assert updated(Feeds(root / "deep" / "a", tmp_path / "one")) == {"."}
    assert (tmp_path / "one" / "a").is_dir()


def get(address, path, host=None):
    connection = http.client.HTTPConnection(address.removeprefix("http://").strip("/"), timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_the_page_shows_a_real_run_and_leaves_its_directory_as_it_is(tmp_path):
    run(*words(tmp_path / "run", "eval.final=true"))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with serving(tmp_path, 0) as (address, _):
        assert address.startswith("http://127.0.0.1:")
        for path in ("/", "/data/environment", "/data/plugins_listing"):
            assert get(address, path)[0] == 200
            assert get(address, path, host="example.com") == (403, b"unknown host")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


@pytest.mark.fault(31)
def test_a_hostile_run_directory_does_not_disturb_the_others(tmp_path):
    write_run(tmp_path / "in" / "good")
    fifo = write_run(tmp_path / "in" / "fifo") / "metrics.jsonl"
    fifo.unlink()
    os.mkfifo(fifo)
    (write_run(tmp_path / "in" / "linked") / "metrics.jsonl").unlink()
    (tmp_path / "in" / "linked" / "metrics.jsonl").symlink_to(tmp_path / "in" / "good" / "metrics.jsonl")
    with (write_run(tmp_path / "in" / "deep") / "metrics.jsonl").open("a") as file:
        file.write("[" * 200_000 + "\n" + json.dumps(row(9)) + "\n")
    feeds = Feeds(tmp_path / "in", tmp_path / "out")
    assert updated(feeds) == {"good", "fifo", "linked", "deep"}
    feeds.close()
    assert {p.name for p in (tmp_path / "out" / "in").iterdir()} == {"good", "deep"}
    assert shown(tmp_path / "out" / "in" / "deep", "train/return_mean")[-1] == (288, 81)


def test_a_missing_folder_and_a_taken_port_are_named(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "run=" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "port=99999"]) == 2
    assert "port=99999: expected from 0" in capsys.readouterr().err
    with serving(tmp_path, 0) as (address, _):
        assert main(["watch", str(tmp_path), f"port={address.strip('/').rpartition(':')[2]}"]) == 2
    assert "expected a free port, or 0 for any" in capsys.readouterr().err


def test_ctrl_c_ends_the_command(tmp_path):
    write_run(tmp_path / "run")
    command = [sys.executable, "-m", "pql", "watch", str(tmp_path), "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert "http://127.0.0.1:" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=20) == 130
