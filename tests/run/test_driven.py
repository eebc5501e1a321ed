"""Runs that their caller steps: the bits of ``pql.train``, rows one by one, exact states, and every kind of end."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from run_files import rows

import pql
from pql.algos.registry import env_seed
from pql.data.transitions import rows_of
from pql.envs.toy import Counter
from pql.errors import ConfigError, RunError

SMALL = ["seed=3", "replay.capacity=512", "algo.batch_size=16", "checkpoint.every_seconds=1e6"]
NO_EVALUATION = ["eval.every_seconds=null", "eval.final=false"]
OFF_POLICY = [*SMALL, "algo.warmup_steps=4"]
ALGORITHMS = {
    "sac": ["algo=sac", *OFF_POLICY, "algo.v_per_step=2"],  # lockstep, ticks of one step
    "pql": ["algo=pql", *OFF_POLICY, "placement.executor=inline"],  # concurrent
    "pql, threads": ["algo=pql", *OFF_POLICY, "placement.executor=threads"],
    "ppo": ["algo=ppo", "seed=3", "algo.horizon=8", "algo.minibatches=2", "checkpoint.every_seconds=1e6"],
}


def bits(run_dir):
    return {k: v for part in pql.load_policy(run_dir).state_dict().values() for k, v in part.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def drive(run, env, steps, action=None):
    """Step ``env`` with the actions of ``run``; return the next action."""
    action = run.begin(env.reset(env_seed(3, 0))) if action is None else action
    for _ in range(steps):
        action = run.feed(env.step(action))
    return action


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_driven_run_has_the_bits_of_a_run_that_steps_by_itself(name, tmp_path, threads_left):
    words = [*ALGORITHMS[name], "budget.env_steps=320"]
    env = Counter(4)
    pql.train(*words, *NO_EVALUATION, f"run_dir={tmp_path / 'own'}", env=env, quiet=True)
    env = Counter(4)
    run = pql.drive(*words, f"run_dir={tmp_path / 'driven'}", spec=env.spec, quiet=True)
    drive(run, env, 80)
    assert not run.going
    summary = run.close()
    assert (summary.env_steps, threads_left()) == (320, [])
    assert equal(bits(tmp_path / "own"), bits(tmp_path / "driven"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["sac", "pql", "ppo"])
def test_a_driven_run_on_a_gpu_waits_for_its_caller(name, tmp_path):
    words = [w for w in ALGORITHMS[name] if not w.startswith("placement")] + ["budget.env_steps=320"]
    found = []
    for where in ("one", "two"):
        env = Counter(4, "cuda")
        run = pql.drive(*words, f"run_dir={tmp_path / where}", spec=env.spec, quiet=True)
        action = run.begin(env.reset(0))
        while run.going:
            torch.cuda._sleep(10**6 if where == "two" else 1)  # the caller's stream is late
            action = run.feed(env.step(action))
        run.close()
        found.append(bits(tmp_path / where))
    assert equal(*found)


def test_rows_of_the_replay_are_the_transitions(tmp_path):
    env, taken, actions = Counter(4, autoreset="next_step"), [], []  # a row of the ring per step
    run = pql.drive(*ALGORITHMS["sac"], f"run_dir={tmp_path}", spec=env.spec, quiet=True)
    actions, first = [run.begin(begun := env.reset(0))], begun["policy"]
    for _ in range(60):
        taken.append(env.step(actions[-1]))
        actions.append(run.feed(taken[-1]))
    run.record(env.step(actions[-1]))
    stored = run.at_pause(lambda session: rows_of(session.parts.collector.replays[0]))
    run.close()
    wanted = {k: torch.stack([getattr(s, k) for s in taken]) for k in ("reward", "terminated", "truncated", "first")}
    wanted |= {"action": torch.stack(actions[:-1]), "valid": torch.stack([s.valid for s in taken])}
    seen = wanted.pop("valid")
    assert torch.equal(stored["valid"][:60], seen)
    assert [k for k, v in wanted.items() if not torch.equal(stored[k][:60][seen], v[seen])] == []
    assert torch.equal(stored["obs.policy"][:61], torch.stack([first, *(s.obs["policy"] for s in taken)]))


@pytest.mark.parametrize("name", ["sac", "pql, threads"])
def test_it_resumes_with_the_same_bits_where_the_environments_continue(name, tmp_path):
    words = ALGORITHMS[name]
    env = Counter(4)
    whole = pql.drive(*words, f"run_dir={tmp_path / 'whole'}", spec=env.spec, quiet=True)
    action = whole.begin(env.reset(1))
    part, other = pql.drive(*words, f"run_dir={tmp_path / 'part'}", spec=env.spec, quiet=True), Counter(4)
    also = part.begin(other.reset(1))
    for _ in range(30):
        assert torch.equal(action, also)
        step, same = env.step(action), other.step(also)
        action, also = whole.feed(step), part.feed(same)
    step, same = env.step(action), other.step(also)
    whole.record(step)
    part.record(same)
    state, action = part.state(), whole.act()
    part.close()
    moved = pql.drive(*words, f"run_dir={tmp_path / 'moved'}", spec=env.spec, quiet=True, state=state, continues=True)
    also = moved.begin(same.obs)
    for _ in range(30):
        assert torch.equal(action, also)
        action, also = whole.feed(env.step(action)), moved.feed(other.step(also))
    assert moved.close().env_steps == whole.close().env_steps == 244
    assert equal(bits(tmp_path / "whole"), bits(tmp_path / "moved"))


def test_it_saves_and_resumes_from_its_directory(tmp_path):
    env = Counter(4)
    run = pql.drive(*ALGORITHMS["sac"], f"run_dir={tmp_path}", spec=env.spec, quiet=True)
    action = drive(run, env, 20)
    assert not run.save()  # written at the end of the running tick
    step = env.step(action)
    run.record(step)
    assert [p.name for p in (tmp_path / "checkpoints").glob("tick-*")] == ["tick-000000000017"]
    expected = run.act()
    run.close()
    again = pql.drive(spec=env.spec, run_dir=tmp_path, quiet=True, continues=True)
    assert torch.equal(again.begin(step.obs), expected)
    assert again.close().env_steps == 84


def test_a_state_without_rows_begins_a_new_run_with_the_weights(tmp_path):
    env = Counter(4)
    run = pql.drive(*ALGORITHMS["sac"], f"run_dir={tmp_path / 'one'}", spec=env.spec, quiet=True)
    action = drive(run, env, 20)
    run.record(env.step(action))
    state = run.state(replay=False)
    assert not any("/replay/" in name for name in state["tensors"])
    policy = run.policy()
    run.close()
    again = pql.drive(*ALGORITHMS["sac"], f"run_dir={tmp_path / 'two'}", spec=env.spec, quiet=True, state=state)
    again.begin(env.reset(0))
    again.close()  # within the warm-up: nothing learned, no policy written
    weights = {k.removeprefix("learners/p/state/policy/"): v for k, v in state["tensors"].items()}
    assert all(torch.equal(v, weights[k]) for k, v in policy.state_dict()["policy"].items())


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("steps", [0, 2, 20])  # before the first tick, in the warm-up, later
def test_it_closes_wherever_it_is(name, steps, tmp_path, threads_left):
    env = Counter(4)
    with pql.drive(*ALGORITHMS[name], f"run_dir={tmp_path}", spec=env.spec, quiet=True) as run:
        if steps:
            drive(run, env, steps)
    assert threads_left() == []
    assert (tmp_path / "checkpoints" / "last").exists() == (steps == 20)
    assert run.close() is run.close()


def test_errors_of_the_run_arrive_in_the_caller(tmp_path, threads_left):
    env = Counter(4)
    with pytest.raises(ConfigError, match=r"algo.warmup_stepss=4: expected"):
        pql.drive("algo.warmup_stepss=4", spec=env.spec, quiet=True)
    with pytest.raises(
        ConfigError, match=r"eval.final=true: expected off: a run cannot step the caller's environments"
    ):
        pql.drive("algo=sac", "eval.final=true", f"run_dir={tmp_path / 'a'}", spec=env.spec, quiet=True)
    run = pql.drive(*ALGORITHMS["sac"], f"run_dir={tmp_path / 'b'}", spec=env.spec, quiet=True)
    with pytest.raises(RunError, match=r"act\(\) out of order: the run waits for begin\(obs\)"):
        run.act()
    action = drive(run, env, 10)
    with pytest.raises(RunError, match=r"possible between record.step. and act.. at the end of a tick only"):
        run.state()
    wrong = env.step(action)
    with pytest.raises(ConfigError, match=r"expected step\(\) to return what its spec says, but reward"):
        run.feed(wrong._replace(reward=wrong.reward[:2]))
    assert run.going  # nothing happened yet
    run.feed(wrong)
    run.close()
    assert threads_left() == []


def test_a_failing_callback_ends_it(tmp_path, threads_left):
    def fail(session, row):
        raise ValueError("no more")

    env = Counter(4)
    words = [*ALGORITHMS["sac"], "logger.every_seconds=0.001", f"run_dir={tmp_path}"]
    run = pql.drive(*words, spec=env.spec, quiet=True, callbacks=fail)
    with pytest.raises(ValueError, match="no more"):
        drive(run, env, 1000)
    assert threads_left() == []


@pytest.mark.parametrize("name", ["sac", "pql", "pql, threads"])
def test_the_callers_time_is_no_hang(name, tmp_path):
    env = Counter(4)
    words = [*ALGORITHMS[name], "placement.watchdog_seconds=1.5", "placement.start_seconds=20", f"run_dir={tmp_path}"]
    with pql.drive(*words, spec=env.spec, quiet=True) as run:
        action = drive(run, env, 10)
        time.sleep(3.5)
        run.record(env.step(action))
        time.sleep(3.5)
        assert torch.equal(run.act(), run.act())


PROGRAM = """
import signal, sys, pql
from pql.envs.toy import Counter
env = Counter(4)
run = pql.drive(*sys.argv[2:], spec=env.spec, quiet=True)
action = run.begin(env.reset(0))
for _ in range(20):
    action = run.feed(env.step(action))
if sys.argv[1] == "error":
    raise SystemExit(7)
if sys.argv[1] == "ctrl-c":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize(("end", "code"), [("none", 0), ("error", 7), ("ctrl-c", -signal.SIGINT)])
@pytest.mark.parametrize("name", ["sac", "pql, threads"])
def test_a_program_that_does_not_close_it_ends_as_it_would_without(name, end, code, tmp_path):
    command = [sys.executable, "-c", PROGRAM, end, *ALGORITHMS[name], f"run_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert done.stderr == "" or end == "ctrl-c"
    assert rows(tmp_path)[-1]["steps/env"] == 80
    assert (tmp_path / "summary.json").exists()
