"""One contender of the speed benchmark, as a process that `compare.py` starts and keeps alive.

The process builds, compiles and warms up its training program, then answers each line `go SEED` on standard input with
one JSON line: what one timed run did. Only the standard library is imported at the top, because every contender runs in
its own environment. Evaluation is never inside the timed part, and neither are the random steps that fill a replay buffer.
"""

# pyright: reportMissingImports=false

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained, equal for all contenders of a case, and how. Hyper-parameters are named as in rljax's configs."""

    algo: str = ""
    env: str = "CartPole-v1"  # or a name of brax, with `physics`
    physics: str = ""  # brax's backend
    updates: int = 1000  # calls of rljax's `step`
    seeds: int = 1
    continued: bool = False  # a round continues the training of the round before instead of starting afresh
    warmups: int = 1  # untimed runs before the first round
    rounds: int = 5
    devices: int = 2  # host devices that rljax spreads several seeds over
    cores: int = 0  # that each contender is kept to; 0: all
    purejaxrl: str = ""  # folder of a purejaxrl checkout
    num_envs: int = 4
    num_steps: int = 128
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    learning_rate: float = 1e-3
    adam_eps: float = 1e-8
    discount: float = 0.99

    @property
    def steps(self) -> int:
        """Environment steps of one round, all seeds together."""
        return self.seeds * self.steps_per_seed

    @property
    def steps_per_seed(self) -> int:
        return self.updates * self.num_envs * self.num_steps

    def hyper_parameters(self) -> dict[str, Any]:
        """The fields that are the algorithm's."""
        others = (*NO_HYPER_PARAMETERS, "num_envs", "num_steps") if isinstance(self, Offline) else NO_HYPER_PARAMETERS
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in others}


NO_HYPER_PARAMETERS = (
    "algo", "env", "physics", "updates", "seeds", "continued", "warmups", "rounds", "devices", "cores", "purejaxrl", "data_size",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PPO(Settings):
    algo: str = "ppo"
    activation: str = "tanh"
    learning_rate: float = 2.5e-4
    adam_eps: float = 1e-5
    num_epochs: int = 4
    num_minibatches: int = 4
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5


@dataclasses.dataclass(frozen=True)
class OffPolicy(Settings):
    """What DQN and SAC share. ``num_steps`` is rljax's alone: one gradient step follows each step of the environments."""

    num_steps: int = 100
    buffer_size: int = 10_000
    learning_starts: int = 1_000  # random steps that fill the buffer at first
    batch_size: int = 128
    target_tau: float = 1.0
    target_every: int = 1  # gradient steps


@dataclasses.dataclass(frozen=True)
class DQN(OffPolicy):
    algo: str = "dqn"
    num_envs: int = 10
    hidden: tuple[int, ...] = (120, 84)
    learning_rate: float = 5e-4
    target_every: int = 100
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    exploration_fraction: float = 0.1
    double: bool = True
    huber_delta: float | None = None  # none: squared error


@dataclasses.dataclass(frozen=True)
class SAC(OffPolicy):
    algo: str = "sac"
    env: str = "Pendulum-v1"
    num_envs: int = 1
    batch_size: int = 256
    target_tau: float = 0.005


@dataclasses.dataclass(frozen=True)
class Offline(Settings):
    """What agents that learn from `synthetic` data share; a step is a gradient step, and no environment is played."""

    env: str = "synthetic"
    num_envs: int = 0
    num_steps: int = 0
    data_size: int = 100_000
    num_updates: int = 64  # gradient steps of one call of rljax's `step`
    batch_size: int = 256
    hidden: tuple[int, ...] = (256, 256)
    learning_rate: float = 3e-4
    target_tau: float = 0.005

    @property
    def steps_per_seed(self) -> int:
        return self.updates * self.num_updates


@dataclasses.dataclass(frozen=True)
class CQL(Offline):
    algo: str = "cql"
    conservative_coef: float = 5.0
    num_actions: int = 10


@dataclasses.dataclass(frozen=True)
class IQL(Offline):
    algo: str = "iql"
    expectile: float = 0.7
    beta: float = 3.0


@dataclasses.dataclass(frozen=True)
class TD3BC(Offline):
    algo: str = "td3_bc"
    alpha: float = 2.5
    policy_delay: int = 2
    target_noise: float = 0.2
    target_noise_clip: float = 0.5


SETTINGS: dict[str, type[Settings]] = {"ppo": PPO, "dqn": DQN, "sac": SAC, "cql": CQL, "iql": IQL, "td3_bc": TD3BC}


@dataclasses.dataclass(frozen=True)
class Result:
    """One timed run. `mean_return` is over the episodes that ended in its last tenth, or of an untimed evaluation.

    Of an offline agent instead, means over its last 64 gradient steps: `q`, the critics' value of recorded actions, and
    `td_error`, the square of what separates it from its target.
    """

    steps: int
    seconds: float
    cpu_seconds: float
    mean_return: float | None = None
    q: float | None = None
    td_error: float | None = None


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
    fill: Callable[[Any], Any] = lambda key: key,
) -> None:
    """Serves a peer whose whole training is one function: compiled by `jit`, several seeds by `vmap`.

    Args:
      train: of what ``fill`` makes of a key, which is not timed.
    """
    import jax

    def keys(seed: int) -> jax.Array:
        key = jax.random.PRNGKey(seed)
        return jax.random.split(key, s.seeds) if s.seeds > 1 else key

    over_seeds = jax.vmap if s.seeds > 1 else lambda f: f
    timer = Timer()
    begin = jax.jit(over_seeds(fill))
    program = jax.jit(over_seeds(train)).lower(begin(keys(0))).compile()
    compile_seconds, _ = timer()
    evaluate = jax.jit(over_seeds(mean_return))

    def run(seed: int) -> Result:
        first = jax.block_until_ready(begin(keys(seed)))
        timer = Timer()
        out = jax.block_until_ready(program(first))
        wall, cpu = timer()
        return Result(s.steps, wall, cpu, float(evaluate(out, keys(seed)).mean()))

    for warmup in range(s.warmups):
        run(warmup)
    shapes = jax.eval_shape(lambda key: train(fill(key)), jax.random.PRNGKey(0))
    channel.ready(compile_seconds, count(parameters(shapes)), ("jax", *packages))
    channel.serve(run)


