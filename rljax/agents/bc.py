"""Behaviour cloning (Pomerleau 1989, "ALVINN"): the log-likelihood of recorded actions, of all episodes or of the best of them.

With ``best`` below 1 it is the "10% BC" of Chen et al. 2021 (arXiv 2106.01345, section 5.1): only the episodes with the highest
returns are cloned.
"""

from typing import Any

import jax
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent
from rljax.agents.offline import as_seen, data_of, distribution, example, learn, single_steps, stats_of
from rljax.agents.on_policy import acting
from rljax.envs import Environment
from rljax.networks import actor_critic
from rljax.networks.torsos import ACTIVATIONS
from rljax.networks.values import FEED_FORWARD
from rljax.ops import dataset, normalization
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-4, "Adam's step size", low=0)
    best: float = traced(1.0, "share of the episodes that are cloned, those with the highest returns", above=0, high=1)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    batch_size: int = static(256, "steps of a gradient step", low=1)
    num_updates: int = static(64, "gradient steps of one call of step, whose random numbers are drawn at once", low=1)
    normalize_observations: bool = static(True, "by the mean and deviation of the data")
    network: str = static("mlp", "torso", choices=FEED_FORWARD)
    hidden: tuple[int, ...] = static((256, 256), "sizes of the hidden layers")
    activation: str = static("relu", "of the hidden layers", choices=tuple(ACTIVATIONS))


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the policy's parameters.
      opt_state: Adam's moments.
      key: typed PRNG key, advanced at every step.
      among: int32 ``[]``, how many steps of the data are cloned.
      observation_stats: of the data.
    """

    params: Any
    opt_state: Any
    key: Array
    among: Array
    observation_stats: normalization.RunningStats


def make(config: Config, env: Environment) -> Agent:
    """Cloning of recorded actions; a step of the run is a gradient step.

    Raises:
      ValueError: one line that names the key: a network that does not fit the environment's spaces.
    """
    spaces = (env.observation_space, env.action_space)
    policy = actor_critic(*spaces, config.network, config.hidden, config.activation, has_value=False)
    optimizer = optax.scale_by_adam(eps=config.adam_eps)

    def init(key: Array, data: Any = None) -> TrainState:
        key, env_key, params_key = jax.random.split(key, 3)
        stats = stats_of(data, env, config.normalize_observations)
        params = policy.init(params_key, example(env, env_key)[0])
        among = dataset.among_best(data_of(data), config.best)
        return TrainState(params, optimizer.init(params), key, among, stats)

    def loss(params: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
        """``-log pi(a|s)``."""
        actions = distribution(policy, params, batch.start.observation, batch.start.action_mask)
        nll = -actions.log_prob(batch.start.action).mean()
        return nll, {"loss/nll": nll, "entropy": actions.entropy().mean()}

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, learn_key = jax.random.split(state.key)

        def update(learner: Any, batch: Any, key: Array) -> Any:
            params, opt_state = learner
            gradient, metrics = jax.grad(loss, has_aux=True)(params, batch)
            direction, opt_state = optimizer.update(gradient, opt_state)
            params = jax.tree.map(lambda p, d: p - config.learning_rate * d, params, direction)
            return (params, opt_state), {**metrics, "grad_norm": optax.tree.norm(gradient)}

        learner = (state.params, state.opt_state)
        sizes = (config.num_updates, config.batch_size)
        draw = single_steps(data, state.observation_stats, among=state.among)
        learner, metrics = learn(update, learner, draw, learn_key, sizes)
        params, opt_state = learner
        return state.replace(params=params, opt_state=opt_state, key=key), metrics

    return Agent(init, step, *acting(policy, as_seen), env_steps=config.num_updates, learns_from="data")
