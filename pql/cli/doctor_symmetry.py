"""``pql doctor --symmetry``: does a task behave as the symmetry says that it declares?

Where environments can be put into reflected states, the step of a reflected state is compared with the reflected step.
Elsewhere statistics under random actions are compared with those of the reflected rows: means, deviations,
correlations, and correlations weighted by the reward are equal up to chance. Environments are independent of each
other, so their deviation gives the standard error.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pql.cli.tables import table
from pql.contract.env import Box, EnvSpec, VecEnv
from pql.contract.optional import Reflectable, supports
from pql.contract.symmetry import SCALAR, Reflection, check_reflection, reflect, side_by_side
from pql.errors import ConfigError
from pql.types import Step

STATES, APART = 8, 12  # how many sets of states are reflected, and random steps between two
HELD = 4  # steps for which statistics hold an action, because longer pushes move more
EQUAL, ALIKE = 1e-3, 0.15  # rms difference, as a share of the deviation
CHANCE, SMALL = 5.5, 0.04  # standard errors and standard deviations (or correlation) from which a difference counts
MISFIT = 0.25  # squared differences, as a share of those with another sign, from which a map is wrong
CHUNK = 10  # elements in a row of the table, without names
HEAD = ["group", "elements", "largest", "rms", "worst", "verdict"]
SAME, CLOSE, PART, UNSEEN, WRONG = "equal", "differs a little", "differs in part", "not tested", "DIFFERS"
ADVICE = {
    WRONG: "an index or a sign of these elements, of those named with them, or of the actions is wrong; or the task is "
    "not symmetric, for example its commands or first states.",
    CLOSE: "left and right of the model differ a little; a wrong sign differs more.",
    PART: "from few other elements, as of a sensor beside the middle; with the other sign it would differ from more.",
    UNSEEN: "constant, or random actions show nothing that depends on its sign; more environments or steps "
    "(--num-envs, --steps) may.",
}


class Finding(NamedTuple):
    """Of one element: the largest and the rms difference, the verdict, and the element with which it shows."""

    largest: float
    rms: float
    verdict: str
    beside: str = ""


def check_symmetry(env: VecEnv, steps: int, seed: int = 0) -> tuple[str, list[str]]:
    """Return a report on the symmetry that ``env`` declares, and the rows that differ. Raises ``ConfigError``: it
    declares none, or a wrong one."""
    maps = declared(env.spec)
    found, title = stepwise(env, maps, seed) or statistical(env, maps, steps, seed)
    rows: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for (group, row, element), one in zip(labels(env.spec, maps), found, strict=True):
        if one is not None:
            rows.setdefault((group, row), []).append((element or group, one))
    order, lines, wrong, seen = (UNSEEN, SAME, CLOSE, PART, WRONG), [HEAD], [], set[str]()
    for (group, row), each in rows.items():
        name, worst = max(each, key=lambda pair: (order.index(pair[1].verdict), pair[1].largest))
        unseen = [element for element, one in each if one.verdict == UNSEEN]
        said = [worst.verdict] if len(unseen) < len(each) else []
        said += (
            [f"{UNSEEN}: {', '.join(unseen) if len(unseen) < 4 else f'{len(unseen)} of {len(each)}'}"] if unseen else []
        )
        rms = (sum(one.rms**2 for _, one in each) / len(each)) ** 0.5
        place = name + (f" with {worst.beside}" if worst.beside else "")
        lines.append([group, row, f"{max(one.largest for _, one in each):.2g}", f"{rms:.2g}", place, "; ".join(said)])
        seen |= {one.verdict for _, one in each}
        wrong += [f"{group} {row}".strip()] if worst.verdict == WRONG else []
    advice = "\n".join(f"{verdict}: {text}" for verdict, text in ADVICE.items() if verdict in seen)
    return f"{title}\n\n{table(lines, right=(2, 3))}" + (f"\n\n{advice}" if advice else ""), wrong


def summary(env: VecEnv) -> str:
    """Return a line on the symmetry that ``env`` declares, and steps it where that can be compared step by step."""
    if not env.spec.info.get("symmetry"):
        return "none declared"
    maps = declared(env.spec)
    what = f"declared for {', '.join(maps)}; "
    if (found := stepwise(env, maps, 0)) is None:
        return what + "not checked: pql doctor --symmetry does"
    verdicts = {one.verdict for one in found[0] if one is not None}
    told = next(one for one in (WRONG, CLOSE, SAME, UNSEEN) if one in verdicts)
    return what + f"checked: the step of a reflected state {'is' if told != WRONG else 'is not'} the reflected step"


def declared(spec: EnvSpec) -> dict[str, Reflection]:
    """Return the reflections that a task declares of observation groups and ``action``; see :func:`check_symmetry`."""
    given = spec.info.get("symmetry") or {}
    if not isinstance(spec.action, Box) or "action" not in given:
        wanted = "a task that declares a symmetry: EnvSpec.info, or task.kwargs.mirror (docs/guides/robot_kit.md)"
        raise ConfigError("--symmetry", spec.name, wanted)
    shapes = {**{k: part.shape for k, part in spec.obs.items() if k in given}, "action": spec.action.shape}  # it last
    checked = {name: check_reflection(name, given[name], shape[-1]) for name, shape in shapes.items()}
    return {name: side_by_side(*[one] * math.prod(shapes[name][:-1])) for name, one in checked.items()}


def labels(spec: EnvSpec, maps: Mapping[str, Reflection]) -> list[tuple[str, str, str]]:
    """Return (group, row of the table, name) of each element: observations, actions, reward, ends."""
    out, robot = list[tuple[str, str, str]](), spec.info.get("robot", {})
    for group, (index, _) in maps.items():
        terms, own = robot.get("terms", {}).get(group, ()), list[tuple[str, str, str]]()
        if group == "action" and "joints" in robot:
            own = [(group, "", name) for name in robot["joints"]]
        for term in terms:
            joints, width = robot.get("joints" if term["source"] == "last_action" else "all_joints", ()), term["width"]
            names = joints if len(joints) == width else [str(i) for i in range(width)]
            own += [(group, term["name"], f"{term['name']} {name}") for name in [*names] * max(term["history"], 1)]
        if len(own) != len(index):
            spans = [range(i, min(i + CHUNK, len(index))) for i in range(0, len(index), CHUNK)]
            own = [(group, f"{one[0]} to {one[-1]}", f"{group} {i}") for one in spans for i in one]
        out += own
    return [*out, ("reward", "", ""), ("ends", "", "")]


def row_of(step: Step, maps: Mapping[str, Reflection], action: Tensor) -> Tensor:
    """Return the numbers of a step in the order of :func:`labels`, [N, D] float64; NaN where they are not known."""
    parts = [action if name == "action" else step.final_obs[name].flatten(1) for name in maps]
    parts += [step.reward[:, None], step.terminated[:, None]]
    row = torch.cat([part.double() for part in parts], 1)
    return row.masked_fill(~((step.valid & step.final_ok)[:, None] & row.isfinite()), torch.nan)


@torch.no_grad()
def stepwise(env: VecEnv, maps: Mapping[str, Reflection], seed: int) -> tuple[list[Finding | None], str] | None:
    """Compare the steps of reflected states with the reflected steps; None: states cannot be reflected, or steps are
    random."""
    if not supports(env, Reflectable):
        return None
    whole, gen = side_by_side(*maps.values(), SCALAR, SCALAR), torch.Generator().manual_seed(seed)
    draw = lambda: env.spec.action.random(env.spec.num_envs, gen).to(env.spec.device)  # noqa: E731
    env.reset(seed)
    pairs = []
    for _ in range(STATES):
        for _ in range(APART):
            env.step(draw())
        state, action = env.state_dict(), draw()
        turned = reflect(maps["action"], action)
        one = row_of(env.step(action), maps, action)
        env.load_state_dict({**state, "generator": env.state_dict()["generator"]})
        other = row_of(env.step(action), maps, action)  # differs where the step draws random numbers
        if (mirrored := env.reflected(state)) is None:
            return None
        env.load_state_dict(mirrored)
        two = row_of(env.step(turned), maps, turned)
        same = ((one - other).abs() < EQUAL).all(1) & two.isfinite().all(1)  # False for NaN
        pairs.append(torch.stack((reflect(whole, one), two))[:, same])
        env.load_state_dict(state)
        env.step(action)
    x, y = torch.cat(pairs, 1)
    if len(x) < STATES * env.spec.num_envs / 2:
        return None
    diff, spread = y - x, torch.cat((x, y)).std(0)
    numbers = torch.stack((diff.abs().amax(0), diff.square().mean(0).sqrt(), spread)).T.tolist()
    found = list[Finding | None]()
    for (group, *_), (most, rms, wide) in zip(labels(env.spec, maps), numbers, strict=True):
        share = rms / max(wide, 1e-6)
        verdict = SAME if share < EQUAL else CLOSE if share < ALIKE else WRONG
        verdict = UNSEEN if verdict == SAME and wide < 1e-6 else verdict
        found.append(None if group == "action" else Finding(most, rms, verdict))
    return found, f"{env.spec.name}: steps of {len(x)} reflected states against the reflected steps"


@torch.no_grad()
def statistical(env: VecEnv, maps: Mapping[str, Reflection], steps: int, seed: int) -> tuple[list[Finding | None], str]:
    """Compare statistics of ``steps`` random steps with those of their reflections."""
    spec, gen, rows = env.spec, torch.Generator().manual_seed(seed), []
    known, obs, action = labels(spec, maps), env.reset(seed), torch.zeros(0)
    changing = len(known) - spec.action.size - 2  # type: ignore[union-attr]
    for i in range(steps):
        if i % HELD == 0:
            action = spec.action.random(spec.num_envs, gen).to(spec.device)
        step = env.step(action)
        row, last = row_of(step, maps, action), row_of(step._replace(final_obs=obs), maps, action)
        rows.append(torch.cat((row, (row - last)[:, :changing]), 1).cpu())
        obs = step.obs
    parts = [one for name, one in maps.items() if name != "action"]
    whole = side_by_side(*parts, maps["action"], SCALAR, SCALAR, *parts)
    title = f"{spec.name}: statistics of {steps} random steps of {spec.num_envs} environments against those reflected"
    return judged(*contrasts(torch.stack(rows), whole, len(known) - 2), whole, known), title


def contrasts(rows: Tensor, whole: Reflection, reward: int) -> tuple[Tensor, Tensor]:
    """Compare statistics of rows with those of their reflections.

    Statistics of D elements are [D, 2 D + 1]: correlations, those weighted by the reward, and means, in deviations.

    Args:
        rows: [T, N, D] float64; NaN: not known. ``reward``: index of the reward among the elements.
        whole: reflection of a row.
    Returns:
        (size, score), [2, D, 2 D + 1] each: of the differences, and of those that there would be if the sign of the
        first element of a pair were the other one; score in standard errors.
    """
    index, sign, count = torch.tensor(whole[0]), torch.tensor(whole[1]).double(), rows.shape[1]
    mean = rows.nanmean((0, 1))
    mean = (mean + sign * mean[index]) / 2
    variance = (rows - mean).square().nanmean((0, 1))
    std = ((variance + variance[index]) / 2).sqrt()
    std = torch.where(std > 1e-6, std, torch.inf)
    signs = sign[:, None] * torch.cat((sign, sign, torch.ones(1)))
    columns = torch.cat((index, index + len(index), torch.tensor([2 * len(index)])))
    power = torch.zeros(2, 2, *signs.shape).double()
    for own in rows.unbind(1):
        unit, level = ((own - mean) / std).nan_to_num(0.0), (own / std).nan_to_num(0.0).mean(0)
        products = torch.cat((unit, unit * unit[:, reward, None]), 1)
        found = torch.cat((unit.T @ products / len(own), level[:, None]), 1)
        turned = signs * found[index][:, columns]
        both = torch.stack((found - turned, found + turned))
        power += torch.stack((both, both.square()))
    size, free = power[0] / count, max(count - 1, 1)
    error = ((power[1] / count - size.square()).clamp(min=0) / free).sqrt()
    t = size.abs() / error.clamp(min=1e-9)
    score = t * (1 - 1 / (4 * free)) / (1 + t.square() / (2 * free)).sqrt()  # Student's t as a normal quantile
    return size.abs(), score


def judged(size: Tensor, score: Tensor, whole: Reflection, known: list[tuple[str, str, str]]) -> list[Finding | None]:
    """Return a finding for each of the L elements of ``known`` from :func:`contrasts` [2, D, 2 D + 1] of all D. Of two
    elements that disagree the one is blamed that disagrees with more."""
    total = size.shape[1]
    owner = torch.cat((torch.arange(len(known)), torch.arange(total - len(known))))  # changes count for their element
    fold = torch.zeros(len(known), total).double()
    fold[owner, torch.arange(total)] = 1.0

    def folded(values: Tensor) -> Tensor:  # [D, 2 D + 1] -> [L, L + 1]; the last: of means
        pairs = fold @ (values[:, :total] + values[:, total:-1]) @ fold.T
        return torch.cat((pairs + pairs.T, fold @ values[:, -1:]), 1)

    counts = (score > CHANCE) & (size > SMALL)
    against, otherwise = folded(score[0].square() * counts[0]), folded(counts[1].double())
    as_declared, turned = (folded(one.square() * counts.any(0)) for one in size)
    for i, j in enumerate(whole[0][: len(known)]):
        otherwise[i, [i, j]] = 0  # the sign of both would be another
    blamed: dict[int, tuple[str, str]] = {}
    while bool(against.any()):
        i = int(against.sum(1).argmax())
        j = int(against[i].argmax())
        verdict = WRONG if as_declared[i].sum() > MISFIT * turned[i].sum() else PART
        blamed[i] = verdict, (known[j][2] or known[j][0]) if j < len(known) else "its mean"
        for one in (against, as_declared, turned):
            one[i], one[:, i] = 0, 0
    fine = torch.tensor([int(i) not in blamed for i in owner])
    fine = torch.cat((fine, fine, torch.tensor([True])))
    out = list[Finding | None]()
    for i in range(len(known)):
        own, errors = (one[0, owner == i][:, slice(None) if i in blamed else fine].flatten() for one in (size, score))
        shown = i in (len(known) - 2, len(known) - 1) or bool(otherwise[i].any())
        told = blamed.get(i, (SAME if shown else UNSEEN, ""))
        out.append(Finding(float(own[errors.argmax()]), float(own.square().mean().sqrt()), *told))
    return out
