"""Evaluation: one episode per environment, exact rewards; concurrent with the run without slowing it; policy files."""

import dataclasses
import re
import threading
import time
from typing import Any

import pytest
import torch
from conftest import small_config
from run_files import points, rows, words
from stand_in import pretend

import pql
from pql.cli.main import main
from pql.config.compose import compose
from pql.contract.env import Discrete, EnvSpec
from pql.contract.registry import register
from pql.envs.classic import Pendulum
from pql.envs.toy import FILLER_REWARD, Counter
from pql.errors import ConfigError, PqlWarning, RunError
from pql.run.environment import build_env
from pql.run.episodes import EpisodeRules, Evaluation, StoppedError, run_episodes
from pql.run.evaluator import CapturedEnv, Evaluator
from pql.run.policy import fresh_policy, load_policy, snapshot
from pql.run.session import Session
from pql.run.store.checkpoint import load


def zero(obs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.zeros(len(obs["policy"]), 2)


def episode(env: Counter, i: int, e: int = 0) -> tuple[float, int]:
    """Return and length of environment ``i``'s episode ``e``, from the formulas alone."""
    at, which = torch.tensor([i]), torch.tensor([e])
    length = 2 if bool(env.restarts(at, which)) else int(env.length_of(at, which))
    return sum(float(env.reward_of(at, which, at * 0 + s)) for s in range(length)), length


def test_an_evaluation_wants_no_random_lengths(monkeypatch):
    """The adapters' word for staggered first episodes."""
    given = []

    def adapter(num_envs, device, random_lengths=False):
        given.append(random_lengths)
        return Counter(num_envs)

    monkeypatch.setattr("pql.contract.registry._registered", {"adapter": adapter})
    config = small_config(task={"name": "adapter", "kwargs": {"random_lengths": True}})
    assert [build_env(config).spec.num_envs, build_env(config, 3).spec.num_envs] == [8, 3]
    assert given == [True, False]


OPTIONS = [{}, {"restart_every": 2}, {"terminate_every": 0}, {"terminate_every": 1}]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("num_envs", "rules"), [(24, {}), (4, {"episodes": 11}), (4, {"episodes": 3})])
def test_every_environment_plays_its_share_of_the_episodes(num_envs, rules, autoreset, options):
    """11 episodes in 4 environments: three each in the first three, two in the last, however short they are. By default
    one in each; lengths differ, so most environments see several until the last one's first has ended."""
    env = Counter(num_envs=num_envs, autoreset=autoreset, episode_length=9, **options)
    result = run_episodes(env, zero, seed=0, rules=EpisodeRules(**rules))
    want = [episode(env, i, e) for e in range(3) for i in range(num_envs)][: rules.get("episodes", num_envs)]
    assert result.returns == [r for r, _ in want]
    assert result.lengths == [n for _, n in want]
    if num_envs == 24 and options.get("terminate_every") != 0:
        assert len(set(result.lengths)) > 3


def test_an_evaluation_of_a_staggered_task_plays_whole_episodes():
    """Training may begin in the middle of the time limit; what an evaluation counts may not."""
    kwargs = ["task.kwargs.stagger=true", "task.kwargs.max_episode_steps=6"]
    config = compose(["device=cpu", "task=pendulum", "num_envs=16", *kwargs])
    training, evaluation = (
        run_episodes(build_env(config, count), lambda obs: torch.zeros(16, 1), seed=0).lengths for count in (None, 16)
    )
    assert min(training) < 6
    assert evaluation == [6] * 16
    env = build_env(config)  # the training's own, where there is no second one
    assert (
        run_episodes(
            env, lambda obs: torch.zeros(16, 1), seed=0, rules=EpisodeRules(staggered=True, episodes=20)
        ).lengths
        == [6] * 20
    )


def test_a_final_evaluation_on_the_trainings_own_simulator_plays_whole_episodes(tmp_path, monkeypatch):
    class Single(Pendulum):
        @classmethod
        def describe(cls, *args: Any, **kwargs: Any) -> EnvSpec:
            return dataclasses.replace(super().describe(*args, **kwargs), single_instance=True)

    monkeypatch.setattr("pql.contract.registry._registered", {"single": Single})
    task = ["task=env", "task.name=single", "task.kwargs.stagger=true", "task.kwargs.max_episode_steps=6"]
    session = Session(compose(words(tmp_path, *task, "eval.final=true")), quiet=True)
    session.train()
    assert session.last_eval is not None
    assert session.last_eval.lengths == [6] * session.parts.env.spec.num_envs


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_a_lost_life_ends_no_episode(autoreset):
    env = Counter(num_envs=5, autoreset=autoreset, episode_length=9)
    real = env.step

    def step(action):
        step = real(action)
        return step._replace(terminated=step.terminated | (step.obs["policy"][:, 1] == 3) & ~step.truncated)

    env.step = step
    result = run_episodes(env, zero, seed=0)
    assert list(zip(result.returns, result.lengths, strict=True)) == [episode(env, i) for i in range(5)]


