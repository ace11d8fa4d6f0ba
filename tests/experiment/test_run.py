import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rljax
from rljax.cli import main
from rljax.envs.wrappers import Wrapper
from rljax.experiment import (
    InputError,
    SaveError,
    checkpoint,
    directory,
    evaluate,
    lanes,
    load,
    load_states,
    parse_overrides,
    result,
    resume,
    run,
    summary_text,
    train,
)
from rljax.experiment.config import elsewhere
from tests.experiment.runs import assert_same, rows, stop_after

TINY = {
    "env": "CartPole-v1",
    "total_steps": 640,
    "seeds": [0, 1, 2],
    "evals": 2,
    "eval_episodes": 4,
    "algo.num_envs": 4,
    "algo.num_steps": 8,
    "algo.num_epochs": 2,
    "algo.num_minibatches": 2,
    "algo.hidden": [8],
    "algo.normalize_observations": True,
    "algo.normalize_rewards": True,
}


def tiny(tmp_path, **changes):
    return load(None, {**TINY, "out": str(tmp_path), **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tiny(tmp_path_factory.mktemp("runs")))


def test_a_run_leaves_its_directory(finished):
    names = {p.name for p in finished.path.iterdir()}
    assert {"config.toml", "run.json", "metrics.jsonl", "checkpoints", "summary.json", "report.html", "curve.png"} <= names
    info = json.loads((finished.path / "run.json").read_text())
    assert (info["status"], info["steps_asked"], info["steps_done"]) == ("finished", 640, 640)
    assert info["versions"]["jax"] == jax.__version__
    assert 0 < info["compile_seconds"] < info["wall_seconds"]


def test_a_row_for_each_step_and_lane(finished):
    table = rows(finished.path)
    assert [(r["step"], r["lane"], r["seed"]) for r in table] == [(s, i, i) for s in range(0, 641, 64) for i in range(3)]
    evaluated = {r["step"] for r in table if "eval/return" in r}
    assert evaluated == {0, 320, 640}
    episodes = sum(r["episode/count"] for r in table if r["step"] > 0)
    assert episodes > 20
    lengths = [r["episode/length"] for r in table if r.get("episode/count")]
    returns = [r["episode/return"] for r in table if r.get("episode/count")]
    np.testing.assert_allclose(lengths, returns)  # CartPole pays 1 a step


def test_results_as_arrays(finished):
    assert finished.eval_steps.tolist() == [0, 320, 640]
    assert finished.eval_returns.shape == (3, 3)
    assert [lane["seed"] for lane in finished.lanes] == [0, 1, 2]
    logged = [r["eval/return"] for r in rows(finished.path) if r["step"] == 640]
    np.testing.assert_array_equal(finished.eval_returns[:, -1], logged)


def test_evaluation_of_the_checkpoint_equals_the_logged_one(finished):
    steps, evaluation = evaluate(finished.path)
    assert steps == 640
    np.testing.assert_array_equal(np.mean(np.asarray(evaluation.returns, np.float64), 1), finished.eval_returns[:, -1])
    _, same = evaluate(finished.path, overrides={"env": "CartPole-v1", "env_params.gravity": 9.8})
    np.testing.assert_array_equal(same.returns, evaluation.returns)
    _, other = evaluate(finished.path, episodes=7, seed=5)
    assert other.returns.shape == (3, 7)


def test_a_lane_can_be_taken_out_and_acted_with(finished):
    agent, state = finished.policy(1)
    env = rljax.make_env("CartPole-v1")
    evaluation = rljax.experiment.evaluate_agent(agent, env, state, lanes.evaluation_key(finished.experiment), 4, 1000)
    assert float(evaluation.returns.mean()) == pytest.approx(finished.eval_returns[1, -1])


def test_a_finished_run_is_not_run_again(finished):
    before = (finished.path / "metrics.jsonl").stat().st_mtime_ns
    events = []
    again = run(finished.experiment, listener=events.append)
    assert "finished already" in events[0]["text"]
    assert (finished.path / "metrics.jsonl").stat().st_mtime_ns == before
    assert_same(again.states, finished.states)


def test_one_program_is_traced_once(tmp_path):
    program = lanes.build(tiny(tmp_path))
    states = program.init(program.lanes, program.data)
    for _ in range(3):
        states, _, _ = program.chunk(program.lanes, states, program.data)
        program.evaluate(program.lanes, states, program.data)
    assert program.traces == {"init": 1, "chunk": 1, "evaluate": 1}


def test_lanes_are_padded_and_sharded(tmp_path):
    program = lanes.build(tiny(tmp_path))
    assert program.mesh.size == 2
    states = program.init(program.lanes, program.data)
    assert states.updates.shape == (4,)
    assert program.unpad(states).updates.shape == (3,)


def test_an_evaluation_in_another_environment_plays_there(finished):
    """Other parameters, other rewards, and actions that are drawn."""
    _, short = evaluate(finished.path, overrides={"env_params.max_steps_in_episode": 3})
    np.testing.assert_array_equal(short.lengths, 3)
    _, other = evaluate(finished.path, overrides={"env": f"{__name__}:PaysTwo"})
    np.testing.assert_array_equal(np.mean(other.returns, 1), 2 * finished.eval_returns[:, -1])
    _, drawn = evaluate(finished.path, greedy=False)
    assert np.any(np.mean(drawn.returns, 1) != finished.eval_returns[:, -1])


class PaysTwo(Wrapper):
    """CartPole-v1 with twice its reward."""

    def __init__(self):
        super().__init__(rljax.make_env("CartPole-v1"))

    def step(self, key, state, action):
        state, timestep = self.env.step(key, state, action)
        return state, timestep.replace(reward=2 * timestep.reward)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"env": "Acrobot-v1"}, "env Acrobot-v1: its actions are Discrete(3), and those of the run Discrete(2)"),
        ({"env": "StatelessCartPole"}, "env StatelessCartPole: parameter ['actor']['Dense_0']['kernel'] is [2, 8] and [4, 8]"),
        ({"env": "Pendulum-v1"}, "its actions are Box([1])"),
        ({"env": "CartPol-v1"}, "unknown env 'CartPol-v1'; did you mean 'CartPole-v1'"),
        (
            {"env_params.gravty": 1.0},
            "unknown key env_params.gravty: CartPole-v1 has no parameter 'gravty'; did you mean 'gravity'",
        ),
        ({"env_params.gravity": "high"}, "env_params.gravity must be a number, got 'high'"),
        ({"algo.learning_rate": 1.0}, "algo.learning_rate: an evaluation can change env and env_params.KEY alone"),
    ],
    ids=str,
)
def test_an_environment_that_does_not_fit_is_refused_in_one_line(finished, overrides, message):
    with pytest.raises(InputError) as error:
        evaluate(finished.path, overrides=overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_an_evaluation_overrides_is_swept_no_more(tmp_path):
    """Lanes stay as many as they are, and keep what else is swept."""
    sweep = {"sweep.env_params.gravity": [9.8, 50.0], "sweep.env_params.force_mag": [10.0, 1.0], "env_params.tau": 0.02}
    e = tiny(tmp_path, seeds=[0], **sweep)
    place = elsewhere(e, {"env_params.gravity": 50.0})
    assert place.env_params == {"tau": 0.02, "gravity": 50.0} and list(place.sweep) == ["env_params.force_mag"]
    assert elsewhere(e, {"env": "Acrobot-v1"}).env_params == elsewhere(e, {"env": "Acrobot-v1"}).sweep == {}
    program = lanes.build(e, place=place)
    lengths = program.unpad(program.evaluate(program.lanes, program.init(program.lanes, program.data), program.data)).lengths
    one, other = lengths[::2], lengths[1::2]  # the sweep sorts its keys: force_mag varies slowest
    np.testing.assert_array_equal(one, other)
    assert np.any(one[0] != one[1])


def test_a_lane_of_many_is_close_to_the_solo_run(tmp_path, finished):
    solo = run(tiny(tmp_path, seeds=[1]))
    for many, one in zip(jax.tree.leaves(finished.states.params), jax.tree.leaves(solo.states.params), strict=True):
        np.testing.assert_allclose(many[1], one[0], atol=2e-3)


def test_train_without_files_is_one_program(tmp_path, finished):
    states, metrics, evaluation = train(tiny(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert metrics["entropy"].shape == (3, 10)
    for a, b in zip(jax.tree.leaves(states.params), jax.tree.leaves(finished.states.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    assert evaluation.returns.shape == (3, 4)


def test_swept_lanes_differ_and_the_first_value_matches_an_unswept_run(tmp_path):
    axes = {"sweep.algo.learning_rate": [3e-4, 0.0], "sweep.env_params.gravity": [9.8, 30.0]}
    swept = run(tiny(tmp_path, seeds=[0, 1], **axes))
    assert len(swept.lanes) == 8
    assert len(swept.summary["settings"]) == 4
    alone = "--algo.learning_rate 0.0003 --env_params.gravity 9.8"
    assert swept.summary["best"] is not None and f"rljax run {swept.path} --algo.learning_rate" in summary_text(swept.summary)
    plain = run(load(swept.path, parse_overrides(alone.split())))
    assert not plain.experiment.sweep and plain.path.parent == swept.path.parent
    for many, one in zip(jax.tree.leaves(swept.states.params), jax.tree.leaves(plain.states.params), strict=True):
        np.testing.assert_allclose(many[:2], one, atol=2e-3)
    returns = [r["episode/length"] for r in rows(swept.path) if r["step"] == 320]
    assert returns[0] != returns[2]  # gravity


def test_steps_are_rounded_up_and_said(tmp_path):
    events = []
    done = run(tiny(tmp_path, total_steps=650), listener=events.append)
    assert any("650 is rounded up to" in e.get("text", "") for e in events)
    assert done.summary["steps_asked"] == 650
    assert done.summary["steps_done"] == rows(done.path)[-1]["step"] >= 650


@pytest.mark.parametrize(
    ("kills", "changes"), [(4, {}), pytest.param(20, {"total_steps": 2560, "evals": 8}, marks=pytest.mark.slow)]
)
def test_resume_after_sigkill_equals_the_uninterrupted_run(tmp_path, finished, kills, changes):
    """Killed at random moments, also in the middle of a save; metrics byte for byte, states bit for bit."""
    finished = run(tiny(tmp_path / "whole", **changes)) if changes else finished
    flags = [f"--{k}={json.dumps(v)}" for k, v in {**TINY, **changes, "out": str(tmp_path), "checkpoint_seconds": 0}.items()]
    command = [sys.executable, "-m", "rljax", "run", *flags]
    path = tiny(tmp_path, **changes).path
    draw = random.Random(0)
    seen = -1
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 120
        while process.poll() is None and time.time() < deadline:
            done = [int(p.name) for p in (path / "checkpoints").glob("*") if p.name.isdigit()]
            if max(done, default=-1) > seen:
                seen = max(done)
                break
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert (path / "metrics.jsonl").read_bytes() == (finished.path / "metrics.jsonl").read_bytes()
    assert_same(load_states(path)[1], finished.states)


def interrupted(tmp_path, chunks, **changes):
    e = tiny(tmp_path, checkpoint_seconds=0, **changes)
    with pytest.raises(KeyboardInterrupt):
        run(e, listener=stop_after(chunks))
    return e


def test_rows_past_the_checkpoint_are_dropped(tmp_path, finished):
    e = interrupted(tmp_path, 4)
    with (e.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 999, "lane": 0, "seed": 0}) + '\n{"step": 10')
    resumed = resume(e.path)
    assert (resumed.path / "metrics.jsonl").read_bytes() == (finished.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:3], "3", *lines[4:]], "are missing (line 4 cannot be read)"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "are missing"),
        (lambda lines: [], "rows of step 0 are missing"),
        (lambda lines: [*lines[:2], lines[2].replace('"step"', '"stop"'), *lines[3:]], "(line 3 cannot be read)"),
    ],
    ids=["middle", "end", "all", "key"],
)
def test_rows_up_to_the_checkpoint_that_are_not_there_are_named(tmp_path, damage, message):
    """Going on would lose them without a word, and with them the score."""
    e = interrupted(tmp_path, 4)
    file = e.path / "metrics.jsonl"
    damaged = "\n".join(damage(file.read_text().splitlines())) + "\n"
    file.write_text(damaged)
    with pytest.raises(InputError, match=r"--fresh starts over") as error:
        run(e)
    assert message in str(error.value)
    assert file.read_text() == damaged


