"""Threads that fill parameters, each on a CUDA stream of its own where the parameters are on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

Item = TypeVar("Item")


def run_on_threads(
    work: Callable[[Item], None], items: Sequence[Item], num_threads: int, device: torch.device
) -> Iterator[Item]:
    """Call `work` on every item and yield each one that is done, in no order.

    After the last, the current stream of `device` holds all that was queued. What an item raises is raised
    here; no item is begun after that.
    """
    streams: list[torch.cuda.Stream] = []
    ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def start() -> None:
        if ready is not None:
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
            # the parameters' memory may have been another tensor's, which is still in use
            stream.wait_event(ready)
            torch.cuda.set_stream(stream)
            streams.append(stream)

    inference = torch.is_inference_mode_enabled()

    def call(item: Item) -> None:
        # the mode is a thread's own
        with torch.inference_mode(inference):
            work(item)

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights", initializer=start)
    try:
        futures = {pool.submit(call, item): item for item in items}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    finally:
        pool.shutdown(cancel_futures=True)
        for stream in streams:
            stream.synchronize()
