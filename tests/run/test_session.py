"""A run as a whole: budgets, files, resuming, starting from old weights, and live environments."""

import functools
import json
import re
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import differences
from run_files import QUICK, WORDS, manifest, points, resume, rows, run, whole_and_resumed, words
from sampling import sample

import pql
from pql.config import from_dict, leaves
from pql.config.compose import compose
from pql.contract.registry import register
from pql.data import tensorfile
from pql.data.replay import Replay
from pql.engine.interrupt import Interrupt
from pql.envs.classic import Pendulum
from pql.envs.toy import Counter
from pql.errors import ConfigError, PqlWarning, RunError
from pql.run.episodes import Evaluation
from pql.run.evaluator import EvaluationReport
from pql.run.policy import load_policy
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import checkpoint
from pql.run.store.run_dir import amend_config, read_summary
from pql.types import Rows


def opened(*overrides: str, **options) -> Session:
    """A session that is built, warmed up and not trained."""
    return Session(compose(overrides), quiet=True, **options)


# -- resuming -------------------------------------------------------------------------------------------------------

TASKS = {
    "pendulum": ("task=pendulum", "task.kwargs.max_episode_steps=11", "task.kwargs.stagger=true"),
    "lqr": ("task=lqr", "task.kwargs.max_episode_steps=9"),
    "counter": ("task=counter", "task.kwargs.autoreset=next_step", "task.kwargs.restart_every=4"),
    "halfcheetah": ("task=halfcheetah", "task.kwargs.max_episode_steps=12", "num_envs=4"),
}
CASES = [
    ("pendulum", "algo=pql"),
    ("pendulum", "algo=pql_d"),
    ("pendulum", "algo=pql_sac"),
    ("pendulum", "algo=td3"),
    ("lqr", "algo=pql"),
    ("lqr", "algo=sac"),
    ("counter", "algo=pql"),
    ("counter", "algo=td3"),
    ("counter", "algo=flashsac"),
    ("halfcheetah", "algo=pql"),
]
EXTRAS = ("algo.normalize_reward=true", "algo.explore.repeat=true")
NETS = ("critic.trunk=residual", "critic.subset=1", "policy.trunk=residual", "policy.norm=rms", "policy.average=0.01")
RECIPE = tuple(f"algo.{word}" for word in ("return_cap=5", "lr_schedule=cosine", "lr_updates=100", *NETS))


@pytest.mark.fault(14, form=lambda given: given["algo"].removeprefix("algo="), count=10)
@pytest.mark.parametrize(("task", "algo"), sample(CASES, keep=[CASES[2], *CASES[4:5], CASES[7], CASES[8]]))
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, task, algo, trial):
    """Split in the middle of episodes, on the default (threaded) executor. Everything the next tick depends on."""
    if task == "halfcheetah":
        pytest.importorskip("mujoco")
    setting = (*TASKS[task], algo, *EXTRAS, *(RECIPE if task == "lqr" else ()), f"seed={trial}")
    config = compose([*WORDS, *setting])
    half, full = (config.num_envs * n for n in (8 + 17, 8 + 34))
    second, tensors, facts = whole_and_resumed(tmp_path, [*WORDS, *setting], half, full)
    groups = {"/".join(k.split("/")[:2]) for k in tensors}
    assert {"collector/env", "collector/gen", "collector/normalizer", "collector/replay"} <= groups
    assert {"learners/v", "learners/p"} <= groups
    assert {"ticks", "steps", "v", "p", "seconds"} <= {*facts["counters"]}
    assert second.updates_v == 34 * config.algo.v_per_step


@pytest.mark.parametrize("algo", ["pql", "sac"])
def test_the_average_of_the_policy_is_the_policy_that_is_saved(tmp_path, algo):
    """In policy checkpoints and resume points; a new run from either starts both networks with it, or has both."""
    setting = (*TASKS["lqr"], f"algo={algo}", "algo.policy.average=0.2", f"budget.env_steps={16 * 25}")
    run(*words(tmp_path / "run", *setting))
    tensors, _ = checkpoint.load(points(tmp_path / "run")[-1])
    for path in (tmp_path / "run", points(tmp_path / "run")[-1]):
        for name, saved in load_policy(path).state_dict()["policy"].items():
            assert torch.equal(saved, tensors[f"learners/p/state/average/{name}"])
            assert not torch.equal(saved, tensors[f"learners/p/state/policy/{name}"])
    for source, equal in ((tmp_path / "run", False), (tmp_path / "run" / "checkpoints" / "last", True)):
        again = Session(compose(words(tmp_path / f"again{equal}", *setting, f"init_from={source}")), quiet=True)
        state = again.parts.learners["p"].state
        for name, average in state.average.state_dict().items():
            assert torch.equal(average, tensors[f"learners/p/state/average/{name}"])
        assert torch.equal(state.average.data, state.policy.data) is equal
        again.closing.close()