@pytest.mark.parametrize(("file", "text"), [("run.json", "[]"), ("run.json", '{"status": "finished"}'), ("metrics.jsonl", None)])
def test_damaged_files_of_a_finished_run_are_a_line(tmp_path, finished, file, text):
    copy = tmp_path / "runs" / finished.path.name
    shutil.copytree(finished.path, copy)
    (copy / file).unlink() if text is None else (copy / file).write_text(text)
    with pytest.raises(InputError, match=r"--fresh starts over") as error:
        resume(copy)
    assert file in str(error.value)


def test_an_unreadable_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, finished):
    e = interrupted(tmp_path, 4)
    newest = max((e.path / "checkpoints").iterdir(), key=lambda p: int(p.name))
    assert newest.name == "4"
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    events = []
    resumed = run(e, listener=events.append)
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert any("4 cannot be read" in note and "resuming from checkpoint 3" in note for note in notes)
    assert_same(resumed.states, finished.states)


def test_an_emptied_checkpoint_falls_back_too(tmp_path, finished):
    """With nothing in it, orbax could not say what kind of checkpoints these are."""
    e = interrupted(tmp_path, 4)
    newest = max((e.path / "checkpoints").iterdir(), key=lambda p: int(p.name))
    shutil.rmtree(newest)
    newest.mkdir()
    assert_same(run(e).states, finished.states)


