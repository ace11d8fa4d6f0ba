"""LinUCB with disjoint linear models (Li et al. 2010, arXiv 1003.0146, algorithm 1), with a discount for tasks that drift.

Each arm has a ridge regression of its rewards on the contexts that it was chosen in. The arm is taken whose reward could be the
highest: ``theta_a . x + alpha sqrt(x^T A_a^-1 x)``.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from rljax.agents.bandits import Bandit, bandit_agent, best, with_intercept
from rljax.agents.base import Agent
from rljax.envs import Environment
from rljax.ops import bandits
from rljax.options import config, static, traced


@config
class Config:
    alpha: float = traced(1.0, "width of the confidence bound; 0: greedy", low=0)
    ridge: float = traced(1.0, "weight of the squared coefficients beside the squared errors, lambda", above=0)
    discount: float = traced(1.0, "what a decision counts after one more; below 1 forgets", above=0, high=1)
    num_envs: int = static(1, "environments side by side, that decide at once", low=1)
    num_steps: int = static(100, "decisions of each environment in one call of step", low=1)


def bandit(config: Config, num_actions: int, context_size: int) -> Bandit:
    """LinUCB as pure functions; its learner is `rljax.ops.bandits.LinearStats` of the contexts, with a constant as the last."""
    size = context_size + 1

    def init(key: Array) -> bandits.LinearStats:
        return bandits.LinearStats(jnp.zeros((num_actions, size, size)), jnp.zeros((num_actions, size)))

    def noise(key: Array, number: int) -> tuple[()]:
        return ()

    def scores(learner: bandits.LinearStats, context: Array, noise: Any) -> tuple[Array, Array]:
        mean, square = bandits.linear_posterior(learner, with_intercept(context), config.ridge)
        return mean, mean + config.alpha * jnp.sqrt(square)

    def update(learner: bandits.LinearStats, context: Array, action: Array, reward: Array) -> bandits.LinearStats:
        return bandits.linear_update(learner, with_intercept(context), action, reward, config.discount)

    def probabilities(learner: bandits.LinearStats, context: Array, mask: Array | None) -> Array:
        chosen = best(scores(learner, context, ())[1], mask)
        return (chosen[:, None] == jnp.arange(num_actions)).astype(jnp.float32)

    return Bandit(init, noise, scores, update, probabilities=probabilities)


def make(config: Config, env: Environment) -> Agent:
    """LinUCB on ``env``, a reward at a time. Raises as `bandit_agent`."""
    return bandit_agent(bandit, config, env)
