"""Painters: how the states of each environment look. They draw with Pillow and numpy on the host; no OpenGL, no window.

A painter is in two parts. ``keep`` is traced with the episode, and takes out of an environment's state what the picture needs, so
that a physics state of many arrays is remembered as the places of its bodies. ``paint`` gets that of a whole episode, as numpy
arrays, and draws frame by frame.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from PIL import Image, ImageDraw

from rljax.envs import Environment, Tokens
from rljax.envs.brax import BraxEnvironment
from rljax.envs.goal import GoalGrid
from rljax.envs.host import Copies, host_state, is_on_host
from rljax.envs.playground import PlaygroundEnvironment
from rljax.envs.tictactoe import TicTacToe
from rljax.envs.wrappers import Wrapper

WIDTH = 320  # of most pictures, pixels
FINE = 2  # a scene is drawn this much larger, and scaled down: smooth edges
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (240, 200, 60),
    (86, 180, 233),
)
WHITE, PALE, GREY, DARK, NIGHT = (255, 255, 255), (236, 238, 241), (170, 174, 180), (60, 64, 72), (24, 27, 34)
RED = (220, 50, 60)

Colour = tuple[int, int, int]


class Painter(NamedTuple):
    """How one environment is drawn.

    Attributes:
      keep: ``(state) -> pytree of arrays``, pure: what a frame needs of a state. Lanes that sweep parameters of the environment
        share that of the first.
      paint: ``(pytree of numpy [T, ...]) -> T frames``, each uint8 ``[H, W, 3]``.
      milliseconds: that a step is shown for, where every step is.
    """

    keep: Callable[[Any], Any]
    paint: Callable[[Any], Iterator[np.ndarray]]
    milliseconds: int = 30


def painter(env: Environment) -> Painter:
    """The painter of an environment: its own ``render(state) -> uint8 [H, W, 3]`` if it has one, else one of those below. A
    wrapper without a ``render`` of its own looks like what it wraps.

    Raises:
      ValueError: nobody can draw it; one line that says what to add.
    """
    from rljax.envs.gymnax import GymnaxEnvironment  # gymnax computes as it is imported, which must wait until hosts have joined

    if isinstance(env, Wrapper) and not hasattr(type(env), "render"):
        inner = painter(env.env)
        wrapper = env
        return inner._replace(keep=lambda state: inner.keep(wrapper.inner_state(state)))
    if is_on_host(env):
        return _filmed(env.copies)  # pyright: ignore[reportAttributeAccessIssue]
    render = getattr(env, "render", None)
    if render is not None:
        return Painter(lambda state: state, functools.partial(_rendered, env, render))
    if isinstance(env, GymnaxEnvironment) and env.env.name in GYMNAX:
        return GYMNAX[env.env.name](env.env, env.params)
    if isinstance(env, BraxEnvironment) and hasattr(env.env, "sys"):
        own = env.env
        view = VIEWS.get(type(own).__name__, OBLIQUE)
        return _bodies(own.sys.mj_model, view, own.dt, lambda state: (state.pipeline_state.x.pos, state.pipeline_state.x.rot))
    if isinstance(env, PlaygroundEnvironment):  # whose first body is the world
        own = env.env
        return _bodies(own.mj_model, SIDE, own.dt, lambda state: (state.data.xpos[1:], state.data.xquat[1:]))
    if isinstance(env, GoalGrid):
        return _goal_grid(env)
    if isinstance(env, TicTacToe):
        return Painter(lambda board: board, _tictactoe, 700)
    if isinstance(env.observation_space, Tokens):
        raise ValueError("what a language model does is read, not looked at: `rljax eval RUN --transcript` prints it")
    name = env.env.name if isinstance(env, GymnaxEnvironment) else type(getattr(env, "env", env)).__name__
    raise ValueError(f"{name} cannot be drawn: give it, or a wrapper around it, a method render(state) -> uint8 [H, W, 3]")


def _rendered(env: Environment, render: Callable[[Any], Any], states: Any) -> Iterator[np.ndarray]:
    shape = None
    for i in range(len(jax.tree.leaves(states)[0])):
        image = np.asarray(render(jax.tree.map(lambda x, i=i: x[i], states)))
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.shape != (shape or image.shape):
            got = f"{image.dtype}{list(image.shape)}"
            raise ValueError(f"{type(env).__name__}.render must return uint8 [H, W, 3], of one size and from 0 to 255, got {got}")
        shape = image.shape
        yield image


def develop(image: Any) -> tuple[tuple[int, ...], bytes]:
    """A picture that an environment on the host drew, as it is kept: no wider than others, and packed."""
    image = np.asarray(image)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"its render() must return uint8 [H, W, 3], got {image.dtype}{list(image.shape)}")
    height, width, _ = image.shape
    if width > WIDTH:
        size = (WIDTH, max(1, round(height * WIDTH / width)))
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BOX))
    return image.shape, zlib.compress(image.tobytes(), 1)


def _filmed(copies: Copies) -> Painter:
    """Of what the host has drawn: see `rljax.envs.host.filmed`."""
    if not copies.can_be_drawn:
        raise ValueError(
            f'{copies.name} cannot be drawn: it has no render_mode "rgb_array", or is played as a vector environment'
        )

    def keep(state: Any) -> tuple[Array, Array]:
        found = host_state(state)
        return found.handle, found.steps

    def paint(kept: Any) -> Iterator[np.ndarray]:
        for handle, step in zip(*kept, strict=True):
            shape, packed = copies.film[int(handle)][int(step)]
            yield np.frombuffer(zlib.decompress(packed), np.uint8).reshape(shape)

    return Painter(keep, paint)


# Scenes of points and lines


class _Scene:
    """A drawing in the environment's own units: x to the right, y up.

    Args:
      left, right, bottom, top: what is seen.
      width: pixels; the height follows.
    """

    def __init__(self, left: float, right: float, bottom: float, top: float, width: int = WIDTH, background: Colour = WHITE):
        self.scale = FINE * width / (right - left)
        self._left, self._top = left, top
        self._size = (FINE * width, FINE * round((top - bottom) * width / (right - left)))
        self._image = Image.new("RGB", self._size, background)
        self._draw = ImageDraw.Draw(self._image)

    def copy(self) -> "_Scene":
        """One to draw on, with what is here already."""
        twin = object.__new__(_Scene)
        twin.__dict__.update(self.__dict__)
        twin._image = self._image.copy()
        twin._draw = ImageDraw.Draw(twin._image)
        return twin

    def at(self, point: Sequence[float] | np.ndarray) -> tuple[float, float]:
        """The pixel of a point."""
        return (float(point[0]) - self._left) * self.scale, (self._top - float(point[1])) * self.scale

    def line(self, points: Any, colour: Colour, pixels: float = 2) -> None:
        """``pixels`` wide."""
        self._draw.line([self.at(p) for p in points], colour, max(1, round(FINE * pixels)), joint="curve")

    def shape(self, points: Any, colour: Colour, edge: Colour | None = None) -> None:
        """A filled polygon."""
        self._draw.polygon([self.at(p) for p in points], colour, edge, FINE)

    def disc(self, centre: Any, radius: float, colour: Colour, edge: Colour | None = None) -> None:
        """Of a radius in the environment's units."""
        (x, y), r = self.at(centre), radius * self.scale
        self._draw.ellipse((x - r, y - r, x + r, y + r), colour, edge, FINE)

    def capsule(self, a: Any, b: Any, radius: float, colour: Colour, edge: Colour = DARK) -> None:
        """A line with round ends, and an edge of one pixel."""
        ends = (self.at(a), self.at(b))
        for r, fill in ((radius * self.scale + FINE, edge), (radius * self.scale, colour)):
            self._draw.line(ends, fill, max(1, round(2 * r)))
            for x, y in ends:
                self._draw.ellipse((x - r, y - r, x + r, y + r), fill)

    def pixels(self) -> np.ndarray:
        """uint8 ``[H, W, 3]``."""
        return np.asarray(self._image.reduce(FINE))


