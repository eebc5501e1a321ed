"""Simulators in a separate process and Python: the contract, runs, and failures."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import far_device
import pytest
import torch
from conftest import differences, small_config
from far_python import far_python
from run_files import whole_and_resumed, words

import pql
from pql.cli.main import main
from pql.collect.env_slice import named_step
from pql.config.compose import compose
from pql.contract.conformance import check_env
from pql.contract.env import Box, Discrete, EnvSpec, MultiDiscrete, ObsSpec, VecEnv, make_env
from pql.contract.grouped import Grouped
from pql.contract.optional import Staged, set_stage, stage_of, supports
from pql.envs.toy import Counter
from pql.errors import ConfigError, RunError
from pql.remote.process import far, shared_cuda
from pql.remote.process.near import ProcessVec
from pql.run.build import build
from pql.run.environment import build_env
from pql.run.store import checkpoint
from pql.types import Step

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Another interpreter, which has NumPy alone."""
    return str(far_python(tmp_path_factory.mktemp("far") / "venv"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))


@pytest.fixture
def walk(python):
    """Makes the simulator of ``far_sims``, and closes it after the test."""
    made = []

    def make(num_envs=6, name="far_sims:Walk", seconds=20.0, **kwargs):
        made.append(ProcessVec(name, num_envs, python=python, kwargs=kwargs, step_seconds=seconds, start_seconds=60.0))
        return made[-1]

    yield make
    for env in made:
        env.close()


def gone(pid, within=5.0):
    """Return True if a process has ended (or ends ``within`` seconds)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # ended; its parent has not asked yet
            return True
        time.sleep(0.05)
    return False


# -- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discrete", [False, True, "two"])
def test_a_simulator_in_another_python_conforms(walk, discrete):
    env = walk(discrete=discrete)
    report = check_env(env, 40)
    assert report.ok, report
    untested = {r.name for r in report.results if r.ok is None}
    assert untested == {"filler_flags", "groups", "describe", "stack", "capturable"} | (
        {"action_range"} if discrete else set()
    )
    assert isinstance(env, VecEnv)
    assert env.spec.info["python"] in ("3.8", ".".join(map(str, sys.version_info[:2])))
    assert env.spec.info["torch"] is False
    assert env.spec.info["arguments"] == 0  # simulators that read them would stumble over ours
    two = MultiDiscrete((4, 3), (0, 1))
    assert env.spec.action == {False: Box.within(2, 2.0), True: Discrete(4, start=-1), "two": two}[discrete]
    assert discrete or env.spec.action_reach == (4.0, 0.5)
    assert {k: (s.shape, s.dtype) for k, s in env.spec.obs.items()} == {
        "policy": ((2,), torch.float32),
        "critic": ((3,), torch.float64),
        "image": ((2, 2), torch.uint8),
    }
    assert not env.spec.single_instance  # each has a process


def test_the_values_are_the_simulators_own(walk):
    """Every row's image and critic say what the point was, so rows cannot have been mixed up on the way."""
    env = walk(limit=3)
    obs, ends = env.reset(1), 0
    for _ in range(20):
        step = env.step(torch.zeros(6, 2))
        for seen in (step.obs, step.final_obs):
            image = (seen["critic"][:, :2] * 20 + 128).clamp(0, 255).to(torch.uint8)
            assert torch.equal(seen["image"], torch.stack((image, image.flip(1)), 1))
            torch.testing.assert_close(seen["policy"], seen["critic"][:, :2].float())
        torch.testing.assert_close(step.reward, -step.final_obs["critic"][:, :2].square().sum(1).float())
        assert torch.equal(step.final_obs["critic"][:, 2], obs["critic"][:, 2] + 1)
        assert torch.equal(step.obs["critic"][:, 2] == 0, step.first)
        assert torch.equal(step.log["success"], step.truncated.float())
        obs, ends = step.obs, ends + int(step.first.sum())
    assert ends > 30


def test_numbers_may_be_numpys(walk):
    env = walk(name="far_sims:Numbers")
    assert env.spec.action == Box.within(2, 2.0)
    assert (env.spec.max_episode_steps, env.spec.obs["image"].shape, env.spec.deterministic) == (7, (2, 2), True)
    report = check_env(env, 30)
    assert report.ok, report


