"""Graders: functions of what a model has written, and of the row of data that it answers."""

from typing import Any


def palindrome(sample: dict[str, Any], item: dict[str, Any], *, ignore_case: bool = True) -> float:
    """The share of characters that stay where they are when the text is reversed: 1 for a palindrome, 0 for nothing.

    Args:
      sample: ``{"output_text": completion}``.
      item: the row with ``prompt`` and ``answer``, of which this one needs nothing.
      ignore_case: a key of the table in a config, as every keyword-only argument is.
    """
    text = sample["output_text"].strip()
    text = text.casefold() if ignore_case else text
    return sum(a == b for a, b in zip(text, reversed(text), strict=True)) / len(text) if text else 0.0
