"""Simulators for tests of ``pql.remote.process.near``: they need only NumPy, and run on any Python from 3.8 on."""

import ctypes
import os
import sys
import time

import numpy as np

from pql.contract.plain import Box, Discrete, EnvSpec, MultiDiscrete, ObsSpec, Step


class Walk:
    """A point pushed in the plane, with noise, two observation groups, an end and a time limit.

    Args:
        fault: of step number ``at``: raise, abort, orphan (abort, while a child process lives), hang, hold (hang,
            and never release the interpreter's lock), or exit.
        helper: fork a process that works for the simulator.
    """

    def __init__(self, num_envs, device="cpu", limit=7, discrete=False, fault=None, at=3, threads=0, helper=False):
        if limit < 1:
            raise WrongSettingError("limit", limit, "at least 1")
        if discrete is None:
            raise WrongSettingError("discrete", discrete, "true or false")
        action = Discrete(4, -1) if discrete else Box(2, (-2.0, -2.0), (2.0, 2.0))
        if discrete == "two":
            action = MultiDiscrete((4, 3), (0, 1))
        obs = {"policy": ObsSpec((2,)), "critic": ObsSpec((3,), "float64"), "image": ObsSpec((2, 2), "uint8")}
        info = {
            "python": ".".join(map(str, sys.version_info[:2])),
            "threads": threads,
            "pid": os.getpid(),
            "torch": "torch" in sys.modules,
            "arguments": len(sys.argv) - 1,
            **({} if discrete else {"action_reach": (4, np.float64(0.5))}),
        }
        more = {"log": ("push", "success"), "single_instance": True, "info": info}
        self.spec = EnvSpec("walk", num_envs, obs, action, "cpu", max_episode_steps=limit, **more)
        self.random, self.limit, self.fault, self.at, self.count = np.random.RandomState(0), limit, fault, at, 0
        if helper and os.fork() == 0:
            time.sleep(600)
        self.x = np.zeros((num_envs, 2))
        self.t = np.zeros(num_envs, np.int64)

    def observe(self):
        image = np.clip(self.x * 20 + 128, 0, 255).astype(np.uint8)
        return {
            "policy": self.x.astype(np.float32),
            "critic": np.concatenate((self.x, self.t[:, None]), 1),
            "image": np.stack((image, image[:, ::-1]), 1),
        }

    def start(self, mask):
        self.x = np.where(mask[:, None], self.random.uniform(-1, 1, self.x.shape), self.x)
        self.t = np.where(mask, 0, self.t)

    def reset(self, seed=None):
        if seed is not None:
            self.random.seed(seed % 2**32)
        self.start(np.ones(len(self.t), bool))
        return self.observe()

    def reset_where(self, mask):
        self.start(mask)
        return self.observe()

    def step(self, action):
        self.count += 1
        if self.fault and self.count == self.at:
            self.fail()
        push = np.eye(4)[action][:, :2] if action.ndim == 1 else np.clip(action, -1, 1)
        if isinstance(self.spec.action, MultiDiscrete):
            assert action.dtype == np.int64
            push = np.eye(4)[action[:, 0]][:, :2] * action[:, 1:]
        self.x = self.x + 0.2 * push + self.random.normal(0, 0.05, self.x.shape)
        self.t = self.t + 1
        far = (self.x**2).sum(1) > 1.5
        late = (self.t >= self.limit) & ~far
        final, reward = self.observe(), -(self.x**2).sum(1)
        self.start(far | late)
        yes = np.ones(len(far), bool)
        log = {"success": late, "push": np.abs(push).sum(1)}
        return Step(self.observe(), reward, far, late, far | late, final, yes, yes, log)

    def fail(self):
        if self.fault == "raise":
            raise ZeroDivisionError("the simulator fell over")
        if self.fault == "lines":
            raise ZeroDivisionError("the simulator fell over\nand broke")
        if self.fault == "orphan" and os.fork() == 0:
            time.sleep(600)
        if self.fault in ("abort", "orphan"):
            os.abort()
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "hold":
            ctypes.PyDLL(None).sleep(600)
        time.sleep(600)

    def state_dict(self):
        _, keys, position, has, cached = self.random.get_state()
        return {"x": self.x, "t": self.t, "keys": keys.astype(np.int64), "numbers": [position, has], "cached": cached}

    def load_state_dict(self, state):
        numbers = state["numbers"]
        keys = np.asarray(state["keys"]).astype(np.uint32)
        self.random.set_state(("MT19937", keys, int(numbers[0]), int(numbers[1]), float(state["cached"])))
        self.x, self.t = state["x"], state["t"]

    def render(self, index=0, width=None, height=None):
        return np.full((height or 4, width or 6, 3), index, np.uint8)

    def close(self):
        if self.fault == "at close":
            raise ValueError("not now")