@pytest.mark.fault(14)
@pytest.mark.parametrize("rows", sample([27, 26, 25, 24, 20], keep=[27, 25, 20]))
def test_resuming_keeps_the_bits_however_full_the_replay_was(tmp_path, rows):
    """Of 25 rows a column: one short of full with the head's observation, full, and turned over."""
    setting = (*TASKS["lqr"], f"replay.capacity={16 * rows}")
    for name, split in (("whole", ()), ("parts", (f"budget.env_steps={16 * 25}",))):
        run(*words(tmp_path / name, *setting, *(split or (f"budget.env_steps={16 * 42}",))))
    resume(tmp_path / "parts", f"budget.env_steps={16 * 42}")
    hashes = {manifest(points(tmp_path / name)[-1])["sha256"] for name in ("whole", "parts")}
    assert len(hashes) == 1


@pytest.mark.parametrize("algo", ["pql", "eps_rainbow"])
@pytest.mark.fault(15)
def test_a_resume_point_of_an_older_release_goes_on_to_the_same_bits(tmp_path, monkeypatch, algo):
    """Format 1 held all rows of a ring and all of a sum tree."""

    def whole(ring):
        stores = {k: getattr(ring, k) for k in ("flags", "action", "reward")}
        counters = {"head": ring.live.head}
        return Rows({f"obs.{k}": v for k, v in ring.obs.items()} | stores | counters)

    task = "pendulum" if algo == "pql" else "cartpole"
    setting = [f"algo={algo}", f"task={task}", "task.kwargs.max_episode_steps=4", "algo.batch_size=8"]
    skipped = () if algo == "pql" else ("algo.policy.hidden", "placement.threads.p")
    steps = [f"budget.env_steps={16 * n}" for n in (25, 42)]
    run(*(w for w in words(tmp_path / "whole", *setting, steps[1]) if not w.startswith(skipped)))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 1)
        patch.setattr(Replay, "state_dict", whole)
        patch.setattr(Replay, "used", lambda ring: ring.rows)
        run(*(w for w in words(tmp_path / "parts", *setting, steps[0]) if not w.startswith(skipped)))
    assert len(checkpoint.load(points(tmp_path / "parts")[-1])[0]["collector/replay/0/flags"]) == 4096
    resume(tmp_path / "parts", steps[1])
    assert len({manifest(points(tmp_path / name)[-1])["sha256"] for name in ("whole", "parts")}) == 1


@pytest.mark.parametrize(
    ("algo", "task", "head"),
    [("pql", "pendulum", "obs.policy"), ("eps_rainbow", "cartpole", "level0"), ("r2d2", "tmaze", "carry")],
)
def test_a_resume_point_is_as_large_as_what_the_replay_holds(tmp_path, algo, task, head):
    """With a ring of a thousand times the rows the point is no larger, except for a few nodes of a sum tree."""
    only = {
        "r2d2": (
            *(f"algo.{word}" for word in ("warmup_steps=64", "lstm=8", "length=8", "burn_in=4", "period=4")),
            *("algo.replay_ratio=0.5", "budget.env_steps=1040"),
        )
    }
    sizes, lengths = [], []
    for capacity in (4096, 4096000):
        given = words(tmp_path / str(capacity), f"task={task}", f"algo={algo}", *only.get(algo, ()))
        skipped = ("algo.policy.hidden", "placement.threads.p") if algo != "pql" else ()
        run(*(w for w in given if not w.startswith(skipped)), f"replay.capacity={capacity}", "algo.batch_size=8")
        point = points(tmp_path / str(capacity))[-1]
        sizes.append((point / "tensors.safetensors").stat().st_size)
        lengths.append({k: len(v) for k, v in checkpoint.load(point)[0].items() if k.endswith(head)})
    assert sizes[0] <= sizes[1] < sizes[0] + 4096
    assert lengths[0] == lengths[1] != {}


