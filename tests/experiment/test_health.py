import dataclasses
import json
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs.tokens import Problem, TokenEnvironment
from rljax.experiment import health, load, run, summary_text
from rljax.experiment.health import RULES, sentence, warnings
from rljax.lm.tasks import CharTask

ROWS = 24
UP = np.linspace(0.0, 1.0, ROWS)  # from the first row to the last
NOISE = 0.02 * np.random.default_rng(0).standard_normal(ROWS)
EVALUATED = 3  # every so many rows are evaluated


def series(lane: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Rows of a lane that learns: the row before training, then one a chunk. A metric is an array [ROWS], a number, or None."""
    metrics = {
        "episode/return": 0.1 + 0.6 * UP + NOISE,
        "episode/return_std": 0.4,
        "episode/length": 10 + 10 * UP,
        "reward/correct": 0.1 + 0.4 * UP + NOISE,
        "reward/brief": 0.2 - 0.1 * UP,
        "entropy": 1.0 - 0.9 * UP,
        "kl": 0.02,
        "kl_reference/k1": 0.9 * UP,
        "kl_reference/k3": 5 * UP,
        "flat_groups": 0.2 + 0.8 * UP,
        "invalid": 0.0,
        "ratio_error": 1e-3,
        **{name.replace("__", "/"): values for name, values in changes.items()},
    }
    if "reward/brief" in metrics and "reward__brief" not in changes:
        metrics["reward/brief"] = 1.0
    gold = metrics.pop("eval/return", 0.1 + 0.6 * UP)
    rows = [{"step": 0, "lane": lane, "seed": lane, "eval/return": float(np.ravel(gold)[0])}]
    for i in range(ROWS):
        values = {name: v if v is None else float(np.broadcast_to(v, ROWS)[i]) for name, v in metrics.items()}
        row = {"step": 100 * (i + 1), "lane": lane, "seed": lane, **values, "finite": True}
        rows.append({**row, **({"eval/return": float(np.broadcast_to(gold, ROWS)[i])} if i % EVALUATED == 0 else {})})
    return rows


def at(values, i, value):
    changed = np.array(np.broadcast_to(values, ROWS), np.float64)
    changed[i] = value
    return changed


FLAT = 0.3 + NOISE * 0.1
PROVOKED = {
    "entropy collapse": [
        {"entropy": at(1.0, slice(10, None), 0.009)},
        {"entropy": at(1.0, slice(10, None), 0.04), "episode__return": FLAT},
        {"entropy": 0.0005},  # from the start
    ],
    "KL runaway": [
        {"kl": at(0.02, 12, 0.3)},
        {"kl_reference__k1": 4 * UP},
        {"kl_reference__k1": 2 * UP, "episode__return": FLAT},
    ],
    "return and length up, gold flat": [
        {"reward__correct": FLAT},
        {"reward__correct": 0.3 - 0.2 * UP},
        {"eval__return": 0.3},
    ],
    "all groups flat": [
        {"flat_groups": 0.98, "episode__return": 0.0, "reward__correct": 0.0, "episode__return_std": 0.0},
        {"flat_groups": 1.0, "episode__return": None},
        {"flat_groups": 0.98, "episode__return": 0.002 + 0.004 * UP, "episode__return_std": 0.07},  # thrice nothing
    ],
    "invalid rewards": [{"invalid": at(0.0, 12, 0.02)}, {"invalid": 1.0, "entropy": 0.0, "flat_groups": 1.0}],
    "ratio not 1": [{"ratio_error": at(1e-3, 0, 0.01)}],
    "episodes without an end": [{"unfinished": at(0.0, slice(10, None), 0.6)}, {"unfinished": 1.0, "episode__return": None}],
    "nothing to learn from": [{"kept": 0.0, "episode__return": None}, {"counted": 0.01, "episode__return": None}],
}
PASSES = [
    {},
    {"entropy": at(1.0, [10, 11], 0.0)},  # two rows are no state
    {"entropy": 1.0 - 0.97 * UP},  # certain, with a return that has risen
    {"kl": 0.1, "kl_reference__k1": 2 * UP},
    {"kl_reference__k3": at(0.1, 5, 1e6)},
    {"kl_reference__k1": at(0.1, [10, 11], 9.0)},
    {"kl_reference__k1": -5 * UP},
    {"reward__correct": FLAT, "episode__length": 10 + UP},
    {"reward__correct": FLAT, "episode__return": 0.3 + NOISE},
    {"reward__correct": 0.97},  # nothing is left to rise to
    {"eval__return": at(0.6, slice(1, None), 0.1 + 0.5 * UP[1:])},  # lucky before it was trained
    {"eval__return": 0.9},  # what the sampling policy catches up with
    {"reward__correct": 0.0, "episode__return": 20 + 80 * UP, "episode__length": 20 + 80 * UP, "eval__return": 20.0},  # CartPole
    {"flat_groups": at(0.5, slice(12, None), 1.0)},  # solved
    {"flat_groups": 0.94, "episode__return": FLAT},
    {"invalid": 0.005},
    {"unfinished": at(0.0, [10, 11], 1.0)},
    {"kept": 0.03, "counted": 0.03},
    {"episode__return": None, "episode__length": None},
]


def test_every_rule_is_provoked():
    assert set(PROVOKED) == set(RULES)


@pytest.mark.parametrize(("name", "changes"), [(name, changes) for name, of in PROVOKED.items() for changes in of])
def test_a_warning_where_it_is_due_and_no_other(name, changes):
    found = warnings(series(**changes))
    assert [(warning.name, warning.lanes) for warning in found] == [(name, (0,))]
    assert "\n" not in found[0].text and found[0].step % 100 == 0


@pytest.mark.parametrize("changes", PASSES)
def test_no_warning_where_none_is_due(changes):
    assert warnings(series(**changes)) == []


def test_the_step_is_the_first_that_shows_it():
    assert warnings(series(invalid=at(0.0, slice(12, None), 0.02)))[0].step == 1300
    assert warnings(series(entropy=at(1.0, slice(10, None), 0.001)))[0].step == 1300  # the third such row


def test_supervised_training_may_grow_certain():
    rows = [{k: v for k, v in row.items() if not k.startswith("episode/")} for row in series(entropy=0.0001)]
    assert warnings(rows) == []


def test_the_entropy_of_a_density_may_pass_zero():
    drifting: dict[str, Any] = {"entropy": np.linspace(0.02, -0.02, ROWS), "episode__return": FLAT}
    assert [w.name for w in warnings(series(**drifting))] == ["entropy collapse"]
    assert warnings(series(**drifting), action_size=1) == []
    falling = series(entropy=1.4 - 6 * UP)
    assert [w.name for w in warnings(falling, action_size=1)] == ["entropy collapse"]
    assert warnings(falling, action_size=2) == []  # 3 nats in each dimension


def test_the_ratio_may_differ_by_the_rounding_of_its_dtype():
    rows = series(ratio_error=0.02)
    assert len(warnings(rows)) == 1 and warnings(rows, dtype="bfloat16") == []


def test_lanes_that_go_wrong_together_are_named_together_and_once():
    lanes = [series(0, invalid=0.5), series(1), series(2, invalid=0.25), series(3, invalid=at(0.0, 5, 0.1))]
    rows = [row for chunk in zip(*lanes, strict=True) for row in chunk]
    found = warnings(rows)
    assert [(w.name, w.lanes, w.step) for w in found] == [("invalid rewards", (0, 2), 100), ("invalid rewards", (3,), 600)]
    said = sentence(found[0]._asdict(), 4)
    assert said.startswith("invalid rewards in lanes 0, 2 of 4 at step 100: the reward of 50.0% of the episodes")
    assert said.endswith("(numbers of lane 0)")
    assert sentence(found[1]._asdict(), 1).startswith("invalid rewards at step 600: ")


def test_a_lane_that_has_failed_is_silent():
    assert warnings([{**row, "finite": False} for row in series(invalid=0.5, ratio_error=9.0)]) == []


def test_judged_row_by_row_the_warnings_are_the_same():
    lanes = [series(0, kl=at(0.02, 3, 0.9), entropy=0.0), series(1, reward__correct=FLAT, invalid=at(0.0, 7, 1.0))]
    rows = [row for chunk in zip(*lanes, strict=True) for row in chunk]
    whole = warnings(rows)
    assert {w.name for w in whole} > {"KL runaway", "entropy collapse", "invalid rewards"}
    parts, said = [], set()
    for end in range(2, len(rows) + 1, 2):
        new = warnings(rows[:end], said=said, after=rows[end - 3]["step"] if end > 2 else -1)
        said |= {(w.name, lane) for w in new for lane in w.lanes}
        parts += new
    assert parts == whole


# Runs

PPO = {
    "env": "CartPole-v1",
    "seeds": [0, 1],
    "total_steps": 20_000,
    "evals": 2,
    "eval_episodes": 8,
    "checkpoint_seconds": 0,
    "algo.num_envs": 8,
    "algo.num_steps": 64,
    "algo.hidden": [16],
}
GRPO = {
    "env": "tokens/addition",
    "seeds": [0, 1],
    "total_steps": 2_000,
    "evals": 1,
    "eval_episodes": 4,
    "checkpoint_seconds": 0,
    "model.layers": 1,
    "model.width": 8,
    "model.heads": 2,
    "model.mlp": 8,
    "algo.name": "grpo",
    "algo.num_groups": 4,
    "algo.group_size": 4,
    "algo.num_epochs": 1,
    "algo.num_minibatches": 1,
}


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    jax.config.update("jax_disable_most_optimizations", True)  # the programs here run for a moment
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def play(tmp_path, settings, **changes):
    """(result, notes that warn)."""
    events = []
    done = run(load(None, {**settings, **changes, "out": str(tmp_path)}), listener=events.append)
    return done, [e["text"] for e in events if e["event"] == "note" and e["text"].startswith("warning: ")]


def test_a_run_that_learns_is_not_warned(tmp_path):
    done, notes = play(tmp_path, PPO)
    assert notes == [] and done.summary["warnings"] == []
    assert "warning" not in summary_text(done.summary)
    assert "<dt>warnings</dt><dd>none</dd>" in (done.path / "report.html").read_text()


def test_a_cold_start_on_sums_is_warned_of_flat_groups_once_and_everywhere(tmp_path):
    done, notes = play(tmp_path, GRPO)
    (warning,) = done.summary["warnings"]
    assert (warning["name"], warning["lanes"]) == ("all groups flat", [0, 1])
    assert notes == [f"warning: {sentence(warning, 2)}"] and "in every lane at step" in notes[0]
    info, summary = (json.loads((done.path / name).read_text()) for name in ("run.json", "summary.json"))
    assert info["warnings"] == summary["warnings"] == [warning]
    assert sentence(warning, 2) in summary_text(done.summary)
    page = (done.path / "report.html").read_text()
    assert re.search(r"<h3>Health</h3><dl><dt>warning</dt><dd>all groups flat in every lane at step", page)


@dataclasses.dataclass(frozen=True)
class Talkative(CharTask):
    """Paid for length; whether the answer is right is measured and not paid."""

    alphabet = "ab"
    components = ("long", "right")
    prompt_length: int = 1
    max_tokens: int = 8

    def sample(self, key):
        return Problem(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))

    def verify(self, problem, completion, length):
        return jnp.stack([length / 8, (completion[0] == problem.answer[0]).astype(jnp.float32)])


def talkative():
    return TokenEnvironment(Talkative(), weights={"right": 0.0}, truncated_counts=True)


def test_a_policy_that_is_paid_for_length_is_warned_of(tmp_path):
    env = f"{__name__}:talkative"
    done, _ = play(tmp_path, GRPO, env=env, total_steps=12_000, evals=3, **{"algo.learning_rate": 1e-3, "algo.num_groups": 8})
    found = [w for w in done.summary["warnings"] if w["name"] == "return and length up, gold flat"]
    assert found and "reward/right" in found[0]["text"]


BAD = {**PPO, "total_steps": 5_000, "evals": 1, "algo.learning_rate": 1.0}  # warns in two chunks or more of five


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    done, notes = play(tmp_path_factory.mktemp("bad"), BAD)
    return done, notes


def test_a_learning_rate_that_is_far_too_high_is_warned_of(bad):
    done, notes = bad
    assert {w["name"] for w in done.summary["warnings"]} == {"KL runaway", "entropy collapse"}
    assert len({w["step"] for w in done.summary["warnings"]}) > 1
    assert notes == [f"warning: {sentence(w, 2)}" for w in done.summary["warnings"]]


def test_a_resumed_run_neither_loses_nor_repeats_a_warning(tmp_path, bad, monkeypatch):
    """The kill comes before one warning is said, and the last checkpoint before another that is."""
    whole, notes = bad
    experiment, judge, events = load(None, {**BAD, "out": str(tmp_path)}), health.warnings, []

    def listen(event):
        events.append(event)
        if event["event"] == "chunk" and event["step"] == whole.summary["warnings"][-1]["step"]:
            raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(health, "warnings", lambda *args: [w for w in judge(*args) if w.name != "KL runaway"])
        with pytest.raises(KeyboardInterrupt):
            run(experiment, listener=listen)
    before = [e["text"] for e in events if e["event"] == "note" and e["text"].startswith("warning: ")]
    shutil.rmtree(max((experiment.path / "checkpoints").iterdir(), key=lambda path: int(path.name)))
    done, after = play(tmp_path, BAD)
    assert all("KL runaway" in note for note in after) and sorted(before + after) == sorted(notes)
    assert done.summary["warnings"] == whole.summary["warnings"]
