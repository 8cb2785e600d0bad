"""An engine measures its load, answers 1.5 s later, and five requests are booked meanwhile (L18).

A report is as old as its measurement, so the five still count."""
from harness import *

questions = []


def slow():
    questions.append(time.time())
    entry = {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 100_000, "token_usage": 0.0}
    body = {"version": "x", "dp_rank_count": 1, "loads": [entry]}
    if stamped:
        body["timestamp"] = time.time()
    time.sleep(1.5)
    return 200, "application/json", json.dumps(body)


for stamped in (True, False):
    questions.clear()
    engine, page = Engine(), Page({"/v1/loads": slow})
    with Serve(worker("w", engine.port, loads=page.url)) as s:
        def load():
            return s("GET", "/loads")[1][0]["loads"][0]
        until(lambda: load()["state"] == "known", 10)
        seen = len(questions)
        until(lambda: len(questions) > seen, 10)
        time.sleep(0.2)
        for i in range(5):
            status, _ = s("POST", "/select_and_reserve", {"model_name": "m", "token_ids": list(range(i * 1000, i * 1000 + 400)), "selection_id": f"r{i}"})
            check.equal(f"booking {i}", status, 200)
        booked = load()
        asked = len(questions)
        # The next question reaches the engine only when the answer to this one has been read.
        until(lambda: len(questions) > asked, 10)
        after = load()
        what = "with the answer's own time" if stamped else "by the moment of asking"
        check.equal(f"{what}: bookings of the meantime stay in the sum", after["decode_blocks"], booked["decode_blocks"])
        check(f"{what}: five requests of 100 blocks", after["decode_blocks"] >= 500, after)
check.done()
