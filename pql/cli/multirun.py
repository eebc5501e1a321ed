"""``pql train -m``: one run for every combination of the swept settings. Repeating the command runs only missing runs.

The directory of a run depends only on its settings: ``DIR/<task>-<algo>[-<swept setting>=<value>...]-seed<k>``.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pql.cli.jobs import INTERRUPTED, PROGRAM, Runner, how_ended, next_command
from pql.cli.sweep_values import Space, parse_space
from pql.cli.tables import table
from pql.config import Config, from_dict, leaves
from pql.config.compose import compose, split_word
from pql.config.files import expanded
from pql.errors import ConfigError, show
from pql.run.store import run_dir as rundir

DIR = "runs/multirun"
NAMED = ("task", "task.name", "algo", "seed")  # included in every run's name


@dataclass(frozen=True)
class Job:
    """One run: its command-line words without ``run_dir``, and the config that they define."""

    run_dir: Path
    words: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        return self.run_dir.name


def run_many(words: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Run the missing runs. Returns the exit status: 0, 1 if a run failed, 130 after Ctrl-C. Raises ``ConfigError``:
    before the first run: a wrong setting, or an existing run was made with other settings."""
    folder, jobs = plan(words)
    for job in jobs:
        check_same(job)
    with Runner(folder, "multirun_dir", program) as runner:
        outcomes = [run_jobs(job, runner, f"[{i}/{len(jobs)}] {job.name}") for i, job in enumerate(jobs, 1)]
        print(f"\n{results(jobs, outcomes)}\n", flush=True)
    failed = sum(o.startswith("failed") for o in outcomes)
    if runner.asked:
        print("interrupted: give the same command again to continue")
        return INTERRUPTED
    if failed:
        print(f"{failed} of {len(jobs)} runs failed: give the same command again to try them once more")
    else:
        print(f"all {len(jobs)} runs are finished: {folder}")
    return 1 if failed else 0


def plan(words: Sequence[str]) -> tuple[Path, list[Job]]:
    """Return the folder and all runs in the order of the command line; the last swept setting changes fastest. Raises
    ``ConfigError``: a wrong setting; an interval, which is for ``pql sweep``; two combinations with the same name."""
    folder, settings = DIR, dict[str, str | Space]()
    for word in words:
        key, value = parse_space(word) if not word.startswith("multirun_dir=") else split_word(word)
        if key == "run_dir":
            raise ConfigError(key, value, "multirun_dir=FOLDER with -m: each run gets a subfolder")
        if isinstance(value, Space) and not value.values:
            raise ConfigError(key, value.text, "values that can be counted; intervals are for pql sweep")
        if key == "multirun_dir":
            folder = str(value)
        else:
            settings[key] = value
    options = [value.values if isinstance(value, Space) else (value,) for value in settings.values()]
    swept = [key for key, value in settings.items() if isinstance(value, Space) and key not in NAMED]
    root, jobs = expanded("multirun_dir", folder), dict[str, Job]()
    for combination in itertools.product(*options):
        chosen = dict(zip(settings, combination, strict=True))
        job = make_job(root, chosen, swept)
        if job.name in jobs:
            raise ConfigError("-m", job.name, "different combinations; two would have this name")
        jobs[job.name] = job
    return root, list(jobs.values())


def make_job(root: Path, chosen: dict[str, str], swept: Sequence[str]) -> Job:
    words = tuple(f"{key}={value}" for key, value in chosen.items())
    config = compose(words)
    task = chosen.get("task", "env")
    task = config.task.name if task == "env" else Path(task).stem  # presets of one simulator have different names
    parts = [plain(task), plain(config.algo.name), *(f"{key}={plain(chosen[key])}" for key in swept)]
    name = "-".join([*parts, f"seed{config.seed}"])
    return Job(root / name, words, config)


def plain(value: str) -> str:
    """Convert a value's text to a part of a folder's name: ``[64,64]`` -> ``64_64``."""
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")


def check_same(job: Job) -> None:
    """Raises ``ConfigError`` if the run in the job's folder was made with other settings."""
    if rundir.state(job.run_dir) == "missing":
        return
    saved = dict(leaves(from_dict(rundir.run_settings(job.run_dir))))
    for name, value in leaves(job.config):
        if name != "run_dir" and saved[name] != value:
            like = f"{show(saved[name])}, as in {job.run_dir}; other settings need another multirun_dir"
            raise ConfigError(name, value, like)


def run_jobs(job: Job, runner: Runner, title: str) -> str:
    """Make, resume or skip one run. Returns its outcome as text for the table."""
    if runner.asked:
        return rundir.state(job.run_dir)
    command = next_command(job.run_dir, job.words)
    if command is None:
        print(f"{title}: finished before", flush=True)
        return "finished before"
    print(f"{title}: {'resumed' if command[0] == 'resume' else 'started'}", flush=True)
    status = runner.run(command)
    if status == 0:
        return "finished"
    if runner.asked:
        return "interrupted"
    if status < 0:
        stacks = "the stacks of its threads are above, if they could be written"
        print(f"{title}: {how_ended(status)}; {stacks}", flush=True)
    return f"failed ({how_ended(status)})"


def results(jobs: Sequence[Job], outcomes: Sequence[str]) -> str:
    """Return the final table: the outcome of each run, and its final evaluation if there is one."""
    rows = [["run", "state", "return", "IQM", "seconds", "env steps"]]
    for job, outcome in zip(jobs, outcomes, strict=True):
        summary = rundir.read_summary(job.run_dir) if outcome.startswith("finished") else None
        forms = {"return_mean": ",.1f", "return_iqm": ",.1f", "seconds": ",.0f", "env_steps": ",d"}
        values = {key: (summary or {}).get(key) for key in forms}
        rows.append([job.name, outcome, *("-" if v is None else format(v, forms[k]) for k, v in values.items())])
    return table(rows, right=(2, 3, 4, 5))
