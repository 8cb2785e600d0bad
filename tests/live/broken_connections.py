"""The event connection is cut twelve times while the engine publishes 300 batches a second: with a replay endpoint, without
one, and with replays that are cut in the middle (E3, E5, E10). What is `live` at the end is exact."""
from harness import *
from proxy import Proxy


def engine_process(rate=300, capacity=150):
    events, replays = ports(), ports()
    process = spawn([sys.executable, os.path.join(HERE, "engine_process.py"), str(events), str(replays), str(rate), str(capacity), "1"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process, events, replays


def compare(s, name, process):
    process.stdin.write("stop\n")
    process.stdin.flush()
    truth = json.loads(process.stdout.readline())
    until(lambda: s.metric("rankwise_last_sequence", worker=name) >= truth["seq"] - 1, 5)
    until(lambda: s.trust(name) in ("live", "partial"), 20)
    held, over, under = set(truth["holds"]), 0, 0
    for prompt in range(400):
        reach = s.reach([prompt * 100 + token for token in range(16)], name)
        under += prompt in held and reach < 16
        over += prompt not in held and reach > 0
    return s.said(name), over, under, s.counters(name)


with Serve("[streams]\nreplay_timeout_ms = 1000\n", log="warn") as s:
    started = []
    for name, replays, cut_after in (("replay", True, None), ("none", False, None), ("cut_in_the_middle", True, 3000)):
        process, events, replay = engine_process()
        proxy = Proxy(events)
        body = {"instance_id": name, "endpoint": tcp(proxy.port), "model_name": "m", "block_size": 4}
        if replays:
            body["replay_endpoint"] = tcp(Proxy(replay, cut_after).port)
        s("POST", "/register", body)
        started.append((name, process, proxy))
    time.sleep(2)
    for cut in range(12):
        for _, _, proxy in started:
            proxy.cut()
        time.sleep(0.4 if cut % 2 else 1.2)
    time.sleep(3)
    for name, process, _ in started:
        said, over, under, counters = compare(s, name, process)
        check(f"{name}: exact, or not live", said[0] != "live" or (over, under) == (0, 0), (said, f"{over} over, {under} under", counters))
        check(f"{name}: comes to an end", said[0] in ("live", "partial"), said)
        # A rank that only misses credits nothing that is gone.
        check(f"{name}: over-credits only where it says so", over == 0 or said[0] != "partial" or "may_overcredit" in said[1], (said, over))
    check.equal("with a replay endpoint: live", s.trust("replay"), "live")
check.done()
