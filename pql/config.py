"""The schema: frozen dataclasses, and the checks of their values. YAML presets and overrides: ``compose.py``.

One field in, one field used. This file imports nothing but the standard library (and torch, to look for a device).
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pql.errors import ConfigError, nearest, show


@dataclass(frozen=True)
class TaskConfig:
    name: str = "halfcheetah"  # the registered environment
    live: bool = False  # an object given from Python: it cannot be built again by name
    id: str | None = None  # for name=gymnasium: the gymnasium id
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the environment's factory
    reward_scale: float = 1.0  # constant factor on rewards before learning


@dataclass(frozen=True)
class NetConfig:
    hidden: list[int] = field(default_factory=lambda: [512, 256, 128])
    activation: str = "elu"  # relu | elu | silu | tanh
    layer_norm: bool = False
    lr: float = 5e-4
    weight_decay: float = 0.01
    grad_clip: float | None = 0.5  # largest gradient norm; null: none
    obs: list[str] | None = None  # observation groups it reads; null: its own (policy, critic), else policy
    net: str | None = None  # module:Class or a name of the entry-point group pql.nets, instead of an MLP


@dataclass(frozen=True)
class CriticConfig(NetConfig):
    ensemble: int = 2  # critics, as one batched network
    atoms: int | None = None  # categorical (C51) with this many atoms; null: scalar
    v_min: float = -10.0
    v_max: float = 10.0
    tau: float = 0.05  # target network: share of the new weights per update


@dataclass(frozen=True)
class PolicyConfig(NetConfig):
    target: bool = False  # keep a target policy for the critic's targets (TD3); false: the policy itself (PQL)
    tau: float = 0.05
    reduce: str = "min"  # the ensemble's value for the policy: min | mean | first


@dataclass(frozen=True)
class ExploreConfig:
    kind: str = "mixed"  # mixed | fixed | redrawn | none
    low: float = 0.05  # smallest sigma (the only one where fixed)
    high: float = 0.8
    repeat: bool = False  # hold each noise vector for a zeta(2)-distributed number of steps


@dataclass(frozen=True)
class SacConfig:
    alpha: float = 1.0  # initial temperature
    auto_alpha: bool = True
    alpha_lr: float = 0.005
    target_entropy: float | None = None  # null: -A


@dataclass(frozen=True)
class EncoderConfig:
    channels: list[int] = field(default_factory=lambda: [16, 32, 32])  # of convolutions, each halves height and width
    features: int = 128  # that each image becomes


@dataclass(frozen=True)
class PpoConfig:
    horizon: int = 16  # steps of every environment per tick: the rollout's rows
    epochs: int = 4  # passes over a rollout
    minibatches: int = 2  # equal parts of a rollout (of its environments, where recurrent), one update each
    gae_lambda: float = 0.95
    clip: float | None = 0.2  # of the probability ratio; null: the plain policy gradient
    value_clip: float | None = None  # largest change of a value within a tick, in units of normalised values
    value_coef: float = 1.0  # times the mean squared error of values
    entropy_coef: float = 0.0
    normalize_advantage: bool = True  # over the whole rollout
    normalize_value: bool = True  # the critic predicts returns less their running mean, over their running deviation
    squash: bool = False  # tanh of a Gaussian; false: the Gaussian clamped to [-1, 1]. Continuous actions only
    init_std: float = 1.0  # of that Gaussian, at first
    shared: bool = False  # the critic takes the policy's last hidden layer
    lstm: int | None = None  # units of an LSTM before the hidden layers; null: no memory
    optimizer: str = "adam"  # adam | rmsprop
    lr_schedule: str = "adaptive"  # adaptive: by the KL | fixed | linear: to 0
    kl_target: float = 0.01  # adaptive: the mean KL that the learning rate is steered to
    kl_stop: float | None = None  # a tick's remaining updates change nothing once the KL is above this
    anneal_steps: int | None = None  # linear: env steps (warm-up not counted) over which the learning rate falls to 0
    anneal_clip: bool = False  # linear: the clip range falls with it
    amp: bool = False  # networks in bfloat16 (autocast), acting included


@dataclass(frozen=True)
class AlgoConfig:
    name: str = "pql"  # the preset's name
    family: str = "ddpg"  # ddpg | sac | ppo: which update functions
    schedule: str = "concurrent"  # concurrent | lockstep
    batch_size: int = 8192
    n_step: int = 3
    gamma: float = 0.99
    v_per_step: float = 8.0  # critic updates per step of all environments (beta_a:v = 1 : this)
    p_per_v: float = 0.5  # policy updates per critic update (beta_p:v)
    warmup_steps: int = 32  # random steps of every environment before learning
    normalize_obs: bool = True
    reward_scale: float = 1.0  # on top of the task's, where an algorithm needs returns of a certain size (C51)
    normalize_reward: bool = False  # divide rewards by the running standard deviation of returns
    smoothing: float = 0.8  # target action noise
    smoothing_clip: float = 0.2
    critic: CriticConfig = field(default_factory=CriticConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    explore: ExploreConfig = field(default_factory=ExploreConfig)
    sac: SacConfig = field(default_factory=SacConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)


@dataclass(frozen=True)
class ReplayConfig:
    capacity: int = 5_000_000  # transitions, all environments together
    dtype: str = "float32"  # float32 | float16 | bfloat16: storage of floating observations (uint8 stays uint8)
    prefill: str | None = None  # file of recorded transitions that a new run's replay starts with
    save: bool = False  # write the replay to replay.safetensors in the run directory when a run ends


@dataclass(frozen=True)
class ThreadsConfig:
    collector: int | None = None  # intra-op threads per worker; null: by core count
    v: int | None = None
    p: int | None = None
    simulator: int | None = None  # of a simulator that steps on threads of its own (MuJoCo)


@dataclass(frozen=True)
class PlacementConfig:
    collector: str | None = None  # a device; null: the run's ``device``
    v_learner: str | None = None
    p_learner: str | None = None
    executor: str = "auto"  # auto | threads | inline | streams: how the workers of a tick are run
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)
    watchdog_seconds: float = 30.0  # a worker that needs longer for one tick is hung
    matmul: str = "fast"  # fast: TF32 on CUDA, oneDNN's reduced-precision mode on the CPU | exact: plain float32


@dataclass(frozen=True)
class BudgetConfig:
    seconds: float | None = None  # of training; null: no limit
    env_steps: int | None = None  # transitions, all environments together, warm-up included
    target_return: float | None = None  # stop once an evaluation's mean return reaches this


@dataclass(frozen=True)
class EvalConfig:
    num_envs: int = 16  # episodes of an evaluation: exactly one per environment
    every_seconds: float | None = 30.0  # null: only at the end
    final: bool = True


@dataclass(frozen=True)
class CheckpointConfig:
    every_seconds: float | None = 300.0  # resume points; null: only at the end
    keep: int = 2
    replay: bool = True  # resume points hold the replay, so that resuming continues bit for bit


@dataclass(frozen=True)
class LoggerConfig:
    kind: str = "none"  # none | tensorboard | wandb; the console and metrics.jsonl are always there
    every_seconds: float = 2.0
    project: str = "pql"  # wandb
    mode: str = "offline"  # wandb: offline | online


@dataclass(frozen=True)
class Config:
    task: TaskConfig = field(default_factory=TaskConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    num_envs: int = 4096
    device: str = "auto"  # auto | cpu | cuda | cuda:0 ...
    seed: int = 0
    cuda_graphs: str = "auto"  # auto | on | off
    run_dir: str | None = None  # null: runs/<task>-<algo>-s<seed>-<time>
    init_from: str | None = None  # run or checkpoint whose weights a new run starts from


CHOICES = {
    "algo.family": ("ddpg", "sac", "ppo"),
    "algo.schedule": ("concurrent", "lockstep"),
    "algo.critic.activation": ("relu", "elu", "silu", "tanh"),
    "algo.policy.activation": ("relu", "elu", "silu", "tanh"),
    "algo.policy.reduce": ("min", "mean", "first"),
    "algo.explore.kind": ("mixed", "fixed", "redrawn", "none"),
    "algo.ppo.optimizer": ("adam", "rmsprop"),
    "algo.ppo.lr_schedule": ("adaptive", "fixed", "linear"),
    "replay.dtype": ("float32", "float16", "bfloat16"),
    "placement.executor": ("auto", "threads", "inline", "streams"),
    "placement.matmul": ("fast", "exact"),
    "logger.kind": ("none", "tensorboard", "wandb"),
    "logger.mode": ("offline", "online"),
    "cuda_graphs": ("auto", "on", "off"),
}

# Numbers: (smallest, largest, is the smallest itself allowed). None in a nullable field is always allowed.
RANGES: dict[str, tuple[float, float, bool]] = {
    "num_envs": (1, 1_000_000, True),
    "seed": (0, 2**62, True),
    "algo.batch_size": (1, 2**24, True),
    "algo.n_step": (1, 100, True),
    "algo.gamma": (0, 1, True),
    "algo.v_per_step": (0, 1000, False),
    "algo.p_per_v": (0, 1000, False),
    "algo.warmup_steps": (0, 10**9, True),
    "algo.smoothing": (0, 10, True),
    "algo.smoothing_clip": (0, 2, True),
    "algo.critic.ensemble": (1, 100, True),
    "algo.critic.atoms": (2, 1001, True),
    "algo.critic.tau": (0, 1, False),
    "algo.policy.tau": (0, 1, False),
    **{f"algo.{net}.{k}": r for net in ("critic", "policy") for k, r in {
        "lr": (0, 1, False), "weight_decay": (0, 1, True), "grad_clip": (0, 1e9, False)}.items()},
    "algo.encoder.features": (1, 65536, True),
    "algo.explore.low": (0, 10, True),
    "algo.explore.high": (0, 10, True),
    "algo.sac.alpha": (0, 100, False),
    "algo.sac.alpha_lr": (0, 1, False),
    "algo.ppo.horizon": (1, 100_000, True),
    "algo.ppo.epochs": (1, 1000, True),
    "algo.ppo.minibatches": (1, 100_000, True),
    "algo.ppo.gae_lambda": (0, 1, True),
    "algo.ppo.clip": (0, 10, False),
    "algo.ppo.value_clip": (0, 1e6, False),
    "algo.ppo.value_coef": (0, 1e6, True),
    "algo.ppo.entropy_coef": (0, 1e6, True),
    "algo.ppo.init_std": (0, 100, False),
    "algo.ppo.lstm": (1, 100_000, True),
    "algo.ppo.kl_target": (0, 100, False),
    "algo.ppo.kl_stop": (0, 100, False),
    "algo.ppo.anneal_steps": (1, 10**15, True),
    "replay.capacity": (1, 10**12, True),
    "placement.threads.collector": (1, 1024, True),
    "placement.threads.v": (1, 1024, True),
    "placement.threads.p": (1, 1024, True),
    "placement.threads.simulator": (1, 1024, True),
    "placement.watchdog_seconds": (0, 1e6, False),
    "budget.seconds": (0, 1e9, False),
    "budget.env_steps": (1, 10**15, True),
    "eval.num_envs": (1, 100_000, True),
    "eval.every_seconds": (0, 1e9, False),
    "checkpoint.every_seconds": (0, 1e9, False),
    "checkpoint.keep": (1, 1000, True),
    "logger.every_seconds": (0, 1e6, False),
}  # fmt: skip


def validate(config: Config) -> Config:
    """Check every value against its range or choices, and what must fit together.

    Raises:
        ConfigError: names the first setting that is wrong, its value, and what is allowed.
    """
    flat = dict(leaves(config))
    for name, allowed in CHOICES.items():
        if flat[name] not in allowed:
            raise ConfigError(name, flat[name], f"one of {', '.join(allowed)}{nearest(str(flat[name]), allowed)}")
    for name, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, value, "a finite number")
    for name, (low, high, inclusive) in RANGES.items():
        value = flat[name]
        if value is not None and not ((low <= value if inclusive else low < value) and value <= high):
            raise ConfigError(name, value, f"a number {'from' if inclusive else 'above'} {low} up to {high}")
    for name in ("algo.critic.obs", "algo.policy.obs"):
        if flat[name] is not None and (not flat[name] or len({*flat[name]}) < len(flat[name])):
            raise ConfigError(name, flat[name], "null, or a list of observation groups, each once: [policy,image]")
    for name in ("algo.critic.hidden", "algo.policy.hidden", "algo.encoder.channels"):
        if not flat[name] or min(flat[name]) < 1:
            raise ConfigError(name, flat[name], "a list of layer widths, each at least 1, such as [128,128]")
    for name in ("device", "placement.collector", "placement.v_learner", "placement.p_learner"):
        if flat[name] is not None:
            resolve_device(flat[name], name)
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    algo, budget = config.algo, config.budget
    if algo.critic.v_min >= algo.critic.v_max:
        raise ConfigError("algo.critic.v_min", algo.critic.v_min, f"below algo.critic.v_max={algo.critic.v_max:g}")
    if algo.explore.kind in ("mixed", "redrawn") and algo.explore.low > algo.explore.high:
        raise ConfigError("algo.explore.low", algo.explore.low, f"at most algo.explore.high={algo.explore.high:g}")
    if budget.seconds is budget.env_steps is budget.target_return is None:
        raise ConfigError("budget", None, "at least one of budget.seconds, budget.env_steps, budget.target_return")
    if algo.family == "sac" and algo.policy.target:
        raise ConfigError("algo.policy.target", True, "false: SAC forms its targets with the policy itself")
    if algo.family == "ppo":
        _check_ppo(config)
    elif algo.warmup_steps < 1:
        raise ConfigError("algo.warmup_steps", algo.warmup_steps, "at least 1: updates need something to sample")
    first = algo.warmup_steps * config.num_envs
    if budget.env_steps is not None and budget.env_steps <= first:
        raise ConfigError("budget.env_steps", budget.env_steps, f"more than the warm-up's {first}")
    if budget.target_return is not None and config.eval.every_seconds is None:
        raise ConfigError("budget.target_return", budget.target_return, "evaluations: eval.every_seconds is null")
    if algo.family != "ppo" and algo.batch_size > config.replay.capacity:
        raise ConfigError("algo.batch_size", algo.batch_size, f"at most replay.capacity={config.replay.capacity}")


def _check_ppo(config: Config) -> None:
    algo, ppo = config.algo, config.algo.ppo
    for name, given, unset in (
        ("replay.prefill", config.replay.prefill, None), ("replay.save", config.replay.save, False),
    ):  # fmt: skip
        if given != unset:
            raise ConfigError(name, given, f"{show(unset)}: for off-policy algorithms alone, not algo={algo.name}")
    if ppo.lstm is not None and (algo.policy.net or algo.critic.net):
        raise ConfigError("algo.ppo.lstm", ppo.lstm, "null: networks from elsewhere (algo.*.net) have no memory here")
    if ppo.shared and algo.critic.net:
        raise ConfigError("algo.critic.net", algo.critic.net, "null: algo.ppo.shared takes the policy's layers")
    if algo.schedule != "lockstep":
        raise ConfigError("algo.schedule", algo.schedule, "lockstep: PPO learns from what its newest policy did")
    if config.placement.p_learner is not None:
        raise ConfigError(
            "placement.p_learner", config.placement.p_learner,
            "null: one learner trains policy and value, and placement.v_learner places it",
        )  # fmt: skip
    size, unit = config.num_envs * ppo.horizon, f"num_envs={config.num_envs} x algo.ppo.horizon={ppo.horizon} rows"
    if ppo.lstm is not None:  # sequences stay whole
        size, unit = config.num_envs, f"num_envs={config.num_envs}"
    if size % ppo.minibatches:
        parts = [d for d in range(1, min(size, 1000) + 1) if size % d == 0]
        near = min(parts, key=lambda d: abs(d - ppo.minibatches))
        raise ConfigError("algo.ppo.minibatches", ppo.minibatches, f"a divisor of {unit}, such as {near}")
    if ppo.lr_schedule == "linear" and ppo.anneal_steps is None:
        raise ConfigError("algo.ppo.anneal_steps", None, "env steps, with algo.ppo.lr_schedule=linear")
    for name, value in (("anneal_steps", ppo.anneal_steps), ("anneal_clip", ppo.anneal_clip)):
        if value and ppo.lr_schedule != "linear":
            raise ConfigError(f"algo.ppo.{name}", value, "algo.ppo.lr_schedule=linear with it")
    if algo.critic.atoms is not None:
        raise ConfigError("algo.critic.atoms", algo.critic.atoms, "null: PPO's critic is a scalar")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dicts, for YAML and JSON."""
    return dataclasses.asdict(config)


