"""Language models as experiments: ``[model]`` in a config, lanes that begin with what their seed has learnt, resuming."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from rljax.envs.tokens import TokenEnvironment
from rljax.experiment import (
    InputError,
    evaluate,
    load,
    load_states,
    parse_overrides,
    replay,
    resume,
    run,
    sample_answers,
    trace,
    traces,
    train,
)
from rljax.lm.tasks import Reversing

SFT = """
env = "tokens/reversing"
total_steps = 160
seeds = [5, 3]
evals = 1
eval_episodes = 4

[env_params]
length = 1

[model]
layers = 1
width = 8
heads = 2
mlp = 8

[algo]
name = "sft"
batch_size = 8
learning_rate = 0.02
"""
GRPO = """
base = "sft.toml"
start_from = "sft.toml"
evals = 2

[algo]
name = "grpo"
num_groups = 2
group_size = 4
num_minibatches = 2
kl_coef = 0.1

[sweep.algo]
learning_rate = [0.0, 0.02]
kl_coef = [0.0, 0.5]
"""


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    """Programs here run for a moment, and most of the time is compilation, which may as well be poor."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "sft.toml").write_text(SFT)
    (folder / "grpo.toml").write_text(GRPO)
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    """``(result, events)``; lanes are two learning rates by two leashes by two seeds."""
    events = []
    return run(load(folder / "grpo.toml", {"out": str(folder / "runs")}), listener=events.append), events


