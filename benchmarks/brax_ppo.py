"""Returns of brax's own PPO trainer, at the settings of one of our configs: what docs/results.md sets ours beside.

    python benchmarks/brax_ppo.py experiments/ppo_ant.toml --seeds 0 1 2 3 4

Equal: environment, backend, steps, environments, unroll, epochs, minibatches, network, discount, lambda, clip, entropy bonus,
gradient norm, observation normalisation, deterministic evaluation of as many episodes. brax's own: Adam's epsilon of 1e-8,
values and advantages computed anew in every gradient step, and its own evaluation episodes.
"""

import argparse
import functools
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen

from rljax.experiment import load

if not hasattr(jax, "device_put_replicated"):  # gone from newer jax, and all that the trainer misses there

    def _replicate(tree: Any, devices: list[Any]) -> Any:
        mesh = jax.sharding.Mesh(np.asarray(devices), ("i",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        return jax.device_put(jax.tree.map(lambda x: jax.numpy.stack([x] * len(devices)), tree), sharding)

    jax.device_put_replicated = _replicate  # type: ignore[attr-defined]


def train(experiment: Any, seed: int) -> tuple[list[int], list[float], float]:
    """``(steps, mean evaluation returns, seconds)`` of one seed."""
    from brax import envs
    from brax.training.agents.ppo import networks
    from brax.training.agents.ppo import train as ppo

    c = experiment.algo
    curve: list[tuple[int, float]] = []
    began = time.perf_counter()
    ppo.train(
        environment=envs.get_environment(experiment.env.removeprefix("brax/"), **experiment.env_params),
        num_timesteps=experiment.total_steps,
        max_devices_per_host=1,
        num_envs=c.num_envs,
        episode_length=1000,
        learning_rate=c.learning_rate,
        entropy_cost=c.entropy_coef,
        discounting=c.discount,
        unroll_length=c.num_steps,
        batch_size=c.num_envs // c.num_minibatches,
        num_minibatches=c.num_minibatches,
        num_updates_per_batch=c.num_epochs,
        normalize_observations=c.normalize_observations,
        clipping_epsilon=c.clip,
        clipping_epsilon_value=c.clip_value,
        gae_lambda=c.gae_lambda,
        max_grad_norm=c.max_grad_norm,
        normalize_advantage=True,
        vf_loss_coefficient=c.value_coef,
        network_factory=functools.partial(
            networks.make_ppo_networks,
            policy_hidden_layer_sizes=c.hidden,
            value_hidden_layer_sizes=c.hidden,
            activation=getattr(linen, c.activation),
            distribution_type="normal",
            noise_std_type="log",
        ),
        num_evals=experiment.evals + 1,
        num_eval_envs=experiment.eval_episodes,
        deterministic_eval=True,
        seed=seed,
        progress_fn=lambda step, metrics: curve.append((int(step), float(metrics["eval/episode_reward"]))),
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
