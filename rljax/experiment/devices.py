"""Process-wide settings of jax, made before it starts."""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax


def prepare() -> None:
    """On CPU, one host device a core, since XLA keeps one small program on one core; and a persistent compilation cache.

    Does nothing where jax has started already, or where the user chose a number of devices or a cache by jax's own settings.
    """
    settings: Any = jax.config  # its values are no declared attributes
    if not settings.jax_compilation_cache_dir:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljax" / "xla"
        settings.update("jax_compilation_cache_dir", str(cache))
    chosen = settings.jax_num_cpu_devices > 0 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with contextlib.suppress(RuntimeError):
            settings.update("jax_num_cpu_devices", cores)
