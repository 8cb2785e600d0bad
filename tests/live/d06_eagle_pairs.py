"""D06: SGLang with an EAGLE or MTP drafter publishes token pairs (I11, I3).
Reports: ai-dynamo/dynamo#6872, ai-dynamo/dynamo#10982, llm-d/llm-d-kv-cache#603.

Page i covers block_size + 1 tokens at a stride of block_size: the window that an `is_eagle` query hashes. Such a query finds
the page, a prompt that differs in the token behind the page does not. The kind of a stream is learnt from the stream."""
from harness import *


def pairs(tokens):
    return [list(pair) for pair in zip(tokens, tokens[1:])]


PROMPT = list(range(1, 10))     # nine tokens: two pages of four pairs
engine, odd = Engine(), Engine()
with Serve(worker("w", engine.port) + worker("odd", odd.port, model="odd")) as s:
    engine.wait_subscribed(), odd.wait_subscribed()
    engine.send(CLEAR)
    engine.send(stored([-71], None, pairs(PROMPT[0:5])), stored([-72], -71, pairs(PROMPT[4:9])))
    check("both batches are applied", until(lambda: s.applied("w") == 2))

    def reach(tokens, **more):
        return s.reach(tokens, "w", **more)
    check.equal("nine tokens with is_eagle: both pages", reach(PROMPT, is_eagle=True), 8)
    check.equal("eight tokens with is_eagle: the first page", reach(PROMPT[:8], is_eagle=True), 4)
    check.equal("another token behind the first page: nothing", reach([1, 2, 3, 4, 99, 6, 7, 8, 9], is_eagle=True), 0)
    check.equal("a query that does not say it is understood all the same", reach(PROMPT), 8)
    check.equal("the rank is live", s.said("w"), ("live", [], []))

    engine.send(stored([-73], -72, [[9, 10], [11, 12], [12, 13], [13, 14]]))
    check("pairs that do not chain are a reason", until(lambda: "token_mismatch" in s.said("w")[2]), s.said("w"))
    engine.send(removed([-72, -71]))
    check("the pages go", until(lambda: reach(PROMPT, is_eagle=True) == 0))
    check.equal("and were no unknown names", s.metric("rankwise_unknown_removals_total"), 0)

    # Event by event: a stream may mix plain tokens and pairs.
    odd.send(stored([1], None, [1, 2, 3, 4]), stored([21], None, pairs([5, 6, 7, 8, 9])))
    until(lambda: s.applied("odd") == 1)
    check.equal("plain tokens beside pairs", s.reach([1, 2, 3, 4, 5], "odd", model="odd", is_eagle=False), 4)
check.done()
