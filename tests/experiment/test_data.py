"""Recorded data sets: files, what is wrong with them, recording, and experiments that learn from them."""

import json
import re
import shutil
from pathlib import Path

import h5py
import jax
import numpy as np
import pytest

import rljax
from rljax import cli
from rljax.experiment import InputError, Recording, evaluate, load, read, record, resume, run, together, train, write
from rljax.experiment.data import load_data
from rljax.experiment.lanes import build
from rljax.experiment.statistics import normalized_score
from tests.experiment.runs import assert_same

PPO = {
    "env": "CartPole-v1",
    "env_params.max_steps_in_episode": 20,
    "total_steps": 512,
    "seeds": [0, 1],
    "evals": 1,
    "eval_episodes": 4,
    "algo.num_envs": 4,
    "algo.num_steps": 16,
    "algo.hidden": [8],
}
BC = {**{k: v for k, v in PPO.items() if not k.startswith("algo")}, "algo.name": "bc", "total_steps": 16, "evals": 2}
BC |= {"algo.hidden": [8], "algo.num_updates": 2, "algo.batch_size": 8, "checkpoint_seconds": 0}


@pytest.fixture(autouse=True, scope="module")
def fast_compilation():
    """Programs here run for a moment, and most of the time is compilation, which may as well be poor."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def arrays(**changes):
    """Two episodes: of three steps, which terminates, and of two, which is cut."""
    seen = np.arange(5, dtype=np.float32)[:, None] + np.zeros((1, 4), np.float32)
    found = {
        "observations": seen,
        "actions": np.array([0, 1, 0, 1, 1]),
        "rewards": np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32),
        "terminals": np.array([0, 0, 1, 0, 0], bool),
        "timeouts": np.array([0, 0, 0, 0, 1], bool),
        "next_observations": seen + 1,
    }
    found |= changes
    return {key: x for key, x in found.items() if x is not None}


def saved(path, about=None, **changes):
    np.savez(path, about=np.array(json.dumps(about or {})), **arrays(**changes))
    return str(path)


def refused(function, *words):
    with pytest.raises(InputError) as error:
        function()
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert re.search(word, text), text


@pytest.mark.parametrize("suffix", [".npz", ".h5", ".hdf5"])
def test_what_is_written_is_read(tmp_path, suffix):
    recording = Recording(arrays(), {"env": "CartPole-v1", "random_return": 20.5})
    write(recording, tmp_path / f"a{suffix}")
    back = read(tmp_path / f"a{suffix}")
    assert back.about == recording.about
    assert back.arrays.keys() == recording.arrays.keys()
    for key, x in recording.arrays.items():
        np.testing.assert_array_equal(back.arrays[key], x)
    assert back.returns.tolist() == [6.0, 9.0]


def test_a_file_of_d4rl_is_read_with_what_it_has_besides(tmp_path):
    with h5py.File(tmp_path / "medium.hdf5", "w") as file:
        for key, x in arrays(next_observations=None).items():
            file[key] = x
        file["infos/qpos"] = np.zeros((5, 2))
        file["metadata/algorithm"] = np.zeros(3)
    read(tmp_path / "medium.hdf5")


def test_what_an_episode_led_to_is_taken_from_the_next_step_or_left_out(tmp_path):
    """The last step of an episode that was cut is left out, for nobody knows what it led to, and the one before it is cut now."""
    found = read(saved(tmp_path / "a.npz", next_observations=None)).arrays
    assert found["rewards"].tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(found["next_observations"][[0, 1, 3], 0], [1, 2, 4])
    assert found["timeouts"].tolist() == [False, False, False, True]
    assert found["terminals"].tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rewards": None}, "has no rewards; a data set needs observations, actions"),
        ({"rewards": np.zeros(4)}, "same number of rows.*rewards 4"),
        ({"rewards": np.zeros((5, 1))}, r"rewards must have one number a step, and has shape \[5, 1\]"),
        ({"rewards": np.array([1, 2, 3, np.nan, 5.0])}, "episode 1, step 0: rewards hold a number that is not finite"),
        ({"observations": np.full((5, 4), np.inf)}, "episode 0, step 0: observations hold a number that is not finite"),
        ({"terminals": np.zeros(5, bool)}, "episode 0, step 2.*no terminals or timeouts say that an episode ends there"),
        ({"actions": np.array(["a"] * 5)}, "actions must be numbers"),
    ],
    ids=str,
)
def test_faults_are_named_by_file_episode_and_step(tmp_path, changes, words):
    if "terminals" in changes:
        seen = arrays()["observations"].copy()
        seen[3:] += 10
        changes = {**changes, "observations": seen}
    file = saved(tmp_path / "bad.npz", **changes)
    refused(lambda: read(file), "bad.npz", words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"observations": np.zeros((5, 3), np.float32), "next_observations": np.zeros((5, 3), np.float32)},
            r"shape \[3\].*\[4\]",
        ),
        ({"actions": np.array([0, 1, 0, 2, 1])}, "episode 1, step 0: actions 2 lie outside"),
        ({"actions": np.array([0, 1, 0.5, 1, 1])}, "episode 0, step 2: actions 0.5 lie outside"),
    ],
    ids=str,
)
def test_data_of_another_environment_is_refused(tmp_path, changes, words):
    file = saved(tmp_path / "bad.npz", **changes)
    refused(lambda: load_data((file,), rljax.make_env("CartPole-v1")), "bad.npz", words)
    refused(lambda: build(load(None, {**BC, "data": file})), "bad.npz", words)


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK and no more")
    refused(lambda: read(tmp_path / "broken.npz"), "broken.npz cannot be read as a data set")
    refused(lambda: read(tmp_path / "none.npz"), "none.npz: there is no such file; `rljax record`")
    (tmp_path / "a.csv").write_text("1")
    refused(lambda: read(tmp_path / "a.csv"), "a data set is one of .npz, .h5, .hdf5, or minari:NAME")
    refused(lambda: read("minari:no/such-v0"), "minari:no/such-v0")
    refused(lambda: write(Recording(arrays(), {}), tmp_path / "a.csv"), "a data set is written to one of .npz")
    refused(lambda: load(None, {**BC, "data": str(tmp_path / "none.npz")}), "data: there is no file")


def test_what_a_newcomer_got_wrong_is_one_line(tmp_path):
    env = rljax.make_env("CartPole-v1")

    def load_of(**changes):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
        write(Recording(arrays(**changes), {}), path)
        return lambda: load_data((str(path),), env)

    legal = np.ones((5, 2), bool)
    load_of(action_masks=legal, next_action_masks=legal)()
    one = legal.copy()
    one[3, 1] = False
    refused(load_of(action_masks=one, next_action_masks=legal), "episode 1, step 0: action 1 is not legal by action_masks")
    refused(load_of(action_masks=legal[:, :1]), r"action_masks have shape \[1\], and should have \[2\]")
    refused(
        load_of(rewards=np.array([1, 2, 1e39, 4, 5])), "episode 0, step 2: rewards hold a number that is not finite in float32"
    )
    refused(load_of(terminals=np.array([0, 0, 0.5, 0, 0])), "episode 0, step 2: terminals must be 0 or 1")
    refused(load_of(observations=np.zeros((5, 4), complex)), "observations must be numbers, and are complex128")
    refused(load_of(next_observations=np.zeros((5, 3))), r"next_observations have shape \[3\], and observations \[4\]")
    np.save(tmp_path / "plain.npy", np.zeros(3))
    (tmp_path / "plain.npy").rename(tmp_path / "plain.npz")
    refused(lambda: read(tmp_path / "plain.npz"), "plain.npz cannot be read as a data set: it holds one array without a name")
    refused(lambda: write(Recording(arrays(), {}), tmp_path / "0.npz"), "0.npz: is there already; take another name")


def test_anchors_of_another_environment_give_no_score(tmp_path):
    about = {"env": "CartPole-v1", "env_params": {}, "random_return": 20.0, "expert_return": 500.0}
    write(Recording(arrays(), about), tmp_path / "a.npz")
    config = {**BC, "data": str(tmp_path / "a.npz")}
    own = {k: v for k, v in config.items() if k != "env_params.max_steps_in_episode"}
    assert "elsewhere" not in build(load(None, own)).about
    other = build(load(None, config)).about
    with pytest.raises(ValueError, match="its anchors are of CartPole-v1, which is not, or not all of, what is evaluated here"):
        normalized_score(60.0, other, "a")


def test_a_minari_data_set_is_read_as_it_was_written(tmp_path, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    about = {"env": "CartPole-v1", "random_return": 20.0, "expert_return": 500.0}
    before = Recording(arrays(), about)
    write(before, "minari:rljax/some-v0")
    after = read("minari:rljax/some-v0")
    assert after.about["random_return"] == 20.0 and after.about["expert_return"] == 500.0
    last = before.ends
    for key in ("observations", "actions", "rewards", "terminals", "next_observations"):
        np.testing.assert_array_equal(after.arrays[key], before.arrays[key], err_msg=key)
    np.testing.assert_array_equal(after.arrays["timeouts"], before.arrays["timeouts"] | (last & ~before.arrays["terminals"]))
    refused(lambda: write(before, "minari:rljax/some-v0"), "minari:rljax/some-v0")  # nothing is replaced
    refused(lambda: write(before, "minari:no version"), "minari:no version")


def test_mixtures_keep_episodes_apart_and_what_both_agree_on():
    one = Recording(arrays(timeouts=np.zeros(5, bool)), {"env": "CartPole-v1", "random_return": 20.0, "source": "a"})
    other = Recording(arrays(), {"env": "CartPole-v1", "random_return": 20.0, "source": "b"})
    both = together([one, other], ["one", "other"])
    assert both.size == 10 and both.returns.tolist() == [6, 9, 6, 9]
    assert both.about == {"env": "CartPole-v1", "random_return": 20.0}
    wide = Recording(arrays(observations=np.zeros((5, 2)), next_observations=np.zeros((5, 2))), {})
    refused(lambda: together([one, wide], ["one", "wide"]), "wide: its .*observations do not fit those of one")


def test_scores_are_normalised_by_both_anchors_or_not_at_all():
    assert normalized_score(60.0, {"random_return": 20.0, "expert_return": 120.0}, "a") == 40.0
    for about, word in (({}, "random_return"), ({"random_return": 1.0}, "expert_return")):
        with pytest.raises(ValueError, match=f"a: has no {word}.*cannot be normalised"):
            normalized_score(1.0, about, "a")
    with pytest.raises(ValueError, match="must be above"):
        normalized_score(1.0, {"random_return": 1.0, "expert_return": 1.0}, "a")


# Recording, and learning from it


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return run(load(None, {**PPO, "out": str(tmp_path_factory.mktemp("source"))}))


@pytest.fixture(scope="module")
def file(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "medium.npz"
    write(record(source.path, 320, epsilon=0.5, expert=source.path), path)
    return str(path)


def test_a_recording_is_whole_and_true_to_the_environment(source):
    recording = record(source.path, 320, lane=1)
    x = recording.arrays
    assert recording.size == 320
    done = x["terminals"] | x["timeouts"]
    lengths = np.diff(np.flatnonzero(recording.ends), prepend=-1)
    assert lengths.max() <= 20 and done.sum() == len(lengths) >= 16
    assert not (x["terminals"] & x["timeouts"]).any()
    np.testing.assert_array_equal(x["rewards"], 1.0)
    inside = ~done[:-1]
    np.testing.assert_array_equal(x["next_observations"][:-1][inside], x["observations"][1:][inside])
    # An episode that ended by itself did so because the pole fell or the cart left, and one that was cut for no such reason.
    fell = (np.abs(x["next_observations"][:, 0]) > 2.4) | (np.abs(x["next_observations"][:, 2]) > 12 * 2 * np.pi / 360)
    np.testing.assert_array_equal(fell & (lengths_of(recording) < 20), x["terminals"] & (lengths_of(recording) < 20))
    assert recording.about["env"] == "CartPole-v1" and recording.about["random_return"] == source.summary["random"]["return"]
    assert "expert_return" not in recording.about


def lengths_of(recording):
    """Of the episode that each step is from."""
    lengths = np.diff(np.flatnonzero(recording.ends), prepend=-1)
    return np.repeat(lengths, lengths)


def test_epsilon_is_the_share_of_random_actions(source):
    greedy, random = (record(source.path, 640, epsilon=e).arrays["actions"] for e in (0.0, 1.0))
    assert random.mean() == pytest.approx(0.5, abs=0.1)
    assert greedy.shape == random.shape and (greedy != random).any()


def test_what_cannot_be_recorded_is_refused(source):
    refused(lambda: record(source.path, 10, lane=2), "--lane: .* has lanes 0 to 1, got 2")
    refused(lambda: record(source.path, 10, epsilon=1.5), "--epsilon must be 0 to 1")
    refused(lambda: record(source.path, 0), "--steps must be 1 or more")


def test_an_offline_run_is_resumed_evaluated_and_scored(file, tmp_path):
    e = load(None, {**BC, "data": file, "out": str(tmp_path / "runs")})
    result = run(e)
    assert result.experiment.data == (file,) and len(e.data_digest[0]) == 12
    np.testing.assert_array_equal(np.asarray(evaluate(result.path)[1].returns).mean(1), result.eval_returns[:, -1])
    summary = (result.path / "summary.json").read_text()
    assert "expert_return" in summary
    assert "normalised" in rljax.experiment.summary_text(result.summary)
    again = run(load(None, {**BC, "data": file, "out": str(tmp_path / "again")}))
    kept = sorted((again.path / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    for checkpoint in kept[1:]:
        shutil.rmtree(checkpoint)
    info = json.loads((again.path / "run.json").read_text())
    (again.path / "run.json").write_text(json.dumps({**info, "status": "running"}))
    resumed = resume(again.path)
    assert_same(resumed.states, result.states)
    states, _, evaluation = train(e)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), states.params, result.states.params)
    assert evaluation.returns.shape == (2, 4)


def test_data_belongs_to_the_hash_by_what_it_holds(file, tmp_path):
    copy = tmp_path / "copy.npz"
    copy.write_bytes(Path(file).read_bytes())
    e = load(None, {**BC, "data": file})
    assert load(None, {**BC, "data": str(copy)}).hash == e.hash
    assert load(None, {**BC, "data": [file, str(copy)]}).hash != e.hash
    saved(copy)
    assert load(None, {**BC, "data": str(copy)}).hash != e.hash
    refused(lambda: load(None, {**BC, "data": str(copy), "data_digest": list(e.data_digest)}), "has changed: it was")


def test_a_config_names_data_from_where_it_stands(file, tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "medium.npz").write_bytes(Path(file).read_bytes())
    (tmp_path / "deep" / "bc.toml").write_text(
        'env = "CartPole-v1"\ntotal_steps = 10\ndata = "../medium.npz"\n[algo]\nname = "bc"\n'
    )
    monkeypatch.chdir(tmp_path)
    e = load("deep/bc.toml")
    assert e.data_digest == load(None, {**BC, "data": "medium.npz"}).data_digest
    assert load(None, {**BC, "data": "medium.npz"}).data[0] == str(tmp_path / "medium.npz")


def test_who_learns_from_data_needs_it_and_who_plays_takes_none(file):
    refused(lambda: build(load(None, BC)), r"algo.name bc learns from recorded data: set data, as in data = \[")
    refused(lambda: build(load(None, {**PPO, "data": file})), "data: algo.name ppo learns from play, not from recorded data")
    refused(lambda: load(None, {**BC, "data_digest": ["abc"]}), "data_digest is filled in by rljax")


def test_the_data_set_is_an_argument_of_the_program_and_no_constant(file):
    program = build(load(None, {**BC, "data": file}))
    abstract = jax.eval_shape(program.init, program.lanes, program.data)
    text = program.chunk.lower(program.lanes, abstract, program.data).as_text()
    assert len(text) < 400_000
    assert program.data["dataset"].size == 320


def test_the_command_writes_a_file_and_says_what_is_in_it(source, tmp_path, capsys):
    target = tmp_path / "a.npz"
    assert cli.main(["record", str(source.path), str(target), "--steps", "64", "--epsilon", "1"]) == 0
    assert re.search(r"a.npz: 64 steps, \d+ episodes, mean return", capsys.readouterr().out)
    assert read(target).about["epsilon"] == 1.0
    assert cli.main(["record", str(source.path), str(target), "--epsilon", "2"]) == 2
