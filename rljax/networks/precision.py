"""Products of matrices in a lower precision."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def matmul(rows: Array, kernel: Array, dtype: str, is_transposed: bool = False) -> Array:
    """``rows [M, K] @ kernel [K, N]``, the factors rounded to ``dtype``; sums, the result and derivatives are float32.

    In the backward pass the derivative of the result is rounded to ``dtype`` before it is a factor. Left in float32 it would keep
    the hardware from its units for bfloat16. With ``is_transposed`` the kernel is given as ``[N, K]``.
    """
    if dtype == "float32":
        return rows @ (kernel.T if is_transposed else kernel)
    return _matmul(dtype, is_transposed, rows, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(dtype: str, is_transposed: bool, rows: Array, kernel: Array) -> Array:
    return _forward(dtype, is_transposed, rows, kernel)[0]


def _forward(dtype: str, is_transposed: bool, rows: Array, kernel: Array) -> tuple[Array, Any]:
    rows, kernel = rows.astype(dtype), kernel.astype(dtype)
    return _contract(rows, kernel, over=1 if is_transposed else 0), (rows, kernel)


def _backward(dtype: str, is_transposed: bool, factors: Any, gradient: Array) -> tuple[Array, Array]:
    rows, kernel = factors
    gradient = gradient.astype(dtype)
    left, right = (gradient, rows) if is_transposed else (rows, gradient)
    return _contract(gradient, kernel, over=0 if is_transposed else 1), _contract(left.T, right, over=0)


_matmul.defvjp(_forward, _backward)


def _contract(a: Array, b: Array, over: int) -> Array:
    """The last axis of ``a`` with axis ``over`` of ``b``, summed in float32.

    On CPU everything lies in memory row by row: of two factors that lie otherwise XLA multiplies some five times slower, and some
    not at all ("Unsupported element type for DotThunk").
    """
    row_major = _row_major if jax.default_backend() == "cpu" else lambda x: x
    contracted = (((1,), (over,)), ((), ()))
    return row_major(jax.lax.dot_general(row_major(a), row_major(b), contracted, preferred_element_type=jnp.float32))


def _row_major(x: Array) -> Array:
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