def test_resuming_drops_rows_that_come_again(tmp_path):
    run(*words(tmp_path, "budget.env_steps=320"))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"steps/env": 999, "lost": 1}\n{"steps/env": 9')  # after the last save; then cut off
    resume(tmp_path, "budget.env_steps=640")
    log = rows(tmp_path)
    assert not any("lost" in row for row in log)
    steps = [row["steps/env"] for row in log]
    assert steps == sorted(steps)
    assert steps[-1] == 640


def test_a_resumed_run_keeps_its_new_budget_and_the_words(tmp_path):
    import yaml

    run(*words(tmp_path))
    resume(tmp_path, "budget.env_steps=640")
    assert resume_config(tmp_path, []).budget.env_steps == 640
    said = yaml.safe_load((tmp_path / "overrides.yaml").read_text())
    assert said == [*words(tmp_path), "budget.env_steps=640"]


@pytest.mark.fault(12)
def test_resuming_falls_back_to_the_point_before(tmp_path):
    run(*words(tmp_path, "budget.env_steps=320"))
    resume(tmp_path, "budget.env_steps=480")
    assert len(points(tmp_path)) == 2
    (points(tmp_path)[-1] / "tensors.safetensors").write_bytes(b"")
    with pytest.warns(PqlWarning, match="trying the previous one"):
        summary = resume(tmp_path, "budget.env_steps=640")
    assert summary.env_steps == 640
    assert [manifest(p)["counters"]["steps"] for p in points(tmp_path)] == [20, 40]
    assert len(list((tmp_path / "checkpoints").glob("skipped-*"))) == 1


class Forgetful:
    """A simulator without ``state_dict``."""

    seeds: ClassVar[list[int]] = []

    def __init__(self, num_envs, device):
        self.env = Pendulum(num_envs, device, max_episode_steps=7)
        self.spec, self.step, self.close = self.env.spec, self.env.step, self.env.close

    def reset(self, seed=None):
        self.seeds.append(seed)
        return self.env.reset(seed)


class Remembering(Forgetful):
    """The same, with its ``state_dict``."""

    def __init__(self, num_envs, device):
        super().__init__(num_envs, device)
        self.state_dict, self.load_state_dict = self.env.state_dict, self.env.load_state_dict


register("forgetful", Forgetful)
register("remembering", Remembering)
SPLIT = {
    "one": (),
    "groups": ("placement.groups=2",),
    "replicas": ("algo=appo_replicas", "algo.central.order=turns", "algo.horizon=4"),
}


def test_resuming_a_simulator_that_cannot_restore_its_state_says_so(tmp_path):
    run(*words(tmp_path, "task=env", "task.name=forgetful"))
    with pytest.warns(PqlWarning, match="this simulator cannot restore its state: episodes begin again"):
        assert resume(tmp_path, "budget.env_steps=640").env_steps == 640


@pytest.mark.filterwarnings("ignore:this simulator cannot restore")
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("name", ["forgetful", "remembering"])
def test_a_resumed_simulator_that_cannot_restore_its_state_gets_new_seeds(tmp_path, monkeypatch, name, split):
    """New at every resume, and the same at two resumes from the same point."""
    first, again = tmp_path / "first", tmp_path / "again"
    unread = ("algo", "replay", "placement") if split == "replicas" else ()
    setting = [word for word in words(first) if not word.startswith(unread)]
    sittings = []

    def seeds(sitting):
        monkeypatch.setattr(Forgetful, "seeds", [])
        sitting()
        sittings.append(Forgetful.seeds)

    seeds(lambda: run(*setting, "task=env", f"task.name={name}", *SPLIT[split]))
    shutil.copytree(first, again)
    for steps in (640, 960):
        seeds(lambda steps=steps: resume(first, f"budget.env_steps={steps}"))
    seeds(lambda: resume(again, "budget.env_steps=640"))
    new, old, later, repeated = sittings
    assert old == repeated
    assert len(new) == len({*new}) == (1 if split == "one" else 2)
    if name == "remembering":
        assert new == old == later
    else:
        assert len({*new, *old, *later}) == 3 * len(new)
    end = checkpoint.load(points(again)[-1])
    middle = checkpoint.load(points(first)[0])
    assert end[1]["counters"]["steps"] == middle[1]["counters"]["steps"]
    assert differences(end[0], middle[0]) == []


def test_a_run_without_resume_points_says_so(tmp_path):
    run(*words(tmp_path, "checkpoint.replay=false"))
    assert points(tmp_path) == []
    assert load_policy(tmp_path)(torch.zeros(2, 3)).shape == (2, 1)
    with pytest.raises(ConfigError, match=r"checkpoint\.replay=false keeps none"):
        resume(tmp_path)


# -- files ----------------------------------------------------------------------------------------------------------


def test_the_run_directory_holds_what_it_takes_to_know_what_was_run(tmp_path):
    import yaml

    folder = tmp_path / "a" / "b"
    said = words(folder, "eval.final=true", "algo=td3")
    summary = run(*said)
    names = " ".join(sorted(p.name for p in folder.iterdir()))
    assert names == "checkpoints config.yaml env.json git.json metrics.jsonl overrides.yaml summary.json"
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best", "last", "tick-000000000012"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["algo"]["name"] == "td3"
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == said
    facts = json.loads((folder / "env.json").read_text())
    assert (facts["torch"], facts["device"]) == (torch.__version__, "cpu")
    assert facts["cpu"]  # its name
    assert 1 <= facts["cores"] <= facts["cpus"]  # of this machine's, those that the run may use
    assert set(json.loads((folder / "git.json").read_text())) == {"commit", "dirty"}
    written = json.loads((folder / "summary.json").read_text())
    assert " ".join(sorted(written)) == (
        "checkpoint env_steps episodes interrupted length_mean return_iqm return_mean return_median run_dir seconds "
        "success updates_p updates_v"
    )
    assert all(written[k] == getattr(summary, k) for k in written)
    last = [row for row in rows(folder) if "eval/return_mean" in row][-1]
    for name in ("return_mean", "return_median", "return_iqm", "length_mean"):
        assert written[name] == last[f"eval/{name}"]
    assert (summary.length_mean, summary.success) == (200.0, None)
    assert (summary.run_dir, summary.episodes, summary.env_steps) == (str(folder), 2, 320)
    assert (summary.updates_v, summary.updates_p) == (24, 12)
    assert summary.checkpoint == str(folder / "checkpoints" / "last")
    assert not summary.interrupted


KEYS = """
time/seconds steps/env updates/v updates/p ratio/v_per_step ratio/p_per_v lag/policy_ticks throughput/env_steps_per_s
throughput/updates_per_s busy/collector busy/v busy/p memory/host_gib replay/bootstrap_lost
"""


def test_metrics_are_numbers_under_the_documented_keys(tmp_path):
    run(*words(tmp_path, "eval.final=true", "task.kwargs.max_episode_steps=5"))
    log = rows(tmp_path)
    training = [row for row in log if "updates/v" in row]
    assert len(training) >= 1
    assert all(set(row) >= {*KEYS.split()} for row in training)
    assert all(type(v) in (int, float) for row in log for v in row.values())
    assert any({"train/return_mean", "train/length_mean", "train/episodes"} <= set(row) for row in training)
    assert {"time/seconds", "steps/env", "eval/return_mean", "eval/return_iqm"} <= set(log[-1])


@pytest.mark.parametrize(
    ("setting", "v_per_step", "p_per_v", "lag"),
    [
        (("algo=pql",), 2.0, 0.5, 1),
        (("algo=ddpg",), 2.0, 0.5, 0),
        (("algo=pql", "algo.v_per_step=0.5", "algo.p_per_v=0.2"), 0.5, 0.2, 1),
        (("algo=sac", "algo.v_per_step=3", "algo.p_per_v=1"), 3.0, 1.0, 0),
    ],
)
def test_ratios_and_lag_are_exact_in_every_row(tmp_path, setting, v_per_step, p_per_v, lag):
    run(*words(tmp_path, *setting, "budget.env_steps=1600"))
    resume(tmp_path, "budget.env_steps=3200")
    training = [row for row in rows(tmp_path) if "updates/v" in row]
    assert len(training) >= 3
    assert {(row["ratio/v_per_step"], row["ratio/p_per_v"], row["lag/policy_ticks"]) for row in training} == {
        (v_per_step, p_per_v, lag)
    }


def test_terms_of_the_reward_are_summed_per_episode(tmp_path):
    """Counter logs 1 a row, so the term is the episode's length, exactly; fillers do not count."""
    run(*words(tmp_path, *TASKS["counter"][:2], "task.kwargs.terminate_every=0", "budget.env_steps=640"))
    told = [row for row in rows(tmp_path) if "episode/rows" in row]
    assert told
    assert all(row["episode/rows"] == row["train/length_mean"] == 7.0 for row in told)


def test_a_run_directory_that_holds_a_run_is_refused(tmp_path):
    run(*words(tmp_path))
    with pytest.raises(ConfigError, match=rf"run_dir={tmp_path}: expected a new folder; .*: pql resume {tmp_path}"):
        run(*words(tmp_path))


def test_a_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*: expected a folder that can be written"):
        run(*words(tmp_path / "file" / "x"))


# -- budgets --------------------------------------------------------------------------------------------------------


def test_env_steps_end_a_run_exactly(tmp_path):
    assert run(*words(tmp_path, "budget.env_steps=481")).env_steps == 496  # whole ticks of 16


def test_seconds_end_a_run(tmp_path):
    summary = run(*words(tmp_path, "budget.env_steps=null", "budget.seconds=0.3"))
    assert 0.3 <= summary.seconds < 3
    assert summary.updates_v > 0


def test_a_target_return_ends_a_run(tmp_path):
    target = ("budget.env_steps=null", "budget.target_return=-1e9", "eval.every_seconds=0.05")
    summary = run(*words(tmp_path, *target, "task.kwargs.max_episode_steps=5"))
    assert summary.updates_v > 0
    assert any("eval/return_mean" in row for row in rows(tmp_path))


def test_a_target_that_is_not_reached_does_not_end_it(tmp_path):
    target = ("budget.env_steps=1600", "budget.target_return=1e9", "eval.every_seconds=0.05")
    assert run(*words(tmp_path, *target, "task.kwargs.max_episode_steps=5")).env_steps == 1600


def test_interrupting_saves_and_skips_the_final_evaluation(tmp_path):
    interrupt = Interrupt()

    def stop(session, row):
        interrupt.asked = True

    config = compose(words(tmp_path, "budget.env_steps=1000000", "eval.final=true"))
    summary = Session(config, quiet=True, callbacks=[stop], interrupt=interrupt).train()
    assert (summary.interrupted, summary.return_mean, summary.episodes) == (True, None, 0)
    assert manifest(points(tmp_path)[-1])["counters"]["steps"] * 16 == summary.env_steps < 1_000_000


def test_interrupting_before_the_first_tick_still_saves(tmp_path):
    interrupt = Interrupt()
    interrupt.asked = True
    summary = Session(compose(words(tmp_path)), quiet=True, interrupt=interrupt).train()
    assert (summary.updates_v, summary.env_steps) == (0, 0)
    assert resume(tmp_path).env_steps == 320


class Slow(Counter):
    """A step takes 10 ms."""

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


def test_seconds_bound_the_warm_up_too(tmp_path):
    """A hundred times longer than the budget; what is left of it comes when the run is resumed."""
    register("slow", lambda num_envs, device: Slow(num_envs, device))
    more = ("algo.warmup_steps=2000", "replay.capacity=40000", "budget.seconds=0.2", "budget.env_steps=null")
    summary = run(*words(tmp_path, "task=env", "task.name=slow", *more))
    assert 0.2 <= summary.seconds < 10
    assert summary.updates_v == 0
    assert 0 < summary.env_steps < 16 * 2000
    assert manifest(points(tmp_path)[-1])["counters"]["seconds"] == summary.seconds
    again = resume(tmp_path, f"budget.seconds={summary.seconds + 0.2}")
    assert again.updates_v == 0
    assert again.env_steps > summary.env_steps


def test_seconds_of_all_rows_include_the_warm_up(tmp_path):
    register("slow", lambda num_envs, device: Slow(num_envs, device))
    run(*words(tmp_path, "task=env", "task.name=slow"))
    assert rows(tmp_path)[0]["time/seconds"] >= 0.01 * 8
    assert all(row["throughput/env_steps_per_s"] <= 16 / 0.01 for row in rows(tmp_path))  # since the first tick


CUT = [
    ("algo=pql",),
    ("algo=impala", "algo.warmup_steps=8"),
    ("algo=a3c", "algo.warmup_steps=8", "algo.replicas=2", "algo.central.order=turns"),
    ("algo=pql", "placement.groups=2"),
]


@pytest.mark.fault(14)
@pytest.mark.parametrize("setting", CUT, ids=lambda s: "-".join(s))
def test_a_warm_up_that_was_cut_goes_on_bit_for_bit(tmp_path, setting):
    """At its fourth step; also where the learner's first rows, or the second replica's warm-up, are still to come."""
    interrupt, made = Interrupt(), []

    class Pressed(Pendulum):
        def step(self, action):
            made.append(self)
            interrupt.asked = interrupt.asked or len(made) == 4
            return super().step(action)

    register("pressed", lambda num_envs, device: Pressed(num_envs, device, max_episode_steps=5))
    same = ("task=env", "task.name=pressed", *setting, "budget.env_steps=640")
    base = words(Path()) if setting[0] == "algo=pql" else AS_ROLLOUTS
    config, whole = (compose([*base, *same, f"run_dir={tmp_path / name}"]) for name in ("parts", "whole"))
    first = Session(config, quiet=True, interrupt=interrupt).train()
    assert (first.interrupted, first.updates_v) == (True, 0)
    assert 0 < first.env_steps < 8 * config.num_envs
    resume(tmp_path / "parts")
    Session(whole, quiet=True).train()
    (a, facts_a), (b, facts_b) = (checkpoint.load(points(tmp_path / name)[-1]) for name in ("whole", "parts"))
    assert differences(a, b) == []
    names = [k for k in facts_a["counters"] if k != "seconds"]
    assert [facts_a["counters"][k] for k in names] == [facts_b["counters"][k] for k in names]


AS_ROLLOUTS = [w for w in words(Path()) if not w.startswith(("replay.", "algo.", "run_dir=", "placement."))]


@pytest.mark.fault(8)
def test_interrupting_the_final_evaluation_does_not_wait_for_it(tmp_path):
    interrupt, begun = Interrupt(), threading.Event()

    class Endless(Counter):
        """Two copies are those of the evaluation."""

        def step(self, action):
            if self.spec.num_envs == 2:
                begun.set()
                time.sleep(0.01)
            return super().step(action)

    register("endless", lambda num_envs, device: Endless(num_envs, device, episode_length=10**6, terminate_every=0))

    def press() -> None:
        begun.wait(30)
        interrupt.asked = True

    threading.Thread(target=press).start()
    config = compose(words(tmp_path, "task=env", "task.name=endless", "eval.final=true"))
    before = time.perf_counter()
    summary = Session(config, quiet=True, interrupt=interrupt).train()
    assert (summary.interrupted, summary.return_mean, summary.env_steps) == (True, None, 320)
    assert time.perf_counter() - before < 20
    assert len(points(tmp_path)) == 1


@pytest.mark.fault(8)
def test_interrupting_a_final_evaluation_before_its_first_row_is_no_error(tmp_path):
    """On remote actors: all of them are gone, and the user gives up waiting for them."""
    interrupt = Interrupt()

    class Deserted(Counter):
        ended = False

        def step(self, action):
            step = super().step(action)
            if not self.ended:
                return step
            interrupt.asked = True
            return step._replace(valid=torch.zeros_like(step.valid), first=torch.zeros_like(step.first))

    def end(session, row):
        env.ended = session.env_steps == 320

    env = Deserted(16, "cpu")
    config = compose(words(tmp_path, "eval.final=true"))
    summary = Session(config, env=env, quiet=True, interrupt=interrupt, callbacks=[end]).train()
    assert (summary.interrupted, summary.return_mean, summary.episodes, summary.env_steps) == (True, None, 0, 320)
    assert len(points(tmp_path)) == 1
    assert not any("eval/return_mean" in row for row in rows(tmp_path))


@pytest.mark.parametrize("at", ["given", "built"])
def test_a_final_evaluation_without_an_episode_is_reported(tmp_path, monkeypatch, at):
    """All remote actors were lost in it: the policy is kept, and the error says what is missing."""
    monkeypatch.setattr("pql.run.evaluator.run_episodes", lambda *_, **__: Evaluation([], []))
    config = compose(words(tmp_path, "eval.final=true"))
    env = Counter(16, "cpu") if at == "given" else None  # given: evaluated on the training environments
    lost = r"the final evaluation \(none of its episodes ended; pql eval repeats it\)"
    with pytest.warns(PqlWarning, match="an evaluation has no result"), pytest.raises(RunError, match=lost):
        Session(config, env=env, quiet=True).train()
    assert read_summary(tmp_path)["return_mean"] is None
    assert (tmp_path / "checkpoints" / "last").is_dir()
    assert not any("eval/return_mean" in row for row in rows(tmp_path))


# -- checkpoints of a run -------------------------------------------------------------------------------------------


def test_resume_points_are_written_on_time_and_rotate(tmp_path):
    session = opened(*words(tmp_path, "checkpoint.every_seconds=1e-9", "checkpoint.keep=3", "budget.env_steps=208"))
    session.train()
    assert [manifest(p)["counters"]["ticks"] for p in points(tmp_path)] == [3, 4, 5]  # 13 steps, 8 of them warm-up


@pytest.mark.fault(13, count=20)
def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch, trial):
    real, calls, ticks = tensorfile.write, [], 1 + trial % 4  # the disk is full after so many ticks

    def full(path, tensors):
        calls.append(path)
        if len(calls) > 2 * ticks:
            raise OSError(28, "No space left on device")
        return real(path, tensors)

    monkeypatch.setattr(tensorfile, "write", full)
    missing = "but not all of it could be kept in .*: checkpoint last .*No space left.*; checkpoint tick-0.*5 "
    with (
        pytest.warns(PqlWarning, match="not written, the run continues: .*No space left"),
        pytest.raises(RunError, match=missing),
    ):
        run(*words(tmp_path, "checkpoint.every_seconds=1e-9", "budget.env_steps=208"))
    assert read_summary(tmp_path)["env_steps"] == 208
    assert len(calls) == 12  # a policy and a resume point, after each of five ticks and at the end
    monkeypatch.undo()
    assert manifest(points(tmp_path)[-1])["counters"]["ticks"] == ticks
    assert resume(tmp_path, "budget.env_steps=224").env_steps == 224


