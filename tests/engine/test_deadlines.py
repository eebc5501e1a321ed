"""Deadlines: every wait of the package has one, and waits between threads end with the other thread."""

import ast
import functools
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pql
from pql.cli import jobs
from pql.config import PlacementConfig
from pql.contract.grouped import Stepper
from pql.data import tensorfile
from pql.engine import deadlines, interrupt, watchdog
from pql.engine.deadlines import Limit, answer_of, idle_get, start_limit, step_limit
from pql.engine.executors import Streams, Threads
from pql.engine.interrupt import Interrupt
from pql.errors import HungError, RunError
from pql.remote.process.child import ChildProcess
from pql.remote.slot_table import FLYING, READY, SlotTable
from pql.reports import watch
from pql.run.log.film import Filmer
from pql.run.log.loggers import TensorBoard
from pql.run.store.saver import Saver

# -- the source: waits without a deadline ----------------------------------------------------------------------------

PLAIN = ("get", "join", "wait", "recv", "acquire", "result", "communicate")  # wait for ever if they get no argument
ALWAYS = ("readline", "readlines", "synchronize")  # take no timeout
PEERS = {  # objects -> functions that wait for another process, whatever they get
    ("sock", "socket"): ("recv", "recv_into", "recvfrom", "accept"),
    ("context",): ("read", "write"),  # of a gRPC stream
    ("store", "_store"): ("get", "set", "check", "wait"),
    ("dist",): ("barrier", "monitored_barrier"),
    ("os",): ("waitpid", "wait", "waitid"),
}
STREAMS = ("stream", "stdout", "stderr", "stdin", "pipe", "connection", "sock", "socket", "call")  # iterated: endless
GIVEN = {  # module or object -> functions that wait for ever without the keyword ``timeout``, whatever else they get
    "subprocess": ("run", "call", "check_call", "check_output"),
    "request": ("urlopen",),
    "socket": ("create_connection",),
    "futures": ("wait", "as_completed"),
    "asyncio": ("wait", "wait_for"),
    "ray": ("get", "wait"),
}
STEP = "a simulator's step: its caller's deadline applies (watching)"
DEVICE = "work on the device: its caller's deadline applies (watching, Streams)"
ALLOWED = {
    "contract/conformance.py:groups": STEP,
    "contract/grouped.py:step": STEP,
    "contract/grouped.py:recv": STEP + "; Stepper.result checks that the thread lives",
    "contract/last_action.py:_recv": STEP,
    "collect/env_slice.py:receive": STEP,
    "envs/atari.py:step": STEP,
    "envs/atari_core.py:receive": STEP,
    "remote/process/near.py:step": "ProcessVec.result, which has the deadline of a step",
    "remote/process/far.py:guard_group": "a child that only forks once more; the start has a deadline",
    "engine/tape.py:run_again": "a collective: its group has a deadline",
    "engine/central.py:of": "another replica's turn: that replica has a deadline, and its failure calls halt()",
    "remote/server.py:_converse": "an actor's next order: the run may be busy; the end of the stream cancels it",
    "remote/actor/client.py:_connect": "gRPC's thread, which reads the outbox until the None that ends the stream",
    "remote/actor/client.py:read_all": "a thread that reads a stream, which _connect cancels",
    "run/driven.py:_next": "a run: its workers have deadlines, and its thread answers when it ends",
    "cli/profile.py:finish": DEVICE,
    "engine/graph.py:take": DEVICE,
    "engine/graph.py:finish": DEVICE,
    "envs/mujoco/warp.py:_unchanged": DEVICE,
    "envs/mujoco/warp.py:close": DEVICE,
    "envs/stage.py:__call__": DEVICE,
    "remote/assembler.py:step": DEVICE,
    "remote/process/shared_cuda.py:wait": DEVICE + "; the other process has that of ProcessVec.result",
    "run/flight_recorder.py:dump": DEVICE,
    "run/log/sinks.py:collect": DEVICE,
    "run/log/sinks.py:_trim": "lines of a file on the disk",
    "run/ranks.py:exchange": "the rank that hosts the store; its caller waits for LAST_MESSAGE",
    "run/replicas.py:on_streams": DEVICE,
    "run/store/saver.py:write": DEVICE,
    "engine/cpu_graph.py:_tensor": "a type of PyTorch's, no wait",
}
"""``file:function`` below ``pql/`` -> the reason why the wait needs no deadline of its own."""