def _frames_on(scene: _Scene, draw: Callable[[_Scene, Any], None], kept: Any) -> Iterator[np.ndarray]:
    """``draw`` one step after the other, each on what ``scene`` holds."""
    for i in range(len(jax.tree.leaves(kept)[0])):
        frame = scene.copy()
        draw(frame, jax.tree.map(lambda x, i=i: x[i], kept))
        yield frame.pixels()


def _cartpole(env: Any, params: Any) -> Painter:
    limit, length = float(params.x_threshold), 2 * float(params.length)  # gymnax's is half of the pole

    def paint(kept: Any) -> Iterator[np.ndarray]:
        half = max(1.12 * limit, length)
        scene = _Scene(-half, half, -0.4, max(length, 0.5) + 0.45)
        scene.line([(-half, -0.12), (half, -0.12)], GREY)
        for x in (-limit, limit):
            scene.line([(x, -0.28), (x, 0.04)], RED, 2)

        def draw(scene: _Scene, step: Any) -> None:
            x, theta = step
            scene.shape([(x - 0.3, -0.1), (x + 0.3, -0.1), (x + 0.3, 0.13), (x - 0.3, 0.13)], BLUE, DARK)
            tip = (x + length * np.sin(theta), 0.1 + length * np.cos(theta))
            scene.capsule((x, 0.1), tip, 0.04, ORANGE)
            scene.disc((x, 0.1), 0.05, DARK)

        return _frames_on(scene, draw, kept)

    return Painter(lambda state: (state.x, state.theta), paint, 20)


