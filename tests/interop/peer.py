#!/usr/bin/env python3
"""A peer that speaks libzmq (by pyzmq), driven by JSON lines: the engine's side of the wire, and nuisances.

Start it, write one JSON object per line to its standard input, read one JSON object per line from its standard
output. It ends when its input ends. Needs pyzmq; msgpack only for `batch`.

Every command has "op" and may have "id" (given back) and "name" (which publisher or raw server; default "main").
Every answer has "ok"; with "ok": false there is "error". Commands are done one after the other. Between commands
replay requests are answered, by the same thread, as in an engine; so a command that is answered later (`sleep`,
`stop_world`, `wait_subscribed`) holds back replays only where that is said.

Publishers (one rank each)
  open             events, replay: endpoints to bind, port 0 for a free one (replay: null for none; default both
                   tcp://127.0.0.1:0); topic: ""; connect: false (true: the events socket connects, as vLLM's does
                   to an endpoint without a wildcard); buffer: 10000 batches; framing: "topic" | "bare" (replay
                   answers with or without a topic frame); router_hwm: null (libzmq's default of 1000, messages
                   above are dropped silently; 0 for no limit); pub_hwm: 100000, as engines have it; heartbeat_ms:
                   null (else libzmq sends PINGs); first: 0 (first number). One of the same name is closed first
                   -> events, replay: what is really bound
  publish          payload: hex; seq: null (else this number, and the next one follows it); live: true (false: the
                   batch is lost on the way); keep: true (false: it is not in the replay buffer)   -> seq
  publish_many     count; size: bytes of each payload, made from its number; live, keep as above   -> first, next
  batch            events: [{"type": "BlockStored", ...}, ...] with the fields' wire names; layout: "map" | "array";
                   ts: null (now); rank: 0; live, keep, seq as above                                -> seq, payload
  send             frames: [hex, ...]: sent on the events socket as they are
  skip             count: 1: numbers that are used up and never seen, as by a batch that failed to encode -> next
  wait_subscribed  count: 1; timeout_ms: 20000: until so many subscriptions have come to the sockets that are open
                   (a reopened socket counts from 0)                                         -> subscriptions
  answers          mode: "all" | "silent" | "no_end" | "endless" (the first batch over and over, 10 ms apart);
                   drop: [numbers left out]; how replay requests are answered from now on
  requests         -> requests: [{"start": n, "sent": n}], all that were answered since `open`
  interrupt        down_ms: 0: the sockets are closed and opened again on the same ports; numbers, buffer and
                   the process stay: a short loss of connection
  restart          down_ms: 0: the same, from the first number with an empty buffer: a new process
  close            the sockets are closed; linger_ms: 0. `reopen` opens them again on the same ports
  reopen           restart: false
Raw TCP (ZMTP 3.0 by hand)
  raw              mode: "mute" | "half_greeted" | "reset_after_handshake" | "reset_after_subscription" | "http" |
                   "bomb" (size: declared bytes of a frame; a few are sent; linger_ms: then closed) | "ping";
                   socket_type: "PUB" | "ROUTER"; port: 0                                  -> endpoint
  raw_stats        -> accepted
  raw_close        the port is free when it is answered
The process
  sleep            ms: nothing is done, replays included; libzmq's own threads go on
  stop_world       ms: the whole process is stopped (SIGSTOP) and continued
  quit
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict

import zmq

END = (1 << 64) - 1
# How often requests are looked at when no command comes.
TURN_MS = 10


class Publisher:
    def __init__(self, context, cmd):
        self.context = context
        self.events_endpoint = cmd.get("events", "tcp://127.0.0.1:0")
        self.replay_endpoint = cmd.get("replay", "tcp://127.0.0.1:0")
        self.topic = cmd.get("topic", "").encode()
        self.connects = cmd.get("connect", False)
        self.buffer = cmd.get("buffer", 10_000)
        self.framing = cmd.get("framing", "topic")
        self.router_hwm = cmd.get("router_hwm")
        self.pub_hwm = cmd.get("pub_hwm", 100_000)
        self.heartbeat_ms = cmd.get("heartbeat_ms")
        self.first = self.next = cmd.get("first", 0)
        self.batches = OrderedDict()
        self.requests = []
        self.mode, self.drop = "all", set()
        self.endless = None
        self.events = self.router = None
        self.open()

    def open(self):
        """Opens the sockets; a port that is still being freed is tried again."""
        self.subscriptions = 0
        # An XPUB is a PUB that tells of subscriptions; what it sends is the same.
        self.events = self.context.socket(zmq.XPUB)
        self.events.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.events.setsockopt(zmq.SNDHWM, self.pub_hwm)
        if self.heartbeat_ms:
            self.events.setsockopt(zmq.HEARTBEAT_IVL, self.heartbeat_ms)
        if self.connects:
            self.events.connect(self.events_endpoint)
        else:
            self.events_endpoint = bind(self.events, self.events_endpoint)
        if self.replay_endpoint is not None:
            self.router = self.context.socket(zmq.ROUTER)
            if self.router_hwm is not None:
                self.router.setsockopt(zmq.SNDHWM, self.router_hwm)
            self.replay_endpoint = bind(self.router, self.replay_endpoint)

    def close(self, linger_ms=0):
        for sock in (self.events, self.router):
            if sock is not None:
                sock.close(linger=linger_ms)
        self.events = self.router = None
        self.endless = None

    def forget(self):
        self.next = self.first
        self.batches.clear()

    def publish(self, payload, cmd):
        seq = cmd.get("seq")
        seq = self.next if seq is None else seq
        self.next = seq + 1
        if cmd.get("live", True):
            self.events.send_multipart([self.topic, number(seq), payload])
        if cmd.get("keep", True):
            self.batches[seq] = payload
            while len(self.batches) > self.buffer:
                self.batches.popitem(last=False)
        return seq

    def turn(self):
        """What an engine's publisher thread does between two batches."""
        if self.events is not None:
            while self.events.poll(0, zmq.POLLIN):
                self.subscriptions += self.events.recv_multipart()[0][:1] == b"\x01"
        if self.router is None:
            return
        if self.endless:
            self.router.send_multipart(self.endless)
        while self.router is not None and self.router.poll(0, zmq.POLLIN):
            self.answer(self.router.recv_multipart())

    def answer(self, request):
        if len(request) != 3 or request[1]:
            return
        identity, _, start = request
        start = int.from_bytes(start, "big")
        record = {"start": start, "sent": 0}
        self.requests.append(record)
        if self.mode == "silent":
            return
        prefix = [identity, b""] + ([self.topic] if self.framing == "topic" else [])
        for seq, payload in list(self.batches.items()):
            if seq >= start and seq not in self.drop:
                message = prefix + [number(seq), payload]
                self.router.send_multipart(message)
                record["sent"] += 1
                if self.mode == "endless":
                    self.endless = message
                    return
        if self.mode == "all":
            end = [identity, b""] + ([b""] if self.framing == "topic" else [])
            self.router.send_multipart(end + [number(END), b""])