def rljax_config(s: Settings) -> Any:
    """The config of rljax's agent."""
    from rljax.agents.base import agent_module

    others: dict[str, Any] = {}
    if isinstance(s, PPO):
        others = {"clip_value": s.clip}
    elif isinstance(s, DQN):
        others = {"anneal_steps": s.steps_per_seed, "max_grad_norm": float("inf")}
    return agent_module(s.algo).Config(**s.hyper_parameters(), **others)


def synthetic(size: int, length: int = 1000) -> dict[str, Any]:
    """Episodes of a noisy linear system, of 17 numbers and 6 actions in [-1, 1], that a noisy linear policy holds near 0.

    Numpy arrays ``[size, ...]`` under the names of D4RL, the same in every process.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    turn, push, gain = np.linalg.qr(rng.normal(size=(17, 17)))[0], rng.normal(size=(6, 17)), rng.normal(size=(17, 6))
    state, rows = rng.normal(size=(size // length, 17)), []
    for _ in range(length):
        action = np.clip(0.2 * state @ gain + 0.3 * rng.normal(size=(len(state), 6)), -0.99, 0.99)
        after = 0.95 * state @ turn + 0.2 * action @ push + 0.1 * rng.normal(size=state.shape)
        rows.append((state, action, 1.0 - np.square(after).mean(1), after))
        state = after
    names = ("observations", "actions", "rewards", "next_observations")
    columns = (np.stack(x, 1).astype(np.float32) for x in zip(*rows, strict=True))
    arrays = {name: x.reshape(-1, *x.shape[2:]) for name, x in zip(names, columns, strict=True)}
    ends = np.arange(len(arrays["rewards"])) % length == length - 1
    return {**arrays, "terminals": np.zeros_like(ends), "timeouts": ends}


def serve_offline(
    s: Settings,
    channel: Channel,
    fresh: Callable[[int], Any],
    build: Callable[[], Any],
    train: Callable[[Any], Callable[[], tuple[Any, Any]]],
    parameters: int,
    packages: tuple[str, ...],
) -> None:
    """Serves an offline agent.

    Args:
      fresh: ``seed ->`` what ``train`` starts from; not timed.
      build: compiles.
      train: all gradient steps of a run, until they are done; what it returns tells `Result`'s ``(q, td_error)``, not timed.
    """
    timer = Timer()
    build()
    compile_seconds, _ = timer()

    def run(seed: int) -> Result:
        start = fresh(seed)
        timer = Timer()
        measure = train(start)
        wall, cpu = timer()
        q, td_error = measure()
        return Result(s.steps, wall, cpu, q=float(q), td_error=float(td_error))

    for warmup in range(s.warmups):
        run(warmup)
    channel.ready(compile_seconds, parameters, packages)
    channel.serve(run)


def run_rljax_offline(s: Offline, channel: Channel) -> None:
    """rljax: all metrics are returned, as the peers do.

    Policy, critics and value take their gradients at once, from the same parameters; observations are normalised in each batch.
    """
    from types import SimpleNamespace

    import jax
    import jax.numpy as jnp

    from rljax.agents import make_agent
    from rljax.envs import Box, restart
    from rljax.ops.dataset import make_dataset
    from rljax.ops.replay import Transition

    x = synthetic(s.data_size)
    transitions = Transition(
        x["observations"], None, x["actions"], x["rewards"], x["terminals"], x["timeouts"], x["next_observations"], None
    )
    data = jax.device_put({"dataset": make_dataset(transitions)})
    spaces = dict(observation_space=Box(-jnp.inf, jnp.inf, (17,)), action_space=Box(-1.0, 1.0, (6,)))
    env: Any = SimpleNamespace(**spaces, reset=lambda key: ((), restart(jnp.zeros(17))))
    agent = make_agent(rljax_config(s), env)
    init = jax.jit(agent.init)

    def fresh(seed: int) -> Any:
        return jax.block_until_ready(init(jax.random.key(seed), data))

    state = fresh(0)
    parameters = count((state.params, getattr(state, "values", ())))

    @jax.jit
    def train(state: Any, data: Any) -> Any:
        return jax.lax.scan(lambda state, _: agent.step(state, data), state, length=s.updates)

    def run(state: Any) -> Callable[[], tuple[Any, Any]]:
        _, metrics = jax.block_until_ready(program(state, data))
        half = 0.5 if isinstance(s, IQL) else 1.0  # the others' loss has it
        return lambda: (metrics["q"][-1], half * metrics["loss/critic"][-1])

    program: Any = None

    def build() -> None:
        nonlocal program
        program = train.lower(state, data).compile()

    serve_offline(s, channel, fresh, build, run, parameters, ("jax", "flax"))


def run_rljax(s: Settings, channel: Channel, all_metrics: bool = False) -> None:
    """rljax: several seeds are spread over the devices, and mapped by `vmap` within each.

    Like the peers' programs it returns the training return alone, and XLA drops what computes the other metrics;
    "rljax-logged" returns all of them, as `rljax run` does.

    Weights start orthogonal, those of rejax, SBX and brax as LeCun proposed. DQN's epsilon is constant within the 100 steps
    of a call of `step`, and the norm of the gradient is computed although it is not bounded. SAC takes the gradients of its
    three losses at once, from the same parameters. Both are evaluated greedily.
    """
    if isinstance(s, Offline):
        return run_rljax_offline(s, channel)
    import jax

    if s.seeds > 1:
        jax.config.update("jax_num_cpu_devices", s.devices)
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    import rljax
    from rljax.agents import make_agent
    from rljax.experiment.evaluation import evaluate_agent

    env = rljax.make_env(f"brax/{s.env}", backend=s.physics) if s.physics else rljax.make_env(s.env)
    agent = make_agent(rljax_config(s), env)
    off_policy = isinstance(s, OffPolicy)

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
    evaluate = jax.jit(over_seeds(lambda state: evaluate_agent(agent, env, state, jax.random.key(1), 32, 1000).returns.mean()))

    def run(seed: int) -> Result:
        nonlocal first
        key = jax.block_until_ready(keys(seed))
        timer = Timer()
        state = first if s.continued else init(key)
        if off_policy:  # `init` has filled the buffer
            jax.block_until_ready(state)
            timer = Timer()
        state, metrics, mean_return = program(state)
        jax.block_until_ready((state, metrics))
        wall, cpu = timer()
        first = state
        if off_policy:
            mean_return = evaluate(state)
        return Result(s.steps, wall, cpu, float(mean_return.mean()))

    for warmup in range(s.warmups):
        run(warmup)
    channel.ready(compile_seconds, parameters, ("jax", "gymnax", "flax", "brax"))
    channel.serve(run)


def rejax_options(s: Settings) -> dict[str, Any]:
    """What an algorithm of rejax takes besides what all take."""
    if isinstance(s, PPO):
        return dict(
            num_steps=s.num_steps,
            num_epochs=s.num_epochs,
            num_minibatches=s.num_minibatches,
            agent_kwargs={"hidden_layer_sizes": s.hidden, "activation": s.activation},
            gae_lambda=s.gae_lambda,
            clip_eps=s.clip,
            vf_coef=s.value_coef,
            ent_coef=s.entropy_coef,
            max_grad_norm=s.max_grad_norm,
        )
    assert isinstance(s, OffPolicy)
    options: dict[str, Any] = dict(
        agent_kwargs={"activation": s.activation},
        buffer_size=s.buffer_size,
        fill_buffer=s.learning_starts - 1,  # the last step without learning
        batch_size=s.batch_size,
        polyak=1.0 - s.target_tau,
        target_update_freq=s.target_every * s.num_envs,
    )
    if not isinstance(s, DQN):
        return options | dict(hidden_layer_sizes=s.hidden)
    assert s.huber_delta is None, "the loss is the squared error"
    return options | dict(
        ddqn=s.double, eps_start=s.epsilon_start, eps_end=s.epsilon_end, exploration_fraction=s.exploration_fraction
    )


def run_rejax(s: Settings, channel: Channel) -> None:
    """rejax. It has no setting for Adam's epsilon (1e-8), and clips PPO's gradients by value at `max_grad_norm`.

    DQN and SAC draw a batch without replacement, at a cost that grows with the buffer, and take a time limit for a
    terminal state. SAC fills the buffer with its first policy's actions, updates policy, critics and temperature one after
    the other, and is evaluated with sampled actions; DQN takes a random action in 200 there.
    """
    import rejax
    from rejax.evaluate import evaluate

    def make(steps: int) -> Any:
        algo = getattr(rejax, s.algo.upper()).create(
            env=s.env,
            num_envs=s.num_envs,
            learning_rate=s.learning_rate,
            gamma=s.discount,
            total_timesteps=steps,
            eval_freq=steps,
            skip_initial_evaluation=True,
            **rejax_options(s),
        )
        if isinstance(s, DQN):  # `create` has no setting for the layers
            algo = algo.replace(agent=algo.agent.clone(hidden_layer_sizes=s.hidden))
        return algo.replace(eval_callback=lambda algo, state, key: ())

    algo = make(s.steps_per_seed)

    def mean_return(state: Any, key: Any) -> Any:
        _, returns = evaluate(algo.make_act(state), key, algo.env, algo.env_params, 32)
        return returns.mean()

    if isinstance(s, OffPolicy):
        start = make(s.learning_starts)
        programs = dict(fill=lambda key: start.train(key)[0], train=lambda state: algo.train(train_state=state)[0])
    else:
        programs = dict(train=lambda key: algo.train(key)[0])
    serve_train(
        s,
        channel,
        **programs,
        parameters=lambda state: [part.params for name, part in vars(state).items() if name.endswith("_ts")],
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
    import ppo  # a module of the checkout

    assert isinstance(s, PPO)
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


def serve_model(
    s: Settings,
    channel: Channel,
    fresh: Callable[[int], Any],
    mean_return: Callable[[Any], Any],
    parameters: int,
    packages: tuple[str, ...],
    fill: int = 0,
) -> None:
    """Serves a peer with the interface of stable-baselines3, on the CPU.

    Its environments are stepped in this process (the default and, here, the fastest). One more warm-up than asked for, the
    first, tells the compile time.

    Args:
      fresh: ``seed ->`` an untrained model.
      fill: environment steps before the first gradient step, which are not timed.
    """
    import torch

    torch.set_num_threads(1)  # as fast as more for layers of this size, and steadier

    def run(seed: int) -> Result:
        model = fresh(seed)
        if fill:
            model.learn(fill)
        timer = Timer()
        model.learn(s.steps, reset_num_timesteps=not fill)
        wall, cpu = timer()
        assert model.num_timesteps == fill + s.steps
        return Result(s.steps, wall, cpu, float(mean_return(model)))

    seconds = [run(warmup).seconds for warmup in range(1 + s.warmups)]
    channel.ready(max(seconds[0] - seconds[-1], 0.0), parameters, packages)
    channel.serve(run)


def run_sb3(s: Settings, channel: Channel) -> None:
    """stable-baselines3's PPO."""
    import numpy as np
    import torch
    from stable_baselines3 import PPO as Algorithm
    from stable_baselines3.common.env_util import make_vec_env

    assert isinstance(s, PPO)

    def fresh(seed: int) -> Algorithm:
        return Algorithm(
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

    serve_model(
        s,
        channel,
        fresh,
        mean_return=lambda model: np.mean([episode["r"] for episode in model.ep_info_buffer]),  # of the last 100 episodes
        parameters=sum(p.numel() for p in fresh(0).policy.parameters()),
        packages=("stable_baselines3", "torch", "gymnasium"),
    )


def run_sbx(s: Settings, channel: Channel) -> None:
    """SBX: stable-baselines3 with networks and gradient steps in JAX, environments and buffer in NumPy.

    A new model would compile anew, so that each round gives the same model its first parameters back.

    DQN has as many units in the second layer as in the first, always uses Huber's loss, is never double, and decides with
    one draw whether all environments explore. SAC updates critics, target critics, policy and temperature one after the
    other.
    """
    import jax
    import sbx
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    assert isinstance(s, OffPolicy)
    own: dict[str, Any] = {}
    if isinstance(s, DQN):
        assert s.huber_delta == 1.0 and not s.double, "fixed in its source"
        own = dict(
            target_update_interval=s.target_every * s.num_envs,
            exploration_initial_eps=s.epsilon_start,
            exploration_final_eps=s.epsilon_end,
            exploration_fraction=s.exploration_fraction,
        )
    model = getattr(sbx, s.algo.upper())(
        "MlpPolicy",
        make_vec_env(s.env, n_envs=s.num_envs),
        learning_rate=s.learning_rate,
        buffer_size=s.buffer_size,
        learning_starts=s.learning_starts,
        batch_size=s.batch_size,
        tau=s.target_tau,
        gamma=s.discount,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={
            "net_arch": list(s.hidden),
            "activation_fn": getattr(jax.nn, s.activation),
            "optimizer_kwargs": {"eps": s.adam_eps},
        },
        **own,
    )
    places = (model, model.policy)
    initial = [(place, name, value) for place in places for name, value in vars(place).items() if name.endswith("_state")]

    def fresh(seed: int) -> Any:
        for place, name, value in initial:
            setattr(place, name, value)
        model.replay_buffer.reset()
        model.set_random_seed(seed)
        return model

    serve_model(
        s,
        channel,
        fresh,
        mean_return=lambda model: evaluate_policy(model, model.get_env(), n_eval_episodes=32)[0],
        parameters=count([value.params for _, _, value in initial]),
        packages=("sbx-rl", "stable_baselines3", "jax", "flax", "gymnasium"),
        fill=s.learning_starts,
    )


def run_brax(s: Settings, channel: Channel) -> None:
    """brax's own PPO trainer.

    Each call compiles anew, so that all rounds are one call of several epochs, and an epoch waits for the driver in the
    progress callback. The seconds are those that the trainer gives for the epoch. It has no setting for Adam's epsilon
    (1e-8), and computes values and advantages anew in every gradient step.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import brax_trainer

    epochs = s.warmups + s.rounds
    assert s.warmups == 2, "the first of two warm-ups tells the compile time"
    seconds: list[float] = []
    parameters = 0
    cpu = 0.0
    timer = Timer()

    def after_epoch(step: int, make_policy: Any, params: Any) -> None:
        nonlocal parameters, cpu
        parameters, cpu = count(params[1:]), timer()[1]

    def after_evaluation(step: int, metrics: Any) -> None:
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

    brax_trainer.train(
        rljax_config(s),
        env=s.env,
        env_params={"backend": s.physics},
        steps=epochs * s.steps,
        evaluations=epochs,
        episodes=16,
        after_evaluation=after_evaluation,
        policy_params_fn=after_epoch,
    )


def run_orlax(s: Settings, channel: Channel, in_scan: bool = False) -> None:
    """orlax: its update, in the loop of its `ExperimentRunner` without the logger: batches are drawn in NumPy.

    With ``in_scan`` the same update is the body of a `lax.scan` over data on the device, which the package does not have.
    What its update does otherwise than rljax's: parts of the agent are updated one after the other; CQL's policy is a Gaussian
    around a tanh, drawn without squashing, and its penalty has actions of two kinds, which are not divided by their density (15
    of each, so that they are as many as rljax's three kinds of 10); IQL clones by weighted squared errors.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orlax

    assert isinstance(s, Offline)
    own: dict[str, Any] = {}
    if isinstance(s, CQL):
        own = dict(alpha=2 * s.conservative_coef)  # of means over two critics, beside squared errors without a half
    elif isinstance(s, IQL):
        own = dict(expectile=s.expectile, beta=s.beta)
    elif isinstance(s, TD3BC):
        own = dict(alpha=s.alpha, policy_freq=s.policy_delay, target_noise=s.target_noise, noise_clip=s.target_noise_clip)
    algo = {"cql": orlax.CQL, "iql": orlax.IQL, "td3_bc": orlax.TD3BC}[s.algo](
        17,
        6,
        orlax.TrainingCfg(algo=s.algo, env_name=s.env, batch_size=s.batch_size, lr=s.learning_rate),
        orlax.ModelCfg(hidden_dims=s.hidden, activation=s.activation),
        orlax.AlgoCfg(gamma=s.discount, tau=s.target_tau, **own),
    )
    if isinstance(s, CQL):
        algo._compute_cql_penalty = functools.partial(algo._compute_cql_penalty, n_samples=3 * s.num_actions // 2)
    x = synthetic(s.data_size)
    buffer = orlax.Dataset({**x, "dones": x["terminals"]}, normalize_obs=True).get_buffer()
    rows = orlax.Batch(*(jnp.asarray(y) for y in (buffer.obs, buffer.act, buffer.reward, buffer.next_obs, buffer.done)))

    form = jax.tree.structure(algo.init(jax.random.PRNGKey(0)))

    def fresh(seed: int) -> Any:
        init_key, key = jax.random.split(jax.random.PRNGKey(seed))
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(algo.init(init_key))]
        return jax.block_until_ready(jax.tree.unflatten(form, leaves)), key  # its own would compile anew

    td_error = "td_loss" if isinstance(s, CQL) else "critic_loss"

    def loop(start: Any, steps: int = s.steps) -> Callable[[], tuple[Any, Any]]:
        (state, key), kept = start, []
        for _ in range(steps):
            key, batch_key = jax.random.split(key)
            batch = buffer.sample(s.batch_size, batch_key)
            key, update_key = jax.random.split(key)
            state, metrics = algo.update(state, batch, update_key)
            kept = [*kept[-63:], (metrics["q_mean"], metrics[td_error])]
        jax.block_until_ready(state)
        return lambda: tuple(np.mean(kept, 0))

    @jax.jit
    def scan(state: Any, key: Any, rows: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            batch_key, update_key = jax.random.split(key)
            index = jax.random.randint(batch_key, (s.batch_size,), 0, s.data_size)
            return algo.update(state, jax.tree.map(lambda x: x[index], rows), update_key)

        return jax.lax.scan(step, state, jax.random.split(key, s.steps))

    program: Any = None

    def build() -> None:
        nonlocal program
        if in_scan:
            program = scan.lower(*fresh(0), rows).compile()
        else:
            loop(fresh(0), 1)

    def scanned(start: Any) -> Callable[[], tuple[Any, Any]]:
        _, metrics = jax.block_until_ready(program(*start, rows))
        return lambda: (metrics["q_mean"][-64:].mean(), metrics[td_error][-64:].mean())

    state, _ = fresh(0)
    parameters = count([part.params for part in state.values() if hasattr(part, "params")])
    serve_offline(s, channel, fresh, build, scanned if in_scan else loop, parameters, ("orlax", "jax", "flax"))


def run_d3rlpy(s: Settings, channel: Channel) -> None:
    """d3rlpy, in PyTorch on the CPU: its update and its batches, as in `fit` without the logger.

    An episode's last step, which was cut, is left out. Critics and policy are updated one after the other.
    """
    import d3rlpy
    import numpy as np
    import torch
    from d3rlpy.algos import CQLConfig, IQLConfig, TD3PlusBCConfig

    assert isinstance(s, Offline)
    torch.set_num_threads(1)  # two wait for each other where the machine has other work
    layers = d3rlpy.models.VectorEncoderFactory(hidden_units=list(s.hidden), activation=s.activation)
    common: dict[str, Any] = dict(
        batch_size=s.batch_size,
        gamma=s.discount,
        tau=s.target_tau,
        actor_learning_rate=s.learning_rate,
        critic_learning_rate=s.learning_rate,
        actor_encoder_factory=layers,
        critic_encoder_factory=layers,
        observation_scaler=d3rlpy.preprocessing.StandardObservationScaler(),
    )
    if isinstance(s, CQL):
        config: Any = CQLConfig(
            **common,
            temp_learning_rate=s.learning_rate,
            alpha_learning_rate=0.0,  # a fixed weight
            conservative_weight=2 * s.conservative_coef,  # beside squared errors without a half
            n_action_samples=s.num_actions,
            soft_q_backup=True,
        )
    elif isinstance(s, IQL):
        config = IQLConfig(**common, value_encoder_factory=layers, expectile=s.expectile, weight_temp=s.beta)
    else:
        assert isinstance(s, TD3BC)
        config = TD3PlusBCConfig(
            **common,
            alpha=s.alpha,
            update_actor_interval=s.policy_delay,
            target_smoothing_sigma=s.target_noise,
            target_smoothing_clip=s.target_noise_clip,
        )
    x = synthetic(s.data_size)
    data = d3rlpy.dataset.MDPDataset(x["observations"], x["actions"], x["rewards"], x["terminals"], x["timeouts"])
    config.observation_scaler.fit_with_transition_picker(data.episodes, data.transition_picker)

    def fresh(seed: int) -> Any:
        d3rlpy.seed(seed)
        algo = config.create(device="cpu:0")
        algo.build_with_dataset(data)
        return algo

    def train(algo: Any) -> Callable[[], tuple[Any, Any]]:
        kept, q = [], []
        for step in range(s.steps):
            batch = data.sample_transition_batch(s.batch_size)
            kept = [*kept[-63:], algo.update(batch)]
            if step >= s.steps - 64 and step % 16 == 0:  # seldom, for this is timed
                q.append(algo.predict_value(batch.observations, batch.actions))

        def measure() -> tuple[Any, Any]:
            both = [m["q_loss"] if isinstance(s, IQL) else m["critic_loss"] - m.get("conservative_loss", 0.0) for m in kept]
            return np.mean(q), np.mean(both) / 2

        return measure

    modules = vars(fresh(0).impl.modules).items()
    nets = [net for name, net in modules if isinstance(net, torch.nn.Module) and not name.startswith("targ")]
    parameters = sum(p.numel() for net in nets for p in net.parameters())
    serve_offline(s, channel, fresh, lambda: None, train, parameters, ("d3rlpy", "torch"))


def keep_to(cores: int) -> None:
    """Keeps this process to its first cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def run_rljax_on_one_core(s: Settings, channel: Channel) -> None:
    """rljax with one host device, kept to one core: what its devices are to be compared with."""
    keep_to(1)
    run_rljax(dataclasses.replace(s, devices=1), channel)


CONTENDERS: dict[str, Callable[[Settings, Channel], None]] = {
    "rljax": run_rljax,
    "rljax-logged": functools.partial(run_rljax, all_metrics=True),
    "rljax-1core": run_rljax_on_one_core,
    "rejax": run_rejax,
    "purejaxrl": run_purejaxrl,
    "sb3": run_sb3,
    "sbx": run_sbx,
    "brax": run_brax,
    "orlax": run_orlax,
    "orlax-scan": functools.partial(run_orlax, in_scan=True),
    "d3rlpy": run_d3rlpy,
}


def main() -> None:
    contender, settings = sys.argv[1:]
    fields = json.loads(settings)
    if fields["cores"]:
        keep_to(fields["cores"])  # before jax counts them
    CONTENDERS[contender](SETTINGS[fields["algo"]](**{**fields, "hidden": tuple(fields["hidden"])}), Channel())


if __name__ == "__main__":
    main()
