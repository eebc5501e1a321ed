"""Rows 21 to 23 of the fault matrix: killed or stopped actors, and a learner that restarts."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import bare
import numpy as np
import pytest
import torch
from remotes import Raw, acting, remote, wait_until
from run_files import WORDS, points, words

from pql.cli.main import main
from pql.engine.interrupt import Interrupt
from pql.remote import protocol, server
from pql.remote.actor.sims import make_sim
from pql.remote.env import Remote
from pql.remote.process.far_build import describe_simulator
from pql.remote.slot_table import EMPTY
from pql.run.store.run_dir import read_summary


@pytest.fixture
def actor(tmp_path):
    """Starts ``pql actor`` with two environments in a process without torch; at the end none is left."""
    command, started = bare.command(tmp_path, "gymnasium"), []

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


class Rows:
    """Checks the rows of ``Film``, slot by slot: each continues the one before or begins an episode; none comes twice.

    After a gap an episode begins.
    """

    def __init__(self, env):
        self.env, self.kept = env, 0
        self.last = [None] * env.spec.num_envs
        self.action = torch.zeros(env.spec.num_envs, dtype=torch.int64)

    def reset(self, seed=0):
        newest = self.env.reset(seed)["policy"][:, -1, 0, 0].tolist()
        self.last = [value if there else None for value, there in zip(newest, self.env.present(), strict=True)]

    def step(self):
        """Step once; return which environments are valid."""
        step = self.env.step(self.action)
        newest, final = (obs["policy"][:, -1, 0, 0].tolist() for obs in (step.obs, step.final_obs))
        for i, (valid, first) in enumerate(zip(step.valid.tolist(), step.first.tolist(), strict=True)):
            if not valid:  # nobody there, or an actor's first observation
                self.last[i] = newest[i] if first else None
                continue
            assert self.last[i] is not None
            if first and step.final_ok[i]:
                assert final[i] == self.last[i] + 1
            assert first or newest[i] == self.last[i] + 1, (i, newest[i], self.last[i])
            self.last[i], self.kept = newest[i], self.kept + 1
        return step.valid


@pytest.mark.fault(21, count=8)
def test_a_killed_actor_s_slots_are_free_within_two_seconds(actor, tmp_path, trial):
    """Row 21, with a process; another actor then has its slots, and begins an episode there."""
    rng = random.Random(trial)
    with remote(f"unix:{tmp_path}/s", [film()], 4) as env:
        process, rows = actor(), Rows(env)
        wait_until(lambda: env.table.live == 2)
        rows.reset()
        slots = env.table.actors[1].slots
        for _ in range(rng.randrange(6)):
            assert rows.step().all()
        killer = threading.Timer(rng.random() * 0.05, process.kill)  # while rows are on their way
        killer.start()
        while killer.is_alive():
            rows.step()
        killed = time.monotonic()
        while env.table.live > 1:
            rows.step()
        assert time.monotonic() - killed < 2.0
        actor()
        while env.table.live < 2:
            rows.step()
        assert (env.table.actors[2].slots == slots).all()
        wait_until(lambda: rows.step().all())
        assert rows.step().all()


def break_off(address, run_id, answers, closed):
    """Join, answer so many requests, and close the connection without BYE, as when a process dies."""
    raw, sim = Raw(address), film()
    layout, stacks = protocol.Layout(describe_simulator(sim.spec)), {"policy": 3}
    raw.hello(sim, run_id=run_id)
    assert raw.hear().kind == protocol.WELCOME
    for _ in range(answers):
        order = raw.hear()
        if order.kind == protocol.RESET:
            raw.say(layout.pack_obs(run_id, order.seq, protocol.newest_frames(sim.reset(0), stacks)))
        else:
            step = sim.step(layout.read_action(order.body))
            obs, final = (protocol.newest_frames(frames, stacks) for frames in (step.obs, step.final_obs))
            raw.say(layout.pack_step(run_id, order.seq, step._replace(obs=obs, final_obs=final)))
    closed.append(time.monotonic())
    raw.channel.close()


@pytest.mark.fault(21, cases=(10, 100))
def test_lost_connections_free_their_slots_within_two_seconds(tmp_path, cases):
    """Row 21, in one process: streams that break off before, between and after their answers."""
    rng, address, worst = random.Random(0), f"unix:{tmp_path}/s", 0.0
    with remote(address, [film()], 4) as env:
        rows = Rows(env)
        rows.reset()
        for i in range(cases):
            closed = []
            thread = threading.Thread(target=break_off, args=(address, i + 1, rng.randrange(5), closed))
            thread.start()
            while not closed or env.table.live > 1:
                rows.step()
            worst = max(worst, time.monotonic() - closed[0])
            thread.join()
            rows.step()
            assert env.table.status[2:].tolist() == [EMPTY, EMPTY]
        assert env.table.admitted == 1 + cases
    assert worst < 2.0
    assert rows.kept > 2 * cases


def stop_and_replace(env, processes):
    """Stop the processes, wait until they are noticed, and continue them; return the time until they were noticed."""
    live, admitted = env.table.live, env.table.admitted
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    took = wait_until(lambda: env.table.live == live - len(processes), 25)
    for process in processes:
        process.send_signal(signal.SIGCONT)
    wait_until(lambda: env.table.admitted == admitted + len(processes), 60)
    wait_until(lambda: env.table.live == live)
    return took


@pytest.mark.slow
@pytest.mark.fault(22, cases=(1, 5))
def test_stopped_actors_are_noticed_within_fifteen_seconds_and_come_back(actor, tmp_path, cases):
    """Row 22, with the limits of real runs; actors that take no CPU while this waits, all at once."""
    with remote(f"unix:{tmp_path}/s", [film()], 2 + 2 * cases) as env:
        processes = [actor() for _ in range(cases)]
        wait_until(lambda: env.table.live == 1 + cases, 60)
        assert stop_and_replace(env, processes) < 16.0
    for process in processes:
        assert process.wait(20) == 0
        assert "connected" in process.stderr.read()


@pytest.mark.fault(22, cases=(1, 50))
def test_stopped_actors_are_replaced_again_and_again(actor, tmp_path, monkeypatch, cases):
    """Row 22, with pings forty times as often; the trajectories stay whole."""
    scaled = {"grpc.keepalive_time_ms": 250, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    options = (*(pair for pair in server.OPTIONS if pair[0] not in scaled), *scaled.items())
    monkeypatch.setattr(server, "OPTIONS", options)
    together = min(cases, 5)
    with remote(f"unix:{tmp_path}/s", [film()], 2 + 2 * together) as env:
        processes, rows = [actor() for _ in range(together)], Rows(env)
        wait_until(lambda: env.table.live == 1 + together, 60)
        rows.reset()
        for _ in range(cases // together):
            rows.step()
            assert stop_and_replace(env, processes) < 15.0
            wait_until(lambda: rows.step().all())
    for process in processes:
        assert process.wait(20) == 0


def drop(env):
    """End the server as the kernel does when its process dies: no actor gets a goodbye."""
    env.server._on_loop(env.server._server.stop(None))
    env.server._stop_loop()


@pytest.mark.fault(23, cases=(1, 50))
def test_actors_come_back_to_a_learner_that_was_killed(actor, tmp_path, cases):
    """Row 23: with a new run id, from the beginning of an episode; no row is torn or comes twice."""
    address, process, rng = f"unix:{tmp_path}/s", actor(), random.Random(0)
    seen = set()
    for i in range(cases + 1):
        env = Remote(2, listen=address)
        rows = Rows(env)
        rows.reset(i)
        assert rows.last == [10, 11]
        run = env.table.actors[0].run_id
        assert run not in seen
        seen.add(run)
        for _ in range(rng.randrange(5)):
            assert rows.step().all()
        if i < cases:
            if rng.random() < 0.5:
                env.table.act(np.arange(2), np.zeros(2, np.int64))  # a step is on its way
            drop(env)
    env.close()
    assert process.wait(20) == 0
    assert process.stderr.read().count("next attempt at") >= cases


@pytest.mark.slow
@pytest.mark.fault(23, count=5)
def test_a_killed_learner_resumes_with_the_actors_that_waited(actor, tmp_path, trial):
    """Row 23, with processes: the run reaches its budget after a kill -9 at a random moment, and the actor ends."""
    own = [w for w in words(tmp_path / "run", "algo=sac", "num_envs=2") if not w.startswith(("task=", "algo=pql"))]
    own += ["task=remote", f"task.kwargs.listen=unix:{tmp_path}/s", "checkpoint.every_seconds=0.1"]
    command, process = [sys.executable, "-m", "pql"], actor("gymnasium", "id=Pendulum-v1")
    with subprocess.Popen([*command, "train", *own, "budget.env_steps=100000"], stdout=subprocess.DEVNULL) as learner:
        wait_until(lambda: points(tmp_path / "run"), 60)
        time.sleep(random.Random(trial).random())
        learner.kill()
    at = int(points(tmp_path / "run")[-1].name.partition("-")[2])
    again = [*command, "resume", str(tmp_path / "run"), f"budget.env_steps={2 * at + 400}", "--trust"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert read_summary(tmp_path / "run")["env_steps"] >= 2 * at + 400
    assert process.wait(20) == 0
    assert process.stderr.read().count("connected") == 2


@pytest.mark.fault(30, form="actor's simulator", count=10)
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


@pytest.mark.fault(30, form="first actor", count=10)
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_a_signal_ends_the_wait_for_the_first_actor(tmp_path, capfd, signals):
    """Long before the wait would end by itself, and nothing is left."""

    pressed = []

    def press():
        wait_until(Path(tmp_path / "s").exists)
        pressed.append(time.monotonic())
        for number in signals:
            os.kill(os.getpid(), number)

    threading.Thread(target=press).start()
    words = [w for w in WORDS if not w.startswith("task=")]
    words += ["task=remote", f"task.kwargs.listen=unix:{tmp_path}/s", "task.kwargs.timeout=60"]
    assert main(["train", *words, "algo=sac", f"run_dir={tmp_path}/run"]) == 130
    assert time.monotonic() - pressed[0] < 2
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
        env.table.leave(env.table.actors[0])
        interrupt.asked = True
        for _ in range(100):  # seconds each, otherwise
            assert not env.step(action).valid.any()
        env.close()
