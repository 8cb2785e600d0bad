"""A replay loses messages, as a ROUTER at its high-water mark does, its end mark arrives, and the engine then is idle (E10, E3).

The rest is asked for until an answer brings only the end mark. What never comes leaves the rank `partial`; no rank is ever
`live` with a hole. Ways to lose: once or always, in the middle, at the end, at the beginning."""
from harness import *

HELD, NEWEST = chain(8), [9101, 9102, 9103, 9104]
# name: (numbers that are lost, how often, trust at the end, its ways to err, reason)
WAYS = {
    "middle_once": ({2}, 1, "live", [], None),
    "middle_twice": ({2}, 2, None, None, None),
    "middle_always": ({2}, None, "partial", ["may_miss", "may_overcredit"], "lost_batches"),
    "end_once": ({2, 3}, 1, "live", [], None),
    "end_always": ({3}, None, "live", [], None),
    "beginning_always": ({0}, None, "partial", ["may_miss"], "joined_late"),
    "beginning_once": ({0, 1}, 1, None, None, None),
}
engines, config = {}, "[streams]\nreplay_timeout_ms = 1000\n"
for framing in ("topic", "bare"):
    for way, (drop, times, *_) in WAYS.items():
        engine = Engine(replay=True, framing=framing)
        engine.drop, engine.drop_times = drop, times
        hashes, tokens = HELD
        engine.send(stored(hashes, None, tokens))
        engine.send(stored([101], None, [9001, 9002, 9003, 9004]))
        engine.send(removed(hashes))
        engine.send(stored([102], None, NEWEST))
        engines[f"{way}_{framing}"] = engine
        config += worker(f"{way}_{framing}", engine.port, replay=engine.replay_port)

with Serve(config) as s:
    wrong = {}

    def watch():
        """No rank may be live at any moment while it credits what the engine has removed."""
        for (name, _), row in s.rows(HELD[1]).items():
            if row["trust"] == "live" and row["device"]:
                wrong[name] = row
        return all(row["trust"] in ("live", "partial") for row in s.rows().values())
    check("every rank comes to an end", until(watch, 15), s.rows())
    steadily(lambda: watch() or True, 2)
    check("none was live and credited what is gone", not wrong, wrong)
    for name, engine in engines.items():
        way = name.rsplit("_", 1)[0]
        drop, _, trust, may_err, reason = WAYS[way]
        said = s.said(name)
        asked = f"asked from {engine.asked}"
        if trust is not None:
            check(f"{name}: {trust} {reason or ''}", said[:2] == (trust, may_err) and (reason is None or reason in said[2]), (said, asked))
        else:
            check(f"{name}: complete or said", said[0] == "partial" or s.applied(name) == 4, (said, asked))
        if trust == "live" and way != "end_always":
            check.equal(f"{name}: all is applied", s.applied(name), 4)
            check.equal(f"{name}: what is gone, what is new", (s.reach(HELD[1], name), s.reach(NEWEST, name)), (0, 4))
        check(f"{name}: it asked on behind the first answer", len(engine.asked) > 1, asked)
        check(f"{name}: and not for ever", len(engine.asked) <= 12, len(engine.asked))
    # The first message that is heard live shows that the end was lost.
    for framing in ("topic", "bare"):
        name = f"end_always_{framing}"
        engines[name].send(stored([103], None, [1] * 4))
        check(f"{name}: a live batch shows the hole", until(lambda: s.said(name)[0] == "partial"), s.said(name))
check.done()
