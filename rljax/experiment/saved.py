"""What can be done with a run that has a checkpoint: evaluate it, watch it, read it, record data with it, export it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.agents import Agent
from rljax.agents.base import whole
from rljax.envs import Box, Discrete, host, make_env, space_text
from rljax.envs.wrappers import as_evaluated
from rljax.experiment import artifact, data, pictures, report, traces
from rljax.experiment.config import Experiment, InputError, elsewhere
from rljax.experiment.directory import read_json
from rljax.experiment.evaluation import Evaluation
from rljax.experiment.lanes import Program, build
from rljax.experiment.programs import (
    built,
    first_difference,
    lane_agent,
    load_run,
    load_states,
    of_lane,
    of_one_lane,
    restore,
    with_weights,
)
from rljax.networks.transformer import merge


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
    _check_lane(path, lane, lanes)
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


def _check_lane(path: str | Path, lane: int, lanes: list[dict[str, Any]]) -> None:
    if not 0 <= lane < len(lanes):
        raise InputError(f"--lane: {path} has lanes 0 to {len(lanes) - 1}, got {lane}")


def _best_lane(path: str | Path) -> int:
    """Of the settings that go on; the first where no return is known."""
    settings = [setting for setting in report.summarize(path)["settings"] if setting["dropped"] is None]
    seeds = [seed for setting in settings for seed in setting["seeds"]]
    return max(seeds, key=lambda seed: seed["return"])["lane"] if seeds else 0


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
    head = trace_head(Path(path), experiment, number, step, episodes, seed, greedy, overrides)
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
    own, _ = built(experiment) if paid else with_weights(build(experiment))
    number, steps, states = restore(own, path, checkpoint)
    if not overrides and greedy:
        return own, number, steps, states
    if overrides and lane_agent(experiment, 0).measure is not None:
        raise InputError(f"{path}: a {experiment.algo_name} is measured by itself, and plays in no other environment")
    place = elsewhere(experiment, overrides or {})
    program = dataclasses.replace(build(experiment, place=place, greedy=greedy), data=own.data)
    here, there = (of_one_lane(jax.eval_shape(p.init, p.lanes, p.data).params) for p in (program, own))
    actions = [space_text(p.env.action_space) for p in (program, own)]
    if actions[0] != actions[1]:
        raise InputError(f"env {place.env}: its actions are {actions[0]}, and those of the run {actions[1]}")
    if difference := first_difference(here, there):
        raise InputError(f"env {place.env}: {difference}, there and in the run: its observations do not fit")
    return program, number, steps, states


def trace_head(
    path: Path,
    experiment: Experiment,
    checkpoint: int,
    step: int,
    episodes: int,
    seed: int,
    greedy: bool,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The first line of a trace: what it takes to say the same again."""
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
    _check_lane(path, lane, lanes)
    if not 0 <= epsilon <= 1:
        raise InputError(f"--epsilon must be 0 to 1, got {epsilon}")
    if steps < 1 or num_envs < 1:
        raise InputError(f"--steps must be 1 or more, got {steps}")
    _, states = load_states(path)
    single = of_lane(experiment, lane)
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
        program, _ = with_weights(build(experiment))
        _, step, states = restore(program, path)
        state = jax.tree.map(lambda x: x[lane], states)
        dropped = [entry["step"] for entry in files.info.get("dropped") or [] if lane in entry["lanes"]]
        after = f"after {(*dropped, step)[0]:,} environment steps"
        try:
            if agent.policy is not None:
                _write_language_model(folder, program, state)
                text = artifact.language_model_card(files, lane, after, experiment)
            else:
                single = of_lane(experiment, lane)
                env = as_evaluated(make_env(single.env, **single.env_params))
                about = {"env": single.env, "env_params": single.env_params, "agent": single.algo_name, "run": experiment.hash}
                artifact.write_policy(
                    folder, agent, state, env, {**about, "lane": lane, "seed": lanes[lane]["seed"], "step": step}
                )
                artifact.time_policy(folder)
                text = artifact.policy_card(files, lane, after, read_json(folder / "policy.json"))
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