def _pendulum(env: Any, params: Any) -> Painter:
    length = float(params.l)

    def paint(theta: np.ndarray) -> Iterator[np.ndarray]:
        half = 1.25 * length
        scene = _Scene(-half, half, -half, half, 240)

        def draw(scene: _Scene, theta: Any) -> None:  # 0 is upright, and angles go against the clock
            bob = (-length * np.sin(theta), length * np.cos(theta))
            scene.capsule((0, 0), bob, 0.05 * length, ORANGE)
            scene.disc(bob, 0.1 * length, BLUE, DARK)
            scene.disc((0, 0), 0.03 * length, DARK)

        return _frames_on(scene, draw, theta)

    return Painter(lambda state: state.theta, paint, 50)


def _acrobot(env: Any, params: Any) -> Painter:
    first, second = float(params.link_length_1), float(params.link_length_2)

    def paint(kept: Any) -> Iterator[np.ndarray]:
        half = 1.1 * (first + second)
        scene = _Scene(-half, half, -half, half, 240)
        scene.line([(-half, 1), (half, 1)], GREEN, 1.5)  # above it the free end is where it should be

        def draw(scene: _Scene, step: Any) -> None:  # 0 hangs down; the second angle is seen from the first link
            a, b = step[0], step[0] + step[1]
            elbow = np.array([first * np.sin(a), -first * np.cos(a)])
            tip = elbow + np.array([second * np.sin(b), -second * np.cos(b)])
            scene.capsule((0, 0), elbow, 0.09, BLUE)
            scene.capsule(elbow, tip, 0.09, ORANGE)
            for joint in ((0, 0), elbow):
                scene.disc(joint, 0.05, DARK)

        return _frames_on(scene, draw, kept)

    return Painter(lambda state: (state.joint_angle1, state.joint_angle2), paint, 40)


