"""Text tasks graded on the host, limits on completions, tools, adapters on a pretrained model, and the way out to Hugging
Face."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import grpo, sft
from rljax.agents.base import whole
from rljax.agents.on_policy import first_episodes
from rljax.envs import group
from rljax.envs.tokens import TokenEnvironment
from rljax.experiment import InputError, evaluate_agent, export, load, run
from rljax.lm import automata, graders, weights
from rljax.lm.packing import pack
from rljax.lm.tasks import Addition, Multiplication
from rljax.lm.text import HostTool, TextTask
from rljax.lm.tokenizer import CharTokenizer
from rljax.networks import Transformer
from rljax.networks.transformer import forward, init_adapters, init_params, join, merge

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
TINY = Transformer(layers=1, width=16, heads=2, mlp=16)
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "12+1=", "answer": "13"}, {"prompt": "3=", "answer": "3"}]


def text_env(grader, **kwargs):
    task = TextTask(ROWS, CharTokenizer("0123456789+=ab"), graders.make_grader(grader), max_tokens=4)
    return TokenEnvironment(task, **kwargs)


def play(env, agent, seed=0, groups=6, size=2):
    @jit
    def episodes(key):
        params = agent.init(key).params
        return first_episodes(grpo.make_policy(CONFIG, env, size), group(env, groups, size), params, key, env.max_tokens)

    return jax.tree.map(np.asarray, episodes(jax.random.key(seed)))


CONFIG = grpo.Config(model=TINY, num_groups=6, group_size=2, num_epochs=1, num_minibatches=1)


def test_the_grader_decides_the_reward_of_the_last_step():
    env = text_env({"type": "python", "source": "def grade(sample, item): return float(len(sample['output_text']))"})
    episodes = play(env, grpo.make(CONFIG, env), groups=16)
    said = episodes.timesteps.observation[-1][:, env.task.prompt_length :]
    lengths, stopped = episodes.mask.sum(0), episodes.transitions.terminated.any(0, where=episodes.mask)
    expected = np.where(stopped, lengths - 1, 0)  # characters before the end token; what was cut earns nothing
    assert stopped.any()
    assert not stopped.all()
    np.testing.assert_array_equal(episodes.returns, expected)
    np.testing.assert_array_equal(episodes.transitions.reward[~episodes.last], 0.0)
    assert said.shape == (32, 4)


def test_an_answer_that_could_not_be_graded_is_no_zero():
    source = "def grade(sample, item):\n    return None if len(sample['output_text']) % 2 else 1.0"
    env = text_env({"type": "python", "source": source}, truncated_counts=True)
    agent = grpo.make(CONFIG, env)
    state, metrics = jit(lambda key: agent.step(agent.init(key)))(jax.random.key(0))
    assert 0 < float(metrics["invalid"]) < 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    evaluation = jit(lambda s: evaluate_agent(agent, env, s, jax.random.key(1), 24, 10, greedy=False))(state)
    returns = np.asarray(evaluation.returns)
    np.testing.assert_array_equal(returns[~np.isnan(returns)], 1.0)
    assert np.isnan(returns).any()


def test_a_pattern_limits_what_is_said():
    task = Addition(digits=2)
    automaton = automata.compile_regex("[1-3]{2}", task.tokenizer)
    env = TokenEnvironment(task, automaton=automaton, max_tokens=3)
    episodes = play(env, grpo.make(CONFIG, env), groups=16)
    said = episodes.timesteps.observation[-1][:, task.prompt_length :]
    assert episodes.mask.all()  # two digits, and then the end token is all that is legal
    assert set(np.unique(said[:, :2])) == {1, 2, 3}
    np.testing.assert_array_equal(episodes.samples[2], task.tokenizer.eos_ids[0])
    assert episodes.transitions.terminated[2].all()


def test_a_tool_on_the_host_answers_with_forced_tokens():
    task = Multiplication(digits=1)
    asked = []

    def double(call):
        asked.append(call)
        return str(2 * int(call))

    tool = HostTool(double, task.tokenizer, "[", "]", max_tokens=4)
    env = TokenEnvironment(task, tool=tool, max_tokens=10)
    step = jit(env.step)
    state, timestep = env.reset(jax.random.key(0))
    for token in task.tokenizer.encode("[21]"):
        assert timestep.action_mask.all()
        state, timestep = step(jax.random.key(0), state, jnp.int32(token))
    answer = []
    while timestep.action_mask.sum() == 1:
        answer.append(int(timestep.action_mask.argmax()))
        state, timestep = step(jax.random.key(0), state, jnp.int32(answer[-1]))
        assert timestep.info["forced"]
    assert task.tokenizer.decode(answer) == "42"
    assert asked.count("21") >= 1
    state, _ = env.reset(jax.random.key(0))
    for token in task.tokenizer.encode("[?]"):
        state, timestep = step(jax.random.key(0), state, jnp.int32(token))
    assert task.tokenizer.decode([int(timestep.action_mask.argmax())]) == "?"  # an exception is answered too
    assert timestep.action_mask.sum() == 1


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A directory with the weights of a tiny model, and their parameters."""
    path = tmp_path_factory.mktemp("pretrained")
    vocab = Addition().tokenizer.vocab_size
    model = Transformer(vocab=vocab, layers=1, width=16, heads=2, kv_heads=2, head_size=8, mlp=16)
    params = jax.tree.map(np.asarray, init_params(model, jax.random.key(3), vocab))
    weights.save(path, model, params)
    return path, params


