"""What the live cases share: the service as a process, engines as sockets, HTTP, and checks that decide the exit code.

RANKWISE names the binary (default target/release/rankwise below the current directory). Ports are chosen at run time, so
several cases may run at once. A case ends with `check.done()`: exit code 0 is a pass, 1 a failed check, anything else a crash.
"""
import atexit, ctypes, json, os, re, shutil, signal, socket, struct, subprocess, sys, tempfile, threading, time
import urllib.error, urllib.request

import msgpack
import zmq

BINARY = os.environ.get("RANKWISE", os.path.join("target", "release", "rankwise"))
HERE = os.path.dirname(os.path.abspath(__file__))
SCRATCH = os.environ.get("LIVE_CASE_DIR") or tempfile.mkdtemp(prefix="rankwise-live-")
END = b"\xff" * 8
CTX = zmq.Context.instance()
CTX.set(zmq.MAX_SOCKETS, 8000)


# === ports ===

class Ports:
    """Hands out ports that no other case uses: a process holds a lane of ports by listening on the lane's first one.

    All lanes lie below the usual range of outgoing connections, so that none of those can take a port between its choice
    and its use."""
    FIRST = int(os.environ.get("LIVE_CASE_PORTS", "20000"))
    LAST = 32_000
    LANE = 200

    def __init__(self):
        self.guards, self.next, self.end = [], 0, 0

    def lane(self):
        lanes = range(self.FIRST, self.LAST, self.LANE)
        # Another place to begin for each process: fewer refusals.
        begin = os.getpid() * 7 % len(lanes)
        for at in list(lanes[begin:]) + list(lanes[:begin]):
            guard = socket.socket()
            try:
                guard.bind(("127.0.0.1", at))
                guard.listen(1)
            except OSError:
                guard.close()
                continue
            self.guards.append(guard)
            self.next, self.end = at + 1, at + self.LANE
            return
        raise SystemExit("no free lane of ports")

    def take(self, count=1):
        """The first of `count` free ports in a row."""
        assert count < self.LANE
        while True:
            if self.next + count > self.end:
                self.lane()
            base, self.next = self.next, self.next + count
            if all(free(port) for port in range(base, base + count)):
                return base


def free(port):
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


ports = Ports().take


def tcp(port):
    return f"tcp://127.0.0.1:{port}"


# === processes ===

def die_with_parent():
    """Runs in a child before it becomes another program: PR_SET_PDEATHSIG, so that no case leaves processes behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def spawn(argv, **options):
    before = options.pop("preexec", None)

    def prepare():
        die_with_parent()
        if before:
            before()
    process = subprocess.Popen(argv, preexec_fn=prepare, **options)
    atexit.register(end_process, process)
    return process


def end_process(process):
    if process.poll() is None:
        process.kill()
        process.wait()


@atexit.register
def remove_scratch():
    if "LIVE_CASE_DIR" not in os.environ:
        shutil.rmtree(SCRATCH, ignore_errors=True)


def http(port, method, path, body=None, headers=None, timeout=30, raw=False):
    """Status and parsed answer (text where it is no JSON, or with `raw`)."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, method=method)
    if data is not None:
        request.add_header("content-type", "application/json")
    for name, value in (headers or {}).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, text = answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode(errors="replace")
    if raw:
        return status, text
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def worker(name, base, model="m", block_size=4, start=0, size=1, replay=None, **more):
    """A `[[workers]]` table. `base` is the first rank's port or a whole endpoint, `replay` likewise."""
    def endpoint(at):
        return tcp(at - start) if isinstance(at, int) else at
    fields = {"id": name, "model": model, "block_size": block_size, "start": start, "size": size, "events": endpoint(base)}
    if replay is not None:
        fields["replay"] = endpoint(replay)
    fields.update(more)
    return "[[workers]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())


