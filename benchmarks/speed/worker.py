"""One contender of the PPO speed benchmark, as a process that `ppo.py` starts and keeps alive.

The process builds, compiles and warms up its training program, then answers each line `go SEED` on standard input with
one JSON line: what one timed run did. Only the standard library is imported at the top, because every contender runs in
its own environment. Evaluation is never inside the timed part.
"""

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, TextIO


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained; equal for all contenders of a case."""

    env: str = "CartPole-v1"  # or a name of brax, with `physics`
    physics: str = ""  # brax's backend
    num_envs: int = 4
    num_steps: int = 128
    num_epochs: int = 4
    num_minibatches: int = 4
    updates: int = 1000
    seeds: int = 1
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    learning_rate: float = 2.5e-4
    adam_eps: float = 1e-5
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    continued: bool = False  # a round continues the training of the round before instead of starting afresh
    warmups: int = 1  # untimed runs before the first round
    rounds: int = 5
    devices: int = 2  # host devices that rljax spreads several seeds over
    purejaxrl: str = ""  # folder of a purejaxrl checkout

    @property
    def steps(self) -> int:
        """Environment steps of one round, all seeds together."""
        return self.seeds * self.updates * self.num_envs * self.num_steps


@dataclasses.dataclass(frozen=True)
class Result:
    """One timed run. `mean_return` is over the episodes that ended in its last tenth, or of an untimed evaluation."""

    steps: int
    seconds: float
    cpu_seconds: float
    mean_return: float


class Channel:
    """The line protocol with the driver; whatever libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self, compile_seconds: float, parameters: int, packages: tuple[str, ...]) -> None:
        versions = {name: metadata.version(name) for name in packages}
        self._send({"compile_seconds": compile_seconds, "parameters": parameters, "versions": versions})

    def wait(self) -> int:
        """The seed of the next run; ends the process when the driver has no more."""
        line = sys.stdin.readline().split()
        if not line or line[0] != "go":
            raise SystemExit(0)
        return int(line[1])

    def result(self, result: Result) -> None:
        self._send(dataclasses.asdict(result))

    def serve(self, run: Callable[[int], Result]) -> None:
        while True:
            self.result(run(self.wait()))

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


class Timer:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __call__(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def count(parameters: Any) -> int:
    """Number of values in a tree of arrays."""
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(parameters))


def serve_train(
    s: Settings,
    channel: Channel,
    train: Callable[..., Any],
    parameters: Callable[[Any], Any],
    mean_return: Callable[[Any, Any], Any],
    packages: tuple[str, ...],
) -> None:
    """Serves a peer whose whole training is one function of a key: compiled by `jit`, several seeds by `vmap`."""
    import jax

    def keys(seed: int) -> jax.Array:
        key = jax.random.PRNGKey(seed)
        return jax.random.split(key, s.seeds) if s.seeds > 1 else key

    over_seeds = jax.vmap if s.seeds > 1 else lambda f: f
    timer = Timer()
    program = jax.jit(over_seeds(train)).lower(keys(0)).compile()
    compile_seconds, _ = timer()
    evaluate = jax.jit(over_seeds(mean_return))

    def run(seed: int) -> Result:
        key = jax.block_until_ready(keys(seed))
        timer = Timer()
        out = jax.block_until_ready(program(key))
        wall, cpu = timer()
        return Result(s.steps, wall, cpu, float(evaluate(out, key).mean()))

    for warmup in range(s.warmups):
        run(warmup)
    shapes = jax.eval_shape(train, jax.random.PRNGKey(0))
    channel.ready(compile_seconds, count(parameters(shapes)), ("jax", *packages))
    channel.serve(run)


