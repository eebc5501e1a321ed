"""On-policy runs as a whole: presets, output files, bit-exact resume, recurrent policies."""

import copy
import json
import re
from dataclasses import replace

import pytest
import run_files
import torch
from conftest import bits, differences, start, ticks
from ppo_runs import VARIANTS, config_of
from run_files import manifest, points, rows, run
from sampling import sample, some_of

import pql
from pql.cli.main import main
from pql.config.compose import compose
from pql.contract.env import MultiDiscrete
from pql.engine.executors import Inline
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.run.build import build
from pql.run.episodes import run_episodes
from pql.run.policy import fresh_policy, load_policy, snapshot
from pql.run.session import Session
from pql.run.store import checkpoint

WORDS = (
    *("algo=ppo", *run_files.QUICK, "algo.policy.hidden=[16]", "eval.final=false"),
    *("algo.horizon=4", "algo.epochs=2", "algo.minibatches=4"),
)


def words(run_dir, *more):
    return [*WORDS, f"run_dir={run_dir}", *more]


CASES = {
    "gaussian": ("task=pendulum", "task.kwargs.max_episode_steps=11", "task.kwargs.stagger=true"),
    "squashed, scaled rewards": [
        *("task=lqr", "algo.squash=true", "algo.entropy_coef=0.01", "algo.normalize_reward=true")
    ],
    "categorical, shared": ("task=cartpole", "algo.shared=true"),
    "lstm, filler rows": ("task=counter", "task.kwargs.autoreset=next_step", "algo.lstm=8"),
    "a2c, linear": (
        *("task=recall", "algo.optimizer=rmsprop", "algo.lr_schedule=linear"),
        *("algo.anneal_steps=2000", "algo.kl_stop=0.001"),
    ),
}


@pytest.mark.fault(14, form="ppo", count=10)
@some_of(CASES, keep=["squashed, scaled rewards", "lstm, filler rows"], name="case")
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, case, trial):
    half, full = (16 * (8 + 4 * n) for n in (5, 10))
    second, a, facts = run_files.whole_and_resumed(tmp_path, [*WORDS, *case, f"seed={trial}"], half, full)
    assert {"learners/learner", "collector/env", "collector/normalizer"} <= {"/".join(k.split("/")[:2]) for k in a}
    assert any("/policy/" in k for k in a)
    assert [facts["counters"][k] for k in ("ticks", "steps", "learner")] == [10, 48, 80]
    assert (second.updates_v, second.updates_p) == (80, 80)


def test_a_run_writes_what_every_run_writes(tmp_path):
    summary = run(*words(tmp_path, "task=cartpole", "budget.env_steps=2000", "eval.final=true"))
    log = [row for row in rows(tmp_path) if "updates/v" in row]
    last = log[-1]
    assert last["updates/v"] == last["updates/p"] == summary.updates_v == summary.updates_p == 8 * 30
    assert last["steps/env"] == summary.env_steps == 16 * (8 + 4 * 30)
    assert (last["ratio/v_per_step"], last["ratio/p_per_v"], last["lag/policy_ticks"]) == (2.0, 1.0, 0)
    names = {k for row in log for k in row}
    assert {"busy/collector", "busy/learner", "rollout/bootstrap_lost", "policy/kl", "policy/lr"} <= names
    assert {"loss/critic", "policy/entropy", "value/explained_variance", "train/return_mean"} <= names
    assert summary.episodes == 2
    assert manifest(tmp_path / "checkpoints" / "last")["spec"]["action"] == {"discrete": 2}
    action = load_policy(tmp_path)(torch.zeros(3, 4))
    assert (action.shape, action.dtype) == ((3,), torch.int64)