def receiver(node: ast.expr) -> str:
    """Return the last name of the object whose method is called: ``self._poll`` -> ``_poll``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def absent(timeout: ast.expr | None) -> bool:
    """Return True for no timeout, None, and a negative number."""
    return timeout is None or ast.unparse(timeout) == "None" or ast.unparse(timeout)[0] == "-"


def waits(call: ast.AST) -> bool:
    """Return True for a call or a loop that waits and has no deadline, judged by its name and its arguments."""
    if isinstance(call, ast.For | ast.AsyncFor | ast.comprehension):  # for message in stream
        return receiver(call.iter) in STREAMS
    assert isinstance(call, ast.Call)
    if isinstance(call.func, ast.Name):  # iter(outbox.get, None), next(stream)
        first = call.args[0] if call.args else ast.Constant(None)
        if call.func.id == "next":
            return receiver(first) in STREAMS
        return call.func.id == "iter" and len(call.args) == 2 and receiver(first) in PLAIN
    if not isinstance(call.func, ast.Attribute):
        return False
    name, of = call.func.attr, receiver(call.func.value)
    keywords = {k.arg: k.value for k in call.keywords}
    if name in ALWAYS:
        return True
    if name in ("flock", "lockf"):
        return "LOCK_NB" not in ast.unparse(call)
    if any(of in objects and name in functions for objects, functions in PEERS.items()):
        return "WNOHANG" not in ast.unparse(call)
    if name in GIVEN.get(of, ()) and not (of == "asyncio" and name == "wait_for"):
        return absent(keywords.get("timeout"))
    if of == "select" and name == "select":
        return absent(dict(enumerate(call.args)).get(3))
    if name == "poll":
        return "poll" in of and absent(dict(enumerate(call.args)).get(0))
    if name == "wait_for":
        return absent(keywords.get("timeout", dict(enumerate(call.args)).get(1)))
    given = [*call.args, *keywords.values()]
    endless = all(absent(v) or (isinstance(v, ast.Constant) and v.value is True) for v in given)
    return name in PLAIN and endless


LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)


@functools.cache
def calls(source: str) -> list[tuple[str, ast.AST]]:
    """Return (function, node) of every call and every loop in a module."""
    found: list[tuple[str, ast.AST]] = []
    left: list[tuple[str, ast.AST]] = [("module", ast.parse(source))]
    while left:
        where, node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = node.name
        elif isinstance(node, ast.AsyncWith) and "asyncio.timeout(" in ast.unparse(node.items[0]):
            continue  # everything in it ends in time
        elif isinstance(node, (ast.Call, *LOOPS)):
            found.append((where, node))
        left += [(where, child) for child in ast.iter_child_nodes(node)]
    return found


def endless(source: str, name: str) -> list[tuple[str, str]]:
    """Return (file:function, call) of every wait without a deadline in a module."""
    found = [(where, node.iter if isinstance(node, LOOPS) else node) for where, node in calls(source) if waits(node)]
    return [(f"{name}:{where}", ast.unparse(node)) for where, node in found]


@functools.cache
def modules() -> list[tuple[str, str]]:
    root = Path(pql.__file__).parent
    return [(path.relative_to(root).as_posix(), path.read_text()) for path in sorted(root.rglob("*.py"))]


def test_every_wait_has_a_deadline():
    found = [one for name, source in modules() for one in endless(source, name)]
    assert [f"{where}: {call}" for where, call in found if where not in ALLOWED] == []
    assert {*ALLOWED} - {where for where, _ in found} == set()  # an exception that nothing needs is none


PLANTED = (  # for each rule
    "self.inbox.get()",
    "process.wait(timeout=None)",
    "lock.acquire(True)",
    "lock.acquire(timeout=-1)",
    "select.select(a, b, c, None)",
    "self._poll.poll()",
    "changed.wait_for(ready)",
    "subprocess.run(command, check=True)",
    "server.socket.accept()",
    "await context.read()",
    "os.waitpid(pid, 0)",
    "asyncio.wait_for(future, None)",
    "iter(outbox.get, None)",
    "next(self.stream, None)",
    "process.stdout.readline()",
    "fcntl.flock(file, fcntl.LOCK_EX)",
    "[m for m in self.stream]",
    "[m async for m in stream]",
)
BOUNDED = (
    "settings.get('name')",
    "thread.join(timeout=deadlines.WORKER)",
    "os.waitpid(pid, os.WNOHANG)",
    "asyncio.wait_for(future, 1)",
    "async def f():\n    async with asyncio.timeout(1):\n        await context.read()",
    "process.poll()",
    "self._poll.poll(1000)",
    "changed.wait_for(ready, 1.0)",
    "ray.get(reference, timeout=1)",
    "iter(words)",
    "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "next(one for one in found)",
)


@pytest.mark.parametrize("line", [*PLANTED, *BOUNDED])
def test_a_planted_wait_is_found_and_one_with_a_deadline_is_not(line):
    source = line if line in BOUNDED else f"async def work():\n    x = [{line}]\n"
    assert [where for where, _ in endless(source, "run/new.py")] == ["run/new.py:work"] * (line in PLANTED)


def numbers(source: str) -> list[str]:
    """Return the waits whose deadline is a number instead of a row of the table."""
    found = []
    for _, call in calls(source):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("join", "wait", "result", "communicate", "run"):
            given = [*call.args, *(k.value for k in call.keywords if k.arg == "timeout")]
            if any(isinstance(v, ast.Constant) and type(v.value) in (int, float) and v.value > 0 for v in given):
                found.append(ast.unparse(call))
    return found


def test_deadlines_are_in_the_table():
    """Except those of simulators, which import the contract alone, and the console's clock."""
    found = {name: numbers(source) for name, source in modules() if not name.startswith("envs/")}
    assert {name: lines for name, lines in found.items() if lines} == {"run/log/console.py": ["self._closed.wait(1.0)"]}
    assert numbers("thread.join(timeout=2.0)") == ["thread.join(timeout=2.0)"]


