"""Pictures of a run: an episode of one lane, played as an evaluation plays it, and the GIF that shows it.

What is drawn is the very first episodes of the run's evaluations: the same key, start states and noise. The file's comment says
what it shows, as JSON, so that a report needs nothing else.
"""

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image, ImageDraw, ImageFont

from rljax.envs import host
from rljax.envs.wrappers import as_evaluated
from rljax.experiment.evaluation import advance, begin
from rljax.experiment.lanes import Program, evaluation_key
from rljax.experiment.painters import Painter, develop, painter
from rljax.files import write_whole

FRAMES = 200  # of a GIF, about; of longer episodes every second, third, ... is shown
SHORTEST, LONGEST = 20, 50  # milliseconds of a frame that stands for several steps; viewers slow down what is shorter
STEPS, BYTES = 10_000, 2**26  # at most so many steps of an episode are kept, and so much of them
STRIP = 18  # pixels for the words above a frame
HELD = 1000  # milliseconds for which the last frame stays


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode, as a painter needs it.

    Attributes:
      kept: what `Painter.keep` took of each state, numpy leaves ``[T + 1, ...]``; the first is that of the reset.
      rewards: float32 ``[T]``.
      finished: whether it has ended; else it was cut, by a limit on what is kept or at the first number that is not finite.
    """

    kept: Any
    rewards: np.ndarray
    finished: bool


class Camera:
    """Plays episodes of single lanes of a program and keeps what a picture needs; compiled once for all lanes.

    Raises:
      ValueError: the environment cannot be drawn.
    """

    def __init__(self, program: Program, episodes: int = 1, greedy: bool = True):
        self._program = program
        keep = jax.vmap(painter(as_evaluated(program.env)).keep)
        self._lanes = program.fetch(program.lanes)
        experiment = program.experiment
        reset_key, play_key = jax.random.split(evaluation_key(experiment))

        def play(lanes: Any, states: Any, lane: Any, data: Any) -> Any:
            own, state = jax.tree.map(lambda x: x[lane], (lanes, states))
            env, agent = program.bind(own)
            env = as_evaluated(env)
            start = begin(agent, env, state, reset_key, episodes, data)
            first = keep(start.env_state)
            size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(first))
            limit = max(1, min(experiment.eval_max_steps, STEPS, BYTES // max(size, 1)))
            kept = jax.tree.map(lambda x: jnp.zeros((limit + 1, *x.shape), x.dtype).at[0].set(x), first)

            def running(loop: Any) -> Any:
                playing, _, _ = loop
                return (playing.step < limit) & ~jnp.all(playing.result.finished)

            def step(loop: Any) -> Any:
                playing, kept, rewards = loop
                after = advance(agent, env, state, play_key, playing, greedy, data)
                kept = jax.tree.map(lambda all_, x: all_.at[after.step].set(x), kept, keep(after.env_state))
                return after, kept, rewards.at[playing.step].set(after.timestep.reward)

            playing, kept, rewards = jax.lax.while_loop(running, step, (start, kept, jnp.zeros((limit, episodes))))
            return kept, rewards, playing.result.lengths, playing.result.finished

        self._on_host = host.is_on_host(program.env)
        self._play = jax.jit(play, out_shardings=None if self._on_host else NamedSharding(program.mesh, PartitionSpec()))

    def painter(self, lane: int) -> Painter:
        """Of a lane's own environment."""
        return painter(as_evaluated(self._program.bind(jax.tree.map(lambda x: x[lane], self._lanes))[0]))

    def play(self, states: Any, lane: int) -> list[Episode]:
        """The first episodes of a lane's evaluation, from padded ``states``. Of several processes all must call it."""
        program = self._program
        arguments = (program.lanes, states, lane, program.data)
        if self._on_host:  # which a program over several devices cannot call
            data = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), program.data)
            arguments = (self._lanes, program.fetch(states), lane, data)
        with host.filmed(program.env, develop):
            played = self._play(*arguments)
            kept, rewards, lengths, finished = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), played)
        return [
            _cut(jax.tree.map(lambda x, i=i: x[:, i], kept), rewards[:, i], lengths[i], finished[i]) for i in range(len(lengths))
        ]


