"""One run in several processes (ranks): division of the work, and agreement between ranks.

Numbers in a config are totals: each of K ranks has 1/K of the environments, the batch and the replay, so that a config
is the same experiment for any number of ranks. Rank 0 writes the run directory and makes decisions that depend on time;
the others follow at the same tick.
"""

import atexit
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from pql.algos.registry import own_seed
from pql.config import Config, changed, leaves
from pql.config.fields import settings
from pql.config.validate import resolve_device, validate
from pql.data.normalize import Moments
from pql.engine import deadlines
from pql.engine.collectives import ALONE, Group, Order, PeerError, explained
from pql.engine.flat import Flat
from pql.engine.optim import Optimizer
from pql.engine.placement import available_cores, machine_of
from pql.engine.world import World, end_with_parent, world
from pql.errors import ConfigError, HungError, PqlError, RunError, first_line, show
from pql.run.components import Parts
from pql.run.store import checkpoint
from pql.types import bytes_of

ACTIONS = ("log", "save", "eval", "video", "stop", "interrupt")
RANK = timedelta(seconds=deadlines.RANK)
PLACES = ("placement.collector", "placement.v_learner", "placement.p_learner")

T = TypeVar("T")

_store: Any = None  # of this process, which joins once for all its runs
_hosts: Any = None  # group of the hosts; None: the default one
_runs = itertools.count()


# -- a rank's share ---------------------------------------------------------------------------------------------------


