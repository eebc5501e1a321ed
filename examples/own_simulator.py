"""A simulator of your own in torch: N point masses are brought to rest at the origin.

    python examples/own_simulator.py                            # checks the contract, then trains for 20 seconds
    python examples/own_simulator.py algo=ppo budget.seconds=5  # any settings of pql train

In this folder also: pql doctor --env own_simulator:Dock; pql train task=env task.name=own_simulator:Dock
"""

import sys

import torch

import pql


class Dock:
    """Observation: position and velocity, [N, 4]; action: acceleration, [N, 2] in [-1, 1]; a step takes 0.1 s."""

    def __init__(self, num_envs=64, device="cpu"):
        obs, self.limit = {"policy": pql.ObsSpec((4,))}, 100
        self.spec = pql.EnvSpec(
            "dock", num_envs, obs, pql.Box(2), torch.device(device), max_episode_steps=self.limit, log=("success",)
        )
        self.generator = torch.Generator(device)

    def start(self):
        place = torch.rand(self.spec.num_envs, 2, generator=self.generator, device=self.spec.device) * 2 - 1
        return torch.cat((place, torch.zeros_like(place)), 1)

    def reset(self, seed=None):
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state, self.age = self.start(), torch.zeros(self.spec.num_envs, device=self.spec.device)
        return {"policy": self.state}

    def step(self, action):
        place, speed = self.state.split(2, 1)
        speed = speed + 0.1 * action.clamp(-1, 1)
        place = place + 0.1 * speed
        distance, self.age = place.norm(dim=1), self.age + 1
        lost, final = distance > 2, torch.cat((place, speed), 1)
        late = ~lost & (self.age >= self.limit)  # a time limit: learners bootstrap from the value of `final`
        over, yes = lost | late, torch.ones_like(lost)
        self.state, self.age = torch.where(over[:, None], self.start(), final), self.age * ~over
        log = {"success": ((distance < 0.1) & (speed.norm(dim=1) < 0.1)).float()}
        obs, final = {"policy": self.state}, {"policy": final}
        return pql.Step(obs, 1 - distance.tanh(), lost, late, over, final, yes, yes, log)

    def close(self): ...


def main(*overrides):
    report = pql.check_env(Dock(), steps=250)
    print(report)
    return report, pql.train("task=env", "task.name=own_simulator:Dock", "budget.seconds=20", *overrides)


if __name__ == "__main__":
    print(f"docked in {main(*sys.argv[1:])[1].success:.0%} of the evaluation's episodes")
