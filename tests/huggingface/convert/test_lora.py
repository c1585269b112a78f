"""LoRA against peft: loss, gradients and weights over AdamW steps, and the export that peft
loads.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.step.step import ParallelModel
from megacp.huggingface.convert.adapter import Adapter
from megacp.huggingface.convert.adapter_config import HARMLESS, READ
from megacp.huggingface.convert.families import of_config
from megacp.huggingface.convert.lora import folded, write_adapter
from megacp.huggingface.convert.source import read_hf
from megacp.huggingface.convert.start import Together
from megacp.huggingface.convert.tensors import Joined, Mapped, whole
from megacp.huggingface.convert_command import main as convert
from megacp.train import main as train
from megacp.training.loop.state import RunState
from tests.huggingface.convert.models import MODELS, Tensors, save
from tests.huggingface.convert.test_exact import TOKENS, row
from tests.huggingface.convert.test_start import trained, weights_of
from tests.ranks import grid, run_ranks
from tests.reference.precision import float32_is_float64
from tests.reference.sharding import Pieces, assemble, fill
from tests.reference.training import AXIS_FLAGS, pieces_of_slices
from tests.training import runs

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
peft = pytest.importorskip("peft", reason="peft is not installed (extra: test)")

# peft asks a model of transformers for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
RANK, ALPHA, STEPS = 3, 7.0, 3
MODULES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj"}
MODULES |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
STATE_MODULES = {f"linear_attention.{x}": f"linear_attn.in_proj_{x}" for x in "zba"}
STATE_MODULES |= {
    "linear_attention.output": "linear_attn.out_proj",
    "attention.v": "self_attn.v_proj",
}
ADAMW = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "clip_grad": 0.3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-4,
}
PAIRS = {"lora_rank": RANK, "lora_alpha": ALPHA}
# Loss, gradients and, after the update, weights by our names.
Tuned = tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]


def our_name(name: str) -> str:
    parts = name.replace(".default", "").split(".")
    place = parts.index("layers")
    kind = {"self_attn": "attention", "linear_attn": "linear_attention", "mlp": "mlp"}[
        parts[place + 2]
    ]
    of_states = {
        theirs.rpartition(".")[2]: ours.rpartition(".")[2] for ours, theirs in STATE_MODULES.items()
    }
    ours = {**of_states, **{theirs: ours for ours, theirs in MODULES.items()}}[parts[place + 3]]
    return ".".join(["layers", parts[place + 1], kind, ours, *parts[place + 4 :]])


def peft_of(
    name: str, targets: str, patch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """Return our flags, the initial weights, and the results of each step of peft with torch's
    AdamW.
    """
    torch.manual_seed(0)
    names = list(MODULES) if targets == "all" else targets.split(",")
    with float32_is_float64(patch):
        base = MODELS[name]().to(torch.float64)
        base.config._attn_implementation = base.config._experts_implementation = "eager"
        with torch.no_grad():
            for key, parameter in base.named_parameters():
                parameter.normal_(1.0 if "norm" in key and key.endswith("weight") else 0.0, 0.2)
        content = base.config.to_dict()
        architecture = of_config(content)
        values = architecture.values(content)
        theirs = Joined(Tensors(dict(base.state_dict())))
        frozen = Mapped(
            theirs, architecture.links(values, architecture.layout_of(theirs.infos)), to_ours=True
        )
        weights = {key: whole(frozen, key).clone() for key in frozen.infos}
        modules = [{**MODULES, **STATE_MODULES}[name] for name in names]
        wanted = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules)
        model = peft.get_peft_model(base, wanted).to(torch.float64)
        trained = {our_name(key): p for key, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for parameter in trained.values():
                parameter.normal_(0.0, 0.2)
        weights |= {key: p.detach().clone() for key, p in trained.items()}
        settings = {
            "betas": (0.9, 0.95),
            "eps": ADAMW["adam_eps"],
            "weight_decay": ADAMW["weight_decay"],
        }
        adamw = torch.optim.AdamW(trained.values(), lr=ADAMW["lr"], **settings)
        steps = []
        for _ in range(STEPS):
            logits = model(input_ids=torch.from_numpy(row().tokens)[None]).logits[0]
            loss = F.cross_entropy(logits, torch.from_numpy(row().labels))
            loss.backward()
            gradients = {key: p.grad.numpy().copy() for key, p in trained.items()}
            torch.nn.utils.clip_grad_norm_(trained.values(), ADAMW["clip_grad"])
            adamw.step()
            adamw.zero_grad()
            steps.append(
                (
                    loss.item(),
                    gradients,
                    {key: p.detach().numpy().copy() for key, p in trained.items()},
                )
            )
    return values, weights, steps


def ours(
    rank: int,
    world_size: int,
    shape: dict[str, int],
    values: dict[str, Any],
    weights: dict[str, torch.Tensor],
) -> list[tuple[float, Pieces, Pieces]]:
    if values["num_experts"]:
        shape = {**shape, "ep": shape.get("tp", 1)}
        values = {**values, "sequence_parallel": "tp" in shape}
    axes = {flag: shape.get(axis, 1) for axis, flag in AXIS_FLAGS.items()}
    run = {"seq_length": TOKENS, "dtype": "float64", "global_batch_size": 1}
    model = ParallelModel(
        with_values(RunConfig(), {**values, **axes, **ADAMW, **run}), grid(**shape)
    )
    for chunk in model.chunks:
        fill(chunk, weights)
    steps = []
    for step in range(1, STEPS + 1):
        loss = model.gradients([row()], step, float(TOKENS))
        found = pieces_of_slices(model.parameters.gradient_slices())
        model.optimizer.step(ADAMW["lr"])
        held = pieces_of_slices(model.parameters.parameters_held())
        steps.append(
            (loss, found, {key: piece for key, piece in held.items() if ".lora_" in key[0]})
        )
    return steps


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *(
            ("qwen3", "all"),
            ("llama 3 with biases", "q,v"),
            ("olmo2", "k,output,up"),
            ("olmoe", "q,output"),
        ),
        ("qwen3_5_text", ",".join(STATE_MODULES)),
    ],
)
@pytest.mark.slow
def test_loss_gradients_and_steps_are_those_of_peft(
    name: str, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, weights, expected = peft_of(name, targets, monkeypatch)
    values |= PAIRS | {"lora_targets": targets}
    for shape in ({}, {"tp": 2}):
        results = (
            run_ranks(ours, 2, shape, values, weights)
            if shape
            else [ours(0, 1, shape, values, weights)]
        )
        for step, (loss, gradients, after) in enumerate(expected):
            for rank in results:
                assert abs(rank[step][0] - loss) <= 1e-10 * loss
            for found, theirs in ((1, gradients), (2, after)):
                summed = assemble([rank[step][found] for rank in results])
                assert summed.keys() == theirs.keys()
                for key, value in theirs.items():
                    assert np.abs(summed[key] - value).max() <= 1e-10 * np.abs(value).max(), (
                        step,
                        key,
                    )


DROPPED = {"lora_targets": "all", "lora_dropout": 0.3}


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": True, "recompute_granularity": "selective"}),
        (
            {"cp": 2},
            {
                "cp_comm_type": "kv_exchange",
                "cp_layout": "balanced",
                "recompute_granularity": "full",
            },
        ),
        ({"pp": 2}, {}),
    ],
)
def test_dropout_of_pairs_has_the_bits_of_one_process_on_every_grid(
    shape: dict[str, int], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, weights, _ = peft_of("llama 2", "all", monkeypatch)
    values |= PAIRS | DROPPED
    expected = ours(0, 1, {}, values, weights)
    assert expected[0][0] != ours(0, 1, {}, {**values, "lora_dropout": 0.0}, weights)[0][0]
    results = run_ranks(ours, 2, shape, {**values, **flags}, weights)
    for step, (loss, *found) in enumerate(expected):
        for rank in results:
            assert abs(rank[step][0] - loss) <= 1e-10 * loss
        for number, pieces in enumerate(found, 1):
            summed, want = assemble([rank[step][number] for rank in results]), assemble([pieces])
            assert summed.keys() == want.keys()
            for key, value in want.items():
                assert np.abs(summed[key] - value).max() <= 1e-10 * np.abs(value).max(), (step, key)


def trained_checkpoint(name: str, folder: Path, targets: str) -> Path:
    """Save a library model in `hf` and a checkpoint of it with random pairs in `run`; return the
    latter.
    """
    save(name, folder / "hf", torch.float64)
    content = json.loads((folder / "hf" / "config.json").read_text())
    values = of_config(content).values(content)
    config = with_values(
        RunConfig(),
        {
            **{**values, **PAIRS, "lora_targets": targets, "hf_model_type": content["model_type"]},
            **{"dtype": "float64", "save": str(folder / "run")},
        },
    )
    model = ParallelModel(config, grid())
    source = Mapped(
        of_config(content).opened(Tensors(_tensors(folder / "hf" / "model.safetensors"))),
        of_config(content).links(values),
        to_ours=True,
    )
    weights = {key: whole(source, key) for key in source.infos}
    generator = torch.Generator().manual_seed(1)
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            for piece in parameter.megacp_spec.pieces:  # type: ignore[attr-defined]
                shape = piece.global_shape
                weights.setdefault(
                    piece.name, torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
                )
        fill(chunk, weights)
    return runs.save(model, RunState(step=1, base="base"), config).parent


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *(("qwen3 tied", "all"), ("phi3", "q,v,gate,up,down"), ("molmo2 native", "q,output,up")),
        *(("qwen3_5_moe_text", "gate,up,down"), ("mixtral", "q,up"), ("gpt_oss", "v,gate,down")),
        *(("glm4_moe", "all"), ("glm4_moe", "gate,q"), ("qwen3_moe", "gate,up,down,v")),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.*keys did not match any targeted module"
)  # peft looks for parameters elsewhere
@pytest.mark.slow
def test_peft_loads_the_adapter_and_computes_what_the_folded_model_does(
    name: str, targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    run = trained_checkpoint(name, tmp_path, targets)
    flags = ["--from", "megacp", "--input", str(run)]
    assert convert([*flags, "--to", "peft", "--output", str(tmp_path / "adapter")]) == 0
    assert convert([*flags, "--to", "hf", "--output", str(tmp_path / "folded"), "--verify"]) == 0
    auto = (
        transformers.AutoModelForImageTextToText
        if "molmo2" in name
        else transformers.AutoModelForCausalLM
    )
    tokens = torch.arange(2, 30)[None]
    base, merged = (
        auto.from_pretrained(tmp_path / which, dtype=torch.float64) for which in ("hf", "folded")
    )
    with float32_is_float64(monkeypatch):
        base.config._experts_implementation = merged.config._experts_implementation = "eager"
        plain, expected = (model.eval()(input_ids=tokens).logits for model in (base, merged))
        tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        found = tuned(input_ids=tokens).logits
    held = {key for key in tuned.state_dict() if ".lora_" in key}
    assert len(held) == len(_tensors(tmp_path / "adapter" / "adapter_model.safetensors")), (
        "peft has made more pairs"
    )
    assert (plain - expected).abs().max() > 0.01
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["base_model_name_or_path"]) == (
        RANK,
        ALPHA,
        "base",
    )


RANKED = [
    "--lora-rank",
    "4",
    "--lora-targets",
    "all",
    "--global-batch-size",
    "4",
    "--seq-length",
    "64",
]
SHARDED = ["--data-parallel-sharding-strategy", "optim_grads_params"]
GRIDS = {
    "one process": (1, []),
    "tp x pp": (4, runs.grid_flags(tp=2, pp=2)),
    "cp, all sharded": (2, [*runs.grid_flags(cp=2), *SHARDED]),
}
SEEN: dict[str, dict[str, torch.Tensor]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "tiny"
    torch.manual_seed(0)
    MODELS["qwen3 tied"]().to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.slow
def test_a_run_from_a_folder_begins_with_its_bits_and_the_same_pairs_on_any_grid(
    name: str, folder: Path, tmp_path: Path
) -> None:
    """Train a step with learning rate 0. This finds a matrix A that depends on the rank, or that
    the folder's weights overwrite.
    """
    ranks, flags = GRIDS[name]
    start = [
        "--load-hf",
        str(folder),
        "--save",
        str(tmp_path / "run"),
        "--lr",
        "0",
        "--train-iters",
        "1",
    ]
    trained([*start, *RANKED, *flags], ranks)
    found, base = weights_of(tmp_path / "run"), read_hf(folder).source
    for key in base.infos:
        assert torch.equal(found[key], whole(base, key)), key
    pairs = {key: value for key, value in found.items() if key not in base.infos}
    assert len(pairs) == 3 * 7 * 2
    for key, value in pairs.items():
        if key.endswith("lora_B.weight"):
            assert not value.any()
        else:
            bound = value.shape[1] ** -0.5
            assert (
                value.shape[0] == 4 and 0.8 * bound < value.abs().max() <= 1.01 * bound
            )  # in bfloat16
            assert 0.5 * bound < value.float().std() < 0.65 * bound
    first = SEEN.setdefault("pairs", pairs)
    assert first.keys() == pairs.keys() and all(
        torch.equal(first[key], pairs[key]) for key in pairs
    )


def refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert train(flags) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_pairs_goes_on_on_another_grid_and_leaves_the_model_as_it_was(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = str(tmp_path / "run"), str(tmp_path / "base")
    steps = (
        "--lr 0.01 --lr-decay-style constant --adam-eps 1e-4 --dtype float64 --train-iters".split()
    )
    assert train(["--load-hf", str(folder), "--save", run, *RANKED, *steps, "2"]) == 0
    kinds = [
        *(f"attention.{x}" for x in ("q", "k", "v", "output")),
        *(f"mlp.{x}" for x in ("gate", "up", "down")),
    ]
    told = f"(9.22 k trained in LoRA adapters of rank 4, alpha 4, on {', '.join(kinds)}) in float64"
    assert told in capsys.readouterr().out
    before = weights_of(tmp_path / "run")
    rows = ["--global-batch-size", "4", "--seq-length", "64"]
    go_on = ["--load", run, "--save", run, *rows, *steps, "4"]
    trained([*go_on, *runs.grid_flags(tp=2), *SHARDED], 2)
    assert (
        train(["--load-hf", str(folder), "--save", str(tmp_path / "whole"), *RANKED, *steps, "4"])
        == 0
    )
    after, whole_run, start = (
        weights_of(tmp_path / "run"),
        weights_of(tmp_path / "whole"),
        read_hf(folder).source,
    )
    assert all(torch.equal(after[key], whole(start, key).double()) for key in start.infos), (
        "the model has not moved"
    )
    moved = [key for key in after if ".lora_" in key and not torch.equal(after[key], before[key])]
    assert len(moved) == 42
    assert all(
        (after[key] - whole_run[key]).abs().max() <= 1e-10 * whole_run[key].abs().max()
        for key in moved
    )
    assert "has --lora-rank 4, but this run has 8" in refused([*go_on, "--lora-rank", "8"], capsys)
    tune = ["--load", run, "--finetune", "--save", str(tmp_path / "x"), *rows]
    assert "has --lora-rank 4, but this run has 0" in refused([*tune, "--lora-rank", "0"], capsys)
    assert (
        convert(
            [
                "--from",
                "hf",
                "--to",
                "megacp",
                "--dtype",
                "float64",
                "--input",
                str(folder),
                "--output",
                base,
            ]
        )
        == 0
    )
    assert "has --lora-rank 0, but this run has 4" in refused(
        ["--load", base, "--save", base, *RANKED], capsys
    )
    assert (
        train(["--load", base, "--finetune", "--save", str(tmp_path / "y"), *RANKED, *steps, "2"])
        == 0
    )
    begun = weights_of(tmp_path / "y")
    assert begun.keys() == before.keys() and all(
        torch.equal(begun[key], before[key]) for key in begun
    )
    capsys.readouterr()
    flags = ["--from", "megacp", "--to", "peft", "--output", str(tmp_path / "z"), "--input"]
    assert convert([*flags, base]) == 2
    assert "has no LoRA adapters" in capsys.readouterr().err
    assert convert([*flags, run]) == 0
    content = json.loads((tmp_path / "z" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == str(
        folder
    )  # though it was resumed without --load-hf


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3 tied", "all"),
        ("phi3", "q,k,v,gate,up"),
        ("phi3", "q,k,gate,up"),
        ("qwen3_moe", "all"),
        ("gpt_oss", "gate,up"),
    ],
)
@pytest.mark.slow
def test_a_run_starts_with_the_pairs_of_an_adapter(
    name: str, targets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For joined linears, an adapter has one pair: ours joined, or a single pair by peft."""
    run, adapter, hf = (
        trained_checkpoint(name, tmp_path, targets),
        tmp_path / "adapter",
        str(tmp_path / "hf"),
    )
    assert (
        convert(["--from", "megacp", "--to", "peft", "--input", str(run), "--output", str(adapter)])
        == 0
    )
    flags = [
        "--load-hf",
        hf,
        "--load-adapter",
        str(adapter),
        "--dtype",
        "float64",
        "--lr",
        "0",
        "--train-iters",
        "1",
    ]
    flags += ["--global-batch-size", "4", "--seq-length", "64", "--save"]
    assert train([*flags, str(tmp_path / "a")]) == 0
    begun, want = weights_of(tmp_path / "a"), weights_of(run)
    assert begun.keys() == want.keys() and all(torch.equal(begun[key], want[key]) for key in want)
    assert f"--load-adapter {adapter} corresponds to --lora-rank 3" in refused(
        [*flags, "x", "--lora-rank", "8"], capsys
    )
    path = adapter / "adapter_config.json"
    content = json.loads(path.read_text())
    if name == "phi3":  # as in peft: one pair with the rank of the other pairs
        pairs = _tensors(adapter / "adapter_model.safetensors")
        one = {}
        for key, x in pairs.items():
            one[key] = (
                x[:RANK].contiguous() if "lora_A" in key else torch.randn(len(x), RANK).double()
            )
        save_file(one, adapter / "adapter_model.safetensors")
        path.write_text(json.dumps(content | {"rank_pattern": {}, "alpha_pattern": {}}))
        assert train([*flags, str(tmp_path / "b")]) == 0
        begun, stem = weights_of(tmp_path / "b"), "layers.0.attention"
        down, up = (
            one[f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{end}.weight"]
            for end in "AB"
        )
        assert torch.equal(begun[f"{stem}.q.lora_A.weight"], down)
        assert not {f"{stem}.{part}.lora_A.weight" for part in "kv"} & begun.keys(), (
            "they share that of q"
        )
        assert torch.equal(torch.cat([begun[f"{stem}.{part}.lora_B.weight"] for part in "qkv"]), up)


REFUSED: dict[str, Any] = {
    **{
        "use_dora": True,
        "bias": "all",
        "lora_bias": True,
        "fan_in_fan_out": True,
        "use_qalora": True,
    },
    **{
        "modules_to_save": ["embed_tokens"],
        "layers_to_transform": 0,
        "layer_replication": [[0, 2], [1, 3]],
    },
    **{
        "alora_invocation_tokens": [5],
        "trainable_token_indices": [3],
        "target_parameters": ["q_proj.weight"],
    },
    **dict.fromkeys(
        ("use_bdlora", "monteclora_config", "arrow_config", "kasa_config", "megatron_config"),
        {"k": 1},
    ),
    **{"velora_config": {"num_groups": 4}},
}
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    **{
        kind: {"init_lora_weights": kind}
        for kind in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga")
    },
    "q_proj has a pair": {"target_modules": ["v_proj"]},
    "k_proj has no pair": {"target_modules": ["q_proj", "k_proj", "v_proj"]},
    "v_proj has a pair": {"exclude_modules": r".*1\.self_attn\.v_proj"},
    "rank 4": {"rank_pattern": {"q_proj": 2}},
    "from_tomorrow": {"from_tomorrow": 1},
}


