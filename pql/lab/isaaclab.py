"""Isaac Lab's tasks with pql, in Isaac Lab's own Python: ``python -m pql.lab.isaaclab train --task T``.

For its other way in, ``--rl_library rsl_rl``, :func:`add_agents` gives every task that rsl_rl can train a configuration
in which pql learns. Written from Isaac Lab's sources (2.3 and 3.0) and tested on stand-ins; not run on Isaac Lab.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pql.api import train
from pql.config.compose import words_of
from pql.config.files import read_yaml
from pql.envs.adapters.isaaclab import isaaclab, registered
from pql.errors import ConfigError, PqlError

KEY = "pql_cfg_entry_point"


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line; the words after the options are settings."""
    made = argparse.ArgumentParser(prog="python -m pql.lab.isaaclab", description="Isaac Lab's tasks with pql.")
    made.add_argument("verb", choices=("train", "play"))
    made.add_argument("--task", required=True, help="gymnasium id, with or without -v0")
    made.add_argument("--num_envs", type=int, default=None, help="train: 4096, play: 16")
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--agent", default=KEY, help="entry of the task's registration that has settings of pql")
    made.add_argument("--run_name", default="", help="appended to the name of the run directory")
    made.add_argument("--action_bound", default="1.0", help="a number, or limits: the joints'")
    made.add_argument("--final_obs", action="store_true", help="observations before resets (Isaac Lab 3)")
    made.add_argument("--enable_cameras", action="store_true")
    made.add_argument("--presets", nargs="*", default=[], help="variants of the configuration (Isaac Lab 3)")
    made.add_argument("--checkpoint", help="play: a run, checkpoint or export")
    made.add_argument("--steps", type=int, default=1000, help="play: of every environment")
    made.add_argument("settings", nargs="*", help="env.NAME=VALUE: the task's; others: of pql train (algo=, budget.)")
    return made


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    args = options().parse_intermixed_args(argv)
    try:
        if (args.verb == "play") != (args.checkpoint is not None):
            raise ConfigError("--checkpoint", args.checkpoint, "a run to play, and none to train")
        env = make_task(args)
        try:
            train_task(args, env) if args.verb == "train" else play_task(args, env)
        finally:
            sys.stdout.flush()  # closing Isaac Sim may end the process
            env.close()
    except PqlError as error:
        print(f"pql: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def make_task(args: argparse.Namespace) -> Any:
    """Start the simulator and return the task's environment, with the settings ``env.*``."""
    from omegaconf import OmegaConf

    settings = OmegaConf.to_container(OmegaConf.from_dotlist([w[4:] for w in args.settings if w.startswith("env.")]))
    number = args.action_bound.replace(".", "", 1).isdecimal()
    return isaaclab(
        num_envs=args.num_envs or (4096 if args.verb == "train" else 16),
        device=args.device,
        task=args.task,
        action_bound=float(args.action_bound) if number else args.action_bound,
        final_obs=args.final_obs,
        settings=settings,  # type: ignore[arg-type]
        random_lengths=args.verb == "train",
        cameras=args.enable_cameras,
        presets=args.presets,
    )


def train_task(args: argparse.Namespace, env: Any) -> None:
    """Train on ``env``; the run directory is ``logs/pql/TASK/TIME``, unless a setting says otherwise."""
    task = registered(args.task)
    name = time.strftime("%Y-%m-%d_%H-%M-%S") + (f"_{args.run_name}" if args.run_name else "")
    words = [f"run_dir={Path('logs') / 'pql' / task / name}", *words_of([agent_settings(task, args.agent)])]
    train(*words, *(w for w in args.settings if not w.startswith("env.")), env=env)


def play_task(args: argparse.Namespace, env: Any) -> None:
    """Step ``env`` with a trained policy; print the mean reward."""
    from pql.run.policy import load_policy

    policy, obs, total, ended = load_policy(args.checkpoint, args.device), env.reset(0), 0.0, 0
    for _ in range(args.steps):
        step = env.step(policy(obs))
        obs, total, ended = step.obs, total + float(step.reward.mean()), ended + int(step.first.sum())
        policy.reset(step.first)
    print(f"{args.steps} steps of {env.spec.num_envs} environments: mean reward {total / args.steps:.4g} a step, "
          f"{ended} episodes ended")  # fmt: skip


def agent_settings(task: str, key: str = KEY) -> Mapping[str, Any]:
    """Return the settings that a task's registration has under ``key``: a mapping, ``module:file.yaml`` beside the
    module, or ``module:name`` of a mapping or of a function that returns one. Raises ``ConfigError``: something else,
    or nothing under a key of your own."""
    import gymnasium

    spec = gymnasium.registry[task]
    known = getattr(spec, "kwargs", None) or {}
    entry = known.get(key)
    if entry is None and key != KEY:
        raise ConfigError("--agent", key, f"an entry of {task}: {', '.join(known)}")
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        found = importlib.import_module(module)
        if name.endswith((".yaml", ".yml")):
            entry = read_yaml(Path(str(found.__file__)).parent / name)
        else:
            entry = getattr(found, name)
    entry = {} if entry is None else entry() if callable(entry) else entry
    if not isinstance(entry, Mapping):
        raise ConfigError("--agent", key, f"a mapping of pql's settings, not a {type(entry).__name__}")
    return entry


def add_agents() -> None:
    """Give every task that rsl_rl can train a configuration in which pql learns, as ``pql_cfg_entry_point``: for the
    options ``--external_callback pql.lab.isaaclab.add_agents --agent pql_cfg_entry_point`` of Isaac Lab 3."""
    import gymnasium

    for name, spec in gymnasium.registry.items():
        kwargs = getattr(spec, "kwargs", None) or {}
        if "rsl_rl_cfg_entry_point" in kwargs:
            kwargs.setdefault(KEY, partial(rsl_rl_cfg, name))


def rsl_rl_cfg(task: str) -> Any:
    """Return a task's configuration for rsl_rl with pql's algorithm."""
    from isaaclab_tasks.utils import load_cfg_from_registry

    cfg = load_cfg_from_registry(task, "rsl_rl_cfg_entry_point")
    cfg.algorithm.class_name = "pql.lab:Learner"
    return cfg


if __name__ == "__main__":
    raise SystemExit(run_command())
