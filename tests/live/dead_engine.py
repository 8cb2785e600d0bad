"""An engine is gone and nobody says so: an endpoint that we bind, a port that accepts and is mute, one that accepts and closes,
one that refuses, a host that does not exist (E4, E9, S5).

Every one is `silent` some seconds after the connection was lost, whatever the cause, gets no request, and the cause is named."""
from harness import *

SETTINGS = "[streams]\nsilent_after_ms = 1000\nsilence_grace_ms = 2000\nprobe_interval_ms = 1000\nprobe_max_ms = 2000\nreplay_timeout_ms = 1000\n"
HASHES, TOKENS = chain(8)
# A name has one engine; "bound" connects to us, as vLLM does where its endpoint holds no wildcard.
bound_port, replaying = ports(), ("mute", "closing", "healthy")
config = SETTINGS + worker("bound", f"tcp://*:{bound_port}") + worker("nohost", "tcp://no-such-host.invalid:5557")
engines = {}
for name in ("mute", "closing", "refusing", "healthy"):
    engines[name] = Engine(replay=name in replaying)
    config += worker(name, engines[name].port, replay=engines[name].replay_port)
with Serve(config) as s:
    engines["bound"] = Engine(bound_port, bind=False)
    check("all connected", s.wait_active(*engines), s.listeners())
    for name, engine in engines.items():
        engine.wait_subscribed()
        engine.send(stored(HASHES, None, TOKENS))
    check("all credited", until(lambda: all(s.reach(TOKENS, name) == 32 for name in engines)), s.rows(TOKENS))
    check("none silent while its engine is idle", steadily(lambda: all(s.trust(name) != "silent" for name in engines), 3),
          {name: s.said(name) for name in engines})
    dead = ["bound", "mute", "closing", "refusing", "nohost"]
    for name in dead[:4]:
        engines[name].close()
    keep = [Listener(engines["mute"].port), Listener(engines["closing"].port, close=True)]
    silent = until(lambda: all(s.trust(name) == "silent" for name in dead), 12)
    check("all five are silent", silent, {name: s.said(name) for name in dead})
    check("the healthy one is not", s.said("healthy") == ("live", [], []), s.said("healthy"))
    for name in dead:
        reasons = s.said(name)[2]
        check(f"{name}: says why", bool({"no_connection", "probe_failed"} & set(reasons)), reasons)
        lines = s.log_lines(name)
        check(f"{name}: one warning or a few, not a flood", 1 <= len(lines) <= 6, (len(lines), lines[:2]))
    for name in ("closing", "refusing", "nohost"):
        check(f"{name}: the listener names the cause", bool(s.listener(name).get("last_error")), s.listener(name))
    picks = [s("POST", "/select", {"model_name": "m", "token_ids": TOKENS})[1] for _ in range(20)]
    check.equal("all picks go to the healthy one", {pick.get("worker_id") for pick in picks}, {"healthy"})
    excluded = {(row["worker_id"], row["reason"]) for row in picks[0].get("excluded", [])}
    check.equal("the answer says who was left out", excluded, {(name, "silent") for name in dead})
    pin = {"model_name": "m", "token_ids": TOKENS, "pinned_worker": {"worker_id": "refusing", "dp_rank": 0}}
    status, answer = s("POST", "/select", pin)
    check("a pin on a silent rank is refused with the reason", status == 503 and "silent" in json.dumps(answer), (status, answer))
    pin["pinned_worker"]["force"] = True
    check.equal("unless it says force", s("POST", "/select", pin)[0], 200)
    engines["healthy"].close()
    check("the last one too", until(lambda: s.trust("healthy") == "silent", 12), s.said("healthy"))
    status, answer = s("POST", "/select", {"model_name": "m", "token_ids": TOKENS})
    check("all silent: a choice is made and says so", status == 200 and "all_silent" in json.dumps(answer), (status, answer))
    for listener in keep:
        listener.close()
    back = Engine(engines["refusing"].port)
    check("back again: heard", until(lambda: s.trust("refusing") != "silent", 15), s.said("refusing"))
check.done()
