"""Runs of several processes: division of the work, agreement, and failure of one process."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import differences, small_config
from pairs import PATIENCE, Pair, free_port, pair, place
from run_files import manifest, points, rows, words
from sampling import sample

import pql
from pql.algos.registry import own_seed
from pql.config.compose import compose
from pql.contract.registry import register
from pql.data import tensorfile
from pql.engine import compiled
from pql.engine.world import World, world
from pql.errors import ConfigError, RunError
from pql.run.ranks import share_of
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import checkpoint


@pytest.fixture(scope="module")
def both():
    with pair() as two:
        yield two


# -- a share --------------------------------------------------------------------------------------------------------


def test_totals_are_shared_out():
    config = small_config(num_envs=8, algo={"batch_size": 32, "family": "ddpg"}, replay={"capacity": 4097})
    own = share_of(config, World(1, 4, 1, 4))
    assert (own.num_envs, own.algo.batch_size, own.replay.capacity) == (2, 8, 1024)
    assert own.budget == config.budget
    assert own.algo.warmup_steps == config.algo.warmup_steps
    assert own.algo.critic == config.algo.critic
    assert share_of(config, World()) is config


def test_only_rank_0_has_the_runs_own_seed():
    assert own_seed(7, 0) == 7
    others = {own_seed(seed, rank) for seed in range(20) for rank in range(1, 8)}
    assert len(others) == 140
    assert not others & set(range(20))
    assert own_seed(7, 3) == own_seed(7, 3)


def test_an_annealed_schedule_counts_the_steps_of_all():
    ppo = {"lr_schedule": "linear", "anneal_steps": 6400, "horizon": 8}
    config = small_config(algo={"family": "ppo", "schedule": "lockstep", **ppo})
    assert share_of(config, World(0, 2, 0, 2)).algo.anneal_steps == 3200


def test_env_steps_are_those_of_all():
    dqn = {"target_period": 64, "epsilon": {"steps": 1000}, "priority": {"beta_steps": 501}}
    own = share_of(small_config(algo={"family": "dqn", **dqn}), World(0, 2, 0, 2)).algo
    assert (own.target_period, own.epsilon.steps, own.priority.beta_steps) == (32, 500, 250)
    pqn = {"horizon": 8, "anneal_steps": 900, "epsilon": {"steps": 1000}}
    shared = share_of(small_config(algo={"family": "pqn", "schedule": "lockstep", **pqn}), World(0, 2, 0, 2))
    assert (shared.algo.anneal_steps, shared.algo.epsilon.steps) == (450, 500)


def test_the_cores_of_a_machine_are_shared_out(monkeypatch):
    monkeypatch.setattr("pql.run.ranks.available_cores", lambda: 8)
    config = small_config(placement={"threads": {"collector": None, "v": None, "p": 3, "simulator": None}})
    threads = share_of(config, World(1, 4, 1, 2)).placement.threads  # two machines
    assert (threads.v, threads.p, threads.collector, threads.simulator) == (2, 3, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_envs": 9}, "num_envs=9: expected a multiple of 2, the processes that share it, such as 8"),
        ({"algo": {"batch_size": 33}}, "algo.batch_size=33: expected a multiple of 2, the processes that share it"),
        (
            {"algo": {"family": "dqn", "schedule": "lockstep", "target_period": 1001}, "num_envs": 8},
            "algo.target_period=1001: expected a multiple of 2, the processes that share it",
        ),
        ({"task": {"name": "remote"}}, "task.name=remote: expected a simulator in each process: actors connect"),
        ({"task": {"remote": {"port": 1}}}, "task.remote={'port': 1}: expected a simulator in each process: actors"),
        (
            {"algo": {"family": "ppo", "schedule": "lockstep", "horizon": 2, "minibatches": 16}},
            "algo.minibatches=16: expected a divisor of num_envs=4 x algo.horizon=2 rows, such as 8 "
            "(this is the share of one of 2 processes)",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        share_of(small_config(**change), World(0, 2, 0, 2))


def test_each_process_of_a_machine_takes_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    here = World(3, 4, 1, 2)
    own = share_of(small_config(device="cuda", placement={"executor": "auto"}), here)
    assert (own.device, own.placement.executor) == ("cuda:1", "auto")
    mixed = share_of(small_config(device="auto", placement={"executor": "auto", "collector": "cpu"}), here)
    # One host thread must queue the collectives of both learners.
    assert (mixed.device, mixed.placement.collector, mixed.placement.executor) == ("cuda:1", "cpu", "inline")
    for change, message in (
        ({"device": "cuda:0"}, "device=cuda:0: expected cuda: each process takes a GPU of its own"),
        ({"device": "cuda", "placement": {"executor": "threads"}}, "placement.executor=threads: expected auto, "),
        ({"device": "cuda", "placement": {"executor": "auto", "p_learner": "cuda:0"}}, "placement.p_learner=cuda:0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            share_of(small_config(**change), here)
    with pytest.raises(ConfigError, match="device=cuda: expected cpu, or at most 2 processes: there are 2 GPUs"):
        share_of(small_config(device="cuda"), World(2, 4, 2, 4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as where each process sees only its own
    assert share_of(small_config(device="cuda", placement={"executor": "auto"}), here).device == "cuda:0"


# -- runs of two processes ------------------------------------------------------------------------------------------


def run(*overrides: str, callbacks=()) -> dict:
    """One sitting; what this process ends with."""
    session = Session(compose(overrides), quiet=True, overrides=overrides, callbacks=callbacks)
    return ended(session, session.train())


def resume(run_dir: str, *overrides: str) -> dict:
    session = Session(resume_config(Path(run_dir), overrides), resume=True, quiet=True, overrides=overrides)
    return ended(session, session.train())


def ended(session: Session, summary) -> dict:
    parts = session.parts
    weights = {
        f"{n}/{k}": v
        for n, one in parts.learners.items()
        for k, v in checkpoint.flatten(one.state.state_dict()).items()
    }
    norm = parts.collector.normalizer.state_dict()
    return {
        "summary": summary,
        "weights": {k: v.clone() for k, v in weights.items()},
        "norm": norm,
        "obs": parts.collector.obs["policy"].clone(),
        "num_envs": parts.env.spec.num_envs,
    }


SHORT = ("algo.length=4", "algo.burn_in=1", "algo.period=4", "algo.lstm=8")
CASES = {
    "pql": ("algo=pql", "algo.normalize_reward=true"),
    "pql_d": ("algo=pql_d",),
    "sac": ("algo=sac",),
    "td3": ("algo=td3",),
    "ppo": ("algo=ppo", "algo.horizon=4", "algo.minibatches=2", "algo.kl_stop=0.002"),
    "a2c": ("algo=a2c", "task=cartpole", "algo.horizon=4"),
    "rainbow": ("algo=rainbow", "task=cartpole", "algo.target_period=64"),
    "apex": ("algo=apex", "task=cartpole", "algo.target_period=64"),
    "r2d2": ("algo=r2d2", "task=cartpole", "algo.target_period=128", *SHORT),
    "pqn": ("algo=pqn", "task=cartpole", "algo.horizon=4", "algo.minibatches=2", "algo.anneal_steps=1000"),
    "reppo": ("algo=reppo", "algo.horizon=4", "algo.epochs=2", "algo.minibatches=2", "algo.critic.atoms=21"),
}
PER_RANK = re.compile(r"progress/lost|progress/carry|/priorities/")


def settings(path: Path, case: str, *more: str) -> list[str]:
    rollouts, values = ("algo.batch_size", "replay"), ("algo.policy",)
    unread = {**dict.fromkeys(("ppo", "a2c", "reppo"), rollouts), **dict.fromkeys(("rainbow", "apex", "r2d2"), values)}
    unread["pqn"] = rollouts + values
    chosen = [w for w in words(path) if not w.startswith(unread.get(case, ("-",)))]
    patient = "placement.watchdog_seconds=200"  # other work on this machine is no failure
    return [*chosen, "task.kwargs.max_episode_steps=11", patient, *CASES[case], *more]


@pytest.mark.parametrize("case", sample(CASES, keep=["pql", "ppo"]))
def test_both_end_with_the_same_weights_and_statistics(both: Pair, tmp_path, case):
    first, second = both(run, *settings(tmp_path / "a", case, "budget.env_steps=320"))
    mine, theirs = ({k: v for k, v in r["weights"].items() if not PER_RANK.search(k)} for r in (first, second))
    assert differences(mine, theirs) == []
    shared = [k for k in first["norm"] if k != "running_return"]
    assert all(torch.equal(first["norm"][k], second["norm"][k]) for k in shared)
    assert not torch.equal(first["obs"], second["obs"])  # but each has environments of its own
    assert (first["num_envs"], first["summary"].env_steps, second["summary"].env_steps) == (8, 320, 320)
    if "moments.policy.count" in first["norm"]:
        assert first["norm"]["moments.policy.count"] == 16 + 320  # of both
    again, _ = both(run, *settings(tmp_path / "b", case, "budget.env_steps=320"))
    assert differences(first["weights"], again["weights"]) == []  # and the same bits every time


def run_in_regions(*overrides: str) -> dict:
    """As ``run``, without Inductor: each region runs as its operations."""
    inductor, compiled.inductor = compiled.inductor, lambda module, example, text: lambda given: module(*given)
    try:
        return run(*overrides)
    finally:
        compiled.inductor = inductor


@pytest.mark.parametrize("how", [run_in_regions, pytest.param(run, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["pql", "ppo"])
def test_compiled_updates_of_both_are_those_of_eager_ones(both: Pair, tmp_path, case, how):
    """Collectives run between two regions."""
    eager, _ = both(run, *settings(tmp_path / "eager", case, "budget.env_steps=160", "graphs=off"))
    on = ("budget.env_steps=160", "graphs=off", "placement.compile=on")
    first, second = both(how, *settings(tmp_path / "compiled", case, *on))
    mine, theirs = ({k: v for k, v in r["weights"].items() if not PER_RANK.search(k)} for r in (first, second))
    assert differences(mine, theirs) == []
    for name, value in mine.items():
        torch.testing.assert_close(value, eager["weights"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", sample(["pql", "sac", "ppo", "rainbow"], keep=["pql", "ppo"]))
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(both: Pair, tmp_path, case):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = {"ppo": (16 * 12, 16 * 20)}.get(case, (16 * 12, 16 * 21))
    want = both(run, *settings(whole, case, f"budget.env_steps={steps[1]}"))
    both(run, *settings(parts, case, f"budget.env_steps={steps[0]}"))
    got = both(resume, str(parts), f"budget.env_steps={steps[1]}")
    for rank in (0, 1):
        assert differences(want[rank]["weights"], got[rank]["weights"]) == []
        a, b = (checkpoint.newest_checkpoint(checkpoint.of_rank(p / "checkpoints", rank))[0] for p in (whole, parts))
        assert "collector/gen" in a
        assert differences(a, b) == []


@pytest.mark.slow
def test_rank_0_writes_the_run_directory(both: Pair, tmp_path):
    first, second = both(
        run, *settings(tmp_path, "pql", "eval.final=true", "budget.env_steps=1600", "checkpoint.keep=1")
    )
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"best", "last", "rank-1", "tick-000000000092"}
    assert [p.name for p in (tmp_path / "checkpoints" / "rank-1").iterdir()] == ["tick-000000000092"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["env_steps"], summary["episodes"], summary["updates_v"]) == (1600, 2, 184)
    assert summary["return_mean"] == first["summary"].return_mean
    assert second["summary"].return_mean is None
    assert manifest(points(tmp_path)[-1])["ranks"] == 2
    log = [row for row in rows(tmp_path) if "updates/v" in row]
    assert log[-1]["steps/env"] == 1600
    assert {(row["ratio/v_per_step"], row["ratio/p_per_v"]) for row in log} == {(2.0, 0.5)}
    # An episode of 11 steps ends in each of 16 environments, 9 times in 100 steps.
    assert sum(row.get("train/episodes", 0) for row in log) == 16 * 9
    assert resume_config(tmp_path, []).num_envs == 16  # the requested number, undivided


def test_another_number_of_processes_is_refused_by_name(both: Pair, tmp_path):
    both(run, *settings(tmp_path, "pql"))
    with pytest.raises(ConfigError, match=r"processes=1: expected 2, as the run had; .*: init_from=RUN"):
        resume(str(tmp_path), "budget.env_steps=640")
    new = tmp_path / "new"
    assert run(*settings(new, "pql", f"init_from={tmp_path}"))["summary"].env_steps == 320


def test_a_resume_point_that_one_lacks_is_passed_over(both: Pair, tmp_path):
    both(run, *settings(tmp_path, "pql", "checkpoint.every_seconds=1e-9"))
    lost = sorted((tmp_path / "checkpoints" / "rank-1").glob("tick-*"))[-1]
    (lost / "tensors.safetensors").write_bytes(b"")
    first, second = both(resume, str(tmp_path), "budget.env_steps=640")
    assert first["summary"].env_steps == second["summary"].env_steps == 640
    assert [manifest(p)["counters"]["ticks"] for p in points(tmp_path)][-1] == 32


def run_on_a_disk_that_is_full(*overrides: str) -> None:
    """A run whose rank 1 can write only its first resume point."""
    write, begun = tensorfile.write, []

    def full(path, *rest):
        if world().rank == 1 and "tick-" in str(path):
            begun.append(path)
            if len(begun) > 1:
                raise OSError(28, "No space left on device")
        return write(path, *rest)

    with mock.patch.object(tensorfile, "write", full), contextlib.suppress(RunError):
        run(*overrides)


@pytest.mark.fault(13)
def test_the_last_point_that_both_have_stays_while_one_cannot_write(both: Pair, tmp_path):
    both(run_on_a_disk_that_is_full, *settings(tmp_path, "pql", "checkpoint.every_seconds=1e-9", "checkpoint.keep=1"))
    mine, theirs = ([p.name for p in checkpoint.resume_points(tmp_path / "checkpoints" / k)] for k in ("", "rank-1"))
    assert mine == [*theirs, "tick-000000000012"]
    first, second = both(resume, str(tmp_path), "budget.env_steps=640")
    assert first["summary"].env_steps == second["summary"].env_steps == 640
    assert [p.name for p in points(tmp_path)] == ["tick-000000000032"]


def stopped_by(run_dir: str, how: str) -> tuple[int, int, bool]:
    """Rank 0's callback, or a signal to rank 1 alone, ends an endless run."""
    seen = []

    def stop(session, row):
        seen.append(row)
        session.stop = how == "callback"

    config = compose(settings(Path(run_dir), "pql", "budget.env_steps=1000000000"))
    session = Session(config, quiet=True, callbacks=[stop])
    if how == "signal" and world().rank == 1:
        session.interrupt.asked = True
    summary = session.train()
    return summary.env_steps, len(seen), summary.interrupted


