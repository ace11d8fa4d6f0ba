"""Thompson sampling: each arm is taken as often as it is likely to be the best (Thompson 1933; Chapelle & Li 2011).

With a linear model (Agrawal & Goyal 2013, arXiv 1209.3352): Bayesian regression of each arm's rewards, with a prior
N(0, prior_variance I) of the weights and noise of variance noise_variance. A decision needs the weights of an arm only through
``theta . x``, so that is drawn: ``N(mu . x, x^T Sigma x)``, independently for each arm. With the Bernoulli model: a Beta
posterior of each arm's mean, whatever the context.
"""

import jax
import jax.numpy as jnp
from jax import Array

from rljax.agents.bandits import Bandit, bandit_agent, with_intercept
from rljax.agents.base import Agent
from rljax.envs import Environment
from rljax.ops import bandits
from rljax.options import config, static, traced

PRIORS = ("linear", "bernoulli")


@config
class Config:
    prior_variance: float = traced(1.0, "of the weights, of the linear model", above=0)
    noise_variance: float = traced(0.25, "of the rewards around their mean, of the linear model", above=0)
    prior_successes: float = traced(1.0, "a of the Beta(a, b) prior, of the Bernoulli model", above=0)
    prior_failures: float = traced(1.0, "b of the Beta(a, b) prior, of the Bernoulli model", above=0)
    discount: float = traced(1.0, "what a decision counts after one more; below 1 forgets", above=0, high=1)
    prior: str = static("linear", "linear: in the context; bernoulli: rewards of 0 to 1, no context", choices=PRIORS)
    num_envs: int = static(1, "environments side by side, that decide at once", low=1)
    num_steps: int = static(100, "decisions of each environment in one call of step", low=1)


def bandit(config: Config, num_actions: int, context_size: int) -> Bandit:
    """Thompson sampling as pure functions; its learner is `rljax.ops.bandits.LinearStats`, or `BetaStats`."""
    return bernoulli(config, num_actions) if config.prior == "bernoulli" else linear(config, num_actions, context_size)


def linear(config: Config, num_actions: int, context_size: int) -> Bandit:
    size = context_size + 1

    def init(key: Array) -> bandits.LinearStats:
        return bandits.LinearStats(jnp.zeros((num_actions, size, size)), jnp.zeros((num_actions, size)))

    def noise(key: Array, number: int) -> Array:
        return jax.random.normal(key, (number, num_actions))

    def scores(learner: bandits.LinearStats, context: Array, noise: Array) -> tuple[Array, Array]:
        ridge = config.noise_variance / config.prior_variance
        mean, square = bandits.linear_posterior(learner, with_intercept(context), ridge)
        return mean, mean + jnp.sqrt(config.noise_variance * square) * noise

    def update(learner: bandits.LinearStats, context: Array, action: Array, reward: Array) -> bandits.LinearStats:
        return bandits.linear_update(learner, with_intercept(context), action, reward, config.discount)

    return Bandit(init, noise, scores, update)


def bernoulli(config: Config, num_actions: int) -> Bandit:
    def init(key: Array) -> bandits.BetaStats:
        return bandits.BetaStats(jnp.zeros(num_actions), jnp.zeros(num_actions))

    def noise(key: Array, number: int) -> Array:
        return jax.random.split(key, number)

    def scores(learner: bandits.BetaStats, context: Array, noise: Array) -> tuple[Array, Array]:
        a, b = config.prior_successes + learner.successes, config.prior_failures + learner.failures
        mean = jnp.broadcast_to(a / (a + b), (context.shape[0], num_actions))
        return mean, jax.vmap(lambda key: jax.random.beta(key, a, b))(noise)

    def update(learner: bandits.BetaStats, context: Array, action: Array, reward: Array) -> bandits.BetaStats:
        return bandits.beta_update(learner, action, jnp.clip(reward, 0.0, 1.0), config.discount)

    return Bandit(init, noise, scores, update)


def make(config: Config, env: Environment) -> Agent:
    """Thompson sampling on ``env``, a reward at a time. Raises as `bandit_agent`."""
    return bandit_agent(bandit, config, env)
