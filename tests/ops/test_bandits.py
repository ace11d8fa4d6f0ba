"""Sums of bandits against regression and counts in float64, one decision at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.ops import bandits, ope

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
K, D = 3, 4


def log(number, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, D)).astype(np.float32)
    return x, rng.integers(0, K, number), rng.normal(size=number).astype(np.float32)


def empty(size=D):
    return bandits.LinearStats(jnp.zeros((K, size, size)), jnp.zeros((K, size)))


def exact(x, action, reward, query, ridge, discount=1.0):
    """``(x^T A^-1 b, x^T A^-1 x) [N, K]`` in float64, by a weighted ridge regression of each arm."""
    weight = discount ** np.arange(len(x) - 1, -1, -1.0)
    mean, square = np.zeros((len(query), K)), np.zeros((len(query), K))
    for arm in range(K):
        own = np.float64(x) * np.sqrt(weight * (action == arm))[:, None]
        inverse = np.linalg.inv(ridge * np.eye(x.shape[1]) + own.T @ own)
        mean[:, arm] = query @ inverse @ (np.float64(x).T @ (weight * (action == arm) * reward))
        square[:, arm] = ((query @ inverse) * query).sum(1)
    return mean, square


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_posterior_is_ridge_regression(discount):
    data, query, ridge = log(60), np.random.default_rng(1).normal(size=(7, D)), 0.7
    stats = jit(bandits.linear_update)(empty(), *map(jnp.asarray, data), discount)
    found = jit(bandits.linear_posterior)(stats, jnp.asarray(query, jnp.float32), ridge)
    for mine, true in zip(found, exact(*data, query, ridge, discount), strict=True):
        np.testing.assert_allclose(mine, true, rtol=2e-4, atol=1e-5)


def test_decisions_at_once_are_as_one_by_one():
    data = tuple(map(jnp.asarray, log(12)))
    rewards = jnp.abs(data[2]) % 1.0
    update, count = jit(bandits.linear_update), jit(bandits.beta_update)
    one, counts = empty(), bandits.BetaStats(jnp.zeros(K), jnp.zeros(K))
    for i in range(12):
        one = update(one, *(part[i : i + 1] for part in data), 0.8)
        counts = count(counts, data[1][i : i + 1], rewards[i : i + 1], 0.8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, bandits.linear_update(empty(), *data, 0.8))
    nothing = bandits.BetaStats(jnp.zeros(K), jnp.zeros(K))
    at_once = bandits.beta_update(nothing, data[1], rewards, 0.8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), counts, at_once)


def test_beta_counts_by_hand():
    stats = bandits.BetaStats(jnp.array([2.0, 0.0]), jnp.array([1.0, 4.0]))
    stats = bandits.beta_update(stats, jnp.array([1]), jnp.array([0.25]), 0.5)
    np.testing.assert_allclose(stats.successes, [1.0, 0.25])
    np.testing.assert_allclose(stats.failures, [0.5, 2.75])


@pytest.mark.parametrize("discount", [1.0, 0.999])
def test_stable_over_a_hundred_thousand_updates(discount):
    """Of contexts with a direction that is never seen, where an inverse that is updated in float32 loses its digits."""
    rng = np.random.default_rng(0)
    topic = rng.integers(0, D - 1, 100_000)
    x = np.concatenate([np.eye(D - 1)[topic], np.ones((100_000, 1))], 1).astype(np.float32)
    action, reward = rng.integers(0, K, 100_000), rng.normal(size=100_000).astype(np.float32)

    @jit
    def run(x, action, reward):
        def step(stats, row):
            return bandits.linear_update(stats, *(part[None] for part in row), discount), None

        return jax.lax.scan(step, empty(), (x, action, reward))[0]

    stats = run(x, action, reward)
    np.testing.assert_array_equal(stats.gram, np.swapaxes(stats.gram, 1, 2))
    seen, unseen = x[:5], np.eye(D, dtype=np.float32)  # the latter only as parts of what was seen
    for query, near in ((seen, dict(rtol=2e-3, atol=2e-5)), (unseen, dict(rtol=0.05, atol=0.01))):
        found = bandits.linear_posterior(stats, jnp.asarray(query), 0.1)
        for mine, true in zip(found, exact(x, action, reward, query, 0.1, discount), strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_allclose(mine, true, **near)
        assert (np.asarray(found[1]) > 0).all()


# Replay evaluation. Two contexts, two actions, known rewards.
MEANS = np.array([[0.2, 0.6], [0.9, 0.5]])


def draw(number, log_policy, seed):
    rng = np.random.default_rng(seed)
    context = rng.integers(0, 2, number)
    action = (rng.random(number) < log_policy[context, 1]).astype(int)
    propensity = log_policy[context, action]
    return context, action, MEANS[context, action] + 0.3 * rng.normal(size=number), propensity


def test_replay_of_a_fixed_policy_is_unbiased():
    target = np.array([[0.3, 0.7], [0.8, 0.2]])
    true = 0.5 * (target * MEANS).sum()
    for policy, given in ((np.full((2, 2), 0.5), False), (np.array([[0.9, 0.1], [0.4, 0.6]]), True)):
        context, action, reward, propensity = draw(100_000, policy, 0)
        choices = (np.random.default_rng(1).random(len(context)) < target[context, 1]).astype(int)
        args = (jnp.asarray(choices), jnp.asarray(action), jnp.asarray(reward))
        each = ope.matched(*args, jnp.asarray(propensity) if given else None)
        error = float(np.std(each) / np.sqrt(len(each)))
        assert float(each.mean()) == pytest.approx(true, abs=4 * error)
        assert error < 0.01
        if given:  # which matter: without them the log is taken for a uniform one
            assert abs(float(ope.matched(*args).mean()) - true) > 10 * error
    assert np.isnan(ope.matched(jnp.zeros(3), jnp.ones(3), jnp.ones(3))).all()


@pytest.mark.parametrize("uniform", [True, False])
def test_replay_of_a_learner_is_as_its_own_life(uniform):
    """Of a policy that goes on with what last paid more than 0.5: its mean reward at each of its first decisions."""
    policy = np.full((2, 2), 0.5) if uniform else np.array([[0.8, 0.2], [0.35, 0.65]])
    lives, decisions = 4000, 6

    def decide(learner, context, key):
        return learner

    def learn(learner, context, action, reward):
        return jnp.where(reward > 0.5, action, 1 - action)

    rng = np.random.default_rng(0)
    arm, true = np.zeros(200_000, int), np.zeros(decisions)
    for t in range(decisions):
        reward = MEANS[rng.integers(0, 2, len(arm)), arm] + 0.3 * rng.normal(size=len(arm))
        arm, true[t] = np.where(reward > 0.5, arm, 1 - arm), reward.mean()

    length = 80
    context, action, reward, propensity = (jnp.asarray(x).reshape(lives, length) for x in draw(lives * length, policy, 1))
    keys = jax.random.split(jax.random.key(0), lives)
    propensity = jnp.asarray(propensity)

    @jit
    @jax.vmap
    def kept_of(context, action, reward, key, propensity):
        return ope.replay(decide, learn, jnp.int32(0), context, action, reward, key, None if uniform else propensity)[1]

    kept = np.asarray(kept_of(context, action, reward, keys, propensity))
    enough = kept.sum(1) >= decisions
    assert enough.mean() > 0.98
    first = np.stack([np.asarray(reward)[i][np.flatnonzero(kept[i])[:decisions]] for i in np.flatnonzero(enough)])
    np.testing.assert_allclose(first.mean(0), true, atol=4 * 0.4 / np.sqrt(lives))