def test_best_is_the_policy_of_the_best_evaluation(tmp_path):
    session = opened(*words(tmp_path))
    state = {v: {"policy": {"w": torch.full((2,), v)}} for v in (1.0, 2.0, 3.0)}
    for value, result in ((1.0, -5.0), (2.0, 7.0), (3.0, 6.0)):
        session.evaluations.record(
            EvaluationReport({"time/seconds": value, "steps/env": 1.0}, state[value], Evaluation([result], [1.0]))
        )
    session.closing.close()
    tensors, facts = checkpoint.load(tmp_path / "checkpoints" / "best")
    assert (tensors["policy/w"].tolist(), facts["return_mean"], session.best) == ([2.0, 2.0], 7.0, 7.0)


def test_a_resumed_run_knows_its_best(tmp_path):
    """Also where the best came after the resume point: in the final evaluation."""
    run(*words(tmp_path, "eval.final=true"))
    facts = manifest(tmp_path / "checkpoints" / "best")
    session = Session(resume_config(tmp_path, []), resume=True, quiet=True)
    session.closing.close()
    assert session.best == facts["return_mean"] > float("-inf")


# -- old weights ----------------------------------------------------------------------------------------------------


def state_of(source: Path, prefix: str) -> dict[str, torch.Tensor]:
    tensors, _ = checkpoint.load(source)
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@pytest.mark.parametrize("algo", ["pql", "pql_d", "pql_sac", "td3"])
def test_init_from_a_run_starts_with_its_policy_and_critics(tmp_path, algo):
    run(*words(tmp_path / "old", f"algo={algo}"))
    session = opened(*words(tmp_path / "new", f"algo={algo}", "seed=5", f"init_from={tmp_path / 'old'}"))
    session.closing.close()
    old = state_of(tmp_path / "old" / "checkpoints" / "last", "policy/")
    assert differences(old, dict(session.parts.policy.state_dict())) == []
    critics = state_of(points(tmp_path / "old")[-1], "learners/v/state/critic/")
    assert differences(critics, dict(session.parts.learners["v"].state.critic.state_dict())) == []
    fresh = opened(*words(tmp_path / "fresh", f"algo={algo}", "seed=5"))
    fresh.closing.close()
    assert differences(old, dict(fresh.parts.policy.state_dict())) != []
    assert session.parts.collector.normalizer.moments["policy"].count == 16 * (1 + 20) + 16 * 8  # continues the count


