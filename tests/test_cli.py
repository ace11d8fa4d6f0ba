import json
import os
import shutil
import subprocess
import sys

import pytest

from rljax.cli import main

FLAGS = (
    "--env CartPole-v1 --total-steps 64 --seeds 0 1 --evals 1 --eval-episodes 2 --algo.num-envs 2 --algo.num-steps 8 "
    "--algo.num-minibatches 1 --algo.num-epochs 1 --algo.hidden 8"
).split()


def call(capsys, *arguments):
    status = main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    assert main(["run", *FLAGS, "--out", str(out)]) == 0
    return next(p.parent for p in out.glob("*/*/config.toml"))


def test_run_prints_plain_lines_and_a_summary(capsys, tmp_path):
    status, out, _ = call(capsys, "run", *FLAGS, "--out", tmp_path)
    assert status == 0
    assert "2 lanes on 2 devices" in out
    assert "IQM" in out
    assert "not established: 2 seeds" in out
    assert "random" in out
    assert out.strip().endswith("report.html")
    assert "\x1b" not in out


def test_a_run_that_begins_with_random_steps_is_not_said_to_resume(capsys, tmp_path):
    flags = "--env CartPole-v1 --total-steps 64 --seeds 0 --evals 1 --eval-episodes 2 --algo.name dqn --algo.hidden 8".split()
    sizes = "--algo.num-envs 2 --algo.num-steps 8 --algo.batch-size 8 --algo.learning-starts 16 --algo.buffer-size 64".split()
    status, out, _ = call(capsys, "run", *flags, *sizes, "--out", tmp_path)
    assert status == 0
    assert "dqn on CartPole-v1: 1 lane on" in out
    assert "resumed" not in out


def test_run_again_says_that_it_is_finished(capsys, run_directory):
    status, out, _ = call(capsys, "run", run_directory)
    assert status == 0
    assert "finished already" in out


def test_sweep_over_a_static_axis_runs_two_programs(capsys, tmp_path):
    status, out, _ = call(capsys, "run", *FLAGS, "--out", tmp_path, "--sweep.algo.num-steps", 8, 16)
    assert status == 0
    assert "program 2 of 2" in out
    assert "all 2 settings of 2 programs" in out
    table = out.partition("all 2 settings")[2]
    assert "num_steps=8 " in table and "num_steps=16 " in table and table.count("*") == 1
    assert "picked on these same seeds, so optimistic" in table
    assert f"rljax run {tmp_path}" in table and "--seeds 2 3" in table
    assert len(list(tmp_path.glob("*/*/summary.json"))) == 2


def test_plan_trains_nothing(capsys, tmp_path):
    status, out, _ = call(capsys, "plan", *FLAGS, "--out", tmp_path, "--probe", "--sweep.algo.num-steps", 8, 16)
    assert status == 0
    assert "2 programs" in out
    assert out.count("  wall time     about 0:") == 2
    assert "2 evaluations of" in out and "4 chunks of" in out and "with untrained policies" in out
    assert "wall time of all programs, one after the other: about 0:" in out
    assert "memory" in out
    assert not list(tmp_path.iterdir())


def test_eval_needs_no_flags(capsys, run_directory):
    status, out, _ = call(capsys, "eval", run_directory)
    rows = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    assert status == 0
    for row in rows[-2:]:
        assert f"seed {row['seed']:>3}  return {row['eval/return']:.2f}" in out


def test_eval_says_which_lanes_have_failed(capsys, run_directory, tmp_path):
    lost = tmp_path / "a" / run_directory.name
    shutil.copytree(run_directory, lost)
    info = json.loads((lost / "run.json").read_text())
    failed = [{"lane": 1, "seed": 1, "step": 64, "reason": "non-finite parameters"}]
    (lost / "run.json").write_text(json.dumps({**info, "failed": failed}))
    status, out, _ = call(capsys, "eval", lost)
    assert status == 0
    assert ["failed at step 64: non-finite parameters" in line for line in out.splitlines()[-2:]] == [False, True]


def test_eval_in_another_environment(capsys, run_directory):
    arguments = ["eval", run_directory, "--env_params.max-steps-in-episode", 5, "--episodes", 3]
    status, out, _ = call(capsys, *arguments)
    assert status == 0
    assert "greedy, 3 episodes a lane, after 64 steps, env_params.max_steps_in_episode 5" in out
    assert out.count("return 5.00 +- 0.00  length 5.0") == 2
    status, out, _ = call(capsys, *arguments, "--sample", "--env", "CartPole-v1")
    assert status == 0
    assert out.startswith("sampled, 3 episodes a lane, after 64 steps, env CartPole-v1")


def test_report_of_two_runs(capsys, run_directory, tmp_path):
    status, out, _ = call(capsys, "report", run_directory, run_directory, "--output", tmp_path / "both.html")
    assert status == 0
    assert out.strip() == str(tmp_path / "both.html")
    assert "<html" in (tmp_path / "both.html").read_text()


def test_reproduce_is_byte_for_byte(capsys, run_directory, tmp_path):
    status, out, _ = call(capsys, "reproduce", run_directory, "--out", tmp_path)
    assert status == 0
    assert "byte for byte" in out


def test_reproduce_overwrites_nothing_and_needs_a_finished_run(capsys, run_directory, tmp_path):
    spelled_otherwise = run_directory.parents[1] / "." / ".." / run_directory.parents[1].name
    status, _, error = call(capsys, "reproduce", run_directory, "--out", spelled_otherwise)
    assert (status, "would overwrite the old one" in error) == (2, True)
    unfinished = tmp_path / "a" / run_directory.name
    shutil.copytree(run_directory, unfinished)
    info = json.loads((unfinished / "run.json").read_text())
    (unfinished / "run.json").write_text(json.dumps({**info, "status": "running"}))
    status, _, error = call(capsys, "reproduce", unfinished, "--out", tmp_path / "b")
    assert (status, "is not finished: `rljax run" in error) == (2, True)


