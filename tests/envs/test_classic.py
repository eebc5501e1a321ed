"""The torch tasks against independent physics; their episodes, resume, and the absence of host syncs."""

import math

import pytest
import torch
from conftest import NoNarrowProducts, never_waiting
from torch.utils._python_dispatch import TorchDispatchMode

from pql.contract.env import Box, Discrete
from pql.envs.ball_balance import BallBalance
from pql.envs.classic import Cartpole, CartpoleSwingup, Pendulum, TorchEnv
from pql.envs.toy import LQR
from pql.errors import ConfigError

TASKS = [Pendulum, CartpoleSwingup, Cartpole, BallBalance, LQR]


def put(env: TorchEnv, state) -> None:
    env.load_state_dict({**env.state_dict(), "state": torch.as_tensor(state, dtype=torch.float32)})


def state_of(env: TorchEnv):
    return env.state_dict()["state"].double()


def random_actions(env, steps, seed=0):
    gen = torch.Generator().manual_seed(seed)
    if isinstance(env.spec.action, Discrete):
        return torch.randint(env.spec.action.n, (steps, env.spec.num_envs), generator=gen)
    return torch.rand(steps, env.spec.num_envs, env.spec.action.size, generator=gen) * 2 - 1


# --- pendulum ---


def test_pendulum_equals_gymnasium():
    pytest.importorskip("gymnasium")
    from gymnasium.envs.classic_control.pendulum import PendulumEnv

    count, theirs = 400, PendulumEnv()
    theirs.reset()
    env = Pendulum(count)
    gen = torch.Generator().manual_seed(0)
    state = (torch.rand(count, 2, generator=gen) * 2 - 1) * torch.tensor([math.pi, 8.0])
    action = torch.rand(count, 1, generator=gen) * 3 - 1.5
    put(env, state)
    step = env.step(action)
    for i in range(count):
        theirs.state = state[i].double().numpy()
        obs, reward, *_ = theirs.step(action[i].clamp(-1, 1).numpy() * 2)
        torch.testing.assert_close(step.obs["policy"][i], torch.from_numpy(obs), rtol=0, atol=1e-5)
        assert step.reward[i].item() == pytest.approx(float(reward), abs=1e-5)
    torch.testing.assert_close(sum(step.log.values()), step.reward)


def test_pendulum_starts_spread_over_the_circle():
    obs = Pendulum(4000).reset(0)["policy"]
    assert obs.mean(0).abs().max() < 0.05
    assert obs[:, 2].abs().max() <= 1
    assert obs[:, 2].abs().max() > 0.99


# --- cart-pole ---


def cartpole_energy(env, state, pieces=2000):
    """Kinetic and potential energy in joules, summed over mass elements along the pole: [N]."""
    x_dot, angle, angle_dot = state[:, 1, None], state[:, 2, None], state[:, 3, None]
    along = (torch.arange(pieces, dtype=torch.float64) + 0.5) / pieces * 2 * env.half_length
    vx, vy = x_dot + along * angle.cos() * angle_dot, -along * angle.sin() * angle_dot
    element = 0.5 * (vx**2 + vy**2) + env.gravity * along * angle.cos()
    return 0.5 * env.mass_cart * state[:, 1] ** 2 + env.mass_pole * element.mean(1)


def test_cartpole_force_does_the_work_it_should():
    """Within one step the force is constant, so the energy gained is force times way."""
    env = CartpoleSwingup(64)
    put(env, torch.randn(64, 4, generator=torch.Generator().manual_seed(2)) * torch.tensor([0.5, 1.0, 3.0, 3.0]))
    before, action = state_of(env), random_actions(env, 1)[0]
    env.step(action)
    after = state_of(env)
    gained = cartpole_energy(env, after) - cartpole_energy(env, before)
    work = 10 * action[:, 0].double() * (after[:, 0] - before[:, 0])
    assert work.abs().max() > 0.3
    torch.testing.assert_close(gained, work, rtol=1e-3, atol=2e-5)


def test_cartpole_linearised_at_upright():
    """Textbook: angle'' = (g angle - force / M) / (l (4/3 - m / M)), with M = 1.1 kg; 3.972 rad/s is its growth."""
    env = CartpoleSwingup(1)
    zero, still = torch.zeros(1, 4), torch.zeros(1)
    A = torch.autograd.functional.jacobian(lambda s: env.derivative(s, still), zero)[0, :, 0]
    B = torch.autograd.functional.jacobian(lambda f: env.derivative(zero, f), still)[0, :, 0]
    arm = 0.5 * (4 / 3 - 0.1 / 1.1)
    angle_acc = 9.8 / arm
    assert A[3].tolist() == pytest.approx([0, 0, angle_acc, 0], abs=1e-4)
    assert A[1].tolist() == pytest.approx([0, 0, -0.05 / 1.1 * angle_acc, 0], abs=1e-4)
    assert B[3].item() == pytest.approx(-1 / 1.1 / arm, abs=1e-5)
    assert B[1].item() == pytest.approx(1 / 1.1 * (1 + 0.05 / 1.1 / arm), abs=1e-5)
    assert torch.linalg.eigvals(A).real.max().item() == pytest.approx(3.972, abs=1e-3)


