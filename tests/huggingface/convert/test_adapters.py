"""Adapters in every usual form: peft's merge of them, the pairs that a run trains, and their
export.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.stack import pair_tensors
from megacp.engine.step.step import ParallelModel
from megacp.huggingface.convert.adapter import Adapter
from megacp.huggingface.convert.families import of_config
from megacp.huggingface.convert.lora import Pairs, folded, write_adapter
from megacp.huggingface.convert.start import Together
from megacp.huggingface.convert.tensors import Mapped, whole
from megacp.huggingface.convert_command import main as convert
from megacp.train import main as train
from tests.huggingface.convert.models import MODELS, Tensors
from tests.huggingface.convert.test_exact import TOKENS, row
from tests.ranks import grid
from tests.reference.precision import float32_is_float64
from tests.reference.sharding import assemble, fill
from tests.reference.training import pieces_of_slices

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
peft = pytest.importorskip("peft", reason="peft is not installed (extra: test)")
pytestmark = pytest.mark.filterwarnings("ignore")

STACKS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAMW = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-4,
    "clip_grad": 0.0,
}
STEPS = 3
PREFIX = "base_model.model."


def base_of(name: str) -> Any:
    """Return a random float64 model that computes experts in a loop."""
    torch.manual_seed(0)
    base = MODELS[name]().double().eval()
    base.config._experts_implementation = base.config._attn_implementation = "eager"
    return base


def made_by_peft(folder: Path, name: str, **more: Any) -> Any:
    """Return a random model, and save an adapter for it in `folder` with peft."""
    base = base_of(name)
    wanted = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6, **more})
    model = peft.get_peft_model(copy.deepcopy(base), wanted)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return base


def of_single_experts(folder: Path, name: str, words: list[str], **more: Any) -> Any:
    """Return a random model, and save an adapter with one pair per linear and expert, as peft did
    when experts were modules.
    """
    base = base_of(name)
    family, values = described(base)
    tensors = {}
    for link in family.links(values):
        module, _, end = link.theirs[0].name.rpartition(".")
        word = module.rpartition(".")[2]
        if end == "weight" and word in ("q_proj", *words):
            rows, inputs = link.theirs[0].shape
            rank = more.get("rank_pattern", {}).get(word, 4)
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, inputs).double() * 0.2
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, rank).double() * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", *words],
        **more,
    }
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return base


def described(base: Any) -> tuple[Any, dict[str, Any]]:
    """Return the family of a model and our flags for it."""
    content = base.config.to_dict()
    return of_config(content), of_config(content).values(content)


def opened(base: Any, adapter: Adapter) -> tuple[Any, Pairs]:
    """Return a model's weights by our names with an adapter merged, and its pairs."""
    family, values = described(base)
    links = family.links_of_modules(values)
    weights = Mapped(family.opened(Tensors(dict(base.state_dict()))), links, to_ours=True)
    both = Together(
        {name: (source, name) for source in (weights, adapter) for name in source.infos}
    )
    source, _, pairs = folded(both, with_values(RunConfig(), values | adapter.flags))
    assert pairs is not None
    return source, pairs


def logits_and_pairs(base: Any, folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """Return peft's logits with an adapter, the pairs that peft loaded, and the model."""
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(2, 30)[None]).logits
    return (
        logits,
        {name: x.clone() for name, x in model.state_dict().items() if ".lora_" in name},
        model,
    )


MODULES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "q and v of a hybrid": (
        "qwen3_5_text",
        {"target_modules": ["q_proj", "v_proj"]},
        ["attention.q", "attention.v"],
    ),
    "the shared expert": (
        "qwen3_5_moe_text",
        {"target_modules": ["v_proj", *MLP]},
        ["attention.v", "shared.gate", "shared.up", "shared.down"],
    ),
    "all linears of a hybrid": (
        "qwen3_5_text",
        {"target_modules": "all-linear"},
        [
            *("attention.q", "attention.k", "attention.v", "attention.output"),
            *(f"linear_attention.{name}" for name in ("q+k+v", "output", "z", "b", "a")),
            *("mlp.gate", "mlp.up", "mlp.down"),
        ],
    ),
    "joined linears": (
        "phi3",
        {"target_modules": ["qkv_proj", "down_proj"]},
        ["attention.q+k+v", "mlp.down"],
    ),
    "joint pairs of gate and up, of twice the rank": (
        "qwen3_moe",
        {"target_modules": ["q_proj", *MLP]},
        ["attention.q", "experts.gate+up:8:12", "experts.down"],
    ),
    "another rank on experts": (
        "qwen3_5_moe_text",
        {
            "target_modules": ["q_proj"],
            "target_parameters": STACKS,
            "rank_pattern": {".*experts.*": 7},
            "alpha_pattern": {STACKS[0]: 3},
        },
        ["attention.q", "experts.gate+up:7:6", "experts.down:7:3"],
    ),
    "another rank on experts in turns": (
        "gpt_oss",
        {"target_modules": ["k_proj"], "target_parameters": STACKS, "rank_pattern": {STACKS[0]: 2}},
        ["attention.k", "experts.gate+up", "experts.down:2:6"],
    ),
    "another rank in one layer": (
        "qwen3",
        {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2},
        },
        ["attention.q", "attention.v"],
    ),
    "other roots of ranks": (
        "qwen3",
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"v_proj": 1}},
        ["attention.q", "attention.v:1:6"],
    ),
}
SINGLE: dict[str, tuple[str, list[str], dict[str, Any], list[str]]] = {
    "of single experts": (
        "olmoe",
        MLP,
        {},
        ["attention.q", "experts.gate", "experts.up", "experts.down"],
    ),
    "of single experts by other words": (
        "mixtral",
        ["w1", "w2", "w3"],
        {},
        ["attention.q", "experts.gate", "experts.up", "experts.down"],
    ),
}


