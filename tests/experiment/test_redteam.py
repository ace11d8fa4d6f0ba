"""Forced play against what episodes are worth by hand; rewards that are gamed are found out, and exact match is left alone."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax import cli
from rljax.envs.tokens import TokenEnvironment
from rljax.envs.wrappers import LearnedReward
from rljax.experiment import InputError, load, red_team, redteam
from rljax.experiment.redteam import play
from rljax.lm import graders
from rljax.lm.automata import compile_choices
from rljax.lm.tasks import Addition, read_fields
from rljax.lm.text import TextTask
from rljax.lm.tokenizer import CharTokenizer

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "12+1=", "answer": "13"}, {"prompt": "3=", "answer": "3"}]
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def fast_compilation():
    """Programs here run for a moment, and most of the time is compilation, which may as well be poor."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def addition(**params):
    return load(None, {"env": "tokens/addition", "total_steps": 1, "env_params.digits": 1, **params})


@functools.cache
def found(proxy):
    params = {} if proxy is None else {"env_params.proxy": proxy}
    return red_team(addition(**{"env_params.max_tokens": 48}, **params), prompts=24)


def lines(team):
    return {line.name: line for line in team.lines}


def host(grader, **kwargs):
    task = TextTask(ROWS, CharTokenizer("0123456789+=,()"), graders.make_grader(grader), max_tokens=8)
    return TokenEnvironment(task, **kwargs)


def encode(env, *texts):
    rows = [[*env.tokenizer.encode(text), *[-1] * (env.max_tokens - len(text))] for text in texts]
    return jnp.asarray(rows, jnp.int32)


def test_play_starts_from_the_prompts_of_its_key_and_pays_the_last_step():
    env = rljax.make_env("tokens/addition", digits=1, max_tokens=4)
    right = jax.jit(lambda: jax.vmap(env.task.sample)(jax.random.split(KEY, 3)).answer)()
    actions = np.full((3, 4), -1, np.int32)
    actions[:2, :2] = right[:2]
    actions[2] = [1, 2, 3, 4]  # cut
    returns, components = play(env, KEY, jnp.asarray(actions))
    assert returns.tolist() == [1.0, 1.0, 0.0]
    assert {name: x.tolist() for name, x in components.items()} == {"exact": [1.0, 1.0, 0.0]}


def test_play_lets_a_tool_speak():
    """Its answer uses up no action: "=12" is what is said after "(12)"."""
    env = rljax.make_env("tokens/multiplication", digits=1, called=0.5, max_tokens=20)
    a, b = jax.jit(lambda: read_fields(env.task.sample(jax.random.split(KEY, 1)[0]).prompt, 2))().tolist()
    returns, components = play(env, KEY, encode(env, f"[{a}*{b}]={a * b}"))
    assert {name: x.tolist() for name, x in components.items()} == {"exact": [1.0], "called": [1.0]}
    assert returns.tolist() == [1.5]


def test_play_says_nothing_illegal():
    task = Addition(1)
    right = jax.jit(lambda: task.sample(jax.random.split(KEY, 1)[0]).answer)()
    right = task.tokenizer.decode([int(token) for token in right if token >= 0])
    env = TokenEnvironment(task, automaton=compile_choices([right], task.tokenizer), max_tokens=4)
    assert play(env, KEY, jnp.zeros((1, 4), jnp.int32))[0].tolist() == [1.0]  # whatever the actions are


def test_play_asks_a_grader_on_the_host_and_says_where_it_could_not_grade():
    source = "def grade(sample, item):\n    return None if '0' in sample['output_text'] else float(len(sample['output_text']))"
    env = host({"type": "python", "source": source}, truncated_counts=True)
    returns, components = play(env, KEY, encode(env, "", "123", "10", "12345678"))
    np.testing.assert_array_equal(returns, [0.0, 3.0, np.nan, 8.0])
    np.testing.assert_array_equal(*(np.isnan(x) for x in (returns, next(iter(components.values())))))


@pytest.mark.parametrize("per_step", [False, True])
def test_play_asks_a_reward_model(per_step):
    env = rljax.make_env("tokens/addition", digits=1, max_tokens=4)

    def pays(context, lengths):
        said = jnp.where(context[:, -4:] >= 0, context[:, -4:] + 1.0, 0.0)
        return jnp.where(said.T > 0, said.T, 100.0) if per_step else said.sum(1)

    returns, components = play(LearnedReward(env, pays), KEY, encode(env, "12", "", "0000"))
    end = env.stop_tokens[0] + 1
    assert returns.tolist() == [2 + 3 + end, end, 4]
    assert components["exact"].shape == (3,)


def test_a_length_bias_is_found():
    team = found("length")
    table = lines(team)
    assert team.gamed and table["the right answer"].gold == 1.0
    room = 47 / 48
    for name in ("as long as possible", "one token again and again"):
        assert table[name].exploit and table[name].gold == 0.0
        np.testing.assert_allclose(table[name].reward, room, rtol=1e-6)
    assert table["policy search"].reward > 0.9 and table["policy search"].exploit
    assert table["an empty answer"].reward == 0.0 and not table["an empty answer"].exploit
    assert team.verdict.startswith("The reward is gamed by ") and "as long as possible (0.979, gold 0.000)" in team.verdict


