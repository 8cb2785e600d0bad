"""D16: a burst between two load reports (S4).
Reports: vllm-project/router#177 and #178, llm-d/llm-d-router#1598.

What was just placed counts at once: 32 simultaneous bookings of different prompts on four ranks spread evenly, and freeing
them gives the reported loads back exactly."""
import collections, concurrent.futures
from harness import *

base = ports(4)
engines = [Engine(base + rank, rank=rank) for rank in range(4)]
with Serve("[load]\nttl_ms = 60000\n" + worker("w", base, block_size=16, size=4)) as s:
    for engine in engines:
        engine.wait_subscribed()
    # Rank 2 is a little less loaded than the others.
    reported = {str(rank): {"decode_blocks": 10 + (rank != 2), "prefill_tokens": 0} for rank in range(4)}
    s("POST", "/loads", {"model_name": "m", "worker_id": "w", "ranks": reported})

    def loads():
        rows = s("GET", "/loads")[1][0]["loads"]
        return {row["dp_rank"]: (row["potential_prefill_tokens"], row["potential_decode_blocks"], row["active_requests"]) for row in rows}

    def book(i):
        return s("POST", "/select_and_reserve",
                 {"model_name": "m", "token_ids": [i * 1000 + k for k in range(320)], "selection_id": f"b{i}"})
    before = loads()
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        got = list(pool.map(book, range(32)))
    check("all are placed", all(status == 200 for status, _ in got))
    share = collections.Counter(answer["dp_rank"] for _, answer in got)
    check("eight each, give or take one", all(7 <= share[rank] <= 9 for rank in range(4)), dict(share))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        freed = list(pool.map(lambda i: s("DELETE", f"/reservations/b{i}")[0], range(32)))
    check.equal("all are freed", set(freed), {200})
    check.equal("the reported loads are back", loads(), before)
    check.equal("the same id twice", (book(77)[0], book(77)[0]), (200, 409))
check.done()