LATE = """
from types import SimpleNamespace as Record

class Late:
    def __init__(self, num_envs, device):
        import torch
        self.torch, part = torch, Record(shape=(1,), dtype="float32")
        self.spec = Record(name="late", num_envs=num_envs, obs={"policy": part}, action=Record(size=1), device="cpu",
                           info={"device": type(device).__name__})

    def reset(self, seed=None):
        return {"policy": self.torch.zeros(self.spec.num_envs, 1)}

    def step(self, action):
        obs, no = self.reset(), self.torch.zeros(self.spec.num_envs, dtype=self.torch.bool)
        graded = self.torch.ones(self.spec.num_envs, requires_grad=True) * 2
        return Record(obs=obs, reward=graded.requires_grad + no.float(), terminated=no, truncated=no, first=no,
                      final_obs=obs, final_ok=~no, valid=~no, log={})

    def close(self): ...
"""


def test_no_gradients_are_kept_where_the_simulator_brings_torch(tmp_path, monkeypatch):
    """Isaac Gym must be imported before it, so it is not there when the simulator is built."""
    (tmp_path / "late_torch.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = ProcessVec("late_torch:Late", 3)
    try:
        assert env.spec.info["device"] == "str"  # no torch yet
        env.reset(0)
        assert env.step(torch.zeros(3, 1)).reward.tolist() == [0, 0, 0]
    finally:
        env.close()


def test_optional_methods_cross_too(walk):
    env = walk()
    env.reset(0)
    mask = torch.tensor([True, False, True, False, False, False])
    env.step(torch.zeros(6, 2))
    assert env.reset_where(mask)["critic"][:, 2].tolist() == [0, 1, 0, 1, 1, 1]
    assert env.render(2, width=3).tolist() == [[[2] * 3] * 3] * 4


def test_a_step_that_nobody_waits_for_is_forgotten(walk):
    """As after an interrupt: its answer is not taken for that of the next question."""
    env = walk()
    env.reset(0)
    env.start(torch.zeros(6, 2))
    assert env.reset(0)["critic"][:, 2].tolist() == [0] * 6
    assert env.step(torch.zeros(6, 2)).final_obs["critic"][:, 2].tolist() == [1] * 6


def test_kinds_of_logged_values_and_stages_cross():
    there = ProcessVec("far_sims:Staged", 3)
    both = Grouped([ProcessVec("far_sims:Staged", 3), ProcessVec("far_sims:Staged", 3)])
    try:
        assert there.spec.log == {"push": "sum", "success": "step", "place": "episode"}
        there.reset(0)
        for _ in range(3):
            there.step(torch.zeros(3, 2))
        found = there.progress()
        assert (found["steps"], found["levels"].tolist()) == (3, [0, 0, 0])
        assert stage_of(there) == {"stage/steps": 3}
        set_stage(there, {"stage/steps": 40.0, "ticks": 1.0})
        assert there.progress()["steps"] == 40
        assert supports(both, Staged)
        both.load_progress({"steps": 7, "levels": torch.arange(6)})
        assert both.progress()["levels"].tolist() == [0, 1, 2, 3, 4, 5]
        assert both.envs[1].progress()["levels"].tolist() == [3, 4, 5]
    finally:
        there.close()
        both.close()


def test_a_tensor_simulator_gives_the_same_bits_in_another_process():
    """This interpreter again, another process: tensors, next-step autoreset, lost final observations, the state."""
    kwargs = {"autoreset": "next_step", "final_obs": "never", "restart_every": 4, "stagger": True}
    here, there = Counter(5, **kwargs), ProcessVec("counter", 5, kwargs=kwargs)
    try:
        assert there.spec == here.spec
        report = check_env(there, 40)
        assert report.ok, report
        for action in torch.zeros(30, 5, 2):
            ours, theirs = here.step(action), there.step(action)
            assert differences(named_step(ours), named_step(theirs)) == []
        assert differences(checkpoint.flatten(here.state_dict()), checkpoint.flatten(there.state_dict())) == []
    finally:
        there.close()


@pytest.mark.parametrize("attach", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_arrays_on_the_device_give_the_same_bits_and_are_waited_for(monkeypatch, attach):
    """The protocol, with files for the device's memory; ``test_gpu.py`` has the real thing."""
    for name, function in far_device.PRETENCE.items():
        monkeypatch.setattr(shared_cuda, name, function)
    far_device.WAITED.clear()
    far_device.FREED.clear()
    kwargs = {"final_obs": "always", "stagger": True}
    here, there = Counter(5, **kwargs), ProcessVec("far_device:Pretending", 5, kwargs={**kwargs, "attach": attach})
    try:
        crossing = "device memory" if attach else "host memory: CUDA_ERROR_INVALID_CONTEXT"
        assert there.crossing == crossing
        assert len(far_device.FREED) == (0 if attach else 1)
        assert torch.equal(here.reset(3)["policy"], there.reset(3)["policy"])
        for action in torch.zeros(30, 5, 2):
            ours, theirs = here.step(action), there.step(action)
            assert differences(named_step(ours), named_step(theirs)) == []
        assert len(far_device.WAITED) == (31 if attach else 0)  # the reset's observation read, 30 actions written
    finally:
        there.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_arrays_on_a_cuda_device_are_shared_between_processes():
    kwargs = {"final_obs": "always", "stagger": True}
    here, there = Counter(64, "cuda", **kwargs), ProcessVec("counter", 64, "cuda", kwargs=kwargs)
    try:
        assert there.crossing == "device memory"
        assert torch.equal(here.reset(3)["policy"], there.reset(3)["policy"])
        for action in torch.zeros(200, 64, 2, device="cuda"):
            ours, theirs = here.step(action), there.step(action)
            assert torch.equal(ours.obs["policy"], theirs.obs["policy"])
            assert torch.equal(ours.final_obs["policy"], theirs.final_obs["policy"])
            assert torch.equal(ours.first, theirs.first)
    finally:
        there.close()


def test_the_documentations_twenty_lines_conform(tmp_path, monkeypatch, walk):
    text = (ROOT / "docs" / "simulators.md").read_text()
    code = next(block for block in text.split("```") if "class Reach" in block).removeprefix("python\n")
    assert len(code.splitlines()) <= 22
    (tmp_path / "my_sim.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = check_env(walk(name="my_sim:Reach", limit=12), 30)
    assert report.ok, report


def test_a_simulator_that_is_not_there_says_which_package(walk):
    with pytest.raises(
        ConfigError, match=r"task=isaacgym: expected the whole package 'isaacgymenvs', or .*; looked for in .*python"
    ):
        walk(name="isaacgym")
    with pytest.raises(ConfigError, match=r"task=mjlab: expected the whole package 'mjlab', or a Python that has it"):
        make_env("mjlab")


def test_the_plain_records_are_the_librarys(python):
    """Substitutes with the same names and defaults are used if the library cannot be imported."""
    script = (
        "import json, sys; sys.path[0] = sys.argv[1]; import far; sys.path.pop(0); far.mount(sys.argv[2])\n"
        # These run in that Python, too.
        "import pql.envs.adapters.isaacgym, pql.remote.process.shared_cuda\n"
        "from pql.contract import plain\n"
        "print(json.dumps({n: [getattr(plain, n)._fields, {k: str(v) for k, v in getattr(plain, n)._field_defaults"
        ".items()}] for n in ('ObsSpec', 'Box', 'Discrete', 'MultiDiscrete', 'EnvSpec', 'Step')}))"
    )
    asked = [python, "-c", script, str(Path(far.__file__).parent), str(Path(pql.__file__).parent)]
    found = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert found.pop("Step")[0] == list(Step._fields)
    for record in (ObsSpec, Box, Discrete, MultiDiscrete, EnvSpec):
        fields = dataclasses.fields(record)
        names, defaults = found.pop(record.__name__)
        assert names == [f.name for f in fields]
        for f in fields:
            if f.default is not dataclasses.MISSING and f.name != "dtype":
                assert defaults[f.name] == str(f.default)
    assert found == {}


# -- runs -------------------------------------------------------------------------------------------------------------


def task(python, *more):
    return ("task=env", "task.name=far_sims:Walk", f"task.process.python={python}", *more)


def walk_words(folder, python, *more):
    return [w for w in words(folder, *task(python, *more)) if w != "task=pendulum"]


@pytest.mark.fault(14)
def test_a_run_in_another_python_resumes_bit_for_bit_and_is_evaluated(tmp_path, python, capsys):
    own = walk_words(tmp_path, python, "eval.final=true")
    _, tensors, _ = whole_and_resumed(tmp_path, own, 320, 640, trust=True)
    assert "collector/env/keys" in tensors
    assert main(["eval", str(tmp_path / "parts"), "--trust", "episodes=3"]) == 0
    assert "3 episodes" in capsys.readouterr().out


def test_groups_of_processes_conform_and_step_by_turns(python):
    config = small_config(
        num_envs=8,
        placement={"groups": 2},
        task={"name": "far_sims:Walk", "process": {"python": python}, "kwargs": {"limit": 5}},
    )
    env = build_env(config)
    try:
        assert isinstance(env, Grouped)
        assert all(stepper is one for stepper, one in zip(env._steppers, env.envs, strict=True))  # no thread waits
        assert len({one._far.process.pid for one in env.envs}) == 2
        report = check_env(env, 30)
        assert report.ok, report
        assert next(r for r in report.results if r.name == "groups").ok
    finally:
        env.close()


@pytest.mark.parametrize("groups", [None, 2])
def test_memory_is_checked_before_a_simulator_there_is_built(python, groups):
    task = {"name": "far_sims:Foreseen", "process": {"python": python}}
    for capacity, error, message in (
        (10**12, ConfigError, "replay.capacity=1000000000000: expected"),
        (4096, RunError, "building was begun"),
    ):
        config = small_config(num_envs=8, task=task, placement={"groups": groups}, replay={"capacity": capacity})
        with pytest.raises(error, match=message):
            build(config)


def test_the_doctor_visits(python, capsys):
    assert (
        main(["doctor", "--env", "far_sims:Walk", "--num-envs", "4", f"task.process.python={python}", "limit=5"]) == 0
    )
    assert "walk: conforms" in capsys.readouterr().out
    assert main(["doctor", "--env", "far_sims:Walk", f"task.process.python={python}", "limt=5"]) == 2
    reported = "limt=5: expected one of the keywords limit, discrete, fault, at, threads, helper (did you mean limit?)"
    assert reported in capsys.readouterr().err
    hangs = [f"task.process.python={python}", "fault=hang", "task.process.step_seconds=0.5"]
    assert main(["doctor", "--env", "far_sims:Walk", *hangs]) == 1
    assert "has not answered for 0.5 s (task.process.step_seconds)" in capsys.readouterr().err
    wrong = {
        "start_seconds=-1.5": "a number above 0",
        "pyhton=x": "a known setting (did you mean task.process.python?)",
    }
    for word, expected in wrong.items():
        assert main(["doctor", "--env", "far_sims:Walk", f"task.process.{word}"]) == 2
        assert f"task.process.{word}: expected {expected}" in capsys.readouterr().err


PACKAGE = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "drift-sim"
version = "0.1"
[project.entry-points."pql.envs"]
drift = "drift_sim:Drift"
[tool.setuptools]
py-modules = ["drift_sim"]
""",
    "drift_sim.py": """
from pql.envs.toy import Counter

class Drift(Counter):
    pass
""",
}


def test_a_package_of_somebody_elses_trains_here_and_in_a_process(tmp_path, monkeypatch, capsys):
    """Installed from a folder, registered by its entry point: nothing here knows of it. The policies are the same,
    bit for bit."""
    for name, text in PACKAGE.items():
        (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    site = tmp_path / "site"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", site]
    subprocess.run([sys.executable, "-m", "pip", *install, tmp_path / "source"], check=True, timeout=120)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    common = ["task=env", "task.name=drift", "task.kwargs.episode_length=10", "eval.final=true"]
    for folder, more in (("here", []), ("there", [f"task.process.python={sys.executable}"])):
        assert main(["train", *(w for w in words(tmp_path / folder, *common, *more) if w != "task=pendulum")]) == 0
    capsys.readouterr()
    a, b = (checkpoint.load(tmp_path / folder / "checkpoints" / "last")[0] for folder in ("here", "there"))
    assert differences(a, b) == []
    assert main(["list", "tasks"]) == 0
    assert "task=env task.name=drift\n" in capsys.readouterr().out


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("fault", "last", "within"),
    [
        ("raise", r"ZeroDivisionError: the simulator fell over$", "in fail"),
        ("abort", r"was ended by SIGABRT$", "in fail"),
        ("orphan", r"was ended by SIGABRT$", "in fail"),  # a process that it forked holds the pipe open
        ("exit", r"ended with status 3; its output above may have the reason$", ""),
        ("hang", r"has not answered for 0.5 s \(task.process.step_seconds\)$", "in fail"),
    ],
)
def test_a_fault_there_is_an_error_here(walk, fault, last, within):
    """At once, with the place in the simulator's code, the cause in the last line, and no process left."""
    env = walk(fault=fault, at=3, seconds=0.5 if fault == "hang" else 20.0)
    env.reset(0)
    for _ in range(2):
        env.step(torch.zeros(6, 2))
    start = time.monotonic()
    with pytest.raises(RunError, match=last) as caught:
        env.step(torch.zeros(6, 2))
    assert time.monotonic() - start < 10
    assert within in str(caught.value)
    assert gone(env._far.process.pid)
    with pytest.raises(RunError, match="is closed"):
        env.reset(0)


@pytest.mark.fault(10)
def test_a_script_may_start_the_interpreter(tmp_path, python):
    """As Isaac Sim's python.sh does: what hangs is then a child of the child, and ends as well."""
    script = tmp_path / "python.sh"
    script.write_text(f'#!/bin/sh\n{python} "$@"\nexit $?\n')
    script.chmod(0o755)
    env = ProcessVec("far_sims:Walk", 2, python=str(script), kwargs={"fault": "hang", "at": 1}, start_seconds=10.0)
    pid = env.spec.info["pid"]
    assert pid != env._far.process.pid
    env._patience = (0.5, "step_seconds")  # else the first step has as long as starting
    with pytest.raises(RunError, match=r"in fail\n(.*\n)*.*has not answered for 0.5 s"):
        env.step(torch.zeros(2, 2))
    assert gone(pid)


@pytest.mark.fault(5)
def test_a_run_ends_with_the_simulators_traceback(tmp_path, python, capsys):
    made = walk_words(tmp_path / "run", python, "task.kwargs.fault=raise", "task.kwargs.at=15")
    assert main(["train", *made]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert (
        said[-1] == "pql: worker collector failed: ZeroDivisionError: the simulator fell over; nothing had been saved"
    )
    assert any("far_sims.py" in line for line in said)


@pytest.mark.fault(5)
def test_a_cause_of_several_lines_stays_the_last_one(python):
    env = ProcessVec("far_sims:Walk", 2, python=python, kwargs={"fault": "lines", "at": 1})
    with pytest.raises(RunError) as caught:
        env.step(torch.zeros(2, 2))
    why = "ZeroDivisionError: the simulator fell over"
    assert str(caught.value).splitlines()[-3:] == [why, "and broke", why]


def members(group):
    """Return the processes of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.fault(10, count=7)
@pytest.mark.parametrize("forked", [False, True], ids=["", "forked"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"helper": True}, {"fault": "hang"}, {"fault": "hold", "helper": True}],
    ids=["idle", "helper", "hang", "lock"],
)
def test_a_killed_parent_leaves_no_process_and_no_shared_memory(python, kwargs, forked, trial):
    """Idle, with a process that the simulator has forked, in a step, and if a fork of the parent lives on."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(read)
        env = ProcessVec("far_sims:Walk", 4, python=python, kwargs={"at": 1, **kwargs})
        other = os.fork() if forked else None
        if other != 0:
            os.write(write, f"{env._far.process.pid} {other or 0}".encode())
            if "fault" in kwargs:
                env.step(torch.zeros(4, 2))
        time.sleep(600)
    os.close(write)
    child, other = map(int, os.read(read, 40).split())
    os.close(read)
    maps = Path(f"/proc/{child}/maps").read_text()
    assert "/memfd:" in maps  # shared memory without a name: it is freed with the last process
    assert "/dev/shm/" not in maps
    time.sleep(0.02 * (trial % 11))
    os.kill(parent, signal.SIGKILL)  # it is not waited for: a job's parent may be slow
    deadline = time.monotonic() + 5
    while members(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = members(child)
    for pid in (*left, *[other] * forked):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert left == []


def test_closing_ends_the_process_whatever_the_simulator_says(walk):
    for env in (walk(), walk(fault="at close")):
        env.close()
        env.close()
        assert gone(env._far.process.pid)


def test_one_that_nobody_holds_is_ended(python):
    env = ProcessVec("far_sims:Walk", 2, python=python)
    pid = env._far.process.pid
    del env
    assert gone(pid)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("wlak", {}, r"task=wlak: expected one of .*ant.*; looked for in .*python"),
        ("counterr", {}, r"did you mean counter\?"),
        ("far_sims:Wlak", {}, r"task=far_sims:Wlak: expected module:attribute .*Wlak.*; looked for in .*python"),
        ("nowhere:Walk", {}, r"task=nowhere:Walk: expected .*No module named 'nowhere'.*; looked for in .*python"),
        ("far_sims:Walk", {"limt": 3}, r"limt=3: expected one of the keywords limit, discrete.*mean limit\?"),
        ("far_sims:Walk", {"discrete": None}, r"discrete=null: expected true or false"),
        ("far_sims:Walk", {"limit": 0}, r"limit=0: expected at least 1"),
        ("pendulum", {}, r"task=pendulum: expected packages that .* has: No module named 'torch'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(walk, name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        walk(name=name, **kwargs)


def test_other_failures_to_start(walk, python):
    with pytest.raises(RunError, match=r"in broken\n(.*\n)+KeyError: 'no licence'$"):
        walk(name="far_sims:broken")
    with pytest.raises(ConfigError, match=r"task\.process\.python=/no/python: expected a Python interpreter"):
        ProcessVec("far_sims:Walk", python="/no/python")
    with pytest.raises(RunError, match="ended with status 0; its output above may have the reason"):
        ProcessVec("far_sims:Walk", python="/bin/true")
    with pytest.raises(RunError, match=r"has not answered for 2 s \(task\.process\.start_seconds\)$"):
        ProcessVec("far_sims:endless", 2, python=python, start_seconds=2.0)


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("reward", r"reward has shape \[6, 1\], expected \[6\]"),
        ("valid", r"valid has shape \[6, 1\], expected \[6\]"),
        ("list", "terminated is a list, not an array"),
        ("log", r"log has keys \['push'\], spec.log says \['push', 'success'\]"),
        ("image", r"obs\[image\] is float64, expected uint8"),  # it would be cut to zeros
        ("missing", r"obs has groups \['policy'\], expected \['critic', 'image', 'policy'\]"),
        ("tuple", "it is a tuple, not a pql.Step"),
    ],
)
def test_an_answer_that_is_not_as_the_specification_says(walk, slip, words):
    env = walk(name="far_sims:Misshapen", slip=slip)
    env.reset(0)
    said = rf"task=walk: expected step\(\) to return what its spec says, but {words}: pql doctor --env NAME tests it$"
    with pytest.raises(ConfigError, match=said):
        env.step(torch.zeros(6, 2))
    env = walk(name="far_sims:Misshapen", slip="reset")
    with pytest.raises(
        ConfigError, match=r"expected reset\(\) to .* obs\[policy\] has shape \[6, 4\], expected \[6, 2\]:"
    ):
        env.reset(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["task.process.step_seconds=0"], r"task\.process\.step_seconds=0.*a number above 0"),
        (["task.live=true", "task.process.python=python"], r"task\.process\.python=python: expected null"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        compose(["task=env", "task.name=walk", *change])


def test_trees_of_arrays_and_numbers_survive():
    tree = {"a": [torch.arange(3), 2.5, None, True], "b": {"c": torch.zeros(2, 0), "d": "x", "e": torch.tensor(7)}}
    for as_tensors in (True, False):
        found = far.unpack_tree(*far.pack_tree(tree), as_tensors)
        assert found["a"][0].tolist() == [0, 1, 2]
        assert found["a"][1:] == tree["a"][1:]
        assert found["b"]["c"].shape == (2, 0)
        assert found["b"]["d"] == "x"
        assert (found["b"]["e"].shape, int(found["b"]["e"])) == ((), 7)
    with pytest.raises(TypeError, match="a Random cannot be saved"):
        far.pack_tree({"gen": random.Random()})
