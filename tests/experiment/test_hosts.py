"""Several processes as one run, on loopback: real processes, one CPU device each, one of them killed in the middle."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple

import jax
import pytest

from rljax.cli import main
from rljax.experiment import InputError, hosts, lanes, load, load_states, resume, run
from tests.experiment.runs import assert_same, stop_after

TINY = {
    "env": "CartPole-v1",
    "total_steps": 1280,
    "seeds": [0, 1, 2],
    "evals": 4,
    "eval_episodes": 2,
    "checkpoint_seconds": 0,
    "algo.num_envs": 4,
    "algo.num_steps": 8,
    "algo.num_epochs": 1,
    "algo.num_minibatches": 1,
    "algo.hidden": [8],
    "algo.normalize_observations": True,
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}  # jax warns of those
ENVIRONMENT |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # time goes to compilation, which may be poor
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
LONG = 300  # seconds that a busy machine may take


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(n, out, **changes):
    """``n`` processes of one run."""
    flags = [f"--{k}={json.dumps(v)}" for k, v in {**TINY, "out": str(out), **changes}.items()]
    shared = [sys.executable, "-m", "rljax", "run", *flags, "--coordinator", f"127.0.0.1:{free_port()}", f"--processes={n}"]
    return [subprocess.Popen([*shared, f"--process={i}"], **PIPES) for i in range(n)]


def ends(processes):
    """``(status, stdout, stderr)`` of each; kills what does not end."""
    try:
        return [(p.wait(LONG), *p.communicate()) for p in processes]
    finally:
        for p in processes:
            p.kill()


def kill_at(processes, victim, path, chunk):
    """SIGKILL as soon as a checkpoint of ``chunk`` or later is there; how the others end, and after how many seconds."""
    deadline = time.time() + LONG
    while max((int(p.name) for p in (path / "checkpoints").glob("*") if p.name.isdigit()), default=-1) < chunk:
        assert time.time() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.01)
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.time()
    return ends(processes), time.time() - killed


def finish(n, out, **changes):
    """Runs ``n`` processes to their end; all but the first say nothing."""
    (status, said, _), *others = ends(start(n, out, **changes))
    assert (status, [s for s, _, _ in others]) == (0, [0] * (n - 1))
    assert "finished" in said
    for _, said, errors in others:
        assert errors == "" and all(line.startswith("[Gloo]") for line in said.splitlines())


def assert_same_runs(path, other):
    """Byte for byte, and bit for bit."""
    assert (path / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert_same(load_states(path)[1], load_states(other)[1])


def test_two_processes_one_killed_equal_one_process_that_was_not(tmp_path):
    """Begun by one process, gone on by two of which one is killed, and finished by two; and by one, from the same checkpoint."""
    whole = run(load(None, {**TINY, "out": str(tmp_path / "whole")}))  # two devices, as the two processes have
    e = load(None, {**TINY, "out": str(tmp_path / "out")})
    with pytest.raises(KeyboardInterrupt):
        run(e, listener=stop_after(3))

    ended, seconds = kill_at(start(2, tmp_path / "out"), 1, e.path, 6)
    assert [status for status, _, _ in ended] == [1, -signal.SIGKILL]
    errors = ended[0][2]
    assert "process 0 has lost another process" in errors and hosts.AGAIN in errors and errors.count("\n") == 1
    assert seconds < 60
    done = json.loads((e.path / "run.json").read_text())
    assert (done["status"], len(done["devices"])) == ("running", 2)
    shutil.copytree(e.path, tmp_path / "one" / "run" / e.path.name)

    finish(2, tmp_path / "out")
    assert_same_runs(e.path, whole.path)
    assert_same_runs(resume(tmp_path / "one" / "run" / e.path.name).path, whole.path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_four_processes_one_killed(tmp_path, victim):
    """Process 0 too: jax then aborts the others, and the last line of each is plain."""
    seeds = list(range(6))  # on four devices: two lanes each, two of them padding
    finish(4, tmp_path / "whole", seeds=seeds)
    e = load(None, {**TINY, "out": str(tmp_path / "out"), "seeds": seeds})
    ended, seconds = kill_at(start(4, tmp_path / "out", seeds=seeds), victim, e.path, 5)
    assert seconds < 90
    for i, (status, _, errors) in enumerate(ended):
        assert status == (-signal.SIGKILL if i == victim else 1)
        assert i == victim or errors.splitlines()[-1].endswith(hosts.AGAIN)
    finish(4, tmp_path / "out", seeds=seeds)
    assert_same_runs(e.path, tmp_path / "whole" / "run" / e.path.name)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path):
    """Wrong input is said once by each that finds it; a full disk of process 0 ends the rest, in one line."""
    ended = ends(start(2, tmp_path, seeds=[0]))
    assert [status for status, _, _ in ended] == [2, 2]
    assert "2 processes for 1 lane: each needs one of its own" in ended[0][2]
    (tmp_path / "file").touch()
    ended = ends(start(2, tmp_path / "file"))
    assert [status for status, _, _ in ended] == [2, 2]
    assert "cannot write" in ended[0][2] and ended[1][2] == ""


def test_a_missing_process_is_a_line():
    """After a while, on whichever process waits."""
    call = "import sys; from rljax.experiment import hosts; hosts.WAIT = 1; hosts.join(sys.argv[1], 3, int(sys.argv[2]))"
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    waiting = [subprocess.Popen([sys.executable, "-c", call, a, str(i)], **PIPES) for i, a in enumerate(addresses)]
    first, second = ends(waiting)
    assert first == (1, "", f"rljax: process 0 waits at {addresses[0]}, and not all of the other 2 have come after 1 s\n")
    line = f"rljax: process 1 cannot reach process 0 at {addresses[1]} (Connection refused) after 1 s\n"
    assert second == (1, "", line)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--processes 2", "--processes 2: --coordinator HOST:PORT is missing"),
        ("--processes 2 --coordinator host:1", "--processes 2: --process I is missing"),
        ("--processes 2 --coordinator host:1 --process 2", "--process must be from 0 to 1 with --processes 2, got 2"),
        ("--processes 2 --coordinator host --process 0", "--coordinator must be HOST:PORT, got 'host'"),
        ("--coordinator host:1 --process 0", "--processes N is missing, which goes with --process"),
        ("--processes 2 --coordinator 3 --process 0", "--coordinator must be HOST:PORT, got 3"),
        ("--processes 0 --coordinator host:1 --process 0", "--processes must be a number or auto, got 0"),
        ("--processes 2 --coordinator host:1 --process one", "--process must be a number, got 'one'"),
        ("--processes auto --process 0", "--processes auto: leave out --coordinator and --process"),
        ("--processes auto", "--processes auto: no TPU pod, Slurm or Open MPI job here"),
        ("--processes", "--processes: a value is missing"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(capsys, flags, message):
    assert main(["run", "--env", "CartPole-v1", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_port_in_use_is_refused(capsys):
    """jax's server would crash, or end the run that has the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = f"--processes 2 --process 0 --coordinator 127.0.0.1:{port}"
        assert main(["run", "--env", "CartPole-v1", *flags.split()]) == 2
    assert f"--coordinator: cannot listen on port {port}: Address already in use" in capsys.readouterr().err


def test_a_cluster_says_who_is_there(monkeypatch):
    """Slurm by its variables; a job of one process stays alone."""
    step = {"JOB_ID": "7", "STEP_NODELIST": "node[3-4]", "NTASKS": "8", "PROCID": "5", "LOCALID": "1"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    coordinator, processes, process, local = hosts._cluster()
    assert (coordinator.split(":")[0], processes, process, local) == ("node3", 8, 5, [1])
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    hosts.join(None, None, None)
    assert not hosts.joined() and hosts.leads()


def test_devices_are_taken_of_each_process_in_turn():
    Device = namedtuple("Device", "id process_index")
    devices = [Device(i, i // 4) for i in range(8)]
    assert [d.id for d in lanes._spread(devices, 3)] == [0, 1, 4]
    assert lanes._spread(devices, 9) == devices
    assert lanes._spread(devices[:4], 3) == devices[:3]
    with pytest.raises(InputError, match="2 processes for 1 lane: each needs one of its own, so start fewer"):
        lanes._spread(devices, 1)