def test_short_episodes_are_not_favoured():
    """Environment 0 plays episodes of 1 row, the other one of 20: the first to end would all be short."""
    env = Counter(num_envs=2, episode_length=20, terminate_every=1)
    env.length_of = lambda env, episode: torch.where(env == 0, 1, 20) + episode * 0  # type: ignore[method-assign]
    result = run_episodes(env, zero, seed=0, rules=EpisodeRules(episodes=10))
    assert result.length == 10.5
    assert sorted(result.lengths) == [1.0] * 5 + [20.0] * 5


def test_an_episode_succeeds_where_any_of_its_rows_does():
    """In row 3 of an episode of environment 1, in the first row of environment 2, and in a filler row: never."""
    env = Counter(num_envs=3, episode_length=4, terminate_every=0, autoreset="next_step")
    env.spec = dataclasses.replace(env.spec, log=("rows", "success"))
    real = env.step

    def step(action):
        at, who = env._step.clone(), env._env
        row = real(action)
        solved = ((who == 1) & (at == 3)) | ((who == 2) & (at == 0) & (env._episode == 0))
        return row._replace(log={**row.log, "success": torch.where(row.valid, solved.float(), 1.0)})

    env.step = step  # type: ignore[method-assign]
    result = run_episodes(env, zero, seed=0, rules=EpisodeRules(episodes=6))
    assert result.successes == [False, True, True, False, True, False]
    assert result.success == 0.5
    assert result.measures()["success"] == 0.5
    assert "success" not in Evaluation([1.0], [1.0]).measures()


def test_what_is_logged_is_averaged_over_the_steps_of_all_episodes():
    """Episodes of 2 rows in environment 0 and 6 in environment 1; filler rows and later episodes do not count."""
    env = Counter(num_envs=2, episode_length=6, terminate_every=1, autoreset="next_step")
    env.length_of = lambda env, episode: torch.where(env == 0, 2, 6) + episode * 0  # type: ignore[method-assign]
    env.spec = dataclasses.replace(env.spec, log={"error": "step", "success": "sum", "level": "episode"})
    real = env.step

    def step(action):
        first = env._episode == 0
        row = real(action)
        error = torch.where(row.valid & first, torch.tensor([1.0, 5.0]), torch.nan)
        level = torch.where(row.terminated | row.truncated, torch.tensor([3.0, 8.0]), 0.0)
        return row._replace(log={"error": error, "success": torch.zeros(2), "level": level})

    env.step = step  # type: ignore[method-assign]
    result = run_episodes(env, zero, seed=0)
    assert result.lengths == [2.0, 6.0]
    assert (result.whole, result.measures()["episode/level"]) == ({"level": 5.5}, 5.5)
    assert result.terms == {"error": (2 * 1.0 + 6 * 5.0) / 8}
    assert result.measures()["step/error"] == 4.0
    cut = run_episodes(env, zero, seed=0, rules=EpisodeRules(max_steps=3))
    assert (cut.lengths, cut.whole) == ([2.0, 3.0], {"level": 3.0})  # a cut episode has no end to log it


def test_kinds_of_logged_values_are_checked_when_the_environment_is_made():
    allowed = r"spec\.log\[level\]=episod: expected one of sum, step, episode \(did you mean episode\?\)"
    with pytest.raises(ConfigError, match=allowed):
        EnvSpec("x", 1, {}, Discrete(2), torch.device("cpu"), log={"level": "episod"})  # type: ignore[dict-item]


def counted(env: Counter) -> list[int]:
    """Calls of ``env.step`` from now on."""
    calls, real = [], env.step
    env.step = lambda action: calls.append(1) or real(action)  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("given", [False, True], ids=["default", "given"])
