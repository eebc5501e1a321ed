"""Stand-ins for JAX, brax's wrappers and MuJoCo Playground 0.2, after their code: what a step's state holds, in which
order time limit and reset replace parts of it, what a full reset does to ``info``. Arrays are torch tensors, and
nothing is compiled. Observations are [the key of the reset, step]."""

import dataclasses
import subprocess
import types
from pathlib import Path

import torch

GIVEN, LOADED = [], []  # actions; physics engines


@dataclasses.dataclass
class State:
    data: torch.Tensor
    obs: dict
    reward: torch.Tensor
    done: torch.Tensor
    metrics: dict
    info: dict

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class Bare:
    """Environment 1 falls in its third step."""

    action_size, dt = 3, 0.02

    def __init__(self, config):
        self.config, self.gravity = config, torch.zeros(())

    def render(self, state, height, width):
        return torch.full((height, width, 3), float(state.data.qpos[1]))

    def observe(self, data):
        return {"state": data.clone(), "privileged_state": torch.cat((data, data[:, :1]), 1)}

    def reset(self, keys):
        data = torch.stack((keys[:, 0] % 1_000_000, torch.zeros(len(keys)) + self.gravity), 1).float()
        none = torch.zeros(len(keys))
        return State(data, self.observe(data), none, none, {"reward/steps": none}, {"speed": none})

    def step(self, state, action):
        GIVEN.append(action)
        data = state.data + torch.tensor([0.0, 1.0])
        fallen = (torch.arange(len(data)) == 1) & (data[:, 1] == 3)
        metrics = {"reward/steps": data[:, 1]}
        return state.replace(data=data, obs=self.observe(data), reward=data[:, 1], done=fallen.float(), metrics=metrics)


class Wrapper:
    def __init__(self, env):
        self.env = env

    def reset(self, keys):
        return self.env.reset(keys)

    def step(self, state, action):
        return self.env.step(state, action)

    def __getattr__(self, name):
        return getattr(self.env, name)


class BraxDomainRandomizationVmapWrapper(Wrapper):
    """Each environment has a model of its own: here the number that its steps begin at."""

    def __init__(self, env, draw):
        super().__init__(env)
        env.gravity = draw(env.gravity)


class EpisodeWrapper(Wrapper):
    def __init__(self, env, length, repeat):
        super().__init__(env)
        self.length, self.repeat = length, repeat

    def reset(self, keys):
        state = self.env.reset(keys)
        state.info |= {"steps": torch.zeros(len(keys)), "truncation": torch.zeros(len(keys))}
        return state

    def step(self, state, action):
        state = self.env.step(state, action)
        steps = state.info["steps"] + self.repeat
        late = steps >= self.length
        state.info["truncation"] = torch.where(late, 1 - state.done, 0.0)
        state.info["steps"] = steps
        return state.replace(done=torch.where(late, 1.0, state.done))


class BraxAutoResetWrapper(Wrapper):
    def __init__(self, env, full_reset=False):
        super().__init__(env)
        self.full = full_reset

    def reset(self, keys):
        rng, key = split_each(keys)
        state = self.env.reset(key)
        state.info |= {"first_data": state.data, "first_obs": state.obs, "rng": rng}
        return state

    def step(self, state, action):
        rng, key = split_each(state.info["rng"])
        data, obs, fresh = state.info["first_data"], state.info["first_obs"], None
        if self.full:
            fresh = self.reset(key)
            data, obs = fresh.data, fresh.obs
        state.info["steps"] = torch.where(state.done > 0, 0.0, state.info["steps"])
        state = self.env.step(state.replace(done=torch.zeros_like(state.done)), action)
        over, info = state.done > 0, state.info
        if fresh is not None:
            info = where(over, fresh.info, state.info)
            info["steps"] = state.info["steps"]
        info["rng"] = rng
        return state.replace(data=where(over, data, state.data), obs=where(over, obs, state.obs), info=info)


def where(rows, new, old):
    """Select between arrays, or dicts of arrays, by row."""
    if isinstance(old, dict):
        return {k: where(rows, new[k], v) for k, v in old.items()}
    return torch.where(rows.view(-1, *(1,) * (old.dim() - 1)), new, old)


def split(key, count=2):
    return torch.stack([(key * 48271 + 11 * i + 7) % (2**31 - 1) for i in range(1, count + 1)])


def split_each(keys):
    return split(keys)


def leaves(tree):
    """Return the tensors of a state, or of a tuple of such, in order."""
    parts = vars(tree).values() if isinstance(tree, State) else tree.values() if isinstance(tree, dict) else tree
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for part in parts for leaf in leaves(part)]


def unflatten(tree, given):
    """Return ``tree`` with the tensors of the iterator ``given``."""
    if isinstance(tree, torch.Tensor):
        return torch.as_tensor(next(given))
    if isinstance(tree, State):
        return State(**{k: unflatten(v, given) for k, v in vars(tree).items()})
    if isinstance(tree, dict):
        return {k: unflatten(v, given) for k, v in tree.items()}
    return tuple(unflatten(part, given) for part in tree)


TREE = types.SimpleNamespace(
    leaves=leaves,
    flatten=lambda tree: (leaves(tree), tree),
    unflatten=lambda structure, given: unflatten(structure, iter(given)),
    map=lambda change, one, two: unflatten(one, map(change, leaves(one), leaves(two))),
)


def load(name, config):
    print("loading", name)
    if config["impl"] == "offline":
        raise subprocess.CalledProcessError(128, ["git", "clone"])
    LOADED.append(config["impl"])
    return Bare(config)


def modules(backend="cpu"):
    """Return the modules that replace the packages, by name."""
    config = {"episode_length": 5, "impl": "warp", "noise": {"level": 1.0}}
    jax = {
        "default_backend": lambda: backend,
        "jit": lambda function: function,
        "random": types.SimpleNamespace(PRNGKey=lambda seed: torch.tensor([seed, 1]), split=split),
        "tree": TREE,
        "numpy": types.SimpleNamespace(where=torch.where),
        "device_put": torch.from_numpy,
        "dlpack": types.SimpleNamespace(from_dlpack=lambda tensor: tensor),
    }
    registry = types.SimpleNamespace(
        ALL_ENVS=("Counter", "Plain"),
        get_domain_randomizer=lambda name: (lambda model, keys: model + keys[:, 1] % 3) if name == "Counter" else None,
        get_default_config=lambda name: Config({**config, "noise": Config(config["noise"])}),
        load=load,
    )
    kinds = {kind.__name__: kind for kind in (Wrapper, BraxAutoResetWrapper, BraxDomainRandomizationVmapWrapper)}
    wrappers = types.SimpleNamespace(**kinds)
    training = types.SimpleNamespace(VmapWrapper=Wrapper, EpisodeWrapper=EpisodeWrapper)
    return {
        "jax": jax,
        "brax": {},
        "brax.envs": {},
        "brax.envs.wrappers": {"training": training},
        "mujoco_playground._src": {},
        "mujoco_playground._src.mjx_env": {
            "MENAGERIE_PATH": Path("/none/menagerie"),
            "MENAGERIE_COMMIT_SHA": "1b86ece",
        },
        "mujoco_playground": {"registry": registry, "wrapper": wrappers},
    }


class Config(dict):
    """A configuration of ml_collections: keys are also attributes."""

    __getattr__ = dict.__getitem__
