"""A server with a fake engine, in one of the modes that are compared; ends when its standard input does.

    python tests/benchmarks/path/server.py MODE PORT INGRESS_REPLICAS PLACES

PLACES: requests at once, more are refused. Prints one line when it is ready. "bare" is the same ASGI
application under uvicorn with the engine in the same process: no Serve, no bus.
"""

import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from fake_engine import MAX_SEQUENCES, FakeFactory

from hybridserve.cluster.pool.engine_loop import EngineLoop
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.settings_reading import load_settings
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
STEP_S = 0.005
TOKEN_TEXT = "~"
"""Of every token; a character that nothing else in an event has."""


def settings(transport: str, proxy: str, replicas: int, places: int) -> AppSettings:
    serving = {
        "device": "cpu",
        "max_concurrent_requests": places,
        "token_budget": 2**40,
        "queue_deadline_s": 600,
        "token_transport": transport,
        "longest_answer_s": 5,
    }
    return load_settings(
        {
            "model": {"path": "configs/demo-model", "name": "demo"},
            "serving": serving,
            "ingress": {"proxy": proxy, "num_replicas": replicas},
        },
        ROOT,
    )


class LocalPool:
    """The engine's thread in this process; its news reach requests by queues."""

    def __init__(self, factory: FakeFactory) -> None:
        self._queues: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._loop = EngineLoop(factory, self)

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._info: asyncio.Future[EngineInfo] = self._event_loop.create_future()
        self._loop.start()
        await self._info

    async def info(self) -> EngineInfo:
        return await self._info

    async def ready(self) -> bool:
        return True

    def full(self, priority: str) -> None:
        """It refuses nothing."""

    def pools(self) -> list[object]:
        return []

    def load(self) -> None:
        return None

    async def refresh_load(self) -> None:
        """Nothing is shown of it."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._loop.submit(request)
        try:
            while not (output := await queue.get()).finished:
                yield output
            yield output
        finally:
            del self._queues[request.request_id]
            self._loop.abort(request.request_id)

    # from the engine's thread

    def started(self, info: EngineInfo) -> None:
        self._event_loop.call_soon_threadsafe(self._info.set_result, info)

    def stepped(self, outputs: list[EngineOutput], load: EngineLoad) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, outputs)

    def refused(self, request_id: str, message: str) -> None:
        raise AssertionError(message)

    failed = refused

    def died(self, message: str) -> None:
        raise AssertionError(message)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.request_id in self._queues:
                self._queues[output.request_id].put_nowait(output)


def run_bare(port: int, factory: FakeFactory) -> None:
    import uvicorn
    import uvloop

    from hybridserve.cluster.ingress.app import build_api
    from hybridserve.cluster.ingress.options import IngressOptions

    async def serve() -> None:
        pool = LocalPool(factory)
        await pool.start()
        options = IngressOptions(model_name="demo", max_concurrent_requests=MAX_SEQUENCES)
        api = build_api(pool, Tokenizer.load(str(ROOT / "configs/demo-model")), options, {})
        config = uvicorn.Config(api, port=port, access_log=False, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        print("ready", flush=True)
        threading.Thread(target=wait_for_end, args=(lambda: setattr(server, "should_exit", True),)).start()
        await server.serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def wait_for_end(then: Callable[[], None]) -> None:
    sys.stdin.read()
    then()


def run_serve(
    port: int, factory: FakeFactory, transport: str, proxy: str, replicas: int, places: int
) -> None:
    import os

    from hybridserve.cluster.serve_alpha.proxy_mode import environment

    with tempfile.TemporaryDirectory(prefix="hs-bench-", dir="/tmp") as folder:
        # before Ray is imported, as Serve reads them at once
        os.environ.update({**environment(proxy, Path(folder), 5.0), **os.environ})
        import ray
        from ray import cloudpickle, serve

        from hybridserve.cluster.ingress.deployment import build_ingress
        from hybridserve.cluster.pool.replica import EngineActorOptions, PoolReplica
        from hybridserve.cluster.serve_alpha.request_router import router_config

        cloudpickle.register_pickle_by_value(sys.modules[FakeFactory.__module__])
        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        app = settings(transport, proxy, replicas, places)
        [spec] = app.pool_specs()
        pool = serve.deployment(
            PoolReplica,
            name=spec.name,
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=MAX_SEQUENCES + 64,
            request_router_config=router_config(spec.name),
            logging_config={"enable_access_log": False},
        ).bind(factory, EngineActorOptions(MAX_SEQUENCES + 64, 60))
        serve.run(build_ingress(app, {spec.name: pool}), name="bench")
        print("ready", flush=True)
        sys.stdin.read()
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    mode, port, replicas, places = sys.argv[1], *map(int, sys.argv[2:5])
    [token_id] = Tokenizer.load(str(ROOT / "configs/demo-model")).encode(TOKEN_TEXT)
    factory = FakeFactory(STEP_S, token_id)
    if mode == "bare":
        run_bare(port, factory)
    else:
        proxy, transport = mode.split("/")
        run_serve(port, factory, transport, proxy, replicas, places)


if __name__ == "__main__":
    main()
