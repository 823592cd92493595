"""Adapters on disk, one pair of matrices per expert, and stock PEFT reading them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from adapter_cases import OPTIONS, checkpoint, largest_difference, model_of, stock_adapter, stock_merge
from amx_sft_moe import ArgumentError, adapters
from amx_sft_moe.adapters import files
from models import EXPERTS, add_lora, base_model, batch
from test_peft import without_our_place_in_peft


def loss(model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**batch()).loss


@pytest.mark.filterwarnings("ignore:.*(rank|alpha)_pattern keys did not match")  # PEFT about its own conversion
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"lora_alpha": 5},
        {"target_modules": None},
        {"target_modules": r".*self_attn\.[qk]_proj"},
        {"target_modules": ["model.layers.1.self_attn.o_proj"]},
        {"target_parameters": EXPERTS[:1]},
        {"target_parameters": EXPERTS[1:]},
        {"rank_pattern": {".*experts.down_proj": 6, "v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {".*experts.gate_up_proj": 3}},
        {"rank_pattern": {r".*layers\.1\.mlp\.experts\.(down|gate_up)_proj": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["grouped_mm", "amx_sft_moe"])
def test_stock_peft_reads_it_back(options: dict[str, Any], implementation: str, tmp_path: Path) -> None:
    trained = add_lora(base_model("amx_sft_moe"), **options)
    expected = loss(trained)
    assert not torch.allclose(expected, loss(base_model("eager"))), "the adapter must matter"
    assert adapters.save_per_expert(trained, tmp_path / "adapter") == tmp_path / "adapter"
    if implementation == "grouped_mm":
        with without_our_place_in_peft():
            loaded = PeftModel.from_pretrained(base_model(implementation), tmp_path / "adapter")
            found = loss(loaded)
    else:
        found = loss(PeftModel.from_pretrained(base_model(implementation), tmp_path / "adapter"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_layout(tmp_path: Path) -> None:
    trained = add_lora(base_model("amx_sft_moe"))
    adapters.save_per_expert(trained, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    state = load_file(tmp_path / "adapter_model.safetensors")
    assert len(state) == 3 * (2 * 2 + 6 * 3 * 2)
    prefix = "base_model.model.model.layers.1"
    q = trained.base_model.model.model.layers[1].self_attn.q_proj
    assert torch.equal(state[f"{prefix}.self_attn.q_proj.lora_A.weight"], q.lora_A.default.weight)
    down = trained.base_model.model.model.layers[1].mlp.experts
    gate_up = down.base_layer
    a = gate_up.lora_A.default.weight.reshape(6, 4, 32)
    b = gate_up.lora_B.default.weight.reshape(48, 4, 6)
    for expert in range(6):
        key = f"{prefix}.mlp.experts.{expert}"
        assert torch.equal(state[f"{key}.gate_proj.lora_A.weight"], a[expert])
        assert torch.equal(state[f"{key}.up_proj.lora_A.weight"], a[expert])
        assert torch.equal(state[f"{key}.gate_proj.lora_B.weight"], b[:24, :, expert])
        assert torch.equal(state[f"{key}.up_proj.lora_B.weight"], b[24:, :, expert])
        both = state[f"{key}.down_proj.lora_B.weight"] @ state[f"{key}.down_proj.lora_A.weight"]
        torch.testing.assert_close(2 * both, down.get_delta_weight("default")[expert])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_parameters"]) == (4, 8, None)
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj", "v_proj"]
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["inference_mode"] is True
    assert (
        trained.peft_config["default"].target_parameters == set(EXPERTS)
        or trained.peft_config["default"].target_parameters == EXPERTS
    ), "the model's own configuration stays"


def test_saved_again_after_loading(tmp_path: Path) -> None:
    trained = add_lora(base_model("amx_sft_moe"))
    adapters.save_per_expert(trained, tmp_path / "first")
    loaded = PeftModel.from_pretrained(base_model("amx_sft_moe"), tmp_path / "first", is_trainable=True)
    adapters.save_per_expert(loaded, tmp_path / "second")
    again = PeftModel.from_pretrained(base_model("grouped_mm"), tmp_path / "second")
    torch.testing.assert_close(loss(again), loss(trained), rtol=1e-5, atol=1e-6)


def loaded_again(folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(base_model("amx_sft_moe"), folder, is_trainable=True)


def rank_of_gate_up(model: PeftModel) -> int:
    return model.base_model.model.model.layers[0].mlp.experts.base_layer.r["default"]


def train_a_step(model: PeftModel) -> None:
    model.train()(**batch()).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


@pytest.mark.filterwarnings("ignore:.*(rank|alpha)_pattern keys did not match")
def test_a_rank_that_doubles_each_time_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = add_lora(base_model("amx_sft_moe"), rank_pattern={r".*\.gate_up_proj": 8})
    adapters.save_per_expert(trained, tmp_path / "wished for")
    adapters.save_per_expert(add_lora(base_model("amx_sft_moe")), tmp_path / "first")
    model = loaded_again(tmp_path / "first")
    adapters.save_per_expert(model, tmp_path / "untouched")
    assert caplog.text == ""
    train_a_step(model)
    adapters.save_per_expert(model, tmp_path / "second")
    assert f"{tmp_path / 'second'}: gate and up of rank 8: PEFT has put those of rank 4 into one" in caplog.text
    assert rank_of_gate_up(loaded_again(tmp_path / "second")) == 16


@pytest.mark.parametrize("way", ["PEFT's own", "converted"])
def test_training_on_without_doubling_the_rank(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained, folder = add_lora(base_model("amx_sft_moe")), tmp_path / "fused"
    if way == "converted":
        config = base_model("eager").config
        config.save_pretrained(tmp_path / "base")
        adapters.save_per_expert(trained, tmp_path / "per-expert")
        adapters.convert_adapter(tmp_path / "per-expert", folder, "peft-fused", base=tmp_path / "base")
    else:
        trained.save_pretrained(folder)
    model = loaded_again(folder)
    torch.testing.assert_close(loss(model), loss(trained), rtol=1e-5, atol=1e-6)
    train_a_step(model)
    adapters.save_per_expert(model, tmp_path / "next")
    assert rank_of_gate_up(model) == json.loads((tmp_path / "next" / files.CONFIG).read_text())["r"] == 4
    assert caplog.text == ""


def test_one_of_several_adapters(tmp_path: Path) -> None:
    model = add_lora(add_lora(base_model("amx_sft_moe")), seed=9, name="second", r=2)
    expected = loss(model)
    model.set_adapter("second")
    second = loss(model)
    assert not torch.allclose(expected, second)
    adapters.save_per_expert(model, tmp_path / "second")
    adapters.save_per_expert(model, tmp_path / "default", "default")
    for name, value in (("default", expected), ("second", second)):
        loaded = PeftModel.from_pretrained(base_model("grouped_mm"), tmp_path / name)
        torch.testing.assert_close(loss(loaded), value, rtol=1e-5, atol=1e-6)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ArgumentError, match="adapter_name"):
        adapters.save_per_expert(model, tmp_path)
    with pytest.raises(ArgumentError, match="third"):
        adapters.save_per_expert(model, tmp_path, "third")


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = add_lora(base_model("amx_sft_moe"))
    adapters.save_per_expert(trained, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(*arguments: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        adapters.save_per_expert(trained, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="PeftModel"):
        adapters.save_per_expert(base_model("eager"), tmp_path)
    with pytest.raises(ArgumentError, match="expected LoRA on fused experts"):
        adapters.save_per_expert(add_lora(base_model("eager"), target_parameters=None), tmp_path)
    with monkeypatch.context() as patch:  # PEFT would take the name for the experts' already here
        patch.setattr(
            "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers",
            lambda *a, **k: None,
        )
        ambiguous = add_lora(base_model("eager", mlp_only_layers=[0]), target_modules=["gate_proj"])
    with pytest.raises(ArgumentError, match=r"layers\.0\.mlp\.gate_proj"):
        adapters.save_per_expert(ambiguous, tmp_path)
    dora = add_lora(base_model("eager"))
    dora.peft_config["default"].use_dora = True
    with pytest.raises(ArgumentError, match="use_dora"):
        adapters.save_per_expert(dora, tmp_path)
    fused_on_disk = get_peft_model(model_of(checkpoint("gpt_oss")), LoraConfig(**OPTIONS))
    with pytest.raises(ArgumentError, match=r"mlp\.experts"):
        adapters.save_per_expert(fused_on_disk, tmp_path)
    assert not list(tmp_path.iterdir())


def test_where_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = add_lora(base_model("eager"))
    with pytest.raises(ArgumentError, match=r"^directory: expected a directory, got ''$"):
        adapters.save_per_expert(trained, "")
    with pytest.raises(TypeError, match=r"^directory: expected a path, got NoneType$"):
        adapters.save_per_expert(trained, None)
    for weights in ("model.safetensors", "model-00001-of-00002.safetensors"):
        folder = tmp_path / weights.removesuffix(".safetensors")
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        adapters.save_per_expert(trained, folder)  # of a configuration alone no model is loaded
        for name in files.ADAPTER_FILES:
            (folder / name).unlink(missing_ok=True)
        (folder / weights).touch()
        with pytest.raises(
            ArgumentError, match=rf"^directory: expected .* got {folder} with .* and {weights}$"
        ):
            adapters.save_per_expert(trained, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", weights]


@pytest.mark.parametrize("family", ["mixtral", "qwen2", "deepseek"])
def test_other_families(family: str, tmp_path: Path) -> None:
    directory, merged = stock_adapter(family)
    model = PeftModel.from_pretrained(model_of(checkpoint(family)), directory)
    adapters.save_per_expert(model, tmp_path)
    assert largest_difference(stock_merge(family, tmp_path), merged) <= 1e-6


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_adapted_layers(bias: str, tmp_path: Path) -> None:
    options = {"bias": bias, "target_modules": ["q_proj"]}
    directory, merged = stock_adapter("qwen2", json.dumps(options))
    model = PeftModel.from_pretrained(model_of(checkpoint("qwen2")), directory)
    adapters.save_per_expert(model, tmp_path)
    saved = {key for key in load_file(tmp_path / files.WEIGHTS) if key.endswith("bias")}
    assert saved == {key for key in load_file(directory / files.WEIGHTS) if key.endswith("bias")}
    assert any("q_proj.base_layer.bias" in key for key in saved)
    assert largest_difference(stock_merge("qwen2", tmp_path), merged) <= 1e-6


def test_an_adapter_of_another_format_goes(tmp_path: Path) -> None:
    source, merged = stock_adapter("mixtral")
    before, _ = stock_adapter("mixtral", '{"lora_alpha": 3}')
    adapters.convert_adapter(before, tmp_path, "ktransformers")
    (tmp_path / files.PICKLED).write_bytes(b"older still")
    model = PeftModel.from_pretrained(model_of(checkpoint("mixtral")), source)
    adapters.save_per_expert(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [files.CONFIG, files.WEIGHTS]
    adapters.merge_adapter(tmp_path, checkpoint("mixtral"), tmp_path / "out", progress=False)
    assert largest_difference(model_of(tmp_path / "out").state_dict(), merged) <= 1e-6


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "state.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("[]")
    trained = add_lora(base_model("eager"))
    for _ in range(2):
        adapters.save_per_expert(trained, tmp_path)
    assert (tmp_path / "checkpoint-1" / "state.json").read_text() == "{}"
    assert (tmp_path / "tokenizer.json").read_text() == "[]"
    assert len(list(tmp_path.iterdir())) == 4
    assert [path.name for path in tmp_path.parent.iterdir() if "partial" in path.name] == []
