import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rljax
from rljax.agents import c51, dqn, grpo, sac, td3
from rljax.agents.off_policy import fill, fill_steps, update_target
from rljax.envs import vectorize
from rljax.ops import replay
from tests.agents import probes

SMALL = dict(hidden=(16,), num_envs=4, num_steps=8, batch_size=16, buffer_size=512, learning_starts=32)


def test_target_moves_towards_the_online_network():
    online, target = {"w": jnp.array([1.0, 3.0])}, {"w": jnp.array([0.0, 1.0])}
    np.testing.assert_allclose(update_target(target, online, jnp.int32(4), 0.1, 1)["w"], [0.1, 1.2], rtol=1e-6)
    np.testing.assert_array_equal(update_target(target, online, jnp.int32(4), 1.0, 2)["w"], online["w"])
    np.testing.assert_array_equal(update_target(target, online, jnp.int32(5), 1.0, 2)["w"], target["w"])


def test_hard_target_updates_are_counted_in_gradient_steps():
    """Whatever the number of environments, of steps a call and of updates a step: none is missed and none comes early."""
    config = dqn.Config(**SMALL, anneal_steps=1000.0, num_updates=3, target_every=16)  # 24 gradient steps a call
    agent = dqn.make(config, rljax.make_env("CartPole-v1"))
    step = jax.jit(agent.step)
    state = agent.init(jax.random.key(0))
    for call in range(1, 5):
        before = state
        state, _ = step(state)
        moved = any(np.any(a != b) for a, b in zip(*(jax.tree.leaves(s.target_params) for s in (before, state)), strict=True))
        assert moved == (call * 24 // 16 > (call - 1) * 24 // 16)
        equal = all(np.all(a == b) for a, b in zip(*map(jax.tree.leaves, (state.params, state.target_params)), strict=True))
        assert equal == (call * 24 % 16 == 0)


def test_a_linear_learning_rate_reaches_zero():
    config = dqn.Config(**SMALL, anneal_steps=128.0, learning_rate_schedule="linear")  # 32 steps of init, 32 a call
    agent = dqn.make(config, rljax.make_env("CartPole-v1"))
    step, states = jax.jit(agent.step), [agent.init(jax.random.key(0))]
    for _ in range(4):
        states.append(step(states[-1])[0])
    moved = [float(optax.tree.norm(optax.tree.sub(b.params, a.params))) for a, b in itertools.pairwise(states)]
    assert moved[0] > moved[2] > moved[3] == 0


@pytest.mark.parametrize("name", ["dqn", "c51"])
def test_initialization_of_every_dense_layer(name):
    module = {"dqn": dqn, "c51": c51}[name]
    config = module.Config(**SMALL, anneal_steps=1000.0, duelling=True, initialization="uniform")
    params = module.make(config, rljax.make_env("CartPole-v1")).init(jax.random.key(0)).params
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    assert len(kernels) == 4
    for kernel in kernels:
        bound = 1 / np.sqrt(kernel.shape[0])
        assert 0.8 * bound < np.abs(kernel).max() <= bound


def batch_of(returns, bootstrap, mask=None):
    zeros = jnp.zeros(len(returns))
    nothing = replay.Transition(zeros, None, zeros.astype(int), zeros, zeros > 0, zeros > 0, zeros, None)
    return replay.Batch(nothing, jnp.asarray(returns), jnp.asarray(bootstrap), zeros, mask, zeros.astype(int), zeros)


def test_double_dqn_targets_by_hand():
    q_online = jnp.array([[1.0, 2.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    q_target = jnp.array([[10.0, 20.0, 30.0], [1.0, 2.0, 3.0], [jnp.nan, jnp.nan, jnp.nan]])
    batch = batch_of([1.0, -1.0, 7.0], [0.9, 0.81, 0.0])  # one step, two steps, a termination
    np.testing.assert_allclose(dqn.targets(batch, q_online, q_target), [1 + 0.9 * 20, -1 + 0.81 * 1, 7.0], rtol=1e-6)
    np.testing.assert_allclose(dqn.targets(batch, q_target, q_target), [1 + 0.9 * 30, -1 + 0.81 * 3, 7.0], rtol=1e-6)
    legal = jnp.array([[True, False, True]] * 3)
    masked = batch_of([1.0, -1.0, 7.0], [0.9, 0.81, 0.0], legal)
    np.testing.assert_allclose(dqn.targets(masked, q_online, q_target), [1 + 0.9 * 10, -1 + 0.81 * 1, 7.0], rtol=1e-6)


@pytest.mark.parametrize(("target", "rises"), [(-5.0, False), (5.0, True)])
def test_temperature_rises_while_the_entropy_is_below_its_target(target, rises):
    agent = sac.make(sac.Config(**SMALL, target_entropy=target), rljax.make_env("Pendulum-v1"))
    state = agent.init(jax.random.key(0))
    after, metrics = jax.jit(agent.step)(state)
    assert (float(metrics["entropy"]) < target) == rises
    assert (after.params["log_temperature"] > state.params["log_temperature"]) == rises


def test_a_fixed_temperature_stays():
    agent = sac.make(sac.Config(**SMALL, temperature=0.3), rljax.make_env("Pendulum-v1"))
    state = agent.init(jax.random.key(0))
    after, metrics = jax.jit(agent.step)(state)
    assert float(metrics["temperature"]) == pytest.approx(0.3)
    assert after.params["log_temperature"] == state.params["log_temperature"]


def test_entropy_does_not_depend_on_the_units_of_the_action():
    @dataclasses.dataclass(frozen=True)
    class Wide(probes.ContinuousTarget):
        action_space = rljax.envs.Box(-200.0, 300.0, (1,))

        def step(self, key, state, action):
            return super().step(key, state, action / 100.0)

    results = []
    for env in (probes.ContinuousTarget(), Wide()):
        agent = sac.make(sac.Config(**SMALL), env)
        state, metrics = jax.jit(agent.step)(agent.init(jax.random.key(0)))
        results.append((metrics["entropy"], metrics["q"], state.params["log_temperature"]))
    np.testing.assert_allclose(*results, atol=1e-4)


def test_fill_is_random_and_legal_and_counts():
    envs = vectorize(probes.MaskedBandit(), 4)
    filled = jax.jit(lambda key: fill(envs, key, capacity=400, num_steps=100))(jax.random.key(0))
    stored = filled.buffer.transitions
    assert int(filled.buffer.filled) == 100
    legal = np.take_along_axis(np.asarray(stored.action_mask), np.asarray(stored.action)[..., None], -1)
    assert legal.all()
    counts = np.bincount(np.asarray(stored.action).ravel(), minlength=3) / 400
    np.testing.assert_allclose(counts, [5 / 12, 5 / 12, 1 / 6], atol=0.08)  # the third is legal half of the time
    assert fill_steps(5000, 1000, 64) == 16 and fill_steps(5000, 1, 64, n_step=3) == 3


def test_transitions_never_join_two_episodes():
    """Episodes count their steps in the observation: what follows k is k + 1, also at the end of an episode."""
    env = rljax.make_env("CartPole-v1", max_steps_in_episode=3)
    filled = jax.jit(lambda key: fill(vectorize(env, 4), key, capacity=400, num_steps=50))(jax.random.key(0))
    stored = filled.buffer.transitions
    assert int(np.asarray(stored.truncated).sum()) >= 60
    # The cart's position moves by its velocity: after a reset it would not.
    position, velocity = np.asarray(stored.observation)[..., 0], np.asarray(stored.observation)[..., 1]
    np.testing.assert_allclose(np.asarray(stored.next_observation)[..., 0], position + 0.02 * velocity, atol=1e-6)


def test_a_buffer_that_is_too_small_names_the_key():
    with pytest.raises(ValueError, match=r"algo\.buffer_size \(63\) must be at least 64.* for algo\.learning_starts"):
        fill_steps(63, 61, 4)
    with pytest.raises(ValueError, match=r"for algo\.n_step"):
        fill_steps(63, 1, 4, n_step=16)
    assert fill_steps(64, 61, 4) == 16
    with pytest.raises(ValueError, match=r"algo\.num_updates \(3\) must be a multiple of algo\.policy_delay \(2\)"):
        td3.make(td3.Config(**SMALL, num_updates=3), rljax.make_env("Pendulum-v1"))
    with pytest.raises(ValueError, match=r"algo\.anneal_steps"):
        dqn.make(dqn.Config(**SMALL), rljax.make_env("CartPole-v1"))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: grpo.Config(group_size=1), r"algo\.group_size must be >= 2"),
        (lambda: dqn.Config(discount=1.5), r"algo\.discount must be >= 0 and <= 1"),
        (lambda: sac.Config(network="cnn"), r"algo\.network must be one of mlp, minatar_cnn"),
    ],
)
def test_a_config_in_python_is_checked_as_one_in_a_file(make, key):
    with pytest.raises(ValueError, match=key):
        make()


def test_actions_without_room_name_the_key():
    @dataclasses.dataclass(frozen=True)
    class Flat(probes.ContinuousTarget):
        action_space = rljax.envs.Box(jnp.array([-1.0, 0.0]), jnp.array([1.0, 0.0]), (2,))

    with pytest.raises(ValueError, match="below the upper one"):
        td3.make(td3.Config(**SMALL), Flat())


def test_policy_delay():
    """With the policy's step every second critic step, half as many move the actor: Adam counts them."""
    agent = td3.make(td3.Config(**SMALL, num_updates=4, policy_delay=2), rljax.make_env("Pendulum-v1"))
    state, _ = jax.jit(agent.step)(agent.init(jax.random.key(0)))
    assert int(state.opt_states["critics"].count) == 8 * 4
    assert int(state.opt_states["actor"].count) == 8 * 2


def test_prioritised_replay_sees_the_errors():
    config = dqn.Config(**SMALL, anneal_steps=1000.0, prioritized=True)
    agent = dqn.make(config, rljax.make_env("CartPole-v1"))
    state, _ = jax.jit(agent.step)(agent.init(jax.random.key(0)))
    weights = np.asarray(state.buffer.priorities.weights)
    np.testing.assert_allclose(weights.sum(1), state.buffer.priorities.sums, rtol=1e-5)
    assert len(np.unique(weights[weights > 0])) > 10


def test_grpo_reaches_the_optimum_of_a_bandit():
    env = probes.ActionReward()
    agent = grpo.make(grpo.Config(num_groups=4, group_size=8, num_steps=1, hidden=(8,), learning_rate=2e-2), env)
    state, _ = jax.jit(lambda k: jax.lax.scan(lambda s, _: agent.step(s), agent.init(k), length=100))(jax.random.key(0))
    timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 4096))[1]
    _, action = agent.act(state, None, timestep, jax.random.key(2), False)
    assert float(action.mean()) > 0.98


def test_the_leash_holds_the_policy():
    env = probes.ActionReward()

    def reached(kl_coef):
        config = grpo.Config(
            num_groups=4,
            group_size=8,
            num_steps=1,
            hidden=(8,),
            learning_rate=2e-2,
            kl_coef=kl_coef,
            advantage="unscaled",
            num_epochs=1,
            num_minibatches=1,
        )
        agent = grpo.make(config, env)
        _, metrics = jax.lax.scan(lambda s, _: agent.step(s), agent.init(jax.random.key(0)), length=100)
        return metrics["kl_reference/k3"][0], metrics["kl_reference/k3"][-1]

    first, last = jax.jit(jax.vmap(reached))(jnp.array([0.3, 1.0, 10.0]))
    assert np.all(first == 0) and last[0] > last[1] > last[2] > 0
