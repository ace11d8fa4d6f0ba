"""The files of a run directory: what they hold, and how they are written so that a kill at any moment loses none of it."""

import contextlib
import datetime
import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax import extensions
from rljax.experiment import hosts, report, sinks
from rljax.experiment.config import Experiment, InputError, file_digest
from rljax.experiment.evaluation import Evaluation
from rljax.files import write_whole


def is_finished(experiment: Experiment) -> bool:
    """Whether all of it has been trained, in its run directory."""
    file = experiment.path / "run.json"
    return file.is_file() and read_json(file).get("status") == "finished"


class Metrics:
    """Appends rows to ``metrics.jsonl`` and to sinks; on resume first drops the rows past the checkpoint. ``rows`` are those of
    the file.

    Of several processes the first alone writes them.
    """

    def __init__(self, path: Path, lanes: list[dict[str, Any]], steps: list[int], fewest: int, logs: sinks.Sinks):
        """
        Args:
          steps: those up to the checkpoint, each of which has a row of ``fewest`` lanes or more; none where the run begins.
          logs: where the rows go besides.

        Raises:
          InputError: rows of one of them are not there. They were on the disk before the checkpoint, so the file was damaged.
        """
        self._lanes, self._logs = lanes, logs
        self.failed: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self._regret = dict.fromkeys(range(len(lanes)), 0.0)  # of each lane, what its decisions have cost so far
        kept, counts, damaged = [], dict.fromkeys(steps, 0), ""
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
            try:
                row = json.loads(line)
                _, _, step = row["lane"], row["seed"], row["step"]
                stays = step in counts
            except (ValueError, TypeError, KeyError):
                damaged = damaged or f" (line {number} cannot be read)"  # or was cut short by a kill, past the checkpoint
                continue
            if stays:
                kept.append(line)
                counts[step] += 1
                self.rows.append(row)
                if report.REGRET in row:
                    self._regret[row["lane"]] = math.nan if row[report.REGRET] is None else row[report.REGRET]
                self._note_failure(row)
        if missing := [at for at, count in counts.items() if count < fewest]:
            raise InputError(f"{path}: rows of step {missing[0]:,} are missing{damaged}; --fresh starts over")
        if hosts.leads():
            write_whole(path, b"".join(line + b"\n" for line in kept))
        self._file = (path if hosts.leads() else Path(os.devnull)).open("a")

    def write(
        self,
        step: int,
        totals: dict[str, Any] | None,
        finite: np.ndarray | None,
        evaluation: Evaluation | None,
        left: list[int],
    ) -> list[dict[str, Any]]:
        """One row for each of the lanes ``left``; returns those that failed in this chunk."""
        new_failures, before = [], len(self.rows)
        for i, lane in ((i, self._lanes[i]) for i in left):
            row: dict[str, Any] = {"step": step, **lane}
            if totals is not None and finite is not None:
                row |= _finalize({name: (s[i], n[i]) for name, (s, n) in totals.items()})
                if "regret" in totals:
                    self._regret[i] += float(totals["regret"][0][i])
                    row[report.REGRET] = self._regret[i]
                row["finite"] = bool(finite[i])
            if evaluation is not None:
                returns = np.asarray(evaluation.returns[i], np.float64)
                returns = returns[~np.isnan(returns)] if not np.isnan(returns).all() else returns
                row |= {
                    "eval/return": returns.mean(),
                    "eval/return_std": returns.std(),
                    "eval/length": float(np.mean(evaluation.lengths[i])),
                    "eval/episodes": len(returns),
                    "eval/unfinished": int(np.sum(~evaluation.finished[i])),
                }
            if self._note_failure(row):
                new_failures.append(self.failed[-1])
            if row.get("finite") is False:
                row |= {name: None for name in row if name.startswith("eval/return")}
            self.rows.append({key: _json_number(value) for key, value in row.items()})
            self._file.write(json.dumps(self.rows[-1]) + "\n")
        self._file.flush()
        self._logs.write(self.rows[before:])
        return new_failures

    def flush(self) -> None:
        """To the disk: the rows up to a checkpoint must outlive it."""
        self._file.flush()
        if hosts.leads():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _note_failure(self, row: dict[str, Any]) -> bool:
        is_new = row.get("finite") is False and row["lane"] not in {f["lane"] for f in self.failed}
        if is_new:
            reason = "non-finite parameters"
            self.failed.append({"lane": row["lane"], "seed": row["seed"], "step": row["step"], "reason": reason})
        return is_new