def tuned(folder: Path, name: str = "llama 2", **more: Any) -> tuple[Any, Any]:
    """Return a random float64 model, and the same model with an adapter in `folder`, loaded by
    peft.
    """
    torch.manual_seed(0)
    base = MODELS[name]().double().eval()
    wanted = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **more}
    model = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", **wanted)
    )
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return base, peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)


def merged(folder: Path, base: Any) -> dict[str, torch.Tensor]:
    """Return the library's weights of a model with our merge of the adapter in `folder`."""
    content = base.config.to_dict()
    values = of_config(content).values(content)
    links = of_config(content).links(values)
    adapter, ours = (
        Adapter(folder, of_config(content), values),
        Mapped(Tensors(base.state_dict()), links, to_ours=True),
    )
    both = Together({name: (source, name) for source in (ours, adapter) for name in source.infos})
    back = Mapped(
        folded(both, with_values(RunConfig(), values | adapter.flags))[0], links, to_ours=False
    )
    return {name: whole(back, name) for name in back.infos}


EACH = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
BESIDE = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
OF_EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"target_parameters": EACH, "target_modules": ["q_proj"]}),
    ("qwen3_5_moe_text", {"target_parameters": EACH[:1], "target_modules": None}),
    (
        "glm4_moe",
        {
            "target_parameters": [*EACH, *BESIDE],
            "target_modules": ["q_proj"],
            "alpha_pattern": {BESIDE[0]: 3},
        },
    ),
    (
        "gpt_oss",
        {"target_parameters": EACH, "target_modules": ["o_proj"], "alpha_pattern": {EACH[1]: 3}},
    ),
]


