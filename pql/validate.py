"""Which values the schema's settings may have, and which of them go together.

This file imports nothing but the standard library (and torch, to look for a device).
"""

import contextlib
import importlib.util
import math
import re
import sys
from pathlib import Path

from pql.config import AlgoConfig, Config, EpsilonConfig, leaves
from pql.errors import ConfigError, nearest, show
from pql.registry import check_chosen

CHOICES = {
    "algo.family": ("ddpg", "sac", "ppo", "impala", "dqn", "r2d2", "pqn"),
    "algo.schedule": ("concurrent", "lockstep", "replicas"),
    "algo.central.order": ("free", "turns"),
    "algo.critic.activation": ("relu", "elu", "silu", "tanh"),
    "algo.policy.activation": ("relu", "elu", "silu", "tanh"),
    "algo.encoder.kind": ("small", "nature", "resnet"),
    "algo.policy.reduce": ("min", "mean", "first"),
    "algo.explore.kind": ("mixed", "fixed", "redrawn", "none"),
    "algo.ppo.optimizer": ("adam", "rmsprop", "rmsprop_tf"),
    "algo.impala.optimizer": ("adam", "rmsprop", "rmsprop_tf"),
    "algo.impala.correction": ("vtrace", "one_step", "none"),
    "algo.impala.reduce": ("sum", "mean"),
    "algo.ppo.lr_schedule": ("adaptive", "fixed", "linear"),
    "algo.dqn.optimizer": ("adam", "rmsprop"),
    "algo.dqn.epsilon.kind": ("annealed", "ladder", "fixed"),
    "algo.pqn.epsilon.kind": ("annealed", "ladder", "fixed"),
    "algo.pqn.optimizer": ("radam", "adam"),
    "algo.dqn.priority.initial": ("max", "actor"),
    "replay.dtype": ("float32", "float16", "bfloat16"),
    "placement.executor": ("auto", "threads", "inline", "streams"),
    "placement.matmul": ("fast", "exact"),
    "logger.kind": ("none", "tensorboard", "wandb"),
    "logger.mode": ("offline", "online"),
    "cuda_graphs": ("auto", "on", "off"),
}

WIDEST = 65536  # of a layer

