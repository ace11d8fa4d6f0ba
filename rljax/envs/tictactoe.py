"""Tic-tac-toe against an opponent that moves at random: a small task with illegal actions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.envs.base import TimeStep, restart, transition
from rljax.envs.spaces import Box, Discrete

LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])


@dataclasses.dataclass(frozen=True)
class TicTacToe:
    """The agent is +1 on the board, the opponent -1; who begins is a coin's toss.

    Observation: float32 ``[18]``, 1 where the agent's marks are, then where the opponent's are. Action: the square, row by row.
    ``action_mask`` has the empty squares; a move to another one loses. Reward at the end: 1 for a win, 0 for a draw, -1 for a
    loss. The state is the board, int8 ``[9]``.
    """

    observation_space = Box(0.0, 1.0, (18,))
    action_space = Discrete(9)

    def reset(self, key: Array) -> tuple[Array, TimeStep]:
        toss_key, move_key = jax.random.split(key)
        empty = jnp.zeros(9, jnp.int8)
        board = jnp.where(jax.random.bernoulli(toss_key), empty, _opponent_moves(move_key, empty))
        return board, restart(_observe(board), board == 0)

    def step(self, key: Array, state: Array, action: Array) -> tuple[Array, TimeStep]:
        illegal = state[action] != 0
        after_agent = jnp.where(illegal, state, state.at[action].set(1))
        won = _has_line(after_agent, 1)
        over = illegal | won | jnp.all(after_agent != 0)
        board = jnp.where(over, after_agent, _opponent_moves(key, after_agent))
        lost = _has_line(board, -1) | illegal
        reward = won.astype(jnp.float32) - lost
        return board, transition(_observe(board), reward, over | lost | jnp.all(board != 0), action_mask=board == 0)


def _opponent_moves(key: Array, board: Array) -> Array:
    move = jnp.argmax(jnp.where(board == 0, jax.random.uniform(key, (9,)), -1.0))
    return board.at[move].set(-1)


def _has_line(board: Array, mark: int) -> Array:
    return jnp.any(jnp.all(board[LINES] == mark, axis=1))


def _observe(board: Array) -> Array:
    return jnp.concatenate([board == 1, board == -1]).astype(jnp.float32)
