import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from rljax.envs import Box, Discrete, MultiDiscrete, TimeStep
from rljax.networks import Categorical, Gaussian, MultiCategorical, TanhGaussian, actor_critic

T, B, HIDDEN = 6, 3, (32, 32)
IMAGES, VECTORS = Box(0.0, 1.0, (5, 5, 2)), Box(-1.0, 1.0, (4,))
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
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
def initial(network):
    """A policy for three discrete actions and its first parameters."""
    policy = actor_critic(POLICIES[network], Discrete(3), network, HIDDEN)
    params = jit(policy.init)(jax.random.key(0), at(time_steps(POLICIES[network].shape), 0))
    unroll = jit(policy.unroll)
    return policy, params, lambda params, ts: unroll(params, policy.start(params, at(ts, 0)), ts)


@functools.cache
def make(network):
    """The same with noise on the parameters, since the policy's last layer starts at nearly zero."""
    policy, params, unroll = initial(network)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32), params)
    return policy, params, functools.partial(unroll, params)


def leaves(output):
    return [np.asarray(x) for x in jax.tree.leaves(output)]


@pytest.mark.parametrize("network", POLICIES)
def test_unroll_equals_steps_over_episode_ends(network):
    policy, params, unroll = make(network)
    terminated, truncated = np.zeros((2, T, B), bool)
    terminated[2, 0] = truncated[3, 1] = terminated[4, 1] = True
    timesteps = time_steps(POLICIES[network].shape, 2, terminated, truncated)
    whole = unroll(timesteps)
    carry, step = policy.start(params, at(timesteps, 0)), jit(policy.step)
    for t in range(T):
        carry, output = step(params, carry, at(timesteps, t))
        for a, b in zip(leaves(output), leaves(at(whole, t)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert whole.value.shape == (T, B)
    assert whole.distribution.logits.shape == (T, B, 3)
    assert np.std(whole.value) > 0.01


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_after_an_episode_end_the_gru_starts_afresh(flag):
    _, _, unroll = make("gru")
    done = np.zeros((T, B), bool)
    done[3] = True
    after = leaves(unroll(time_steps((4,), 3, **{flag: done})))
    fresh = leaves(unroll(jax.tree.map(lambda x: jnp.roll(x, -3, axis=0), time_steps((4,), 3))))
    for a, b in zip(after, fresh, strict=True):
        np.testing.assert_allclose(a[3:], b[:3], rtol=1e-6, atol=1e-6)
    remembering = leaves(unroll(time_steps((4,), 3)))
    assert np.abs(remembering[0][3:] - after[0][3:]).max() > 1e-3


def test_an_episode_end_erases_any_carry():
    policy, params, unroll = make("gru")
    timesteps = time_steps((4,), 4, terminated=np.ones((T, B), bool))
    start = policy.start(params, at(timesteps, 0))
    np.testing.assert_array_equal(start, np.zeros((B, 32)))
    carry, output = jit(policy.step)(params, start + 5.0, at(timesteps, 0))
    assert carry.shape == (B, 32)
    for a, b in zip(leaves(output), leaves(at(unroll(timesteps), 0)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_feed_forward_policies_have_an_empty_carry():
    policy, params, _ = make("mlp")
    assert policy.start(params, at(time_steps((4,)), 0)) == ()


def test_mlp_by_hand():
    _, params, unroll = make("mlp")
    timesteps = time_steps((4,), 5)
    output = unroll(timesteps)

    def network(torso, head):
        x = np.asarray(timesteps.observation)
        for layer in ("Dense_0", "Dense_1"):
            x = np.tanh(x @ params[torso][layer]["kernel"] + params[torso][layer]["bias"])
        return x @ params[head]["kernel"] + params[head]["bias"]

    np.testing.assert_allclose(output.distribution.logits, network("actor", "Dense_0"), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output.value, network("critic", "Dense_1")[..., 0], rtol=1e-4, atol=1e-5)


def test_observations_of_more_axes_are_flattened():
    _, params, unroll = make("mlp")
    squares = actor_critic(Box(0.0, 1.0, (2, 2)), Discrete(3), hidden=HIDDEN)
    timesteps = time_steps((2, 2), 6)
    flattened = timesteps.replace(observation=timesteps.observation.reshape(T, B, 4))
    for a, b in zip(leaves(jit(squares.unroll)(params, (), timesteps)), leaves(unroll(flattened)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_discrete_observations_are_one_hot():
    _, params, unroll = make("mlp")
    indexed = actor_critic(Discrete(4), Discrete(3), hidden=HIDDEN)
    states = jnp.asarray(np.random.default_rng(7).integers(0, 4, (T, B)))
    timesteps = time_steps((4,)).replace(observation=states)
    shapes = jax.eval_shape(indexed.init, jax.random.key(0), at(timesteps, 0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    by_index = jit(indexed.unroll)(params, (), timesteps)
    one_hot = unroll(timesteps.replace(observation=jnp.eye(4)[states]))
    for a, b in zip(leaves(by_index), leaves(one_hot), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.uint8])
def test_observations_of_other_dtypes_are_numbers_too(dtype):
    _, _, unroll = make("minatar_cnn")
    timesteps = time_steps(IMAGES.shape, 8)
    pixels = timesteps.observation > 0
    a, b = (unroll(timesteps.replace(observation=pixels.astype(d))) for d in (dtype, jnp.float32))
    np.testing.assert_array_equal(a.value, b.value)


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete((1, 2))])
def test_action_masks_reach_the_distribution(space):
    _, params, unroll = make("mlp")
    mask = np.random.default_rng(9).random((T, B, 3)) < 0.5
    mask[..., :2] = True
    masked = actor_critic(VECTORS, space, hidden=HIDDEN).unroll
    logits = jit(masked)(params, (), time_steps((4,), mask=jnp.asarray(mask))).distribution.logits
    np.testing.assert_allclose(logits[mask], unroll(time_steps((4,))).distribution.logits[mask], rtol=1e-6)
    assert np.all(logits[~mask] < -1e38)


@pytest.mark.parametrize("network", POLICIES)
def test_action_heads_start_nearly_uniform(network):
    _, params, unroll = initial(network)
    output = unroll(params, time_steps(POLICIES[network].shape, 10))
    probabilities = scipy.special.softmax(np.asarray(output.distribution.logits), -1)
    np.testing.assert_allclose(probabilities, 1 / 3, atol=0.02)
    assert np.std(output.value) > 0.1  # the value head does not
    for name, scale in (("Dense_0", 0.01), ("Dense_1", 1.0)):
        np.testing.assert_allclose(np.linalg.norm(params[name]["kernel"], axis=0), scale, rtol=1e-5)
        np.testing.assert_array_equal(params[name]["bias"], 0.0)


@pytest.mark.parametrize(("distribution", "kind"), [("auto", Gaussian), ("gaussian", Gaussian), ("tanh_gaussian", TanhGaussian)])
def test_continuous_heads(distribution, kind):
    _, params, _ = initial("mlp")
    low, high = np.array([-2.0, 0.0, -9.0]), np.array([3.0, 0.5, -8.0])
    policy = actor_critic(VECTORS, Box(low, high, (3,)), hidden=HIDDEN, distribution=distribution)
    timesteps = time_steps((4,), 10)
    shapes = jax.eval_shape(policy.init, jax.random.key(0), at(timesteps, 0))
    assert shapes["log_std"].shape == (3,)
    log_std = jnp.array([0.0, 0.1, 0.2])
    output = jit(policy.unroll)({**params, "log_std": log_std}, (), timesteps)
    assert type(output.distribution) is kind
    np.testing.assert_allclose(output.distribution.mean, 0.0, atol=0.05)
    np.testing.assert_array_equal(output.distribution.log_std, np.broadcast_to(log_std, (T, B, 3)))
    limits = [output.distribution.to_action(jnp.full((T, B, 3), x))[0, 0] for x in (-50.0, 50.0)]
    np.testing.assert_allclose(limits, [low, high], rtol=1e-6)  # each action has its own bounds


def test_log_std_starts_at_zero():
    policy = actor_critic(VECTORS, Box(-1.0, 1.0, (2,)), hidden=(2,))
    params = jit(policy.init)(jax.random.key(0), at(time_steps((4,)), 0))
    np.testing.assert_array_equal(params["log_std"], np.zeros(2))


def test_discrete_heads():
    _, params, unroll = make("mlp")
    assert type(unroll(time_steps((4,))).distribution) is Categorical
    policy = actor_critic(VECTORS, MultiDiscrete((1, 2)), hidden=HIDDEN)
    distribution = jit(policy.unroll)(params, (), time_steps((4,))).distribution
    assert type(distribution) is MultiCategorical
    assert distribution.logits.shape == (T, B, 3)
    assert distribution.mode().shape == (T, B, 2)


def test_lanes_of_parameters_equal_single_ones():
    policy, _, _ = make("gru")
    timestep, keys = at(time_steps((4,)), 0), jax.random.split(jax.random.key(1), 2)
    lanes, init = jit(jax.vmap(policy.init, (0, None)))(keys, timestep), jit(policy.init)
    for i, key in enumerate(keys):
        for a, b in zip(jax.tree.leaves(lanes), jax.tree.leaves(init(key, timestep)), strict=True):
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
    ],
)
def test_what_does_not_fit_is_named(observations, actions, options, words):
    with pytest.raises(ValueError, match=words[0]) as error:
        actor_critic(observations, actions, **options)
    for word in words[1:]:
        assert word in str(error.value)
