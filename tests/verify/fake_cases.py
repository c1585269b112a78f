"""Take fake steps of the requested cases and print a line of JSON for each case.

    python -m tests.verify.fake_cases CASE...

This runs in a separate process, because the fake device must exist before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import sys

from megacp.verify import fake_cuda

TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
FULL = "--data-parallel-sharding-strategy optim_grads_params"
ANY = f"{CP} --cp-comm-type kv_exchange --cp-layout balanced"
BASE = (
    "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 --num-query-groups 4 "
    "--seq-length 8192 --vocab-size 4096 --global-batch-size 8 --dtype bfloat16 --qk-layernorm head "
    "--untie-embeddings-and-output-weights"
)
SEEING = (
    "--vision-num-layers 8 --vision-hidden-size 512 --vision-ffn-hidden-size 1024 --vision-num-attention-heads 8 "
    "--vision-image-size 224 --vision-patch-size 14 --vision-planned-crops 32 --additional-vocab-size 128"
)
EXPERTS = (
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512 --expert-model-parallel-size"
)
TERMS = "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
CORRECTED = "--moe-router-score-function sigmoid --moe-router-bias-update-rate 0.001"
STATES = "--linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 8 --attention-output-gate"
WINDOWS = "--window-size 1024 --window-attn-skip-freq 4"
# Flags of each case. `4d` has 16 GPUs, all other cases have 8.
CASES = {
    "a2a": "--context-parallel-size 4 --cp-comm-type a2a",
    "a2a+p2p": "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "p2p": f"{TP} {CP} --cp-comm-type p2p",
    "all_gather": "--context-parallel-size 4 --cp-comm-type all_gather",
    "4d": f"{TP} {PP} {ANY} --cross-entropy-chunk-tokens 256",
    "interleaved": f"{PP} {TP} --num-virtual-stages-per-pipeline-rank 2",
    "zero bubble": f"{PP} {TP} --pipeline-schedule zero_bubble",
    "gradients sharded": f"{CP} --data-parallel-sharding-strategy optim_grads",
    "all sharded": f"{ANY} {FULL} --recompute-granularity selective",
    "all sharded, pipeline": f"{PP} {CP} {FULL}",
    "instances": f"{CP} {FULL} --num-distributed-optimizer-instances 2",
    "selective": f"{TP} {CP} --recompute-granularity selective",
    "full": f"{TP} {CP} --recompute-granularity full",
    "on the host": f"{ANY} {FULL} --recompute-granularity full --activation-offload 0.99 --mlp-chunk-tokens 1024",
    "pairs": f"{TP} {CP} --lora-rank 8",
    "dropout": f"{TP} --hidden-dropout 0.1 --cross-entropy-chunk-tokens 1024",
    "dynamic": f"{ANY} --dynamic-context-parallel",
    "vision": f"{TP} {ANY} {SEEING} --recompute-granularity full",
    "vision, all sharded": f"{ANY} {FULL} {SEEING} --recompute-granularity selective",
    "vision, replicated": f"{CP} {SEEING} --vision-shards replicate",
    "experts": f"{TP} {CP} {EXPERTS} 4 {TERMS}",
    "experts, all sharded": f"{ANY} {FULL} {EXPERTS} 2 {TERMS} {CORRECTED} --recompute-granularity selective",
    "experts, full": f"{CP} {EXPERTS} 4 {CORRECTED} --recompute-granularity full --mlp-chunk-tokens 2048",
    "float32": f"{CP} --dtype float32",
    "states": f"{TP} {STATES}",
    "states, all sharded": f"{ANY} {FULL} {STATES} --recompute-granularity selective",
    "states, full": f"{PP} {STATES} --recompute-granularity full",
    "windows, interleaved": f"{PP} {CP} {WINDOWS} --num-virtual-stages-per-pipeline-rank 2",
    "windows, on the host": f"{CP} {FULL} {WINDOWS} --recompute-granularity full --activation-offload 0.99",
}
# Cases that run the Python files of Transformer Engine, with packs of causal documents.
ENGINE = {
    "engine p2p": f"{TP} {PP} {CP} --cp-comm-type p2p",
    "engine all_gather": "--context-parallel-size 4 --cp-comm-type all_gather --recompute-granularity selective",
    "engine a2a": f"{TP} --context-parallel-size 4 --cp-comm-type a2a --recompute-granularity full",
    "engine a2a+p2p": f"{CASES['a2a+p2p']} --mlp-chunk-tokens 1024",
    "engine kv_exchange": f"{CP} --cp-comm-type kv_exchange",  # cuDNN's kernel in our transport
}


def main(names: list[str]) -> None:
    """Take a step of rank 0 and of its neighbours for each case."""
    fake_cuda.load_fake_cuda()
    from megacp.distributed.fake_world import differences
    from megacp.dry_run.memory import stage_memory
    from megacp.engine.checks import require
    from megacp.engine.config.cli import parse
    from megacp.engine.models.costs import stage_layers
    from megacp.verify import fake_step
    from tests.engine.backends import engine_fake

    watch = fake_step.Watch()
    for name in names:
        world = 16 if name == "4d" else 8
        # The dry run assumes that one causal document fills a row.
        mask = "causal"
        flags = {**CASES, **ENGINE}[name]
        if name in ENGINE:
            mask, flags = "packed", f"{flags} --cp-layout zigzag_document"
        config = parse(f"{BASE} {flags}".split())
        require(config, world, [])
        beside = fake_step.neighbours(config.grid_shape(world), 0)
        ranks = [*(beside if name == "4d" else beside[-2:]), 0, 0]  # the last step compiles nothing
        with engine_fake.faked() if name in ENGINE else contextlib.nullcontext():
            *others, one = (fake_step.step(config, world, rank, mask, watch) for rank in ranks)
        wrong: list[str] = []
        for other in others:
            wrong += differences(0, one.calls, other.rank, other.calls)
        planned = stage_memory(config, 0, stage_layers(config, world)[0], world).total
        grid = {"groups": sorted({(call.group, call.ranks, call.peer >= 0) for call in one.calls})}
        print(
            json.dumps(
                {"name": name, "peak": one.total, "planned": planned, "wrong": wrong, **grid}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
