import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import ppo
from rljax.agents.on_policy import next_values, rollout
from rljax.envs import TimeStep, restart, vectorize
from rljax.experiment import evaluate_agent
from rljax.networks import actor_critic
from tests.agents import probes

SMALL = ppo.Config(
    num_envs=16, num_steps=16, num_epochs=4, num_minibatches=4, hidden=(32,), learning_rate=5e-3, entropy_coef=0.0, discount=0.5
)


def train(config, env, updates=60, seed=0):
    agent = ppo.make(config, env)

    @jax.jit
    def program(key):
        return jax.lax.scan(lambda state, _: agent.step(state), agent.init(key), length=updates)

    state, metrics = program(jax.random.key(seed))
    return agent, state, metrics


def value_of(config, env, state, observation):
    policy = actor_critic(env.observation_space, env.action_space, config.network, config.hidden, config.activation)
    timestep = jax.tree.map(lambda x: x[None], restart(jnp.asarray(observation, jnp.float32)))
    return float(policy.step(state.params, policy.start(state.params, timestep), timestep)[1].value[0])


def greedy_return(agent, env, state, episodes=64):
    evaluation = jax.jit(lambda s: evaluate_agent(agent, env, s, jax.random.key(7), episodes, 100))(state)
    assert evaluation.finished.all()
    return float(evaluation.returns.mean())


def test_probe_constant_reward():
    _, state, _ = train(SMALL, probes.ConstantReward())
    assert value_of(SMALL, probes.ConstantReward(), state, [0.0]) == pytest.approx(1.0, abs=0.05)


def test_probe_reward_from_observation():
    _, state, _ = train(SMALL, probes.RewardFromObservation())
    for sign in (-1.0, 1.0):
        assert value_of(SMALL, probes.RewardFromObservation(), state, [sign]) == pytest.approx(sign, abs=0.05)


def test_probe_two_step_credit():
    _, state, _ = train(SMALL, probes.TwoStepCredit())
    assert value_of(SMALL, probes.TwoStepCredit(), state, [0.0]) == pytest.approx(0.5, abs=0.05)
    assert value_of(SMALL, probes.TwoStepCredit(), state, [1.0]) == pytest.approx(1.0, abs=0.05)


def test_probe_action_reward():
    env = probes.ActionReward()
    agent, state, _ = train(SMALL, env)
    assert greedy_return(agent, env, state) == 1.0


def test_probe_action_matches_observation():
    env = probes.ActionMatchesObservation()
    agent, state, _ = train(SMALL, env)
    assert greedy_return(agent, env, state) == 1.0


def test_truncation_keeps_the_bootstrap():
    _, state, _ = train(SMALL, probes.EndlessReward())
    assert value_of(SMALL, probes.EndlessReward(), state, [0.0]) == pytest.approx(2.0, abs=0.05)


def test_illegal_actions_are_never_taken_and_legal_ones_are_learned():
    env = probes.MaskedBandit()
    agent, state, metrics = train(SMALL, env)
    total, count = metrics["episode/return"]
    assert float(total.sum() / count.sum()) > 0  # one illegal action costs 100
    assert greedy_return(agent, env, state, episodes=512) == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_continuous_actions(distribution):
    env = probes.ContinuousTarget()
    agent, state, _ = train(dataclasses.replace(SMALL, distribution=distribution), env, updates=150)
    assert greedy_return(agent, env, state) > -0.05


def test_recurrent_policy_remembers_and_feed_forward_cannot():
    env = probes.RecallFirst()
    recurrent = dataclasses.replace(SMALL, network="gru", hidden=(16, 16), discount=0.9)
    agent, state, _ = train(recurrent, env, updates=150, seed=1)  # of 40 seeds tried, one ends where it ignores what it saw
    assert greedy_return(agent, env, state, episodes=256) > 0.95
    agent, state, _ = train(dataclasses.replace(SMALL, discount=0.9), env, updates=60)
    assert abs(greedy_return(agent, env, state, episodes=256)) < 0.3


@pytest.mark.parametrize("network", ["mlp", "gru"])
def test_ratio_of_first_minibatch_is_one(network):
    """With moving statistics, episodes that end, and a policy that has moved since its initialisation."""
    config = dataclasses.replace(
        SMALL, network=network, normalize_observations=True, normalize_rewards=True, whiten_advantages="batch"
    )
    _, _, metrics = train(config, rljax.make_env("CartPole-v1", max_steps_in_episode=7), updates=12)
    assert float(metrics["ratio_error"].max()) < 1e-5
    assert float(metrics["kl"].max()) > 1e-6  # later minibatches do move


def at(tree, t):
    return jax.tree.map(lambda x: x[t], tree)