def test_a_random_policy_whose_rewards_cannot_be_had(tmp_path, monkeypatch):
    """Its return is None, and what was graded counts alone."""
    module = sys.modules["rljax.experiment.run"]
    for returns, expected in (([np.nan, np.nan], (None, None, 0)), ([np.nan, 2.0, 4.0], (3.0, 1.0, 2))):
        monkeypatch.setattr(module, "evaluate_random", lambda e, returns=returns: SimpleNamespace(returns=np.array(returns)))
        baseline = module._random_baseline(tiny(tmp_path))
        assert (baseline["return"], baseline["std"], baseline["episodes"]) == expected


def test_no_readable_checkpoint_is_wrong_input(tmp_path, capsys):
    e = interrupted(tmp_path, 1)
    for file in (e.path / "checkpoints").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert main(["run", str(e.path)]) == 2
    error = capsys.readouterr().err
    assert "--fresh" in error
    assert error.count("\n") == 1
    assert (e.path / "metrics.jsonl").exists()


def test_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch, finished):
    e = tiny(tmp_path, checkpoint_seconds=0)
    save = checkpoint.Checkpoints.save

    def full(self, chunk, states):
        if chunk == 4:
            with monkeypatch.context() as m:

                def write(*args, **kwargs):
                    partial = self.directory / "4.orbax-checkpoint-tmp"
                    partial.mkdir()
                    raise OSError(28, "No space left on device")

                m.setattr(self._manager, "save", write)
                return save(self, chunk, states)
        return save(self, chunk, states)

    with monkeypatch.context() as m:
        m.setattr(checkpoint.Checkpoints, "save", full)
        with pytest.raises(SaveError, match=r"No space left on device; valid ones: 2, 3"):
            run(e)
    assert not list((e.path / "checkpoints").glob("*tmp*"))
    assert_same(run(e).states, finished.states)