class Serve:
    """`rankwise serve` with a configuration, until the end of the `with` block. Call it for HTTP: `s("GET", "/workers")`."""

    def __init__(self, config="", args=(), log="info", preexec=None, wait=True):
        self.port = ports()
        self.dir = tempfile.mkdtemp(prefix="serve-", dir=SCRATCH)
        argv = [BINARY, "serve", "--listen", f"127.0.0.1:{self.port}"]
        if config:
            path = os.path.join(self.dir, "config.toml")
            with open(path, "w") as file:
                file.write(config)
            argv += ["--config", path]
        self.log_path = os.path.join(self.dir, "log")
        self.process = spawn(argv + list(args), stdout=subprocess.DEVNULL, stderr=open(self.log_path, "w"),
                             env=dict(os.environ, RUST_LOG=log), preexec=preexec)
        if wait:
            self.wait_healthy()

    def wait_healthy(self, seconds=20):
        end = time.time() + seconds
        while time.time() < end:
            if self.process.poll() is not None:
                raise SystemExit("serve ended at once:\n" + self.log())
            try:
                if http(self.port, "GET", "/health", timeout=1)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.03)
        raise SystemExit("serve did not come up:\n" + self.log())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def __call__(self, method, path, body=None, **options):
        return http(self.port, method, path, body, **options)

    def stop(self, wait=15):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(wait)
            except subprocess.TimeoutExpired:
                end_process(self.process)

    def log(self):
        with open(self.log_path, errors="replace") as file:
            return file.read()

    def log_lines(self, *words, level=("WARN", "ERROR")):
        """Lines of the log at these levels that hold all the words."""
        return [line for line in self.log().splitlines()
                if any(f" {name} " in f" {line} " for name in level) and all(word in line for word in words)]

    # --- what is said of a rank ---

    def rows(self, tokens=(1,), model="m", **more):
        """`/query`: the row of each rank, by (worker, rank)."""
        status, answer = self("POST", "/query", {"model_name": model, "token_ids": list(tokens), **more})
        if status != 200:
            raise AssertionError(f"/query: {status} {answer}")
        return {(row["worker_id"], row["dp_rank"]): row for row in answer["ranks"]}

    def reach(self, tokens, name, rank=0, model="m", tier="device", **more):
        """How many leading tokens the rank holds in a tier."""
        return self.rows(tokens, model, **more).get((name, rank), {}).get(tier, 0)

    def said(self, name, rank=0, model="m"):
        """(trust, ways to err, reasons) as `/query` says them."""
        row = self.rows([1], model).get((name, rank))
        if row is None:
            return "not there", [], []
        return row["trust"], row["may_err"], row.get("reasons", [])

    def trust(self, name, rank=0, model="m"):
        return self.said(name, rank, model)[0]

    def listeners(self):
        _, workers = self("GET", "/workers")
        return {(w["worker_id"], int(rank)): listener for w in workers for rank, listener in w["listeners"].items()}

    def listener(self, name, rank=0):
        return self.listeners().get((name, rank), {})

    def wait_active(self, *names, seconds=10):
        """Until the event connections of all ranks of these workers stand."""
        def connected():
            now = self.listeners()
            return all(l["status"] == "active" for (name, _), l in now.items() if name in names)
        return until(connected, seconds)

    # --- metrics ---

    def metrics(self):
        _, text = self("GET", "/metrics", raw=True, timeout=120)
        found = {}
        for line in text.splitlines():
            match = re.match(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)", line)
            if match:
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match.group(2) or ""))
                found.setdefault(match.group(1), []).append((labels, float(match.group(3))))
        return found

    def metric(self, name, **labels):
        """The sum over the series that carry these labels."""
        return sum(value for own, value in self.metrics().get(name, []) if all(own.get(k) == v for k, v in labels.items()))

    def counters(self, name):
        """All counters of a worker that are not 0, for a failure's message."""
        return {metric.removeprefix("rankwise_") + (":" + own["reason"] if "reason" in own else ""): value
                for metric, series in self.metrics().items() if metric.endswith("_total")
                for own, value in series if own.get("worker") == name and value}

    def applied(self, name=None, rank=None):
        labels = {} if name is None else {"worker": name}
        if rank is not None:
            labels["dp_rank"] = str(rank)
        return self.metric("rankwise_applied_batches_total", **labels)


# === engines ===

class Engine:
    """One rank of an engine: publishes batches under its own numbers and, where it has a replay socket, answers requests
    for history from a buffer.

    framing: "topic" (vLLM 0.26 and later), "bare" (before). drop: numbers that an answer leaves out, as a full ROUTER
    does; `drop_times` says for how many answers (None: for ever). answers: "all", or "none" to stay mute."""

    def __init__(self, port=None, replay=False, bind=True, topic=b"", rank=0, keep=10_000, framing="topic", seq=0,
                 answers="all", context=None, send_limit=100_000):
        self.context = context or CTX
        self.topic, self.rank, self.keep, self.framing, self.seq = topic, rank, keep, framing, seq
        self.answers, self.drop, self.drop_times = answers, set(), None
        self.sent, self.asked, self.lock = [], [], threading.Lock()
        self.clock = time.time()
        self.replay_port = ports() if replay is True else (replay or None)
        self.port = ports() if port is None else port
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.setsockopt(zmq.SNDHWM, send_limit)
        join(self.pub, tcp(self.port) if isinstance(self.port, int) else self.port, bind)
        self.running, self.thread = True, None
        if self.replay_port:
            self.router = self.context.socket(zmq.ROUTER)
            self.router.setsockopt(zmq.LINGER, 0)
            self.router.setsockopt(zmq.SNDHWM, send_limit)
            join(self.router, tcp(self.replay_port), True)
            self.thread = threading.Thread(target=self.serve_replays, daemon=True)
            self.thread.start()

    def wait_subscribed(self, seconds=10):
        """Until the next subscription arrives."""
        if self.pub.poll(seconds * 1000):
            self.pub.recv()
            return True
        return False

    def frames(self, frames):
        self.pub.send_multipart(frames)

    def send(self, *events, ts=None, seq=None, rank="own", topic=None, payload=None, lose=False, keep=True):
        """Publishes one batch. lose: only the buffer gets it; keep=False: only the wire does."""
        self.clock = max(time.time(), self.clock + 0.001)
        if payload is None:
            batch = [self.clock if ts is None else ts, list(events), self.rank if rank == "own" else rank]
            payload = msgpack.packb(batch, use_bin_type=True)
        number = self.seq if seq is None else seq
        topic = self.topic if topic is None else topic
        if keep:
            with self.lock:
                self.sent.append((topic, number, payload))
                del self.sent[:-self.keep]
        if not lose:
            self.pub.send_multipart([topic, struct.pack(">Q", number), payload])
        self.seq = number + 1
        return number

    def serve_replays(self):
        while self.running:
            if not self.router.poll(50):
                continue
            message = self.router.recv_multipart()
            if len(message) < 3:
                continue
            start = int.from_bytes(message[2], "big")
            self.asked.append(start)
            if self.answers != "none":
                self.answer(message[0], start)
        self.router.close(0)

    def answer(self, who, start):
        with self.lock:
            batches = [batch for batch in self.sent if batch[1] >= start]
        drop = self.drop
        if self.drop_times is not None:
            if self.drop_times <= 0:
                drop = ()
            # An answer that loses nothing is none of the lossy ones.
            elif any(number in drop for _, number, _ in batches):
                self.drop_times -= 1
        for topic, number, payload in batches:
            if number not in drop:
                self.reply(who, topic, struct.pack(">Q", number), payload)
        self.reply(who, b"", END, b"")

    def reply(self, who, topic, number, payload):
        head = [who, b"", topic] if self.framing == "topic" else [who, b""]
        self.router.send_multipart(head + [number, payload])

    def close(self):
        self.running = False
        if self.thread:
            self.thread.join(5)
        self.pub.close(0)


