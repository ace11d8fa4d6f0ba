"""One call of brax's own PPO trainer, at the settings of an rljax config; for `brax_ppo.py` and `speed/worker.py`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen

from rljax.agents import ppo

if not hasattr(jax, "device_put_replicated"):  # gone from newer jax, and all that the trainer misses there

    def _replicate(tree: Any, devices: list[Any]) -> Any:
        mesh = jax.sharding.Mesh(np.asarray(devices), ("i",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        return jax.device_put(jax.tree.map(lambda x: jax.numpy.stack([x] * len(devices)), tree), sharding)

    jax.device_put_replicated = _replicate  # type: ignore[attr-defined]


def train(
    config: ppo.Config,
    env: str,
    env_params: dict[str, Any],
    steps: int,
    evaluations: int,
    episodes: int,
    after_evaluation: Callable[[int, Any], None],
    **others: Any,
) -> None:
    """Trains on one device.

    Args:
      env: brax's name, without a prefix.
      evaluations: in equal distances, besides one before the first step.
      episodes: of an evaluation.
      after_evaluation: ``(steps, metrics)``.
      others: more arguments of the trainer.
    """
    from brax import envs
    from brax.training.agents.ppo import networks
    from brax.training.agents.ppo import train as trainer

    trainer.train(
        environment=envs.get_environment(env, **env_params),
        num_timesteps=steps,
        max_devices_per_host=1,
        num_envs=config.num_envs,
        episode_length=1000,
        learning_rate=config.learning_rate,
        entropy_cost=config.entropy_coef,
        discounting=config.discount,
        unroll_length=config.num_steps,
        batch_size=config.num_envs // config.num_minibatches,
        num_minibatches=config.num_minibatches,
        num_updates_per_batch=config.num_epochs,
        normalize_observations=config.normalize_observations,
        clipping_epsilon=config.clip,
        clipping_epsilon_value=config.clip_value,
        gae_lambda=config.gae_lambda,
        max_grad_norm=config.max_grad_norm,
        normalize_advantage=True,
        vf_loss_coefficient=config.value_coef,
        network_factory=functools.partial(
            networks.make_ppo_networks,
            policy_hidden_layer_sizes=config.hidden,
            value_hidden_layer_sizes=config.hidden,
            activation=getattr(linen, config.activation),
            distribution_type="normal",
            noise_std_type="log",
        ),
        num_evals=evaluations + 1,
        num_eval_envs=episodes,
        progress_fn=after_evaluation,
        **others,
    )
