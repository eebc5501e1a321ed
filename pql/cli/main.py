"""Command line, one function per command. Errors that a user can correct are one line and exit status 2."""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pql import __version__
from pql.cli.api import launch
from pql.engine import crash, deadlines
from pql.engine.world import world
from pql.errors import ConfigError, HungError, PqlError, PqlWarning, RunError, first_line, nearest, with_cause
from pql.remote.actor import command as actor_command
from pql.remote.fleet import command as fleet_command

# Every command, with the names and types of the key=value settings that are not settings of a run.
COMMANDS: dict[str, dict[str, type]] = {
    "train": {},
    "resume": {},
    "eval": {
        "num_envs": int,
        "episodes": int,
        "seed": int,
        "device": str,
        "epsilon": float,
        "max_steps": int,
        "out": str,
    },
    "play": {
        "episodes": int,
        "steps": int,
        "width": int,
        "height": int,
        "seed": int,
        "device": str,
        "out": str,
        "port": int,
    },
    "export": {"formats": str, "scale": bool, "out": str},
    "compare": {"x": str, "out": str, "thresholds": list, "at": list, "references": str},
    "report": {"x": str, "out": str, "thresholds": list, "at": list, "references": str},
    "watch": {"port": int, "open": bool},
    "pull": {"out": str, "revision": str},
    "push": {"private": bool, "message": str},
    "sweep": {},
    "bench": {"seconds": int, "rounds": int},
    "warm-up": {},
    "actor": {},
    "fleet": {},
    "list": {},
    "doctor": {},
    "completion": {},
}
FLAGS: dict[str, tuple[str, ...]] = {
    "train": ("-m", "--multirun", "--cfg", "--cfg-diff", "--dry-run", "--presets", "-h", "--help"),
    "resume": ("--trust",),
    "eval": ("--trust",),
    "play": ("--live", "--browser", "--trust"),
    "export": ("--trust",),
}
"""Options that may stand anywhere among a command's words."""
SIMULATING = ("train", "resume", "eval", "play", "export", "bench", "warm-up", "actor")
"""Commands that run native code of simulators, whose crashes are reported by a second process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status (docs/troubleshooting.md, How a command ends)."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    crash.report_crashes(speaker() if words[0] in SIMULATING else None)
    crash.name_thread("the main thread")
    plain, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise ConfigError("command", words[0], f"one of {', '.join(COMMANDS)}{nearest(words[0], COMMANDS)}")
        args = parser().parse_args(presets_as_setting(words))
        check_alone(words[0], getattr(args, "multirun", False))
        return args.run(args)
    except ConfigError as error:
        print(f"{speaker()}: {error}", file=sys.stderr)
        return 2
    except PqlError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print_cause(error, str(error))
        if isinstance(error, HungError) and argv is None:  # a hung thread must not keep the process alive
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        return 1
    except KeyboardInterrupt as error:  # before or after the part of a run that can be saved
        print(f"pql: interrupted: {error}" if error.args else "pql: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has left: ``pql list tasks | head``
        if words[0] != "sweep" and not {"-m", "--multirun"} & {*words}:
            raise
        print("pql: the output was closed before all runs were done: give the same command again", file=sys.stderr)
        return 1
    except Exception as error:  # of a simulator, of the disk, or of this package
        traceback.print_exception(error)
        what = "make room or choose another place" if isinstance(error, OSError) else "the lines above say where"
        print_cause(error, f"{words[0]} failed: {first_line(error)}; {what}")
        return 1
    finally:
        warnings.formatwarning = plain


def print_cause(error: Exception, text: str) -> None:
    """Print ``text``, whose last line names the cause, and on that line what is kept: the notes of ``error``."""
    print("; ".join([with_cause(f"{speaker()}: ", text), *getattr(error, "__notes__", ())]), file=sys.stderr)


def presets_as_setting(words: Sequence[str]) -> list[str]:
    """Rewrite ``--presets DIR``, which may be anywhere among the settings, as ``presets=DIR``.

    Likewise, of ``pql sweep``, ``--backend NAME`` as ``backend=NAME`` and ``--start`` as ``start=true``. Hydra's
    ``--cfg job`` is ``--cfg``.
    """
    names = ("--presets", "--backend") if words[0] == "sweep" else ("--presets",)
    out: list[str] = []
    for word in words:
        if out and out[-1] in names:
            out[-1] = f"{out[-1].removeprefix('--')}={word}"
        elif word == "job" and out[-1:] == ["--cfg"]:
            pass
        elif word == "--start" and "--backend" in names:
            out.append("start=true")
        else:
            out.append(word.removeprefix("--") if word.partition("=")[0] in names and "=" in word else word)
    return out


@contextlib.contextmanager
def within(seconds: float, what: str, kind: str) -> Iterator[None]:
    """Context manager: end a command that makes no progress for ``seconds``, with the stacks of all threads.

    Raises:
        HungError: it was ended.
    """
    from pql.engine.watchdog import guarded, watching

    with guarded(), watching(what, deadlines.Limit(seconds, f"the limit of {kind}")):
        yield


def speaker() -> str:
    """Prefix of an error message: ``pql``, with the rank if there are several processes."""
    rank = 0
    with contextlib.suppress(ConfigError):  # it may be the error that is being printed
        rank = world().rank
    return f"pql, rank {rank}" if rank else "pql"


def check_alone(command: str, multirun: bool) -> None:
    """Raises ``ConfigError`` if several processes were started for a command that needs one."""
    if (multirun or command not in ("train", "resume")) and world().size > 1:
        command += " -m" * multirun
        raise ConfigError("command", command, "train or resume: under torchrun, all processes make one run")


def _format_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Format a warning of this package as one line, all others as Python does."""
    if issubclass(category, PqlWarning):
        return f"pql: warning: {message}\n"
    return f"{where[0]}:{where[1]}: {category.__name__}: {message}\n"


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, like every other error, instead of in argparse's format.

    ``flags`` may be anywhere: argparse would end a list of settings at the first one.
    """

    flags: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(sorted(args or (), key=lambda word: word not in self.flags), namespace)

    def error(self, message: str) -> NoReturn:
        hint = "; settings have no dashes: seed=3" if "unrecognized arguments: --" in message else ""
        raise ConfigError("command", self.prog, f"other words: {message} ({self.prog} --help){hint}")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="pql", description="Parallel Q-Learning on massively parallel simulators.")
    top.add_argument("--version", action="version", version=f"pql {__version__}")
    sub = top.add_subparsers(required=True, metavar="|".join(COMMANDS), parser_class=Parser)
    train = sub.add_parser("train", add_help=False, help="train: pql train task=halfcheetah algo=pql seed=1")
    train.add_argument(
        "overrides", nargs="*", help="key=value settings; presets: algo= task= atari= placement= logger= scale="
    )
    train.flags = FLAGS["train"]
    train.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a run for every combination: pql train -m algo=pql,sac seed=1,2,3",
    )
    train.add_argument(
        "--cfg", action="store_true", help="print every setting and where its value comes from; also: --cfg job"
    )
    train.add_argument(
        "--cfg-diff",
        action="store_true",
        help="print the settings that the command line changes, and their presets' values",
    )
    train.add_argument("--dry-run", action="store_true", help="build, do two ticks, print memory and the time it takes")
    train.add_argument("-h", "--help", action="store_true", help="with algo=NAME: the settings that NAME reads")
    train.add_argument("--presets", metavar="DIR", help="a folder of your own presets: algo/NAME.yaml, ...")
    train.set_defaults(run=run_train, parser=train)
    resume = sub.add_parser("resume", help="continue a run: pql resume RUN budget.seconds=600")
    resume.add_argument("run_dir", metavar="RUN")
    resume.add_argument("overrides", nargs="*")
    add_trust(resume, "resume")
    resume.set_defaults(run=run_resume)
    evaluate = sub.add_parser("eval", help="evaluate a policy: pql eval RUN|CHECKPOINT episodes=100")
    evaluate.add_argument("path", metavar="RUN|CHECKPOINT|EXPORT")
    evaluate.add_argument(
        "overrides", nargs="*", help="num_envs=16 episodes=16 seed=0 device=cpu epsilon=0 max_steps=N out=FILE"
    )
    add_trust(evaluate, "eval")
    evaluate.set_defaults(run=run_eval)
    compare = sub.add_parser("compare", help="compare runs on one page: pql compare RUN... x=env_steps out=DIR")
    compare.add_argument(
        "words",
        metavar="RUN",
        nargs="+",
        help="runs, or folders of runs; x= out= thresholds=[...] at=[...] references=",
    )
    compare.set_defaults(run=run_report, single=False)
    report = sub.add_parser("report", help="a page about one run: pql report RUN out=DIR")
    report.add_argument("words", metavar="RUN", nargs="+", help="a run; x= out= thresholds=[...] at=[...]")
    report.set_defaults(run=run_report, single=True)
    watch = sub.add_parser("watch", help="a live page about runs, on this machine: pql watch RUN|FOLDER port=8421")
    watch.add_argument("path", metavar="RUN|FOLDER")
    watch.add_argument("overrides", nargs="*", help="port=8421 open=true (in a browser)")
    watch.set_defaults(run=run_watch)
    pull = sub.add_parser("pull", help="a policy from a model hub: pql pull OWNER/NAME revision=COMMIT")
    pull.add_argument("repo", metavar="OWNER/NAME")
    pull.add_argument("overrides", nargs="*", help="revision=COMMIT out=FOLDER")
    pull.set_defaults(run=run_pull)
    push = sub.add_parser("push", help="a policy to a model hub: pql push RUN OWNER/NAME private=false")
    push.add_argument("path", metavar="RUN|CHECKPOINT")
    push.add_argument("repo", metavar="OWNER/NAME")
    push.add_argument("overrides", nargs="*", help="private=true message=TEXT")
    push.set_defaults(run=run_push)
    sweep = sub.add_parser("sweep", help="search settings: pql sweep 'algo.critic.lr=interval(1e-4,1e-2)' trials=20")
    sweep.add_argument(
        "overrides", nargs="*", help="as for train; trials= seeds= sampler= objective= prune= sweep_dir= backend="
    )
    sweep.set_defaults(run=run_sweep)
    play = sub.add_parser("play", help="a video of a policy: pql play RUN|CHECKPOINT episodes=1")
    play.add_argument("path", metavar="RUN|CHECKPOINT|EXPORT")
    play.add_argument("overrides", nargs="*", help="out=FILE.mp4 episodes=1 steps=N width=N height=N seed=0 device=cpu")
    add_trust(play, "play")
    play.add_argument("--live", action="store_true", help="the simulator's own window instead of a video (MuJoCo)")
    play.add_argument("--browser", action="store_true", help="a live page on this machine instead of a video")
    play.set_defaults(run=run_play)
    export = sub.add_parser("export", help="a policy as .pt2 and .onnx files: pql export RUN|CHECKPOINT formats=onnx")
    export.add_argument("path", metavar="RUN|CHECKPOINT")
    export.add_argument("overrides", nargs="*", help="out=FOLDER formats=pt2,onnx scale=true")
    add_trust(export, "export")
    export.set_defaults(run=run_export)
    bench = sub.add_parser("bench", help="what makes a run's ticks fastest here: pql bench placement task=ant algo=sac")
    bench.add_argument("what", choices=("placement",))
    bench.add_argument("overrides", nargs="*", help="as for train; seconds=2 rounds=3")
    bench.set_defaults(run=run_bench)
    warm = sub.add_parser("warm-up", help="compile ahead what a run needs: pql warm-up task=ant num_envs=4096")
    warm.add_argument("overrides", nargs="*", help="as for train")
    warm.set_defaults(run=run_warm_up)
    actor = sub.add_parser(
        "actor", help="environments for a learner elsewhere: pql actor --connect HOST:PORT --task ant"
    )
    actor_command.add_actor_options(actor)
    fleet = sub.add_parser(
        "fleet", help="actors on a Ray cluster: pql fleet --connect HOST:PORT --task ant --actors 16"
    )
    fleet_command.add_fleet_options(fleet)
    listing = sub.add_parser("list", help="what there is: pql list tasks|algos|games")
    listing.add_argument("what", choices=("tasks", "algos", "games"))
    listing.set_defaults(run=run_list)
    doctor = sub.add_parser("doctor", help="check this machine, or a simulator: pql doctor --env NAME")
    doctor.add_argument("--env", metavar="NAME")
    doctor.add_argument("--num-envs", type=int, default=16)
    doctor.add_argument("--steps", type=int, help="default: a little over the time limit, so that episodes end")
    doctor.add_argument(
        "overrides", nargs="*", help="device=, task.*= as in training; key=value: keywords of the environment"
    )
    doctor.set_defaults(run=run_doctor)
    completion = sub.add_parser("completion", help='for the shell: eval "$(pql completion bash)"')
    completion.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"))
    completion.add_argument("--words", metavar="LINE", help="what the line's last word may become")
    completion.set_defaults(run=run_completion)
    return top


def add_trust(command: Parser, name: str) -> None:
    command.flags = FLAGS[name]
    command.add_argument(
        "--trust", action="store_true", help="run the code, programs and paths that the file names (docs/security.md)"
    )


def run_train(args: argparse.Namespace) -> int:
    if args.help and not args.overrides:
        args.parser.print_help()
        return 0
    if args.help or args.cfg or args.cfg_diff or args.dry_run:
        from pql.cli import explain

        if args.help:
            return explain.print_settings(args.overrides)
        if args.cfg or args.cfg_diff:
            return (explain.print_config if args.cfg else explain.print_difference)(args.overrides)
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
    from pql.config.validate import EPISODES, limits, resolve_device
    from pql.run.evaluation import EvaluationPlan, evaluate_saved, evaluation_file
    from pql.run.log.console import Console

    asked: dict[str, Any] = {"num_envs": 16, "seed": 0, "device": "cpu"} | parse_pairs(args.overrides, COMMANDS["eval"])
    asked.setdefault("episodes", asked["num_envs"])
    for key, allowed in (
        ("num_envs", limits("eval.num_envs")),
        ("episodes", EPISODES),
        ("seed", limits("seed")),
        ("epsilon", limits("eval.epsilon")),
        ("max_steps", limits("eval.max_steps")),
    ):
        allowed.check(key, asked.get(key))
    device = resolve_device(asked["device"])
    out = expanded("out", asked["out"]) if "out" in asked else None
    if out:
        check_writable(out)  # before the episodes are run
    ended: list[int] = []

    def far() -> str:
        return f"{ended[-1]} of {asked['episodes']} episodes" if ended else "starting"

    with contextlib.closing(Console("pql eval", {})) as console, console.doing("evaluation", far):
        counts = (asked["num_envs"], asked["episodes"], asked["seed"])
        plan = EvaluationPlan(*counts, device, asked.get("epsilon"), args.trust, asked.get("max_steps"))
        row = evaluate_saved(Path(args.path), plan, ended.append)
    path, lost = out or evaluation_file(Path(row["checkpoint"]), row["seed"], row["episodes"]), None
    try:  # first: the reader of the output may leave
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n")
    except OSError as error:  # for example, another user's run
        lost = error
    print_evaluation(row)
    if row["episodes"] < asked["episodes"]:
        print(
            f"only {row['episodes']} of {asked['episodes']} episodes: "
            "the environment has no time limit, or places for remote actors were empty"
        )
    if lost is None:
        print(f"written: {path}")
    elif out:
        raise RunError(f"the evaluation above was not written: {lost}; make room, or choose another out=FILE")
    else:
        warnings.warn(f"not written: {lost}; out=FILE chooses another place", PqlWarning, stacklevel=1)
    return 0


def check_writable(path: Path) -> None:
    """Raises ``ConfigError`` if the file ``out=path`` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError("out", path, f"a file that can be written ({error.strerror})") from error


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
    console.print(f"{row['algo']} on {row['task']}: {where}", highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    terms = {name.removeprefix("step/"): value for name, value in row.items() if name.startswith("step/")}
    if terms:
        print("a step: " + ", ".join(f"{name} {value:.3g}" for name, value in terms.items()))
    print(f"policy: {row['checkpoint']}")


def run_report(args: argparse.Namespace) -> int:
    from pql import reports
    from pql.config.files import expanded

    runs = [
        w for w in args.words if "=" not in w or os.path.exists(os.path.expanduser(w))
    ]  # a sweep's folders may be key=value
    asked = parse_pairs([w for w in args.words if w not in runs], COMMANDS["report"])
    if not runs or (args.single and len(runs) > 1):
        raise ConfigError("run", " ".join(runs) or None, "one run directory" if args.single else "run directories")
    levels, points = (asked.get(key, []) for key in ("thresholds", "at"))
    out = expanded("out", asked["out"]) if "out" in asked else None
    references = expanded("references", asked["references"]) if "references" in asked else None
    with within(deadlines.REPORT, "the report", "a report"):
        path, numbers = reports.write(runs, out, asked.get("x", "seconds"), levels, args.single, references, points)
    reports.tell(numbers)
    print(f"page: {path}\nnumbers: {path.with_name('numbers.json')}")
    return 0


def run_pull(args: argparse.Namespace) -> int:
    from pql.run.hub.repo import pull

    found = pull(args.repo, **parse_pairs(args.overrides, COMMANDS["pull"]))
    print(f"policy: {found.folder}\nagain: pql pull {args.repo} revision={found.commit}")
    trust = " --trust" if found.foreign else ""
    print(f"next: pql eval {shlex.quote(str(found.folder))}{trust}")
    return 0


def run_push(args: argparse.Namespace) -> int:
    from pql.run.hub.repo import push

    with within(deadlines.PUSH, "the upload", "an upload"):
        commit = push(args.path, args.repo, **parse_pairs(args.overrides, COMMANDS["push"]))
    print(f"pushed: pql pull {args.repo} revision={commit}")
    return 0


def run_sweep(args: argparse.Namespace) -> int:
    from pql.cli import sweep

    return sweep.sweep_command(args.overrides)


def run_watch(args: argparse.Namespace) -> int:
    from pql.config.files import expanded
    from pql.reports.watch.server import PORT, watch

    asked = {"port": PORT, "open": False} | parse_pairs(args.overrides, COMMANDS["watch"])
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
    from pql.run.play import record_video, watch_live

    # a file has a size, a window ends after some steps, a page has a port
    only = ("port",) if args.browser else ("steps",) if args.live else ("out", "steps", "width", "height")
    kinds = {key: kind for key, kind in COMMANDS["play"].items() if key in ("episodes", "seed", "device", *only)}
    asked: dict[str, Any] = parse_pairs(args.overrides, kinds)
    if args.browser:
        from pql.reports.watch.stream import stream

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

    asked: dict[str, Any] = {"formats": "pt2,onnx", "scale": True} | parse_pairs(args.overrides, COMMANDS["export"])
    formats = asked.pop("formats").strip("[]").replace(" ", "").split(",")
    with within(deadlines.EXPORT, "the export", "an export"):
        export = export_policy(args.path, formats=formats, **asked, trust=args.trust)
    for file in (*export.files.values(), export.metadata):
        print(f"{file}  {file.stat().st_size:,} bytes")
    found = ", ".join(f"{k} {v:.3g}" for k, v in export.parity.items())
    print(f"parity on {PARITY_ROWS:,} random observations, largest difference: {found} (at most {TOLERANCE:g})")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    from pql.cli import bench_placement as placement
    from pql.config.fields import Range

    own = [w for w in args.overrides if w.partition("=")[0] in COMMANDS["bench"]]
    asked = {"seconds": 2, "rounds": 3} | parse_pairs(own, COMMANDS["bench"])
    for key, allowed in (("seconds", Range(1, 3600)), ("rounds", Range(1, 1000))):
        allowed.check(key, asked[key])
    return placement.measure_placements([w for w in args.overrides if w not in own], **asked)


def run_warm_up(args: argparse.Namespace) -> int:
    from pql.cli.warm_up import warm_up

    return warm_up(args.overrides)


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
        about = f"{name:{column}}{presets.about(group, name)}"
        print(
            textwrap.fill(about, wide, subsequent_indent=" " * column, break_on_hyphens=False, break_long_words=False)
        )
    if group == "task":
        extra = sorted({*env_names()} - {*names})
        print("".join(f"task=env task.name={name}\n" for name in extra), end="")
    return 0


def run_completion(args: argparse.Namespace) -> int:
    from pql.cli.completion import SCRIPTS, candidates

    if args.words is None and args.shell is None:
        raise ConfigError("command", "completion", f"one of {', '.join(SCRIPTS)}")
    print(SCRIPTS[args.shell] if args.words is None else "\n".join(candidates(args.words, COMMANDS, FLAGS)))
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    if args.env:
        from pql.cli.doctor_env import check_simulator

        return check_simulator(args.env, args.num_envs, args.steps, args.overrides)
    if args.overrides:
        raise ConfigError("command", " ".join(args.overrides), "--env NAME with keywords for an environment")
    from pql.cli.doctor import doctor_report

    print(doctor_report())
    return 0


def parse_pairs(words: Sequence[str], kinds: dict[str, type]) -> dict[str, Any]:
    """Parse ``key=value`` words with the keys and types of ``kinds``."""
    from pql.config.compose import parse_word

    words_of = {
        int: "a whole number",
        bool: "true or false",
        str: "text",
        float: "a number",
        list: "a list of numbers such as [100,200]",
    }
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


if __name__ == "__main__":
    sys.exit(main())
