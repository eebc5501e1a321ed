"""Composition of a checked ``Config`` from presets (:mod:`pql.config.layers`) and command-line overrides.

Hydra's grammar is used here and in ``space.py`` alone, and imported only when called.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, cast

from pql.config import AlgoConfig, Config, from_dict, leaves, to_dict
from pql.config.algorithms import RECORDS
from pql.config.families import record_of, registered
from pql.config.fields import condition_text, instead_of, is_read, settings, types_of
from pql.config.files import flat, walk
from pql.config.layers import GROUPS, Layer, Presets
from pql.config.schema import nested
from pql.config.validate import resolve_device, validate
from pql.errors import ConfigError, nearest, show

ATARI = "atari"  # the task with protocols, which are presets in a group of this name
DEFAULT = {"task": "halfcheetah", "placement": "auto", "logger": "none"}
DEFAULT_ALGO = "pql2"
PRESETS = "presets"  # presets=DIR: a folder of the user's presets
COMMAND_LINE = "command line"  # source of the last layer
FREE = ("task.kwargs.", "task.remote.", "replay.demo_keys.")  # names below these belong to simulators, or data
SEVERAL = " (pql train -m takes several)"


def split_word(word: str) -> tuple[str, str]:
    """Split ``key=value`` into key and text of the value. Raises ``ConfigError``: no such form, or no value."""
    key, equals, text = word.partition("=")
    key, text = key.strip().lstrip("+"), text.strip()
    if not (key and equals):
        raise ConfigError("override", word, "the form key=value")
    if not text:
        raise ConfigError(key, text, "a value (null for none)")
    return key, text


def parse_override(key: str, text: str) -> Any:
    """Parse the text of a value into Hydra's ``Override``. Raises ``ConfigError``: it cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"value={text}")
    except HydraException as error:
        raise ConfigError(key, text, "a value such as 3, 0.5, true, null, [64,64], or text in quotes") from error


PLAIN = re.compile(r"(?P<int>0|-?[1-9][0-9]*)|true|false|null|(?!(?:true|false|null|nan|inf)$)[a-z_][a-z0-9_]*")
"""Values whose meaning in Hydra's grammar is plain: its parser takes milliseconds for each."""
NAMED = {"true": True, "false": False, "null": None}


def parse_word(word: str, text_keys: Sequence[str] = ()) -> tuple[str, Any]:
    """Parse ``key=value`` with Hydra's grammar; values of ``text_keys`` need no quotes. Raises ``ConfigError``: no such
    form, no value, or one that cannot be read."""
    key, text = split_word(word)
    if key in text_keys and text != "null" and text[0] not in "'\"":
        return key, text
    if (plain := PLAIN.fullmatch(text)) is not None:
        return key, int(text) if plain["int"] else NAMED.get(text, text)
    override = parse_override(key, text)
    if override.is_sweep_override():
        raise ConfigError(key, text, f"a single value{SEVERAL}")
    return key, override.value()


SYNONYMS = {
    "batch": "algo.batch_size; or algo=dqn_512, c51_512, eps_rainbow_512 or rainbow_512",
    "buffer_size": "replay.capacity",
    "total_steps": "budget.env_steps",
    "total_timesteps": "budget.env_steps",
    "learning_starts": "algo.warmup_steps",
    "n_envs": "num_envs",
    "learning_rate": "algo.critic.lr or algo.policy.lr",
    "actor_lr": "algo.policy.lr",
    "critic_lr": "algo.critic.lr",
    "max_episode_steps": "task.kwargs.max_episode_steps",
}
"""Names of other libraries' settings (docs/migrate), and of former ones."""


def similar(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with what an unknown setting is called here, or ""."""
    near = SYNONYMS.get(name.rpartition(".")[2])
    return f" (did you mean {near}?)" if near else nearest(name, known)


def parse_words(words: Sequence[str], known: Iterable[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Parse overrides into (preset by group, value by setting); the last one for a name wins.

    Names below ``algo.`` are not checked, because they depend on the algorithm.

    Args:
        known: names of settings.
    Raises:
        ConfigError: an unknown group or setting, or a value that cannot be read.
    """
    known, text_keys = [*known], plain_text_keys()
    presets: dict[str, str] = {}
    values: dict[str, Any] = {}
    for word in words:
        key, value = parse_word(word, text_keys)
        if key in GROUPS:
            presets[key] = str(value)
        elif key in (PRESETS, *known) or (key.startswith(("algo.", *FREE)) and all(key.split("."))):
            values[key] = value
        else:
            raise ConfigError(key, value, f"a known setting{similar(key, [*known, *GROUPS, PRESETS])}")
    return presets, values


def words_of(settings: Iterable[str | Mapping[str, Any]]) -> list[str]:
    """Return overrides as ``key=value`` texts; dicts may be nested or have dotted names. Raises ``ConfigError``:
    something else."""
    words: list[str] = []
    for one in settings:
        if isinstance(one, Mapping):
            words += [f"{key}={in_words(key, value)}" for key, value in flat(one)]
        elif isinstance(one, str):
            words.append(one)
        else:
            raise ConfigError("override", one, "the form 'key=value', or a dict of settings")
    return words


def in_words(key: str, value: Any) -> str:
    """Return a Python value in the command line's grammar. Raises ``ConfigError``: it has no such form."""
    if value is None or isinstance(value, bool | int | float):
        return show(value)
    if isinstance(value, str | Path):  # quotes are escaped, and backslashes where they stand before one
        return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"
    if isinstance(value, list | tuple):
        return f"[{','.join(in_words(key, v) for v in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{in_words(key, v)}" for k, v in value.items()) + "}"
    raise ConfigError(key, value, "null, true, false, a number, text, a list or a dict")


