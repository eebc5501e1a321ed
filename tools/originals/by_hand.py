"""Returns of random actions and of scripted policies, as baselines for learners.

Whole episodes, one per environment, as in ``pql eval``. The policies read only observations, as a learner does, with
three exceptions: the trots count steps, stiff legs use the joints' ranges, and on tasks from pixels they read the
critic's observation of the state. Tests require that those of the PQL paper's tasks beat random actions by a margin.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pql.config.compose import compose
from pql.config.layers import Presets
from pql.contract.env import Box, Discrete, VecEnv, make_env
from pql.contract.registry import env_names
from pql.envs.mujoco.isaac.ball import LEGS
from pql.envs.mujoco.isaac.humanoid import JOINTS
from pql.envs.mujoco.isaac.measure import product
from pql.errors import ConfigError, nearest
from pql.run.episodes import run_episodes
from pql.types import Obs
from tools.bench.common import options, save

Play = Callable[[Obs], Tensor]

SPOKES = torch.tensor([[math.cos(a), math.sin(a)] for a in LEGS])
GEARS = torch.tensor([67.5] * 3 + 2 * [45, 45, 135, 90, 22.5, 22.5] + 2 * [67.5, 67.5, 45])
DOWN = torch.tensor([0.0, 1.0, 0.0, 0.0])  # orientation of Franka's hand: w, x, y, z
CUPS = {
    "shadow_hand": ".22 .54 .57 -.59 -.52 -.22 -.80 .02 .42 -.67 -.52 .72 -.01 -.89 .21 .72 .78 .09 .53 .10",
    "allegro_hand": ".01 -.80 -.03 .14 -.26 -.99 -.40 -.11 -.63 -.28 .25 .34 .86 .53 .22 -.80",
}
HOLD = {task: [float(word) for word in words.split()] for task, words in CUPS.items()}
"""Actions with which the fingers form a cup; from a search for the least distance."""


def gait(obs: Tensor, t: int) -> Tensor:
    """``isaac_ant``'s trot of 2.3 Hz, opposite legs in phase (parameters from a random search): [N, 8]."""
    forward, outward = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    phase = 2 * math.pi * 2.3 * 0.0166 * t + torch.tensor([0.0, math.pi, 0.0, math.pi])
    hip, ankle = 0.7 * forward * phase.sin(), outward * (-0.39 + 0.42 * (phase + 0.45).sin())
    goal = torch.stack((hip, ankle), 1).flatten()
    return (1.86 * (goal - obs[:, 12:20]) - 0.28 * obs[:, 20:28]).clamp(-1, 1)


class Trot(NamedTuple):
    """Parameters of a trot with opposite legs in phase.

    Each joint's target is a sine around its pose. Its amplitude, and for the thighs its centre, follows from the foot
    speed that the command requires; where the base is too fast, feet are placed further ahead. The parameters are from
    a search with the cross-entropy method on the task's reward, since servos that yield under load rule out
    kinematics.
    """

    ahead: tuple[float, ...]  # each leg: 1 front, -1 hind
    aside: tuple[float, ...]  # 1 left, -1 right
    mirrored: bool  # hind knees bend the other way
    place: tuple[float, float]  # a foot's offset from the base's centre: ahead, sideways, m
    most: tuple[float, float, float, float]  # commands that it follows: back, ahead, sideways, m/s; yaw, rad/s
    frequency: float  # Hz
    hip: tuple[float, float, float]  # rad per commanded m/s; phase; rad per m/s of excess speed
    thigh: tuple[float, float, float]  # the same
    middle: tuple[float, float, float]  # thighs: rad; front minus hind; rad per commanded m/s
    calf: tuple[float, float, float, float]  # rad; phase; centre, rad; front minus hind
    level: tuple[float, float, float, float, float]  # against a tilt: hips by roll and its rate; calves by roll, pitch
    # and the rates of both


SETTLE = 25  # initial steps of standing, since episodes begin in the air with bent legs
TROTS = {
    "go1_velocity": Trot(
        ahead=(1, 1, -1, -1),
        aside=(-1, 1, -1, 1),
        mirrored=False,
        place=(0.19, 0.13),
        most=(-0.4, 0.6, 0.4, 0.5),
        frequency=4.679,
        hip=(0.281, 5.801, 0.59),
        thigh=(0.429, 2.612, -0.243),
        middle=(0.004, -0.077, 0.058),
        calf=(0.372, 2.677, 0.131, -0.016),
        level=(-0.086, 0.024, -0.453, -0.388, 0.006),
    ),
    "anymal": Trot(
        ahead=(1, -1, 1, -1),
        aside=(1, 1, -1, -1),
        mirrored=True,
        place=(0.36, 0.3),
        most=(-1.4, 1.4, 0.7, 0.7),
        frequency=4.02,
        hip=(0.234, 5.342, 0.155),
        thigh=(0.208, 1.826, -0.153),
        middle=(-0.01, 0.05, 0.089),
        calf=(0.643, 2.574, 0.227, 0.041),
        level=(0, 0, 0, 0, 0),
    ),
}


