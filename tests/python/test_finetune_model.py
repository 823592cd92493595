"""The model of a fine-tuning run: what is adapted beside its experts, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from amx_sft_moe.adapters.base import BaseModel
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.finetune import hook, model, stages
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.finetune.options import parse
from amx_sft_moe.finetune.terminal import Terminal
from amx_sft_moe.finetune.tokenizer import train_tokenizer
from checkpoint_folders import E, H, I, K, edit_config, make, write
from composite_models import make as make_composite


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("glm4_moe", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("deepseek_v3", ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]),
        ("gpt_oss", ["k_proj", "o_proj", "q_proj", "v_proj"]),
    ],
)
def test_attention_is_found_by_where_it_stands(family, expected):
    found = make(family, torch.float32)
    assert model.attention_targets(found) == expected
    assert model.expert_sizes(found) == model.ExpertSizes(E, H, I, K)


def test_a_router_a_dense_mlp_and_a_vision_tower_are_not_attention():
    found = make_composite("gemma4", pad_token_id=0)
    targets = model.attention_targets(found)
    kinds = {"k_proj", "o_proj", "q_proj", "v_proj"}
    path = "model.language_model.layers"
    assert targets == sorted(f"{path}.{n}.self_attn.{kind}" for n in (0, 1) for kind in kinds)
    adapted = model.add_adapter(found, 2, 4.0, 0)
    trained = {name.partition(".lora_")[0] for name, each in adapted.named_parameters() if each.requires_grad}
    attention = {name for name in trained if "experts" not in name}
    assert attention == {f"base_model.model.{name}" for name in targets}


def test_a_name_that_experts_have_too_is_told_in_full():
    found = make("mixtral", torch.float32)
    for layer in found.model.layers:
        layer.mlp.q_proj = torch.nn.Linear(2, 2)
    assert model.attention_targets(found) == ["k_proj", "o_proj", "self_attn.q_proj", "v_proj"]


def test_code_of_the_checkpoint_is_not_run_and_not_asked_about(tmp_path, monkeypatch):
    """As Kimi K2 is published: code for its configuration, which is not needed, and for its tokenizer."""
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    folder = write(tmp_path, "deepseek_v3", torch.bfloat16)
    train_tokenizer(["Count to 12: 0 1 2 3"], 300, 64).save_pretrained(folder)
    edit_config(folder, model_type="kimi_k2", auto_map={"AutoConfig": "code.DeepseekV3Config"})
    (folder / "code.py").write_text("raise SystemExit('run')\n")
    assert len(model.load_tokenizer(folder)) > 0
    path = folder / "tokenizer_config.json"
    code = {"auto_map": {"AutoTokenizer": ["code.Tokens", None]}, "tokenizer_class": "Tokens"}
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    with pytest.raises(
        FinetuneError, match=r"code of the checkpoint, which is not run; expected a tokenizer\.json"
    ):
        model.load_tokenizer(folder)


def test_what_peft_takes_for_experts_by_its_name_is_left_out_and_said(monkeypatch, capsys):
    """AFMoE's attention has a gate_proj: PEFT from 0.19 would make a part of gate_up_proj of it."""
    config = AutoConfig.for_model(
        "afmoe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=28,
        num_hidden_layers=3,
        num_dense_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        layer_types=["full_attention"] * 3,
    )
    found = AutoModelForCausalLM.from_config(config)
    assert "gate_proj" in dict(found.model.layers[0].self_attn.named_children())
    assert model.attention_targets(found) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    monkeypatch.setattr(model, "load_model", lambda *arguments: found)
    place = Path("checkpoint")
    out = SimpleNamespace(require_space=lambda *arguments: None)
    adapted = stages.load_adapted(parse(["--quick"]), out, stages.Base(place, place, None), Terminal(1))
    said = " ".join(capsys.readouterr().out.split())
    assert "left out self_attn.gate_proj: PEFT takes the name for an expert's, so it gets no LoRA" in said
    assert model.trained_parameters(adapted).layers == 2


def test_what_peft_refuses_is_said(monkeypatch):
    monkeypatch.setattr(model, "attention_targets", lambda found: ["w1", "q_proj"])
    with pytest.raises(FinetuneError, match="PEFT refuses LoRA on this mixtral model: "):
        model.add_adapter(make("mixtral", torch.float32), 2, 4.0, 0)


def test_a_family_whose_files_cannot_be_taken_apart_trains(monkeypatch):
    def unknown(self, key):
        raise ArgumentError("a conversion that nobody knows")

    monkeypatch.setattr(BaseModel, "place_of", unknown)
    found = make("mixtral", torch.float32)
    assert model.attention_targets(found) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert model.attention_left_out(found) == []


def test_the_users_limit_of_dumps_is_not_that_of_the_own_one(tmp_path, monkeypatch):
    """Nor does his trace get steps of a limit that is not his."""
    trace = tmp_path / "trace.json"
    monkeypatch.setenv("AMX_SFT_MOE_TRACE", str(trace))
    monkeypatch.setenv("AMX_SFT_MOE_TRACE_LIMIT", "0.001")
    found = make("qwen3_moe", torch.float32)
    ids = torch.arange(8)[None] % 8
    times = hook.backward_times(found, {"input_ids": ids, "labels": ids}, "portable", 1, tmp_path)
    assert times.groups.keys() >= {"backward_down", "backward_gate_up"}
    assert not trace.exists()