def test_recurrent_replay_equals_stepwise_rollout():
    env = probes.RecallFirst()
    envs = vectorize(env, 3)
    policy = actor_critic(env.observation_space, env.action_space, "gru", (8, 8))
    env_state, timestep = envs.reset(jax.random.key(0))
    params = policy.init(jax.random.key(1), timestep)
    world = (env_state, timestep, policy.start(params, timestep))
    _, trajectory = jax.jit(lambda w: rollout(policy, envs, params, w, jax.random.key(2), 11))(world)
    replayed = policy.unroll(params, world[2], trajectory.timesteps)
    carry = world[2]
    for t in range(12):
        timestep = at(trajectory.timesteps, t)
        np.testing.assert_allclose(trajectory.carries[t], carry, atol=1e-6)
        carry, output = policy.step(params, carry, timestep)
        np.testing.assert_allclose(replayed.value[t], output.value, atol=1e-6)
        np.testing.assert_allclose(replayed.distribution.logits[t], output.distribution.logits, atol=1e-6)


@pytest.mark.parametrize("network", ["mlp", "gru"])
def test_next_values_evaluates_the_state_before_the_reset(network):
    """Against one direct evaluation of every ``next_observation``; episodes of three steps, so each column is cut often."""
    env = rljax.make_env("Pendulum-v1", max_steps_in_episode=3)
    envs = vectorize(env, 4)
    policy = actor_critic(env.observation_space, env.action_space, network, (8, 8))
    env_state, timestep = envs.reset(jax.random.key(0))
    params = policy.init(jax.random.key(1), timestep)
    world = (env_state, timestep, policy.start(params, timestep))
    _, trajectory = jax.jit(lambda w: rollout(policy, envs, params, w, jax.random.key(2), 10))(world)
    values = policy.unroll(params, world[2], trajectory.timesteps).value
    result = jax.jit(lambda t, v: next_values(policy, params, t, v))(trajectory, values)
    assert int(trajectory.transitions.truncated.sum()) == 12
    for t in range(10):
        transition = at(trajectory.timesteps, t + 1)
        no = jnp.zeros(4, bool)
        before_reset = transition.replace(observation=transition.next_observation, terminated=no, truncated=no)
        carry = at(trajectory.carries, t + 1)
        np.testing.assert_allclose(result[t], policy.step(params, carry, before_reset)[1].value, atol=1e-6)


def test_key_advances_and_updates_differ():
    agent = ppo.make(SMALL, probes.ActionMatchesObservation())
    state = agent.init(jax.random.key(0))
    step = jax.jit(agent.step)
    first, _ = step(state)
    second, _ = step(first)
    keys = {tuple(np.asarray(jax.random.key_data(s.key)).tolist()) for s in (state, first, second)}
    assert len(keys) == 3


def plain(state):
    return state.replace(key=jax.random.key_data(state.key))


