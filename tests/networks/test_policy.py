import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from rljax.envs import Box, Discrete, MultiDiscrete, TimeStep
from rljax.networks import Categorical, Gaussian, MultiCategorical, TanhGaussian, actor_critic

T, B = 6, 3
IMAGES, VECTORS = Box(0.0, 1.0, (5, 5, 2)), Box(-1.0, 1.0, (4,))
POLICIES = {"mlp": VECTORS, "minatar_cnn": IMAGES, "gru": VECTORS}


def time_steps(shape, seed=0, terminated=None, truncated=None, mask=None):
    """``[T, B]`` time steps of random observations."""
    observation = jnp.asarray(np.random.default_rng(seed).normal(size=(T, B, *shape)), jnp.float32)
    no = jnp.zeros((T, B), bool)
    terminated, truncated = (no if x is None else jnp.asarray(x) for x in (terminated, truncated))
    return TimeStep(observation, mask, jnp.zeros((T, B)), terminated, truncated, observation, {})


def at(timesteps, t):
    return jax.tree.map(lambda x: x[t], timesteps)


@functools.cache
def policy_and_params(network, distribution="auto", action_space=Discrete(3), observation_space=None):
    """Parameters with noise added, so that the last layers are not nearly zero."""
    space = POLICIES[network] if observation_space is None else observation_space
    policy = actor_critic(space, action_space, network, hidden=(8, 8), distribution=distribution)
    params = jax.jit(policy.init)(jax.random.key(0), at(time_steps(space.shape), 0))
    rng = np.random.default_rng(1)
    return policy, jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32), params)


def leaves(output):
    return [np.asarray(x) for x in jax.tree.leaves(output)]


