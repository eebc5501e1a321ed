"""Validation of a checkpoint's manifest and an export's metadata, before they are used.

Reads no files. A failed check is a ``ValueError`` that names the entry and the expected value.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pql import __version__
from pql.config import Config, fingerprint, from_dict, leaves, to_dict
from pql.config.families import record_of
from pql.config.files import check_tree, parse_json, walk
from pql.contract.robot import robot_fault
from pql.contract.shapes import layout_fault
from pql.errors import UNSEEN, ConfigError, printable

FORMAT = 2  # in format 1, replays and priorities were saved in full, including unused rows
EXPORT_FORMAT = 3  # in format 1, discrete actions began at 0; in format 2, an action of 0 was the bounds' middle
DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool")
LARGEST = 2**31 - 1  # of an axis, a number of actions, a time limit
COUNT = 2**62
SETTINGS = 10_000  # values in a config


class NewerFormatError(ValueError):
    """Written by another release, in a format or with settings that this one does not know."""


def config_entries(config: Config) -> dict[str, Any]:
    """Return a manifest's entries for a config: its values, the release, and the fingerprint of its settings."""
    return {"config": to_dict(config), "release": __version__, "schema": fingerprint(type(config.algo))}


def check_manifest(data: Any, kinds: Sequence[str]) -> None:
    """Validate a checkpoint's manifest. Hashes are compared elsewhere.

    Args:
        kinds: allowed kinds, whose entries are all checked; if empty, only format and the types of hashes are.
    Raises:
        NewerFormatError: its format is newer than this release's.
        ValueError: an entry is missing, or has a wrong type or range.
    """
    _need(isinstance(data, dict), "the manifest", "a mapping")
    check_version("format", data.get("format"), FORMAT)
    for name in ("sha256", "manifest_sha256"):
        _need(isinstance(data.get(name), str), name, "a hash")
    _need(_whole(data.get("ranks", 1), 1), "ranks", "a whole number from 1 on")
    _need(isinstance(data.get("sources", {}), dict), "sources", "a mapping")
    best = data.get("return_mean", 0.0)
    _need(_number(best) and not math.isnan(best), "return_mean", "a number")
    if not kinds:
        return
    _need(data.get("kind") in kinds, "kind", " or ".join(kinds))
    check_settings("config", data.get("config"))
    check_texts("spec", data.get("spec"))
    check_spec_dict(data.get("spec"))
    _check_counters(data.get("counters", {}), ("ticks", "seconds") if data["kind"] == "resume" else ())


def check_storable(config: Config, spec: Mapping[str, Any] | None = None) -> None:
    """Check that readers will accept the checkpoints of a run, so that it does not train for nothing.

    Args:
        spec: from ``spec_to_dict``; None: not known yet.
    Raises:
        ConfigError: the first setting that a reader refuses, or the task if its specification is refused.
    """
    for name, value in leaves(config):
        try:
            check_settings(name, {name: as_read(value)})
        except (TypeError, ValueError) as error:
            raise ConfigError(name, value, f"a value that checkpoints can store ({error})") from None
    if spec is not None:
        manifest = {"format": FORMAT, "kind": "policy", **config_entries(config), "spec": spec}
        try:
            check_unwritten(manifest)
        except (TypeError, ValueError) as error:
            wanted = f"a simulator whose description checkpoints can store ({error})"
            raise ConfigError("task", config.task.title, wanted) from None


def check_unwritten(manifest: Mapping[str, Any]) -> None:
    """Check a manifest, before its hashes are known, as :func:`check_manifest` will when it is read.

    Raises:
        TypeError, ValueError: readers would refuse it.
    """
    kinds = [manifest["kind"]] if "kind" in manifest else ()
    check_manifest(as_read({**manifest, "sha256": "", "manifest_sha256": ""}), kinds)


def as_read(data: Any) -> Any:
    """Return what a reader gets from ``data`` written as JSON.

    Raises:
        TypeError: it holds other types than JSON has.
        ValueError: it is too large, too deep, or has names that are no text.
    """
    check_tree(data)
    return parse_json(json.dumps(data))


def check_settings(name: str, settings: Any) -> None:
    """Validate a saved config or a part of one: no ``${...}`` interpolations, and :func:`check_texts`. Raises
    ``ValueError``: it is no mapping, is too large or contains a forbidden text."""
    _need(isinstance(settings, dict), name, "a mapping")
    try:
        check_tree(settings, values=SETTINGS)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for text in check_texts(name, settings):
        _need("${" not in text, name, f"without interpolations: {text:.60}")