def test_rank_0s_word_ends_all(both: Pair, tmp_path):
    (steps, told, _), (others, silent, _) = both(stopped_by, str(tmp_path), "callback")
    assert 128 < steps == others < 1_000_000
    assert told >= 1
    assert silent == 0


def test_a_signal_to_one_ends_all_saved(both: Pair, tmp_path):
    first, second = both(stopped_by, str(tmp_path), "signal")
    assert first[0] == second[0] < 1_000_000
    assert first[2] is second[2] is True
    assert resume_config(tmp_path, []) is not None
    assert len(points(tmp_path)) == 1


def test_the_clock_is_rank_0s(both: Pair, tmp_path):
    first, second = both(run, *settings(tmp_path, "pql", "budget.env_steps=null", "budget.seconds=0.4"))
    assert first["summary"].env_steps == second["summary"].env_steps
    assert 0.4 <= first["summary"].seconds < 5


def test_a_target_return_ends_all(both: Pair, tmp_path):
    target = ("budget.env_steps=null", "budget.target_return=-1e9", "eval.every_seconds=0.05")
    first, second = both(run, *settings(tmp_path, "pql", *target))
    assert first["summary"].env_steps == second["summary"].env_steps


def drifting(run_dir: str) -> str:
    session = Session(compose(settings(Path(run_dir), "pql")), quiet=True)
    if world().rank == 1:
        session.parts.learners["v"].state.critic.data.data[3] += 1e-6
    session.train()


