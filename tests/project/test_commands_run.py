"""The commands of README, docs and examples run as printed, with a small budget and small batches.

The commands of a page run in its order, in one folder. README and the first pages are part of the suite; ``-m slow``
has the rest, about five minutes. ``NOT_HERE`` says why a command is not run, and what else covers it.
"""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from test_blocks import BLOCKS, DRAWINGS, ROOT, SHELL, commands

from pql.cli import main as command_line
from pql.config.compose import compose
from pql.errors import ConfigError

FIRST = ("README.md", "docs/start/own-simulator.md")
FOREIGN = "another program, or a simulator with its own Python"
NOT_HERE = {
    r"make|pip|git|cd|bazel|\./bazel-bin|uv|source|export|ray|/opt/": "installs, or builds",
    r"python (tools/(bench_|check_|pass_rates|gpu_check.py($| --parts))|fast_td3)": "hours; short in test_tools",
    r"PQL_ISAACGYMENVS=": "needs the original tasks: tests/envs/test_originals.py",
    r"torchrun --nnodes": "two machines; two processes on one are run",
    r"pql .*(/opt/|isaacgym|task=dmlab|task=playground|engine=warp)": FOREIGN,
    r"pql (train|eval|doctor).*device=cuda": "needs a GPU",
    r"pql play .*--live": "needs a screen",
    r"pql (push|pull|eval walker )": "tests/hub/test_hub.py has a stand-in of the hub",
    r"pql sweep .*--backend wandb": "needs an account: tests/cli/test_sweep.py",
    r"pql (fleet|actor .*learner\.lan)": "tests/remote has fleets and TLS",
    r"pql train task=remote .*0\.0\.0\.0": "tests/remote/test_remote.py: TLS, tokens",
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


def pages():
    """Page -> its commands in order, without repetitions on other pages."""
    seen, found = set(), {}
    for block in BLOCKS:
        if (
            block.language not in SHELL
            or block.text.lstrip().startswith(DRAWINGS)
            or "reference/commands" in block.page
        ):
            continue
        for words in commands(block.text):
            line = " ".join(words)
            if words and line not in seen and not any(re.match(rule, line) for rule in NOT_HERE):
                seen.add(line)
                found.setdefault(block.page, []).append(words)
    return found


PAGES = pages()
GONE = 60  # seconds in which a process ends


def shortened(words):
    """The words of ``pql train`` or ``resume`` with a small budget, few environments and small batches."""
    keep = [w for w in words if not w.startswith(("budget.", "num_envs=", "trials=", "seeds=", "device="))]
    keep = [re.sub(r"^(algo=[^,]+,[^,]+|seed=[^,]+),.*", r"\1", w) for w in keep]  # two runs are enough
    keep = [re.sub(r"^(task)=([^,]+),.*", r"\1=\2", w) for w in keep]
    if words[0] == "resume":
        return [*keep, "budget.seconds=null", "budget.env_steps=2000"]
    sweep = ["trials=2", "seeds=1"] if words[0] == "sweep" else []
    one = [re.sub(r"=([^,\[(]+),.*", r"=\1", w) for w in keep[1:] if "=" in w and not re.search(r"\w\(|^multirun", w)]
    algo = compose(["device=cpu", *(w for w in one if not w.startswith("run_dir="))]).algo
    mixed = any(re.match("algo=.*,", w) for w in keep)
    num_envs = 1 if "num_envs=1" in words else 8
    more = [f"num_envs={num_envs}", "device=cpu", "eval.num_envs=2", "budget.seconds=null"]
    if hasattr(algo, "batch_size") and not mixed:
        start = algo.warmup_steps if hasattr(algo, "burn_in") else 20
        rows = 2000 if hasattr(algo, "burn_in") else 512
        more += ["algo.batch_size=8", f"algo.warmup_steps={start}", f"replay.capacity={num_envs * rows}"]
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


def run(words):
    """Run one command. Return its exit status."""
    while re.match(r"[A-Z_]+=", words[0]) or words[0] == "taskset":
        words = words[3 if words[0] == "taskset" else 1 :]
    if words[0] == "torchrun":
        at = words.index("pql.cli.main") + 1
        rest = shortened(words[at:])
        if rest[0] == "train":  # the run that the page then resumes
            shutil.rmtree("runs/x", ignore_errors=True)
            rest = [*rest, "run_dir=runs/x", "eval.every_seconds=null"]
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:at], *rest]
        return subprocess.run(command, check=False, timeout=300).returncode
    if words[0] in ("python", "openssl"):
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        words, target = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, "/dev/null")
        with open(target, "wb") as out:
            return subprocess.run(words, check=False, timeout=300, stdout=out).returncode
    assert words[0] == "pql"
    words = own_names(words[1:])
    if words[0] == "watch" or "--browser" in words:
        return interrupted([*words, *(["port=0"] if words[0] == "watch" else [])])
    if words[0] in ("train", "resume", "sweep"):
        words = shortened(words)
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


def test_every_reason_is_needed():
    lines = [" ".join(w) for b in BLOCKS if b.language in SHELL for w in commands(b.text) if w]
    assert [rule for rule in NOT_HERE if not any(re.match(rule, line) for line in lines)] == []
    assert sum(map(len, PAGES.values())) > 60
    with pytest.raises(ConfigError):
        shortened(["train", "task=halfcheetahh"])
