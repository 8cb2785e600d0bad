"""A plain ROUTER at its default high-water mark (1,000) and 10,000 batches of about 3 kB: the answer loses thousands of them and
perhaps its end mark. All 10,000 are applied, every time (E10). Trials in turn: a slow link, which
loses for sure; the same with an engine that takes a breath before the end mark, so that the mark arrives; a plain link.

Usage: lossy_replay_natural.py [TRIALS]   3 unless told; prints a line of JSON."""
from harness import *
from proxy import Proxy

BATCHES = 10_000
trials = int(sys.argv[1]) if len(sys.argv) > 1 else 3
payloads = [msgpack.packb([1.0 + i, [stored([i * 4 + j + 1 for j in range(4)], None, [i * 16 + j for j in range(16)],
                                            extra_keys=[["x" * 2500], None, None, None])], 0]) for i in range(BATCHES)]
complete, seconds, answers = 0, [], []
KINDS = ("slow link", "slow link, end mark", "plain link")


class Breathing(Engine):
    def reply(self, who, topic, number, payload):
        if number == END:
            time.sleep(0.3)
        super().reply(who, topic, number, payload)


for trial in range(trials):
    context = zmq.Context()
    kind = KINDS[trial % 3]
    engine = (Breathing if kind == KINDS[1] else Engine)(replay=True, context=context, keep=BATCHES, send_limit=1000)
    for number, payload in enumerate(payloads):
        engine.send(payload=payload, seq=number, lose=True)
    slow = kind != KINDS[2]
    replay = Proxy(engine.replay_port, pause=0.002).port if slow else engine.replay_port
    with Serve("[streams]\nreplay_timeout_ms = 1000\n" + worker("w", engine.port, replay=replay), log="warn") as s:
        started = time.time()
        until(lambda: s.applied("w") == BATCHES and s.trust("w") == "live", 60, 0.1)
        applied, said = s.applied("w"), s.said("w")
        seconds.append(round(time.time() - started, 2))
        answers.append(len(engine.asked))
        complete += check(f"trial {trial}, {kind}: all are applied and the rank is live", (applied, said) == (BATCHES, ("live", [], [])),
                          (applied, said, f"{seconds[-1]} s, asked {len(engine.asked)} times"))
        if slow:
            check("the first answer was lossy", len(engine.asked) > 1, engine.asked)
    engine.close()
    context.destroy(0)
print(json.dumps({"what": "lossy replay, ROUTER at its default limit", "trials": trials, "complete": complete,
                  "seconds": seconds, "requests": answers}))
check.done()
