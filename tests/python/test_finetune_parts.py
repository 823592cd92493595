"""Parts of the main job that can be seen without a run: options, clock, dumps, tables, lanes, speed."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from amx_sft_moe.finetune import adapter, comparison, hook, model, report, stages, tables
from amx_sft_moe.finetune import clock as clock_module
from amx_sft_moe.finetune.clock import ExpertClock
from amx_sft_moe.finetune.comparison import Lane
from amx_sft_moe.finetune.errors import DivergedError, FinetuneError
from amx_sft_moe.finetune.options import Options, parse
from amx_sft_moe.finetune.packing import Encoded, pack, require_any
from amx_sft_moe.finetune.results import write_metrics, write_text
from amx_sft_moe.finetune.training import train

DUMP = """\
[FWD TIMER] forward_gather: 0.100 ms (total: 0.100 ms)
[DOWN] D3_gemm: 1.000 ms
[BWD TIMER] backward_down: 1.000 ms (total: 1.000 ms)
[BWD TIMER] backward_routing_weights: 0.500 ms (total: 1.500 ms)
[DOWN] D2_quantize: 0.000 ms (not needed)
[DOWN] D3_gemm: 41.123 ms
[BWD TIMER] backward_down: 42.000 ms (total: 42.000 ms)
[GU] base_pass(gate)+base_pass(up): 24.303 ms (fused)
[BWD TIMER] backward_routing_weights: 0.250 ms (total: 42.250 ms)
"""


class TestOptions:
    def test_defaults_are_those_of_the_class(self):
        options = parse([])
        assert options == Options(threads=options.threads, dense_dtype=options.dense_dtype)
        assert options.threads >= 1

    def test_quick_is_smaller_and_can_be_overridden(self):
        quick = parse(["--quick"])
        assert quick.steps < Options().steps
        assert quick.shape.hidden < Options().shape.hidden
        assert parse(["--quick", "--steps", "3"]).steps == 3

    def test_alpha_follows_the_rank_unless_given(self):
        assert parse(["--rank", "32"]).alpha == 64
        assert parse(["--rank", "32", "--alpha", "8"]).alpha == 8

    def test_a_checkpoint_is_trained_more_gently(self):
        assert parse(["--model", "x"]).learning_rate < parse([]).learning_rate
        assert parse(["--model", "x", "--learning-rate", "0.5"]).learning_rate == 0.5

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--rank", "0"],
            ["--steps", "0"],
            ["--compare-steps", "-1"],
            ["--compare-steps", str(10**10)],
            ["--learning-rate", "0"],
            ["--learning-rate", "inf"],
            ["--alpha", "nan"],
            ["--dtype", "float16"],
            ["--dense-dtype", "bfloat16", "--dtype", "float32"],
            ["--threads", "two"],
            ["--threads", "5000"],
            ["--seed", str(2**32)],
            ["--alpha", "1e300"],
            ["--rank", str(10**9)],
            ["--steps", str(10**10)],
            ["--base-steps", str(10**10)],
            ["--batch-size", str(10**9)],
            ["--sequence-length", str(10**9)],
            ["--base-steps", "3", "--model", "x"],  # a checkpoint's base is not trained
            ["--cache-dir", "x"],  # nothing to convert
            ["--model", ""],  # to Path the current directory
            ["--data", ""],
            ["--output", ""],
            *([flag, os.fsdecode(b"o\xff")] for flag in ("--output", "--data", "--model", "--cache-dir")),
            ["--unknown"],
        ],
    )
    def test_what_makes_no_sense_is_refused(self, arguments, capsys):
        with pytest.raises(SystemExit) as raised:
            parse(arguments)
        assert raised.value.code == 2
        assert arguments[0] in capsys.readouterr().err

    def test_a_directory_that_is_not_utf8_is_refused_too(self, tmp_path, monkeypatch, capsys):
        folder = tmp_path / os.fsdecode(b"o\xff")
        folder.mkdir()
        monkeypatch.chdir(folder)
        for arguments in ([], ["--output", "out"]):
            with pytest.raises(SystemExit, match="2"):
                parse(arguments)
            assert r"--output: expected a path in UTF-8, got " in capsys.readouterr().err
        (tmp_path / "ünïcode").mkdir()
        monkeypatch.chdir(tmp_path / "ünïcode")
        assert parse(["--output", "out"]).output == Path("out")

    def test_all_but_the_experts_is_in_what_torch_multiplies_fast(self, monkeypatch):
        for fast, dense in ((True, "bfloat16"), (False, "float32")):
            monkeypatch.setattr("amx_sft_moe.checkpoints.dense.torch_multiplies_bf16", lambda fast=fast: fast)
            assert parse([]).dense_dtype == dense
            assert parse(["--dtype", "float32"]).dense_dtype == "float32"
            assert parse(["--dense-dtype", "bfloat16"]).dense_dtype == "bfloat16"
            assert parse(["--dense-dtype", "float32"]).dtypes == "bfloat16 (experts) and float32 (the rest)"

    def test_options_that_go_together(self):
        assert parse(["--base-steps", "3"]).base_steps == 3
        assert parse(["--model", "x", "--cache-dir", "y"]).cache_dir == Path("y")

    def test_threads_are_those_of_the_environment_unless_given(self, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
        assert parse([]).threads == 7
        assert parse(["--threads", "3"]).threads == 3

    def test_threads_of_the_environment_have_the_same_limit(self, monkeypatch, capsys):
        monkeypatch.setenv("OMP_NUM_THREADS", "5000")
        with pytest.raises(SystemExit):
            parse([])
        assert "--threads: expected at most 4096, got 5000" in capsys.readouterr().err
        assert parse(["--threads", "4096"]).threads == 4096

    def test_options_are_plain_json(self):
        values = parse(["--model", "a/b"]).as_json()
        assert values["model"] == str(Path("a/b"))
        assert values["shape"]["experts"] == Options().shape.experts


def test_text_is_written_whole(tmp_path):
    write_text(tmp_path / "report.md", "text\n")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "report.md", "half \udc00")
    assert (tmp_path / "report.md").read_text() == "text\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_metrics_are_json_whatever_the_numbers(tmp_path):
    values = {
        "losses": [1.0, float("nan")],
        "lane": {"loss": float("inf")},
        "held_out": [(0, float("-inf"))],
        "n": 3,
    }
    write_metrics(SimpleNamespace(as_json=lambda: values), tmp_path / "metrics.json")

    def refuse(name):
        raise AssertionError(name)

    found = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=refuse)
    assert found == {"losses": [1.0, None], "lane": {"loss": None}, "held_out": [[0, None]], "n": 3}


def test_too_many_threads_are_not_the_kernels_fault():
    assert hook.register("auto", 4096, torch.float32)
    with pytest.raises(FinetuneError, match=r"^--threads 4097: num_threads: expected at most 4096, got 4097"):
        hook.register("auto", 4097, torch.float32)
    hook.register("auto", 1, torch.float32)


class TestDump:
    def test_the_last_backward_is_found(self):
        lines = hook.last_backward(DUMP).splitlines()
        assert lines == DUMP.splitlines()[4:]
        # After a forward and without an earlier backward it is the same.
        assert hook.last_backward("\n".join([DUMP.splitlines()[0], *lines])) == "\n".join(lines)

    def test_it_is_read_into_phases_and_groups(self):
        phases, groups = hook.parse_dump(hook.last_backward(DUMP))
        assert phases == {"D2_quantize": 0.0, "D3_gemm": 41.123, "base_pass(gate)+base_pass(up)": 24.303}
        assert groups == {"backward_down": 42.0, "backward_routing_weights": 0.25}


class _Time:
    """Stands for the module: time passes only where somebody says so, however busy the machine is."""

    now = 0.0

    @classmethod
    def perf_counter(cls):
        return cls.now

    @classmethod
    def sleep(cls, seconds):
        cls.now += seconds


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        _Time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _Time.sleep(2 * ctx.seconds)
        return gradient, None


class _Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, expert_ids, routing_weights):
        return _Sleep.apply(x * self.weight, 1.0) * routing_weights.sum(1, keepdim=True)


class TestClock:
    def test_it_sees_the_experts_and_nothing_else(self, monkeypatch):
        monkeypatch.setattr(clock_module, "time", _Time)
        experts = [_Experts(), _Experts()]
        clock = ExpertClock()
        x = torch.randn(3, 4, requires_grad=True)
        ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
        with clock.attached(experts):
            y = _Sleep.apply(x, 16.0)
            for module in experts:
                y = _Sleep.apply(module(y, ids, weights), 16.0)
            y.sum().backward()
        assert (clock.forward, clock.backward, clock.total) == (2.0, 4.0, 6.0)
        clock.reset()
        assert clock.total == 0
        experts[0](x, ids, weights).sum().backward()
        assert clock.total == 0  # detached

    def test_it_changes_no_gradient_and_allows_no_grad(self):
        module = _Experts()
        ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.rand(3, 1, requires_grad=True)
        x = torch.randn(3, 4, requires_grad=True)
        expected = torch.autograd.grad(module(x, ids, weights).square().sum(), [x, weights, module.weight])
        with ExpertClock().attached([module]):
            found = torch.autograd.grad(module(x, ids, weights).square().sum(), [x, weights, module.weight])
            with torch.no_grad():
                assert not module(x, ids, weights).requires_grad
            # As in a first layer that nothing trainable precedes.
            module(x.detach(), ids, weights.detach()).sum().backward()
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_lanes_leave_out_the_step_that_warms_up():
    lane = Lane("x", step=[9.0, 1.0, 3.0, 2.0], forward=[9.0, 0.5, 0.5, 0.5], backward=[9.0, 0.5, 0.5, 0.5])
    assert lane.median("step") == 2.0
    assert lane.share == 0.5
    assert Lane("x", step=[9.0]).median("step") == 9.0


def test_compared_batches_use_each_row_once_before_any_comes_again():
    blocks = pack([Encoded([n] * 8, [-100] + [n] * 7) for n in range(10, 16)], 8, padding_id=1)
    batches = list(comparison.batches(blocks, 3, 4, seed=1))
    rows = [int(row[0]) for batch in batches for row in batch["input_ids"]]
    assert sorted(rows[:6]) == list(range(10, 16))
    assert len(set(rows[6:])) == 6
    again = comparison.batches(blocks, 3, 4, seed=1)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))
    assert rows != [
        int(row[0]) for batch in comparison.batches(blocks, 3, 4, seed=2) for row in batch["input_ids"]
    ]
    assert next(comparison.batches(blocks, 10**4, 4, seed=1))["input_ids"].equal(batches[0]["input_ids"])


def test_compared_batches_have_as_many_rows_as_those_of_training():
    blocks = pack([Encoded([n] * 8, [-100] + [n] * 7) for n in range(10, 13)], 8, padding_id=1)
    for batch in comparison.batches(blocks, 2, 100, seed=1):
        assert sorted(batch["input_ids"][:, 0].tolist()) == [10, 11, 12]


class _Losses(torch.nn.Module):
    """A language model of one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(20))

    def forward(self, input_ids, labels=None, position_ids=None, use_cache=None):
        logits = self.weight.expand(*input_ids.shape, -1)
        return CausalLMOutput(loss=self.weight.square().sum(), logits=logits)


