"""Shadow Hand for sim-to-real transfer, after OpenAI et al. 2018 (arXiv 1808.00177), as in Isaac Gym's
ShadowHandOpenAI_FF: a policy with few observations, a critic with the full state, 20 actions per second, success within
0.4 rad, and eight seconds per goal.

Differences from Isaac's task, in addition to those of :mod:`.shadow_hand`: a push on the block lasts the whole step
with a third of its force (Isaac: full force for the first third). The preset enables ``task.kwargs.randomize`` for
masses, friction, motor stiffness and observation noise; action noise, gravity, the block's size, joint limits and
damping are not randomised.
"""

import math
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.reorient import pick
from pql.envs.mujoco.isaac.shadow_hand import STATE, ShadowHand
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Verdict
from pql.types import Obs

DECAY = 0.99 ** (0.01667 / 0.08)  # of a push, per step
CHANCE = (0.001, 0.1)  # range of the chance of a new push per step, drawn log-uniformly per episode


class ShadowHandOpenAI(ShadowHand):
    """The policy observes 42 numbers: the fingertips' and the block's positions, the rotation from goal to block, and
    the action. The critic observes the 211 of ``shadow_hand``. Targets follow actions with a moving average of .3. The
    reward is that of ``shadow_hand``, and -50 if the block falls, -25 after 159 steps in a row without a success, which
    truncates the episode. The 50th success ends the episode.
    """

    name = "shadow_hand_openai"
    obs_size = 42
    frame_skip, dt = 12, 0.05001
    time_limit = 8000
    terms = (*ShadowHand.terms, "fall", "late")
    parts: ClassVar[tuple[str, ...]] = ("fingertip_places", "place", "error", "action")
    tolerance = 0.4
    AVERAGE: ClassVar[float] = 0.3
    PATIENCE: ClassVar[int] = 159  # steps without a success before truncation
    GOALS: ClassVar[int] = 50

    def __init__(self, robot: Robot):
        super().__init__(robot)
        motors = slice(self.action_size)
        self._driven = torch.tensor(robot.model.actuator_trnid[motors, 0], device=robot.device, dtype=torch.int64)
        self._middle, self._half = robot.ctrl_middle[motors], robot.ctrl_half[motors]
        self._mass = float(robot.model.body("object").mass[0])

    @classmethod
    def obs_spec(cls) -> dict[str, ObsSpec]:
        return {"policy": ObsSpec((cls.obs_size,)), "critic": ObsSpec((ShadowHand.obs_size,))}

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for axis, name in enumerate("xyz"):  # forces on the block along its axes
            gear = [float(axis == other) for other in range(6)]
            spec.add_actuator(name=f"push_{name}", target="object:center", trntype=mujoco.mjtTrn.mjTRN_SITE, gear=gear)

    def start(self, count: int, draw: Draw) -> Start:
        start = super().start(count, draw)
        low, high = (math.log(bound) for bound in CHANCE)
        memory = {
            **start.memory,
            "targets": start.qpos[:, self._driven],
            "push": start.qpos.new_zeros(count, 3),
            "chance": draw.uniform(low, high, count, 1).exp(),
            "count": start.qpos.new_zeros(count),
            "idle": start.qpos.new_zeros(count),
        }
        return start._replace(memory=memory)

    def control(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        """Joint targets and the push on the block, [N, nu], from ``action`` [N, A]."""
        wanted = action * self._half + self._middle
        targets = self.AVERAGE * wanted + (1 - self.AVERAGE) * memory["targets"]
        return torch.cat((targets, memory["push"] / 3), 1)

    def taken(self, fields: Fields, memory: Memory) -> Tensor:
        targets = fields["ctrl"][:, : self.action_size]
        wanted = memory["targets"] + (targets - memory["targets"]) / self.AVERAGE
        return (wanted - self._middle) / self._half

    def _idle(self, solved: Tensor, memory: Memory) -> Tensor:
        """Return the steps since the latest success, or since the start."""
        return torch.where(solved, 0.0, memory["idle"] + 1)

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        solved, push = self.solved(fields, memory), memory["push"]
        fresh = self._mass * draw.normal(1.0, *push.shape)
        hit = draw.uniform(0.0, 1.0, len(push), 1) < memory["chance"]
        return {
            **super().evolve(fields, memory, draw),
            "targets": fields["ctrl"][:, : self.action_size].clone(),
            "push": torch.where(hit, fresh, DECAY * push),
            "count": memory["count"] + solved,
            "idle": self._idle(solved, memory),
        }

    def expired(self, memory: Memory) -> Tensor:
        return memory["idle"] >= self.PATIENCE

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        terms, fell, metrics = super().judge(fields, memory)
        assert fell is not None
        solved = metrics["success"]
        late = self._idle(solved, memory) >= self.PATIENCE
        all_terms = {**terms, "fall": -50.0 * fell, "late": -25.0 * late}
        return Verdict(all_terms, fell | (memory["count"] + solved >= self.GOALS), metrics)

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        measured = self.measure(fields, memory)
        return {"policy": pick(measured, self.parts), "critic": pick(measured, STATE)}
