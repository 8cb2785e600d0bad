"""How long an engine that is gone goes on being believed and chosen (E4, E8, E9, S5), with default settings, dialled endpoints
and two ranks in each pool: one that is lost and one that stays.

Ways: killed (SIGKILL), stopped (SIGSTOP), unplugged (its ports accept and are mute), wrong topic (it goes on under another
one). Seconds from the last sign of life (the last batch under the configured topic) until the trust says so, and until the
last pick of that rank. Trials run beside each other in pools of one service.
Usage: measure_silence.py [TRIALS] [--goals]   20 unless told; prints a table and JSON"""
from harness import *

words = [word for word in sys.argv[1:] if not word.startswith("--")]
TRIALS = int(words[0]) if words else 20
GOALS = {"killed": 8, "stopped": 15, "unplugged": 15, "wrong topic": 15}
PATIENCE, PROMPT = 40, list(range(16))


class Victim:
    """An engine process that publishes five batches a second, and a quiet neighbour in the same pool."""

    def __init__(self, way, number):
        self.model = f"{way.replace(' ', '-')}-{number}"
        self.port, self.replay = ports(), ports()
        self.process = spawn([sys.executable, os.path.join(HERE, "engine_process.py"), str(self.port), str(self.replay), "5", "50", "1", "kv"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.other = Engine(replay=True, topic=b"kv")
        self.tables = worker(f"lost-{self.model}", self.port, model=self.model, replay=self.replay, topic="kv")
        self.tables += worker(f"stays-{self.model}", self.other.port, model=self.model, replay=self.other.replay_port, topic="kv")
        self.kept, self.said, self.last_pick, self.reasons = [], None, None, None

    def lose(self, way):
        if way == "stopped":
            os.kill(self.process.pid, signal.SIGSTOP)
        else:
            end_process(self.process)
        self.lost = time.time()
        if way == "unplugged":
            self.kept = [Listener(self.port), Listener(self.replay)]
        elif way == "wrong topic":
            self.kept = [Engine(self.port, replay=self.replay, topic=b"quite-another")]

    def look(self, s, way):
        if self.kept and way == "wrong topic":
            self.kept[0].send(stored([7], None, [9] * 4))
        status, pick = s("POST", "/select", {"model_name": self.model, "token_ids": PROMPT})
        now = time.time() - self.lost
        if status == 200 and pick["worker_id"].startswith("lost-"):
            self.last_pick = now
        if self.said is None:
            trust, _, reasons = s.said(f"lost-{self.model}", model=self.model)
            if trust == "silent" or (way == "wrong topic" and "other_topic" in reasons):
                self.said, self.reasons = now, reasons

    def close(self):
        end_process(self.process)
        self.other.close()
        for one in self.kept:
            one.close()


def trial(way):
    victims = [Victim(way, number) for number in range(TRIALS)]
    for victim in victims:
        victim.process.stdout.readline()
    with Serve("".join(victim.tables for victim in victims), log="warn") as s:
        until(lambda: all(s.trust(f"lost-{v.model}", model=v.model) == "live" for v in victims), 30, 0.5)
        for number, victim in enumerate(victims):
            victim.lose(way)
        end = time.time() + PATIENCE
        while time.time() < end:
            for victim in victims:
                victim.look(s, way)
            # Two rounds behind the last one that had something to say.
            if all(v.said is not None and time.time() - v.lost - max(v.said, v.last_pick or 0) > 3 for v in victims):
                break
            time.sleep(0.1)
    for victim in victims:
        victim.close()
    return victims


def figures(values):
    values = sorted(PATIENCE if value is None else value for value in values)
    return {"p50_s": round(values[(len(values) - 1) // 2], 2), "max_s": round(values[-1], 2)}


rows = []
for way, goal in GOALS.items():
    victims = trial(way)
    row = {"way": way, "trials": TRIALS, "said": figures([v.said for v in victims]),
           "last_pick": figures([v.last_pick or 0 for v in victims]), "reasons": victims[0].reasons}
    rows.append(row)
    check(f"{way}: said within {goal} s", row["said"]["max_s"] <= goal, row)
    # An engine with another topic lives: it may be chosen, on the credit of nothing.
    if way != "wrong topic":
        check(f"{way}: no pick after {goal} s", row["last_pick"]["max_s"] <= goal, row["last_pick"])
print("\n| way | trials | said, p50 | said, max | last pick, p50 | last pick, max |\n|---|---|---|---|---|---|")
for row in rows:
    print(f'| {row["way"]} | {TRIALS} | {row["said"]["p50_s"]} s | {row["said"]["max_s"]} s | {row["last_pick"]["p50_s"]} s | {row["last_pick"]["max_s"]} s |')
print(json.dumps(rows))
check.done()
