"""The commands of README, docs and examples run as printed, with a small budget and small batches.

The commands of a page run in its order, in one folder. README and the first pages are part of the suite; the rest, five
minutes, is marked `slow`: `make test-all`, and continuous integration once a week. Commands that need something else
are cases of their own, skipped without it and marked `gpu` or `foreign` (another library's program or simulator):
`pytest -m foreign`. `COVERED` has all others, with the test that covers each or the reason why none does.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_blocks import BLOCKS, DRAWINGS, ROOT, SHELL, commands

from pql.cli import main as command_line
from pql.config.compose import compose
from pql.errors import ConfigError

FIRST = ("README.md", "docs/start/own-simulator.md")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FOREIGN = [pytest.mark.foreign]
ON_CPU_TOO = r"pql (train|eval|doctor) .*(scale=gpu|device=cuda)"
MARKED = {  # by the first rule that fits
    r"pql .*isaacgym.*device=cuda": [*GPU, *FOREIGN],
    r"pql .*(/opt/|task=playground|engine=warp|gymnasium_robotics:|minigrid:)": FOREIGN,
    r"PQL_ISAACGYMENVS=|python tools/originals/check": FOREIGN,
    r"python fast_td3|uv run": FOREIGN,
    ON_CPU_TOO: GPU,
}
COVERED = {
    r"(make|pip|git|cd|bazel|\./bazel-bin\S*|source|export|ray|/opt/\S+pip) ": "installs, builds, or sets up a shell",
    r"python tools/(bench/|peers/compare|pass_rates)": "hours: short in tests/project/test_tools.py",
    r"python tools/gpu/check.py( $| --parts)": "minutes on a GPU, and itself runs tests: tests/gpu/test_gpu_check.py",
    r"torchrun --nnodes": "two machines: tests/engine/test_parallel.py has two processes on one",
    r"(PQL_SETTINGS=.* )?(train|play) ": "mjlab's: tests/envs/test_adapters.py",
    r"(isaaclab|\./isaaclab\.sh) ": "Isaac Lab's: tests/lab/test_lab_isaaclab.py has stand-ins",
    r"pql play .*--(live|browser)": "needs a screen, or viser: tests/run/test_play.py has stand-ins",
    r"pql (record|train .*replay.demos=(demos|path))": "tests/run/test_record.py, tests/data/test_datasets.py",
    r"pql (push|pull|eval walker )": "needs a hub: tests/hub/test_hub.py has a stand-in",
    r"pql sweep .*--pbt": "needs Ray Tune: tests/cli/test_population.py has a stand-in",
    r"pql (fleet|actor .*learner\.lan)": "needs a cluster: tests/remote/test_fleet.py",
    r"pql train task=remote .*0\.0\.0\.0": "TLS and tokens: tests/remote/test_remote.py",
}
WITHOUT = {  # pages whose commands are all of these kinds, or printed on an earlier page, too
    "docs/contributing.md",
    "docs/guides/robot_stacks.md",
    "docs/results/libraries.md",
    "docs/results/quality.md",
}
ARM = """
import torch, pql
class Arm:
    def __init__(self, num_envs, device):
        groups = {"policy": (4,), "critic": (6,), "image": (3, 32, 32)}
        obs = {k: pql.ObsSpec(shape, torch.uint8 if k == "image" else torch.float32) for k, shape in groups.items()}
        self.spec = pql.EnvSpec("my_arm", num_envs, obs, pql.Box(2), torch.device(device), max_episode_steps=20)
        self.t = 0
        self.none = torch.zeros(num_envs, dtype=torch.bool)
    def obs(self):
        return {k: torch.zeros(self.spec.num_envs, *o.shape, dtype=o.dtype) for k, o in self.spec.obs.items()}
    def reset(self, seed=None):
        self.t = 0
        return self.obs()
    def step(self, action):
        self.t += 1
        over = self.none | (self.t % 20 == 0)
        return pql.Step(self.obs(), -action.norm(dim=1), self.none, over, over, self.obs(), ~self.none, ~self.none, {})
    def close(self): ...
