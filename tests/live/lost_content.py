"""Removals and stores of unusual length, batches cut short or too large, a bad name in a removal (E8, I4, I2).

Nothing that engines legally send is over a limit. What is lost shows as `may_overcredit` or `may_miss` under its name, and
the good names of a removal count."""
from harness import *

LONG, HASHES, TOKENS = 300_000, *chain(4)
SIZES = {"long_removal": 1, "million_removal": 1, "long_store": 1}
NAMES = ["long_removal", "million_removal", "long_store", "cut_short", "oversized", "huge", "long_key", "text_name", "control"]
engines = {name: Engine(replay=True) for name in NAMES}
config = "".join(worker(name, engine.port, model=f"m{SIZES.get(name, 4)}", block_size=SIZES.get(name, 4), replay=engine.replay_port)
                 for name, engine in engines.items())


def said(name):
    return s.said(name, model=f"m{SIZES.get(name, 4)}")


def reach(name, tokens, **more):
    return s.reach(tokens, name, model=f"m{SIZES.get(name, 4)}", **more)


def fill(engine, count):
    for at in range(0, count, 100_000):
        engine.send(stored([at + 1 + i for i in range(100_000)], at or None, list(range(at, at + 100_000)), 1))


with Serve(config) as s:
    check("all connected", s.wait_active(*NAMES), s.listeners())
    until(lambda: all(engine.asked for engine in engines.values()))
    for name in ("cut_short", "oversized", "huge", "text_name", "control"):
        engines[name].send(stored(HASHES, None, TOKENS))
        until(lambda: reach(name, TOKENS) == 16)

    # SGLang with pages of one token merges neighbouring removals: evicting a long context is one event.
    fill(engines["long_removal"], LONG)
    check.equal("300,000 pages are held", until(lambda: reach("long_removal", range(LONG)) == LONG, 30) and LONG, LONG)
    engines["long_removal"].send(removed([i + 1 for i in range(LONG)]))
    until(lambda: reach("long_removal", range(LONG)) == 0, 20)
    check.equal("one removal of 300,000 names", (reach("long_removal", range(LONG)), said("long_removal")), (0, ("live", [], [])))

    engines["million_removal"].send(stored([1, 2, 3], None, [1, 2, 3], 1))
    engines["million_removal"].send(removed([1, 2, 3] + list(range(10, 10 + 1_000_000))))
    until(lambda: s.applied("million_removal") == 2, 20)
    check.equal("one removal of a million names", (reach("million_removal", [1, 2, 3]), said("million_removal")), (0, ("live", [], [])))

    engines["long_store"].send(stored([i + 1 for i in range(LONG)], None, list(range(LONG)), 1))
    until(lambda: reach("long_store", range(LONG)) == LONG, 20)
    check.equal("one store of 300,000 pages", (reach("long_store", range(LONG)), said("long_store")), (LONG, ("live", [], [])))

    def over(name, what, reasons):
        until(lambda: set(reasons) & set(said(name)[2]), 8)
        trust, may_err, names = said(name)
        check(f"{what}: may over-credit, {' or '.join(reasons)}",
              trust == "partial" and "may_overcredit" in may_err and bool(set(reasons) & set(names)), ((trust, may_err, names), s.counters(name)))
    engines["cut_short"].send(payload=msgpack.packb([time.time(), [removed(HASHES)], 0])[:-1])
    over("cut_short", "a batch cut short", ["undecodable"])
    engines["oversized"].send(removed(HASHES), {"type": "Future", "pad": b"x" * (17 << 20)})
    over("oversized", "a batch of 17 MiB with a removal in it", ["too_large", "unknown_tag"])
    check("its removal is applied, or its size is said", reach("oversized", TOKENS) == 0 or "too_large" in said("oversized")[2], said("oversized"))
    engines["huge"].send({"type": "Future", "pad": b"x" * (80 << 20)})
    over("huge", "a batch of 80 MiB", ["too_large", "unknown_tag"])
    key = "u" * 5000
    engines["long_key"].send(stored(HASHES, None, TOKENS, extra_keys=[[key], None, None, None]))
    until(lambda: s.applied("long_key") == 1)
    held, told = reach("long_key", TOKENS, cache_salt=key), said("long_key")
    check("a key of 5,000 bytes: credited under it, or said", (held == 16 and told[0] == "live") or "may_miss" in told[1], (held, told))
    check.equal("and never without it", reach("long_key", TOKENS), 0)
    engines["text_name"].send(removed(HASHES + ["ab" * 32]))
    over("text_name", "a text among five names", ["malformed_removal"])
    check.equal("the four good names count", reach("text_name", TOKENS), 0)
    check.equal("control: nothing of all this", (reach("control", TOKENS), said("control")), (16, ("live", [], [])))
check.done()
