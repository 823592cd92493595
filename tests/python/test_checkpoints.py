"""Models whose experts stay in mapped checkpoints: the same numbers as from_pretrained, and no second copy."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from amx_sft_moe import ArgumentError, StateError
from amx_sft_moe.adapters import save_per_expert
from amx_sft_moe.checkpoints import CheckpointFiles, load_model, routed_experts
from amx_sft_moe.checkpoints.plan import expert_of
from amx_sft_moe.finetune.model import attention_targets, expert_modules
from amx_sft_moe.integrations.mapped_experts import (
    MappedStack,
    is_mapped,
    mapped_bytes,
    weights_one_by_one,
)
from amx_sft_moe.nn import ExpertWeights, sft_moe
from checkpoint_folders import E, H, I, edit_config, write
from families import FAMILIES

PER_EXPERT = [family for family in FAMILIES if family != "gpt_oss"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a checkpoint, written once and not to be changed: (family, dtype, fused)."""
    made: dict[tuple, Path] = {}

    def folder(family: str, dtype: torch.dtype = torch.float32, fused: bool = False) -> Path:
        key = (family, dtype, fused)
        if key not in made:
            made[key] = write(tmp_path_factory.mktemp(family), family, dtype, fused=fused)
        return made[key]

    return folder


def stock(folder: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")


def ids(rows: int = 2, length: int = 13) -> torch.Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(3))


