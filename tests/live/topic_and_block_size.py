"""Declarations that do not fit the engine (E8, R4): topics that are prefixes of the engine's or quite others, another block
size, ranks that were registered one by one.

What is never heard is not `live`, whether it comes live or by replay, and a local rank is not guessed."""
from harness import *

HASHES, TOKENS = chain(4)
TOPICS = {"prefix": ("kv@", b"kv@pod-1@llama"), "other": ("kv-events", b""), "bare": ("kv-events", b"kv-events"), "size": ("", b"")}
engines, config = {}, ""
for name, (configured, published) in TOPICS.items():
    engines[name] = Engine(replay=True, topic=published, framing="bare" if name == "bare" else "topic")
    config += worker(name, engines[name].port, replay=engines[name].replay_port, **({"topic": configured} if configured else {}))
with Serve(config) as s:
    for name in ("prefix", "other", "bare"):
        engines[name].send(stored(HASHES, None, TOKENS))
    s.wait_active(*engines)
    until(lambda: all(engine.asked for engine in engines.values()))
    check.equal("a framing without a topic is taken as matching",
                until(lambda: s.reach(TOKENS, "bare") == 16, 4) and s.said("bare"), ("live", [], []))
    for name in ("prefix", "other"):
        engines[name].send(removed(HASHES))
    engines["size"].send(stored(HASHES, None, list(range(32)), 8))
    for name, reason in (("prefix", "other_topic"), ("other", "other_topic"), ("size", "block_size_mismatch")):
        until(lambda: reason in s.said(name)[2], 5)
        said = s.said(name)
        check(f"{name}: {reason}, nothing credited", said[0] == "partial" and reason in said[2] and s.reach(list(range(32)), name) == 0,
              (said, s.reach(list(range(32)), name)))
        check(f"{name}: a warning", len(s.log_lines(f"{name}:0", reason)) == 1, s.log_lines(f"{name}:0", reason))
    check.equal("another block size misses and never over-credits", s.said("size")[1], ["may_miss"])

    ends = {rank: Engine(rank=rank) for rank in (4, 5)}
    one = {"instance_id": "q", "model_name": "z", "block_size": 4, "type": "vllm"}
    s("POST", "/register", {**one, "endpoint": tcp(ends[5].port), "dp_rank": 5})
    ends[5].wait_subscribed()
    pick = s("POST", "/select", {"token_ids": TOKENS, "model_name": "z"})[1]
    check.equal("rank 5 alone: its local rank is not known", (pick.get("dp_rank"), pick.get("local_rank"), pick.get("dispatch")), (5, None, None))
    s("POST", "/register", {**one, "endpoint": tcp(ends[4].port), "dp_rank": 4})
    ends[4].wait_subscribed()
    pick = s("POST", "/select", {"token_ids": TOKENS, "model_name": "z", "pinned_worker": {"worker_id": "q", "dp_rank": 5}})[1]
    check.equal("nor when rank 4 has come", (pick.get("dp_rank"), pick.get("local_rank"), pick.get("dispatch")), (5, None, None))
check.done()