# Numbers: (smallest, largest, is the smallest itself allowed). None in a nullable field is always allowed.
RANGES: dict[str, tuple[float, float, bool]] = {
    "num_envs": (1, 1_000_000, True),
    "seed": (0, 2**62, True),
    "task.reward_clip": (0, 1e9, False),
    "task.process.step_seconds": (0, 1e6, False),
    "task.process.start_seconds": (0, 1e6, False),
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
    "algo.critic.target_every": (1, 10**6, True),
    "algo.policy.tau": (0, 1, False),
    "algo.policy.saturation_penalty": (0, 1e3, True),
    **{f"algo.{net}.{k}": r for net in ("critic", "policy") for k, r in {
        "lr": (0, 1, False), "eps": (0, 1, False), "weight_decay": (0, 1, True), "grad_clip": (0, 1e9, False)}.items()},
    "algo.encoder.features": (0, WIDEST, True),
    "algo.explore.low": (0, 10, True),
    "algo.explore.high": (0, 10, True),
    "algo.sac.alpha": (0, 100, False),
    "algo.sac.alpha_lr": (0, 1, False),
    "algo.replicas": (1, 1024, True),
    "algo.central.ticks": (1, 100_000, True),
    "algo.central.chunk": (1, 2**40, True),
    **{f"algo.{family}.{k}": r for family in ("ppo", "impala") for k, r in {
        "horizon": (1, 100_000, True), "minibatches": (1, 100_000, True), "value_coef": (0, 1e6, True),
        "entropy_coef": (0, 1e6, True), "init_std": (0, 100, False), "lstm": (1, 100_000, True),
        "anneal_steps": (1, 10**15, True)}.items()},
    "algo.ppo.epochs": (1, 1000, True),
    "algo.ppo.gae_lambda": (0, 1, True),
    "algo.ppo.clip": (0, 10, False),
    "algo.ppo.value_clip": (0, 1e6, False),
    "algo.ppo.kl_target": (0, 100, False),
    "algo.ppo.kl_stop": (0, 100, False),
    "algo.impala.trace_lambda": (0, 1, True),
    "algo.impala.kl_coef": (0, 1e6, True),
    "algo.vtrace.rho_bar": (0, 1e6, False),
    "algo.vtrace.c_bar": (0, 1e6, True),
    "algo.vtrace.pg_rho_bar": (0, 1e6, False),
    "algo.policy_lag": (0, 1000, True),
    "algo.dqn.shared_grad": (0, 1, False),
    "algo.dqn.noisy": (0, 10, False),
    "algo.dqn.huber": (0, 1e6, False),
    "algo.dqn.target_period": (1, 10**12, True),
    "algo.dqn.rms_decay": (0, 1, True),
    **{f"algo.{family}.epsilon.{k}": r for family in ("dqn", "pqn") for k, r in {
        "start": (0, 1, True), "end": (0, 1, True), "steps": (1, 10**15, True), "base": (0, 1, False),
        "exponent": (0, 100, True)}.items()},
    "algo.dqn.priority.alpha": (0, 10, True),
    "algo.dqn.priority.beta": (0, 1, True),
    "algo.dqn.priority.beta_steps": (1, 10**15, True),
    "algo.r2d2.lstm": (1, 100_000, True),
    "algo.r2d2.length": (1, 100_000, True),
    "algo.r2d2.burn_in": (0, 100_000, True),
    "algo.r2d2.period": (1, 100_000, True),
    "algo.r2d2.replay_ratio": (0, 1e6, False),
    "algo.r2d2.eta": (0, 1, True),
    "algo.r2d2.rescale": (0, 1, False),
    "algo.pqn.horizon": (1, 100_000, True),
    "algo.pqn.epochs": (1, 1000, True),
    "algo.pqn.minibatches": (1, 100_000, True),
    "algo.pqn.q_lambda": (0, 1, True),
    "algo.pqn.anneal_steps": (1, 10**15, True),
    "replay.capacity": (1, 10**12, True),
    "placement.threads.collector": (1, 1024, True),
    "placement.threads.v": (1, 1024, True),
    "placement.threads.p": (1, 1024, True),
    "placement.threads.simulator": (1, 1024, True),
    "placement.groups": (1, 1024, True),
    "placement.watchdog_seconds": (0, 1e6, False),
    "placement.start_seconds": (0, 1e6, False),
    "budget.seconds": (0, 1e9, False),
    "budget.env_steps": (1, 10**15, True),
    "eval.num_envs": (1, 100_000, True),
    "eval.every_seconds": (0, 1e9, False),
    "eval.epsilon": (0, 1, True),
    "checkpoint.every_seconds": (0, 1e9, False),
    "checkpoint.keep": (1, 1000, True),
    "logger.every_seconds": (0, 1e6, False),
}  # fmt: skip

# Of single commands, which no run's settings have.
EPISODES = STEPS = (1, 1_000_000, True)


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
    for name, limits in RANGES.items():
        check_range(name, flat[name], limits)
    for name in ("algo.critic.obs", "algo.policy.obs"):
        if flat[name] is not None and (not flat[name] or len({*flat[name]}) < len(flat[name])):
            raise ConfigError(name, flat[name], "null, or a list of observation groups, each once: [policy,image]")
    for name in ("algo.critic.hidden", "algo.policy.hidden", "algo.encoder.channels"):
        widths, empty = flat[name], name != "algo.encoder.channels"  # no hidden layers: outputs straight from features
        if widths is not None and not (1 <= min(widths) <= max(widths) <= WIDEST if widths else empty):
            raise ConfigError(name, widths, f"a list of layer widths, each from 1 to {WIDEST}, such as [128,128]")
    for name in ("device", "placement.collector", "placement.v_learner", "placement.p_learner"):
        if flat[name] is not None:
            resolve_device(flat[name], name)
    _check_replicas(config)
    _check_together(config)
    return config


def check_range(setting: str, value: float | None, limits: tuple[float, float, bool]) -> None:
    """Raises ``ConfigError`` for a number outside ``limits`` (as in ``RANGES``); None is always inside."""
    low, high, inclusive = limits
    if value is not None and not ((low <= value if inclusive else low < value) and value <= high):
        raise ConfigError(setting, value, f"a number {'from' if inclusive else 'above'} {low} up to {high}")


