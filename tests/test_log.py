"""Where the numbers go, and that no sink can hurt a run."""

import dataclasses
import io
import json
import re
import sys
import threading
import time
import types

import pytest
import torch
from rich.console import Console as RichConsole
from runs import rows, words

from pql import log
from pql.compose import compose
from pql.config import BudgetConfig
from pql.errors import ConfigError, PqlWarning
from pql.rundir import Summary
from pql.session import Session

ROW = {
    "time/seconds": 50.0, "steps/env": 20_000, "updates/v": 2_400, "updates/p": 1_200, "ratio/v_per_step": 8.0,
    "ratio/p_per_v": 0.5, "lag/policy_ticks": 1, "throughput/env_steps_per_s": 4_321.0,
    "throughput/updates_per_s": 765.0, "busy/collector": 0.25, "busy/v": 0.5, "busy/p": 0.125,
    "train/return_mean": -123.45, "memory/host_gib": 1.25,
}  # fmt: skip
EVAL = {"time/seconds": 40.0, "steps/env": 16_000.0, "eval/return_mean": 77.7, "eval/return_iqm": 70.0}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


# -- console --------------------------------------------------------------------------------------------------------


def test_plain_lines_where_nobody_looks():
    out = io.StringIO()
    console = log.Console("pql on x", {"env_steps": 80_000.0}, console=RichConsole(file=out, width=400))
    console.write(ROW)
    console.write({**ROW, "time/seconds": 55.0})  # within ten seconds of the last: not told
    console.write(EVAL)
    console.write({**ROW, "time/seconds": 65.0, "memory/gpu_gib": 3.0})
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "time 50 s, 150 s left | env steps 20,000  (4,321/s) | updates v 2,400, p 1,200  (765/s) | "
        "ratios v/step 8, p/v 0.5, lag 1 | return train -123.5, eval - | busy collector 25%, v 50%, p 12% | "
        "memory 1.25 GiB"
    )
    assert len(lines) == 3
    assert lines[1].startswith("time 55 s")  # not back to when the evaluation was asked for
    assert "eval 77.7" in lines[1]
    assert "GPU 3.00 GiB" in lines[2]
    assert "\x1b" not in out.getvalue()


def test_a_panel_on_a_terminal():
    out = io.StringIO()
    rich = RichConsole(file=out, force_terminal=True, width=120)
    console = log.Console("pql on x", {"seconds": 240.0}, console=rich)
    assert console.live is not None
    console.write(ROW)
    console.write(EVAL)
    console.close()
    text = plain(out.getvalue())
    for part in (
        "pql on x", "20,000  (4,321/s)", "v 2,400, p 1,200  (765/s)", "v/step 8, p/v 0.5, lag 1",
        "train -123.5, eval 77.7", "50 s, 190 s left", "1.25 GiB", "collector 25%, v 50%, p 12%",
    ):  # fmt: skip
        assert part in text, part
    assert "\x1b[?25h" in out.getvalue()  # the cursor is back
    assert console.live is None


@pytest.mark.parametrize(
    ("budget", "left"),
    [
        ({"seconds": 60.0}, 10.0),
        ({"env_steps": 40_000.0}, 50.0),
        ({"seconds": 60.0, "env_steps": 40_000.0}, 10.0),
        ({"seconds": 5.0}, 0.0),
        ({"target_return": 5.0}, None),
    ],
)
def test_the_time_left_is_that_of_the_budget_that_ends_first(budget, left):
    console = log.Console("", budget, console=RichConsole(file=io.StringIO()))
    console.write(ROW)
    assert console._eta() == left


def test_what_is_said_is_not_taken_for_markup():
    out = io.StringIO()
    log.Console("", {}, console=RichConsole(file=out)).say("hidden=[64,64] [bold]x[/bold] :smile:")
    assert out.getvalue() == "hidden=[64,64] [bold]x[/bold] :smile:\n"


def test_a_closed_pipe_does_not_end_a_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = log.Console("", {}, console=RichConsole(file=Gone()))
    console.say("nobody reads this")
    console.write(ROW)


