"""Models, health, readiness, tokens, and metrics."""

from prometheus_client.parser import text_string_to_metric_families

from hybridserve.cluster.pool.interface import PoolError
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.cluster.routing.state import PoolState, ReplicaState
from hybridserve.replicas.engine.plan import EngineLoad


def metrics(caller) -> dict[str, float]:
    """Every sample by its name, its labels' values appended, the labels in alphabetical order."""
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


def test_metrics_of_the_engine(caller, pool):
    assert "hybridserve_requests_running" not in metrics(caller)
    pool.engine_load = EngineLoad(3, 4, 500, 5, 6, 70, 80, 9, 12.5, 11, 1000)
    seen = metrics(caller)
    assert seen["hybridserve_requests_running"] == 3
    assert seen["hybridserve_requests_waiting"] == 4
    assert (seen["hybridserve_units_used"], seen["hybridserve_units_total"]) == (5, 6)
    assert (seen["hybridserve_pages_used"], seen["hybridserve_pages_total"]) == (70, 80)
    assert seen["hybridserve_preemptions_total"] == 11
    assert seen["hybridserve_step_seconds"] == 0.0125


def test_pools_and_their_metrics(caller, pool):
    limits = PoolLimits(4, 1000, 10.0, 0.9, 0.5)
    load = ReplicaLoad(3, 4, 500, 5, 6, 70, 80, 9, 12.5, 11, 1000, 320, 120, 9000, 700, 1.5)
    pool.pool_states = [
        PoolState(
            spec=PoolSpec("short", 0, 512, 1, ReplicaRange(1, 4), ("long",), limits),
            replicas=(ReplicaState("a1", 350, load), ReplicaState("b2", 0, None)),
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
    ]
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
    assert seen["hybridserve_pool_queue_age_seconds|short"] == 1.5
    assert seen["hybridserve_router_decisions_total|own|short"] == 7
    assert seen["hybridserve_router_rejections_total|short|low|token_budget"] == 2


def test_metrics_of_requests_move(caller, pool):
    pool.text = "one two three"
    body = {"prompt": "def f", "max_tokens": 64}
    used = caller.post("/v1/completions", body).json()["usage"]
    caller.events("/v1/completions", {**body, "max_tokens": 2, "n": 2})
    caller.post("/v1/completions", {**body, "temperature": -1})
    caller.post("/v1/completions", {**body, "model": "other"})
    pool.failures = {1: PoolError("gone")}
    caller.post("/v1/completions", {**body, "stream": True})
    seen = metrics(caller)
    assert seen["hybridserve_requests_total|stop"] == 1
    assert seen["hybridserve_requests_total|length"] == 2
    assert seen["hybridserve_requests_total|error"] == 1
    assert seen["hybridserve_prompt_tokens_total"] == 3 * used["prompt_tokens"]
    made = used["completion_tokens"] + 2 * 2 + 1
    assert seen["hybridserve_generation_tokens_total"] == made
    assert seen["hybridserve_time_to_first_token_seconds_count"] == 4
    assert seen["hybridserve_inter_token_latency_seconds_count"] == made - 4
    assert seen["hybridserve_request_errors_total|none|400"] == 1
    assert seen["hybridserve_request_errors_total|model_not_found|404"] == 1
    assert seen["hybridserve_request_errors_total|pool_unavailable|503"] == 1
    assert seen["hybridserve_ingress_requests_in_flight"] == 0


def test_two_ingresses_in_one_process_count_apart(make_caller):
    first, second = make_caller(), make_caller()
    first.post("/generate", {"prompt": "a"})
    assert "hybridserve_requests_total|stop" not in metrics(second)
