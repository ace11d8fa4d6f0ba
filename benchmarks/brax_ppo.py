"""Returns of brax's own PPO trainer, at the settings of one of our configs: what docs/results.md sets ours beside.

    python benchmarks/brax_ppo.py experiments/ppo_ant.toml --seeds 0 1 2 3 4

Equal: environment, backend, steps, environments, unroll, epochs, minibatches, network, discount, lambda, clip, entropy bonus,
gradient norm, observation normalisation, deterministic evaluation of as many episodes. brax's own: Adam's epsilon of 1e-8,
values and advantages computed anew in every gradient step, and its own evaluation episodes.
"""

import argparse
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import brax_trainer

from rljax.experiment import load


def train(experiment: Any, seed: int) -> tuple[list[int], list[float], float]:
    """``(steps, mean evaluation returns, seconds)`` of one seed."""
    curve: list[tuple[int, float]] = []
    began = time.perf_counter()
    brax_trainer.train(
        experiment.algo,
        env=experiment.env.removeprefix("brax/"),
        env_params=experiment.env_params,
        steps=experiment.total_steps,
        evaluations=experiment.evals,
        episodes=experiment.eval_episodes,
        after_evaluation=lambda step, metrics: curve.append((int(step), float(metrics["eval/episode_reward"]))),
        deterministic_eval=True,
        seed=seed,
    )
    steps, returns = zip(*curve, strict=True)
    return list(steps), list(returns), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    experiment = load(arguments.config)
    runs = {}
    for seed in arguments.seeds:
        steps, returns, seconds = train(experiment, seed)
        runs[seed] = {"eval_steps": steps, "eval_returns": [round(x, 4) for x in returns], "wall_seconds": round(seconds, 1)}
        print(f"seed {seed}: {returns[-1]:.1f} after {steps[-1]:,} steps, {seconds:.0f} s", flush=True)
    versions = {name: metadata.version(name) for name in ("brax", "jax", "flax", "optax")}
    out = Path(__file__).parent / "results" / f"brax_own_{experiment.name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"config": experiment.name, "versions": versions, "seeds": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
