"""Language models as experiments: ``[model]`` in a config, lanes that begin with what their seed has learnt, resuming."""

import dataclasses
import functools
import hashlib
import importlib
import json
import re

import jax
import numpy as np
import pytest

from rljax.agents import make_agent
from rljax.envs.tokens import TokenEnvironment
from rljax.envs.wrappers import LearnedReward
from rljax.experiment import (
    InputError,
    evaluate,
    export,
    load,
    load_states,
    parse_overrides,
    red_team,
    replay,
    resume,
    run,
    sample_answers,
    trace,
    traces,
    train,
)
from rljax.experiment.lanes import build, first_environment, judge
from rljax.lm.tasks import Reversing
from tests.experiment.runs import assert_same, leaves, rows, stop_after

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

REWARD = """
base = "sft.toml"
start_from = "sft.toml"

[algo]
name = "reward_model"
num_pairs = 32
num_heldout = 32
batch_size = 8
answers = 8
ensemble = 2
"""
PAID = """
base = "sft.toml"
start_from = "sft.toml"
reward_from = "reward.toml"
total_steps = 128
evals = 2

[algo]
name = "ppo"
num_envs = 8
num_minibatches = 1
kl_coef = 0.1
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
    (folder / "reward.toml").write_text(REWARD)
    (folder / "paid.toml").write_text(PAID)
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    """``(result, events)``; lanes are two learning rates by two leashes by two seeds."""
    events = []
    return run(load(folder / "grpo.toml", {"out": str(folder / "runs")}), listener=events.append), events


def lane(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


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


def interrupted(folder, source, place, chunks, config="grpo.toml", **changes):
    """A run that was stopped at its n-th chunk, as by Ctrl-C."""
    e = load(folder / config, {"out": str(place), "start_from": str(source.path), **changes})
    with pytest.raises(KeyboardInterrupt):
        run(e, listener=stop_after(chunks))
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


# Paid by a reward model


@pytest.fixture(scope="module")
def paid(folder):
    """``(result, events)`` of PPO with a reward model of each seed; both begin with the same fine-tuned policies."""
    events = []
    return run(load(folder / "paid.toml", {"out": str(folder / "paid")}), listener=events.append), events


def test_a_reward_model_is_trained_first_on_the_seeds_and_in_the_place_of_what_it_pays(paid, folder):
    result, events = paid
    e = result.experiment
    for source in (e.start_from, e.reward_from, e.reward_from.start_from):
        assert (source.seeds, source.out) == (e.seeds, str(folder / "paid"))
    assert e.reward_from.start_from.path == e.start_from.path  # which is trained once
    started = [event["experiment"].algo_name for event in events if event["event"] == "start"]
    assert started == ["sft", "reward_model", "ppo"]
    learnt = load_states(e.start_from.path)[1].params
    assert_same(load_states(e.reward_from.path)[1].origin, learnt)
    assert_same({name: result.states.reference[name] for name in learnt}, learnt)


def test_what_is_learnt_from_is_the_score_of_the_lanes_own_model(paid):
    """``episode/return`` of the first update, which fits the seed's model and not the other's."""
    result, _ = paid
    e = result.experiment
    models, learnt = (load_states(source.path)[1].params for source in (e.reward_from, e.start_from))
    env = first_environment(e)
    network = judge(e, env.observation_space)

    @jax.jit
    @jax.vmap
    def first_return(seed, model, params):
        agent = make_agent(e.algo, LearnedReward(env, functools.partial(network.pays, model)))
        total, count = agent.step(agent.init(jax.random.key(seed), params=params))[1]["episode/return"]
        return total / count

    seeds = np.asarray(e.seeds, np.uint32)
    returns, swapped = (first_return(seeds, lane(models, np.array(order)), learnt) for order in ([0, 1], [1, 0]))
    logged = [row["episode/return"] for row in rows(result.path) if row["step"] == 16]
    np.testing.assert_allclose(logged, returns, atol=1e-4)
    assert np.all(np.abs(np.asarray(returns - swapped)) > 1e-3)


def test_evaluations_are_gold_and_the_return_of_episodes_is_the_proxy(paid):
    result, _ = paid
    logged = rows(result.path)
    for row in logged:
        if "eval/return" in row:
            assert 4 * row["eval/return"] == int(4 * row["eval/return"])  # right or wrong, of four answers
    trained = [row for row in logged if row["step"] > 0]
    assert all(0.0 <= row["reward/exact"] <= 1.0 and row["episode/return"] != row["reward/exact"] for row in trained)
    gold = evaluate(result.path)[1]
    np.testing.assert_array_equal(np.asarray(gold.returns).mean(1), [row["eval/return"] for row in logged[-2:]])


def test_an_evaluation_needs_no_reward_model_and_what_does_says_which(paid):
    result, _ = paid
    judge_path = result.experiment.reward_from.path
    away = judge_path.with_name("away")
    judge_path.rename(away)
    try:
        assert evaluate(result.path)[1].finished.all()
        refused(
            lambda: red_team(result.experiment),
            f"the reward model {result.experiment.reward_from.name} has not been trained yet",
            "rljax run",
        )
    finally:
        away.rename(judge_path)


def test_a_source_of_which_a_seed_has_failed_is_no_source(paid):
    result, _ = paid
    lost = {"settings": [{"failed": [{"seed": 7, "lane": 0, "step": 64, "reason": "NaN"}]}]}
    module = importlib.import_module("rljax.experiment.run")
    refused(lambda: module._trained("reward_from", dataclasses.replace(result, summary=lost)), "reward_from", "seed 7 failed")
    assert module._trained("reward_from", result) is result.states


def test_a_run_whose_file_has_changed_is_not_taken_for_it(paid, tmp_path):
    result, _ = paid
    file, record = tmp_path / "pairs.jsonl", result.path / "run.json"
    file.write_text("{}")
    whole = record.read_text()
    try:
        for seen, is_refused in (("0123456789ab", True), (hashlib.sha256(b"{}").hexdigest()[:12], False)):
            record.write_text(json.dumps({**json.loads(whole), "files": {str(file): seen}}))
            if is_refused:
                refused(lambda: run(result.experiment), "pairs.jsonl has changed since this run began: --fresh starts over")
            else:
                run(result.experiment)
    finally:
        record.write_text(whole)


def test_an_experiment_that_is_paid_by_a_model_resumes_bit_for_bit(paid, folder, tmp_path):
    result, _ = paid
    sources = result.experiment.start_from, result.experiment.reward_from
    killed = interrupted(
        folder, sources[0], tmp_path, 3, config="paid.toml", reward_from=str(sources[1].path), checkpoint_seconds=0
    )
    assert killed.hash == result.experiment.hash and killed.path != result.path
    resumed = resume(killed.path)
    assert_same(resumed.states, result.states)
    assert (resumed.path / "metrics.jsonl").read_bytes() == (result.path / "metrics.jsonl").read_bytes()


def test_hash_covers_what_pays(folder):
    e = load(folder / "paid.toml")
    hashes = {e.hash}
    for change in (
        {"reward_from.algo.ensemble": 3},
        {"reward_from": "none"},
        {"reward_from.start_from": "none"},
        {"reward_from.algo.label_noise": 0.2},
    ):
        hashes.add(load(folder / "paid.toml", change).hash)
    assert len(hashes) == 5
    assert load(folder / "paid.toml", {"reward_from.name": "other", "out": "elsewhere"}).hash == e.hash
    assert load(folder / "paid.toml", {"reward_from": "none"}).reward_from is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"reward_from": 3}, ["reward_from must name a config or a run directory, got 3"]),
        ({"reward_from": "none", "reward_from.total_steps": 5}, ["there is no reward_from that it could change"]),
        ({"reward_from.algo.ensembel": 5}, ["algo.ensembel", "did you mean 'algo.ensemble'"]),
        ({"reward_from.sweep.algo.label_noise": [0.0, 0.1]}, ["reward_from", "sweeps algo.label_noise"]),
    ],
    ids=str,
)
def test_what_cannot_pay_is_refused(folder, overrides, words):
    refused(lambda: load(folder / "paid.toml", overrides), *words)


def test_what_is_no_reward_model_cannot_pay(folder):
    refused(lambda: load(folder / "paid.toml", {"reward_from": str(folder / "sft.toml")}), "reward_from: sft is not of algo.name")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"algo.name": "a2c"}, "algo.name: a grader or a reward model pays whole episodes"),
        ({"algo.name": "dqn"}, "algo.name: a grader or a reward model pays whole episodes"),
        ({"algo.name": "sft"}, "reward_from: algo.name sft learns from examples and is paid nothing; leave it out"),
        ({"algo.name": "dpo"}, "reward_from: algo.name dpo learns from examples and is paid nothing; leave it out"),
        ({"env": "CartPole-v1"}, "reward_from: a reward model pays for tokens, and CartPole-v1 has none"),
    ],
    ids=str,
)
def test_who_cannot_be_paid_is_told_so_before_anything_is_trained(paid, overrides, words):
    """The reward of a step is 0 where a model pays: agents that learn from steps would learn nothing, and say nothing."""
    path = str(paid[0].experiment.reward_from.path)
    plain = {"env": "tokens/reversing", "total_steps": 64, "seeds": [3], "reward_from": path}
    refused(lambda: build(load(None, {**plain, **overrides})), words)


def test_a_reward_model_of_other_tokens_cannot_pay(paid, tmp_path):
    source = paid[0].experiment.reward_from
    model = {"model.layers": 1, "model.width": 8, "model.heads": 2, "model.mlp": 8}
    e = load(
        None,
        {
            "env": f"{__name__}:letters",
            "total_steps": 16,
            "seeds": [3],
            "out": str(tmp_path),
            "reward_from": str(source.path),
            "algo.num_envs": 8,
            **model,
        },
    )
    refused(lambda: run(e), "reward_from", "['embed'] is [2, 4, 8] and [2, 22, 8]", "was trained on other tokens")


def test_a_reward_model_is_judged_on_its_own_pairs(paid, tmp_path):
    path = paid[0].experiment.reward_from.path
    assert {row["eval/length"] for row in rows(path) if "eval/return" in row} == {0.0}
    assert json.loads((path / "run.json").read_text())["random"]["return"] is None
    refused(lambda: evaluate(path, overrides={"env_params.length": 2}), "measured by itself")
    refused(lambda: export(path, 0, tmp_path / "out"), "is no policy")


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
        ({"algo.name": "a2c", "model.width": 8}, ["model.width", "'a2c' has no transformer"]),
        ({"algo.name": "a2c", "sweep.model.width": [8]}, ["model.width", "'a2c' has no transformer"]),
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
