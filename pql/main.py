"""The command line: train, resume, eval, list, doctor. Errors a user can mend are one line and exit status 2."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pql.errors import ConfigError, PqlError, nearest

COMMANDS = ("train", "resume", "eval", "list", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 the run failed, 2 wrong input, 130 interrupted and saved."""
    # Before the first CUDA call: cuBLAS picks its workspaces when it starts, and only these are reproducible.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    words = list(sys.argv[1:] if argv is None else argv)
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
            import traceback

            traceback.print_exception(error.__cause__)
        print(f"pql: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pql", description="Parallel Q-Learning on massively parallel simulators.")
    sub = top.add_subparsers(required=True, metavar="|".join(COMMANDS))
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
    evaluate.add_argument("overrides", nargs="*")
    evaluate.set_defaults(run=run_eval)
    listing = sub.add_parser("list", help="what there is: pql list tasks|algos")
    listing.add_argument("what", choices=("tasks", "algos"))
    listing.set_defaults(run=run_list)
    doctor = sub.add_parser("doctor", help="check this machine, or a simulator: pql doctor --env NAME")
    doctor.add_argument("--env", metavar="NAME")
    doctor.add_argument("--num-envs", type=int, default=16)
    doctor.add_argument("overrides", nargs="*", help="keywords for the environment: key=value")
    doctor.set_defaults(run=run_doctor)
    return top


def run_train(args: argparse.Namespace) -> int:
    from pql.config import compose
    from pql.session import Session

    summary = Session(compose(args.overrides)).train()
    return 130 if summary.interrupted else 0


def run_resume(args: argparse.Namespace) -> int:
    from pql.session import Session, resume_config

    config = resume_config(Path(args.run_dir), args.overrides)
    return 130 if Session(config, resume=True).train().interrupted else 0


def run_eval(args: argparse.Namespace) -> int:
    import torch

    from pql import checkpoint
    from pql.build import build_env
    from pql.config import from_dict, resolve_device
    from pql.evaluate import find_checkpoint, load_policy, run_episodes

    options = parse_pairs(args.overrides, {"num_envs": 16, "seed": 0, "device": "cpu"})
    path = find_checkpoint(Path(args.path))
    _, manifest = checkpoint.load(path)
    device = resolve_device(str(options["device"]))
    config = dataclasses.replace(from_dict(manifest["config"]), device=device)
    env = build_env(config, int(options["num_envs"]))
    result = run_episodes(env, load_policy(path, torch.device(device)), int(options["seed"]))
    env.close()
    row = {
        "checkpoint": str(path), "return_mean": result.mean, "return_iqm": result.iqm,
        "return_min": min(result.returns), "return_max": max(result.returns),
        "length_mean": sum(result.lengths) / len(result.lengths), "episodes": len(result.returns),
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    return 0


def run_list(args: argparse.Namespace) -> int:
    from pql.config import options
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
        from pql.conformance import check_env
        from pql.env import make_env

        kwargs = {k: v for k, v in (parse_pair(o) for o in args.overrides)}
        env = make_env(args.env, num_envs=args.num_envs, **kwargs)
        report = check_env(env)
        print(report)
        env.close()
        return 0 if report.ok else 1
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


def parse_pair(text: str) -> tuple[str, object]:
    """``key=value`` with the value read as YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("override", text, "the form key=value")
    return key, yaml.safe_load(value)


def parse_pairs(texts: Sequence[str], defaults: dict[str, int | str]) -> dict[str, int | str]:
    """``key=value`` words for the keys of ``defaults``, of the same types."""
    out = dict(defaults)
    for text in texts:
        key, value = parse_pair(text)
        if key not in defaults:
            raise ConfigError(key, value, f"one of {', '.join(defaults)}{nearest(key, defaults)}")
        if not isinstance(value, type(defaults[key])):
            raise ConfigError(key, value, "a whole number" if isinstance(defaults[key], int) else "text")
        out[key] = value
    return out


if __name__ == "__main__":
    sys.exit(main())
