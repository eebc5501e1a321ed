"""Configuration of a run: frozen dataclasses whose fields carry their documentation and ranges.

``algo`` is the record of the chosen family (:mod:`pql.config.algorithms`) and has only the settings that it reads.
"""

import dataclasses
import hashlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from pql.config.algorithms import AlgoConfig, DdpgConfig
from pql.config.families import record_of
from pql.config.fields import group, setting, settings, types_of
from pql.config.migrate import migrated
from pql.contract.plugins import entry_points
from pql.errors import ConfigError, nearest

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default

    A_co = TypeVar("A_co", bound=AlgoConfig, covariant=True, default=AlgoConfig)
else:
    A_co = typing.TypeVar("A_co", bound=AlgoConfig, covariant=True)

MANY = 10**15
DEVICE = "a device; null: the run's device."


@dataclass(frozen=True)
class ProcessConfig:
    """A separate process for the simulator."""

    python: str | None = setting(
        None, "Python interpreter of the process, a path or a name on PATH; null: no separate process."
    )
    step_seconds: float = setting(
        20.0, "Time limit of a step; a longer one counts as a hang.", above=0, high=1e6, when="python"
    )
    start_seconds: float = setting(
        600.0, "Time limit of starting the process, and of its first step.", above=0, high=1e6, when="python"
    )


@dataclass(frozen=True)
class TaskConfig:
    """The environment."""

    name: str = setting("halfcheetah", "Name of the registered environment.")
    live: bool = setting(False, "The environment is an object passed in from Python, which cannot be rebuilt by name.")
    id: str | None = setting(None, "Environment id, for task=gymnasium and task=envpool.")
    game: str | None = setting(None, "Game, for task=atari.")
    model: str | None = setting(None, "Model of a MuJoCo task: shipped or fast; null: the task's default.")
    kwargs: dict[str, Any] = setting({}, "Keyword arguments of the environment's factory.")
    reward_clip: float | None = setting(
        None,
        "Rewards are clipped to [-reward_clip, reward_clip] before learning; null: no clipping.",
        above=0,
        high=1e9,
    )
    reward_scale: float = setting(
        1.0, "Constant factor on rewards before learning, after clipping; see algo.normalize_reward."
    )
    process: ProcessConfig = group(ProcessConfig, "A separate process for the simulator.")
    remote: dict[str, Any] = setting(
        {}, "Keyword arguments of task=remote: remote actors step this task; {}: no remote actors."
    )

    @property
    def title(self) -> str:
        """The task's display name: the gymnasium id or the game, else the simulator's name."""
        return self.id or self.game or self.name

    @property
    def by_actors(self) -> bool:
        """True if remote actors step it: ``task=remote``, or any task with ``task.remote.*``."""
        return bool(self.remote) or self.name == "remote"


@dataclass(frozen=True)
class ReplayConfig:
    """Replay of an off-policy algorithm."""

    capacity: int = setting(5_000_000, "Transitions, summed over all environments.", low=1, high=10**12, ranks="floor")
    dtype: str = setting(
        "float32",
        "Storage type of floating-point observations; integers and booleans keep their type.",
        choices=("float32", "float16", "bfloat16"),
    )
    prefill: str | None = setting(None, "File of recorded transitions that fills the replay of a new run at its start.")
    demos: str | None = setting(
        None,
        "Recorded transitions of which every batch has a share, never overwritten (RLPD): a file, a LeRobot dataset's "
        "folder, or a robomimic file.",
    )
    demo_keys: dict[str, Any] = setting(
        {},
        "Of a LeRobot or robomimic dataset: columns for each observation group, action, reward and terminated; {}: the "
        "usual names.",
    )
    demo_share: float = setting(0.5, "Share of them in a batch.", low=0, high=1, when="demos")
    demo_share_end: float | None = setting(
        None,
        "Share from demo_steps env steps on, to which demo_share changes linearly; null: constant.",
        low=0,
        high=1,
        when="demos",
    )
    demo_steps: int = setting(
        1_000_000, "Env steps of that change.", low=1, high=10**12, when="demo_share_end", ranks="floor"
    )
    save: bool = setting(False, "Write the replay to replay.safetensors in the run directory when a run ends.")


