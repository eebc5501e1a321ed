"""The wall clock jumps by an hour both ways: nothing but time stamps changes."""

import random
import subprocess
import sys
import time
from pathlib import Path

import bare
import leaping
import pytest
from run_files import manifest, points, resume, rows, run, words

from pql.run.store.run_dir import read_summary

SETTINGS = (
    "task.kwargs.max_episode_steps=11",
    "checkpoint.every_seconds=0.02",
    "eval.every_seconds=0.05",
    "logger.every_seconds=0.02",
)


def content(folder: Path) -> tuple[list[str], dict[str, float]]:
    """What a run leaves apart from times: hashes of the last resume point and of the policy, and its counters."""
    summary = read_summary(folder)
    hashes = [manifest(path)["sha256"] for path in (points(folder)[-1], folder / "checkpoints" / "last")]
    return hashes, {k: summary[k] for k in ("env_steps", "updates_v", "updates_p", "interrupted")}


@pytest.mark.fault(36, count=10)
def test_a_run_and_its_resumption_are_as_with_a_steady_clock(tmp_path, monkeypatch, trial):
    """Every reading of the time is another hour; resume points and policies are saved and evaluated all along."""
    seed = f"seed={trial}"
    run(*words(tmp_path / "steady", seed, *SETTINGS))
    resume(tmp_path / "steady", "budget.env_steps=640")
    rng, real, read = random.Random(trial), time.time, []

    def leaping_time():
        read.append(real() + rng.choice((-3600, 0, 3600)))
        return read[-1]

    def local(seconds=None, real=time.localtime):
        return real(leaping_time() if seconds is None else seconds)

    monkeypatch.setattr(time, "time", leaping_time)
    monkeypatch.setattr(time, "localtime", local)
    begun = time.monotonic()
    assert run(*words(tmp_path / "leaping", seed, *SETTINGS)).seconds < time.monotonic() - begun
    assert resume(tmp_path / "leaping", "budget.env_steps=640").seconds < time.monotonic() - begun
    assert content(tmp_path / "leaping") == content(tmp_path / "steady")
    seconds = [row["time/seconds"] for row in rows(tmp_path / "leaping") if "updates/v" in row]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[-1] < time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.fault(36, count=2)
def test_a_learner_and_its_actor_whose_clocks_jump_train_to_the_end(tmp_path):
    """Real processes, every clock of which jumps ten times a second: deadlines, pings and waits are not affected."""
    env = leaping.environment(tmp_path)
    if env is None:
        pytest.skip("a C compiler is needed")
    shown = subprocess.run(
        [sys.executable, "-c", "import time\nfor _ in range(9): print(int(time.time())); time.sleep(.1)"],
        env=env,
        capture_output=True,
        text=True,
    )
    times = [int(line) for line in shown.stdout.split()]
    assert max(times) - min(times) > 3000
    own = [w for w in words(tmp_path / "run", "algo=sac", "num_envs=2") if not w.startswith(("task=", "algo=pql"))]
    own += ["task=remote", f"task.kwargs.listen=unix:{tmp_path}/s", "budget.env_steps=400"]
    command = [sys.executable, "-m", "pql", "train", *own]
    actor = [*bare.command(tmp_path, "gymnasium"), "actor", "--connect", f"unix:{tmp_path}/s", "--num-envs", "2"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": env}
    begun = time.monotonic()
    learner = subprocess.Popen(command, **quiet)
    playing = subprocess.Popen([*actor, "--task", "gymnasium", "id=Pendulum-v1"], **quiet)
    try:
        said = learner.communicate(timeout=120)[1]
        assert learner.returncode == 0, said
        assert playing.wait(20) == 0
    finally:
        for process in (learner, playing):
            process.kill()
            process.communicate()
    summary = read_summary(tmp_path / "run")
    assert (summary["env_steps"], summary["interrupted"]) == (400, False)
    assert 0 < summary["seconds"] < time.monotonic() - begun