def test_weights_that_drift_apart_end_the_run(both: Pair, tmp_path):
    (a, told), (b, _) = both.outcomes(drifting, str(tmp_path))
    assert (a, b) == ("RunError", "RunError")
    assert "rank 0 and rank 1 have drifted apart: v/critic differs" in told


def live(run_dir: str) -> tuple[int, int]:
    from pql.envs.classic import Pendulum

    more = [w for w in words(Path(run_dir)) if not w.startswith(("task=", "num_envs="))]
    summary = pql.train(*more, env=Pendulum(num_envs=8, max_episode_steps=10), quiet=True)
    return summary.env_steps, summary.updates_v


def test_live_environments_are_one_to_each(both: Pair, tmp_path):
    assert both(live, str(tmp_path)) == [(320, 24)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("case", ["pql", "sac", "ppo"])
def test_two_gpus_hold_the_same_weights(both: Pair, tmp_path, case, graphs):
    more = ("device=cuda", f"graphs={graphs}", "budget.env_steps=640")
    first, second = both(run, *settings(tmp_path, case, *more))
    mine, theirs = ({k: v for k, v in r["weights"].items() if not PER_RANK.search(k)} for r in (first, second))
    assert differences(mine, {k: v.to(mine[k].device) for k, v in theirs.items()}) == []


# -- data -----------------------------------------------------------------------------------------------------------


def test_a_file_of_transitions_is_shared_out(both: Pair, tmp_path):
    alone = run(*settings(tmp_path / "one", "pql", "replay.save=true"))
    assert alone["summary"].env_steps == 320
    data = tmp_path / "one" / "replay.safetensors"
    both(run, *settings(tmp_path / "two", "pql", f"replay.prefill={data}", "replay.save=true"))
    saved = {p.name for p in (tmp_path / "two").glob("replay*")}
    assert saved == {"replay.safetensors", "replay-rank1.safetensors"}
    assert not torch.equal(*(checkpoint.load_file(tmp_path / "two" / n)["reward"][:5, :4] for n in sorted(saved)))


# -- failures -------------------------------------------------------------------------------------------------------


SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}