def read(folder: Path, base: Any, kinds: list[str]) -> Adapter:
    """Read an adapter; check its kinds, its pairs in a run with its flags, and the merge against
    peft's.
    """
    family, values = described(base)
    adapter = Adapter(folder, family, values)
    assert str(adapter.flags["lora_targets"]).split(",") == kinds
    config = with_values(RunConfig(), values | adapter.flags)
    assert {pair.name: pair.shape for pair in pair_tensors(config.model)} == {
        name: info.shape for name, info in adapter.infos.items()
    }
    found, _ = opened(base, adapter)
    _, _, model = logits_and_pairs(base, folder)
    merged = family.opened(Tensors(dict(model.merge_and_unload().state_dict())))
    expected = Mapped(merged, family.links_of_modules(values), to_ours=True)
    for key in expected.infos:
        torch.testing.assert_close(whole(found, key), whole(expected, key), rtol=1e-12, atol=1e-12)
    return adapter


def exports_the_same(folder: Path, base: Any, adapter: Adapter, again: Path) -> None:
    """Return whether an export without a training step gives peft the same logits and bit-identical
    pairs.
    """
    family, values = described(base)
    again.mkdir()
    write_adapter(opened(base, adapter)[1], family, values, again, None, None)
    (logits, pairs, _), (found, held, _) = (
        logits_and_pairs(base, path) for path in (folder, again)
    )
    assert (found - logits).abs().max() <= 1e-12 * logits.abs().max()
    assert held.keys() == pairs.keys()
    assert all(torch.equal(held[name], pairs[name]) for name in pairs)


@pytest.mark.parametrize("form", MODULES)
def test_an_adapter_is_read_as_peft_merges_it_and_comes_back(form: str, tmp_path: Path) -> None:
    name, more, kinds = MODULES[form]
    base = made_by_peft(tmp_path, name, **more)
    adapter = read(tmp_path, base, kinds)
    exports_the_same(tmp_path, base, adapter, tmp_path / "again")
    before, after = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "again")
    )
    assert before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )


@pytest.mark.parametrize("form", SINGLE)
def test_pairs_of_single_experts_are_read_as_peft_converts_them(form: str, tmp_path: Path) -> None:
    name, words, more, kinds = SINGLE[form]
    base = of_single_experts(tmp_path, name, words, **more)
    exports_the_same(tmp_path, base, read(tmp_path, base, kinds), tmp_path / "again")


def test_single_experts_may_have_a_rank_of_their_own(tmp_path: Path) -> None:
    """Each pair keeps its rank, although current peft cannot convert different ranks."""
    base = of_single_experts(
        tmp_path, "olmoe", MLP, rank_pattern={"up_proj": 2}, alpha_pattern={"down_proj": 3}
    )
    adapter = Adapter(tmp_path, *described(base))
    assert (
        adapter.flags["lora_targets"] == "attention.q,experts.gate,experts.up:2:6,experts.down:4:3"
    )
    found, _ = opened(base, adapter)
    pairs = load_file(tmp_path / "adapter_model.safetensors")
    family, values = described(base)
    plain = Mapped(
        family.opened(Tensors(dict(base.state_dict()))),
        family.links_of_modules(values),
        to_ours=True,
    )
    for word, scale in {"gate": 1.5, "up": 3.0, "down": 0.75}.items():
        stem = f"{PREFIX}model.layers.1.mlp.experts.4.{word}_proj.lora_"
        name = f"layers.1.mlp.experts.4.{word}.weight"
        change = scale * pairs[f"{stem}B.weight"] @ pairs[f"{stem}A.weight"]
        torch.testing.assert_close(
            whole(found, name), whole(plain, name) + change, rtol=1e-12, atol=1e-12
        )