def run_rljax(s: Settings, channel: Channel, all_metrics: bool = False) -> None:
    """rljax: several seeds are spread over the devices, and mapped by `vmap` within each.

    Like the peers' programs it returns the training return alone, and XLA drops what computes the other metrics;
    "rljax-logged" returns all of them, as `rljax run` does.
    """
    import jax

    if s.seeds > 1:
        jax.config.update("jax_num_cpu_devices", s.devices)
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    import rljax
    from rljax.agents import ppo

    config = ppo.Config(
        num_envs=s.num_envs,
        num_steps=s.num_steps,
        num_epochs=s.num_epochs,
        num_minibatches=s.num_minibatches,
        hidden=tuple(s.hidden),
        activation=s.activation,
        learning_rate=s.learning_rate,
        adam_eps=s.adam_eps,
        discount=s.discount,
        gae_lambda=s.gae_lambda,
        clip=s.clip,
        clip_value=s.clip,
        value_coef=s.value_coef,
        entropy_coef=s.entropy_coef,
        max_grad_norm=s.max_grad_norm,
    )
    env = rljax.make_env(f"brax/{s.env}", backend=s.physics) if s.physics else rljax.make_env(s.env)
    agent = ppo.make(config, env)

    def train(state: Any) -> Any:
        state, metrics = jax.lax.scan(lambda state, _: agent.step(state), state, length=s.updates)
        last = slice(-max(s.updates // 10, 1), None)
        total, episodes = metrics["episode/return"]
        return state, metrics if all_metrics else {}, total[last].sum() / episodes[last].sum()

    def over_seeds(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if s.seeds == 1:
            return function
        mesh, spec = Mesh(np.asarray(jax.devices()), ("seeds",)), PartitionSpec("seeds")
        return jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def keys(seed: int) -> jax.Array:
        key = jax.random.key(seed)
        return jax.random.split(key, s.seeds) if s.seeds > 1 else key

    timer = Timer()
    init = jax.jit(over_seeds(agent.init))
    first = init(keys(0))
    program = jax.jit(over_seeds(train), donate_argnums=0).lower(first).compile()
    compile_seconds, _ = timer()
    parameters = count(first.params) // s.seeds

    def run(seed: int) -> Result:
        nonlocal first
        key = jax.block_until_ready(keys(seed))
        timer = Timer()
        state, metrics, mean_return = program(first if s.continued else init(key))
        jax.block_until_ready((state, metrics))
        wall, cpu = timer()
        first = state
        return Result(s.steps, wall, cpu, float(mean_return.mean()))

    for warmup in range(s.warmups):
        run(warmup)
    channel.ready(compile_seconds, parameters, ("jax", "gymnax", "flax", "brax"))
    channel.serve(run)


def run_rejax(s: Settings, channel: Channel) -> None:
    """rejax. It has no setting for Adam's epsilon (1e-8) and clips gradients by value at `max_grad_norm`."""
    from rejax import PPO
    from rejax.evaluate import evaluate

    steps = s.updates * s.num_envs * s.num_steps
    algo = PPO.create(
        env=s.env,
        num_envs=s.num_envs,
        num_steps=s.num_steps,
        num_epochs=s.num_epochs,
        num_minibatches=s.num_minibatches,
        agent_kwargs={"hidden_layer_sizes": s.hidden, "activation": s.activation},
        learning_rate=s.learning_rate,
        gamma=s.discount,
        gae_lambda=s.gae_lambda,
        clip_eps=s.clip,
        vf_coef=s.value_coef,
        ent_coef=s.entropy_coef,
        max_grad_norm=s.max_grad_norm,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
    )
    algo = algo.replace(eval_callback=lambda algo, state, key: ())

    def mean_return(state: Any, key: Any) -> Any:
        _, returns = evaluate(algo.make_act(state), key, algo.env, algo.env_params, 32)
        return returns.mean()

    serve_train(
        s,
        channel,
        train=lambda key: algo.train(key)[0],
        parameters=lambda state: (state.actor_ts.params, state.critic_ts.params),
        mean_return=mean_return,
        packages=("rejax", "gymnax", "flax"),
    )


def one_at_a_time(orthogonal: Callable[[float], Callable[..., Any]]) -> Callable[[float], Callable[..., Any]]:
    """The same initialiser, drawn for one seed after the other under `vmap`.

    On a machine of few cores jaxlib 0.10 hangs now and then where batched QR factorisations run side by side: each
    blocks a thread of the pool that it waits for.
    """
    import jax

    def initializer(scale: float) -> Callable[..., Any]:
        init = orthogonal(scale)
        return lambda key, *args: jax.custom_batching.sequential_vmap(lambda key: init(key, *args))(key)

    return initializer


def run_purejaxrl(s: Settings, channel: Channel) -> None:
    """purejaxrl, from a checkout; only the mean return is kept of its per-step metrics, so that XLA drops the rest."""
    sys.path.insert(0, os.path.join(s.purejaxrl, "purejaxrl"))
    import ppo  # purejaxrl's own module: the line above puts it before this folder's

    assert s.hidden == (64, 64), "purejaxrl's layers are fixed in its source"
    assert s.adam_eps == 1e-5, "so is Adam's epsilon"
    if s.seeds > 1:
        ppo.orthogonal = one_at_a_time(ppo.orthogonal)
    train = ppo.make_train(
        {
            "ENV_NAME": s.env,
            "NUM_ENVS": s.num_envs,
            "NUM_STEPS": s.num_steps,
            "TOTAL_TIMESTEPS": s.updates * s.num_envs * s.num_steps,
            "UPDATE_EPOCHS": s.num_epochs,
            "NUM_MINIBATCHES": s.num_minibatches,
            "ACTIVATION": s.activation,
            "LR": s.learning_rate,
            "ANNEAL_LR": False,
            "GAMMA": s.discount,
            "GAE_LAMBDA": s.gae_lambda,
            "CLIP_EPS": s.clip,
            "VF_COEF": s.value_coef,
            "ENT_COEF": s.entropy_coef,
            "MAX_GRAD_NORM": s.max_grad_norm,
        }
    )

    def train_and_reduce(key: Any) -> tuple[Any, Any]:
        out = train(key)
        last = slice(-max(s.updates // 10, 1), None)
        ended = out["metrics"]["returned_episode"][last]
        returns = out["metrics"]["returned_episode_returns"][last]
        return out["runner_state"], (returns * ended).sum() / ended.sum()

    serve_train(
        s,
        channel,
        train=train_and_reduce,
        parameters=lambda out: out[0][0].params,
        mean_return=lambda out, key: out[1],
        packages=("gymnax", "flax", "distrax"),
    )


def run_sb3(s: Settings, channel: Channel) -> None:
    """stable-baselines3 on the CPU, its environments stepped in this process (the default and, here, the fastest)."""
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)  # as fast as more for layers of this size, and steadier

    def make(seed: int) -> PPO:
        return PPO(
            "MlpPolicy",
            make_vec_env(s.env, n_envs=s.num_envs, seed=seed),
            learning_rate=s.learning_rate,
            n_steps=s.num_steps,
            batch_size=s.num_envs * s.num_steps // s.num_minibatches,
            n_epochs=s.num_epochs,
            gamma=s.discount,
            gae_lambda=s.gae_lambda,
            clip_range=s.clip,
            clip_range_vf=s.clip,
            normalize_advantage=True,
            ent_coef=s.entropy_coef,
            vf_coef=s.value_coef,
            max_grad_norm=s.max_grad_norm,
            policy_kwargs={
                "net_arch": {"pi": list(s.hidden), "vf": list(s.hidden)},
                "activation_fn": {"tanh": torch.nn.Tanh}[s.activation],
                "optimizer_kwargs": {"eps": s.adam_eps},
            },
            seed=seed,
            device="cpu",
        )

    def run(seed: int) -> Result:
        model = make(seed)
        timer = Timer()
        model.learn(s.steps)
        wall, cpu = timer()
        assert model.num_timesteps == s.steps
        # The buffer keeps the last 100 episodes.
        returns = [episode["r"] for episode in model.ep_info_buffer or ()]
        return Result(s.steps, wall, cpu, float(np.mean(returns)))

    for warmup in range(s.warmups):
        run(warmup)
    parameters = sum(p.numel() for p in make(0).policy.parameters())
    channel.ready(0.0, parameters, ("stable_baselines3", "torch", "gymnasium"))
    channel.serve(run)


def run_brax(s: Settings, channel: Channel) -> None:
    """brax's own PPO trainer.

    Each call compiles anew, so that all rounds are one call of several epochs, and an epoch waits for the driver in the
    progress callback. The seconds are those that the trainer gives for the epoch. It has no setting for Adam's epsilon
    (1e-8), and computes values and advantages anew in every gradient step.
    """
    import functools

    import jax

    if not hasattr(jax, "device_put_replicated"):  # gone from newer jax, and all that the trainer misses there

        def device_put_replicated(tree: Any, devices: list[Any]) -> Any:
            mesh = jax.sharding.Mesh(devices, ("i",))
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
            stack = lambda x: jax.numpy.stack([x] * len(devices))  # noqa: E731
            return jax.device_put(jax.tree.map(stack, tree), sharding)

        jax.device_put_replicated = device_put_replicated  # type: ignore[attr-defined]

    from brax import envs
    from brax.training.agents.ppo import networks
    from brax.training.agents.ppo import train as ppo
    from flax import linen

    epochs = s.warmups + s.rounds
    assert s.warmups == 2, "the first of two warm-ups tells the compile time"
    seconds: list[float] = []
    parameters = 0
    cpu = 0.0
    timer = Timer()

    def after_epoch(step: int, make_policy: Any, params: Any) -> None:
        nonlocal parameters, cpu
        parameters, cpu = count(params[1:]), timer()[1]

    def after_evaluation(step: int, metrics: dict[str, Any]) -> None:
        nonlocal timer
        if step == 0:
            return
        seconds.append(s.steps / metrics["training/sps"])
        if len(seconds) > s.warmups:
            channel.result(Result(s.steps, seconds[-1], cpu, float(metrics["eval/episode_reward"])))
        elif len(seconds) == s.warmups:
            channel.ready(seconds[0] - seconds[1], parameters, ("brax", "jax", "flax"))
        if len(seconds) >= s.warmups:
            channel.wait()
        timer = Timer()

    ppo.train(
        environment=envs.get_environment(s.env, backend=s.physics),
        num_timesteps=epochs * s.steps,
        max_devices_per_host=1,
        num_envs=s.num_envs,
        episode_length=1000,
        learning_rate=s.learning_rate,
        entropy_cost=s.entropy_coef,
        discounting=s.discount,
        unroll_length=s.num_steps,
        batch_size=s.num_envs // s.num_minibatches,
        num_minibatches=s.num_minibatches,
        num_updates_per_batch=s.num_epochs,
        normalize_observations=False,
        clipping_epsilon=s.clip,
        clipping_epsilon_value=s.clip,
        gae_lambda=s.gae_lambda,
        max_grad_norm=s.max_grad_norm,
        normalize_advantage=True,
        vf_loss_coefficient=s.value_coef,
        network_factory=functools.partial(
            networks.make_ppo_networks,
            policy_hidden_layer_sizes=s.hidden,
            value_hidden_layer_sizes=s.hidden,
            activation=getattr(linen, s.activation),
            distribution_type="normal",
            noise_std_type="log",
        ),
        num_evals=epochs + 1,
        num_eval_envs=16,
        policy_params_fn=after_epoch,
        progress_fn=after_evaluation,
    )


CONTENDERS: dict[str, Callable[[Settings, Channel], None]] = {
    "rljax": run_rljax,
    "rljax-logged": functools.partial(run_rljax, all_metrics=True),
    "rejax": run_rejax,
    "purejaxrl": run_purejaxrl,
    "sb3": run_sb3,
    "brax": run_brax,
}


def main() -> None:
    contender, settings = sys.argv[1:]
    fields = json.loads(settings)
    CONTENDERS[contender](Settings(**{**fields, "hidden": tuple(fields["hidden"])}), Channel())


if __name__ == "__main__":
    main()
