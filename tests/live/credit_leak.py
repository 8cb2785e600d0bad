"""Replays that are cancelled while they wait for room, beside a flood of large stores (E9, E7): every stream goes on.

Usage: credit_leak.py [SECONDS]   60 unless told"""
from harness import *

seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
PAD = b"p" * (7 << 20)


class Victim(Engine):
    """Its answers hold the last batch twenty times more: what a busy engine has to say behind what was heard live."""
    def answer(self, who, start):
        with self.lock:
            batches = [batch for batch in self.sent if batch[1] >= start]
        for topic, number, payload in batches + batches[-1:] * 20:
            self.reply(who, topic, struct.pack(">Q", number), payload)
        self.reply(who, b"", END, b"")


flooded = ports(12)
floods = [spawn([sys.executable, os.path.join(HERE, "flood.py"), "20", ",".join(str(flooded + i) for i in range(half, 12, 2))],
                stdout=subprocess.PIPE, text=True) for half in (0, 1)]
for flood in floods:
    flood.stdout.readline()
victim = Victim(replay=True, keep=20)
config = "[streams]\nreplay_timeout_ms = 1500\n" + worker("victim", victim.port, block_size=1, replay=victim.replay_port)
config += "".join(worker(f"flood{i}", flooded + i, block_size=1) for i in range(12))


def big(k):
    return stored([k * 10**7 + i for i in range(50)], None, [900_000 + k] + list(range(49)), 1, pad=PAD)


with Serve(config, log="warn") as s:
    victim.wait_subscribed()
    started, k = time.time(), 0
    while time.time() - started < seconds:
        k += 1
        victim.send(big(k), lose=True)
        victim.send(big(1000 + k))
        time.sleep(0.5)
    print("      under the flood:", s.said("victim"), s.counters("victim"))
    for flood in floods:
        end_process(flood)
    victim.send(stored([77], None, [3], 1))
    newest = victim.seq - 1
    heard = until(lambda: s.metric("rankwise_last_sequence", worker="victim") >= newest, 60, 0.5)
    check("the stream is heard again", heard, (s.said("victim"), newest, s.counters("victim")))
    victim.send(stored([78], None, [4], 1))
    check("and goes on", until(lambda: s.reach([4], "victim") == 1, 20), s.said("victim"))
    check("no flooded stream is deaf", all(s.applied(f"flood{i}") > 0 for i in range(12)))
check.done()