def experiment(path, out, **changes):
    overrides = {
        "env": "tokens/addition",
        "total_steps": 64,
        "seeds": [0, 1],
        "evals": 1,
        "eval_episodes": 4,
        "eval_max_steps": 8,
        "out": str(out),
        "model.path": str(path),
        "algo.name": "grpo",
        "algo.num_groups": 4,
        "algo.group_size": 2,
        "algo.num_epochs": 1,
        "algo.num_minibatches": 1,
        "algo.kl_coef": 0.1,
    }
    return load(None, {**overrides, **changes})


def test_training_begins_with_the_pretrained_weights(pretrained, tmp_path):
    path, params = pretrained
    result = run(experiment(path, tmp_path, **{"algo.learning_rate": 0.0}))
    for lane in range(2):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, lane=lane: x[lane], result.states.params), params)


def test_adapters_leave_the_shared_base_alone(pretrained, tmp_path):
    path, params = pretrained
    changes = {"model.lora_rank": 2, "algo.learning_rate": 1e-2}
    result = run(experiment(path, tmp_path, **changes))
    state = jax.tree.map(lambda x: x[0], result.states)
    assert set(state.params) == {"layers"}  # no copy of the base in any lane
    assert {leaf for layer in state.params["layers"][0].values() for leaf in layer} == {"lora_a", "lora_b"}
    target = export(result.path, 0, tmp_path / "exported")
    assert f"began with the weights of `{path}`, by adapters of rank 2 that are merged here" in (target / "README.md").read_text()
    assert (target / "tokenizer.json").is_file()
    exported = weights.load(target)[1]
    np.testing.assert_array_equal(exported["embed"], params["embed"])
    model = Transformer(**weights.sizes(target))
    tokens = jnp.asarray([[1, 2, 3, 4]])
    joined = join(params, state.params)
    lora = Transformer(**weights.sizes(target), path=str(path), lora_rank=2)
    np.testing.assert_allclose(forward(model, exported, tokens), forward(lora, joined, tokens), atol=1e-5)
    moved = [np.abs(np.asarray(x)).max() for x in jax.tree.leaves(jax.tree.map(lambda x: x, state.params))]
    assert max(moved) > 0


def test_new_adapters_change_nothing():
    model = Transformer(layers=1, width=16, heads=2, mlp=16, path="x", lora_rank=3)
    base = init_params(model, jax.random.key(0), 7)
    both = whole(init_adapters(model, jax.random.key(1)), {"base": base})
    tokens = jnp.asarray([[1, 2, 3]])
    np.testing.assert_array_equal(forward(model, both, tokens), forward(model, base, tokens))
    jax.tree.map(np.testing.assert_array_equal, merge(model, both), base)
    assert whole(base, None) is base


def test_sizes_that_the_weights_do_not_have_are_refused(pretrained, tmp_path):
    with pytest.raises(InputError, match=r"model\.layers is 1 in .*, so it cannot be 3; leave it out"):
        experiment(pretrained[0], tmp_path, **{"model.layers": 3})
    with pytest.raises(InputError, match=r"model\.path: no model at nowhere"):
        experiment("nowhere", tmp_path)
    with pytest.raises(InputError, match=r"model\.lora_rank trains adapters of a pretrained model"):
        experiment("", tmp_path, **{"model.lora_rank": 2})


