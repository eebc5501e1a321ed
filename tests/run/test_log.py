"""Log sinks: where metrics are written, and that a failing sink does not affect the run."""

import dataclasses
import importlib.metadata
import io
import json
import os
import re
import shutil
import struct
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from run_files import points, resume, rows, run, words
from wandb_server import WandbServer

from pql.config import Config
from pql.config.compose import compose
from pql.config.schema import LoggerConfig
from pql.engine import deadlines
from pql.errors import ConfigError, PqlWarning
from pql.reports.runs import read_rows
from pql.run.log import feed, loggers, trackers
from pql.run.log import sinks as log
from pql.run.log.closing import closing_words, few_rollouts
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store.run_dir import Summary

ROOT = Path(__file__).resolve().parents[2]
ROW = {"steps/env": 20_000, "train/return_mean": -123.45}


def with_budget(**budget):
    return small_config(budget={"seconds": None, "env_steps": None, **budget})


@pytest.mark.parametrize(
    ("words", "seconds", "note"),
    [
        (
            (),
            15.0,
            ["at 273 env steps/s budget.seconds=60 has room for about 1.5 rollouts", "8,192 env steps; num_envs=8 "],
        ),
        ((), 2.0, []),  # 14.5 rollouts
        (("num_envs=1024",), 6.0, ["about 4.5 rollouts of num_envs x algo.horizon = 32,768", "num_envs=128 "]),
        (("num_envs=8",), 15.0, []),  # fewer would not help
        (("algo=pql2",), 15.0, []),  # no rollouts
        (("budget.seconds=null", "budget.env_steps=9000"), 15.0, []),
        (("algo.warmup_steps=0",), 0.0, []),
    ],
)
def test_a_budget_with_room_for_few_rollouts_is_told(words, seconds, note):
    config = compose(["task=pendulum", "algo=ppo", "scale=cpu", "budget.seconds=60", *words])
    said = " ".join(few_rollouts(config, seconds).split())
    assert all(part in said for part in note), said
    assert bool(said) == bool(note)


def test_closing_words_name_the_worker_that_bounds_the_tick():
    summary = Summary("runs/x", -1.25, -1.5, 16, 50.0, 20_000, 2_400, 1_200, "runs/x/checkpoints/last")
    busy = {"collector": 0.5, "v": 0.9, "p": 0.1}
    text = closing_words(summary, with_budget(seconds=50.0, env_steps=20_000), busy)
    assert "done: return -1.2 (IQM -1.5) over 16 episodes" in text
    assert "the tick is bounded by v (busy: collector 50%, v 90%, p 10%): a smaller critic or batch" in text
    assert "pql resume runs/x budget.seconds=100 budget.env_steps=40000" in text
    assert max(map(len, text.splitlines())) <= 100
    full = dataclasses.replace(summary, return_median=-1.0, length_mean=12.0, success=0.25)
    text = closing_words(summary, small_config(task={"name": "mine:Env"}), busy)
    assert [line.endswith(" --trust") for line in text.splitlines()[-2:]] == [True, True]
    text = closing_words(full, with_budget(seconds=50.0), busy)
    assert "done: return -1.2 (median -1.0, IQM -1.5), success 25% over 16 episodes of 12.0 steps" in text
    stopped = Summary("runs/x", None, None, 0, 50.0, 20_000, 2_400, 1_200, "c", interrupted=True)
    text = closing_words(stopped, with_budget(seconds=500.0), busy)
    assert text.startswith("interrupted, saved: not evaluated")
    assert text.endswith("pql resume runs/x")
    spaced = dataclasses.replace(stopped, run_dir="my runs/x")
    text = closing_words(spaced, with_budget(seconds=5.0), busy)
    assert text.endswith("next: pql eval 'my runs/x'\n      pql resume 'my runs/x'")  # to be pasted as it stands


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_budget(env_steps=5_000_000), " budget.env_steps=5000000"),  # it ended early, by a callback say
        (with_budget(env_steps=2048), " budget.env_steps=4096"),
        (with_budget(seconds=1_000_000.4, env_steps=2048), " budget.seconds=1000001 budget.env_steps=4096"),
        (with_budget(seconds=0.3), " budget.seconds=6"),
        (with_budget(target_return=3.0), ""),
    ],
)
def test_the_next_command_has_no_budget_below_the_runs_own(config, words):
    summary = Summary("runs/x", None, None, 0, 3.0, 2048, 24, 12, "c")
    assert closing_words(summary, config, {"v": 0.5}).endswith(f"pql resume runs/x{words}")


