"""Low-rank pairs against peft: loss, gradients and weights over AdamW steps, and what peft loads of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacp.commands.convert import main as convert
from megacp.config.run import RunConfig, with_values
from megacp.convert.tables.architectures import LAYOUTS, of_config
from megacp.convert.tables.mapping import Mapped, whole
from megacp.training.state import Progress
from megacp.training.step import ParallelModel
from tests.convert.models import MODELS, save
from tests.convert.test_exact import TOKENS, Tensors, float32_is_float64, row
from tests.ranks import grid, run_ranks
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
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.3, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-4}
PAIRS = {"lora_rank": RANK, "lora_alpha": ALPHA}
Tuned = tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]
"""Loss, gradients and, after the update, weights by our names."""


def our_name(name: str) -> str:
    """Of a matrix in peft's model."""
    parts = name.replace(".default", "").split(".")
    place = parts.index("layers")
    kind = {"self_attn": "attention", "mlp": "mlp"}[parts[place + 2]]
    ours = {theirs: ours for ours, theirs in MODULES.items()}[parts[place + 3]]
    return ".".join(["layers", parts[place + 1], kind, ours, *parts[place + 4 :]])


def peft_of(name: str, targets: str, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """Our values, all weights at the start, and what each of the steps of peft and torch's AdamW makes."""
    torch.manual_seed(0)
    names = list(MODULES) if targets == "all" else targets.split(",")
    with float32_is_float64(patch):
        base = MODELS[name]().to(torch.float64)
        base.config._attn_implementation = "eager"
        with torch.no_grad():
            for key, parameter in base.named_parameters():
                parameter.normal_(1.0 if "norm" in key and key.endswith("weight") else 0.0, 0.2)
        content = base.config.to_dict()
        architecture = of_config(content)
        values = architecture.values(content)
        frozen = Mapped(Tensors(dict(base.state_dict())), architecture.links(values, LAYOUTS[0]), to_ours=True)
        weights = {key: whole(frozen, key).clone() for key in frozen.infos}
        wanted = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[MODULES[n] for n in names])
        model = peft.get_peft_model(base, wanted).to(torch.float64)
        trained = {our_name(key): p for key, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for parameter in trained.values():
                parameter.normal_(0.0, 0.2)
        weights |= {key: p.detach().clone() for key, p in trained.items()}
        settings = {"betas": (0.9, 0.95), "eps": ADAMW["adam_eps"], "weight_decay": ADAMW["weight_decay"]}
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
            steps.append((loss.item(), gradients, {key: p.detach().numpy().copy() for key, p in trained.items()}))
    return values, weights, steps


def ours(
    rank: int, world_size: int, shape: dict[str, int], values: dict[str, Any], weights: dict[str, torch.Tensor]
) -> list[tuple[float, Pieces, Pieces]]:
    axes = {flag: shape.get(axis, 1) for axis, flag in AXIS_FLAGS.items()}
    run = {"seq_length": TOKENS, "dtype": "float64", "global_batch_size": 1}
    model = ParallelModel(with_values(RunConfig(), {**values, **axes, **ADAMW, **run}), grid(**shape))
    for chunk in model.chunks:
        fill(chunk, weights)
    steps = []
    for step in range(1, STEPS + 1):
        loss = model.gradients([row()], step, float(TOKENS))
        found = pieces_of_slices(model.parameters.gradient_slices())
        model.optimizer.step(ADAMW["lr"])
        held = pieces_of_slices(model.parameters.parameters_held())
        steps.append((loss, found, {key: piece for key, piece in held.items() if ".lora_" in key[0]}))
    return steps


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3", "all"), ("llama 3 with biases", "q,v"), ("olmo2", "k,output,up")]
)
def test_loss_gradients_and_steps_are_those_of_peft(name: str, targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a scale left out of a gradient, a pair on another linear, and a frozen weight that is clipped."""
    values, weights, expected = peft_of(name, targets, monkeypatch)
    values |= PAIRS | {"lora_targets": targets}
    for shape in ({}, {"tp": 2}):
        results = run_ranks(ours, 2, shape, values, weights) if shape else [ours(0, 1, shape, values, weights)]
        for step, (loss, gradients, after) in enumerate(expected):
            for rank in results:
                assert abs(rank[step][0] - loss) <= 1e-10 * loss
            for found, theirs in ((1, gradients), (2, after)):
                summed = assemble([rank[step][found] for rank in results])
                assert summed.keys() == theirs.keys()
                for key, value in theirs.items():
                    assert np.abs(summed[key] - value).max() <= 1e-10 * np.abs(value).max(), (step, key)


def trained_checkpoint(name: str, folder: Path, targets: str) -> Path:
    """A library model in `hf`, and in `run` a checkpoint of it with random pairs; the latter."""
    save(name, folder / "hf", torch.float64)
    content = json.loads((folder / "hf" / "config.json").read_text())
    values = of_config(content).values(content)
    config = with_values(
        RunConfig(),
        {
            **{**values, **PAIRS, "lora_targets": targets, "hf_model_type": content["model_type"]},
            **{"dtype": "float64", "save": str(folder / "run"), "load_hf": "base"},
        },
    )
    model = ParallelModel(config, grid())
    source = Mapped(
        Tensors(_tensors(folder / "hf" / "model.safetensors")),
        of_config(content).links(values, LAYOUTS[0]),
        to_ours=True,
    )
    weights = {key: whole(source, key) for key in source.infos}
    generator = torch.Generator().manual_seed(1)
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            for piece in parameter.megacp_spec.pieces:  # type: ignore[attr-defined]
                shape = piece.global_shape
                weights.setdefault(piece.name, torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2)
        fill(chunk, weights)
    return runs.save(model, Progress(step=1), config).parent


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3 tied", "all"), ("phi3", "q,v,gate,up,down"), ("molmo2 native", "q,output,up")]
)
def test_peft_loads_the_adapter_and_computes_what_the_folded_model_does(
    name: str, targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch pairs in another order than joined linears, a lost alpha, and names that peft leaves out."""
    import transformers

    run = trained_checkpoint(name, tmp_path, targets)
    flags = ["--from", "megacp", "--input", str(run)]
    assert convert([*flags, "--to", "peft", "--output", str(tmp_path / "adapter")]) == 0
    assert convert([*flags, "--to", "hf", "--output", str(tmp_path / "folded"), "--verify"]) == 0
    auto = transformers.AutoModelForImageTextToText if "molmo2" in name else transformers.AutoModelForCausalLM
    tokens = torch.arange(2, 30)[None]
    with float32_is_float64(monkeypatch):
        base, merged = (auto.from_pretrained(tmp_path / which, dtype=torch.float64) for which in ("hf", "folded"))
        plain, expected = (model.eval()(input_ids=tokens).logits for model in (base, merged))
        tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        found = tuned(input_ids=tokens).logits
    held = {key for key in tuned.state_dict() if ".lora_" in key}
    assert len(held) == len(_tensors(tmp_path / "adapter" / "adapter_model.safetensors")), "peft has made more pairs"
    assert (plain - expected).abs().max() > 0.01
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["base_model_name_or_path"]) == (RANK, ALPHA, "base")
