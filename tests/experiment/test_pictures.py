import functools
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageSequence

from rljax import cli
from rljax.envs import Box, Discrete, make_env, restart, transition
from rljax.envs.wrappers import Wrapper
from rljax.experiment import InputError, evaluate, load, picture, report, run
from rljax.experiment.lanes import build
from rljax.experiment.painters import BLUE, GREEN, GYMNAX, ORANGE, painter
from rljax.experiment.pictures import FRAMES, Camera, Episode, _cut, frames, gif, read_about
from tests.experiment.runs import stop_after

OWN = ("GoalGrid", "StatelessCartPole", "TicTacToe")
TINY = {
    "env": "CartPole-v1",
    "total_steps": 64,
    "seeds": [0, 1],
    "evals": 4,
    "eval_episodes": 2,
    "checkpoint_seconds": 0,
    "algo.num_envs": 2,
    "algo.num_steps": 8,
    "algo.num_minibatches": 1,
    "algo.num_epochs": 1,
    "algo.hidden": [8],
}


def drawn(name, *states, **parameters):
    """Frames of states that hold no more than what is drawn."""
    return list(painter(make_env(name, **parameters)).paint(jax.tree.map(lambda *x: np.asarray(x), *states)))


def centre(image, colour):
    """``(row, column)`` of what has this colour, as a share of the picture."""
    places = np.argwhere((image == colour).all(-1))
    assert len(places), f"nothing is {colour}"
    return tuple(places.mean(0) / image.shape[:2])


def test_the_cart_is_where_it_is_and_its_pole_leans_as_it_should():
    left, right, upright = drawn("CartPole-v1", (-1.2, -0.3), (1.2, 0.3), (0.0, 0.0))
    assert np.allclose(centre(left, BLUE)[1], 0.5 - 1.2 / (2 * 1.12 * 2.4), atol=0.01)
    assert np.allclose(centre(right, BLUE)[1], 0.5 + 1.2 / (2 * 1.12 * 2.4), atol=0.01)
    assert centre(left, ORANGE)[1] < centre(left, BLUE)[1] - 0.01
    assert centre(right, ORANGE)[1] > centre(right, BLUE)[1] + 0.01
    assert np.allclose(centre(upright, ORANGE)[1], 0.5, atol=0.01)
    assert centre(upright, ORANGE)[0] < centre(upright, BLUE)[0]


def test_a_longer_pole_is_drawn_longer():
    short, long = (drawn("CartPole-v1", (0.0, 0.0), length=length)[0] for length in (0.25, 0.5))
    assert np.sum((long == ORANGE).all(-1)) > 1.5 * np.sum((short == ORANGE).all(-1))


def test_the_pendulum_is_upright_at_zero_and_turns_against_the_clock():
    up, turned, down = (centre(image, BLUE) for image in drawn("Pendulum-v1", 0.0, np.pi / 2, np.pi))
    assert np.allclose((up, turned, down), ((0.1, 0.5), (0.5, 0.1), (0.9, 0.5)), atol=0.02)


def test_the_links_of_the_acrobot_hang_down_at_zero_and_join():
    hanging, standing, bent = drawn("Acrobot-v1", (0.0, 0.0), (np.pi, 0.0), (0.0, np.pi / 2))
    assert centre(hanging, ORANGE)[0] > centre(hanging, BLUE)[0] > 0.5
    assert centre(standing, ORANGE)[0] < centre(standing, BLUE)[0] < 0.5
    assert np.allclose(centre(bent, ORANGE), (0.5 + 1 / 4.4, 0.5 + 0.5 / 4.4), atol=0.02)


def test_the_car_starts_in_the_valley_and_ends_at_the_flag():
    valley, flag = drawn("MountainCar-v0", -np.pi / 6, 0.5)
    assert centre(valley, BLUE)[0] > 0.7 and centre(flag, BLUE)[0] < 0.4
    assert np.allclose(centre(valley, BLUE)[1], (1.2 - np.pi / 6) / 1.8, atol=0.02)
    assert abs(centre(flag, BLUE)[1] - centre(flag, GREEN)[1]) < 0.1


