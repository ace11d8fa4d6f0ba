"""PPO on Gymnasium's CartPole: the callback out of the compiled program, which rljax trains with, beside a loop on the host.

    python benchmarks/speed/host.py
    python benchmarks/speed/host.py --copies 64 --rounds 15

The loop calls a compiled policy, steps the copies in Python and hands what it recorded to a compiled update, which is that of
rljax's PPO itself. It draws its noise beforehand, checks nothing that comes from the environments, and begins episodes without a
seed, where rljax gives each one its own. Both train side by side in one process, in turns whose order is reversed every other
round; compilation is apart. The ratio is taken within each round. Writes benchmarks/results/speed_host.json.
"""

import argparse
import datetime
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

from rljax.experiment.devices import prepare

STEPS = 128  # of a copy in an update
OUT = Path(__file__).resolve().parents[1] / "results" / "speed_host.json"


class Callback:
    """As rljax trains."""

    def __init__(self, copies: int):
        import jax

        from rljax.agents import ppo
        from rljax.envs import make_env

        agent = ppo.make(ppo.Config(num_envs=copies, num_steps=STEPS), make_env("gymnasium/CartPole-v1"))
        self._step = jax.jit(agent.step, donate_argnums=0)
        self.state = jax.jit(agent.init)(jax.random.key(0))

    def update(self) -> None:
        self.state, _ = self._step(self.state)


class Loop:
    """The same update, with its rollout on the host."""

    def __init__(self, copies: int):
        import gymnasium
        import jax
        import jax.numpy as jnp
        import numpy as np

        from rljax.agents import ppo
        from rljax.agents.on_policy import Trajectory
        from rljax.envs import TimeStep, make_env

        config, env = ppo.Config(num_envs=copies, num_steps=STEPS), make_env("CartPole-v1")
        agent, policy = ppo.make(config, env), ppo.make_policy(config, env)

        def seen(observation: Any) -> TimeStep:
            no = jnp.zeros(copies, bool)
            return TimeStep(observation, None, jnp.zeros(copies), no, no, observation, {})

        def act(params: Any, observation: Any, noise: Any) -> Any:
            distribution = policy.step(params, (), seen(observation))[1].distribution
            sample = distribution.from_noise(noise)
            return sample, distribution.log_prob(sample)

        def draw(params: Any, key: Any, observation: Any) -> Any:
            shapes = jax.eval_shape(lambda: policy.step(params, (), seen(observation))[1].distribution)
            return jax.vmap(shapes.noise)(jax.random.split(key, STEPS))

        def learn(state: Any, observation: Any, recorded: dict[str, Any]) -> Any:
            first = seen(observation)
            samples, log_prob, returns, lengths = (recorded.pop(key) for key in ("sample", "log_prob", "return", "length"))
            steps = TimeStep(action_mask=None, info={}, **recorded)
            timesteps = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, steps)
            counts = {"episode_return": returns, "episode_length": lengths}
            info = {key: jnp.concatenate([jnp.zeros_like(x[:1]), x]) for key, x in counts.items()}
            trajectory = Trajectory(timesteps.replace(info=info), samples, (), log_prob)
            with mock.patch.object(ppo, "rollout", return_value=(state.world, trajectory)):
                return agent.step(state)[0]

        self._envs = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(copies)]
        self._observation = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(self._envs)])
        self._return, self._length = np.zeros(copies, np.float32), np.zeros(copies, np.int32)
        self._act, self._draw, self._learn = jax.jit(act), jax.jit(draw), jax.jit(learn, donate_argnums=0)
        self._key = jax.random.key(1)
        self.state = jax.jit(agent.init)(jax.random.key(0))

    def update(self) -> None:
        import jax
        import numpy as np

        self._key, key = jax.random.split(self._key)
        noise = jax.tree.map(np.asarray, self._draw(self.state.params, key, self._observation))
        shape, float32 = (STEPS, len(self._envs)), np.float32
        recorded = {
            "observation": np.empty((*shape, 4), float32),
            "next_observation": np.empty((*shape, 4), float32),
            "reward": np.empty(shape, float32),
            "terminated": np.empty(shape, bool),
            "truncated": np.empty(shape, bool),
            "sample": np.empty(shape, np.int32),
            "log_prob": np.empty(shape, float32),
            "return": np.empty(shape, float32),
            "length": np.empty(shape, np.int32),
        }
        first = observation = self._observation
        for t in range(STEPS):
            at = {key: values[t] for key, values in recorded.items()}
            sample, log_prob = self._act(self.state.params, observation, jax.tree.map(lambda x, t=t: x[t], noise))
            at["sample"][:], at["log_prob"][:] = sample, log_prob
            after, following, reward, terminated, truncated = (
                at[key] for key in ("observation", "next_observation", "reward", "terminated", "truncated")
            )
            for i, (env, action) in enumerate(zip(self._envs, at["sample"], strict=True)):
                seen, reward[i], terminated[i], truncated[i], _ = env.step(action)
                following[i] = seen
                after[i] = env.reset()[0] if terminated[i] or truncated[i] else seen
            self._return += reward
            self._length += 1
            at["return"][:], at["length"][:] = self._return, self._length
            goes_on = ~(terminated | truncated)
            self._return *= goes_on
            self._length *= goes_on
            observation = after
        self._observation = observation
        self.state = self._learn(self.state, first, recorded)


def measure(copies: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a round of ``steps`` steps or an update, whichever is more."""
    import jax

    contenders = {"callback": Callback(copies), "loop": Loop(copies)}
    updates = max(1, steps // (copies * STEPS))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(-1, rounds):
        for name in list(contenders)[:: 1 if i % 2 else -1]:
            began = time.perf_counter()
            for _ in range(updates):
                contenders[name].update()
            jax.block_until_ready(contenders[name].state.params)
            if i >= 0:  # the round before the first compiles
                seconds[name].append(time.perf_counter() - began)
    ratios = [loop / callback for callback, loop in zip(*seconds.values(), strict=True)]
    return {
        "steps_of_a_round": updates * copies * STEPS,
        "seconds": seconds,
        "steps_per_second": {name: updates * copies * STEPS / statistics.median(values) for name, values in seconds.items()},
        "callback_over_loop": statistics.median(ratios),
        "callback_over_loop_range": [min(ratios), max(ratios)],
        "cpus": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=32_768, help="of all copies in a round")
    arguments = parser.parse_args()
    prepare()
    report = json.loads(OUT.read_text()) if OUT.exists() else {}
    for copies in arguments.copies:
        report[str(copies)] = result = measure(copies, arguments.rounds, arguments.steps)
        speeds = ", ".join(f"{name} {speed:,.0f} steps/s" for name, speed in result["steps_per_second"].items())
        print(f"{copies} copies: {speeds}; ratio {result['callback_over_loop']:.2f}", flush=True)
        OUT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