"""


def lines():
    """Yield (page, words of a command), each command once; without the reference, which quotes the help texts."""
    seen = set()
    for block in BLOCKS:
        drawn = block.text.lstrip().startswith(DRAWINGS) or block.page == "docs/reference/commands.md"
        for words in commands(block.text) if block.language in SHELL and not drawn else ():
            if words and (line := " ".join(words)) not in seen:
                seen.add(line)
                yield block.page, words


def first_of(rules, words):
    """The first rule that fits a command, or None."""
    return next((rule for rule in rules if re.match(rule, " ".join(words) + " ")), None)


def pages():
    """Page -> its commands in order."""
    found = {}
    for page, words in lines():
        marked = first_of(MARKED, words)
        if (marked is None or marked == ON_CPU_TOO) and first_of(COVERED, words) is None:
            found.setdefault(page, []).append(words)
    return found


def marked_cases():
    """Commands that need a GPU or a foreign program."""
    for page, words in lines():
        if rule := first_of(MARKED, words):
            marks = [pytest.mark.slow, pytest.mark.timeout(1800), *MARKED[rule]]
            yield pytest.param(words, marks=marks, id=f"{page}: {' '.join(words)[:60]}")


PAGES = pages()
GONE = 60  # seconds in which a process ends


def shortened(words, device="cpu"):
    """The words of ``pql train`` or ``resume`` with a small budget, few environments and small batches."""
    keep = [w for w in words if not w.startswith(("budget.", "num_envs=", "trials=", "seeds=", "device="))]
    keep = [re.sub(r"^(algo=[^,]+,[^,]+|seed=[^,]+),.*", r"\1", w) for w in keep]  # two runs are enough
    keep = [re.sub(r"^(task)=([^,]+),.*", r"\1=\2", w) for w in keep]
    if words[0] == "resume":
        return [*keep, "budget.seconds=null", "budget.env_steps=2000"]
    sweep = ["trials=2", "seeds=1"] if words[0] == "sweep" else []
    one = [re.sub(r"=([^,\[(]+),.*", r"=\1", w) for w in keep[1:] if "=" in w and not re.search(r"\w\(|^multirun", w)]
    algo = compose([f"device={device}", *(w for w in one if not w.startswith("run_dir="))]).algo
    mixed = any(re.match("algo=.*,", w) for w in keep)
    num_envs = 1 if "num_envs=1" in words else 8
    more = [f"num_envs={num_envs}", f"device={device}", "eval.num_envs=2", "budget.seconds=null"]
    if hasattr(algo, "batch_size") and not mixed:
        sequences = hasattr(algo, "burn_in") and algo.lstm is not None
        start, rows, size = (algo.warmup_steps, 2000, 16) if sequences else (20, 512, 8)
        more += [f"algo.batch_size={size}", f"algo.warmup_steps={start}", f"replay.capacity={num_envs * rows}"]
        more += [f"budget.env_steps={num_envs * (start + 30)}"]
    else:
        more += ["algo.warmup_steps=20"] * mixed
        ticks = 140 if mixed else algo.warmup_steps + 2 * getattr(algo, "horizon", 20)
        more += [f"budget.env_steps={num_envs * ticks}"]
    names = {w.partition("=")[0] for w in more}
    return [*(w for w in keep if w.partition("=")[0] not in names), *more, *sweep]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """A folder with everything that the pages presuppose: simulators of the reader, a finished run, recorded data."""
    folder = tmp_path_factory.mktemp("workshop")
    for page, file, name in (
        ("docs/start/own-simulator.md", "drift.py", "class Drift"),
        ("docs/simulators.md", "my_sim.py", "class Reach"),
    ):
        (text,) = [b.text for b in BLOCKS if b.page == page and name in b.text]
        (folder / file).write_text(text)
    (folder / "my_arm.py").write_text(ARM)
    shutil.copytree(ROOT / "docs" / "policies", folder / "docs" / "policies")
    shutil.copytree(ROOT / "docs" / "results" / "json", folder / "docs" / "results" / "json")
    (folder / "tools").symlink_to(ROOT / "tools")
    m = 100
    recorded = {"obs.policy": torch.randn(m, 17), "action": torch.rand(m, 6), "reward": torch.randn(m)}
    recorded |= {name: torch.zeros(m, dtype=torch.bool) for name in ("terminated", "truncated")}
    save_file(recorded | {"next_obs.policy": torch.randn(m, 17)}, folder / "recorded.safetensors")
    with contextlib.chdir(folder):
        for seed, algo in ((1, "pql"), (2, "pql"), (1, "sac")):
            words = f"train task=pendulum algo={algo} seed={seed} run_dir=runs/{algo}-{seed}".split()
            assert command_line.main(shortened(words)) == 0
        shutil.copytree("runs/pql-1", "runs/x")
        assert command_line.main(["export", "runs/x"]) == 0
    return folder


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[] if p in FIRST else [pytest.mark.slow, pytest.mark.timeout(1800)]) for p in PAGES]
)
def test_the_commands_of_a_page_run(page, workshop, tmp_path, monkeypatch):
    for module in ("mujoco", "gymnasium", "ale_py", "onnxscript", "matplotlib", "imageio", "grpc"):
        pytest.importorskip(module)
    home = tmp_path / "home"
    shutil.copytree(workshop, home, symlinks=True)
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    for words in PAGES[page]:
        assert run(words) == 0, " ".join(words)


@pytest.mark.parametrize("words", marked_cases())
def test_a_command_that_needs_more_runs_where_it_can(words, request, tmp_path, monkeypatch):
    if lacks := lacking(words):
        pytest.skip(f"needs {lacks}")
    home = tmp_path / "home"
    shutil.copytree(request.getfixturevalue("workshop"), home, symlinks=True)
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    where = os.environ.get(ORIGINALS, "")
    gpu = any(mark.name == "gpu" for mark in MARKED[first_of(MARKED, words)])
    assert run([word.replace("PATH", where) for word in words], "cuda" if gpu else "cpu") == 0


ORIGINALS = "PQL_ISAACGYMENVS"  # folder of the original tasks, for tests/envs/test_originals.py


def lacking(words):
    """The file, module or variable that a command lacks here; None if it can run."""
    line = " ".join(words)
    if ORIGINALS in line or "originals/check" in line:
        return None if os.environ.get(ORIGINALS) else f"the variable {ORIGINALS}"
    files = [found for word in words for found in re.findall(r"/opt/[\w./-]+|fast_td3/\w+\.py", word)]
    files += ["train.py"] if words[0] == "uv" else []
    modules = {"task=playground": "mujoco_playground", "engine=warp": "mujoco_warp"}
    modules["task.id=gymnasium_robotics:PointMaze_UMaze-v3"] = "pettingzoo"  # which gymnasium_robotics imports
    modules["task.id=minigrid:MiniGrid-Empty-5x5-v0"] = "minigrid"
    wanted = [] if files else [modules[word] for word in words if word in modules]
    return next((f for f in files if not Path(f).exists()), None) or next(
        (m for m in wanted if importlib.util.find_spec(m) is None), None
    )


def run(words, device="cpu"):
    """Run one command. Return its exit status."""
    while re.match(r"[A-Z_]+=", words[0]) or words[0] == "taskset":
        words = words[3 if words[0] == "taskset" else 1 :]
    if words[0] == "torchrun":
        at = words.index("pql.cli.main") + 1
        rest = shortened(words[at:], device)
        if rest[0] == "train":  # the run that the page then resumes
            shutil.rmtree("runs/x", ignore_errors=True)
            rest = [*rest, "run_dir=runs/x", "eval.every_seconds=null"]
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:at], *rest]
        return subprocess.run(command, check=False, timeout=300).returncode
    if words[0] in ("python", "pytest", "uv", "openssl"):
        words = [sys.executable, *own_names(words[1:])] if words[0] == "python" else words
        words = [sys.executable, "-m", *words, f"--rootdir={ROOT}"] if words[0] == "pytest" else words
        words, target = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, "/dev/null")
        with open(target, "wb") as out:
            return subprocess.run(words, check=False, timeout=300, stdout=out).returncode
    assert words[0] == "pql"
    words = own_names(words[1:])
    if words[0] == "watch":
        return interrupted([*words, "port=0"])
    if words[0] in ("train", "resume", "sweep"):
        words = shortened(words, device)
        for word in words:
            if word.startswith("run_dir=") and words[0] == "train":  # the workshop's own
                shutil.rmtree(word.partition("=")[2], ignore_errors=True)
    if "task=remote" in words or any(w.startswith("task.remote.") for w in words):
        return with_an_actor(words)
    if words[0] == "actor":  # run beside the learner of its page
        return 0
    if words[0] in ("eval", "play"):
        words = [w for w in words if not w.startswith(("episodes=", "num_envs="))] + ["episodes=2"]
    return command_line.main(words)


def own_names(words):
    """Names that stand for the reader's own."""
    named = {"task.name=my_arm": "task.name=my_arm:Arm", "RUNS": "runs", "RUN": "runs/x"}
    return [named.get(w, w).replace("/paper/", "/").replace("runs/T", "runs/t") for w in words]