def leaves(tree):
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_same(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def lane(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_lanes_begin_with_what_their_seed_has_learnt(finished):
    result, _ = finished
    source = result.experiment.start_from
    assert source.path.exists() and source.seeds == (5, 3)
    learnt = load_states(source.path)[1].params
    moved = 0
    for i, row in enumerate(result.lanes):
        own = lane(learnt, source.seeds.index(row["seed"]))
        assert_same(lane(result.states.reference, i), own)
        if row["algo.learning_rate"] == 0.0:
            assert_same(lane(result.states.params, i), own)
        else:
            moved += any(np.any(a != b) for a, b in zip(*map(leaves, (lane(result.states.params, i), own)), strict=True))
    assert moved >= 3
    assert any(np.any(a != b) for a, b in zip(*map(leaves, (lane(learnt, 0), lane(learnt, 1))), strict=True))


def test_at_first_the_policy_is_the_reference(finished):
    result, _ = finished
    first = min(row["step"] for row in rows(result.path) if row["step"] > 0)
    for row in rows(result.path):
        if row["step"] == first or (row["algo.learning_rate"] == 0.0 and row["step"] > 0):
            assert row["kl_reference/k3"] == row["kl_reference/episode"] == 0.0
            assert row["ratio_error"] < 1e-5
        if row["step"] > 0:
            assert row["kl_coef"] == np.float32(row["algo.kl_coef"])


def test_a_sweep_of_the_leash_with_its_seeds_is_one_program(finished):
    result, events = finished
    programs = [event["program"] for event in events if event["event"] == "start"]
    assert [program.experiment.algo_name for program in programs] == ["sft", "grpo"]
    assert len(result.experiment.programs()) == 1 and programs[1].num_lanes == 8
    assert programs[1].traces["chunk"] == programs[1].traces["evaluate"] == 1


def test_the_config_that_a_run_writes_makes_the_same_experiment(finished, tmp_path, monkeypatch):
    result, _ = finished
    monkeypatch.chdir("/")  # nothing in it depends on where it is read
    again = load(result.path)
    assert again.hash == result.experiment.hash
    assert dataclasses.replace(again.start_from, out="", name="") == dataclasses.replace(
        result.experiment.start_from, out="", name=""
    )
    (tmp_path / "config.toml").write_text((result.path / "config.toml").read_text())
    assert load(tmp_path / "config.toml").hash == result.experiment.hash


def test_hash_covers_what_a_run_starts_from(folder):
    e = load(folder / "grpo.toml")
    assert load(folder / "grpo.toml", {"out": "elsewhere"}).hash == e.hash
    assert load(folder / "grpo.toml", {"start_from.name": "other", "start_from.checkpoint_seconds": 1}).hash == e.hash
    assert load(folder / "grpo.toml", {"start_from.algo.learning_rate": 0.1}).hash != e.hash
    assert load(folder / "grpo.toml", {"start_from": "none"}).hash != e.hash
    assert load(folder / "grpo.toml", {"model.width": 16}).hash != e.hash


def test_a_run_that_is_there_serves_other_seeds_in_any_order(finished, folder):
    result, _ = finished
    source = result.experiment.start_from
    before = (source.path / "metrics.jsonl").stat().st_mtime_ns
    e = load(folder / "grpo.toml", {"start_from": str(source.path), "seeds": [3], "out": str(folder / "others")})
    assert e.start_from.seeds == (5, 3) and e.start_from.path == source.path
    e = dataclasses.replace(e, sweep={}, total_steps=16)
    params = run(e).states.reference
    assert (source.path / "metrics.jsonl").stat().st_mtime_ns == before
    assert_same(lane(params, 0), lane(load_states(source.path)[1].params, 1))


def test_overrides_reach_what_comes_first(folder):
    flags = "--start-from.total-steps 320 --start-from.algo.learning-rate 0.5 --seeds 7 8"
    e = load(folder / "grpo.toml", parse_overrides(flags.split()))
    assert (e.start_from.total_steps, e.start_from.algo.learning_rate, e.start_from.seeds) == (320, 0.5, (7, 8))
    assert e.total_steps == 160


def test_without_files_it_starts_the_same_way(finished, folder):
    e = dataclasses.replace(load(folder / "grpo.toml"), sweep={}, total_steps=16)
    states, metrics, _ = train(e)
    assert metrics["kl_reference/episode"][0, 0] == 0.0
    learnt = load_states(finished[0].experiment.start_from.path)[1].params
    for a, b in zip(leaves(states.reference), leaves(learnt), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


# Evaluation elsewhere


def test_a_language_model_plays_any_task_over_its_alphabet(finished, tmp_path):
    result, _ = finished
    logged = [row["eval/return"] for row in rows(result.path) if row["step"] == 160]
    _, own = evaluate(result.path, overrides={"env": "tokens/reversing"})
    np.testing.assert_array_equal(np.asarray(own.returns, np.float64).mean(1), logged)
    for overrides in ({"env_params.length": 4}, {"env": "tokens/addition", "env_params.digits": 3}):
        evaluation = evaluate(result.path, 16, overrides=overrides)[1]
        assert evaluation.returns.shape == (8, 16) and (evaluation.lengths <= 5).all() and evaluation.finished.all()
    rewards, right = sample_answers(result.path, 4, 2, overrides={"env": "tokens/sorting"})
    assert rewards.shape == right.shape == (8, 4, 2)


def test_a_trace_of_another_environment_is_replayed_there(finished, tmp_path):
    result, _ = finished
    head, episodes = trace(result.path, 2, overrides={"env": "tokens/addition", "env_params.digits": 1})
    assert all(re.fullmatch(r"\d\+\d=", row["prompt"]) and row["step"] == 160 for row in episodes)
    traces.write(tmp_path / "said.jsonl", head, episodes)
    assert replay(tmp_path / "said.jsonl") == (16, [])


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPole-v1", "[model] takes token observations"),
        (f"{__name__}:letters", "its actions are Discrete(4), and those of the run Discrete(22)"),
    ],
)
def test_a_language_model_needs_as_many_tokens(finished, env, message):
    refused(lambda: evaluate(finished[0].path, overrides={"env": env}), message)


def letters():
    class Letters(Reversing):
        alphabet = "abc"

        def text(self, characters):
            return super().text("a")

    return TokenEnvironment(Letters(2))


# Resuming


def interrupted(folder, source, place, chunks, **changes):
    """A run that was stopped at its n-th chunk, as by Ctrl-C."""
    seen = []

    def listen(event):
        seen.append(event["event"])
        if seen.count("chunk") == chunks:
            raise KeyboardInterrupt

    e = load(folder / "grpo.toml", {"out": str(place), "start_from": str(source.path), **changes})
    with pytest.raises(KeyboardInterrupt):
        run(e, listener=listen)
    return e


def test_resume_is_bit_for_bit(finished, folder, tmp_path):
    result, _ = finished
    e = interrupted(folder, result.experiment.start_from, tmp_path, 4, checkpoint_seconds=0)
    assert e.hash == result.experiment.hash
    resumed = resume(e.path)
    assert_same(resumed.states, result.states)
    assert (resumed.path / "metrics.jsonl").read_bytes() == (result.path / "metrics.jsonl").read_bytes()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_there_again(finished, folder, tmp_path):
    result, _ = finished
    e = interrupted(folder, result.experiment.start_from, tmp_path, 2, checkpoint_seconds=1e9)
    assert_same(resume(e.path).states, result.states)


# Wrong input


def refused(function, *words):
    with pytest.raises(InputError) as error:
        function()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"start_from": 3}, ["start_from must name a config or a run directory, got 3"]),
        ({"start_from": "nowhere.toml"}, ["cannot read config nowhere.toml"]),
        ({"start_from.algo.lerning_rate": 1.0}, ["algo.lerning_rate", "did you mean 'algo.learning_rate'"]),
        ({"start_from.total_steps": "many"}, ["total_steps must be a whole number"]),
        ({"start_from": "none", "start_from.total_steps": 5}, ["there is no start_from that it could change"]),
        ({"start_from.sweep.algo.learning_rate": [0.1, 0.2]}, ["start_from", "sweeps algo.learning_rate"]),
    ],
    ids=str,
)
def test_wrong_starts_are_refused(folder, overrides, words):
    refused(lambda: load(folder / "grpo.toml", overrides), *words)


