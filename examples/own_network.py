"""Networks of your own: policy and critics that see sines of the observation, which learn fine detail faster.

    python examples/own_network.py                       # Pendulum, 20 seconds; any task with task=NAME

A run names the class, own_network:Policy: `pql eval RUN --trust` loads it, in this folder or where Python finds it.
"""

import sys

import torch
from torch import nn

import pql


class Sines(nn.Module):
    """x [B, D] -> [B, outputs]: an MLP that reads x and 16 sines of learned frequencies."""

    def __init__(self, size, outputs, hidden=64):
        super().__init__()
        self.waves, self.first = nn.Linear(size, 16), nn.Linear(size + 16, hidden)
        self.rest = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, outputs))

    def forward(self, x):
        return self.rest(self.first(torch.cat((x, torch.sin(self.waves(x))), -1)))


class Policy(nn.Module):
    """Normalised observations, a dict of [B, ...] -> action [B, A] in [-1, 1]."""

    def __init__(self, spec, config):
        super().__init__()
        self.net = Sines(spec.obs["policy"].shape[0], spec.action.size)

    def forward(self, obs):
        return self.net(obs["policy"]).tanh()

    mean_action = forward  # the action without exploration noise: a deterministic policy's own


class Critics(nn.Module):
    """Observations and actions [B, A] -> values of two critics, [2, B]."""

    def __init__(self, spec, config):
        super().__init__()
        size = spec.obs["policy"].shape[0] + spec.action.size
        self.nets = nn.ModuleList(Sines(size, 1) for _ in range(2))

    def forward(self, obs, action):
        return torch.stack([net(torch.cat((obs["policy"], action), -1)).squeeze(-1) for net in self.nets])


def main(*overrides):
    nets = {"algo": "pql", "algo.policy.net": "own_network:Policy", "algo.critic.net": "own_network:Critics"}
    return pql.train("task=pendulum", nets, "budget.seconds=20", *overrides)


if __name__ == "__main__":
    main(*sys.argv[1:])