def test_a_run_on_a_live_object_goes_on_with_that_object_only(tmp_path):
    env = Counter(16, "cpu", episode_length=5)
    more = [w for w in words(tmp_path) if not w.startswith(("task=", "num_envs="))]
    pql.train(*more, env=env, quiet=True)
    with pytest.raises(ConfigError, match="task=counter: expected the live object"):
        Session(resume_config(tmp_path, ["budget.env_steps=640"]), resume=True, quiet=True)
    config = resume_config(tmp_path, ["budget.env_steps=640"])
    assert Session(config, env=Counter(16, "cpu", episode_length=5), resume=True, quiet=True).train().env_steps == 640


@pytest.mark.parametrize("algo", ["pql", "pql_d", "pql_sac", "td3"])
def test_init_from_a_resume_point_starts_with_its_critics_too(tmp_path, algo):
    run(*words(tmp_path / "old", f"algo={algo}"))
    source = points(tmp_path / "old")[-1]
    session = opened(*words(tmp_path / "new", f"algo={algo}", "algo.critic.lr=0.02", f"init_from={source}"))
    session.closing.close()
    for worker in ("v", "p"):
        new = checkpoint.flatten(session.parts.learners[worker].state.state_dict())
        old = state_of(source, f"learners/{worker}/state/")
        changed = {k.split("/")[0] for k in differences(old, new)}
        assert all("optimizer" in name or name == "clock" for name in changed), changed  # a new run's own counts
    assert session.parts.learners["v"].state.optimizer.lr.item() == pytest.approx(0.02)  # this run's own


