"""Epsilon-greedy: the arm of the highest estimate, or with probability epsilon any legal one.

Estimates are ridge regressions of each arm's rewards on the context, or its mean reward, shrunk by the same ridge. Epsilon falls
as one over the decisions made (Auer, Cesa-Bianchi & Fischer 2002, figure 3), down to a floor that a task which drifts needs.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.agents.bandits import Bandit, bandit_agent, with_intercept
from rljax.agents.base import Agent
from rljax.envs import Environment
from rljax.networks import EpsilonGreedy
from rljax.networks.distributions import mask_logits
from rljax.ops import bandits
from rljax.options import config, static, traced

ESTIMATES = ("linear", "means")


@config
class Config:
    epsilon: float = traced(0.05, "probability of a random action in the end", low=0, high=1)
    decay: float = traced(
        50.0, "decisions before epsilon falls from 1, as decay / t; 0: it is as in the end from the start", low=0
    )
    ridge: float = traced(1.0, "weight of the squared coefficients beside the squared errors, lambda", above=0)
    discount: float = traced(1.0, "what a decision counts after one more; below 1 forgets", above=0, high=1)
    estimate: str = static("linear", "of rewards: linear in the context, or means, whatever the context", choices=ESTIMATES)
    num_envs: int = static(1, "environments side by side, that decide at once", low=1)
    num_steps: int = static(100, "decisions of each environment in one call of step", low=1)


class Learner(struct.PyTreeNode):
    """All that is learned.

    Attributes:
      stats: of the contexts with a constant as the last feature, or of the constant alone.
      decisions: int32 ``[]``, those learned from.
    """

    stats: bandits.LinearStats
    decisions: Array


def bandit(config: Config, num_actions: int, context_size: int) -> Bandit:
    """Epsilon-greedy as pure functions."""
    size = context_size + 1 if config.estimate == "linear" else 1

    def features(context: Array) -> Array:
        return with_intercept(context)[..., -size:]

    def init(key: Array) -> Learner:
        stats = bandits.LinearStats(jnp.zeros((num_actions, size, size)), jnp.zeros((num_actions, size)))
        return Learner(stats, jnp.zeros((), jnp.int32))

    def noise(key: Array, number: int) -> Array:
        return jax.random.uniform(key, (number, num_actions + 1))

    def epsilon(learner: Learner) -> Array:
        return jnp.maximum(config.epsilon, jnp.minimum(1.0, config.decay / (learner.decisions + 1.0)))

    def values(learner: Learner, context: Array) -> Array:
        return bandits.linear_posterior(learner.stats, features(context), config.ridge)[0]

    def scores(learner: Learner, context: Array, noise: Array) -> tuple[Array, Array]:
        mean = values(learner, context)
        return mean, jnp.where(noise[:, -1:] < epsilon(learner), noise[:, :-1], mean)

    def update(learner: Learner, context: Array, action: Array, reward: Array) -> Learner:
        stats = bandits.linear_update(learner.stats, features(context), action, reward, config.discount)
        return Learner(stats, learner.decisions + action.shape[0])

    def probabilities(learner: Learner, context: Array, mask: Array | None) -> Array:
        return EpsilonGreedy(mask_logits(values(learner, context), mask), epsilon(learner)).probabilities()

    return Bandit(init, noise, scores, update, probabilities=probabilities)


def make(config: Config, env: Environment) -> Agent:
    """Epsilon-greedy on ``env``, a reward at a time. Raises as `bandit_agent`."""
    return bandit_agent(bandit, config, env)
