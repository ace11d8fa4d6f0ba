"""Lanes: (seed, hyper-parameters) pairs mapped over one program, and the program's three compiled functions."""

import dataclasses
import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax import sharding
from rljax.agents import Agent, make_agent, reward_model
from rljax.envs import Environment, Tokens, host, make_env
from rljax.envs.wrappers import LearnedReward, as_evaluated
from rljax.experiment import hosts
from rljax.experiment.config import Experiment, InputError
from rljax.experiment.data import load_data
from rljax.experiment.evaluation import Evaluation, evaluate_agent, random_agent
from rljax.experiment.traces import Transcript, transcribe
from rljax.networks.reward import RewardModel

AXIS = "lanes"


@dataclasses.dataclass(frozen=True)
class Program:
    """One traced program over all lanes of an experiment.

    ``lanes`` holds everything in which lanes differ; its leaves, and those of every state, start with the axis ``[lanes]``,
    padded to a multiple of the number of devices by repeating the last lane.

    Attributes:
      num_lanes: without padding.
      lanes: ``(seeds, swept algorithm fields, swept environment parameters, parameters of the reward model or None)``.
      updates_per_chunk: calls of ``Agent.step`` in a chunk.
      num_chunks: chunks of a whole run.
      chunks_per_eval: a run is evaluated after every so many chunks, and after its last.
      env_steps: environment steps per seed of one update.
      init_steps: environment steps per seed of ``init``.
      data: what all lanes share, one copy on each device: ``{"base": parameters}`` of a pretrained model whose adapters are
        trained, ``{"dataset": Dataset}`` of an offline agent, else None.
      about: what is known of the data set: see `Recording`.
      init: ``(lanes, data) -> states``, jitted.
      init_from: ``(lanes, params, data) -> states``, jitted: from parameters that were trained before, ``[lanes, ...]``.
      chunk: ``(lanes, states, data) -> (states, {metric: (sum, count)}, finite)``, jitted; donates the states.
      evaluate: ``(lanes, states, data) -> Evaluation``, jitted.
      env: the environment of the first lane.
      bind: a lane's ``(environment, agent)``.
      traces: how often each function was traced, by name.
      at_once: how many lanes of a device run at once; the others wait for their turn.
      lift: ``(at_once) -> {"init", "init_from", "chunk", "evaluate"}``, compiled so.
      rests: where states rest between calls, if lanes are split: see `rljax.sharding.of_states`; else None.
    """

    experiment: Experiment
    num_lanes: int
    lanes: Any
    mesh: Mesh
    updates_per_chunk: int
    num_chunks: int
    chunks_per_eval: int
    env_steps: int
    init_steps: int
    data: Any
    about: dict[str, Any]
    init: Any
    init_from: Any
    chunk: Any
    evaluate: Any
    env: Any
    bind: Any
    traces: dict[str, int]
    at_once: int
    lift: Any
    rests: Any = None

    def steps_at(self, chunk: int) -> int:
        """Environment steps per seed after ``chunk`` chunks, as a Python integer (int32 would overflow at 2.1e9)."""
        return self.init_steps + chunk * self.updates_per_chunk * self.env_steps

    def example(self) -> tuple[Any, Any]:
        """``(lanes, states)`` of one call of a compiled program, as shapes: all, or of a halving those of its last rung."""
        states = jax.eval_shape(self.init, self.lanes, self.data)
        if not self.experiment.sweep_halving:
            return self.lanes, states
        size = self.padded(self.experiment.lanes_a_call)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), (self.lanes, states))

    def compiled(self) -> tuple["Program", Any]:
        """``(program, its chunk, compiled)``, with half as many lanes at once as often as these need more than a device has."""
        chunk = self.chunk.lower(*self.example(), self.data).compile()
        if self.at_once == 1 or hosts.lead(lambda: bytes_needed(chunk) <= bytes_free(self.mesh)):
            return self, chunk
        fewer = -(-self.at_once // 2)
        return dataclasses.replace(self, at_once=fewer, **self.lift(fewer)).compiled()

    def padded(self, lanes: int) -> int:
        """So many lanes with their padding: a multiple of the devices."""
        return -(-lanes // self.mesh.size) * self.mesh.size

    def evaluates_at(self, chunk: int) -> bool:
        return chunk % self.chunks_per_eval == 0 or chunk == self.num_chunks

    def pad(self, tree: Any) -> Any:
        """Puts arrays ``[num_lanes, ...]`` on the devices, padded where these divide lanes."""
        if self.rests is not None:
            return _put(tree, sharding.of_states(tree, self.mesh, self.experiment.shard))
        return _put(_pad(tree, self.mesh.size), NamedSharding(self.mesh, PartitionSpec(AXIS)))

    def share(self, tree: Any) -> Any:
        """Puts arrays that all lanes share on the devices: one copy on each, or, where parameters are split, those as well."""
        if self.experiment.shard == "params" and "base" in tree:
            return {**tree, "base": _put(tree["base"], sharding.of_params(tree["base"], self.mesh))}
        return _put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def fetch(self, tree: Any) -> Any:
        """Numpy arrays ``[num_lanes, ...]`` of arrays ``[padded lanes, ...]``, on every process; all must call it."""
        if hosts.joined():  # leaf by leaf, since each device holds a copy of all lanes for a moment
            everywhere = jax.jit(_same, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
            return self.unpad(jax.tree.map(lambda x: jax.device_get(everywhere(x).addressable_data(0)), tree))
        return self.unpad(jax.device_get(tree))

    def transcriber(self, episodes: int, greedy: bool, samples: int = 1) -> Any:
        """``(padded states, seed) -> Transcript`` of numpy arrays ``[num_lanes, episodes * samples, ...]``, compiled once; None
        where the agent is no language model."""
        example = jax.tree.map(lambda x: x[0], self.fetch(self.lanes))
        if not isinstance(self.env.observation_space, Tokens) or self.bind(example)[1].policy is None:
            return None

        def transcribe_lane(lane: Any, state: Any, seed: Array, data: Any) -> Transcript:
            env, agent = self.bind(lane)
            return transcribe(agent, env, state, jax.random.key(seed), episodes, greedy, data, samples)

        program = _lift(transcribe_lane, self.mesh, self.at_once, self.rests)

        def say(states: Any, seed: int) -> Transcript:
            seeds = self.pad(np.full(self.num_lanes, seed, np.uint32))
            return self.fetch(program(self.lanes, states, seeds, self.data))

        return say

    def paid_by(self, params: Any) -> "Program":
        """The program whose lanes are paid by reward models with ``params [num_lanes, K, ...]``."""
        return dataclasses.replace(self, lanes=(*self.lanes[:3], self.pad(params)))

    def unpad(self, tree: Any) -> Any:
        """Without the padding lanes."""
        return jax.tree.map(lambda x: x[: self.num_lanes], tree)


CHUNKS_PER_EVAL = 5  # progress lines and metric rows between two evaluations


def build(
    experiment: Experiment, devices: list[Any] | None = None, place: Experiment | None = None, greedy: bool = True
) -> Program:
    """Builds the program of an experiment with traced sweeps only (see `Experiment.programs`).

    Args:
      experiment: what to build.
      devices: all by default.
      place: the same lanes are bound to the environment of this experiment instead (see `elsewhere`).
      greedy: whether ``evaluate`` acts greedily.

    Raises:
      InputError: the algorithm does not fit the environment; one line that names the key.
    """
    static_axes = [key for key in experiment.sweep if not experiment.is_traced(key)]
    if static_axes:
        raise InputError(f"{static_axes[0]} is static: run each of experiment.programs() by itself")
    place = place or experiment
    swept_params = [key[11:] for key in place.sweep if key.startswith("env_params.")]
    first_env = _checked(lambda: first_environment(place))
    fixed_env = None if swept_params else first_env

    def bind(lane: Any) -> tuple[Environment, Agent]:
        _, algo, env_params, reward = lane
        env = fixed_env or make_env(place.env, **{**place.env_params, **{key: env_params[key] for key in swept_params}})
        if reward is not None:
            env = LearnedReward(env, functools.partial(judge(experiment, env.observation_space).pays, reward))
        return env, make_agent(dataclasses.replace(experiment.algo, **algo), env)

    traces = {"init": 0, "chunk": 0, "evaluate": 0}

    def init(lane: Any, data: Any) -> Any:
        traces["init"] += 1
        return bind(lane)[1].init(jax.random.key(lane[0]), data)

    def init_from(lane: Any, params: Any, data: Any) -> Any:
        traces["init"] += 1
        return bind(lane)[1].init(jax.random.key(lane[0]), data, params=params)

    def chunk(lane: Any, state: Any, data: Any) -> tuple[Any, dict[str, tuple[Array, Array]], Array]:
        traces["chunk"] += 1
        agent = bind(lane)[1]
        state, metrics = jax.lax.scan(lambda state, _: agent.step(state, data), state, length=updates_per_chunk)
        is_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(state.params)]
        return state, {name: _total(value) for name, value in metrics.items()}, jnp.all(jnp.stack(is_finite))

    def evaluate(lane: Any, state: Any, data: Any) -> Evaluation:
        traces["evaluate"] += 1
        env, agent = bind(lane)
        sizes = (experiment.eval_episodes, experiment.eval_max_steps)
        key = evaluation_key(experiment)
        if host.is_on_host(env):  # the same for all lanes, but each plays on copies of its own
            key = jax.random.wrap_key_data(jax.random.key_data(key) | (lane[0] & jnp.uint32(0)))
        return evaluate_agent(agent, as_evaluated(env), state, key, *sizes, greedy, data)

    lanes = _stack(experiment)
    num_lanes = len(experiment.lanes())
    devices = devices or jax.devices()
    is_split = experiment.shard != "lanes"
    mesh = Mesh(
        np.asarray(devices if is_split else _spread(devices, experiment.lanes_a_call)), (sharding.AXIS if is_split else AXIS,)
    )
    example = jax.tree.map(lambda x: x[0], lanes)
    agent = _checked(lambda: _agent(bind, example))
    if agent.learns_from == "data" and not experiment.data:
        raise InputError(f'algo.name {experiment.algo_name} learns from recorded data: set data, as in data = ["medium.npz"]')
    if experiment.data and agent.learns_from != "data":
        raise InputError(
            f"data: algo.name {experiment.algo_name} learns from {agent.learns_from}, not from recorded data; leave it out"
        )
    own_env = first_env if place is experiment else first_environment(experiment)
    dataset, about = load_data(experiment.data, own_env) if experiment.data else (None, {})
    recorded = (about.get("env"), about.get("env_params") or {})
    if recorded[0] is not None and (recorded != (experiment.env, experiment.env_params) or swept_params):
        about["elsewhere"] = " ".join([recorded[0], *(f"{key}={value}" for key, value in recorded[1].items())])
    swept = [key for key in experiment.sweep if key.startswith("algo.")]
    if swept:  # what an agent checks of its options it can only see where they are numbers
        for algo in {tuple((key[5:], row[key]) for key in swept) for row in experiment.lanes()}:
            _checked(lambda algo=algo: make_agent(dataclasses.replace(experiment.algo, **dict(algo)), first_env))
    for params in (
        {tuple((key, row[f"env_params.{key}"]) for key in swept_params) for row in place.lanes()} if swept_params else ()
    ):
        _checked(lambda params=params: make_env(place.env, **{**place.env_params, **dict(params)}))
    if experiment.reward_from is not None:
        if agent.learns_from != "play":
            raise InputError(
                f"reward_from: algo.name {experiment.algo_name} learns from {agent.learns_from} and is paid nothing; leave it out"
            )
        if not isinstance(first_env.observation_space, Tokens):
            raise InputError(f"reward_from: a reward model pays for tokens, and {experiment.env} has none")
        _checked(lambda: make_agent(experiment.algo, LearnedReward(first_env, lambda context, lengths: lengths)))
    updates = max(1, -(-(experiment.total_steps - agent.init_steps) // agent.env_steps))
    updates_per_chunk = max(1, -(-updates // (experiment.evals * CHUNKS_PER_EVAL)))
    num_chunks = -(-updates // updates_per_chunk)
    chunks_per_eval = -(-num_chunks // experiment.evals)
    if experiment.sweep_halving and is_split:
        raise InputError(f"sweep.halving packs whole lanes: leave it out, or shard, which is {experiment.shard!r}")
    if is_split and host.is_on_host(first_env):
        raise InputError(f"shard: the copies of {place.env} are on the host, and no device has some of a lane: leave it out")
    if experiment.sweep_halving and host.is_on_host(first_env):
        raise InputError(f"sweep.halving copies lanes to fill its program, and {place.env} on the host has no copy: leave it out")
    if experiment.sweep_halving and experiment.sweep_halving[-1] * chunks_per_eval >= num_chunks:
        raise InputError(
            f"sweep.halving: there are {-(-num_chunks // chunks_per_eval)} evaluations, and settings are dropped after any "
            f"but the last, got {list(experiment.sweep_halving)}"
        )
    rests = states = None
    if is_split:
        shared = None if dataset is None else {"dataset": dataset}
        with sharding.split_over(mesh):
            states = _checked(lambda: jax.eval_shape(lambda: jax.lax.map(lambda lane: init(lane, shared), lanes)))
        rests = sharding.of_states(states, mesh, experiment.shard)

    def lift(at_once: int) -> dict[str, Any]:
        over = functools.partial(_lift, mesh=mesh, at_once=at_once, rests=rests)
        functions = {"init": over(init), "init_from": over(init_from), "evaluate": over(evaluate)}
        return {**functions, "chunk": over(chunk, donate_argnums=(1,))}

    at_once = _at_once(experiment, mesh, agent.env_steps)
    program = Program(
        experiment=experiment,
        num_lanes=num_lanes,
        lanes=None,
        mesh=mesh,
        updates_per_chunk=updates_per_chunk,
        num_chunks=num_chunks,
        chunks_per_eval=chunks_per_eval,
        env_steps=agent.env_steps,
        init_steps=agent.init_steps,
        data=None,
        about=about,
        env=first_env,
        bind=bind,
        traces=traces,
        at_once=at_once,
        lift=lift,
        rests=rests,
        **lift(at_once),
    )
    data = None if dataset is None else program.share({"dataset": dataset})
    program = dataclasses.replace(program, lanes=program.pad(lanes), data=data)
    if is_split:  # what cannot be divided is found where it is traced
        for function in (program.chunk, program.evaluate):
            _checked(lambda function=function: jax.eval_shape(function, program.lanes, states, data))
    return program


def judge(experiment: Experiment, space: Any) -> RewardModel:
    """The network of ``reward_from``, for completions in ``space``."""
    source = experiment.reward_from
    assert source is not None
    model = dataclasses.replace(source.algo.model, lora_rank=0)  # adapters have been merged
    return reward_model.of_config(dataclasses.replace(source.algo, model=model), space)


def evaluation_key(experiment: Experiment) -> Array:
    """Key of every evaluation: apart from the seeds' keys even where the numbers agree."""
    return jax.random.fold_in(jax.random.key(experiment.eval_seed), 0xE7A1)


def evaluate_random(experiment: Experiment) -> Evaluation:
    """The random policy on the evaluation episodes (of the first setting, where environment parameters are swept)."""
    env = as_evaluated(first_environment(experiment))
    agent = random_agent(env)
    key = evaluation_key(experiment)
    sizes = (experiment.eval_episodes, experiment.eval_max_steps)
    evaluation = jax.block_until_ready(jax.jit(lambda: evaluate_agent(agent, env, (), key, *sizes, greedy=False))())
    host.raise_failure(env)
    host.close(env)
    return evaluation


def first_environment(experiment: Experiment) -> Environment:
    """That of an experiment, with the first value of each parameter that is swept.

    Raises:
      InputError: what its constructor objects to.
    """
    first = {key[11:]: values[0] for key, values in experiment.sweep.items() if key.startswith("env_params.")}
    return _checked(lambda: make_env(experiment.env, **{**experiment.env_params, **first}))


def _agent(bind: Callable[[Any], tuple[Environment, Agent]], lane: Any) -> Agent:
    """A lane's agent, made of traced values."""
    agents = []
    jax.eval_shape(lambda lane: agents.append(bind(lane)[1]), lane)
    return agents[0]


def _checked(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def _stack(experiment: Experiment) -> Any:
    """``(seeds uint32 [L], {algo field: [L]}, {environment parameter: [L]}, None)``, see `Program`."""
    rows = experiment.lanes()

    def columns(section: str) -> dict[str, Array]:
        keys = [key for key in experiment.sweep if key.startswith(section)]
        return {key[len(section) :]: jnp.asarray([row[key] for row in rows], jnp.float32) for key in keys}

    return jnp.asarray([row["seed"] for row in rows], jnp.uint32), columns("algo."), columns("env_params."), None


def _total(value: Any) -> tuple[Array, Array]:
    """``(sum, count)`` over the updates of a chunk, of a scalar metric ``[K]`` or of a pair of them."""
    if isinstance(value, tuple):
        return value[0].sum(), value[1].astype(jnp.float32).sum()
    return value.astype(jnp.float32).sum(), jnp.float32(value.shape[0])


def _spread(devices: list[Any], num_lanes: int) -> list[Any]:
    """At most as many devices as there are lanes, of each process as many as of the others if they have them.

    Raises:
      InputError: a process would have no lane.
    """
    by_process = [list(own) for _, own in itertools.groupby(devices, key=lambda device: device.process_index)]
    if num_lanes < len(by_process):
        lanes = f"{num_lanes} lane{'s' * (num_lanes > 1)}"
        raise InputError(f"{len(by_process)} processes for {lanes}: each needs one of its own, so start fewer")
    in_turn = [device for turn in itertools.zip_longest(*by_process) for device in turn if device is not None]
    chosen = set(in_turn[:num_lanes])
    return [device for device in devices if device in chosen]


def _same(x: Array) -> Array:
    return x


def _put(tree: Any, where: Any) -> Any:
    """`jax.device_put` of what every process has; on several it would send all of it around, to see that it is the same.

    Args:
      where: one `NamedSharding`, or one for each leaf.
    """
    if not hosts.joined():
        return jax.device_put(tree, where)
    if isinstance(where, NamedSharding):
        where = jax.tree.map(lambda x: where, tree)

    def put(x: Any, where: NamedSharding) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(put, tree, where)


def _pad(tree: Any, multiple: int) -> Any:
    def pad(x):
        missing = -x.shape[0] % multiple
        return jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)]) if missing else x

    return jax.tree.map(pad, tree)


IN_TURN = 2**15  # numbers in the activations of a layer above which a CPU gains nothing from batching lanes


def _at_once(experiment: Experiment, mesh: Mesh, env_steps: int) -> int:
    """How many lanes of one device run at once, if there is memory for them.

    Those that are split over all devices take turns. So do those of a transformer on a CPU, unless an update is tiny: matrices of
    several lanes are multiplied slower there than those of one, and one by one they need the memory of one.
    """
    model = getattr(experiment.algo, "model", None)
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    if experiment.shard != "lanes" or (is_cpu and model is not None and env_steps * model.width >= IN_TURN):
        return 1
    return -(-experiment.lanes_a_call // mesh.size)


def bytes_needed(compiled: Any) -> int:
    """What a compiled program takes on each device, by its own account; 0 where it has none."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def bytes_free(mesh: Mesh) -> float:
    """What each device has for a program: nine tenths of its memory, or of the host's, which its devices share."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        return 0.9 * stats["bytes_limit"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return math.inf
    return 0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(jax.local_devices())


def _lift(function: Callable[..., Any], mesh: Mesh, at_once: int, rests: Any, donate_argnums: tuple[int, ...] = ()) -> Any:
    """Jits a function of one lane over all lanes, whose last argument is shared.

    The lanes are sharded over the devices, and ``at_once`` of those of a device are mapped together; or, with ``rests``, each is
    split over all devices, see `rljax.sharding`. A single lane is not mapped, since XLA runs a batch of one slower than none.
    """

    def mapped(*args):
        own, shared = args[:-1], args[-1]
        here = jax.tree.leaves(own)[0].shape[0]
        if here == 1:
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], own), shared))
        if at_once < here:
            return jax.lax.map(lambda lane: function(*lane, shared), own, batch_size=at_once if at_once > 1 else None)
        return jax.vmap(lambda *lane: function(*lane, shared))(*own)

    names = list(inspect.signature(function).parameters)
    if rests is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        comes = tuple(rests if name == "state" else None for name in names)  # None: as what is given is
        goes = {"init": rests, "init_from": rests, "chunk": (rests, whole, whole)}.get(function.__name__, whole)

        def split(*args):
            with sharding.split_over(mesh):
                return mapped(*args)

        return jax.jit(split, in_shardings=comes, out_shardings=goes, donate_argnums=donate_argnums)
    spec, shared = PartitionSpec(AXIS), PartitionSpec()
    specs = (spec,) * (len(names) - 1) + (shared,)
    shardings = tuple(NamedSharding(mesh, s) for s in specs)
    sharded = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return jax.jit(sharded, in_shardings=shardings, out_shardings=shardings[0], donate_argnums=donate_argnums)
