"""One lane over several devices: its environments, prompts and minibatches split, and its parameters too where they must be.

The program stays one over whole arrays, of which some say where they are split, and XLA completes the rest (GSPMD: Xu et al.
2021, arXiv 2105.04663): a mean over a minibatch becomes a mean over devices, so that a gradient is averaged over all of them,
and a parameter that is split is gathered where it is used (as in ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054). Random
numbers are those of one device; sums are added in another order.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "split"
PARAMS = ("params", "target_params", "opt_state", "opt_states", "critics", "target_critics", "values")  # fields of train states

_mesh: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextlib.contextmanager
def split_over(mesh: Mesh) -> Iterator[None]:
    """Where a function is traced within, `spread` splits over the axis `AXIS` of the mesh."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def spread(tree: Any, axis: int = 0) -> Any:
    """The arrays, each split along ``axis`` over the devices of a lane; outside of `split_over`, as they are.

    Raises:
      ValueError: the axis cannot be split evenly.
    """
    mesh = _mesh.get()
    if mesh is None:
        return tree

    def one(x: Any) -> Any:
        if x.shape[axis] % mesh.size:
            raise ValueError(
                f"shard: {x.shape[axis]} environments, episodes or samples cannot be split evenly over {mesh.size} devices; of "
                f"eval_episodes, algo.num_envs, groups and batches make multiples of {mesh.size}"
            )
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS)))

    return jax.tree.map(one, tree)


def of_states(states: Any, mesh: Mesh, mode: str) -> Any:
    """Where the leaves ``[lanes, ...]`` of train states rest between two calls, as `NamedSharding`.

    Environments are split along their own axis; with "params", parameters and what the optimizer keeps of each along their
    longest axis that can be split evenly; all else is on every device.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        field = getattr(path[0], "name", "")
        if field == "world" and leaf.ndim > 1 and leaf.shape[1] % mesh.size == 0:
            return NamedSharding(mesh, PartitionSpec(None, AXIS))
        is_split = field in PARAMS and mode == "params"
        return _longest(leaf, mesh, 1) if is_split else NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(one, states)


def of_params(params: Any, mesh: Mesh) -> Any:
    """The same of parameters that all lanes share, without the axis of lanes."""
    return jax.tree.map(lambda leaf: _longest(leaf, mesh, 0), params)


def _longest(leaf: Any, mesh: Mesh, first: int) -> NamedSharding:
    """Split along the longest axis from ``first`` on that can be split evenly, if there is one."""
    even = [i for i in range(first, leaf.ndim) if leaf.shape[i] and leaf.shape[i] % mesh.size == 0]
    spec = PartitionSpec(*[None] * max(even, key=lambda i: leaf.shape[i]), AXIS) if even else PartitionSpec()
    return NamedSharding(mesh, spec)