class Raw:
    """A TCP server that mistreats each connection in one way."""

    def __init__(self, cmd):
        self.mode = cmd["mode"]
        self.size = cmd.get("size", 0)
        self.linger_ms = cmd.get("linger_ms", 0)
        self.socket_type = cmd.get("socket_type", "PUB").encode()
        self.accepted = 0
        self.open = []
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", cmd.get("port", 0)))
        self.listener.listen(64)
        self.endpoint = "tcp://127.0.0.1:%d" % self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                self.treat(conn)
            except OSError:
                conn.close()

    def treat(self, conn):
        conn.settimeout(5)
        if self.mode == "mute":
            self.open.append(conn)
            return
        if self.mode == "half_greeted":
            conn.sendall(greeting())
            self.open.append(conn)
            return
        if self.mode == "http":
            conn.recv(64)
            conn.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            conn.close()
            return
        self.handshake(conn)
        if self.mode == "reset_after_subscription":
            read(conn, 3)
        elif self.mode == "bomb":
            conn.sendall(b"\x02" + struct.pack(">Q", self.size) + b"boom")
            time.sleep(self.linger_ms / 1000)
            conn.close()
            return
        elif self.mode == "ping":
            conn.sendall(b"\x04\x07\x04PING\x00\x0a")
        # Closing with a linger time of zero sends a reset.
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        conn.close()

    def handshake(self, conn):
        conn.sendall(greeting())
        read(conn, 64)
        read(conn, read(conn, 2)[1])
        # Last, so that what follows it is there before the other side has sent anything more.
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(self.socket_type)) + self.socket_type
        conn.sendall(bytes([4, len(ready)]) + ready)

    def close(self):
        # Wakes the thread that waits in accept; closing alone would leave it there.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        for conn in self.open:
            conn.close()


def greeting():
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def read(conn, count):
    data = b""
    while len(data) < count:
        chunk = conn.recv(count - len(data))
        if not chunk:
            raise OSError("the connection has ended")
        data += chunk
    return data


def bind(sock, endpoint):
    deadline = time.monotonic() + 10
    while True:
        try:
            sock.bind(endpoint)
            return sock.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def number(seq):
    return seq.to_bytes(8, "big")


# Positions of fields in the array layout; what follows the last one that is set is left out.
FIELDS = {
    "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}
ALWAYS = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}


def encode(cmd):
    import msgpack

    events = cmd["events"]
    if cmd.get("layout", "map") == "array":
        events = [positional(event) for event in events]
    ts = cmd.get("ts")
    return msgpack.packb([time.time() if ts is None else ts, events, cmd.get("rank", 0)])


