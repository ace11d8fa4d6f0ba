"""The run loop: compile once, then chunk by chunk log, evaluate and checkpoint; resume where a killed run stopped."""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import json
import math
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from rljax import extensions
from rljax.agents import Agent, make_agent
from rljax.agents.base import agent_module, whole
from rljax.envs import Box, Discrete, EnvironmentFailed, host, make_env, space_text
from rljax.envs.wrappers import as_evaluated
from rljax.experiment import artifact, data, health, hosts, pictures, report, sinks, traces
from rljax.experiment.checkpoint import Checkpoints, SaveError
from rljax.experiment.config import Experiment, InputError, elsewhere, file_digest, load
from rljax.experiment.evaluation import Evaluation
from rljax.experiment.halving import Halving
from rljax.experiment.lanes import Program, build, bytes_needed, evaluate_random, first_environment, judge
from rljax.networks.transformer import merge

Listener = Callable[[dict[str, Any]], None]
TRANSCRIPTS = 4  # episodes of each lane that are written down at each evaluation of a language model


class Stopped(Exception):
    """A run has been asked to stop, and has saved; the message says where it is."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished run produced, as arrays.

    Attributes:
      path: the run directory.
      experiment: the resolved config.
      lanes: one dict a lane: ``lane``, ``seed`` and the swept values.
      eval_steps: int64 ``[E]``, environment steps per seed at each evaluation.
      eval_returns: float64 ``[lanes, E]``, mean return of the evaluation episodes; NaN where a lane had failed or was dropped.
      states: the final `TrainState`; every leaf ``[lanes, ...]``.
      summary: what ``summary.json`` holds.
    """

    path: Path
    experiment: Experiment
    lanes: list[dict[str, Any]]
    eval_steps: np.ndarray
    eval_returns: np.ndarray
    states: Any
    summary: dict[str, Any]

    def policy(self, lane: int) -> tuple[Agent, Any]:
        """``(agent, state)`` of one lane, to act with: ``agent.act(state, None, timestep, key, True)``."""
        return lane_agent(self.experiment, lane), jax.tree.map(lambda x: x[lane], self.states)


def run(
    experiment: Experiment,
    *,
    fresh: bool = False,
    listener: Listener | None = None,
    argv: list[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    log: str | Sequence[str] = (),
    draw: bool = False,
) -> Result:
    """Trains every lane of an experiment, in its run directory; resumes what is there.

    Args:
      experiment: with traced sweeps only; `Experiment.programs` splits others.
      fresh: deletes what the run directory holds and starts over.
      listener: called with a dict at each event: ``start``, ``chunk``, ``evaluation``, ``note`` and ``end``.
      argv: recorded in ``run.json``.
      stop: asked after each chunk; where it is true, the run saves and stops. Of several processes the first is asked.
      log: where its metrics go besides, names of `rljax.experiment.sinks.SINKS`. A run that has finished is sent there too.
      draw: writes a GIF of an episode into ``samples/`` at the first, the middle and the last evaluation, of an environment that
        can be drawn. Nothing else that a run writes depends on it. What runs first is logged and drawn likewise.

    Raises:
      Stopped: ``stop`` was true before the end; the same run goes on from there.
      InputError: wrong input, or a run directory that cannot be used; one line.
      SaveError: the disk is full; the last checkpoint is valid and the run can be resumed.
      EnvironmentFailed: an environment on the host did; the last checkpoint is valid here too.
    """
    say = listener or (lambda event: None)
    path = experiment.path
    log = hosts.lead(lambda: sinks.check(log))
    first = functools.partial(run, listener=listener, argv=argv, stop=stop, log=log, draw=draw)

    def found() -> dict[str, Any]:
        """What ``run.json`` says, from when the directory is held."""
        held.enter_context(_locked(path, fresh))
        info = _read_json(path / "run.json") if (path / "run.json").exists() else {}
        changed = [name for name, seen in info.get("files", {}).items() if (now := _digest(name)) and now != seen]
        if changed:
            raise InputError(
                f"{path}: {changed[0]} has changed since this run began: --fresh starts over, and loses what it holds"
            )
        return info

    with contextlib.ExitStack() as held:
        if hosts.lead(lambda: str(path)) != str(path):
            raise InputError(f"process {hosts.me()} has another config than process 0, or another --out")
        info = hosts.lead(found)
        logs = held.enter_context(
            sinks.Sinks(experiment, log if hosts.leads() else (), lambda text: say({"event": "note", "text": text}))
        )
        if info.get("status") == "finished":
            say({"event": "note", "text": f"finished already: {path} (--fresh starts over)"})
            if log:
                logs.begin(info.get("id", "0"), report.read_run(path).rows)
            return result(path)

        def start() -> Any:
            """Parameters to begin with, of all lanes, or None: trains what ``start_from`` names, if that has not been done."""
            source = experiment.start_from
            if source is None:
                return None
            program = build(source)
            _check_params(experiment, jax.eval_shape(program.init, program.lanes, None).params)
            say({"event": "note", "text": f"first {source.name}, which this starts from"})
            states = _trained("start_from", first(source))
            return _check_params(experiment, _params_of(states, source, experiment))

        def pay() -> Any:
            """Parameters of the reward models, of all lanes, or None: trains what ``reward_from`` names, if need be."""
            source = experiment.reward_from
            if source is None:
                return None
            say({"event": "note", "text": f"first {source.name}, which pays"})
            return _params_of(_trained("reward_from", first(source)), source, experiment)

        try:
            return _train(experiment, path, info, say, argv or sys.argv, start, pay, stop, logs, draw)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SaveError(f"cannot write to {path}: {error.strerror}; its last checkpoint stays valid") from error
            raise
        except EnvironmentFailed as error:
            is_kept = any((path / "checkpoints").glob("[0-9]*"))
            kept = "the same command goes on from its last checkpoint" if is_kept else "it has no checkpoint yet"
            raise EnvironmentFailed(f"{error}; {path}: {kept}") from error


def resume(path: str | Path, **kwargs: Any) -> Result:
    """`run` on the config of an existing run directory."""
    return run(load_run(path), **kwargs)


def _trained(key: str, finished: Result) -> Any:
    """The states of what ran first.

    Raises:
      InputError: a lane of it has failed.
    """
    failed = [str(lane["seed"]) for setting in finished.summary["settings"] for lane in setting["failed"]]
    if failed:
        seeds = f"seed{'s' * (len(failed) > 1)} {', '.join(failed)}"
        raise InputError(f"{key}: {finished.path}: {seeds} failed there, as its report says; change it, or leave the seeds out")
    return finished.states


def _params_of(states: Any, source: Experiment, experiment: Experiment) -> Any:
    """Parameters for the lanes of ``experiment``, ``[lanes, ...]``, out of the states that ``source`` ended with: a lane gets
    those of its seed."""
    rows = np.asarray([source.seeds.index(lane["seed"]) for lane in experiment.lanes()])
    return jax.tree.map(lambda x: x[rows], states.params)


def _with_weights(program: Program) -> tuple[Program, Any]:
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


def _paid(program: Program, params: Any) -> Program:
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
    if difference := _difference(wanted, _of_one_lane(params)):
        raise InputError(f"reward_from: {difference}, here and there: {source.name} was trained on other tokens")
    return program.paid_by(params)


def _built(experiment: Experiment) -> tuple[Program, Any]:
    """`_with_weights` of its program, paid by the reward model that has been trained for it, if it has one."""
    program, params = _with_weights(build(experiment))
    source = experiment.reward_from
    judges = None if source is None else _params_of(load_states(source.path)[1], source, experiment)
    return _paid(program, judges), params


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
    program = _paid(program, _params_of(load_states(source.path)[1], source, experiment))
    return program.bind(jax.tree.map(lambda x: x[0], program.lanes))[0]


def _check_params(experiment: Experiment, params: Any) -> Any:
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
    if difference := _difference(own, _of_one_lane(params)):
        raise InputError(f"start_from: {difference}, here and there; give both the same [model] and env_params")
    return params


def _of_one_lane(params: Any) -> Any:
    """Shapes of ``params [lanes, ...]`` without that axis."""
    return jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), params)