def test_a_disk_that_fills_while_metrics_are_written_is_no_traceback(tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory.Metrics, "write", full)
    e = tiny(tmp_path)
    e.path.mkdir(parents=True)
    (e.path / "config.toml").write_text(e.to_toml())
    assert main(["run", str(e.path)]) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to mount a small file system")
def test_really_full_disk(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount")
    try:
        e = tiny(small, checkpoint_seconds=0, **{"algo.hidden": [64, 64], "algo.num_envs": 4})
        with pytest.raises((SaveError, OSError)):
            run(e)
        assert checkpoint.Checkpoints(e.path / "checkpoints").steps() != [] or not rows(e.path)
    finally:
        subprocess.run(["umount", str(small)], check=False)


def test_a_lane_that_turns_nan_is_named_and_spoils_nothing(tmp_path):
    events = []
    settings = {"seeds": [0, 1, 2, 3, 4], "sweep.algo.learning_rate": [1e-3, 1e30]}
    done = run(tiny(tmp_path, **settings), listener=events.append)
    good, bad = done.summary["settings"]
    assert good["failed"] == []
    assert np.isfinite(good["iqm"])
    assert [f["seed"] for f in bad["failed"]] == [0, 1, 2, 3, 4]
    assert sum("failed at step" in e.get("text", "") for e in events) == 5
    assert "NaN" not in (done.path / "metrics.jsonl").read_text()
    failed = json.loads((done.path / "run.json").read_text())["failed"]
    assert {f["lane"] for f in failed} == {5, 6, 7, 8, 9}


def test_fewer_than_five_seeds_do_not_establish_a_spread(finished):
    assert "not established" in finished.summary["spread"]
    assert "not established" in rljax.experiment.summary_text(finished.summary)


def test_a_second_process_is_kept_out(tmp_path):
    e = tiny(tmp_path)

    def listen(event):
        if event["event"] == "start":
            with pytest.raises(InputError, match="another process"):
                run(e)

    run(e, listener=listen)


def test_fresh_starts_over(tmp_path):
    e = interrupted(tmp_path, 2)
    again = run(e, fresh=True)
    assert rows(again.path)[0]["step"] == 0
    assert result(again.path).summary["steps_done"] == 640


def test_checkpoints_do_not_depend_on_the_number_of_devices(tmp_path, finished):
    program = lanes.build(finished.experiment, jax.devices()[:1])
    _, states = load_states(finished.path)
    padded = program.pad(states)
    assert padded.updates.shape == (3,)
    evaluation = program.evaluate(program.lanes, padded, program.data)
    np.testing.assert_allclose(np.mean(evaluation.returns, 1), finished.eval_returns[:, -1], rtol=0.2)


def test_time_and_memory_of_a_chunk_do_not_depend_on_the_length_of_the_run(tmp_path):
    def size(total_steps):
        program = lanes.build(dataclasses.replace(tiny(tmp_path), total_steps=total_steps, evals=total_steps // 320))
        return program.updates_per_chunk, [
            x.shape for x in jax.tree.leaves(jax.eval_shape(program.init, program.lanes, program.data))
        ]

    assert size(640) == size(640_000)
