"""Pure arithmetic on arrays; imports nothing else of ours."""

from rljax.ops import kl, losses, normalization, returns

__all__ = ["kl", "losses", "normalization", "returns"]
