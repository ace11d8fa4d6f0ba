"""Runs whose environment lives on the host: what fails there, what a resumed run goes on with, where a policy can be played."""

import sys
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
from PIL import Image

from rljax import cli, experiment
from rljax.experiment import InputError, pictures
from rljax.experiment.lanes import build
from tests.experiment.runs import rows

MODULE = '''
import gymnasium
import numpy
import pathlib
from gymnasium import spaces

class Walk(gymnasium.Env):
    """Ten steps, then the end; breaks where the file says so."""
    observation_space = spaces.Box(-1, 100, (1,))
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}
    taken = 0

    def __init__(self, broken="", stretch: float = 1.0, has_paint: bool = True, render_mode=None):
        self.broken, self.has_paint, self.render_mode = pathlib.Path(broken), has_paint, render_mode

    def render(self):
        if not self.has_paint:
            raise RuntimeError("no paint left")
        return numpy.full((40, 640, 3), 20 * self.steps, numpy.uint8)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return [0.0], {}

    def step(self, action):
        Walk.taken += 1
        self.steps += 1
        if Walk.taken > 400 and self.broken.is_file():
            return [float("nan")], 1.0, False, False, {}
        return [self.steps], 1.0, self.steps == 10, False, {}

class Unseen(Walk):
    metadata = {"render_modes": []}

def together(num_envs, autoreset_mode="NextStep"):
    return gymnasium.vector.SyncVectorEnv([Walk] * num_envs, autoreset_mode=autoreset_mode)

gymnasium.register("Walk-v0", Walk)
gymnasium.register("Walks-v0", vector_entry_point=together)
gymnasium.register("Unseen-v0", Unseen)
'''
CONFIG = {
    "env": "gymnasium/walks:Walk-v0",
    "algo.name": "ppo",
    "algo.num_minibatches": 1,
    "algo.num_epochs": 1,
    "algo.num_envs": 2,
    "algo.num_steps": 8,
    "algo.hidden": [4],
    "algo.normalize_observations": True,
    "seeds": [0, 1, 2, 3],  # two on each device: they are evaluated with one key, on copies of their own
    "total_steps": 640,
    "evals": 4,
    "eval_episodes": 2,
    "checkpoint_seconds": 0,
    "name": "walk",
}


@pytest.fixture(autouse=True)
def fast_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def walks(tmp_path, monkeypatch):
    (tmp_path / "walks.py").write_text(MODULE)
    (tmp_path / "broken").write_text("")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("walks", None)
    for name in ("Walk-v0", "Walks-v0", "Unseen-v0"):
        gymnasium.registry.pop(name, None)


def flags(config):
    return [str(word) for key, value in config.items() for word in (f"--{key}", *(value if isinstance(value, list) else [value]))]


