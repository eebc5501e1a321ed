"""The command line's words -> a checked ``Config``: Hydra overlays the presets of ``pql.cfg``, then the words win.

Hydra and OmegaConf are imported here and in ``space.py`` alone, and only when called.
"""

import dataclasses
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pql.config import Config, from_dict, leaves, to_dict
from pql.errors import ConfigError, PqlWarning, nearest, show
from pql.large_batch import large_batch
from pql.trust import PYTHON, check_links, check_networks, check_task, names_code
from pql.validate import corrected, resolve_device, validate

BATCH = "batch"  # batch=512: sizes and rates by the rules of pql.large_batch
GROUPS = ("algo", "task", "atari", "placement", "logger", "scale")
ALGORITHMS = "algorithms"  # in a scale's file: those that it is for, where not all
ATARI = ("atari", "pong")  # tasks that come in its protocols
FREE = ("task.kwargs.", "task.remote.")  # below these any name is a simulator's to know
SEVERAL = " (pql train -m takes several)"


def options(group: str) -> list[str]:
    """The presets of a config group."""
    folder = files("pql.cfg").joinpath(group)
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def split_word(word: str) -> tuple[str, str]:
    """``key=value`` -> (key, value's text).

    Raises:
        ConfigError: no such form, or no value.
    """
    key, equals, text = word.partition("=")
    key, text = key.strip().lstrip("+"), text.strip()
    if not (key and equals):
        raise ConfigError("override", word, "the form key=value")
    if not text:
        raise ConfigError(key, text, "a value (null for none)")
    return key, text


def parse_override(key: str, text: str) -> Any:
    """Hydra's ``Override`` of a value's text.

    Raises:
        ConfigError: it cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"value={text}")
    except HydraException as error:
        raise ConfigError(key, text, "a value such as 3, 0.5, true, null, [64,64], or text in quotes") from error


def parse_word(word: str, text_keys: Sequence[str] = ()) -> tuple[str, Any]:
    """``key=value`` with the value in Hydra's grammar; those of ``text_keys`` need no quotes, whatever they hold.

    Raises:
        ConfigError: no such form, no value, or one that cannot be read.
    """
    key, text = split_word(word)
    if key in text_keys and text != "null" and text[0] not in "'\"":
        return key, text
    override = parse_override(key, text)
    if override.is_sweep_override():
        raise ConfigError(key, text, f"a single value{SEVERAL}")
    return key, override.value()


def parse_words(words: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The command line's words -> (preset by group, value by setting); of two for the same thing the later wins.

    Raises:
        ConfigError: an unknown group, preset or setting, or a value that cannot be read.
    """
    known, text_keys = dict(leaves(Config())), plain_text_keys()
    presets: dict[str, str] = {}
    values: dict[str, Any] = {}
    for word in words:
        key, value = parse_word(word, text_keys)
        if key in GROUPS:
            if value not in options(key):
                hint = SEVERAL if "," in str(value) else nearest(str(value), options(key))
                raise ConfigError(key, value, f"one of {', '.join(options(key))}{hint}")
            presets[key] = value
        elif key == BATCH or key in known or (key.startswith(FREE) and all(key.split("."))):
            values[key] = value
        else:
            raise ConfigError(key, value, f"a known setting{nearest(key, [*known, *GROUPS, BATCH])}")
    return presets, values


def words_of(settings: Iterable[str | Mapping[str, Any]]) -> list[str]:
    """``key=value`` words as they are, and dicts of settings, nested or with dotted names, as such words.

    Raises:
        ConfigError: something else.
    """
    words: list[str] = []
    for one in settings:
        if isinstance(one, Mapping):
            words += [f"{key}={in_words(key, value)}" for key, value in _flat(one)]
        elif isinstance(one, str):
            words.append(one)
        else:
            raise ConfigError("override", one, "the form 'key=value', or a dict of settings")
    return words


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def in_words(key: str, value: Any) -> str:
    """A Python value in the command line's grammar.

    Raises:
        ConfigError: it has no such form.
    """
    if value is None or isinstance(value, bool | int | float):
        return show(value)
    if isinstance(value, str | Path):  # quotes are escaped, and backslashes where they stand before one
        return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"
    if isinstance(value, list | tuple):
        return f"[{','.join(in_words(key, v) for v in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{in_words(key, v)}" for k, v in value.items()) + "}"
    raise ConfigError(key, value, "null, true, false, a number, text, a list or a dict")