def _check_together(config: Config) -> None:
    algo, budget = config.algo, config.budget
    if not config.task.live:
        task = config.task
        chosen = {k for k, v in (("id", task.id), ("game", task.game)) if v is not None} | task.kwargs.keys()
        check_chosen(task.name, chosen, {"": "task.kwargs.", "id": "task.", "game": "task."})
    if config.task.live and config.task.process.python is not None:
        raise ConfigError("task.process.python", config.task.process.python, "null: a live environment is where it is")
    if config.task.remote and config.task.name == "remote":
        raise ConfigError("task.remote", config.task.remote, "nothing with task=remote, whose keywords are task.kwargs")
    if config.task.remote and config.task.process.python is not None:
        raise ConfigError("task.process.python", config.task.process.python, "null: actors step it, by task.remote")
    if algo.critic.v_min >= algo.critic.v_max:
        raise ConfigError("algo.critic.v_min", algo.critic.v_min, f"below algo.critic.v_max={algo.critic.v_max:g}")
    if algo.explore.kind in ("mixed", "redrawn") and algo.explore.low > algo.explore.high:
        raise ConfigError("algo.explore.low", algo.explore.low, f"at most algo.explore.high={algo.explore.high:g}")
    if algo.encoder.kind == "nature" and len(algo.encoder.channels or ()) > 3:
        raise ConfigError("algo.encoder.channels", algo.encoder.channels, "three at most with algo.encoder.kind=nature")
    if algo.encoder.kind == "resnet" and algo.encoder.layer_norm:
        raise ConfigError("algo.encoder.layer_norm", True, "false: the residual network is taken as it is published")
    if budget.seconds is budget.env_steps is budget.target_return is None:
        raise ConfigError("budget", None, "at least one of budget.seconds, budget.env_steps, budget.target_return")
    if algo.family == "sac" and algo.policy.target:
        raise ConfigError("algo.policy.target", True, "false: SAC forms its targets with the policy itself")
    if algo.family == "ppo":
        _check_ppo(config)
    if algo.family == "impala":
        _check_impala(config)
    if algo.vtrace.c_bar > algo.vtrace.rho_bar:
        limit = f"at most algo.vtrace.rho_bar={algo.vtrace.rho_bar:g}"
        raise ConfigError("algo.vtrace.c_bar", algo.vtrace.c_bar, limit)
    if algo.policy_lag and (algo.family not in ("ppo", "impala") or algo.schedule == "replicas"):
        raise ConfigError("algo.policy_lag", algo.policy_lag, "0 but for PPO, A2C and IMPALA under one schedule")
    if algo.family == "dqn":
        _check_dqn(config)
    if algo.family == "r2d2":
        _check_dqn(config)
        _check_r2d2(config)
    if algo.family == "pqn":
        _check_pqn(config)
    off_policy = algo.family not in ("ppo", "impala", "pqn")
    if off_policy and algo.warmup_steps < 1:
        raise ConfigError("algo.warmup_steps", algo.warmup_steps, "at least 1: updates need something to sample")
    groups, envs = config.placement.groups or 1, f"num_envs={config.num_envs}"
    envs += f" / algo.replicas={algo.replicas}" if algo.replicas > 1 else ""
    if config.num_envs // algo.replicas % groups:
        raise ConfigError("placement.groups", groups, f"null, or a divisor of {envs}")
    first = algo.warmup_steps * config.num_envs
    if budget.env_steps is not None and budget.env_steps <= first:
        raise ConfigError("budget.env_steps", budget.env_steps, f"more than the warm-up's {first}")
    if budget.target_return is not None and config.eval.every_seconds is None:
        raise ConfigError("budget.target_return", budget.target_return, "evaluations: eval.every_seconds is null")
    if off_policy and algo.batch_size > config.replay.capacity:
        raise ConfigError("algo.batch_size", algo.batch_size, f"at most replay.capacity={config.replay.capacity}")