class Staged(Walk):
    """Its stage is the number of its steps; it logs an episode's last place, and a number of every step."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs)
        log = {"push": "sum", "success": "step", "place": "episode"}
        self.spec = EnvSpec(**{**fields_of(self.spec), "log": log})
        self.levels = np.zeros(num_envs, np.int64)

    def progress(self):
        return {"steps": self.count, "levels": self.levels}

    def load_progress(self, progress):
        self.count = int(progress["steps"])
        self.levels = np.asarray(progress.get("levels", self.levels))

    def step(self, action):
        step = super().step(action)
        return step._replace(log={**step.log, "place": step.truncated * 2.0})


def fields_of(spec):
    """Return the fields of a specification: a dataclass, or a tuple without torch."""
    return spec._asdict() if hasattr(spec, "_asdict") else {name: getattr(spec, name) for name in vars(spec)}


class WrongSettingError(Exception):
    def __init__(self, setting, value, allowed):
        super().__init__(setting, value, allowed)
        self.setting, self.value, self.allowed = setting, value, allowed


def broken(num_envs, device):
    raise KeyError("no licence")


class Foreseen(Walk):
    """A simulator whose specification is available before construction, which fails."""

    @staticmethod
    def describe(num_envs, device="cpu", limit=7):
        return Walk(num_envs, device, limit).spec

    def __init__(self, num_envs, device="cpu", limit=7):
        raise RuntimeError("building was begun")


class Misshapen(Walk):
    def __init__(self, num_envs, device="cpu", slip="reward"):
        super().__init__(num_envs, device)
        self.slip = slip

    def reset(self, seed=None):
        obs = super().reset(seed)
        return {k: np.tile(v, 2) if k == "policy" else v for k, v in obs.items()} if self.slip == "reset" else obs

    def step(self, action):
        step = super().step(action)
        if self.slip == "tuple":
            return (step.obs, step.reward)
        obs = {k: v / 255.0 for k, v in step.obs.items()} if self.slip == "image" else {"policy": step.obs["policy"]}
        change = {
            "list": {"terminated": step.terminated.tolist()},
            "log": {"log": {"push": step.log["push"]}},
            "image": {"obs": obs},
            "missing": {"obs": obs},
        }
        return step._replace(**(change.get(self.slip) or {self.slip: getattr(step, self.slip)[:, None]}))


class Numbers(Walk):
    """A simulator whose specification has NumPy numbers, and some of whose flags are numbers."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, device)
        obs = {k: ObsSpec(tuple(np.array(part.shape)), part.dtype) for k, part in self.spec.obs.items()}
        bound = np.full(2, 2, np.float32)
        action = Box(np.int64(2), -bound, bound)
        more = {"max_episode_steps": np.int64(7), "log": ("push", "success"), "deterministic": np.bool_(True)}
        self.spec = EnvSpec("walk", np.int64(num_envs), obs, action, "cpu", **more)

    def step(self, action):
        step = super().step(action)
        return step._replace(terminated=step.terminated.astype(np.int64), valid=step.valid.astype(np.float32))


def endless(num_envs, device):
    time.sleep(600)