class Faulty:
    """Counter, which ends its process, or fails, on a rank at step ``at``, unless ``mark`` exists; it is made then."""

    def __init__(self, num_envs, device, how="raise", at=30, mark=None, rank=1):
        from pql.envs.toy import Counter

        self.env, self.how, self.at, self.mark, self.steps = Counter(num_envs, device), how, at, mark, 0
        self.rank = rank
        self.spec, self.reset, self.close = self.env.spec, self.env.reset, self.env.close

    def step(self, action):
        self.steps += 1
        if self.steps == self.at and world().rank == self.rank and not (self.mark and Path(self.mark).exists()):
            if self.mark:
                Path(self.mark).touch()
            if self.how == "raise":
                raise ValueError("the simulator broke")
            if self.how in SIGNALS:
                os.kill(os.getpid(), SIGNALS[self.how])
            time.sleep(1000)
        return self.env.step(action)


register("faulty_rank", Faulty)


def failing(run_dir: str, how: str) -> None:
    limit = f"placement.watchdog_seconds={4 if how == 'hang' else 200}"
    more = ("task=env", "task.name=faulty_rank", f"task.kwargs.how={how}", limit)
    run(*words(Path(run_dir), "budget.env_steps=3200", *more))


def killed(run_dir: str, mark: str, at: int, rank: int = 1, how: str = "die", device: str = "cpu") -> None:
    kwargs = {"how": how, "mark": mark, "at": at, "rank": rank}
    faulty = ("task=env", "task.name=faulty_rank", *(f"task.kwargs.{name}={value}" for name, value in kwargs.items()))
    limit = f"placement.watchdog_seconds={4 if how == 'stop' else 200}"
    more = ("budget.env_steps=32000", "checkpoint.every_seconds=0.05", limit, f"device={device}")
    run(*words(Path(run_dir), *faulty, *more))


