"""Record demonstrations of a scripted controller, and start training with them in the replay.

    python examples/demonstrations.py                  # Pendulum, 20 seconds
    python examples/demonstrations.py algo=sac

Any source will do that fills these columns (docs/replay.md): a teleoperated robot, a planner, another library's policy.
"""

import sys

import torch
from safetensors.torch import save_file

import pql


def swing_up(obs):
    """Pump energy until the pendulum is nearly upright, then hold it there. obs [N, 3] -> action [N, 1]."""
    cos, sin, speed = obs.unbind(1)
    missing = 15 * (1 - cos) - speed.square() / 2  # of the energy at rest upright, per moment of inertia
    hold = -10 * torch.atan2(sin, cos) - 2 * speed
    pump = missing.clamp(-1, 1) * torch.where(speed.abs() < 0.1, torch.ones_like(speed), speed.sign()) * 2
    return torch.where(cos > 0.9, hold, pump).div(2).clamp(-1, 1).unsqueeze(1)


def record(path, num_envs=64, steps=200):
    """Write ``num_envs * steps`` transitions, one environment after the other. Returns the mean return."""
    env, rows = pql.make_env("pendulum", num_envs=num_envs), []
    obs = env.reset(seed=0)["policy"]
    for _ in range(steps):
        action = swing_up(obs)
        step = env.step(action)
        rows.append((obs, action, step.reward, step.terminated, step.truncated, step.final_obs["policy"]))
        obs = step.obs["policy"]
    names = "obs.policy", "action", "reward", "terminated", "truncated", "next_obs.policy"
    columns = {
        name: torch.stack(parts, 1).flatten(0, 1) for name, parts in zip(names, zip(*rows, strict=True), strict=True)
    }
    save_file(columns, path)
    return columns["reward"].sum().item() / num_envs


def main(*overrides, path="demonstrations.safetensors"):
    shown = record(path)
    run = pql.train("task=pendulum", "algo=pql", f"replay.prefill={path}", "budget.seconds=20", *overrides)
    return shown, run


if __name__ == "__main__":
    shown, run = main(*sys.argv[1:])
    print(f"return of the demonstrations {shown:,.0f}, of the policy {run.return_mean:,.0f}")
