"""D10: SGLang with the metrics of all schedulers has a series for every TP rank of a DP rank (L18).
Reports: sgl-project/sglang#7597, radixark/miles#2023.

Equal series of one DP rank are one report: neither their sum nor a contradiction. Different ones contradict each other."""
from harness import *


def series(used):
    lines = [f'sglang_num_running_reqs{{dp_rank="{dp}",model_name="m",pp_rank="0",tp_rank="{tp}"}} {5 + dp}.0\n'
             f'sglang_num_used_tokens{{dp_rank="{dp}",model_name="m",pp_rank="0",tp_rank="{tp}"}} {used(dp, tp)}.0\n'
             for dp in (0, 1) for tp in (2 * dp, 2 * dp + 1)]
    return "".join(lines)


equal = Page({"/metrics": series(lambda dp, tp: 640 + 160 * dp)})
unequal = Page({"/metrics": series(lambda dp, tp: 640 + 160 * tp if dp else 640)})
config, engines = "[telemetry]\ninterval_ms = 200\n", []
for name, page in (("equal", equal), ("unequal", unequal)):
    base = ports(2)
    engines += [Engine(base + rank, rank=rank) for rank in (0, 1)]
    config += worker(name, base, model=name, block_size=16, size=2, loads=page.url)


def loads(s, name):
    _, answer = s("POST", "/select", {"model_name": name, "token_ids": list(range(32)), "candidates": "all"})
    # `decode_blocks` holds the request's own blocks too.
    return {c["dp_rank"]: (c["load"], None if c["decode_blocks"] is None else c["decode_blocks"] - c["new_blocks"])
            for c in answer.get("candidates", [])}


with Serve(config) as s:
    want = {0: ("known", 40), 1: ("known", 50)}
    until(lambda: loads(s, "equal") == want)
    check.equal("equal series are one report", loads(s, "equal"), want)
    until(lambda: loads(s, "unequal").get(0) == ("known", 40))
    got = loads(s, "unequal")
    check("different series leave their rank unknown, and that one alone",
          got.get(0) == ("known", 40) and got.get(1, ("",))[0] != "known", got)
check.done()
