"""An engine as a process, so that it can be killed or stopped: stores prompts of four blocks and evicts the oldest.

`engine_process.py PORT REPLAY_PORT RATE CAPACITY LIFE [TOPIC]`. The names of its blocks hold LIFE, so that two lives of one
engine never share any. A line on stdin makes it publish no more and print what it holds, as JSON."""
import random
from harness import *

port, replay, rate, capacity, life = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
chance = random.Random(life * 7919 + port)
engine = Engine(port, replay=replay or False, topic=sys.argv[6].encode() if len(sys.argv) > 6 else b"")
PROMPTS, held = 400, []
asked = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
print("bound", flush=True)
while not asked.is_set():
    prompt, events = chance.randrange(PROMPTS), []
    if prompt not in held:
        if len(held) >= capacity:
            gone = held.pop(0)
            events.append(removed([life * 10**9 + gone * 10 + i for i in (3, 2, 1, 0)]))
        held.append(prompt)
        events.append(stored([life * 10**9 + prompt * 10 + i for i in range(4)], None, [prompt * 100 + t for t in range(16)]))
        engine.send(*events)
    time.sleep(1 / rate)
print(json.dumps({"holds": held, "seq": engine.seq}), flush=True)
time.sleep(3600)