def resumed(run_dir: str, mark: str) -> int:
    more = (f"task.kwargs.mark={mark}", "budget.env_steps=3200", "checkpoint.every_seconds=null")
    return resume(run_dir, *more)["summary"].env_steps


@pytest.mark.fault(28, count=50)
def test_a_killed_rank_ends_the_other_within_a_minute_and_the_run_resumes(tmp_path, trial):
    """At a random moment, with kill -9, every other time the rank that hosts the store; resumed after every tenth."""
    folder, mark, rank = str(tmp_path / "run"), str(tmp_path / "mark"), 1 - trial % 2
    with pair() as two:
        two.ask(killed, folder, mark, 60 + random.Random(trial).randrange(100), rank)
        two.processes[rank].join(PATIENCE)
        assert two.processes[rank].exitcode == -signal.SIGKILL
        begun = time.monotonic()
        kind, message = two.answer(1 - rank)
        assert time.monotonic() - begun < 60
    assert kind == "RunError"
    assert ("rank 1 has ended, or hangs" if rank else "rank 0 has ended") in message
    if trial % 10 == 1:
        with pair() as again:
            assert again(resumed, folder, mark) == [3200, 3200]


@pytest.mark.fault(28)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_other_within_a_minute(tmp_path, rank):
    """Also the one that hosts the store, whose calls then do not return."""
    with pair() as two:
        two.ask(killed, str(tmp_path / "run"), str(tmp_path / "mark"), 100, rank, "stop")
        kind, message = two.answer(1 - rank)
        for process in two.processes:
            process.kill()
    assert kind == "RunError"
    assert f"rank {rank} has ended, or hangs" in message


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.fault(28)
def test_a_killed_rank_with_nccl_ends_the_other_within_a_minute_and_the_run_resumes(tmp_path):
    folder, mark = str(tmp_path / "run"), str(tmp_path / "mark")
    with pair() as two:
        two.ask(killed, folder, mark, 100, 1, "die", "cuda")
        two.processes[1].join(PATIENCE)
        assert two.processes[1].exitcode == -signal.SIGKILL
        begun = time.monotonic()
        kind, _ = two.answer(0)
        assert time.monotonic() - begun < 60
    assert kind in ("RunError", "HungError", "Exit")
    with pair() as again:
        assert again(resumed, folder, mark) == [3200, 3200]