def trained(model, scratch, rows=3, steps=2):
    """The curve of a short training."""
    blocks = pack([Encoded([n] * 8, [-100] + [n] * 7) for n in range(10, 10 + rows)], 8, padding_id=1)
    return train(
        model,
        blocks,
        blocks,
        title="  LoRA",
        steps=steps,
        batch_size=3,
        learning_rate=1e-3,
        seed=0,
        scratch=scratch,
    )


@pytest.mark.parametrize(("rows", "tokens"), [(2, 16), (3, 24), (6, 24)])
def test_a_step_counts_the_tokens_that_it_saw(rows, tokens, tmp_path):
    curve = trained(_Losses(), tmp_path, rows=rows)
    assert len(curve.step_seconds) == 2
    assert curve.tokens_per_step == tokens


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_however_few_steps_train_something(steps, tmp_path):
    model = _Losses()
    assert len(trained(model, tmp_path, steps=steps).losses) == steps
    assert (model.weight < 1).all()


class _Diverging(_Losses):
    """Its loss in training is no number from the third step on."""

    steps = 0

    def forward(self, input_ids, labels=None, position_ids=None, use_cache=None):
        found = super().forward(input_ids)
        if self.training:
            self.steps += 1
            found.loss = found.loss * (1.0 if self.steps < 3 else self.broken)
        return found


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_training(broken, tmp_path, capsys):
    model = _Diverging()
    model.broken = broken
    message = f"training has diverged: expected a finite loss, got {broken} in step 3 of 9$"
    with pytest.raises(DivergedError, match=message):
        trained(model, tmp_path, steps=9)
    assert model.steps == 3
    assert "loss 0.000" not in capsys.readouterr().err