def share_of(config: Config, place: World) -> Config:
    """Return one rank's config: its share of every total, its device, threads and seed. Raises ``ConfigError``: a total
    is not divisible, or a setting does not support several processes."""
    if place.size == 1:
        return config
    if config.algo.schedule not in ("lockstep", "concurrent"):
        raise ConfigError("algo.schedule", config.algo.schedule, "lockstep or concurrent with several processes")
    if config.task.by_actors:
        setting, value = ("task.remote", config.task.remote) if config.task.remote else ("task.name", "remote")
        raise ConfigError(
            setting,
            value,
            "a simulator in each process: actors connect to one learner and "
            "determine how often it updates (one process may use several GPUs: placement.*)",
        )
    flat, shared = dict(leaves(config)), [one for one in settings(config) if one.declaration.ranks]
    own: dict[str, Any] = {"seed": own_seed(config.seed, place.rank)}
    for one in shared:
        if one.declaration.ranks == "divide" and one.value % place.size:
            near = f"such as {max(1, round(one.value / place.size)) * place.size}"
            raise ConfigError(one.name, one.value, f"a multiple of {place.size}, the processes that share it, {near}")
    own |= {one.name: max(1, one.value // place.size) for one in shared if one.value is not None}
    own["device"] = own_device("device", config.device, place)
    own |= {name: own_device(name, flat[name], place) for name in PLACES if flat[name] is not None}
    threads = machine_of(config, max(1, available_cores() // place.local_size)).threads
    own |= {f"placement.threads.{k}": threads[k] for k in ("collector", "v", "p", "simulator")}
    kinds = {own["device"].partition(":")[0], *(own[name].partition(":")[0] for name in PLACES if name in own)}
    own["placement.executor"] = own_executor(config, kinds)
    try:
        return validate(changed(config, own))
    except ConfigError as error:
        what = f"{error.allowed} (this is the share of one of {place.size} processes)"
        raise ConfigError(error.setting, error.value, what) from error


def own_device(setting: str, name: str, place: World) -> str:
    """Return the GPU with the local rank's number, or the only visible one."""
    kind = resolve_device(name, setting)
    if kind == "cpu":
        return kind
    count = torch.cuda.device_count()
    index = place.local_rank if count > 1 else 0
    if index >= count:
        raise ConfigError(setting, name, f"cpu, or at most {count} processes: there are {count} GPUs")
    if kind not in ("cuda", f"cuda:{index}"):
        raise ConfigError(setting, name, "cuda: each process takes a GPU of its own")
    return f"cuda:{index}"


def own_executor(config: Config, kinds: Iterable[str]) -> str:
    """Return the executor of a rank: with collectives on a GPU, one host thread must queue all workers. Raises
    ``ConfigError``: threads, on a GPU."""
    chosen, kinds = config.placement.executor, set(kinds)
    if "cuda" not in kinds:
        return chosen
    if chosen == "threads":
        raise ConfigError("placement.executor", chosen, "auto, streams or inline with several processes on GPUs")
    return "inline" if len(kinds) > 1 else chosen


# -- all ranks together -----------------------------------------------------------------------------------------------


class Ranks:
    """The ranks of a run, seen from one of them. With one process all methods are free.

    Communication is between hosts, with gloo: only :meth:`check_same` waits for a GPU.

    Raises:
        ConfigError: the config cannot be divided, or ranks have different configs.
    """

    def __init__(self, config: Config):
        place = world()
        self.rank, self.size = place.rank, place.size
        self.share = share_of(config, place)
        self.groups: dict[str, Group] = {}
        self._name = f"run {next(_runs)}"
        self._waited = False  # for other ranks, when the run ended
        self._flags: tuple[Tensor, Any] | None = None
        if self.size > 1:
            _join(place)
            self._check_config(config)

    @property
    def first(self) -> bool:
        """True for rank 0, which writes, evaluates and measures time."""
        return self.rank == 0

    def connect(self, parts: Parts) -> None:
        """Connect learners and statistics of all ranks; call before graphs are captured."""
        if self.size == 1:
            return
        self.barrier()  # simulators may start slowly; after this, ranks do not wait for each other
        order, limit = Order(), timedelta(seconds=self.share.placement.watchdog_seconds)
        for name, worker in sorted(parts.workers.items()):  # in the same order on all ranks
            cuda = worker.device.type == "cuda"
            if cuda:
                torch.cuda.set_device(worker.device)
            handle = dist.new_group(backend="nccl" if cuda else "gloo", timeout=limit)
            self.groups[name] = Group(handle, order if cuda else None)
        for name, job in parts.jobs.items():
            job.connect(self.groups[name])
        parts.collector.normalizer.connect(self.groups["collector"])

    def group(self, worker: str) -> Group:
        """Return the process group of a worker, by its kind."""
        return self.groups.get(worker, ALONE)

    def spread(self, parts: Parts) -> None:
        """Copy the networks of rank 0 to all ranks."""
        for name, job in parts.jobs.items() if self.size > 1 else ():
            for tensor in _networks(job.learner.state):
                self.groups[name].broadcast_(tensor)

    def check_same(self, parts: Parts) -> None:
        """Raise ``RunError`` if weights or statistics of this rank differ from rank 0's in any bit."""
        if self.size == 1:
            return
        mine = {f"{n}/{k}": _digest(v) for n, one in parts.learners.items() for k, v in _trained(one.state).items()}
        mine |= {f"statistics/{i}": _digest(v) for i, v in enumerate(parts.collector.normalizer.frozen())}
        for rank, other in enumerate(self.every(mine)):
            if wrong := [k for k, v in mine.items() if other[k] != v]:
                raise RunError(f"rank {self.rank} and rank {rank} have drifted apart: {wrong[0]} differs")

    def resume_point(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors and manifest of the newest resume point that all ranks have intact. ``folder`` is
        rank 0's. Raises ``ConfigError``: there is none, or it has another number of ranks."""
        if (wrote := checkpoint.ranks(folder)) not in (None, self.size):
            raise ConfigError(
                "processes", self.size, f"{wrote}, as the run had; a new run can start from its weights: init_from=RUN"
            )
        points = checkpoint.of_rank(folder, self.rank)
        checkpoint.recover(points)
        while True:
            tensors, manifest, path = checkpoint.newest_checkpoint(points, ("resume",))
            names = self.every(path.name)
            checkpoint.set_aside(points, keep_up_to=points / min(names))
            if min(names) == max(names):
                return tensors, manifest

    # -- between hosts ------------------------------------------------------------------------------------------------

    def every(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank."""
        out: list[Any] = [value] * self.size
        if self.size > 1:
            with explained():
                dist.all_gather_object(out, value, group=_hosts)
        return out

    def from_first(self, value: Any) -> Any:
        """Return rank 0's ``value``."""
        return self.every(value)[0]

    def by_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 only and return its result on all ranks. Raises ``ConfigError``: on all ranks, if
        raised on rank 0."""
        made: T | None = None
        wrong: tuple[str, str, str] | None = None
        if self.first:
            try:
                made = make()
            except ConfigError as error:
                if self.size == 1:
                    raise
                wrong = error.setting, show(error.value), error.allowed
        made, wrong = self.from_first((made, wrong))
        if wrong is not None:
            raise ConfigError(*wrong)
        return cast(T, made)

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self.every(None)

    def agree(self, wanted: Iterable[str]) -> list[str]:
        """Requests that all ranks carry out after this tick, in order; with several ranks, those of the previous tick.

        One tick late, so that no rank waits for the answer.
        """
        wishes = set(wanted)
        if self.size == 1:
            return [a for a in ACTIONS if a in wishes]
        before = self._flags
        flags = torch.tensor([a in wishes for a in ACTIONS], dtype=torch.uint8)
        with explained():
            self._flags = flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=_hosts, async_op=True)
            if before is None:
                return []
            before[1].wait(RANK)
        return [a for a, said in zip(ACTIONS, before[0].tolist(), strict=True) if said]

    def _check_config(self, config: Config) -> None:
        """Check that all ranks have equal settings, except output paths and devices, which rank 0 decides."""
        passed = ("run_dir", "device", *PLACES)
        first, *others = self.every({k: v for k, v in leaves(config) if k not in passed})
        for rank, other in enumerate(others, 1):
            for name, value in other.items():
                if value != first[name]:
                    same = "as on rank 0: all processes run the same command"
                    raise ConfigError(name, value, f"{show(first[name])} on rank {rank}, {same}")

    # -- the end ------------------------------------------------------------------------------------------------------

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Context manager: a failure ends all ranks; a rank that failed in a collective names the rank that caused it.
        Raises ``RunError``: another rank failed."""
        try:
            yield
        except Exception as error:
            if self.size == 1 or _store is None:
                raise
            hung = self._waited and isinstance(error, HungError)  # the watchdog, in a collective
            reached = hung or _reached(error)
            found = self._errors_of_others("" if reached else _words(error))
            if not reached or not found:
                raise
            raise RunError("; ".join(found)) from None

    def _errors_of_others(self, mine: str) -> list[str]:
        """Publish ``mine``, this rank's error if any, and return the outcome of the others."""
        others, said, ended = set(range(self.size)) - {self.rank}, dict[int, str](), threading.Event()

        def exchange() -> None:
            try:
                _store.set(f"{self._name}/{self.rank}", mine)
                while len(said) < len(others) and not ended.is_set():
                    for rank in sorted(others - {*said}):
                        if _store.check([f"{self._name}/{rank}"]):
                            said[rank] = _store.get(f"{self._name}/{rank}").decode()
                    ended.wait(deadlines.LOOK)
            except RuntimeError:  # the rank that hosts the store has ended
                lost.append("rank 0 has ended")

        # A thread: calls of a store whose host hangs return neither at their timeout nor on Ctrl-C.
        lost = list[str]()
        thread = threading.Thread(target=exchange, name="pql-last-message", daemon=True)
        thread.start()
        thread.join(deadlines.LAST_MESSAGE)
        ended.set()
        found = [f"rank {rank} failed: {text}" for rank, text in sorted(said.items()) if text]
        if lost:
            return found or lost
        return found + [f"rank {rank} has ended, or hangs" for rank in sorted(others - {*said})]

    def close(self) -> None:
        """Destroy the process groups of this run."""
        self._waited = any(group.waiting for group in self.groups.values())
        for group in self.groups.values():
            group.close()
        self.groups = {}


def _join(place: World) -> None:
    """Initialise ``torch.distributed``, once per process, or make a group beside those of the program that has."""
    global _store, _hosts
    if _store is not None:
        return
    if dist.is_initialized():  # by the runner of another library, which also ends it
        _hosts = dist.new_group(backend="gloo", timeout=RANK)
        _store = dist.PrefixStore("pql", dist.distributed_c10d._get_default_store())
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's processes are in their own session and would outlive it
        end_with_parent()
    store, rank, size = next(dist.rendezvous("env://", timeout=RANK))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=RANK)
    _store = dist.PrefixStore("pql", store)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _reached(error: BaseException | None) -> bool:
    """Return True if the error was caused by another rank's failure."""
    while error is not None:
        if isinstance(error, PeerError):
            return True
        error = error.__cause__
    return False


def _words(error: BaseException) -> str:
    """One line."""
    return str(error).splitlines()[-1] if isinstance(error, PqlError) else first_line(error)


def _networks(state: Any) -> list[Tensor]:
    """Return the networks in a learner's state, buffers included."""
    members = (getattr(state, f.name) for f in fields(state))
    return [t for member in members if isinstance(member, Flat | nn.Module) for t in member.state_dict().values()]


def _trained(state: Any) -> dict[str, Tensor]:
    """Return the parts of a learner's state that are equal on all ranks; noise of noisy layers is not."""
    out: dict[str, Tensor] = {}
    for f in fields(state):
        member = getattr(state, f.name)
        if isinstance(member, Optimizer):
            out[f"{f.name}/parameters"] = member.flat.data
        elif isinstance(member, Flat):
            out[f.name] = member.data
        if isinstance(member, Optimizer | Moments):
            out |= {f"{f.name}/{k}": v for k, v in member.state_dict().items()}
    return out


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor).cpu().numpy().tobytes()).hexdigest()
