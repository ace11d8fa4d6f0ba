"""Offline agents on recordings small enough to know the answer by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import bc, cql, iql, td3_bc
from rljax.agents.sac import actions_of
from rljax.agents.td3 import networks
from rljax.envs import Box, Discrete, restart, transition
from rljax.ops import losses, replay
from rljax.ops.dataset import make_dataset
from tests.agents import probes

GAMMA = 0.5
SMALL = dict(hidden=(32,), batch_size=64, num_updates=64, normalize_observations=False, learning_rate=3e-3)
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class TwoStates:
    """In state 0, action 1 ends with 0.3, and action 0 goes on to state 1 for nothing; there action 0 ends with 1, 1 with 0.

    At a discount of a half, going on is worth 0.5 before an action that is best, and 0.25 before one that is drawn at random.
    """

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(2)

    def reset(self, key):
        return jnp.int32(0), restart(jnp.zeros(1))

    def step(self, key, state, action):
        reward = jnp.where(state == 1, 1.0 - action, 0.3 * action)
        return state + 1, transition(jnp.ones(1), reward, terminated=(state == 1) | (action == 1))


def dataset(observation, action, reward, terminated, next_observation):
    rows = (np.asarray(x, np.float32)[:, None] for x in (observation, next_observation))
    return {
        "dataset": make_dataset(
            replay.Transition(
                observation=next(rows),
                action_mask=None,
                action=np.asarray(action),
                reward=np.asarray(reward, np.float32),
                terminated=np.asarray(terminated, bool),
                truncated=~np.asarray(terminated, bool) & (np.arange(len(reward)) == len(reward) - 1),
                next_observation=next(rows),
                next_action_mask=None,
            )
        )
    }


# Every action of every state once: episodes (1), (0, 0) and (0, 1). State 0 sees action 0 twice.
RANDOM = dataset([0, 0, 1, 0, 1], np.array([1, 0, 0, 0, 1], np.int32), [0.3, 0, 1, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1])


def train(config, env, data, calls):
    agent = rljax.make_agent(config, env)

    @jax.jit
    def program(key, data):
        return jax.lax.scan(lambda state, _: agent.step(state, data), agent.init(key, data), length=calls)

    return agent, *program(jax.random.key(0), data)


def greedy(agent, state, *observations):
    timestep = jax.vmap(restart)(jnp.asarray(observations, jnp.float32)[:, None])
    return np.asarray(agent.act(state, None, timestep, jax.random.key(0), True)[1])


def test_cloning_learns_the_shares_of_the_recorded_actions():
    agent, state, metrics = train(bc.Config(**SMALL), TwoStates(), RANDOM, 20)
    # Three steps from state 0, two of them action 0, and one of each action from state 1.
    entropy = (3 * -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3)) + 2 * np.log(2)) / 5
    assert float(metrics["loss/nll"][-3:].mean()) == pytest.approx(entropy, abs=0.02)
    assert greedy(agent, state, 0.0)[0] == 0


def test_cloning_the_best_episodes_leaves_the_others():
    agent, state, metrics = train(bc.Config(best=1 / 3, **SMALL), TwoStates(), RANDOM, 20)
    assert int(state.among) == 2  # the two steps of the episode that earned 1
    assert greedy(agent, state, 0.0, 1.0).tolist() == [0, 0]
    assert float(metrics["loss/nll"][-1]) < 0.1


@pytest.mark.parametrize(("tau", "first"), [(0.9, 0), (0.5, 1)])
def test_the_expectile_decides_how_far_ahead_the_best_counts(tau, first):
    """V(1) is the expectile tau of the values 0 and 1, which is tau, so going on is worth tau / 2, and ending 0.3."""
    config = iql.Config(discount=GAMMA, expectile=tau, target_tau=0.1, beta=20.0, **SMALL)
    agent, state, _ = train(config, TwoStates(), RANDOM, 40)
    actions = actions_of(config, TwoStates())
    taken = functools.partial(actions.taken, state.values["critics"])
    values = taken(jnp.asarray([[0.0], [0.0], [1.0], [1.0]]), jnp.asarray([0, 1, 0, 1])).mean(0)
    np.testing.assert_allclose(values, [GAMMA * tau, 0.3, 1.0, 0.0], atol=0.04)
    assert greedy(agent, state, 0.0, 1.0).tolist() == [first, 0]


def test_the_expectile_loss_is_least_at_the_expectile():
    """Of 0, 0, 0 and 4 at tau = 0.9: 3 (1 - tau) v = tau (4 - v), so v = 3."""
    points = jnp.asarray([0.0, 0.0, 0.0, 4.0])
    gradient = jax.grad(lambda v: losses.expectile(points - v, 0.9).sum())
    assert float(gradient(3.0)) == pytest.approx(0.0, abs=1e-5)
    assert float(losses.expectile(jnp.float32(-2.0), 0.9)) == pytest.approx(0.4)
    assert float(losses.expectile(jnp.float32(2.0), 0.9)) == pytest.approx(3.6)


def test_conservative_values_are_lowest_where_nothing_was_recorded():
    """Only action 0 was recorded in state 1; without the penalty nothing is known of the other."""
    one_sided = dataset([0, 0, 1], np.array([1, 0, 0], np.int32), [0.3, 0, 1], [1, 0, 1], [1, 1, 1])
    config = cql.Config(discount=GAMMA, target_tau=0.1, temperature=0.01, conservative_coef=1.0, **SMALL)
    agent, state, metrics = train(config, TwoStates(), one_sided, 40)
    actions = actions_of(config, TwoStates())
    q = actions.critics.apply(state.params["critics"], jnp.asarray([[1.0]]))[:, 0]
    assert np.all(np.asarray(q[:, 0] - q[:, 1]) > 1.0)
    assert greedy(agent, state, 1.0).tolist() == [0]
    assert float(metrics["gap"][-1]) < float(metrics["gap"][0])


def test_without_the_penalty_it_finds_the_best_actions_of_all_that_were_tried():
    config = cql.Config(discount=GAMMA, target_tau=0.1, temperature=0.01, conservative_coef=0.0, **SMALL)
    agent, state, _ = train(config, TwoStates(), RANDOM, 40)
    assert greedy(agent, state, 0.0, 1.0).tolist() == [0, 0]
    actions = actions_of(config, TwoStates())
    q = actions.critics.apply(state.params["critics"], jnp.asarray([[0.0], [1.0]])).mean(0)
    np.testing.assert_allclose(q, [[0.5, 0.3], [1.0, 0.0]], atol=0.05)


def gap_of(config, env, data):
    """The penalty at the first parameters, summed over both critics."""
    agent = rljax.make_agent(dataclasses.replace(config, learning_rate=0.0), env)
    state = quick_jit(agent.init)(jax.random.key(0), data)
    return state, float(quick_jit(agent.step)(state, data)[1]["gap"])


def test_the_penalty_by_enumeration():
    data = dataset([1.0], np.array([1], np.int32), [0.0], [1], [1.0])
    config = cql.Config(**{**SMALL, "num_updates": 1})
    state, gap = gap_of(config, TwoStates(), data)
    q = np.asarray(actions_of(config, TwoStates()).critics.apply(state.params["critics"], jnp.asarray([[1.0]]))[:, 0])
    assert gap == pytest.approx(float((np.log(np.exp(q).sum(1)) - q[:, 1]).sum()), abs=1e-5)


def test_the_penalty_of_continuous_actions_is_an_integral_over_their_range():
    env = probes.ContinuousTarget()  # actions in [-2, 3]
    data = dataset([0.5], np.array([[2.0]], np.float32), [0.0], [1], [0.5])
    config = cql.Config(**{**SMALL, "num_updates": 1, "num_actions": 4000, "batch_size": 8})
    state, gap = gap_of(config, env, data)
    unit = np.linspace(-1.0, 1.0, 4001)
    actions = jnp.asarray(0.5 + 2.5 * unit, jnp.float32)[:, None]
    q = np.asarray(actions_of(config, env).taken(state.params["critics"], jnp.full((4001, 1), 0.5), actions), np.float64)
    integral = np.log(np.trapezoid(np.exp(q), unit, axis=1))
    recorded = np.asarray(actions_of(config, env).taken(state.params["critics"], jnp.asarray([[0.5]]), jnp.asarray([[2.0]])))[
        :, 0
    ]
    assert gap == pytest.approx(float((integral - recorded).sum()), abs=0.02)


@pytest.mark.parametrize("alpha", [0.0, 100.0])
def test_cloning_and_values_pull_at_the_policy(alpha):
    """Recorded actions are spread over [-2, 3], mean 0.5; the reward is highest at 1.5, and the critic about there."""
    recorded = np.linspace(-2.0, 3.0, 201, dtype=np.float32)[:, None]
    zeros = np.zeros(201)
    data = dataset(zeros, recorded, -np.square(recorded[:, 0] - 1.5), zeros + 1, zeros)
    config, env = td3_bc.Config(alpha=alpha, **SMALL), probes.ContinuousTarget()
    agent, state, _ = train(config, env, data, 60)
    _, critics, _, _ = networks(config, env.observation_space, env.action_space)
    q = critics.apply(state.params["critics"], jnp.zeros((201, 1)), jnp.asarray(recorded))[0]
    np.testing.assert_allclose(q, -np.square(recorded[:, 0] - 1.5), atol=0.5)
    action = greedy(agent, state, 0.0)[0, 0]
    if alpha == 0:
        assert action == pytest.approx(0.5, abs=0.15)
    else:  # a critic of straight pieces may have its top a little aside
        assert action == pytest.approx(1.5, abs=0.4)
        assert np.interp(action, recorded[:, 0], q) > q.max() - 0.05


def test_observations_are_seen_by_the_statistics_of_the_data():
    rows = np.array([100.0, 102.0, 104.0])
    data = dataset(rows, np.array([0, 1, 1], np.int32), [0, 0, 0], [1, 1, 1], rows)
    config = bc.Config(**{**SMALL, "normalize_observations": True})
    agent, state, metrics = train(config, TwoStates(), data, 20)
    assert float(metrics["loss/nll"][-1]) < 0.1
    assert greedy(agent, state, 100.0, 102.0, 104.0).tolist() == [0, 1, 1]


def test_without_data_there_is_one_line():
    agent = rljax.make_agent(bc.Config(**SMALL), TwoStates())
    with pytest.raises(ValueError, match="learns from recorded data: set data"):
        agent.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"algo\.num_updates \(3\) must be a multiple of algo\.policy_delay"):
        rljax.make_agent(td3_bc.Config(num_updates=3), probes.ContinuousTarget())
    with pytest.raises(ValueError, match=r"algo\.name"):
        rljax.make_agent(td3_bc.Config(), TwoStates())
