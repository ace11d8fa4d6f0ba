"""Offline agents on recordings small enough to know the answer by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import bc, cql, decision_transformer, iql, td3_bc
from rljax.agents.sac import actions_of
from rljax.agents.td3 import networks
from rljax.envs import Box, Discrete, restart, transition, vectorize
from rljax.networks import Transformer
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


TINY = Transformer(family="gpt2", layers=1, width=16, heads=2, mlp=32, positions=8)


def played(agent, state, env):
    """The actions of one greedy episode of two steps."""
    env_state, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1))
    carry, said = agent.start(state, timestep), []
    for key in jax.random.split(jax.random.key(1), 2):
        carry, action = agent.act(state, carry, timestep, key, True)
        env_state, timestep = jax.vmap(env.step)(key[None], env_state, action)
        said.append(int(action[0]))
    return said


def test_the_decision_transformer_earns_what_it_is_asked_for():
    """Of two recorded episodes one earned 1 and one 0.3, from the same state: only returns tell their actions apart."""
    two = dataset([0, 0, 1], np.array([1, 0, 0], np.int32), [0.3, 0, 1], [1, 0, 1], [1, 1, 1])
    config = decision_transformer.Config(
        context=2, batch_size=32, num_updates=64, learning_rate=1e-2, normalize_observations=False, model=TINY
    )
    agent, state, metrics = train(config, TwoStates(), two, 3)
    assert float(state.target) == float(state.scale) == 1.0  # the best return, and the largest
    assert float(metrics["loss/action"][-1]) < 0.02
    assert played(agent, state, TwoStates()) == [0, 0]
    assert played(agent, state.replace(target=jnp.float32(0.3)), TwoStates())[0] == 1


@dataclasses.dataclass(frozen=True)
class Walk:
    """Five steps; the observation is where the last action led, in [2, 6], and the reward."""

    observation_space = Box(-jnp.inf, jnp.inf, (1,))
    action_space = Box(2.0, 6.0, (1,))

    def reset(self, key):
        return jnp.int32(0), restart(jnp.zeros(1))

    def step(self, key, state, action):
        return state + 1, transition(action, action[0], truncated=state == 4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_recorded_episode_is_read_as_it_was_played(family):
    """Window by window in training, and one step at a time by `act`, whose window is shorter than the episode."""
    env, key = Walk(), jax.random.key(0)
    config = decision_transformer.Config(
        context=3, normalize_observations=False, model=dataclasses.replace(TINY, family=family), target_return=20.0
    )
    agent = rljax.make_agent(config, env)
    some = dataset(np.zeros(2), np.full((2, 1), 3.0, np.float32), [25.0, 3.0], [0, 0], np.zeros(2))
    state = agent.init(jax.random.key(1), some)
    state = state.replace(params=jax.tree.map(lambda x: 4 * x, state.params))  # actions that differ from one another
    envs = vectorize(env, 2)
    env_state, timestep = envs.reset(key)
    carry, steps = None, []
    for _ in range(10):  # two episodes, by auto-reset
        carry, action = agent.act(state, carry, timestep, key, True)
        steps.append((timestep.observation, action, timestep.reward, carry))
        env_state, timestep = envs.step(key, env_state, action)
    observation, action = (np.stack([s[i] for s in steps])[:, 0] for i in (0, 1))
    assert np.ptp(action[:5]) > 0.1
    np.testing.assert_allclose(action[:5], action[5:], rtol=1e-6)  # the second episode begins with nothing of the first
    to_go = 20.0 - np.concatenate([[0.0], np.cumsum(action[:4, 0])])
    _, predict = decision_transformer.network(config, env)
    unit = (action - 4) / 2
    for first in range(5):
        rows = np.minimum(np.arange(first, first + 3), 4)
        window = decision_transformer.Window(
            to_go=jnp.asarray(to_go[rows], jnp.float32)[None] / 28.0,
            observation=jnp.asarray(observation[rows])[None],
            action=jnp.asarray(unit[rows])[None],
            action_mask=None,
            step=jnp.asarray(rows)[None],
            is_real=(jnp.arange(3) < 5 - first)[None],
        )
        said = predict(state.params, window)[0]
        if first <= 2:  # the last of three steps, of which `act` saw no more than these
            np.testing.assert_allclose(said[-1], unit[first + 2], atol=1e-5)
        if first == 0:
            np.testing.assert_allclose(said, unit[:3], atol=1e-5)


def test_an_option_of_a_language_model_is_refused():
    config = decision_transformer.Config(model=dataclasses.replace(TINY, tied=False))
    with pytest.raises(ValueError, match=r"model\.tied is of models of language"):
        rljax.make_agent(config, TwoStates())