def test_an_environment_that_does_not_end_counts_for_exactly_the_limit(monkeypatch, autoreset, given):
    monkeypatch.setattr("pql.run.episodes.LONGEST", 30 if given else 10)
    env = Counter(num_envs=2, episode_length=10**6, terminate_every=0, autoreset=autoreset)
    env.spec, calls = dataclasses.replace(env.spec, max_episode_steps=None), counted(env)
    limit = {"max_steps": 10} if given else {}
    result = run_episodes(env, zero, seed=0, rules=EpisodeRules(**limit))
    zeroth, at = torch.zeros(10, dtype=torch.int64), torch.arange(10)
    want = [float(env.reward_of(zeroth + i, zeroth, at).sum()) for i in range(2)]
    assert (result.returns, result.lengths) == (want, [10.0, 10.0])
    assert len(calls) == 10 + (autoreset == "next_step")
    del calls[:]
    several = run_episodes(
        env, zero, seed=0, rules=EpisodeRules(episodes=40, **limit)
    )  # a second one might never begin
    assert (several.returns, several.lengths) == (want, [10.0, 10.0])
    assert len(calls) == 64  # the next look after the limit


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("declared", [True, False])
def test_episodes_as_long_as_the_limit_are_whole(autoreset, declared):
    env = Counter(num_envs=3, episode_length=9, terminate_every=0, autoreset=autoreset)
    env.length_of = lambda env, episode: torch.full_like(env, 6)  # type: ignore[method-assign]
    env.spec = dataclasses.replace(env.spec, max_episode_steps=9 if declared else None)
    want = [episode(env, i, e) for e in range(3) for i in range(3)]
    result = run_episodes(env, zero, seed=0, rules=EpisodeRules(episodes=9, max_steps=6))
    assert (result.returns, result.lengths) == ([r for r, _ in want], [6.0] * 9)


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_a_limit_below_the_tasks_own_cuts_every_episode(autoreset):
    """A later one is awaited: the task's own limit says that it will begin."""
    env = Counter(num_envs=3, episode_length=9, autoreset=autoreset)
    result = run_episodes(env, zero, seed=0, rules=EpisodeRules(episodes=8, max_steps=4))
    want = []
    for e, i in [(e, i) for e in range(3) for i in range(3)][:8]:
        length, at = min(episode(env, i, e)[1], 4), torch.tensor([i])
        want.append((sum(float(env.reward_of(at, at * 0 + e, at * 0 + s)) for s in range(length)), length))
    assert list(zip(result.returns, result.lengths, strict=True)) == want
    assert min(result.lengths) < max(result.lengths) == 4


def endless(num_envs, device):
    env = Pendulum(num_envs, device, max_episode_steps=10**9)
    env.spec = dataclasses.replace(env.spec, max_episode_steps=None)
    return env


def test_the_limit_of_an_endless_task_is_said_and_can_be_set(tmp_path, monkeypatch, capsys):
    register("endless", endless)
    monkeypatch.setattr("pql.run.episodes.LONGEST", 1234)
    task, said = ("task=env", "task.name=endless"), "endless has no time limit: evaluations cut its episodes after"
    said = said.replace("endless", endless(1, "cpu").spec.name, 1)
    assert main(["train", *words(tmp_path / "one", *task, "eval.final=true")]) == 0
    told = capsys.readouterr().out
    assert f"{said} 1,234 steps (eval.max_steps)\n" in told
    assert told.index(said) < told.index("over 2 episodes of 1,234.0 steps")
    assert main(["train", *words(tmp_path / "two", *task, "eval.final=true", "eval.max_steps=20")]) == 0
    told = capsys.readouterr().out
    assert "no time limit" not in told
    assert "over 2 episodes of 20.0 steps" in told
    assert main(["train", *words(tmp_path / "off", *task)]) == 0
    assert "no time limit" not in capsys.readouterr().out
    assert pql.evaluate(tmp_path / "two", 2)["lengths"] == [20, 20]
    assert pql.evaluate(tmp_path / "two", 2, max_steps=7)["lengths"] == [7, 7]
    with pytest.warns(PqlWarning, match=f"^{re.escape(said)} 1,234 steps"):
        assert pql.evaluate(tmp_path / "one", 2)["lengths"] == [1234, 1234]
    assert main(["eval", str(tmp_path / "one"), "episodes=2", "max_steps=9"]) == 0
    assert "9.0" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "one"), "max_steps=0"]) == 2


def test_evaluation_ends_early_where_all_episodes_have(monkeypatch):
    env = Counter(num_envs=4, episode_length=1000, terminate_every=1)
    env.length_of = lambda env, episode: torch.full_like(env, 5)  # type: ignore[method-assign]
    calls, real = [], env.step
    monkeypatch.setattr(env, "step", lambda action: calls.append(1) or real(action))
    assert run_episodes(env, zero, seed=0).lengths == [5.0] * 4
    assert len(calls) == 64


