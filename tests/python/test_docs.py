"""Everything that the pages of ``docs/`` tell people to type is executed here, and the README's Python; see
pages.py for how."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import amx_sft_moe
from amx_sft_moe.finetune.tokenizer import train_tokenizer
from cases import Sizes
from families import family_model
from pages import DOCS, EXECUTED, ROOT, Block, Folder, blocks_of, program, without_numbers
from reference import make_layer, run
from timelines import global_tid, write_nsys
from within_pass import Within

PAGES = sorted(page.name for page in DOCS.glob("*.md"))
README = ROOT / "README.md"
# How many blocks of a page are not executed; each says why, in a comment above it.
NOT_RUN = {"fine-tune-my-model.md": 4, "llama-factory.md": 2, "profiling.md": 3}

# A training script as pages call it: some steps of one layer, without torch.
TRAIN = """
    import numpy as np
    import amx_sft_moe

    E, H, I, k, T, r = 4, 32, 16, 2, 24, 3
    random = np.random.default_rng(0)
    def new(*shape):
        return random.normal(size=shape).astype(np.float32)
    op = amx_sft_moe.SftMoe(E, k, H, I, name="layers.0")
    op.set_base(gate_up_proj=new(E, 2 * I, H), down_proj=new(E, H, I))
    op.set_lora(down_lora_a=new(E, r, I), down_lora_b=new(E, H, r))
    for step in range(6):
        op.forward_sft(new(T, H), random.integers(0, E, (T, k)), new(T, k))
        op.backward(new(T, H))
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages take for granted: a checkpoint with its tokenizer, data, sources."""
    folder = tmp_path_factory.mktemp("docs")
    pairs = [{"prompt": f"Count to {n}:", "completion": " ".join(map(str, range(n)))} for n in range(2, 42)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = train_tokenizer([pair["prompt"] + pair["completion"] for pair in pairs], 300, 64)
    tokenizer.save_pretrained(folder / "my-model")
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "my-model", max_shard_size="200KB")  # several shards, as most have
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    (folder / "amx-sft-moe").symlink_to(ROOT)
    (folder / "installed").mkdir()
    return folder


@pytest.fixture(scope="module")
def recorded(material: Path) -> Path:
    """The same, with recorded steps."""
    files = {"TIMER": "json", "TIMER_FILE": "steps.jsonl", "TRACE": "trace.json"}
    variables = {f"AMX_SFT_MOE_{name}": value for name, value in files.items()}
    command = [sys.executable, "train.py"]
    subprocess.run(command, check=True, cwd=material, env=os.environ | variables, timeout=100)
    for copy in ("before.jsonl", "after.jsonl"):
        shutil.copy(material / "steps.jsonl", material / copy)
    ranges = [(start, start + 40, 59, "amx_sft_moe", global_tid(40, 41), None, 0) for start in (100, 200)]
    write_nsys(material / "run.sqlite", {"NVTX_EVENTS": ranges}, {})
    return material


@pytest.mark.parametrize("name", PAGES)
def test_page(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(DOCS / name)
    if not any(block.runs for block in blocks):
        return
    if name == "from-cpp.md" and not amx_sft_moe.info()["instruction_sets"]["avx2"]:
        pytest.skip("its program names the kernel avx2")
    material: Path = request.getfixturevalue("recorded" if name == "timeline.md" else "material")
    folder = tmp_path / "page"
    shutil.copytree(material, folder, symlinks=True)
    monkeypatch.chdir(folder)
    running = Folder(folder)
    (folder / "main.cpp").write_text(program(blocks))
    if any(block.compiler_only for block in blocks):
        running.check_program(blocks)
    for block in blocks:
        running.run(block)


# What the README's python blocks take for granted: one layer with adapters.
GIVEN = """
import torch