@pytest.mark.parametrize("network", POLICIES)
def test_unroll_equals_steps_over_episode_ends(network):
    policy, params = policy_and_params(network)
    terminated, truncated = np.zeros((2, T, B), bool)
    terminated[2, 0] = truncated[3, 1] = terminated[4, 1] = True
    timesteps = time_steps(POLICIES[network].shape, 2, terminated, truncated)
    carry = policy.start(params, at(timesteps, 0))
    whole = jax.jit(policy.unroll)(params, carry, timesteps)
    step = jax.jit(policy.step)
    for t in range(T):
        carry, output = step(params, carry, at(timesteps, t))
        for a, b in zip(leaves(output), leaves(at(whole, t)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert whole.value.shape == (T, B) and whole.distribution.logits.shape == (T, B, 3)
    assert np.std(whole.value) > 0.01


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_after_an_episode_end_the_gru_starts_afresh(flag):
    policy, params = policy_and_params("gru")
    unroll = jax.jit(policy.unroll)
    done = np.zeros((T, B), bool)
    done[3] = True
    timesteps = time_steps((4,), 3, **{flag: done})
    zeros = policy.start(params, at(timesteps, 0))
    assert zeros.shape == (B, 8) and not zeros.any()
    after = leaves(unroll(params, zeros, timesteps))
    # The same time steps moved to the front, from a carry of something else, which the flag must erase.
    moved = jax.tree.map(lambda x: jnp.roll(x, -3, axis=0), timesteps)
    fresh = leaves(unroll(params, zeros + 5.0, moved))
    for a, b in zip(after, fresh, strict=True):
        np.testing.assert_allclose(a[3:], b[:3], rtol=1e-6, atol=1e-6)
    remembering = leaves(unroll(params, zeros, time_steps((4,), 3)))
    assert np.abs(remembering[0][3:] - after[0][3:]).max() > 1e-3


def test_a_gru_start_equals_the_first_time_step_of_a_run():
    policy, params = policy_and_params("gru")
    timesteps = time_steps((4,), 4)
    step = jax.jit(policy.step)
    started = step(params, policy.start(params, at(timesteps, 0)), at(timesteps, 0))
    erased = step(params, jnp.full((B, 8), 3.0), at(time_steps((4,), 4, terminated=np.ones((T, B), bool)), 0))
    for a, b in zip(leaves(started), leaves(erased), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_feed_forward_policies_have_an_empty_carry():
    policy, params = policy_and_params("mlp")
    assert policy.start(params, at(time_steps((4,)), 0)) == ()


def test_mlp_by_hand():
    policy, params = policy_and_params("mlp")
    timesteps = time_steps((4,), 5)
    output = jax.jit(policy.unroll)(params, (), timesteps)
    params = jax.tree.map(np.asarray, params)

    def network(torso, head):
        x = np.asarray(timesteps.observation)
        for layer in ("Dense_0", "Dense_1"):
            x = np.tanh(x @ params[torso][layer]["kernel"] + params[torso][layer]["bias"])
        return x @ params[head]["kernel"] + params[head]["bias"]

    np.testing.assert_allclose(output.distribution.logits, network("actor", "Dense_0"), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output.value, network("critic", "Dense_1")[..., 0], rtol=1e-4, atol=1e-5)


def test_observations_of_more_axes_are_flattened():
    policy, params = policy_and_params("mlp", observation_space=Box(0.0, 1.0, (2, 2)))
    flat, _ = policy_and_params("mlp")
    timesteps = time_steps((2, 2), 6)
    flattened = timesteps.replace(observation=timesteps.observation.reshape(T, B, 4))
    np.testing.assert_array_equal(policy.unroll(params, (), timesteps).value, flat.unroll(params, (), flattened).value)


def test_discrete_observations_are_one_hot():
    policy, params = policy_and_params("mlp", observation_space=Discrete(4))
    vector, _ = policy_and_params("mlp")
    timesteps = time_steps((4,), 7)
    states = jnp.asarray(np.random.default_rng(7).integers(0, 4, (T, B)))
    by_index = policy.unroll(params, (), timesteps.replace(observation=states))
    one_hot = vector.unroll(params, (), timesteps.replace(observation=jnp.eye(4)[states]))
    for a, b in zip(leaves(by_index), leaves(one_hot), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.uint8])
def test_observations_of_other_dtypes_are_numbers_too(dtype):
    policy, params = policy_and_params("minatar_cnn")
    timesteps = time_steps(IMAGES.shape, 8)
    pixels = timesteps.observation > 0
    a, b = (policy.unroll(params, (), timesteps.replace(observation=pixels.astype(d))) for d in (dtype, jnp.float32))
    np.testing.assert_array_equal(a.value, b.value)


def test_action_masks_reach_the_distribution():
    mask = np.random.default_rng(9).random((T, B, 3)) < 0.5
    mask[..., 1] = True
    for space in (Discrete(3), MultiDiscrete((1, 2))):
        policy, params = policy_and_params("mlp", action_space=space)
        unmasked = policy.unroll(params, (), time_steps((4,))).distribution
        masked = policy.unroll(params, (), time_steps((4,), mask=jnp.asarray(mask))).distribution
        np.testing.assert_array_equal(masked.logits[mask], unmasked.logits[mask])
        assert np.all(masked.logits[~mask] < -1e38)


def fresh_output(action_space, network="mlp", distribution="auto"):
    space = POLICIES[network]
    policy = actor_critic(space, action_space, network, (64, 64), distribution=distribution)
    timesteps = time_steps(space.shape, 10)
    params = jax.jit(policy.init)(jax.random.key(5), at(timesteps, 0))
    return params, policy.unroll(params, policy.start(params, at(timesteps, 0)), timesteps)


@pytest.mark.parametrize("network", POLICIES)
def test_action_heads_start_nearly_uniform(network):
    params, output = fresh_output(Discrete(4), network)
    probabilities = scipy.special.softmax(np.asarray(output.distribution.logits), -1)
    np.testing.assert_allclose(probabilities, 0.25, atol=0.02)
    assert np.std(output.value) > 0.1  # the value head does not
    for name, scale in (("Dense_0", 0.01), ("Dense_1", 1.0)):
        np.testing.assert_allclose(np.linalg.norm(params[name]["kernel"], axis=0), scale, rtol=1e-5)
        np.testing.assert_array_equal(params[name]["bias"], 0.0)


@pytest.mark.parametrize(("distribution", "kind"), [("auto", Gaussian), ("gaussian", Gaussian), ("tanh_gaussian", TanhGaussian)])
def test_continuous_heads_start_near_a_standard_normal(distribution, kind):
    low, high = np.array([-2.0, 0.0]), np.array([3.0, 0.5])
    _, output = fresh_output(Box(low, high, (2,)), distribution=distribution)
    assert type(output.distribution) is kind
    np.testing.assert_allclose(output.distribution.mean, 0.0, atol=0.05)
    np.testing.assert_array_equal(output.distribution.log_std, np.zeros((T, B, 2)))
    # Each action has its own bounds.
    limits = [output.distribution.to_action(jnp.full((T, B, 2), x))[0, 0] for x in (-50.0, 50.0)]
    np.testing.assert_allclose(limits, [low, high], rtol=1e-6)


def test_discrete_heads():
    assert type(fresh_output(Discrete(4))[1].distribution) is Categorical
    distribution = fresh_output(MultiDiscrete((2, 3)))[1].distribution
    assert type(distribution) is MultiCategorical
    assert distribution.logits.shape == (T, B, 5) and distribution.mode().shape == (T, B, 2)


def test_lanes_of_parameters_equal_single_ones():
    policy, _ = policy_and_params("gru")
    timestep, keys = at(time_steps((4,)), 0), jax.random.split(jax.random.key(1), 2)
    lanes = jax.jit(jax.vmap(policy.init, (0, None)))(keys, timestep)
    for i, key in enumerate(keys):
        for a, b in zip(jax.tree.leaves(lanes), jax.tree.leaves(jax.jit(policy.init)(key, timestep)), strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-6)


class DictSpace:
    """A space that no network of ours takes."""

    shape, dtype = (), jnp.float32
    spaces = {"position": VECTORS}  # noqa: RUF012


@pytest.mark.parametrize(
    ("observations", "actions", "options", "words"),
    [
        (DictSpace(), Discrete(2), {}, ["algo.network", "DictSpace"]),
        (MultiDiscrete((2, 2)), Discrete(2), {}, ["algo.network", "MultiDiscrete"]),
        (VECTORS, Discrete(2), {"network": "transformer"}, ["algo.network", "mlp, minatar_cnn, gru"]),
        (VECTORS, Discrete(2), {"network": "minatar_cnn"}, ["algo.network", "minatar_cnn", "[4]"]),
        (Discrete(3), Discrete(2), {"network": "minatar_cnn"}, ["algo.network", "minatar_cnn"]),
        (Box(0.0, 1.0, (2, 5, 1)), Discrete(2), {"network": "minatar_cnn"}, ["algo.network", "[2, 5, 1]"]),
        (VECTORS, DictSpace(), {}, ["algo.distribution", "DictSpace"]),
        (VECTORS, Discrete(2), {"distribution": "gaussian"}, ["algo.distribution", "gaussian", "Discrete"]),
        (VECTORS, MultiDiscrete((2, 2)), {"distribution": "tanh_gaussian"}, ["algo.distribution", "MultiDiscrete"]),
        (VECTORS, Box(-1.0, 1.0, (2,)), {"distribution": "categorical"}, ["algo.distribution", "categorical", "Box"]),
        (VECTORS, Discrete(2), {"distribution": "beta"}, ["algo.distribution", "beta"]),
        (VECTORS, Box(-1.0, 1.0, (2, 2)), {}, ["Box", "[2, 2]"]),
        (VECTORS, Box(-np.inf, np.inf, (2,)), {"distribution": "tanh_gaussian"}, ["algo.distribution", "tanh_gaussian"]),
        (VECTORS, Discrete(2), {"activation": "swish2"}, ["algo.activation", "swish2"]),
    ],
)
def test_what_does_not_fit_is_named(observations, actions, options, words):
    with pytest.raises(ValueError, match=".") as error:
        actor_critic(observations, actions, **options)
    for word in words:
        assert word in str(error.value)
