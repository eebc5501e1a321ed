"""The schema: frozen dataclasses. Allowed values: ``validate.py``; YAML presets and overrides: ``compose.py``.

One field in, one field used. This file imports nothing but the standard library.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pql.errors import ConfigError, nearest


@dataclass(frozen=True)
class ProcessConfig:
    """A process of its own for the simulator."""

    python: str | None = None  # the interpreter that it runs in, a path or a name on PATH; null: no such process
    step_seconds: float = 20.0  # a step that takes longer is a hang
    start_seconds: float = 600.0  # as long may starting take, and the first step


@dataclass(frozen=True)
class TaskConfig:
    name: str = "halfcheetah"  # the registered environment
    live: bool = False  # an object given from Python: it cannot be built again by name
    id: str | None = None  # for name=gymnasium: the gymnasium id
    game: str | None = None  # for name=atari: the game
    model: str | None = None  # of a MuJoCo task: shipped | fast; null: what the task does best with
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the environment's factory
    reward_clip: float | None = None  # each reward is clipped to +- this before learning; null: as it is
    reward_scale: float = 1.0  # constant factor on rewards before learning, after clipping
    process: ProcessConfig = field(default_factory=ProcessConfig)
    remote: dict[str, Any] = field(
        default_factory=dict
    )  # keywords of task=remote: actors elsewhere step this task; {}: not

    @property
    def title(self) -> str:
        """What it is called: the gymnasium id or the game, where that says more than the simulator's name."""
        return self.id or self.game or self.name

    @property
    def by_actors(self) -> bool:
        """Whether actors elsewhere step it: ``task=remote``, or any task with ``task.remote.*``."""
        return bool(self.remote) or self.name == "remote"


@dataclass(frozen=True)
class NetConfig:
    hidden: list[int] = field(default_factory=lambda: [512, 256, 128])
    activation: str = "elu"  # relu | elu | silu | tanh
    layer_norm: bool = False
    lr: float = 5e-4
    eps: float | None = None  # that the optimiser adds to the root of the mean squared gradient; null: its own
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
    tau: float = 0.05  # target network: share of the new weights when it moves
    target_every: int = 1  # critic updates between its moves; TD3: 1 / algo.p_per_v


@dataclass(frozen=True)
class PolicyConfig(NetConfig):
    target: bool = False  # keep a target policy for the critic's targets (TD3); false: the policy itself (PQL)
    tau: float = 0.05
    reduce: str = "min"  # the ensemble's value for the policy: min | mean | first
    saturation_penalty: float = 0.0  # DDPG family: weight of the mean square of what the policy's tanh takes


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
    kind: str = "small"  # small | nature (Mnih et al. 2015) | resnet (Espeholt et al. 2018): network of each image
    channels: list[int] | None = None  # of its convolutions (of resnet's sections); null: the kind's own
    features: int | None = None  # of each image; null: the kind's own: 128, 512, 256; 0: all of the last convolution
    layer_norm: bool = False  # LayerNorm over channels after each convolution, and over features; not for resnet


@dataclass(frozen=True)
class RolloutConfig:
    """What policy and value that learn from rollouts have in common."""

    horizon: int = 16  # steps of every environment per tick: the rollout's rows
    entropy_coef: float = 0.0
    squash: bool = False  # tanh of a Gaussian; false: the Gaussian clamped to [-1, 1]. Continuous actions only
    init_std: float = 1.0  # of that Gaussian, at first
    shared: bool = False  # the critic takes the policy's last hidden layer
    lstm: int | None = None  # units of an LSTM before the hidden layers; null: no memory
    optimizer: str = "adam"  # adam | rmsprop | rmsprop_tf (eps under the root, as TensorFlow has it)
    anneal_steps: int | None = None  # env steps (warm-up not counted) over which the learning rate falls to 0
    amp: bool = False  # networks in bfloat16 (autocast), acting included; evaluations and exports are in float32


