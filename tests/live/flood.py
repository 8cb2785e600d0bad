"""A process of its own that publishes stores of 28,000 pages of one token on each of its ports until it is ended:
`flood.py PAUSE_MS PORT,PORT,...`. The first line that it prints says that the ports are bound."""
from harness import *

pause, targets = float(sys.argv[1]) / 1e3, [int(port) for port in sys.argv[2].split(",")]
PAGES = 28_000
tokens = list(range(70_000, 70_000 + PAGES))
batches = [msgpack.packb([time.time(), [stored([k * 10**7 + i for i in range(PAGES)], None, [k] + tokens[1:], 1)], 0]) for k in range(1, 9)]
engines = [Engine(port) for port in targets]
print("bound", flush=True)
sent = 0
while True:
    for engine in engines:
        engine.send(payload=batches[sent % len(batches)], keep=False)
    sent += 1
    time.sleep(pause)
