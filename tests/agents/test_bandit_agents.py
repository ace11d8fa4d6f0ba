"""Bandits by hand, and on tasks whose regret is known."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import agent_module, bandits, epsilon_greedy, linucb, neural_linear, thompson
from rljax.agents.base import BANDITS
from rljax.envs.bandits import Routing
from rljax.experiment import InputError, load, run
from tests.agents import probes

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


def posterior(x, reward, ridge):
    """Mean and covariance over noise variance of a ridge regression of one arm, with a constant, in float64."""
    x = np.concatenate([x, np.ones((len(x), 1))], 1).astype(np.float64)
    inverse = np.linalg.inv(ridge * np.eye(x.shape[1]) + x.T @ x)
    return inverse @ x.T @ reward, inverse


def test_the_bound_of_linucb_by_hand():
    """Two arms and one feature: after x = 2 with reward 1 for arm 0, A = I + [2, 1] [2, 1]^T and b = [2, 1]."""
    bandit = linucb.bandit(linucb.Config(alpha=0.5), 2, 1)
    learner = bandit.init(jax.random.key(0))
    learner = bandit.update(learner, jnp.array([[2.0]]), jnp.array([0]), jnp.array([1.0]))
    mean, score = bandit.scores(learner, jnp.array([[1.0]]), ())
    # A = [[5, 2], [2, 2]], det 6; A^-1 b = [2, 1] / 6; [1, 1] A^-1 [1, 1] = (2 - 4 + 5) / 6.
    np.testing.assert_allclose(mean[0], [0.5, 0.0], atol=1e-6)
    np.testing.assert_allclose(score[0], [0.5 + 0.5 * np.sqrt(0.5), 0.5 * np.sqrt(2.0)], rtol=1e-5)


def test_thompson_draws_from_the_posterior():
    config = thompson.Config(prior_variance=2.0, noise_variance=0.3)
    bandit, rng = thompson.bandit(config, 2, 3), np.random.default_rng(0)
    x, reward = rng.normal(size=(30, 3)).astype(np.float32), rng.normal(size=30).astype(np.float32)
    update = quick_jit(bandit.update)
    learner = update(bandit.init(jax.random.key(0)), jnp.asarray(x), jnp.ones(30, jnp.int32), jnp.asarray(reward))
    query = jnp.tile(jnp.array([[0.5, -1.0, 2.0]]), (20_000, 1))
    mean, drawn = quick_jit(bandit.scores)(learner, query, bandit.noise(jax.random.key(1), 20_000))
    theta, inverse = posterior(x, reward, 0.3 / 2.0)
    at = np.array([0.5, -1.0, 2.0, 1.0])
    assert float(mean[0, 1]) == pytest.approx(theta @ at, abs=1e-4)
    np.testing.assert_allclose(drawn[:, 1].std(), np.sqrt(0.3 * at @ inverse @ at), rtol=0.02)
    np.testing.assert_allclose([drawn[:, 0].mean(), drawn[:, 0].std()], [0, np.sqrt(2.0 * at @ at)], rtol=0.02, atol=0.08)


def test_bernoulli_thompson_counts():
    bandit = thompson.bandit(thompson.Config(prior="bernoulli", prior_successes=2.0, prior_failures=3.0), 2, 0)
    none = jnp.zeros((3, 0))
    learner = bandit.update(bandit.init(jax.random.key(0)), none, jnp.array([1, 1, 0]), jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_array_equal(learner.successes, [0, 2])
    np.testing.assert_array_equal(learner.failures, [1, 0])
    mean, drawn = quick_jit(bandit.scores)(learner, jnp.zeros((20_000, 0)), bandit.noise(jax.random.key(1), 20_000))
    np.testing.assert_allclose(mean[0], [2 / 6, 4 / 7])
    np.testing.assert_allclose(drawn.mean(0), mean[0], atol=0.01)
    np.testing.assert_allclose(drawn.var(0), [2 * 4 / (36 * 7), 4 * 3 / (49 * 8)], rtol=0.05)


def test_epsilon_falls_to_its_floor_and_the_probabilities_are_exact():
    bandit = epsilon_greedy.bandit(epsilon_greedy.Config(epsilon=0.1, decay=20.0, estimate="means", ridge=0.5), 3, 2)
    learner, rows = bandit.init(jax.random.key(0)), jnp.ones((1, 2))
    for decisions, epsilon in ((0, 1.0), (39, 0.5), (1000, 0.1)):
        probabilities = bandit.probabilities(learner.replace(decisions=decisions), rows, None)[0]
        np.testing.assert_allclose(probabilities, [1 - epsilon * 2 / 3, epsilon / 3, epsilon / 3], rtol=1e-5)
    learner = bandit.update(learner, jnp.ones((2, 2)), jnp.array([2, 2]), jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(bandit.scores(learner, rows, jnp.ones((1, 4)))[0][0], [0, 0, 3 / 2.5], rtol=1e-5)
    mask, many = jnp.array([[True, True, False]]), jnp.ones((20_000, 2))
    learner = learner.replace(decisions=39)
    scores = quick_jit(bandit.scores)(learner, many, bandit.noise(jax.random.key(0), 20_000))[1]
    share = np.bincount(bandits.best(scores, jnp.tile(mask, (20_000, 1))), minlength=3) / 20_000
    np.testing.assert_allclose(share, bandit.probabilities(learner, rows, mask)[0], atol=0.015)


def test_neural_linear_regresses_on_what_it_keeps():
    """After a refresh the last layer is the ridge regression of the kept decisions, forgotten ones weighted less."""
    config = neural_linear.Config(hidden=(8, 4), buffer_size=16, batch_size=8, num_updates=3, discount=0.9)
    bandit, rng = neural_linear.bandit(config, 2, 3), np.random.default_rng(0)
    x = rng.normal(size=(21, 3)).astype(np.float32)
    action, reward = rng.integers(0, 2, 21), rng.normal(size=21).astype(np.float32)
    update = quick_jit(bandit.update)
    learner = bandit.init(jax.random.key(0))
    for i in range(0, 21, 3):
        learner = update(learner, *(jnp.asarray(part[i : i + 3]) for part in (x, action, reward)))
    before = jax.tree.leaves(learner.network)
    learner, _ = quick_jit(bandit.refresh)(learner, jax.random.key(1))
    assert any((a != b).any() for a, b in zip(before, jax.tree.leaves(learner.network), strict=True))
    network = neural_linear.Network((8, 4), "tanh", 2)
    hidden = np.asarray(network.apply(learner.network, bandits.with_intercept(jnp.asarray(x[5:])))[0], np.float64)
    hidden, weight = np.concatenate([hidden, np.ones((16, 1))], 1), 0.9 ** np.arange(15, -1, -1.0)
    for arm in range(2):
        own = hidden * np.sqrt(weight * (action[5:] == arm))[:, None]
        np.testing.assert_allclose(learner.stats.gram[arm], own.T @ own, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            learner.stats.moment[arm], hidden.T @ (weight * (action[5:] == arm) * reward[5:]), rtol=1e-3, atol=1e-5
        )


LEARNERS = {
    "linucb": linucb.Config(),
    "thompson": thompson.Config(noise_variance=0.05),
    "epsilon_greedy": epsilon_greedy.Config(epsilon=0.02),
    "neural_linear": neural_linear.Config(hidden=(16, 8), noise_variance=0.05, buffer_size=512, num_updates=10),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_regret_is_far_below_that_of_chance(name):
    """Lanes of one program: two seeds, with a traced discount each."""
    env = rljax.make_env("LinearBandit")

    def life(seed, discount):
        agent = rljax.make_agent(dataclasses.replace(LEARNERS[name], discount=discount), env)
        state, metrics = jax.lax.scan(lambda state, _: agent.step(state), agent.init(jax.random.key(seed)), length=15)
        total, count = metrics["regret"]
        return total / count, agent.measure(state, jax.random.key(1), 64)

    regret, rewards = quick_jit(jax.vmap(life))(jnp.arange(2), jnp.array([1.0, 0.999]))
    chance = float(jnp.mean(env.weights.max(0)))  # of the order of one
    assert chance > 0.3 and (np.asarray(regret)[:, -5:].mean(1) < 0.2).all(), regret
    assert rewards.shape == (2, 64) and (rewards.mean(1) > 0.8).all()


def test_forgetting_follows_a_drift():
    """In the last thousand of three thousand decisions, of the same eight lives of a task that drifts."""
    env = Routing(drift=0.05)

    def life(seed, discount):
        config = thompson.Config(noise_variance=0.02, discount=discount)
        agent = rljax.make_agent(config, env)
        _, metrics = jax.lax.scan(lambda state, _: agent.step(state), agent.init(jax.random.key(seed)), length=30)
        return metrics["regret"][0][20:].sum() / 1000

    regret = quick_jit(jax.vmap(jax.vmap(life, (0, None)), (None, 0)))(jnp.arange(8), jnp.array([1.0, 0.99]))
    assert regret[1].mean() < 0.7 * regret[0].mean(), regret.mean(1)


def test_what_does_not_fit_is_one_line():
    with pytest.raises(ValueError, match="linucb chooses among Discrete actions, the environment has Box; use ppo or sac"):
        rljax.make_agent(linucb.Config(), probes.ContinuousTarget())
    with pytest.raises(ValueError, match=r"thompson takes a flat Box or a Discrete .* Box of shape \[10, 10, 4\]"):
        rljax.make_agent(thompson.Config(), rljax.make_env("Breakout-MinAtar"))
    with pytest.raises(ValueError, match=r"algo.buffer_size must be at least algo.num_envs"):
        rljax.make_agent(neural_linear.Config(buffer_size=2, num_envs=4), probes.ActionReward())
    with pytest.raises(ValueError, match=r"algo.hidden must have a layer"):
        rljax.make_agent(neural_linear.Config(hidden=()), probes.ActionReward())
    with pytest.raises(InputError, match=r"algo.alpha"):
        load(None, {"env": "Routing", "seeds": [0], "total_steps": 100, "algo.name": "linucb", "algo.alpha": -1.0})


def test_a_run_adds_up_its_regret(tmp_path):
    settings = {"env": "Routing", "seeds": [0, 1, 2], "total_steps": 400, "evals": 1, "eval_episodes": 8}
    settings |= {
        "algo.name": "linucb",
        "algo.num_steps": 20,
        "sweep.algo.alpha": [0.1, 1.0],
        "checkpoint_seconds": 1e6,
        "out": str(tmp_path),
    }
    finished = run(load(None, settings))
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").open()]
    for lane in range(6):
        own = [row for row in rows if row["lane"] == lane and "regret" in row]
        decisions = np.diff([0, *(row["step"] for row in own)])
        np.testing.assert_allclose(
            np.cumsum(decisions * [row["regret"] for row in own]), [row["regret/cumulative"] for row in own]
        )
    for setting in finished.summary["settings"]:
        alpha = setting["values"]["algo.alpha"]
        ends = [row["regret/cumulative"] for row in rows if row["step"] == 400 and row["algo.alpha"] == alpha]
        assert min(ends) <= setting["regret"]["low"] <= setting["regret"]["iqm"] <= setting["regret"]["high"] <= max(ends)
    assert "cumulative; less is better" in (finished.path / "report.html").read_text()


def test_every_bandit_has_its_functions():
    assert set(BANDITS) == set(LEARNERS)
    assert all(hasattr(agent_module(name), "bandit") for name in BANDITS)