@pytest.mark.fault(6, 7)
@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("raise", "rank 1 failed: worker collector failed: ValueError: the simulator broke", "RunError"),
        ("hang", "rank 1 failed: worker collector has not finished its tick in 4 s", "HungError"),
    ],
)
def test_the_failure_of_one_ends_all_by_its_name(tmp_path, how, first, second):
    before = time.monotonic()
    with pair() as two:
        (kind, told), (other, _) = two.outcomes(failing, str(tmp_path), how)
    assert (kind, other) == ("RunError", second)
    assert first in told
    assert time.monotonic() - before < 150


# -- the command line -----------------------------------------------------------------------------------------------


def torchrun(*argv: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "pql.cli.main"]
    return subprocess.run([*command, *argv], capture_output=True, text=True, timeout=timeout)


def test_torchrun_trains_one_run(tmp_path):
    done = torchrun("train", *settings(tmp_path, "pql", "eval.final=true"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: return") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["env_steps"], summary["updates_v"], summary["episodes"]) == (320, 24, 2)
    assert rows(tmp_path)[-1]["steps/env"] == 320
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["processes"] == 2


def commands(*lines: list[str]) -> list[tuple[int, str]]:
    """One command per rank, started as torchrun would; their status and what they said."""
    port, running = free_port(), []
    for rank, line in enumerate(lines):
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "pql", *line],
                env={**os.environ, **place(rank, len(lines), port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return [(p.wait(250), p.stdout.read()) for p in running]


@pytest.mark.slow
def test_ranks_that_were_told_different_things_are_refused(tmp_path):
    same = settings(tmp_path, "pql")
    (first, said), (second, told) = commands(["train", *same], ["train", *same, "algo.gamma=0.5"])
    assert (first, second) == (2, 2)
    message = "algo.gamma=0.5: expected 0.99 on rank 1, as on rank 0: all processes run the same command"
    assert f"pql: {message}" in said
    assert f"pql, rank 1: {message}" in told


def test_other_commands_are_for_one_process(monkeypatch, capsys):
    from pql.cli.main import main

    for name, value in place(1, 2, 1).items():
        monkeypatch.setenv(name, value)
    for line, command in (["list", "tasks"], "list"), (["train", "-m", "seed=1,2"], "train -m"):
        assert main(line) == 2
        assert f"pql, rank 1: command={command}: expected train or resume: under torchrun" in capsys.readouterr().err
