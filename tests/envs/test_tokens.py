"""The token MDP: how conversations end, what tools say, what the reward counts, and agents that know nothing of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import ppo, reinforce
from rljax.envs import Discrete, Tokens, check, env_names, make_env, vectorize
from rljax.envs.tokens import Problem, TokenEnvironment
from rljax.experiment import evaluate_agent
from rljax.lm.automata import compile_regex
from rljax.lm.tasks import CharTask, MixedProblem, Multiplication, pad_right
from rljax.lm.tokenizer import CharTokenizer
from rljax.networks import Transformer, transformer

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
TOKENS = [name for name in env_names() if name.startswith("tokens/")]


@dataclasses.dataclass(frozen=True)
class Echo(CharTask):
    """``a`` or ``b``; saying it back is right. Components: ``exact``, and ``length`` of what was said."""

    alphabet = "ab!"
    components = ("exact", "length")
    prompt_length: int = 1
    max_tokens: int = 3

    def sample(self, key):
        letter = jax.random.randint(key, (), 0, 2)
        return Problem(jnp.full(self.prompt_length, -1, jnp.int32).at[-1].set(letter), letter[None].astype(jnp.int32))

    def demonstrate(self, key, problem):
        return pad_right((jnp.concatenate([problem.answer, jnp.asarray(self.tokenizer.eos_ids)]), jnp.int32(2)), self.max_tokens)

    def verify(self, problem, completion, length):
        exact = (length == 1) & (completion[0] == problem.answer[0])
        return jnp.stack([exact.astype(jnp.float32), length.astype(jnp.float32)])


A, B, BANG, EOS = range(4)


@functools.cache
def player(env):
    def play(key, tokens):
        state, first = env.reset(key)
        _, rest = jax.lax.scan(lambda state, token: env.step(key, state, token), state, tokens)
        return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, rest)

    return jit(play)


def say(env, tokens, key=0):
    """Time steps ``[T + 1]`` of saying ``tokens``, as numpy."""
    return jax.tree.map(np.asarray, player(env)(jax.random.key(key), jnp.asarray(tokens, jnp.int32)))


def answer_of(timesteps, prompt=1):
    return int(timesteps.observation[0, prompt - 1])


def test_there_are_token_environments():
    assert len(TOKENS) >= 9


@pytest.mark.parametrize("name", TOKENS)
def test_contract(name):
    env = make_env(name)
    check(env, name)
    space = env.observation_space
    assert isinstance(space, Tokens) and env.action_space == Discrete(space.n)
    assert space.n == env.tokenizer.vocab_size and space.length == space.prompt + env.max_tokens
    timesteps, actions, mask = jit(jax.vmap(env.demonstration))(jax.random.split(jax.random.key(0), 16))
    assert timesteps.observation.shape == (16, env.max_tokens + 1, space.length)
    assert space.contains(timesteps.observation) and not space.contains(timesteps.observation + space.n)
    done = np.asarray(timesteps.done)
    first = done.argmax(1)
    assert done.any(1).all()
    exact = np.asarray(timesteps.info["reward/exact"])
    np.testing.assert_array_equal(exact[np.arange(16), first], 1.0)
    np.testing.assert_array_equal(np.asarray(timesteps.terminated)[np.arange(16), first], True)
    # The mask is of the policy's words up to the end token.
    last = np.asarray(mask).shape[1] - 1 - np.asarray(mask)[:, ::-1].argmax(1)
    np.testing.assert_array_equal(last, first - 1)
    np.testing.assert_array_equal(np.asarray(actions)[np.arange(16), last], env.tokenizer.eos_ids[0])


def test_what_is_said_stands_in_its_place():
    timesteps = say(TokenEnvironment(Echo(prompt_length=3)), [B, BANG, EOS])
    letter = answer_of(timesteps, 3)
    expected = [[-1, -1, letter, *said] for said in ([-1, -1, -1], [B, -1, -1], [B, BANG, -1], [B, BANG, EOS])]
    np.testing.assert_array_equal(timesteps.observation, expected)
    np.testing.assert_array_equal(timesteps.next_observation, expected)


@pytest.mark.parametrize(
    ("stops", "tokens", "ends"),
    [
        ((), [A, EOS, A], [False, True]),
        ((), [EOS, A, A], [True]),
        ((), [A, BANG, A], [False, False]),
        ((BANG,), [A, BANG, A], [False, True]),
        ((BANG,), [A, EOS, A], [False, False]),  # those that are given replace the tokenizer's
        ((BANG, EOS), [A, EOS, A], [False, True]),
        ((EOS, BANG), [BANG, A, A], [True]),
    ],
)
def test_stop_tokens_end_the_episode(stops, tokens, ends):
    timesteps = say(TokenEnvironment(Echo(), stop_tokens=stops), tokens)
    assert timesteps.terminated[1 : 1 + len(ends)].tolist() == ends
    assert not timesteps.truncated[1 : 1 + len(ends)].any()
    length = len(ends) - 1 if ends[-1] else 0
    assert timesteps.info["reward/length"][len(ends)] == (length if ends[-1] else 0)  # the stop token is not counted


@pytest.mark.parametrize("counts", [False, True])
def test_a_completion_that_runs_out_of_tokens_is_truncated(counts):
    env = TokenEnvironment(Echo(), truncated_counts=counts)
    for key in range(4):
        timesteps = say(env, [A, B, A], key)
        assert timesteps.truncated.tolist() == [False, False, False, True]
        assert not timesteps.terminated.any()
        assert timesteps.reward.tolist() == [0, 0, 0, 3.0 * counts]
    one = TokenEnvironment(Echo(), max_tokens=1, truncated_counts=counts)
    earned = [say(one, [A], key) for key in range(6)]
    assert {answer_of(timesteps) for timesteps in earned} == {A, B}
    assert all(t.reward[1] == counts * ((answer_of(t) == A) + 1) for t in earned)


def test_the_end_token_in_the_last_place_terminates():
    timesteps = say(TokenEnvironment(Echo()), [A, B, EOS])
    assert timesteps.terminated.tolist() == [False, False, False, True]
    assert not timesteps.truncated.any()
    assert timesteps.reward[3] == 2.0


def test_rewards_come_with_the_last_token_alone_and_are_weighted():
    env = TokenEnvironment(Echo(), weights={"exact": 10.0, "length": -0.5})
    for key in range(6):
        timesteps = say(env, [A, EOS, B], key)
        exact = float(answer_of(timesteps) == A)
        assert timesteps.reward[:3].tolist() == [0, 0, 10 * exact - 0.5]
        assert timesteps.info["reward/exact"][:3].tolist() == [0, 0, exact]
        assert timesteps.info["reward/length"][:3].tolist() == [0, 0, 1]


def test_weights_may_be_traced_and_are_checked():
    def reward(weight):
        env = TokenEnvironment(Echo(), weights={"length": weight})
        state, _ = env.reset(jax.random.key(0))
        state, _ = env.step(jax.random.key(0), state, jnp.int32(BANG))
        return env.step(jax.random.key(0), state, jnp.int32(EOS))[1].reward

    np.testing.assert_array_equal(jit(jax.vmap(reward))(jnp.array([0.0, 2.0])), [0.0, 2.0])
    with pytest.raises(ValueError, match="unknown reward component 'exat'; this task has exact, length"):
        TokenEnvironment(Echo(), weights={"exat": 1.0})
    with pytest.raises(ValueError, match=r"env_params\.max_tokens must be a whole number, 1 or more"):
        TokenEnvironment(Echo(), max_tokens=0)


def test_what_an_automaton_forbids_is_no_legal_action():
    env = TokenEnvironment(Echo(), automaton=compile_regex("a!?", CharTokenizer(Echo.alphabet)))
    check(env)
    timesteps = say(env, [A, BANG, EOS])
    np.testing.assert_array_equal(timesteps.action_mask, np.array([[1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1]], bool))


# Dense rewards


@functools.cache
def posed(env):
    """``(prompt, answer, tokens) -> TimeStep [T]`` of saying ``tokens [T]``."""

    def play(prompt, answer, tokens):
        return jax.lax.scan(lambda s, token: env.step(None, s, token), env.pose(Problem(prompt, answer))[0], tokens)[1]

    return jit(play)


def paid(env, text, stop=True):
    """Rewards of what is said after ``3+1+4=``, and ``reward/steps`` at its end."""
    said = [*env.tokenizer.encode(text), *env.tokenizer.eos_ids * 4]
    prompt = jnp.asarray(env.tokenizer.encode("3+1+4="), jnp.int32)
    timesteps = posed(env)(prompt, jnp.asarray([3, 4, 8], jnp.int32), jnp.asarray(said[:4]))
    size = len(text) + stop
    assert np.flatnonzero(timesteps.done)[0] == size - 1
    return np.asarray(timesteps.reward)[:size], float(timesteps.info["reward/steps"][size - 1])


@pytest.mark.parametrize("counts", [False, True])
def test_a_dense_component_pays_as_it_comes(counts):
    third = 1 / 3
    env = make_env("tokens/running_sum", terms=3, process=2.0, dense=True, truncated_counts=counts)
    cases = {
        "348": [2 * third, 2 * third, 2 * third, 1.0],  # `exact` still comes with the last token
        "34": [2 * third, 2 * third, 0.0],
        "": [0.0],
        "358": [2 * third, 0.0, 0.0, 0.0],  # a mistake ends what can be earned
        "048": [0.0, 0.0, 0.0, 0.0],
    }
    for text, expected in cases.items():
        rewards, steps = paid(env, text)
        np.testing.assert_allclose(rewards, expected, atol=1e-6, err_msg=text)
        assert rewards.sum() == pytest.approx(2 * steps + (text == "348"))


def test_an_episode_earns_the_same_whether_it_is_paid_step_by_step_or_at_its_end():
    """Also one that is cut, whose steps are taken back where it counts for nothing."""
    for counts in (False, True):
        make = functools.partial(make_env, "tokens/running_sum", terms=3, process=0.5, truncated_counts=counts)
        dense, sparse = make(dense=True), make()
        for text, stop in (("348", True), ("3480", False), ("34", True), ("3500", False), ("0348", False)):
            (a, steps), (b, same) = paid(dense, text, stop=stop), paid(sparse, text, stop=stop)
            assert a.sum() == pytest.approx(b.sum(), abs=1e-6) and steps == same
            assert not b[:-1].any()
    assert paid(make_env("tokens/running_sum", terms=3, process=3.0, dense=True), "3480", stop=False)[0].tolist() == [1, 1, 1, -3]


def test_a_dense_component_may_fall_and_its_weight_may_be_traced():
    def rewards(weight):
        env = TokenEnvironment(Echo(), weights={"length": weight}, dense=("length", "exact"))
        state, _ = env.pose(Problem(jnp.array([A]), jnp.array([A])))
        return jax.lax.scan(lambda s, token: env.step(None, s, token), state, jnp.array([A, B, EOS]))[1].reward

    # `exact` comes with the right letter, and is given back with the next.
    np.testing.assert_allclose(jit(jax.vmap(rewards))(jnp.array([0.0, 2.0])), [[1, -1, 0], [3, 1, 0]])


def test_what_cannot_be_dense_is_refused():
    assert TokenEnvironment(Echo()).reset(jax.random.key(0))[0].paid is None  # and costs nothing where it is not asked for
    with pytest.raises(ValueError, match="unknown reward component 'exat'"):
        TokenEnvironment(Echo(), dense=("exat",))

    class Graded(Echo):
        def grade(self, problems, completions, lengths):
            raise NotImplementedError

    with pytest.raises(ValueError, match="graded on the host is only known at the end, so 'exact' cannot be dense"):
        TokenEnvironment(Graded(), dense=("exact",))


# Mixtures


@pytest.mark.parametrize(("number", "name", "params"), [(0, "addition", {"digits": 1}), (1, "reversing", {"length": 2})])
def test_the_same_text_has_the_same_log_probability_alone_and_in_a_mixture(number, name, params):
    """The same parameters fit both, though the prompts of the mixture have more places."""
    alone = make_env(f"tokens/{name}", **params)
    mixed = make_env("tokens/addition_and_reversing", **{"digits": 4, "length": 7, **params})
    more = mixed.task.prompt_length - alone.task.prompt_length
    assert more > 0
    model = Transformer(layers=2, width=16, heads=2, mlp=16)
    weights = transformer(model, alone.observation_space).init(jax.random.key(0), None)
    weights = jax.tree.map(lambda x: 10 * x, weights)  # so that what stands before a token matters

    def log_probs(env, problem, words):
        policy = transformer(model, env.observation_space)
        state, first = env.pose(problem)
        _, rest = jax.lax.scan(lambda s, word: env.step(None, s, word), state, words)
        starts = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs[:-1]])[:, None], first, rest)
        carry = policy.start(weights, jax.tree.map(lambda x: x[None], first))
        return policy.unroll(weights, carry, starts).distribution.log_prob(words[:, None])[:, 0], rest.reward

    def both(key):
        problem = alone.task.sample(key)
        words = jnp.maximum(alone.task.demonstrate(key, problem), 0)
        prompt = jnp.pad(problem.prompt, (more, 0), constant_values=-1)
        answer = jnp.pad(problem.answer, (0, mixed.task.answer_length - len(problem.answer)), constant_values=-1)
        return log_probs(alone, problem, words), log_probs(mixed, MixedProblem(prompt, answer, jnp.int32(number)), words)

    (one, reward), (other, same) = jit(jax.vmap(both))(jax.random.split(jax.random.key(1), 8))
    assert np.std(one) > 0.5
    np.testing.assert_allclose(one, other, atol=1e-4)
    np.testing.assert_array_equal(reward, same)


# Tools


@functools.cache
def with_tool(**kwargs):
    return make_env("tokens/multiplication", **{"digits": 2, **kwargs})


def write(env, text):
    return [env.tokenizer.eos_ids[0] if c == "$" else env.tokenizer.encode(c)[0] for c in text]


def test_a_tool_answers_with_forced_tokens():
    env = with_tool()
    text = "[12*34](408)=7$"
    timesteps = say(env, write(env, text))
    masks = timesteps.action_mask[:-1]
    for place, (token, mask) in enumerate(zip(write(env, text), masks, strict=True)):
        in_answer = text[:place].count("]") == 1 and text[:place].count(")") == 0
        assert mask.sum() == (1 if in_answer else env.action_space.n), place
        assert mask[token]
        assert timesteps.info["forced"][place + 1] == in_answer
    assert timesteps.terminated.tolist() == [False] * len(text) + [True]
    assert timesteps.info["reward/called"][-1] == 1.0


def test_an_unclear_call_is_answered_too():
    env = with_tool()
    masks = say(env, write(env, "[12*](?)=")).action_mask
    assert [int(m.argmax()) if m.sum() == 1 else None for m in masks[5:8]] == write(env, "(?)")
    assert masks[8].all()


def test_a_forced_token_ends_nothing():
    """Even if it is a stop token."""
    env = TokenEnvironment(Multiplication(2), tool=with_tool().tool, stop_tokens=tuple(write(with_tool(), "4$")))
    tokens = write(env, "[12*13](156)")
    for text, over in (("[2*2](4)4", [8]), ("4", [0]), ("[1", [])):
        timesteps = say(env, write(env, text))
        assert np.flatnonzero(timesteps.terminated[1:]).tolist() == over, text
    assert not say(env, tokens).done.any()


def test_a_conversation_may_be_cut_while_a_tool_speaks():
    env = TokenEnvironment(Multiplication(2), tool=with_tool().tool, max_tokens=7)
    timesteps = say(env, write(env, "[2*2](4"))
    assert np.flatnonzero(timesteps.truncated).tolist() == [7]
    assert not timesteps.terminated.any()


def test_demonstrations_leave_forced_tokens_out():
    env = with_tool(tool_share=1.0)
    timesteps, actions, mask = jax.tree.map(np.asarray, jit(jax.vmap(env.demonstration))(jax.random.split(jax.random.key(1), 32)))
    for said, counts, legal, forced in zip(actions, mask, timesteps.action_mask, timesteps.info["forced"], strict=True):
        end = np.flatnonzero(said == env.tokenizer.eos_ids[0])[0] + 1
        text = env.tokenizer.decode(said[:end])
        call, answer, result = text.partition("(")[0], text[text.index("(") : text.index(")") + 1], text.partition("=")[2]
        assert call[0] == "[" and call[-1] == "]" and answer == f"({eval(call[1:-1])})" == f"({result})"
        places = np.arange(len(said))
        is_answer = (places >= len(call)) & (places < len(call) + len(answer))
        np.testing.assert_array_equal(counts, ~is_answer & (places < end))
        np.testing.assert_array_equal(forced[1 : end + 1], is_answer[:end])
        assert (legal[:-1][is_answer].sum(-1) == 1).all() and legal[places[:end], said[:end]].all()
    direct = jit(jax.vmap(with_tool(tool_share=0.0).demonstration))(jax.random.split(jax.random.key(1), 32))
    assert not np.asarray(direct[0].info["forced"]).any()


def test_without_a_tool_nobody_answers():
    env = with_tool(tool=False)
    timesteps = say(env, write(env, "[2*2]=4$"))
    assert timesteps.action_mask is None and timesteps.terminated[-1]
    _, actions, _ = jit(jax.vmap(env.demonstration))(jax.random.split(jax.random.key(0), 32))
    assert not np.isin(np.asarray(actions), write(env, "[]")).any()


# Many copies, and agents


def test_nothing_after_the_end_changes_what_came_before():
    env = TokenEnvironment(Echo(max_tokens=5))
    one, other = (say(env, [B, EOS, *rest]) for rest in ([A, A, A], [EOS, B, BANG]))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x[:3], y[:3])


def test_copies_are_reset_by_themselves():
    envs = vectorize(TokenEnvironment(Echo()), 8)

    def play(key):
        state, first = envs.reset(key)
        actions = jax.random.randint(key, (12, 8), 0, 4)
        _, rest = jax.lax.scan(lambda s, x: envs.step(x[0], s, x[1]), state, (jax.random.split(key, 12), actions))
        return first, rest, actions

    first, rest, actions = jax.tree.map(np.asarray, jit(play)(jax.random.key(0)))
    done = rest.done
    assert done.sum() >= 8 * 4 and rest.terminated.any() and rest.truncated.any()
    np.testing.assert_array_equal((rest.observation[done] >= 0).sum(-1), 1)  # a new prompt
    np.testing.assert_array_equal(rest.next_observation[done].max(-1) >= 0, True)
    lengths = rest.info["episode_length"][done]
    np.testing.assert_array_equal((rest.next_observation[done] >= 0).sum(-1), 1 + lengths)
    np.testing.assert_array_equal(rest.terminated, actions == EOS)
    assert set(rest.observation[done][:, 0]) == {A, B} == set(first.observation[:, 0])


def learn(config, env, updates=80):
    """``(metrics, evaluation)`` of an agent that has learnt."""
    agent = rljax.make_agent(config, env)

    @jax.jit
    def program(key):
        state, metrics = jax.lax.scan(lambda s, _: agent.step(s), agent.init(key), length=updates)
        return metrics, evaluate_agent(agent, env, state, jax.random.key(1), 64, 5)

    return program(jax.random.key(0))


REINFORCE = reinforce.Config(num_envs=64, num_steps=3, hidden=(32,), learning_rate=2e-2, baseline="mean")
PPO = ppo.Config(num_envs=64, num_steps=8, hidden=(32,), learning_rate=5e-3, entropy_coef=0.02)


def assert_learnt(metrics, evaluation):
    total, count = metrics["episode/return"]
    assert total[0] / count[0] < 0.5
    assert evaluation.returns.mean() == 1.0 and evaluation.finished.all() and (evaluation.lengths == 2).all()


def test_reinforce_learns_to_answer_and_to_stop():
    assert_learnt(*learn(REINFORCE, TokenEnvironment(Echo(), weights={"length": 0.0})))


def test_ppo_learns_to_answer_where_an_automaton_stops_it():
    automaton = compile_regex("[ab!]", CharTokenizer(Echo.alphabet))
    assert_learnt(*learn(PPO, TokenEnvironment(Echo(), weights={"length": 0.0}, automaton=automaton), 30))


def test_ppo_learns_to_answer_and_to_stop():
    # With the limit as a truncation PPO would bootstrap from the value of a full context, which nothing ever teaches it.
    assert_learnt(*learn(PPO, TokenEnvironment(Echo(), weights={"length": 0.0}, limit_terminates=True)))