def test_a_run_that_fails_on_the_host_ends_with_a_line_and_goes_on(walks, capsys):
    config = {**CONFIG, "env_params.broken": "broken"}
    # The file is noted with the run, and must stay as it is: it is moved away in place of being changed.
    assert cli.main(["run", *flags(config)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    for part in ("gymnasium/walks:Walk-v0: copy ", " of 4, step ", "the observation is not finite", "its last checkpoint"):
        assert part in said
    path = next(Path("runs/walk").glob("*/config.toml")).parent
    steps = [row["step"] for row in rows(path)]
    checkpoints = sorted(int(p.name) for p in (path / "checkpoints").iterdir())
    assert 0 < steps[-1] < 640
    assert checkpoints[-1] * 32 == steps[-1]  # the chunk that failed left nothing

    Path("broken").rename("mended")
    assert cli.main(["run", *flags(config)]) == 0
    found = rows(path)
    assert [row["step"] for row in found if row["lane"] == 0] == list(range(0, 641, 32))
    after = {row["step"]: row["episode/truncated"] for row in found if row["lane"] == 0 and row["step"]}
    assert after.pop(steps[-1] + 32) > 0  # the two episodes in flight
    assert set(after.values()) <= {0.0, None}
    assert all(row["eval/return"] == 10.0 for row in found if "eval/return" in row)
    assert cli.main(["eval", str(path)]) == 0
    assert "10.0" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_vector_environments_keep_their_rows_from_program_to_program(walks, mode):
    config = {**CONFIG, "env": "gymnasium/walks:Walks-v0", "env_params.autoreset_mode": mode, "total_steps": 320, "evals": 2}
    assert cli.main(["run", *flags(config)]) == 0
    found = rows(next(Path("runs/walk").glob("*/config.toml")).parent)
    assert {row["episode/return"] for row in found if row.get("episode/return") is not None} == {10.0}
    assert all(row["episode/truncated"] in (0.0, None) for row in found if row["step"])
    assert all(row["eval/return"] == 10.0 for row in found if "eval/return" in row)


def test_parameters_on_the_host_are_static_and_lanes_are_not_copied(walks):
    sweep = experiment.load(None, {**CONFIG, "sweep.env_params.stretch": [0.5, 1.0], "sweep.env_params.reward_scale": [1.0, 2.0]})
    assert len(sweep.programs()) == 4
    halving = experiment.load(None, {**CONFIG, "sweep.algo.learning_rate": [1e-3, 1e-2], "sweep.halving": [1]})
    with pytest.raises(InputError, match=r"sweep\.halving copies lanes .* gymnasium/walks:Walk-v0 on the host"):
        build(halving)
    with pytest.raises(InputError, match=r"shard: the copies of gymnasium/walks:Walk-v0 are on the host"):
        build(experiment.load(None, {**CONFIG, "shard": "envs"}))


def test_episodes_are_drawn_as_gymnasium_draws_them(walks, capsys):
    result = experiment.run(experiment.load(None, {**CONFIG, "total_steps": 64, "evals": 2}), draw=True)
    assert [pictures.read_about(p)["returns"] for p in sorted((result.path / "samples").glob("*.gif"))] == [[10.0]] * 3
    assert cli.main(["eval", str(result.path), "--gif", "--lane", "3", "--episodes", "2"]) == 0
    file = Path(capsys.readouterr().out.splitlines()[-1])
    with Image.open(file) as image:
        assert image.n_frames == 22
        assert image.size == (320, 20 + pictures.STRIP)  # no wider than other pictures
        for frame in (0, 7, 10, 11, 21):
            image.seek(frame)
            assert image.convert("RGB").getpixel((100, 30)) == pytest.approx((20 * (frame % 11),) * 3, abs=8)


def test_what_cannot_be_drawn_on_the_host_is_named_as_the_user_does(walks, capsys):
    config = {**CONFIG, "total_steps": 32, "evals": 1}
    unseen = experiment.run(experiment.load(None, {**config, "env": "gymnasium/walks:Unseen-v0"}), draw=True)
    with pytest.raises(InputError, match=r"^gymnasium/walks:Unseen-v0 cannot be drawn: it has no render_mode"):
        experiment.picture(unseen.path)
    said = []
    bare = experiment.run(experiment.load(None, {**config, "env_params.has_paint": False}), listener=said.append, draw=True)
    notes = [event["text"] for event in said if event["event"] == "note"]
    assert sum("gymnasium/walks:Walk-v0 cannot be drawn: no paint left" in note for note in notes) == 2
    assert cli.main(["eval", str(bare.path), "--gif"]) == 2
    assert capsys.readouterr().err == "rljax: gymnasium/walks:Walk-v0 cannot be drawn: no paint left\n"


@pytest.mark.slow
def test_what_was_learnt_in_gymnax_earns_the_same_in_gymnasium(tmp_path):
    root = Path(__file__).parents[2]
    overrides = {"seeds": [0, 1], "total_steps": 200_000, "evals": 2, "out": str(tmp_path)}
    result = experiment.run(experiment.load(root / "experiments/ppo_cartpole.toml", overrides))
    _, here = experiment.evaluate(result.path)
    _, there = experiment.evaluate(result.path, overrides={"env": "gymnasium/CartPole-v1"})
    np.testing.assert_array_equal(here.returns, 500.0)
    np.testing.assert_array_equal(there.returns, 500.0)
