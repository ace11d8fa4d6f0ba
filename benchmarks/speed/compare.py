"""Speed against peers: steps a second in training, at equal settings, on one machine.

They are environment steps; of the offline cases, which learn from the same synthetic data, gradient steps.

    python benchmarks/speed/compare.py                              # rljax and brax's trainer alone
    python benchmarks/speed/compare.py --peers FOLDER               # and every peer
    python benchmarks/speed/compare.py --peers FOLDER --case dqn sac-64 --rounds 3

Each peer runs in a virtual environment of its own, since they need other versions of the same packages. FOLDER holds them; those
that are not there yet are made from `requirements-PEER.txt`. purejaxrl is no package: clone its repository and give the folder
with `--purejaxrl`, or it is left out. brax's trainer runs in rljax's own environment.

Every contender is a process that compiles and warms up first, and then trains once a round; the contenders take turns,
in an order that is reversed every other round, and only one runs at a time. The ratio is taken within each round, so
that a machine whose speed drifts favours nobody. Evaluation, logging and the random steps that fill a replay buffer are
outside the timed part.

The results of an algorithm are kept in `benchmarks/results/speed_ALGORITHM.json`, of offline ones in `speed_offline.json`, from
which `benchmarks/collect.py` writes its tables.

What could not be made equal is said in the docstrings of `worker.py`.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from worker import CQL, DQN, IQL, PPO, SAC, TD3BC, Offline, Settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """Contenders, the first of which the others are compared with, and what they train; `updates` where one differs."""

    contenders: tuple[str, ...]
    settings: Settings
    updates: dict[str, int] = dataclasses.field(default_factory=dict)


PPO_PEERS = ("rljax", "rljax-logged", "rejax", "purejaxrl")
OFFLINE_PEERS = ("rljax", "orlax", "orlax-scan", "d3rlpy")
PEERS = ("rejax", "sb3", "sbx", "purejaxrl", "orlax", "d3rlpy")  # each in an environment of its own
CASES = {
    "small-1seed": Case(PPO_PEERS, PPO()),
    "small-1seed-1core": Case(PPO_PEERS, PPO(cores=1)),  # XLA hands small operations from core to core where there are more
    "small-8seeds": Case(PPO_PEERS, PPO(seeds=8)),
    "small-64seeds": Case(("rljax", "rejax"), PPO(seeds=64, updates=100)),
    "cores": Case(("rljax", "rljax-1core"), PPO(seeds=8)),  # as many host devices as `--devices`, beside one
    "large": Case(PPO_PEERS, PPO(num_envs=2048, num_steps=16, updates=64)),
    "sb3": Case(("rljax", "sb3"), PPO(), {"sb3": 40}),
    "brax": Case(
        ("rljax", "brax"),
        PPO(
            env="inverted_pendulum",
            physics="spring",
            num_envs=256,
            num_steps=16,
            hidden=(256, 256),
            updates=125,
            continued=True,
            warmups=2,
        ),
    ),
    "dqn": Case(("rljax", "rljax-logged", "rejax"), DQN(updates=200)),
    "dqn-sbx": Case(("rljax", "sbx"), DQN(updates=200, double=False, huber_delta=1.0), {"sbx": 20}),
    "sac-64": Case(("rljax", "rljax-logged", "rejax", "sbx"), SAC(updates=100), {"sbx": 30}),
    "sac-256": Case(("rljax", "rljax-logged", "rejax", "sbx"), SAC(updates=20, hidden=(256, 256))),
    "cql": Case(OFFLINE_PEERS, CQL(updates=2)),
    "iql": Case(OFFLINE_PEERS, IQL(updates=10)),
    "td3_bc": Case(OFFLINE_PEERS, TD3BC(updates=10)),
}


class WorkerError(RuntimeError):
    """A contender ended or fell silent."""


class Worker:
    """A contender's process."""

    def __init__(self, name: str, python: str, arguments: list[str], timeout: float):
        """``arguments``: the program, a file beside this one, and what it is given."""
        self.name, self._timeout = name, timeout
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes may share a GPU
        if name.startswith(("rljax", "brax")):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [python, str(HERE / arguments[0]), *arguments[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
          WorkerError: with the end of what the process wrote to standard error.
        """
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            self.close()
            raise WorkerError(f"{self.name} was silent for {self._timeout:.0f} s") from None
        if not line:
            self._log.seek(0)
            raise WorkerError(f"{self.name} ended:\n{self._log.read()[-2000:]}")
        return json.loads(line)

    def run(self, seed: int) -> dict[str, Any]:
        """One timed run."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"go {seed}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `receive` says why
        return self.receive()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


def measure(case: Case, pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs a case; a contender that fails is dropped, with a line on standard error."""
    contenders: dict[str, dict[str, Any]] = {}
    workers: dict[str, Worker] = {}

    def drop(name: str, error: WorkerError) -> None:
        print(f"dropped: {error}", file=sys.stderr)
        workers.pop(name).close()
        contenders.pop(name, None)

    try:
        for name in (name for name in case.contenders if name in pythons):
            settings = dataclasses.replace(
                case.settings,
                updates=max(1, round(case.updates.get(name, case.settings.updates) * options.scale)),
                rounds=options.rounds,
                devices=options.devices,
                purejaxrl=options.purejaxrl,
            )
            arguments = ["worker.py", name, json.dumps(dataclasses.asdict(settings))]
            workers[name] = Worker(name, pythons[name], arguments, options.timeout)
            try:
                contenders[name] = {**workers[name].receive(), "rounds": []}
                print(f"  {name} is ready", file=sys.stderr)
            except WorkerError as error:
                drop(name, error)
        for number in range(options.rounds):
            for name in list(workers)[:: -1 if number % 2 else 1]:
                try:
                    contenders[name]["rounds"].append(workers[name].run(100 + number))
                except WorkerError as error:
                    drop(name, error)
    finally:
        for worker in workers.values():
            worker.close()
    shown = {**dataclasses.asdict(case.settings), "rounds": options.rounds, "scale": options.scale}
    for private in ("purejaxrl", "devices"):
        del shown[private]
    return {"settings": shown, "host_devices_of_rljax": options.devices, "contenders": contenders}


OUTCOMES = ("mean_return", "q", "td_error")


def summarize(contenders: dict[str, dict[str, Any]], first: str) -> None:
    """Adds each contender's summary; `ratio` is how many times as fast ``first`` is."""
    rates = {name: [r["steps"] / r["seconds"] for r in c["rounds"]] for name, c in contenders.items()}

    def ratio(name: str) -> float | None:
        if first not in contenders:
            return None
        return statistics.median(base / rate for base, rate in zip(rates[first], rates[name], strict=True))

    for name, contender in contenders.items():
        rounds = contender["rounds"]
        contender["summary"] = {
            "steps_per_second": statistics.median(rates[name]),
            "min": min(rates[name]),
            "max": max(rates[name]),
            "cores_used": statistics.median(r["cpu_seconds"] / r["seconds"] for r in rounds),
            "ratio": ratio(name),
            **{key: statistics.mean(r[key] for r in rounds) for key in OUTCOMES if rounds[0][key] is not None},
        }


def table(case: str, contenders: dict[str, dict[str, Any]]) -> str:
    head = ["contender", "steps/s", "min..max", "ratio", "compile s", "cores", "outcome", "steps", "parameters"]
    rows = [head]
    for name, contender in contenders.items():
        s = contender["summary"]
        rows.append(
            [
                name,
                f"{s['steps_per_second']:,.0f}",
                f"{s['min']:,.0f}..{s['max']:,.0f}",
                "-" if s["ratio"] is None else f"{s['ratio']:.2f}",
                f"{contender['compile_seconds']:.1f}",
                f"{s['cores_used']:.2f}",
                ", ".join(f"{key} {s[key]:.4g}" for key in OUTCOMES if key in s),
                f"{contender['rounds'][0]['steps']:,}",
                f"{contender['parameters']:,}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"\n{case}", *lines])


def environment(peer: str, folder: Path) -> str:
    """The interpreter of a peer's environment, which is made if it is not there, from its released packages."""
    place = folder.resolve() / peer
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        print(f"making {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "-r", HERE / f"requirements-{peer}.txt"], check=True)
        for alone in HERE.glob(f"requirements-{peer}-alone.txt"):  # what asks for packages that it does not need
            subprocess.run([*install, "--no-deps", "-r", alone], check=True)
        ready.touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where the peers' environments are, or are to be")
    parser.add_argument("--purejaxrl", metavar="PATH", default="", help="checkout of purejaxrl")
    parser.add_argument("--devices", type=int, default=2, help="host devices of rljax with several seeds (default 2)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the length of a round, to try things out")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a contender's next message")
    parser.add_argument("--out", type=Path, help="one file for all results")
    options = parser.parse_args()

    if options.purejaxrl and not options.peers:
        parser.error("--purejaxrl needs --peers, where its environment is")
    if options.purejaxrl:
        options.purejaxrl = str(Path(options.purejaxrl).resolve())
    pythons = dict.fromkeys(("rljax", "rljax-logged", "rljax-1core", "brax"), sys.executable)
    wanted = {contender for name in options.case for contender in CASES[name].contenders}
    for peer in PEERS:
        if options.peers and peer in wanted and (peer != "purejaxrl" or options.purejaxrl):
            pythons[peer] = environment(peer, options.peers)
    pythons |= {"orlax-scan": pythons["orlax"]} if "orlax" in pythons else {}

    for name in options.case:
        print(name, file=sys.stderr)
        case = CASES[name]
        result = measure(case, pythons, options)
        summarize(result["contenders"], case.contenders[0])
        print(table(name, result["contenders"]), flush=True)
        system = f"{platform.system()} {platform.machine()}"
        machine = {"cpus": os.cpu_count(), "system": system, "python": platform.python_version()}
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        algo = "offline" if isinstance(case.settings, Offline) else case.settings.algo
        out = options.out or ROOT / "benchmarks" / "results" / f"speed_{algo}.json"
        report = json.loads(out.read_text()) if out.exists() else {}
        report[name] = {"date": date, "machine": machine, **result}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