@dataclass(frozen=True)
class ThreadsConfig:
    """Intra-op threads. Another split gives other bits."""

    collector: int | None = setting(
        None, "Threads of the collector; null: chosen from the core count.", low=1, high=1024
    )
    v: int | None = setting(None, "Threads of the V-learner, or of the only learner.", low=1, high=1024)
    p: int | None = setting(None, "Threads of the P-learner.", low=1, high=1024)
    simulator: int | None = setting(
        None, "Threads of a simulator with its own thread pool (MuJoCo, Atari).", low=1, high=1024
    )


@dataclass(frozen=True)
class PlacementConfig:
    """Devices, threads and time limits of the workers."""

    collector: str | None = setting(None, f"Collector: {DEVICE}")
    v_learner: str | None = setting(None, f"V-learner, or the only learner: {DEVICE}")
    p_learner: str | None = setting(None, f"P-learner: {DEVICE}")
    replicas: list[str] | None = setting(
        None, "One device per replica; null: the run's device, or all GPUs in turn.", when=".algo.schedule=replicas"
    )
    groups: int | None = setting(
        None,
        "Number of env slices, which step alternately; null: the simulator's default, usually 1.",
        low=1,
        high=1024,
    )
    overlap: bool = setting(
        True, "Compute the actions of one env slice while the others step; false: one after the other."
    )
    executor: str = setting(
        "auto", "Execution of the workers of a tick.", choices=("auto", "threads", "inline", "streams")
    )
    threads: ThreadsConfig = group(ThreadsConfig, "Intra-op threads.")
    watchdog_seconds: float = setting(
        30.0,
        "Time limit of a worker's tick (lockstep on the CPU: of a step); a longer one counts as a hang.",
        above=0,
        high=1e6,
    )
    start_seconds: float = setting(
        600.0, "Time limit of building, of a reset, and of each worker's first tick or step.", above=0, high=1e6
    )
    compile: str = setting(
        "auto",
        "Compile updates and steps with Inductor; auto: on CUDA, where Triton and a C compiler are installed.",
        choices=("auto", "on", "off"),
    )
    matmul: str = setting(
        "fast",
        "fast: TF32 on CUDA, oneDNN's reduced-precision mode on the CPU; exact: plain float32.",
        choices=("fast", "exact"),
    )