E, k, H, I, T, r = 4, 2, 32, 16, 6, 3
gate_proj, up_proj, down_proj = torch.randn(E, I, H), torch.randn(E, I, H), torch.randn(E, H, I)
ga, ua, da = torch.randn(E, r, H), torch.randn(E, r, H), torch.randn(E, r, I)
gb, ub, db = torch.randn(E, I, r), torch.randn(E, I, r), torch.randn(E, H, r)
x, grad_y = torch.randn(T, H), torch.randn(T, H)
routing_weights, expert_ids = torch.rand(T, E).topk(k)
"""


def test_readme(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its python blocks, one after the other; commands and C++ are those of the pages."""
    folder = tmp_path / "page"
    shutil.copytree(material, folder, symlinks=True)
    monkeypatch.chdir(folder)
    running = Folder(folder)
    blocks = [block for block in blocks_of(README) if block.language == "python"]
    assert len(blocks) == 3
    assert all(block.runs for block in blocks)
    running.run(blocks[0])
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    for block in (Block(README.name, 0, "python", GIVEN), *blocks[1:]):
        running.run(block)


# What its C++ block takes for granted.
GIVEN_CPP = """
  const std::vector<bf16> matrices(4 * 16 * 32, to_bf16(0.5F));
  const std::vector<float> factors(4 * 3 * 32, 0.25F);
  std::vector<float> values(6 * 32, 1.0F), result(values), grad_x(values);
  const std::vector<std::int64_t> ids{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  const Config config{.num_experts = 4, .top_k = 2, .hidden_size = 32, .intermediate_size = 16};
  using Experts = ExpertMatrices<const bf16>;
  const BaseWeights<bf16> weights{.gate = Experts::stacked(matrices.data(), 16, 32),
                                  .up = Experts::stacked(matrices.data(), 16, 32),
                                  .down = Experts::stacked(matrices.data(), 32, 16)};
  LoraWeights lora;
  lora.gate = {AnyConstExpertTensor(factors.data(), 4, 3, 32), AnyConstExpertTensor(factors.data(), 4, 16, 3)};
  const Routing routing{6, ExpertIds(ids.data(), 2), AnyConstMatrix(values.data(), 6, 2, 2)};
  const AnyConstMatrix x(values.data(), 6, 32, 32), grad_y = x;
  const AnyMatrix y(result.data(), 6, 32, 32);
  Gradients grads;
  grads.x = AnyMatrix(grad_x.data(), 6, 32, 32);
"""


def test_the_program_of_the_readme(tmp_path: Path) -> None:
    [block] = [block for block in blocks_of(README) if block.language == "cpp"]
    top, body = block.code.split("\n\n", 1)
    includes = "".join(f"#include <{name}>\n" for name in ("cstdint", "iostream", "vector"))
    source = f"{includes}{top}\nint main() {{\n{GIVEN_CPP}\n{body}\n}}\n"
    (tmp_path / "main.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O0", "-fopenmp", f"-I{ROOT / 'include'}", "main.cpp", "-o", "main"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=600)
    run = subprocess.run(["./main"], check=True, cwd=tmp_path, timeout=100, capture_output=True, text=True)
    assert "backward_gate_up" in run.stdout


def test_what_is_not_run_says_why() -> None:
    left_out = {name: [b for b in blocks_of(DOCS / name) if "not run" in b.marks] for name in PAGES}
    assert {name: len(found) for name, found in left_out.items() if found} == NOT_RUN
    assert all(len(block.marks["not run"]) > 10 for found in left_out.values() for block in found)


def test_every_program_is_compiled() -> None:
    """cpp blocks run only where a page compiles main.cpp."""
    for name in PAGES:
        blocks = blocks_of(DOCS / name)
        if any(block.language == "cpp" and block.runs for block in blocks):
            assert any(block.runs and "main.cpp" in block.code and "./main" in block.code for block in blocks)


NAMED = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("family", "by_name", "all_linear"),
    [
        *[
            (name, {"experts"}, {"experts", "gate"})
            for name in ("qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe")
        ],
        ("mixtral", None, {"experts", "gate"}),
        ("qwen2_moe", {"shared_expert"}, {"shared_expert", "shared_expert_gate"}),
        ("gpt_oss", None, set()),
    ],
)
def test_the_table_of_targets(family: str, by_name: set[str] | None, all_linear: set[str]) -> None:
    """What target_modules adapt beside attention, of fine-tune-my-model.md. None: PEFT raises an error."""
    for targets, expected in ((NAMED, by_name), ("all-linear", all_linear)):
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
        model = family_model(family, "amx_sft_moe")
        if expected is None:
            with pytest.raises(ValueError, match="not found"):
                get_peft_model(model, lora)
            continue
        model = get_peft_model(model, lora)
        factors = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert {name.split(".mlp.")[1].split(".")[0] for name in factors if ".mlp." in name} == expected
        for name, parameter in model.named_parameters():
            if ".experts." in name and ".lora_A." in name:
                rank = 8 if ".base_layer." in name else 4  # gate_up_proj, down_proj
                assert parameter.shape[0] == rank * 5


