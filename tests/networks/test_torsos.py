import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.networks.torsos import MinAtarCNN, ResettableGRU, dense, orthogonal

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


@functools.partial(jit, static_argnums=(1, 2))
def kernel_of(key, shape, scale=1.0):
    return orthogonal(scale)(key, shape)


SHAPES = [(7, 3), (3, 7), (5, 5), (3, 3, 4, 16), (3, 3, 1, 16)]  # tall, wide, square, and convolutions of either kind


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_kernels(shape):
    kernel = np.asarray(kernel_of(jax.random.key(0), shape, math.sqrt(2.0)))
    assert kernel.shape == shape
    matrix = kernel.reshape(-1, shape[-1])
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    np.testing.assert_allclose(tall.T @ tall, 2.0 * np.eye(tall.shape[1]), atol=1e-5)


def test_orthogonal_matches_a_qr_factorisation_with_a_positive_diagonal():
    key = jax.random.key(1)
    gaussian = np.asarray(jax.random.normal(key, (64, 48)), np.float64)
    q, r = np.linalg.qr(gaussian)
    np.testing.assert_allclose(kernel_of(key, (64, 48)), q * np.sign(np.diag(r)), atol=1e-5)
    np.testing.assert_allclose(kernel_of(key, (48, 64)), (q * np.sign(np.diag(r))).T, atol=1e-5)


def test_orthogonal_stays_orthogonal_at_size():
    # Gram-Schmidt done once would lose it: the columns are projected twice.
    kernel = np.asarray(kernel_of(jax.random.key(2), (256, 256)))
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(256), atol=1e-5)


def test_orthogonal_under_vmap():
    keys = jax.random.split(jax.random.key(3), 3)
    lanes = jit(jax.vmap(lambda key: orthogonal(1.0)(key, (7, 3))))(keys)
    for lane, key in zip(lanes, keys, strict=True):
        np.testing.assert_allclose(lane, kernel_of(key, (7, 3)), atol=1e-6)
    assert np.abs(lanes[0] - lanes[1]).max() > 0.01


def test_minatar_convolution_by_hand():
    # The first feature of a kernel that picks the top left pixel of channel 1 is that pixel; no padding: 5x5 gives 3x3.
    network = MinAtarCNN((2,), "relu")
    images = jnp.asarray(np.random.default_rng(0).random((4, 5, 5, 2)), jnp.float32)
    shapes = jax.eval_shape(network.init, jax.random.key(0), images)["params"]
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    params["Conv_0"]["kernel"][0, 0, 1, 0] = 1.0
    dense = params["MLP_0"]["Dense_0"]
    assert dense["kernel"].shape == (3 * 3 * 16, 2)
    dense["kernel"][0, 0] = dense["kernel"][16, 1] = 1.0  # channel 0 at positions (0, 0) and (0, 1)
    np.testing.assert_allclose(jit(network.apply)({"params": params}, images), images[:, 0, :2, 1], rtol=1e-6)


def test_gru_by_hand():
    """The cell of Cho et al. 2014 in numpy, its carry zeroed before the step that begins an episode."""
    network = ResettableGRU(3)
    rng = np.random.default_rng(0)
    features, carry = rng.normal(size=(4, 2, 5)).astype(np.float32), rng.normal(size=(2, 3)).astype(np.float32)
    first = np.array([[False, False], [False, True], [True, False], [False, False]])
    shapes = jax.eval_shape(network.init, jax.random.key(0), carry, (features, first))
    params = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), shapes)
    cell = params["params"]["GRUCell_0"]

    def linear(name, x):
        return x @ cell[name]["kernel"] + cell[name].get("bias", 0.0)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    h, expected = carry, []
    for t in range(4):
        h = np.where(first[t][:, None], 0.0, h)
        r = sigmoid(linear("ir", features[t]) + linear("hr", h))
        z = sigmoid(linear("iz", features[t]) + linear("hz", h))
        n = np.tanh(linear("in", features[t]) + r * linear("hn", h))
        h = (1 - z) * n + z * h
        expected.append(h)
    end, outputs = jit(network.apply)(params, carry, (features, first))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(end, outputs[-1])


def test_uniform_weights_are_within_one_over_the_root_of_the_inputs():
    params = dense(300, initialization="uniform").init(jax.random.key(0), jnp.zeros((1, 100)))["params"]
    kernel = np.asarray(params["kernel"])
    assert np.abs(kernel).max() <= 0.1
    assert kernel.std() == pytest.approx(0.1 / math.sqrt(3), rel=0.01)
    assert not params["bias"].any()


def test_dense_layer_on_few_rows_and_on_many():
    """Few rows are multiplied another way; values and gradients are the same."""
    layer = dense(5)
    x = jax.random.normal(jax.random.key(0), (400, 3))
    params = layer.init(jax.random.key(1), x)
    kernel = params["params"]["kernel"]
    for rows in (1, 4, 400):
        np.testing.assert_allclose(layer.apply(params, x[:rows]), x[:rows] @ kernel, rtol=1e-5, atol=1e-6)
        gradient = jax.grad(lambda p, rows=rows: jnp.sum(jnp.asarray(layer.apply(p, x[:rows])) ** 2))(params)["params"]["kernel"]
        np.testing.assert_allclose(gradient, 2 * x[:rows].T @ (x[:rows] @ kernel), rtol=1e-4, atol=1e-4)