def test_no_command_is_named_that_would_find_nothing():
    summary = Summary("runs/x", None, None, 0, 3.0, 2048, 24, 12, "runs/x/checkpoints/last")
    stopped, config = dataclasses.replace(summary, interrupted=True), with_budget()

    def end(policy, point, summary=summary):
        text = closing_words(summary, config, {"v": 0.5}, (policy, point))
        return text.splitlines()[0], text[text.index("run: ") :].splitlines()[1:]

    policy, evaluate, resume = "policy: runs/x/checkpoints/last", "next: pql eval runs/x", "pql resume runs/x"
    assert end(True, True) == ("done: not evaluated", [policy, evaluate, f"      {resume}"])
    assert end(True, False) == ("done: not evaluated", [policy, evaluate])
    assert end(False, True, stopped) == ("interrupted, saved: not evaluated", [f"next: {resume}"])
    assert end(False, False, stopped) == ("interrupted: not evaluated", [])


def test_a_better_policy_than_the_last_one_is_named():
    summary = Summary("runs/x", 0.0, 0.0, 16, 50.0, 20_000, 2_400, 1_200, "runs/x/checkpoints/last")

    def named(best, last=0.0):
        ended = dataclasses.replace(summary, return_mean=last)
        text = closing_words(ended, with_budget(seconds=50.0), {"v": 0.5}, best=best)
        return [line for line in text.splitlines() if line.startswith("best: ")]

    assert named(1234.56) == ["best: runs/x/checkpoints/best, return 1,234.6"]
    assert named(0.04) == named(-1.0) == named(-float("inf")) == named(float("nan")) == named(1.0, None) == []


def test_a_sitting_without_a_tick_names_no_worker():
    summary = Summary("runs/x", -1.25, -1.5, 16, 50.0, 20_000, 2_400, 1_200, "c")
    text = closing_words(summary, with_budget(seconds=50.0), {})
    assert "bounded" not in text
    assert "nothing was learned in this sitting: the budget of the run was already used up" in text
    assert text.endswith("pql resume runs/x budget.seconds=100")
    cut = dataclasses.replace(summary, updates_v=0, updates_p=0)
    text = closing_words(cut, with_budget(seconds=50.0), {})
    why = "nothing was learned in this sitting: it ended before the first tick"
    assert f"{why}; a longer budget, or fewer num_envs or algo.warmup_steps, reaches it\n" in text
    stopped = dataclasses.replace(cut, interrupted=True)
    assert f"{why}\n" in closing_words(stopped, with_budget(seconds=50.0), {})


# -- files ----------------------------------------------------------------------------------------------------------


def test_jsonl_leaves_out_what_json_lacks(tmp_path):
    sink = log.Jsonl(tmp_path / "m.jsonl")
    sink.write({"a": 1.5, "nan": float("nan"), "inf": float("inf"), "minus": -float("inf"), "steps/env": 3})
    assert (tmp_path / "m.jsonl").read_text() == '{"a": 1.5, "steps/env": 3}\n'  # readable at once, while open
    sink.close()


def test_jsonl_of_a_resumed_run_goes_on_where_it_was_saved(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"steps/env": 1}\n{"steps/env": 2}\n{"steps/env": 3}\nnoise\n[1]\n{"steps/e')
    sink = log.Jsonl(path, resumed_at=2)
    sink.write({"steps/env": 4})
    sink.close()
    assert [json.loads(line)["steps/env"] for line in path.read_text().splitlines()] == [1, 2, 4]


def test_metrics_that_are_a_pipe_or_have_no_lines_hold_up_no_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "LINE", 20)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"steps/env": 1}\n' + "[" * 100 + '\n{"steps/env": 2}\n{"steps/env": 3}\n{"steps/')
    other = tmp_path / "other"
    (tmp_path / ".metrics.jsonl").symlink_to(other)
    log.Jsonl(path, resumed_at=2).close()
    assert [row["steps/env"] for row in rows(tmp_path)] == [1, 2]
    assert not other.exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"run=.*: expected a run with metrics .* is no ordinary file"):
        log.Jsonl(path, resumed_at=2)