def interrupted(words):
    """Start a server of pages, wait for its address, press Ctrl-C. Return 0 if it then ends as it should."""
    command = [sys.executable, "-m", "pql", *(w for w in words if not w.startswith("open="))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        line = ""
        while "http://" not in line:
            line = process.stdout.readline()
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        return {130: 0}.get(status := process.wait(GONE), status)


def with_an_actor(words):
    """Run a remote learner with one actor of the same page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    atari = "task=atari" in words
    task = "atari game=pong noop_max=30 sticky=0.0 full_actions=false life_loss=true"
    task = task if atari else "gymnasium id=Pendulum-v1"
    listen = f"task.{'remote' if atari else 'kwargs'}.listen={address}"
    words = [*(w for w in words if ".listen=" not in w), listen]
    actor = ["actor", "--connect", address, "--num-envs", "8", "--task", *task.split()]
    with subprocess.Popen([sys.executable, "-m", "pql", *actor]) as process:
        status = command_line.main(words)
        return status or process.wait(GONE)


def test_every_rule_is_needed_and_names_what_there_is():
    found = [words for _, words in lines()]
    assert [rule for rule in (*MARKED, *COVERED) if not any(first_of([rule], words) for words in found)] == []
    named = [path for why in COVERED.values() for path in re.findall(r"tests/[\w/]+\.py", why)]
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert sum(map(len, PAGES.values())) > 60
    with pytest.raises(ConfigError):
        shortened(["train", "task=halfcheetahh"])


def test_every_page_with_commands_is_among_the_cases():
    (cases,) = (m.args[1] for m in test_the_commands_of_a_page_run.pytestmark if m.name == "parametrize")
    covered = {case.values[0]: {mark.name for mark in case.marks} for case in cases}
    assert {page for page, _ in lines()} - {*covered} == WITHOUT
    assert {page for page, marks in covered.items() if "slow" not in marks} == {*FIRST}