def test_every_row_is_used():
    rows = [name for name, value in vars(deadlines).items() if name.isupper() and isinstance(value, float)]
    used = "".join(source for name, source in modules() if name != "engine/deadlines.py")
    own = Path(deadlines.__file__).read_text()
    assert [row for row in rows if f"deadlines.{row}" not in used and f"timeout={row}" not in own] == []
    assert len(rows) > 25
    assert all(getattr(deadlines, row) > 0 for row in rows)


def test_settings_of_deadlines():
    place = PlacementConfig(watchdog_seconds=2.0, start_seconds=7.0)
    assert step_limit(place) == Limit(2.0, "placement.watchdog_seconds")
    assert start_limit(place) == Limit(7.0, "placement.start_seconds")
    larger = PlacementConfig(watchdog_seconds=9.0, start_seconds=7.0)
    assert start_limit(larger) == Limit(9.0, "placement.watchdog_seconds")


# -- waits between threads --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(deadlines, "LOOK", 0.02)
    monkeypatch.setattr(deadlines, "IDLE", 0.02)


@pytest.fixture
def ended():
    """A thread that has ended."""
    thread = threading.Thread(target=int, name="pql-ended")
    thread.start()
    thread.join(30)
    return thread


def test_an_idle_worker_takes_its_orders_and_ends_with_those_who_give_them(ended, monkeypatch):
    monkeypatch.setattr(deadlines, "IDLE", 0.02)
    inbox: queue.SimpleQueue[int] = queue.SimpleQueue()
    for main, owner in ((threading.main_thread(), ended), (ended, threading.current_thread())):
        monkeypatch.setattr(threading, "main_thread", lambda main=main: main)
        late = threading.Timer(0.1, inbox.put, [4])
        late.start()
        assert idle_get(inbox, owner) == 4
    inbox.put(3)
    assert idle_get(inbox, ended) == 3
    assert idle_get(inbox, ended) is None