def test_tensorboard_has_what_metrics_jsonl_has(tmp_path):
    """Every number of every row, also where a run was killed after its last resume point, and resumed."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    setting = words(
        tmp_path, "logger=tensorboard", "budget.env_steps=1600", "eval.final=true", "logger.every_seconds=0.001"
    )
    Session(compose(setting), quiet=True).train()
    Session(resume_config(tmp_path, ["budget.env_steps=2400"]), resume=True, quiet=True).train()
    shutil.rmtree(points(tmp_path)[-1])
    Session(resume_config(tmp_path, ["budget.env_steps=3200"]), resume=True, quiet=True).train()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    logged = rows(tmp_path)
    assert logged[-1]["steps/env"] == 3200
    for key in {key for row in logged for key in row}:
        want = sorted(
            (row["steps/env"], struct.unpack("f", struct.pack("f", row[key]))[0]) for row in logged if key in row
        )
        assert sorted((e.step, e.value) for e in events.Scalars(key)) == want, key


def test_tensorboard_shows_a_video_as_a_small_gif(tmp_path):
    pytest.importorskip("tensorboard")
    imageio, image = pytest.importorskip("imageio.v2"), pytest.importorskip("PIL.Image")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    film = tmp_path / "film.mp4"
    with imageio.get_writer(film, fps=30, macro_block_size=2) as video:
        for i in range(45):  # 1.5 s, from black to white
            video.append_data(np.full((48, 640, 3), i * 5, np.uint8))
    sink = loggers.TensorBoard(tmp_path / "tensorboard")
    sink.video(film, 640)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (found,) = events.Images("eval/video")
    gif = image.open(io.BytesIO(found.encoded_image_string))
    assert (found.step, found.width, found.height) == (640, 320, 24)
    assert (gif.size, gif.n_frames, gif.info["duration"]) == ((320, 24), 23, 60)  # GIFs count hundredths of seconds
    gif.seek(22)
    assert abs(np.asarray(gif.convert("L")).mean() - 220) < 8
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"nothing")
    sink = loggers.TensorBoard(tmp_path / "tensorboard")
    sink.video(bad, 650)
    with pytest.warns(PqlWarning, match="TensorBoard lacks a video: "):
        sink.close()


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio", "swanlab"])
def test_a_logger_that_is_not_installed_is_refused_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.delitem(sys.modules, kind, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"logger={kind}: expected the package '{kind}'.*pip install 'pql-rl\[{kind}\]'"
    ):
        Session(compose(words(tmp_path, f"logger={kind}")), quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(13)
def test_a_sink_that_fails_is_warned_of_once_and_tried_again():
    class Flaky:
        tried = 0
        closed = False

        def write(self, row):
            self.tried += 1
            if self.tried < 3:
                raise OSError("No space left on device")

        def close(self):
            self.closed = True
            raise OSError

    kept: list[dict[str, float]] = []
    good = types.SimpleNamespace(write=kept.append, close=lambda: None)
    flaky = Flaky()
    sinks = log.Sinks([flaky, good])
    with pytest.warns(PqlWarning, match="a log is incomplete, the run continues: Flaky: OSError: No space") as told:
        sinks.write({"x": 0.0})
    for i in range(1, 4):
        sinks.write({"x": float(i)})
    assert (len(told), flaky.tried, len(kept)) == (1, 4, 4)
    sinks.close()
    assert flaky.closed


# -- wandb ----------------------------------------------------------------------------------------------------------


# In place of wandb, and of trackio (0.43) and swanlab (0.10) with their documented functions of the same names: records
# all calls. WANDB_FAKE: the file, and the stage at which to fail or hang.
FAKE = """
import json, os, time
path, _, stage = os.environ["WANDB_FAKE"].partition(":")
def note(what, value):
    with open(path, "a") as file:
        file.write(json.dumps([what, value]) + "\\n")
    if stage == what:
        raise ConnectionError("no server")
    if stage == "hang" + what:
        time.sleep(60)
class Settings:
    def __init__(self, **options):
        self.__dict__ = options
class Video:
    def __init__(self, path, format=None):
        if not os.path.exists(path):
            raise ValueError("no such file")
        self.shown = [path, format or open(path, "rb").read(6).decode("latin-1")]
class Artifact:
    def __init__(self, name, type):
        self.content = [name, type]
    def add_dir(self, path, name):
        self.content.append([name, sorted(os.listdir(path))])
    def add_file(self, path, name):
        self.content.append([name, os.path.isfile(path)])
