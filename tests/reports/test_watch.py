"""The live page about runs: reading while others write, bounds, and who is answered."""

import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from urllib.parse import quote

import pytest
from browser import CHROMIUM, browser
from run_files import run, words

from pql.cli.main import main
from pql.reports.watch import feed as feeds
from pql.reports.watch.feed import Feed, Folder
from pql.reports.watch.server import serving

HOSTILE = "<img src=x onerror=alert(1)>"


def write_run(path, rows=3, algo="pql2", **more):
    """A run directory with ``rows`` rows of training and one evaluation."""
    path.mkdir(parents=True)
    settings = {"algo": {"name": algo}, "task": {"name": "ant"}, "seed": 1, "replay": {"capacity": 100}}
    (path / "config.yaml").write_text(json.dumps(settings))
    evaluation = {"time/seconds": rows, "steps/env": 32 * rows, "eval/return_mean": 7.5}
    lines = [*(row(i, **more) for i in range(rows)), evaluation]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def row(i, **more):
    names = {"time/seconds": i, "steps/env": 32 * i, "updates/v": 2 * i, "train/return_mean": i**2, "busy/v": 0.5}
    return {k: float(v) for k, v in names.items()} | more


def get(server, path, host=None, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers | ({"Host": host} if host else {}))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def asked(server, path):
    status, _, body = get(server, path)
    assert status == 200, (path, body)
    return json.loads(body)


def updated(folder):
    folder.update()
    return folder


def test_rows_are_read_as_they_are_written_also_in_halves(tmp_path):
    one = Feed(write_run(tmp_path / "run"))
    one.update()
    assert [r["train/return_mean"] for r in one.training.rows] == [0, 1, 4]
    assert [r["eval/return_mean"] for r in one.evaluations.rows] == [7.5]
    line = json.dumps(row(3)) + "\n"
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        one.update()
        assert len(one.training.rows) == 3
        file.write(line[20:] + "no json\n")
    one.update()
    assert [r["train/return_mean"] for r in one.training.rows] == [0, 1, 4, 9]
    assert (one.latest["train/return_mean"], one.latest["eval/return_mean"]) == (9, 7.5)
    (tmp_path / "run" / "metrics.jsonl").write_text(line)  # a new run in the same place
    one.update()
    assert [r["steps/env"] for r in one.training.rows] == [96]


def test_a_long_run_is_thinned_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(feeds, "POINTS", 10)
    one = Feed(write_run(tmp_path / "run", rows=1000))
    one.update()
    steps = [r["steps/env"] / 32 for r in one.training.rows]
    assert 10 <= len(steps) <= 20
    assert steps[0] == 0
    assert {b - a for a, b in itertools.pairwise(steps)} == {one.training.stride}
    assert steps[-1] > 1000 - 2 * one.training.stride


def test_numbers_that_json_does_not_have_are_left_out():
    assert feeds.numbers(b'{"a": NaN, "b": Infinity, "c": 1e999, "d": "text", "e": 2}') == {"e": 2.0}
    assert feeds.numbers(b"[1]") == feeds.numbers(b"\xff") == {}
    assert feeds.columns([{"a": 1.0}, {"b": 2.0}]) == {"a": [1.0, None], "b": [None, 2.0]}


def test_states(tmp_path):
    path = write_run(tmp_path / "run")
    one = Feed(path)
    assert one.state() == "running"
    past = time.time() - 2 * feeds.ALIVE
    os.utime(path / "metrics.jsonl", (past, past))
    assert one.state() == "stopped"
    for interrupted, state in ((True, "stopped"), (False, "finished")):
        (path / "summary.json").write_text(json.dumps({"interrupted": interrupted}))
        assert one.state() == state


def test_new_runs_below_a_folder_appear_and_links_are_not_followed(tmp_path):
    root = tmp_path / "runs"
    write_run(root / "deep" / "a")
    write_run(tmp_path / "elsewhere")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    folder = updated(Folder(root))
    assert [*folder.feeds] == ["deep/a"]
    write_run(root / "b")
    assert {*updated(folder).feeds} == {"deep/a", "b"}
    shutil.rmtree(root / "b")
    assert {*updated(folder).feeds} == {"deep/a"}
    assert [*updated(Folder(root / "deep" / "a")).feeds] == ["a"]


