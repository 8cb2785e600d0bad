"""An engine comes back with another layout of attention groups; a placeholder comes before any group (I9, I10).

A restarted process has no groups yet, and a kind that is said replaces one that was assumed: 32 of 32 tokens each time."""
from harness import *

FULL = {"kv_cache_spec_kind": "full_attention"}
WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
HASHES, TOKENS = chain(8)
s = Serve()


class Rank:
    def __init__(self, name):
        self.name = name
        self.engine = Engine(replay=True)
        s("POST", "/register", {"instance_id": name, "endpoint": tcp(self.engine.port), "replay_endpoint": tcp(self.engine.replay_port),
                                "model_name": name, "block_size": 4})
        self.engine.wait_subscribed()

    def restart(self):
        port, replay = self.engine.port, self.engine.replay_port
        self.engine.close()
        time.sleep(0.3)
        self.engine = Engine(port, replay=replay)
        self.engine.wait_subscribed()

    def hybrid(self, windowed, full):
        self.engine.send(stored(HASHES, None, TOKENS, group_idx=full, **FULL), stored(HASHES, None, TOKENS, group_idx=windowed, **WINDOW))
        # A window of 8 tokens needs the last two blocks only.
        self.engine.send(removed(HASHES[:6], group_idx=windowed))

    def expect(self, what):
        def now():
            return s.reach(TOKENS, self.name, model=self.name), s.said(self.name, model=self.name)
        until(lambda: now() == (32, ("live", [], [])), 6)
        check.equal(f"{what}: 32 tokens, live", now(), (32, ("live", [], [])))
        check.equal(f"{what}: no unknown name", s.metric("rankwise_unknown_removals_total", worker=self.name), 0)


a = Rank("a")
a.hybrid(0, 1)
a.expect("group 0 windowed, group 1 full")

b = Rank("b")
b.engine.send(stored(HASHES, None, TOKENS, group_idx=0, **FULL))
b.expect("one full group")
b.restart()
b.hybrid(0, 1)
b.expect("restarted: group 0 is the windowed one")

c = Rank("c")
c.engine.send(stored([999], None, [], 0, medium="CPU"))
c.hybrid(0, 1)
c.expect("a placeholder without a group comes first")

d = Rank("d")
d.engine.send(stored(HASHES, None, TOKENS, group_idx=0))
d.expect("group 0 without a kind")
d.restart()
d.hybrid(0, 1)
d.expect("restarted with kinds")

f = Rank("f")
f.hybrid(1, 0)
f.expect("group 0 full, group 1 windowed")
f.restart()
f.engine.send(stored(HASHES, None, TOKENS, group_idx=0, **FULL))
f.expect("restarted with one full group")
s.stop()
check.done()
