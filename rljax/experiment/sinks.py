"""Where the rows of ``metrics.jsonl`` go besides: TensorBoard, Weights & Biases, trackio.

Each lane is a run of its own there; nothing is averaged. A sink changes no result, so none is part of a config. At its start a
sink is given all rows that the run goes on from, and takes those that it does not hold yet, so that going on, beginning in the
middle and sending a finished run are the same. What fails there is said once, and the run goes on without that sink.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import io
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rljax.experiment.config import Experiment, InputError
from rljax.experiment.report import setting_label
from rljax.options import did_you_mean

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
PROJECT = "rljax"  # of what is logged to Weights & Biases and to trackio, unless their own variables name another
FINISH_SECONDS = 120.0  # for Weights & Biases to send what is left of a lane
FAILED = "non-finite parameters"


class Lane(NamedTuple):
    """One lane of a run, as a sink sees it.

    Attributes:
      path: the run directory.
      group: of all lanes of the run.
      name: the lane's seed and swept values.
      id: the same whenever the run is resumed, and no other run's.
      config: the resolved config with the lane's own values; ``sweep`` holds those that are swept, and ``seed`` is one number.
      last: step of the last row that the run goes on from; -1: it begins.
    """

    path: Path
    group: str
    name: str
    id: str
    config: dict[str, Any]
    last: int


class Sink(Protocol):
    """One lane in a sink, which its constructor opens. Every method may raise what it likes.

    Attributes:
      held: the last step that the sink holds from before; -1: none. Rows up to it are left out.
      where: in words, where the rows go.
    """

    held: int
    where: str

    def __init__(self, lane: Lane): ...
    def log(self, step: int, values: dict[str, float]) -> None: ...
    def fail(self, step: int) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in ``tensorboard/`` of the run directory, a folder for each lane.

    Its readers drop what a file that is resumed holds past the checkpoint, by the step that the next file purges from.
    """

    def __init__(self, lane: Lane):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import scalar, text

        proto = importlib.import_module("tensorboardX.proto.event_pb2")
        self._event, self._scalar, self._text = proto.Event, scalar, text
        folder = lane.path / "tensorboard" / lane.name.replace(", ", ",").replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        written = max((step for file in folder.glob("*tfevents*") for step in _steps(file, proto.Event)), default=-1)
        # Of the last step that is there a kill may have left some metrics out, so it is written anew.
        self.held = min(written - 1, lane.last) if written >= 0 else -1
        self.where = f"tensorboard --logdir {lane.path / 'tensorboard'}"
        # Written by hand: the thread of SummaryWriter dies of a full disk, and whoever logs then waits for ever.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")  # two files of a second need two names
        if written >= 0:
            self._write(step=self.held + 1, session_log=proto.SessionLog(status=proto.SessionLog.START))
        if self.held < 0:
            self._write(step=0, summary=text("config", _as_text(lane.config)))

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._write(step=step, summary=self._scalar(name, value))
        self._writer.flush()

    def fail(self, step: int) -> None:
        self._write(step=step, summary=self._text("failed", f"{FAILED} at step {step:,}"))
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """Runs of Weights & Biases, grouped. One that is resumed goes on under its id, and steps that it has are not sent again.

    Offline there is nothing to go on from: a new folder gets all rows, and takes the place of the lane's earlier ones.
    """

    def __init__(self, lane: Lane):
        wandb = importlib.import_module("wandb")
        root = os.environ.get("WANDB_DIR") or str(lane.path)
        if wandb.setup().settings.mode == "offline":
            for earlier in Path(root).glob(f"wandb/offline-run-*-{lane.id}"):
                shutil.rmtree(earlier)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=lane.id,
            name=lane.name,
            group=lane.group,
            config=lane.config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,  # of the machine, once for each lane
                init_timeout=30,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
            dir=root,
        )
        self.held = self._run.step - 1
        place = Path(root, "wandb", "offline-run-*")
        self.where = f"wandb, offline: wandb sync {place}" if self._run.offline else f"wandb, {self._run.project_url}"

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def fail(self, step: int) -> None:
        self._run.tags = (*(self._run.tags or ()), "failed")
        self._run.summary["failed"] = f"{FAILED} at step {step:,}"

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """Runs of trackio, in its own store, grouped. One that is resumed goes on, and steps that it has are not sent again."""

    def __init__(self, lane: Lane):
        with _quiet():
            trackio = importlib.import_module("trackio")
            project = os.environ.get("TRACKIO_PROJECT") or PROJECT
            # In a context of its own: `init` ends the run that the context holds.
            self._run = contextvars.Context().run(
                trackio.init,
                project,
                name=f"{lane.name} {lane.id}",
                group=lane.group,
                config=lane.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._error = trackio.AlertLevel.ERROR
        self.held = self._run._next_step - 1  # which has no public name
        self.where = f"trackio show --project {project}"

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def fail(self, step: int) -> None:
        with _quiet():
            self._run.alert("failed", f"{FAILED} at step {step:,}", level=self._error, step=step)

    def close(self, failed: bool) -> None:
        with _quiet():
            self._run.finish()


SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def check(log: str | Sequence[str]) -> list[str]:
    """The names of sinks in ``log``, each of which can begin, as far as that can be known before anything is trained.

    Raises:
      InputError: an unknown sink, one whose package is missing, or one that has no account to log to.
    """
    names = [str(name) for name in dict.fromkeys(log if isinstance(log, list | tuple) else [log])]
    for name in names:
        if name not in SINKS:
            raise InputError(f"--log: unknown sink {name!r}{did_you_mean(name, list(SINKS))}; known: {', '.join(SINKS)}")
        try:
            package = importlib.import_module(PACKAGES[name])
        except ImportError as error:
            raise InputError(f"--log {name}: {error}: pip install 'rljax[{name}]'") from error
        if name == "wandb":
            _check_account(package)
    return names


def _check_account(wandb: Any) -> None:
    with _quiet():
        if wandb.setup().settings.mode not in ("online", "shared"):
            return
        try:
            reason = "" if wandb.login(prompt=False) else "not logged in, which `wandb login` does"
        except Exception as error:  # of the network, of the key, and of what both depend on
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if reason:
        raise InputError(f"--log wandb: {reason}; WANDB_MODE=offline needs no account and no network")


class Sinks:
    """The sinks of one run. ``begin`` opens them; leaving the context closes them.

    Args:
      names: of `SINKS`.
      say: called with a line for each sink that opens, and for each that fails.
    """

    def __init__(self, experiment: Experiment, names: Sequence[str], say: Callable[[str], None]):
        self._experiment, self._say = experiment, say
        self._sinks: dict[str, list[Sink]] = {name: [] for name in names}
        self._failed: set[int] = set()  # lanes
        self._aside = {"step", "lane", "seed", *experiment.sweep}  # what of a row is no metric

    def begin(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """Opens each sink, and gives it the rows so far.

        Args:
          run_id: tells this run from others of the same config.
          rows: those that the run goes on from.
        """
        lanes = [self._lane(row, run_id, rows[-1]["step"] if rows else -1) for row in self._experiment.lanes()]
        for name in list(self._sinks):
            with self._lost(name):
                for lane in lanes:
                    self._sinks[name].append(SINKS[name](lane))
                self._say(f"logs to {self._sinks[name][0].where}")
        self.write(rows)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Gives each sink the rows that it does not hold."""
        newly = [row for row in rows if row.get("finite") is False and row["lane"] not in self._failed]
        first = {row["lane"]: row["step"] for row in reversed(newly)}
        self._failed |= first.keys()
        for name in list(self._sinks):
            with self._lost(name):
                for row in rows:
                    sink, step, lane = self._sinks[name][row["lane"]], row["step"], row["lane"]
                    if step <= sink.held:
                        continue
                    values = {k: float(v) for k, v in row.items() if k not in self._aside and v is not None}
                    sink.log(step, values)
                    if first.get(lane) == step:
                        sink.fail(step)

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        for name in list(self._sinks):
            with self._lost(name):
                for lane, sink in enumerate(self._sinks[name]):
                    sink.close(failed=kind is not None or lane in self._failed)

    @contextlib.contextmanager
    def _lost(self, name: str) -> Iterator[None]:
        """Does without a sink from when it fails."""
        try:
            yield
        except Exception as error:  # of packages that are not ours, over disks and networks
            del self._sinks[name]
            words = (str(error).strip().splitlines() or [""])[0]
            self._say(f"--log {name} has failed, and the run goes on without it: {type(error).__name__}: {words}")

    def _lane(self, row: dict[str, Any], run_id: str, last: int) -> Lane:
        experiment = self._experiment
        values = {key: row[key] for key in experiment.sweep}
        single = dataclasses.replace(experiment._with(values), sweep={}, sweep_mode="grid", sweep_halving=())
        config = single.to_dict() | {"seed": row["seed"], "lane": row["lane"], "hash": experiment.hash, "sweep": values}
        del config["seeds"]
        name = ", ".join(filter(None, [f"seed={row['seed']}", setting_label(values)]))
        identity = f"{experiment.hash}-{run_id}-{row['lane']}"
        return Lane(experiment.path, f"{experiment.name}/{experiment.hash}", name, identity, config, last)


def _as_text(config: dict[str, Any]) -> str:
    """A config as TensorBoard shows text: Markdown."""
    import tomli_w

    return "".join(f"    {line}\n" for line in tomli_w.dumps(config).splitlines())


def _steps(file: Path, event: Any) -> Iterator[int]:
    """The step of every scalar in an event file; what a kill has cut short at its end is left out."""
    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)  # then its checksum, the event, and another checksum
        if at + 16 + length > len(data):
            return
        read = event.FromString(data[at + 12 : at + 12 + length])
        if any(value.HasField("simple_value") for value in read.summary.value):
            yield read.step
        at += 16 + length


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what a package prints; what there is to say is in `Sink.where`, and in what it raises."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
