"""Rows of the fault matrix whose fault needs a CUDA device: NaN inside a captured graph, device asserts, its memory.

The rank that is killed while it uses NCCL is in ``tests/run/test_ranks.py``.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import HERE_TOO, differences, small_config, start, ticks
from races import Races, Watched
from races import main as sanitized
from run_files import points, resume, run, words

from pql.algos import critics
from pql.config.compose import compose
from pql.contract.registry import register
from pql.envs.toy import Counter
from pql.errors import ConfigError, RunError
from pql.run.session import Session
from pql.run.store import checkpoint

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA_WORDS = ("device=cuda", "graphs=on")


def on_gpu(test):
    for mark in ON_GPU:
        test = mark(test)
    return test


# -- row 4 ----------------------------------------------------------------------------------------------------------


@HERE_TOO
@pytest.mark.fault(4)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_inside_a_captured_graph_is_no_step(machine, monkeypatch, bad):
    """The loss is multiplied by a tensor that the graph reads, so that the replayed kernels see the fault."""
    device = "cuda" if machine == "cuda" else "cpu"
    factor, loss_of = torch.ones((), device=device), critics.scalar_loss

    def loss(*args):
        loss, q = loss_of(*args)
        return loss * factor, q

    monkeypatch.setattr(critics, "scalar_loss", loss)
    parts = start(small_config(device=device, graphs="on", placement={"executor": "auto"}))
    worker, job = parts.workers["v"], parts.jobs["v"]
    assert job.graph.graph is not None

    def weights():
        with parts.schedule.executor.exclusive():
            state = checkpoint.flatten(parts.learners["v"].state.state_dict())
        own = {k: v for k, v in state.items() if not k.startswith("target/")}  # which follows the unchanged critic
        return {k: v.detach().cpu().clone() for k, v in own.items() if v.is_floating_point()}

    try:
        worker.run(1)
        job.metrics.drain()
        before = weights()
        factor.fill_(bad)
        worker.run(1)
        assert differences(before, weights()) == []
        assert float(job.metrics.drain()["skipped/v"]) == 1.0
        factor.fill_(1.0)
        worker.run(1)
        assert "critic/net.0.weight" in differences(before, weights())
        assert float(job.metrics.drain()["skipped/v"]) == 0.0
    finally:
        parts.schedule.executor.close()


# -- row 5 ----------------------------------------------------------------------------------------------------------

ASSERTS = """
import sys, time
from pathlib import Path
import pytest
import torch
from pql import register
from pql.cli.main import main
from pql.envs.toy import Counter
from run_files import points
from stand_in import pretend

machine, mark, run_dir = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

class Asserts(Counter):
    capturable = False  # a captured step would not run this code again
    steps = 0
    def step(self, action):
        self.steps += 1
        if self.steps == 60 and not mark.exists():
            end = time.monotonic() + 20
            while not points(run_dir) and time.monotonic() < end:
                time.sleep(0.01)
            mark.touch()
            if machine == "stand-in":
                raise RuntimeError("CUDA error: device-side assert triggered")
            torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]
        return super().step(action)

if machine == "stand-in":
    pretend(pytest.MonkeyPatch())
register("asserts", lambda num_envs, device: Asserts(num_envs, device))
sys.argv = ["pql", *sys.argv[4:]]
sys.exit(main())
"""


@HERE_TOO
@pytest.mark.fault(5)
def test_a_device_assert_ends_the_run_within_ten_seconds_with_its_cause(machine, tmp_path):
    folder, mark = tmp_path / "run", tmp_path / "mark"
    device = "device=cuda" if machine == "cuda" else "device=cpu"
    own = words(folder, device, "graphs=on", "task=env", "task.name=asserts", "budget.env_steps=32000")
    command = [sys.executable, "-c", ASSERTS, machine, str(mark), str(folder)]
    log = tmp_path / "log"
    with log.open("wb") as file:
        saving = ["train", *own, "checkpoint.every_seconds=0.01"]
        process = subprocess.Popen([*command, *saving], stdout=file, stderr=file)
    try:
        end = time.monotonic() + 200
        while not mark.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.01)
        assert process.wait(10) == 1, log.read_text()
    finally:
        process.kill()
        process.wait()
    said = log.read_text().strip().splitlines()
    assert "device-side assert triggered" in "\n".join(said)
    assert re.match(r"pql: .*CUDA error: device-side assert", said[-1])
    assert points(folder)
    again = [*command, "resume", str(folder), "budget.env_steps=3200"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


# -- rows 17 and 18 -------------------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.fault(17)
def test_a_replay_larger_than_the_device_is_refused_with_the_largest_that_fits(tmp_path):
    """This process may use a tenth of the device's memory."""
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        with pytest.raises(
            ConfigError, match=r"at most (\d+) here: this many need [\d.,]+ GiB, [\d.,]+ GiB are free"
        ) as error:
            Session(compose(words(tmp_path / "x", *CUDA_WORDS, "task=counter", f"replay.capacity={10**12}")))
        fits = int(re.search(r"at most (\d+)", str(error.value))[1])
        with pytest.raises(ConfigError, match=f"replay.capacity={fits + 16}: expected at most"):
            Session(compose(words(tmp_path / "x", *CUDA_WORDS, "task=counter", f"replay.capacity={fits + 16}")))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Hungry(Counter):
    """Asks the device for more memory than it has at step 40, once; there is a resume point by then."""

    capturable = False  # a captured step would not run this code again
    fed = False

    def __init__(self, num_envs, device, machine, run_dir):
        super().__init__(num_envs, device)
        self.machine, self.run_dir, self.steps = machine, run_dir, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 40 and not Hungry.fed:
            Hungry.fed = True
            end = time.monotonic() + 20
            while not points(self.run_dir) and time.monotonic() < end:
                time.sleep(0.01)
            if self.machine == "stand-in":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 280.00 GiB.")
            torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
        return super().step(action)