class Combination(Counter):
    """The counter, which shows its step alone, paid for each of two numbers that is right: 2 of 3, and 1 of 2."""

    @classmethod
    def describe(cls, *args, **kwargs):
        return replace(super().describe(*args, **kwargs), action=MultiDiscrete((3, 2), (-1, 4)))

    def step(self, action):
        assert (action.shape, action.dtype) == ((self.spec.num_envs, 2), torch.int64)
        right, step = (action == torch.tensor([2, 1])).float().sum(1), super().step(action)
        return step._replace(reward=right, obs=self._shown(step.obs), final_obs=self._shown(step.final_obs))

    def reset(self, seed=None):
        return self._shown(super().reset(seed))

    def reset_where(self, mask):
        return self._shown(super().reset_where(mask))

    def _shown(self, obs):
        return {"policy": obs["policy"] * torch.tensor([0.0, 1.0])}


SEVERAL = ("task=env", f"task.name={__name__}:Combination", "seed=1", "algo.policy.lr=1e-2")


@pytest.mark.parametrize("algo", ["ppo", "a2c", "impala", "appo"])
def test_several_discrete_actions_at_once_are_learned(tmp_path, algo):
    one = [w for w in words(tmp_path, *SEVERAL) if algo == "ppo" or ("minibatches" not in w and "epochs" not in w)]
    one = [f"algo={algo}" if w == "algo=ppo" else w for w in one if algo == "ppo" or "horizon" not in w]
    run(*one, "budget.env_steps=8000")
    about = manifest(tmp_path / "checkpoints" / "last")["spec"]
    assert (about["action"], about["action_start"]) == ({"multi_discrete": [3, 2]}, [-1, 4])
    for epsilon, a_step in ((0.0, 2), (1.0, 1 / 3 + 1 / 2)):  # the policy, and chance
        found = pql.evaluate(tmp_path, episodes=64, num_envs=64, epsilon=epsilon, trust=True)
        assert found["return_mean"] / found["length_mean"] == pytest.approx(a_step, abs=0.2)


def test_several_discrete_actions_resume_bit_for_bit_and_leave_with_their_start(tmp_path):
    pytest.importorskip("onnxruntime")
    half, full = (16 * (8 + 4 * n) for n in (5, 10))
    run_files.whole_and_resumed(tmp_path, [*WORDS, *SEVERAL], half, full, trust=True)
    parts = tmp_path / "parts"
    live, obs = load_policy(parts, trust=True), torch.randn(9, 2)
    for scale, first in ((True, [-1, 4]), (False, [0, 0])):
        forms = ("pt2", "onnx") if scale else ("pt2",)
        pql.export_policy(parts, out=tmp_path / f"{scale}", formats=forms, scale=scale, trust=True)
        for form in forms:
            policy = load_policy(tmp_path / f"{scale}" / f"policy.{form}", trust=True)
            assert policy.spec.action == MultiDiscrete((3, 2), (-1, 4))
            assert torch.equal(policy(obs), live(obs))
            raw = policy._function([obs])[0]
            assert torch.equal(raw, live(obs) + torch.tensor(first))
            action = {"kind": "multi_discrete", "size": 2, "nvec": [3, 2], "start": [-1, 4], "scaled": scale}
            assert policy.metadata["action"] == action


@pytest.mark.parametrize("algo", ["dqn", "r2d2", "pqn", "sac", "pql", "reppo"])
def test_other_algorithms_name_those_for_several_actions(tmp_path, algo):
    with pytest.raises(ConfigError, match=r"this one has MultiDiscrete.*: for that, algo=ppo, a2c, appo, impala"):
        run(f"algo={algo}", "device=cpu", "num_envs=4", *SEVERAL[:3], f"run_dir={tmp_path}")


def test_the_command_line_trains_and_evaluates(tmp_path, capsys):
    assert main(["train", *words(tmp_path, "task=recall", "algo.lstm=4", "budget.env_steps=500")]) == 0
    out = capsys.readouterr().out
    assert "the tick is bounded by" in out
    assert re.search(r"\(busy: learner \d+%, collector \d+%\)", out)
    assert main(["eval", str(tmp_path), "num_envs=4"]) == 0
    (file,) = (tmp_path / "evaluations").iterdir()
    assert json.loads(file.read_text())["length_mean"] == 6.0
    capsys.readouterr()
    assert main(["train", *words(tmp_path / "x", "algo.minibatches=5")]) == 2
    assert capsys.readouterr().err.startswith("pql: algo.minibatches=5: expected a divisor of num_envs=16 x")