def join(sock, endpoint, bind):
    # A connection that has just ended may hold the port for a moment.
    for left in range(100, -1, -1):
        try:
            (sock.bind if bind else sock.connect)(endpoint)
            return
        except zmq.ZMQError:
            if not left:
                raise
            time.sleep(0.1)


def stored(hashes, parent, tokens, block_size=4, medium="GPU", **more):
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
            "block_size": block_size, "lora_id": None, "medium": medium, "lora_name": None, **more}


def removed(hashes, medium="GPU", **more):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


CLEAR = {"type": "AllBlocksCleared"}


def chain(blocks, name=1, token=0, block_size=4):
    """Names and tokens of a chain of blocks."""
    return [name + i for i in range(blocks)], [token + i for i in range(blocks * block_size)]


class Listener:
    """A port that accepts connections and says nothing (or closes them at once)."""

    def __init__(self, port, close=False):
        self.socket, self.kept = socket.socket(), []
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for left in range(100, -1, -1):
            try:
                self.socket.bind(("127.0.0.1", port))
                break
            except OSError:
                if not left:
                    raise
                time.sleep(0.05)
        self.socket.listen(128)
        threading.Thread(target=self.run, args=(close,), daemon=True).start()

    def run(self, close):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            connection.close() if close else self.kept.append(connection)

    def close(self):
        self.socket.close()
        for connection in self.kept:
            connection.close()


class Page:
    """An engine's HTTP side: fixed answers by path, a text or (status, content type, text), that may be exchanged."""

    def __init__(self, routes):
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
        self.routes, self.port = routes, ports()
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                answer = page.routes.get(self.path.split("?")[0], (404, "text/plain", ""))
                if callable(answer):
                    answer = answer()
                if isinstance(answer, str):
                    answer = (200, "text/plain; version=0.0.4", answer)
                status, kind, body = answer[0], answer[1], answer[2].encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    # Whoever asked has ended meanwhile.
                    pass

            def log_message(self, *_):
                pass
        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


# === checks ===

def until(condition, seconds=10, step=0.05):
    """The first true value of `condition`, or its last one when the time is over."""
    end = time.time() + seconds
    while True:
        value = condition()
        if value or time.time() > end:
            return value
        time.sleep(step)


def steadily(condition, seconds, step=0.2):
    """Whether `condition` holds all the time."""
    end = time.time() + seconds
    while time.time() < end:
        if not condition():
            return False
        time.sleep(step)
    return True


class Check:
    def __init__(self):
        self.bad, self.count, self.started = [], 0, time.time()

    def __call__(self, what, holds, seen=None):
        self.count += 1
        print(("ok    " if holds else "FAIL  ") + what + ("" if seen is None else f"   [{seen}]"), flush=True)
        if not holds:
            self.bad.append(what)
        return bool(holds)

    def equal(self, what, got, want):
        return self(what, got == want, got if got == want else f"got {got!r}, want {want!r}")

    def done(self):
        spent = time.time() - self.started
        if self.bad:
            print(f"RESULT fail, {len(self.bad)} of {self.count} checks, {spent:.1f} s: " + "; ".join(self.bad))
        else:
            print(f"RESULT pass, {self.count} checks, {spent:.1f} s")
        sys.stdout.flush()
        sys.exit(1 if self.bad or not self.count else 0)


check = Check()