def test_a_directory_that_is_not_called_by_its_hash_is_not_run(capsys, run_directory, tmp_path):
    shutil.copytree(run_directory, tmp_path / "copy")
    status, _, error = call(capsys, "run", tmp_path / "copy")
    assert status == 2
    assert f"whose config is now called {run_directory.name}" in error


def test_a_run_that_cannot_be_reproduced_is_set_beside_the_new_one(capsys, run_directory, tmp_path):
    """Also where a seed had failed, and where too few are left for an interval."""
    original = tmp_path / "original"
    shutil.copytree(run_directory, original)
    rows = [json.loads(line) for line in (original / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "eval/return": None, "finite": False} for row in rows]
    (original / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = json.loads((original / "run.json").read_text())
    failed = [{"lane": lane, "seed": lane, "step": 64, "reason": "non-finite parameters"} for lane in (0, 1)]
    (original / "run.json").write_text(json.dumps({**info, "failed": failed}))
    status, out, _ = call(capsys, "reproduce", original, "--out", tmp_path)
    assert status == 0
    assert "not bit for bit the same" in out
    assert "n/a [n/a, n/a] and " in out


def test_list(capsys):
    status, out, _ = call(capsys, "list")
    assert status == 0
    for word in ("CartPole-v1", "Breakout-MinAtar", "brax/ant", "MNISTBandit-bsuite is left out", "ppo ", "module:attribute"):
        assert word in out


def test_help_of_a_config_lists_every_option(capsys):
    status, out, _ = call(capsys, "run", "--help")
    assert status == 0
    for option in ("--algo.learning_rate", "--seeds", "--env_params.gravity", "[traced]"):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name a config file"),
        (["run", "nowhere.toml"], "cannot read config nowhere.toml"),
        (["run", *FLAGS, "--algo.lerning-rate", "1"], "did you mean 'algo.learning_rate'"),
        (["run", *FLAGS, "--algo.num-minibatches", "3"], "algo.num_minibatches (3) must divide"),
        (["run", *FLAGS, "--algo.network", "minatar_cnn"], 'algo.network "minatar_cnn" takes images'),
        (["run", *FLAGS, "--algo.distribution", "gaussian"], "algo.distribution 'gaussian' does not fit the Discrete actions"),
        (["run", *FLAGS, "--env", "Pendulum-v1", "--algo.distribution", "categorical"], "does not fit the Box actions"),
        (["run", *FLAGS, "--probe"], "--probe is an option of `rljax plan` alone"),
        (["plan", *FLAGS, "--fresh"], "--fresh is an option of `rljax run` alone"),
        (["eval", "."], "is not a run directory"),
        (["eval", ".", "5"], "unexpected argument '5'"),
        (["report", "nowhere"], "nowhere"),
        (["reproduce", "nowhere"], "is not a run directory"),
    ],
)
def test_wrong_input_is_one_line_and_status_two(capsys, arguments, message):
    status, out, error = call(capsys, *arguments)
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert "compiling" not in out  # wrong input is named before


@pytest.mark.parametrize(("platform", "says"), [("abacus", ""), ("cuda", "there is no device of 'cuda' here; leave it empty")])
def test_a_platform_that_is_not_there_is_a_line(platform, says):
    command = [sys.executable, "-m", "rljax", "plan", *map(str, FLAGS)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # where there is one, jax has words of its own
    ended = subprocess.run(command, env={**os.environ, **hidden, "JAX_PLATFORMS": platform}, capture_output=True, text=True)
    assert ended.returncode == 2
    own = "rljax: JAX_PLATFORMS: Unable to initialize backend"
    assert ended.stderr.splitlines()[-1].startswith((f"rljax: JAX_PLATFORMS: {says}", own))
    assert "Traceback" not in ended.stderr


def test_an_unwritable_directory(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, error = call(capsys, "run", *FLAGS, "--out", tmp_path / "file")
    assert status == 2
    assert "cannot write to" in error


def test_help_is_quick_and_does_not_import_jax():
    code = "import sys; from rljax.cli import main\ntry: main(['--help'])\nfinally: assert 'jax' not in sys.modules"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment).stdout
    assert "reproduce" in out


def test_own_environment_from_a_file(capsys, tmp_path):
    (tmp_path / "corridor.py").write_text(
        "import jax.numpy as jnp\n"
        "from rljax.envs import Box, Discrete, restart, transition\n\n"
        "class Corridor:\n"
        "    observation_space = Box(0.0, 1.0, (1,))\n"
        "    action_space = Discrete(2)\n\n"
        "    def __init__(self, length: float = 4.0):\n"
        "        self.length = length\n\n"
        "    def reset(self, key):\n"
        "        return jnp.float32(0), restart(jnp.zeros(1))\n\n"
        "    def step(self, key, position, action):\n"
        "        position = jnp.maximum(position + 2.0 * action - 1.0, 0.0)\n"
        "        return position, transition(position[None] / self.length, -1.0, terminated=position >= self.length)\n"
    )
    env = f"{tmp_path / 'corridor.py'}:Corridor"
    more = ["--env-params.time-limit", 8, "--sweep.env-params.length", 2, 3, "--out", tmp_path]
    status, out, _ = call(capsys, "run", *FLAGS, "--env", env, *more)
    assert status == 0
    assert "4 lanes" in out