def test_the_table_of_state_errors() -> None:
    """Those of calls that meet, of troubleshooting.md: what is quoted is what Python callers get."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)
    sizes = Sizes()
    layer = make_layer(sizes)
    workspace = amx_sft_moe.Workspace()
    op, other = (sizes.operator(workspace=workspace) for _ in range(2))
    run(other, layer)
    run(op, layer)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights, False)
    for meets, words in ((op, "SftMoe"), (other, "workspace")):
        within = Within(lambda meets=meets: meets.forward_sft(*inputs))
        op._core.ranges = within
        op.forward_sft(*inputs)
        [error] = within.errors
        assert [row for row in quoted if row in error and words in row], error


def test_links_lead_somewhere() -> None:
    for page in (README, *(DOCS / name for name in PAGES)):
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in anchors, f"{page}: {target}#{anchor}"


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[([^\]]*)\]", index, re.MULTILINE)) == {*PAGES} - {"README.md"}


PAGE = """Text.

<!-- test: 500 => 2 -->
```bash
echo 500
```
<!-- output -->
```text
7
```
"""


class TestTheTestItself:
    """That it sees what it should."""

    @staticmethod
    def blocks(text: str, folder: Path) -> list[Block]:
        (folder / "page.md").write_text(text)
        return blocks_of(folder / "page.md")

    def test_blocks(self, tmp_path: Path) -> None:
        command, output = self.blocks(PAGE, tmp_path)
        assert (command.language, command.code, command.line, command.runs) == ("bash", "echo 2\n", 4, True)
        assert not output.runs
        folder = Folder(tmp_path)
        folder.run(command)
        folder.run(output)

    @pytest.mark.parametrize("code", ["false", "false | true", "echo $unset", "no-such-command"])
    def test_a_command_that_fails(self, code: str, tmp_path: Path) -> None:
        [block] = self.blocks(f"```bash\n{code}\ntrue\n```\n", tmp_path)
        with pytest.raises(AssertionError, match=r"page\.md"):
            Folder(tmp_path).run(block)

    def test_other_output(self, tmp_path: Path) -> None:
        command, output = self.blocks(PAGE.replace("echo", "echo no"), tmp_path)
        folder = Folder(tmp_path)
        folder.run(command)
        folder.run(output)  # numbers are not compared, and "no" is not asked for
        [_, other] = self.blocks(PAGE.replace("\n7\n", "\n7 s\n"), tmp_path)
        with pytest.raises(AssertionError, match="not printed: 7 s"):
            folder.run(other)
        [slower, _] = self.blocks(PAGE.replace("echo 500", "echo 1 min 500 s"), tmp_path)
        folder.run(slower)
        folder.run(other)  # it took longer, which nobody asked for

    def test_python(self, tmp_path: Path) -> None:
        first, second = self.blocks("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", tmp_path)
        folder = Folder(tmp_path)
        folder.run(first)
        with pytest.raises(AssertionError):
            folder.run(second)

    @pytest.mark.parametrize(
        "text",
        [
            "```\ncode\n```\n",
            "```bash\necho 1\n",
            "Text.\n\n    indented\n",
            "<!-- test: 3 => 4 -->\n```bash\necho 1\n```\n",
            "<!-- tset: 1 => 4 -->\n```bash\necho 1\n```\n",
        ],
    )
    def test_what_is_not_understood(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"page\.md"):
            self.blocks(text, tmp_path)

    def test_numbers(self) -> None:
        assert without_numbers("  1,024 of 3.5e-06   in 1.19 GiB") == "# of # in #"
        assert EXECUTED == ("bash", "python", "cpp", "cmake")
