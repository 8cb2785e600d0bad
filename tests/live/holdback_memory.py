"""Eight ranks wait for a mute replay while 64 MiB of live batches come for each: what is held back has one bound over all
ranks, and the loss behind it is said (E2, E7)."""
from harness import *

# A bound of 128 MiB, and what a rank has at least on top of it.
RANKS, EACH, BOUND = 8, 64 << 20, 128
engines = [Engine(replay=True, answers="none", seq=10) for _ in range(RANKS)]
config = f"[streams]\nreplay_timeout_ms = 20000\nmax_held_bytes_total = {BOUND << 20}\n"
config += "".join(worker(f"w{i}", engine.port, block_size=16, replay=engine.replay_port) for i, engine in enumerate(engines))
with Serve(config, log="warn") as s:
    def resident():
        with open(f"/proc/{s.process.pid}/status") as file:
            return int(next(line for line in file if line.startswith("VmRSS")).split()[1]) / 1024
    for engine in engines:
        engine.wait_subscribed()
    until(lambda: all(engine.asked for engine in engines), 20)
    before = resident()
    payload = msgpack.packb([time.time(), [stored(list(range(500)), None, list(range(8000)), 16)], 0])
    for number in range(EACH // len(payload)):
        for engine in engines:
            engine.send(payload=payload, keep=False)
        # As fast as engines are, not as a socket's queue is.
        time.sleep(0.001)
    until(lambda: s.metric("rankwise_queued_messages") == 0, 20)
    time.sleep(1)
    held, grown = s.metric("rankwise_held_bytes") / 2**20, resident() - before
    print(f"      held {held:.0f} MiB, resident +{grown:.0f} MiB of {RANKS * EACH >> 20} MiB sent")
    check("what is held has a bound over all ranks", 0 < held <= BOUND + 8, f"{held:.0f} MiB")
    check("and so has the memory", grown <= 2 * BOUND + 64, f"{grown:.0f} MiB")
    check("no rank is live", all(row["trust"] != "live" for row in s.rows().values()), s.rows())
check.done()