def test_cartpole_can_be_swung_up_with_the_force_it_has():
    """Energy pumping, then a linear law: a return of 423 of 500, and no cart leaves the rail."""
    env = CartpoleSwingup(16)
    obs, total, fell = env.reset(0)["policy"], torch.zeros(16), 0
    for _ in range(500):
        x, cos, sin, x_dot, angle_dot = obs.unbind(1)
        angle = torch.atan2(sin, cos)
        energy = 0.5 * 4 / 3 * 0.1 * 0.25 * angle_dot**2 + 0.1 * 9.8 * 0.5 * (cos - 1)
        pump = (60 * energy * angle_dot * cos).clamp(-8, 8) - 2 * x - x_dot
        hold = 3.95 * x + 5.4 * x_dot + 46.4 * angle + 12.0 * angle_dot
        near = (angle.abs() < 0.35) & (angle_dot.abs() < 4)
        step = env.step((torch.where(near, hold, pump) / 10)[:, None])
        obs, total, fell = step.obs["policy"], total + step.reward, fell + int(step.terminated.sum())
    assert fell == 0
    assert 400 < total.min() <= total.max() < 450
    assert step.reward.min() > 0.999  # upright, centred, calm and without effort pays 1


def test_cartpole_reward_stays_in_the_unit_interval_and_terms_multiply_to_it():
    env = CartpoleSwingup(512)
    env.reset(0)
    put(env, torch.randn(512, 4, generator=torch.Generator().manual_seed(3)) * 4)
    step = env.step(random_actions(env, 1)[0])
    assert 0 <= step.reward.min() <= step.reward.max() <= 1
    torch.testing.assert_close(math.prod(step.log.values()), step.reward)
    put(env, torch.tensor([[0, 0, math.pi, 0]]).expand(512, 4))
    assert env.step(torch.zeros(512, 1)).reward.max() < 1e-3


def test_cartpole_terminates_off_the_rail():
    env = CartpoleSwingup(4)
    put(env, [[2.39, 1, math.pi, 0], [-2.39, -1, math.pi, 0], [2.39, -1, math.pi, 0], [0, 9, math.pi, 0]])
    step = env.step(torch.zeros(4, 1))
    assert step.terminated.tolist() == [True, True, False, False]
    assert step.final_obs["policy"][0, 0].item() == pytest.approx(2.41, abs=1e-3)
    assert step.obs["policy"][0, 0].abs() <= 0.1


def test_the_balanced_cartpole_equals_gymnasium():
    pytest.importorskip("gymnasium")
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv

    count, theirs = 400, CartPoleEnv()
    theirs.reset()
    env = Cartpole(count)
    gen = torch.Generator().manual_seed(0)
    state = (torch.rand(count, 4, generator=gen) * 2 - 1) * torch.tensor([2.5, 3.0, 0.22, 3.0])
    action = torch.randint(2, (count,), generator=gen)
    put(env, state)
    step = env.step(action)
    ended = 0
    for i in range(count):
        theirs.state, theirs.steps_beyond_terminated = state[i].double().numpy(), None
        obs, reward, terminated, *_ = theirs.step(int(action[i]))
        torch.testing.assert_close(step.final_obs["policy"][i], torch.from_numpy(obs), rtol=0, atol=1e-5)
        assert (step.reward[i].item(), bool(step.terminated[i])) == (float(reward), terminated)
        ended += terminated
    assert 20 < ended < 380
    assert Cartpole(4000).reset(1)["policy"].abs().max() == pytest.approx(0.05, abs=1e-3)


# --- ball balance ---


def ball_state(rows, legs=(0, 0, 0), position=(0, 0, 0.05), velocity=(0, 0, 0), spin=(0, 0, 0)):
    return torch.tensor([[*legs, *position, *velocity, *spin]], dtype=torch.float32).repeat(rows, 1)


def tilt(env, slope):
    """Leg heights that tilt the plate by ``slope`` along x (metres per metre), as positions and as an action."""
    legs = torch.linalg.solve(env._plane.T, torch.tensor([0.0, slope, 0.0]))
    return legs.tolist(), (legs / env.leg_range)[None]


