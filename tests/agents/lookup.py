"""A language small enough to enumerate: every completion has a reward of its own, and every probability can be written down."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.envs.tokens import Problem, TokenEnvironment
from rljax.lm.tasks import CharTask
from rljax.networks import Transformer
from rljax.networks.transformer import forward

MODEL = Transformer(layers=1, width=8, heads=2, mlp=8)
A, B, EOS = range(3)
T = 3
TABLE = np.random.default_rng(0).normal(size=(4, 4, 4)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Lookup(CharTask):
    """Two letters and the end, at most three tokens, each completion with a reward of its own; the prompt is always ``b``."""

    alphabet = "ab"
    scale: float = 1.0
    prompt_length: int = 2
    max_tokens: int = T

    def sample(self, key):
        return Problem(jnp.array([-1, B], jnp.int32), jnp.zeros(1, jnp.int32))

    def verify(self, problem, completion, length):
        said = jnp.where(jnp.arange(T) < length, completion, 3)
        return self.scale * jnp.asarray(TABLE)[said[0], said[1], said[2]][None]


ENV = TokenEnvironment(Lookup(), truncated_counts=True)
EVERY = [seq for n in range(1, T + 1) for seq in itertools.product((A, B, EOS), repeat=n) if EOS not in seq[:-1]]
LEAVES = [seq for seq in EVERY if seq[-1] == EOS or len(seq) == T]


def reward_of(seq, table=TABLE):
    said = [*(token for token in seq if token != EOS), 3, 3, 3]
    return float(table[tuple(said[:3])])


def padded(seqs, width=T):
    """int32 ``[T, B]`` and bool ``[T, B]``; what follows an end is any token."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, (width, len(seqs)))
    mask = np.zeros((width, len(seqs)), bool)
    for i, seq in enumerate(seqs):
        tokens[: len(seq), i], mask[: len(seq), i] = seq, True
    return tokens.astype(np.int32), mask


def log_probs(params, tokens, prompt=(-1, B), temperature=1.0, num_tokens=3, model=MODEL):
    """log pi of each token of ``[T, B]``, by `forward`."""
    prompts = jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (tokens.shape[1], len(prompt)))
    hidden = forward(model, params, jnp.concatenate([prompts, tokens.T], 1))[:, len(prompt) - 1 : -1]
    logits = hidden @ params["embed"][:num_tokens].T / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens.T[..., None], -1)[..., 0].T
