"""``check_env``: test an environment against the contract of ``pql.contract.env.VecEnv`` and ``pql.types.Step``.

Run it on your own simulator before you train on it: ``print(check_env(my_env))``. Each rule is one function of
``pql.contract.rules`` over one recorded step; a rule that could not be tested (because no episode ended, for example)
is reported as untested. This file synchronises with the host at every step, which a training loop must not do.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from pql.contract import rules
from pql.contract.env import Action, Box, EnvSpec, VecEnv, adapted, capturable, undeclared
from pql.contract.grouped import join_steps
from pql.contract.optional import Capturable, GroupedEnv, Resumable, supports
from pql.contract.robot import robot_fault
from pql.engine.tape import Tape
from pql.errors import RunError
from pql.types import Step


@dataclass(frozen=True)
class Result:
    """Outcome of one rule; ``ok`` is None if it could not be tested."""

    name: str
    ok: bool | None
    message: str = ""


@dataclass(frozen=True)
class Report:
    """Results of ``check_env``, one per rule. ``print`` shows them as a table."""

    env: str
    results: list[Result]

    @property
    def ok(self) -> bool:
        """True if no rule failed; untested rules do not count."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the rules that failed."""
        return [r.name for r in self.results if r.ok is False]

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}
        head = f"{self.env}: " + ("conforms" if self.ok else f"{len(self.failed)} rules broken")
        return "\n".join([head, *(f"  {mark[r.ok]} {r.name:<16} {r.message}".rstrip() for r in self.results)])