class Run:
    dir, id = path + "/files", "mine"
    def log_artifact(self, artifact):
        note("artifact", artifact.content)
    def define_metric(self, name, step_metric):
        note("metric", [name, step_metric])
    def log(self, row, step=None):  # none in wandb, which drops rows whose step is below the last one's
        if "eval/video" in row:
            note("video", [*row["eval/video"].shown, row["steps/env"] if step is None else step])
        else:
            note("log", row if step is None else [row, step])
    def finish(self):
        note("finish", None)
def init(settings=None, **options):
    note("init", options | {"space": os.environ.get("TRACKIO_SPACE_ID")})
    return Run()
"""


def tracker(folder, kind="wandb", mode="offline", offset=0):
    """The sink of a run in ``folder``, with enough patience for a busy machine."""
    config = dataclasses.replace(Config(), logger=LoggerConfig(kind=kind, mode=mode))
    return loggers.Tracker(config, folder, offset, patience=60)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """stage -> nothing; afterwards, what the fake package was asked: stage -> values."""
    (tmp_path / "fake").mkdir()
    for name in ("wandb", "trackio", "swanlab"):
        (tmp_path / "fake" / f"{name}.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.syspath_prepend(str(tmp_path / "fake"))
    notes = tmp_path / "notes"
    monkeypatch.setenv("WANDB_FAKE", f"{notes}:")

    def asked(what: str) -> list:
        found = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        return [value for key, value in found if key == what]

    return asked


def a_log(folder, count: int = 3) -> list[dict[str, float]]:
    """A run directory with that many rows."""
    folder.mkdir()
    told = [{"steps/env": float(i), "loss/v": i / 3} for i in range(count)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    return told


def test_wandb_is_offline_and_gets_every_row_once(tmp_path, fake, monkeypatch, capsys):
    """Also those of a second sitting."""
    monkeypatch.setattr(deadlines, "TRACKER", 60)
    folder = tmp_path / "run"
    Session(compose(words(folder, "logger=wandb", "eval.final=true", "seed=4"))).train()
    (asked,) = fake("init")
    assert (asked["mode"], asked["project"], asked["dir"], asked["name"]) == ("offline", "pql", str(folder), "run")
    assert asked["config"]["seed"] == 4
    assert fake("log") == rows(folder)
    assert fake("metric") == [["*", "steps/env"]]
    assert fake("finish") == [None]
    assert f"wandb: offline. To upload what is missing: wandb sync {tmp_path / 'notes'}" in capsys.readouterr().out
    policy = sorted(path.name for path in (folder / "checkpoints" / "last").iterdir())
    kept = ["policy-mine", "model", ["checkpoints/last", policy], ["config.yaml", True]]
    assert fake("artifact") == [kept]
    Session(resume_config(folder, ["budget.env_steps=640"]), resume=True, quiet=True).train()
    assert fake("log") == rows(folder)
    assert rows(folder)[-1]["steps/env"] == 640
    first, second = fake("init")
    assert first["id"] == second["id"] == (folder / "wandb" / "run-id").read_text().strip()
    assert len(first["id"]) == 16


def test_wandb_gets_the_videos_of_a_run(tmp_path, fake):
    a_log(tmp_path / "run")
    film = tmp_path / "run" / "film.mp4"
    film.write_bytes(b"mp4")
    sink = tracker(tmp_path / "run")
    both = log.Sinks([sink, types.SimpleNamespace(write=print, close=lambda: None)])  # one that shows no videos
    both.video(film, 640)
    both.video(tmp_path / "deleted.mp4", 650)
    both.video(film, 660)
    both.close()
    assert fake("video") == [[str(film), "mp4", 640], [str(film), "mp4", 660]]
    assert len(fake("log")) == 3
    both.video(film, 670)  # after its end: nothing happens
    assert not both.failed


@pytest.mark.fault(20)
@pytest.mark.parametrize("stage", ["init", "log", "finish"])
def test_wandb_that_raises_is_told_of_and_no_more(tmp_path, fake, monkeypatch, stage):
    monkeypatch.setenv("WANDB_FAKE", f"{tmp_path / 'notes'}:{stage}")
    a_log(tmp_path / "run")
    sink = tracker(tmp_path / "run")
    with pytest.warns(PqlWarning, match=r"wandb stopped: ConnectionError: no server; the run is not affected") as told:
        sink.close()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink.close()  # reported once
    assert len(fake("log")) == {"init": 0, "log": 1, "finish": 3}[stage]


@pytest.mark.fault(6, form="logger", count=25)
@pytest.mark.fault(20)
def test_wandb_that_dies_is_told_of_while_the_run_goes_on(tmp_path):
    a_log(tmp_path / "run")
    sink = tracker(tmp_path / "run")
    sink.process.kill()
    sink.process.wait()
    with pytest.warns(PqlWarning, match="wandb's process died; the run is not affected. .* wandb sync .*latest-run"):
        sink.write(ROW)
    sink.write(ROW)
    sink.close()


@pytest.mark.fault(20)
def test_wandb_that_hangs_does_not_slow_a_run(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("WANDB_FAKE", f"{tmp_path / 'notes'}:hanginit")
    monkeypatch.setattr(deadlines, "TRACKER", 0.3)
    start = time.perf_counter()
    session = Session(compose(words(tmp_path / "run", "logger=wandb")), quiet=True)
    sink = next(s for s in session.sinks.sinks if isinstance(s, loggers.Tracker))
    for _ in range(1000):
        sink.write(ROW)
    assert time.perf_counter() - start < 5
    start = time.perf_counter()
    with pytest.warns(PqlWarning, match="wandb is still uploading and continues in the background"):
        summary = session.train()
    assert summary.env_steps == 320
    assert time.perf_counter() - start - summary.seconds < 5
    assert sink.process.poll() is None
    sink.process.kill()
    sink.process.wait()


@pytest.mark.fault(20)
def test_a_server_that_goes_while_wandb_finishes(monkeypatch):
    """It is left, with a word on it, after a while."""
    left = threading.Event()
    monkeypatch.setattr(deadlines, "WANDB_FINISH", 0.05)
    monkeypatch.setattr(trackers, "reachable", lambda url: False)
    monkeypatch.setattr(trackers.os, "_exit", lambda status: left.set())
    server = types.SimpleNamespace(settings=types.SimpleNamespace(base_url="http://127.0.0.1:9"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(setup=lambda: server))
    done = []
    tracker = trackers.Wandb.__new__(trackers.Wandb)
    tracker.wandb, tracker.options = sys.modules["wandb"], {"folder": "nowhere"}
    tracker.verdict = {"dir": "d", "mode": "online", "why": ""}
    tracker.run = types.SimpleNamespace(finish=lambda: left.wait(10))
    tracker.finish(lambda: done.append(dict(tracker.verdict)))
    assert left.is_set()
    assert done == [{"dir": "d", "mode": "offline", "why": "wandb's server is unreachable"}]


def test_a_server_that_answers_anything_can_be_reached():
    import http.server

    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert trackers.reachable(url)  # with "not implemented"
    assert not trackers.reachable(url)
    assert not trackers.reachable("nonsense")


@pytest.mark.fault(19)
def test_rows_of_a_very_long_run_come_less_often_and_a_resumed_one_goes_on_so(tmp_path, monkeypatch):
    """With 4 KB instead of 32 MB; every row counts all updates since the one before."""
    monkeypatch.setattr(log, "PART", 4 << 10)
    quick = ("logger.every_seconds=0.002", "budget.env_steps=6400")
    run(*words(tmp_path, *quick))
    first, size = log.stretch(tmp_path), (tmp_path / "metrics.jsonl").stat().st_size
    assert first == min(2 ** (size >> 12), log.LONGEST) >= 4
    before = rows(tmp_path)
    assert len(before) < 100  # of 400 ticks
    assert resume(tmp_path, "budget.env_steps=12800").env_steps == 12800
    after = rows(tmp_path)
    assert after[: len(before) - 1] == before[:-1]
    assert [row["steps/env"] for row in after] == sorted({row["steps/env"] for row in after})
    assert len(after) - len(before) < len(before)
    assert (tmp_path / "metrics.jsonl").stat().st_size < 16 * (4 << 10)
    found, notes = read_rows(tmp_path / "metrics.jsonl")
    assert (found, notes) == (after, [])
    (tmp_path / "metrics.jsonl").write_bytes(bytes(1 << 20))
    assert log.stretch(tmp_path) == 1024
    assert log.stretch(tmp_path / "nowhere") == 1


def test_rows_are_read_while_they_are_written(tmp_path):
    path, ended = tmp_path / "metrics.jsonl", threading.Event()
    path.write_text('{"old": 1}\n{"a": 1}\n{"b"')
    found = feed.rows(path, len('{"old": 1}\n'), ended)
    assert next(found) == {"a": 1}
    with path.open("a") as file:
        file.write(': 2}\n{"c": 3}\n')
    ended.set()
    assert list(found) == [{"b": 2}, {"c": 3}]


def history(path) -> list[dict[str, float]]:
    """The rows in a .wandb file: records in blocks of 32 KiB, each record with a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, body, found = path.read_bytes(), 7, b"", []
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        body, at = body + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record.FromString(body)
            items = {(item.nested_key or [item.key])[0]: item.value_json for item in record.history.item}
            body = b""
            if items:
                found.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    return found


