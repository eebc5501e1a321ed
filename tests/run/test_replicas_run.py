"""Runs with replicas: output files, resuming, rejected settings, and policies from their checkpoints."""

import dataclasses
import re

import pytest
import torch
from conftest import differences
from run_files import manifest, points, resume, rows, run, whole_and_resumed
from sampling import sample
from test_onpolicy import WORDS

import pql
from pql.cli.main import main
from pql.config import from_dict
from pql.config.compose import compose
from pql.contract.registry import register
from pql.engine.placement import machine_of, replica_devices
from pql.envs.classic import Pendulum
from pql.errors import ConfigError
from pql.run.policy import load_policy, policy_of
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import checkpoint

ROWS = 16 * 4  # a tick of both replicas together: WORDS has 16 environments, and rollouts of 4 rows


def words(run_dir, *more):
    """Two replicas of 8 environments, two ticks of each in a tick of the run."""
    small = [w for w in WORDS if not w.startswith("algo=")]
    return ["algo=appo_replicas", *small, "algo.central.ticks=2", f"run_dir={run_dir}", *more]


def steps(run_ticks):
    return 16 * 8 + ROWS * 2 * run_ticks


CASES = {
    "gaussian": ("task=pendulum", "task.kwargs.max_episode_steps=11", "task.kwargs.stagger=true"),
    "three, scaled rewards": ("task=lqr", "algo.normalize_reward=true", "algo.replicas=3", "num_envs=24"),
    "lstm, filler rows": ("task=counter", "task.kwargs.autoreset=next_step", "algo.lstm=8"),
    "a2c, linear": (
        "task=recall",
        "algo.optimizer=rmsprop",
        "algo.lr_schedule=linear",
        "algo.anneal_steps=2000",
        "algo.kl_stop=0.001",
    ),
}


