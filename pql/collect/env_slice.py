"""Env slice: environments that step together, from the observation that is acted on to the row that is written.

A collector has one slice or, if its simulator steps in groups, one per group. A slice owns only its graphs: all tensors
it writes are views of the collector's, so a run's state does not depend on the number of slices.

This file knows nothing of schedules or checkpoints.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Generator, Tensor

from pql.collect.actors import Actor
from pql.collect.nonfinite import floats, mask_and
from pql.collect.state import CollectorState
from pql.contract.env import capturable
from pql.contract.optional import Capturable, GroupedEnv
from pql.contract.rules import check_answer, check_stacks
from pql.data.normalize import ALL
from pql.engine import watchdog
from pql.engine.cpu_graph import make_graph
from pql.engine.graph import EAGER, Execution, Graph, Restorable
from pql.errors import ConfigError, PqlWarning, first_line
from pql.types import Step, column

SAME, ODD = 1e-3, 0.1
"""Relative difference between equal results of a captured and a launched step, and the share that may differ more."""


class EnvSlice:
    """Acts, sends, receives and records for the environments of a collector's state.

    Args:
        state: of the whole collector, or of a range of its environments.
        execution: of acting and recording: one body with the simulator's step between them if that can be captured
            (``Capturable``), or two.

    Attributes:
        ids: [n] int64 on the CPU; None: the simulator steps all environments at once.
        mask: [n] bool; with late answers, the environments that the next act or record applies to.
        last: the simulator's last step.
    """

    def __init__(self, state: CollectorState, execution: Execution):
        self.state = state
        env, actor, device, stores = state.env, state.actor, state.device, state.stores
        n, here = actor.action.shape[0], actor.action.device
        self.ids = None if state.columns is None else torch.arange(env.spec.num_envs)[state.columns]
        self.columns = [None if self.ids is None else self.ids.to(store.device) for store in stores]
        self.mask = torch.zeros(n, dtype=torch.bool, device=device) if state.late else None
        self.made = floats((actor.action, actor.record(here), actor.memory))
        self.last: Step | None = None
        self.checked = False  # that steps are as the specification says
        # A copy to another device joins that device's current stream, which is not allowed during capture.
        self._near = near = all(store.device == here for store in stores)
        alone = near and self.ids is None and not state.default_stream and Graph.possible(device)
        self._execution = execution
        self._make_bodies(execution != EAGER and alone and capturable(env))
        self._answer: Step | None = None  # of the prepared step

    def _make_bodies(self, whole_step: bool) -> None:
        """Make the parts of a step: one body if the simulator's step can be captured between acting and recording."""
        state, execution, stores = self.state, self._execution, self.state.stores
        env, actor, device = state.env, state.actor, state.device
        drawn = [state.gen, *(cast(Capturable, env).generators if whole_step else ())]
        part = EAGER if whole_step else execution
        acting = _Changed({"actor": actor}, {}, state.gen)
        statistics = {k: getattr(state, k) for k in ("actor", "normalizer", "episodes", "quarantine")}
        # Rows past a position are unused, so positions suffice.
        positions = {f"{i}.{j}": t for i, s in enumerate(stores) for j, t in enumerate(s.positions())}
        recording = _Changed(statistics, positions)
        stepping = _Changed({"act": acting, "record": recording, "env": cast(Any, env)}, state.obs)
        self._act = make_graph(self._act_body, device, [state.gen], acting, part, "acting")
        apart = part if self._near and Graph.possible(device) else EAGER
        self._record = Graph(self._record_body, device, [], recording, apart, "recording")
        whole = execution if whole_step else EAGER
        self._step = Graph(self._step_body, device, drawn, stepping, whole, "a step of the collector")
        self.bodies = (self._step, self._act, self._record)

    def prepare(self) -> None:
        """Capture graphs if enabled. Call it before the first reset, while the stores are empty."""
        self._prepare_step()
        self._act.prepare()
        if self._record.wanted:
            zero = torch.zeros(self.state.actor.action.shape[0], device=self.state.device)
            obs, flag = self.state.obs, zero.bool()
            step = Step(obs, zero, flag, flag, flag, obs, flag, flag, dict.fromkeys(self.state.env.spec.log, zero))
            self.last = step.map(torch.clone)
            self._record.prepare()

    def _prepare_step(self) -> None:
        """Capture a whole step, if enabled; if that fails or gives other results, the simulator steps between two."""
        try:
            self._step.prepare()
            if not self.whole:
                return
            assert self.last is not None
            self._answer = self.last.map(self._step.current)
            why = self._difference(self._answer)
        except ConfigError:
            raise
        except Exception as error:  # simulators' errors have no common type
            why = first_line(error)
        if why is None:
            return
        if self._execution.capture == "on":
            raise ConfigError("graphs", "on", f"auto or off: the simulator's step cannot be captured, {why}")
        warnings.warn(f"the simulator's step is not captured, {why}", PqlWarning, stacklevel=2)
        self._make_bodies(False)

    def _difference(self, answer: Step) -> str | None:
        """Compare a captured step with one that is launched, from the same state. Returns what is wrong, or None.

        A simulator whose sums have no fixed order may differ by rounding, and in a few environments by more.
        """
        with self._step.unchanged() as restore:
            self._step()
            captured = {k: v.clone() for k, v in named_step(answer).items()}
            restore()
            self._step_body()
            for name, value in named_step(self.last).items():
                one, other = captured[name].float(), value.float()
                differs = ~one.isclose(other, rtol=SAME, atol=SAME, equal_nan=True)
                if (share := float(differs.float().mean())) > ODD:
                    return f"{share:.0%} of {name} differ from those of a step that is not captured"
        return None

    # -- one step ---------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Return True if :meth:`step` is one body."""
        return self._step.fixed

    @property
    def compiled(self) -> bool:
        """Return True if any part of a step is compiled."""
        return any(body.program is not None for body in self.bodies)

    def step(self) -> None:
        """Choose actions with the policy, step the simulator, and record the row, in one body."""
        self._step()
        watchdog.stepped()
        assert self._answer is not None
        self.last = self._answer.map(self._step.current)
        self.state.recorder.sent(self.state.actor.action)

    def act(self, randomly: bool = False) -> None:
        """Choose actions with the policy, or uniformly among all actions."""
        if not randomly:
            self._act()
            return
        actor, gen = self.state.actor, self.state.gen
        with masked_update(actor, self.mask):
            actor.action.copy_(self.state.env.spec.action.random(len(actor.action), gen))

    def send(self) -> None:
        """Start the simulator's step, if it can be awaited later."""
        if self.ids is not None:
            self.state.recorder.sent(self.state.actor.action)
            with self.state.simulator():
                cast(GroupedEnv, self.state.env).send(self.state.actor.action, self.ids)

    def receive(self) -> None:
        """Wait for the step, and record its row."""
        env, action = self.state.env, self.state.actor.action
        if self.ids is None:
            self.state.recorder.sent(action)
        with self.state.simulator():
            step = env.step(action) if self.ids is None else cast(GroupedEnv, env).recv()[1]
        watchdog.stepped()
        self.record(step)

    def record(self, step: Step) -> None:
        """Write the row of a step to the stores, and update the statistics."""
        unchecked = not self.checked
        self._check(step)
        if unchecked and self.mask is None:  # with late answers, some rows are no steps
            state, known = self.state, (step.first | step.final_ok) & ~self.state.quarantine.out
            check_stacks("step", step.obs, state.obs, step.first, known, state.env.spec)
        if self.state.default_stream:
            for tensor in named_step(step).values():
                tensor.record_stream(torch.cuda.current_stream(self.state.device))
        if not self._record.fixed:
            self.last = step
        else:
            source = named_step(step)
            for name, target in named_step(self.last).items():
                target.copy_(source[name], non_blocking=True)
        self._record()

    def returned(self) -> dict[str, Tensor]:
        """Return the simulator's last step, by name; empty before the first."""
        return {} if self.last is None else {k: v.clone() for k, v in named_step(self.last).items()}

    def _act_body(self) -> None:
        state = self.state
        with masked_update(state.actor, self.mask):
            state.actor.act(state.normalizer(state.obs), state.gen)
            state.quarantine.act(self.made, self.mask)
        if state.saturation is not None and state.actor.squashed is not None:
            state.saturation(state.actor.squashed, self.mask)

    def _record_body(self) -> None:
        assert self.last is not None
        state = self.state
        step, shown = state.quarantine(self.last, state.obs, self.mask)
        for store, columns in zip(state.stores, self.columns, strict=True):
            arrived = () if self.mask is None else (self.mask.to(store.device, non_blocking=True),)
            store.insert(state.actor.record(store.device), step_to(step, store.device), columns, *arrived)
        over = step.terminated | step.truncated
        # With next-step autoreset this is the final observation; where the simulator lost it, it is not a real frame.
        lost = over & ~step.final_ok & ~step.first if state.env.spec.final_obs == "never" else None
        fresh = mask_and(self.mask, None if lost is None else ~lost, shown)
        state.normalizer.observe(step.obs, fresh)
        state.normalizer.observe_reward(step.reward, over | step.first, step.valid, state.columns or ALL)
        state.episodes.update(step)
        with masked_update(state.actor, self.mask):
            state.actor.observe(step.first)
        state.keep(step.obs)

    def _step_body(self) -> None:
        self._act_body()
        step = self.state.env.step(self.state.actor.action)
        self._check(step)
        self.last = step
        self._record_body()

    def _check(self, step: Step) -> None:
        """Check the first step [n, ...] against the specification."""
        if not self.checked:
            check_answer("step", step, self.state.env.spec, len(self.state.actor.action))
            self.checked = True