def test_a_model_without_a_loss_is_not_trained(tmp_path):
    model = _Diverging()
    torch.nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(FinetuneError, match="a finite held-out loss before LoRA, got nan: nothing was kept"):
        trained(model, tmp_path)
    assert model.steps == 0


@pytest.mark.parametrize("name", ["my-model", "it's", 'a "model"', "back\\slash", "{base}", "ünïcode"])
def test_the_lines_that_load_the_adapter_run_from_any_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model_folder, base in ((Path(name), tmp_path / name), (None, tmp_path / name / "base-model")):
        lines = ast.parse(report.loading(Options(model=model_folder, output=Path(name))))
        texts = [node.value for node in ast.walk(lines) if isinstance(node, ast.Constant)]
        assert [text for text in texts if text != "auto"] == [str(base), str(tmp_path / name / "adapter")]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, as a system does where memory runs out$"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
        ("raise SystemExit('none of my formats')", "exit status 1\nnone of my formats$"),
    ],
)
def test_how_the_reading_process_ended_is_said(code, message, tmp_path, monkeypatch):
    (tmp_path / "reads.py").write_text(code)
    monkeypatch.setattr(adapter.held_out, "__file__", str(tmp_path / "reads.py"))
    blocks = pack([Encoded([3] * 8, [3] * 8)], 8, padding_id=1)
    with pytest.raises(FinetuneError, match=f"stock PEFT could not read here/adapter: {message}"):
        adapter.stock_loss(Path("base"), Path("here/adapter"), blocks, torch.float32, 1, 1, tmp_path)


