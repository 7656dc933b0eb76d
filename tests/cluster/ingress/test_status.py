"""Models, health, readiness, tokens, and metrics."""

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from hybridserve.cluster.ingress.service import Observers
from hybridserve.cluster.pool.interface import PoolBusy, PoolError
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.cluster.routing.state import PoolState, ReplicaState


def metrics(caller) -> dict[str, float]:
    """Every sample by its name, its labels' values appended in the alphabetical order of the labels."""
    response = caller.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        "|".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_models(caller):
    listed = caller.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("demo", "model", 256)
    assert caller.get("/v1/models/demo").json() == model


def test_root_names_the_endpoints(caller):
    root = caller.get("/").json()
    assert root["model"] == "demo"
    assert "/v1/chat/completions" in root["endpoints"]


def test_health_does_not_ask_the_pool(caller, pool):
    pool.info_failure = pool.is_ready = PoolError("gone")
    assert caller.get("/health").status_code == 200


def test_ready(caller, pool):
    assert caller.get("/ready").status_code == 200
    pool.is_ready = False
    response = caller.get("/ready")
    assert response.status_code == 503
    assert "not answered a prompt" in response.json()["reason"]
    pool.is_ready = PoolError("replica 3 died")
    response = caller.get("/ready")
    assert (response.status_code, response.json()["reason"]) == (503, "replica 3 died")