def test_the_page_shows_a_real_run_and_leaves_its_directory_as_it_is(tmp_path):
    run(*words(tmp_path / "run", "eval.final=true"))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with serving(tmp_path, 0) as server:
        (line,) = asked(server, "/api/runs")["runs"]
        assert (line["id"], line["task"], line["algo"], line["state"]) == ("run", "pendulum", "pql", "finished")
        body = asked(server, "/api/run?id=run")
        assert body["training"]["steps/env"][-1] == body["latest"]["steps/env"] == 320
        assert len(body["evaluations"]["eval/return_mean"]) == 1
        assert body["capacity"] == 4096
        known = f"/api/run?id=run&version={quote(body['version'])}"
        assert asked(server, known) == {"version": body["version"]}
        assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before
        (tmp_path / "run.log").write_text("a line")
        assert asked(server, known)["log"] == "a line"


def test_only_this_machines_browser_is_answered(tmp_path):
    path = write_run(tmp_path / "runs" / "run")
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (path / "videos").mkdir()
    (path / "videos" / "stolen.mp4").symlink_to(tmp_path / "secret.mp4")
    with serving(tmp_path / "runs", 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert get(server, "/api/runs", host="example.com")[0] == 403
        assert get(server, "/api/runs", host=f"localhost:{server.server_port}")[0] == 200
        for gone in ("/secret.mp4", "/../secret.mp4", "/video?id=../..", "/video?id=run", "/api/run?id=..", "/api/run"):
            assert get(server, gone)[0] == 404, gone
        assert get(server, "/api/runs", method="POST")[0] == 501
        (path / "videos" / "own.mp4").write_bytes(b"frames")
        status, headers, film = get(server, "/video?id=run")
        assert (status, headers["Content-Type"], film) == (200, "video/mp4", b"frames")
        assert asked(server, "/api/run?id=run")["video"].startswith("own.mp4 ")
        (path / "videos" / ".writing-own.mp4").write_bytes(b"half")
        assert get(server, "/video?id=run")[2] == b"frames"
        status, headers, part = get(server, "/video?id=run", Range="bytes=2-3")
        assert (status, headers["Content-Range"], part) == (206, "bytes 2-3/6", b"am")
        assert get(server, "/video?id=run", Range="bytes=9-")[0] == 200
        status, headers, body = get(server, "/", method="HEAD")
        assert (status, body) == (200, b"")
        assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.fault(31)
def test_a_hostile_run_directory_does_not_disturb_the_others(tmp_path):
    write_run(tmp_path / "good")
    os.mkfifo(write_run(tmp_path / "fifo") / "fifo")
    (tmp_path / "fifo" / "metrics.jsonl").unlink()
    os.rename(tmp_path / "fifo" / "fifo", tmp_path / "fifo" / "metrics.jsonl")
    (write_run(tmp_path / "text") / "config.yaml").write_text("replay: text\nalgo: [1]\n")
    with (write_run(tmp_path / "deep") / "metrics.jsonl").open("a") as file:
        file.write("[" * 200_000 + "\n" + json.dumps(row(9)) + "\n")
    with serving(tmp_path, 0) as server:
        assert {one["id"] for one in asked(server, "/api/runs")["runs"]} == {"good", "fifo", "text", "deep"}
        for name in ("good", "fifo", "text", "deep"):
            body = asked(server, f"/api/run?id={name}")
            assert body["capacity"] == (None if name in ("fifo", "text") else 100)
        assert body["latest"]["train/return_mean"] == 81


def test_a_missing_folder_and_a_taken_port_are_named(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "run=" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "port=99999"]) == 2
    assert "port=99999: expected from 0" in capsys.readouterr().err
    with serving(tmp_path, 0) as server:
        assert main(["watch", str(tmp_path), f"port={server.server_port}"]) == 2
    assert "expected a free port, or 0 for any" in capsys.readouterr().err


def test_ctrl_c_ends_the_command(tmp_path):
    write_run(tmp_path / "run")
    command = [sys.executable, "-m", "pql", "watch", str(tmp_path), "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert "http://127.0.0.1:" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=20) == 130


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_nothing_is_executed_and_nothing_overflows(tmp_path, width):
    write_run(tmp_path / "runs" / HOSTILE.replace("/", ""), algo=HOSTILE, **{HOSTILE: 1.0, "value/q": 2.0})
    write_run(tmp_path / "runs" / "a-run-with-a-very-long-name-that-needs-a-place-somewhere", **{"value/q": 2.0})
    with serving(tmp_path / "runs", 0) as server, browser(tmp_path / "profile", width) as tab:
        tab.open(server.address, "document.documentElement.dataset.charts == 4")  # return, busy, replay, value
        assert tab.value("innerWidth") == width
        assert tab.value("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        page = tab.value("document.documentElement.outerHTML")
    assert page.count("<path") >= 6
    assert "<img" not in page
    assert "&lt;img" in page