def steps_of_peft(base: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return the pairs after some steps of peft with torch's AdamW."""
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder, is_trainable=True)
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    settings = {
        "betas": (0.9, 0.95),
        "eps": ADAMW["adam_eps"],
        "weight_decay": ADAMW["weight_decay"],
    }
    adamw = torch.optim.AdamW(trained.values(), lr=ADAMW["lr"], **settings)
    for _ in range(STEPS):
        logits = model(input_ids=torch.from_numpy(row().tokens)[None]).logits[0]
        F.cross_entropy(logits, torch.from_numpy(row().labels)).backward()
        adamw.step()
        adamw.zero_grad()
    return {name: parameter.detach() for name, parameter in trained.items()}


def steps_of_ours(base: Any, folder: Path, again: Path) -> dict[str, torch.Tensor]:
    """Return the pairs after the same steps of a run that starts from the adapter, exported and
    loaded by peft.
    """
    family, values = described(base)
    adapter = Adapter(folder, family, values)
    links = family.links_of_modules(values)
    plain = Mapped(family.opened(Tensors(dict(base.state_dict()))), links, to_ours=True)
    both = Together({name: (source, name) for source in (plain, adapter) for name in source.infos})
    run = {"seq_length": TOKENS, "dtype": "float64", "global_batch_size": 1}
    config = with_values(RunConfig(), {**values, **adapter.flags, **ADAMW, **run})
    model = ParallelModel(config, grid())
    fill(model.chunks[0], {name: whole(both, name) for name in both.infos})
    for step in range(1, STEPS + 1):
        model.gradients([row()], step, float(TOKENS))
        model.optimizer.step(ADAMW["lr"])
    after = assemble([pieces_of_slices(model.parameters.parameters_held())])
    again.mkdir()
    weights = Tensors({name: torch.from_numpy(value) for name, value in after.items()})
    write_adapter(Pairs(weights, config), family, values, again, None, None)
    return logits_and_pairs(base, again)[1]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
        ("qwen3_5_moe_text", MODULES["another rank on experts"][1]),
        ("qwen3_5_text", {"target_modules": ["v_proj", "in_proj_qkv", "in_proj_b"]}),
        (
            "qwen3",
            {
                "target_modules": ["q_proj", "v_proj"],
                "rank_pattern": {"v_proj": 2},
                "use_rslora": True,
            },
        ),
    ],
)
def test_a_run_that_continues_an_adapter_takes_the_steps_of_peft(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with float32_is_float64(monkeypatch):
        base = made_by_peft(tmp_path, name, **more)
        expected = steps_of_peft(base, tmp_path)
        found = steps_of_ours(base, tmp_path, tmp_path / "again")
    before = logits_and_pairs(base, tmp_path)[1]
    assert found.keys() == expected.keys() == before.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-10 * value.abs().max(), key
        assert (before[key] - value).abs().max() > 1e-3


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    """Rename the tensors of an adapter."""
    path = folder / "adapter_model.safetensors"
    save_file({change(name): x for name, x in load_file(path).items()}, path)


def test_an_adapter_of_the_text_model_fits_the_model_with_a_tower(tmp_path: Path) -> None:
    base = made_by_peft(
        tmp_path, "qwen3_5_text", target_modules=["q_proj", "in_proj_qkv", "up_proj"]
    )
    plain = Adapter(tmp_path, *described(base))
    family, values = described(MODELS["qwen3_5 with images"]())
    assert "model.language_model.layers.0.mlp.up_proj.weight" in {
        link.theirs[0].name for link in family.links(values)
    }
    for form in ("model.layers.", "model.language_model.layers.", "language_model.model.layers."):
        renamed(tmp_path, lambda name, form=form: f"{PREFIX}{form}" + name.partition("layers.")[2])  # type: ignore[misc]
        for kind in (described(base), (family, values)):
            adapter = Adapter(tmp_path, *kind)
            assert adapter.flags == plain.flags and adapter.infos == plain.infos
            assert all(
                torch.equal(whole(adapter, name), whole(plain, name)) for name in plain.infos
            )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda name: name.removeprefix(PREFIX),
            "without peft's prefix base_model.model.",
        ),
        (lambda name: name.replace(".model.layers", ".layers"), "the prefix 'model.' is missing"),
        (
            lambda name: name.replace("model.layers.1", "model.language_model.layers.1"),
            "names have two different prefixes",
        ),
        (lambda name: name.replace("q_proj", "query"), "q_proj has no pair"),
    ],
)
def test_a_missing_prefix_is_named(change: Callable[[str], str], told: str, tmp_path: Path) -> None:
    base = made_by_peft(tmp_path, "qwen3", target_modules=["q_proj"])
    renamed(tmp_path, change)
    with pytest.raises(ValueError, match=told):
        Adapter(tmp_path, *described(base))