def test_lost_final_observations_are_counted_and_filler_rows_left_out():
    kwargs = {"autoreset": "next_step", "final_obs": "never", "episode_length": 5, "terminate_every": 0}
    config = config_of({"task": {"name": "counter", "kwargs": kwargs}, "algo": {"warmup_steps": 0}})
    parts = start(config, Inline())
    ticks(parts, 3)  # 24 rows; episodes of five and a filler row: ends on rows 5, 11, 17, 23
    assert parts.gauges["rollout/bootstrap_lost"] == 4 * 8
    assert parts.learners["learner"].state.returns.count == 8 * (24 - 4 - 4)


def test_a_simulator_without_state_goes_on_with_an_empty_memory(monkeypatch):
    monkeypatch.delattr(Counter, "state_dict")
    config = config_of({"task": {"name": "counter"}}, VARIANTS["lstm"])
    parts = ticks(start(config, Inline()), 3)
    again = build(config, executor=Inline())
    again.collector.start(7)
    again.load_state_dict(parts.state_dict(), 3)
    assert parts.collector.actor.memory.carry.abs().max() > 0
    assert again.collector.actor.memory.carry.abs().max() == 0
    assert bool(again.collector.actor.memory.fresh.all())
    again.workers["collector"].run(8)
    segment = again.collector.stores[0].segment()
    from pql.algos import ppo

    state = again.learners["learner"].state
    assert state.progress.carry.abs().max() > 0
    assert ppo.value_carry(state, segment).abs().max() == 0


# -- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["gaussian", "squashed", "categorical", "lstm"])
def test_a_policy_acts_as_the_collector_would_without_noise(variant):
    parts = ticks(start(config_of(VARIANTS[variant]), Inline()), 2)
    policy = fresh_policy(parts.config, parts.env.spec, "cpu")
    policy.load_state_dict(snapshot(parts))
    net, norm = parts.learners["learner"].state.net.policy, parts.collector.normalizer
    obs = torch.randn(5, parts.env.spec.obs["policy"].shape[0])
    with torch.no_grad():
        known = norm({"policy": obs})
        params = net.step(known, torch.zeros(5, 16))[0] if variant == "lstm" else net(known)
        mean = params.chunk(2, -1)[0]
        want = {"squashed": mean.tanh(), "categorical": params.argmax(-1)}.get(variant, mean.clamp(-1, 1))
    torch.testing.assert_close(policy(obs), want, rtol=0, atol=1e-6)  # weights lie elsewhere: the last bit may differ


def test_a_recurrent_policy_remembers_until_it_is_reset():
    parts = ticks(start(config_of(VARIANTS["lstm"]), Inline()), 4)
    policy = fresh_policy(parts.config, parts.env.spec, "cpu")
    policy.load_state_dict(snapshot(parts))
    frames = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))
    state, explicit = policy.initial_state(3), []
    assert {k: v.shape for k, v in state.items()} == {"carry": (3, 16)}
    for obs in frames:
        action, state = policy.act(obs, state)
        explicit.append(action)
    implicit = [policy(obs) for obs in frames]
    assert all(torch.equal(a, b) for a, b in zip(explicit, implicit, strict=True))
    policy.reset()
    assert torch.equal(policy(frames[0]), explicit[0])
    assert not torch.equal(policy(frames[0]), explicit[0])
    policy.reset(torch.tensor([True, False, True]))
    assert torch.equal(policy(frames[0]) == explicit[0], torch.tensor([[True], [False], [True]]))
    with pytest.raises(ValueError, match="2 observations for a memory of 3 environments"):
        policy(frames[0, :2])


