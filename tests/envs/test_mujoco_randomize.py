"""Domain randomisation, curricula and staggered starts of the MuJoCo tasks: their values."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import build, random_actions

from pql.config.compose import compose
from pql.contract.conformance import check_env
from pql.contract.env import make_env
from pql.contract.optional import Staged, set_stage, stage_of, supports
from pql.envs.mujoco.curriculum import Levels, linear, make_curriculum, succeed, survive
from pql.envs.mujoco.engine import BatchEngine, Listed
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.randomize import base_dofs
from pql.envs.mujoco.weights import InverseWeights
from pql.errors import ConfigError
from pql.run.environment import build_eval_env, in_play

ALL = {
    "mass": [0.7, 1.4],
    "friction": [0.5, 1.5],
    "gain": [0.8, 1.2],
    "push": 0.5,
    "push_interval": 0.2,
    "obs_noise": 0.01,
    "obs_delay": [0, 3],
}


pytestmark = pytest.mark.usefixtures("scratch")


def engine_of(env: MujocoVec) -> BatchEngine:
    assert isinstance(env.engine, BatchEngine)
    return env.engine


def test_factors_are_uniform_in_their_ranges_and_reach_the_model() -> None:
    n = 300
    env = build("walker2d", n, randomize={k: ALL[k] for k in ("mass", "friction", "gain")})
    env.reset(seed=0)
    batch, model = engine_of(env).batch, env.model
    mass = torch.from_numpy(batch.expand("body_mass"))[:, 1:] / torch.from_numpy(model.body_mass)[1:]
    inertia = torch.from_numpy(batch.expand("body_inertia"))[:, 1:] / torch.from_numpy(model.body_inertia)[1:]
    friction = torch.from_numpy(batch.expand("geom_friction")) / torch.from_numpy(model.geom_friction)
    gain = torch.from_numpy(batch.expand("actuator_gainprm"))[:, :, 0] / torch.from_numpy(model.actuator_gainprm)[:, 0]
    torch.testing.assert_close(inertia, mass[:, :, None].expand_as(inertia))
    torch.testing.assert_close(friction, friction[:, :1, :1].expand_as(friction))  # one factor for all geoms
    for values, (low, high) in ((mass, (0.7, 1.4)), (friction[:, 0, :1], (0.5, 1.5)), (gain, (0.8, 1.2))):
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
        spread = (high - low) / 12**0.5
        assert (values.mean(0) - (low + high) / 2).abs().max() < 5 * spread / n**0.5
        torch.testing.assert_close(values.std(0), torch.full_like(values[0], spread), rtol=0.15, atol=0)
    assert np.corrcoef(mass.T)[0, 1:].max() < 0.25  # bodies are drawn apart
    subtree = batch.expanded("body_subtreemass")  # derived constants follow
    assert subtree is not None
    np.testing.assert_allclose(subtree[:, 0], batch.expand("body_mass").sum(1))


def test_a_randomised_simulation_is_that_of_a_model_with_these_values() -> None:
    env = build("hopper", 3, randomize={k: ALL[k] for k in ("mass", "friction", "gain")})
    env.reset(seed=1)
    factors = env._randomizer.factors  # type: ignore[union-attr]
    model, by_hand = engine_of(env).batch.get_model(0), copy.copy(env.model)
    by_hand.body_mass[:] = env.model.body_mass * factors["mass"][0].numpy()
    by_hand.body_inertia[:] = env.model.body_inertia * factors["mass"][0].numpy()[:, None]
    by_hand.geom_friction[:] = env.model.geom_friction * float(factors["friction"][0])
    by_hand.actuator_gainprm[:] = env.model.actuator_gainprm * factors["gain"][0].numpy()[:, None]
    data = mujoco.MjData(by_hand)
    mujoco.mj_setConst(by_hand, data)
    np.testing.assert_array_equal(model.body_invweight0, by_hand.body_invweight0)
    data.qpos[:], data.qvel[:] = (env.engine.fields[name][0].numpy() for name in ("qpos", "qvel"))
    for action in random_actions(env, 10):
        env.step(action)
        data.ctrl[:] = action[0].numpy()
        mujoco.mj_step(by_hand, data, 4)
        np.testing.assert_array_equal(env.engine.fields["qpos"][0].numpy(), data.qpos)


@pytest.mark.parametrize("name", ["hopper", "ant", "humanoid", "pusher", "ballbalance"])
def test_inverse_weights_are_mujocos(name: str) -> None:
    rng, model = np.random.default_rng(0), copy.copy(build(name, 1).model)
    weights = InverseWeights(model, torch.device("cpu"))
    model.body_mass[:] *= rng.uniform(0.5, 2.0, model.nbody)
    model.body_inertia[:] *= rng.uniform(0.5, 2.0, (model.nbody, 1))
    dof, body = weights(torch.tensor(model.body_mass)[None], torch.tensor(model.body_inertia)[None])
    of_single = weights(torch.tensor(model.body_mass)[None].float(), torch.tensor(model.body_inertia)[None].float())
    assert {part.dtype for part in of_single} == {torch.float64}
    torch.testing.assert_close(of_single, (dof, body), rtol=1e-4, atol=1e-9)
    mujoco.mj_setConst(model, mujoco.MjData(model))
    np.testing.assert_allclose(dof[0], model.dof_invweight0, rtol=1e-6)
    np.testing.assert_allclose(body[0], model.body_invweight0, rtol=1e-6, atol=1e-12)


def test_each_episode_draws_anew_and_only_its_own_row() -> None:
    env = build("hopper", 4, randomize={"mass": [0.5, 2.0]})
    env.reset(seed=0)
    before = engine_of(env).batch.expand("body_mass").copy()
    env.reset_where(torch.tensor([False, True, False, False]))
    changed = (engine_of(env).batch.expand("body_mass") != before).any(1)
    assert changed.tolist() == [False, True, False, False]


def test_pushes_come_as_often_and_as_strong_as_asked() -> None:
    n, steps = 500, 40
    still = build("halfcheetah", n, max_episode_steps=1000)
    pushed = build("halfcheetah", n, max_episode_steps=1000, randomize={"push": 2.0, "push_interval": 0.5})
    jumps = []
    pushed.reset(seed=0)
    for _ in range(steps):
        before = pushed.engine.fields["qvel"].clone()
        pushed._randomizer.push(torch.ones(n))  # type: ignore[union-attr]
        jumps.append(pushed.engine.fields["qvel"] - before)
    jump = torch.stack(jumps)
    assert (jump[:, :, 1:] == 0).all()  # along the ground only
    hit = jump[:, :, 0] != 0
    assert hit.float().mean() == pytest.approx(still.task.dt / 0.5, rel=0.1)
    size = jump[:, :, 0][hit]
    assert 1.95 < size.abs().max() <= 2.0
    assert size.mean().abs() < 0.15
    assert size.std() == pytest.approx(4 / 12**0.5, rel=0.1)


def test_base_dofs() -> None:
    found = {
        name: base_dofs(build(name, 1).model) for name in ("ant", "hopper", "swimmer", "invertedpendulum", "reacher")
    }
    assert found == {"ant": [0, 1], "hopper": [0], "swimmer": [0, 1], "invertedpendulum": [0], "reacher": []}


def test_noise_has_its_standard_deviation_and_leaves_the_rest_alone() -> None:
    plain, noisy = build("halfcheetah", 200), build("halfcheetah", 200, randomize={"obs_noise": 0.05})
    action = random_actions(plain, 1)[0]
    gaps = [noisy.reset(seed=3)["policy"] - plain.reset(seed=3)["policy"]]
    a, b = plain.step(action), noisy.step(action)
    gaps += [b.obs["policy"] - a.obs["policy"]]
    assert torch.equal(a.reward, b.reward)
    for gap in gaps:
        assert gap.std() == pytest.approx(0.05, rel=0.05)
        assert gap.mean().abs() < 0.005


def test_a_delay_shows_old_observations_and_never_another_episodes() -> None:
    n, limit = 60, 7
    plain = build("halfcheetah", n, max_episode_steps=limit)
    late = build("halfcheetah", n, max_episode_steps=limit, randomize={"obs_delay": [1, 3]})
    late.reset(seed=0)
    plain.reset(seed=0)
    for t, action in enumerate(random_actions(plain, 2 * limit)):
        if t % limit == 0:  # the two draw differently: put them into the same state
            plain.engine.load_state(late.engine.state())
            seen = [plain.task.observe(plain.engine.fields, {})["policy"].float()]
            delay = late._randomizer._delay.clone()  # type: ignore[union-attr]
            assert sorted({*delay.tolist()}) == [1, 2, 3]
        step, true = late.step(action), plain.step(action)
        seen.append(true.final_obs["policy"])
        expected = torch.stack([seen[max(0, t % limit + 1 - int(d))][i] for i, d in enumerate(delay)])
        assert torch.equal(step.final_obs["policy"], expected)


def test_the_contract_holds_with_everything_on() -> None:
    """Among others that a seed and a saved state repeat all that is drawn, and levels."""
    env = build("hopper", 4, max_episode_steps=12, randomize=ALL, curriculum={"kind": "survive"}, stagger=True)
    report = check_env(env, steps=80)
    assert report.ok, str(report)


def test_stagger_spreads_the_first_ends_only() -> None:
    env = build("halfcheetah", 200, max_episode_steps=10, stagger=True)
    env.reset(seed=0)
    ends = torch.stack([env.step(action).truncated for action in random_actions(env, 20)])
    assert ends[:10].sum(0).tolist() == [1] * 200
    assert ends[:10].sum(1).min() >= 8
    assert torch.equal(ends[:10], ends[10:])  # whole episodes follow


def test_how_an_episode_ends_that_stagger_cut_short_moves_no_level() -> None:
    env = build("halfcheetah", 50, max_episode_steps=10, stagger=True, curriculum={"kind": "survive"})
    env.reset(seed=0)
    levels = []
    for action in random_actions(env, 20):
        env.step(action)
        levels.append(env._levels.level.clone())
    assert (levels[9] == 0).all()  # each has ended once, at the time limit
    assert levels[19].tolist() == pytest.approx([0.1] * 50)


def test_at_level_zero_nothing_is_randomised() -> None:
    env = build("hopper", 6, randomize=ALL, curriculum={"kind": "linear", "steps": 1e12})
    plain = build("hopper", 6)
    env.reset(seed=0), plain.reset(seed=0)
    np.testing.assert_array_equal(engine_of(env).batch.expand("body_mass"), np.tile(env.model.body_mass, (6, 1)))
    plain.engine.load_state(env.engine.state())
    for action in random_actions(env, 5):
        assert torch.equal(env.step(action).obs["policy"], plain.step(action).obs["policy"])


def test_what_is_drawn_is_a_group_for_critics() -> None:
    """Mass of each body, friction, gain of each actuator and delay, of the episode that an observation belongs to."""
    env = build("walker2d", 5, randomize={**ALL, "observe": True}, max_episode_steps=4)
    size = env.model.nbody + 1 + env.model.nu + 1
    assert env.spec.obs["privileged"].shape == (size,)
    before = env.reset(seed=1)["privileged"]
    batch, model = engine_of(env).batch, env.model
    for i, action in enumerate(random_actions(env, 8), 1):
        step = env.step(action)
        mass = torch.from_numpy(batch.expand("body_mass"))[:, 1:] / torch.from_numpy(model.body_mass)[1:]
        gain = torch.from_numpy(batch.expand("actuator_gainprm"))[:, :, 0] / model.actuator_gainprm[:, 0]
        shown = step.obs["privileged"].double()
        torch.testing.assert_close(shown[:, 1 : model.nbody], mass, rtol=1e-6, atol=0)
        torch.testing.assert_close(shown[:, model.nbody + 1 : -1], gain, rtol=1e-6, atol=0)
        assert torch.equal(shown[:, -1].long(), env._randomizer._delay)  # type: ignore[union-attr]
        assert torch.equal(step.final_obs["privileged"], before)  # type: ignore[index]
        assert torch.equal(step.obs["privileged"], before) == (i % 4 > 0)
        before = step.obs["privileged"]
    again = env.reset_where(torch.tensor([True, False, True, False, False]))["privileged"]
    assert (again != before).any(1).tolist() == [True, False, True, False, False]
    bare = {name: value for name, value in ALL.items() if name.startswith("push")}
    with pytest.raises(ConfigError, match=r"randomize\.observe=true: expected mass, friction, gain or obs_delay to be"):
        build("walker2d", 5, randomize={**bare, "observe": True})


def test_evaluations_for_play_are_of_the_nominal_model() -> None:
    words = ["task=walker2d", "device=cpu", *(f"task.kwargs.randomize.{k}={v}" for k, v in ALL.items())]
    config = compose([*words, "task.kwargs.randomize.observe=true", "eval.play=true"])
    env, plain, drawn = build_eval_env(config, 3), build("walker2d", 3), build_eval_env(compose(words), 3)
    assert isinstance(env, MujocoVec)
    assert isinstance(drawn, MujocoVec)
    assert (in_play(config, env.spec), in_play(compose(words), drawn.spec)) == (True, False)
    for one in (env, plain, drawn):
        one.reset(seed=0)
    nominal = np.tile(env.model.body_mass, (3, 1))
    np.testing.assert_array_equal(engine_of(env).batch.expand("body_mass"), nominal)
    assert (engine_of(drawn).batch.expand("body_mass") != nominal).any()  # as the training
    plain.engine.load_state(env.engine.state())
    for action in random_actions(env, 5):
        step = env.step(action)
        assert torch.equal(step.obs["policy"], plain.step(action).obs["policy"])
        assert step.obs["privileged"][:, :-1].unique().tolist() == [1.0]
        assert step.obs["privileged"][:, -1].tolist() == [0.0] * 3


def test_evaluations_are_at_the_trainings_level() -> None:
    given: dict[str, Any] = {"max_episode_steps": 4, "curriculum": {"kind": "linear", "steps": 64}}
    env, evaluation = build("halfcheetah", 4, **given), build("halfcheetah", 2, **given)
    assert not supports(build("halfcheetah", 2), Staged)
    env.reset(0)
    for action in random_actions(env, 8):
        env.step(action)
    assert stage_of(env) == {"stage/level": 0.5, "stage/total": 32}
    set_stage(evaluation, stage_of(env))
    evaluation.reset(0)
    assert evaluation._levels.level.tolist() == [0.5, 0.5]
    steps = [evaluation.step(action).log["level"] for action in random_actions(evaluation, 8)]
    assert [s.tolist() for s in steps[3::4]] == [[0.5, 0.5], [40 / 64, 40 / 64]]
    set_stage(evaluation, {"stage/level": 7.0})  # of a checkpoint that nobody checked
    evaluation.reset(0)
    assert evaluation._levels.level.tolist() == [1.0, 1.0]


def test_curricula_move_levels_as_they_say() -> None:
    ended = torch.tensor([True, True, True, False])
    steps, reward = torch.tensor([100, 60, 20, 70]), torch.zeros(4)
    levels = Levels(survive(0.2, 0.1), 4, 100, torch.device("cpu"))
    levels.level = torch.tensor([0.5, 0.5, 0.05, 0.5])
    assert levels.follow(reward, None, ended, steps).tolist() == pytest.approx([0.5, 0.5, 0.05, 0.0])
    assert levels.level.tolist() == pytest.approx([0.7, 0.5, 0.0, 0.5])

    levels = Levels(linear(16), 4, 100, torch.device("cpu"))
    levels.follow(reward, None, ended, steps)
    assert levels.level.tolist() == [0.25, 0.25, 0.25, 0.0]

    levels = Levels(succeed(0.2, 0.1), 4, 100, torch.device("cpu"))
    levels.follow(reward, torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.bool), steps)
    levels.follow(reward, torch.zeros(4), ended, steps)  # a success earlier in the episode counts
    assert levels.level.tolist() == pytest.approx([0.0, 0.2, 0.0, 0.0])


def test_a_curriculum_of_ones_own_sees_returns() -> None:
    def by_return(level: Tensor, progress: Any) -> Tensor:
        return (progress.returns > 2.5).float()

    levels = Levels(by_return, 2, 10, torch.device("cpu"))
    no, yes = torch.tensor([False, False]), torch.tensor([True, True])
    levels.follow(torch.tensor([1.0, 2.0]), None, no, torch.tensor([1, 1]))
    levels.follow(torch.tensor([1.0, 1.0]), None, yes, torch.tensor([2, 2]))
    assert levels.level.tolist() == [0.0, 1.0]
    levels.abandon(Listed(yes))  # as new episodes begin
    levels.follow(torch.tensor([1.0, 1.0]), None, yes, torch.tensor([1, 1]))
    assert levels.level.tolist() == [0.0, 0.0]
    levels.level = torch.ones(2)
    levels.restart()
    assert levels.level.tolist() == [0.0, 0.0]
    assert make_curriculum({"kind": "pql.envs.mujoco.curriculum:linear", "steps": 5}) is not None


@pytest.mark.parametrize(
    ("name", "kwargs", "named"),
    [
        ("hopper", {"randomize": {"masss": [1, 2]}}, "randomize.masss=.*did you mean mass"),
        ("hopper", {"randomize": {"mass": [2, 1]}}, r"randomize.mass=\[2, 1\]: expected \[low, high\]"),
        ("hopper", {"randomize": {"mass": 2}}, r"randomize.mass=2: expected \[low, high\]"),
        ("hopper", {"randomize": {"obs_delay": [0, 1.5]}}, "randomize.obs_delay=.*whole numbers"),
        ("hopper", {"randomize": {"obs_delay": [0, float("inf")]}}, "randomize.obs_delay=.*whole numbers"),
        ("hopper", {"randomize": {"mass": [1, float("inf")]}}, "randomize.mass=.*low, high"),
        ("hopper", {"randomize": {"obs_noise": float("nan")}}, "randomize.obs_noise=nan: expected a number"),
        ("ballbalance_pixels", {"randomize": {"obs_noise": 0.1}}, "randomize.obs_noise=0.1: expected 0: .*not vectors"),
        ("ballbalance_pixels", {"randomize": {"obs_delay": [0, 1]}}, r"randomize.obs_delay=\[0, 1\]: .*not vectors"),
        ("hopper", {"randomize": {"push": -1}}, "randomize.push=-1: expected a number, at least 0"),
        ("hopper", {"randomize": {"push_interval": 0}}, "randomize.push_interval=0: expected a number, above 0"),
        ("hopper", {"randomize": {"push_interval": 2}}, "randomize.push_interval=2.0: expected randomize.push above 0"),
        ("reacher", {"randomize": {"push": 1}}, "randomize.push=1.0: expected 0: this robot's base"),
        ("hopper", {"randomize": 3}, "randomize=3: expected settings below it"),
        ("hopper", {"curriculum": {"kind": "linar"}}, "curriculum.kind=linar: .*did you mean linear"),
        ("hopper", {"curriculum": {"steps": 3}}, "curriculum.kind=null: expected one of survive"),
        ("hopper", {"curriculum": {"kind": "linear", "step": 3}}, "curriculum.step=3: .*did you mean steps"),
        ("hopper", {"curriculum": {"kind": "linear", "steps": 0}}, "curriculum.steps=0: expected a number, above 0"),
        ("hopper", {"curriculum": {"kind": "survive", "up": "a"}}, "curriculum.up=a: expected a number, at least 0"),
        ("hopper", {"curriculum": {"kind": "succeed", "down": -1}}, "curriculum.down=-1: expected a number"),
        (
            "hopper",
            {"curriculum": {"kind": ":linear"}},
            "curriculum.kind=:linear: expected module:attribute of a module",
        ),
        ("hopper", {"curriculum": {"kind": "pql.envs.mujoco.curriculum:KINDS"}}, "curriculum=.*keywords of .*KINDS"),
        ("hopper", {"stagger": 1}, "stagger=1: expected true or false"),
    ],
)
def test_bad_settings_are_named(name: str, kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_env(name, 2, **kwargs)


def test_randomisation_is_reached_from_the_command_line() -> None:
    from pql.config.compose import compose
    from pql.run.environment import build_env

    words = ["task.kwargs.randomize.mass=[0.8,1.2]", "task.kwargs.curriculum.kind=linear", "task.kwargs.stagger=true"]
    env = build_env(compose(["device=cpu", "task=hopper", "num_envs=2", *words]))
    assert isinstance(env, MujocoVec)
    assert env._randomizer is not None
    assert env._randomizer.settings.mass == (0.8, 1.2)
    assert (list(env.spec.log)[-1], env.spec.log_kinds["level"]) == ("level", "episode")
