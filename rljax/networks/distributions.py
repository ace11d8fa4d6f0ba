"""Action distributions as pytrees, batched over their leading axes ``[...]``.

``sample`` returns the draw in the distribution's own coordinates: that is what an agent stores and what ``log_prob`` takes.
It is ``from_noise(noise(key))``; ``noise`` needs shapes alone, so a rollout draws the noise of all its steps in one batch.
``to_action`` maps it to what the environment takes. For a tanh-Gaussian the two differ, and keeping the pre-tanh draw means
that no stored action ever needs an inverse tanh.
"""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from rljax.networks.precision import matmul
from rljax.ops.sampling import filter_logits, sample_inverse_cdf

_LOG_2PI = math.log(2.0 * math.pi)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(16)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Distribution(Protocol):
    """What an agent asks of a policy's output."""

    def noise(self, key: Array) -> Array: ...

    def from_noise(self, noise: Array) -> Array: ...

    def sample(self, key: Array) -> Array: ...

    def mode(self) -> Array: ...

    def log_prob(self, sample: Array) -> Array: ...

    def entropy(self) -> Array: ...

    def to_action(self, sample: Array) -> Array: ...


def mask_logits(logits: Array, mask: Array | None) -> Array:
    """Illegal actions get the lowest finite float32, so that their probability is exactly 0 and no gradient is NaN.

    With one legal action its log-probability is exactly 0. A row with none stays finite (and uniform).
    """
    logits = logits.astype(jnp.float32)
    return logits if mask is None else jnp.where(mask, logits, jnp.finfo(jnp.float32).min)


def pick(values: Array, index: Array) -> Array:
    """``values[..., index]`` for ``values [..., A]`` and int32 ``index [...]``.

    A select and not a gather: the gradient of a gather is a scatter, which is slow everywhere.
    """
    chosen = index[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(chosen, values, 0.0), -1)


def _entropy(logits: Array) -> Array:
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.where(log_probs > -1e30, jnp.exp(log_probs) * log_probs, 0.0), -1)


class Categorical(struct.PyTreeNode):
    """One choice out of ``A``; ``logits`` float32 ``[..., A]``, masked already (`mask_logits`). Samples int32 ``[...]``."""

    logits: Array

    def noise(self, key: Array) -> Array:
        return jax.random.gumbel(key, self.logits.shape)

    def from_noise(self, noise: Array) -> Array:
        return jnp.argmax(self.logits + noise, -1).astype(jnp.int32)

    def sample(self, key: Array) -> Array:
        return self.from_noise(self.noise(key))

    def mode(self) -> Array:
        return jnp.argmax(self.logits, -1).astype(jnp.int32)

    def log_prob(self, sample: Array) -> Array:
        return pick(jax.nn.log_softmax(self.logits), sample)

    def entropy(self) -> Array:
        return _entropy(self.logits)

    def to_action(self, sample: Array) -> Array:
        return sample


class EpsilonGreedy(struct.PyTreeNode):
    """The best of ``A`` values, or with probability ``epsilon`` any legal action, uniformly. Samples int32 ``[...]``.

    ``values`` float32 ``[..., A]``, masked already (`mask_logits`); ``epsilon`` float32, ``[...]`` or ``[]``.
    """

    values: Array
    epsilon: Array

    def noise(self, key: Array) -> Array:
        """Uniform ``[..., A + 1]``: a rank for each action, and whether to explore."""
        return jax.random.uniform(key, (*self.values.shape[:-1], self.values.shape[-1] + 1))

    def from_noise(self, noise: Array) -> Array:
        legal = self.values > jnp.finfo(jnp.float32).min
        any_legal = jnp.argmax(jnp.where(legal, noise[..., :-1], -1.0), -1)
        return jnp.where(noise[..., -1] < self.epsilon, any_legal, self.mode()).astype(jnp.int32)

    def sample(self, key: Array) -> Array:
        return self.from_noise(self.noise(key))

    def mode(self) -> Array:
        return jnp.argmax(self.values, -1).astype(jnp.int32)

    def probabilities(self) -> Array:
        """``[..., A]``."""
        legal = self.values > jnp.finfo(jnp.float32).min
        uniform = legal / jnp.maximum(legal.sum(-1, keepdims=True), 1)
        best = self.mode()[..., None] == jnp.arange(self.values.shape[-1])
        epsilon = jnp.asarray(self.epsilon)[..., None]
        return epsilon * uniform + (1.0 - epsilon) * best

    def log_prob(self, sample: Array) -> Array:
        return jnp.log(pick(self.probabilities(), sample))

    def entropy(self) -> Array:
        return jnp.sum(jax.scipy.special.entr(self.probabilities()), -1)

    def to_action(self, sample: Array) -> Array:
        return sample


