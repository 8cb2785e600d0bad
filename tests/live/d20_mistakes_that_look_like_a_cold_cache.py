"""D20: mistakes of deployment that end in no hits at all (E4, E8).
Reports: NVIDIA/TensorRT-LLM#14882, ai-dynamo/dynamo#13653, vllm-project/production-stack#1062, AMD-AGI/Infera#109,
llm-d/llm-d-inference-sim#725, sgl-project/sglang#39326.

Each mistake is said where an operator looks, under its name. A rank of which nothing could be indexed is not `live`."""
from harness import *

TOKENS = list(range(320))
base = ports(7)
NAMES = ["size", "topic", "prefix", "loadport", "nobody", "unheard", "good"]
TOPICS = {"topic": "kv-events", "prefix": "kv"}
config = "[streams]\nsilence_grace_ms = 1500\nsilent_after_ms = 1500\n"
for offset, name in enumerate(NAMES):
    more = {"topic": TOPICS[name]} if name in TOPICS else {}
    config += worker(name, base + offset, block_size=16, **more)
with Serve(config) as s:
    published = {"topic": b"kv@10.0.0.1:8000@m", "prefix": b"kv@10.0.0.1:8000@m", "loadport": b"load"}
    engines = {name: Engine(base + offset, topic=published.get(name, b"")) for offset, name in enumerate(NAMES) if name != "nobody"}
    for engine in engines.values():
        engine.wait_subscribed()
    for k in range(8):
        parent = k - 1 if k else None
        engines["size"].send(stored([k], parent, TOKENS[k * 32:(k + 1) * 32], 32))
        for name in ("topic", "prefix", "good"):
            engines[name].send(stored([k], parent, TOKENS[k * 16:(k + 1) * 16], 16))
        engines["loadport"].frames([b"load", struct.pack(">q", k), msgpack.packb(["LoadStat", 1, 0, 640, 32000, 0])])

    def told(name):
        row = s.rows(TOKENS)[(name, 0)]
        return row["trust"], row["may_err"], row.get("reasons"), row["device"]
    until(lambda: told("good") == ("live", [], [], 128))
    check.equal("good: live, eight blocks", told("good"), ("live", [], [], 128))
    check.equal("good: no warning", s.log_lines("good"), [])
    # "reason": what the row must name; the trust that goes with it.
    for name, reason, trust in (("size", "block_size_mismatch", "partial"), ("topic", "other_topic", "partial"),
                                ("prefix", "other_topic", "partial"), ("loadport", None, "partial"), ("nobody", "no_connection", "silent"),
                                ("unheard", "never_heard", "partial")):
        until(lambda: told(name)[0] == trust and (reason is None or reason in (told(name)[2] or [])), 6)
        seen = told(name)
        check(f"{name}: {trust}, {reason or 'with a reason'}, nothing credited",
              seen[0] == trust and bool(seen[2]) and (reason is None or reason in seen[2]) and seen[3] == 0, (seen, s.counters(name)))
        if name != "unheard":
            check(f"{name}: a warning by name", bool(s.log_lines(name)), s.log_lines(name)[:1])
    check("nobody: the listener names the cause", bool(s.listener("nobody").get("last_error")), s.listener("nobody"))
check.done()