def test_tokenize_and_back(caller, tokenizer):
    text = "def f(x):\n    return '🙂'"
    answer = caller.post("/tokenize", {"prompt": text}).json()
    ids = tokenizer.encode(text)
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 256}
    assert caller.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    assert caller.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_tokenize_messages(caller, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    answer = caller.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert answer["tokens"] == tokenizer.encode_chat(messages, add_generation_prompt=False)


LOAD = ReplicaLoad(3, 4, 500, 5, 6, 70, 80, 9, 12.5, 11, 1000, 320, 120, 9000, 700, 1.5)


def state_of(**changes: object) -> PoolState:
    limits = PoolLimits(4, 1000, 10.0, 0.9, 0.5)
    state = PoolState(
        spec=PoolSpec("short", 0, 512, 2, ReplicaRange(1, 4), ("long",), limits),
        replicas=(ReplicaState("a1", 350, LOAD), ReplicaState("b2", 0, None)),
        budget_tokens=2000,
        outstanding_tokens=350,
        queued_tokens=150,
        own_requests=2,
        tokens_per_s=99.96,
        queue_wait_s=1.5004,
        decisions={"own": 7},
        rejections={("token_budget", "low"): 2, ("token_budget", "high"): 1},
        prefix_hits=3,
    )
    return replace(state, **changes)


def test_metrics_of_the_engines(caller, pool):
    assert not any(name.startswith("hybridserve_requests_running") for name in metrics(caller))
    pool.pool_states = [state_of()]
    seen = metrics(caller)
    assert seen["hybridserve_requests_running|short|a1"] == 3
    assert seen["hybridserve_requests_waiting|short|a1"] == 4
    assert (seen["hybridserve_units_used|short|a1"], seen["hybridserve_units_limit|short|a1"]) == (5, 6)
    assert (seen["hybridserve_pages_used|short|a1"], seen["hybridserve_pages_limit|short|a1"]) == (70, 80)
    assert seen["hybridserve_arena_use_ratio|short|a1"] == 1
    assert seen["hybridserve_preemptions_total|short|a1"] == 11
    assert seen["hybridserve_steps_total|short|a1"] == 1000
    assert seen["hybridserve_computed_tokens_total|short|a1"] == 9000
    assert seen["hybridserve_step_seconds|short|a1"] == 0.0125
    assert seen["hybridserve_queue_age_seconds|short|a1"] == 1.5
    # what has not reported has no figures
    assert not any("b2" in name for name in seen)


def test_a_load_without_a_name(caller, pool):
    pool.pool_states = [state_of(replicas=(ReplicaState("b2", 0, None),), unnamed_load=LOAD)]
    assert metrics(caller)["hybridserve_steps_total|short|unnamed"] == 1000


def test_pools_and_their_metrics(caller, pool):
    pool.pool_states = [state_of()]
    [state] = caller.get("/pools").json()["pools"]
    assert (state["name"], state["bucket"]) == ("short", {"above": 0, "max_prompt_tokens": 512})
    replicas = state["replicas"]
    assert (replicas["min"], replicas["max"], replicas["up"]) == (1, 4, 2)
    assert [one["name"] for one in replicas["list"]] == ["a1", "b2"]
    assert replicas["list"][0]["load"]["queue_age_s"] == 1.5 and replicas["list"][1]["load"] is None
    assert state["budget"] == {"tokens": 2000, "outstanding_tokens": 350}
    assert state["queue"] == {"tokens": 150, "age_s": 1.5, "wait_s": 1.5, "tokens_per_s": 100.0}
    assert state["decisions"] == {"own": 7, "borrowed": 0, "prefix_hits": 3}
    assert state["rejections"] == {"token_budget": {"high": 1, "low": 2}}
    seen = metrics(caller)
    assert seen["hybridserve_pool_replicas|short"] == 2
    assert seen["hybridserve_pool_shards|short"] == 4
    assert (seen["hybridserve_pool_replicas_min|short"], seen["hybridserve_pool_replicas_max|short"]) == (
        1,
        4,
    )
    assert seen["hybridserve_pool_queue_age_seconds|short"] == 1.5
    assert seen["hybridserve_router_decisions_total|own|ingress|short"] == 7
    assert seen["hybridserve_router_rejections_total|ingress|short|low|token_budget"] == 2
    pool.pool_states = [state_of(queue_wait_s=None)]
    assert "hybridserve_pool_queue_wait_seconds|short" not in metrics(caller)


def test_metrics_of_requests_move(caller, pool):
    pool.text = "one two three"
    body = {"prompt": "def f", "max_tokens": 64}
    used = caller.post("/v1/completions", body).json()["usage"]
    caller.events("/v1/completions", {**body, "max_tokens": 2, "n": 2})
    caller.post("/v1/completions", {**body, "temperature": -1})
    caller.post("/v1/completions", {**body, "model": "other"})
    pool.failures = {1: PoolError("gone")}
    caller.post("/v1/completions", {**body, "stream": True})
    caller.get("/nowhere")
    seen = metrics(caller)
    here = "ingress|only"
    assert seen[f"hybridserve_requests_total|stop|{here}"] == 1
    assert seen[f"hybridserve_requests_total|length|{here}"] == 2
    assert seen[f"hybridserve_requests_total|error|{here}"] == 1
    # once for each prompt, however many answers it has
    assert seen[f"hybridserve_prompt_tokens_total|{here}"] == 3 * used["prompt_tokens"]
    made = used["completion_tokens"] + 2 * 2 + 1
    assert seen[f"hybridserve_generation_tokens_total|{here}"] == made
    assert seen[f"hybridserve_time_to_first_token_seconds_count|{here}"] == 4
    assert seen[f"hybridserve_inter_token_latency_seconds_count|{here}"] == made - 4
    assert seen[f"hybridserve_request_duration_seconds_count|{here}"] == 4
    assert seen["hybridserve_request_errors_total|none|ingress|400"] == 1
    assert seen["hybridserve_request_errors_total|model_not_found|ingress|404"] == 1
    assert seen["hybridserve_request_errors_total|pool_unavailable|ingress|503"] == 1
    assert seen["hybridserve_http_requests_total|ingress|/v1/completions|200"] == 3
    assert seen["hybridserve_http_requests_total|ingress|/v1/completions|400"] == 1
    assert seen["hybridserve_http_requests_total|ingress|other|404"] == 1
    assert seen["hybridserve_ingress_requests_in_flight|ingress"] == 0


def test_what_was_refused_is_no_pools(caller, pool):
    pool.rejection = PoolBusy("full", 3, "token_budget")
    assert caller.post("/generate", {"prompt": "a"}).status_code == 429
    seen = metrics(caller)
    assert seen["hybridserve_request_errors_total|overloaded|ingress|429"] == 1
    # no error of a pool's, and nothing that a pool took
    assert seen["hybridserve_requests_total|rejected|ingress|none"] == 1
    assert not any(name.startswith("hybridserve_prompt_tokens_total") for name in seen)
    assert not any(name.startswith("hybridserve_request_duration_seconds_count") for name in seen)


def test_one_scrape_is_of_all_ingress_replicas(make_caller, pool):
    """Whichever is asked; with two that count in one process, as `metrics_snapshot` says it to the other."""
    pool.pool_states = [state_of()]
    callers: dict[str, object] = {}

    def others_of(name: str):
        async def ask():
            return [
                one.api.state.service.metrics.snapshot() for other, one in callers.items() if other != name
            ]

        return Observers(name, other_ingresses=ask)

    for name in ("a", "b"):
        callers[name] = make_caller(observers=others_of(name))
    callers["a"].post("/generate", {"prompt": "x"})
    for _ in range(2):
        callers["b"].post("/generate", {"prompt": "x"})
    for one in callers.values():
        seen = metrics(one)
        assert seen["hybridserve_requests_total|stop|a|only"] == 1
        assert seen["hybridserve_requests_total|stop|b|only"] == 2
        # pools are the same to both
        assert seen["hybridserve_pool_replicas|short"] == 2
        assert seen["hybridserve_requests_running|short|a1"] == 3


def test_two_ingresses_in_one_process_count_apart(make_caller):
    first, second = make_caller(), make_caller()
    first.post("/generate", {"prompt": "a"})
    assert metrics(first)["hybridserve_requests_total|stop|ingress|only"] == 1
    assert "hybridserve_requests_total|stop|ingress|only" not in metrics(second)