@dataclass
class Checker:
    """Steps the environment and keeps the first fault of each rule."""

    env: VecEnv
    seed: int
    faults: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    ends: int = 0
    limited: int = 0
    kept: bool = False
    live: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # tensors of the last step, and their copies

    def fault(self, rule: str, message: str, index: int | None = None) -> None:
        """Record ``message`` as the fault of ``rule`` at step ``index``, unless it is "" or the rule has one."""
        if message and rule not in self.faults:
            self.faults[rule] = message + (f", step {index}" if index is not None else "")

    def actions(self, count: int, scale: float = 1.0) -> Iterator[Tensor]:
        """Yield ``count`` random actions [N, ...], the same every time; ``scale`` multiplies continuous ones."""
        spec, gen = self.env.spec, torch.Generator().manual_seed(self.seed)
        for _ in range(count):
            action = spec.action.random(spec.num_envs, gen)
            yield (action * scale if isinstance(spec.action, Box) else action).to(spec.device)

    def rollout(self, actions: Iterator[Tensor]) -> list[dict[str, bytes]]:
        """Step through ``actions``, [N, A] or [N] each; return one digest per step."""
        return [digest(self.env.step(action)) for action in actions]

    def inspect(self, steps: int) -> list[dict[str, bytes]]:
        """Test every rule on each of ``steps`` steps; stop at the first wrong shape. Return one digest per step."""
        spec = self.env.spec
        obs = self.env.reset(self.seed)
        self.fault("shapes", rules.obs_fault("reset's obs", obs, spec))
        if "shapes" in self.faults:
            return []
        every = torch.ones(spec.num_envs, dtype=torch.bool, device=spec.device)
        self.fault("stack", rules.stack_fault("reset's obs", obs, obs, every, every, spec.obs))
        self.live = [(name, value, value.clone()) for name, value in obs.items()]
        digests, first, last = [], {k: v.clone() for k, v in obs.items()}, None
        for index, action in enumerate(self.actions(steps)):
            step = self.take(action, index)
            if step is None:
                return []
            if last is not None:  # judged one step late: a lost life is recognised by the row after it
                last.next_valid = step.valid.clone()
                self.judge(last)
            last = rules.following(spec, last, step.map(torch.clone), first)
            digests.append(digest(step))
        if last is not None:
            self.judge(last)
        if self.ends and not self.kept and spec.autoreset == "same_step" and spec.final_obs != "never":
            self.fault("final_obs_kept", "final_obs is the next episode's first observation at every end")
        return digests

    def take(self, action: Tensor, index: int) -> Step | None:
        """Take one step with ``action`` [N, A] or [N] and test the rules on its tensors; None if a shape is wrong."""
        spec, given = self.env.spec, action.clone()
        step = self.env.step(action)
        self.fault("shapes", rules.shapes_fault(step, spec), index)
        if "shapes" in self.faults:
            return None
        self.fault("log", rules.log_fault(step, spec), index)
        self.fault("action_kept", "step wrote to the action it was given" * (not torch.equal(action, given)))
        for name, value, copy in self.live:
            rewritten = bool(rules.differs(value, copy).any())
            self.fault("buffers", f"{name} was rewritten by the next step: return copies" * rewritten, index)
        self.live = [(name, value, value.clone()) for name, value in rules.tensors(step)]
        return step

    def judge(self, row: rules.Row) -> None:
        """Test ``STEP_RULES`` on one row and count its ends."""
        for name, rule in rules.STEP_RULES.items():
            self.fault(name, rule(row), row.index)
        close = rules.closes(row)
        self.ends += int(close.sum())
        if row.spec.max_episode_steps is not None:
            self.limited += int((close & (row.length >= row.spec.max_episode_steps)).sum())
        for name, obs in row.step.obs.items():
            self.kept |= bool((rules.differs(obs, row.step.final_obs[name]) & close).any())

    def repeat(self, digests: list[dict[str, bytes]]) -> None:
        """Test the rules that repeat the main run: determinism, state, groups, capture, action range."""
        env, few = self.env, min(len(digests), 50)
        if not env.spec.deterministic:
            self.skipped |= dict.fromkeys(("determinism", "state_dict"), "spec.deterministic is False")
        else:
            env.reset(self.seed)
            found = compare_runs(digests, self.rollout(self.actions(len(digests))), "reset(seed)")
            self.fault("determinism", found and f"{found}; {UNREPEATABLE}")
        stable = env.spec.deterministic and "determinism" not in self.faults
        if "determinism" in self.faults:
            self.skipped["state_dict"] = "needs determinism"
        elif not supports(env, Resumable):
            self.skipped["state_dict"] = "not offered: resume restarts the episodes"
        elif stable:
            state = env.state_dict()
            once = self.rollout(self.actions(few))
            env.load_state_dict(state)
            self.fault("state_dict", compare_runs(once, self.rollout(self.actions(few)), "load_state_dict"))
        self.groups(digests[:few], stable)
        self.capture(digests, stable)
        self.clamp(few, stable)

    def capture(self, digests: list[dict[str, bytes]], stable: bool) -> None:
        """Test that replaying a step captured once gives the bits of stepping."""
        env = self.env
        if not capturable(env) or not stable:
            anew = f"not declared by {type(env).__name__}, which overrides {undeclared(env)}"
            bare = anew if getattr(env, "capturable", False) else "not declared"
            self.skipped["capturable"] = "needs determinism" if capturable(env) else bare
            return
        env.reset(self.seed)
        given, found = [action.clone() for action in self.actions(len(digests))], []
        action = given[0].clone()
        try:
            with Tape(cast(Capturable, env).generators) as tape:
                step = env.step(action)
            found.append(digest(step))
            for one in given[1:]:
                action.copy_(one)
                tape.replay()
                found.append(digest(step))
        except RunError as error:
            self.fault("capturable", str(error))
        else:
            self.fault("capturable", compare_runs(digests, found, "a step that was recorded once"))

    def groups(self, digests: list[dict[str, bytes]], stable: bool) -> None:
        """Test that stepping group by group gives the bits of stepping all environments together."""
        env, spec = cast(GroupedEnv, self.env), self.env.spec
        if spec.groups == 1 or not stable:
            self.skipped["groups"] = "all environments step at once" if spec.groups == 1 else "needs determinism"
            return
        every, found = list(torch.arange(spec.num_envs).chunk(spec.groups)), []
        env.reset(self.seed)
        for index, action in enumerate(self.actions(len(digests))):
            for ids in every:
                env.send(action[ids[0] : ids[-1] + 1], ids)
            answers = [env.recv() for _ in every]
            if not all(torch.equal(ids, got.cpu()) for ids, (got, _) in zip(every, answers, strict=True)):
                self.fault("groups", "recv returned ids that differ from the oldest group sent", index)
                return
            found.append(digest(join_steps([step for _, step in answers])))
        self.fault("groups", compare_runs(digests, found, "send and recv instead of step"))

    def clamp(self, steps: int, stable: bool) -> None:
        """Test that actions outside [-1, 1] act like their clamped values."""
        env = self.env
        if not isinstance(env.spec.action, Box):
            self.skipped["action_range"] = "discrete actions"
            return
        env.reset(self.seed)
        far = []
        for index, action in enumerate(self.actions(steps, 3.0)):
            step = env.step(action)
            numbers = ((name, value) for name, value in rules.tensors(step) if value.is_floating_point())
            bad = [name for name, value in numbers if not value.isfinite().all()]
            if "finite" not in self.faults and bad:
                self.fault("action_range", f"{bad[0]} holds NaN or infinity after actions in [-3, 3]", index)
            far.append(digest(step))
        if stable:
            env.reset(self.seed)
            near = self.rollout(a.clamp(-1, 1) for a in self.actions(steps, 3.0))
            self.fault("action_range", compare_runs(near, far, "actions in [-3, 3] instead of clamped ones"))

    def results(self) -> list[Result]:
        """Return one result per rule, in order: failed, passed or untested (None)."""
        spec, skipped = self.env.spec, self.skipped
        if "shapes" in self.faults:
            skipped |= dict.fromkeys(RULES, "needs shapes")
        elif not self.ends:
            idle = ("final_obs_kept", "filler", "first", "filler_flags")
            skipped |= dict.fromkeys(idle, "no episode ended: pass more steps")
        if all(part.stack == 1 for part in spec.obs.values()):
            skipped["stack"] = "no observation group is a stack"
        if spec.autoreset == "same_step":
            skipped.setdefault("filler_flags", "same-step autoreset")
        else:
            skipped.setdefault("final_obs_kept", "next-step autoreset: obs is the final observation")
        if spec.final_obs == "never":
            skipped.setdefault("final_obs_kept", "spec.final_obs=never: windows that end in a truncation are left out")
        if not self.limited:
            none = spec.max_episode_steps is None
            reason = "no limit" if none else f"none of {spec.max_episode_steps} rows was reached"
            skipped.setdefault("time_limit", reason)
        return [
            Result(name, False, self.faults[name])
            if name in self.faults
            else Result(name, None, "not tested: " + skipped[name])
            if name in skipped
            else Result(name, True, meaning)
            for name, meaning in {"protocol": PROTOCOL, **RULES}.items()
        ]