def _cut(kept: Any, rewards: np.ndarray, length: int, finished: bool) -> Episode:
    leaves = [x[: length + 1].reshape(length + 1, -1) for x in jax.tree.leaves(kept)]
    known = np.all(
        [np.isfinite(x).all(1) for x in leaves if np.issubdtype(x.dtype, np.floating)] or [np.ones(length + 1, bool)], 0
    )
    steps = int(length) if known.all() else max(int(np.argmin(known)) - 1, 0)
    return Episode(jax.tree.map(lambda x: x[: steps + 1], kept), rewards[:steps], bool(finished and steps == length))


def frames(artist: Painter, episodes: list[Episode], every: int = 1) -> Iterator[np.ndarray]:
    """The frames of episodes, one after the other, each with its step and the reward so far above it; uint8 ``[H, W, 3]``.

    Of an episode the first, then every so-manieth, and the last are drawn.
    """
    for number, episode in enumerate(episodes, 1):
        last = len(episode.rewards)
        shown = np.append(np.arange(0, last, every), last)
        returns = np.concatenate([[0.0], np.cumsum(episode.rewards, dtype=np.float64)])
        prefix = f"{number}/{len(episodes)}  " if len(episodes) > 1 else ""
        images = artist.paint(jax.tree.map(lambda x, shown=shown: x[shown], episode.kept))
        for step, image in zip(shown, images, strict=True):
            yield _titled(image, f"{prefix}step {step}", f"return {returns[step]:.6g}")


def _titled(image: np.ndarray, left: str, right: str) -> np.ndarray:
    """``image`` under a strip of words."""
    height, width, _ = image.shape
    strip = Image.new("RGB", (max(width, 120), STRIP), (255, 255, 255))
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(11)
    draw.text((5, 2), left, (60, 64, 72), font)
    draw.text((strip.width - 5, 2), right, (60, 64, 72), font, anchor="ra")
    framed = np.full((height + STRIP, strip.width, 3), 255, np.uint8)
    framed[:STRIP], framed[STRIP:, :width] = np.asarray(strip), image
    return framed


def gif(artist: Painter, episodes: list[Episode], about: dict[str, Any]) -> bytes:
    """An animated GIF of `frames`, about `FRAMES` of them, with ``about`` as JSON in its comment."""
    every = max(1, -(-sum(len(episode.rewards) for episode in episodes) // FRAMES))
    images = [Image.fromarray(frame) for frame in frames(artist, episodes, every)]
    palette = _palette(images[:: max(1, len(images) // 6)])
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    time = min(max(artist.milliseconds * every, SHORTEST), max(artist.milliseconds, LONGEST))
    times = [time] * (len(images) - 1) + [HELD]
    buffer = io.BytesIO()
    comment = json.dumps(about).encode()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=times, loop=0, comment=comment, optimize=True)
    return buffer.getvalue()


def _palette(images: list[Image.Image]) -> Image.Image:
    """One for all frames, or what stands still would flicker: the commonest colours as they are, and shades for the others."""
    width, height = images[0].size
    together = Image.new("RGB", (width, height * len(images)))
    for i, image in enumerate(images):
        together.paste(image, (0, i * height))
    counted = sorted(together.getcolors(together.width * together.height) or [], reverse=True)
    common = np.asarray([colour for _, colour in counted[:16]])
    median = together.quantize(48, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    shades = np.asarray(median.getpalette() or []).reshape(-1, 3)
    distance = np.abs(shades[:, None] - common[None]).max(-1).min(1)
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.concatenate([common, shades[distance > 8]]).ravel().tolist())
    return palette


def save(path: Path, artist: Painter, episodes: list[Episode], about: dict[str, Any]) -> dict[str, Any]:
    """Writes a GIF, whole or not at all; returns what its comment says: ``about``, and ``returns``, ``lengths`` and ``finished``
    of the episodes."""
    about = {
        **about,
        "returns": [float(np.sum(episode.rewards, dtype=np.float64)) for episode in episodes],
        "lengths": [len(episode.rewards) for episode in episodes],
        "finished": [episode.finished for episode in episodes],
    }
    write_whole(path, gif(artist, episodes, about))
    return about


def read_about(path: Path) -> dict[str, Any]:
    """What the comment of a GIF says; nothing where it is none of ours."""
    try:
        with Image.open(path) as image:
            about = json.loads(image.info.get("comment", b"{}"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