class TokenCategorical(struct.PyTreeNode):
    """A choice among ``V`` tokens, read out of hidden states only when it is asked for. Samples int32 ``[...]``.

    Its logits are ``hidden @ head.T / temperature``, masked. Sampling goes through `rljax.ops.sampling.filter_logits`;
    ``log_prob`` and ``entropy`` are the model's own at that temperature, and ``behaviour_log_prob`` is that of the filtered draw.

    Attributes:
      hidden: ``[..., width]``.
      head: ``[V, width]``.
      mask: bool ``[..., V]``, or None.
      temperature, top_p, min_p: scalars.
      top_k: 0 for all.
      chunk: tokens whose logits exist at once in `log_prob_and_entropy`; 0 for all.
      dtype: of the product with ``head``; the rest is float32.
    """

    hidden: Array
    head: Array
    mask: Array | None
    temperature: Array | float
    top_p: Array | float
    min_p: Array | float
    top_k: int = struct.field(pytree_node=False)
    chunk: int = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)

    @property
    def logits(self) -> Array:
        """float32 ``[..., V]``, at the temperature, masked."""
        return self._logits(self.hidden.reshape(-1, self.hidden.shape[-1]), self.mask).reshape(*self.hidden.shape[:-1], -1)

    def _logits(self, rows: Array, mask: Array | None) -> Array:
        logits = matmul(rows, self.head, self.dtype, is_transposed=True) / self.temperature
        return mask_logits(logits, None if mask is None else mask.reshape(logits.shape))

    def _filtered(self) -> Array:
        return filter_logits(self.logits, self.top_k, self.top_p, self.min_p)

    def noise(self, key: Array) -> Array:
        """Uniform ``[...]``, drawn row by row: what one row samples does not depend on how many others there are."""
        shape = self.hidden.shape[:-1]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(math.prod(shape)))
        return jax.vmap(jax.random.uniform)(keys).reshape(shape)

    def from_noise(self, noise: Array) -> Array:
        return sample_inverse_cdf(self._filtered(), noise)

    def sample(self, key: Array) -> Array:
        return self.from_noise(self.noise(key))

    def mode(self) -> Array:
        return jnp.argmax(self.logits, -1).astype(jnp.int32)

    def behaviour_log_prob(self, sample: Array) -> Array:
        """Log-probability of a draw of `from_noise`: top-k, top-p and min-p renormalise."""
        return pick(jax.nn.log_softmax(self._filtered()), sample)

    def log_prob(self, sample: Array) -> Array:
        return self.log_prob_and_entropy(sample)[0]

    def entropy(self) -> Array:
        return self.log_prob_and_entropy(jnp.zeros(self.hidden.shape[:-1], jnp.int32))[1]

    def log_prob_and_entropy(self, sample: Array) -> tuple[Array, Array]:
        """Both ``[...]``, from logits that are computed once, ``chunk`` rows at a time."""

        def of_rows(rows: Array, mask: Array | None, chosen: Array) -> tuple[Array, Array]:
            logits = self._logits(rows, mask)
            shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
            exps = jnp.exp(shifted)
            total = exps.sum(-1)
            log_total = jnp.log(total)
            # An illegal token has probability 0 and a logit so low that their product must not be formed.
            expected = jnp.where(exps > 0, exps * shifted, 0.0).sum(-1) / total
            return pick(shifted, chosen) - log_total, log_total - expected

        shape = self.hidden.shape[:-1]
        size = math.prod(shape)
        rows, chosen = self.hidden.reshape(size, -1), sample.reshape(size)
        mask = None if self.mask is None else self.mask.reshape(size, -1)
        if self.chunk and self.chunk < size:
            # The last chunk is filled up with rows that are thrown away.
            chunks = jax.tree.map(
                lambda x: jnp.pad(x, ((0, -size % self.chunk),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, self.chunk, *x.shape[1:]),
                (rows, mask, chosen),
            )
            log_prob, entropy = jax.lax.map(jax.checkpoint(lambda chunk: of_rows(*chunk)), chunks)
            log_prob, entropy = log_prob.reshape(-1)[:size], entropy.reshape(-1)[:size]
        else:
            log_prob, entropy = of_rows(rows, mask, chosen)
        return log_prob.reshape(shape), entropy.reshape(shape)

    def to_action(self, sample: Array) -> Array:
        return sample


def log_prob_and_entropy(distribution: Distribution, sample: Array) -> tuple[Array, Array]:
    """Both ``[...]``; in one pass where the distribution has one."""
    together = getattr(distribution, "log_prob_and_entropy", None)
    return together(sample) if together else (distribution.log_prob(sample), distribution.entropy())


class MultiCategorical(struct.PyTreeNode):
    """Independent choices; ``logits`` ``[..., sum(nvec)]`` side by side, masked already. Samples int32 ``[..., len(nvec)]``."""

    logits: Array
    nvec: tuple[int, ...] = struct.field(pytree_node=False)

    def _parts(self, logits: Array | None = None) -> list[Categorical]:
        logits = self.logits if logits is None else logits
        return [Categorical(part) for part in jnp.split(logits, np.cumsum(self.nvec)[:-1], axis=-1)]

    def noise(self, key: Array) -> Array:
        return jax.random.gumbel(key, self.logits.shape)

    def from_noise(self, noise: Array) -> Array:
        return jnp.stack([part.mode() for part in self._parts(self.logits + noise)], -1)

    def sample(self, key: Array) -> Array:
        return self.from_noise(self.noise(key))

    def mode(self) -> Array:
        return jnp.stack([part.mode() for part in self._parts()], -1)

    def log_prob(self, sample: Array) -> Array:
        return sum((part.log_prob(sample[..., i]) for i, part in enumerate(self._parts())), jnp.float32(0.0))

    def entropy(self) -> Array:
        return sum((part.entropy() for part in self._parts()), jnp.float32(0.0))

    def to_action(self, sample: Array) -> Array:
        return sample


class Gaussian(struct.PyTreeNode):
    """Diagonal Gaussian; every field float32 ``[..., D]``; the environment gets the draw clipped to ``[low, high]``.

    The clipping belongs to the environment, so log-probabilities are those of the unclipped draw.
    """

    mean: Array
    log_std: Array
    low: Array
    high: Array

    def noise(self, key: Array) -> Array:
        return jax.random.normal(key, self.mean.shape)

    def from_noise(self, noise: Array) -> Array:
        return self.mean + jnp.exp(self.log_std) * noise

    def sample(self, key: Array) -> Array:
        return self.from_noise(self.noise(key))

    def mode(self) -> Array:
        return self.mean

    def log_prob(self, sample: Array) -> Array:
        standard = (sample - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * jnp.square(standard) - self.log_std - 0.5 * _LOG_2PI, -1)

    def entropy(self) -> Array:
        return jnp.sum(jnp.broadcast_to(self.log_std, self.mean.shape) + 0.5 * (1.0 + _LOG_2PI), -1)

    def to_action(self, sample: Array) -> Array:
        return jnp.clip(sample, self.low, self.high)


class TanhGaussian(struct.PyTreeNode):
    """A diagonal Gaussian squashed by tanh and scaled to the finite box ``[low, high]``; samples are pre-tanh ``[..., D]``.

    ``log_prob`` is the density of the action in the environment's units. The log-determinant of tanh at ``u`` is
    ``2 (log 2 - u - softplus(-2 u))`` (Haarnoja et al. 2018, arXiv 1812.05905, appendix C, in its stable form). The entropy has
    no closed form; it is exact up to a 16-point Gauss-Hermite quadrature. ``mode`` is the image of the Gaussian's mean.
    """

    mean: Array
    log_std: Array
    low: Array
    high: Array

    def _base(self) -> Gaussian:
        return Gaussian(self.mean, self.log_std, self.low, self.high)

    def _log_det(self, u: Array) -> Array:
        return 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u)) + jnp.log(0.5 * (self.high - self.low))

    def noise(self, key: Array) -> Array:
        return self._base().noise(key)

    def from_noise(self, noise: Array) -> Array:
        return self._base().from_noise(noise)

    def sample(self, key: Array) -> Array:
        return self._base().sample(key)

    def mode(self) -> Array:
        return self.mean

    def log_prob(self, sample: Array) -> Array:
        return self._base().log_prob(sample) - jnp.sum(self._log_det(sample), -1)

    def entropy(self) -> Array:
        nodes, weights = (jnp.asarray(x, jnp.float32).reshape(-1, *(1,) * self.mean.ndim) for x in (_NODES, _WEIGHTS))
        log_det = self._log_det(self.mean + jnp.exp(self.log_std) * nodes)  # [16, ..., D]
        return self._base().entropy() + jnp.sum(weights * log_det, (0, -1))

    def to_action(self, sample: Array) -> Array:
        return jnp.clip(self.low + 0.5 * (self.high - self.low) * (jnp.tanh(sample) + 1.0), self.low, self.high)
