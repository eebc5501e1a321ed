"""Background checkpoints: consistent copies, written in sequence, bounded memory, killed at any time."""

import gc
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from conftest import differences
from fault_rows import STAGES
from run_files import manifest, points, resume, run, words

from pql.config.compose import compose
from pql.data import tensorfile
from pql.errors import PqlWarning, RunError
from pql.run.session import Session
from pql.run.store import checkpoint, saver
from pql.run.store.saver import Saver


def tree(value: float) -> dict:
    return {"a": torch.full((3,), value), "b": [torch.full((2, 2), value).t(), 7]}


def value_at(path) -> float:
    tensors, _ = checkpoint.load(path)
    (value,) = {float(v) for k in ("a", "b/0") for v in tensors[k].flatten()}
    return value


class Gate:
    """Writing waits until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self.opened, self.writers = threading.Event(), threading.Event(), []
        self.real = tensorfile.write
        monkeypatch.setattr(tensorfile, "write", self.write)

    def write(self, path, tensors):
        self.writers.append(threading.current_thread().name)
        self.reached.set()
        assert self.opened.wait(30)
        return self.real(path, tensors)


@pytest.fixture
def one():
    it = Saver()
    yield it
    it.close()


def test_what_is_written_is_what_stood_there_when_it_was_asked_for(tmp_path, monkeypatch, one):
    gate, state = Gate(monkeypatch), tree(1.0)
    one.later(tmp_path / "x", state, {})
    assert gate.reached.wait(30)
    assert not one.idle
    assert one.outcomes() == []
    for tensor in (state["a"], state["b"][0]):
        tensor.fill_(2.0)
    gate.opened.set()
    assert one.outcomes(wait=True) == [("x", None)]
    assert one.idle
    assert value_at(tmp_path / "x") == 1.0
    assert gate.writers == ["pql-saver"]


def test_one_comes_after_the_other_and_all_are_told(tmp_path, one):
    (tmp_path / "file").write_text("")
    for i in range(5):
        one.later(tmp_path / "last", tree(float(i)), {"ticks": i})
    one.later(tmp_path / "file" / "x", tree(0.0), {})
    one.now(tmp_path / "now", tree(9.0), {})
    told = one.outcomes(wait=True)
    assert [name for name, _ in told] == ["last"] * 5 + ["x", "now"]
    assert [type(error) for _, error in told[:5] + told[6:]] == [type(None)] * 6
    assert isinstance(told[5][1], OSError)
    assert (value_at(tmp_path / "last"), value_at(tmp_path / "now")) == (4.0, 9.0)


@pytest.mark.parametrize("why", ["free memory", "an allocation"])
def test_where_a_copy_would_not_fit_it_is_written_at_once(tmp_path, monkeypatch, one, why):
    gate = Gate(monkeypatch)
    gate.opened.set()
    if why == "free memory":
        monkeypatch.setattr(saver, "host_memory", lambda: 71)  # 36 bytes are more than half
    else:
        monkeypatch.setattr(torch.Tensor, "clone", lambda self, **_: torch.empty(1 << 60))
    one.later(tmp_path / "x", tree(1.0), {})
    assert gate.writers == [threading.current_thread().name]
    assert one.outcomes() == [("x", None)]
    assert value_at(tmp_path / "x") == 1.0


def test_what_the_disk_is_not_to_blame_for_ends_the_run(tmp_path, one):
    one.later(tmp_path / "x", {"a": torch.zeros(2, dtype=torch.complex64)}, {})
    with pytest.raises(RunError, match=r"x could not be written: KeyError: torch\.complex64"):
        one.outcomes(wait=True)
    assert list(tmp_path.iterdir()) == []


def test_closing_waits_no_longer_than_it_says(tmp_path, monkeypatch):
    gate, one = Gate(monkeypatch), Saver()
    one.later(tmp_path / "x", tree(1.0), {})
    begin = time.monotonic()
    one.close(0.05)
    assert time.monotonic() - begin < 5
    gate.opened.set()
    one._thread.join(30)
    assert value_at(tmp_path / "x") == 1.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_stage(stage, rng) -> None:
    """Kill this process at a stage of a save: between any two pieces of a file, in a manifest, at a rename or after."""
    turns = iter(range(rng.randrange(3), -2, -1))  # it is the turn of the call that draws 0
    if stage in ("model", "replay"):
        name = ".writing-last" if stage == "model" else ".writing-tick-000003"
        write, writing = tensorfile.write, []
        tensorfile.PIECE = 4
        tensorfile.touch = lambda: die() if writing[-1].parent.name == name and next(turns) == 0 else None
        tensorfile.write = lambda path, tensors: (writing.append(path), write(path, tensors))[1]
    elif stage == "manifest":
        name, write = rng.choice((".writing-last", ".writing-tick-000003")), checkpoint._write_manifest

        def cut(folder, facts):
            write(folder, facts)
            if folder.name == name:
                file = folder / checkpoint.MANIFEST
                os.truncate(file, rng.randrange(file.stat().st_size))
                die()

        checkpoint._write_manifest = cut
    elif stage == "rename":  # of the policy before, of the new one, and of the resume point
        rename, before = Path.rename, rng.random() < 0.5

        def move(path, target):
            due = next(turns) == 0
            found = None if due and before else rename(path, target)
            return die() if due else found

        Path.rename = move
    else:

        def half(path, remove=shutil.rmtree, **options):
            if path.name.startswith(".removing-"):
                next(path.iterdir()).unlink()
                die()
            remove(path, **options)

        shutil.rmtree = half


def save_once(folder, stage, seed) -> None:
    gc.disable()  # objects inherited from other tests refer to threads that do not exist in the forked process
    at_stage(stage, random.Random(seed))
    checkpoint.save(folder / "last", tree(3.0), {})
    checkpoint.save(folder / "tick-000003", tree(3.0), {"ticks": 3})
    checkpoint.rotate(folder, 2)


@pytest.mark.fault(11, form="{stage}", cases=(1, 50))
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_a_stage_of_a_save_the_newest_point_stands(tmp_path, stage, cases):
    for trial in range(cases):
        folder = tmp_path / str(trial)
        for i in (1, 2):
            checkpoint.save(folder / "last", tree(float(i)), {})
            checkpoint.save(folder / f"tick-{i:06d}", tree(float(i)), {"ticks": i})
        child = multiprocessing.get_context("fork").Process(target=save_once, args=(folder, stage, trial), daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        _, facts, path = checkpoint.newest_checkpoint(folder)
        assert value_at(path) == facts["ticks"] >= 2
        assert value_at(folder / "last") in (2.0, 3.0)
        checkpoint.save(folder / "tick-000004", tree(4.0), {"ticks": 4})
        checkpoint.rotate(folder, 2)
        assert [value_at(path) for path in checkpoint.resume_points(folder)][-1] == 4.0
        assert not list(folder.glob(".writing-*"))


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_ticks_go_on_while_a_point_is_written_and_the_next_one_waits_for_it(tmp_path, monkeypatch):
    session = Session(compose(words(tmp_path)), quiet=True)
    with session.closing:
        gate = Gate(monkeypatch)
        session.save(background=True)
        for _ in range(3):
            session.parts.schedule.tick()
            session.archive.settle(wait=False)
        assert gate.reached.wait(30)
        assert points(tmp_path) == []
        threading.Timer(0.05, gate.opened.set).start()
        session.save(background=True)
        assert gate.opened.is_set()
        assert manifest(points(tmp_path)[0])["counters"]["ticks"] == 0
        session.save()
    assert gate.writers == 4 * ["pql-saver"] + 2 * [threading.current_thread().name]
    assert [manifest(p)["counters"]["ticks"] for p in points(tmp_path)] == [0, 3]


@pytest.mark.fault(14)
@pytest.mark.parametrize("algo", ["pql"])
def test_a_point_that_was_written_while_ticks_went_on_resumes_to_the_same_bits(tmp_path, monkeypatch, algo):
    real = tensorfile.write

    def slow(path, tensors):
        time.sleep(0.01)
        return real(path, tensors)

    common = (f"algo={algo}", "replay.capacity=320", "task.kwargs.max_episode_steps=7", "budget.env_steps=480")
    run(*words(tmp_path / "whole", *common))
    with monkeypatch.context() as patch:
        patch.setattr(tensorfile, "write", slow)
        run(*words(tmp_path / "parts", *common, "checkpoint.every_seconds=0.001", "checkpoint.keep=100"))
    written = points(tmp_path / "parts")
    assert len(written) > 4
    for path in written[len(written) // 2 :]:
        shutil.rmtree(path)  # as if it had been killed there
    resume(tmp_path / "parts", "checkpoint.every_seconds=null")
    (a, facts_a), (b, facts_b) = (checkpoint.load(points(tmp_path / name)[-1]) for name in ("whole", "parts"))
    assert differences(a, b) == []
    assert facts_a["sha256"] == facts_b["sha256"]


@pytest.mark.fault(13)
def test_a_point_that_failed_on_the_way_is_told_at_the_end(tmp_path, monkeypatch):
    """For one resume point the disk is too full; the run continues, and later points are written."""
    real, kept = shutil.disk_usage, []

    def usage(folder):
        if folder.name == ".writing-tick-000000000003":
            kept.extend(value["counters"]["ticks"] for value in map(manifest, points(tmp_path)))
            return shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
        return real(folder)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    sizes = r"No space left on device: 0\.\d MB to write, 0\.0 MB free"
    with (
        pytest.warns(PqlWarning, match=rf"checkpoint tick-0*3 not written, the run continues: .*{sizes}$"),
        pytest.raises(RunError, match=rf"(?m)kept in .*: checkpoint tick-0*3 \(.*{sizes}\)$"),
    ):
        run(*words(tmp_path, "checkpoint.every_seconds=1e-9", "budget.env_steps=208"))
    assert kept[-1] == 2  # intact until the next ones were written
    assert [manifest(p)["counters"]["ticks"] for p in points(tmp_path)] == [4, 5]


def test_there_is_never_more_than_one_copy_of_the_state(tmp_path, monkeypatch):
    """With a disk slower than the interval: the next copy is made when the one before has been written and freed."""
    real, flush, sizes, copies, peaks = saver.copied, Saver.flush, [], [], []

    def alive():
        return sum(t.nbytes for t in (ref() for ref in copies) if t is not None)

    def copied(tensors):
        peaks.append(alive())
        sizes.append(sum(t.nbytes for t in tensors.values()))
        out, events = real(tensors)
        copies.extend(weakref.ref(t) for t in out.values())
        return out, events

    gate = Gate(monkeypatch)

    def flushed(self):  # nothing is written before somebody waits for it
        gate.opened.set()
        flush(self)
        gate.opened.clear()

    monkeypatch.setattr(saver, "copied", copied)
    monkeypatch.setattr(Saver, "flush", flushed)
    session = Session(compose(words(tmp_path)), quiet=True)
    with session.closing:
        for i in range(3):
            session.parts.schedule.tick()
            session.save(background=True)
            assert len(sizes) == 2 * (i + 1)  # a policy and a resume point
        session.archive.settle()
        assert alive() == 0
    policy, point = sizes[:2]
    assert policy < point / 10
    assert peaks == [0, policy, 0, policy, 0, policy]
