"""A stand-in for a task of IsaacGymEnvs 1.5.1, modelled on its ``VecTask``: signatures, dtypes, live buffers, and the
order of reset, reward and flags. Observations are [episode, step], so that every row is identifiable."""

import torch

ALIVE = []


class FakeVecTask:
    """Episodes of ``length - 1`` rows; environments of ``falls`` fall in row ``fall_at`` instead.

    Args:
        when: post | pre | same | manual: when environments that have ended are reset.
    """

    def __init__(self, num_envs=4, length=6, when="post", falls=(), fall_at=2, states=0):
        if ALIVE:
            raise RuntimeError("one simulation per process")  # the real one returns the old one
        ALIVE.append(self)
        self.num_envs, self.num_obs, self.num_states, self.num_actions = num_envs, 2, states, 3
        self.max_episode_length, self.rl_device, self.when = length, "cpu", when
        self.falls, self.fall_at = torch.tensor([i in falls for i in range(num_envs)]), fall_at
        self.obs_buf = torch.zeros(num_envs, 2)
        self.rew_buf = torch.zeros(num_envs)
        kind = torch.bool if when == "same" else torch.long
        self.reset_buf = torch.ones(num_envs, dtype=kind)
        self.progress_buf = torch.zeros(num_envs, dtype=torch.long)
        self.episode = torch.full((num_envs,), -1)
        self.extras, self.obs_dict, self.actions = {}, {}, []

    def zero_actions(self):
        return torch.zeros(self.num_envs, self.num_actions)

    def reset_idx(self, ids):
        self.episode[ids] += 1
        self.progress_buf[ids] = 0
        self.reset_buf[ids] = 0
        self.extras["last_reset"] = float(len(ids))  # a number of single resets, stale until the next

    def reset_flagged(self):
        ids = self.reset_buf.nonzero(as_tuple=False).flatten()
        if len(ids):
            self.reset_idx(ids)
        return ids

    def observe(self):
        self.obs_buf[:, 0], self.obs_buf[:, 1] = self.episode, self.progress_buf

    def clamped(self):
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -1e9, 1e9)
        if self.num_states > 0:
            self.obs_dict["states"] = torch.clamp(self.obs_buf[:, :1].expand(-1, self.num_states), -1e9, 1e9)
        return self.obs_dict

    def judge(self):
        fallen = self.falls & (self.progress_buf == self.fall_at)
        self.rew_buf[:] = 10.0 * self.episode + self.progress_buf
        self.reset_buf[:] = (fallen | (self.progress_buf >= self.max_episode_length - 1)).to(self.reset_buf.dtype)
        return fallen

    def step(self, actions):
        self.actions.append(torch.clamp(actions, -1, 1))
        if self.when == "pre":
            self.reset_flagged()
        self.progress_buf += 1
        if self.when == "post":
            self.reset_flagged()
            self.observe()
            self.judge()
        elif self.when == "same":
            self.judge()
            flags = self.reset_buf.clone()
            self.reset_flagged()
            self.reset_buf[:] = flags
            self.observe()
        else:
            self.observe()
            fallen = self.judge()
            if self.when == "manual":
                self.extras["terminate"] = fallen.long()
        self.extras["time_outs"] = (self.progress_buf >= self.max_episode_length - 1) & (self.reset_buf != 0)
        return self.clamped(), self.rew_buf, self.reset_buf, self.extras

    def reset(self):
        return self.clamped()

    def reset_done(self):
        ids = self.reset_flagged()
        if self.when == "manual":  # elsewhere it forgets to observe
            self.observe()
        return self.clamped(), ids
