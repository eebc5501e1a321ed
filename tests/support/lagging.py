"""A task whose observation is the history of another's, as the managers of mjlab and Isaac Lab keep it."""

from dataclasses import replace

import torch

import pql
from pql.contract.env import ObsSpec


class Lagging:
    """The last ``stack`` observations of ``task``, term by term: its first number, then the others. ``fault``: with
    ``begin`` older observations are twice the first one, with ``step`` two observations enter in a step."""

    def __init__(self, num_envs, device, task="pendulum", stack=5, fill="first", declared=True, fault="", **kwargs):
        self.inner = pql.make_env(task, num_envs, device, **kwargs)
        self.stack, self.fill, self.fault, (width,) = stack, fill, fault, self.inner.spec.obs["policy"].shape
        said = {"stack": stack, "terms": (1, width - 1), "fill": fill} if declared else {}
        self.spec = replace(self.inner.spec, obs={"policy": ObsSpec((stack * width,), **said)})

    def begun(self, obs):
        older = obs[:, None].repeat(1, self.stack, 1)
        older[:, :-1] *= 0 if self.fill == "zeros" else 1 + (self.fault == "begin")
        return older

    def flat(self, frames):
        self.frames = frames
        return {"policy": torch.cat((frames[:, :, 0], frames[:, :, 1:].flatten(1)), 1)}

    def reset(self, seed=None):
        return self.flat(self.begun(self.inner.reset(seed)["policy"]))

    def step(self, action):
        row, times = self.inner.step(action), 1 + (self.fault == "step")
        new = [x["policy"][:, None].repeat(1, times, 1) for x in (row.final_obs, row.obs)]
        final, obs = (torch.cat((self.frames, x), 1)[:, -self.stack :] for x in new)
        obs = torch.where(row.first[:, None, None], self.begun(row.obs["policy"]), obs)
        return row._replace(final_obs=self.flat(final), obs=self.flat(obs))

    def state_dict(self):
        return {**self.inner.state_dict(), "frames": self.frames}

    def load_state_dict(self, state):
        self.frames = state["frames"].clone()
        self.inner.load_state_dict({k: v for k, v in state.items() if k != "frames"})

    def close(self):
        self.inner.close()