@lru_cache
def _algorithms_of(scale: str) -> list[str] | None:
    """The algorithms that a scale is for; None: all."""
    from omegaconf import OmegaConf

    raw = OmegaConf.create(files("pql.cfg").joinpath("scale", f"{scale}.yaml").read_text())
    return typing.cast(Mapping[str, list[str]], raw).get(ALGORITHMS)


def scales(algo: str) -> list[str]:
    """The scales that there are for an algorithm."""
    return [name for name in options("scale") if algo in (_algorithms_of(name) or [algo])]


def hint_of(name: str) -> Any:
    """The declared type of a dotted setting."""
    hint: Any = Config
    for part in name.split("."):
        hint = typing.get_type_hints(hint)[part]
    return hint


def plain_text_keys() -> list[str]:
    """Settings whose values are text, which needs no quotes."""
    return [*GROUPS, *(k for k, _ in leaves(Config()) if hint_of(k) in (str, str | None))]


def compose(overrides: Sequence[str], resolve: Callable[[str], str] | None = None) -> Config:
    """Presets plus ``key=value`` overrides -> a checked :class:`Config`.

    Where ``scale`` is not chosen, it follows the device: the paper's settings on a GPU, smaller ones on a CPU. Atari
    games come in the protocol ``atari=paper`` unless another is chosen.

    Args:
        resolve: says what ``device=auto`` is; None: ``resolve_device``, which may have to import torch.
    Raises:
        ConfigError: unknown group, key or option, wrong type or range; names the nearest valid name.
    """
    presets, values = parse_words(overrides)
    device = (resolve or resolve_device)(str(values.get("device", "auto")))
    if (batch := values.pop(BATCH, None)) is not None:
        values = {**large_batch(presets.get("algo", "pql"), batch), **values}
    if any(k.startswith("budget.") for k in values):
        values = {"budget.seconds": None, **values}  # the scale's own budget is for who names none
    chosen = {"scale": "cpu" if device == "cpu" else "gpu", **presets}
    algo, scale = chosen.get("algo", Config().algo.name), chosen["scale"]
    if scale not in scales(algo):
        allowed = f"one of {', '.join(scales(algo))} with algo={algo}{nearest(scale, scales(algo))}"
        raise ConfigError("scale", scale, f"{allowed}; it is for {', '.join(_algorithms_of(scale) or ())}")
    if chosen.get("task") in ATARI:
        chosen.setdefault("atari", "paper")
    elif "atari" in chosen:
        raise ConfigError("atari", chosen["atari"], "task=atari with it: a protocol of its games")
    config = _overlay(deepcopy(_load_presets(tuple(chosen.items()))), values)
    check_used(config, values)
    return config


NOT_PPO = ("batch_size", "n_step", "v_per_step", "p_per_v", "smoothing", "smoothing_clip", "explore.", "sac.",
           "critic.ensemble", "critic.atoms", "critic.v_min", "critic.v_max", "critic.tau", "critic.target_every",
           "critic.lr", "critic.weight_decay", "critic.grad_clip", "critic.eps", "policy.target", "policy.tau",
           "policy.reduce", "policy.saturation_penalty")  # fmt: skip
NOT_SAC = ("smoothing", "smoothing_clip", "policy.tau", "policy.saturation_penalty")


OF_A_REPLAY = ("replay.capacity", "replay.dtype")  # prefill and save are refused whatever names them
NOT_DQN = ("p_per_v", "smoothing", "smoothing_clip", "explore.", "sac.", "policy.", "critic.ensemble",
           "critic.tau", "critic.target_every")  # fmt: skip
NOT_PQN = (*NOT_DQN, "batch_size", "n_step", "v_per_step", "critic.atoms", "critic.v_min", "critic.v_max")
NOT_R2D2 = (*NOT_DQN, "v_per_step", "critic.atoms", "critic.v_min", "critic.v_max")
UNREAD = {"ddpg": ("sac.",), "sac": NOT_SAC, "ppo": NOT_PPO, "impala": NOT_PPO, "dqn": NOT_DQN, "r2d2": NOT_R2D2,
          "pqn": NOT_PQN}  # fmt: skip
