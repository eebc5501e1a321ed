"""The command line: train, resume, eval, list, doctor. Errors a user can mend are one line and exit status 2."""

import argparse
import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pql.errors import ConfigError, PqlError, PqlWarning, nearest

COMMANDS = ("train", "resume", "eval", "play", "export", "list", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 the run failed, 2 wrong input, 130 interrupted and saved."""
    words = list(sys.argv[1:] if argv is None else argv)
    plain, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise ConfigError("command", words[0], f"one of {', '.join(COMMANDS)}{nearest(words[0], COMMANDS)}")
        args = parser().parse_args(words)
        return args.run(args)
    except ConfigError as error:
        print(f"pql: {error}", file=sys.stderr)
        return 2
    except PqlError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"pql: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before, or after, there was something to save
        print("pql: interrupted", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = plain


def _format_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """One line for a warning of this package; Python's own form for all others."""
    if issubclass(category, PqlWarning):
        return f"pql: warning: {message}\n"
    return f"{where[0]}:{where[1]}: {category.__name__}: {message}\n"


class Parser(argparse.ArgumentParser):
    """One line for wrong usage, as for every other error, instead of argparse's own report.

    ``flags`` may stand anywhere: argparse would end a list of settings at the first.
    """

    flags: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(sorted(args or (), key=lambda word: word not in self.flags), namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command", self.prog, f"other words: {message} ({self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="pql", description="Parallel Q-Learning on massively parallel simulators.")
    sub = top.add_subparsers(required=True, metavar="|".join(COMMANDS), parser_class=Parser)
    train = sub.add_parser("train", help="train: pql train task=halfcheetah algo=pql seed=1")
    train.add_argument(
        "overrides", nargs="*", help="key=value settings; presets: algo= task= placement= logger= scale="
    )
    train.set_defaults(run=run_train)
    resume = sub.add_parser("resume", help="continue a run: pql resume RUN budget.seconds=600")
    resume.add_argument("run_dir", metavar="RUN")
    resume.add_argument("overrides", nargs="*")
    resume.set_defaults(run=run_resume)
    evaluate = sub.add_parser("eval", help="evaluate a policy: pql eval RUN|CHECKPOINT num_envs=16 seed=0")
    evaluate.add_argument("path", metavar="RUN|CHECKPOINT")
    evaluate.add_argument("overrides", nargs="*", help="num_envs=16 seed=0 device=cpu")
    evaluate.set_defaults(run=run_eval)
    play = sub.add_parser("play", help="a video of a policy: pql play RUN|CHECKPOINT episodes=1")
    play.add_argument("path", metavar="RUN|CHECKPOINT")
    play.add_argument("overrides", nargs="*", help="out=FILE.mp4 episodes=1 steps=N width=N height=N seed=0 device=cpu")
    play.flags = ("--live",)
    play.add_argument("--live", action="store_true", help="the simulator's own window instead of a video (MuJoCo)")
    play.set_defaults(run=run_play)
    export = sub.add_parser("export", help="a policy as .pt2 and .onnx files: pql export RUN|CHECKPOINT formats=onnx")
    export.add_argument("path", metavar="RUN|CHECKPOINT")
    export.add_argument("overrides", nargs="*", help="out=FOLDER formats=pt2,onnx scale=true")
    export.set_defaults(run=run_export)
    listing = sub.add_parser("list", help="what there is: pql list tasks|algos")
    listing.add_argument("what", choices=("tasks", "algos"))
    listing.set_defaults(run=run_list)
    doctor = sub.add_parser("doctor", help="check this machine, or a simulator: pql doctor --env NAME")
    doctor.add_argument("--env", metavar="NAME")
    doctor.add_argument("--num-envs", type=int, default=16)
    doctor.add_argument("--steps", type=int, help="default: a little over the time limit, so that episodes end")
    doctor.add_argument("overrides", nargs="*", help="keywords for the environment: key=value")
    doctor.set_defaults(run=run_doctor)
    return top


def run_train(args: argparse.Namespace) -> int:
    from pql.interrupt import Interrupt

    with Interrupt() as interrupt:  # from the start: what is slow to build is saved, too, once it stands
        from pql.compose import compose
        from pql.session import Session

        config = compose(args.overrides)
        summary = Session(config, overrides=args.overrides, interrupt=interrupt).train()
    return 130 if summary.interrupted else 0


def run_resume(args: argparse.Namespace) -> int:
    from pql.interrupt import Interrupt

    with Interrupt() as interrupt:
        from pql.compose import resume_config
        from pql.session import Session

        config = resume_config(Path(args.run_dir), args.overrides)
        summary = Session(config, resume=True, overrides=args.overrides, interrupt=interrupt).train()
    return 130 if summary.interrupted else 0


def run_eval(args: argparse.Namespace) -> int:
    from pql import checkpoint
    from pql.build import build_env
    from pql.config import PlacementConfig, from_dict, resolve_device
    from pql.evaluate import run_episodes
    from pql.machine import set_precision
    from pql.policy import policy_of

    asked = parse_pairs(args.overrides, {"num_envs": 16, "seed": 0, "device": "cpu"})
    for key, least in (("num_envs", 1), ("seed", 0)):
        if int(asked[key]) < least:
            raise ConfigError(key, asked[key], f"a whole number, at least {least}")
    device = resolve_device(str(asked["device"]))
    path = checkpoint.find(Path(args.path))
    tensors, manifest = checkpoint.load(path)
    saved = from_dict(manifest["config"])
    set_precision(saved.placement)
    config = dataclasses.replace(saved, device=device, placement=PlacementConfig())
    env = build_env(config, int(asked["num_envs"]))
    result = run_episodes(env, policy_of(tensors, manifest, device), int(asked["seed"]))
    env.close()
    row = {
        "checkpoint": str(path), "return_mean": result.mean, "return_iqm": result.iqm,
        "return_min": min(result.returns), "return_max": max(result.returns),
        "length_mean": result.length, "episodes": len(result.returns),
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    return 0


def run_play(args: argparse.Namespace) -> int:
    from pql.play import record_video, watch

    more = {"steps": int} if args.live else {"steps": int, "width": int, "height": int, "out": str}
    asked = parse_pairs(args.overrides, {"episodes": 1, "seed": 0, "device": "cpu"}, more)
    if args.live:
        watch(args.path, **asked)
        return 0
    video = record_video(args.path, **asked)
    for i, (total, length) in enumerate(zip(video.returns, video.lengths, strict=True), 1):
        print(f"episode {i}: return {total:.6g}, {length} steps")
    print(f"{video.path}: {video.frames} frames of {video.size[0]} x {video.size[1]}, {video.fps:.4g} per second")
    return 0


def run_export(args: argparse.Namespace) -> int:
    from pql.export import PARITY_ROWS, TOLERANCE, export_policy

    asked = parse_pairs(args.overrides, {"formats": "pt2,onnx", "scale": True}, {"out": str})
    formats = asked.pop("formats").strip("[]").replace(" ", "").split(",")
    export = export_policy(args.path, formats=formats, **asked)
    for file in (*export.files.values(), export.metadata):
        print(f"{file}  {file.stat().st_size:,} bytes")
    found = ", ".join(f"{k} {v:.3g}" for k, v in export.parity.items())
    print(f"parity on {PARITY_ROWS:,} random observations, largest difference: {found} (at most {TOLERANCE:g})")
    return 0


def run_list(args: argparse.Namespace) -> int:
    from pql.compose import options
    from pql.env import env_names

    group = "task" if args.what == "tasks" else "algo"
    for name in options(group):
        print(f"{name:20} {first_comment(group, name)}".rstrip())
    if group == "task":
        extra = sorted({*env_names()} - {*options("task")})
        print("".join(f"task=env task.name={name}\n" for name in extra), end="")
    return 0


def first_comment(group: str, name: str) -> str:
    from importlib.resources import files

    line = files("pql.cfg").joinpath(group, f"{name}.yaml").read_text().splitlines()[0]
    return line.removeprefix("# ") if line.startswith("# ") else ""


def run_doctor(args: argparse.Namespace) -> int:
    if args.env:
        return _check_simulator(args, dict(_pair(o) for o in args.overrides))
    if args.overrides:
        raise ConfigError("command", " ".join(args.overrides), "--env NAME with keywords for an environment")
    import importlib.metadata
    import platform

    import torch

    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"torch {torch.__version__}; GPUs: {', '.join(gpus) or 'none'}")
    for package in ("mujoco", "gymnasium", "tensorboard", "wandb"):
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} not installed: pip install 'pql[{package}]'")
    return 0


def _check_simulator(args: argparse.Namespace, kwargs: dict[str, Any]) -> int:
    from pql.conformance import check_env
    from pql.env import find_factory, make_env

    for option, value in (("--num-envs", args.num_envs), ("--steps", args.steps)):
        if value is not None and value < 1:
            raise ConfigError(option, value, "a whole number, at least 1")
    env = make_env(args.env, num_envs=args.num_envs, **kwargs)
    describe = getattr(find_factory(args.env), "describe", None)
    described = describe(num_envs=args.num_envs, device=env.spec.device, **kwargs) if describe else None
    steps = args.steps or min((env.spec.max_episode_steps or 195) + 5, 2000)
    report = check_env(env, steps, described=described)
    print(report)
    env.close()
    return 0 if report.ok else 1


def _pair(word: str) -> tuple[str, Any]:
    from pql.compose import parse_word

    return parse_word(word, ("device",))


def parse_pairs(
    words: Sequence[str], defaults: Mapping[str, int | str | bool], optional: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """``key=value`` words for the keys of ``defaults``, of the same types, or of ``optional``, which gives types."""
    from pql.compose import parse_word

    kinds = {k: type(v) for k, v in defaults.items()} | dict(optional or {})
    out: dict[str, Any] = dict(defaults)
    for word in words:
        key, value = parse_word(word, [k for k, kind in kinds.items() if kind is str])
        if key not in kinds:
            raise ConfigError(key, value, f"one of {', '.join(kinds)}{nearest(key, kinds)}")
        if type(value) is not kinds[key]:
            raise ConfigError(key, value, {int: "a whole number", bool: "true or false", str: "text"}[kinds[key]])
        out[key] = value
    return out


if __name__ == "__main__":
    sys.exit(main())