def test_evaluation_forgets_between_episodes():
    parts = start(config_of({"task": {"name": "recall"}}, VARIANTS["lstm"]), Inline())
    policy, env, calls = fresh_policy(parts.config, parts.env.spec, "cpu"), parts.env, []

    def spy(mask=None, reset=policy.reset):
        calls.append(None if mask is None else bool(mask.all()))
        reset(mask)

    policy.reset = spy  # type: ignore[method-assign]
    run_episodes(env, policy, 0)
    assert calls == [None, False, False, False, False, False, True]


def test_a_new_run_starts_from_old_weights(tmp_path):
    run(*words(tmp_path / "a", "task=pendulum", "budget.env_steps=1000"))
    old = checkpoint.load(points(tmp_path / "a")[-1])[0]
    again = ("task=pendulum", "budget.env_steps=1000", f"init_from={tmp_path / 'a'}")
    session = Session(compose(words(tmp_path / "b", *again, "algo.epochs=1")), quiet=True)
    state = session.parts.learners["learner"].state
    for part in ("policy", "value", "returns"):
        mine = checkpoint.flatten(getattr(state, part).state_dict())
        assert differences(mine, {k: old[f"learners/learner/state/{part}/{k}"] for k in mine}) == []
    session.parts.schedule.tick()  # the collector acts with them
    session.closing.close()
    for word, wanted in (("algo.lstm=4", "null"), ("algo.normalize_value=false", "true")):
        with pytest.raises(ConfigError, match=f"{word}: expected {wanted}, as in init_from="):
            Session(compose(words(tmp_path / "c", *again, word)), quiet=True)


# -- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("isaac_ant", (4096, 16, 32768, 4, 0.008)),
        ("allegro_hand", (16384, 8, 32768, 5, 0.016)),
        ("shadow_hand", (16384, 8, 32768, 5, 0.016)),
        ("franka_cube_stack", (8192, 32, 16384, 5, 0.008)),
    ],
)
def test_the_papers_tasks_have_its_sizes_on_a_gpu(task, expected):
    words = ["device=cpu", "scale=gpu"]
    config = compose([*words, "algo=ppo", f"task={task}"])
    size = config.num_envs * config.algo.horizon // config.algo.minibatches
    assert (config.num_envs, config.algo.horizon, size, config.algo.epochs, config.algo.kl_target) == expected
    for more in (["algo=ppo", "scale=cpu"], ["algo=a2c"]):  # they are not for these
        assert compose([*words, f"task={task}", *more]).algo == compose([*words, "task=ant", *more]).algo


def test_a_scale_gives_every_algorithm_its_own_settings():
    off, on, a2c = (compose(["device=cpu", f"algo={a}"]) for a in ("pql", "ppo", "a2c"))
    assert (off.num_envs, on.algo.clip, a2c.algo.clip) == (32, 0.2, None)
    assert (a2c.algo.epochs, a2c.algo.optimizer) == (1, "rmsprop")
    assert on.budget == off.budget == a2c.budget
    assert compose(["device=cpu", "algo=ppo", "num_envs=64"]).num_envs == 64


