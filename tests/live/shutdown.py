"""SIGTERM beside connections of every kind; heads and bodies that come slowly or not at all (A2, E7).

The process ends within seconds, a second signal ends it at once, heads have a time limit, and HTTP connections a number."""
from harness import *


def open_one(s, text):
    connection = socket.create_connection(("127.0.0.1", s.port))
    if text:
        connection.sendall(text)
    return connection


HEAD_HALF = b"POST /query HT"
BODY_HALF = b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
KINDS = {"nobody": None, "an idle connection": b"", "a kept connection": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", "half a head": HEAD_HALF,
         "half a body": BODY_HALF, "a watch": b"GET /loads/watch HTTP/1.1\r\nHost: x\r\n\r\n"}
# Half a body may be waited for as long as any request.
LIMITS = {"half a body": 13}
for kind, text in KINDS.items():
    s = Serve()
    kept = None if text is None else open_one(s, text)
    time.sleep(0.3)
    started = time.time()
    s.process.send_signal(signal.SIGTERM)
    try:
        code = s.process.wait(30)
    except subprocess.TimeoutExpired:
        code = "alive"
    spent = time.time() - started
    check(f"SIGTERM beside {kind}: ends with 0", code == 0 and spent < LIMITS.get(kind, 4), (code, f"{spent:.1f} s"))
    s.stop()

s = Serve()
kept = open_one(s, BODY_HALF)
time.sleep(0.3)
s.process.send_signal(signal.SIGTERM)
time.sleep(0.3)
started = time.time()
if s.process.poll() is None:
    s.process.send_signal(signal.SIGTERM)
try:
    s.process.wait(10)
except subprocess.TimeoutExpired:
    pass
check("a second signal ends it at once", s.process.poll() is not None and time.time() - started < 1.5, f"{time.time() - started:.1f} s")
s.stop()

with Serve() as s:
    for what, text in (("half bodies", BODY_HALF), ("half heads", HEAD_HALF)):
        connections = [open_one(s, text) for _ in range(300)]
        started = time.time()
        try:
            status, spent = s("GET", "/health", timeout=15)[0], time.time() - started
        except OSError as error:
            status, spent = str(error), time.time() - started
        check(f"an answer beside 300 {what}", status == 200 and spent < 12, (status, f"{spent:.1f} s"))
        if text is HEAD_HALF:
            def closed():
                gone = 0
                for connection in connections:
                    connection.settimeout(0.002)
                    try:
                        # 408 may be said first.
                        while connection.recv(1000):
                            pass
                        gone += 1
                    except TimeoutError:
                        pass
                    except OSError:
                        gone += 1
                return gone == len(connections)
            check("slow heads are closed by the server", until(closed, 35, 1))
        for connection in connections:
            connection.close()
check.done()
