"""D15: equal idle ranks and prompts that share nothing: does every rank get its part? (S1, S3)
Reports: AMD-AGI/Infera#103 and #109, vllm-project/router#179, smg-project/smg#2096.

Paced traffic (a request is over before the next comes) spreads over equal idle ranks: each gets between half and twice its
even share, and follow-up turns stay where their prefix lies. A replay socket or a load report says nothing of a rank's worth.

`--table` prints the six set-ups as a table and as JSON and leaves the other checks out."""
import collections, concurrent.futures, random
from harness import *

BLOCK, RANKS = 16, 4


class Session:
    def __init__(self, chance, system):
        self.chance, self.at = chance, None
        self.tokens = system + self.more(3)

    def more(self, blocks):
        return [self.chance.randrange(50_000) for _ in range(blocks * BLOCK)]

    def grow(self):
        self.tokens = self.tokens + self.more(2)


class Cache:
    """What a rank's engine holds: publishes the blocks of a prompt that are new."""
    def __init__(self, engine):
        self.engine, self.names = engine, {}

    def take(self, tokens):
        parent, first, names, fresh = None, None, [], []
        for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            key = (parent, tuple(tokens[at:at + BLOCK]))
            if key not in self.names:
                self.names[key] = len(self.names) + 1
                first = first if names else parent
                names.append(self.names[key])
                fresh += key[1]
            parent = self.names[key]
        if names:
            self.engine.send(stored(names, first, fresh, BLOCK))
        return bool(names)


def paced(replay, reports, weight=1.0, sessions=60, turns=2, shared=0):
    """Shares by rank, the part of follow-ups that stayed, and the trust of the ranks, for one set-up."""
    chance = random.Random(7)
    base, replays = ports(RANKS), ports(RANKS)
    engines = [Engine(base + rank, replay=replays + rank if replay else False, rank=rank) for rank in range(RANKS)]
    caches = [Cache(engine) for engine in engines]
    table = worker("w", base, block_size=BLOCK, size=RANKS, replay=replays if replay else None)
    share, stayed, followed = collections.Counter(), 0, 0
    with Serve(f"[scoring]\noverlap_weight = {weight}\n" + table, log="warn") as s:
        for engine in engines:
            engine.wait_subscribed()
        until(lambda: all(row["trust"] in ("live", "partial") for row in s.rows().values()), 3)
        system = [chance.randrange(50_000) for _ in range(shared * BLOCK)]
        opened = [Session(chance, system) for _ in range(sessions)]
        idle = {str(rank): {"decode_blocks": 0, "prefill_tokens": 0} for rank in range(RANKS)}
        sent = 0
        for _ in range(turns):
            for session in opened:
                if reports:
                    s("POST", "/loads", {"model_name": "m", "worker_id": "w", "ranks": idle})
                rank = s("POST", "/select", {"model_name": "m", "token_ids": session.tokens})[1]["dp_rank"]
                share[rank] += 1
                if session.at is not None:
                    followed += 1
                    stayed += rank == session.at
                session.at = rank
                if caches[rank].take(session.tokens):
                    sent += 1
                    whole = len(session.tokens) // BLOCK * BLOCK
                    until(lambda: s.reach(session.tokens, "w", rank) == whole, 2, 0.002)
                session.grow()
        trust = {rank: row["trust"] for (_, rank), row in s.rows().items()}
    for engine in engines:
        engine.close()
    total = sum(share.values())
    return {rank: share[rank] / total for rank in range(RANKS)}, stayed / followed, trust


SETUPS = [(replay, reports, weight) for replay in (True, False) for reports, weight in ((True, 1.0), (True, 0.01), (False, 1.0))]


def six_setups():
    rows = []
    for replay, reports, weight in SETUPS:
        share, stay, trust = paced(replay, reports, weight)
        rows.append({"replay_socket": replay, "load_reports": reports, "overlap_weight": weight,
                     "share": {rank: round(part, 3) for rank, part in share.items()}, "follow_ups_stayed": round(stay, 3),
                     "trust": trust})
        what = f"replay socket {replay}, load reports {reports}, weight {weight}"
        even = all(0.5 / RANKS <= part <= 2 / RANKS for part in share.values())
        check(f"{what}: every rank gets its part", even, (rows[-1]["share"], trust))
        # At a hundredth of the weight a prefix is worth less than the request's own blocks.
        check(f"{what}: follow-ups stay", stay == 1.0 or weight < 1.0, f"{stay:.0%}")
    return rows


def burst():
    base = ports(8)
    engines = [Engine(base + rank, rank=rank) for rank in range(8)]
    with Serve(worker("w", base, block_size=BLOCK, size=8)) as s:
        for engine in engines:
            engine.wait_subscribed()
        engines[5].send(stored([1, 2, 3], None, list(range(1, 49)), BLOCK))
        until(lambda: s.applied() == 1)

        def one(i):
            return s("POST", "/select_and_reserve", {"model_name": "m", "token_ids": [i * 1000 + k for k in range(320)]})[1]["dp_rank"]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            got = collections.Counter(pool.map(one, range(100)))
        check("100 bookings at once after one unrelated store: no rank takes more than 30", max(got.values()) <= 30, dict(got))


def after_a_restart():
    base = ports(4)
    engines = [Engine(base + rank, rank=rank, seq=500 if rank else 0) for rank in range(4)]
    with Serve(worker("w", base, block_size=BLOCK, size=4) + "[load]\nttl_ms = 60000\n") as s:
        for engine in engines:
            engine.wait_subscribed()
        for rank, engine in enumerate(engines):
            engine.send(stored([1 + rank], None, [100 + rank] * BLOCK, BLOCK))
        engines[0].send(*[stored([1000 + k], None, [k] * BLOCK, BLOCK) for k in range(400)])
        equal = {str(rank): {"decode_blocks": 5, "prefill_tokens": 0} for rank in range(4)}
        s("POST", "/loads", {"model_name": "m", "worker_id": "w", "ranks": equal})
        until(lambda: s.applied() == 5)
        got = collections.Counter(s("POST", "/select", {"model_name": "m", "token_ids": [i * 100 + k for k in range(48)]})[1]["dp_rank"]
                                  for i in range(100))
        check("joined late but one, equal loads, the whole view has the largest tree: it does not take all", got[0] <= 60, dict(got))


if __name__ == "__main__":
    rows = six_setups()
    if "--table" in sys.argv:
        print("\n| replay socket | load reports | weight | shares | follow-ups that stayed |\n|---|---|---|---|---|")
        for row in rows:
            shares = ", ".join(f"{part:.0%}" for part in row["share"].values())
            print(f'| {row["replay_socket"]} | {row["load_reports"]} | {row["overlap_weight"]} | {shares} | {row["follow_ups_stayed"]:.0%} |')
        print(json.dumps(rows))
    else:
        burst()
        after_a_restart()
    check.done()
