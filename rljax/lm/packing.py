"""Packing: several examples in one row, so that a batch of texts of different lengths holds little padding."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Packed(NamedTuple):
    """Rows ``[N, length]``.

    Attributes:
      tokens: int32, -1 where there is nothing.
      segments: int32, the number of the example within its row; padding goes on with the next number.
      mask: bool, True for the words of a completion: what the loss asks a model to predict from what stands before.
    """

    tokens: np.ndarray
    segments: np.ndarray
    mask: np.ndarray


def pack(examples: Sequence[tuple[Sequence[int], Sequence[int]]], length: int) -> Packed:
    """Puts ``(prompt, completion)`` pairs of ids into rows of ``length``, the longest first, each into the first row with room.

    Raises:
      ValueError: an example that is longer than a row, or has no prompt or no completion; names its number.
    """
    for i, (prompt, completion) in enumerate(examples):
        if not prompt or not completion:
            raise ValueError(f"example {i} has no {'completion' if prompt else 'prompt'}")
        if len(prompt) + len(completion) > length:
            raise ValueError(f"example {i} has {len(prompt) + len(completion)} tokens, and a row has {length}")
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(examples)), key=lambda i: -len(examples[i][0]) - len(examples[i][1])):
        size = len(examples[i][0]) + len(examples[i][1])
        row = next((k for k, free in enumerate(room) if free >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(i)
        room[row] -= size
    packed = Packed(*(np.full((len(rows), length), fill, kind) for fill, kind in ((-1, np.int32), (0, np.int32), (False, bool))))
    for k, members in enumerate(rows):
        place = 0
        for segment, i in enumerate(members):
            prompt, completion = examples[i]
            end = place + len(prompt) + len(completion)
            packed.tokens[k, place:end] = [*prompt, *completion]
            packed.segments[k, place:] = segment
            packed.mask[k, place + len(prompt) : end] = True
            place = end
        packed.segments[k, place:] = len(members)
    return packed
