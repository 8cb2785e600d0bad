"""D08: an event of an unknown kind may have taken blocks away, so the view must not go on calling itself whole (E8, I4).
Reports: vllm-project/vllm#57296 (one tier's clear under a new name), ROCm/ATOM#869 (a move between tiers).

What was skipped shows in the trust until a clear or a restart. A field that is not known is no loss."""
from harness import *

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
base = ports(6)
engines = [Engine(base + rank, rank=rank) for rank in range(6)]
with Serve(worker("w", base, size=6)) as s:
    for engine in engines:
        engine.wait_subscribed()
        engine.send(stored([1, 2], None, TOKENS))
    engines[0].send({"type": "TierBlocksCleared", "medium": "GPU"})
    engines[1].send(["BlockTransferred", [1, 2], "GPU", "CPU"])
    engines[2].send(stored([3], 2, [9, 9, 9, 9], tomorrows_field={"a": [1]}))
    engines[3].send(payload=b"\xc1\xc1")
    engines[4].send(removed(["0x01", "0x02"]))
    engines[5].send(removed(["0x01", 2]))
    cases = ((0, "a tier's clear under a new name", "unknown_tag"), (1, "a move from device to host", "unknown_tag"),
             (3, "a batch that cannot be decoded", "undecodable"), (4, "names that cannot be read", "malformed_removal"),
             (5, "one name that cannot be read", "malformed_removal"))
    for rank, what, reason in cases:
        until(lambda: reason in s.said("w", rank)[2], 4)
        trust, may_err, reasons = s.said("w", rank)
        check(f"{what}: {reason}", trust == "partial" and "may_overcredit" in may_err and reason in reasons, (trust, may_err, reasons))
        lines = s.log_lines(f"dp_rank={rank} ", reason)
        check(f"{what}: one line in the log", len(lines) == 1, lines)
    check.equal("the readable name beside it counts", s.reach(TOKENS, "w", 5), 4)
    check.equal("an unknown field changes nothing", (s.reach(TOKENS, "w", 2), s.said("w", 2)), (8, ("live", [], [])))
    check.equal("the kinds are counted", s.metric("rankwise_skipped_events_total", reason="unknown_tag"), 2)
    for rank, *_ in cases:
        engines[rank].send(CLEAR)
        check(f"rank {rank}: a clear lifts it", until(lambda: s.said("w", rank) == ("live", [], [])), s.said("w", rank))
check.done()