INSTEAD = {
    "ppo": {"batch_size": "algo.ppo.minibatches", "v_per_step": "algo.ppo.epochs", "n_step": "algo.ppo.gae_lambda",
            "critic.lr": "algo.policy.lr, of the one optimiser", "explore.": "algo.ppo.init_std",
            "critic.grad_clip": "algo.policy.grad_clip, of the one optimiser",
            "critic.eps": "algo.policy.eps, of the one optimiser"},
    "impala": {"batch_size": "algo.impala.minibatches", "n_step": "algo.impala.trace_lambda",
               "critic.lr": "algo.policy.lr, of the one optimiser", "explore.": "algo.impala.entropy_coef"},
    "dqn": {"explore.": "algo.dqn.epsilon", "policy.": "algo.critic, of the one network",
            "critic.tau": "algo.dqn.target_period", "critic.target_every": "algo.dqn.target_period"},
    "r2d2": {"v_per_step": "algo.r2d2.replay_ratio", "explore.": "algo.dqn.epsilon",
             "policy.": "algo.critic, of the one network", "critic.tau": "algo.dqn.target_period",
             "critic.target_every": "algo.dqn.target_period"},
    "pqn": {"batch_size": "algo.pqn.minibatches", "v_per_step": "algo.pqn.epochs", "n_step": "algo.pqn.q_lambda",
            "explore.": "algo.pqn.epsilon", "policy.": "algo.critic, of the one network"},
}  # fmt: skip
EPSILON_OF = {"start": ("annealed",), "end": ("annealed", "fixed"), "steps": ("annealed",), "base": ("ladder",),
              "exponent": ("ladder",)}  # fmt: skip
SWITCHES = ("algo.dqn.priority.alpha",)
OWNED = {"algo.ppo.": (("ppo",), "ppo or a2c"), "algo.impala.": (("impala",), "impala"),
         "algo.dqn.": (("dqn", "r2d2"), "dqn and its like"), "algo.r2d2.": (("r2d2",), "r2d2"),
         "algo.pqn.": (("pqn",), "pqn")}  # fmt: skip


def check_used(config: Config, names: Iterable[str]) -> None:
    """Refuse settings that this algorithm reads nowhere, of those that somebody asked for by name.

    Raises:
        ConfigError: names the first, and what does its job here.
    """
    family, algo = config.algo.family, config.algo.name
    values, off = dict(leaves(config)), idle(config)
    for name in names:
        if name in OF_A_REPLAY and family in ("ppo", "impala", "pqn"):
            raise ConfigError(name, values[name], f"no such setting: algo={algo} does not read it")
        part = name.removeprefix("algo.")
        if name.startswith("algo.central.") and config.algo.schedule != "replicas":
            raise ConfigError(name, values[name], "algo.schedule=replicas with it (algo=a3c, algo=appo_replicas)")
        if name.startswith("algo.vtrace.") and not corrected(config.algo):
            raise ConfigError(name, values[name], f"algo=impala or appo with it; algo={algo} does not read it")
        for prefix, (owners, who) in OWNED.items():
            if name.startswith(prefix) and family not in owners:
                raise ConfigError(name, values[name], f"algo={who} with it; algo={algo} does not read it")
        hit = next((k for k in UNREAD[family] if part == k or (k.endswith(".") and part.startswith(k))), None)
        if name.startswith("algo.") and hit:
            more = f": see {INSTEAD[family][hit]}" if hit in INSTEAD.get(family, {}) else ""
            raise ConfigError(name, values[name], f"no such setting: algo={algo} does not read it{more}")
        if wanted := next((v for k, v in off.items() if name.startswith(k) and name not in SWITCHES), None):
            raise ConfigError(name, values[name], f"{wanted} with it; nothing else reads it")


def idle(config: Config) -> dict[str, str]:
    """Settings that another one switches off, by the beginning of their names, and what would have them read."""
    dqn, critic, ppo = config.algo.dqn, config.algo.critic, config.algo.ppo
    family, optimizers = config.algo.family, {"ppo": ppo.optimizer, "impala": config.algo.impala.optimizer}
    off = {
        "algo.ppo.kl_target": ("algo.ppo.lr_schedule=adaptive", ppo.lr_schedule == "adaptive"),
        "algo.policy.weight_decay": (f"algo.{family}.optimizer=adam", optimizers.get(family, "adam") == "adam"),
        "algo.policy.tau": ("algo.policy.target=true", config.algo.policy.target),
        **dict.fromkeys(
            ("task.process.step_seconds", "task.process.start_seconds"),
            ("task.process.python", config.task.process.python is not None),
        ),
        "algo.dqn.priority.": ("algo.dqn.priority.alpha above 0", dqn.priority.alpha > 0),
        "algo.dqn.rms_decay": ("algo.dqn.optimizer=rmsprop", dqn.optimizer == "rmsprop"),
        "algo.dqn.huber": ("algo.critic.atoms=null: a categorical loss is the cross-entropy", critic.atoms is None),
        **dict.fromkeys(("algo.critic.v_min", "algo.critic.v_max"), ("algo.critic.atoms", critic.atoms is not None)),
    }
    for name, epsilon in (("dqn", dqn.epsilon), ("pqn", config.algo.pqn.epsilon)):
        for part, kinds in EPSILON_OF.items():
            off[f"algo.{name}.epsilon.{part}"] = (
                f"algo.{name}.epsilon.kind={' or '.join(kinds)}",
                epsilon.kind in kinds,
            )
    return {name: wanted for name, (wanted, read) in off.items() if not read}