@pytest.mark.fault(20, form="start", count=10)
def test_the_real_wandb_without_a_server_loses_nothing(tmp_path, monkeypatch):
    """Online, but the server cannot be reached: offline data of every row, and the run as without it."""
    pytest.importorskip("wandb")
    monkeypatch.setattr(deadlines, "TRACKER", 120)  # a busy machine
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    config = compose(words(tmp_path, "logger=wandb", "logger.mode=online", "eval.final=true"))
    with pytest.warns(PqlWarning, match="wandb is offline: ConnectionError: http://127.0.0.1:9 cannot be reached"):
        summary = Session(config, quiet=True).train()
    assert summary.env_steps == 320
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    told = rows(tmp_path)
    assert len(told) >= 2
    assert "eval/return_mean" in told[-1]
    assert history(path) == told


@pytest.mark.slow
@pytest.mark.fault(20, form="{stage}", count=10)
@pytest.mark.parametrize("stage", ["middle", "end"])
def test_the_real_wandb_whose_server_goes_loses_nothing(tmp_path, monkeypatch, stage):
    """In the middle of the run, or when it ends: all rows are on the disk, and the run ends within 15 s."""
    pytest.importorskip("wandb")
    server, ending = WandbServer(), []
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(deadlines, "TRACKER", 60)  # a busy machine
    real = Session.close_sinks

    def close(session):
        ending.append(time.monotonic())
        if stage == "end":
            server.close()
        real(session)
        ending.append(time.monotonic())

    def watch(session, row):
        if not server.began.wait(20):
            pytest.skip("this machine is so busy that wandb gave up before it was online")
        if stage == "middle" and not ending:
            ending.append(0.0)
            server.close()

    monkeypatch.setattr(Session, "close_sinks", close)
    config = compose(words(tmp_path, "logger=wandb", "logger.mode=online", "budget.env_steps=640"))
    with pytest.warns(PqlWarning, match="wandb's server is unreachable"):
        summary = Session(config, quiet=True, callbacks=[watch]).train()
    assert summary.env_steps == 640
    assert ending[-1] - ending[-2] < 15
    (path,) = (tmp_path / "wandb").glob("run-*/*.wandb")
    written, end = rows(tmp_path), time.monotonic() + 30
    assert len(written) >= 2
    while history(path) != written and time.monotonic() < end:  # wandb's own process writes
        time.sleep(0.1)
    assert history(path) == written


