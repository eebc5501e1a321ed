"""Deadlines: the named cause, the end of the process, and that slow progress is not a hang."""

import importlib
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import small_config, ticks
from run_files import points, resume, run, words

from pql.cli.main import main
from pql.config import PlacementConfig
from pql.contract.registry import register
from pql.engine import deadlines, watchdog
from pql.engine.deadlines import Limit
from pql.engine.executors import Inline, Streams, Threads
from pql.engine.interrupt import Interrupt
from pql.engine.watchdog import Timed, Watchdog, stepped, touch, watching
from pql.envs.toy import Counter
from pql.errors import HungError, RunError, first_line, with_cause
from pql.remote.process.child import ChildProcess
from pql.run.build import build
from pql.run.evaluation import EvaluationPlan, evaluate_saved
from pql.run.evaluator import Evaluator
from pql.run.play import record_video
from pql.run.policy import fresh_policy

SHORT = Limit(0.2, "placement.watchdog_seconds")
LONG = Limit(1000.0, "placement.start_seconds")


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(deadlines, "LOOK", 0.02)


@pytest.fixture
def guarded():
    """A watchdog that breaks off what the main thread waits for."""
    with Interrupt() as interrupt, Watchdog(interrupt):
        yield


def cause(caught):
    """The last line."""
    return str(caught.value).splitlines()[-1]


def forever(*_):
    time.sleep(1000)


@pytest.mark.fault(7)
def test_a_wait_is_broken_off_and_named_with_all_stacks(guarded):
    with pytest.raises(HungError) as caught, watching("worker v", SHORT):
        forever(touch("the simulator toy"))
    assert cause(caught) == (
        "worker v has made no progress for 0.2 s, in the simulator toy (placement.watchdog_seconds)"
    )
    assert "--- MainThread\n" in str(caught.value)
    assert "time.sleep(1000)" in str(caught.value)


def test_progress_begins_the_deadline_anew(guarded):
    with watching("worker v", SHORT):
        for _ in range(8):
            time.sleep(0.05)
            touch()
    time.sleep(0.3)  # and nothing is looked after any more


def test_what_surrounds_a_watch_has_its_time_afterwards(guarded):
    with watching("the run", SHORT):
        with watching("the save", LONG):
            time.sleep(0.3)
        touch()
        with pytest.raises(HungError, match="the run has made no progress"):
            forever()


def test_of_two_the_one_entered_last_breaks_off():
    """The other, of a run that this one is inside of, has no handler in place and would end the process."""
    late = pytest.raises(HungError, match="worker v has made no progress")
    with Watchdog(), Interrupt() as interrupt, Watchdog(interrupt), late, watching("worker v", SHORT):
        forever()


def test_after_the_first_step_the_limit_is_that_of_steps(guarded):
    def step():
        time.sleep(0.3)  # compiles
        stepped()

    with pytest.raises(HungError) as caught, watching("the warm-up", LONG, SHORT):
        forever(step())
    assert cause(caught) == "the warm-up has made no progress for 0.2 s (placement.watchdog_seconds)"


def test_the_thread_ends_with_it(threads_left):
    with Watchdog():
        assert threads_left() == ["pql-watchdog"]
    assert not threads_left()
    with watching("nobody looks", Limit(0.0, "")) as watch:
        assert watch is None


# A main thread that is stuck in C: a mutex that it has locked itself. Its child, which holds its output open, is to
# go, too.
STUCK = """
import ctypes, multiprocessing, sys, time
from pql.engine import deadlines, watchdog
from pql.engine.interrupt import Interrupt
deadlines.UNWIND = 0.2
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
child.start()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with Interrupt() as interrupt, watchdog.Watchdog(interrupt):
    with watchdog.watching("the reset of toy", deadlines.Limit(0.2, "placement.start_seconds")):
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.fault(7)
def test_what_cannot_be_broken_off_ends_the_process():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.endswith("\npql: the reset of toy has made no progress for 0.2 s (placement.start_seconds)\n")
    assert 'File "<string>", line 12, in <module>' in done.stderr


# Within its limit of 2 s for as long as it runs, and stopped for 3 s in between.
PAUSED = """
import time
from pql.engine import deadlines, watchdog
deadlines.LOOK, deadlines.STOPPED = 0.02, 0.3
with watchdog.Watchdog(), watchdog.watching("a step", deadlines.Limit(2.0, "placement.watchdog_seconds")):
    print("begun", flush=True)
    for _ in range(4):
        time.sleep(0.1)