@dataclass(frozen=True)
class BudgetConfig:
    """Limits of a run, which ends at the first one reached."""

    seconds: float | None = setting(
        None, "Wall time from the first env step, warm-up included; null: no limit.", above=0, high=1e9
    )
    env_steps: int | None = setting(
        None, "Transitions, summed over all environments, warm-up included.", low=1, high=MANY
    )
    target_return: float | None = setting(None, "Stop once an evaluation's mean return reaches this.")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluations of the deterministic policy."""

    num_envs: int = setting(16, "Environments of an evaluation; each runs exactly one episode.", low=1, high=100_000)
    every_seconds: float | None = setting(
        30.0, "Interval between evaluations; null: only at the end.", above=0, high=1e9
    )
    final: bool = setting(True, "Evaluate at the end of the run.")
    epsilon: float = setting(0.0, "Probability of a random action, for discrete actions.", low=0, high=1)
    max_steps: int | None = setting(
        None,
        "Steps after which an evaluation cuts an episode; null: the task's time limit, or 100,000 without one.",
        low=1,
        high=10_000_000,
    )
    play: bool | None = setting(
        None,
        "Evaluate in the simulator's configuration for play (mjlab, Isaac Lab), or without task.kwargs.randomize; "
        "null: in the configuration for play if there is one.",
    )
    video_every_seconds: float | None = setting(
        None, "Interval between videos of an episode (tasks that render); null: none.", above=0, high=1e9
    )
    videos_kept: int = setting(5, "Number of these videos kept.", low=1, high=10_000, when="video_every_seconds")


@dataclass(frozen=True)
class CheckpointConfig:
    """Resume points."""

    every_seconds: float | None = setting(
        300.0, "Interval between resume points; null: only at the end.", above=0, high=1e9
    )
    keep: int = setting(2, "Number of resume points kept.", low=1, high=1000)
    replay: bool = setting(True, "Store the replay in resume points, so that resuming continues bit for bit.")


LOGGERS = ("none", "tensorboard", "wandb", "trackio", "swanlab")
PLUGINS = "pql.loggers"  # entry-point group of packages' loggers


def logger_names() -> list[str]:
    """Return the names of all loggers: of this library and of installed packages."""
    return [*LOGGERS, *sorted({e.name for e in entry_points(group=PLUGINS)} - {*LOGGERS})]


@dataclass(frozen=True)
class LoggerConfig:
    """Logging of metrics, in addition to the console and metrics.jsonl."""

    kind: str = setting("none", f"Logger: {', '.join(LOGGERS)}, or one of an installed package.")
    every_seconds: float = setting(2.0, "Interval between rows of the log.", above=0, high=1e6)
    project: str = setting("pql", "Project of wandb, trackio and swanlab.")
    mode: str = setting(
        "offline", "Uploads of wandb, trackio and swanlab: later, or during the run.", choices=("offline", "online")
    )


@dataclass(frozen=True)
class Config(Generic[A_co]):
    """Configuration of a run; ``Config[SacConfig]`` is that of a run whose ``algo`` is a ``SacConfig``."""

    task: TaskConfig = group(TaskConfig, "The environment.")
    algo: A_co = group(DdpgConfig, "The algorithm.", name="pql")
    replay: ReplayConfig = group(ReplayConfig, "The replay.")
    placement: PlacementConfig = group(PlacementConfig, "Devices, threads and time limits.")
    budget: BudgetConfig = group(BudgetConfig, "Limits of the run.")
    eval: EvalConfig = group(EvalConfig, "Evaluations.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "Resume points.")
    logger: LoggerConfig = group(LoggerConfig, "Logging of metrics.")
    num_envs: int = setting(4096, "Number of environments.", low=1, high=1_000_000, ranks="divide")
    device: str = setting("auto", "auto, cpu, cuda, cuda:0, ...")
    seed: int = setting(0, "Seed of network initialisation, environments and sampling.", low=0, high=2**62)
    graphs: str = setting(
        "auto",
        "Capture updates and steps: as CUDA graphs; on the CPU, as programs without Python.",
        choices=("auto", "on", "off"),
    )
    run_dir: str | None = setting(None, "Run directory; null: runs/<task>-<algo>-s<seed>-<time>.")
    init_from: str | None = setting(None, "Run or checkpoint whose weights a new run starts from.")

    @property
    def replicas(self) -> int:
        """Number of replicas of the run on this machine."""
        return getattr(self.algo, "replicas", 1)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every setting."""
    for found in settings(config, prefix):
        yield found.name, found.value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted name as nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        node = tree
        for part in groups:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(name, value, f"no additional value of {part}")
        node[last] = value
    return tree


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of the config with these values by dotted name."""
    tree = to_dict(config)
    for name, value in values.items():
        *groups, last = name.split(".")
        branch = tree
        for part in groups:
            branch = branch[part]
        branch[last] = value
    return from_dict(tree)


def to_dict(config: Any) -> dict[str, Any]:
    """Return plain nested dicts, for YAML and JSON."""
    return dataclasses.asdict(config)


def fingerprint(record: type[AlgoConfig]) -> str:
    """Return a hash of the names and types of all settings of a run whose algorithm has the settings ``record``."""
    found = settings(Config(algo=record()))
    lines = [f"{s.name}: {_words(types_of(type(s.record))[s.name.rpartition('.')[2]])}" for s in found]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def from_dict(data: Mapping[str, Any]) -> Config:
    """Return the config of nested dicts; checks names and types, but not ranges (see :func:`validate`).

    Files in the format from before each algorithm had its own record are migrated (:mod:`pql.config.migrate`).

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    return _build(Config, migrated(data), "")


def _build(cls: type, data: Any, prefix: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(prefix.rstrip("."), data, "a group of settings")
    hints = types_of(cls)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{prefix}{key}", data[key], f"a known setting{nearest(str(key), hints)}")
    values = {}
    for key, value in data.items():
        hint, name = hints[key], f"{prefix}{key}"
        if hint is A_co:
            hint = record_of(value)
        is_group = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        values[key] = _build(hint, value, f"{name}.") if is_group else _typed(name, value, hint)
    return cls(**values)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` converted to one of the types of ``hint``, if that is lossless."""
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
    """Return a readable name of a type."""
    if isinstance(hint, types.UnionType):
        return " or ".join(_words(h) for h in typing.get_args(hint))
    if hint == list[str]:
        return "a list of names such as [policy,image]"
    names = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "NoneType": "null"}
    names |= {"list": "a list of whole numbers such as [128,128]", "dict": "key=value settings"}
    return names[(typing.get_origin(hint) or hint).__name__]