def check_schema(data: Mapping[str, Any]) -> None:
    """Validate the entries ``release`` and ``schema`` of a manifest, which older ones lack.

    Raises:
        NewerFormatError: its settings are of another release, and this one does not know them all.
        ValueError: an entry has a wrong type.
    """
    release, schema = data.get("release", ""), data.get("schema", "")
    for name, value in (("release", release), ("schema", schema)):
        _need(isinstance(value, str) and len(value) <= 64, name, "a short text")
        check_texts(name, value)
    with contextlib.suppress(ConfigError):  # an unknown algorithm is named where the config is used
        if schema in ("", fingerprint(record_of(data["config"].get("algo")))):
            return
        try:
            from_dict(data["config"])
        except ConfigError as error:
            raise NewerFormatError(f"settings of pql {__version__}; these are of pql {release}: {error}") from None


def check_texts(name: str, data: Any) -> list[str]:
    """Return all texts in nested lists and mappings. Raises ``ValueError`` for control characters and NaN."""
    texts = []
    for _, value in walk(data):
        _need(value == value, name, "without NaN")
        texts += [text for text in (value, *(value if isinstance(value, dict) else ())) if isinstance(text, str)]
    for text in texts:
        _need(not UNSEEN.search(text), name, f"without control characters: {printable(text):.60}")
    return texts


def check_version(name: str, value: Any, known: int) -> None:
    """Validate a format's version number. Raises like :func:`check_manifest`."""
    _need(_whole(value, 1), name, f"a whole number from 1 to {known}, not {str(value)[:20]!r}")
    if value > known:
        raise NewerFormatError(f"{name} {known} or older; this is {value}: update pql")


def check_spec_dict(spec: Any) -> None:
    """Check the environment's description in a manifest or export. Raises ``ValueError``."""
    _need(isinstance(spec, dict), "spec", "a mapping")
    _need(isinstance(spec.get("name"), str), "spec.name", "text")
    groups = spec.get("obs")
    _need(isinstance(groups, dict) and bool(groups), "spec.obs", "observation groups")
    for name, group in groups.items():
        _need(isinstance(group, dict), f"spec.obs.{name}", "a mapping")
        check_tensor(f"spec.obs.{name}", group.get("shape"), group.get("dtype"))
        stack, terms, fill = group.get("stack", 1), group.get("terms", []), group.get("fill", "zeros")
        whole = _whole(stack, 1) and isinstance(terms, list) and all(_whole(w, 1) for w in terms)
        _need(whole and not layout_fault(group["shape"], stack, terms, fill), f"spec.obs.{name}.stack", "frames")
    action = spec.get("action")
    count: Any = action.get("discrete") if isinstance(action, dict) else action
    many = action.get("multi_discrete") if isinstance(action, dict) else None
    _need(_whole(count, 1) or (isinstance(many, list) and _wholes(many, 1)), "spec.action", "a number of actions")
    for name in ("action_low", "action_high"):
        if (bounds := spec.get(name)) is not None:
            check_bounds(f"spec.{name}", bounds, count)
    _check_center("spec.action_", spec, count)
    _check_start("spec.action_start", spec.get("action_start", 0), many)
    limit = spec.get("max_episode_steps", 0)
    _need(limit is None or _whole(limit, 1), "spec.max_episode_steps", "null or a whole number from 1 on")
    if "robot" in spec:
        size = action if isinstance(action, int) else None
        if fault := robot_fault(spec["robot"], size, {k: group["shape"] for k, group in groups.items()}):
            raise ValueError(f"spec.{fault}")