@pytest.mark.fault(14, count=10)
@pytest.mark.parametrize("case", sample(CASES, keep=["three, scaled rewards"]))
def test_in_turns_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, case, trial):
    case = CASES[case]
    count = 3 if "algo.replicas=3" in case else 2
    half, full = (steps(n) // 2 * count for n in (3, 6))
    own = [*words(tmp_path, *case, "algo.central.order=turns", f"seed={trial}")]
    second, tensors, facts = whole_and_resumed(tmp_path, own, half, full)
    assert {"replicas/0", "learners/learner", "collector/env"} <= {"/".join(k.split("/")[:2]) for k in tensors}
    assert {"ticks", "steps", "learner", "steps.1", "learner.1"} <= {*facts["counters"]}
    assert (second.updates_v, second.updates_p, second.env_steps) == (8 * 12 * count, 8 * 12 * count, full)


def test_a_free_run_resumes_with_all_of_its_counters(tmp_path):
    run(*words(tmp_path, "task=cartpole", f"budget.env_steps={steps(3)}"))
    before = manifest(points(tmp_path)[-1])["counters"]
    assert (before["steps"] + before["steps.1"]) * 8 == steps(3)
    assert before["learner"] + before["learner.1"] == 8 * 12
    second = resume(tmp_path, f"budget.env_steps={steps(5)}")
    assert (second.env_steps, second.updates_v) == (steps(5), 8 * 20)
    tensors = checkpoint.load(points(tmp_path)[-1])[0]
    assert tensors["learners/learner/state/optimizer/count"] == 8 * 20  # Adam's count continues as well
    assert "replicas/0/learners/learner/state/optimizer/count" not in tensors  # there once


def test_a_run_writes_what_every_run_writes_and_its_lag(tmp_path, capsys):
    setting = ("task=cartpole", f"budget.env_steps={steps(12)}", "eval.final=true")
    assert main(["train", *words(tmp_path, *setting)]) == 0
    out = capsys.readouterr().out
    assert "replicas run free: the same seed would give other bits (algo.central.order=turns repeats them)" in out
    assert "the tick is bounded by" in out
    log = [row for row in rows(tmp_path) if "updates/v" in row]
    last = log[-1]
    assert last["updates/v"] == last["updates/p"] == 8 * 2 * 2 * 12
    assert last["steps/env"] == steps(12)
    assert last["ratio/v_per_step"] == 8 * 48 / (4 * 24)  # updates of all replicas for a step of all environments
    assert max(row["lag/policy_max"] for row in log) >= 1
    assert any(row["lag/policy_mean"] > 0 for row in log)
    assert {row["schedule/reproducible"] for row in log} == {0}
    names = {k for row in log for k in row}
    assert {
        "busy/collector",
        "busy/learner",
        "rollout/bootstrap_lost",
        "policy/kl",
        "policy/lr",
        "loss/critic",
        "train/return_mean",
        "train/episodes",
    } <= names
    assert "lag/policy_ticks" not in names
    assert all(0 <= row["busy/collector"] + row["busy/learner"] <= 1.05 for row in log)
    assert main(["eval", str(tmp_path), "num_envs=4"]) == 0
    assert main(["list", "algos"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^a3c +A3C \(Mnih et al\. 2016\)", out, re.M)
    assert re.search(r"^appo_replicas +Asynchronous PPO", out, re.M)


def test_the_central_policy_is_what_is_saved(tmp_path):
    session = Session(compose(words(tmp_path, "task=cartpole", f"budget.env_steps={steps(3)}")), quiet=True)
    central = session.parts.schedule.central
    session.train()
    mine = load_policy(tmp_path).state_dict()
    flat = torch.cat([v.reshape(-1) for v in mine["policy"].values()])
    assert torch.equal(flat, central.data[: flat.numel()])  # the policy's parameters come first
    tensors, facts = checkpoint.load(points(tmp_path)[-1])
    found = policy_of(tensors, facts, "cpu").state_dict()
    assert differences(checkpoint.flatten(mine), checkpoint.flatten(found)) == []


def test_a_new_run_starts_from_a_replicas_run_and_the_other_way_round(tmp_path):
    run(*words(tmp_path / "a", "task=pendulum", f"budget.env_steps={steps(2)}"))
    old = checkpoint.load(points(tmp_path / "a")[-1])[0]
    for name, more in (("b", ()), ("c", ("algo.schedule=lockstep", "algo.replicas=1"))):
        begin = [w for w in words(tmp_path / name, "task=pendulum", *more) if not more or "central" not in w]
        begin += ["budget.env_steps=1000", f"init_from={tmp_path / 'a'}"]
        session = Session(compose(begin), quiet=True)
        for one in getattr(session.parts, "replicas", [session.parts]):
            for part in ("policy", "value"):
                mine = checkpoint.flatten(getattr(one.learners["learner"].state, part).state_dict())
                assert differences(mine, {k: old[f"learners/learner/state/{part}/{k}"] for k in mine}) == []
        session.closing.close()


# -- rejected settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["num_envs=15"], "num_envs=15: expected a multiple of algo.replicas=2, such as 14"),
        (["algo.schedule=lockstep"], "algo.replicas=2: expected 1 with algo.schedule=lockstep"),
        (["algo.replicas=0"], "algo.replicas=0: expected a number from 1 up to 1024"),
        (
            ["algo.replicas=4", "num_envs=8", "algo.minibatches=16"],
            "algo.minibatches=16: expected a divisor of num_envs=8 / algo.replicas=4 x algo.horizon=4 rows",
        ),
        (["algo.lstm=4", "algo.minibatches=16"], "num_envs=16 / algo.replicas=2, such as 8"),
        (["placement.replicas=[cpu]"], "placement.replicas=['cpu']: expected one device for each of algo.replicas=2"),
        (["placement.replicas=[cpu,tpu]"], "placement.replicas=tpu: expected a device of this machine"),
        (["placement.collector=cpu"], "placement.collector=cpu: expected null: placement.replicas places whole"),
        (["placement.executor=streams"], "placement.executor=streams: expected auto, threads or inline"),
        (["placement.executor=inline", "algo.central.order=turns"], "algo.central.order=turns: expected free with"),
        (["algo.central.order=random"], "algo.central.order=random: expected one of free, turns"),
        (["algo.central.ticks=0"], "algo.central.ticks=0: expected a number from 1 up to"),
        (["algo.central.chunk=0"], "algo.central.chunk=0: expected a number from 1 up to"),
        (["graphs=on"], "graphs=on: expected auto or off with algo.schedule=replicas: a push takes locks"),
    ],
)
def test_a_wrong_word_is_named_with_what_is_allowed(tmp_path, change, message):
    with pytest.raises(ConfigError) as caught:
        compose(words(tmp_path, *change))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo=pql", "algo.schedule=replicas"], "expected concurrent or lockstep with algo=pql; only ppo can"),
        (
            ["algo=pql", "algo.replicas=2"],
            "algo.replicas=2: expected no such setting: algo=pql does not read it; ppo would",
        ),
        (["algo=a2c", "algo.replicas=2"], "algo.replicas=2: expected 1 with algo.schedule=lockstep"),
        (["algo=a2c", "placement.replicas=[cpu]"], "placement.replicas=['cpu']: expected null with algo.schedule="),
        (["algo=ppo", "algo.central.chunk=128"], "algo.central.chunk=128: expected algo.schedule=replicas with it"),
    ],
)
def test_replicas_are_for_rollouts(words, message):
    with pytest.raises(ConfigError) as caught:
        compose(["device=cpu", *words])
    assert message in str(caught.value)


