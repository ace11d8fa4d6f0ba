"""rljax's GRPO on token sequences as a contender of `grpo.py`, which says what is equal; the protocol is that of `worker.py`.

The twin of `trl_worker.py`: the same model, prompts of random tokens, completions of one length, one gradient step for each batch
of samples, no reference, a reward that counts one token. A round is one compiled call.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from worker import Channel, Result, Timer

FIRST_WORD = 2  # as in `trl_worker.py`


@dataclasses.dataclass(frozen=True)
class Round(Result):
    """`mean_return` is the mean reward of the last step."""

    median_step_seconds: float


def serve(options: argparse.Namespace, channel: Channel) -> None:
    import jax
    import jax.numpy as jnp

    from rljax.agents import grpo
    from rljax.envs.tokens import Problem, TokenEnvironment
    from rljax.networks import Transformer

    class Words:
        """The tokenizer that `TokenEnvironment` asks for: a size, and no token that ends a completion."""

        vocab_size = options.vocabulary
        eos_ids = (options.vocabulary,)

    class Counting:
        tokenizer = Words()
        prompt_length = options.prompt
        max_tokens = options.completion
        components = ("count",)

        def sample(self, key: Any) -> Problem:
            prompt = jax.random.randint(key, (options.prompt,), FIRST_WORD, options.vocabulary)
            return Problem(prompt, jnp.zeros(1, jnp.int32))

        def demonstrate(self, key: Any, problem: Problem) -> Any:
            raise NotImplementedError

        def verify(self, problem: Problem, completion: Any, length: Any) -> Any:
            said = jnp.where(jnp.arange(completion.shape[0]) < length, completion, -1)
            return jnp.sum(said == FIRST_WORD).astype(jnp.float32)[None]

    model = Transformer(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        kv_heads=options.kv_heads,
        mlp=options.mlp or 8 * options.width // 3,
        tied=bool(options.tied),
        dtype=options.dtype,
        head_chunk=512 if options.vocabulary > 1024 else 0,
    )
    config = grpo.Config(
        model=model,
        num_groups=options.rows // options.group,
        group_size=options.group,
        num_epochs=1,
        num_minibatches=1,
        num_microbatches=options.microbatches,
        aggregate="sequence",
        learning_rate=options.learning_rate,
        max_grad_norm=1.0,
    )
    env = TokenEnvironment(Counting(), truncated_counts=True)

    agent = grpo.make(config, env)

    def many(state: Any) -> Any:
        return jax.lax.scan(lambda state, _: agent.step(state), state, length=options.steps)

    state = jax.jit(agent.init)(jax.random.key(0))
    began = time.perf_counter()
    step = jax.jit(many, donate_argnums=0).lower(state).compile()
    compile_seconds = time.perf_counter() - began
    state, _ = jax.block_until_ready(step(state))
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    channel.ready(compile_seconds, parameters, ("rljax", "jax"))
    while True:
        channel.wait()  # a round goes on training, as the peer's does
        timer = Timer()
        state, metrics = jax.block_until_ready(step(state))
        wall, cpu = timer()
        total, count = metrics["episode/return"]
        tokens = options.steps * options.rows * options.completion
        channel.result(Round(tokens, wall, cpu, float((total / count)[-1]), wall / options.steps))


if __name__ == "__main__":
    serve(argparse.Namespace(**json.loads(sys.argv[1])), Channel())