def test_boards_have_their_cells_where_they_are():
    env = make_env("GoalGrid", size=4)
    artist = painter(env)
    (image,) = artist.paint(np.asarray(artist.keep((jnp.array([1, 2]), 0)))[None])
    assert np.allclose(centre(image, ORANGE), (1.5 / 4, 2.5 / 4), atol=0.01)
    assert np.allclose(centre(image, GREEN), (3.5 / 4, 3.5 / 4), atol=0.01)
    board = np.zeros(9, np.int8)
    board[2], board[3] = 1, -1
    (image,) = drawn("TicTacToe", board)
    assert np.allclose(centre(image, BLUE), (1 / 6, 5 / 6), atol=0.02)
    assert np.allclose(centre(image, ORANGE), (1 / 2, 1 / 6), atol=0.02)


@functools.cache
def reset(name):
    """``(painter, observation, what is kept)`` after a reset; op by op, since a compilation takes longer."""
    env = make_env(name, time_limit=5, reward_scale=0.5)
    artist = painter(env)
    with jax.disable_jit():
        state, timestep = env.reset(jax.random.key(0))
        return artist, np.asarray(timestep.observation), jax.device_get(artist.keep(state))


@pytest.mark.parametrize("name", [*GYMNAX, *OWN])
def test_what_can_be_drawn_is(name):
    artist, _, kept = reset(name)
    images = list(artist.paint(jax.tree.map(lambda x: np.stack([x, x]), kept)))
    assert len(images) == 2 and np.array_equal(*images)
    assert images[0].dtype == np.uint8 and images[0].ndim == 3 and images[0].shape[2] == 3
    assert min(images[0].shape[:2]) >= 80 and max(images[0].shape[:2]) <= 320
    assert len(np.unique(images[0].reshape(-1, 3), axis=0)) > 2


