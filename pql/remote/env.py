"""``Remote``: a ``VecEnv`` whose environments run in actors on other machines, with central inference as in SEED RL.

    pql train task=remote num_envs=64                                              learner: networks, replay, updates
    pql actor --connect HOST:PORT --task gymnasium --num-envs 32 id=Pendulum-v1    any machine, any number of times

Actors send observations and receive actions. The first actor to connect determines the specification.
Source: Espeholt et al. 2020 (SEED RL), section 3.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.config.files import expanded
from pql.contract.env import EnvSpec
from pql.engine import deadlines, interrupt
from pql.engine.watchdog import touch
from pql.errors import ConfigError, RunError
from pql.remote.assembler import StepAssembler
from pql.remote.process.near import read_spec
from pql.remote.server import ActorServer
from pql.remote.slot_table import Answer, SlotTable
from pql.remote.token import read_token
from pql.types import Obs, Step

SPREAD = 4
NOBODY = torch.zeros(0, dtype=torch.int64)


class Remote:
    """Asynchronous ``VecEnv`` with ``num_envs`` slots for the environments of remote actors.

    The constructor waits for the first actor. Environments may answer late, leave and be replaced (see
    ``pql.collect.steppers``): after the loss of an actor its slots continue with a new one, after a filler row with
    ``first`` set. ``reset`` and ``step`` wait for all connected actors. Fields of a ``Step`` are [N, ...], or [n, ...]
    for a group.

    Args:
        num_envs: N, the number of slots; a run also works while some are empty.
        device: device of the tensors.
        listen: ``host:port`` (port 0: a free one) or ``unix:/path``. An address that other machines can reach needs
            ``token_file``, ``cert`` and ``key``.
        token_file: file with the access token of actors; null: the environment variable PQL_TOKEN, if set.
        cert, key: PEM files, for TLS.
        wait: seconds for which answers wait for the rest of their group; null: until all have arrived.
        groups: number of groups that step in turn; null: 2 if the first actor fills at most half of the slots, else 1.
        timeout: seconds without any actor after which the run fails.
        step_seconds: time limit of a step; an actor that exceeds it is disconnected and its slots are freed.
        start_seconds: time limit of a reset and of an actor's first step.
        eval_envs: number of additional slots for evaluation (``pql actor --role eval``).
        task: task name and settings, shown in the command line suggested for starting actors.
    Raises:
        ConfigError: an invalid address, or one that other machines can reach without token and TLS.
        RunError: no actor within ``timeout`` seconds.
        KeyboardInterrupt: Ctrl-C or SIGTERM before the first actor connected.
    """

    def __init__(
        self,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        listen: str = "127.0.0.1:5555",
        token_file: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        wait: float | None = 0.01,
        groups: int | None = None,
        timeout: float = 600.0,
        eval_envs: int = 0,
        step_seconds: float = 20.0,
        start_seconds: float = 600.0,
        task: str = "NAME",
    ):
        check_remote(wait, timeout, eval_envs, step_seconds, start_seconds)
        if groups is not None and not (type(groups) is int and groups > 0 and num_envs % groups == 0):
            raise ConfigError("groups", groups, f"null, or a divisor of num_envs={num_envs}")
        self.timeout, self.task = float(timeout), task
        self.table = SlotTable(num_envs, 1, wait)
        self._evaluation = SlotTable(eval_envs) if eval_envs else None
        cert_file, key_file = (None if v is None else expanded(k, v) for k, v in (("cert", cert), ("key", key)))
        secret = read_token("token_file", token_file)
        limits: dict[str, Any] = {"step_seconds": step_seconds, "start_seconds": start_seconds}
        self.server = ActorServer(listen, self.table, self._evaluation, secret, cert_file, key_file, **limits)
        try:
            facts = self._first_actor()
            groups = choose_groups(num_envs, facts["num_envs"]) if groups is None else groups
            self.table.divide(groups)
            self.spec = spec_of(facts, num_envs, torch.device(device), groups)
        except BaseException:
            self.server.close("the run could not begin")
            raise
        self.assembler = StepAssembler(self.spec)
        self._stepper = SlotEnv(self.table, self.assembler, self.server, self.timeout)

    def _first_actor(self) -> dict[str, Any]:
        """Wait for the first actor and return its specification."""
        command = f"pql actor --connect {self.server.address} --num-envs K --task {self.task}"
        self.server.tell(f"waiting for the first actor (at most {self.timeout:g} s): {command}")
        end = time.monotonic() + self.timeout
        while not self.server.known.wait(max(0.0, min(deadlines.LOOK, end - time.monotonic()))):
            touch()  # this wait has its own time limit
            if not self.server.alive:
                raise RunError("the server for remote actors was closed")
            if interrupt.asked():
                raise KeyboardInterrupt("no actor had connected: nothing to save")
            if time.monotonic() >= end:
                within = f"within {self.timeout:g} s (task.kwargs.timeout)"
                raise RunError(f"no actor connected to {self.server.address} {within}")
        return self.server.facts

    # -- VecEnv -------------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments and wait for those of connected actors. Returns observations [N, ...]."""
        return self._stepper.reset(seed)

    def step(self, action: Tensor) -> Step:
        """Step the environments of all connected actors with ``action`` [N, A] or [N]. Other rows are fillers."""
        return self._stepper.step(action)

    def close(self) -> None:
        """Disconnect all actors and stop the server."""
        self.server.close()

    def beside(self) -> "SlotEnv | None":
        """Return the environments for evaluation, on the same server; None if ``eval_envs`` is 0."""
        if self._evaluation is None:
            return None
        spec = replace(self.spec, num_envs=self._evaluation.size, groups=1, spread=1)
        kind = "actor with --role eval"
        return SlotEnv(self._evaluation, StepAssembler(spec), self.server, self.timeout, kind)

    # -- asynchronous VecEnv ------------------------------------------------------------------------------------------

    def present(self) -> Tensor:
        """Return [N] bool on the CPU: environments that answered the last reset."""
        return self._stepper.present

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Send actions [k, A] or [k] to environments ``ids`` [k] int64."""
        self.table.act(ids.numpy(), action.cpu().numpy())

    def answers(self, group: int) -> tuple[Tensor, Step]:
        """Wait for a bounded time; return the ids [k] int64 that answered, and the step of the group, [n, ...]."""
        answers, part = self.table.take(group), self.table.parts[group]
        if not answers:
            self._stepper.check_alive()
        ids = [torch.from_numpy(one.slots) for one in answers]
        return ids[0] if len(ids) == 1 else torch.cat((NOBODY, *ids)), self.assembler.step(part, answers)

    def measures(self) -> dict[str, float]:
        """Metrics: connected actors and environments."""
        return self.table.measures()


class SlotEnv:
    """Synchronous ``VecEnv`` over the slots of a table: waits for all connected actors. Fields are [N, ...].

    Args:
        timeout: seconds without an actor after which it fails.
        kind: kind of actor, for messages.
    Attributes:
        present: [N] bool on the CPU: environments that answered the last reset.
    """

    def __init__(
        self, table: SlotTable, assembler: StepAssembler, server: ActorServer, timeout: float, kind: str = "actor"
    ):
        self.table, self.assembler, self.server, self.timeout, self.kind = table, assembler, server, timeout, kind
        self.spec, self.present = assembler.spec, torch.zeros(table.size, dtype=torch.bool)
        self._reported = -1.0  # ``empty_since`` at the last message about missing actors
        self._ending = False  # the run is ending: do not wait any more

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments and wait for those of connected actors. Returns observations [N, ...]."""
        self.table.reset(seed)
        answers, self.present = self._everybody(), torch.zeros(self.table.size, dtype=torch.bool)
        for one in answers:
            self.present[torch.from_numpy(one.slots)] = True
        step = self.assembler.step(slice(0, self.table.size), answers)
        return {k: v.clone() for k, v in step.obs.items()}

    def step(self, action: Tensor) -> Step:
        """Step with ``action`` [N, A] or [N]. Fields [N, ...] are new tensors; rows without an actor are fillers."""
        self.table.act(np.arange(self.table.size), action.cpu().numpy())
        return self.assembler.step(slice(0, self.table.size), self._everybody()).map(torch.clone)

    def close(self) -> None:
        """Do nothing: the training environment owns the server."""

    def _everybody(self) -> list[Answer]:
        """Take the answers of all actors; once the run is ending, only those that have arrived."""
        while not (answers := self.table.take_all(0.0 if self._ending else deadlines.IDLE)) and not self._ending:
            self._ending = interrupt.asked()
            self.check_alive()
        return answers

    def check_alive(self) -> None:
        """Report once if no actor is connected. Raises ``RunError``: none has been connected for ``timeout`` seconds,
        or the table was closed."""
        touch()  # this wait has its own time limit
        if self.table.closed or not self.server.alive:
            raise RunError("the server for remote actors was closed")
        if self.table.live:
            return
        since = self.table.empty_since
        if time.monotonic() - since > self.timeout:
            raise RunError(f"no {self.kind} at {self.server.address} for {self.timeout:g} s (task.kwargs.timeout)")
        if self._reported != since:
            self.server.tell(f"no {self.kind}: waiting at {self.server.address}, at most {self.timeout:g} s")
            self._reported = since