def test_a_loss_that_is_no_number_is_no_result(tmp_path, monkeypatch):
    (tmp_path / "reads.py").write_text("""print('{"loss": NaN}')""")
    monkeypatch.setattr(adapter.held_out, "__file__", str(tmp_path / "reads.py"))
    blocks = pack([Encoded([3] * 8, [3] * 8)], 8, padding_id=1)
    with pytest.raises(FinetuneError, match="stock PEFT finds no finite loss with here/adapter: nan"):
        adapter.stock_loss(Path("base"), Path("here/adapter"), blocks, torch.float32, 1, 1, tmp_path)


def test_memory_is_what_the_control_group_leaves(tmp_path, monkeypatch, caplog):
    (tmp_path / "x.safetensors").write_bytes(bytes(1000))
    layer = torch.nn.Linear(10, 10)  # 440 bytes
    for left, room, warned in ((1, False, True), (440, False, True), (1200, True, False), (10**4, True, False)):
        monkeypatch.setattr(model, "available_memory", lambda left=left: left)
        assert model.room_for_copies(layer) is room
        caplog.clear()
        model._check_memory(tmp_path)
        assert bool(caplog.records) is warned
    assert model.room_for_copies(layer, 20) is True
    assert model.room_for_copies(layer, 30) is False


def test_tables_are_aligned():
    header, rows = ("what", "ms"), [("a", "1,000"), ("longer", "2")]
    assert tables.plain_table(header, rows).splitlines() == [
        "  what       ms",
        "  ------  -----",
        "  a       1,000",
        "  longer      2",
    ]
    assert tables.markdown_table(header, rows).splitlines() == [
        "| what   |    ms |",
        "| ------ | ----: |",
        "| a      | 1,000 |",
        "| longer |     2 |",
    ]


def test_durations_and_milliseconds():
    assert tables.duration(42.4) == "42 s"
    assert tables.duration(187) == "3 min 07 s"
    assert tables.milliseconds(1.2345) == "1,234"
    assert tables.milliseconds(0.01234) == "12.3"


@pytest.mark.parametrize(("dense", "copies"), [("bfloat16", 1), ("float32", 2)])
def test_memory_of_the_model_that_is_read_back(dense, copies, monkeypatch, tmp_path):
    """Stock PEFT has it whole in the dtype of the rest."""
    asked = []
    monkeypatch.setattr(model, "room_for_copies", lambda of, count=1: asked.append(count))
    wanted = Options(dtype="bfloat16", dense_dtype=dense, output=tmp_path)
    said = SimpleNamespace(fact=lambda *words: asked.append(words[1]))
    saved = SimpleNamespace(loss=1.0, bytes=0)
    stages.read_back(wanted, None, SimpleNamespace(model=None), None, tmp_path, saved, said)
    assert asked[0] == copies
    assert "memory is short for a second model" in asked[1]


def test_a_run_whose_held_out_examples_are_too_long_says_so():
    with pytest.raises(FinetuneError, match="no held-out example, of 1, has a token to predict within 256"):
        require_any([], 256, "held-out example, of 1,")


def test_quick_says_what_it_takes_of_the_users_examples(tmp_path, capsys):
    lines = [json.dumps({"prompt": f"{n}?", "completion": f"{n}!"}) for n in range(250)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    said = []
    wanted = parse(["--quick", "--model", "x", "--data", str(tmp_path / "pairs.jsonl")])
    stages.read_text(wanted, SimpleNamespace(fact=lambda *words: said.append(words)))
    assert said[-1][1].endswith("held out: pairs.jsonl (200 of 250, as --quick takes them)")