@pytest.mark.parametrize(
    ("game", "things"), [("Breakout", 3), ("Asterix", 1), ("Freeway", 3), ("Seaquest", 2), ("SpaceInvaders", 2)]
)
def test_things_of_minatar_have_different_colours(game, things):
    artist, observation, cells = reset(f"{game}-MinAtar")
    assert len(set(np.unique(cells)) - {0}) >= things
    assert np.array_equal(cells > 0, observation.any(-1))
    (image,) = artist.paint(cells[None])
    size = len(image) // 10
    middles = image[size // 2 :: size, size // 2 :: size].reshape(-1, 3)
    assert len(np.unique(middles, axis=0)) == len(np.unique(cells))


def test_bodies_stand_on_the_ground():
    """At rest, where mujoco itself says that the bodies are."""
    mujoco = pytest.importorskip("mujoco")
    env = make_env("brax/hopper")
    system = env.env.env.sys
    data = mujoco.MjData(system.mj_model)
    data.qpos[:] = system.init_q
    mujoco.mj_kinematics(system.mj_model, data)
    artist = painter(env)
    kept = jax.tree.map(lambda x: np.stack([x[1:], x[1:]]), (data.xpos, data.xquat))
    kept[0][1] += [3.0, 0.0, 0.0]
    first, moved = artist.paint(kept)
    torso, leg = centre(first, BLUE), centre(first, ORANGE)
    assert torso[0] < leg[0] and abs(torso[1] - 0.5) < 0.05
    assert abs(np.argwhere((first == ORANGE).all(-1))[:, 0].max() / len(first) - 0.92) < 0.06
    assert np.allclose(centre(moved, BLUE), torso, atol=0.01)  # the camera goes along
    assert artist.milliseconds == 8


class Lamp:
    """Counts up to four; is as bright as it has counted."""

    observation_space = Box(0.0, 4.0, (4,))
    action_space = Discrete(2)

    def reset(self, key):
        return jnp.zeros((), jnp.int32), restart(jnp.zeros(4))

    def step(self, key, state, action):
        state = state + 1
        return state, transition(jnp.full(4, state, jnp.float32), 1.0, terminated=state >= 4)


class Drawn(Wrapper):
    def render(self, state):
        return np.full((6, 8, 3), 60 * int(state), np.uint8)


class Wrong(Wrapper):
    def render(self, state):
        return np.zeros((6, 8, 3))


def test_an_environment_draws_itself_by_render():
    images = list(painter(Drawn(Lamp())).paint(np.arange(3)))
    assert [image[0, 0, 0] for image in images] == [0, 60, 120]
    with pytest.raises(ValueError, match=r"Wrong\.render must return uint8 \[H, W, 3\].*, got float64\[6, 8, 3\]"):
        list(painter(Wrong(Lamp())).paint(np.arange(3)))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Lamp(), "Lamp cannot be drawn: give it, or a wrapper around it, a method render(state)"),
        ("MemoryChain-bsuite", "MemoryChain-bsuite cannot be drawn"),
        ("brax/fast", "Fast cannot be drawn"),
        ("tokens/addition", "`rljax eval RUN --transcript` prints it"),
    ],
    ids=["own", "gymnax", "brax", "tokens"],
)
def test_what_cannot_be_drawn_says_what_to_add(env, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        painter(make_env(env) if isinstance(env, str) else env)
    assert "\n" not in str(error.value)


def test_long_episodes_are_thinned_out_and_end_with_their_last_step():
    artist = painter(Drawn(Lamp()))
    episode = Episode(np.zeros(1002, np.int32), np.ones(1001, np.float32), True)
    image = Image.open(io.BytesIO(gif(artist, [episode], {})))
    assert image.n_frames == len(list(frames(artist, [episode], 6))) == 168 <= FRAMES + 1
    last = list(frames(artist, [episode], 6))[-1]
    assert not np.array_equal(last, list(frames(artist, [Episode(episode.kept[1:], episode.rewards[1:], True)], 6))[-1])
    short = Episode(np.zeros(5, np.int32), np.ones(4, np.float32), True)
    assert Image.open(io.BytesIO(gif(artist, [short, short], {}))).n_frames == 10


def test_an_episode_ends_before_a_number_that_is_not_finite():
    kept = (np.array([0.0, 1.0, np.nan, np.nan]), np.arange(4))
    episode = _cut(kept, np.ones(9, np.float32), np.int32(3), np.True_)
    assert (episode.kept[0].tolist(), len(episode.rewards), episode.finished) == ([0.0, 1.0], 1, False)
    episode = _cut((kept[1],), np.ones(9, np.float32), np.int32(3), np.True_)
    assert (len(episode.kept[0]), len(episode.rewards), episode.finished) == (4, 3, True)


# Runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(load(None, {**TINY, "out": str(tmp_path_factory.mktemp("runs"))}), draw=True)


def test_a_run_keeps_an_early_a_middle_and_a_late_episode(finished):
    files = sorted((finished.path / "samples").iterdir())
    assert [file.name for file in files] == [f"step-{step:012d}.gif" for step in (0, 32, 64)]
    for file in files:
        about = read_about(file)
        assert (about["step"], about["lane"], about["seed"]) == (int(file.stem[5:]), 0, 0)
        assert about["returns"] == [float(about["lengths"][0])] and about["finished"] == [True]
        assert Image.open(file).n_frames == about["lengths"][0] + 1
    _, evaluation = evaluate(finished.path)
    assert read_about(files[-1])["returns"] == [evaluation.returns[0][0]]
    text = (finished.path / "report.html").read_text()
    assert text.count("data:image/gif;base64,") == 3
    assert f"step 64, seed 0 (lane 0): return {evaluation.returns[0][0]:g} in {evaluation.lengths[0][0]} steps" in text


def test_nothing_else_depends_on_pictures(finished, tmp_path):
    e = load(None, {**TINY, "out": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        run(e, listener=stop_after(1))
    assert not (e.path / "samples").exists() and e.path.name == finished.path.name
    plain = (e.path / "metrics.jsonl").read_text()
    assert plain and (finished.path / "metrics.jsonl").read_text().startswith(plain)


def test_a_run_that_was_stopped_ends_with_the_same_pictures(finished, tmp_path):
    e = load(None, {**TINY, "out": str(tmp_path)})
    for chunks, steps in ((1, [0]), (1, [0, 32])):
        with pytest.raises(KeyboardInterrupt):
            run(e, listener=stop_after(chunks), draw=True)
        files = sorted((e.path / "samples").iterdir())
        assert [int(file.stem[5:]) for file in files] == steps
        for file in files:
            assert file.read_bytes() == (finished.path / "samples" / file.name).read_bytes()


def test_eval_draws_as_many_frames_as_steps(finished, capsys):
    assert cli.main(["eval", str(finished.path), "--gif", "--lane", "1"]) == 0
    printed = capsys.readouterr().out
    file = finished.path / "samples" / "eval_lane1.gif"
    _, evaluation = evaluate(finished.path)
    steps = int(evaluation.lengths[1][0])
    assert f"lane 1, seed 1, after 64 steps\nreturn {steps} in {steps} steps\n{file}\n" == printed
    images = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(Image.open(file))]
    assert len(images) == steps + 1
    assert not np.array_equal(images[0], images[-1])
    file.unlink()


def test_eval_draws_the_best_lane_and_several_episodes(finished):
    returns = finished.eval_returns[:, -1]
    file, about = picture(finished.path, episodes=2)
    _, evaluation = evaluate(finished.path)
    assert about["lane"] == np.argmax(returns) and file.name == f"eval_lane{about['lane']}.gif"
    np.testing.assert_array_equal(about["returns"], evaluation.returns[about["lane"]])
    assert Image.open(file).n_frames == sum(about["lengths"]) + 2
    file.unlink()


def test_eval_draws_in_another_environment_and_says_what_cannot_be_drawn(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, about = picture(finished.path, 0, overrides={"env": f"{__file__}:Drawn", "env_params.env": Lamp()})
    assert about["returns"] == [4.0] and Image.open(file).n_frames == 5
    file.unlink()
    assert cli.main(["eval", str(finished.path), "--gif", "--env", f"{__file__}:Lamp"]) == 2
    assert capsys.readouterr().err.startswith("rljax: Lamp cannot be drawn: give it")
    assert cli.main(["eval", str(finished.path), "--gif", "--lane", "2"]) == 2
    assert capsys.readouterr().err == f"rljax: --lane: {finished.path} has lanes 0 to 1, got 2\n"
    assert cli.main(["eval", str(finished.path), "--lane", "1"]) == 2
    assert "--lane goes with --gif" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"Wrong\.render must return uint8"):
        picture(finished.path, 0, overrides={"env": f"{__file__}:Wrong", "env_params.env": Lamp()})


def test_lanes_that_sweep_the_environment_are_drawn_as_theirs_is(tmp_path):
    """With one compiled program for both."""
    program = build(load(None, {**TINY, "seeds": [0], "sweep.env_params.length": [0.25, 0.5], "out": str(tmp_path)}))
    camera, states = Camera(program), program.init(program.lanes, program.data)
    short, long = (next(frames(camera.painter(lane), camera.play(states, lane))) for lane in (0, 1))
    assert np.sum((long == ORANGE).all(-1)) > 1.5 * np.sum((short == ORANGE).all(-1))
    assert camera._play._cache_size() == 1


def test_a_drawing_that_fails_does_not_stop_the_training(tmp_path):
    (tmp_path / "faint.py").write_text(
        "from tests.experiment.test_pictures import Lamp, Wrong\n\n\ndef faint():\n    return Wrong(Lamp())\n"
    )
    events = []
    e = load(None, {**TINY, "env": f"{tmp_path}/faint.py:faint", "out": str(tmp_path)})
    assert last_step(e, events) == 16
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert [note for note in notes if note.startswith("no picture of step 0: Wrong.render must return uint8")]


def test_environments_that_cannot_be_drawn_are_trained_as_before(tmp_path):
    events = []
    e = load(None, {**TINY, "env": f"{__file__}:Lamp", "out": str(tmp_path)})
    assert last_step(e, events) == 16
    assert not (e.path / "samples").exists()
    assert not [event for event in events if "picture" in event.get("text", "")]


def last_step(experiment, events):
    """Trains a chunk, and notes the events."""
    stop = stop_after(1)

    def listen(event):
        events.append(event)
        stop(event)

    with pytest.raises(KeyboardInterrupt):
        run(experiment, draw=True, listener=listen)
    return events[-1]["step"]


def test_a_report_leaves_pictures_of_others_alone(finished):
    """A GIF without our comment goes under its name."""
    other = finished.path / "samples" / "other.gif"
    Image.new("RGB", (4, 4)).save(other)
    assert read_about(other) == {} and json.dumps(read_about(finished.path / "run.json")) == "{}"
    page = report._samples(report.read_run(finished.path))
    assert page.count("data:image/gif") == 4 and "<figcaption>other.gif</figcaption>" in page
    other.unlink()