WITHOUT_MAIN = """
import threading, time
from pql.contract.grouped import Stepper
from pql.engine import deadlines
from pql.engine.executors import Threads
from pql.run.store.saver import Saver

deadlines.IDLE = 0.02

def work():
    workers, saver, stepper = Threads(["a"]), Saver(), Stepper(lambda action: action, "stepper")
    saver.do("first", int)
    saver.flush()
    threading.main_thread().join(60)
    time.sleep(0.2)
    workers.run({"a": lambda: None})
    saver.do("second", int)
    saver.flush()
    stepper.start(3)
    print("worked", stepper.result(), flush=True)

threading.Thread(target=work).start()
"""


def test_workers_live_on_in_a_users_thread_after_the_main_thread():
    """As in a program whose main thread has started everything and is done."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_MAIN], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("worked 3\n", 0), done.stderr


def test_an_answer_that_cannot_come_is_an_error(ended):
    outbox: queue.SimpleQueue[int] = queue.SimpleQueue()
    outbox.put(5)
    assert answer_of(ended, outbox) == 5
    with pytest.raises(RunError, match=r"^the thread pql-ended has ended without an answer$"):
        answer_of(ended, outbox)
    with pytest.raises(HungError, match=r"^late$"):
        answer_of(threading.main_thread(), outbox, lambda: HungError("late"))


def test_a_simulator_s_thread_that_has_ended_is_an_error_of_the_step():
    stepper = Stepper(lambda action: None, "pql-step")
    stepper.close()
    with pytest.raises(RunError, match=r"^the thread pql-step has ended without an answer$"):
        stepper.result()


class Disk:
    """A disk that hangs while a checkpoint is written."""

    def __init__(self, monkeypatch):
        self.back = threading.Event()
        self.real = tensorfile.write
        monkeypatch.setattr(tensorfile, "write", self.write)

    def write(self, path, tensors):
        self.back.wait(30)
        return self.real(path, tensors)


def test_a_disk_that_hangs_is_named_and_does_not_hold_the_run(tmp_path, monkeypatch):
    disk, saver = Disk(monkeypatch), Saver(Limit(0.1, "placement.start_seconds"))
    saver.later(tmp_path / "tick-7", {"a": torch.zeros(3)}, {})
    for wait in (saver.flush, lambda: saver.outcomes(wait=True)):
        with pytest.raises(HungError) as caught:
            wait()
        last = str(caught.value).splitlines()[-1]
        assert last == "writing tick-7 has made no progress for 0.1 s (placement.start_seconds)"
        assert "--- pql-saver\n" in str(caught.value)
    saver.close(0.01)
    disk.back.set()
    assert saver._thread is not None
    saver._thread.join(30)
    assert (tmp_path / "tick-7").is_dir()


def test_a_slow_disk_that_makes_progress_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE", 4)
    touched = []
    monkeypatch.setattr(tensorfile, "touch", lambda: touched.append(1))
    tensorfile.write(tmp_path / "x", {"a": torch.zeros(8)})
    assert len(touched) == 1 + 8  # the header, and each piece


def test_a_video_that_cannot_be_converted_does_not_hold_the_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(deadlines, "GIF", 0.05)
    release = threading.Event()
    monkeypatch.setattr(TensorBoard, "_log_gif", lambda self, path, step: release.wait(30))
    board = TensorBoard(tmp_path)
    board.video(tmp_path / "x.mp4", 1)
    with pytest.warns(match=r"TensorBoard lacks a video: not converted within 0\.05 s"):
        board.close()
    release.set()
    board.converting[0].join(30)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def stepping(tmp_path, monkeypatch):
    """Grouped's wait for a simulator that hangs."""
    release = threading.Event()
    stepper = Stepper(lambda action: release.wait(60), "pql-step")
    stepper.start(torch.zeros(1))
    return stepper.result, release.set


def saving(tmp_path, monkeypatch):
    disk, saver = Disk(monkeypatch), Saver()
    saver.later(tmp_path / "tick-7", {"a": torch.zeros(3)}, {})
    return saver.flush, disk.back.set


def ticking(tmp_path, monkeypatch):
    release, executor = threading.Event(), Threads(("v",), watchdog=60)
    return lambda: executor.run({"v": lambda: release.wait(60) and None}), release.set


def streaming(tmp_path, monkeypatch):
    """A device that never finishes."""
    streams, never = Streams({}, 60), SimpleNamespace(query=lambda: False)
    return lambda: streams._settle({"v": (never, never)}), int