@dataclass(frozen=True)
class PpoConfig(RolloutConfig):
    epochs: int = 4  # passes over a rollout
    minibatches: int = 2  # equal parts of a rollout (of its environments, where recurrent), one update each
    gae_lambda: float = 0.95
    clip: float | None = 0.2  # of the probability ratio; null: the plain policy gradient
    value_clip: float | None = None  # largest change of a value within a tick, in units of normalised values
    value_coef: float = 1.0  # times the mean squared error of values
    normalize_advantage: bool = True  # over the whole rollout
    normalize_value: bool = True  # the critic predicts returns less their running mean, over their running deviation
    vtrace: bool = False  # returns and advantages by V-trace (algo.vtrace), for rollouts of an older policy
    lr_schedule: str = "adaptive"  # adaptive: by the KL | fixed | linear: to 0 over anneal_steps
    kl_target: float = 0.01  # adaptive: the mean KL that the learning rate is steered to
    kl_stop: float | None = None  # a tick's remaining updates change nothing once the KL is above this
    anneal_clip: bool = False  # linear: the clip range falls with it


@dataclass(frozen=True)
class VtraceConfig:
    rho_bar: float = 1.0  # largest importance weight of a temporal difference: whose values are learned
    c_bar: float = 1.0  # largest of a trace: how far differences are carried back
    pg_rho_bar: float = 1.0  # largest in the policy gradient


@dataclass(frozen=True)
class ImpalaConfig(RolloutConfig):
    horizon: int = 20
    minibatches: int = 1  # equal parts of the environments, one update each
    trace_lambda: float = 1.0  # of V-trace: 1: rewards up to the rollout's end; 0: one-step targets
    correction: str = "vtrace"  # vtrace | one_step: of the policy gradient alone | none: as if on-policy
    reduce: str = "sum"  # sum | mean: of losses over a minibatch's rows. Learning rates do not carry over
    value_coef: float = 0.5  # times half the squared error of values
    entropy_coef: float = 0.01
    kl_coef: float = 0.0  # times KL(policy that acted || policy)
    shared: bool = True
    optimizer: str = "rmsprop_tf"


@dataclass(frozen=True)
class EpsilonConfig:
    kind: str = "annealed"  # annealed | ladder | fixed: share of random actions
    start: float = 1.0  # annealed: at first
    end: float = 0.1  # annealed: in the end; fixed: always
    steps: int = 1_000_000  # annealed: env steps (warm-up not counted) from start to end
    base: float = 0.4  # ladder: environment i of N keeps base ** (1 + exponent * i / (N - 1))
    exponent: float = 7.0


@dataclass(frozen=True)
class PriorityConfig:
    alpha: float = 0.0  # rows are drawn in proportion to priority ** alpha; 0: uniformly
    beta: float = 0.4  # importance weights are probability ** -beta, at first
    beta_steps: int | None = None  # env steps (warm-up not counted) over which beta rises to 1; null: it stays
    initial: str = "max"  # a new row's: max: the largest so far | actor: its TD error when acted


@dataclass(frozen=True)
class DqnConfig:
    double: bool = False  # the newest network chooses the action that the target network values
    dueling: bool = False  # streams for value and advantages, which share all layers but the last hidden one
    shared_grad: float = 1.0  # dueling: factor on the gradient that both streams send into what they share
    noisy: float | None = None  # initial noise (sigma_0) of noisy layers; null: ordinary layers
    huber: float | None = 1.0  # TD error from which on the loss is linear, and to which priorities are clipped
    target_period: int = 10_000  # env steps between copies to the target network
    optimizer: str = "adam"  # adam | rmsprop
    rms_decay: float = 0.95  # rmsprop: of the running mean of squared gradients
    epsilon: EpsilonConfig = field(default_factory=EpsilonConfig)
    priority: PriorityConfig = field(default_factory=PriorityConfig)


@dataclass(frozen=True)
class R2d2Config:
    """What ``algo.dqn`` does not say already: both belong to the family r2d2."""

    lstm: int = 512  # units of the LSTM between what is observed and the layers of algo.critic.hidden
    length: int = 80  # rows of a sequence that are trained on
    burn_in: int = 40  # rows before those, which only bring the LSTM's state up to date
    period: int = 40  # a sequence begins at every so many rows: their states alone are stored
    replay_ratio: float = 1.0  # rows trained on per row collected (burn-in not counted); exact
    eta: float = 0.9  # a sequence's priority: this times its largest TD error, plus the rest of 1 times the mean
    rescale: float | None = 1e-3  # epsilon of h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x; null: values as they are
    stored_state: bool = True  # sequences begin with the state that acted; false: with zeros
    feedback: bool = True  # the network is also shown the last action and reward


