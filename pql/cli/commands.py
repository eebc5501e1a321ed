"""The commands: one function for each, from parsed words to what it prints and its exit status.

Modules that import torch are imported only by the commands that need them.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pql.api import launch
from pql.engine import deadlines
from pql.errors import ConfigError, PqlWarning, RunError, nearest, writing


@contextlib.contextmanager
def within(seconds: float, what: str, kind: str) -> Iterator[None]:
    """Context manager: end a command that makes no progress for ``seconds``, with the stacks of all threads. Raises
    ``HungError``: it was ended."""
    from pql.engine.watchdog import guarded, watching

    with guarded(), watching(what, deadlines.Limit(seconds, f"the limit of {kind}")):
        yield


def run_train(args: argparse.Namespace) -> int:
    if args.help and not args.overrides:
        args.parser.print_help()
        return 0
    if args.help or args.cfg or args.dry_run:
        from pql.cli import explain

        if args.help:
            return explain.print_settings(args.overrides)
        if args.cfg:
            return explain.print_config(args.overrides)
        return explain.dry_run(args.overrides)
    if args.multirun:
        from pql.cli import multirun

        return multirun.run_many(args.overrides)
    from pql.engine.interrupt import Interrupt

    with Interrupt() as interrupt:  # entered first: an interrupted slow build is saved as well, once it is finished
        summary = launch(args.overrides, interrupt=interrupt)
    return 130 if summary.interrupted else 0


def run_resume(args: argparse.Namespace) -> int:
    from pql.config.files import expanded
    from pql.engine.interrupt import Interrupt

    with Interrupt() as interrupt:
        summary = launch(args.overrides, expanded("run", args.run_dir), trust=args.trust, interrupt=interrupt)
    return 130 if summary.interrupted else 0


def run_eval(args: argparse.Namespace) -> int:
    from pql.config.files import expanded
    from pql.run.evaluation import EvaluationPlan, evaluate_saved, evaluation_file
    from pql.run.log.console import Console

    asked: dict[str, Any] = {"num_envs": 16} | parse_pairs(args.overrides, args.own)
    out = expanded("out", asked.pop("out")) if "out" in asked else None
    plan = EvaluationPlan(**{"episodes": asked["num_envs"], **asked}, trust=args.trust)
    if out:  # before the episodes are run
        with writing("out", out, "file"):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
    ended: list[int] = []

    def far() -> str:
        return f"{ended[-1]} of {plan.episodes} episodes" if ended else "starting"

    with contextlib.closing(Console("pql eval", {})) as console, console.doing("evaluation", far):
        row = evaluate_saved(Path(args.path), plan, ended.append)
    path, lost = out or evaluation_file(Path(row["checkpoint"]), row["seed"], row["episodes"]), None
    try:  # first: the reader of the output may leave
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n")
    except OSError as error:  # for example, another user's run
        lost = error
    print_evaluation(row)
    if row["episodes"] < plan.episodes:
        why = "the environment has no time limit, or places for remote actors were empty"
        print(f"only {row['episodes']} of {plan.episodes} episodes: {why}")
    if lost is None:
        print(f"written: {path}")
    elif out:
        raise RunError(f"the evaluation above was not written: {lost}; make room, or choose another out=FILE")
    else:
        warnings.warn(f"not written: {lost}; out=FILE chooses another place", PqlWarning, stacklevel=1)
    return 0


def run_record(args: argparse.Namespace) -> int:
    from pql.run.log.console import Console
    from pql.run.record import RecordPlan, record_demonstrations

    asked: dict[str, Any] = {"num_envs": 16} | parse_pairs(args.overrides, args.own)
    if "steps" in asked and "episodes" in asked:
        raise ConfigError("steps", asked["steps"], "episodes or steps, not both")
    if (out := asked.pop("out", None)) is None:
        raise ConfigError("out", None, "a file for the transitions: out=demos.safetensors")
    plan, kept = RecordPlan(**{"episodes": asked["num_envs"], **asked}, trust=args.trust), [0]

    def far() -> str:
        return f"episodes kept: {kept[-1]:,}"

    with contextlib.closing(Console("pql record", {})) as console, console.doing("recording", far):
        row = record_demonstrations(args.path, out, plan, kept.append)
    returns, file = row["returns"], row["file"]
    print(f"{file}: {row['steps']:,} transitions of {len(returns):,} episodes ({row['played']:,} played)")
    print(f"return: mean {sum(returns) / len(returns):,.6g}, min {min(returns):,.6g}, max {max(returns):,.6g}")
    print(f"next: replay.demos={shlex.quote(str(file))} (or replay.prefill=) in a run with the same task")
    return 0


def print_evaluation(row: dict[str, Any]) -> None:
    """Print the table of ``pql eval``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    for name in ("", "mean", "median", "IQM", "std", "min", "max"):
        table.add_column(name, justify="right" if name else "left")
    names = ("return_mean", "return_median", "return_iqm", "return_std", "return_min", "return_max")
    table.add_row("return", *(f"{row[k]:,.1f}" for k in names))
    longest = (f"{row[k]:,.0f}" for k in ("length_min", "length_max"))
    table.add_row("length", f"{row['length_mean']:,.1f}", "", "", "", *longest)
    if "success" in row:
        table.add_row("success", f"{row['success']:.1%}")
    console = Console()
    where = f"{row['episodes']} episodes in {row['num_envs']} environments, seed {row['seed']}"
    where += ", the simulator's configuration for play" if row.get("play") else ""
    console.print(f"{row['algo']} on {row['task']}: {where}", highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for kind, title in (("step/", "a step"), ("episode/", "an episode")):
        terms = {name.removeprefix(kind): value for name, value in row.items() if name.startswith(kind)}
        if terms:
            print(f"{title}: " + ", ".join(f"{name} {value:.3g}" for name, value in terms.items()))
    if stage := {k.removeprefix("stage/"): v for k, v in row.items() if k.startswith("stage/")}:
        print("stage: " + ", ".join(f"{name} {value:,g}" for name, value in stage.items()))
    print(f"policy: {row['checkpoint']}")


def run_compare(args: argparse.Namespace, single: bool = False) -> int:
    from pql import reports

    # A sweep's folders may be key=value.
    runs = [w for w in args.words if "=" not in w or os.path.exists(os.path.expanduser(w))]
    asked = parse_pairs([w for w in args.words if w not in runs], args.own)
    if not runs or (single and len(runs) > 1):
        raise ConfigError("run", " ".join(runs) or None, "one run directory" if single else "run directories")
    out = asked.pop("out", None)
    with within(deadlines.REPORT, "the report", "a report"):
        path, numbers = reports.write(runs, out, reports.PageOptions(**asked), single)
    reports.tell(numbers)
    print(f"page: {path}\nnumbers: {path.with_name('numbers.json')}")
    return 0


def run_report(args: argparse.Namespace) -> int:
    return run_compare(args, single=True)


def run_pull(args: argparse.Namespace) -> int:
    from pql.run.hub.repo import pull

    found = pull(args.repo, **parse_pairs(args.overrides, args.own))
    print(f"policy: {found.folder}\nagain: pql pull {args.repo} revision={found.commit}")
    trust = " --trust" if found.foreign else ""
    print(f"next: pql eval {shlex.quote(str(found.folder))}{trust}")
    return 0


def run_push(args: argparse.Namespace) -> int:
    from pql.run.hub.repo import push

    with within(deadlines.PUSH, "the upload", "an upload"):
        commit = push(args.path, args.repo, **parse_pairs(args.overrides, args.own))
    print(f"pushed: pql pull {args.repo} revision={commit}")
    return 0


def run_sweep(args: argparse.Namespace) -> int:
    from pql.cli import population, sweep

    return (population.population_command if args.pbt else sweep.sweep_command)(args.overrides)


def run_watch(args: argparse.Namespace) -> int:
    from pql.config.files import expanded
    from pql.reports.watch import PORT, watch

    asked = {"port": PORT, "open": False} | parse_pairs(args.overrides, args.own)
    obey_interrupts()
    check_port(asked["port"])
    watch(expanded("run", args.path), asked["port"], asked["open"])
    return 0


def obey_interrupts() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` also where a shell has started the command with it ignored (``&``)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check_port(port: int) -> None:
    """Raises ``ConfigError`` for a number that is no port."""
    if not 0 <= port <= 65535:
        raise ConfigError("port", port, "from 0 (any free port) up to 65535")


def run_play(args: argparse.Namespace) -> int:
    from pql.run.play import record_video, stream, watch_live

    # a file has a size, a window ends after some steps, a page has a port
    only = ("port",) if args.browser else ("steps",) if args.live else ("out", "steps", "width", "height")
    kinds = {key: kind for key, kind in args.own.items() if key in ("episodes", "seed", "device", *only)}
    asked: dict[str, Any] = parse_pairs(args.overrides, kinds)
    if args.browser:
        if "port" in asked:
            check_port(asked["port"])
        obey_interrupts()
        stream(args.path, **asked, trust=args.trust)
        return 0
    if args.live:
        watch_live(args.path, **asked, trust=args.trust)
        return 0
    video = record_video(args.path, **asked, trust=args.trust)
    for i, (total, length) in enumerate(zip(video.returns, video.lengths, strict=True), 1):
        print(f"episode {i}: return {total:.6g}, {length} steps")
    print(f"{video.path}: {video.frames} frames of {video.size[0]} x {video.size[1]}, {video.fps:.4g} per second")
    return 0


def run_export(args: argparse.Namespace) -> int:
    from pql.run.export.writer import PARITY_ROWS, TOLERANCE, export_policy

    asked: dict[str, Any] = {"formats": "pt2,onnx", "scale": True} | parse_pairs(args.overrides, args.own)
    formats = asked.pop("formats").strip("[]").replace(" ", "").split(",")
    with within(deadlines.EXPORT, "the export", "an export"):
        export = export_policy(args.path, formats=formats, **asked, trust=args.trust)
    for file in (*export.files.values(), export.metadata):
        print(f"{file}  {file.stat().st_size:,} bytes")
    found = ", ".join(f"{k} {v:.3g}" for k, v in export.parity.items())
    print(f"parity on {PARITY_ROWS:,} random observations, largest difference: {found} (at most {TOLERANCE:g})")
    return 0


def run_warm_up(args: argparse.Namespace) -> int:
    from pql.cli.warm_up import warm_up

    return warm_up(args.overrides)


def run_profile(args: argparse.Namespace) -> int:
    from pql.cli.profile import profile

    return profile(args.overrides, Path(args.out), args.ticks)


def run_list(args: argparse.Namespace) -> int:
    from pql.config.layers import Presets
    from pql.contract.registry import env_names, find_factory

    if args.what == "games":
        print("\n".join(find_factory("atari").games()))
        return 0
    group = "task" if args.what == "tasks" else "algo"
    wide = shutil.get_terminal_size().columns
    presets = Presets()
    names = presets.names(group)
    column = max(map(len, names)) + 2
    for name in names:
        about, below = f"{name:{column}}{presets.about(group, name)}", " " * column
        print(textwrap.fill(about, wide, subsequent_indent=below, break_on_hyphens=False, break_long_words=False))
    if group == "task":
        extra = sorted({*env_names()} - {*names})
        print("".join(f"task=env task.name={name}\n" for name in extra), end="")
    return 0


def run_completion(args: argparse.Namespace) -> int:
    from pql.cli.completion import SCRIPTS, candidates

    if args.words is None and args.shell is None:
        raise ConfigError("command", "completion", f"one of {', '.join(SCRIPTS)}")
    print(SCRIPTS[args.shell] if args.words is None else "\n".join(candidates(args.words, args.commands)))
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    named = [] if args.env else [word for word in args.overrides if word.startswith("task=")]
    words = [word for word in args.overrides if word not in named]
    if name := args.env or "".join(named[-1:]).removeprefix("task="):
        from pql.cli.doctor_env import check_simulator

        count = args.num_envs if args.num_envs is not None else 64 if args.symmetry else 16
        return check_simulator(name, count, args.steps, words, args.symmetry)
    if words or args.symmetry:
        raise ConfigError("command", " ".join(words) or "--symmetry", "task=NAME, with keywords for its environment")
    from pql.cli.doctor import doctor_report

    print(doctor_report())
    return 0


def parse_pairs(words: Sequence[str], kinds: dict[str, type]) -> dict[str, Any]:
    """Parse ``key=value`` words with the keys and types of ``kinds``."""
    from pql.config.compose import parse_word

    words_of = {int: "a whole number", bool: "true or false", str: "text", float: "a number"}
    words_of[list] = "a list of numbers such as [100,200]"
    out = {}
    for word in words:
        key, value = parse_word(word, [k for k, kind in kinds.items() if kind is str])
        if key not in kinds:
            raise ConfigError(key, value, f"one of {', '.join(kinds)}{nearest(key, kinds)}")
        if kinds[key] is float and type(value) is int:
            value = float(value)
        if type(value) is not kinds[key]:
            raise ConfigError(key, value, words_of[kinds[key]])
        out[key] = value
    return out
