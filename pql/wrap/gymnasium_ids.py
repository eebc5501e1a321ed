"""Registers every shipped task with gymnasium as a single environment.

    import gymnasium
    import pql.wrap.gymnasium_ids

    env = gymnasium.make("pql/HalfCheetah-v0")
    env = gymnasium.make("pql/Ant-v0", contact_forces=False, render_mode="rgb_array")

Keywords are those of ``task.kwargs``. One environment at a time is slow: ``pql.make_env`` steps thousands together, and
``pql.wrap.gymnasium`` shows them as a ``gymnasium.vector.VectorEnv``.
"""

from functools import partial
from typing import Any

import gymnasium

from pql.wrap.single import SingleEnv

# Tasks that need only this library and its extras, by their gymnasium names.
TASKS = {
    "HalfCheetah": "halfcheetah",
    "Hopper": "hopper",
    "Walker2d": "walker2d",
    "Swimmer": "swimmer",
    "Reacher": "reacher",
    "Pusher": "pusher",
    "Ant": "ant",
    "Humanoid": "humanoid",
    "HumanoidStandup": "humanoidstandup",
    "InvertedPendulum": "invertedpendulum",
    "InvertedDoublePendulum": "inverteddoublependulum",
    "IsaacAnt": "isaac_ant",
    "IsaacHumanoid": "isaac_humanoid",
    "Anymal": "anymal",
    "Go1Velocity": "go1_velocity",
    "G1Velocity": "g1_velocity",
    "BallBalance": "ballbalance",
    "BallBalancePixels": "ballbalance_pixels",
    "FrankaCubeStack": "franka_cube_stack",
    "FrankaCubeStackTorque": "franka_cube_stack_torque",
    "ShadowHand": "shadow_hand",
    "ShadowHandFull": "shadow_hand_full",
    "ShadowHandFullNoVel": "shadow_hand_full_no_vel",
    "ShadowHandOpenAI": "shadow_hand_openai",
    "AllegroHand": "allegro_hand",
    "DClaw": "dclaw",
    "Pendulum": "pendulum",
    "Cartpole": "cartpole",
    "CartpoleSwingup": "cartpole_swingup",
    "BallBalanceTorch": "ball_balance",
    "Catch": "catch",
    "TMaze": "tmaze",
    "Pong": "pong",
    "Atari": "atari",
    "LQR": "lqr",
    "Counter": "counter",
    "Recall": "recall",
}


def make(task: str, render_mode: str | None = None, **kwargs: Any) -> SingleEnv:
    """Create one environment of ``task``, as its preset defines it.

    Args:
        task: as in ``pql train task=``.
        render_mode: ``rgb_array``, or None for no images.
        kwargs: keywords of the simulator, as under ``task.kwargs``.

    Raises:
        ConfigError: unknown task or keyword, or a simulator that is not installed.
    """
    from pql.config.compose import compose

    return SingleEnv(compose([f"task={task}", "device=cpu"]), render_mode, kwargs)


def env_id(name: str) -> str:
    """Return the gymnasium id of one of ``TASKS``: ``pql/HalfCheetah-v0``."""
    return f"pql/{name}-v0"


for _name, _task in TASKS.items():
    if env_id(_name) not in gymnasium.registry:
        gymnasium.register(env_id(_name), entry_point=partial(make, _task))