def _mountain_car(env: Any, params: Any) -> Painter:
    low, high, goal = (float(x) for x in (params.min_position, params.max_position, params.goal_position))

    def height(x: Any) -> Any:
        return 0.45 * np.sin(3 * x) + 0.55

    def paint(position: np.ndarray) -> Iterator[np.ndarray]:
        scene = _Scene(low, high, -0.05, 1.25)
        xs = np.linspace(low, high, 100)
        scene.shape([(low, -1), *zip(xs, height(xs), strict=True), (high, -1)], PALE)
        scene.line(list(zip(xs, height(xs), strict=True)), GREY, 2)
        pole = height(goal) + 0.2
        scene.line([(goal, height(goal)), (goal, pole)], DARK, 1.5)
        scene.shape([(goal, pole), (goal + 0.07, pole - 0.03), (goal, pole - 0.07)], GREEN)

        def draw(scene: _Scene, x: Any) -> None:
            along = np.array([1.0, 1.35 * np.cos(3 * x)])
            along /= np.linalg.norm(along)
            up, place = np.array([-along[1], along[0]]), np.array([x, height(x)])
            corners = ((-0.085, 0.04), (0.085, 0.04), (0.085, 0.09), (0.04, 0.13), (-0.04, 0.13), (-0.085, 0.09))
            scene.shape([place + u * along + v * up for u, v in corners], BLUE, DARK)
            for u in (-0.05, 0.05):
                scene.disc(place + u * along + 0.035 * up, 0.032, DARK)

        return _frames_on(scene, draw, position)

    return Painter(lambda state: state.position, paint, 30)


def _point_robot(env: Any, params: Any) -> Painter:
    radius, near = float(params.circle_radius), float(params.goal_radius)

    def paint(kept: Any) -> Iterator[np.ndarray]:
        scene = _Scene(-1.6 * radius, 1.6 * radius, -0.7 * radius, 1.4 * radius)
        angles = np.linspace(0, np.pi, 60)
        scene.line(radius * np.stack([np.cos(angles), np.sin(angles)], 1), GREY, 1.5)

        def draw(scene: _Scene, step: Any) -> None:
            place, goal = step
            scene.disc(goal, near, (190, 226, 214), GREEN)
            scene.disc(place, 0.05 * radius, BLUE, DARK)

        return _frames_on(scene, draw, kept)

    return Painter(lambda state: (state.pos, state.goal), paint, 80)


def _reacher(env: Any, params: Any) -> Painter:
    def paint(kept: Any) -> Iterator[np.ndarray]:
        half = 1.5 * kept[0].shape[1]
        scene = _Scene(-half, half, -half, half, 240)

        def draw(scene: _Scene, step: Any) -> None:  # every angle is seen from the x axis, and every link is 1 long
            angles, goal = step
            joints = np.concatenate([np.zeros((1, 2)), np.cumsum(np.stack([np.cos(angles), np.sin(angles)], 1), 0)])
            scene.disc(goal, 0.14, RED)
            for a, b in itertools.pairwise(joints):
                scene.capsule(a, b, 0.08, BLUE)
            scene.disc(joints[-1], 0.12, ORANGE, DARK)

        return _frames_on(scene, draw, kept)

    return Painter(lambda state: (state.angles, state.goal_xy), paint, 50)


def _point_swimmer(env: Any, params: Any) -> Painter:
    def paint(kept: Any) -> Iterator[np.ndarray]:
        half = min(max(1.2, 1.1 * float(np.abs(kept[0]).max())), 4.0)  # nothing keeps it in the water
        scene = _Scene(-half, half, -half, half, 240, (226, 240, 250))

        def draw(scene: _Scene, step: Any) -> None:
            place, urchins, goal = step
            scene.disc(goal, 0.09, GREEN, DARK)
            for urchin in urchins:
                scene.disc(urchin, 0.07, DARK)
            scene.disc(place, 0.06, ORANGE, DARK)

        return _frames_on(scene, draw, kept)

    return Painter(lambda state: (state.xy, state.urchin_xys, state.goal_xy), paint, 50)


# Boards of coloured cells