def _difference(here: Any, there: Any) -> str | None:
    """The first parameter that has not the same shape in both, and its shapes."""
    sides = [
        {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (here, there)
    ]
    for name in [*sides[0], *sides[1]]:
        if sides[0].get(name) != sides[1].get(name):
            return f"parameter {name} is {' and '.join(str(side.get(name, 'missing')) for side in sides)}"
    return None


def _begin(program: Program, params: Any, data: Any) -> Any:
    """The first states, from parameters ``[lanes, ...]`` that were trained before, if any."""
    if params is None:
        return program.init(program.lanes, data)
    return program.init_from(program.lanes, program.pad(params), data)


def _train(
    experiment: Experiment,
    path: Path,
    info: dict[str, Any],
    say: Listener,
    argv: list[str],
    start: Callable[[], Any],
    pay: Callable[[], Any],
    stop: Callable[[], bool],
    logs: sinks.Sinks,
    draw: bool,
) -> Result:
    clock = time.perf_counter
    began = clock()
    program, pretrained = _with_weights(build(experiment))
    built = clock()
    judges = pay()
    began += clock() - built  # what runs first has a time of its own
    program = _paid(program, judges)

    def open_directory() -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(experiment.to_toml())

    hosts.lead(open_directory)
    checkpoints = Checkpoints(path / "checkpoints")
    abstract = jax.eval_shape(program.init, program.lanes, program.data)
    restored = checkpoints.restore_latest(jax.eval_shape(program.unpad, abstract))
    before = clock()
    params = start() if restored is None else None
    began += clock() - before

    compile_began = clock()
    halving = Halving(program)
    at_once = program.at_once
    program, compiled = program.compiled()
    if program.at_once < at_once:
        say({"event": "note", "text": f"{at_once} lanes at once do not fit into a device's memory: {program.at_once} at once do"})
    chunk_program = halving.of_all(compiled)
    evaluate_program = halving.of_all(program.evaluate.lower(*program.example(), program.data).compile())
    hosts.meet()
    if restored is None:
        done, states = 0, _begin(program, pretrained if params is None else params, program.data)
    else:
        done, states, notes = restored
        states = program.pad(states)
        hosts.lead(lambda: checkpoints.drop_after(done))
        for note in notes:
            say({"event": "note", "text": f"{note}; resuming from checkpoint {done}, the newest that can be"})
    baseline = info.get("random") or hosts.lead(lambda: _random_baseline(experiment))
    jax.block_until_ready(states)
    host.raise_failure(program.env)
    compile_seconds = clock() - compile_began

    steps_asked, steps_done = experiment.total_steps, program.steps_at(program.num_chunks)
    earlier = {key: info.get(key, 0.0) for key in ("wall_seconds", "compile_seconds", "train_seconds")} if done else {}
    info = {
        "id": info.get("id") or secrets.token_hex(4),
        **provenance(experiment, argv),
        "started": info.get("started", _now()) if done else _now(),
        "status": "running",
        "steps_asked": steps_asked,
        "steps_done": program.steps_at(done),
        "lanes": experiment.lanes(),
        "random": baseline,
        "files": {str(name): seen for name in experiment.env_params.values() if (seen := _digest(name))},
        "data": program.about,
        "failed": [],
        "dropped": [],
        "warnings": info.get("warnings", []) if done else [],
        **earlier,
    }
    _write_json(path / "run.json", info)
    steps = [program.steps_at(chunk) for chunk in range(done + 1)] if restored else []
    metrics = _Metrics(path / "metrics.jsonl", experiment.lanes(), steps, experiment.lanes_a_call, logs)
    halving.drop(metrics.rows)
    say({"event": "start", "path": path, "experiment": experiment, "program": program, "resumed_at": program.steps_at(done)})
    logs.begin(info["id"], metrics.rows)
    if steps_done != steps_asked:
        text = f"total_steps {steps_asked:,} is rounded up to {steps_done:,}: {program.env_steps:,} per update, "
        say({"event": "note", "text": text + f"updates in chunks of {program.updates_per_chunk}"})

    space, model = program.env.action_space, getattr(experiment.algo, "model", None)
    action_size = math.prod(space.shape) if isinstance(space, Box) else 0
    dtype = "float32" if model is None else model.dtype

    def warn(after: int) -> None:
        """Says what the rows past ``after`` give cause for, and writes it down before: a killed run does not repeat it."""
        said = {(warning["name"], lane) for warning in info["warnings"] for lane in warning["lanes"]}
        found = [
            {**warning._asdict(), "lanes": list(warning.lanes)}
            for warning in health.warnings(metrics.rows, action_size, dtype, said, after)
        ]
        if found:
            info["warnings"] = sorted([*info["warnings"], *found], key=lambda warning: warning["step"])
            _write_json(path / "run.json", info)
        for warning in found:
            say({"event": "note", "text": f"warning: {health.sentence(warning, program.num_lanes)}"})

    warn(after=-1)  # of rows that were kept, what a kill left unsaid
    per_lane = program.updates_per_chunk * program.env_steps
    train_seconds, saved_at = earlier.get("train_seconds", 0.0), clock()

    hosts.meet()
    transcribe = program.transcriber(TRANSCRIPTS, greedy=False)

    def keep_transcripts() -> None:
        if transcribe is None:
            return
        transcript = transcribe(states, experiment.eval_seed)
        step = program.steps_at(done)
        head = _trace_head(path, experiment, done, step, TRANSCRIPTS, experiment.eval_seed, False)
        if hosts.leads():
            episodes = traces.rows(transcript, program.env, experiment.lanes(), step)
            traces.write(path / "samples" / f"step-{step:012d}.jsonl", head, episodes)

    camera = _camera(program) if draw else None
    evaluated = [chunk for chunk in range(program.num_chunks + 1) if chunk == 0 or program.evaluates_at(chunk)]
    pictured = {evaluated[0], evaluated[len(evaluated) // 2], evaluated[-1]}

    def keep_picture() -> None:
        lost = {failure["lane"] for failure in metrics.failed}
        lane = next((lane for lane in halving.left if lane not in lost), None)
        if camera is None or lane is None or done not in pictured:
            return
        step = program.steps_at(done)
        try:
            episodes = camera.play(states, lane)
            if hosts.leads():
                file = path / "samples" / f"step-{step:012d}.gif"
                pictures.save(file, camera.painter(lane), episodes, {"step": step, **experiment.lanes()[lane]})
        except Exception as error:  # a user's own drawing may fail in any way, and training goes on
            say({"event": "note", "text": f"no picture of step {step:,}: {(str(error).splitlines() or [repr(error)])[0]}"})

    def decide() -> tuple[bool, bool]:
        """Whether to save now, and to stop after that."""
        is_last = done == program.num_chunks
        stops = not is_last and stop()
        return is_last or stops or clock() - saved_at >= experiment.checkpoint_seconds, stops

    def account(status: str) -> None:
        info.update(
            status=status,
            steps_done=program.steps_at(done),
            failed=metrics.failed,
            dropped=halving.dropped,
            wall_seconds=earlier.get("wall_seconds", 0.0) + clock() - began,
            compile_seconds=earlier.get("compile_seconds", 0.0) + compile_seconds,
            train_seconds=train_seconds,
            steps_per_second=per_lane * halving.lane_chunks(done) / train_seconds if train_seconds else None,
        )
        _write_json(path / "run.json", info)

    try:
        if restored is None:
            first = program.fetch(evaluate_program(program.lanes, states, program.data))
            host.raise_failure(program.env)
            metrics.write(program.steps_at(0), None, None, first, halving.left)
            keep_transcripts()
            keep_picture()
        while done < program.num_chunks:
            chunk_began = clock()
            states, totals, finite = chunk_program(program.lanes, states, program.data)
            totals, finite = program.fetch((totals, finite))
            host.raise_failure(program.env)
            seconds = clock() - chunk_began
            train_seconds += seconds
            done += 1
            evaluation, left = None, halving.left
            if program.evaluates_at(done):
                evaluation = program.fetch(evaluate_program(program.lanes, states, program.data))
                host.raise_failure(program.env)
                keep_transcripts()
            for failure in metrics.write(program.steps_at(done), totals, finite, evaluation, left):
                say(
                    {
                        "event": "note",
                        "text": f"lane {failure['lane']} (seed {failure['seed']}) failed at step "
                        f"{failure['step']:,}: {failure['reason']}; the other lanes go on",
                    }
                )
            keep_picture()
            warn(after=program.steps_at(done - 1))
            if found := halving.drop(metrics.rows) if evaluation is not None else []:
                dropped = "; ".join(report.setting_label(drop["values"]) for drop in found)
                say({"event": "note", "text": f"dropped after evaluation {found[0]['evaluation']}: {dropped}"})
            saves, stops = hosts.lead(decide)
            if saves:
                metrics.flush()
                checkpoints.save(done, program.fetch(states))
                saved_at = clock()
                account("running")
            say(
                {
                    "event": "chunk",
                    "step": program.steps_at(done),
                    "total": steps_done,
                    "steps_per_second": per_lane * len(left) / seconds,
                    "totals": totals,
                    "evaluation": evaluation,
                    "failed": metrics.failed,
                    "left": left,
                }
            )
            if stops:
                raise Stopped(f"saved at step {program.steps_at(done):,} of {steps_done:,} in {path}")
    finally:
        metrics.close()
        checkpoints.close()
        host.close(program.env)

    def finish() -> None:
        info["finished"] = _now()
        account("finished")
        summary = report.write_summary(path)
        report.write_curve(path)
        report.write_report(path)
        say({"event": "end", "path": path, "summary": summary})

    hosts.lead(finish)
    return result(path, program.fetch(states))


def _camera(program: Program) -> pictures.Camera | None:
    """None where the environment cannot be drawn."""
    try:
        return pictures.Camera(program)
    except ValueError:
        return None


def _trace_head(
    path: Path,
    experiment: Experiment,
    checkpoint: int,
    step: int,
    episodes: int,
    seed: int,
    greedy: bool,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "run": str(path),
        "config_hash": experiment.hash,
        "checkpoint": checkpoint,
        "step": step,
        "episodes": episodes,
        "seed": seed,
        "greedy": greedy,
        "overrides": overrides or {},
    }


def trace(
    path: str | Path,
    episodes: int,
    seed: int | None = None,
    greedy: bool = False,
    checkpoint: int | None = None,
    overrides: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``(head, episodes)`` of a new trace (`rljax.experiment.traces`): what each lane of a run says, at its last checkpoint.

    Args:
      episodes: of each lane.
      seed: of the prompts and draws; the run's ``eval_seed`` by default.
      greedy: the likeliest token each time.
      checkpoint: another than the last, by its number.
      overrides: another environment than the run's, see `evaluate`.

    Raises:
      InputError: the run's agent is no language model, the checkpoint is gone, or it cannot play in that environment.
    """
    program, (number, step), transcript, seed = _say(path, episodes, 1, seed, greedy, checkpoint, overrides)
    experiment = program.experiment
    head = _trace_head(Path(path), experiment, number, step, episodes, seed, greedy, overrides)
    return head, traces.rows(transcript, program.env, experiment.lanes(), step)


def sample_answers(
    path: str | Path, prompts: int, samples: int, seed: int | None = None, overrides: dict[str, Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """``(rewards, right)``, float64 and bool ``[lanes, prompts, samples]``: several answers of the last policy to each prompt.

    An answer is right where the first component of its reward is 1. An invalid reward is NaN, and not right. ``overrides`` are
    those of `evaluate`.

    Raises:
      InputError: see `trace`.
    """
    program, _, transcript, _ = _say(path, prompts, samples, seed, False, None, overrides)
    shape = (program.num_lanes, prompts, samples)
    rewards = np.where(transcript.valid, transcript.reward, np.nan).astype(np.float64).reshape(shape)
    first = transcript.components[program.env.task.components[0]].reshape(shape)
    return rewards, np.asarray((first >= 1.0) & transcript.valid.reshape(shape))


def _say(
    path: str | Path,
    episodes: int,
    samples: int,
    seed: int | None,
    greedy: bool,
    checkpoint: int | None,
    overrides: dict[str, Any] | None,
) -> tuple[Program, tuple[int, int], traces.Transcript, int]:
    """``(program, number and environment steps of the checkpoint, numpy Transcript [lanes, episodes * samples], seed)``."""
    experiment = load_run(path)
    program, number, steps, states = _reopen(experiment, path, checkpoint, overrides)
    transcribe = program.transcriber(episodes, greedy, samples)
    if transcribe is None:
        raise InputError(f"{path}: {experiment.algo_name} on {experiment.env} says nothing: it is no language model")
    seed = experiment.eval_seed if seed is None else seed
    return program, (number, steps), transcribe(program.pad(states), seed), seed


def _reopen(
    experiment: Experiment,
    path: str | Path,
    checkpoint: int | None = None,
    overrides: dict[str, Any] | None = None,
    greedy: bool = True,
    paid: bool = True,
) -> tuple[Program, int, int, Any]:
    """``(program, number of the checkpoint, environment steps, states)`` of a run, to evaluate it: in its own environment, or in
    what ``overrides`` make of it. Evaluations play for gold, and do not ask for it to be ``paid`` by its reward model.

    Raises:
      InputError: see `load_states` and `elsewhere`; the agent cannot play there.
    """
    own, _ = _built(experiment) if paid else _with_weights(build(experiment))
    number, steps, states = _restore(own, path, checkpoint)
    if not overrides and greedy:
        return own, number, steps, states
    if overrides and lane_agent(experiment, 0).measure is not None:
        raise InputError(f"{path}: a {experiment.algo_name} is measured by itself, and plays in no other environment")
    place = elsewhere(experiment, overrides or {})
    program = dataclasses.replace(build(experiment, place=place, greedy=greedy), data=own.data)
    here, there = (_of_one_lane(jax.eval_shape(p.init, p.lanes, p.data).params) for p in (program, own))
    actions = [space_text(p.env.action_space) for p in (program, own)]
    if actions[0] != actions[1]:
        raise InputError(f"env {place.env}: its actions are {actions[0]}, and those of the run {actions[1]}")
    if difference := _difference(here, there):
        raise InputError(f"env {place.env}: {difference}, there and in the run: its observations do not fit")
    return program, number, steps, states


def replay(file: str | Path) -> tuple[int, list[str]]:
    """Plays the episodes of a trace again: ``(how many there are, what differs)``, a line for each that is not the same token for
    token.

    Raises:
      InputError: it is no trace, or its run or checkpoint is gone.
    """
    try:
        head, before = traces.read(file)
    except ValueError as error:
        raise InputError(str(error)) from error
    _, again = trace(head["run"], head["episodes"], head["seed"], head["greedy"], head["checkpoint"], head.get("overrides"))
    return len(before), traces.differences(before, again)


def _random_baseline(experiment: Experiment) -> dict[str, Any]:
    if lane_agent(experiment, 0).measure is not None:  # evaluations report no returns
        return {"return": None, "std": None, "episodes": 0}
    returns = np.asarray(evaluate_random(experiment).returns, np.float64)
    returns = returns[~np.isnan(returns)]  # without those whose reward could not be had
    mean, std = (returns.mean(), returns.std()) if returns.size else (None, None)
    return {"return": mean, "std": std, "episodes": len(returns)}


def result(path: str | Path, states: Any = None) -> Result:
    """The `Result` of a finished run directory; reads the states from its last checkpoint where they are not given."""
    experiment, path = load_run(path), Path(path)
    try:
        run_data = report.read_run(path)
    except (ValueError, FileNotFoundError) as error:
        raise InputError(f"{error}; --fresh starts over") from error
    rows = [row for row in run_data.rows if "eval/return" in row]
    steps = sorted({row["step"] for row in rows})
    lanes = experiment.lanes()
    returns = np.full((len(lanes), len(steps)), np.nan)
    for row in rows:
        if row["eval/return"] is not None:
            returns[row["lane"], steps.index(row["step"])] = row["eval/return"]
    summary = report.summarize(path)
    if states is None:
        states = load_states(path)[1]
    return Result(path, experiment, lanes, np.asarray(steps, np.int64), returns, states, summary)


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
    return _restore(build(load_run(path)), path, chunk)[1:]


def _restore(program: Program, path: str | Path, chunk: int | None = None) -> tuple[int, int, Any]:
    """``(number of the checkpoint, environment steps, states)``."""
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


def lane_agent(experiment: Experiment, lane: int) -> Agent:
    """The agent of one lane, with its own hyper-parameters and environment parameters."""
    row = experiment.lanes()[lane]
    single = experiment._with({key: row[key] for key in experiment.sweep})
    return make_agent(single.algo, make_env(single.env, **single.env_params))


def evaluate(
    path: str | Path,
    episodes: int | None = None,
    seed: int | None = None,
    overrides: dict[str, Any] | None = None,
    greedy: bool = True,
) -> tuple[int, Evaluation]:
    """Evaluates the last checkpoint of a run; by default the very episodes of its last logged evaluation.

    Args:
      path: of the run directory.
      episodes: of each lane.
      seed: of the episodes.
      overrides: another environment to play in, ``{"env": "tokens/reversing", "env_params.length": 8}``. Without ``env`` it is
        the run's with other parameters; one of another name begins with its own defaults.
      greedy: else actions are drawn, as in training.

    Returns:
      ``(environment steps, Evaluation [lanes, episodes])``.

    Raises:
      InputError: no checkpoint, or an environment that the run's policies cannot play in.
    """
    experiment = load_run(path)
    changes = {"eval_episodes": episodes, "eval_seed": seed}
    experiment = dataclasses.replace(experiment, **{k: v for k, v in changes.items() if v is not None})
    program, _, steps, states = _reopen(experiment, path, overrides=overrides, greedy=greedy, paid=False)
    evaluation = program.fetch(program.evaluate(program.lanes, program.pad(states), program.data))
    host.raise_failure(program.env)
    host.close(program.env)
    return steps, evaluation


def picture(
    path: str | Path,
    lane: int | None = None,
    episodes: int = 1,
    seed: int | None = None,
    overrides: dict[str, Any] | None = None,
    greedy: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Plays episodes with the last policy of one lane, by default the first of its evaluation, and writes them as a GIF.

    Args:
      path: of the run directory.
      lane: whose policy; by default the one with the highest return at its last evaluation.
      episodes: one after the other.
      seed: of the episodes.
      overrides, greedy: see `evaluate`.

    Returns:
      ``(samples/eval_lane<lane>.gif of the run, what it shows)``: ``step``, ``lane``, ``seed``, the swept values, and
      ``returns``, ``lengths`` and ``finished`` of the episodes.

    Raises:
      InputError: see `evaluate`; no such lane; an environment that cannot be drawn.
    """
    experiment = load_run(path)
    lanes = experiment.lanes()
    if lane is None:
        lane = _best_lane(path)
    if not 0 <= lane < len(lanes):
        raise InputError(f"--lane: {path} has lanes 0 to {len(lanes) - 1}, got {lane}")
    if seed is not None:
        experiment = dataclasses.replace(experiment, eval_seed=seed)
    program, _, steps, states = _reopen(experiment, path, overrides=overrides, greedy=greedy, paid=False)
    about = {"step": steps, **lanes[lane], **{key: str(value) for key, value in (overrides or {}).items()}}
    file = Path(path) / "samples" / f"eval_lane{lane}.gif"
    try:
        camera = pictures.Camera(program, episodes, greedy)
        return file, pictures.save(file, camera.painter(lane), camera.play(program.pad(states), lane), about)
    except ValueError as error:
        raise InputError(str(error)) from error


def _best_lane(path: str | Path) -> int:
    """Of the settings that go on; the first where no return is known."""
    settings = [setting for setting in report.summarize(path)["settings"] if setting["dropped"] is None]
    seeds = [seed for setting in settings for seed in setting["seeds"]]
    return max(seeds, key=lambda seed: seed["return"])["lane"] if seeds else 0


def train(experiment: Experiment) -> tuple[Any, dict[str, Array], Evaluation]:
    """The whole training of all lanes as one program, with no host in the loop, no files and no checkpoints.

    Returns:
      ``(states, {metric: [lanes, chunks]}, Evaluation [lanes, episodes] of the final policies)``.
    """
    if experiment.sweep_halving:
        raise InputError("sweep.halving: `train` has no host in its loop that could drop a setting; `run` has")
    program, params = _with_weights(build(experiment))
    if experiment.reward_from is not None:
        program = _paid(program, _params_of(train(experiment.reward_from)[0], experiment.reward_from, experiment))
    if experiment.start_from is not None:
        params = _check_params(experiment, _params_of(train(experiment.start_from)[0], experiment.start_from, experiment))

    @jax.jit
    def whole(lanes, data):
        def chunk(states, _):
            states, totals, _ = program.chunk(lanes, states, data)
            return states, jax.tree.map(lambda pair: pair[0] / pair[1], totals, is_leaf=lambda x: isinstance(x, tuple))

        states, metrics = jax.lax.scan(chunk, _begin(program, params, data), length=program.num_chunks)
        return states, jax.tree.map(lambda x: x.swapaxes(0, 1), metrics), program.evaluate(lanes, states, data)

    trained = program.unpad(jax.block_until_ready(whole(program.lanes, program.data)))
    host.raise_failure(program.env)
    return trained


def record(
    path: str | Path,
    steps: int,
    *,
    epsilon: float = 0.0,
    lane: int = 0,
    expert: str | Path | None = None,
    seed: int = 0,
    num_envs: int = 16,
) -> data.Recording:
    """Plays the last policy of a run and keeps every step, for offline agents.

    Args:
      steps: of the environment, rounded up to as many for each of ``num_envs`` copies. The last episode of each is cut there.
      epsilon: probability of a uniformly random action in its place; 1: the random policy.
      lane: whose policy.
      expert: a run whose final return is the upper anchor of normalised scores; the random policy's is the lower one.
      seed: of the episodes.

    Raises:
      InputError: no such lane, a probability outside of 0 to 1, no run, a language model, or an environment whose spaces are no
        single arrays.
    """
    experiment = load_run(path)
    lanes = experiment.lanes()
    if not 0 <= lane < len(lanes):
        raise InputError(f"--lane: {path} has lanes 0 to {len(lanes) - 1}, got {lane}")
    if not 0 <= epsilon <= 1:
        raise InputError(f"--epsilon must be 0 to 1, got {epsilon}")
    if steps < 1 or num_envs < 1:
        raise InputError(f"--steps must be 1 or more, got {steps}")
    _, states = load_states(path)
    single = experiment._with({key: lanes[lane][key] for key in experiment.sweep})
    env = as_evaluated(make_env(single.env, **single.env_params))
    if not all(isinstance(space, Box | Discrete) for space in (env.observation_space, env.action_space)):
        raise InputError(f"{path}: data sets are of Box and Discrete spaces, and {single.env} has others")
    state = jax.tree.map(lambda x: x[lane], states)
    arrays = data.play(lane_agent(experiment, lane), state, env, jax.random.key(seed), steps, num_envs, epsilon)
    host.raise_failure(env)
    host.close(env)
    about = {"env": single.env, "env_params": single.env_params, "source": f"{experiment.name}/{experiment.hash}"}
    about |= {"epsilon": epsilon, "random_return": result(path, states=()).summary["random"]["return"]}
    if expert is not None:
        other = load_run(expert)
        if other.env != experiment.env:
            raise InputError(f"--expert: {expert} is of {other.env}, and {path} of {experiment.env}")
        about["expert_return"] = float(np.nanmean(result(expert, states=()).eval_returns[:, -1]))
    return data.Recording(arrays, about)


def export(path: str | Path, lane: int, target: str | Path) -> Path:
    """Writes what one lane has learnt, as of its last checkpoint, so that it can be used without rljax, with the card of a model.

    A language model becomes a Hugging Face directory, which transformers and vLLM load; adapters are merged into the weights. Any
    other policy becomes a folder that jax alone can load, see `rljax.exported`; it is timed once it is written.

    Raises:
      InputError: the run has learnt no policy, the lane has failed or there is none, there is something at ``target`` already, or
        it cannot be written.
    """
    experiment, target = load_run(path), Path(target)
    lanes = experiment.lanes()
    if not 0 <= lane < len(lanes):
        raise InputError(f"--lane must be from 0 to {len(lanes) - 1}, got {lane}")
    try:
        files = report.read_run(path)
    except (FileNotFoundError, ValueError) as error:
        raise InputError(str(error)) from error
    if failed := {entry["lane"]: entry for entry in files.info.get("failed") or []}.get(lane):
        raise InputError(f"--lane: lane {lane} of {path} has failed at step {failed['step']:,}: {failed['reason']}; name another")
    agent = lane_agent(experiment, lane)
    if agent.measure is not None:
        raise InputError(f"{path}: what a {experiment.algo_name} has learnt is no policy, and no language model that speaks")
    with artifact.appearing(target) as folder:
        program, _ = _with_weights(build(experiment))
        _, step, states = _restore(program, path)
        state = jax.tree.map(lambda x: x[lane], states)
        dropped = [entry["step"] for entry in files.info.get("dropped") or [] if lane in entry["lanes"]]
        after = f"after {(*dropped, step)[0]:,} environment steps"
        try:
            if agent.policy is not None:
                _write_language_model(folder, program, state)
                text = artifact.language_model_card(files, lane, after, experiment)
            else:
                single = experiment._with({key: lanes[lane][key] for key in experiment.sweep})
                env = as_evaluated(make_env(single.env, **single.env_params))
                about = {"env": single.env, "env_params": single.env_params, "agent": single.algo_name, "run": experiment.hash}
                artifact.write_policy(
                    folder, agent, state, env, {**about, "lane": lane, "seed": lanes[lane]["seed"], "step": step}
                )
                artifact.time_policy(folder)
                text = artifact.policy_card(files, lane, after, _read_json(folder / "policy.json"))
        except ValueError as error:
            raise InputError(f"{path} cannot be exported: {error}") from error
        (folder / "README.md").write_text(text, encoding="utf-8")
    return target


def _write_language_model(folder: Path, program: Program, state: Any) -> None:
    """Writes a Hugging Face directory."""
    from rljax.lm import weights

    model = program.experiment.algo.model
    params = jax.tree.map(np.asarray, state.params)
    if program.data is not None:
        params = jax.tree.map(np.asarray, merge(model, whole(params, program.data)))
    params.pop("value", None)
    model = dataclasses.replace(model, vocab=params["embed"].shape[0], kv_heads=model.groups, head_size=model.size)
    weights.save(folder, model, params, program.env.tokenizer.files)


def plan(experiment: Experiment, probe: bool = False) -> dict[str, Any]:
    """What a run would be, without training: sizes, and memory predicted by the compiled program; with ``probe`` the seconds of a
    chunk, an evaluation and the whole, from a chunk or two and an evaluation that are run, and forgotten."""
    is_paid = experiment.reward_from is not None and is_finished(experiment.reward_from)
    program, pretrained = _built(experiment) if is_paid else _with_weights(build(experiment))
    halving = Halving(program)
    abstract = jax.eval_shape(program.init, program.lanes, program.data)
    began = time.perf_counter()
    program, compiled = program.compiled()
    seconds = time.perf_counter() - began
    state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract))
    total_steps = program.steps_at(program.num_chunks)
    lanes = halving.planned()
    evaluated = [program.num_lanes, *(n for chunk, n in enumerate(lanes, 1) if program.evaluates_at(chunk))]
    num_evals = len(evaluated)
    measured: dict[str, Any] = {}
    if probe:
        began = time.perf_counter()
        chunk = halving.of_all(compiled)
        evaluation = halving.of_all(program.evaluate.lower(*program.example(), program.data).compile())
        states = jax.block_until_ready(_begin(program, pretrained, program.data))
        starting = seconds + time.perf_counter() - began
        evaluation_seconds, _ = _timed(lambda _: evaluation(program.lanes, states, program.data), None)
        chunk_seconds, _ = _timed(lambda states: chunk(program.lanes, states, program.data)[0], states)
        # Of a halving, later chunks take fewer calls.
        chunks, evaluations = (sum(map(halving.calls, of)) / halving.calls(program.num_lanes) for of in (lanes, evaluated))
        measured = {"chunks": program.num_chunks, "chunk_seconds": chunk_seconds, "evaluation_seconds": evaluation_seconds}
        measured["wall_seconds"] = starting + chunks * chunk_seconds + evaluations * evaluation_seconds
        measured["start_seconds"] = starting
    return {
        **measured,
        "path": str(experiment.path),
        "lanes": program.num_lanes,
        "devices": program.mesh.size,
        "env_steps_per_update": program.env_steps,
        "updates": program.num_chunks * program.updates_per_chunk,
        "updates_per_chunk": program.updates_per_chunk,
        "steps_per_seed": total_steps,
        "steps_all_lanes": program.init_steps * program.num_lanes + program.updates_per_chunk * program.env_steps * sum(lanes),
        "evaluations": num_evals,
        "eval_episodes_all_lanes": sum(evaluated) * experiment.eval_episodes,
        "state_bytes": state_bytes,
        "device_bytes": bytes_needed(compiled) or None,
        "lanes_at_once": program.at_once,
        "compile_seconds": seconds,
        "first": [
            f"{source.name}, {source.total_steps:,} steps a seed; {'done' if is_finished(source) else 'not done yet'}"
            for source in (experiment.start_from, experiment.reward_from)
            if source is not None
        ],
    }


def _timed(function: Callable[[Any], Any], value: Any) -> tuple[float, Any]:
    """Seconds of ``function``, and what it returns: of a second call on that, unless the first was long enough to be no start."""
    for _ in range(2):
        began = time.perf_counter()
        value = jax.block_until_ready(function(value))
        seconds = time.perf_counter() - began
        if seconds > 10:
            break
    return seconds, value


def is_finished(experiment: Experiment) -> bool:
    """Whether all of it has been trained, in its run directory."""
    file = experiment.path / "run.json"
    return file.is_file() and _read_json(file).get("status") == "finished"


class _Metrics:
    """Appends rows to ``metrics.jsonl`` and to sinks; on resume first drops the rows past the checkpoint. ``rows`` are those of
    the file.

    Of several processes the first alone writes them.
    """

    def __init__(self, path: Path, lanes: list[dict[str, Any]], steps: list[int], fewest: int, logs: sinks.Sinks):
        """
        Args:
          steps: those up to the checkpoint, each of which has a row of ``fewest`` lanes or more; none where the run begins.
          logs: where the rows go besides.

        Raises:
          InputError: rows of one of them are not there. They were on the disk before the checkpoint, so the file was damaged.
        """
        self._lanes, self._logs = lanes, logs
        self.failed: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self._regret = dict.fromkeys(range(len(lanes)), 0.0)  # of each lane, what its decisions have cost so far
        kept, counts, damaged = [], dict.fromkeys(steps, 0), ""
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
            try:
                row = json.loads(line)
                stays = {row["lane"], row["seed"]} and row["step"] in counts
            except (ValueError, TypeError, KeyError):
                damaged = damaged or f" (line {number} cannot be read)"  # or was cut short by a kill, past the checkpoint
                continue
            if stays:
                kept.append(line)
                counts[row["step"]] += 1
                self.rows.append(row)
                if report.REGRET in row:
                    self._regret[row["lane"]] = math.nan if row[report.REGRET] is None else row[report.REGRET]
                self._note_failure(row)
        if missing := [step for step, count in counts.items() if count < fewest]:
            raise InputError(f"{path}: rows of step {missing[0]:,} are missing{damaged}; --fresh starts over")
        if hosts.leads():
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(b"".join(line + b"\n" for line in kept))
            os.replace(temporary, path)
        self._file = (path if hosts.leads() else Path(os.devnull)).open("a")

    def write(
        self,
        step: int,
        totals: dict[str, Any] | None,
        finite: np.ndarray | None,
        evaluation: Evaluation | None,
        left: list[int],
    ) -> list[dict[str, Any]]:
        """One row for each of the lanes ``left``; returns those that failed in this chunk."""
        new_failures, before = [], len(self.rows)
        for i, lane in ((i, self._lanes[i]) for i in left):
            row: dict[str, Any] = {"step": step, **lane}
            if totals is not None and finite is not None:
                row |= _finalize({name: (s[i], n[i]) for name, (s, n) in totals.items()})
                if "regret" in totals:
                    self._regret[i] += float(totals["regret"][0][i])
                    row[report.REGRET] = self._regret[i]
                row["finite"] = bool(finite[i])
            if evaluation is not None:
                returns = np.asarray(evaluation.returns[i], np.float64)
                returns = returns[~np.isnan(returns)] if not np.isnan(returns).all() else returns
                row |= {
                    "eval/return": returns.mean(),
                    "eval/return_std": returns.std(),
                    "eval/length": float(np.mean(evaluation.lengths[i])),
                    "eval/episodes": len(returns),
                    "eval/unfinished": int(np.sum(~evaluation.finished[i])),
                }
            if self._note_failure(row):
                new_failures.append(self.failed[-1])
            if row.get("finite") is False:
                row |= {name: None for name in row if name.startswith("eval/return")}
            self.rows.append({key: _json_number(value) for key, value in row.items()})
            self._file.write(json.dumps(self.rows[-1]) + "\n")
        self._file.flush()
        self._logs.write(self.rows[before:])
        return new_failures

    def flush(self) -> None:
        """To the disk: the rows up to a checkpoint must outlive it."""
        self._file.flush()
        if hosts.leads():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _note_failure(self, row: dict[str, Any]) -> bool:
        is_new = row.get("finite") is False and row["lane"] not in {f["lane"] for f in self.failed}
        if is_new:
            reason = "non-finite parameters"
            self.failed.append({"lane": row["lane"], "seed": row["seed"], "step": row["step"], "reason": reason})
        return is_new


def _finalize(totals: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Sums and counts to means; None where there was nothing to count."""
    row: dict[str, Any] = {name: float(s) / float(n) if n else None for name, (s, n) in totals.items()}
    if "episode/return_square" in row:
        mean, square = row["episode/return"], row.pop("episode/return_square")
        row["episode/return_std"] = None if mean is None or square is None else math.sqrt(max(square - mean * mean, 0.0))
        row["episode/count"] = int(totals["episode/return"][1])
    return row


def _json_number(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _extensions(experiment: Experiment) -> list[str]:
    """Packages that provide the agent, the environment and the graders of an experiment, by entry points."""

    def types(value: Any) -> list[str]:
        """Of the graders in parameters of an environment: tables that have a type, in tables and lists."""
        if isinstance(value, dict):
            return [*([value["type"]] if isinstance(value.get("type"), str) else []), *types(list(value.values()))]
        return [kind for item in value for kind in types(item)] if isinstance(value, list | tuple) else []

    used = [("agent", experiment.algo_name), ("environment", experiment.env)]
    used += [("grader", kind) for kind in types(experiment.env_params)]
    found = [entry for kind, name in used for entry in extensions.entries(kind).get(name, [])]
    return [entry.dist.name for entry in found if entry.dist is not None]


def provenance(experiment: Experiment, argv: list[str]) -> dict[str, Any]:
    """What a reader needs to get the same numbers again."""
    packages = ("rljax", "jax", "jaxlib", "flax", "optax", "gymnax", "gymnasium", "brax", "orbax-checkpoint", "numpy")
    versions = {"python": platform.python_version()}
    for package in (*packages, *_extensions(experiment)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit, dirty = _commit()
    return {
        "name": experiment.name,
        "config_hash": experiment.hash,
        "env": experiment.env,
        "agent": experiment.algo_name,
        "sweep": {key: list(values) for key, values in experiment.sweep.items()},
        "argv": argv,
        "command": shlex.join(["rljax", "reproduce", str(experiment.path)]),
        "commit": commit,
        "dirty": dirty,
        "versions": versions,
        "devices": [str(device) for device in jax.devices()],
        "platform": f"{platform.system()} {platform.machine()}, {jax.default_backend()}",
    }


def _commit() -> tuple[str | None, bool | None]:
    """Commit of the checkout that rljax runs from, else of the working directory."""
    for directory in (Path(__file__).parent, Path.cwd()):
        git = ["git", "-C", str(directory)]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
            status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
            return commit, bool(status.strip())
    return None, None


@contextlib.contextmanager
def _locked(path: Path, fresh: bool) -> Iterator[None]:
    """Holds the run directory against a second process; the lock goes with the process, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise InputError(f"out: cannot write to {path.parent}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{path} is being run by another process") from error
        if fresh and path.exists():
            shutil.rmtree(path)
        yield


def _digest(name: Any) -> str | None:
    """Of the contents of a file; None where an environment's parameter names none."""
    if not isinstance(name, str) or not name or len(name) > 4096 or not Path(name).is_file():
        return None
    return file_digest(Path(name))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is no table")
        return data
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}; --fresh starts over") from error


def _write_json(path: Path, data: dict[str, Any]) -> None:
    """Of several processes the first alone does."""
    if not hosts.leads():
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(temporary, path)
