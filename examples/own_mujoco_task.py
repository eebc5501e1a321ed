"""A MuJoCo task of your own: a motor tilts a beam so that a ball on it comes to rest in the middle.

    python examples/own_mujoco_task.py                                        # 30 seconds
    python examples/own_mujoco_task.py 'task.kwargs.randomize.mass=[0.5,2]'   # with domain randomisation

Needs the extra mujoco. In this folder also: pql train task=env task.name=own_mujoco_task:beam
"""

import sys

import mujoco
import torch

import pql
from pql.envs.mujoco import Maker
from pql.envs.mujoco.task import Start, Task, Verdict

MODEL = """<mujoco><option timestep="0.01"/><worldbody>
  <light pos="0 -1 3" dir="0 .3 -1"/><body name="beam" pos="0 0 .5">
    <joint name="tilt" axis="0 1 0" damping=".2"/><geom type="box" size=".5 .05 .01" rgba=".3 .45 .7 1" mass="1"/>
    <body name="ball" pos="0 0 .06">
      <joint name="roll" type="slide" axis="1 0 0"/><geom type="sphere" size=".05" rgba=".85 .3 .2 1" mass=".1"/>
    </body>
  </body>
</worldbody><actuator><position joint="tilt" kp="20" dampratio="1" ctrlrange="-.25 .25"/></actuator></mujoco>"""


class Beam(Task):
    """Observation: tilt, place of the ball and their velocities, [N, 4]; action: the tilt to hold, [N, 1]."""

    name, obs_size, action_size, ctrl_limit = "beam", 4, 1, 0.25
    frame_skip, dt, time_limit = 4, 0.04, 250
    terms, metrics, model = ("centred",), ("distance",), "fast"  # the reward's parts; other numbers for the log; solver

    @classmethod
    def source(cls):
        return mujoco.MjSpec.from_string(MODEL)

    def start(self, count, draw):
        place = draw.uniform(-0.3, 0.3, count, 1)
        return Start(torch.cat((torch.zeros_like(place), place), 1), self.robot.qvel0.repeat(count, 1))

    def observe(self, fields, memory):
        return {"policy": torch.cat((fields["qpos"], fields["qvel"]), 1)}

    def judge(self, fields, memory):
        distance = fields["qpos"][:, 1].abs()
        return Verdict({"centred": (1 - 2 * distance).clamp(min=0)}, distance > 0.5, {"distance": distance})


beam = Maker(Beam)  # takes what every MuJoCo task takes: threads, engine, randomize, curriculum, ...


def main(*overrides):
    return pql.train("task=env", "task.name=own_mujoco_task:beam", "budget.seconds=30", *overrides)


if __name__ == "__main__":
    print(f"{main(*sys.argv[1:]).return_mean:.0f} of at most 250")
