"""Every reason of `trust::Reason` (E8, E4, E9): raised by real messages on real sockets, seen in the answer, in the metrics and
in the log, and lifted as it promises: by a clear and by a restart, or by whoever raised it.

Usage: reasons.py [--all NAME,NAME,...] [--only NAME,...]   --all names the program's reasons: the tables must cover them"""
from harness import *

SETTINGS = ("[streams]\nsilence_grace_ms = 1000\nsilent_after_ms = 1000\nprobe_interval_ms = 1000\nprobe_max_ms = 2000\n"
            "replay_timeout_ms = 1000\n")
HASHES, TOKENS = chain(2)
OVERCREDITS, MISSES = ["may_miss", "may_overcredit"], ["may_miss"]


def array_of(count, marker=b"<long>"):
    """An event's array of `count` equal names, written by hand: `msgpack` need not hold them all."""
    return marker, b"\xdd" + struct.pack(">I", count) + b"\x07" * count


def with_long(engine, event, count):
    marker, array = array_of(count)
    payload = msgpack.packb([time.time(), [event(marker)], 0], use_bin_type=True)
    packed = msgpack.packb(marker, use_bin_type=True)
    assert payload.count(packed) == 1
    engine.send(payload=payload.replace(packed, array))


# === raised by what a message says; lifted by a clear or a restart of the rank ===

def other_topic(r):
    r.engine.send(stored([5], None, [9] * 4), topic=b"quite-another")


def too_large(r):
    # More events than any batch has; a batch of too many bytes is in `lost_content.py`.
    count = (1 << 20) + 1
    r.engine.send(payload=b"\x92\xcb" + struct.pack(">d", time.time()) + b"\xdd" + struct.pack(">I", count) + b"\xc0" * count)


def too_many_groups(r):
    r.engine.send(*[stored([100 + g], None, [g] * 4, group_idx=g, kv_cache_spec_kind="full_attention") for g in range(40)])


def orphans_dropped(r):
    # A rank keeps 4 MiB of them.
    at, count = 1_000_000, 40_000
    r.engine.send(stored([at + i for i in range(count)], at - 1, [i % 1000 for i in range(4 * count)]))


def joined_late(r):
    # The buffer has lost the beginning: the first answer is above the number that was asked for.
    r.engine.keep = 1
    for k in range(3):
        r.engine.send(stored([10 + k], None, [50 + k] * 4))


def lost_batches(r):
    # A number that neither the wire nor the buffer has.
    r.engine.seq += 1
    r.engine.send(stored([10], None, [50] * 4))


def restart_undecided(r):
    # What comes back is far ahead of what was heard, and its buffer does not reach back to it.
    r.engine.send(stored([10], None, [50] * 4))
    r.applied(2)
    r.exchange(seq=500)
    r.engine.send(stored([11], None, [51] * 4))


def contradicting_stores(r):
    r.engine.send(stored([70], None, [1] * 4), stored([70], None, [2] * 4))


def no_removals(r):
    for k in range(8):
        r.engine.send(stored([1000 + 4 * k + i for i in range(4)], None, [k * 100 + t for t in range(16)], medium="CPU"))


def eagle_differs(r):
    r.engine.send(stored([70], None, [7] * 4))


def unchained(r):
    # SGLang before 0.5.6: a first page names Python's hash of an empty tuple as its parent.
    r.engine.send(stored([70], 5_740_354_900_026_072_187, [7] * 4))


def late_first(r):
    # Before anybody listens, so that the first answer lacks the beginning.
    joined_late(r)


SEND = {
    "undecodable": (OVERCREDITS, lambda r: r.engine.send(payload=b"\xc1\xc1")),
    "too_large": (OVERCREDITS, too_large),
    "other_topic": (OVERCREDITS, other_topic),
    "unknown_tag": (OVERCREDITS, lambda r: r.engine.send({"type": "TierBlocksMoved"})),
    "malformed_event": (OVERCREDITS, lambda r: r.engine.send(5, {"block_hashes": [1]}, [7, [1]])),
    "malformed_removal": (OVERCREDITS, lambda r: r.engine.send(removed(["x"]))),
    "too_long_removal": (OVERCREDITS, lambda r: with_long(r.engine, removed, 20_000_000)),
    "malformed_store": (MISSES, lambda r: r.engine.send(stored([None], None, [9] * 4))),
    "too_long_store": (MISSES, lambda r: with_long(r.engine, lambda names: stored(names, None, [9] * 4), 20_000_000)),
    "token_mismatch": (MISSES, lambda r: r.engine.send(stored([5, 6], None, [9] * 5))),
    "unusable_tokens": (MISSES, lambda r: r.engine.send(stored([5], None, [{"a": 1}, None, 3.5, 4]))),
    "block_size_mismatch": (MISSES, lambda r: r.engine.send(stored([5], None, [9] * 8, 8))),
    "self_parent": (MISSES, lambda r: r.engine.send(stored([5], 5, [9] * 4))),
    "too_many_groups": (MISSES, too_many_groups),
    "orphans_dropped": (MISSES, orphans_dropped),
    "unchained_hashes": (OVERCREDITS, unchained),
    "contradicting_stores": (OVERCREDITS, contradicting_stores),
    "lost_batches": (OVERCREDITS, lost_batches),
    "joined_late": (MISSES, late_first),
    "restart_undecided": (OVERCREDITS, restart_undecided),
    "no_removals": (None, no_removals),
    "bad_framing": (None, lambda r: r.engine.frames([b"", b"short"])),
    "eagle_differs": (None, eagle_differs),
}
DECLARED = {"other_topic": {"topic": "kv"}, "no_removals": {"capacity_blocks_per_rank": 16}, "eagle_differs": {"is_eagle": True}}
BEFORE_START = {"joined_late"}

