"""Plays a case file (the format of fixtures/cases/README.md) against the binary over real ports: `run_case.py FILE`.

Knows the ops that the files beside it use; an op that it does not know ends the case with exit code 3."""
from harness import *

COUNTERS = {
    "gaps": "rankwise_gaps_total", "lost_batches": "rankwise_lost_batches_total",
    "duplicate_batches": "rankwise_duplicate_batches_total", "malformed_messages": "rankwise_malformed_messages_total",
    "skipped_events": "rankwise_skipped_events_total", "orphan_blocks": "rankwise_orphan_blocks_total",
    "unknown_removals": "rankwise_unknown_removals_total", "rank_mismatch": "rankwise_rank_mismatch_batches_total",
}
TIERS = {"device": "device", "host": "host", "disk": "disk", "any": "disk"}


def name(value):
    if isinstance(value, str):
        return int(value, 0)
    if isinstance(value, dict) and "bytes" in value:
        return bytes.fromhex(value["bytes"])
    return value


def event(fields):
    if not isinstance(fields, dict):
        return fields
    fields = dict(fields)
    if "block_hashes" in fields:
        fields["block_hashes"] = [name(value) for value in fields["block_hashes"]]
    if "parent_block_hash" in fields:
        fields["parent_block_hash"] = name(fields["parent_block_hash"])
    return fields


class Case:
    def __init__(self, path):
        with open(path) as file:
            self.case = json.load(file)
        config = self.case["config"]
        self.block_size = config.get("block_size", 4)
        self.engines, self.tables = {}, ""
        for worker_name, ranks in config["workers"].items():
            start, size = ranks["start"], ranks["size"]
            base = ports(size)
            self.tables += worker(worker_name, base, block_size=self.block_size, start=start, size=size)
            for offset in range(size):
                self.engines[f"{worker_name}:{start + offset}"] = Engine(base + offset, rank=start + offset)

    def engine(self, step):
        return self.engines[f'{step["worker"]}:{step["dp_rank"]}']

    def run(self):
        with Serve(self.tables) as self.service:
            for rank, engine in self.engines.items():
                if not engine.wait_subscribed():
                    raise SystemExit(f"nobody subscribed to {rank}")
            for number, step in enumerate(self.case["steps"], 1):
                play = getattr(self, "op_" + step["op"], None)
                if play is None:
                    print(f'{self.case["id"]}: not runnable, op {step["op"]}')
                    sys.exit(3)
                play(f"{number} {step['op']} {step.get('note', '')}".strip(), step)
            for line in self.service.log_lines()[:8]:
                print("      log:", line[:300])

    def op_event(self, _, step):
        self.publish(step, [step["event"]])

    def op_batch(self, _, step):
        self.publish(step, step["events"])

    def publish(self, step, events):
        self.engine(step).send(*map(event, events), ts=1.0, seq=step["seq"], rank=step.get("batch_rank", step["dp_rank"]))

    def op_raw(self, _, step):
        self.engine(step).frames([bytes.fromhex(frame) for frame in step["frames"]])

    def op_query(self, what, step):
        want = {rank: blocks for rank, blocks in step["expect"].items() if blocks}
        tier = TIERS[step.get("tier", "device")]
        narrowed = {key: step[key] for key in ("lora_name", "cache_salt") if key in step}

        def overlaps():
            rows = self.service.rows(step["tokens"], **narrowed)
            return {f"{w}:{rank}": row[tier] // self.block_size for (w, rank), row in rows.items() if row[tier]}
        # What an earlier step must *not* do can only be seen by giving it time to do it.
        time.sleep(0.1)
        until(lambda: overlaps() == want, 2)
        check.equal(what, overlaps(), want)

    def op_expect_counters(self, what, step):
        for counter, want in step.get("exactly", {}).items():
            until(lambda: self.service.metric(COUNTERS[counter]) == want, 1)
            check.equal(f"{what}: {counter}", self.service.metric(COUNTERS[counter]), want)
        for counter, want in step.get("at_least", {}).items():
            until(lambda: self.service.metric(COUNTERS[counter]) >= want, 1)
            got = self.service.metric(COUNTERS[counter])
            check(f"{what}: {counter} at least {want}", got >= want, got)

    def op_expect_index(self, what, step):
        for rank, want in step.get("blocks", {}).items():
            worker_name, number = rank.split(":")
            held = lambda: self.service.metric("rankwise_blocks", worker=worker_name, dp_rank=number, tier="device")
            until(lambda: held() == want, 1)
            check.equal(f"{what}: blocks of {rank}", held(), want)


Case(sys.argv[1]).run()
check.done()
