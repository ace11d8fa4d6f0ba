"""Off-policy evaluation: what a policy would earn, from episodes of another one.

Importance sampling needs the probabilities of both policies, and nothing else. Episodes are ``[B, T]``, with False in ``mask``
after their end. ``log_ratio`` is ``log pi(a|s) - log mu(a|s)`` of each step: the evaluated policy over the one that played. Every
estimator gives one number an episode, whose mean is the estimate, so that `rljax.experiment.statistics.bootstrap_interval` of
them is its interval. `fitted_q` needs no probabilities, but a critic. `matched` and `replay` are of bandits, whose log is of
single decisions ``[N]``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from rljax.ops.dataset import Dataset


def ordinary(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float) -> Array:
    """``prod_t rho_t * sum_t gamma^t r_t``, ``[B]``: unbiased; its variance grows exponentially with T (Precup et al. 2000)."""
    return jnp.exp(jnp.where(mask, log_ratio, 0.0).sum(1)) * _returns(rewards, mask, discount)


def per_decision(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float) -> Array:
    """``sum_t gamma^t rho_{0:t} r_t``, ``[B]``: unbiased; a reward is weighted by what led to it alone (Precup et al. 2000)."""
    weights = jnp.exp(jnp.cumsum(jnp.where(mask, log_ratio, 0.0), 1))
    return _returns(rewards * weights, mask, discount)


def weighted(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float) -> Array:
    """`ordinary`, with weights divided by their mean over episodes, ``[B]``: biased, consistent, and within the returns.

    The mean of these numbers is ``sum_i w_i G_i / sum_i w_i``. They depend on one another: a bootstrap draws episodes and
    computes them anew, see `weighted_interval`.
    """
    weights = jax.nn.softmax(jnp.where(mask, log_ratio, 0.0).sum(1)) * rewards.shape[0]
    return weights * _returns(rewards, mask, discount)


def doubly_robust(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float, q: Array, v: Array) -> Array:
    """``V_t = v_t + rho_t (r_t + gamma V_{t+1} - q_t)`` from the last step back, ``[B]``.

    Jiang & Li 2016, arXiv 1511.03722, eq. 10. Unbiased whatever ``q`` and ``v`` are, and of a smaller variance the nearer they
    are to the truth.

    Args:
      q: ``[B, T]``, a guess of the evaluated policy's value of the actions taken, such as fitted Q evaluation gives.
      v: ``[B, T]``, of the states; ``sum_a pi(a|s) q(s, a)``.
    """

    def back(following: Array, step: tuple[Array, ...]) -> tuple[Array, None]:
        reward, log_rho, is_played, q, v = step
        value = v + jnp.exp(log_rho) * (reward + discount * following - q)
        return jnp.where(is_played, value, 0.0), None

    steps = jax.tree.map(lambda x: x.T, (rewards, log_ratio, mask, q, v))
    return jax.lax.scan(back, jnp.zeros(rewards.shape[0]), steps, reverse=True)[0]


def weighted_interval(
    rewards: Array, log_ratio: Array, mask: Array, discount: Array | float, key: Array, resamples: int = 1000, level: float = 0.95
) -> tuple[Array, Array]:
    """Percentile interval of the mean of `weighted`, by drawing episodes with replacement."""
    weights = jax.nn.softmax(jnp.where(mask, log_ratio, 0.0).sum(1))
    returns = _returns(rewards, mask, discount)
    rows = jax.random.randint(key, (resamples, rewards.shape[0]), 0, rewards.shape[0])
    drawn = weights[rows]
    means = (drawn * returns[rows]).sum(1) / drawn.sum(1)
    low, high = jnp.quantile(means, jnp.asarray([(1 - level) / 2, (1 + level) / 2]))
    return low, high


def fitted_q(
    critic: Callable[[Any, Any, Array], Array],
    init: Callable[[Array], Any],
    policy: Callable[[Array, Any, Array | None], Array],
    data: Dataset,
    key: Array,
    discount: float,
    *,
    resamples: int = 20,
    steps: int = 20_000,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    target_tau: float = 0.05,
) -> Array:
    """Fitted Q evaluation (Le et al. 2019, arXiv 1903.08738, algorithm 3) with a slowly moving target, and its bootstrap.

    ``Q(s, a)`` learns ``r + discount Q'(s', a')`` with ``a'`` from the evaluated policy; a truncated step counts as any other,
    after a terminated one nothing follows. The estimate is the mean of ``Q(s, a)`` over first steps of episodes, which must be
    drawn as those of the evaluation. Every bootstrap draws whole episodes with replacement and fits a critic of its own to them
    (Hao et al. 2021, arXiv 2102.03607), all in one program.

    Args:
      critic: ``(params, observation [M, ...], action [M, ...]) -> [M]``.
      init: ``(key) -> params``.
      policy: ``(key, observation [M, ...], action_mask) -> action [M, ...]``, drawn as the policy draws.
      data: of numpy arrays; it is no argument of a program.
      resamples: bootstraps.
      steps, batch_size: gradient steps of each fit, of Adam, and steps of the data in each.
      target_tau: step of the target towards the critic. A value ``1 / (1 - discount)`` steps away has come in after about
        ``1 / (target_tau (1 - discount))`` gradient steps, of which ``steps`` must be five times as many.

    Returns:
      float32 ``[1 + resamples]``: the estimate from all episodes, and those of the bootstraps, whose quantiles are its interval.

    Raises:
      ValueError: too few steps for values to come in, which would be narrow and wrong.
    """
    if steps * target_tau * (1 - discount) < 5:
        least = int(np.ceil(5 / (target_tau * (1 - discount)))) if discount < 1 else "no number of"
        raise ValueError(f"steps: {steps} are too few at discount {discount:g} and target_tau {target_tau:g}, {least} are needed")
    starts = np.flatnonzero(np.asarray(data.step) == 0)
    lengths = np.asarray(data.left)[starts] + 1
    optimizer = optax.adam(learning_rate)
    rows = jax.tree.map(jnp.asarray, data.transitions)

    def fit(key: Array, drawn: Array) -> Array:
        init_key, loop_key, start_key = jax.random.split(key, 3)
        ends = jnp.cumsum(jnp.asarray(lengths)[drawn])

        def loss(params: Any, target: Any, key: Array) -> Array:
            row_key, action_key = jax.random.split(key)
            place = jax.random.randint(row_key, (batch_size,), 0, ends[-1])
            number = jnp.searchsorted(ends, place, side="right")
            row = jnp.asarray(starts + lengths)[drawn[number]] - (ends[number] - place)
            batch = jax.tree.map(lambda x: x[row], rows)
            action = policy(action_key, batch.next_observation, batch.next_action_mask)
            following = critic(target, batch.next_observation, action)
            goal = batch.reward + discount * jnp.where(batch.terminated, 0.0, following)
            return jnp.square(critic(params, batch.observation, batch.action) - goal).mean()

        def step(learner: Any, key: Array) -> Any:
            params, target, opt_state = learner
            updates, opt_state = optimizer.update(jax.grad(loss)(params, target, key), opt_state)
            params: Any = optax.apply_updates(params, updates)
            return (params, optax.incremental_update(params, target, target_tau), opt_state), None

        params = init(init_key)
        learner, _ = jax.lax.scan(step, (params, params, optimizer.init(params)), jax.random.split(loop_key, steps))
        first = jax.tree.map(lambda x: x[jnp.asarray(starts)], rows)
        value = critic(learner[0], first.observation, policy(start_key, first.observation, first.action_mask))
        return value[drawn].mean()

    fit_key, draw_key = jax.random.split(key)
    episodes = len(starts)
    again = jax.random.randint(draw_key, (resamples, episodes), 0, episodes)
    drawn = jnp.concatenate([jnp.arange(episodes)[None], again])
    return jax.jit(jax.vmap(fit))(jax.random.split(fit_key, 1 + resamples), drawn)


def matched(choices: Array, actions: Array, rewards: Array, propensities: Array | None = None) -> Array:
    """What a policy would earn a decision, from a log of single decisions ``[N]``: events count where it would do the same.

    Without propensities the log must have been drawn uniformly, and the mean of these numbers is the mean reward over the events
    that match: the replay method (Li et al. 2011, arXiv 1003.5956, algorithm 1), unbiased given that one matches. They depend on
    one another. With them it is ``1[match] r / p``: inverse propensities, unbiased however the log was drawn, as long as every
    action that the policy takes had a chance.

    Args:
      choices: int ``[N]``, of a policy that does not learn, drawn apart from the log's actions.
      actions, rewards: ``[N]``, logged.
      propensities: ``[N]``, the probability with which the logged action was drawn.

    Returns:
      ``[N]``; NaN where propensities are not given and nothing matches.
    """
    match = choices == actions
    weight = match * (match.shape[0] / match.sum()) if propensities is None else match / propensities
    each = jnp.where(match, weight * rewards, 0.0)
    return each if propensities is not None else jnp.where(match.any(), each, jnp.nan)


def replay(
    decide: Callable[[Any, Any, Array], Array],
    learn: Callable[[Any, Any, Array, Array], Any],
    learner: Any,
    contexts: Any,
    actions: Array,
    rewards: Array,
    key: Array,
    propensities: Array | None = None,
) -> tuple[Any, Array]:
    """What a policy that learns would have seen: it learns from the events that match its choice, and the others never happened.

    Li et al. 2011, arXiv 1003.5956, algorithm 2: of a log that was drawn uniformly, the events that are kept come as those of
    a life of its own, so that ``rewards[kept]`` are what it would earn in its first decisions. A log that was
    not is thinned to one that is: an event that matches is kept with probability ``min p / p``, so that what is kept does not
    depend on how likely it was to be logged.

    Args:
      decide: ``(learner, context, key) -> action``, of one decision.
      learn: ``(learner, context, action, reward) -> learner``.
      learner: what it begins with.
      contexts: arrays ``[N, ...]``, in the order of the log.
      actions, rewards: ``[N]``.
      propensities: ``[N]``, the probability with which the logged action was drawn; None: all the same.

    Returns:
      ``(learner, kept bool [N])``.
    """
    accept = jnp.ones(actions.shape[0]) if propensities is None else propensities.min() / propensities

    def event(learner: Any, log: tuple[Any, ...]) -> tuple[Any, Array]:
        context, action, reward, accept, key = log
        decide_key, accept_key = jax.random.split(key)
        kept = (decide(learner, context, decide_key) == action) & (jax.random.uniform(accept_key) < accept)
        after = learn(learner, context, action, reward)
        return jax.tree.map(lambda new, old: jnp.where(kept, new, old), after, learner), kept

    keys = jax.random.split(key, actions.shape[0])
    return jax.lax.scan(event, learner, (contexts, actions, rewards, accept, keys))


def _returns(rewards: Array, mask: Array, discount: Array | float) -> Array:
    """``sum_t gamma^t r_t`` over what was played, ``[B]``."""
    powers = jnp.power(discount, jnp.arange(rewards.shape[1]))
    return (jnp.where(mask, rewards, 0.0) * powers).sum(1)