def test_ball_falls_freely_above_the_plate():
    env = BallBalance(1)
    put(env, ball_state(1, position=(0.1, 0, 2.0), velocity=(0.3, 0, 0)))
    for _ in range(20):  # 0.4 s
        env.step(torch.zeros(1, 3))
    x, _, z, vx, _, vz = state_of(env)[0, 3:9].tolist()
    assert vz == pytest.approx(-9.81 * 0.4, abs=1e-4)
    assert z == pytest.approx(2.0 - 0.5 * 9.81 * 0.16, abs=0.011)  # semi-implicit: half a substep early
    assert (x, vx) == pytest.approx((0.1 + 0.12, 0.3), abs=1e-5)


@pytest.mark.parametrize("slope", [0.05, -0.12])
def test_ball_rolls_down_a_slope_at_five_sevenths(slope):
    env = BallBalance(1)
    legs, action = tilt(env, slope)
    put(env, ball_state(1, legs=legs, position=(0.0, 0, 0.05)))
    speeds = []
    for _ in range(25):
        env.step(action)
        speeds.append(math.hypot(*state_of(env)[0, [6, 8]].tolist()))
    along = 9.81 * math.sin(math.atan(abs(slope)))
    acceleration = (speeds[24] - speeds[9]) / (15 * env.dt)
    assert acceleration == pytest.approx(5 / 7 * along, rel=0.01)
    spin = state_of(env)[0, 10].item()
    assert abs(spin) * 0.05 == pytest.approx(speeds[24], rel=0.02)  # rolling
    assert state_of(env)[0, 6].item() * slope < 0  # downhill


def test_spinning_ball_grips_and_keeps_two_sevenths():
    """A ball set down with spin and no speed slides, then rolls with v = 2/7 of the spin's surface speed."""
    env = BallBalance(1)
    put(env, ball_state(1, position=(0, 0, 0.0435), spin=(0, 20.0, 0)))  # at rest in its own dent: 9.81 / 1500 m
    first = None
    for _ in range(15):
        env.step(torch.zeros(1, 3))
        first = first if first is not None else state_of(env)[0, 6].item()
    assert first == pytest.approx(0.8 * 9.81 * env.dt, rel=0.05)  # Coulomb friction while it slides
    assert state_of(env)[0, 6].item() == pytest.approx(2 / 7 * 20 * 0.05, rel=0.01)


def test_ball_comes_to_rest_where_the_weight_is_carried():
    env = BallBalance(1)
    put(env, ball_state(1, position=(0.02, -0.01, 0.15)))
    for _ in range(150):
        step = env.step(torch.zeros(1, 3))
    position, velocity = state_of(env)[0, 3:6], state_of(env)[0, 6:9]
    assert position.tolist() == pytest.approx([0.02, -0.01, 0.05 - 9.81 / 1500], abs=1e-4)
    assert velocity.abs().max() < 1e-3
    distance = math.sqrt(0.02**2 + 0.01**2 + (9.81 / 1500) ** 2)
    assert step.reward.item() == pytest.approx(1 / (1 + distance / 0.1), abs=2e-3)


def test_ball_can_be_balanced():
    """Tilt against position and speed: no ball falls, and all end in the middle."""
    env = BallBalance(64)
    obs, total, fell = env.reset(1)["policy"], torch.zeros(64), 0
    for _ in range(300):
        slope = (2 * obs[:, 3:5] + 1.5 * obs[:, 6:8]).clamp(-0.15, 0.15)
        legs = torch.linalg.solve(env._plane.T, torch.cat((torch.zeros(64, 1), slope), 1).T).T
        step = env.step(legs / env.leg_range)
        obs, total, fell = step.obs["policy"], total + step.reward, fell + int(step.terminated.sum())
    assert fell == 0
    assert step.reward.min() > 0.9
    assert total.min() > 200


def test_ball_off_the_plate_terminates():
    env = BallBalance(2)
    put(env, torch.cat((ball_state(1, position=(0.49, 0, 0.05), velocity=(1, 0, 0)), ball_state(1))))
    step = env.step(torch.zeros(2, 3))
    assert step.terminated.tolist() == [True, False]
    assert step.final_obs["policy"][0, 3] > 0.5
    assert step.obs["policy"][0, 3:5].norm() <= 0.3


# --- what they share ---


def test_specs_tell_what_an_action_of_one_is():
    bounds = {task: spec.action.bounds for task in TASKS if isinstance((spec := task(2).spec).action, Box)}
    assert bounds[Pendulum] == ((-2.0,), (2.0,))  # N m
    assert bounds[CartpoleSwingup] == ((-10.0,), (10.0,))  # N
    assert bounds[BallBalance] == ((-0.05,) * 3, (0.05,) * 3)  # m


