import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import Box, Discrete, MultiDiscrete
from rljax.networks import action_values, continuous_critics, feed_forward
from rljax.networks.values import action_bounds

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
VECTORS, IMAGES, HIDDEN = Box(-1.0, 1.0, (4,)), Box(0.0, 1.0, (5, 5, 2)), (8, 8)
KEY = jax.random.key(0)


def inputs(space, rows=3, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, *space.shape)), jnp.float32)


def params_of(network, *arguments, noise=0.3):
    """Random kernels, and ``noise`` on the biases, which are zero at the start; an orthogonal matrix takes long to compile."""
    rng = np.random.default_rng(1)
    scales = {"kernel": (0.0, 0.5), "bias": (0.0, noise), "scale": (1.0, noise)}
    shapes = jax.eval_shape(network.init, KEY, *arguments)
    return jax.tree.map_with_path(lambda path, x: rng.normal(*scales[path[-1].key], x.shape).astype(np.float32), shapes)


def outputs(network, params, *arguments):
    return np.asarray(jit(network.apply)(params, *arguments))


# Shapes


@pytest.mark.parametrize(
    ("space", "network", "options", "shape"),
    [
        (VECTORS, "mlp", {}, (3, 5)),
        (VECTORS, "mlp", {"layer_norm": True, "duelling": True}, (3, 5)),
        (VECTORS, "mlp", {"atoms": 7}, (3, 5, 7)),
        (VECTORS, "mlp", {"atoms": 7, "duelling": True}, (3, 5, 7)),
        (IMAGES, "mlp", {}, (3, 5)),
        (IMAGES, "minatar_cnn", {"layer_norm": True, "atoms": 7, "duelling": True}, (3, 5, 7)),
        (Discrete(6), "mlp", {"duelling": True}, (3, 5)),
    ],
)
def test_shapes_of_action_values(space, network, options, shape):
    values = action_values(space, Discrete(5), network, HIDDEN, "relu", **options)
    observation = jnp.zeros((3, *space.shape), space.dtype)
    result = jax.eval_shape(lambda: values.apply(values.init(KEY, observation), observation))
    assert (result.shape, result.dtype) == (shape, jnp.float32)


def test_shapes_of_outputs_and_critics():
    network = feed_forward(VECTORS, 3, "mlp", HIDDEN, "relu")
    assert jax.eval_shape(lambda: network.apply(network.init(KEY, inputs(VECTORS)), inputs(VECTORS))).shape == (3, 3)
    action = inputs(Box(-1.0, 1.0, (2,)))
    for space in (VECTORS, IMAGES, Discrete(6)):
        critics = continuous_critics(space, Box(-1.0, 1.0, (2,)), HIDDEN, "relu", 4)
        observation = jnp.zeros((3, *space.shape), space.dtype)
        result = jax.eval_shape(lambda c=critics, o=observation: c.apply(c.init(KEY, o, action), o, action))
        assert (result.shape, result.dtype) == ((4, 3), jnp.float32)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_the_last_layer_starts_at_its_scale(scale):
    network = feed_forward(VECTORS, 3, "mlp", HIDDEN, "relu", scale=scale)
    kernel = np.asarray(jit(network.init)(KEY, inputs(VECTORS))["Dense_0"]["kernel"])
    np.testing.assert_allclose(kernel.T @ kernel, scale**2 * np.eye(3), atol=1e-6)


# Action values


def mlp(params, x, activation=np.tanh):
    for layer in ("Dense_0", "Dense_1"):
        x = activation(x @ params[layer]["kernel"] + params[layer]["bias"])
    return x


def linear(params, x):
    return x @ params["kernel"] + params["bias"]


