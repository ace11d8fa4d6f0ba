"""One GRPO step of a language model, sampling and update, beside TRL's `GRPOTrainer`: equal models, prompts, groups and lengths.

    python benchmarks/speed/grpo.py --peers FOLDER    # as in compare.py

Both begin with random weights of one Llama, sample completions of a fixed length from prompts of random tokens, reward the count
of one token, and take one gradient step, with float32 weights and no reference. Each is a process that warms up and then trains
once a round, in turns, in an order that is reversed every other round. The ratio is that of the least time of a step on each
side: a shared machine adds time and takes none away. Results go to ``benchmarks/results/speed_grpo.json``.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from compare import ROOT, Worker, WorkerError, environment


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a step; ``steps`` of a round."""

    rows: int
    layers: int
    width: int
    prompt: int
    completion: int
    steps: int
    group: int = 8
    heads: int = 4
    kv_heads: int = 4
    mlp: int = 0  # 0: 8/3 of the width
    vocabulary: int = 16
    tied: int = 0
    dtype: str = "float32"
    learning_rate: float = 1e-3
    warmups: int = 5  # of the peer
    threads: int = 2  # of the peer; XLA takes one for each core
    microbatches: int = 1  # of rljax: the gradient is that of the whole


CASES = {
    "32-rows-2x64": Case(rows=32, layers=2, width=64, prompt=16, completion=32, steps=20),
    "256-rows-2x64-short": Case(rows=256, layers=2, width=64, prompt=6, completion=4, steps=20),
    "256-rows-2x64": Case(rows=256, layers=2, width=64, prompt=16, completion=32, steps=8, microbatches=4),
    "256-rows-4x128": Case(rows=256, layers=4, width=128, prompt=16, completion=32, steps=4, microbatches=4),
    # The sizes of SmolLM2-135M.
    "64-rows-135M-bfloat16": Case(
        rows=64,
        layers=30,
        width=576,
        prompt=16,
        completion=48,
        steps=1,
        heads=9,
        kv_heads=3,
        mlp=1536,
        vocabulary=49152,
        tied=1,
        dtype="bfloat16",
        learning_rate=1e-5,
        warmups=2,
    ),
}


def arguments(contender: str, case: Case) -> list[str]:
    """The command line of a contender."""
    if contender == "trl":
        options = {name: x for name, x in dataclasses.asdict(case).items() if name != "microbatches"}
        return ["trl_worker.py", *(str(x) for k, v in options.items() for x in (f"--{k.replace('_', '-')}", v))]
    return ["grpo_worker.py", json.dumps(dataclasses.asdict(case))]


def measure(case: Case, pythons: dict[str, str], rounds: int, timeout: float) -> dict[str, Any]:
    """``{contender: what it said of itself, and its rounds}``."""
    workers = {name: Worker(name, pythons[name], arguments(name, case), timeout) for name in pythons}
    try:
        contenders = {name: {**worker.receive(), "rounds": []} for name, worker in workers.items()}
        for number in range(rounds):
            for name in list(workers)[:: -1 if number % 2 else 1]:
                contenders[name]["rounds"].append(workers[name].run(number))
    finally:
        for worker in workers.values():
            worker.close()
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where TRL's environment is, or is to be")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a contender's next message")
    options = parser.parse_args()

    pythons = {"rljax": sys.executable}
    if options.peers:
        pythons["trl"] = environment("trl", options.peers)
    out = ROOT / "benchmarks" / "results" / "speed_grpo.json"
    for name in options.case:
        try:
            contenders = measure(CASES[name], pythons, options.rounds, options.timeout)
        except WorkerError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(f"\n{name}")
        least: dict[str, float] = {}
        for contender, said in contenders.items():
            steps = [r["median_step_seconds"] for r in said["rounds"]]
            least[contender] = min(steps)
            said["summary"] = {"least": min(steps), "median": statistics.median(steps), "ratio": min(steps) / least["rljax"]}
            print(
                f"{contender:>14}  least {1e3 * min(steps):8.1f} ms  median {1e3 * statistics.median(steps):8.1f} ms"
                f"  {min(steps) / least['rljax']:5.2f} times rljax  compile {said['compile_seconds']:5.1f} s"
                f"  {said['parameters']:,} parameters  reward {said['rounds'][-1]['mean_return']:.2f}",
                flush=True,
            )
        report = json.loads(out.read_text()) if out.exists() else {}
        machine = {"cpus": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}", "load": os.getloadavg()[0]}
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        report[name] = {"date": date, "machine": machine, "settings": dataclasses.asdict(CASES[name]), "contenders": contenders}
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