def follow(trot: Trot, obs: Tensor, t: int) -> Tensor:
    """``go1_velocity``, ``anymal``: offsets of the joints' targets from the pose in step ``t``.

    Observations are [N, 48], the result is [N, 12] in rad. Where the command is to stand, the joints hold a stance.
    """
    ahead, aside = torch.tensor(trot.ahead), torch.tensor(trot.aside)
    back, front, side, around = trot.most
    low, high = torch.tensor([back, -side, -around]), torch.tensor([front, side, around])
    velocity, turn = obs[:, :2] / 2, obs[:, 5:6] / 0.25
    command = (obs[:, 9:12] / torch.tensor([2.0, 2.0, 0.25])).clamp(low, high)
    x, y = trot.place[0] * ahead, trot.place[1] * aside

    def at_feet(linear: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity of the base above each foot: ahead and sideways, [N, 4] each."""
        return linear[:, :1] - around * y, linear[:, 1:] + around * x

    wanted, moving = at_feet(command[:, :2], command[:, 2:]), at_feet(velocity, turn)
    phase = 2 * math.pi * 0.02 * trot.frequency * t + math.pi * (ahead != aside)
    hip = trot.hip[0] * wanted[1] * (phase + trot.hip[1]).sin() + trot.hip[2] * (moving[1] - wanted[1])
    swing = trot.thigh[0] * wanted[0] * (phase + trot.thigh[1]).sin() + trot.thigh[2] * (moving[0] - wanted[0])
    thigh = swing + trot.middle[0] + trot.middle[1] * ahead + trot.middle[2] * wanted[0]
    knee = ahead if trot.mirrored else torch.ones(4)
    calf = knee * (trot.calf[0] * (phase + trot.calf[1]).sin() + trot.calf[2] + trot.calf[3] * ahead)
    (pitch, roll), rates = (obs[:, [6]], -obs[:, [7]]), obs[:, 3:5] / 0.25
    hip = hip + trot.level[0] * roll + trot.level[1] * rates[:, :1]
    level = trot.level[4] * (rates[:, :1] * aside - rates[:, 1:] * ahead)
    calf = calf + trot.level[2] * roll * aside + trot.level[3] * pitch * ahead + level
    walks = (command.abs().sum(1) > 0.05) & (t >= SETTLE)
    return (torch.stack((hip, thigh, calf), 2) * walks[:, None, None]).flatten(1)


def stand(obs: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``isaac_humanoid``: springs and dampers to a pose with bent knees, within joint limits [21] each: [N, 21]."""
    bend = math.radians(20)
    pose = torch.zeros(21)
    for i, name in enumerate(JOINTS):
        pose[i] = -bend if name.endswith("knee") else -bend / 2 if name.endswith(("hip_y", "ankle_y")) else 0.0
    at, pace = (low + high) / 2 + obs[:, 12:33] * (high - low) / 2, 10 * obs[:, 33:54]
    return ((100 * (pose - at) - 5 * pace) / GEARS).clamp(-1, 1)


def tilt(obs: Tensor) -> Tensor:
    """``ballbalance``: the tray rises on the side of the ball, or where it is moving to: [N, 3]."""
    wanted = (0.3 * obs[:, 6:8] + 0.15 * obs[:, 9:11]) @ SPOKES.T
    return ((wanted - obs[:, :3]) / 0.2).clamp(-1, 1)


def stacker(obs: Tensor, keep: bool = False) -> Tensor:
    """``franka_cube_stack``: above the small cube, down, grip, up, over the large one, down, let go, up: [N, 7].

    Args:
        obs: [N, 19].
        keep: never let go, so that the small cube hovers where it would be stacked, which is rewarded in every step.
    """
    small, large, grip = obs[:, 4:7], obs[:, 4:7] + obs[:, 7:10], obs[:, 10:13]
    fingers = obs[:, 17:].sum(1)
    gap = small - grip
    horizontal, over = gap[:, :2].norm(dim=1), obs[:, 7:9].norm(dim=1)
    within = gap.norm(dim=1) < 0.018
    on_top = (over < 0.012) & ((small[:, 2] - large[:, 2] - 0.06).abs() < 0.006)
    held = (gap.norm(dim=1) < 0.035) & (fingers < 0.056)
    if keep:
        on_top = torch.zeros_like(on_top)

    up = torch.tensor([0.0, 0.0, 1.0])
    fetch = torch.where((horizontal < 0.012)[:, None], gap, gap + 0.1 * up)
    place = large + 0.06 * up - small  # displacement of carrying
    carry = torch.where((over < 0.01)[:, None], place, place + 0.05 * up)
    low = (place[:, 2] > -0.02) & (over > 0.02)
    carry = torch.where(low[:, None], (place + 0.06 * up) * up, carry)  # straight up first
    way = torch.where(on_top[:, None], 0.1 * up, torch.where(held[:, None], carry, fetch))
    shut = (within | held) & ~on_top

    x, y, z, w = obs[:, :4].unbind(1)
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    still = torch.zeros_like(yaw)
    wanted = product(torch.stack(((yaw / 2).cos(), still, still, (yaw / 2).sin()), 1), DOWN.expand(len(obs), 4))
    held_turn = obs[:, 13:17].roll(1, 1) * torch.tensor([1.0, -1.0, -1.0, -1.0])
    error = product(wanted, held_turn)
    turn = 2 * error[:, 1:] * error[:, :1].sign()
    return torch.cat((way / 0.1, turn / 0.5, torch.where(shut, -1.0, 1.0)[:, None]), 1).clamp(-1, 1)


def trot(env: VecEnv) -> Play:
    steps = iter(range(10**9))
    return lambda obs: gait(obs["policy"], next(steps))


def follower(env: VecEnv) -> Play:
    steps, gait = iter(range(10**9)), TROTS[env.spec.name]
    reach = env.task.robot.ctrl_half.float()  # type: ignore[attr-defined]
    return lambda obs: (follow(gait, obs["policy"], next(steps)) / reach).clamp(-1, 1)


def stiff(env: VecEnv) -> Play:
    low, high = torch.tensor(env.model.jnt_range[1:]).float().unbind(1)  # type: ignore[attr-defined]
    return lambda obs: stand(obs["policy"], low, high)


def still(env: VecEnv) -> Play:
    return lambda obs: torch.zeros(env.spec.num_envs, cast(Box, env.spec.action).size)


def hold(env: VecEnv) -> Play:
    cup = torch.tensor(HOLD[env.spec.name.removesuffix("_openai")])
    return lambda obs: cup.expand(env.spec.num_envs, -1)


def chance(env: VecEnv, seed: int = 0) -> Play:
    """Return a policy with uniformly random actions, in [-1, 1] or discrete."""
    gen, n, action = torch.Generator().manual_seed(seed), env.spec.num_envs, env.spec.action
    if isinstance(action, Discrete):
        return lambda obs: torch.randint(action.n, (n,), generator=gen)
    return lambda obs: torch.rand(n, *action.shape, generator=gen) * 2 - 1


BY_HAND: dict[str, dict[str, Callable[[VecEnv], Play]]] = {
    "isaac_ant": {"a trot": trot},
    "isaac_humanoid": {"stiff legs": stiff},
    "walker2d": {"no torque": still},
    "pusher": {"no torque": still},
    "anymal": {"standing still": still, "a trot": follower},
    "go1_velocity": {"standing still": still, "a trot": follower},
    "g1_velocity": {"standing still": still},
    "ballbalance": {"a tilt against the ball": lambda env: lambda obs: tilt(obs["policy"])},
    "ballbalance_pixels": {"a tilt against the ball": lambda env: lambda obs: tilt(obs["critic"])},
    "franka_cube_stack": {
        "grasp, lift and place": lambda env: lambda obs: stacker(obs["policy"]),
        "grasp, lift and hover": lambda env: lambda obs: stacker(obs["policy"], keep=True),
    },
    "shadow_hand": {"holding": hold},
    "shadow_hand_openai": {"holding": hold},
    "allegro_hand": {"holding": hold},
    "dclaw": {"holding still": still},
}
"""Scripted policies by task, and by name."""


def preset(task: str) -> dict[str, Any]:
    """Return the environment's keywords from the task's preset."""
    return compose([f"task={task}", "device=cpu"]).task.kwargs if task in Presets().names("task") else {}


def rows(task: str, episodes: int) -> list[dict[str, Any]]:
    """Return one row for random actions and for each scripted policy.

    A row has returns, lengths, the mean per step of each logged term and, where the task logs it, success.
    """
    out: list[dict[str, Any]] = []
    kwargs = {name: value for name, value in preset(task).items() if name != "randomize"}  # the nominal robot
    for name, make in {"random actions": chance, **BY_HAND.get(task, {})}.items():
        env = make_env(task, episodes, "cpu", **kwargs)
        try:
            played = run_episodes(env, make(env), seed=0)
        finally:
            env.close()
        out.append({"task": task, "policy": name, "episodes": episodes, **played.measures()})
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in played.measures().items())
        print(f"{task}, {name}: {numbers}", flush=True)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(BY_HAND))
    parser.add_argument("--episodes", type=int, default=16)
    args = parser.parse_args(argv)
    for task in args.tasks:
        if task not in env_names():
            parser.error(f"--tasks={task}: expected one of {', '.join(env_names())}{nearest(task, env_names())}")
    found: list[dict[str, Any]] = []
    for task in args.tasks:
        try:
            found += rows(task, args.episodes)
        except ConfigError as error:  # for example, a robot that is not installed
            print(f"{task} left out: {error}", flush=True)
        else:
            save(found, args.json)


if __name__ == "__main__":
    main()