def positional(event):
    fields = FIELDS[event["type"]]
    values = [event.get(field) for field in fields]
    while len(values) > ALWAYS[event["type"]] and values[-1] is None:
        values.pop()
    return [event["type"]] + values


class Peer:
    def __init__(self):
        self.context = zmq.Context()
        self.publishers = {}
        self.raws = {}

    def turn(self):
        for publisher in self.publishers.values():
            publisher.turn()

    def do(self, cmd):
        return getattr(self, "do_" + cmd["op"])(cmd)

    def publisher(self, cmd):
        return self.publishers[cmd.get("name", "main")]

    def do_open(self, cmd):
        name = cmd.get("name", "main")
        if name in self.publishers:
            self.publishers.pop(name).close()
        publisher = self.publishers[name] = Publisher(self.context, cmd)
        return {"events": publisher.events_endpoint, "replay": publisher.replay_endpoint}

    def do_publish(self, cmd):
        return {"seq": self.publisher(cmd).publish(bytes.fromhex(cmd["payload"]), cmd)}

    def do_publish_many(self, cmd):
        publisher, first = self.publisher(cmd), self.publisher(cmd).next
        for _ in range(cmd["count"]):
            text = b"batch %d " % publisher.next
            size = cmd.get("size", len(text))
            publisher.publish((text * (size // len(text) + 1))[:size], {**cmd, "seq": None})
        return {"first": first, "next": publisher.next}

    def do_batch(self, cmd):
        payload = encode(cmd)
        return {"seq": self.publisher(cmd).publish(payload, cmd), "payload": payload.hex()}

    def do_send(self, cmd):
        self.publisher(cmd).events.send_multipart([bytes.fromhex(frame) for frame in cmd["frames"]])
        return {}

    def do_skip(self, cmd):
        self.publisher(cmd).next += cmd.get("count", 1)
        return {"next": self.publisher(cmd).next}

    def do_wait_subscribed(self, cmd):
        publisher, count = self.publisher(cmd), cmd.get("count", 1)
        deadline = time.monotonic() + cmd.get("timeout_ms", 20_000) / 1000
        while publisher.subscriptions < count:
            if time.monotonic() > deadline:
                raise TimeoutError("%d of %d subscriptions came" % (publisher.subscriptions, count))
            time.sleep(TURN_MS / 1000)
            self.turn()
        return {"subscriptions": publisher.subscriptions}

    def do_answers(self, cmd):
        publisher = self.publisher(cmd)
        publisher.mode, publisher.drop = cmd.get("mode", "all"), set(cmd.get("drop", []))
        publisher.endless = None
        return {}

    def do_requests(self, cmd):
        return {"requests": self.publisher(cmd).requests}

    def do_interrupt(self, cmd):
        publisher = self.publisher(cmd)
        publisher.close()
        time.sleep(cmd.get("down_ms", 0) / 1000)
        publisher.open()
        return {}

    def do_restart(self, cmd):
        self.publisher(cmd).forget()
        return self.do_interrupt(cmd)

    def do_close(self, cmd):
        self.publisher(cmd).close(cmd.get("linger_ms", 0))
        return {}

    def do_reopen(self, cmd):
        if cmd.get("restart", False):
            self.publisher(cmd).forget()
        self.publisher(cmd).open()
        return {}

    def do_raw(self, cmd):
        raw = self.raws[cmd.get("name", "main")] = Raw(cmd)
        return {"endpoint": raw.endpoint}

    def do_raw_stats(self, cmd):
        return {"accepted": self.raws[cmd.get("name", "main")].accepted}

    def do_raw_close(self, cmd):
        self.raws.pop(cmd.get("name", "main")).close()
        return {}

    def do_sleep(self, cmd):
        time.sleep(cmd["ms"] / 1000)
        return {}

    def do_stop_world(self, cmd):
        script = 'kill -STOP "$1"; sleep "$2"; kill -CONT "$1"'
        args = ["sh", "-c", script, "sh", str(os.getpid()), str(cmd["ms"] / 1000)]
        subprocess.run(args, check=True)
        return {}

    def do_quit(self, cmd):
        raise EOFError


def serve():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = Peer()
    poller = zmq.Poller()
    poller.register(0, zmq.POLLIN)
    pending = b""
    while True:
        if not poller.poll(TURN_MS):
            peer.turn()
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            cmd = json.loads(line)
            try:
                answer = {"ok": True, **peer.do(cmd)}
            except EOFError:
                return
            except Exception as error:  # whatever went wrong is the driver's to report
                answer = {"ok": False, "error": "%s: %s" % (type(error).__name__, error)}
            if "id" in cmd:
                answer["id"] = cmd["id"]
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            peer.turn()


if __name__ == "__main__":
    serve()
    # Without waiting for what is unsent: the sockets go with the process.
    os._exit(0)