def check_remote(wait: float | None, timeout: float, eval_envs: int, step_seconds: float, start_seconds: float) -> None:
    """Raise ``ConfigError`` for numbers out of range."""
    for name, value, least in (
        ("wait", wait, 0),
        ("timeout", timeout, 0.001),
        ("eval_envs", eval_envs, 0),
        ("step_seconds", step_seconds, 0.001),
        ("start_seconds", start_seconds, 0.001),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
            raise ConfigError(name, value, f"a number from {least} up")
    if not isinstance(eval_envs, int):
        raise ConfigError("eval_envs", eval_envs, "a whole number")


def choose_groups(slots: int, first: int) -> int:
    """Return 2 groups if the first actor's environments fit into half of the slots, else 1."""
    return 2 if slots % 2 == 0 and first <= slots // 2 else 1


def spec_of(facts: dict[str, Any], num_envs: int, device: torch.device, groups: int) -> EnvSpec:
    """Return the specification of all slots, derived from one actor's."""
    ends = {k: [*map(float, v)] for k, v in facts["action"].items() if k in ("low", "high") and v is not None}
    one = read_spec({**facts, "deterministic": False, "action": {**facts["action"], **ends}}, device)
    info = {**one.info, "restarts": True}
    return replace(one, num_envs=num_envs, single_instance=True, groups=groups, spread=SPREAD, info=info)