def test_wandb_continues_its_own_run_and_an_agent_s(tmp_path, monkeypatch):
    file = tmp_path / "wandb" / "run-id"
    assert trackers.own_id(file) == trackers.own_id(file) == file.read_text().strip()
    for text in ("short\n", "../../../etc/passwd\n", "x" * 200):
        file.write_text(text)
        assert trackers.own_id(file) != text.strip()
    monkeypatch.setenv("WANDB_RUN_ID", "agents01")
    assert trackers.own_id(file) == "agents01"


@pytest.mark.parametrize("kind", ["trackio", "swanlab"])
def test_trackio_and_swanlab_get_every_row_and_video_by_env_step(tmp_path, fake, monkeypatch, kind):
    imageio = pytest.importorskip("imageio.v2")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    told = a_log(tmp_path / "run")
    film = tmp_path / "film.mp4"
    with imageio.get_writer(film, fps=30, macro_block_size=2) as video:
        video.append_data(np.zeros((16, 16, 3), np.uint8))
    sink = tracker(tmp_path / "run", kind)
    sink.video(film, 640)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink.close()
    (asked,) = fake("init")
    assert (asked["project"], asked["name"], asked["config"]["logger"]["kind"]) == ("pql", "run", kind)
    assert fake("log") == [[row, int(row["steps/env"])] for row in told]
    ((path, head, step),) = fake("video")
    assert (step, fake("finish")) == (640, [None])
    if kind == "trackio":
        assert (asked["space"], asked["resume"], path) == (None, "never", str(film))  # offline: no upload
    else:
        assert (asked["mode"], asked["log_dir"]) == ("offline", str(tmp_path / "run" / "swanlab"))
        assert head == "GIF89a"  # the only kind that swanlab shows


