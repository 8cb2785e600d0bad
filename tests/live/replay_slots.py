"""Many ranks whose replay endpoint takes the question and never answers, and one healthy idle rank behind them (E9).

The healthy rank waits seconds: waiting for a slot costs no attempt, and mute endpoints delay no other.
Usage: replay_slots.py [MUTE RANKS]   60 unless told"""
from harness import *

count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
config, mute = "", []
for number in range(count):
    engine = Engine(replay=True, answers="none")
    mute.append(engine)
    config += worker(f"mute{number}", engine.port, replay=engine.replay_port)
hashes, tokens = chain(4)
healthy = Engine(replay=True)
healthy.send(stored(hashes, None, tokens))
healthy.send(stored([50], None, [1, 2, 3, 4]))
config += worker("healthy", healthy.port, replay=healthy.replay_port)
with Serve(config, log="warn") as s:
    started = time.time()
    live = until(lambda: s.said("healthy") == ("live", [], []), 60, 0.1)
    spent = time.time() - started
    check("the healthy rank is live", live, (s.said("healthy"), healthy.asked, f"{spent:.1f} s"))
    check("within seconds", spent < 12, f"{spent:.1f} s")
    check.equal("with its history", s.reach(tokens, "healthy"), 16)
    healthy.send(stored([51], 50, [5, 6, 7, 8], ), lose=True)
    healthy.send(stored([52], 51, [9, 9, 9, 9]))
    started = time.time()
    filled = until(lambda: s.reach([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], "healthy") == 12, 60, 0.1)
    spent = time.time() - started
    check("a hole of its is filled within seconds too", filled and spent < 12, f"{spent:.1f} s")
    check("no mute rank calls itself live", all(row["trust"] != "live" for (name, _), row in s.rows().items() if name != "healthy"))
check.done()
