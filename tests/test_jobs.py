"""Jobs on the executors of submitit: a local one that runs and is preempted, and Slurm's, whose sbatch is a stand-in."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljax import experiment
from rljax.cli import STOPPED, _Progress, main

pytest.importorskip("submitit")

FLAGS = (
    "--env CartPole-v1 --total-steps 640 --seeds 0 1 --evals 8 --eval-episodes 2 --algo.num-envs 2 --algo.num-steps 8 "
    "--algo.num-minibatches 1 --algo.num-epochs 1 --algo.hidden 8 --checkpoint-seconds 0"
).split()


def call(capsys, *arguments):
    status = main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def wait_for(condition, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def metrics(out: Path) -> bytes:
    (file,) = out.glob("*/*/metrics.jsonl")
    return file.read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    assert main(["run", *FLAGS, "--out", str(out)]) == 0
    return metrics(out)


def test_sigterm_saves_after_the_chunk_and_the_same_command_goes_on(capsys, tmp_path, monkeypatch, uninterrupted):
    def terminate(self, event):
        if event["event"] == "chunk" and event["step"] == 256:  # the next chunk is still made
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(_Progress, "__call__", terminate)
        status, _, error = call(capsys, "run", *FLAGS, "--out", tmp_path, "--checkpoint-seconds", 1000)
    assert status == STOPPED == 75
    assert error.startswith("rljax: stopped by SIGTERM, saved at step 272 of 640 in ") and error.count("\n") == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    status, out, _ = call(capsys, "run", *FLAGS, "--out", tmp_path)
    assert status == 0 and "resumed at step 272" in out
    assert metrics(tmp_path) == uninterrupted


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the job's process in /proc")
def test_a_job_that_is_preempted_saves_and_is_queued_again(capsys, tmp_path, uninterrupted):
    status, out, _ = call(capsys, "submit", *FLAGS, "--out", tmp_path, "--cluster", "local", "--log", "tensorboard")
    assert status == 0
    (config,) = tmp_path.glob("*/*/config.toml")
    job = int(out.split()[1])
    assert out == f"job {job}   {config.parent}\n  log {tmp_path}/run/jobs/{job}_0_log.out\n"
    wait_for(lambda: list(config.parent.glob("checkpoints/[0-9]*")))
    (task,) = Path(f"/proc/{job}/task/{job}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)
    wait_for(lambda: (config.parent / "summary.json").exists())
    wait_for(lambda: (tmp_path / f"run/jobs/{job}_0_result.pkl").exists())
    assert metrics(tmp_path) == uninterrupted
    log, errors = ((tmp_path / f"run/jobs/{job}_0_log.{name}").read_text() for name in ("out", "err"))
    assert "stopped by SIGTERM, saved at step" in errors
    assert "Requeued job" in log and "resumed at step" in log
    assert [len(list(lane.iterdir())) for lane in config.parent.glob("tensorboard/*")] == [2, 2]
    status, out, _ = call(capsys, "submit", *FLAGS, "--out", tmp_path, "--cluster", "local")
    assert (status, out) == (0, f"finished already: {config.parent}\n")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster that accepts every job; ``sbatch`` keeps what it was given."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in (("srun", ""), ("sbatch", f'cp "$1" {tmp_path}/batch.sh; echo Submitted batch job 77')):
        (bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    return tmp_path / "batch.sh"


def test_programs_are_an_array_on_slurm(capsys, tmp_path, slurm):
    flags = [*FLAGS, "--out", tmp_path / "runs", "--sweep.algo.num-steps", 8, 16]
    status, out, _ = call(capsys, "submit", *flags, "--slurm.time", 30, "--slurm.partition", "gpu")
    assert status == 0
    assert "job 77_0 " in out and "job 77_1 " in out and "77_1_0_log.out" in out
    batch = slurm.read_text()
    for line in ("--array=0-1", "--time=30", "--partition=gpu", "--signal=USR2@90", "--job-name=rljax"):
        assert f"#SBATCH {line}" in batch
    programs = {experiment.load(path.parent).algo.num_steps for path in tmp_path.glob("runs/*/*/config.toml")}
    assert programs == {8, 16}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slurm.time", "5", "--slurm.partitoin", "gpu"], "slurm: Unknown argument 'partitoin'"),
        ([], "--slurm.time is missing: the minutes that a job may take"),
        (["--cluster", "local", "--slurm.time", "5"], "--slurm.time: --cluster local takes no parameters of Slurm"),
        (["--cluster", "kubernetes"], "--cluster must be slurm or local, got 'kubernetes'"),
        (["--algo.clip", "0"], "algo.clip must be > 0"),
    ],
    ids=str,
)
def test_wrong_input_is_one_line_and_queues_nothing(capsys, tmp_path, slurm, flags, message):
    status, _, error = call(capsys, "submit", *FLAGS, "--out", tmp_path / "runs", *flags)
    assert (status, error.count("\n")) == (2, 1)
    assert message in error
    assert not slurm.exists() and not list(tmp_path.glob("runs/*/*/config.toml"))


def test_where_there_is_no_slurm_or_no_submitit(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    arguments = ["submit", *FLAGS, "--out", tmp_path, "--slurm.time", 5]
    status, _, error = call(capsys, *arguments)
    assert (status, error.count("\n")) == (2, 1) and "srun" in error
    monkeypatch.setitem(sys.modules, "submitit", None)
    status, _, error = call(capsys, *arguments)
    assert (status, error) == (2, "rljax: submit needs submitit: pip install 'rljax[slurm]'\n")


def test_a_job_imports_no_jax():
    code = "import sys, rljax.jobs; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