@pytest.mark.parametrize(("name", "more"), OF_EXPERTS)
@pytest.mark.filterwarnings("ignore")
def test_pairs_that_peft_has_made_for_experts_are_read_as_it_merges_them(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Gate and up share one pair, and its A becomes the A of both; B is ordered by rank, A by
    expert.
    """
    base, model = tuned(tmp_path, name, **more)
    content = base.config.to_dict()
    family = of_config(content)
    values = family.values(content)
    links = family.links_of_modules(values)
    before, after = (
        Mapped(family.opened(Tensors(dict(x.state_dict()))), links, to_ours=True)
        for x in (base, model.merge_and_unload())
    )
    adapter = Adapter(tmp_path, family, values)
    both = Together({name: (source, name) for source in (before, adapter) for name in source.infos})
    found, _, pairs = folded(both, with_values(RunConfig(), values | adapter.flags))
    assert any(".experts." in key for key in adapter.infos)
    for key in after.infos:
        torch.testing.assert_close(whole(found, key), whole(after, key), rtol=1e-12, atol=1e-12)
    (tmp_path / "again").mkdir()
    assert pairs is not None and write_adapter(
        pairs, family, values, tmp_path / "again", None, None
    )
    loaded = (
        peft.PeftModel.from_pretrained(base, tmp_path / "again").merge_and_unload().state_dict()
    )
    for key, value in model.get_base_model().state_dict().items():
        torch.testing.assert_close(loaded[key], value, rtol=1e-12, atol=1e-12)
    path = tmp_path / "again" / "adapter_config.json"
    said = json.loads(path.read_text())
    experts = [name for name in said["target_parameters"] if name.endswith(tuple(EACH))]
    modules = [
        name.removesuffix(".weight") for name in said["target_parameters"] if name not in experts
    ]
    older = {
        "target_modules": [*modules, *(said["target_modules"] or ())],
        "target_parameters": experts,
    }
    for content in (said, said | older):
        path.write_text(json.dumps(content))
        again = Adapter(tmp_path / "again", family, values)
        assert again.infos == adapter.infos
        assert all(torch.equal(whole(again, key), whole(adapter, key)) for key in adapter.infos)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"alpha_pattern": {"q_proj": 64, "layers.1.self_attn.v_proj": 1.3, ".*v_proj": 2}},
        {"use_rslora": True, "alpha_pattern": {r"layers\.\d.self_attn.q_proj": 3}},
        {
            "target_modules": r".*\.(q|v|gate)_proj",
            "exclude_modules": ["gate_proj"],
            "init_lora_weights": "orthogonal",
        },
        {"target_modules": "all-linear", "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_an_adapter_answers_as_with_peft(more: dict[str, Any], tmp_path: Path) -> None:
    base, model = tuned(tmp_path, **more)
    tokens = torch.arange(2, 30)[None]
    plain, expected = base(tokens).logits, model(tokens).logits
    base.load_state_dict(merged(tmp_path, base))
    assert (plain - expected).abs().max() > 0.01
    assert (base(tokens).logits - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.filterwarnings("ignore")
def test_what_is_more_than_pairs_is_refused_by_its_name(tmp_path: Path) -> None:
    """The test lists the fields of the installed peft.

    A new field requires a decision to read, ignore or refuse it.
    """
    base, _ = tuned(tmp_path)
    path = tmp_path / "adapter_config.json"
    content = json.loads(path.read_text())
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == {
        *READ,
        *HARMLESS,
        *REFUSED,
    }
    for named, more in (
        {name: {name: value} for name, value in REFUSED.items()} | CONTRADICTIONS
    ).items():
        path.write_text(json.dumps(content | more))
        with pytest.raises(ValueError, match=named):
            merged(tmp_path, base)
    tuned(tmp_path, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="lm_head"):
        merged(tmp_path, base)
