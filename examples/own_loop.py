"""A loop of your own around a simulator or a robot: it steps, and pql learns beside it.

python examples/own_loop.py algo=pql2 budget.env_steps=40000
"""

import sys

import torch

import pql

N = 16


class Cart:
    """Carts that are to drive to the origin: obs [N, 2] position, action [N, 2] velocity."""

    def __init__(self):
        self.x, self.age = torch.rand(N, 2) * 2 - 1, torch.randint(100, (N,))

    def drive(self, velocity):
        """Drive for a step; return (observations, rewards, observations before restarts, whose time is up)."""
        self.x = self.x + 0.1 * velocity
        self.age += 1
        seen, up = self.x.clone(), self.age >= 100
        self.x[up], self.age[up] = torch.rand(N, 2)[up] * 2 - 1, 0
        return self.x.clone(), -seen.norm(dim=1), seen, up


def main(*overrides):
    spec = pql.EnvSpec("cart", N, {"policy": pql.ObsSpec((2,))}, pql.Box(2), torch.device("cpu"), max_episode_steps=100)
    cart, never = Cart(), torch.zeros(N, dtype=torch.bool)
    run = pql.drive("algo=pql2", "algo.warmup_steps=50", "budget.env_steps=40_000", *overrides, spec=spec)
    action, rewards = run.begin({"policy": cart.x.clone()}), []
    while run.going:
        obs, reward, seen, up = cart.drive(action)
        rewards.append(float(reward.mean()))
        step = pql.Step({"policy": obs}, reward, never, up, up, {"policy": seen}, ~never, ~never, {})
        action = run.feed(step)
    return run.close(), rewards


if __name__ == "__main__":
    summary, rewards = main(*sys.argv[1:])
    early, late = (sum(part) / len(part) for part in (rewards[:100], rewards[-100:]))
    print(f"mean reward of the first 100 steps {early:.3f}, of the last {late:.3f}: {summary.run_dir}")
