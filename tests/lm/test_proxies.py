"""Proxies by hand, and what evaluations, groups, demonstrations and tools make of an environment that pays one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import grpo, sft
from rljax.envs import check, vectorize
from rljax.envs.tokens import TokenEnvironment
from rljax.envs.wrappers import as_evaluated
from rljax.experiment import InputError, load
from rljax.experiment.lanes import build
from rljax.experiment.traces import transcribe
from rljax.lm.graders import make_grader
from rljax.lm.proxies import ProxyReward, contains
from rljax.lm.tasks import Addition
from rljax.lm.text import TextTask
from rljax.lm.tokenizer import CharTokenizer
from rljax.networks import Transformer

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
TINY = Transformer(layers=1, width=16, heads=2, mlp=16)
CONFIG = grpo.Config(model=TINY, num_groups=4, group_size=2, num_epochs=1, num_minibatches=1)
TOKENIZER = Addition().tokenizer
EOS = TOKENIZER.eos_ids[0]
NAMES = ("addition", "chain_sum", "reversing", "sorting", "brackets", "countdown", "multiplication")


@pytest.mark.parametrize(
    ("said", "answer", "expected"),
    [
        ("17", "17", True),
        ("16,17,18", "17", True),
        ("117", "17", True),
        ("1,7", "17", False),
        ("71", "17", False),
        ("1", "17", False),
        ("", "17", False),
        ("", "", True),
        ("42", "", True),
        ("1777", "777", True),
        ("17", "171", False),
    ],
)
def test_contains(said, answer, expected):
    completion = np.full(8, 7, np.int32)  # what lies past the length is no part of it
    completion[: len(said)] = TOKENIZER.encode(said)
    padded = np.full(3, -1, np.int32)
    padded[: len(answer)] = TOKENIZER.encode(answer)
    assert bool(contains(jnp.asarray(completion), jnp.int32(len(said)), jnp.asarray(padded))) == expected


def test_an_answer_in_the_last_places_is_contained():
    assert contains(jnp.asarray([4, 4, 1, 7]), jnp.int32(4), jnp.asarray([1, 7, -1]))
    assert not contains(jnp.asarray([4, 4, 1, 7]), jnp.int32(3), jnp.asarray([1, 7, -1]))


@functools.cache
def made(proxy, truncated_counts=False):
    env = rljax.make_env("tokens/addition", digits=1, max_tokens=8, truncated_counts=truncated_counts, proxy=proxy)
    return env, jit(env.reset), jit(env.step)


def say(proxy, text, end=True, key=0, truncated_counts=False):
    """``(rewards, time step of the last)`` of a completion; ``{}`` stands for the right answer."""
    _, reset, step = made(proxy, truncated_counts)
    state, timestep = reset(jax.random.key(key))
    answer = TOKENIZER.decode([int(token) for token in state.problem.answer if token >= 0])
    rewards = []
    for token in [*TOKENIZER.encode(text.replace("{}", answer)), *([EOS] if end else [])]:
        state, timestep = step(jax.random.key(0), state, jnp.int32(token))
        rewards.append(float(timestep.reward))
    return rewards, timestep


def test_length_pays_tokens_whatever_they_say():
    assert say("length", "")[0] == [0.0]
    assert say("length", "?? 4")[0] == [0.0] * 4 + [0.5]
    rewards, last = say("length", "[[[[[[[")
    assert rewards == [0.0] * 7 + [7 / 8]
    assert last.terminated and last.info["reward/exact"] == 0.0


def test_contains_pays_a_list_and_the_task_does_not():
    rewards, last = say("contains", "?,{}")
    assert rewards[:-1] == [0.0] * (len(rewards) - 1) and rewards[-1] == 1.0
    assert last.info["reward/exact"] == 0.0
    rewards, last = say("contains", "{}")
    assert rewards[-1] == last.info["reward/exact"] == 1.0
    assert say("contains", "?")[0] == [0.0, 0.0]


@pytest.mark.parametrize("counts", [False, True])
def test_what_was_cut_is_paid_as_the_environment_says(counts):
    rewards, last = say("length", "[" * 8, end=False, truncated_counts=counts)
    assert last.truncated and not last.terminated
    assert rewards == [0.0] * 7 + [float(counts)]


@pytest.mark.parametrize("name", NAMES)
def test_every_task_takes_a_proxy_and_a_limit(name):
    env = rljax.make_env(f"tokens/{name}", max_tokens=40, proxy="contains")
    check(env, name)
    assert env.max_tokens == 40 and env.observation_space.length == env.task.prompt_length + 40


@pytest.mark.parametrize("name", ["addition", "countdown", "multiplication"])
def test_demonstrations_have_room(name):
    """They are as wide as the task asks, the episode as long as the environment allows; their rewards are never looked at."""
    env = rljax.make_env(f"tokens/{name}", max_tokens=30, proxy="contains")
    timesteps, actions, mask = jit(jax.vmap(env.demonstration))(jax.random.split(jax.random.key(0), 8))
    assert actions.shape == (8, 30) and mask.any(1).all()
    done = np.asarray(timesteps.done).argmax(1)
    np.testing.assert_array_equal(np.asarray(timesteps.info["reward/exact"])[np.arange(8), done], 1.0)


def test_evaluations_are_paid_the_tasks_own_reward():
    env = made("length")[0]
    assert isinstance(as_evaluated(env), TokenEnvironment)
    scaled = rljax.make_env("tokens/addition", proxy="length", reward_scale=3.0, time_limit=5)
    assert isinstance(as_evaluated(scaled).env, TokenEnvironment) and as_evaluated(scaled).max_steps == 5
    assert isinstance(as_evaluated(rljax.make_env("tokens/addition")), TokenEnvironment)


def test_a_tools_words_are_part_of_the_completion():
    env = rljax.make_env("tokens/multiplication", digits=1, max_tokens=16, proxy="length")
    step = jit(env.step)
    state, timestep = jit(env.reset)(jax.random.key(0))
    for token in env.tokenizer.encode("[3*4]"):
        state, timestep = step(jax.random.key(0), state, jnp.int32(token))
    forced = 0
    while timestep.action_mask.sum() == 1:
        state, timestep = step(jax.random.key(0), state, timestep.action_mask.argmax())
        forced += 1
    _, timestep = step(jax.random.key(0), state, jnp.int32(EOS))
    assert forced == len("(12)")
    assert float(timestep.reward) == (5 + 4) / 16


def test_the_end_of_an_episode_in_a_batch():
    envs = vectorize(made("length")[0], 2)
    step = jit(envs.step)
    state, _ = jit(envs.reset)(jax.random.key(0))
    rewards = []
    for tokens in ([1, EOS], [2, 3], [EOS, EOS]):  # the second begins anew after its first step
        state, timestep = step(jax.random.key(1), state, jnp.asarray(tokens))
        rewards.append(timestep.reward.tolist())
    assert rewards == [[0.0, 0.0], [0.0, 0.0], [2 / 8, 1 / 8]]


def test_episodes_of_grpo_are_paid_the_proxy_and_report_the_task():
    env = made("length")[0]
    agent = grpo.make(CONFIG, env)

    said = jit(lambda key: transcribe(agent, env, agent.init(key), key, 8, False, None))(jax.random.key(0))
    length = (np.asarray(said.context)[:, env.task.prompt_length :] >= 0).sum(1)
    np.testing.assert_allclose(said.reward, np.where(said.terminated, (length - 1) / 8, 0.0))
    assert said.reward.max() > 0.0
    assert set(said.components) == {"exact"} and not said.components["exact"].any()
    _, metrics = jax.eval_shape(lambda key: agent.step(agent.init(key)), jax.random.key(0))
    assert {"episode/return", "reward/exact"} <= set(metrics)


def test_fine_tuning_finds_the_demonstrations():
    agent = sft.make(sft.Config(model=TINY, batch_size=4), made("contains")[0])
    _, metrics = jax.eval_shape(lambda key: agent.step(agent.init(key)), jax.random.key(0))
    assert "loss/nll" in metrics


def test_wrong_values_are_named():
    with pytest.raises(ValueError, match=r"^env_params\.proxy must be 'length' or 'contains', got 'lenght'; did you mean"):
        rljax.make_env("tokens/addition", proxy="lenght")
    with pytest.raises(ValueError, match=r"env_params\.max_tokens must be a whole number, 1 or more, got 2\.5"):
        rljax.make_env("tokens/addition", max_tokens=2.5)
    task = TextTask([{"prompt": "1", "answer": "2"}], CharTokenizer("12"), make_grader({"type": "exact"}), max_tokens=2)
    with pytest.raises(ValueError, match=r"env_params\.proxy 'length': a task that is graded on the host takes a grader"):
        ProxyReward(TokenEnvironment(task), "length")
    config = {"env": "tokens/addition", "total_steps": 64, "algo.name": "grpo", "env_params.proxy": 3}
    with pytest.raises(InputError, match=r"env_params\.proxy must be 'length' or 'contains', got 3"):
        build(load(None, config))