@pytest.mark.parametrize("algo", ["grpo", "sft"])
def test_a_whole_step_calls_no_host(algo):
    env = rljax.make_env("tokens/multiplication")  # with its calculator
    agent = grpo.make(CONFIG, env) if algo == "grpo" else sft.make(sft.Config(model=TINY, batch_size=4), env)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    program = jax.jit(agent.step).lower(state).as_text()
    assert "callback" not in program
    host = text_env({"type": "exact"})
    program = jax.jit(grpo.make(CONFIG, host).step).lower(state_of(host)).as_text()
    assert "callback" in program  # so the word is the right one to look for


def state_of(env):
    return jax.eval_shape(grpo.make(CONFIG, env).init, jax.random.key(0))


def test_env_text_reads_a_file_and_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"env_params\.file: name a file"):
        rljax.make_env("text")
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(ValueError, match=r"env_params\.grader: say how"):
        rljax.make_env("text", file=str(file))
    with pytest.raises(ValueError, match=r"env_params\.choices holds none"):
        rljax.make_env("text", file=str(file), grader={"type": "exact"}, choices=[])
    with pytest.raises(ValueError, match=r"env_params\.file: cannot read none\.jsonl"):
        rljax.make_env("text", file="none.jsonl", grader={"type": "exact"})
    with pytest.raises(ValueError, match=r"env_params\.tokenizer: no model at nowhere"):
        rljax.make_env("text", file=str(file), grader={"type": "exact"}, tokenizer="nowhere")
    with pytest.raises(ValueError, match=r"env_params\.regex and env_params\.choices"):
        rljax.make_env("text", file=str(file), grader={"type": "exact"}, regex="a", choices=["b"])


def test_packing_keeps_every_example_and_wastes_little():
    examples = [([1] * (1 + i % 5), [2] * (1 + i % 3)) for i in range(40)]
    packed = pack(examples, 12)
    total = sum(len(p) + len(c) for p, c in examples)
    assert (packed.tokens >= 0).sum() == total
    assert packed.mask.sum() == sum(len(c) for _, c in examples)
    assert packed.tokens.size < 1.1 * total
    for bad, words in (
        ([([1] * 9, [2] * 4)], "example 0 has 13 tokens"),
        ([([], [2])], "no prompt"),
        ([([1], [])], "no completion"),
    ):
        with pytest.raises(ValueError, match=words):
            pack(bad, 12)


def test_an_example_in_a_packed_row_is_read_as_if_it_were_alone():
    model = Transformer(layers=2, width=16, heads=2, mlp=16)
    params = init_params(model, jax.random.key(0), 9)
    examples = [([1, 2, 3], [4, 5]), ([6], [7, 8]), ([2, 2], [1])]
    packed = pack(examples, 12)
    assert packed.tokens.shape == (1, 12)
    hidden = np.asarray(forward(model, params, jnp.asarray(packed.tokens), jnp.asarray(packed.segments)))[0]
    for prompt, completion in examples:
        ids = [*prompt, *completion]
        alone = np.asarray(forward(model, params, jnp.asarray([ids])))[0]
        starts = [k for k in range(12 - len(ids) + 1) if packed.tokens[0, k : k + len(ids)].tolist() == ids]
        place = next(
            k for k in starts if packed.mask[0, k : k + len(ids)].tolist() == [False] * len(prompt) + [True] * len(completion)
        )
        np.testing.assert_allclose(hidden[place : place + len(ids)], alone, atol=1e-5)


def test_packed_fine_tuning_has_the_loss_of_the_same_examples_one_by_one():
    env = text_env({"type": "exact"})
    agent = sft.make(sft.Config(model=TINY, batch_size=2, pack=20), env)  # all three examples fit into one row
    state = agent.init(jax.random.key(0))
    _, metrics = jit(agent.step)(state)
    total, words = 0.0, 0
    for row in ROWS:
        prompt, answer = (env.tokenizer.encode(row[key]) for key in ("prompt", "answer"))
        ids = jnp.asarray([[*prompt, *answer, env.tokenizer.eos_ids[0]]])
        logits = forward(TINY, state.params, ids)[0] @ state.params["embed"].T
        log_probs = jax.nn.log_softmax(logits)[np.arange(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]]
        total, words = total - float(log_probs.sum()), words + len(log_probs)
    np.testing.assert_allclose(float(metrics["loss/nll"]), total / words, rtol=1e-5)
    with pytest.raises(ValueError, match=r"algo\.pack packs the examples of a file"):
        sft.make(sft.Config(model=TINY, pack=20), TokenEnvironment(Addition()))
