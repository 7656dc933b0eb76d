"""The gate before a small application: who gets in, what they are told, and that nothing leaks."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridserve.cluster.access import key_edit
from hybridserve.cluster.access.client_address import parse_networks
from hybridserve.cluster.access.gate import Access, Gate
from hybridserve.cluster.access.key_file import KeyFile
from hybridserve.cluster.access.key_limits import KeyLimiter
from hybridserve.cluster.access.keys import KeyLimits
from hybridserve.cluster.access.record import current_record
from hybridserve.cluster.ingress.errors import ApiError, translate
from hybridserve.cluster.observe.trail import RequestTrail, follow
from hybridserve.cluster.pool.interface import PoolBusy

NOW = datetime.now(UTC)
LEAVES = {"type": "http.disconnect"}


class Log:
    """Keeps what an AuditLog would write."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def put(self, record: dict[str, object], text_bytes: int = 0) -> None:
        self.lines.append(json.loads(json.dumps(record)))


class App:
    """Answers 200 with "ok" after `tokens` tokens; by its path it fails, waits, or breaks off."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, object]] = []
        self.waiting = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        self.scopes.append(scope)
        record, path = current_record(), scope["path"]
        if path == "/broken":
            raise RuntimeError("broken")
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        if message["type"] == "http.disconnect":
            return
        record.admit("cmpl-1", "demo", 7, 20)
        reason = "cancelled"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"1")]})
            for _ in range(3):
                record.add(0, 1, "t")
                await send({"type": "http.response.body", "body": b"o", "more_body": True})
            if path == "/waits":
                self.waiting.set()
                await asyncio.Event().wait()
            if path == "/breaks-off":
                reason = "error"
                raise RuntimeError("broke off")
            reason = "stop"
        finally:
            record.end_answer(0, reason)
        await send({"type": "http.response.body", "body": b"k", "more_body": False})


class Client:
    """Calls a gate in-process; keeps what was asked of the body."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.reads = 0

    async def call(
        self,
        path: str = "/v1/x",
        headers: list[tuple[bytes, bytes]] | None = None,
        *,
        key: str | None = None,
        **scope: object,
    ) -> tuple[int, dict[str, str], bytes]:
        headers = list(headers or [])
        if key is not None:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        sent: list[dict[str, object]] = []

        async def receive() -> dict[str, object]:
            self.reads += 1
            return {"type": "http.request", "body": b"the body", "more_body": False}

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        whole = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("9.9.9.9", 1)}
        await self.gate({**whole, **scope}, receive, send)
        start, *rest = sent
        names = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], names, b"".join(message["body"] for message in rest)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def make(path: Path, log: Log, app: App) -> Callable[..., Client]:
    """make(**of Access): a client of a gate with the keys of `path` when that exists."""

    def build(**access: object) -> Client:
        keys = KeyFile(path) if path.exists() else None
        options = {"keys": keys, "audit": log, "limiter": KeyLimiter(1, lambda: 0.0), **access}
        return Client(Gate(app, Access(**options), lambda error: translate(error, "1")))

    return build


def error_of(body: bytes) -> dict[str, object]:
    return json.loads(body)["error"]


def test_a_valid_key_gets_in(path: Path, make: Callable[..., Client], log: Log) -> None:
    key = key_edit.add(path, "team", NOW)
    status, headers, body = asyncio.run(make().call(key=key))
    assert (status, headers, body) == (200, {"x-mine": "1"}, b"oook")
    [line] = log.lines
    assert line["key"] == "team"