def adapted(model, seed: int = 4):
    """LoRA with random factors on experts and attention."""
    experts = {f"{'.'.join(path.split('.')[-2:])}" for path, _ in routed_experts(model)}
    names = [f"{path}.{leaf}" for path in sorted(experts) for leaf in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=attention_targets(model), target_parameters=names)
    model = get_peft_model(model, config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model


def mapped_file(tensor: torch.Tensor) -> str:
    """Name of the file whose map holds the tensor; empty for ordinary memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= tensor.data_ptr() < last:
            return os.path.basename(path[0]) if int(inode) else ""
    return ""


def matrices_of(module: torch.nn.Module) -> dict:
    return weights_one_by_one(False, module.gate_up_proj, module.down_proj)


class TestTheSameModel:
    @pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_logits(self, checkpoint, family, fused):
        folder = checkpoint(family, fused=fused)
        expected = stock(folder)(ids()).logits
        found = load_model(folder, progress=False)(ids()).logits
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    @pytest.mark.parametrize("family", FAMILIES)
    def test_logits_in_bfloat16(self, checkpoint, family):
        folder = checkpoint(family, torch.bfloat16)
        model = load_model(folder, progress=False)
        assert model.dtype == torch.bfloat16
        exact = stock(folder)(ids()).logits  # the same bf16 weights, computed in fp32
        error, usual = (
            (each(ids()).logits.float() - exact).norm() for each in (model, stock(folder, torch.bfloat16))
        )
        assert error < 1.5 * usual

    @pytest.mark.parametrize("family", FAMILIES)
    def test_logits_with_a_dense_part_in_float32(self, checkpoint, family, monkeypatch):
        monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "portable")  # fp32 arithmetic, whatever this CPU has
        folder = checkpoint(family, torch.bfloat16)
        model = load_model(folder, dense_dtype=torch.float32, progress=False)
        of_experts = {id(part) for _, module in routed_experts(model) for part in module.parameters()}
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.bfloat16 if id(parameter) in of_experts else torch.float32), name
        assert mapped_bytes(model) == mapped_bytes(load_model(folder, dense_dtype="auto", progress=False))
        expected = stock(folder)(ids()).logits  # the same bf16 weights, computed in fp32
        assert (model(ids()).logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    def test_dense_dtypes(self, checkpoint, monkeypatch, caplog):
        folder = checkpoint("qwen3_moe", torch.bfloat16)
        for fast, dense in ((True, torch.bfloat16), (False, torch.float32)):
            monkeypatch.setattr("amx_sft_moe.checkpoints.dense.torch_multiplies_bf16", lambda fast=fast: fast)
            assert load_model(folder, dense_dtype="auto").lm_head.weight.dtype == dense
        monkeypatch.setattr("amx_sft_moe.checkpoints.loading.torch_multiplies_bf16", lambda: False)
        caplog.set_level(logging.WARNING, "amx_sft_moe")
        assert load_model(folder).lm_head.weight.dtype == torch.bfloat16
        assert "dense_dtype=torch.float32 is faster" in caplog.text
        for dtype, wanted, known in (
            (torch.bfloat16, torch.float16, '"auto", torch.float32 or torch.bfloat16'),
            (torch.float32, torch.bfloat16, '"auto" or torch.float32'),
        ):
            message = f"^dense_dtype: expected {known} as dtype says, got {wanted}$"
            with pytest.raises(TypeError, match=message):
                load_model(folder, dtype=dtype, dense_dtype=wanted)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_training_step(self, checkpoint, family):
        folder = checkpoint(family)
        found, expected = adapted(load_model(folder, progress=False)), adapted(stock(folder))
        losses = []
        for model in (found, expected):
            model.train()
            losses.append(model(input_ids=ids(), labels=ids()).loss)
            losses[-1].backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        gradients = {name: p.grad for name, p in expected.named_parameters() if p.requires_grad}
        assert sum(".experts." in name for name in gradients) == 4 * len(expert_modules(expected))
        for name, parameter in found.named_parameters():
            if name in gradients:
                reference = gradients.pop(name)
                assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm(), name
        assert not gradients

    def test_generation_settings_and_name_come_along(self, checkpoint):
        folder = checkpoint("olmoe")
        model = load_model(folder)
        assert model.name_or_path == str(folder)
        assert model.generation_config.to_diff_dict() == stock(folder).generation_config.to_diff_dict()
        assert not model.training

    def test_an_architecture_under_another_model_type(self, tmp_path):
        folder = write(tmp_path / "kimi", "deepseek_v3", torch.float32)
        expected = stock(folder)(ids()).logits
        edit_config(
            folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
        )
        assert torch.allclose(load_model(folder)(ids()).logits, expected, atol=1e-5)

    @pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has none")
    def test_names_by_regular_expressions(self, tmp_path):
        """Whose rule for experts is written as one, and comes after others that have renamed what is before."""
        sizes = {"vocab_size": 61, "hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": I, "n_routed_experts": E}
        sizes |= {"q_lora_rank": 16, "index_head_dim": 16, "index_n_heads": 2, "num_experts_per_tok": 2}
        config = transformers.DeepseekV4Config(**sizes, pad_token_id=0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        assert any(".ffn.experts.4.w1.weight" in name for name in CheckpointFiles(tmp_path))
        found = load_model(tmp_path, experts_implementation="eager")
        assert all(is_mapped(module) for _, module in routed_experts(found))
        assert torch.allclose(found(ids()).logits, stock(tmp_path)(ids()).logits, atol=1e-5)

    @pytest.mark.parametrize(
        ("pattern", "key", "expected"),
        [
            ("mlp.experts.*.gate_proj.weight", "model.layers.3.mlp.experts.12.gate_proj.weight", 12),
            (r"\.experts.*.w1.weight", "model.layers.3.mlp.experts.12.w1.weight", 12),
            (r"(mlp|ffn)\.experts.*.w1.weight", "model.layers.3.ffn.experts.0.w1.weight", 0),
            ("mlp.experts.*.gate_proj.weight", "model.layers.3.ffn.experts.12.gate_proj.weight", None),
        ],
    )
    def test_the_experts_number_in_a_name(self, pattern, key, expected):
        assert expert_of(pattern, key) == expected


class TestNoSecondCopy:
    @pytest.mark.parametrize("family", PER_EXPERT)
    def test_matrices_lie_in_the_shards(self, checkpoint, family):
        folder = checkpoint(family, torch.bfloat16)
        model = load_model(folder)
        layers = list(routed_experts(model))
        assert mapped_bytes(model) == len(layers) * 3 * E * H * I * 2
        for _, module in layers:
            weights = matrices_of(module)
            for name, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
                assert len(weights[name]) == E
                for matrix in weights[name]:
                    assert tuple(matrix.shape) == shape
                    assert mapped_file(matrix).startswith("model-0")

    @pytest.mark.parametrize("family", PER_EXPERT)
    def test_fused_parameters_lie_in_the_shards(self, checkpoint, family):
        model = load_model(checkpoint(family, torch.bfloat16, fused=True))
        assert mapped_bytes(model) == 0
        for _, module in routed_experts(model):
            assert not is_mapped(module)
            assert mapped_file(module.gate_up_proj).startswith("model-0")
            assert mapped_file(module.down_proj).startswith("model-0")

    def test_anonymous_memory(self, checkpoint, tmp_path):
        """Measured in a process of its own, beside from_pretrained, which shows that the measure works."""
        sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "vocab_size": 300}
        changes = {"num_hidden_layers": 4, "head_dim": 64} | sizes
        write(tmp_path / "large", "qwen3_moe", torch.bfloat16, **changes)
        experts = 4 * 3 * 32 * 256 * 512 * 2
        program = Path(__file__).with_name("memory_of_loading.py")
        command = [sys.executable, program, checkpoint("qwen3_moe", torch.bfloat16), tmp_path / "large"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        grown = json.loads(done.stdout.splitlines()[-1])
        assert experts > 100e6
        assert grown["from_pretrained"] > 0.9 * experts
        assert grown["mapped"] < 0.1 * experts
        assert grown["mapped_and_run"] < 0.3 * experts

    def test_what_is_not_of_the_dtype_is_loaded_and_said(self, checkpoint, caplog):
        folder = checkpoint("qwen3_moe", torch.bfloat16)
        with caplog.at_level(logging.WARNING, "amx_sft_moe"):
            model = load_model(folder, dtype=torch.float32)
        assert mapped_bytes(model) == 0
        (record,) = [record for record in caplog.records if "not mapped" in record.message]
        assert "and 3 more expert weights" in record.message
        assert "torch.bfloat16, not torch.float32" in record.message
        expected = stock(folder)(ids()).logits
        assert (model(ids()).logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    def test_other_dtypes_are_refused(self, checkpoint):
        with pytest.raises(
            TypeError, match=r"dtype: expected torch.bfloat16 or torch.float32, got torch.float16"
        ):
            load_model(checkpoint("olmoe"), dtype=torch.float16)


class TestMappedModel:
    @pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
    def test_it_saves_the_same_tensors(self, checkpoint, tmp_path, family):
        folder = checkpoint(family)
        load_model(folder).save_pretrained(tmp_path, max_shard_size="15KB")
        before, after = CheckpointFiles(folder), CheckpointFiles(tmp_path)
        assert set(after) == set(before)
        for name in before:
            assert torch.equal(after.tensor(name), before.tensor(name)), name

    def test_saving_stacked_is_refused(self, checkpoint, tmp_path):
        with pytest.raises(StateError, match="gate_up_proj: expected a use that leaves the experts"):
            load_model(checkpoint("mixtral")).save_pretrained(tmp_path, save_original_format=False)

    def test_merging_is_refused_and_changes_nothing(self, checkpoint):
        model = adapted(load_model(checkpoint("mixtral")))
        before = model(ids()).logits
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(StateError, match="python -m amx_sft_moe adapter merge"):
                merge()
        assert torch.equal(model(ids()).logits, before)

    def test_what_saves_all_weights_is_told_to_save_the_adapter(self, checkpoint, tmp_path):
        model = adapted(load_model(checkpoint("mixtral")))
        with pytest.raises(StateError, match=r"save the adapter alone \(model.save_pretrained or save_per_ex"):
            save_file(model.state_dict(), tmp_path / "all")  # as accelerator.save_state() does
        model.save_pretrained(tmp_path / "fused")
        save_per_expert(model, tmp_path / "per-expert")

    @pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
    def test_implementations_that_need_a_stack_are_refused(self, checkpoint, implementation):
        model = load_model(checkpoint("olmoe"), experts_implementation=implementation)
        with pytest.raises(StateError, match="experts_implementation='amx_sft_moe'"):
            model(ids())

    def test_adapted_experts_that_the_operator_cannot_take_say_why(self, checkpoint):
        model = adapted(load_model(checkpoint("qwen3_moe")))
        before = model(ids()).logits
        with (
            torch.autocast("cpu", dtype=torch.float16),
            pytest.raises(StateError, match=r"or float32, got torch.float16; no other implementation"),
        ):
            model(ids())
        assert torch.equal(model(ids()).logits, before)

    def test_eager_reads_expert_by_expert(self, checkpoint):
        folder = checkpoint("olmoe")
        model = load_model(folder, experts_implementation="eager")
        assert torch.equal(model(ids()).logits, stock(folder)(ids()).logits)

    def test_what_is_not_understood_runs_in_eager(self, checkpoint):
        folder = checkpoint("olmoe")
        model, expected = load_model(folder), stock(folder)
        for each in (model, expected):
            for _, module in routed_experts(each):
                module.act_fn = torch.nn.Tanh()
        assert torch.allclose(model(ids()).logits, expected(ids()).logits, atol=1e-6)

    def test_compiled_it_is_the_same(self, checkpoint):
        model = load_model(checkpoint("mixtral"))
        with torch.no_grad():
            expected = model(ids()).logits
            assert torch.equal(torch.compile(model, backend="eager")(ids()).logits, expected)

    def test_training_the_experts_themselves_is_refused(self, checkpoint):
        model = load_model(checkpoint("mixtral")).requires_grad_(True)
        with pytest.raises(StateError, match=r"gate_up_proj: expected .* got requires_grad=True"):
            model(ids())
        with torch.no_grad():
            model(ids())

    def test_moving_and_casting(self, checkpoint):
        model = load_model(checkpoint("mixtral"))
        before = model(ids()).logits
        assert torch.equal(model.to("cpu").to(torch.float32)(ids()).logits, before)
        for cast in (model.half, model.double):
            with pytest.raises(
                StateError,
                match=r"gate_up_proj: expected to stay in torch.float32 .* in which experts cannot be",
            ):
                cast()
        with pytest.raises(StateError, match=r"got torch.bfloat16: load the model by load_model\(..., dtype="):
            model.bfloat16()

    def test_copies_read_the_same_files(self, checkpoint):
        model = load_model(checkpoint("mixtral"))
        copied = copy.deepcopy(model)
        assert torch.equal(copied(ids()).logits, model(ids()).logits)
        (first, *_), (second, *_) = (
            matrices_of(next(routed_experts(m))[1])["up_proj"] for m in (model, copied)
        )
        assert first.data_ptr() == second.data_ptr()
        with pytest.raises(StateError, match="got pickling"):
            pickle.dumps(model)

    def test_it_counts_as_what_it_stands_for(self, checkpoint):
        folder = checkpoint("deepseek_v3")
        model = load_model(folder)
        assert model.num_parameters() == stock(folder).num_parameters()
        weight = next(routed_experts(model))[1].gate_up_proj
        assert isinstance(weight, torch.nn.Parameter)
        assert not weight.requires_grad
        assert "MappedStack('model.layers.1.mlp.experts.gate_up_proj', shape=[5, 48, 32]" in repr(weight)


class TestMappedStack:
    gate, up = [torch.randn(3, 4) for _ in range(2)], [torch.randn(5, 4) for _ in range(2)]

    def test_reading(self):
        stack = MappedStack([self.gate, self.up], "w")
        whole = torch.cat([torch.stack(self.gate), torch.stack(self.up)], dim=1)
        assert stack.shape == whole.shape == (2, 8, 4)
        assert torch.equal(stack[1], whole[1])
        assert torch.equal(stack[torch.tensor(0)], whole[0])
        assert all(torch.equal(a, b) for a, b in zip(stack.unbind(), whole.unbind(), strict=True))
        parts = stack.split([3, 5], dim=1)
        assert [list(part.shape) for part in parts] == [[2, 3, 4], [2, 5, 4]]
        assert parts[1][1].data_ptr() == self.up[1].data_ptr()  # of one part: in place
        assert [each.data_ptr() for each in stack.rows(1, 3)] == [each[1:].data_ptr() for each in self.gate]

    @pytest.mark.parametrize(
        "use",
        [
            lambda stack: stack + 1,
            lambda stack: stack.mul_(2),
            lambda stack: stack.sum(),
            lambda stack: stack.transpose(1, 2),
            lambda stack: stack[:, 1],
            lambda stack: stack.split(4, dim=1),
            lambda stack: stack.split(1, dim=2),
            lambda stack: stack.data_ptr(),
            lambda stack: torch.zeros(2, 8, 4).copy_(stack),
            lambda stack: stack.rows(2, 4),
        ],
    )
    def test_anything_else_is_refused(self, use):
        with pytest.raises(StateError, match="w: expected"):
            use(MappedStack([self.gate, self.up], "w"))

    def test_parts_must_fit(self):
        with pytest.raises(ArgumentError, match=r"parts\[1\]: expected 2 experts, got 1"):
            MappedStack([self.gate, self.up[:1]])
        with pytest.raises(
            ArgumentError, match=r"parts\[0\]\[1\]: expected \[3, 4\] torch.float32, got \[5, 4\]"
        ):
            MappedStack([[self.gate[0], self.up[0]]])
        with pytest.raises(ArgumentError, match=r"parts\[1\]\[0\]: expected .* got \[5, 4\] torch.bfloat16"):
            MappedStack([self.gate, [each.bfloat16() for each in self.up]])


class TestExpertWeights:
    """Weights as one matrix per expert."""

    random = torch.Generator().manual_seed(11)
    gate = torch.randn(4, 5, 7, generator=random)  # E=4, I=5, H=7
    up = torch.randn(4, 5, 7, generator=random)
    down = torch.randn(4, 7, 5, generator=random)
    x = torch.randn(9, 7, generator=random)
    expert_ids = torch.randint(0, 4, (9, 2), generator=random)
    routing = torch.rand(9, 2, generator=random)

    def run(self, *weights) -> torch.Tensor:
        gate, up, down = weights
        experts = ExpertWeights(top_k=2, gate_proj=gate, up_proj=up, down_proj=down)
        return sft_moe(experts, self.x, self.expert_ids, self.routing)

    def test_they_are_the_same_weights(self):
        apart = [[each.clone() for each in weight] for weight in (self.gate, self.up, self.down)]
        expected = self.run(self.gate, self.up, self.down)
        assert torch.equal(self.run(*apart), expected)
        assert torch.equal(self.run(self.gate, tuple(apart[1]), self.down), expected)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (lambda up: up[:3], ArgumentError, "up_proj"),
            (lambda up: [*up[:3], up[0][:4]], ArgumentError, r"up_proj\[3\]"),
            (lambda up: [*up[:3], up[0].bfloat16()], TypeError, "up_proj"),
            (lambda up: [], TypeError, "up_proj: expected a torch.Tensor or one .* got list"),
            (lambda up: [*up[:3], None], TypeError, "up_proj: expected a torch.Tensor or one for each expert"),
            (lambda up: "up", TypeError, "up_proj: expected a torch.Tensor or one .* got str"),
            (
                lambda up: [row[0] for row in up],
                ArgumentError,
                r"up_proj: expected 3 dimensions, got shape",
            ),
            (
                lambda up: [*up[:3], up[3].requires_grad_()],
                ArgumentError,
                "up_proj: expected matrices that require no",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change, error, message):
        up = change([each.clone() for each in self.up])
        with pytest.raises(error, match=message):
            self.run(self.gate, up, self.down)
