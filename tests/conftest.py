"""Two host devices for every test, so that lanes are sharded as they are in use."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