PROTOCOL = "spec, reset, step and close exist, and spec is consistent"
RULES = {
    "shapes": "shape, dtype and device of every field are the specification's, at every step",
    "log": "log keys are spec.log, each [N] float32",
    "finite": "no NaN or infinity",
    "disjoint": "terminated and truncated are never both set",
    "final_obs": "final_obs is obs where no episode was replaced",
    "final_obs_kept": "final_obs is not the next episode's first observation",
    "final_ok": "final_ok is False exactly where spec.final_obs says it is lost",
    "first": "first marks exactly the observations that begin an episode",
    "filler": "filler rows follow ends, and only under next-step autoreset",
    "filler_flags": "filler rows carry no flags",
    "time_limit": "no episode continues after max_episode_steps rows",
    "stack": "a stack's older frames are those of the observation before, ObsSpec.fill from before the episode",
    "buffers": "what a step returned is not rewritten by the next one",
    "action_kept": "step does not write to its action",
    "action_range": "actions outside [-1, 1] act as if clamped",
    "determinism": "reset(seed) and the same actions give the same bits",
    "groups": "send and recv, group by group, do what step does",
    "capturable": "a step that is recorded once, as in a CUDA graph, continues with the same bits",
    "state_dict": "load_state_dict continues with the same bits",
    "describe": "describe gives the specification without building",
}