@pytest.mark.parametrize("atoms", [None, 7])
def test_action_values_by_hand(atoms):
    network, x = action_values(VECTORS, Discrete(5), "mlp", HIDDEN, "tanh", atoms=atoms), inputs(VECTORS)
    params = params_of(network, x)
    expected = linear(params["Dense_0"], mlp(params["MLP_0"], np.asarray(x)))
    expected = expected if atoms is None else expected.reshape(3, 5, 7)  # the atoms of an action are side by side
    np.testing.assert_allclose(outputs(network, params, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("atoms", [None, 7])
def test_duelling_by_hand(atoms):
    # The mean over the actions is V, whatever the advantages; what is left is the advantages', whatever V.
    network, x = action_values(VECTORS, Discrete(5), "mlp", HIDDEN, "tanh", duelling=True, atoms=atoms), inputs(VECTORS)
    params = params_of(network, x)
    values = linear(params["Dense_1"], mlp(params["MLP_1"], np.asarray(x)))
    advantages = linear(params["Dense_0"], mlp(params["MLP_0"], np.asarray(x))).reshape(3, 5, -1)
    expected = values[:, None] + advantages - advantages.mean(1, keepdims=True)
    q = outputs(network, params, x)
    np.testing.assert_allclose(q, expected.reshape(q.shape), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(q.mean(1), values.reshape(q.mean(1).shape), rtol=1e-4, atol=1e-5)
    for stream, same in (("1", lambda q: q - q.mean(1, keepdims=True)), ("0", lambda q: q.mean(1))):
        names = ["MLP_" + stream, "Dense_" + stream]
        moved = {name: jax.tree.map(lambda x: x + 0.3, part) if name in names else part for name, part in params.items()}
        other = outputs(network, moved, x)
        np.testing.assert_allclose(same(other), same(q), rtol=1e-4, atol=1e-5)
        assert np.abs(other - q).max() > 0.1


def test_discrete_observations_are_one_hot():
    x = jnp.array([3, 0, 2])
    by_index = action_values(Discrete(4), Discrete(5), "mlp", HIDDEN, "tanh")
    by_vector = action_values(VECTORS, Discrete(5), "mlp", HIDDEN, "tanh")
    params = params_of(by_index, x)
    np.testing.assert_array_equal(outputs(by_index, params, x), outputs(by_vector, params, jnp.eye(4)[x]))
    action = inputs(Box(-1.0, 1.0, (2,)))
    by_index, by_vector = (continuous_critics(s, Box(-1.0, 1.0, (2,)), HIDDEN, "tanh", 2) for s in (Discrete(4), VECTORS))
    params = params_of(by_index, x, action)
    np.testing.assert_array_equal(outputs(by_index, params, x, action), outputs(by_vector, params, jnp.eye(4)[x], action))


@pytest.mark.parametrize("space", [VECTORS, IMAGES])
def test_layer_norm_makes_the_scale_of_observations_irrelevant(space):
    # Without biases, as at the start.
    network = "mlp" if space is VECTORS else "minatar_cnn"
    plain, normed = (feed_forward(space, 3, network, HIDDEN, "relu", layer_norm=norm, scale=1.0) for norm in (False, True))
    x = inputs(space)
    for head, factor in ((plain, 1000.0), (normed, 1.0)):
        params = params_of(head, x, noise=0.0)
        np.testing.assert_allclose(outputs(head, params, 1000 * x), factor * outputs(head, params, x), rtol=1e-3, atol=1e-3)
    assert np.all(np.isfinite(outputs(normed, params_of(normed, x), 1e12 * x)))


# Critics


def test_critics_by_hand_are_networks_of_their_own():
    space = Box(-1.0, 1.0, (2,))
    critics, x, action = continuous_critics(VECTORS, space, HIDDEN, "tanh", 2), inputs(VECTORS), inputs(space, seed=1)
    params = params_of(critics, x, action)
    joint = np.concatenate([x, action], 1)
    expected = [linear(params[f"Dense_{i}"], mlp(params[f"MLP_{i}"], joint))[:, 0] for i in range(2)]
    np.testing.assert_allclose(outputs(critics, params, x, action), expected, rtol=1e-4, atol=1e-5)
    first = jit(critics.init)(KEY, x, action)
    assert np.abs(first["MLP_0"]["Dense_0"]["kernel"] - first["MLP_1"]["Dense_0"]["kernel"]).max() > 0.01


def test_critics_see_where_in_its_box_an_action_is():
    boxes = [Box(-1.0, 1.0, (2,)), Box(np.array([-2.0, 0.0]), np.array([3.0, 1000.0]), (2,)), Box(5.0, 5.5, (2,))]
    relative = np.random.default_rng(2).uniform(-1.0, 1.0, (3, 2))
    x, results = inputs(VECTORS), []
    for box in boxes:
        critics = continuous_critics(VECTORS, box, HIDDEN, "tanh", 2)
        action = jnp.asarray(box.low + (box.high - box.low) * (relative + 1) / 2, jnp.float32)
        results.append(outputs(critics, params_of(critics, x, action), x, action))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-4, atol=1e-4)


def test_bounds_may_be_traced():
    x, action = inputs(VECTORS), inputs(Box(-1.0, 1.0, (2,)))

    def critics(high):
        return continuous_critics(VECTORS, Box(-high, high, (2,)), HIDDEN, "tanh", 2)

    params = params_of(critics(1.0), x, action)
    swept = jit(jax.vmap(lambda high: critics(high).apply(params, x, high * action)))(jnp.array([1.0, 2.0, 7.0]))
    for lane in swept:
        np.testing.assert_allclose(lane, outputs(critics(1.0), params, x, action), rtol=1e-4, atol=1e-5)


def test_bounds_are_one_for_each_dimension():
    low, high = action_bounds(Box(-1, np.array([1.0, 2.0]), (2,)))
    np.testing.assert_array_equal([low, high], [[-1.0, -1.0], [1.0, 2.0]])
    assert (low.dtype, high.dtype) == (jnp.float32, jnp.float32)


# What does not fit


BOX = Box(-1.0, 1.0, (2,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: action_values(VECTORS, BOX, "mlp", HIDDEN, "relu"), r"algo\.name: .* Discrete actions.* has Box"),
        (lambda: action_values(VECTORS, MultiDiscrete((2, 3)), "mlp", HIDDEN, "relu"), r"algo\.name: .* has MultiDiscrete"),
        (lambda: action_values(VECTORS, Discrete(2), "gru", HIDDEN, "relu"), r"algo\.network must be one of mlp, minatar_cnn"),
        (lambda: feed_forward(VECTORS, 2, "minatar_cnn", HIDDEN, "relu"), r"algo\.network \"minatar_cnn\""),
        (lambda: feed_forward(MultiDiscrete((2, 3)), 2, "mlp", HIDDEN, "relu"), r"algo\.network 'mlp' .* has MultiDiscrete"),
        (lambda: continuous_critics(MultiDiscrete((2, 3)), BOX, HIDDEN, "relu", 2), r"algo\.network 'mlp' .* has MultiDiscrete"),
        (lambda: continuous_critics(VECTORS, Discrete(2), HIDDEN, "relu", 2), r"algo\.name: .*Discrete"),
        (lambda: continuous_critics(VECTORS, Box(-1.0, np.inf, (2,)), HIDDEN, "relu", 2), r"algo\.name: .* finite bounds"),
        (lambda: continuous_critics(VECTORS, Box(-np.inf, 1.0, (2,)), HIDDEN, "relu", 2), r"algo\.name: .* finite bounds"),
        (lambda: continuous_critics(VECTORS, Box(-1.0, 1.0, (2, 2)), HIDDEN, "relu", 2), r"one axis, .* shape \[2, 2\]"),
    ],
)
def test_what_does_not_fit_names_the_key(make, message):
    with pytest.raises(ValueError, match=message):
        make()