def test_resume_is_bit_for_bit():
    config = dataclasses.replace(SMALL, normalize_observations=True, normalize_rewards=True)
    agent = ppo.make(config, rljax.make_env("CartPole-v1"))
    chunk = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.step(s), state, length=5)[0])
    start = agent.init(jax.random.key(3))
    straight = chunk(chunk(start))
    halfway = chunk(start)
    saved = halfway.replace(key=jax.random.key_data(halfway.key))
    restored = jax.tree.map(lambda x: jnp.asarray(np.array(x)), saved)  # nothing but numbers
    resumed = chunk(restored.replace(key=jax.random.wrap_key_data(restored.key)))
    for a, b in zip(jax.tree.leaves(plain(straight)), jax.tree.leaves(plain(resumed)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_types_are_stable():
    """A state that changed its type would be compiled again, and could not be a scan's carry."""
    agent = ppo.make(SMALL, rljax.make_env("CartPole-v1"))
    before = jax.eval_shape(agent.init, jax.random.key(0))
    after = jax.eval_shape(lambda s: agent.step(s)[0], before)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_target_kl_stops_the_update():
    config = dataclasses.replace(SMALL, learning_rate=0.05, num_epochs=8, target_kl=1e-4)
    _, _, metrics = train(config, probes.ActionReward(), updates=1)
    _, _, free = train(dataclasses.replace(config, target_kl=None), probes.ActionReward(), updates=1)
    assert 0 < float(metrics["skipped"][0]) < 1
    assert float(metrics["kl"][0]) < float(free["kl"][0])


def test_linear_schedules_reach_zero():
    config = dataclasses.replace(SMALL, learning_rate_schedule="linear", clip_schedule="linear", anneal_steps=256.0 * 4)
    agent = ppo.make(config, probes.ActionReward())
    states = [agent.init(jax.random.key(0))]
    step = jax.jit(agent.step)
    rates = []
    for _ in range(6):
        state, metrics = step(states[-1])
        states.append(state)
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, 5e-3 * np.array([1, 0.75, 0.5, 0.25, 0, 0]), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, states[4].params, states[6].params)


def test_gradient_is_clipped_by_its_global_norm():
    """With plain gradient descent in place of Adam the step would be the clipped gradient; here Adam's first moment shows it."""
    config = dataclasses.replace(SMALL, max_grad_norm=1e-3, num_epochs=1, num_minibatches=1)
    agent = ppo.make(config, probes.RewardFromObservation())
    state, metrics = jax.jit(agent.step)(agent.init(jax.random.key(0)))
    assert float(metrics["grad_norm"]) > 1e-2
    first_moment = state.opt_state[1].mu  # (1 - b1) times the clipped gradient
    assert float(jnp.linalg.norm(first_moment)) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_observation_statistics_are_those_of_the_rollout():
    config = dataclasses.replace(SMALL, normalize_observations=True)
    env = rljax.make_env("CartPole-v1")
    agent = ppo.make(config, env)
    step = jax.jit(agent.step)
    state = agent.init(jax.random.key(0))
    for count in (256.0, 512.0, 768.0):
        state, _ = step(state)
        assert float(state.observation_stats.count) == count


def test_acting_sees_the_statistics_of_training():
    """Moving the statistics together with the observation leaves the action alone; moving the observation alone does not."""
    env = rljax.make_env("Pendulum-v1")
    agent = ppo.make(dataclasses.replace(SMALL, normalize_observations=True), env)
    state, _ = jax.jit(agent.step)(agent.init(jax.random.key(0)))
    timestep = state.world[1]
    stats = state.observation_stats
    moved = timestep.replace(observation=timestep.observation + 0.5)
    moved_state = state.replace(observation_stats=stats.replace(mean=stats.mean + 0.5))
    action, same, other = (
        agent.act(s, None, t, jax.random.key(0), True)[1] for s, t in ((state, timestep), (moved_state, moved), (state, moved))
    )
    np.testing.assert_allclose(action, same, atol=1e-6)
    assert np.abs(action - other).max() > 1e-4


def test_reward_normalisation_is_invariant_to_scale():
    """Rewards times 1,000 give the very same learner up to rounding, once they are normalised."""

    @dataclasses.dataclass(frozen=True)
    class Scaled(probes.ActionMatchesObservation):
        scale: float = 1.0

        def step(self, key, state, action):
            state, timestep = super().step(key, state, action)
            return state, timestep.replace(reward=timestep.reward * self.scale)

    config = dataclasses.replace(SMALL, normalize_rewards=True)
    _, small, _ = train(config, Scaled(scale=1.0), updates=5)
    _, large, _ = train(config, Scaled(scale=1000.0), updates=5)
    for a, b in zip(jax.tree.leaves(small.params), jax.tree.leaves(large.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_traced_hyper_parameters_are_swept_by_vmap():
    env = probes.ActionReward()

    def final(learning_rate):
        agent = ppo.make(dataclasses.replace(SMALL, learning_rate=learning_rate), env)
        return jax.lax.scan(lambda s, _: agent.step(s), agent.init(jax.random.key(0)), length=3)[0].params

    swept = jax.jit(jax.vmap(final))(jnp.array([0.0, 5e-3]))
    solo = jax.jit(functools.partial(final, 5e-3))()
    for many, one in zip(jax.tree.leaves(swept), jax.tree.leaves(solo), strict=True):
        np.testing.assert_allclose(many[1], one, atol=1e-5)
        assert many.shape == (2, *one.shape)


def test_multi_discrete_actions():
    from rljax.envs import Box, MultiDiscrete, transition

    @dataclasses.dataclass(frozen=True)
    class Lock:
        observation_space = Box(-1.0, 1.0, (1,))
        action_space = MultiDiscrete((2, 3))

        def reset(self, key):
            return jnp.int32(0), restart(jnp.zeros(1))

        def step(self, key, state, action) -> tuple[jax.Array, TimeStep]:
            reward = (action[0] == 1).astype(jnp.float32) + (action[1] == 2)
            return state, transition(jnp.zeros(1), reward, terminated=True)

    agent, state, _ = train(SMALL, Lock())
    assert greedy_return(agent, Lock(), state) == 2.0


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_minibatches": 7}, "algo.num_minibatches"),
        ({"num_minibatches": 32, "network": "gru"}, "algo.num_minibatches"),
        ({"learning_rate_schedule": "linear"}, "algo.anneal_steps"),
        ({"distribution": "gaussian"}, "algo.distribution"),
        ({"network": "minatar_cnn"}, "algo.network"),
    ],
)
def test_a_config_that_does_not_fit_names_the_key(change, key):
    with pytest.raises(ValueError, match=key):
        ppo.make(dataclasses.replace(SMALL, **change), rljax.make_env("CartPole-v1"))


def test_categories_are_not_normalised():
    with pytest.raises(ValueError, match=r"algo\.normalize_observations"):
        ppo.make(dataclasses.replace(SMALL, normalize_observations=True), rljax.make_env("FrozenLake-misc"))


def test_categorical_on_continuous_actions_names_the_key():
    with pytest.raises(ValueError, match=r"algo\.distribution"):
        ppo.make(dataclasses.replace(SMALL, distribution="categorical"), rljax.make_env("Pendulum-v1"))
