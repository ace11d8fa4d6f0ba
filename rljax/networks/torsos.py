"""Torsos: observations to features. All take ``[M, *observation]`` and return ``[M, features]``.

Rows are always flattened to two dimensions before a dense layer: XLA on CPU multiplies matrices much faster than it does
three-dimensional arrays.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
from jax import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": nn.tanh,
    "relu": nn.relu,
    "silu": nn.silu,
    "elu": nn.elu,
    "gelu": nn.gelu,
}


INITIALIZATIONS = ("orthogonal", "uniform")  # of `dense`

SMALL_PRODUCT = 2048  # multiplications


def orthogonal(scale: float) -> Callable[..., Array]:
    """Initialiser of ``[..., out]`` kernels: ``scale`` times a uniformly random matrix with orthonormal columns or rows.

    Source: Saxe et al. 2014, arXiv 1312.6120.
    The same matrix as from a QR factorisation with a positive diagonal, by Gram-Schmidt, each column projected twice. jax's own
    initialiser calls LAPACK, and batched calls from several CPU devices at once can wait for each other for ever.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        gaussian = jax.random.normal(key, (max(rows, columns), min(rows, columns)))

        def add_column(j, basis):
            column = gaussian[:, j]
            for _ in range(2):
                column = column - basis @ (basis.T @ column)
            return basis.at[:, j].set(column / jnp.linalg.norm(column))

        basis = jax.lax.fori_loop(0, gaussian.shape[1], add_column, jnp.zeros_like(gaussian))
        return (scale * (basis if rows >= columns else basis.T)).reshape(shape).astype(dtype)

    return init


def _product(x: Array, kernel: Array, dimensions: Any, **options: Any) -> Array:
    """``x [M, in]`` times ``kernel [in, out]``; where both are tiny, as a sum that XLA fuses with its surroundings.

    A call of a matrix product costs a fixed time, which is most of the time of a rollout of few environments.
    """
    if x.ndim != 2:
        return jax.lax.dot_general(x, kernel, dimensions, **options)

    def fused(x: Array, kernel: Array) -> Array:
        return jnp.sum(x[:, :, None] * kernel, axis=1)

    def called(x: Array, kernel: Array) -> Array:
        return jax.lax.dot_general(x, kernel, dimensions, **options)

    size: Any = x.shape[0] * kernel.size
    if jax.export.is_symbolic_dim(size):  # an exported policy; compiled for a batch, it has one of the two
        return jax.lax.cond(jnp.asarray(size) <= SMALL_PRODUCT, fused, called, x, kernel)
    return (fused if size <= SMALL_PRODUCT else called)(x, kernel)


def dense(features: int, scale: float = math.sqrt(2.0), initialization: str = "orthogonal") -> nn.Dense:
    """A dense layer with zero bias, and with weights that are

    - orthogonal times ``scale``, as PPO uses them (arXiv 2006.05990, section 3.2); or
    - "uniform" within ``1 / sqrt(inputs)``, a variance of ``1 / (3 inputs)``, whatever the scale, as PyTorch's layers.
    """
    uniform = nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform")
    init = orthogonal(scale) if initialization == "orthogonal" else uniform
    return nn.Dense(features, kernel_init=init, bias_init=nn.initializers.zeros_init(), dot_general=_product)


class MLP(nn.Module):
    """Dense layers over the flattened observation, each normalised before its activation where ``layer_norm`` is set."""

    hidden: tuple[int, ...]
    activation: str
    layer_norm: bool = False
    initialization: str = "orthogonal"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for features in self.hidden:
            x = dense(features, initialization=self.initialization)(x)
            x = ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)
        return x


class MinAtarCNN(nn.Module):
    """One 3x3 convolution of 16 channels, then dense layers: the network of MinAtar (Young and Tian 2019, arXiv 1903.03176)."""

    hidden: tuple[int, ...]
    activation: str
    layer_norm: bool = False
    initialization: str = "orthogonal"  # of the dense layers

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(16, (3, 3), padding="VALID", kernel_init=orthogonal(math.sqrt(2.0)))(x)
        x = ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)
        return MLP(self.hidden, self.activation, self.layer_norm, self.initialization)(x)


class ResettableGRU(nn.Module):
    """A GRU over time whose carry is zeroed wherever a new episode begins.

    Called with ``carry [B, H]`` and ``(features [T, B, F], first [T, B] bool)``; returns ``(carry, [T, B, H])``.
    """

    features: int

    @nn.compact
    def __call__(self, carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        def step(cell, carry, inputs):
            x, first = inputs
            return cell(jnp.where(first[:, None], 0.0, carry), x)

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(nn.GRUCell(self.features, recurrent_kernel_init=orthogonal(1.0)), carry, inputs)
