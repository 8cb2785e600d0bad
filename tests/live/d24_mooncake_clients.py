"""D24: what clients of Mooncake's conductor send (A1).
Reports: kvcache-ai/Mooncake#1403 and #1828 (`lora_id` beside `lora_name`, a query for one instance), #3258 (msgpack bodies).

A field that narrows a question narrows it or is refused; it is never passed over. A msgpack body is answered or refused as one."""
from harness import *

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
engines = {name: Engine() for name in ("e1", "e2")}
with Serve() as s:
    for name, engine in engines.items():
        status, _ = s("POST", "/register", {
            "endpoint": tcp(engine.port), "type": "vLLM", "modelname": "m", "lora_name": "", "tenant_id": "default",
            "instance_id": name, "block_size": 4, "dp_rank": 0, "cache_group": 0,
            "hash_profile": {"strategy": "vllm_v1", "python_hash_seed": "0"}})
        check.equal(f"registered {name}", status, 201)
    for engine in engines.values():
        engine.wait_subscribed()
    engines["e1"].send(stored([1, 2], None, TOKENS))
    engines["e2"].send(stored([1], None, TOKENS[:4]), stored([7, 8], None, TOKENS, lora_id=12))
    until(lambda: s.applied() == 2)

    def ask(**narrow):
        status, answer = s("POST", "/query", {"model": "m", "tenant_id": "default", "token_ids": TOKENS, **narrow})
        if status != 200:
            return status, {}
        instances = answer.get("default", answer)
        instances = instances.get("instances", instances)
        return status, {name: value["GPU"] for name, value in instances.items() if isinstance(value, dict) and "GPU" in value}
    check.equal("the base model", ask(), (200, {"e1": 8, "e2": 4}))
    status, got = ask(lora_id=12)
    check("adapter number 12: its blocks alone, or refused", status >= 400 or (got.get("e1", 0), got.get("e2")) == (0, 8), (status, got))
    status, got = ask(lora_id=-1)
    check("number -1 is no adapter", status == 200 and got.get("e1") == 8, (status, got))
    status, got = ask(instance_id="e2")
    check("for one instance: that one alone, or refused", status >= 400 or set(got) == {"e2"}, (status, got))
    status, got = ask(dp_rank=3)
    check("for a rank that is not there: nothing, or refused", status >= 400 or not any(got.values()), (status, got))
    status, got = ask(tenant_id="other")
    check("another tenant: refused", status >= 400, (status, got))
    body = msgpack.packb({"model": "m", "tenant_id": "default", "block_size": 4, "token_ids": struct.pack("<8i", *TOKENS)}, use_bin_type=True)
    status, _ = s("POST", "/query", body, headers={"content-type": "application/msgpack"})
    check("msgpack: answered, or 415", status in (200, 415), status)
check.done()
