"""Pure arithmetic on arrays; imports nothing else of ours."""

from rljax.ops import groups, kl, losses, normalization, replay, returns, schedules

__all__ = ["groups", "kl", "losses", "normalization", "replay", "returns", "schedules"]
