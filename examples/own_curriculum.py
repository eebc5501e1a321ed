"""A curriculum in a simulator of your own: masses start close to the goal at first, farther away later.

    python examples/own_curriculum.py                   # trains for 20 seconds
    python examples/own_curriculum.py budget.seconds=5  # any settings of pql train

`progress` and `load_progress` let evaluations and `pql resume` take place at the stage that training has reached.
"""

import sys
from dataclasses import replace

from own_simulator import Dock

import pql


class Approach(Dock):
    """Starts within `reach` of the goal, which grows from 0.2 to 1 over the first 2,000 steps."""

    def __init__(self, num_envs=64, device="cpu"):
        super().__init__(num_envs, device)
        self.steps = 0
        self.spec = replace(self.spec, log={"success": "sum", "reach": "episode"})

    @property
    def reach(self):
        return min(0.2 + 0.8 * self.steps / 2000, 1.0)

    def start(self):
        return super().start() * self.reach

    def step(self, action):
        self.steps += 1
        step = super().step(action)
        return step._replace(log={**step.log, "reach": step.first * self.reach})  # once for each episode, at its end

    def progress(self):
        return {"steps": self.steps}

    def load_progress(self, progress):
        self.steps = int(progress["steps"])


def main(*overrides):
    return pql.train("task=env", "task.name=own_curriculum:Approach", "budget.seconds=20", *overrides)


if __name__ == "__main__":
    run = main(*sys.argv[1:])
    print(f"{run.success:.0%} docked, at the stage of {run.env_steps:,} env steps")
