"""A pendulum seen as a picture: a light at its tip."""

from dataclasses import replace

import torch

from pql.contract.env import ObsSpec
from pql.contract.registry import register
from pql.envs.classic import Pendulum

SIDE = 12
PIXELS = {
    "task": {"name": "dial", "kwargs": {"max_episode_steps": 30, "stagger": True}},
    "algo": {
        "encoder": {"kind": "squint", "channels": [4, 4], "features": 6, "size": 10, "shift": 2, "jitter": 0.3},
        "critic": {"hidden": [8], "obs": ["critic", "policy"]},
        "policy": {"hidden": [8], "encoder": "critic"},
    },
}
"""A small run in which the policy reads the picture through the critics' encoder."""
RECIPES = {
    "squint": {
        "family": "sac",
        "explore": {"kind": "none"},
        "critic": {"atoms": 11, "target": "own", "layer_norm": True, "init": "orthogonal"},
    },
    "a target policy": {"policy": {"target": True}},
    "batch norm, bfloat16": {"policy": {"batch_norm": True}, "critic": {"batch_norm": True}, "amp": True},
}


class Dial(Pendulum):
    """``policy`` observes bytes [1, 12, 12], brighter towards the tip; ``critic`` observes the pendulum's state."""

    name = "dial"

    @classmethod
    def describe(cls, *args, **kwargs):
        obs = {"policy": ObsSpec((1, SIDE, SIDE), torch.uint8), "critic": ObsSpec((3,))}
        return replace(super().describe(*args, **kwargs), obs=obs)

    def seen(self, obs):
        state = obs["policy"]
        line = torch.linspace(-1, 1, SIDE, device=state.device)
        far = (line.view(-1, 1) + state[:, 0].view(-1, 1, 1)).square() + (line - state[:, 1].view(-1, 1, 1)).square()
        return {"policy": (255 * (-4 * far).exp()).to(torch.uint8).unsqueeze(1), "critic": state}

    def reset(self, seed=None):
        return self.seen(super().reset(seed))

    def reset_where(self, mask):
        return self.seen(super().reset_where(mask))

    def step(self, action):
        step = super().step(action)
        return step._replace(obs=self.seen(step.obs), final_obs=self.seen(step.final_obs))


register("dial", Dial)