def test_who_has_none_is_told_so_and_no_body_is_read(path: Path, make, app: App, log: Log) -> None:
    key_edit.add(path, "team", NOW)
    old = key_edit.add(path, "old", NOW - timedelta(2), expires=NOW - timedelta(1))
    gone = key_edit.add(path, "gone", NOW)
    key_edit.revoke(path, "gone", NOW)
    client = make()
    told = {}
    for case, key in (("none", None), ("unknown", "hs-x"), ("revoked", gone), ("expired", old)):
        status, headers, body = asyncio.run(client.call(key=key))
        assert status == 401
        assert headers["www-authenticate"].startswith("Bearer")
        error = error_of(body)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        told[case] = error["message"]
    assert told["unknown"] == told["revoked"]
    assert "expired" in told["expired"] and "expired" not in told["unknown"]
    assert "required" in told["none"]
    assert (client.reads, app.scopes) == (0, [])
    assert [(line["status"], line["key"]) for line in log.lines] == [
        (401, None),
        (401, None),
        (401, None),
        (401, "old"),
    ]


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (b"Bearer %s", True),
        (b"bearer %s", True),
        (b"BEARER    %s  ", True),
        (b"Bearer\t%s", False),
        (b"Basic %s", False),
        (b"Bearer", False),
        (b"Bearer ", False),
        (b"%s", False),
        (b"Bearer %s x", False),
        (b"Bearer  \xff%s", False),
    ],
)
def test_forms_of_the_header(path: Path, make, value: bytes, valid: bool) -> None:
    key = key_edit.add(path, "team", NOW)
    header = (b"Authorization", value.replace(b"%s", key.encode()))
    status, _, _ = asyncio.run(make().call(headers=[header]))
    assert status == (200 if valid else 401)
    # two that contradict each other are none
    twice = [header, (b"authorization", b"Bearer hs-other")]
    assert asyncio.run(make().call(headers=twice))[0] == 401


def test_any_header_is_answered(path: Path, make) -> None:
    key_edit.add(path, "team", NOW)
    client = make()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.binary(max_size=300), max_size=3), st.booleans())
    def run(values: list[bytes], with_scheme: bool) -> None:
        headers = [(b"authorization", (b"Bearer " if with_scheme else b"") + value) for value in values]
        assert asyncio.run(client.call(headers=headers))[0] == 401

    run()


def test_open_paths(path: Path, make, log: Log) -> None:
    key_edit.add(path, "team", NOW)
    client = make(open_paths=frozenset(("/health", "/metrics")))
    for open_path, status in (("/health", 200), ("/metrics", 200), ("/health/", 401), ("/ready", 401)):
        assert asyncio.run(client.call(open_path))[0] == status
    assert asyncio.run(client.call("/app/health", root_path="/app"))[0] == 200
    assert asyncio.run(client.call("/health/app", root_path="/app"))[0] == 401
    assert [line["route"] for line in log.lines] == ["/health/", "/ready", "/health/app"]


def test_browsers_of_other_sites_get_no_leave(path: Path, make) -> None:
    """A preflight carries no key, and answering it without one would be a route without a key."""
    key_edit.add(path, "team", NOW)
    headers = [(b"origin", b"https://x"), (b"access-control-request-method", b"POST")]
    status, names, _ = asyncio.run(make().call(headers=headers, method="OPTIONS"))
    assert status == 401
    assert not any(name.startswith("access-control") for name in names)


def test_an_open_server(make, app: App, log: Log) -> None:
    client = make()
    assert asyncio.run(client.call())[0] == 200
    assert asyncio.run(client.call(key="anything"))[0] == 200
    assert [line["key"] for line in log.lines] == [None, None]
    assert log.lines[0]["prompt_tokens"] == 7
    quiet = make(audit=None)
    assert asyncio.run(quiet.call())[0] == 200
    assert app.scopes[-1]["path"] == "/v1/x"