def type_of(config: Config, name: str) -> Any:
    """Return the declared type of a dotted setting of ``config``."""
    record: Any = config
    *groups, last = name.split(".")
    for part in groups:
        record = getattr(record, part)
    return types_of(type(record))[last]


_known: dict[type[AlgoConfig], Mapping[str, Any]] = {}


def known_settings() -> Mapping[str, Any]:
    """Return the settings of all built-in and registered algorithms, with their types."""
    found: dict[str, Any] = {}
    for record in (*RECORDS.values(), *registered.values()):
        if record not in _known:
            config = Config(algo=record())
            _known[record] = {name: type_of(config, name) for name, _ in leaves(config)}
        found |= _known[record]
    return found


def plain_text_keys() -> tuple[str, ...]:
    """Return the settings with text values, which need no quotes."""
    return (*GROUPS, PRESETS, *(name for name, kind in known_settings().items() if kind in (str, str | None)))


def whole_numbers() -> list[str]:
    """Return the settings with integer values."""
    return [name for name, kind in known_settings().items() if kind in (int, int | None)]


def compose(overrides: Sequence[str], resolve: Callable[[str], str] | None = None) -> Config:
    """Compose presets and ``key=value`` overrides into a checked :class:`Config`.

    Where ``scale`` is not chosen, it follows the device: thousands of environments on a GPU, few on a CPU. Where
    ``algo`` is not chosen, it is ``DEFAULT_ALGO``. Atari games come in the protocol ``atari=paper``
    unless another is chosen.

    Args:
        resolve: says what ``device=auto`` is; None: ``resolve_device``, which may have to import torch.
    Raises:
        ConfigError: unknown group, key or option, wrong type or range; names the nearest valid name.
    """
    return trace(overrides, resolve)[0]


def trace(overrides: Sequence[str], resolve: Callable[[str], str] | None = None) -> tuple[Config, list[Layer]]:
    """Compose, and also return the layers of settings, weakest first."""
    chosen, values = parse_words(overrides, known_settings())
    presets = Presets([values.pop(PRESETS)] if PRESETS in values else [])
    for group, name in chosen.items():
        presets.check(group, name, SEVERAL if "," in name else "")
    device = (resolve or resolve_device)(str(values.get("device", "auto")))
    chosen.setdefault("scale", "cpu" if device == "cpu" else "gpu")
    chosen.setdefault("algo", DEFAULT_ALGO)
    given = dict(values)
    if "algo.family" in values:
        raise ConfigError("algo.family", values["algo.family"], "a preset instead: algo=NAME chooses the family, too")
    if "task.name" in values:
        chosen.setdefault("task", "env")  # another simulator has nothing of the default task's preset
    if chosen.get("task") == "env" and values.get("task.name") is None:
        raise ConfigError("task", "env", "task.name=NAME or task.name=module:Class with it")
    if any(k.startswith("budget.") for k in values):
        values = {"budget.seconds": None, **values}  # an explicit budget replaces the scale's
    chosen = {**DEFAULT, **chosen}
    if ATARI in presets.line("task", chosen["task"]):
        chosen.setdefault(ATARI, "paper")
    elif ATARI in chosen:
        raise ConfigError(ATARI, chosen[ATARI], "task=atari with it: a protocol of its games")
    layers = [*presets.layers(chosen), Layer(COMMAND_LINE, nested(values))]
    config = merge_layers(layers, given)
    check_read(config, given)
    return config, layers


OF_A_REPLAY = ("replay.capacity", "replay.dtype")  # prefill and save are always refused