def check_export(data: Any) -> None:
    """Validate an export's metadata. Raises like :func:`check_manifest`."""
    types = {"algorithm": str, "family": str, "inputs": list, "outputs": list, "action": dict, "task": dict}
    check_mapping("the metadata", data, {"format": str, **types})
    check_texts("the metadata", data)
    _need(data["format"] == "pql-policy", "format", "pql-policy")
    check_version("format_version", data.get("format_version"), EXPORT_FORMAT)
    check_settings("task", data["task"])
    _need(data["task"].keys() <= {"name", "id", "game", "model", "kwargs"}, "task", "name, id, game, model and kwargs")
    spec = data.get("spec")
    check_spec_dict(spec)
    names = []
    for end in ("inputs", "outputs"):
        for entry in data[end]:
            check_mapping(end, entry, {"name": str, "shape": list, "dtype": str})
            _need(entry["shape"][:1] == ["batch"], f"{end}.shape", "a batch")
            check_tensor(f"{end}.{entry['name']}", entry["shape"][1:], entry["dtype"])
            names.append(entry["name"])
    _need(
        len({*names}) == len(names) and bool(data["inputs"]) and names[len(data["inputs"]) :][:1] == ["action"],
        "outputs",
        "an action, and names that differ",
    )
    for entry in data["inputs"]:
        kind, _, name = entry["name"].partition(".")
        group = spec["obs"].get(name, {}) if kind == "obs" else {"shape": entry["shape"][1:], "dtype": "float32"}
        same = group.get("shape") == entry["shape"][1:] and group.get("dtype") == entry["dtype"]
        _need(kind in ("obs", "state") and same, f"inputs.{entry['name']}", "a group of spec.obs, or a state")
    _check_action(data["action"])


def _check_action(about: Mapping[str, Any]) -> None:
    kinds, many = ("box", "discrete", "multi_discrete"), about.get("nvec")
    _need(about.get("kind") in kinds and _whole(about.get("size"), 1), "action", "a kind and a size")
    if about["kind"] == "multi_discrete":
        _need(
            isinstance(many, list) and len(many) == about["size"] and _wholes(many, 1), "action.nvec", "whole numbers"
        )
    _need(isinstance(about.get("scaled"), bool), "action.scaled", "true or false")
    _check_start("action.start", about.get("start", 0), many if about["kind"] == "multi_discrete" else None)
    for name in ("low", "high") if about["kind"] == "box" else ():
        check_bounds(f"action.{name}", about.get(name), about["size"])
    _check_center("action.", about, about["size"])


def _check_center(prefix: str, facts: Mapping[str, Any], count: int) -> None:
    """Validate the simulator's actions for 0, which are between the bounds of ``count`` actions."""
    low, high, center = (facts.get(prefix.partition(".")[2] + k) for k in ("low", "high", "center"))
    if center is not None:
        check_bounds(f"{prefix}center", center, count)
        inside = low is not None and high is not None and all(map(lambda a, b, c: a < b < c, low, center, high))
        _need(inside, f"{prefix}center", "between low and high")


def _check_start(name: str, start: Any, many: Sequence[int] | None) -> None:
    """Validate the first action of a simulator, or those of several at once, with ``many`` choices."""
    fine = _whole(start, -LARGEST) if many is None else isinstance(start, list) and len(start) == len(many)
    _need(start == 0 or (fine and (many is None or _wholes(start, -LARGEST))), name, "whole numbers")


def check_tensor(name: str, shape: Any, dtype: Any) -> None:
    """Validate a shape (without the batch axis) and a dtype's name. Raises ``ValueError``."""
    _need(isinstance(shape, list) and len(shape) <= 8 and all(_whole(n, 0) for n in shape), f"{name}.shape", "sizes")
    _need(math.prod(shape) <= LARGEST, f"{name}.shape", f"at most {LARGEST:,} elements")
    _need(isinstance(dtype, str) and dtype in DTYPES, f"{name}.dtype", f"one of {', '.join(DTYPES)}")


def check_bounds(name: str, bounds: Any, count: int) -> None:
    """Validate bounds of ``count`` actions. Raises ``ValueError``."""
    fine = isinstance(bounds, list) and len(bounds) == count and all(_number(b) and not math.isnan(b) for b in bounds)
    _need(fine, name, f"{count} numbers")


def _check_counters(counters: Any, required: Sequence[str]) -> None:
    _need(isinstance(counters, dict), "counters", "a mapping")
    for name in (*required, *counters):
        value = counters.get(name)
        _need(_number(value) and 0 <= value <= COUNT, f"counters.{name}", "a number from 0 on")


def check_mapping(name: str, value: Any, entries: Mapping[str, type]) -> None:
    """Validate a mapping with entries of these types. Raises ``ValueError``."""
    _need(isinstance(value, dict), name, "a mapping")
    for key, kind in entries.items():
        _need(isinstance(value.get(key), kind), f"{key} of {name}", "present, with the type that pql writes")


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST


def _wholes(values: Sequence[Any], least: int) -> bool:
    return len(values) > 0 and all(_whole(value, least) for value in values)


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _need(fine: bool, name: str, expected: str) -> None:
    if not fine:
        raise ValueError(f"{name} is not {expected}")