def test_closing_words_name_the_worker_that_bounds_the_tick():
    summary = Summary("runs/x", -1.25, -1.5, 16, 50.0, 20_000, 2_400, 1_200, "runs/x/checkpoints/last")
    busy = {"collector": 5.0, "v": 9.0, "p": 1.0}
    text = log.closing_words(summary, busy, 10.0, BudgetConfig(seconds=50.0, env_steps=20_000))
    assert "done: return -1.2 (IQM -1.5) over 16 episodes" in text
    assert "the tick is bounded by v (busy: collector 50%, v 90%, p 10%): a smaller critic or batch" in text
    assert "pql resume runs/x budget.seconds=100 budget.env_steps=40000" in text
    full = dataclasses.replace(summary, return_median=-1.0, length_mean=12.0, success=0.25)
    text = log.closing_words(full, busy, 10.0, BudgetConfig(seconds=50.0))
    assert "done: return -1.2 (median -1.0, IQM -1.5), success 25% over 16 episodes of 12.0 steps" in text
    stopped = Summary("runs/x", None, None, 0, 50.0, 20_000, 2_400, 1_200, "c", interrupted=True)
    text = log.closing_words(stopped, busy, 10.0, BudgetConfig(seconds=500.0))
    assert text.startswith("interrupted, saved: not evaluated")
    assert text.endswith("pql resume runs/x")


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


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Session(compose(words(tmp_path, "logger=tensorboard", "budget.env_steps=1600")), quiet=True).train()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    told = [(e.step, e.value) for e in events.Scalars("ratio/v_per_step")]
    assert told == [(row["steps/env"], row["ratio/v_per_step"]) for row in rows(tmp_path)]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_refused_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.delitem(sys.modules, kind, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"logger={kind}: expected the package '{kind}'.*pip install 'pql\[{kind}\]'"
    ):
        Session(compose(words(tmp_path, f"logger={kind}")), quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault
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
    with pytest.warns(PqlWarning, match="a log is incomplete, the run goes on: Flaky: OSError: No space") as told:
        sinks.write({"x": 0.0})
    for i in range(1, 4):
        sinks.write({"x": float(i)})
    assert (len(told), flaky.tried, len(kept)) == (1, 4, 4)
    sinks.close()
    assert flaky.closed


# -- wandb ----------------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self):
        self.logged, self.metrics, self.finished = [], [], False

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, row, **options):
        assert "step" not in options  # wandb drops rows whose step is below the last one's
        self.logged.append(row)

    def finish(self):
        self.finished = True


def fake_wandb(monkeypatch, init) -> None:
    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_wandb_is_offline_and_gets_every_row(tmp_path, monkeypatch):
    run, asked = FakeRun(), {}
    fake_wandb(monkeypatch, lambda **options: asked.update(options) or run)
    Session(compose(words(tmp_path, "logger=wandb", "eval.final=true", "seed=4")), quiet=True).train()
    assert (asked["mode"], asked["project"], asked["dir"]) == ("offline", "pql", str(tmp_path))
    assert asked["config"]["seed"] == 4
    assert [row["steps/env"] for row in run.logged] == [row["steps/env"] for row in rows(tmp_path)]
    assert run.metrics == [("*", "steps/env")]
    assert run.finished


@pytest.mark.fault
@pytest.mark.parametrize("stage", ["init", "log", "finish"])
def test_wandb_that_raises_does_not_stop_a_run(tmp_path, monkeypatch, stage):
    run = FakeRun()

    def fail(*args, **kwargs):
        raise ConnectionError("no server")

    fake_wandb(monkeypatch, fail if stage == "init" else lambda **options: run)
    setattr(run, stage, fail)
    with pytest.warns(PqlWarning, match="wandb stopped, the run goes on: ConnectionError: no server"):
        summary = Session(compose(words(tmp_path, "logger=wandb")), quiet=True).train()
    assert summary.env_steps == 320
    assert rows(tmp_path)


@pytest.mark.fault
def test_wandb_that_hangs_does_not_slow_a_run(tmp_path, monkeypatch):
    release = threading.Event()
    fake_wandb(monkeypatch, lambda **options: release.wait(60) and FakeRun())
    sink = log.Wandb(tmp_path, "pql", "online", {}, patience=0.2)
    start = time.perf_counter()
    for _ in range(1000):
        sink.write(ROW)
    assert time.perf_counter() - start < 0.5
    sink.close()
    assert 0.15 < time.perf_counter() - start < 5
    release.set()


def test_rows_for_a_wandb_that_has_gone_are_not_kept(tmp_path, monkeypatch):
    fake_wandb(monkeypatch, lambda **options: 1 / 0)
    sinks: list[log.Wandb] = []

    def start():
        sinks.append(log.Wandb(tmp_path, "pql", "offline", {}))
        sinks[0].thread.join(5)

    with pytest.warns(PqlWarning, match="ZeroDivisionError"):
        start()
    sinks[0].write(ROW)
    assert sinks[0].rows.empty()


# -- device values --------------------------------------------------------------------------------------------------


def test_pending_values_fill_the_row():
    values = {"a": torch.tensor(1.5), "b": torch.tensor(7, dtype=torch.int64), "c": torch.tensor(True)}
    pending = log.Pending(values, {"x": 1.0})
    values["a"].add_(1)  # the owner goes on; the row is of the moment it was drained
    assert pending.ready()
    assert pending.collect() == {"x": 1.0, "a": 1.5, "b": 7.0, "c": 1.0}


def test_means_of_windows_without_episodes_are_left_out(tmp_path):
    session = Session(compose(words(tmp_path)), quiet=True)
    seen = []
    session.callbacks.append(lambda session, row: seen.append(row))
    for episodes in (0.0, 2.0):
        session._write(
            {"steps/env": 1, "train/episodes": episodes, "train/return_mean": 0.0, "episode/x": 0.0, "loss/v": 1}
        )
    session.closing.close()
    assert [set(row) for row in seen] == [
        {"steps/env", "loss/v"}, {"steps/env", "train/episodes", "train/return_mean", "episode/x", "loss/v"},
    ]  # fmt: skip