def test_filler_rows_inside_an_episode_do_not_count():
    env = Counter(num_envs=3, episode_length=4, terminate_every=0)
    real = env.step

    def step(action):
        row = real(action)
        filler = row.obs["policy"][:, 1] == 2  # every second row of an episode
        return row._replace(valid=~filler, reward=torch.where(filler, FILLER_REWARD, row.reward))

    env.step = step  # type: ignore[method-assign]
    result = run_episodes(env, zero, seed=0)
    assert result.lengths == [3.0] * 3
    assert result.returns == [3 * i + (0 + 2 + 3) / 8 for i in range(3)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16, 33])
def test_the_interquartile_mean_is_scipys_trimmed_mean(count):
    stats = pytest.importorskip("scipy.stats")
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).double().pow(3).tolist()
    result = Evaluation(x, [1.0] * count)
    assert result.iqm == pytest.approx(stats.trim_mean(x, 0.25), rel=1e-12)
    assert result.mean == pytest.approx(sum(x) / count)
    assert result.median == pytest.approx(stats.scoreatpercentile(x, 50), rel=1e-12)


# -- concurrent -----------------------------------------------------------------------------------------------------


class Gate(Counter):
    """Steps only while the gate is open."""

    def __init__(self, **options: Any):
        super().__init__(num_envs=2, episode_length=3, terminate_every=0, **options)
        self.open, self.entered, self.closed = threading.Event(), threading.Event(), False

    def step(self, action):
        self.entered.set()
        assert self.open.wait(10)
        return super().step(action)

    def close(self):
        self.closed = True


def evaluator(env: Gate) -> Evaluator:
    config = compose(words("x", "task=counter"))  # type: ignore[arg-type]
    return Evaluator(env, fresh_policy(config, env.spec, "cpu"), seed=0)


def state_of(one: Evaluator, value: float) -> dict[str, Any]:
    return {
        group: {k: torch.full_like(v, value) for k, v in part.items()}
        for group, part in one.policy.state_dict().items()
    }


def test_the_environment_is_made_ready_before_its_thread_runs():
    """Graphs that it captures then, on a GPU, need not be captured during the run."""
    asked: list[tuple[str, str]] = []

    class Captures(Gate):
        def prepare(self):
            asked.append(("prepare", threading.current_thread().name))

        def reset(self, seed=None):
            asked.append(("reset", threading.current_thread().name))
            return super().reset(seed)

    env = Captures()
    env.open.set()
    one = evaluator(env)
    assert asked == [("prepare", threading.current_thread().name)]
    assert one.request(state_of(one, 1.0), {})
    assert one.wait(5)
    one.close()
    assert asked[1:] == [("reset", "pql-evaluator")]


def test_a_request_while_busy_is_dropped_counted_and_returns_at_once():
    env = Gate()
    one = evaluator(env)
    assert one.request(state_of(one, 1.0), {"steps/env": 1.0})
    assert env.entered.wait(5)
    assert not one.request(state_of(one, 2.0), {"steps/env": 2.0})  # returns although the evaluation is stuck
    assert not one.wait(0.01)
    assert (one.dropped, one.reports.empty()) == (1, True)
    env.open.set()
    assert one.wait(5)
    report = one.reports.get()
    assert report.counters == {"steps/env": 1.0}
    assert report.outcome.lengths == [3.0, 3.0]
    one.close()
    assert env.closed


def test_a_report_holds_the_policy_that_was_evaluated():
    """Also when the next request comes before the report is read: its weights must not pass for the best ones."""
    env = Gate()
    env.open.set()
    one = evaluator(env)
    for value in (1.0, 2.0):
        assert one.request(state_of(one, value), {})
        assert one.wait(5)
    reports = [one.reports.get() for _ in range(2)]
    one.close()
    assert [{float(t.reshape(-1)[0]) for t in r.state["policy"].values()} for r in reports] == [{1.0}, {2.0}]


def test_closing_does_not_wait_for_the_episodes():
    env = Gate()
    env.spec = Counter.describe(num_envs=2, episode_length=10**6)
    env.episode_length = 10**6
    env.open.set()
    one = evaluator(env)
    one.request(state_of(one, 0.0), {})
    assert env.entered.wait(5)
    one.close()
    assert env.closed
    assert isinstance(one.reports.get().outcome, StoppedError)


