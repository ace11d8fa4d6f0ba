"""The run loop: compile once, then chunk by chunk log, evaluate and checkpoint; resume where a killed run stopped."""

import contextlib
import errno
import functools
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from rljax.envs import Box, EnvironmentFailed, host
from rljax.experiment import health, hosts, pictures, report, sinks, traces
from rljax.experiment.checkpoint import Checkpoints, SaveError
from rljax.experiment.config import Experiment, InputError
from rljax.experiment.directory import Metrics, contents_digest, is_finished, locked, now, provenance, read_json, write_json
from rljax.experiment.evaluation import Evaluation
from rljax.experiment.halving import Halving
from rljax.experiment.lanes import Program, build, bytes_needed, evaluate_random
from rljax.experiment.programs import begin, built, check_params, lane_agent, load_run, paid, params_of, with_weights
from rljax.experiment.saved import Result, result, trace_head

Listener = Callable[[dict[str, Any]], None]
TRANSCRIPTS = 4  # episodes of each lane that are written down at each evaluation of a language model


class Stopped(Exception):
    """A run has been asked to stop, and has saved; the message says where it is."""


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
      listener: called with a dict at each event: ``compile``, ``start``, ``chunk``, ``note`` and ``end``.
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
        held.enter_context(locked(path, fresh))
        info = read_json(path / "run.json") if (path / "run.json").exists() else {}
        changed = [name for name, seen in info.get("files", {}).items() if (now := contents_digest(name)) and now != seen]
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
            check_params(experiment, jax.eval_shape(program.init, program.lanes, None).params)
            say({"event": "note", "text": f"first {source.name}, which this starts from"})
            states = _trained("start_from", first(source))
            return check_params(experiment, params_of(states, source, experiment))

        def pay() -> Any:
            """Parameters of the reward models, of all lanes, or None: trains what ``reward_from`` names, if need be."""
            source = experiment.reward_from
            if source is None:
                return None
            say({"event": "note", "text": f"first {source.name}, which pays"})
            return params_of(_trained("reward_from", first(source)), source, experiment)

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
    program, pretrained = with_weights(build(experiment))
    built = clock()
    judges = pay()
    began += clock() - built  # what runs first has a time of its own
    program = paid(program, judges)

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
    say({"event": "compile"})
    halving = Halving(program)
    at_once = program.at_once
    program, compiled = program.compiled()
    if program.at_once < at_once:
        say({"event": "note", "text": f"{at_once} lanes at once do not fit into a device's memory: {program.at_once} at once do"})
    chunk_program = halving.of_all(compiled)
    evaluate_program = halving.of_all(program.evaluate.lower(*program.example(), program.data).compile())
    hosts.meet()
    if restored is None:
        done, states = 0, begin(program, pretrained if params is None else params, program.data)
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
        "started": info.get("started", now()) if done else now(),
        "status": "running",
        "steps_asked": steps_asked,
        "steps_done": program.steps_at(done),
        "lanes": experiment.lanes(),
        "random": baseline,
        "files": {str(name): seen for name in experiment.env_params.values() if (seen := contents_digest(name))},
        "data": program.about,
        "failed": [],
        "dropped": [],
        "warnings": info.get("warnings", []) if done else [],
        **earlier,
    }
    write_json(path / "run.json", info)
    steps = [program.steps_at(chunk) for chunk in range(done + 1)] if restored else []
    metrics = Metrics(path / "metrics.jsonl", experiment.lanes(), steps, experiment.lanes_a_call, logs)
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
            write_json(path / "run.json", info)
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
        head = trace_head(path, experiment, done, step, TRANSCRIPTS, experiment.eval_seed, False)
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
        write_json(path / "run.json", info)

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
        info["finished"] = now()
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


def _random_baseline(experiment: Experiment) -> dict[str, Any]:
    if lane_agent(experiment, 0).measure is not None:  # evaluations report no returns
        return {"return": None, "std": None, "episodes": 0}
    returns = np.asarray(evaluate_random(experiment).returns, np.float64)
    returns = returns[~np.isnan(returns)]  # without those whose reward could not be had
    mean, std = (returns.mean(), returns.std()) if returns.size else (None, None)
    return {"return": mean, "std": std, "episodes": len(returns)}


def train(experiment: Experiment) -> tuple[Any, dict[str, Array], Evaluation]:
    """The whole training of all lanes as one program, with no host in the loop, no files and no checkpoints.

    Returns:
      ``(states, {metric: [lanes, chunks]}, Evaluation [lanes, episodes] of the final policies)``.
    """
    if experiment.sweep_halving:
        raise InputError("sweep.halving: `train` has no host in its loop that could drop a setting; `run` has")
    program, params = with_weights(build(experiment))
    if experiment.reward_from is not None:
        program = paid(program, params_of(train(experiment.reward_from)[0], experiment.reward_from, experiment))
    if experiment.start_from is not None:
        params = check_params(experiment, params_of(train(experiment.start_from)[0], experiment.start_from, experiment))

    @jax.jit
    def whole(lanes, data):
        def chunk(states, _):
            states, totals, _ = program.chunk(lanes, states, data)
            return states, jax.tree.map(lambda pair: pair[0] / pair[1], totals, is_leaf=lambda x: isinstance(x, tuple))

        states, metrics = jax.lax.scan(chunk, begin(program, params, data), length=program.num_chunks)
        return states, jax.tree.map(lambda x: x.swapaxes(0, 1), metrics), program.evaluate(lanes, states, data)

    trained = program.unpad(jax.block_until_ready(whole(program.lanes, program.data)))
    host.raise_failure(program.env)
    return trained


def plan(experiment: Experiment, probe: bool = False) -> dict[str, Any]:
    """What a run would be, without training: sizes, and memory predicted by the compiled program; with ``probe`` the seconds of a
    chunk, an evaluation and the whole, from a chunk or two and an evaluation that are run, and forgotten."""
    is_paid = experiment.reward_from is not None and is_finished(experiment.reward_from)
    program, pretrained = built(experiment) if is_paid else with_weights(build(experiment))
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
        states = jax.block_until_ready(begin(program, pretrained, program.data))
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