@dataclass(frozen=True)
class PqnConfig:
    horizon: int = 32  # steps of every environment per tick: the rollout's rows
    epochs: int = 2  # passes over a rollout
    minibatches: int = 32  # equal parts of a rollout, one update each
    q_lambda: float = 0.65  # of the Q(lambda) return: 0: one-step targets; 1: rewards up to the rollout's end
    optimizer: str = "radam"  # radam | adam
    anneal_steps: int | None = None  # env steps (warm-up not counted) over which the learning rate falls to 0
    amp: bool = False  # networks in bfloat16 (autocast), acting included
    epsilon: EpsilonConfig = field(default_factory=EpsilonConfig)


@dataclass(frozen=True)
class CentralConfig:
    """How replicas share parameters and moments."""

    order: str = "free"  # of pulls and pushes: free: as they come | turns: one replica after the other; reproducible
    ticks: int = 8  # of every replica (on average) in a tick of the run, after which all stand still: to log, to save
    chunk: int = 65_536  # parameters under one lock


@dataclass(frozen=True)
class AlgoConfig:
    name: str = "pql"  # the preset's name
    family: str = "ddpg"  # ddpg | sac | ppo | impala | dqn | r2d2 | pqn: which update functions
    schedule: str = "concurrent"  # concurrent | lockstep | replicas
    policy_lag: int = 0  # ticks by which what acts on rollouts is older than the schedule has it: for experiments
    replicas: int = 1  # whole learners on shared parameters, with an equal part of the environments each
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
    impala: ImpalaConfig = field(default_factory=ImpalaConfig)
    vtrace: VtraceConfig = field(default_factory=VtraceConfig)
    dqn: DqnConfig = field(default_factory=DqnConfig)
    r2d2: R2d2Config = field(default_factory=R2d2Config)
    pqn: PqnConfig = field(default_factory=PqnConfig)
    central: CentralConfig = field(default_factory=CentralConfig)


@dataclass(frozen=True)
class ReplayConfig:
    capacity: int = 5_000_000  # transitions, all environments together
    dtype: str = "float32"  # float32 | float16 | bfloat16: storage of floating observations (uint8 stays uint8)
    prefill: str | None = None  # file of recorded transitions that a new run's replay starts with
    save: bool = False  # write the replay to replay.safetensors in the run directory when a run ends


@dataclass(frozen=True)
class ThreadsConfig:
    # ``pql bench placement`` measures what is fastest on a machine. Another split gives other bits.
    collector: int | None = None  # intra-op threads per worker; null: by core count
    v: int | None = None
    p: int | None = None
    simulator: int | None = None  # of a simulator that steps on threads of its own (MuJoCo)


@dataclass(frozen=True)
class PlacementConfig:
    collector: str | None = None  # a device; null: the run's ``device``
    v_learner: str | None = None
    p_learner: str | None = None
    replicas: list[str] | None = None  # a device for each replica; null: the run's, or all GPUs in turn
    groups: int | None = None  # in which environments step by turns; null: the simulator's own, in most all at once
    overlap: bool = True  # one group's actions are computed while the others step; false: one after the other
    executor: str = "auto"  # auto | threads | inline | streams: how the workers of a tick are run
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)
    watchdog_seconds: float = 30.0  # a worker that needs longer for a tick (lockstep on the CPU: for a step) hangs
    start_seconds: float = 600.0  # as long may building, a reset, and each worker's first tick or step take
    matmul: str = "fast"  # fast: TF32 on CUDA, oneDNN's reduced-precision mode on the CPU | exact: plain float32


@dataclass(frozen=True)
class BudgetConfig:
    seconds: float | None = None  # from the first env step on, warm-up included; null: no limit
    env_steps: int | None = None  # transitions, all environments together, warm-up included
    target_return: float | None = None  # stop once an evaluation's mean return reaches this


@dataclass(frozen=True)
class EvalConfig:
    num_envs: int = 16  # episodes of an evaluation: exactly one per environment
    every_seconds: float | None = 30.0  # null: only at the end
    final: bool = True
    epsilon: float = 0.0  # share of random actions, where they are discrete


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