def watching_runs(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    return lambda: watch.watch(tmp_path, 0), int


def filming(tmp_path, monkeypatch):
    filmer = Filmer(tmp_path, "cpu", 1, print)
    filmer.busy = True
    return lambda: filmer.wait(lambda: False, 60), filmer.close


def awaiting_a_run(tmp_path, monkeypatch):
    child = subprocess.Popen(["sleep", "60"])
    return lambda: jobs._wait(child, None, 0.5), child.kill


def awaiting_a_simulator_s_process(tmp_path, monkeypatch):
    """A program that is no simulator, and never answers."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    far = ChildProcess(str(program))
    return lambda: far.ask("build", 60), far.kill


def awaiting_actors(tmp_path, monkeypatch):
    table = SlotTable(2)
    return lambda: table.take_all(60), int


def awaiting_an_actor_of_a_group(tmp_path, monkeypatch):
    """``take`` returns after half a second, and is called again."""
    table = SlotTable(2)
    return lambda: [table.take(0) for _ in range(120)], int


WAITS = [
    *(stepping, saving, ticking, streaming, watching_runs, filming, awaiting_a_run),
    *(awaiting_a_simulator_s_process, awaiting_actors, awaiting_an_actor_of_a_group),
]


@pytest.mark.fault(8, 30)
@pytest.mark.parametrize("make", WAITS, ids=lambda make: make.__name__)
def test_ctrl_c_ends_a_wait_of_the_main_thread_at_once(make, tmp_path, monkeypatch, ctrl_c):
    """Every wait would take a minute."""
    wait, tidy = make(tmp_path, monkeypatch)
    pressed = []

    def press():
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(0.1, press)
    timer.start()
    try:
        with watchdog.guarded(), pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        tidy()
    assert time.monotonic() - pressed[0] < 10  # 2 s, and what a busy machine adds


@pytest.mark.fault(8)
def test_ctrl_c_ends_the_wait_for_answers_of_a_group_with_those_that_are_there(monkeypatch):
    """Where answers wait for all of their group (``wait=null``)."""
    table = SlotTable(2)
    table.status[:] = [READY, FLYING]
    monkeypatch.setattr(table, "_collect", lambda part: ["one"])
    with Interrupt() as one:
        one.asked = True
        assert table.take(0) == ["one"]


STUCK = """
import ctypes, os, sys, threading, time
from pql.engine import deadlines, watchdog
from pql.engine.interrupt import Interrupt
deadlines.LOOK = 0.05
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
with Interrupt() as interrupt, watchdog.Watchdog(interrupt):
    if sys.argv[1] == "released":
        interrupt.release()
    threading.Timer(0.2, print, ["stuck"], {"flush": True}).start()
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.fault(8, 30)
@pytest.mark.parametrize("signals", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"), ("SIGINT", "SIGINT", "released")])
def test_the_second_ctrl_c_ends_a_process_whose_main_thread_is_inside_native_code(signals):
    """As in a collective, for another rank that hangs: Python's handlers do not run there."""
    first, second, *released = signals
    command = [sys.executable, "-c", STUCK, *(released or ["asks"])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(getattr(signal, first))
        time.sleep(0.4)
        assert process.poll() is None  # the first one could still save
        began = time.monotonic()
        process.send_signal(getattr(signal, second))
        assert process.wait(30) == 130
        assert time.monotonic() - began < 10  # 2 s, and what a busy machine adds
    finally:
        process.kill()
        process.communicate()


def test_one_ctrl_c_that_is_handled_is_no_second_one(monkeypatch):
    left = []
    monkeypatch.setattr(interrupt, "leave", lambda: left.append(1))
    before = signal.set_wakeup_fd(-1)
    with Interrupt() as one:
        signal.raise_signal(signal.SIGINT)
        for _ in range(3):
            one.leave_if_stuck()
        assert (one.asked, left) == (True, [])
        one._handled.clear()  # as if it had come inside native code
        one.leave_if_stuck()
        assert left == []
        one.leave_if_stuck()
        assert left == [1]
    one.leave_if_stuck()
    assert signal.set_wakeup_fd(-1) == before
