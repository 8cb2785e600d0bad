"""Twelve ranks of page size 1 flood while `/query`, `/health` and `/metrics` are timed, without scrapers and with four (I8).

Nobody waits for a write section or for a scrape. Goals, with a release build: `/query` p99 50 ms, `/health` at most 100 ms.
Usage: http_stall.py [QUERIES] [--goals]   200 unless told; only --goals makes the goals checks (else 2 s), and JSON is printed"""
from harness import *

words = [word for word in sys.argv[1:] if not word.startswith("--")]
count, goals = int(words[0]) if words else 200, "--goals" in sys.argv
flooded = ports(12)
flood = spawn([sys.executable, os.path.join(HERE, "flood.py"), "20", ",".join(str(flooded + i) for i in range(12))], stdout=subprocess.PIPE, text=True)
flood.stdout.readline()
QUESTION = {"model_name": "m", "token_ids": [1] + list(range(70_001, 70_200))}


def timed(method, path, body=None, pause=0.02):
    spent = []
    for _ in range(count):
        started = time.perf_counter()
        status, _ = s(method, path, body, timeout=60, raw=True)
        spent.append((time.perf_counter() - started) * 1e3)
        assert status == 200, (path, status)
        time.sleep(pause)
    spent.sort()
    # The nearest rank: the smallest value that 99 of 100 do not exceed.
    return {"n": count, "p50_ms": round(spent[(count - 1) // 2], 1), "p99_ms": round(spent[-(-99 * count // 100) - 1], 1), "max_ms": round(spent[-1], 1)}


with Serve("".join(worker(f"f{i}", flooded + i, block_size=1) for i in range(12)), log="warn") as s:
    check("the flood is applied", until(lambda: s.applied() > 24, 60))
    time.sleep(3)
    result = {"quiet": {"health": timed("GET", "/health"), "query": timed("POST", "/query", QUESTION)}}
    stopping, scrapes = threading.Event(), []

    def scrape():
        while not stopping.is_set():
            started = time.perf_counter()
            s("GET", "/metrics", timeout=120, raw=True)
            scrapes.append(round((time.perf_counter() - started) * 1e3, 1))
            stopping.wait(0.5)
    threads = [threading.Thread(target=scrape) for _ in range(4)]
    for thread in threads:
        thread.start()
    result["four_scrapers"] = {"health": timed("GET", "/health"), "query": timed("POST", "/query", QUESTION)}
    stopping.set()
    for thread in threads:
        thread.join()
    result["metrics_max_ms"] = max(scrapes)
    started = time.perf_counter()
    status, _ = s("POST", "/register", {"instance_id": "late", "endpoint": tcp(ports()), "model_name": "m", "block_size": 1}, timeout=60)
    result["register_ms"] = round((time.perf_counter() - started) * 1e3, 1)
    result["applied_batches"] = s.applied()
    print(json.dumps(result))
    for state in ("quiet", "four_scrapers"):
        query, health = result[state]["query"]["p99_ms"], result[state]["health"]["max_ms"]
        check(f"{state}: /query p99 at most {50 if goals else 2000} ms", query <= (50 if goals else 2000), query)
        check(f"{state}: /health at most {100 if goals else 2000} ms", health <= (100 if goals else 2000), health)
    check("a registration is no exception", status == 201 and result["register_ms"] < 2000, (status, result["register_ms"]))
check.done()
