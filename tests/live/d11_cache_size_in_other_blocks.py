"""D11: a cache described in other blocks than the declared ones (L17).
Reports: vllm-project/vllm#40895 (the local block size under context parallelism), ai-dynamo/dynamo#13653,
sgl-project/sglang#35298 (the logical block is the physical one times the degree of context parallelism).

`num_gpu_blocks` counts the engine's logical blocks: half of 1000 in use is 500, whatever size the label names, or unknown.
A front-end of several engines gives their sum under every engine's label: 2000 under two labels is 1000 each."""
from harness import *


def metrics(engines, blocks, label=16):
    return "".join(f'vllm:num_requests_running{{engine="{e}",model_name="x/y"}} 7.0\n'
                   f'vllm:num_requests_waiting{{engine="{e}",model_name="x/y"}} 3.0\n'
                   f'vllm:kv_cache_usage_perc{{engine="{e}",model_name="x/y"}} 0.5\n'
                   f'vllm:cache_config_info{{block_size="{label}",engine="{e}",num_gpu_blocks="{blocks}"}} 1.0\n'
                   for e in engines)


context_parallel = Page({"/metrics": metrics([0], 1000)})
front_end = Page({"/metrics": metrics([0, 1], 2000)})
plain = Page({"/metrics": metrics([0], 1000)})
config, engines = "[telemetry]\ninterval_ms = 200\n", []
for name, block, size, page in (("dcp", 32, 1, context_parallel), ("sum", 16, 2, front_end), ("plain", 16, 1, plain)):
    base = ports(size)
    engines += [Engine(base + rank, rank=rank) for rank in range(size)]
    config += worker(name, base, model=name, block_size=block, size=size, loads=page.url)


def used(s, name, rank):
    _, answer = s("POST", "/select", {"model_name": name, "token_ids": list(range(32)), "candidates": "all"})
    for c in answer.get("candidates", []):
        if c["dp_rank"] == rank:
            return None if c["decode_blocks"] is None else round(c["decode_blocks"] - c["new_blocks"], 6)


with Serve(config) as s:
    until(lambda: used(s, "plain", 0) == 500)
    check.equal("half of 1000 blocks", used(s, "plain", 0), 500)
    until(lambda: used(s, "dcp", 0) is not None, 2)
    check("blocks of 32 described as 1000 x 16: 500 or unknown", used(s, "dcp", 0) in (500, None), used(s, "dcp", 0))
    for rank in (0, 1):
        got = used(s, "sum", rank)
        check(f"the sum under both labels, rank {rank}: half of 1000 or unknown", got in (500, None), got)
check.done()
