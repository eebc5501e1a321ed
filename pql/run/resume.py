"""Settings of a resumed run: those of the run, with a few that may be overridden."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

from pql.config import Config, from_dict, leaves
from pql.config.compose import RESUMABLE, RESUMABLE_TOO, live, merge_layers, parse_words
from pql.config.layers import Layer
from pql.config.schema import nested
from pql.config.trust import FILES, PYTHON, check_files, check_links, check_networks, check_task, names_code
from pql.errors import ConfigError, PqlWarning, show
from pql.run.store.own import started_here
from pql.run.store.run_dir import run_settings

UPLOADING = "logger.mode"  # accepted only from the command line: the run directory may be untrusted


def resume_config(run_dir: Path, overrides: Sequence[str], trust: bool = False) -> Config:
    """Return a run's config with ``overrides`` of its budget, evaluation, logger, checkpoints or live settings.

    Args:
        overrides: may repeat settings that name code with their old values, which then need no trust. The simulator's
            interpreter may differ.
        trust: accept settings of the run that name code, programs or paths, and its uploads. A run that this user
            started here needs it only for uploads.
    Raises:
        ConfigError: no such run, an override of a setting that must not change, or untrusted settings.
    """
    data = run_settings(run_dir)
    presets, values = parse_words(overrides, dict(leaves(from_dict(data))))
    values |= {f"{group}.kind": name for group, name in presets.items() if group == "logger"}
    free = [*RESUMABLE_TOO, *live(from_dict(data))]
    for key, value in {**presets, **values}.items():
        if key.partition(".")[0] not in RESUMABLE and key not in free and not names_code(key):
            known = [*(f"{g}.*" for g in RESUMABLE), *free]
            raise ConfigError(key, value, f"one of {', '.join(known)}: the rest stays as it was")
    saved = dict(leaves(from_dict(data)))
    config = merge_layers([Layer("run", data), Layer("command line", nested(values))], values)
    for name, value in leaves(config):
        if name in FILES and (value is None) != (saved[name] is None):
            raise ConfigError(name, value, f"{show(saved[name])} or the path of the same file")
        moved = name == PYTHON and None not in (value, saved[name])
        if names_code(name) and value != saved[name] and not moved:
            raise ConfigError(name, value, f"{show(saved[name])}, as the run has it")
    if not (trust or started_here(run_dir, from_dict(data))):
        check_task(config, run_dir, values)
        check_networks(config, run_dir, values)
        check_files(config, run_dir, values)
    if not trust:
        check_links(run_dir)
        if UPLOADING not in values:
            config = _offline(config)
    return dataclasses.replace(config, run_dir=str(run_dir))


def counts_when_typed(word: str) -> bool:
    """Return True if ``key=value`` is of a setting not trusted from a run directory: give it again to resume."""
    name = word.partition("=")[0].strip().lstrip("+")
    return names_code(name) or name == UPLOADING


def _offline(config: Config) -> Config:
    """Return the config with its tracker offline: uploads would use the user's login for a project that it names."""
    kind = config.logger.kind
    if kind in ("none", "tensorboard") or config.logger.mode != "online":
        return config
    what = (
        f"{kind} stays offline: that it uploads with your login is the run directory's word; {UPLOADING}=online says so"
    )
    warnings.warn(what, PqlWarning, stacklevel=3)
    return dataclasses.replace(config, logger=dataclasses.replace(config.logger, mode="offline"))