# === raised by what a connection, a declaration or silence says; lifted by its end ===


def close(r):
    r.engine.close()


def reopen(r):
    r.exchange()
    r.engine.send(stored(HASHES, None, TOKENS))


def mute_hole(r):
    r.engine.answers = "none"
    r.engine.send(stored([10], None, [50] * 4), lose=True)
    r.engine.send(stored([11], None, [51] * 4))


def speak(r):
    r.engine.answers = "all"


def stop(r):
    os.kill(r.process.pid, signal.SIGSTOP)


def go_on(r):
    os.kill(r.process.pid, signal.SIGCONT)


def mute_reconnect(r):
    """The connection breaks, and the replay endpoint does not say whether anything is missing."""
    r.engine.answers = "none"
    r.proxy.cut()


def first_number_zero(r):
    r.engine.send(stored(HASHES, None, TOKENS))


def declare_events(r):
    r.service("PATCH", f"/workers/{r.name}", {"events": "zmq"})


# reason: (trust, how the rank begins, how it is raised, how it ends)
STATES = {
    "no_connection": ("silent", "plain", close, reopen),
    "probe_failed": ("silent", "process", stop, go_on),
    "history_pending": ("joining", "mute", lambda r: None, speak),
    "replay_pending": ("repairing", "plain", mute_hole, speak),
    "no_history": ("partial", "no_replay", lambda r: None, first_number_zero),
    "never_heard": ("partial", "no_replay", lambda r: None, first_number_zero),
    "unproven": ("partial", "proxy", mute_reconnect, speak),
    "publishes_nothing": ("unknown", "no_events", lambda r: None, None),
}
# These end by themselves when the replay is given up: looked at before all others.
TRANSIENT = ("history_pending", "replay_pending")
# A declaration is no event: nothing is to be said of it.
NOT_LOGGED = {"publishes_nothing"}
# Passing states and ways to be set up are said, and are no warnings.
NOT_WARNED = {"history_pending", "replay_pending", "no_history", "never_heard"}
# What a socket cannot bring about in a test's time, and why.
NOT_HERE = {"rank_full": "2^24 blocks of one rank, gigabytes of messages; the index's own tests fill a smaller limit"}


