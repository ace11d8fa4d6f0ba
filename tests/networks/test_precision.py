"""Products with factors of bfloat16, against float32 on factors that were rounded by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.networks.precision import matmul

LANES = 3


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def draw(rows, inner, columns, lanes=()):
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(k, (*lanes, *s)) for k, s in zip(keys, ((rows, inner), (inner, columns), (rows, columns)), strict=True)
    ]


# One row; sizes that are no multiples of a vector; more of one than of the others.
@pytest.mark.parametrize("shape", [(1, 5, 3), (7, 33, 17), (64, 8, 130), (130, 64, 2)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_values_and_derivatives(shape, is_transposed):
    rows, kernel, gradient = draw(*shape)
    given = kernel.T if is_transposed else kernel
    value, pull = jax.vjp(jax.jit(lambda a, b: matmul(a, b, "bfloat16", is_transposed)), rows, given)
    to_rows, to_kernel = jax.jit(pull)(gradient)
    assert value.dtype == to_rows.dtype == to_kernel.dtype == jnp.float32
    np.testing.assert_allclose(value, rounded(rows) @ rounded(kernel), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(to_rows, rounded(gradient) @ rounded(kernel).T, rtol=1e-5, atol=1e-4)
    to_kernel = to_kernel.T if is_transposed else to_kernel
    np.testing.assert_allclose(to_kernel, rounded(rows).T @ rounded(gradient), rtol=1e-5, atol=1e-4)
    assert np.abs(value - rows @ kernel).max() > 1e-4  # they were rounded


@pytest.mark.parametrize("is_transposed", [False, True])
def test_lanes(is_transposed):
    rows, kernel, gradient = draw(9, 16, 6, (LANES,))
    kernel = kernel.swapaxes(1, 2) if is_transposed else kernel

    def one(rows, kernel, gradient):
        value, pull = jax.vjp(lambda a, b: matmul(a, b, "bfloat16", is_transposed), rows, kernel)
        return value, *pull(gradient)

    lanes = jax.jit(jax.vmap(one))(rows, kernel, gradient)
    for lane in range(LANES):
        for x, y in zip(lanes, jax.jit(one)(rows[lane], kernel[lane], gradient[lane]), strict=True):
            np.testing.assert_allclose(x[lane], y, rtol=1e-5, atol=1e-5)


def test_float32_is_a_plain_product():
    rows, kernel, _ = draw(4, 6, 5)
    np.testing.assert_allclose(matmul(rows, kernel, "float32"), np.asarray(rows) @ np.asarray(kernel), rtol=1e-5)
    np.testing.assert_array_equal(matmul(rows, kernel.T, "float32", is_transposed=True), matmul(rows, kernel, "float32"))
