"""More ranks than file descriptors (R2, E4): 1,100 ranks under a soft limit of 1,024, which is raised; and under a hard limit
as well, where HTTP goes on and what cannot be connected is said.

Usage: many_ranks.py [RANKS] [LIMIT]   1100 and 1024 unless told"""
import collections, resource
from harness import *

count = int(sys.argv[1]) if len(sys.argv) > 1 else 1100
limit = int(sys.argv[2]) if len(sys.argv) > 2 else 1024
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000) if hard > 0 else 20_000, hard))
HASHES, TOKENS = chain(2)


def deployment(lower_hard):
    folder = tempfile.mkdtemp(dir=SCRATCH)
    context = zmq.Context(io_threads=2)
    context.set(zmq.MAX_SOCKETS, 5000)
    publishers = []
    for rank in range(count):
        publisher = context.socket(zmq.PUB)
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.bind(f"ipc://{folder}/kv" + (f"_dp{rank}" if rank else ""))
        publishers.append(publisher)
    service = Serve(log="warn", preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit if lower_hard else hard)))
    status, answer = service("POST", "/register", {"instance_id": "w", "endpoint": f"ipc://{folder}/kv", "dp_rank": 0,
                                                   "data_parallel_size": count, "model_name": "m", "block_size": 4}, timeout=60)
    check.equal("registered", (status, answer if status != 201 else None), (201, None))

    def states():
        return collections.Counter((l["trust"], l["status"], bool(l.get("last_error"))) for l in service.listeners().values())
    return context, publishers, service, states


def publish(publishers):
    for rank, publisher in enumerate(publishers):
        batch = msgpack.packb([time.time(), [stored([1 + rank, 2 + rank], None, TOKENS)], rank])
        publisher.send_multipart([b"", struct.pack(">Q", 0), batch])


def credited(s):
    return sum(row["device"] == 8 for row in s.rows(TOKENS).values())


context, publishers, s, states = deployment(lower_hard=False)
check("all are connected", until(lambda: sum(n for (_, status, _), n in states().items() if status == "active") == count, 30, 0.5), states())
publish(publishers)
check("all are credited", until(lambda: credited(s) == count, 20, 0.3), credited(s))
status, answer = s("POST", "/select", {"token_ids": TOKENS, "model_name": "m"})
# The overlap of each rank of the worker stands in the answer, as clients expect it; the candidates do not.
check("a choice, small", status == 200 and len(json.dumps(answer)) < 12 * count and not answer.get("candidates"), (status, len(json.dumps(answer))))
s.stop()
context.destroy(0)

context, publishers, s, states = deployment(lower_hard=True)
time.sleep(5)
seen = [s("GET", "/health")[0] for _ in range(20)]
check.equal("both limits low: HTTP answers", set(seen), {200})
now = until(lambda: (lambda c: c if sum(c.values()) == count else None)(states()), 10)
check("the ranks are listed", bool(now), now)
active = sum(n for (_, status, _), n in now.items() if status == "active")
said = sum(n for (_, status, error), n in now.items() if status != "active" and error)
check("most are connected", active > limit // 2, now)
check("each of the others names its cause", until(lambda: all(error or status == "active" for (_, status, error) in states()), 20, 0.5), states())
check("no unconnected rank is live", not any(trust == "live" and status != "active" for (trust, status, _) in states()), states())
check("the log says what is short", bool(s.log_lines()), s.log_lines()[:2])
check("and is not flooded", len(s.log_lines()) < 5 * count, len(s.log_lines()))
publish(publishers)
check("those that are connected go on", until(lambda: credited(s) >= active // 2, 20, 0.3), credited(s))
s.stop()
context.destroy(0)
check.done()