def test_a_run_without_a_lane_of_the_seed_is_refused(finished, folder):
    """A config is run for the seeds that are asked for; a run has those that it has."""
    source = finished[0].experiment.start_from
    refused(lambda: load(folder / "grpo.toml", {"start_from": str(source.path), "seeds": [3, 4]}), "has no lane of seed 4")
    assert load(folder / "grpo.toml", {"seeds": [3, 4]}).start_from.seeds == (3, 4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model.width": 16}, ["start_from", "['embed']", "16] and [", "8], here and there", "[model]"]),
        ({"algo.name": "reinforce"}, ["start_from", "reinforce cannot start"]),
    ],
    ids=str,
)
def test_parameters_that_do_not_fit_are_named(finished, folder, tmp_path, overrides, words):
    source = finished[0].experiment.start_from
    changes = {"start_from": str(source.path), "out": str(tmp_path), **overrides}
    if "algo.name" in overrides:
        plain = {"env": "tokens/reversing", "env_params.length": 1, "total_steps": 64, "seeds": [3], "algo.num_envs": 4}
        refused(lambda: run(load(None, {**plain, **changes})), *words)
    else:
        refused(lambda: run(dataclasses.replace(load(folder / "grpo.toml", changes), sweep={})), *words)


# [model]

GIVEN = {"env": "tokens/addition", "total_steps": 1000, "algo.name": "grpo"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model.widht": 8}, ["unknown key model.widht", "did you mean 'model.width'"]),
        ({"sweep.model.widht": [8, 16]}, ["unknown key sweep.model.widht", "did you mean 'sweep.model.width'"]),
        ({"model.width": 8.5}, ["model.width must be a whole number, got 8.5"]),
        ({"model.width": 0}, ["model.width must be >= 1, got 0"]),
        ({"model.family": "lama"}, ["model.family must be one of llama, gpt2", "did you mean 'llama'"]),
        ({"model.kv_heads": 3}, ["model.kv_heads (3) must divide model.heads (4)"]),
        ({"sweep.model.heads": [2, 3]}, ["model.heads (3) must divide model.width (64)"]),
        ({"model.tied": 1}, ["model.tied must be true or false"]),
        ({"algo.name": "ppo", "model.width": 8}, ["model.width", "'ppo' has no transformer"]),
        ({"algo.name": "ppo", "sweep.model.width": [8]}, ["model.width", "'ppo' has no transformer"]),
        ({"algo.model": "llama"}, ["unknown key algo.model"]),
    ],
    ids=str,
)
def test_models_that_do_not_fit_are_refused(overrides, words):
    refused(lambda: load(None, {**GIVEN, **overrides}).programs(), *words)


def test_models_are_swept_as_programs():
    e = load(None, {**GIVEN, "model.heads": 2, "sweep.model.width": [8, 16], "sweep.algo.kl_coef": [0.0, 0.1], "seeds": [0, 1]})
    assert not e.is_traced("model.width")
    programs = e.programs()
    assert [p.algo.model.width for p in programs] == [8, 16] and all(p.algo.model.heads == 2 for p in programs)
    assert all(len(p.lanes()) == 4 for p in programs)
    assert len({p.hash for p in programs}) == 2


def test_a_model_is_written_out_and_read_back(tmp_path):
    for name, model in (("grpo", {"model.width": 16, "model.family": "gpt2"}), ("grpo", {}), ("sft", {})):
        e = load(None, {**GIVEN, "algo.name": name, **model})
        (tmp_path / "again.toml").write_text(e.to_toml())
        again = load(tmp_path / "again.toml")
        assert dataclasses.replace(again, name=e.name) == e and again.hash == e.hash
    assert load(None, GIVEN).algo.model is None