class Rank:
    """A rank of a worker of its own, with the engine behind it."""

    def __init__(self, reason, way, begin="plain"):
        self.reason, self.name, self.begin = reason, f"{reason}.{way}", begin
        self.engine = self.process = self.proxy = self.service = None
        more = dict(DECLARED.get(reason, {}))
        if begin == "process":
            self.port, self.replay = ports(), ports()
            self.process = spawn([sys.executable, os.path.join(HERE, "engine_process.py"), str(self.port), str(self.replay), "5", "50", "1"],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        elif begin == "no_events":
            self.port = self.replay = None
        else:
            self.engine = Engine(replay=begin != "no_replay", answers="none" if begin == "mute" else "all")
            self.port, self.replay = self.engine.port, self.engine.replay_port
            self.engine.topic = more.get("topic", "").encode()
        if begin == "proxy":
            from proxy import Proxy
            self.proxy = Proxy(self.port)
            self.port = self.proxy.port
        if begin == "no_events":
            self.table = f'[[workers]]\nid = "{self.name}"\nmodel = "m"\nblock_size = 4\nsize = 1\nno_events = true\n'
        else:
            self.table = worker(self.name, self.port, replay=self.replay, **more)

    def exchange(self, seq=0):
        """Another process behind the same ports."""
        own, replay, topic = self.engine.port, self.engine.replay_port, self.engine.topic
        self.engine.close()
        until(lambda: self.service.listener(self.name).get("status") != "active", 5, 0.02)
        self.engine = Engine(own, replay=replay, seq=seq, topic=topic)
        self.engine.wait_subscribed()

    def applied(self, count):
        return until(lambda: self.service.applied(self.name) >= count, 5)

    def said(self):
        return self.service.said(self.name)

    def stands(self):
        return self.reason in self.said()[2]

    def gauge(self):
        return self.service.metric("rankwise_trust_reason", worker=self.name, reason=self.reason)

    def lines(self, level):
        # The words of a warning about the connection may hold a reason's name, which is part of the worker's.
        named = f'reason="{self.reason}"' if level == ("WARN",) else self.reason
        return self.service.log_lines(self.name, named, level=level)


def raised(rank, trust, may_err):
    """The three places where a standing reason is seen."""
    until(rank.stands, 15)
    said = rank.said()
    what = f"{rank.name}"
    if not check(f"{what}: in the answer", rank.stands(), (said, rank.service.counters(rank.name))):
        return False
    if trust is not None:
        check(f"{what}: {trust} {may_err if may_err is not None else ''}", said[0] == trust and (may_err is None or said[1] == may_err), said)
    check(f"{what}: in /workers", rank.reason in rank.service.listener(rank.name).get("reasons", []), rank.service.listener(rank.name))
    check(f"{what}: in the metrics", rank.gauge() == 1, rank.gauge())
    if rank.reason not in NOT_LOGGED:
        warned, said = rank.lines(("WARN",)), rank.lines(("INFO",))
        if rank.reason in NOT_WARNED:
            check(f"{what}: in the log, no warning", said and not warned, (said, warned))
        else:
            check(f"{what}: one warning", len(warned) == 1, warned)
    return True


def lifted(rank, how, trusts=("live",)):
    until(lambda: not rank.stands() and rank.said()[0] in trusts, 15)
    said = rank.said()
    check(f"{rank.name}: lifted by {how}", rank.reason not in said[2] and said[0] in trusts, (said, rank.service.counters(rank.name)))
    check(f"{rank.name}: gone from the metrics", rank.gauge() == 0, rank.gauge())


def ends(rank):
    trust, _, _, end = STATES[rank.reason]
    if raised(rank, trust, None) and end is not None:
        end(rank)
        # A process that was stopped goes on; one that lost its connection is asked, or restarted.
        lifted(rank, "its end")


def main():
    words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if "--all" in words:
        program, here = set(words["--all"].split(",")), set(SEND) | set(STATES) | set(NOT_HERE)
        check.equal("every reason of the program has its row", here, program)
    only = set(words["--only"].split(",")) if "--only" in words else None
    wanted = [reason for reason in (*SEND, *STATES) if only is None or reason in only]
    by_clear = {(reason, way): Rank(reason, way) for reason in wanted if reason in SEND for way in ("clear", "restart")}
    by_source = {reason: Rank(reason, "source", STATES[reason][1]) for reason in wanted if reason in STATES}
    ranks = [*by_clear.values(), *by_source.values()]
    for rank in by_clear.values():
        if rank.reason in BEFORE_START:
            SEND[rank.reason][1](rank)
    with Serve(SETTINGS + "".join(rank.table for rank in ranks)) as service:
        for rank in ranks:
            rank.service = service
        until(lambda: all(rank.begin == "no_events" or service.listener(rank.name).get("status") == "active" for rank in ranks), 15)
        for rank in ranks:
            if rank.begin in ("plain", "proxy") and rank.reason not in BEFORE_START | {"eagle_differs"}:
                until(lambda: rank.engine.asked, 10)
                rank.engine.send(stored(HASHES, None, TOKENS))
                check(f"{rank.name}: live before", until(lambda: rank.said() == ("live", [], []), 10), rank.said())
        for reason in TRANSIENT:
            if reason in by_source:
                STATES[reason][2](by_source[reason])
        for reason in TRANSIENT:
            if reason in by_source:
                ends(by_source.pop(reason))
        for rank in by_clear.values():
            if rank.reason not in BEFORE_START:
                SEND[rank.reason][1](rank)
        for reason, rank in by_source.items():
            STATES[reason][2](rank)
        for (reason, way), rank in by_clear.items():
            may_err = SEND[reason][0]
            if not raised(rank, "live" if may_err is None else "partial", may_err or []):
                continue
            if way == "clear":
                rank.engine.send({"type": "AllBlocksCleared", "medium": "GPU"})
                time.sleep(0.1)
                check(f"{rank.name}: a clear of one medium lifts nothing", rank.stands(), rank.said())
                rank.engine.send(CLEAR)
                lifted(rank, "a clear")
            else:
                rank.exchange()
                first = [stored([5], None, [[1, 2], [2, 3], [3, 4], [4, 5]])] if reason == "eagle_differs" else [stored(HASHES, None, TOKENS)]
                rank.engine.send(*first)
                lifted(rank, "a restart")
        for rank in by_source.values():
            ends(rank)


main()
check.done()
