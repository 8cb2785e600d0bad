"""Ids in the type that they were registered with, an empty `selection_id`, a wrong model that must not consume a selection,
one request at a time in the log (A1, A2, S4)."""
from harness import *

engine = Engine()
with Serve() as s:
    s("POST", "/register", {"instance_id": 42, "endpoint": tcp(engine.port), "model_name": "m", "block_size": 4})
    engine.wait_subscribed()
    s("POST", "/loads", {"worker_id": 42, "ranks": {"0": {"num_used_tokens": 8}}})
    connection = socket.create_connection(("127.0.0.1", s.port))
    connection.sendall(b"GET /loads/watch HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.settimeout(5)
    text = ""
    try:
        while "data:" not in text or not text.endswith("\n"):
            text += connection.recv(5000).decode()
    except TimeoutError:
        pass
    connection.close()
    first = next((line for line in text.splitlines() if line.startswith("data:")), text)
    check("the watch gives the id as a number", '"worker_id":42' in first.replace(" ", ""), first[:200])
    for path in ("/workers", "/loads"):
        found = json.dumps(s("GET", path)[1])
        check(f"{path} gives it as a number", '"worker_id": 42' in found or '"instance_id": 42' in found, found[:200])
    pick = s("POST", "/select", {"token_ids": [1] * 8, "model_name": "m"})[1]
    check.equal("the choice gives it as a number", pick.get("worker_id"), 42)

    s("POST", "/select", {"token_ids": [1] * 8, "model_name": "m", "selection_id": "p1"})
    wrong = s("POST", "/reservations", {"selection_id": "p1", "model_name": "zz"})[0]
    right = s("POST", "/reservations", {"selection_id": "p1", "model_name": "m"})[0]
    check("a wrong model leaves the selection as it was", wrong in (400, 404) and right == 201, (wrong, right))
    status, answer = s("POST", "/select_and_reserve", {"token_ids": [1] * 8, "model_name": "m", "selection_id": ""})
    check("an empty selection_id is refused by name", status in (400, 422) and "selection_id" in json.dumps(answer), (status, answer))
    before = len(s.log().splitlines())
    for _ in range(300):
        s("POST", "/select", {"token_ids": [1] * 8, "model_name": "m"})
    time.sleep(0.2)
    lines = len(s.log().splitlines()) - before
    check("decisions are logged only when asked for", lines < 30, f"{lines} lines for 300 decisions")
check.done()