def _check_replicas(config: Config) -> None:
    algo, place, count = config.algo, config.placement, config.algo.replicas
    if algo.schedule != "replicas":
        for name, given, unset in (("algo.replicas", count, 1), ("placement.replicas", place.replicas, None)):
            if given != unset:
                raise ConfigError(name, given, f"{show(unset)} with algo.schedule={algo.schedule}")
        return
    if algo.family != "ppo":
        other = "lockstep" if algo.family == "pqn" else "concurrent or lockstep"
        data = algo.family in ("pqn", "impala")
        why = f"{other}: " + ("PPO and A2C alone have replicas" if data else f"algo={algo.name} learns from a replay")
        raise ConfigError("algo.schedule", "replicas", why)
    if config.num_envs % count:
        near = max(1, config.num_envs // count) * count
        raise ConfigError("num_envs", config.num_envs, f"a multiple of algo.replicas={count}, such as {near}")
    if place.replicas is not None and len(place.replicas) != count:
        raise ConfigError("placement.replicas", place.replicas, f"one device for each of algo.replicas={count}")
    for place_of in place.replicas or ():
        resolve_device(place_of, "placement.replicas")
    for name, device in (("placement.collector", place.collector), ("placement.v_learner", place.v_learner)):
        if device is not None and count > 1 and not config.task.live:
            raise ConfigError(name, device, "null: placement.replicas places whole replicas")
    if place.executor == "streams":
        raise ConfigError("placement.executor", "streams", "auto, threads or inline with algo.schedule=replicas")
    if place.executor == "inline" and algo.central.order == "turns" and count > 1:
        raise ConfigError("algo.central.order", "turns", "free with placement.executor=inline: whole ticks take turns")
    if config.cuda_graphs == "on":
        raise ConfigError("cuda_graphs", "on", "auto or off with algo.schedule=replicas: a push takes locks")


def _check_ppo(config: Config) -> None:
    algo, ppo = config.algo, config.algo.ppo
    _check_rollout(config, ppo.horizon, ppo.minibatches, ppo.lstm is not None)
    if ppo.lstm is not None and (algo.policy.net or algo.critic.net):
        raise ConfigError("algo.ppo.lstm", ppo.lstm, "null: networks from elsewhere (algo.*.net) have no memory here")
    if ppo.shared and algo.critic.net:
        raise ConfigError("algo.critic.net", algo.critic.net, "null: algo.ppo.shared takes the policy's layers")
    if ppo.lr_schedule == "linear" and ppo.anneal_steps is None:
        raise ConfigError("algo.ppo.anneal_steps", None, "env steps, with algo.ppo.lr_schedule=linear")
    for name, value in (("anneal_steps", ppo.anneal_steps), ("anneal_clip", ppo.anneal_clip)):
        if value and ppo.lr_schedule != "linear":
            raise ConfigError(f"algo.ppo.{name}", value, "algo.ppo.lr_schedule=linear with it")
    if algo.critic.atoms is not None:
        raise ConfigError("algo.critic.atoms", algo.critic.atoms, "null: PPO's critic is a scalar")


def _check_impala(config: Config) -> None:
    algo, impala = config.algo, config.algo.impala
    _check_rollout(config, impala.horizon, impala.minibatches, whole=True)
    if impala.lstm is not None and not impala.shared:
        raise ConfigError("algo.impala.shared", False, "true with algo.impala.lstm: policy and value share a memory")
    if impala.lstm is not None and algo.policy.net:
        raise ConfigError("algo.impala.lstm", impala.lstm, "null: a network from elsewhere (algo.policy.net) has none")
    if impala.shared and algo.critic.net:
        raise ConfigError("algo.critic.net", algo.critic.net, "null: algo.impala.shared takes the policy's layers")
    if algo.critic.atoms is not None:
        raise ConfigError("algo.critic.atoms", algo.critic.atoms, "null: IMPALA's critic is a scalar")


def _check_pqn(config: Config) -> None:
    _check_rollout(config, config.algo.pqn.horizon, config.algo.pqn.minibatches, whole=False)
    _check_epsilon(config.algo.pqn.epsilon, "algo.pqn.epsilon")
    if config.algo.critic.atoms is not None:
        raise ConfigError("algo.critic.atoms", config.algo.critic.atoms, "null: PQN's values are scalars")


def _check_rollout(config: Config, horizon: int, minibatches: int, whole: bool) -> None:
    """What learning from rollouts asks for; ``whole``: sequences stay whole in minibatches."""
    algo, group = config.algo, f"algo.{config.algo.family}"
    for name, given, unset in (
        ("replay.prefill", config.replay.prefill, None), ("replay.save", config.replay.save, False),
    ):  # fmt: skip
        if given != unset:
            raise ConfigError(name, given, f"{show(unset)}: for off-policy algorithms alone, not algo={algo.name}")
    if algo.schedule == "concurrent" and not corrected(algo):
        allowed = "lockstep or replicas" if algo.family == "ppo" else "lockstep"
        more = " (algo.ppo.vtrace=true: from what an older one did)" if algo.family == "ppo" else ""
        raise ConfigError(
            "algo.schedule", algo.schedule, f"{allowed}: {algo.name} learns from what its policy did{more}"
        )
    if config.placement.p_learner is not None:
        raise ConfigError(
            "placement.p_learner", config.placement.p_learner,
            "null: one learner trains policy and value, and placement.v_learner places it",
        )  # fmt: skip
    size, unit = config.num_envs // algo.replicas, f"num_envs={config.num_envs}"
    unit += f" / algo.replicas={algo.replicas}" if algo.replicas > 1 else ""
    if not whole:
        size, unit = size * horizon, f"{unit} x {group}.horizon={horizon} rows"
    if size % minibatches:
        parts = [d for d in range(1, min(size, 1000) + 1) if size % d == 0]
        near = min(parts, key=lambda d: abs(d - minibatches))
        raise ConfigError(f"{group}.minibatches", minibatches, f"a divisor of {unit}, such as {near}")


def corrected(algo: AlgoConfig) -> bool:
    """Whether rollouts are corrected for the policy that acted."""
    return algo.family == "impala" or (algo.family == "ppo" and algo.ppo.vtrace)


def _check_epsilon(epsilon: EpsilonConfig, group: str) -> None:
    if epsilon.kind == "annealed" and epsilon.start < epsilon.end:
        raise ConfigError(f"{group}.start", epsilon.start, f"at least {group}.end={epsilon.end:g}")


def _check_dqn(config: Config) -> None:
    algo, dqn, place = config.algo, config.algo.dqn, config.placement
    if place.p_learner is not None:
        raise ConfigError(
            "placement.p_learner", place.p_learner, "null: the V-learner's network is the policy (placement.v_learner)"
        )
    if dqn.shared_grad != 1 and not dqn.dueling:
        raise ConfigError("algo.dqn.shared_grad", dqn.shared_grad, "1, or algo.dqn.dueling=true with it")
    _check_epsilon(dqn.epsilon, "algo.dqn.epsilon")
    if dqn.priority.initial == "actor" and algo.critic.atoms is not None:
        raise ConfigError(
            "algo.dqn.priority.initial", "actor",
            "max with algo.critic.atoms: there priorities are divergences, which the values when acted do not give",
        )  # fmt: skip


def _check_r2d2(config: Config) -> None:
    algo, own, dqn = config.algo, config.algo.r2d2, config.algo.dqn
    if own.period > own.length:
        raise ConfigError("algo.r2d2.period", own.period, f"at most algo.r2d2.length={own.length}: no row is left out")
    rows = own.burn_in + own.length + algo.n_step
    if algo.warmup_steps < rows:
        raise ConfigError("algo.warmup_steps", algo.warmup_steps, f"at least {rows}, the rows of a sequence")
    for name, given in (("algo.dqn.noisy", dqn.noisy), ("algo.critic.atoms", algo.critic.atoms)):
        if given is not None:
            raise ConfigError(name, given, f"null with algo={algo.name}")


def likely_device(name: str) -> str:
    """What :func:`resolve_device` will say, if the GPU that seems to be there can be used. Imports no torch."""
    return name if name != "auto" else "cuda" if gpu_in_sight() else "cpu"


def gpu_in_sight() -> bool:
    """Whether it is worth asking torch for a GPU: its build can use one, and there is a driver. Imports no torch."""
    if torch := sys.modules.get("torch"):
        return torch.cuda.is_available()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    with contextlib.suppress(OSError):
        build = Path(spec.origin).with_name("version.py").read_text()
        if re.search(r"^cuda\b.*= None$", build, re.M) and re.search(r"^hip\b.*= None$", build, re.M):
            return False
    return sys.platform != "linux" or any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def resolve_device(name: str, setting: str = "device") -> str:
    """``auto`` -> ``cuda`` where there is one, else ``cpu``. Says what is there if a device is not.

    Raises:
        ConfigError: no such device.
    """
    if name == "cpu" or (name == "auto" and not gpu_in_sight()):
        return "cpu"
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name in found or (name == "cuda" and len(found) > 1):
        return name
    raise ConfigError(setting, name, f"a device of this machine: auto, {', '.join(found)}{nearest(name, found)}")