@pytest.mark.parametrize("task", TASKS)
def test_time_limit_truncates_and_the_next_episode_starts(task):
    env = task(8, max_episode_steps=5)
    env.reset(0)
    for t in range(1, 11):
        step = env.step(torch.zeros_like(random_actions(env, 1)[0]))
        assert step.truncated.all() == (t % 5 == 0)
        assert torch.equal(step.first, step.truncated)
        moved = (step.obs["policy"] != step.final_obs["policy"]).any(1)
        assert torch.equal(moved, step.truncated)
    assert not step.terminated.any()


def test_termination_wins_on_the_time_limit():
    env = CartpoleSwingup(2, max_episode_steps=1)
    put(env, [[2.39, 5, 0, 0], [0, 0, 0, 0]])
    step = env.step(torch.zeros(2, 1))
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [False, True]


def test_stagger_spreads_the_first_ends_evenly():
    env = Pendulum(2000, max_episode_steps=10, stagger=True)
    env.reset(0)
    ends = torch.stack([env.step(torch.zeros(2000, 1)).truncated for _ in range(20)])
    assert (ends.sum(0) == 2).all()
    assert (ends.sum(1) - 200).abs().max() < 60


@pytest.mark.parametrize("task", TASKS)
def test_seeds_decide_and_none_goes_on_drawing(task):
    env = task(16)
    one, two, again = env.reset(1)["policy"], env.reset(2)["policy"], env.reset(1)["policy"]
    further = env.reset()["policy"]
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert not torch.equal(again, further)


@pytest.mark.parametrize("task", TASKS)
def test_environments_do_not_touch_each_other(task):
    env = task(16)
    env.reset(0)
    state, action = env.state_dict(), random_actions(env, 1)[0]
    one = env.step(action).final_obs["policy"]
    env.load_state_dict(state)
    action[3] = 1 - action[3] if isinstance(env.spec.action, Discrete) else -action[3]
    changed = (env.step(action).final_obs["policy"] != one).any(1)
    assert changed.nonzero().flatten().tolist() == [3]


class Waits(TorchDispatchMode):
    """Records the operators that make a host wait for its device, or whose shape depends on values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero") or masked:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_recorder_sees_waits():
    with Waits() as waits:
        x = torch.ones(3)
        x[x > 0].sum().item()
    assert waits.seen == ["index", "_local_scalar_dense"]


@pytest.mark.parametrize("task", TASKS)
def test_a_step_never_waits_and_writes_its_state_in_place(task):
    env = task(8, max_episode_steps=2)
    env.reset(0)
    addresses = [t.data_ptr() for t in (env._state, env._steps)]
    actions = random_actions(env, 4)
    with Waits() as waits:
        for action in actions:
            env.step(action)
    assert waits.seen == []
    assert [t.data_ptr() for t in (env._state, env._steps)] == addresses


@pytest.mark.parametrize("task", TASKS)
def test_describe_needs_no_environment(task):
    assert task.describe(3, "cpu", max_episode_steps=12) == task(3, max_episode_steps=12).spec
    assert task.describe().max_episode_steps == task.time_limit


@pytest.mark.parametrize(("key", "value"), [("num_envs", 0), ("num_envs", 2.0), ("max_episode_steps", -1)])
def test_bad_sizes_are_named(key, value):
    with pytest.raises(ConfigError, match=f"^{key}={value}"):
        Pendulum(**{key: value})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", TASKS)
def test_cuda_step_is_free_of_syncs_and_can_be_captured(task):
    env, twin = (task(1024, "cuda", max_episode_steps=3) for _ in range(2))
    actions = random_actions(env, 12).cuda()
    for e in (env, twin):
        e.reset(0)
        e.step(actions[0])
    with never_waiting():
        twin.step(actions[0])
        env.step(actions[0])
    held, graph = actions[0].clone(), torch.cuda.CUDAGraph()
    state = env.state_dict()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        captured = env.step(held)
    env.load_state_dict(state)
    for action in actions[1:]:
        held.copy_(action)
        graph.replay()
        eager = twin.step(action)
        assert torch.equal(captured.obs["policy"], eager.obs["policy"])
        assert torch.equal(captured.truncated, eager.truncated)


@pytest.mark.parametrize("task", TASKS)
def test_a_step_multiplies_no_float32_matrices(task):
    """Which CUDA rounds to TF32, and some CPUs to bfloat16, where products may be fast."""
    env = task(3)
    env.reset(seed=0)
    actions = random_actions(env, 3).unbind(0)
    with NoNarrowProducts():
        for action in actions:
            env.step(action)