def test_presets_of_rollouts_for_atari_are_those_of_the_papers():
    ppo, a2c, q = (compose(["device=cpu", f"algo={a}", "task=atari", "task.game=pong"]) for a in ("ppo", "a2c", "pqn"))
    p, net = ppo.algo, ppo.algo.policy
    assert ppo.num_envs * p.horizon // p.minibatches == 512
    assert (p.epochs, p.gae_lambda, p.clip, net.lr, net.eps) == (4, 0.95, 0.2, 1e-3, 1e-5)
    assert (p.lr_schedule, p.anneal_clip, p.anneal_steps) == ("linear", True, ppo.budget.env_steps)
    p, net = a2c.algo, a2c.algo.policy
    assert (p.horizon, p.epochs, p.minibatches, p.clip, p.optimizer) == (5, 1, 1, None, "rmsprop")
    assert (net.lr, net.grad_clip, p.value_coef, p.entropy_coef) == (7e-4, 0.5, 0.25, 0.01)
    p, net = q.algo, q.algo.critic
    assert (q.num_envs, p.horizon, p.epochs, p.minibatches, p.q_lambda, p.optimizer) == (128, 32, 2, 32, 0.65, "radam")
    assert (net.lr, net.grad_clip, p.epsilon.start, p.epsilon.end) == (2.5e-4, 10, 1, 0.001)
    assert p.epsilon.steps == q.budget.env_steps // 10
    assert ppo.algo.policy.hidden == a2c.algo.policy.hidden == q.algo.critic.hidden == []
    assert ppo.algo.encoder.kind == a2c.algo.encoder.kind == q.algo.encoder.kind == "nature"
    assert min(c.algo.warmup_steps for c in (ppo, a2c, q)) > 0  # games that do not run in step
    assert ppo.task.reward_clip == a2c.task.reward_clip == q.task.reward_clip == 1.0
    short = compose(["device=cpu", "algo=ppo", "task=atari", "task.game=pong", "budget.env_steps=1_000_000"])
    assert short.algo.anneal_steps == 1_000_000
    pong = compose(["device=cpu", "algo=ppo", "task=pong", "atari=sticky"])
    assert (pong.task.name, pong.task.game, pong.task.kwargs["sticky"]) == ("atari", "pong", 0.25)
    assert (pong.algo.encoder.channels, pong.algo.anneal_steps) == ([16, 32], 5_000_000)
    lstm = compose(["device=cpu", "algo=ppo", "task=atari", "task.game=pong", "algo.lstm=512"])
    assert lstm.num_envs % lstm.algo.minibatches == 0


@pytest.mark.parametrize("lstm", sample(["null", "8"], keep=["8"]))
def test_a_lost_life_ends_returns_and_no_memory(lstm):
    """On real frames: what acted is what learns, though lives were lost in between; a row that lost one bootstraps
    from nothing, and the game continues with the next."""
    pytest.importorskip("ale_py")
    from pql.algos import ppo

    words = [
        *("algo=ppo", "task=atari", "task.game=breakout", "task.kwargs.threads=1", "device=cpu", "num_envs=8"),
        *("algo.horizon=64", f"algo.lstm={lstm}", "graphs=off", "algo.warmup_steps=0", "algo.encoder.channels=[4,4]"),
        *("algo.encoder.features=16", "placement.matmul=exact"),
        *("placement.threads.collector=1", "placement.threads.v=1"),
    ]
    parts = ticks(start(compose(words), Inline()), 1)
    parts.workers["collector"].run(64)
    rollout, learner = parts.collector.stores[0], parts.learners["learner"]
    segment, state, settings = rollout.segment(), learner.state, learner.settings
    lost = (segment.alive == 0) & ~segment.first
    assert lost.any()
    assert segment.obs["policy"].dtype == torch.uint8
    assert bool(((segment.mask == 1) | ~lost).all())  # such rows are learned from
    assert bool((segment.goes_on[lost] == 0).all())
    columns, _ = ppo.prepare(state, segment, settings)
    reward = segment.reward[lost]  # the target of such a row is only its reward
    torch.testing.assert_close(columns["target"][lost], reward, atol=1e-5, rtol=0)
    (batch, *_) = learner.draw(parts.counts.updates["learner"], learner.gen)
    with torch.no_grad():
        params, _ = ppo.evaluate_minibatch(state.net, batch)
    ratio = torch.exp(state.net.policy.dist.log_prob(params, batch.action) - batch.log_prob)
    assert (ratio - 1).abs().max() < 1e-5


def test_private_weights_are_the_published_ones():
    parts = ticks(start(config_of(), Inline()), 2)
    acting = copy.deepcopy(parts.collector.actor.policy.state_dict())
    parts.workers["collector"].run(8)  # pulls
    newest = parts.learners["learner"].state.policy.state_dict()
    assert differences(dict(parts.collector.actor.policy.state_dict()), dict(newest)) == []
    assert differences(dict(acting), dict(newest)) != []
    assert parts.schedule.lag == 0
    assert "learners/learner/state/optimizer/lr" in bits(parts)
