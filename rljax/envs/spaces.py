"""Spaces: what an observation or an action may be. Bounds may be traced, so that an environment parameter can be swept."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Discrete:
    """The integers ``0 .. n - 1``, int32 ``[]``."""

    n: int

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"Discrete.n must be at least 1, got {self.n}")

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> Any:
        return jnp.int32

    def sample(self, key: Array) -> Array:
        """A uniform draw, int32 ``[]``."""
        return jax.random.randint(key, (), 0, self.n, jnp.int32)

    def contains(self, x: Array) -> Array:
        """bool ``[]``."""
        return jnp.all((x >= 0) & (x < self.n))


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """Several discrete choices at once, int32 ``[len(nvec)]``."""

    nvec: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "nvec", tuple(int(n) for n in self.nvec))
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"MultiDiscrete.nvec must hold positive sizes, got {self.nvec}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    @property
    def dtype(self) -> Any:
        return jnp.int32

    def sample(self, key: Array) -> Array:
        """A uniform draw, int32 ``[len(nvec)]``."""
        return jax.random.randint(key, self.shape, 0, jnp.asarray(self.nvec), jnp.int32)

    def contains(self, x: Array) -> Array:
        """bool ``[]``."""
        return jnp.all((x >= 0) & (x < jnp.asarray(self.nvec)))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A context of token ids, int32 ``[length]``: a prompt in the first ``prompt`` places, padded at its left, then what was
    said.

    A place that holds nothing is -1, which is no id: whether a token is there never depends on which token it is.
    """

    n: int
    length: int
    prompt: int

    def __post_init__(self):
        if not (self.n >= 1 and 1 <= self.prompt <= self.length):
            raise ValueError(f"Tokens needs n >= 1 and 1 <= prompt <= length, got {self}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def dtype(self) -> Any:
        return jnp.int32

    def sample(self, key: Array) -> Array:
        """A uniform draw of a full context, int32 ``[length]``."""
        return jax.random.randint(key, self.shape, 0, self.n, jnp.int32)

    def contains(self, x: Array) -> Array:
        """bool ``[]``."""
        return jnp.all((x >= -1) & (x < self.n))


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Arrays of one shape between two bounds, which broadcast against ``shape`` and may be infinite."""

    low: Any
    high: Any
    shape: tuple[int, ...]
    dtype: Any = jnp.float32

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def sample(self, key: Array) -> Array:
        """A uniform draw ``[*shape]``; where a bound is infinite, from a standard normal, clipped to the other bound."""
        low, high = (jnp.broadcast_to(jnp.asarray(b, jnp.float32), self.shape) for b in (self.low, self.high))
        # A finite bound as large as float32 can hold means "unbounded" too: high - low would overflow.
        bounded = (low > -1e30) & (high < 1e30)
        uniform = jax.random.uniform(key, self.shape)
        inside = jnp.where(bounded, low, 0.0) + uniform * jnp.where(bounded, high - low, 1.0)
        free = jnp.clip(jax.random.normal(key, self.shape), low, high)
        return jnp.where(bounded, inside, free).astype(self.dtype)

    def contains(self, x: Array) -> Array:
        """bool ``[]``."""
        return jnp.all((x >= self.low) & (x <= self.high))


Space = Discrete | MultiDiscrete | Box | Tokens


def space_text(space: Space) -> str:
    """Kind and size, as ``Discrete(22)``."""
    return f"{type(space).__name__}({getattr(space, 'n', None) or list(getattr(space, 'nvec', ())) or list(space.shape)})"
