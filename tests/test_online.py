"""Bandits that decide online: what they are saved as, learn from, and refuse."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax import online
from rljax.agents import epsilon_greedy
from rljax.agents.base import BANDITS

OPTIONS = {
    "thompson": {"noise_variance": 0.1},
    "neural_linear": {"hidden": (8, 4), "buffer_size": 64, "num_steps": 10, "num_updates": 2},
}


def decider(name, **options):
    return rljax.Online(name, num_actions=3, context_size=2, seed=5, **{**OPTIONS.get(name, {}), **options})


def lived(name, number=25, seed=0):
    """A decider after some decisions, and the next context."""
    one, rng = decider(name), np.random.default_rng(seed)
    for context in rng.normal(size=(number, 2)):
        one.learn(context, one.decide(context).action, context[0])
    return one, rng.normal(size=2)


def learner_of(one):
    return jax.tree.leaves(one._learner)


@pytest.mark.parametrize("name", BANDITS)
def test_online_learns_saves_and_compiles_once(name, tmp_path):
    one, context = lived(name)
    before = dict(online.traces)
    again, _ = lived(name)
    assert dict(online.traces) == before  # of another decider too
    path = tmp_path / "decider.npz"
    one.save(path)
    loaded = rljax.Online.load(path, name)
    assert [p.name for p in tmp_path.iterdir()] == ["decider.npz"]
    for other in (again, loaded):
        for a, b in zip(learner_of(one), learner_of(other), strict=True):
            np.testing.assert_array_equal(a, b)
    for _ in range(12):  # over a refresh of the network
        first, second = one.decide(context), loaded.decide(context)
        assert first == second
        one.learn(context, first.action, 0.5)
        loaded.learn(context, first.action, 0.5)
    for a, b in zip(learner_of(one), learner_of(loaded), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first.id, one.decided, one.learned) == (36, 37, 37)


@pytest.mark.parametrize("name", BANDITS)
def test_a_log_is_learned_as_decisions_are(name):
    rng = np.random.default_rng(1)
    contexts, actions, rewards = rng.normal(size=(33, 2)), rng.integers(0, 3, 33), rng.random(33)
    one, log = decider(name), decider(name)
    for row in zip(contexts, actions, rewards, strict=True):
        one.learn(*row)
    log.replay(contexts, actions, rewards)
    for a, b in zip(learner_of(one), learner_of(log), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if name != "neural_linear":  # whose network has another order to learn in
        late = decider(name)
        for i in rng.permutation(33):
            late.learn(contexts[i], actions[i], rewards[i])
        for a, b in zip(learner_of(one), learner_of(late), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_propensities():
    one, context = lived("epsilon_greedy")
    bandit = epsilon_greedy.bandit(one.config, 3, 2)
    exact = np.asarray(bandit.probabilities(one._learner, jnp.asarray(context, jnp.float32)[None], None))[0]
    decision = one.decide(context)
    assert decision.propensity == pytest.approx(exact[decision.action], rel=1e-5)
    assert lived("linucb")[0].decide(context).propensity == 1.0
    one = decider("thompson")
    seen = [one.decide(np.zeros(2)) for _ in range(60)]  # nothing is known: all alike
    assert {decision.action for decision in seen} == {0, 1, 2}
    np.testing.assert_allclose([decision.propensity for decision in seen], 1 / 3, atol=0.07)
    masked = [one.decide(np.zeros(2), [True, False, True]) for _ in range(30)]
    assert {decision.action for decision in masked} == {0, 2}
    np.testing.assert_allclose([decision.propensity for decision in masked], 1 / 2, atol=0.08)


def test_without_context():
    one = rljax.Online("thompson", num_actions=2, prior="bernoulli")
    one.learn(None, 1, 1.0)
    one.replay(None, [0, 1], [0.0, 0.5])
    np.testing.assert_array_equal(one._learner.successes, [0.0, 1.5])
    assert 0 < one.decide().propensity <= 1
    with pytest.raises(ValueError, match="reward must be 0 to 1 with prior 'bernoulli', got 2"):
        one.learn(None, 0, 2.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda one: one.decide([1.0]), r"context must be of shape \[2\], got \[1\]"),
        (lambda one: one.decide(["a", "b"]), "context must be 2 numbers"),
        (lambda one: one.decide([np.nan, 0.0]), "context must be finite"),
        (lambda one: one.decide([0.0, 0.0], [False] * 3), "action_mask must be 3 truth values with one True"),
        (lambda one: one.learn([0.0, 0.0], 3, 1.0), "action must be a whole number of 0 to 2, got 3"),
        (lambda one: one.learn([0.0, 0.0], -1, 1.0), "action must be a whole number of 0 to 2, got -1"),
        (lambda one: one.learn([0.0, 0.0], 0.5, 1.0), "action must be a whole number of 0 to 2, got 0.5"),
        (lambda one: one.learn([0.0, 0.0], 0, np.nan), "reward must be finite, got nan"),
        (
            lambda one: one.learn([0.0, 0.0], None, 1.0),
            "action must be a whole number of 0 to 2, got nan",
        ),
        (lambda one: one.learn([0.0, 0.0], 0, "x"), "reward must be a number"),
        (lambda one: one.learn("abcd", 0, 1.0), "context must be 2 numbers"),
        (lambda one: one.learn([1e20, 0.0], 0, 1.0), "context must hold numbers of at most 1e.06 in size"),
        (lambda one: one.learn([0.0, 0.0], 0, 1e38), "reward must be at most 1e.06 in size, got 1e.38; scale it"),
        (lambda one: one.replay([[0.0, 0.0]], [0, 1], [1.0]), "two columns of one length"),
        (lambda one: rljax.Online("ppo", num_actions=2), "'ppo' does not decide online"),
        (lambda one: rljax.Online("linucb", num_actions=0), "num_actions must be >= 1 and <= 2147483647, got 0"),
        (lambda one: decider("linucb", alfa=1.0), "unknown option 'alfa' of linucb; did you mean 'alpha'"),
        (lambda one: decider("linucb", alpha="x"), "alpha must be a number, got 'x'"),
        (lambda one: decider("linucb", discount=2.0), "discount must be <= 1 and > 0, got 2.0"),
        (lambda one: decider("linucb", alpha=10**400), "alpha must be a number, got 1000"),
        (lambda one: decider("thompson", prior=3), "prior must be text, got 3"),
        (lambda one: decider("thompson", prior="x"), "prior must be one of linear, bernoulli, got 'x'"),
        (lambda one: decider("neural_linear", hidden=(4.5,)), "hidden must be a whole number, got 4.5"),
        (lambda one: decider("neural_linear", hidden="ab"), "hidden must be a whole number, got 'ab'"),
        (lambda one: decider("neural_linear", hidden=(4, 0)), "hidden must hold one or more positive sizes"),
        (lambda one: decider("neural_linear", hidden=(10**30,)), "num_actions, context_size and options ask for inf numbers"),
        (lambda one: decider("neural_linear", num_steps=None), "num_steps must be a whole number, got None"),
        (lambda one: decider("neural_linear", buffer_size=True), "buffer_size must be a whole number, got True"),
        (lambda one: rljax.Online("linucb", num_actions=2.5), "num_actions must be a whole number, got 2.5"),
        (lambda one: rljax.Online("linucb", num_actions=10**30), "num_actions must be >= 1 and <= 2147483647, got 1000"),
        (
            lambda one: rljax.Online("linucb", num_actions=2, context_size=10**6),
            "context_size and options ask for 2,000,006,000,",
        ),
        (lambda one: rljax.Online("linucb", num_actions=2, seed=2**64), "seed must be >= 0 and <= 4294967295, got 18446744073"),
        (lambda one: rljax.Online("linucb", num_actions=2, seed=-1), "seed must be >= 0 and <= 4294967295, got -1"),
        (lambda one: rljax.Online("linucb", num_actions=2, seed=1.5), "seed must be a whole number, got 1.5"),
        (lambda one: one.decide([0.0, 0.0], [True, [False], True]), r"action_mask must be .*, got \[True, \[False\], True\]"),
        (lambda one: one.decide([0.0, 0.0], ["a", "b", "c"]), "action_mask must be 3 truth values .*, got \\['a', 'b', 'c'\\]"),
        (lambda one: one.decide([0.0, 0.0], [1.0, 0.5, 0.0]), "action_mask must be 3 truth values"),
        (lambda one: one.decide([0.0, 0.0], np.ones((3, 3))), "action_mask must be 3 truth values"),  # whose text has lines
        (lambda one: one.decide(["0", "1"]), "context must be 2 numbers, got"),
        (lambda one: one.decide([1j, 0.0]), "context must be 2 numbers, got"),
        (lambda one: one.learn([0.0, 0.0], 0, [0.5]), r"reward must be a number, got \[0.5\]"),
        (lambda one: one.learn([0.0, 0.0], [0], 0.5), r"action must be a number, got \[0\]"),
        (lambda one: one.learn([0.0, 0.0], one.decide([0.0, 0.0]), 0.5), "action must be a number, got Decision"),
        (lambda one: one.learn([0.0, 0.0], 0, 10**400), "reward must be a number, got 1000"),
    ],
)
def test_bad_input_is_one_line(call, says):
    one = decider("linucb")
    before = learner_of(one)
    with pytest.raises(ValueError, match=says) as error:
        call(one)
    assert "\n" not in str(error.value)
    for a, b in zip(before, learner_of(one), strict=True):
        np.testing.assert_array_equal(a, b)


def test_numbers_of_numpy_and_jax_are_as_good_as_pythons():
    options = {"hidden": np.array([4, 3]), "buffer_size": np.int64(64), "num_steps": 10.0, "learning_rate": np.float32(0.5)}
    options["noise_variance"] = jnp.float32(0.25)
    one = rljax.Online("neural_linear", num_actions=np.int64(3), context_size=2.0, seed=np.uint8(7), **options)
    plain = {"hidden": (4, 3), "buffer_size": 64, "num_steps": 10, "learning_rate": 0.5, "noise_variance": 0.25}
    other = rljax.Online("neural_linear", num_actions=3, context_size=2, seed=7, **plain)
    assert one.config == other.config and hash(one.config) is not None
    for mask in (np.array([1, 0, 1]), jnp.array([True, False, True]), [True, False, True]):
        assert one.decide(np.ones(2), mask) == other.decide([1.0, 1.0], [1, 0, 1])
    for action, reward in (
        (np.int64(1), np.float32(0.5)),
        (jnp.int32(1), np.array(0.5)),
        (np.array(1), jnp.float32(0.5)),
        (1.0, 0.5),
    ):
        one.learn(jnp.ones(2), action, reward)
        other.learn([1.0, 1.0], 1, 0.5)
    one.replay([], [], [])  # an empty log
    for a, b in zip(learner_of(one), learner_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_files_of_others_are_refused_and_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "one.npz"
    one, _ = lived("linucb")
    one.save(path)
    with pytest.raises(ValueError, match="holds a linucb, and not a thompson"):
        rljax.Online.load(path, "thompson")
    with pytest.raises(ValueError, match="no such file"):
        rljax.Online.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("nothing")
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    for name in ("text.npz", "arrays.npz"):
        with pytest.raises(ValueError, match=r"is no file that Online.save wrote"):
            rljax.Online.load(tmp_path / name)
    (tmp_path / "half.npz").write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"is no file that Online.save wrote"):
        rljax.Online.load(tmp_path / "half.npz")
    whole = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        one.save(path)
    assert path.read_bytes() == whole
    assert not list(tmp_path.glob(".one*"))


def refused(path, content):
    """What loading a file of ``content`` says."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name) as error:
        rljax.Online.load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_files_that_are_cut_short_or_altered_are_one_line(tmp_path):
    one, _ = lived("linucb", 3)
    path = tmp_path / "one.npz"
    one.save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), len(whole) // 20):
        refused(tmp_path / "cut", whole[:size])
    directory = whole.index(b"PK\x01\x02")
    for at in (directory + 6, directory + 10, 200):  # the version of zip, the compression, an array
        refused(tmp_path / "altered", whole[:at] + b"\xf3" + whole[at + 1 :])
    for other in (b"PK\x05\x06" + bytes(18), b"\x80\x04K\x03.", b"\x89PNG" + bytes(99)):
        refused(tmp_path / "other", other)
    np.save(tmp_path / "array.npy", np.ones(3))
    refused(tmp_path / "array.npy", (tmp_path / "array.npy").read_bytes())
    with pytest.raises(ValueError, match=r"context must be of shape \[2\], got \[3\]"):
        rljax.Online.load(path).decide([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "ppo"}, "is damaged: name: 'ppo' does not decide online"),
        ({"name": None}, "is damaged: name: None"),
        ({"options": 3}, "is damaged: "),
        ({"options": {"seed": 1}}, "is damaged: "),
        ({"options": {"alfa": 1.0}}, "is damaged: unknown option 'alfa'"),
        ({"options": {"alpha": "x"}}, "is damaged: alpha must be a number"),
        ({"num_actions": 4}, "is damaged: its arrays are not those of a linucb of its sizes"),
        ({"context_size": 10**9}, "is damaged: num_actions, context_size and options ask for"),
        ({"seed": 2**70}, "is damaged: seed must be"),
        ({"decided": "x"}, "is damaged: decided must be a whole number, got 'x'"),
        ({"decided": -1}, "is damaged: decided must be >= 0"),
        ({"learned": 1.5}, "is damaged: learned must be a whole number, got 1.5"),
        ({"format": "rljax online 2"}, "is no file that this version of Online.save wrote"),
    ],
)
def test_headers_that_are_damaged_are_one_line(changes, says, tmp_path):
    one = decider("linucb")
    one.save(tmp_path / "one.npz")
    arrays = dict(np.load(tmp_path / "one.npz"))
    head = json.loads(str(arrays.pop("head")))

    def saved(head, arrays):
        content = io.BytesIO()
        np.savez(content, head=np.asarray(head if isinstance(head, str) else json.dumps(head)), **arrays)
        return content.getvalue()

    assert says in refused(tmp_path / "new.npz", saved({**head, **changes}, arrays))
    (key,) = changes
    refused(tmp_path / "new.npz", saved({k: v for k, v in head.items() if k != key}, arrays))
    refused(tmp_path / "new.npz", saved("[" * 100_000, arrays))
    not_finite = {k: np.full_like(v, np.nan) for k, v in arrays.items()}
    assert "are not finite" in refused(tmp_path / "new.npz", saved(head, not_finite))