UNREPEATABLE = (
    "seed all its generators in reset(seed), or declare deterministic=False in its EnvSpec "
    "(task=gymnasium: task.kwargs.deterministic=false)"
)


def digest(step: Step) -> dict[str, bytes]:
    """Return name -> hash of the bytes of every tensor of a step."""
    return {
        name: hashlib.blake2b(value.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).digest()
        for name, value in rules.tensors(step)
    }


def compare_runs(a: list[dict[str, bytes]], b: list[dict[str, bytes]], what: str) -> str:
    """Return a message for the first step whose digests differ, "" if none does."""
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        for name, value in one.items():
            if other.get(name) != value:
                return f"{name} differs after {what}, step {index}"
    return ""


def protocol_fault(env: Any) -> str:
    """Check the methods of ``env`` and the consistency of its specification; return a message, "" if all is well."""
    spec = getattr(env, "spec", None)
    if not isinstance(spec, EnvSpec):
        return f"spec is a {type(spec).__name__}, not a pql.contract.env.EnvSpec"
    for name in ("reset", "step", "close"):
        if not callable(getattr(env, name, None)):
            return f"{name} is missing"
    for one, other in (("state_dict", "load_state_dict"), ("send", "recv")):
        if hasattr(env, one) != hasattr(env, other):
            return f"{one} and {other} belong together: one of them is missing"
    if capturable(env) and not (hasattr(env, "generators") and hasattr(env, "state_dict")):
        return "capturable needs generators, state_dict and load_state_dict"
    if spec.groups < 1 or spec.num_envs % spec.groups or (spec.groups > 1 and not hasattr(env, "send")):
        return f"spec.groups={spec.groups}: equal groups of environments, and send and recv where they are several"
    if spec.num_envs < 1 or "policy" not in spec.obs or not isinstance(spec.action, Action):
        return "spec needs num_envs of at least 1, a 'policy' observation, and Box, Discrete or MultiDiscrete actions"
    for name, allowed in (
        ("autoreset", ("same_step", "next_step")),
        ("final_obs", ("always", "on_done", "never")),
        ("stream", ("current", "default")),
    ):
        if getattr(spec, name) not in allowed:
            return f"spec.{name}={getattr(spec, name)}: expected one of {', '.join(allowed)}"
    if "robot" in spec.info:
        shapes = {k: part.shape for k, part in spec.obs.items()}
        return robot_fault(spec.info["robot"], getattr(spec.action, "size", None), shapes)
    return ""


@torch.no_grad()
def check_env(env: VecEnv, steps: int = 200, seed: int = 0, described: EnvSpec | None = None) -> Report:
    """Test ``env`` against the environment contract with random actions, and leave it freshly reset.

    A simulator must declare two special kinds of rows: ``spec.info["lost_life"]`` (``terminated`` without ``first``:
    the episode continues) and ``spec.info["restarts"]`` (``first`` without an end).

    Args:
        env: in any state, also a ``gymnasium.vector.VectorEnv``. A few environments (8, for example) suffice.
        steps: length of the main run; more than ``max_episode_steps`` also tests the time limit. The run is repeated
            once to test determinism.
        seed: of the environment and the actions.
        described: ``EnvSpec`` that the factory's ``describe`` returned, compared with ``env.spec``.
    Returns:
        A report with one result per rule: ``report.ok``, ``report.failed`` (names), ``print(report)``.
    """
    if fault := protocol_fault(env := adapted(env)):
        skipped = [Result(name, None, "not tested: needs protocol") for name in RULES]
        return Report(type(env).__name__, [Result("protocol", False, fault), *skipped])
    checker = Checker(env, seed)
    if described is None:
        checker.skipped["describe"] = "nothing to compare with"
    elif described != env.spec:
        checker.fault("describe", f"describe gave {described}, but spec is {env.spec}")
    digests = checker.inspect(steps)
    if "shapes" not in checker.faults:
        checker.repeat(digests)
        checker.fault("shapes", rules.obs_fault("reset's obs", env.reset(), env.spec))
    return Report(env.spec.name, checker.results())