def test_a_live_environment_has_one_replica(tmp_path):
    small = [w for w in words(tmp_path, "budget.env_steps=1000") if not w.startswith(("num_envs", "device"))]
    with pytest.raises(ConfigError, match=r"algo\.replicas=2: expected 1: a live environment cannot be built again"):
        pql.train(*small, env=pql.make_env("cartpole", num_envs=16), quiet=True)
    summary = pql.train(*small, "algo.replicas=1", env=pql.make_env("cartpole", num_envs=16), quiet=True)
    assert summary.env_steps == steps(7)  # the first tick that reaches 1,000


class Single(Pendulum):
    @classmethod
    def describe(cls, *args, **kwargs):
        return dataclasses.replace(super().describe(*args, **kwargs), single_instance=True)


def test_a_simulator_that_fits_once_has_one_replica(tmp_path):
    register("single", Single)
    with pytest.raises(ConfigError, match=r"algo\.replicas=2: expected 1: a process can hold one pendulum only"):
        Session(compose(words(tmp_path, "task=env", "task.name=single", "budget.env_steps=999")), quiet=True)


def test_a_resumed_run_keeps_its_replicas(tmp_path):
    run(*words(tmp_path, "task=cartpole", f"budget.env_steps={steps(1)}"))
    with pytest.raises(ConfigError, match=r"algo\.replicas=4: expected one of budget"):
        resume_config(tmp_path, ["algo.replicas=4"])
    config = compose(words(tmp_path, "task=cartpole", "algo.replicas=4", f"budget.env_steps={steps(2)}"))
    with pytest.raises(ConfigError, match=r"algo\.replicas=4: expected 2, as in the checkpoint"):
        Session(config, resume=True, quiet=True)


# -- placement ------------------------------------------------------------------------------------------------------


def test_replicas_share_cores_and_gpus_evenly(monkeypatch):
    config = compose(["device=cpu", "algo=a3c", "algo.replicas=4"])
    monkeypatch.setattr("pql.engine.placement.available_cores", lambda: 8)
    assert machine_of(config).threads == {"collector": 2, "v": 2, "p": 2, "simulator": 2, "learner": 2}
    assert replica_devices(config) == ["cpu"] * 4
    assert replica_devices(compose(["device=cpu", "algo=a3c", "placement.replicas=[cpu,cpu]"])) == ["cpu", "cpu"]
    monkeypatch.setattr("pql.engine.placement.resolve_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert replica_devices(config) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    one = from_dict({"algo": {"schedule": "replicas", "family": "ppo"}, "device": "auto"})
    assert replica_devices(one) == ["auto"]
