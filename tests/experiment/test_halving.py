import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from rljax.experiment import InputError, evaluate, load, load_states, run, summary_text, train
from rljax.experiment.halving import Halving
from rljax.experiment.lanes import build
from tests.experiment.runs import rows

TINY = {
    "env": "CartPole-v1",
    "total_steps": 320,
    "seeds": [0, 1],
    "evals": 4,
    "eval_episodes": 2,
    "checkpoint_seconds": 0,
    "algo.num_envs": 2,
    "algo.num_steps": 8,
    "algo.num_minibatches": 1,
    "algo.num_epochs": 1,
    "algo.hidden": [8],
    "sweep.algo.learning_rate": [1e-4, 1e-3, 3e-3, 1e-2, 1e-30],
    "sweep.halving": [1, 2],
}


def tiny(tmp_path, **changes):
    return load(None, {**TINY, "out": str(tmp_path), **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tiny(tmp_path_factory.mktemp("runs")))


def test_the_worst_settings_are_dropped_and_named(finished):
    found = rows(finished.path)
    lanes = {step: [row["lane"] for row in found if row["step"] == step] for step in {row["step"] for row in found}}
    assert [len(lanes[step]) for step in (0, 80, 96, 160, 176, 320)] == [10, 10, 6, 6, 4, 4]
    dropped = json.loads((finished.path / "run.json").read_text())["dropped"]
    assert [(drop["evaluation"], drop["step"]) for drop in dropped] == [(1, 80), (1, 80), (2, 160)]
    out = {lane for drop in dropped for lane in drop["lanes"]}
    assert out == set(range(10)) - set(lanes[320])
    first = np.nanmean(finished.eval_returns[:, 1].reshape(5, 2), 1)
    worst = {finished.lanes[drop["lanes"][0]]["algo.learning_rate"] for drop in dropped[:2]}
    assert worst == {TINY["sweep.algo.learning_rate"][i] for i in np.argsort(-first, kind="stable")[3:]}
    settings = finished.summary["settings"]
    assert [setting["dropped"] for setting in settings].count(None) == 2
    assert next(s for s in settings if s["label"] == finished.summary["best"])["dropped"] is None
    assert "(dropped at 80)" in summary_text(finished.summary)
    assert "3 settings, at steps 80, 160" in summary_text(finished.summary)


def test_a_dropped_lane_keeps_its_policy(finished):
    _, evaluation = evaluate(finished.path)
    np.testing.assert_array_equal(np.mean(evaluation.returns, 1)[:, None], _last(finished.eval_returns))


def _last(returns):
    return np.stack([row[~np.isnan(row)][-1:] for row in returns])


def test_resume_after_sigkill_drops_the_same_and_ends_the_same(tmp_path, finished):
    """Killed as the second rung has been decided, and nothing of it is saved."""
    code = (
        "import os, signal, sys, rljax.experiment as x\n"
        "def listen(event):\n"
        "    if 'after evaluation 2' in event.get('text', ''): os.kill(os.getpid(), signal.SIGKILL)\n"
        "x.run(x.load(sys.argv[1]), listener=listen)"
    )
    e = tiny(tmp_path)
    e.path.mkdir(parents=True)
    (e.path / "config.toml").write_text(e.to_toml())
    assert subprocess.run([sys.executable, "-c", code, str(e.path)], stderr=subprocess.DEVNULL).returncode == -9
    events = []
    assert run(e, listener=events.append).path == e.path
    assert next(event for event in events if event["event"] == "start")["resumed_at"] == 144
    assert (e.path / "metrics.jsonl").read_bytes() == (finished.path / "metrics.jsonl").read_bytes()
    for a, b in zip(jax.tree.leaves(load_states(e.path)[1].params), jax.tree.leaves(finished.states.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_program_of_the_last_rung_serves_all(tmp_path):
    """Three calls of four lanes, then one, which leaves the others as they are."""
    program = build(tiny(tmp_path))
    halving = Halving(program)
    assert (program.experiment.rungs, program.experiment.lanes_a_call) == ([5, 3, 2], 4)
    states = program.init(program.lanes, program.data)
    chunk = halving.of_all(program.compiled()[1])
    plain = build(dataclasses.replace(program.experiment, sweep_halving=()))
    expected, totals, _ = plain.chunk(plain.lanes, plain.init(plain.lanes, plain.data), plain.data)
    states, packed, finite = chunk(program.lanes, states, program.data)
    for a, b in zip(jax.tree.leaves((states.params, packed)), jax.tree.leaves((expected.params, totals)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    before = jax.device_get(states.params)
    halving.left = [2, 3, 8]
    states, _, finite = chunk(program.lanes, states, program.data)
    pairs = zip(jax.tree.leaves(states.params), jax.tree.leaves(before), strict=True)
    changed = [np.any(np.asarray(a) != b, axis=tuple(range(1, b.ndim))) for a, b in pairs]
    assert np.flatnonzero(np.any(changed, 0)).tolist() == [2, 3, 8]
    assert np.flatnonzero(finite).tolist() == [2, 3, 8]
    assert program.traces["chunk"] == 1


def test_a_setting_with_a_failed_seed_is_below_all_that_have_none(tmp_path):
    halving = Halving(build(tiny(tmp_path)))
    returns = [9.0, None, None, None, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    rows = [{"step": 80, "lane": lane, "eval/return": value} for lane, value in enumerate(returns)]
    assert [drop["lanes"] for drop in halving.drop(rows)] == [[0, 1], [2, 3]]
    assert halving.drop(rows) == [] and halving.left == [4, 5, 6, 7, 8, 9]
    assert halving.lane_chunks(10) == 4 * 5 + 6 * 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep.halving": [2, 1]}, "sweep.halving must hold numbers of evaluations, from 1 on and in their order, got [2, 1]"),
        ({"sweep.halving": [0]}, "sweep.halving must hold numbers of evaluations"),
        ({"sweep.keep": 1.0}, "sweep.keep must be above 0 and below 1, the share of settings that goes on, got 1.0"),
        ({"sweep.halving": [], "sweep.keep": 0.5}, "sweep.keep must be set with sweep.halving"),
        (
            {"sweep.halving": [4]},
            "sweep.halving: there are 4 evaluations, and settings are dropped after any but the last, got [4]",
        ),
    ],
    ids=str,
)
def test_wrong_input_is_one_line(tmp_path, changes, message):
    with pytest.raises(InputError) as error:
        build(tiny(tmp_path, **changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_train_cannot_drop(tmp_path):
    with pytest.raises(InputError, match=r"sweep\.halving: `train` has no host"):
        train(tiny(tmp_path))


def test_a_setting_alone_is_not_halved(tmp_path):
    e = tiny(tmp_path)
    assert load(None, {**TINY, "sweep.halving": []}).hash != e.hash
    one = tiny(tmp_path, **{"algo.learning_rate": 1e-3})
    assert not one.sweep_halving and not one.sweep
    alone = tiny(tmp_path, **{"sweep.algo.learning_rate": [1e-4], "sweep.algo.num_steps": [8, 16]})
    assert all(not program.sweep_halving for program in alone.programs())