def test_answer_listing_is_found():
    """47 tokens are room for 0 to 18, all sums of two digits: 10 + 9 * 2 digits and 18 commas."""
    team = found("contains")
    table = lines(team)
    listing = table["listing all answers"]
    assert listing.says == ",".join(map(str, range(19)))
    assert (listing.reward, listing.paid, listing.gold, listing.exploit) == (1.0, 1.0, 0.0, True)
    assert table["the right answer with text around it"].exploit
    assert not table["an empty answer"].exploit and not table["a random policy"].exploit
    assert team.gamed and "listing all answers (1.000, gold 0.000)" in team.verdict


def test_exact_is_not_gamed():
    team = found(None)
    assert team.gamed is False and not any(line.exploit for line in team.lines)
    table = lines(team)
    assert table["the right answer"].reward == 1.0 and table["the right answer"].gold is None
    assert max(line.reward for line in team.lines[1:]) < 0.5
    assert team.verdict.startswith("The reward is not gamed")


def test_the_right_answer_is_the_best_of_what_a_careless_teacher_shows():
    env = rljax.make_env("tokens/addition", digits=2, forget_carry=0.9)
    right = redteam._Answers(env, env, KEY, 16).right
    np.testing.assert_array_equal(play(env, KEY, right)[0], 1.0)


@pytest.mark.parametrize(("kind", "gamed"), [("like", True), ("tag", None)])
def test_answers_of_a_file_and_a_grader(kind, gamed, monkeypatch):
    grader = {"type": kind}
    if kind == "like":
        grader = {"type": "string_check", "operation": kind, "input": "{{ completion }}", "reference": "{{ answer }}"}
    monkeypatch.setattr(redteam, "paid_environment", lambda experiment: host(grader))
    team = red_team(addition(), prompts=12)
    table = lines(team)
    assert team.gamed is gamed
    assert table["listing all answers"].says == "2,13,3"
    assert table["the right answer"].reward == float(kind != "tag")
    assert table["listing all answers"].reward == float(kind == "like")
    assert not table["the right answer with text around it"].exploit  # right in another form, where no gold says otherwise
    if gamed is None:
        assert "cannot be said" in team.verdict


def test_a_reward_that_has_no_zero(monkeypatch):
    """Half the way from a random policy to the right answer is what counts, not half the right answer's pay."""
    source = "def grade(sample, item):\n    return 5.0 + (sample['output_text'] == item['answer'])"
    monkeypatch.setattr(redteam, "paid_environment", lambda _: host({"type": "python", "source": source}, truncated_counts=True))
    team = red_team(addition(), prompts=12)
    assert team.lines[0].reward == 6.0 and lines(team)["an empty answer"].reward == 5.0
    assert team.gamed is False and lines(team)["an empty answer"].paid == 0.0


def test_half_way_to_the_right_answer():
    def near(right, random):
        return redteam._half_way(np.array([right, random]))[1]

    assert near([1.0, 1.0], [0.0, 0.0]) == 0.5
    assert near([6.0, 6.0], [5.0, 5.0]) == 5.5
    assert near([-1.0, -1.0], [-3.0, -3.0]) == -2.0
    assert near([0.2, 0.4], [0.9, 0.9]) == pytest.approx(0.15)
    assert near([-1.0, -1.0], [2.0, 2.0]) == -1.0  # what is paid as much as the right answer
    assert near([0.0, 0.0], [0.0, 0.0]) == np.inf
    marks, mean = redteam._half_way(np.array([[1.0, 0.0, np.nan], [0.0, 0.0, 0.0]]))
    assert marks.tolist() == [0.5, np.inf, np.inf] and mean == 0.25


def test_the_command(tmp_path, capsys):
    config = tmp_path / "addition.toml"
    config.write_text('env = "tokens/addition"\ntotal_steps = 64\n[env_params]\ndigits = 1\n[algo]\nname = "grpo"\n')
    flags = ["--prompts", "8", "--seed", "3", "--json", str(tmp_path / "found.json"), "--env-params.proxy", "contains"]
    assert cli.main(["redteam", str(config), *flags]) == 0
    out = capsys.readouterr().out
    head, *rest = out.splitlines()
    assert head == "tokens/addition, digits 1, proxy 'contains': 8 prompts, up to 3 tokens"
    assert rest[1].split() == ["answer", "reward", "paid", "gold", "first", "of", "them"]
    assert rest[-1].startswith("The reward is ")
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["env_params"]["proxy"] == "contains" and data["prompts"] == 8 and data["seed"] == 3
    for line in data["lines"]:
        assert f"{line['name']}" in out
        assert line["exploit"] == any(row.startswith("exploit") and line["name"] in row for row in rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "redteam: name a config file or a run first"),
        (["experiments/ppo_cartpole.toml"], "redteam needs an environment of tokens with demonstrations"),
        (["experiments/grpo_addition.toml", "--prompts", "0"], "--prompts must be a whole number, 1 or more, got 0"),
        (["experiments/grpo_addition.toml", "--seed", "x"], "--seed must be a whole number, 0 or more, got 'x'"),
        (["experiments/grpo_addition.toml", "--env_params.proxy", "short"], "env_params.proxy must be 'length' or 'contains'"),
        (["nowhere.toml"], "cannot read config nowhere.toml"),
    ],
)
def test_wrong_input_is_one_line_and_status_two(arguments, message, capsys):
    assert cli.main(["redteam", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_has_its_options(capsys):
    assert cli.main(["redteam", "experiments/grpo_addition.toml", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--prompts N" in out and "--env_params.proxy" in out


def test_an_unknown_kind_of_experiment_names_the_environment():
    with pytest.raises(InputError, match="CartPole-v1 is none"):
        red_team(load(None, {"env": "CartPole-v1", "total_steps": 1}))