class _Changed:
    """State that the body of a graph changes and a warm-up restores: objects, tensors by name, a generator."""

    def __init__(self, objects: dict[str, Restorable], tensors: dict[str, Tensor], gen: Generator | None = None):
        self.objects, self.tensors, self.gen = objects, tensors, gen

    def state_dict(self) -> dict[str, Any]:
        gen = {} if self.gen is None else {"gen": self.gen.get_state()}
        return {**{k: v.state_dict() for k, v in self.objects.items()}, "tensors": self.tensors, **gen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.gen is not None:
            self.gen.set_state(state["gen"].cpu())
        for name, one in self.objects.items():
            one.load_state_dict(state[name])
        for name, tensor in self.tensors.items():
            tensor.copy_(state["tensors"][name])


@contextmanager
def masked_update(actor: Actor, mask: Tensor | None) -> Iterator[None]:
    """Restrict changes of ``actor``'s state inside the context to the environments of ``mask`` ([n] bool; None: all).

    Scalars count steps; they grow by the share of the masked environments.
    """
    if mask is None:
        yield
        return
    tensors = [actor.action, *actor.state_dict().values()]
    before = [t.clone() for t in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        if tensor.dim() == 0:
            tensor.copy_(old + (tensor - old) * mask.sum() // mask.numel())
        else:
            tensor.copy_(torch.where(column(mask, tensor), tensor, old))


def named_step(step: Step | None) -> dict[str, Tensor]:
    """Return a step's tensors by name: ``reward``, ``obs.policy``, ``log.speed`` ..."""
    assert step is not None
    out: dict[str, Tensor] = {}
    for field, part in step._asdict().items():
        out |= {f"{field}.{k}": v for k, v in part.items()} if isinstance(part, dict) else {field: part}
    return out


def step_to(step: Step, device: torch.device) -> Step:
    """Copy the step to ``device``, without its log; if it is there, return it."""
    if step.reward.device == device:
        return step
    return step._replace(log={}).map(lambda t: t.to(device, non_blocking=True))