RESUMABLE = ("budget", "eval", "logger", "checkpoint")
RESUMABLE_TOO = ("replay.save",)
UPLOADING = "logger.mode"  # counts where it is typed: a run directory may be somebody else's


def resume_config(run_dir: Path, overrides: Sequence[str], trust: bool = False) -> Config:
    """A run's config with ``overrides`` of its budget, evaluation, logger or checkpoints.

    Args:
        overrides: settings that name code may be among them, as they were: so they need not be trusted. The simulator's
            interpreter may be another one.
        trust: the settings that name code, programs or paths, and uploads to wandb, are taken from the run as they are.
    Raises:
        ConfigError: no run there, an override that would make it another run, or settings that are not trusted.
    """
    from omegaconf import OmegaConf

    from pql.rundir import settings

    data = settings(run_dir)
    presets, values = parse_words(overrides)
    values |= {f"{group}.kind": name for group, name in presets.items() if group == "logger"}
    for key, value in {**presets, **values}.items():
        if key.partition(".")[0] not in RESUMABLE and key not in RESUMABLE_TOO and not names_code(key):
            known = [*(f"{g}.*" for g in RESUMABLE), *RESUMABLE_TOO]
            raise ConfigError(key, value, f"one of {', '.join(known)}: the rest stays as it was")
    config, saved = _overlay(OmegaConf.create(data), values), dict(leaves(from_dict(data)))
    for name, value in leaves(config):
        moved = name == PYTHON and None not in (value, saved[name])
        if names_code(name) and value != saved[name] and not moved:
            raise ConfigError(name, value, f"{show(saved[name])}, as the run has it")
    if not trust:
        check_task(config, run_dir, values)
        check_networks(config, run_dir, values)
        check_links(run_dir)
        if UPLOADING not in values:
            config = _offline(config)
    return dataclasses.replace(config, run_dir=str(run_dir))


def counts_when_typed(word: str) -> bool:
    """Whether ``key=value`` is of a setting that a run directory cannot decide alone: to resume, it is typed again."""
    name = word.partition("=")[0].strip().lstrip("+")
    return names_code(name) or name == UPLOADING


def _offline(config: Config) -> Config:
    """With wandb's data on the disk alone: uploads go by the user's login, to a project that the config names."""
    if (config.logger.kind, config.logger.mode) != ("wandb", "online"):
        return config
    what = (
        f"wandb stays offline: that it uploads with your login is the run directory's word; {UPLOADING}=online says so"
    )
    warnings.warn(what, PqlWarning, stacklevel=3)
    return dataclasses.replace(config, logger=dataclasses.replace(config.logger, mode="offline"))


def _overlay(raw: Any, values: Mapping[str, Any]) -> Config:
    """``values`` over the OmegaConf tree ``raw``, resolved and checked."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.set_struct(raw, False)
    try:
        for key, value in values.items():
            OmegaConf.update(raw, key, value, merge=False, force_add=True)
        data = OmegaConf.to_container(raw, resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or "override"
        raise ConfigError(key, values.get(key), f"a value ({str(error).splitlines()[0]})") from error
    assert isinstance(data, dict)
    return validate(from_dict({str(k): v for k, v in data.items()}))


@lru_cache
def _load_presets(presets: tuple[tuple[str, str], ...]) -> Any:
    """The schema's defaults overlaid with the chosen presets, by Hydra. Not to be changed: several runs share it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=to_dict(Config()))
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # a program of yours may use Hydra too
    try:
        with initialize_config_module("pql.cfg", version_base="1.3"):
            raw = hydra_compose("train", overrides=[f"{k}={v}" for k, v in presets])
    finally:
        GlobalHydra.instance().hydra = outer
    OmegaConf.set_struct(raw, False)
    raw.pop(ALGORITHMS, None)  # no setting: compose has looked at it
    return raw
