"""Several processes as one run: how they find each other, what process 0 decides for all, and how they end together.

All compute, each on the lanes of its own devices, and all read the run directory, which is on a file system that they share.
Process 0 alone writes and says anything, and alone looks at the clock. What it decides goes to the others through the key-value
store of `jax.distributed`, not through the devices, so that they wait for it however long it takes.

Nothing here starts `jax.distributed` for a run of one process.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from rljax.experiment.config import InputError

WAIT = 300  # seconds for all processes to come
HEARTBEAT = 60  # seconds of silence after which jax takes a process for dead, and ends the others
FOREVER = 2**31 - 1  # milliseconds
AGAIN = "the same command on all processes resumes from the last checkpoint"

_turns = itertools.count()
_told = threading.Event()  # that another has failed
_keep: list[Any] = []  # the handler of SIGABRT, which C holds no reference to


def joined() -> bool:
    return jax.distributed.is_initialized()


def leads() -> bool:
    """Whether this is process 0, or the only one."""
    return not joined() or me() == 0


def me() -> int:
    """Which process this is. `jax.process_index` would start the devices, for which all processes wait for each other."""
    return _jax().process_id


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Waits for all processes of a run; must come before anything else of jax.

    Args:
      coordinator: ``HOST:PORT`` on which process 0 listens.
      processes: how many there are; None: as a TPU pod, Slurm or Open MPI says, and the other two with it.
      process: which of them this is, from 0.

    Raises:
      InputError: these do not fit together, or there is no cluster to ask.
    """
    local = None
    if processes is None:
        if coordinator is not None or process is not None:
            raise InputError("--processes auto: leave out --coordinator and --process, which the cluster knows too")
        coordinator, processes, process, local = _cluster()
    if coordinator is None or process is None:
        missing = "--coordinator HOST:PORT" if coordinator is None else "--process I"
        raise InputError(f"--processes {processes}: {missing} is missing")
    if not 0 <= process < processes:
        raise InputError(f"--process must be from 0 to {processes - 1} with --processes {processes}, got {process}")
    host, _, port = str(coordinator).rpartition(":")
    if not host or not port.isdigit() or int(port) >= 2**16:
        raise InputError(f"--coordinator must be HOST:PORT, got {coordinator!r}")
    if processes == 1:
        return
    if process == 0:
        _check_free(int(port))
    _die_plainly()

    def late() -> None:
        print(f"rljax: {_who_is_missing(host, int(port), processes, process)} after {WAIT} s", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(WAIT, late)  # jax would abort, with a stack trace
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            local,
            cluster_detection_method="deactivate",
            initialization_timeout=WAIT + 60,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except RuntimeError as error:
        raise InputError(f"--coordinator {coordinator}: {str(error).splitlines()[0]}; is the port in use?") from error
    finally:
        timer.cancel()
    threading.Thread(target=_watch, daemon=True).start()


def meet() -> None:
    """Waits until all processes are here, however long it takes.

    Comes between what they compile and what they then compute together: collectives wait for 30 s alone, and jax keeps what
    process 0 has compiled but not what the others have.
    """
    if joined():
        _store().wait_at_barrier(f"rljax/{next(_turns)}", FOREVER)


def lead(decide: Callable[[], Any]) -> Any:
    """On all processes what ``decide`` returns on process 0, which alone calls it: None or JSON."""
    if not joined():
        return decide()
    key = f"rljax/{next(_turns)}"
    if not leads():
        return json.loads(_store().blocking_key_value_get(key, FOREVER))
    decided = json.dumps(decide())
    _store().key_value_set(key, decided)
    return json.loads(decided)


def leave(status: int) -> None:
    """Ends this process's part: with the others where all went well, else the others with it.

    Does nothing for a run of one process.
    """
    if not joined():
        return
    if status == 0:
        jax.distributed.shutdown()
        return
    if _told.wait(0.1):  # what has failed here follows from that, and `_watch` ends this process
        time.sleep(60)
    error = sys.exception()
    text = f"process {me()} has stopped, see what it says"
    if error is not None and any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE", "rljax/")):
        text = f"process {me()} has lost another process ({str(error).splitlines()[0][:160]})"
        print(f"rljax: {text}; {AGAIN}", file=sys.stderr, flush=True)
    elif error is not None:
        traceback.print_exception(error)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was faster
        _store().key_value_set("rljax/end", json.dumps([me(), status, text]))
    _exit(status)


def _exit(status: int) -> None:
    """Without jax, which would wait at exit for processes that do not come; process 0, which has the store, a second later."""
    if leads():
        time.sleep(1.0)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _watch() -> None:
    """Ends this process when another says that it has failed."""
    try:
        who, status, text = json.loads(_store().blocking_key_value_get("rljax/end", FOREVER))
    except jax.errors.JaxRuntimeError:
        return  # the run is over
    if who == me():
        return
    _told.set()
    if status == 1:  # wrong input is told by the one that found it
        print(f"rljax: {text}; {AGAIN}", file=sys.stderr, flush=True)
    _exit(status)


def _die_plainly() -> None:
    """A line after the stack trace with which jax aborts when a process does not answer any more; and status 1."""

    def last_words(_: int) -> None:
        os.write(2, f"rljax: jax has ended this process, most likely since another did not answer; {AGAIN}\n".encode())
        os._exit(1)

    # abort() comes from a thread of jax, and no handler of Python's `signal` runs before the process is gone
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(last_words)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, type(handler)]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
    _keep.append(handler)


def _check_free(port: int) -> None:
    """
    Raises:
      InputError: something listens on the port. The server of jax would share it with another of its kind, or crash.
    """
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run that has just ended is not in the way
        try:
            probe.bind(("", port))
        except OSError as error:
            raise InputError(f"--coordinator: cannot listen on port {port}: {error.strerror}; name a free one") from error


def _cluster() -> tuple[str, int, int, Any]:
    """``(coordinator, processes, process, local devices)`` of the cluster that this runs on.

    Raises:
      InputError: there is none that jax knows.
    """
    from jax._src.clusters import ClusterEnv

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, WAIT)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"--processes auto: {str(error).splitlines()[0]}") from error
    coordinator, processes, process, local = found
    if coordinator is None or processes is None or process is None:
        raise InputError(
            "--processes auto: no TPU pod, Slurm or Open MPI job here; give --coordinator HOST:PORT --processes N --process I"
        )
    return coordinator, processes, process, local


def _who_is_missing(host: str, port: int, processes: int, process: int) -> str:
    if process == 0:
        return f"process 0 waits at {host}:{port}, and not all of the other {processes - 1} have come"
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=5):
            return f"process {process} has found process 0 at {host}:{port}, and another of the {processes} has not come"
    except OSError as error:
        return f"process {process} cannot reach process 0 at {host}:{port} ({error.strerror or error})"


def _store() -> Any:
    """The key-value store of all processes, which jax has no public name for."""
    return _jax().client


def _jax() -> Any:
    from jax._src.distributed import global_state

    return global_state