print("done")
"""


def test_the_time_for_which_a_process_is_stopped_does_not_count():
    with subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"begun\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        child.send_signal(signal.SIGCONT)
        out, errors = child.communicate(timeout=100)
    assert (child.returncode, out, errors) == (0, b"done\n", b"")


def test_the_clock_of_deadlines_leaves_out_stops(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = watchdog.RunningClock()
    read = []
    for now in (100.0, 104.0, 109.0, 209.0, 210.0, 215.5, 216.0):  # noqa: B007 (the clock reads it)
        read.append(clock() - 100.0)
    assert read == [0.0, 4.0, 9.0, 9.0, 10.0, 10.0, 10.5]


@pytest.fixture
def stop(monkeypatch):
    """Advance the clock by 1,000 s at each call, as if the process had been stopped for as long."""
    monkeypatch.setattr(watchdog.clock, "_seen", watchdog.clock._seen)  # restored, as others use this clock
    plain, calls = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: plain() + 1000.0 * len(calls))
    return lambda: calls.append(None)


def test_waits_read_the_clock_more_often_than_a_stop_lasts():
    assert 2 * max(deadlines.LOOK, deadlines.IDLE) < deadlines.STOPPED


def test_a_stop_does_not_count_while_worker_threads_are_waited_for(monkeypatch, stop):
    monkeypatch.setattr(deadlines, "IDLE", 0.02)

    def job():
        for _ in range(3):
            time.sleep(0.1)
            stop()
        time.sleep(0.1)

    threads = Threads(("a",), watchdog=20.0)
    assert list(threads.run({"a": job})) == ["a"]
    threads.close()


def test_a_stop_does_not_count_while_the_device_is_waited_for(stop):
    answers = iter((False, False, True))
    end = SimpleNamespace(query=lambda: stop() or next(answers))
    assert Streams({}, 20.0)._settle({"v": (SimpleNamespace(elapsed_time=lambda _: 1500.0), end)}) == {"v": 1.5}


def test_a_stop_does_not_count_while_a_simulators_process_is_waited_for(stop):
    answers = iter(([], [], [1]))

    def poll(milliseconds):
        return stop() or [] if milliseconds else next(answers)

    far = SimpleNamespace(_limit=(20.0, "task.process.step_seconds"), process=SimpleNamespace(poll=lambda: None))
    ChildProcess._look_after(far, SimpleNamespace(poll=poll))
    assert next(answers, None) is None


# -- a run's parts --------------------------------------------------------------------------------------------------


def made(**limits):
    return build(small_config(algo={"schedule": "lockstep"}, placement={**limits, "executor": "inline"}))


def begun(parts, count):
    """After its warm-up and some ticks."""
    parts.start()
    parts.warm_up(16)
    parts.begin()
    return ticks(parts, count)


@pytest.mark.fault(30, form="reset", count=20)
def test_a_reset_that_hangs(guarded):
    parts = made(watchdog_seconds=0.1, start_seconds=0.3)
    parts.env.reset = forever
    with pytest.raises(HungError) as caught:
        parts.start()
    assert cause(caught) == "the reset of pendulum has made no progress for 0.3 s (placement.start_seconds)"


def hanging(env, at):
    """``env``, whose step number ``at`` never returns."""
    plain, count = env.step, iter(range(1, 10**9))
    env.step = lambda action: forever() if next(count) == at else plain(action)


@pytest.mark.fault(30, form="inline", count=10)
@pytest.mark.parametrize(("at", "who"), [(3, "the warm-up"), (20, "worker collector")])
def test_a_step_that_hangs_under_lockstep(guarded, at, who):
    parts = made(watchdog_seconds=0.5)
    hanging(parts.env, at)
    with pytest.raises(HungError) as caught:
        begun(parts, 20)
    said = f"{who} has made no progress for 0.5 s, in the simulator pendulum (placement.watchdog_seconds)"
    assert cause(caught) == said
    assert "in forever" in str(caught.value)


@pytest.mark.fault(7, 30)
def test_an_update_that_hangs_under_lockstep(guarded):
    parts = begun(made(watchdog_seconds=0.3), 2)
    parts.workers["p"].job = forever
    with pytest.raises(HungError) as caught:
        ticks(parts, 1)
    assert cause(caught) == "worker p has made no progress for 0.3 s (placement.watchdog_seconds)"


def test_a_long_first_tick_compiles_and_a_long_job_that_gets_on_does_not_hang(guarded):
    alone = Inline(step=SHORT, start=LONG)
    alone.run({"collector": partial(time.sleep, 0.3)})

    def job():
        for _ in range(8):
            time.sleep(0.05)
            touch()

    alone.run({"collector": job})
    with pytest.raises(HungError, match="worker collector"):
        alone.run({"collector": forever})
    threads = Threads(("a", "b"), watchdog=0.3, start=1000.0)
    threads.run({"a": partial(time.sleep, 0.5), "b": partial(time.sleep, 0)})
    release = threading.Event()
    with pytest.raises(HungError) as caught:
        threads.run({"a": lambda: release.wait(60), "b": partial(time.sleep, 0)})
    assert cause(caught) == "worker a has not finished its tick in 0.3 s (placement.watchdog_seconds)"
    release.set()
    threads.close()


def test_the_cause_stays_the_last_line():
    assert first_line(ValueError("\nwhy\nand how")) == "ValueError: why"
    assert with_cause("pql: ", "why") == "pql: why"
    assert with_cause("pql: ", "a\nb\nwhy") == "a\nb\npql: why"


# -- whole runs -----------------------------------------------------------------------------------------------------


class Stuck(Counter):
    """With two environments, as in an evaluation, the third step blocks until it is released."""

    release = threading.Event()
    steps = 0

    def step(self, action):
        self.steps += self.spec.num_envs == 2
        if self.steps == 3:
            self.release.wait(60)
        return super().step(action)


@pytest.fixture
def stuck():
    register("stuck", lambda num_envs, device: Stuck(num_envs, device, episode_length=10**6, terminate_every=0))
    Stuck.release.clear()
    yield ("task=env", "task.name=stuck", "placement.watchdog_seconds=1", "eval.final=true")
    Stuck.release.set()


@pytest.mark.fault(30, form="evaluator", count=10)
@pytest.mark.parametrize("beside", [False, True])
def test_an_evaluation_that_hangs_ends_the_run_saved(tmp_path, stuck, beside):
    """At its end, or in the middle of an endless run."""
    endless = ("budget.env_steps=null", "budget.seconds=1000", "eval.every_seconds=0.01") if beside else ()
    with pytest.raises(HungError) as caught:
        run(*words(tmp_path, *stuck, *endless))
    said = "the evaluation has made no progress for 1 s, in the simulator counter (placement.watchdog_seconds)"
    assert cause(caught) == said
    assert "--- pql-evaluator" in str(caught.value)
    assert "self.release.wait(60)" in str(caught.value)
    assert len(points(tmp_path)) == 1
    last = int(points(tmp_path)[-1].name.removeprefix("tick-"))
    steps, calm = 16 * (8 + last + 4), ("budget.seconds=null", "eval.final=false", "eval.every_seconds=null")
    assert resume(tmp_path, f"budget.env_steps={steps}", *calm).env_steps == steps


@pytest.mark.fault(30)
def test_an_evaluation_on_the_run_s_own_environments_that_hangs(tmp_path):
    env = Counter(16, "cpu", episode_length=10**6, terminate_every=0)
    hanging(env, 25)  # 20 are the run's
    import pql

    more = [w for w in words(tmp_path) if not w.startswith(("task=", "num_envs=", "eval.final"))]
    with pytest.raises(HungError, match="the evaluation has made no progress for 1 s"):
        pql.train(*more, "placement.watchdog_seconds=1", env=env, quiet=True)
    assert len(points(tmp_path)) == 1


@pytest.mark.fault(30)
def test_an_evaluator_s_simulator_whose_close_hangs(guarded):
    env = Counter(2, "cpu")
    policy = fresh_policy(small_config(), env.spec, "cpu")
    one = Evaluator(env, policy, 0, step=SHORT, start=SHORT)
    env.close = forever
    with pytest.raises(HungError) as caught:
        one.close()
    assert cause(caught) == "closing counter has made no progress for 0.2 s (placement.watchdog_seconds)"


# -- commands that are no run ---------------------------------------------------------------------------------------


@pytest.mark.fault(30)
def test_each_call_of_an_environment_has_its_deadline():
    place = PlacementConfig(watchdog_seconds=0.2, start_seconds=0.4)
    env = Timed(Counter(4), place)
    assert (env.spec.num_envs, hasattr(env, "render"), hasattr(env, "state_dict")) == (4, False, True)
    env.reset(0)
    action = torch.zeros(4, 2)
    for name, seconds, setting in (("step", 0.4, "start"), ("step", 0.2, "watchdog"), ("reset", 0.4, "start")):
        whole = getattr(env._env, name)
        setattr(env._env, name, forever)
        with pytest.raises(HungError) as caught, watchdog.guarded():
            getattr(env, name)(action)
        what = f"the {name} of counter has made no progress for {seconds} s (placement.{setting}_seconds)"
        assert cause(caught) == what
        setattr(env._env, name, whole)
        env.step(action)


def test_outside_a_run_signals_do_what_they_did(ctrl_c):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with watchdog.guarded():
        assert signal.getsignal(signal.SIGTERM) == before[1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture
def played(stuck, tmp_path):
    """A run of a simulator that hangs where there are two environments."""
    run(*words(tmp_path, *stuck[:3]))
    return tmp_path


@pytest.mark.fault(30)
def test_a_step_that_hangs_in_an_evaluation_of_a_run(played, threads_left):
    with pytest.raises(HungError) as caught:
        evaluate_saved(played, EvaluationPlan(2, 2))
    said = "the evaluation has made no progress for 1 s, in the simulator counter (placement.watchdog_seconds)"
    assert cause(caught) == said
    assert not threads_left()


@pytest.mark.fault(30)
def test_a_reset_that_hangs_while_it_is_filmed(played, tmp_path, monkeypatch, threads_left):
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setattr(Stuck, "reset", forever)
    monkeypatch.setattr(watchdog, "start_limit", lambda place: SHORT)
    with pytest.raises(HungError, match=r"the reset of counter has made no progress for 0.2 s"):
        record_video(played, tmp_path / "x.mp4")
    assert not threads_left()


@pytest.mark.fault(30)
def test_a_reset_that_hangs_before_the_doctor(stuck, monkeypatch, capsys):
    monkeypatch.setattr(Stuck, "reset", forever)
    limits = ("placement.watchdog_seconds=0.5", "placement.start_seconds=1")
    assert main(["doctor", "--env", "stuck", *limits]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "pql: the reset of counter has made no progress for 1 s (placement.start_seconds)"


@pytest.mark.fault(30, form="{command}", count=20)
@pytest.mark.parametrize(
    ("command", "call"), [("report", "pql.reports.runs.find"), ("export", "pql.run.store.checkpoint.find")]
)
def test_a_report_or_an_export_that_hangs_is_named_and_ends_at_ctrl_c(
    tmp_path, monkeypatch, capsys, ctrl_c, command, call
):
    """As on a network drive that is gone."""
    if command == "report":
        pytest.importorskip("matplotlib")
    for name in ("pql.reports.page", "pql.reports.symptoms", "pql.run.export.writer"):
        importlib.import_module(name)  # which takes longer than this deadline
    monkeypatch.setattr(call, forever)
    monkeypatch.setattr(deadlines, command.upper(), 0.4)
    words = [command, str(tmp_path), *(["formats=pt2"] if command == "export" else [])]
    assert main(words) == 1
    *above, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"pql: the {command} has made no progress for 0.4 s \(the limit of an? {command}\)", last)
    assert "in forever" in "".join(above)
    monkeypatch.setattr(deadlines, command.upper(), 60.0)
    pressed = []

    def press():
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Timer(0.1, press).start()
    assert main(words) == 130
    assert time.monotonic() - pressed[0] < 10  # 2 s, and what a busy machine adds


def test_an_evaluation_that_fails_ends_the_run_saved(tmp_path):
    class Broken(Counter):
        def step(self, action):
            if self.spec.num_envs == 2:
                raise ValueError("no more\nof it")
            return super().step(action)

    register("broken", lambda num_envs, device: Broken(num_envs, device))
    endless = ("budget.env_steps=null", "budget.seconds=1000", "eval.every_seconds=0.01")
    with pytest.raises(RunError, match=r"(?m)the evaluator failed: ValueError: no more$"):
        run(*words(tmp_path, "task=env", "task.name=broken", *endless))
    assert len(points(tmp_path)) == 1
