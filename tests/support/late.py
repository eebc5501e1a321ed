"""``Late``: a simulator whose environments answer at arbitrary times, for tests of collectors."""

import functools
import random
from dataclasses import replace

import torch

from pql.envs.toy import Counter
from pql.types import Step

LENGTH = 320  # rows of a history


@functools.cache
def history(num_envs, kwargs):
    """Return the history of ``Counter``, all environments together: first observation, and steps [LENGTH, N, ...]."""
    env = Counter(num_envs, **dict(kwargs))
    first = env.reset()["policy"].clone()
    steps = [env.step(torch.zeros(num_envs, 2)) for _ in range(LENGTH)]

    def stack(field):
        if isinstance(field[0], dict):
            return {k: torch.stack([f[k] for f in field]) for k in field[0]}
        return torch.stack(list(field))

    return env.spec, first, Step(*(stack(field) for field in zip(*steps, strict=True)))


class Late:
    """``Counter``'s environments, each with its own step count.

    Args:
        late: share of answers that come ``by`` requests later.
        gone: environments that never answer.
        lost: (environment, number of its step): there its actor is replaced, and that step is never made.
    """

    def __init__(self, num_envs=8, groups=2, spread=4, late=0.0, by=3, gone=(), lost=(), seed=0, **kwargs):
        spec, self.first, self.steps = history(num_envs, tuple(kwargs.items()))
        self.spec = replace(spec, groups=groups, spread=spread, deterministic=False, info={"restarts": True})
        self.random, self.late, self.by, self.gone, self.lost = random.Random(seed), late, by, set(gone), set(lost)
        self.parts = torch.arange(num_envs).chunk(groups)
        self.time = torch.zeros(num_envs, dtype=torch.int64)  # position in its history, by environment
        self.delay: dict[int, int] = {}  # requests until its answer comes
        self.sent: dict[int, list] = {i: [] for i in range(num_envs)}  # actions, by environment
        self.shown = self.first.clone()
        self.rows = 0

    def reset(self, seed=None):
        return {"policy": self.first.clone()}

    def present(self):
        return torch.tensor([i not in self.gone for i in range(self.spec.num_envs)])

    def send(self, action, ids):
        for i, a in zip(ids.tolist(), action, strict=True):
            assert i not in self.delay, "an action for an environment that is still at the last one"
            self.delay[i] = self.by if self.random.random() < self.late else 0
            self.sent[i].append(a.clone())

    def answers(self, group):
        ids = [i for i in self.parts[group].tolist() if i in self.delay]
        ready = [i for i in ids if self.delay[i] == 0]
        self.delay = {i: d - (i in ids) for i, d in self.delay.items() if i not in ready}
        self.rows += len(ready)
        restarted = [i for i in ready if (i, int(self.time[i])) in self.lost]
        for i in restarted:  # a new actor begins an episode
            self.lost.remove((i, int(self.time[i])))
            while not self.steps.first[self.time[i], i]:
                self.time[i] += 1
        part, here = self.parts[group], torch.isin(self.parts[group], torch.tensor(ready, dtype=torch.int64))
        again = torch.isin(part, torch.tensor(restarted, dtype=torch.int64))
        now, made = self.time[part], here & ~again

        def of(field):
            return {k: v[now, part] for k, v in field.items()} if isinstance(field, dict) else field[now, part]

        step = Step(*map(of, self.steps))
        obs = torch.where(here[:, None], step.obs["policy"], self.shown[part])
        self.shown[part] = obs
        self.time[part] += here
        return torch.tensor(ready, dtype=torch.int64), step._replace(
            obs={"policy": obs},
            final_obs={"policy": torch.where(made[:, None], step.final_obs["policy"], obs)},
            first=(step.first & made) | again,
            final_ok=step.final_ok | ~made,
            **{k: getattr(step, k) & made for k in ("terminated", "truncated", "valid")},
            log={k: v * made for k, v in step.log.items()},
            reward=step.reward * made,
        )

    def close(self):
        pass


def cells(ring, rows):
    """Return every (row, column) below ``rows``, as windows need them: row [M], column [M], head [M]."""
    row, column = (
        v.reshape(-1) for v in torch.meshgrid(torch.arange(rows), torch.arange(ring.num_envs), indexing="ij")
    )
    return row, column, ring.live.head[column]
