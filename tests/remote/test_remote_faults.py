"""Rows 21 to 23 of the fault matrix: killed or stopped actors, and a learner that restarts."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import bare
import pytest
import torch
from remotes import acting, remote, wait_until
from run_files import WORDS

from pql.cli.main import main
from pql.engine.interrupt import Interrupt
from pql.remote.actor.sims import make_sim
from pql.remote.env import Remote


@pytest.fixture
def actor(tmp_path):
    """Starts ``pql actor`` with two environments in a process without torch; at the end none is left."""
    command, started = bare.command(tmp_path), []

    def start(task="film:Film", *words):
        address = f"unix:{tmp_path}/s"
        words = ["actor", "--connect", address, "--task", task, "--num-envs", "2", *words]
        started.append(subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def film():
    return make_sim("film:Film", 2, {})


@pytest.mark.fault(21)
def test_a_killed_actor_s_slots_are_free_within_two_seconds(actor, tmp_path):
    """Row 21: another actor then has them, and begins an episode there."""
    with remote(f"unix:{tmp_path}/s", [film()], 4) as env:
        process = actor()
        wait_until(lambda: env.table.live == 2)
        env.reset(0)
        slots = env.table.peers[1].slots
        process.kill()
        assert wait_until(lambda: env.table.live == 1) < 2.0
        before = time.monotonic()
        actor()
        wait_until(lambda: env.table.live == 2)
        assert (env.table.peers[2].slots == slots).all()
        assert time.monotonic() - before < 20  # its start, on a busy machine
        (taken,) = env.table.take_all(10)[-1:]
        assert taken.rows.flags is None  # first observations: rows that begin an episode


@pytest.mark.fault(22)
def test_a_stopped_actor_is_noticed_within_fifteen_seconds_and_comes_back(actor, tmp_path):
    """Row 22: it takes no CPU while this waits."""
    with remote(f"unix:{tmp_path}/s", [film()], 4) as env:
        process = actor()
        wait_until(lambda: env.table.live == 2)
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: env.table.live == 1, 25) < 16.0
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: env.table.admitted == 3)
    assert process.wait(10) == 0
    assert "connected" in process.stderr.read()


@pytest.mark.fault(23)
def test_actors_come_back_to_a_learner_that_was_killed(actor, tmp_path):
    """Row 23: with a new run, from the beginning of an episode."""
    address, process = f"unix:{tmp_path}/s", actor()
    env = Remote(2, listen=address)
    first = env.reset(0)
    run = env.table.peers[0].run_id
    env.step(first["policy"][:, 0, 0, 0].long() * 0)
    env.server._on_loop(env.server._server.stop(None))  # no actor sends a goodbye
    env.server._stop_loop()
    again = Remote(2, listen=address)
    obs = again.reset(0)
    assert again.table.peers[0].run_id != run
    assert (obs["policy"] == first["policy"]).all()
    again.close()
    assert process.wait(10) == 0


@pytest.mark.fault(30)
@pytest.mark.parametrize("at", [1, 3])
def test_an_actor_whose_simulator_hangs_is_dropped_and_ends(actor, tmp_path, capfd, at):
    """Row 30: it still answers pings. The other actors' steps continue, and only present environments are counted."""
    limits = {"step_seconds": 1.0, "start_seconds": 1.5}
    with remote(f"unix:{tmp_path}/s", [film()], 4, **limits) as env:
        process = actor("film:Film", f"hangs_at={at}")
        wait_until(lambda: env.table.live == 2)
        env.reset(0)
        action = torch.zeros(4, dtype=torch.int64)
        for _ in range(at - 1):
            assert env.step(action).valid.all()
        assert env.step(action).valid.sum() == 2
        assert env.measures() == {"remote/actors": 1, "remote/envs": 2, "remote/admitted": 2}
        assert env.step(action).valid.sum() == 2
        said = process.communicate(timeout=60)[1].splitlines()
    setting = "1.5 s (task.kwargs.start_seconds" if at == 1 else "1 s (task.kwargs.step_seconds"
    assert process.returncode == 1
    assert said[-1] == f"pql: the simulator film has made no progress for {setting} of the learner)"
    assert any("time.sleep(1000)" in line for line in said)
    assert f"environments) has not answered for {setting})" in capfd.readouterr().err


def test_a_simulator_that_rests_between_orders_does_not_hang(tmp_path):
    """The clock runs from an order to its answer."""
    with remote(f"unix:{tmp_path}/s", [film()], 2, step_seconds=0.3, start_seconds=0.3) as env:
        env.reset(0)
        action = torch.zeros(2, dtype=torch.int64)
        for _ in range(3):
            assert env.step(action).valid.all()
            time.sleep(0.5)
        assert env.measures()["remote/admitted"] == 1


@pytest.mark.parametrize(("name", "words"), [("gymnasium", ["id=CartPole-v1"]), ("atari", ["game=breakout"])])
def test_an_actor_needs_no_torch(name, words, tmp_path):
    pytest.importorskip({"gymnasium": "gymnasium", "atari": "ale_py"}[name])
    address = f"unix:{tmp_path}/s"
    command = bare.command(tmp_path, "gymnasium", name)
    words = ["actor", "--connect", address, "--task", name, "--num-envs", "2", *words]
    process = subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True)
    try:
        env = Remote(2, listen=address, timeout=60)
        obs = env.reset(0)
        for _ in range(3):
            step = env.step(obs["policy"].flatten(1)[:, 0].long() * 0)
        assert step.valid.all()
        env.close()
        assert process.wait(20) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--task", "pendulum"], "--task=pendulum"),
        (["--task", "gymnasiun"], "did you mean gymnasium"),
        (["--task", "film:Film", "lenght=3"], "lenght=3: expected one of the keywords length, hangs_at"),
        (["--task", "film:Film", "--connect", "nowhere"], "--connect=nowhere: expected HOST:PORT"),
    ],
)
def test_wrong_words_are_one_line(words, why, tmp_path):
    command = [*bare.command(tmp_path), "actor", "--connect", "127.0.0.1:1", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.fault(30)
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_a_signal_ends_the_wait_for_the_first_actor(tmp_path, capfd, signals):
    """Long before the wait would end by itself, and nothing is left."""

    def press():
        wait_until(Path(tmp_path / "s").exists)
        for number in signals:
            os.kill(os.getpid(), number)

    threading.Thread(target=press).start()
    words = [w for w in WORDS if not w.startswith("task=")]
    words += ["task=remote", f"task.kwargs.listen=unix:{tmp_path}/s", "task.kwargs.timeout=60"]
    before = time.monotonic()
    assert main(["train", *words, "algo=sac", f"run_dir={tmp_path}/run"]) == 130
    assert time.monotonic() - before < 50
    assert capfd.readouterr().err.endswith("pql: interrupted: no actor had connected: nothing to save\n")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_to_end_waits_for_no_actor(tmp_path):
    """Steps that all wait for everybody (``ppo``'s) become fillers at once, so that the tick ends and is saved."""
    address = f"unix:{tmp_path}/s"
    with acting(address, film(), patience=0.1), Interrupt() as interrupt:
        env = Remote(4, listen=address)
        env.reset(0)
        action = torch.zeros(4, dtype=torch.int64)
        assert env.step(action).valid.tolist() == [True, True, False, False]
        env.table.leave(env.table.peers[0])
        interrupt.asked = True
        for _ in range(100):  # seconds each, otherwise
            assert not env.step(action).valid.any()
        env.close()
