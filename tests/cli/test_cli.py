"""Command line: exit statuses, one-line errors, signals, and runs in separate processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_files import manifest, points, run, words

import pql
from pql.__main__ import main as program
from pql.cli.main import main
from pql.cli.parser import COMMANDS
from pql.config.compose import compose
from pql.config.layers import Presets
from pql.contract.env import preparation
from pql.contract.registry import register
from pql.engine.interrupt import Interrupt
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.remote.actor.sims import make_sim


@pytest.fixture
def finished(tmp_path: Path, trained: Path) -> Path:
    """A finished run of one's own, to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", *words(path, "eval.final=true")]) == 0
    return path


def mistake(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a wrong command gives."""
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    said = capsys.readouterr()
    shown = said.out.splitlines()  # settings of runs whose error shows when they are read or built
    assert len(shown) in (0, 1, 3)
    assert all(re.match(r"resumes |run: |budget: |\w+ on .* environments on ", line) for line in shown)
    assert said.err.startswith("pql: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1, said.err
    return said.err.strip()


# -- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], f"pql: command=trian: expected one of {', '.join(COMMANDS)} (did you mean train?)"),
        (["--verbose"], "pql: command=pql: expected other words:"),
        (["train", "--seed", "3"], "unrecognized arguments: --seed (pql --help); settings have no dashes: seed=3"),
        (["resume"], "pql: command=pql resume: expected other words: the following arguments are required: RUN"),
        (["list", "robots"], "argument what: invalid choice: 'robots'"),
        (["doctor", "--num-envs", "x"], "argument --num-envs: invalid int value: 'x'"),
        (["doctor", "seed=1"], "pql: command=seed=1: expected task=NAME, with keywords for its environment"),
        (["doctor", "--env", "pendulum", "max_steps=3"], "max_steps=3: expected one of the keywords "),
        (["doctor", "--env", "pendulum", "num_envs=4"], "num_envs=4: expected --num-envs 4"),
        (["doctor", "--env", "pendulum", "device=cud"], "device=cud: expected a device of this machine: auto, cpu"),
        (["doctor", "--env", "pendulum", "task.kwargs.max_steps=3"], "max_steps=3: expected one of the keywords "),
        (["doctor", "--env", "pendulum", "task.kwarg.x=3"], "task.kwarg.x=3: expected a known setting"),
        (["doctor", "--env", "pendulum", "--num-envs", "0"], "--num-envs=0: expected a number from 1 up to"),
        (["train", "task=env", "task.name=pendulun"], "(did you mean pendulum?)"),
        (["train", "task=lqr", "task.kwargs.max_steps=3"], "task.kwargs.max_steps=3: expected one of the keywords "),
        (["train", "task=lqr", "task.kwargs.max_episode_steps=no"], "task.kwargs.max_episode_steps=no: expected a"),
        (["train", "task=lqr", "task.id=x"], "pql: task.id=x: expected one of the keywords "),
        (["train", "task=pendulum", "algo.v_per_step=0.0123"], "algo.v_per_step=0.0123: expected a ratio that"),
        (["train", "task=lqr", "algo.batch_size=50", "replay.capacity=10"], "algo.batch_size=50: expected at most"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, *argv)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "argv"),
    [
        ("run_dir", ["train", "task=pendulum", "run_dir={}"]),
        ("init_from", ["train", "task=pendulum", "device=cpu", "init_from={}"]),
        ("replay.prefill", ["train", "task=pendulum", "device=cpu", "replay.prefill={}"]),
        ("presets", ["train", "task=pendulum", "--presets", "{}"]),
        ("algo", ["train", "task=pendulum", "algo={}.yaml"]),
        ("token_file", ["train", "task=remote", 'task.kwargs.token_file="{}"']),
        ("cert", ["train", "task=remote", 'task.kwargs.cert="{}"', 'task.kwargs.key="{}"']),
        ("multirun_dir", ["train", "-m", "task=pendulum", "seed=1,2", "multirun_dir={}"]),
        ("sweep_dir", ["sweep", "task=pendulum", "algo.critic.lr=interval(1e-4,1e-2)", "sweep_dir={}"]),
        ("--token-file", ["actor", "--connect", "localhost:5", "--task", "lqr", "--token-file", "{}"]),
        *(("run", [command, "{}"]) for command in ("resume", "eval", "play", "export", "report", "compare", "watch")),
        ("out", ["report", "/nowhere", "out={}"]),
        ("out", ["eval", "/nowhere", "out={}"]),
    ],
)
def test_a_home_directory_of_nobody_is_one_line(capsys, tmp_path, monkeypatch, setting, argv):
    monkeypatch.chdir(tmp_path)
    path = "~no-such-user/x"
    said = mistake(capsys, *(word.format(path) for word in argv))
    suffix = ".yaml" if setting == "algo" else ""
    assert f"{setting}={path}{suffix}: expected a path whose ~no-such-user is a home directory on this machine" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "num_env=3",
            "num_env=3: expected one of num_envs, episodes, seed, device, epsilon, max_steps, play, out (did you mean ",
        ),
        ("num_envs=0", "num_envs=0: expected a number from 1 up to 100000"),
        ("num_envs=1000000000000", "num_envs=1000000000000: expected a number from 1 up to 100000"),
        ("episodes=0", "episodes=0: expected a number from 1 up to 1000000"),
        ("seed=-1", "seed=-1: expected a number from 0 up to 4611686018427387904"),
        ("seed=99999999999999999999", "expected a number from 0 up to 4611686018427387904"),
        ("out=/proc/x.json", "out=/proc/x.json: expected a file that can be written"),
        ("num_envs=many", "num_envs=many: expected a whole number"),
        ("seed=1.5", "seed=1.5: expected a whole number"),
        ("device=cuda:9", "device=cuda:9: expected a device of this machine"),
        ("seed", "override=seed: expected the form key=value"),
    ],
)
def test_mistakes_in_an_evaluation(capsys, trained, word, message):
    assert message in mistake(capsys, "eval", trained, word)


def test_m_may_stand_anywhere(capsys):
    """Seen by what several values of a setting then mean."""
    for argv in (["-m", "seed=1,1", "algo=sac"], ["seed=1,1", "-m", "algo=sac"], ["seed=1,1", "algo=sac", "-m"]):
        assert "seed=1,1: expected values that differ" in mistake(capsys, "train", *argv)


@pytest.mark.parametrize("package", ["mujoco", "gymnasium"])  # the latter has the models
def test_a_simulator_that_is_not_installed(capsys, monkeypatch, package):
    for name in [m for m in sys.modules if m.startswith("pql.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    text = mistake(capsys, "train", "task=halfcheetah")
    assert text == (
        f"pql: task=halfcheetah: expected the package '{package}', which is not installed: pip install 'pql-rl[mujoco]'"
    )


# -- valid use ------------------------------------------------------------------------------------------------------


def test_training_says_how_it_went_and_what_to_type_next(capsys, tmp_path):
    assert main(["train", *words(tmp_path, "eval.final=true")]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert "\x1b" not in said.out
    assert lines[:2] == ["pql on pendulum: 16 environments on cpu, seed 0", "budget: 320 env steps"]
    assert any(line.split()[:4] == ["time", "left", "env", "steps"] for line in lines)
    assert any(line.startswith("done: return -") for line in lines)
    assert lines[-2:] == [f"next: pql eval {tmp_path}", f"      pql resume {tmp_path} budget.env_steps=640"]


def test_evaluating_prints_a_table_and_writes_json_beside_the_run(capsys, finished):
    capsys.readouterr()
    results = []
    for path in (finished, finished / "checkpoints" / "last", points(finished)[-1]):
        assert main(["eval", str(path), "num_envs=3", "seed=1", "episodes=7"]) == 0
        lines = capsys.readouterr().out.splitlines()
        where = Path(lines[-1].removeprefix("written: "))
        assert where.parent == finished / "evaluations"
        results.append(json.loads(where.read_text()))
    assert where.name == f"{points(finished)[-1].name}-seed1-7episodes.json"
    assert [Path(r.pop("checkpoint")).name for r in results] == ["last", "last", points(finished)[-1].name]
    assert results[0] == results[1] == results[2]
    row = results[0]
    assert (row["episodes"], row["num_envs"], row["lengths"]) == (7, 3, [200.0] * 7)
    assert row["return_mean"] == pytest.approx(sum(row["returns"]) / 7)
    assert row["return_median"] == sorted(row["returns"])[3]
    assert row["return_min"] == min(row["returns"]) < row["return_iqm"] < row["return_max"] < 0
    assert "success" not in row
    assert lines[0] == "pql on pendulum: 7 episodes in 3 environments, seed 1"
    assert lines[1].split() == ["mean", "median", "IQM", "std", "min", "max"]
    names = ("mean", "median", "iqm", "std", "min", "max")
    assert lines[2].split() == ["return", *(f"{row[f'return_{k}']:,.1f}" for k in names)]
    assert lines[3].split() == ["length", "200.0", "200", "200"]


def test_an_evaluation_of_a_checkpoint_that_lies_elsewhere(capsys, finished, tmp_path):
    alone = Path(shutil.copytree(finished / "checkpoints" / "last", tmp_path / "policies" / "good"))
    assert main(["eval", str(alone), "num_envs=2"]) == 0
    assert (tmp_path / "policies" / "evaluations" / "good-seed0-2episodes.json").exists()
    assert main(["eval", str(alone), "num_envs=4", "episodes=2", f"out={tmp_path / 'x' / 'a.json'}"]) == 0
    row = json.loads((tmp_path / "x" / "a.json").read_text())
    assert (row["episodes"], row["num_envs"]) == (2, 2)
    assert capsys.readouterr().out.count("written: ") == 2


def test_listing(capsys):
    assert main(["list", "tasks"]) == 0
    tasks = capsys.readouterr().out
    assert {line.split()[0] for line in tasks.splitlines()} >= {"pendulum", "halfcheetah", "gymnasium", "lqr"}
    about = re.sub(r"\n +", " ", tasks).splitlines()  # a description goes on below itself
    assert [line for line in about if len(line.split()) < 3 and not line.startswith("task=env ")] == []
    assert {line.split()[0] for line in about} >= {*Presets().names("task")}
    assert main(["list", "algos"]) == 0
    algos = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert algos == sorted(Presets().names("algo"))
    assert {"a3c", "eps_rainbow_512", "pql", "xqc"} <= {*algos}


@pytest.mark.parametrize(("columns", "widest"), [("80", 80), ("120", 120)])
def test_lists_fit_the_terminal(capsys, monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    for what in ("tasks", "algos"):
        assert main(["list", what]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > widest] == []


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"pql {pql.__version__}\n")


def test_help_where_nothing_is_asked(capsys):
    """Bare ``pql`` is ``pql --help``, with the status of one that was asked for."""
    shown = []
    for argv in ([], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert all(command in shown[0] for command in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["list", "tasks"], 0),
        (["list", "algos"], 0),
        (["--help"], 0),
        ([], 0),
        (["train", "--help"], 0),
        (["trian"], 2),
        (["train", "taks=ant"], 2),
        (["train", "task=ants"], 2),
        (["train", "algo.gama=1"], 2),
        (["train", "task=env", "task.name=pendulun"], 2),
        (["train", "task=gymnasium"], 2),
        (["resume", "nowhere"], 2),
    ],
)
def test_what_needs_no_torch_loads_none(tmp_path, argv, status):
    """It takes seconds: four to seventeen on a busy machine."""
    code = "import json, sys; from pql.cli.main import main\ntry: status = main(sys.argv[1:])\n"
    code += "except SystemExit as ended: status = ended.code\nprint(json.dumps([status, 'torch' in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [status, False], done.stderr


@pytest.mark.parametrize(
    ("task", "want"),
    [
        ("gymnasium", "task.id=null: expected one of the tasks that gymnasium has, such as task.id=Pendulum-v1"),
        ("envpool", "task.id=null: expected one of the tasks that envpool has, such as task.id=HalfCheetah-v5"),
        ("atari", "task.game=null: expected one of the tasks that atari has, such as task.game=pong"),
        *(
            (t, f"task.kwargs.{k}=null: expected one of the tasks that {t} has, such as task.kwargs.{k}=")
            for t, k in (
                ("playground", "env"),
                ("mjlab", "task"),
                ("maniskill", "task"),
                ("isaaclab", "task"),
                ("isaacgym", "task"),
            )
        ),
    ],
)
def test_a_simulator_of_many_tasks_asks_for_one(capsys, task, want):
    assert want in mistake(capsys, "train", f"task={task}")


def test_so_it_does_in_python_and_for_actors(tmp_path):
    with pytest.raises(ConfigError, match=r"id=null: expected one of the tasks that gymnasium has, such as id=Pend"):
        pql.make_env("gymnasium", 2)
    with pytest.raises(ConfigError, match=r"game=null: expected one of the tasks that atari has, such as game=pong"):
        make_sim("atari", 2, {})
    assert compose(["task=gymnasium", "task.kwargs.id=Ant-v5", "device=cpu"]).task.kwargs == {"id": "Ant-v5"}


def test_what_a_run_compiles_is_compiled_ahead(tmp_path, monkeypatch, capsys):
    """Nothing is written, no step is made, and the simulator is closed."""
    monkeypatch.chdir(tmp_path)
    seen = []

    class Compiles(Counter):
        def prepare(self):
            seen.append(preparation(self))

        def preparation(self):
            return "module 1 of 2"

        def reset(self, seed=None):
            raise AssertionError

        def close(self):
            seen.append("closed")

    register("compiles", lambda num_envs, device: Compiles(num_envs, device))
    own = ["task.name=compiles", "device=cpu", "num_envs=16", "replay.capacity=4096", "algo.warmup_steps=8"]
    assert main(["warm-up", *own, "algo=pql"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"pql on compiles, 16 environments on cpu: built in [\d.]+ s, compiled in [\d.]+ s", said)
    assert seen == ["module 1 of 2", "closed"]
    assert [*tmp_path.iterdir()] == []
    assert main(["warm-up", "task=halfchetah"]) == 2
    assert "did you mean halfcheetah?" in capsys.readouterr().err


# -- signals --------------------------------------------------------------------------------------------------------


def test_an_interrupt_is_a_flag_and_the_handlers_come_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    for number in (signal.SIGINT, signal.SIGTERM):
        with Interrupt() as interrupt, interrupt:
            assert not interrupt.asked
            os.kill(os.getpid(), number)
            assert interrupt.asked
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.fault(8, 9)
def test_a_run_that_is_summed_up_ends_at_a_signal(tmp_path, ctrl_c):
    """While a simulator is closed, which may hang, Ctrl-C and SIGTERM do what they did before the run."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    class Closing(Counter):
        def close(self):
            seen.append((signal.getsignal(signal.SIGTERM), (tmp_path / "summary.json").exists()))
            signal.raise_signal(signal.SIGINT)

    register("closing", lambda num_envs, device: Closing(num_envs, device))
    with pytest.raises(KeyboardInterrupt):
        run(*words(tmp_path, "task=env", "task.name=closing"))
    assert seen == [(before, True)]


def test_ctrl_c_before_there_is_a_run(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("pql.cli.main.parser", interrupt)
    assert main(["list", "tasks"]) == 130
    assert capsys.readouterr().err == "pql: interrupted\n"


def test_ctrl_c_while_the_command_line_loads(monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "pql.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "pql.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert program() == 130
    assert capsys.readouterr().err == "pql: interrupted\n"


# -- processes of their own -----------------------------------------------------------------------------------------


def python(*argv: str) -> str:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_seed_gives_the_same_bits_in_two_processes(tmp_path):
    hashes = []
    for name in ("a", "b"):
        setting = words(tmp_path / name, "task.kwargs.max_episode_steps=11", "seed=7", "budget.env_steps=640")
        if name == "a":
            python("-m", "pql", "train", *setting)
        else:
            assert main(["train", *setting]) == 0
        found = tmp_path / name / "checkpoints"
        hashes.append([manifest(found / "last")["sha256"], manifest(points(tmp_path / name)[-1])["sha256"]])
    assert hashes[0] == hashes[1]


def test_importing_and_building_need_torch_numpy_and_safetensors_only():
    script = """
import sys
import pql
assert "torch" not in sys.modules
from pql.config import BudgetConfig, Config, ReplayConfig, TaskConfig
from pql.config.validate import validate
from pql.run.build import build
config = Config(TaskConfig("pendulum"), replay=ReplayConfig(100_000), num_envs=16, device="cpu",
                budget=BudgetConfig(env_steps=1000))
parts = build(validate(config))
import pql.run.session, pql.run.policy, pql.run.store.checkpoint, pql.wrap
foreign = {"hydra", "omegaconf", "rich", "yaml", "mujoco", "gymnasium", "tensorboard", "wandb", "antlr4", "rsl_rl",
           "stable_baselines3", "tensordict"}
print(sorted(foreign & set(sys.modules)), parts.env.spec.name)
"""
    assert python("-c", script).strip() == "[] pendulum"


def test_a_reader_that_has_enough_ends_a_listing_quietly():
    """``pql list tasks | head -1``: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "pql", "list", "tasks"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