def test_pairs_in_some_layers_are_refused_and_those_in_all_are_read(tmp_path: Path) -> None:
    base = made_by_peft(
        tmp_path, "qwen3", target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 1, 2]
    )
    plain = Adapter(tmp_path, *described(base))
    path = tmp_path / "adapter_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"layers_pattern": "layers"}))
    assert Adapter(tmp_path, *described(base)).infos == plain.infos
    made_by_peft(tmp_path, "qwen3", target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 2])
    told = (
        r"attention\.q has no pair in layers 1; attention\.v has no pair in layers 1 "
        r".*layers_to_transform \[0, 2\]"
    )
    with pytest.raises(ValueError, match=told):
        Adapter(tmp_path, *described(base))
    made_by_peft(tmp_path, "qwen3", target_modules=["q_proj", "v_proj"], layers_to_transform=1)
    with pytest.raises(ValueError, match="has no pair in layers 0, 2"):
        Adapter(tmp_path, *described(base))


def test_a_joined_linear_without_a_trained_pair_has_none(tmp_path: Path) -> None:
    """If only the queries of Phi-3 have pairs, the export has zero rows for keys and values."""
    base = made_by_peft(tmp_path, "phi3", target_modules=["qkv_proj"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor[48:] = 0
    save_file(tensors, path)
    adapter = read(tmp_path, base, ["attention.q"])
    exports_the_same(tmp_path, base, adapter, tmp_path / "again")


def test_pairs_that_were_joined_for_an_export_are_read_apart(tmp_path: Path) -> None:
    """Pairs on q, k and v of Phi-3 are exported as one: A stacked, B block-diagonal."""
    base = made_by_peft(tmp_path, "phi3", target_modules=["qkv_proj"], r=6, lora_alpha=9)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            rows = tensor.split([48, 24, 24])  # of q, k and v
            tensors[name] = torch.block_diag(
                *(part[:, 2 * i : 2 * i + 2] for i, part in enumerate(rows))
            )
    save_file(tensors, path)
    adapter = read(tmp_path, base, ["attention.q", "attention.k", "attention.v"])
    assert (adapter.flags["lora_rank"], adapter.flags["lora_alpha"]) == (2, 3.0)
    of_k = tensors[f"{PREFIX}model.layers.1.self_attn.qkv_proj.lora_A.weight"][2:4]
    assert torch.equal(whole(adapter, "layers.1.attention.k.lora_A.weight"), of_k)
    exports_the_same(tmp_path, base, adapter, tmp_path / "again")


def test_a_run_continues_the_pairs_of_an_adapter_and_exports_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = made_by_peft(
        tmp_path / "adapter", "qwen3_5_moe_text", target_modules=["q_proj", *MLP], lora_dropout=0.25
    )
    base.save_pretrained(tmp_path / "hf")
    start = [
        "--load-hf",
        str(tmp_path / "hf"),
        "--load-adapter",
        str(tmp_path / "adapter"),
        "--seq-length",
        "32",
    ]
    start += [
        "--lr",
        "0.01",
        "--train-iters",
        "1",
        "--global-batch-size",
        "1",
        "--adam-eps",
        "1e-4",
    ]
    assert train([*start, "--save", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "on attention.q, shared.gate, shared.up, shared.down)" in told
    assert "no LoRA adapters on linear_attention of layers 0-2 (the adapter includes none)" in told
    assert "experts are not trained: 69.1 k parameters (6 experts in each of 4 layers)" in told
    assert "lora_dropout 0.25 is ignored; set --lora-dropout" in told
    flags = [
        "--from",
        "megacp",
        "--to",
        "peft",
        "--input",
        str(tmp_path / "run"),
        "--output",
        str(tmp_path / "after"),
    ]
    assert convert(flags) == 0
    before, after = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "after")
    )
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    _, held, _ = logits_and_pairs(base, tmp_path / "after")
    assert len(held) == len(before)
    assert train([*start, "--save", str(tmp_path / "x"), "--lora-targets", "q,gate,up,down"]) == 2
    assert (
        "corresponds to --lora-rank 4 --lora-alpha 6.0 --lora-targets attention.q,shared.gate"
        in capsys.readouterr().err
    )
    kinds = "attention.q,shared.gate,shared.up,shared.down"
    assert train([*start, "--save", str(tmp_path / "y"), "--lora-targets", kinds]) == 0