def _finalize(totals: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Sums and counts to means; None where there was nothing to count."""
    row: dict[str, Any] = {name: float(s) / float(n) if n else None for name, (s, n) in totals.items()}
    if "episode/return_square" in row:
        mean, square = row["episode/return"], row.pop("episode/return_square")
        row["episode/return_std"] = None if mean is None or square is None else math.sqrt(max(square - mean * mean, 0.0))
        row["episode/count"] = int(totals["episode/return"][1])
    return row


def _json_number(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def provenance(experiment: Experiment, argv: list[str]) -> dict[str, Any]:
    """What a reader needs to get the same numbers again, as ``run.json`` holds it."""
    packages = ("rljax", "jax", "jaxlib", "flax", "optax", "gymnax", "gymnasium", "brax", "orbax-checkpoint", "numpy")
    versions = {"python": platform.python_version()}
    for package in (*packages, *_extensions(experiment)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit, dirty = _commit()
    return {
        "name": experiment.name,
        "config_hash": experiment.hash,
        "env": experiment.env,
        "agent": experiment.algo_name,
        "sweep": {key: list(values) for key, values in experiment.sweep.items()},
        "argv": argv,
        "command": shlex.join(["rljax", "reproduce", str(experiment.path)]),
        "commit": commit,
        "dirty": dirty,
        "versions": versions,
        "devices": [str(device) for device in jax.devices()],
        "platform": f"{platform.system()} {platform.machine()}, {jax.default_backend()}",
    }


def _extensions(experiment: Experiment) -> list[str]:
    """Packages that provide the agent, the environment and the graders of an experiment, by entry points."""

    def types(value: Any) -> list[str]:
        """Of the graders in parameters of an environment: tables that have a type, in tables and lists."""
        if isinstance(value, dict):
            return [*([value["type"]] if isinstance(value.get("type"), str) else []), *types(list(value.values()))]
        return [kind for item in value for kind in types(item)] if isinstance(value, list | tuple) else []

    used = [("agent", experiment.algo_name), ("environment", experiment.env)]
    used += [("grader", kind) for kind in types(experiment.env_params)]
    found = [entry for kind, name in used for entry in extensions.entries(kind).get(name, [])]
    return [entry.dist.name for entry in found if entry.dist is not None]


def _commit() -> tuple[str | None, bool | None]:
    """Commit of the checkout that rljax runs from, else of the working directory."""
    for directory in (Path(__file__).parent, Path.cwd()):
        git = ["git", "-C", str(directory)]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
            status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
            return commit, bool(status.strip())
    return None, None


@contextlib.contextmanager
def locked(path: Path, fresh: bool) -> Iterator[None]:
    """Holds the run directory against a second process; the lock goes with the process, however it ends.

    Raises:
      InputError: another process has it, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise InputError(f"out: cannot write to {path.parent}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{path} is being run by another process") from error
        if fresh and path.exists():
            shutil.rmtree(path)
        yield


def contents_digest(name: Any) -> str | None:
    """Of the contents of a file; None where an environment's parameter names none."""
    if not isinstance(name, str) or not name or len(name) > 4096 or not Path(name).is_file():
        return None
    return file_digest(Path(name))


def now() -> str:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
      InputError: the file holds no JSON table.
    """
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is no table")
        return data
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}; --fresh starts over") from error


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes it whole or not at all; of several processes the first alone does."""
    if hosts.leads():
        write_whole(path, (json.dumps(data, indent=2) + "\n").encode())