@HERE_TOO
@pytest.mark.fault(18)
def test_the_device_s_memory_that_runs_out_is_named_with_sizes_and_the_checkpoint_is_kept(
    machine, tmp_path, monkeypatch
):
    register("hungry", lambda num_envs, device: Hungry(num_envs, device, machine, tmp_path))
    monkeypatch.setattr(Hungry, "fed", False)
    device = "device=cuda" if machine == "cuda" else "device=cpu"
    own = (device, "graphs=on", "task=env", "task.name=hungry", "checkpoint.every_seconds=0.01")
    with pytest.raises(RunError) as error:
        run(*words(tmp_path, *own, "budget.env_steps=32000"))
    last = str(error.value).splitlines()[-1]
    assert last.startswith("out of memory: ")
    assert re.search(r"GiB used by this process, [\d.]+ GiB free", last)
    kept = int(Path(points(tmp_path)[-1]).name.removeprefix("tick-"))
    assert kept > 0
    steps = 16 * (8 + kept + 4)
    assert resume(tmp_path, f"budget.env_steps={steps}").env_steps == steps


# -- row 27 ---------------------------------------------------------------------------------------------------------

RACED = {
    "pql": {"warmup_steps": 4, "n_step": 3},
    "ppo": {"family": "ppo", "schedule": "lockstep", "horizon": 4, "epochs": 1, "minibatches": 2, "warmup_steps": 4},
}


def raced(rows, count, plant=lambda parts: None, algo="pql"):
    """Races in ``count`` ticks of a run whose ring has 16 rows, on a stand-in for a device."""
    short = {"num_envs": 8, "replay": {"capacity": 128}, "task": {"kwargs": {"max_episode_steps": 5}}}
    learners = ("v", "p") if algo == "pql" else ("learner",)
    parts = start(small_config(**short, algo=RACED[algo]), Watched((*learners, "collector")))
    plant(parts)
    with Races(parts, rows) as races:
        ticks(parts, count)
    return set(races.found)


def program(run_dir, algo, device):
    """Settings of ``python -m races``."""
    own = words(run_dir, f"device={device}", f"algo={algo}", "graphs=off", "budget.env_steps=640")
    if algo == "ppo":
        own = [w for w in own if not w.startswith(("algo.batch_size", "replay."))]
        own += ["algo.horizon=4", "algo.minibatches=2"]
    return own


@on_gpu
@pytest.mark.fault(27)
@pytest.mark.parametrize("algo", RACED)
def test_the_streams_of_a_run_have_no_race_that_cuda_s_sanitizer_finds(tmp_path, algo):
    """Without graphs, whose kernels it does not see; what it says of the replay's rows is judged in ``races.py``."""
    command = [sys.executable, "-m", "races", *program(tmp_path / "run", algo, "cuda")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 races" in done.stdout.splitlines()


@pytest.mark.parametrize("algo", RACED)
def test_a_run_with_checkpoints_has_no_race_either(tmp_path, algo, monkeypatch, capsys):
    """The same program on the stand-in."""
    monkeypatch.setattr("pql.run.build.make_executor", lambda place, devices: Watched(devices))
    short = ["budget.env_steps=256", "checkpoint.every_seconds=0.01", *["replay.capacity=512"] * (algo == "pql")]
    assert sanitized([*program(tmp_path / "run", algo, "cpu"), *short]) == 0
    assert "0 races" in capsys.readouterr().out.splitlines()


@pytest.mark.fault(27)
@pytest.mark.parametrize("algo", RACED)
def test_the_streams_of_a_run_have_no_race_in_any_row(algo):
    assert raced(True, 32 if algo == "pql" else 8, algo=algo) == set()


@pytest.mark.fault(27)
def test_rows_that_are_written_while_they_are_read_are_a_race():
    def draws_what_is_written(parts):
        parts.collector.stores[0].guard = 0

    assert "ring 0 reward: aten::index_select, aten::index_copy_" in raced(True, 20, draws_what_is_written)


@pytest.mark.fault(27)
def test_a_race_on_any_tensor_but_rows_of_the_replay_is_found_as_on_a_device():
    """There, an operation on rows may meet another one: reading and writing rows is all that a ring is for."""

    def after_an_update(work):
        def plant(parts):
            worker = parts.workers["v"]
            job = worker.job
            worker.job = lambda count: (job(count), work(parts.collector))

        return plant

    def acting(collector):
        next(iter(collector.actor.policy.parameters())).detach().add_(0)

    def whole(collector):
        collector.stores[0].reward.add_(0)

    assert raced(False, 20) == set()
    assert raced(False, 3, after_an_update(acting)) == {"another tensor: aten::add_, aten::copy_"}
    assert raced(False, 3, after_an_update(whole)) == {"ring 0 reward: aten::add_, aten::index_fill_"}
