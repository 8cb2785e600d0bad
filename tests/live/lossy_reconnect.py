"""A live rank's connection breaks for a moment, and the replay behind it loses a batch in the middle; the engine then is idle
(E10, E3). And a load report without usable fields behind a usable one (L18)."""
from harness import *
from proxy import Proxy

HASHES, TOKENS = chain(8)
engines = {name: Engine(replay=True) for name in ("once", "always")}
proxies = {name: Proxy(engine.port) for name, engine in engines.items()}
config = "[streams]\nreplay_timeout_ms = 1000\n"
for name, engine in engines.items():
    config += worker(name, proxies[name].port, replay=engine.replay_port)
with Serve(config) as s:
    s.wait_active(*engines)
    until(lambda: all(engine.asked for engine in engines.values()))
    for name, engine in engines.items():
        engine.send(stored(HASHES, None, TOKENS))
        engine.send(stored([77], None, [7] * 4))
        check(f"{name}: live before", until(lambda: s.said(name)[0] == "live" and s.reach(TOKENS, name) == 32), s.said(name))
        engine.drop, engine.drop_times = {3}, 1 if name == "once" else None
        proxies[name].cut()
        engine.send(stored([78], None, [8] * 4))     # number 2
        engine.send(removed(HASHES))                 # number 3 is lost in the answer
        engine.send(stored([79], None, [9] * 4))     # number 4
    wrong = []

    def watch():
        for (name, _), row in s.rows(TOKENS).items():
            # Until the connection is found lost the view is that of before.
            if row["trust"] == "live" and row["device"] and s.reach([8] * 4, name):
                wrong.append((name, row))
        return all(s.reach([9] * 4, name) for name in engines)
    check("both go on", until(watch, 15), s.rows(TOKENS))
    until(lambda: s.said("always")[0] == "partial" and s.said("once")[0] == "live", 15)
    steadily(lambda: watch() or True, 2)
    check("none was live and credited what is gone", not wrong, wrong[:1])
    check.equal("lost once: complete", (s.said("once"), s.reach(TOKENS, "once")), (("live", [], []), 0))
    said = s.said("always")
    check("lost always: partial, may over-credit", said[0] == "partial" and "may_overcredit" in said[1] and "lost_batches" in said[2], said)
    check("no restart was seen in it", s.metric("rankwise_restarts_total") == 0)

    def load():
        row = s("GET", "/loads")[1][0]["loads"]
        row = next(r for r in row if r["worker_id"] == "once")
        return row["state"], row["decode_blocks"]
    s("POST", "/loads", {"model_name": "m", "worker_id": "once", "source": "a", "ranks": {"0": {"num_used_tokens": 400}}})
    check.equal("a usable report", load(), ("known", 100))
    s("POST", "/loads", {"model_name": "m", "worker_id": "once", "source": "b", "ranks": {"0": {"num_running_reqs": 3}}})
    check.equal("one without usable fields does not replace it", load(), ("known", 100))
check.done()
