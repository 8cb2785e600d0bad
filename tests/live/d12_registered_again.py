"""D12: a controller posts the same worker again and again (R3, R7, S4, A2).
Reports: vllm-project/router#197 (loads of requests in flight are zeroed), sgl-project/sglang#38523 (the old worker stays
listed), sgl-project/sglang#30270.

The same declaration changes nothing: blocks, reservations, order and connections stay, the worker is listed and chosen once.
So does a change that has nothing to do with the cache. /register of a rank that is there is 409 and changes nothing."""
from harness import *

A, B = list(range(1, 17)), list(range(101, 117))
base = ports(2)
with Serve() as s:
    engines = [Engine(base + rank, rank=rank) for rank in (0, 1)]
    record = {"worker_id": "pod-a", "model_name": "m", "block_size": 4, "endpoint": "http://10.0.0.1:8000",
              "data_parallel_start_rank": 0, "data_parallel_size": 2,
              "kv_events_endpoints": {str(rank): tcp(base + rank) for rank in (0, 1)}}
    check.equal("declared", s("POST", "/workers", record)[0], 201)
    for engine in engines:
        engine.wait_subscribed()
    engines[0].send(stored([1, 2, 3, 4], None, A))
    engines[1].send(stored([5, 6], None, B[:8]))
    until(lambda: s.applied() == 2)
    for i in range(5):
        s("POST", "/select_and_reserve", {"model_name": "m", "token_ids": A + [7] * 40, "selection_id": f"r{i}",
                                          "pinned_worker": {"worker_id": "pod-a", "dp_rank": 0}})

    def state():
        rows = {key: (row["device"], row["trust"]) for key, row in s.rows(A).items()}
        return (rows, s.metric("rankwise_reserved_requests", dp_rank="0"), s.metric("rankwise_reserved_blocks", dp_rank="0"),
                s.metric("rankwise_blocks", dp_rank="1", tier="device"))
    until(lambda: all(trust == "live" for _, trust in state()[0].values()), 3)
    before = state()
    check("five bookings on rank 0, blocks on both", before[1] == 5 and before[3] == 2, before)
    for _ in range(20):
        s("POST", "/workers", record)
    check.equal("twenty times the same record", state(), before)
    for patch in ({"taints": ["slow"]}, {"taints": []}, {"max_num_batched_tokens": 8192}, {"endpoint": "http://10.0.0.1:8001"},
                  {"stable_routing_id": "x"}):
        status, _ = s("PATCH", "/workers/pod-a", patch)
        check.equal(f"PATCH {patch}", (status, state()), (200, before))
    status, _ = s("POST", "/register", {"instance_id": "pod-a", "model_name": "m", "block_size": 4, "dp_rank": 0, "endpoint": tcp(base)})
    check.equal("/register of the same rank", (status, state()), (409, before))
    engines[0].send(stored([9], 4, [1, 1, 1, 1]))
    check("the stream goes on", until(lambda: s.applied() == 3))
    check.equal("without a hole", (s.metric("rankwise_gaps_total"), s.metric("rankwise_restarts_total")), (0, 0))
    listed = s("GET", "/workers")[1]
    check("listed once, with two ranks", len(listed) == 1 and len(listed[0]["endpoints"]) == 2, len(listed))
    chosen = s("POST", "/select", {"model_name": "m", "token_ids": A, "candidates": "all"})[1]
    check.equal("two candidates", len(chosen["candidates"]), 2)
    check("no second subscription reached the engines", not any(engine.pub.poll(50) for engine in engines))
check.done()
