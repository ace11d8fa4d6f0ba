"""The program of an experiment with what it takes from elsewhere: pretrained weights, what other runs trained, checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.agents import Agent, make_agent
from rljax.agents.base import agent_module, whole
from rljax.envs import make_env
from rljax.experiment.checkpoint import Checkpoints
from rljax.experiment.config import Experiment, InputError, load
from rljax.experiment.lanes import Program, build, first_environment, judge
from rljax.networks.transformer import merge


def of_lane(experiment: Experiment, lane: int) -> Experiment:
    """With the swept values of one lane as its own."""
    row = experiment.lanes()[lane]
    return experiment._with({key: row[key] for key in experiment.sweep})


def lane_agent(experiment: Experiment, lane: int) -> Agent:
    """The agent of one lane, with its own hyper-parameters and environment parameters."""
    single = of_lane(experiment, lane)
    return make_agent(single.algo, make_env(single.env, **single.env_params))


def load_run(path: str | Path) -> Experiment:
    """The resolved config of a run directory.

    Raises:
      InputError: no run there.
    """
    path = Path(path)
    if not (path / "config.toml").is_file():
        runs = sorted(str(p.parent) for p in path.glob("*/config.toml"))
        hint = f"; did you mean {' or '.join(runs[:3])}?" if runs else ""
        raise InputError(f"{path} is not a run directory: it has no config.toml{hint}")
    return load(path)


def load_states(path: str | Path, chunk: int | None = None) -> tuple[int, Any]:
    """``(environment steps, states of all lanes)`` of a checkpoint of a run, the last by default.

    Raises:
      InputError: there is none, or it cannot be read.
    """
    return restore(build(load_run(path)), path, chunk)[1:]


def restore(program: Program, path: str | Path, chunk: int | None = None) -> tuple[int, int, Any]:
    """``(number of the checkpoint, environment steps, states [lanes, ...])``, of the last checkpoint by default.

    Raises:
      InputError: there is none, or it cannot be read.
    """
    abstract = jax.eval_shape(program.unpad, jax.eval_shape(program.init, program.lanes, program.data))
    checkpoints = Checkpoints(Path(path) / "checkpoints")
    try:
        if chunk is not None:
            return chunk, program.steps_at(chunk), checkpoints.restore(chunk, abstract)
        restored = checkpoints.restore_latest(abstract)
    finally:
        checkpoints.close()
    if restored is None:
        raise InputError(f"{path} has no checkpoint yet")
    return restored[0], program.steps_at(restored[0]), restored[1]


def with_weights(program: Program) -> tuple[Program, Any]:
    """``(program, params)``: with pretrained weights, those of ``[model]`` path, as what all lanes share if adapters are trained
    on them, else as parameters that every lane begins with."""
    model = getattr(program.experiment.algo, "model", None)
    if model is None or not model.path:
        return program, None
    from rljax.lm import fetch, weights

    params = weights.load(fetch.locate(model.path))[1]
    if model.lora_rank:
        return dataclasses.replace(program, data=program.share({"base": params})), None
    return program, jax.tree.map(lambda x: np.broadcast_to(x, (program.num_lanes, *x.shape)), params)


def params_of(states: Any, source: Experiment, experiment: Experiment) -> Any:
    """Parameters for the lanes of ``experiment``, ``[lanes, ...]``, out of the states that ``source`` ended with: a lane gets
    those of its seed."""
    rows = np.asarray([source.seeds.index(lane["seed"]) for lane in experiment.lanes()])
    return jax.tree.map(lambda x: x[rows], states.params)


def paid(program: Program, params: Any) -> Program:
    """The program, paid by reward models of ``params [lanes, K, ...]``, or by its environment if None."""
    if params is None:
        return program
    source = program.experiment.reward_from
    assert source is not None
    model = source.algo.model
    if model.lora_rank:
        from rljax.lm import fetch, weights

        base = weights.load(fetch.locate(model.path))[1]
        params = jax.jit(jax.vmap(jax.vmap(lambda adapters: merge(model, whole(adapters, {"base": base})))))(params)
    wanted = jax.eval_shape(judge(program.experiment, program.env.observation_space).init, jax.random.key(0))
    if difference := first_difference(wanted, of_one_lane(params)):
        raise InputError(f"reward_from: {difference}, here and there: {source.name} was trained on other tokens")
    return program.paid_by(params)


def built(experiment: Experiment) -> tuple[Program, Any]:
    """`with_weights` of its program, paid by the reward model that has been trained for it, if it has one."""
    program, params = with_weights(build(experiment))
    source = experiment.reward_from
    judges = None if source is None else params_of(load_states(source.path)[1], source, experiment)
    return paid(program, judges), params


def paid_environment(experiment: Experiment) -> Any:
    """The environment of an experiment's first lane as its agent sees it: paid by its reward model, if it has one; that of a
    reward model as those see it that it pays.

    Raises:
      InputError: what the environment objects to, or a reward model that has not been trained.
    """
    source = experiment.reward_from
    if experiment.algo_name == "reward_model":
        source, player = experiment, agent_module("grpo").Config(model=experiment.algo.model)
        experiment = dataclasses.replace(experiment, reward_from=source, start_from=None, algo=player, sweep={})
    if source is None:
        return first_environment(experiment)
    if not (source.path / "config.toml").is_file():
        raise InputError(f"the reward model {source.name} has not been trained yet: `rljax run` its config first, on these seeds")
    program = build(experiment.programs()[0])
    program = paid(program, params_of(load_states(source.path)[1], source, experiment))
    return program.bind(jax.tree.map(lambda x: x[0], program.lanes))[0]


def check_params(experiment: Experiment, params: Any) -> Any:
    """Those of ``params [lanes, ...]`` that the agent begins with: a value head that it has no use for is left.

    Raises:
      InputError: they are others than it trains, with the first that differs.
    """
    agent = lane_agent(experiment, 0)
    if agent.begins_with is None:
        raise InputError(f"start_from: {experiment.algo_name} cannot start from parameters that were trained before")
    own = jax.eval_shape(agent.begins_with, jax.random.key(0))
    if isinstance(own, dict) and isinstance(params, dict) and own.keys() < params.keys():
        params = {name: params[name] for name in own}
    if difference := first_difference(own, of_one_lane(params)):
        raise InputError(f"start_from: {difference}, here and there; give both the same [model] and env_params")
    return params


def begin(program: Program, params: Any, data: Any) -> Any:
    """The first states, from parameters ``[lanes, ...]`` that were trained before, if any."""
    if params is None:
        return program.init(program.lanes, data)
    return program.init_from(program.lanes, program.pad(params), data)


def of_one_lane(params: Any) -> Any:
    """Shapes of ``params [lanes, ...]`` without that axis."""
    return jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), params)


def first_difference(here: Any, there: Any) -> str | None:
    """The first parameter that has not the same shape in both, and its shapes."""
    sides = [
        {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (here, there)
    ]
    for name in [*sides[0], *sides[1]]:
        if sides[0].get(name) != sides[1].get(name):
            return f"parameter {name} is {' and '.join(str(side.get(name, 'missing')) for side in sides)}"
    return None