def _board(cells: Callable[[Any], Array], colours: Sequence[Colour], milliseconds: int = 100, gap: int = 1) -> Painter:
    """Of ``cells``, ``(state) -> [H, W]`` numbers of colours, with a ``gap`` between them; about 240 pixels long."""
    palette = np.asarray(colours, np.uint8)

    def paint(kept: np.ndarray) -> Iterator[np.ndarray]:
        size = max(4, 240 // max(kept.shape[1:]))
        between = np.rint(0.85 * palette[0]).astype(np.uint8)
        for board in kept:
            image = np.repeat(np.repeat(palette[board], size, 0), size, 1)
            for edge in range(gap):
                image[edge::size] = image[:, edge::size] = between
            yield image

    return Painter(lambda state: cells(state).astype(jnp.uint8), paint, milliseconds)


def _put(board: Array, place: Any, number: int) -> Array:
    """A number at ``place``, row and column; nothing where that is off the board."""
    row, column = (jnp.asarray(x, jnp.int32) for x in (place[0], place[1]))
    return board.at[row, column].set(number, mode="drop")


def _minatar(*channels: tuple[int, Colour]) -> Callable[[Any, Any], Painter]:
    """From the observation's channels; a later one of these lies above an earlier one."""

    def make(env: Any, params: Any) -> Painter:
        def cells(state: Any) -> Array:
            observation = env.get_obs(state, params)
            board = jnp.zeros(observation.shape[:2], jnp.int32)
            for number, (channel, _) in enumerate(channels, 1):
                board = jnp.where(observation[..., channel] > 0, number, board)
            return board

        return _board(cells, [NIGHT, *(colour for _, colour in channels)], 60)

    return make


def _pong(env: Any, params: Any) -> Painter:
    def cells(state: Any) -> Array:
        paddle, ball, last = jnp.moveaxis(env.get_obs(state), -1, 0) > 0
        side = jnp.where(jnp.arange(env.width) < env.width // 2, 3, 2)
        return jnp.where(ball, 4, jnp.where(paddle, side, jnp.where(last, 1, 0)))

    return _board(cells, [NIGHT, (90, 94, 104), ORANGE, SKY, WHITE], 40, gap=0)


def _catch(env: Any, params: Any) -> Painter:
    def cells(state: Any) -> Array:
        board = jnp.zeros((env.rows, env.columns), jnp.int32)
        return _put(_put(board, (state.paddle_y, state.paddle_x), 1), (state.ball_y, state.ball_x), 2)

    return _board(cells, [NIGHT, SKY, YELLOW], 150)


def _deep_sea(env: Any, params: Any) -> Painter:
    def cells(state: Any) -> Array:
        rows, columns = jnp.indices((env.size, env.size))
        board = jnp.where(columns > rows, 1, 0).at[-1, -1].set(3)  # nobody gets to the right of the diagonal
        return _put(board, (state.row, state.column), 2)

    return _board(cells, [(28, 74, 120), (16, 40, 66), ORANGE, YELLOW], 200)


def _rooms(env: Any, params: Any) -> Painter:
    walls = 1 - np.asarray(env.env_map, np.int32)

    def cells(state: Any) -> Array:
        return _put(_put(jnp.asarray(walls), state.goal, 2), state.pos, 3)

    return _board(cells, [WHITE, DARK, GREEN, ORANGE], 100)


def _frozen_lake(env: Any, params: Any) -> Painter:
    tiles = np.asarray(env.desc, np.int32)  # start, frozen, hole, goal

    def cells(state: Any) -> Array:
        return _put(jnp.asarray(tiles), (state.position // env.ncol, state.position % env.ncol), 4)

    return _board(cells, [(205, 228, 244), (226, 240, 250), NIGHT, GREEN, ORANGE], 250)


def _goal_grid(env: GoalGrid) -> Painter:
    def cells(state: Any) -> Array:
        board = jnp.zeros((env.size, env.size), jnp.int32).at[-1, -1].set(1)
        return _put(board, state[0], 2)

    return _board(cells, [WHITE, GREEN, ORANGE], 150)


def _tictactoe(boards: np.ndarray) -> Iterator[np.ndarray]:
    scene = _Scene(0, 3, 0, 3, 210)
    for x in (1, 2):
        scene.line([(x, 0.08), (x, 2.92)], GREY, 3)
        scene.line([(0.08, x), (2.92, x)], GREY, 3)

    def draw(scene: _Scene, board: np.ndarray) -> None:  # the agent has the crosses
        for square, mark in enumerate(board):
            x, y = square % 3 + 0.5, 2.5 - square // 3
            if mark > 0:
                scene.line([(x - 0.27, y - 0.27), (x + 0.27, y + 0.27)], BLUE, 7)
                scene.line([(x - 0.27, y + 0.27), (x + 0.27, y - 0.27)], BLUE, 7)
            elif mark < 0:
                scene.disc((x, y), 0.31, ORANGE)
                scene.disc((x, y), 0.21, WHITE)

    return _frames_on(scene, draw, boards)


GYMNAX: dict[str, Callable[[Any, Any], Painter]] = {
    "CartPole-v1": _cartpole,
    "Pendulum-v1": _pendulum,
    "Acrobot-v1": _acrobot,
    "MountainCar-v0": _mountain_car,
    "MountainCarContinuous-v0": _mountain_car,
    "Asterix-MinAtar": _minatar((2, (90, 60, 64)), (3, YELLOW), (1, RED), (0, SKY)),
    "Breakout-MinAtar": _minatar((3, ORANGE), (2, (90, 94, 104)), (0, SKY), (1, WHITE)),
    "Freeway-MinAtar": _minatar(*((i, (70 + 20 * (i - 2), 66, 74)) for i in range(2, 7)), (1, RED), (0, YELLOW)),
    "Seaquest-MinAtar": _minatar(
        *((7, SKY), (8, GREEN), (1, (70, 120, 160)), (9, GREEN), (5, PINK), (6, RED), (4, ORANGE), (2, WHITE), (0, YELLOW))
    ),
    "SpaceInvaders-MinAtar": _minatar((1, GREEN), (5, RED), (4, WHITE), (0, SKY)),
    "Catch-bsuite": _catch,
    "DeepSea-bsuite": _deep_sea,
    "FourRooms-misc": _rooms,
    "MetaMaze-misc": _rooms,
    "PointRobot-misc": _point_robot,
    "Reacher-misc": _reacher,
    "Swimmer-misc": _point_swimmer,
    "Pong-misc": _pong,
    "FrozenLake-misc": _frozen_lake,
}


# Bodies of brax


class _View(NamedTuple):
    """A camera without perspective: where it stands around the scene and how high, degrees, and whether it goes with the body."""

    azimuth: float = 0.0
    elevation: float = 0.0
    follows: bool = True


SIDE, TOP, OBLIQUE = _View(), _View(0.0, 90.0, False), _View(25.0, 22.0)
VIEWS = {
    **dict.fromkeys(("Halfcheetah", "Hopper", "Walker2d"), SIDE),
    **dict.fromkeys(("InvertedPendulum", "InvertedDoublePendulum"), SIDE._replace(follows=False)),
    "Reacher": TOP,
    "Pusher": _View(0.0, 50.0, False),
    "Swimmer": TOP._replace(follows=True),
}


PLANE, CAPSULE = 0, 3  # of mujoco's mjtGeom


class _Geoms(NamedTuple):
    """Spheres and capsules ``[N]`` of a model: the body of each (-1: the world), its two ends there, radius and colour."""

    body: np.ndarray
    ends: np.ndarray
    radius: np.ndarray
    colours: list[Colour]


def _geoms(model: Any) -> _Geoms:
    """Out of a ``mujoco.MjModel``. A shape that is no capsule is shown as a ball of its bounding radius; planes are left out."""
    limbs = (BLUE, ORANGE, GREEN, PINK, SKY, (230, 159, 0), (120, 120, 200))
    bodies, ends, radii, colours = [], [], [], []
    number: dict[int, int] = {}

    children = np.bincount(model.body_parentid[1:], minlength=model.nbody)

    def limb(body: int) -> int:
        """The body with which its limb begins: a root, its child, or one of several that hang from the same body."""
        parent = int(model.body_parentid[body])
        return body if parent == 0 or model.body_parentid[parent] == 0 or children[parent] > 1 else limb(parent)

    for i in range(model.ngeom):
        if model.geom_type[i] == PLANE or model.geom_rgba[i][3] == 0:
            continue
        body, is_capsule = int(model.geom_bodyid[i]), model.geom_type[i] == CAPSULE
        half = np.array([0.0, 0.0, model.geom_size[i][1] if is_capsule else 0.0])
        axis = _rotate(model.geom_quat[i], half)
        bodies.append(body - 1)
        ends.append([model.geom_pos[i] - axis, model.geom_pos[i] + axis])
        radii.append(model.geom_size[i][0] if is_capsule else model.geom_rbound[i])
        colours.append(GREY if body == 0 else limbs[number.setdefault(limb(body), len(number)) % len(limbs)])
    return _Geoms(np.asarray(bodies), np.asarray(ends), np.asarray(radii), colours)


def _rotate(quaternion: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """``vector [..., 3]`` turned by a unit quaternion ``[..., 4]``, real part first."""
    w, u = quaternion[..., :1], quaternion[..., 1:]
    cross = np.cross(u, vector)
    return vector + 2 * (w * cross + np.cross(u, cross))


def _bodies(model: Any, view: _View, seconds: Any, keep: Callable[[Any], tuple[Array, Array]]) -> Painter:
    """Of a ``mujoco.MjModel``.

    Args:
      seconds: of a step.
      keep: ``(state) -> (places [bodies, 3], turns [bodies, 4])`` of all bodies but the world.
    """
    geoms, has_floor = _geoms(model), bool((model.geom_type == PLANE).any())
    a, e = np.deg2rad([view.azimuth, view.elevation])
    ahead = np.array([-np.sin(a), np.cos(a), 0.0])
    right, up = np.array([np.cos(a), np.sin(a), 0.0]), ahead * np.sin(e) + [0, 0, np.cos(e)]
    away = ahead * np.cos(e) - [0, 0, np.sin(e)]
    screen = np.stack([right, up], 1)

    def paint(kept: Any) -> Iterator[np.ndarray]:
        places, turns = kept  # [T, links, 3], [T, links, 4]
        world = (geoms.body < 0)[:, None, None]
        link = np.maximum(geoms.body, 0)
        moved = places[:, link, None] + _rotate(turns[:, link, None], geoms.ends[None])
        ends = np.where(world, geoms.ends, moved)  # [T, N, 2, 3]
        centre = places.mean(1) * [1, 1, 0] if view.follows else np.zeros((len(places), 3))
        flat, depth = (ends - centre[:, None, None]) @ screen, (ends @ away).mean(-1)
        low, high = (flat - geoms.radius[:, None, None]).min((0, 1, 2)), (flat + geoms.radius[:, None, None]).max((0, 1, 2))
        half = 1.1 * max(-low[0], high[0])
        is_side = view.elevation == 0
        low[1], high[1] = (min(low[1], -0.12 * half) if is_side else low[1] - 0.1 * half), high[1] + 0.1 * half
        half = max(half, 0.6 * (high[1] - low[1]))
        for t in range(len(places)):
            scene = _Scene(-half, half, low[1], high[1], background=WHITE)
            if has_floor:
                _floor(scene, centre[t], half, low[1], screen, is_side)
            for i in np.argsort(-depth[t], kind="stable"):
                scene.capsule(flat[t, i, 0], flat[t, i, 1], float(geoms.radius[i]), geoms.colours[i])
            yield scene.pixels()

    return Painter(keep, paint, max(1, round(1000 * float(seconds))))


def _floor(scene: _Scene, centre: np.ndarray, half: float, low: float, screen: np.ndarray, is_side: bool) -> None:
    """The ground, with marks that stay where they are as the camera goes along: lines, or from the side ticks."""
    step = 1.0 if half > 0.8 else 0.1
    if is_side:
        scene.shape([(-half, 0), (half, 0), (half, low), (-half, low)], PALE)
        scene.line([(-half, 0), (half, 0)], GREY, 1.5)
        for x in np.arange(np.ceil((centre[0] - half) / step) * step, centre[0] + half, step):
            scene.line([(x - centre[0], 0), (x - centre[0], -0.06 * half)], GREY, 1.5)
        return
    reach = 3 * half
    for axis in (0, 1):
        first = np.ceil((centre[axis] - reach) / step) * step - centre[axis]
        for offset in np.arange(first, reach, step):
            ends = np.zeros((2, 3))
            ends[:, axis], ends[:, 1 - axis] = offset, (-reach, reach)
            scene.line(ends @ screen, PALE, 1.5)
