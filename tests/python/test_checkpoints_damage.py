"""Checkpoints with something missing or broken: every message names the file or the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig

from amx_sft_moe import ArgumentError
from amx_sft_moe.checkpoints import CheckpointFiles, load_model, loading
from checkpoint_folders import edit_config, write


@pytest.fixture
def own(tmp_path):
    """A checkpoint of Mixtral that a test may damage."""
    return write(tmp_path / "own", "mixtral", torch.bfloat16)


def shard_of(folder: Path, name: str) -> Path:
    return CheckpointFiles(folder).file_of(name)


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w3.weight"


class TestDamage:
    def test_no_folder(self, tmp_path):
        with pytest.raises(ArgumentError, match=r"none: expected the folder of a checkpoint"):
            load_model(tmp_path / "none")

    def test_what_is_no_folder(self, own, tmp_path, monkeypatch):
        with pytest.raises(
            ArgumentError, match=r"config.json: expected the folder of a checkpoint, got a file"
        ):
            load_model(own / "config.json")
        with pytest.raises(TypeError, match=r"^directory: expected a path, got NoneType$"):
            load_model(None)
        monkeypatch.chdir(own)
        for given in ({"directory": ""}, {"directory": own, "cache_dir": ""}):
            with pytest.raises(ArgumentError, match=rf"^{list(given)[-1]}: expected a directory, got ''$"):
                load_model(**given)

    def test_no_files(self, own):
        for file in own.glob("model*"):
            file.unlink()
        with pytest.raises(ArgumentError, match=r"expected model.safetensors or model.safetensors.index.json"):
            load_model(own)

    def test_a_missing_shard(self, own):
        shard = shard_of(own, EXPERT)
        shard.unlink()
        with pytest.raises(ArgumentError, match=f"shards by model.safetensors.index.json, got no {shard.name}"):
            load_model(own)

    @pytest.mark.parametrize("keep", [0, 4, 100, -1])
    def test_a_shard_cut_off(self, own, keep):
        shard = shard_of(own, EXPERT)
        shard.write_bytes(shard.read_bytes()[:keep])
        with pytest.raises(ArgumentError, match=f"{shard.name}: expected a whole safetensors file, got: "):
            load_model(own)

    def test_a_tensor_of_the_index_that_is_not_there(self, own):
        shard = shard_of(own, EXPERT)
        save_file({k: v for k, v in load_file(shard).items() if k != EXPERT}, shard, metadata={"format": "pt"})
        with pytest.raises(ArgumentError, match=rf"{shard.name}: expected .* got no {EXPERT}"):
            load_model(own)

    @pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "[" * 100_000])
    def test_a_damaged_index(self, own, content):
        (own / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ArgumentError, match=r"index.json: expected JSON with a weight_map"):
            load_model(own)

    @pytest.mark.parametrize(
        "name", ["../a.safetensors", "/tmp/a.safetensors", "b/a.safetensors", "..", "", 3, None]
    )
    def test_an_index_that_leads_elsewhere(self, own, name):
        (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(ArgumentError, match=r"lm_head.weight: expected the name of a file beside it, got "):
            load_model(own)

    def test_an_index_of_nothing(self, own):
        (own / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        with pytest.raises(ArgumentError, match=r"index.json: expected shards in its weight_map, got none"):
            load_model(own)

    @staticmethod
    def _without(folder: Path, lost: str) -> None:
        """Takes tensors out of the checkpoint, index and all."""
        files = CheckpointFiles(folder)
        tensors = {name: files.tensor(name).clone() for name in files if lost not in name}
        for file in folder.glob("model*"):
            file.unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    @pytest.mark.parametrize(
        ("lost", "message"),
        [
            (
                "layers.1.block_sparse_moe.experts.3.w3",
                r"1.*gate_up_proj: expected 5 experts .* got no expert 3",
            ),
            (
                "layers.0.block_sparse_moe.experts.4.w2",
                r"0.*down_proj: expected 5 experts .* got no expert 4",
            ),
            (".w1.", r"gate_up_proj: expected tensors .*w1.*, got none"),
            ("norm.weight", "expected all weights of MixtralForCausalLM, got no model.* and 4 more"),
        ],
    )
    def test_missing_weights(self, own, lost, message):
        self._without(own, lost)
        with pytest.raises(ArgumentError, match=message):
            load_model(own)

    def test_more_experts_than_the_configuration_says(self, own):
        edit_config(own, num_local_experts=4)
        with pytest.raises(ArgumentError, match=r"expected 4 experts .* got 5 tensors"):
            load_model(own)

    def test_experts_of_another_size(self, own):
        edit_config(own, intermediate_size=16)
        with pytest.raises(
            ArgumentError, match=r"gate_up_proj: expected \[5, 32, 32\] by config.json, got \[5, 48, 32\]"
        ):
            load_model(own)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"quantization_config": {"quant_method": "fp8"}}, "got quant_method 'fp8'.*FineGrainedFP8Config"),
            ({"model_type": "nothing", "architectures": ["NothingForCausalLM"]}, "got model_type 'nothing'"),
            ({"model_type": "llama"}, "expected routed experts .* got none in this 'llama' model"),
            ({"model_type": "vit"}, "expected a causal language model, got 'vit'"),
            (
                {"hidden_act": "swishh"},
                r"config\.json: expected a configuration of which 'mixtral' .* got KeyError.*swish",
            ),
        ],
    )
    def test_models_of_another_kind(self, own, changes, message):
        edit_config(own, **changes)
        with pytest.raises(ArgumentError, match=message):
            load_model(own)

    def test_a_cause_without_words(self, own, monkeypatch):
        def refuse(*arguments, **options):
            raise ValueError

        monkeypatch.setattr(loading.AutoModelForCausalLM, "from_config", refuse)
        with pytest.raises(
            ArgumentError, match=r"expected a causal language model, got 'mixtral': ValueError$"
        ):
            load_model(own)
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", refuse)
        monkeypatch.setattr(MixtralConfig, "from_dict", refuse)
        with pytest.raises(ArgumentError, match=r"one that transformers refuses: ValueError$"):
            load_model(own)
        edit_config(own, architectures=["NothingForCausalLM"])
        with pytest.raises(ArgumentError, match=r"got model_type 'mixtral': ValueError$"):
            load_model(own)

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "expected a configuration"), ("{", "expected JSON"), ("[" * 100_000, "expected JSON")],
    )
    def test_no_configuration(self, own, content, message):
        (own / "config.json").unlink()
        if content is not None:
            (own / "config.json").write_text(content)
        with pytest.raises(ArgumentError, match=f"config.json: {message}"):
            load_model(own)


@pytest.mark.parametrize(
    ("device_map", "module"),
    [("disk", "''"), ({"": "cpu", "model.layers.1": "disk"}, "'model.layers.1'")],
)
def test_experts_on_disk_anyway(own, device_map, module):
    with pytest.raises(ArgumentError, match=rf"^device_map: expected no module on disk, got {module}: "):
        load_model(own, device_map=device_map)


def shift(shard: Path) -> None:
    """Lays the data of a safetensors file one byte further, which the format allows."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length] + b" ", content[8 + length :]
    shard.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(("family", "fused"), [("mixtral", False), ("mixtral", True), ("gpt_oss", True)])
def test_weights_at_odd_addresses(tmp_path, caplog, family, fused):
    folder = write(tmp_path / "own", family, torch.bfloat16, fused=fused)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = load_model(folder)(tokens).logits
    for shard in folder.glob("*.safetensors"):
        shift(shard)
    caplog.clear()
    model = load_model(folder, cache_dir=tmp_path / "cache")
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)
    told = "does not begin at a multiple of 2 bytes in its file" in caplog.text
    assert told == (family == "mixtral"), "gpt-oss's are written again anyway"


def test_an_adapter_beside_the_checkpoint(own, caplog):
    (own / "adapter_config.json").write_text("{}")
    load_model(own)
    assert f"{own / 'adapter_config.json'} lies beside the checkpoint and is not applied" in caplog.text