def from_dict(data: Mapping[str, Any]) -> Config:
    """The reverse of :func:`to_dict`: types and names are checked, ranges are not (see :func:`validate`).

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    return _build(Config, data, "")


def _build(cls: type, data: Any, prefix: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(prefix.rstrip("."), data, "a group of settings")
    hints = typing.get_type_hints(cls)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{prefix}{key}", data[key], f"a known setting{nearest(str(key), hints)}")
    values = {}
    for key, value in data.items():
        hint, name = hints[key], f"{prefix}{key}"
        group = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        values[key] = _build(hint, value, f"{name}.") if group else _typed(name, value, hint)
    return cls(**values)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """``value`` as one of ``hint``'s types, where that loses nothing."""
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        kind = typing.get_origin(option) or option
        if kind is type(None) and value is None:
            return None
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind is list and isinstance(value, list) and all(type(v) is typing.get_args(option)[0] for v in value):
            return list(value)
        if kind in (str, int, bool, dict) and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
            return value
    raise ConfigError(name, value, _words(hint))


def _words(hint: Any) -> str:
    """A type, for people."""
    if isinstance(hint, types.UnionType):
        return " or ".join(_words(h) for h in typing.get_args(hint))
    if hint == list[str]:
        return "a list of names such as [policy,image]"
    names = {
        "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "NoneType": "null",
        "list": "a list of whole numbers such as [128,128]", "dict": "key=value settings",
    }  # fmt: skip
    return names[(typing.get_origin(hint) or hint).__name__]


def resolve_device(name: str, setting: str = "device") -> str:
    """``auto`` -> ``cuda`` where there is one, else ``cpu``. Says what is there if a device is not.

    Raises:
        ConfigError: no such device.
    """
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name in found or (name == "cuda" and len(found) > 1):
        return name
    raise ConfigError(setting, name, f"a device of this machine: auto, {', '.join(found)}{nearest(name, found)}")
