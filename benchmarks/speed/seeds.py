"""The cost of many seeds over one: seconds that the very program of `rljax run` takes for 1, 5, 8 and 32 seeds.

    python benchmarks/speed/seeds.py experiments/dqn_cartpole.toml experiments/sac_pendulum.toml ...
    python benchmarks/speed/seeds.py bc iql cql td3_bc --seeds 1 10

A name of an offline agent stands for a config of it with all defaults, which learns from `worker.synthetic` data.
For each config the chunks of the programs take turns; compilation is apart. Writes benchmarks/results/speed_seeds.json.
"""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from worker import synthetic

from rljax.experiment.devices import prepare

SEEDS = (1, 5, 8, 32)
OFFLINE = {"bc": 5120, "iql": 1280, "cql": 320, "td3_bc": 1280}  # gradient steps in place of a config's total_steps
OUT = Path(__file__).resolve().parents[1] / "results" / "speed_seeds.json"


def offline_config(agent: str, folder: str) -> str:
    """The path of a config of an offline agent; in an environment that is like the data, and is not played."""
    from rljax.experiment import Recording, write

    write(Recording(synthetic(100_000), {}), Path(folder, "synthetic.npz"))
    path = Path(folder, f"{agent}_synthetic.toml")
    head = f'env = "brax/halfcheetah"\ndata = "synthetic.npz"\ntotal_steps = {OFFLINE[agent]}\nseeds = [0]\n'
    path.write_text(f'{head}[algo]\nname = "{agent}"\n')
    return str(path)


def measure(config: str, rounds: int, steps: int | None, seeds: list[int]) -> dict[str, Any]:
    """Median seconds of a chunk, a fifth of ``steps`` or of the config's, for each number of seeds."""
    import jax

    from rljax.experiment import load
    from rljax.experiment.lanes import build

    experiment = dataclasses.replace(load(config), evals=1)
    if steps:
        experiment = dataclasses.replace(experiment, total_steps=steps)
    programs = {}
    for count in seeds:
        program = build(dataclasses.replace(experiment, seeds=tuple(range(count))))
        states = program.init(program.lanes, program.data)
        states, *_ = jax.block_until_ready(program.chunk(program.lanes, states, program.data))
        programs[count] = (program, states)
    times: dict[int, list[float]] = {count: [] for count in seeds}
    for _ in range(rounds):
        for count, (program, states) in programs.items():
            began = time.perf_counter()
            states, *_ = jax.block_until_ready(program.chunk(program.lanes, states, program.data))
            times[count].append(time.perf_counter() - began)
            programs[count] = (program, states)
    program = programs[1][0]
    per_chunk = program.updates_per_chunk * program.env_steps
    medians = {count: statistics.median(values) for count, values in times.items()}
    return {
        "agent": experiment.algo_name,
        "env": experiment.env,
        "steps_of_a_chunk": per_chunk,
        "seconds": times,
        "steps_per_second": {count: count * per_chunk / medians[count] for count in seeds},
        "cost_over_one_seed": {count: medians[count] / medians[1] for count in seeds},
        "devices": len(jax.devices()),
        "cpus": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="numbers of seeds, 1 among them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of the config's total_steps")
    arguments = parser.parse_args()
    prepare()
    report = json.loads(OUT.read_text()) if OUT.exists() else {}
    for config in arguments.configs:
        with tempfile.TemporaryDirectory() as folder:
            config = offline_config(config, folder) if config in OFFLINE else config
            report[Path(config).stem] = result = measure(config, arguments.rounds, arguments.steps, arguments.seeds)
        costs = ", ".join(f"{count}: {cost:.2f}" for count, cost in result["cost_over_one_seed"].items())
        print(
            f"{Path(config).stem}: {result['steps_per_second'][1]:,.0f} steps/s with one seed; cost over one seed {costs}",
            flush=True,
        )
        OUT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
