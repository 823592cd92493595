"""finetune --model on checkpoints of several families, from end to end at tiny sizes, in this process."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from amx_sft_moe import adapters
from amx_sft_moe.checkpoints import CheckpointFiles, routed_experts
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.finetune import adapter, cli, job, model, output, stages
from amx_sft_moe.finetune.corpus import Example
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.finetune.options import OURS, Options, parse
from amx_sft_moe.finetune.terminal import Terminal
from amx_sft_moe.finetune.tokenizer import train_tokenizer
from amx_sft_moe.finetune.training import Curve
from checkpoint_folders import E, H, I, K, edit_config, write
from composite_models import TEXT_ALONE, WHOLE
from composite_models import write as write_composite

FAMILIES = {
    # family: layers with routed experts, what is adapted beside them
    "mixtral": (2, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    "deepseek_v3": (1, {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    "qwen2_moe": (2, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    "gpt_oss": (2, {"q_proj", "k_proj", "v_proj", "o_proj"}),
}


def options(folder: Path, checkpoint: Path) -> Options:
    lines = [{"prompt": f"Count to {n}:", "completion": " ".join(map(str, range(n)))} for n in range(2, 30)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--quick", "--model", checkpoint, "--data", folder / "data.jsonl", "--output", folder / "out"]
    found = parse([*map(str, arguments), "--steps", "3", "--rank", "2", "--learning-rate", "1e-2"])
    return replace(found, threads=2, compare_steps=0)


def checkpoint(
    folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, written: Any = write, **changes: int
) -> Path:
    tokens = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    written(folder, family, dtype, **({"vocab_size": 300} | tokens | changes))
    train_tokenizer(["Count to 12: 0 1 2 3 4 5 6 7 8 9"], 300, 64).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run(family, tmp_path, capsys, monkeypatch):
    folder = checkpoint(tmp_path / "checkpoint", family)
    if family == "deepseek_v3":
        edit_config(folder, model_type="kimi_k2")  # as Kimi K2 calls it
    layers, attention = FAMILIES[family]
    # Two of them also compare: grouped_mm has no use for mapped experts, so a second model is loaded. One of
    # these has dtypes of its own for experts and the rest, as on CPUs without AVX512.
    apart = family == "qwen2_moe"
    dense = "float32" if apart else "bfloat16"
    compared = 2 if family in ("mixtral", "qwen2_moe") else 0
    loaded = []
    for name in ("load_model", "load_stacked"):
        original = getattr(model, name)
        monkeypatch.setattr(
            model, name, lambda *a, original=original: loaded.append(original(*a)) or loaded[-1]
        )
    results = job.run(replace(options(tmp_path, folder), compare_steps=compared, dense_dtype=dense))
    assert [each.get_input_embeddings().weight.dtype for each in loaded] == [getattr(torch, dense)] * (
        2 if compared else 1
    )
    assert (results.model.experts, results.model.hidden, results.model.intermediate) == (E, H, I)
    assert results.model.top_k == K
    rank = 2
    assert results.model.trained_experts == layers * E * rank * (H + 2 * I + I + H)
    assert results.lora.held_out[-1][1] < results.lora.held_out[0][1]
    out = capsys.readouterr().out
    if family == "gpt_oss":
        assert (folder / "amx_sft_moe-experts").is_dir()
    else:
        assert f"GB of experts, used as they lie in {folder}" in out
    assert f"on the experts of {layers} layers" in out
    assert ("bfloat16 (experts) and float32 (the rest)" in out) == apart
    assert "beware" not in out
    assert ("in gpt_oss several in a row would not stay apart" in out) == (family == "gpt_oss")
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert attention <= set(config["target_modules"])
    assert not {"gate", "router", "shared_expert_gate", "lm_head"} & set(config["target_modules"])
    assert results.adapter.stock_loss == pytest.approx(results.adapter.loss, abs=5e-3)
    if results.comparison:
        ours, other = results.comparison
        assert ours.losses == pytest.approx(other.losses, abs=0.02)


@pytest.mark.parametrize("family", [TEXT_ALONE[0], *WHOLE])
def test_a_model_for_text_and_images(family, tmp_path):
    changes = {"vocab_size_per_layer_input": 300, "pad_token_id": 0} if family == "gemma4" else {}
    folder = checkpoint(tmp_path / "checkpoint", family, written=write_composite, **changes)
    results = job.run(options(tmp_path, folder))
    assert (results.model.layers, results.model.experts, results.model.top_k) == (2, E, K)
    assert results.model.trained_experts == 2 * E * 2 * (H + 2 * I + I + H)
    assert results.lora.held_out[-1][1] < results.lora.held_out[0][1]
    assert results.adapter.stock_loss == pytest.approx(results.adapter.loss, abs=5e-3)
    assert set(output.REPORTS) <= {path.name for path in (tmp_path / "out").iterdir()}
    with_router_losses = model.load_stacked(folder, torch.bfloat16, "eager").config.get_text_config()
    assert with_router_losses.output_router_logits is False


def mxfp4_checkpoint(folder: Path, without: str = "") -> Path:
    """gpt-oss as it is published, its experts in blocks of 32 numbers with a scale each; a tensor may be left
    out."""
    checkpoint(folder, "gpt_oss", intermediate_size=64)
    random = torch.Generator().manual_seed(5)
    files = CheckpointFiles(folder)
    state = {name: files.tensor(name).clone() for name in files}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        e, columns, rows = state.pop(name).shape
        blocks = (e, rows, columns // 32, 16)
        state[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=random)
        state[f"{name}_scales"] = torch.randint(118, 124, blocks[:3], dtype=torch.uint8, generator=random)
    state.pop(without, None)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder


def test_mxfp4_is_compared_with_the_same_experts(tmp_path):
    """Those of grouped_mm are loaded apart: on CPUs without AVX512 the rest is in float32."""
    folder = mxfp4_checkpoint(tmp_path / "checkpoint")
    ours = model.load_model(folder, torch.bfloat16, torch.float32, OURS)
    other = model.load_stacked(folder, torch.float32, "grouped_mm")
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    for (_, module), (_, reference) in zip(routed_experts(ours), routed_experts(other), strict=True):
        for name in model.EXPERTS:
            assert torch.equal(module.get_parameter(name).float(), reference.get_parameter(name))
    adapted = model.add_adapter(other, 2, 4.0, 0)
    assert model.trained_parameters(adapted).layers == 2
    ids = torch.arange(12)[None]
    expected = model.load_model(folder, torch.float32, torch.float32, OURS)(ids).logits
    assert torch.allclose(adapted(ids).logits, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("model.norm.weight", r"expected all weights of GptOssForCausalLM, got no model\.norm\.weight$"),
        ("model.layers.1.mlp.experts.down_proj_scales", r"cannot load .*layers\.1\.mlp\.experts\.down_proj: "),
    ],
)
def test_nothing_is_compared_with_weights_drawn_at_random(without, said, tmp_path):
    folder = mxfp4_checkpoint(tmp_path / "checkpoint", without)
    with pytest.raises(FinetuneError, match=said):
        model.load_stacked(folder, torch.float32, "grouped_mm")


def test_experts_that_the_operator_does_not_know(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint", "olmoe")
    edit_config(folder, hidden_act="tanh")
    with pytest.raises(FinetuneError, match=r"experts, OlmoeExperts: expected a gate that computes"):
        job.run(options(tmp_path, folder))


def test_damage_is_said_before_anything_is_trained(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint", "mixtral")
    (shard, *_) = sorted(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FinetuneError, match=rf"--model .*{shard.name}: expected a whole safetensors file"):
        job.run(options(tmp_path, folder))
    shard.unlink()
    with pytest.raises(FinetuneError, match=rf"--model .*, got no {shard.name}"):
        job.run(options(tmp_path, folder))


def test_a_second_run_keeps_what_is_not_its_own(tmp_path, capsys):
    wanted = options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))
    kept = tmp_path / "out" / "adapter"
    job.run(wanted)
    assert "is replaced" not in capsys.readouterr().out
    (kept / "runs").mkdir()
    for name in ("README.md", "runs/log.txt"):
        (kept / name).write_text("mine")
    first = (kept / "adapter_model.safetensors").read_bytes()
    job.run(replace(wanted, seed=1))
    assert "is replaced once the new one is trained" in capsys.readouterr().out
    assert (kept / "adapter_model.safetensors").read_bytes() != first
    assert (kept / "README.md").read_text() == (kept / "runs" / "log.txt").read_text() == "mine"


def test_a_diverged_adapter_replaces_none(tmp_path, monkeypatch, capsys):
    wanted = options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))
    job.run(wanted)
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(cli, "parse", lambda argv: replace(wanted, learning_rate=1e300))
    assert cli.main([]) == 1
    message = (
        r"error: training has diverged: expected a finite loss, got nan in step 3 of 3: nothing was kept, .* "
        r"is as it was; try a smaller --learning-rate than 1e\+300"
    )
    assert re.search(message, capsys.readouterr().err)
    assert {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    adapted = stages.Adapted(torch.nn.Linear(2, 2), {}, Curve(held_out=[(0, 1.0), (3, float("nan"))]))
    with pytest.raises(FinetuneError, match=r"a held-out loss of nan: nothing was kept, .* --learning-rate"):
        stages.keep(wanted, None, None, adapted, None, None, None)
    torch.nn.init.constant_(adapted.model.bias, float("inf"))
    with pytest.raises(FinetuneError, match="numbers that are not finite in bias"):
        stages.keep(wanted, None, None, adapted, None, None, None)


def test_tokens_that_the_model_does_not_know(tmp_path):
    """A tokenizer with more tokens than the model: only those of the text count."""
    folder = checkpoint(tmp_path / "checkpoint", "mixtral")
    tokenizer = model.load_tokenizer(folder)
    size = len(tokenizer)
    edit_config(folder, vocab_size=size)
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tokenizer.pad_token_id == size
    part = [Example("Count to 3:", " 0 1 2"), Example("Count", " 0")]
    text = stages.Text(([], []), (part, part), "")
    base = stages.Base(folder, folder, tokenizer)
    wanted = options(tmp_path, folder)
    say = Terminal(1)
    found = stages.encode_examples(wanted, text, base, say)
    assert max(token for example in found.training for token in example.tokens) < size
    assert found.padding < size
    part[1] = Example("Count", " <new>")
    message = rf"expected token ids below {size} \(vocab_size of config\.json\).*, got {size} \('<new>'\)"
    with pytest.raises(FinetuneError, match=message):
        stages.encode_examples(wanted, text, base, say)
    tokenizer.eos_token = "<new>"
    assert stages._padding_id(tokenizer, size) == 0


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON"])
def test_a_tokenizer_that_is_none(content, tmp_path):
    folder = checkpoint(tmp_path / "checkpoint", "mixtral")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(FinetuneError, match=f"no tokenizer in {folder} that can be read: "):
        model.load_tokenizer(folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_checkpoint_without_a_tokenizer(family, tmp_path, monkeypatch, capsys):
    """For Qwen transformers makes one that encodes everything to nothing; for others it raises."""
    folder = write(tmp_path / "checkpoint", family, torch.bfloat16)
    monkeypatch.setattr(cli, "parse", lambda argv: options(tmp_path, folder))
    assert cli.main([]) == 1
    known = "expected its files, got one that knows 1 tokens"
    reason = known if family == "qwen3_moe" else "ValueError"
    assert re.search(f"error: no tokenizer in {folder}.*: {reason}", capsys.readouterr().err)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def refused(*arguments):
    raise ArgumentError("model: expected what this layout can say, got something else")


def test_an_adapter_that_is_not_read_back_is_reported(tmp_path, monkeypatch, capsys):
    """Nor could it be written per expert."""
    monkeypatch.setattr(adapters, "save_per_expert", refused)
    wanted = replace(options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral")), compare_steps=1)

    def killed(*arguments):
        raise FinetuneError("stock PEFT could not read a: killed by SIGKILL\nits last words")

    monkeypatch.setattr(stages.adapter, "stock_loss", killed)
    monkeypatch.setattr(cli, "parse", lambda argv: wanted)
    assert cli.main([]) == 1
    said = capsys.readouterr()
    assert "error: stock PEFT could not read a: killed by SIGKILL\nits last words" in said.err
    assert "Done in" in said.out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["adapter"]["stock_loss"] is None
    assert metrics["adapter"]["stock_error"].startswith("stock PEFT could not read a")
    assert metrics["adapter"]["fused"].endswith("got something else")
    assert len(metrics["comparison"]) == 2
    report = (tmp_path / "out" / "report.md").read_text()
    assert "its last words" in report
    assert "failed" in report
    assert "fused, as PEFT writes it; not per expert: model: expected what this layout can say" in report
    assert "a pair of factors per expert" not in report


def test_a_report_that_cannot_be_made_keeps_no_other_back(tmp_path, monkeypatch, capsys):
    def broken(*arguments):
        raise LookupError("no font\nof that name")

    monkeypatch.setattr(job, "draw", broken)
    wanted = options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))
    monkeypatch.setattr(cli, "parse", lambda argv: wanted)
    assert cli.main([]) == 1
    said = capsys.readouterr()
    error = (
        f"--output {tmp_path / 'out'}: the adapter is written, but not {output.PICTURE}: LookupError: no font"
    )
    assert said.err.endswith(f"error: {error}\n")
    assert "every number" in said.out
    assert "the picture\n" not in said.out
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"adapter", *output.REPORTS} - {output.PICTURE}


def test_stages_that_fail_after_training_keep_no_report_back(tmp_path, monkeypatch, capsys):
    def no_memory(*arguments):
        raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes\nmore of it")

    def odd(*arguments):
        raise LookupError("of a layer")

    monkeypatch.setattr(stages.comparison, "compare", no_memory)
    monkeypatch.setattr(stages.hook, "backward_times", odd)
    monkeypatch.setattr(stages.adapter, "stock_loss", odd)
    wanted = replace(options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral")), compare_steps=1)
    monkeypatch.setattr(cli, "parse", lambda argv: wanted)
    assert cli.main([]) == 1
    said = capsys.readouterr()
    reasons = {
        "the comparison": "RuntimeError: can't allocate memory: you tried to allocate 8 bytes",
        output.TIMES: "LookupError: of a layer",
    }
    lost = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    unread = f"stock PEFT could not read {tmp_path / 'out' / 'adapter'}: LookupError: of a layer"
    kept = f"--output {tmp_path / 'out'}: the adapter is written, but not {lost}"
    assert said.err.endswith(f"error: {unread}\n\nerror: {kept}\n")
    assert "every number" in said.out
    assert "the timing dump" not in said.out
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"adapter", *output.REPORTS} - {output.TIMES}
    metrics = json.loads((tmp_path / "out" / output.METRICS).read_text())
    assert metrics["failed"] == reasons
    assert metrics["comparison"] is None
    assert metrics["backward_times"] is None
    assert metrics["adapter"]["stock_error"] == unread
    report = (tmp_path / "out" / output.REPORT).read_text()
    assert all(f"- {name}: {reason}\n" in report for name, reason in reasons.items())
    assert "Where the time of a backward goes" not in report.split("## Time")[0]


def test_what_is_known_is_on_disk_before_the_comparison(tmp_path, monkeypatch):
    """For want of memory it may be killed, which nothing can catch."""

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages.comparison, "compare", killed)
    wanted = replace(options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral")), compare_steps=1)
    with pytest.raises(KeyboardInterrupt):
        job.run(wanted)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"adapter", *output.REPORTS} - {output.TIMES}
    metrics = json.loads((tmp_path / "out" / output.METRICS).read_text())
    assert metrics["adapter"]["stock_loss"] is not None
    assert metrics["comparison"] is None
    assert metrics["failed"] == {}


def test_reports_know_which_of_them_failed(tmp_path, monkeypatch):
    def broken(*arguments):
        raise LookupError("no font")

    monkeypatch.setattr(job, "draw", broken)
    results = job.run(options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral")))
    assert results.failed == {output.PICTURE: "LookupError: no font"}
    assert json.loads((tmp_path / "out" / output.METRICS).read_text())["failed"] == results.failed
    report = (tmp_path / "out" / output.REPORT).read_text()
    assert f"- {output.PICTURE}: LookupError: no font\n" in report
    assert "![" not in report


def test_a_standard_output_that_takes_nothing_stops_no_training(tmp_path, monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    wanted = options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))
    monkeypatch.setattr(cli, "parse", lambda argv: wanted)
    with pytest.raises(OSError, match="No space left"):  # told by standard_output.printing()
        cli.main([])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter", *output.REPORTS}
    metrics = json.loads((tmp_path / "out" / output.METRICS).read_text())
    assert (metrics["failed"], metrics["adapter"]["stock_error"]) == ({}, "")


def broken_midway(found, folder):
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    (folder / "left.bin").write_bytes(b"half")
    raise LookupError("of a family that nobody tried: got something else")


@pytest.mark.parametrize("save", [refused, broken_midway])
def test_an_adapter_saved_fused_leaves_the_users_own_card(save, tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "save_per_expert", save)
    wanted = options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))
    bare = model.load_model(wanted.model, torch.bfloat16, torch.bfloat16, OURS)
    adapted = model.add_adapter(bare, 2, 4.0, 0)
    folder = tmp_path / "written"
    folder.mkdir()
    place = tmp_path / "where it will lie"
    reason = adapter.save_adapter(adapted, folder, place)
    assert reason.endswith("got something else")
    assert not {"README.md", "left.bin"} & {path.name for path in folder.iterdir()}
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(place)
    assert "adapter_model.safetensors" in {path.name for path in folder.iterdir()}
