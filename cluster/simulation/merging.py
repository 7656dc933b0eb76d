"""A configuration's pools as one, with the same replicas: what buckets are compared with."""

import copy
from collections.abc import Mapping

from hybridserve.cluster.settings import AppSettings

MERGED = "merged"


def merged_pools(args: Mapping[str, object]) -> dict[str, object]:
    """A deployment's `args` with one pool that has all pools' replicas and the largest of each limit.

    Raises:
        ValueError: there are not two pools, their shards differ in number, or limits are no numbers.
    """
    settings = AppSettings.model_validate(args)
    pools = settings.pools
    if len(pools) < 2:
        raise ValueError(f"pools: merging takes two at least, got {len(pools)}")
    specs = settings.pool_specs()
    sizes = {spec.tensor_parallel_size for spec in specs}
    if len(sizes) > 1:
        got = ", ".join(map(str, sorted(sizes)))
        raise ValueError(f"pools: merged replicas must have one tensor_parallel_size, got {got}")
    changed = {key for pool in pools for key in pool.serving}
    each = [settings.serving_of(spec.name).model_dump() for spec in specs]
    limits = {key: max(_number(key, serving[key]) for serving in each) for key in sorted(changed)}
    replicas: object = sum(spec.replicas.max for spec in specs)
    if not all(spec.replicas.fixed for spec in specs):
        replicas = {"min": sum(spec.replicas.min for spec in specs), "max": replicas}
    pool = {"name": MERGED, "replicas": replicas, "tensor_parallel_size": sizes.pop(), "serving": limits}
    return {**copy.deepcopy(dict(args)), "pools": [pool]}


def _number(key: str, value: object) -> int | float:
    if not isinstance(value, int | float):
        raise ValueError(f"pools: serving.{key} cannot be merged, it is no number in every pool: {value!r}")
    return value
