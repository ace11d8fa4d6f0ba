"""Runs as jobs, through submitit: on Slurm, or as processes of this machine. Nothing here imports jax, which would hold the
accelerator that the run of a job needs.

A job is `rljax run` on a run directory, in a process of its own. Before Slurm's time limit, or as it says that it needs the node,
submitit gets a signal (USR2); the run is then asked to save (TERM), and the job is queued again. What a run saves on the way is
what can be relied on: a node may go without a word.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 80  # seconds for a run to save, of the 90 that submitit asks Slurm for
TIMES = 100  # a job is queued again at its time limit


@dataclasses.dataclass
class Job:
    """`rljax run PATH`, which logs to the sinks ``log``; submitit calls it on the node, and ``checkpoint`` out of the handler of
    its signal."""

    path: str
    log: tuple[str, ...] = ()

    def __call__(self) -> None:
        options = ["--log", *self.log] if self.log else []
        self._process = subprocess.Popen([sys.executable, "-m", "rljax", "run", self.path, *options])
        while not self._has_ended():
            time.sleep(0.2)
        if status := self._process.wait():
            raise RuntimeError(f"rljax run {self.path} has ended with status {status}; the same command goes on")

    def checkpoint(self) -> Any:
        """What is queued in its place: the same, from where it is by then."""
        from submitit.helpers import DelayedSubmission

        self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.2)
        self._process.kill()
        return DelayedSubmission(Job(self.path, self.log))

    def _has_ended(self) -> bool:
        """Without the lock of ``Popen.poll``, which the code that a handler interrupts may hold."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True


def executor(folder: Path, cluster: str, parameters: dict[str, Any]) -> Any:
    """An executor of submitit.

    Args:
      folder: for logs, and for what submitit keeps of a job.
      cluster: ``slurm``, or ``local`` for processes of this machine.
      parameters: of submitit's Slurm executor, such as ``partition``, ``time`` in minutes, ``gpus_per_node``.

    Raises:
      ValueError: submitit is not installed, there is no Slurm, or it does not know a parameter; one line.
      OSError: the folder cannot be made.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError("submit needs submitit: pip install 'rljax[slurm]'") from None
    if cluster not in ("slurm", "local"):
        raise ValueError(f"--cluster must be slurm or local, got {cluster!r}")
    if cluster == "local" and parameters:
        raise ValueError(f"--slurm.{next(iter(parameters))}: --cluster local takes no parameters of Slurm")
    if cluster == "slurm" and "time" not in parameters:
        raise ValueError("--slurm.time is missing: the minutes that a job may take before it is queued again")
    options = {"timeout_min": 365 * 24 * 60}
    if cluster == "slurm":
        options = {"name": "rljax", **{f"slurm_{key}": value for key, value in parameters.items()}}
    folder.mkdir(parents=True, exist_ok=True)  # an OSError names the place better than submitit does
    with _one_line(cluster):
        made = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=TIMES)
        made.update_parameters(**options)
    return made


def submit(executor: Any, paths: Sequence[Path], log: Sequence[str] = ()) -> list[Any]:
    """Queues a job for each run directory, which logs to ``log``, as one array; returns the jobs of submitit.

    Raises:
      ValueError: they are refused; one line.
    """
    with _one_line(executor.cluster):
        with executor.batch():
            jobs = [executor.submit(Job(str(path), tuple(log))) for path in paths]
        for job in jobs:
            _ = job.job_id  # fails here if it was not queued
    return jobs


@contextlib.contextmanager
def _one_line(cluster: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NameError, ValueError, TypeError, AssertionError, OSError) as error:
        raise ValueError(f"{cluster}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