def test_websockets_are_closed_where_keys_are_asked_for(path: Path, make, app: App) -> None:
    key_edit.add(path, "team", NOW)
    sent = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(make().gate({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert (sent, app.scopes) == ([{"type": "websocket.close", "code": 1008}], [])


def test_too_many_or_too_long_headers(make, app: App) -> None:
    client = make()
    for headers in ([(b"x", b"")] * 129, [(b"x", b"y" * 70_000)]):
        status, _, body = asyncio.run(client.call(headers=headers))
        assert (status, error_of(body)["code"]) == (431, "headers_too_large")
    assert asyncio.run(client.call(headers=[(b"x", b"")] * 128))[0] == 200
    assert len(app.scopes) == 1


def test_limits_are_answered_429_with_their_headers(path: Path, make, log: Log) -> None:
    limits = KeyLimits(requests_per_minute=2, tokens_per_minute=1000)
    key = key_edit.add(path, "team", NOW, limits=limits)
    client = make()
    first, second, third = [asyncio.run(client.call(key=key)) for _ in range(3)]
    assert (first[0], second[0], third[0]) == (200, 200, 429)
    assert [answer[1]["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == [
        "1",
        "0",
        "0",
    ]
    # the first answer's headers leave when its prompt and expected answer are charged
    assert first[1]["x-ratelimit-remaining-tokens"] == "973"
    assert second[1]["x-ratelimit-remaining-tokens"] == "963"
    assert third[1]["retry-after"] == "30"
    assert third[1]["x-hybridserve-reject-reason"] == "key_rate"
    error = error_of(third[2])
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert [line["reject_reason"] for line in log.lines] == [None, None, "key_rate"]
    assert log.lines[2]["key"] == "team"


@pytest.mark.parametrize(
    ("ceiling", "asked", "status", "seen"),
    [
        ("high", None, 200, None),
        ("high", "high", 200, "high"),
        ("normal", None, 200, None),
        ("normal", " High ", 403, None),
        ("normal", "low", 200, "low"),
        ("low", None, 200, "low"),
        ("low", "normal", 403, None),
        # told by the endpoint that reads it
        ("low", "urgent", 200, "urgent"),
    ],
)
def test_priorities_have_a_ceiling(
    path: Path, make, app: App, ceiling: str, asked: str | None, status: int, seen: str | None
) -> None:
    key = key_edit.add(path, "team", NOW, priority=ceiling)
    headers = [] if asked is None else [(b"x-hybridserve-priority", asked.encode())]
    answer = asyncio.run(make().call(headers=headers, key=key))
    assert answer[0] == status
    if status == 403:
        error = error_of(answer[2])
        assert (error["code"], error["param"]) == ("priority_not_allowed", "x-hybridserve-priority")
        assert app.scopes == []
    else:
        assert dict(app.scopes[0]["headers"]).get(b"x-hybridserve-priority") == (seen and seen.encode())


def test_every_end_has_its_line(path: Path, make, app: App, log: Log) -> None:
    key = key_edit.add(path, "team", NOW)
    client = make()

    async def go() -> None:
        follow(RequestTrail(request_id="r-1"))
        await client.call("/v1/x", key=key)
        for path in ("/broken", "/breaks-off"):
            with pytest.raises(RuntimeError):
                await client.call(path, key=key)
        waits = asyncio.create_task(client.call("/waits", key=key))
        await app.waiting.wait()
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(go())
    ended, broken, broke_off, left = log.lines
    duration = ended.pop("duration_s")
    assert 0 < duration < 60
    assert abs(datetime.fromisoformat(ended.pop("time")) - datetime.now(UTC)) < timedelta(minutes=1)
    assert ended == {
        "request_id": "r-1",
        "answer_id": "cmpl-1",
        "key": "team",
        "key_id": key_edit.load(path)[0].key_id,
        "client": "9.9.9.9",
        "method": "POST",
        "route": "/v1/x",
        "model": "demo",
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "status": 200,
        "finish_reasons": ["stop"],
        "reject_reason": None,
    }
    assert (broken["status"], broken["finish_reasons"], broken["prompt_tokens"]) == (500, [], 0)
    assert (broke_off["status"], broke_off["finish_reasons"]) == (200, ["error"])
    assert (left["status"], left["finish_reasons"], left["completion_tokens"]) == (200, ["cancelled"], 3)
    assert key not in json.dumps(log.lines)


def test_a_client_that_leaves_before_the_answer_is_499(make, log: Log) -> None:
    async def receive() -> dict[str, object]:
        return LEAVES

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [], "client": None}
    asyncio.run(make().gate(scope, receive, None))
    [line] = log.lines
    assert (line["status"], line["client"]) == (499, None)


def test_prompts_are_kept_only_when_asked_for(make, log: Log) -> None:
    asyncio.run(make().call())
    asyncio.run(make(keeps_text=True).call())
    without, with_text = log.lines
    assert "the body" not in json.dumps(without) and "answers" not in without
    assert (with_text["request"], with_text["answers"]) == ("the body", ["ttt"])


def test_forwarded_addresses_need_a_trusted_proxy(make, log: Log) -> None:
    headers = [(b"x-forwarded-for", b"6.6.6.6, 1.2.3.4")]
    asyncio.run(make().call(headers=headers))
    asyncio.run(make(networks=parse_networks(["9.0.0.0/8"])).call(headers=headers))
    assert [line["client"] for line in log.lines] == ["9.9.9.9", "1.2.3.4"]


def test_what_a_client_writes_stays_within_its_line(make, log: Log) -> None:
    headers = [(b"authorization", b"Bearer secret")]
    asyncio.run(make().call("/\n" + "x" * 5000, headers))
    [line] = log.lines
    assert len(line["route"]) == 200
    assert "secret" not in json.dumps(line)


def test_no_place_and_no_token_leaks_whatever_is_cancelled_when(path: Path, log: Log) -> None:
    limits = KeyLimits(max_concurrent=3, tokens_per_minute=10_000)
    key = key_edit.add(path, "team", NOW, limits=limits)
    keys = KeyFile(path)

    async def app(scope, receive, send) -> None:
        steps, fails = scope["plan"]
        record = current_record()
        for step in range(steps):
            if step == 1:
                record.admit("cmpl-1", "demo", 5, 10)
            if step == 2:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            if step > 2:
                record.add(0, 4, "")
            await asyncio.sleep(0)
        if fails:
            raise RuntimeError("planned")
        if steps <= 2:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    plan = st.tuples(st.integers(0, 8), st.booleans())
    step = st.one_of(plan, st.tuples(st.just("cancel"), st.integers(0, 9)), st.just(("wait", 0)))

    @settings(max_examples=150, deadline=None)
    @given(st.lists(step, max_size=40))
    def run(events) -> None:
        limiter = KeyLimiter(1, lambda: 0.0)
        gate = Gate(app, Access(keys=keys, limiter=limiter, audit=log), lambda error: translate(error, "1"))
        use = limiter.use_of(keys.ring.entries[0])

        async def one(plan: tuple[int, bool]) -> None:
            headers = [(b"authorization", f"Bearer {key}".encode())]

            async def send(message: dict[str, object]) -> None:
                assert use.in_flight <= 3

            scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "plan": plan}
            await gate(scope, None, send)

        async def go() -> None:
            tasks: list[asyncio.Task[None]] = []
            for first, second in events:
                if first == "cancel":
                    if tasks:
                        tasks[second % len(tasks)].cancel()
                elif first == "wait":
                    await asyncio.sleep(0)
                else:
                    tasks.append(asyncio.create_task(one((first, second))))
            await asyncio.gather(*tasks, return_exceptions=True)

        log.lines.clear()
        asyncio.run(go())
        assert use.in_flight == 0
        used = sum(line["prompt_tokens"] + line["completion_tokens"] for line in log.lines)
        assert use.tokens.level(0.0) == pytest.approx(10_000 - used)

    run()


def test_a_rotated_key_works_without_a_restart(path: Path, make) -> None:
    old = key_edit.add(path, "team", NOW)
    client = make()
    new = key_edit.rotate(path, "team", NOW, grace=timedelta(days=1))
    client.gate._access.keys.check()
    assert [asyncio.run(client.call(key=key))[0] for key in (old, new)] == [200, 200]
    key_edit.revoke(path, "team", NOW, key_id=key_edit.load(path)[0].key_id)
    client.gate._access.keys.check()
    assert [asyncio.run(client.call(key=key))[0] for key in (old, new)] == [401, 200]


def test_errors_are_reported(path: Path, app: App) -> None:
    """Counted by whoever counts errors, as all others."""
    key = key_edit.add(path, "team", NOW, limits=KeyLimits(requests_per_minute=1))
    reported: list[Exception] = []

    def report(error: Exception) -> ApiError:
        reported.append(error)
        return translate(error, "1")

    client = Client(Gate(app, Access(keys=KeyFile(path)), report))
    for one in (None, key, key):
        asyncio.run(client.call(key=one))
    assert [type(error) for error in reported] == [ApiError, PoolBusy]