def test_trackers_resume_under_their_own_name_or_id(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "my/space")
    a_log(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    tracker(tmp_path / "run", "trackio", "online", offset=before).close()
    assert fake("log") == []  # of an earlier sitting
    for _ in range(2):
        tracker(tmp_path / "run", "swanlab", "online").close()
    trackio, *swanlab = fake("init")
    assert (trackio["resume"], trackio["space"]) == ("allow", "my/space")
    assert [(s["resume"], s["id"]) for s in swanlab] == [("allow", swanlab[0]["id"])] * 2
    monkeypatch.delenv("TRACKIO_SPACE_ID")
    with pytest.warns(PqlWarning, match="trackio is local: neither TRACKIO_SPACE_ID nor TRACKIO_SERVER_URL is set"):
        tracker(tmp_path / "run", "trackio", "online").close()


def test_the_example_of_a_logger_in_the_docs_receives_every_row(tmp_path, monkeypatch):
    """docs/logging.md: its class as an installed package, used by name."""
    text = (ROOT / "docs" / "logging.md").read_text()
    code = re.search(r"```python\n# csv_logger\.py\n(.*?)```", text, re.S)[1]
    point = re.search(r'```toml\n\[project\.entry-points\."(pql\.loggers)"\]\n(\w+) = "(.*?)"\n```', text)
    assert len(code.splitlines()) <= 20
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "csv_logger.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    entry = importlib.metadata.EntryPoint(point[2], point[3], point[1])
    found = lambda group: [entry] if group == point[1] else []  # noqa: E731
    for module in ("pql.config.schema", "pql.config.layers", "pql.run.log.sinks"):
        monkeypatch.setattr(f"{module}.entry_points", found)
    with pytest.raises(ConfigError, match=r"logger=csw: expected one of csv, none, .* \(did you mean csv\?\)"):
        compose(words(tmp_path / "run", "logger=csw"))
    Session(compose(words(tmp_path / "run", "logger=csv", "eval.final=true")), quiet=True).train()
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert lines[0] == "steps/env,time/seconds,train/return_mean,eval/return_mean"
    assert [float(line.split(",")[0]) for line in lines[1:]] == [row["steps/env"] for row in rows(tmp_path / "run")]
    assert float(lines[-1].split(",")[3]) == pytest.approx(rows(tmp_path / "run")[-1]["eval/return_mean"])
    broken = importlib.metadata.EntryPoint("csv", "no_such_module:Csv", "pql.loggers")
    monkeypatch.setattr("pql.run.log.sinks.entry_points", lambda group: [broken])
    with pytest.raises(ConfigError, match="logger=csv: expected a logger that can be imported: no_such_module:Csv"):
        Session(compose(words(tmp_path / "other", "logger=csv")), quiet=True)
    assert not (tmp_path / "other").exists()


# -- device values --------------------------------------------------------------------------------------------------


def test_pending_values_fill_the_row():
    values = {"a": torch.tensor(1.5), "b": torch.tensor(7, dtype=torch.int64), "c": torch.tensor(True)}
    pending = log.Pending(values, {"x": 1.0})
    values["a"].add_(1)  # the owner continues; the row is of the moment of the drain
    assert pending.ready()
    assert pending.collect() == {"x": 1.0, "a": 1.5, "b": 7.0, "c": 1.0}


def test_means_of_windows_without_episodes_are_left_out(tmp_path):
    session = Session(compose(words(tmp_path)), quiet=True)
    seen = []
    session.callbacks.append(lambda session, row: seen.append(row))
    for episodes in (0.0, 2.0):
        session.write(
            {"steps/env": 1, "train/episodes": episodes, "train/return_mean": 0.0, "episode/x": 0.0, "loss/v": 1}
        )
    session.closing.close()
    assert [set(row) for row in seen] == [
        {"steps/env", "loss/v"},
        {"steps/env", "train/episodes", "train/return_mean", "episode/x", "loss/v"},
    ]