def check_read(config: Config, names: Iterable[str]) -> None:
    """Refuse explicitly given settings that the run does not read. Raises ``ConfigError``: names the first, and the
    condition under which it is read."""
    found = {one.name: one for one in settings(config)}
    for name in names:
        if config.algo.data == "rollout" and name in OF_A_REPLAY:
            raise ConfigError(name, found[name].value, f"no such setting: algo={config.algo.name} does not read it")
        if name in found and not is_read(config, found[name]):
            raise ConfigError(name, found[name].value, f"{condition_text(found[name])} with it; nothing else reads it")


def check_known(record: type[AlgoConfig], name: str, value: Any, preset: str) -> None:
    """Raise ``ConfigError`` for a setting that the algorithm does not have, naming its replacement."""
    mine = [*settings(record(), "algo.")]
    if name in (one.name for one in mine):
        return
    if instead := instead_of(record(), name.removeprefix("algo."), "algo."):
        raise ConfigError(name, value, f"no such setting: algo={preset} does not read it: see {instead}")
    others = [f for f, r in RECORDS.items() if name in (k for k, _ in leaves(r(), "algo."))]
    if others:
        raise ConfigError(name, value, f"no such setting: algo={preset} does not read it; {', '.join(others)} would")
    raise ConfigError(name, value, f"a known setting{similar(name, [one.name for one in mine])}")


RESUMABLE = ("budget", "eval", "logger", "checkpoint")
RESUMABLE_TOO = ("replay.save", "replay.demos", "algo.teacher")
"""Groups and settings that may be overridden when a run is resumed, with the algorithm's (:func:`live`)."""


def live(config: Config) -> list[str]:
    """Return the algorithm's settings that may change when its run is resumed: numbers that updates read and from which
    nothing saved was derived. An adaptive learning rate belongs to what is saved."""
    adaptive = getattr(config.algo, "lr_schedule", "") == "adaptive"
    found = [one for one in settings(config) if one.declaration.live and is_read(config, one)]
    return [one.name for one in found if not (adaptive and one.name.endswith("lr"))]


def changed_live(before: Config, now: Config) -> list[str]:
    """Return the live settings in which two configs of one run differ."""
    one, two = dict(leaves(before)), dict(leaves(now))
    return [name for name in live(now) if one[name] != two[name]]


def merge_layers(layers: Sequence[Layer], given: Mapping[str, Any]) -> Config:
    """Return the merged settings of the layers, interpolated and checked. ``given``: settings of the last layer, the
    command line, by name."""
    presets = stacked(layers[:-1])
    algo = resolved(presets, given)["algo"]
    for name, value in given.items():
        if name.startswith("algo."):
            check_known(record_of({**algo}), name, value, str(algo.get("name", "?")))
    data = resolved(overlaid(presets, layers[-1].tree), given)
    for layer in layers[:-1]:
        check_nested(layer.tree, layer.source)
    try:
        return validate(from_dict(data))
    except ConfigError as error:
        files = [layer.source for layer in layers[:-1] if has(layer.tree, error.setting)]
        if error.setting in given or not files:
            raise
        raise ConfigError(error.setting, error.value, f"{error.allowed}; it is in {files[-1]}") from error


def stacked(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the settings of ``layers`` above the schema's defaults, but for those of the algorithm."""
    schema = {k: v for k, v in to_dict(Config()).items() if k != "algo"}
    return reduce(overlaid, (layer.tree for layer in layers), schema)


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the values of ``above``; mappings that both have are merged."""
    merged = {str(k): v for k, v in below.items()}
    for key, value in above.items():
        base = merged.get(str(key))
        both = isinstance(base, Mapping) and isinstance(value, Mapping)
        merged[str(key)] = overlaid(base, value) if both else value  # type: ignore[arg-type]
    return merged


def resolved(tree: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with their interpolations (``${budget.env_steps}``) replaced by values. ``given``: settings of
    the command line by name, for messages. Raises ``ConfigError``: an interpolation that cannot be resolved."""
    if not any(isinstance(value, str) and "${" in value for _, value in walk(tree)):
        return tree  # OmegaConf is slow
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(tree), resolve=True))
    except OmegaConfBaseException as error:
        key = error.full_key or "override"
        raise ConfigError(key, given.get(key), f"a value ({str(error).splitlines()[0]})") from error


def check_nested(tree: Mapping[str, Any], source: str, inner: bool = False) -> None:
    """Raise ``ConfigError`` for a dotted name in a file: at the top, or anywhere in ``algo`` (``inner``)."""
    for key, value in tree.items():
        if "." in str(key):
            first, _, rest = str(key).partition(".")
            raise ConfigError(str(key), value, f"nested settings in {source}: {first}: {{{rest}: {show(value)}}}")
        if isinstance(value, Mapping) and (inner or key == "algo"):
            check_nested(value, source, inner=True)


def has(tree: Mapping[str, Any], name: str) -> bool:
    """Return True if a layer's settings have the dotted ``name``."""
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