def test_init_from_a_run_without_a_target_policy_starts_one_from_the_policy(tmp_path):
    run(*words(tmp_path / "old", "algo=pql"))
    session = opened(*words(tmp_path / "new", "algo=td3", f"init_from={points(tmp_path / 'old')[-1]}"))
    session.closing.close()
    state = session.parts.learners["p"].state.state_dict()
    assert differences(dict(state["target"]), dict(state["policy"])) == []


def test_init_from_keeps_the_runs_own_reward_scale(tmp_path):
    run(*words(tmp_path / "old", "task.reward_scale=0.5"))
    session = opened(*words(tmp_path / "new", "task.reward_scale=0.25", f"init_from={tmp_path / 'old'}"))
    session.closing.close()
    assert session.parts.collector.normalizer.reward_scale.item() == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algo.policy.hidden=[24]", "algo.policy.hidden=[24]: expected [16], as in init_from="),
        ("algo.policy.activation=tanh", "algo.policy.activation=tanh: expected relu, as in init_from="),
        ("algo.normalize_obs=false", "algo.normalize_obs=false: expected true, as in init_from="),
        ("algo=pql_sac", "algo.family=sac: expected ddpg, as in init_from="),
        ("algo.critic.ensemble=3", "algo.critic.ensemble=3: expected 2, as in init_from="),
        ("task=lqr", "expected a run with this task's obs ("),
    ],
)
def test_init_from_other_networks_or_spaces_is_refused_by_name(tmp_path, change, message):
    run(*words(tmp_path / "old"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        opened(*words(tmp_path / "new", change, f"init_from={points(tmp_path / 'old')[-1]}"))


# -- live environments and callbacks --------------------------------------------------------------------------------

LIVE = [w for w in words(Path("x")) if not w.startswith(("task=", "num_envs=", "device=", "run_dir="))]


def test_training_on_a_live_environment_with_callbacks(tmp_path):
    env = Pendulum(num_envs=8, max_episode_steps=10)
    seen = []

    def watch(session, row):
        seen.append((session.env_steps, row["steps/env"]))
        session.stop = len(seen) == 2

    more = ("budget.env_steps=1000000", "eval.final=true", f"run_dir={tmp_path}")
    summary = pql.train(*LIVE, *more, env=env, callbacks=[watch], quiet=True)
    assert len(seen) == 4  # two rows, the last one of training, the evaluation
    assert summary.env_steps == seen[-1][1] < 1_000_000
    assert not summary.interrupted
    assert summary.episodes == 8  # the live environment's own
    assert summary.return_mean < 0
    assert env.step(torch.zeros(8, 1)).reward.shape == (8,)  # not closed
    assert load_policy(summary.run_dir)(torch.zeros(5, 3)).shape == (5, 1)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("num_envs=4", "num_envs=4: expected 8, as the given environment has"),
        ("task=lqr", "task=lqr: expected no task together with env="),
        ("budget.target_return=0", "budget.target_return=0.0: expected null: this environment cannot be evaluated"),
    ],
)
def test_what_does_not_go_with_a_live_environment(tmp_path, word, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        pql.train(*LIVE, f"run_dir={tmp_path}", "eval.every_seconds=1", word, env=Pendulum(num_envs=8), quiet=True)


def test_a_callback_that_fails_ends_the_run(tmp_path):
    def fail(session, row):
        raise ValueError("from the callback")

    before = threading.active_count()
    with pytest.raises(ValueError, match="from the callback"):
        run(*words(tmp_path), callbacks=[fail])
    assert threading.active_count() == before  # workers and evaluator are gone


# -- before the simulator starts ------------------------------------------------------------------------------------


@pytest.mark.fault(17, count=20)
def test_a_replay_that_cannot_fit_is_refused_with_its_bytes_and_the_largest_that_fits(tmp_path, monkeypatch, trial):
    """The largest size that the message names is accepted; with another row of each environment it is refused."""
    monkeypatch.setattr("pql.engine.placement.host_memory", lambda: (1 + trial) << 20)
    with pytest.raises(
        ConfigError, match=r"at most (\d+) here: this many need [\d.,]+ GiB, [\d.,]+ GiB are free"
    ) as error:
        opened(*words(tmp_path / "x", "task=counter", f"replay.capacity={10**8 * (1 + trial)}"))
    fits = int(re.search(r"at most (\d+)", str(error.value))[1])
    with pytest.raises(ConfigError, match=f"replay.capacity={fits + 16}: expected at most {fits} here"):
        opened(*words(tmp_path / "x", "task=counter", f"replay.capacity={fits + 16}"))
    with opened(*words(tmp_path / "x", "task=counter", f"replay.capacity={fits}")).closing:
        pass


@pytest.mark.fault(18, count=20)
def test_memory_that_runs_out_in_a_run_is_named_with_its_sizes_and_the_checkpoint_is_kept(tmp_path, trial):
    """In any worker, as torch and Python report it; the run can be resumed."""
    said = [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        MemoryError("Unable to allocate 3.00 GiB for an array"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ][trial % 3]
    run(*words(tmp_path))
    point = points(tmp_path)[-1]
    before = manifest(point)["sha256"]
    session = Session(resume_config(tmp_path, ["budget.env_steps=100000"]), resume=True, quiet=True)
    worker = session.parts.workers[("collector", "v", "p")[trial // 3 % 3]]
    real, calls = worker.job, []

    def job(count):
        calls.append(count)
        if len(calls) > trial:
            raise said
        return real(count)

    worker.job = job
    sizes = r"at most [\d.]+ GiB used by this process, [\d.]+ GiB free\): resume the run where there is more, or choose"
    with pytest.raises(RunError) as error:
        session.train()
    last = str(error.value).splitlines()[-1]
    assert last.startswith("out of memory: ")
    assert re.search(sizes, last)
    assert str(said) in last
    assert checkpoint.load(point)[1]["sha256"] == before
    assert resume(tmp_path, "budget.env_steps=480").env_steps == 480


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("replay.capacity=1000000000000", "replay.capacity=1000000000000: expected at most "),
        ("replay.capacity=64", "replay.capacity=64: expected at least "),
        ("task.kwargs.episode_lenth=3", "task.kwargs.episode_lenth=3: expected one of the keywords "),
        ("task.kwargs.episode_length=0", "task.kwargs.episode_length=0: expected a whole number, at least 1"),
    ],
)
def test_what_cannot_fit_is_refused_before_the_simulator_starts(tmp_path, monkeypatch, word, message):
    started, real = [], Counter.__init__

    @functools.wraps(real)
    def start(self, *args, **kwargs):
        started.append(self)
        real(self, *args, **kwargs)

    monkeypatch.setattr(Counter, "__init__", start)
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(*words(tmp_path, "task=counter", word))
    assert started == []
    assert list(tmp_path.iterdir()) == []


def test_a_quiet_run_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PqlWarning)
        run(*words(tmp_path, "eval.final=true"))


@pytest.mark.parametrize(
    ("algo", "changed", "rate", "saved"),
    [
        ("pql", "algo.critic.lr=0.25", "learners/v/state/optimizer/lr", 0.25),
        ("ppo", "algo.policy.lr=0.25", "learners/learner/state/optimizer/lr", 0.25),
        ("ppo", "algo.clip=0.4", "learners/learner/state/optimizer/lr", 5e-4),
    ],
)
def test_a_resumed_run_may_change_settings_that_updates_read(tmp_path, algo, changed, rate, saved):
    """Also when its first sitting with them did not reach a resume point: the older one keeps its own."""
    rollouts = ["task=lqr", "algo=ppo", *QUICK[:4], "algo.warmup_steps=0", "algo.lr_schedule=fixed", "eval.final=false"]
    mine = [w for w in WORDS if "budget" not in w] if algo == "pql" else [*rollouts, "eval.num_envs=2"]
    run(*mine, "algo.policy.lr=5e-4", f"run_dir={tmp_path}", "budget.env_steps=640", "budget.seconds=null")
    first, name = points(tmp_path)[-1], changed.partition("=")[0]
    amend_config(tmp_path, resume_config(tmp_path, [changed]), [changed])  # what a sitting that is killed has written
    with pytest.warns(PqlWarning, match=f"differs from the run in {name}: the settings in its resume point are used"):
        resume(tmp_path, changed, "budget.env_steps=1280")
    last = points(tmp_path)[-1]
    assert last != first
    assert checkpoint.load(last)[0][rate].item() == pytest.approx(saved)
    was, now = (dict(leaves(from_dict(manifest(path)["config"])))[name] for path in (first, last))
    assert (was, now) == (dict(leaves(compose([*mine, "algo.policy.lr=5e-4"])))[name], float(changed.partition("=")[2]))
    resume(tmp_path, "budget.env_steps=1920")  # and stays
    assert checkpoint.load(points(tmp_path)[-1])[0][rate].item() == pytest.approx(saved)