@pytest.mark.fault(6, form="evaluator", count=25)
def test_an_evaluator_that_fails_ends_the_run_and_names_the_cause(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("simulator lost")

    monkeypatch.setattr("pql.run.evaluator.run_episodes", fail)
    session = Session(compose(words(tmp_path, "eval.final=true")), quiet=True)
    with pytest.raises(RunError, match="the evaluator failed: ValueError: simulator lost"):
        session.train()


def test_a_run_on_a_device_evaluates_with_a_captured_step(tmp_path, monkeypatch):
    pretend(monkeypatch)
    prepared = []
    prepare = CapturedEnv.prepare
    monkeypatch.setattr(CapturedEnv, "prepare", lambda self: prepare(self) or prepared.append(self._graph.graph))
    found = [
        Session(compose(words(tmp_path / g, "eval.final=true", f"graphs={g}")), quiet=True).train().return_mean
        for g in ("auto", "off")
    ]
    assert found[0] == found[1]
    assert [graph is not None for graph in prepared] == [True]


def test_evaluating_often_does_not_change_the_training(tmp_path):
    bits = []
    for every in ("null", "1e-9"):
        run_dir = tmp_path / every
        setting = (f"eval.every_seconds={every}", "task.kwargs.max_episode_steps=20", "budget.env_steps=640")
        Session(compose(words(run_dir, *setting)), quiet=True).train()
        bits.append(load(points(run_dir)[-1])[1]["sha256"])
    assert bits[0] == bits[1]


class Judged(Counter):
    """Succeeds in environment 0 only, and takes its time where it is evaluated (two environments, see ``words``)."""

    def __init__(self, num_envs: int, device: object):
        super().__init__(num_envs, episode_length=10, terminate_every=0)
        self.spec = dataclasses.replace(self.spec, log=("rows", "success"))

    def step(self, action):
        if self.spec.num_envs == 2:
            time.sleep(0.005)
        row = super().step(action)
        return row._replace(log={**row.log, "success": (self._env == 0).float()})


def test_a_run_tells_successes_and_drops_what_comes_while_it_evaluates(tmp_path):
    register("judged", Judged)
    setting = ("task=env", "task.name=judged", "eval.every_seconds=1e-9", "eval.final=true", "budget.env_steps=1600")
    summary = Session(compose(words(tmp_path, *setting)), quiet=True).train()
    told = [row for row in rows(tmp_path) if "eval/return_mean" in row]
    assert all(row["eval/success"] == 0.5 and row["eval/length_mean"] == 10 for row in told)
    assert all(row["eval/return_median"] == row["eval/return_mean"] == 5 + 45 / 8 for row in told)
    drops = [row["eval/dropped"] for row in told]
    assert drops == sorted(drops)
    assert drops[-1] > 5
    assert len(told) + drops[-1] >= 92  # one request a tick, and the last
    assert (summary.success, summary.return_median) == (0.5, 5 + 45 / 8)


# -- policies that travel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["pql", "pql_d", "pql_sac", "td3"])
def test_a_loaded_policy_acts_as_the_trained_one(tmp_path, algo):
    session = Session(compose(words(tmp_path, f"algo={algo}", "eval.final=true")), quiet=True)
    session.train()
    obs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) * 3
    parts = session.parts
    with torch.no_grad():
        want = parts.policy.module.mean_action(parts.collector.normalizer({"policy": obs}))
        raw = parts.policy.module.mean_action({"policy": obs})
    resume_point = next((tmp_path / "checkpoints").glob("tick-*"))
    for source in (tmp_path, tmp_path / "checkpoints" / "best", resume_point):
        policy = load_policy(source)
        assert torch.equal(policy(obs), want)
        assert torch.equal(policy({"policy": obs, "critic": obs}), want)
    assert not torch.equal(want, raw)  # the normaliser matters
    assert not want.requires_grad
    assert policy.spec.obs["policy"].shape == (3,)


def test_a_policy_without_a_normaliser(tmp_path):
    session = Session(compose(words(tmp_path, "algo.normalize_obs=false")), quiet=True)
    session.train()
    obs = torch.randn(8, 3)
    assert torch.equal(load_policy(tmp_path)(obs), session.parts.policy.module.mean_action({"policy": obs}))


def test_a_fresh_policy_leaves_torchs_own_generator_alone(tmp_path):
    session = Session(compose(words(tmp_path)), quiet=True)
    session.closing.close()
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    fresh_policy(session.config, session.parts.env.spec, "cpu")
    assert torch.equal(torch.rand(1), want)
    assert set(snapshot(session.parts)) == {"policy", "norm"}
