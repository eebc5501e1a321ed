"""Pairs of the paper's two hands with IsaacGymEnvs' classes, for ``check.py``."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from pql.envs.mujoco.isaac.measure import product
from pql.envs.mujoco.task import Memory, Start
from tools.originals.isaac_stub import DOUBLE, Scene
from tools.originals.pairs import Fields, Pair, Sides, body, quats, still


class Hand(Pair):
    tips: ClassVar[int]

    def make_scene(self, n: int) -> Scene:
        task, j = self.task, self.task.joints
        place, goal = still(n, task.place), still(n, tuple(task.goal_place.tolist()))
        actors, zero = 3 * torch.arange(n), torch.zeros(j, dtype=DOUBLE)
        driven = torch.tensor(self.model.actuator_trnid[: task.action_size, 0], dtype=torch.long)
        tensors = {
            "actor_root_state": torch.stack((still(n, (0, 0, 0.5)), place, goal), 1).flatten(0, 1),
            "dof_state": torch.zeros(n * j, 2, dtype=DOUBLE),
            "dof_force": torch.zeros(n * j, dtype=DOUBLE),
            "rigid_body_state": torch.zeros(n * (self.tips + 1), 13, dtype=DOUBLE),
            "force_sensor": torch.zeros(n * self.tips, 6, dtype=DOUBLE),
        }
        known = {
            "num_dofs": j,
            "num_shadow_hand_dofs": j,
            "actuated_dof_indices": driven,
            "shadow_hand_dof_lower_limits": task.low,
            "shadow_hand_dof_upper_limits": task.high,
            "shadow_hand_dof_default_pos": zero,
            "shadow_hand_dof_default_vel": zero,
            "fingertip_handles": torch.arange(self.tips),
            "hand_indices": actors,
            "object_indices": actors + 1,
            "goal_object_indices": actors + 2,
            "object_init_state": place,
            "goal_init_state": goal.clone(),
            "goal_states": goal,
            "goal_displacement_tensor": torch.tensor([-0.2, -0.06, 0.12], dtype=DOUBLE),
            "object_rb_handles": torch.tensor([self.tips]),
            "object_rb_masses": torch.ones(1, dtype=DOUBLE),
        }
        return Scene(n, tensors, known)

    def show(self, fields: Fields, memory: Memory) -> None:
        given, task, one = self.scene.tensors, self.task, self.original
        j = task.joints
        given["actor_root_state"].view(self.n, 3, 13)[:, 1] = body(fields, j, j)
        given["dof_state"][:] = torch.stack((fields["qpos"][:, :j], fields["qvel"][:, :j]), 2).flatten(0, 1)
        one.goal_states[:, 3:7] = memory["goal"].roll(-1, 1)
        if self.tips:
            begun = memory["begun"][:, None]
            given["rigid_body_state"].view(self.n, -1, 13)[:, : self.tips] = fields["sensordata"][:, task._tips]
            given["force_sensor"][:] = (task._wrench.at_origins(fields) * begun).view(-1, 6)
            given["dof_force"][:] = (fields["qfrc_actuator"][:, :j] * begun).flatten()
        if "targets" in memory:
            one.prev_targets[:, one.actuated_dof_indices] = memory["targets"].to(one.prev_targets)

    def clear(self, memory: Memory) -> None:
        super().clear(memory)
        self.original.reset_goal_buf.zero_()
        if "count" in memory:
            self.original.successes[:] = memory["count"]
            self.original.progress_buf[:] = memory["idle"].long() + 1

    def scatter(self, gen: torch.Generator) -> None:
        """Move a third of the goals near the cube's orientation, and a tenth of the cubes out of the hand."""
        env, task, n = self.env, self.task, self.n
        qpos, qvel = env.engine.fields["qpos"].clone(), env.engine.fields["qvel"].clone()
        near = torch.rand(n, generator=gen) < 0.3
        turned = product(quats(n, gen, task.tolerance), task.cube(env.engine.fields)[1])
        memory = {**env._memory, "goal": torch.where(near[:, None], turned, env._memory["goal"])}
        if "count" in memory:
            memory["count"] = torch.randint(0, 50, (n,), generator=gen).double()
            memory["idle"] = torch.randint(0, 159, (n,), generator=gen).double()
        env._memory = memory
        away = (torch.rand(n, generator=gen) < 0.1).double()[:, None]
        qpos[:, task.joints : task.joints + 3] += 0.2 * away * torch.randn(n, 3, generator=gen, dtype=DOUBLE)
        env.engine.reset(env.engine.rows(torch.ones(n, dtype=torch.bool)), qpos, qvel)

    def controls(self, fields: Fields) -> Sides:
        one = self.original
        return one.cur_targets[:, one.actuated_dof_indices].double(), fields["ctrl"][:, : self.task.action_size]

    def begin(self) -> None:
        every = torch.arange(self.n)
        self.original.reset_idx(every, every)

    def starts(self, start: Start) -> Sides:
        one, task = self.original, self.task
        cube = one.root_state_tensor[one.object_indices]
        hand = one.shadow_hand_dof_pos.clamp(task.low, task.high)
        theirs = torch.cat((hand, cube[:, :7], one.goal_states[:, 3:7]), 1)
        at = start.qpos[:, task.joints :]
        mine = (start.qpos[:, : task.joints], at[:, :3], at[:, 3:].roll(-1, 1), start.memory["goal"].roll(-1, 1))
        return theirs, torch.cat(mine, 1)


class ShadowHand(Hand):
    ours, module, theirs, config, tips = "shadow_hand", "shadow_hand", "ShadowHand", "ShadowHand", 5


class ShadowHandFull(ShadowHand):
    ours = "shadow_hand_full"
    changed: ClassVar[dict[str, Any]] = {"observationType": "full"}


class ShadowHandFullNoVel(ShadowHand):
    ours = "shadow_hand_full_no_vel"
    changed: ClassVar[dict[str, Any]] = {"observationType": "full_no_vel"}


class ShadowHandOpenAI(ShadowHand):
    ours, config = "shadow_hand_openai", "ShadowHandOpenAI_FF"

    def ended(self, terminated: Tensor, memory: Memory) -> Tensor:
        late = self.task.expired(memory)
        assert late is not None
        return terminated | late


class AllegroHand(Hand):
    ours, module, theirs, config, tips = "allegro_hand", "allegro_hand", "AllegroHand", "AllegroHand", 0
