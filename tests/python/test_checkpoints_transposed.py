"""The one-time conversion of experts that lie transposed or in mxfp4: exact, resumable, bounded."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from amx_sft_moe import ArgumentError
from amx_sft_moe.checkpoints import CheckpointFiles, load_model, routed_experts, transposed
from checkpoint_folders import E, H, I, edit_config, make, write
from test_checkpoints import ids, mapped_file, stock

WEIGHTS = [f"model.layers.{n}.mlp.experts.{name}" for n in range(2) for name in ("down_proj", "gate_up_proj")]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "gpt-oss", "gpt_oss", torch.bfloat16)


@pytest.fixture
def written(monkeypatch):
    """Parameters that were converted, in order."""
    names: list[str] = []
    original = transposed._write

    def write(file, one, *rest):
        original(file, one, *rest)
        names.append(one.parameter)

    monkeypatch.setattr(transposed, "_write", write)
    return names


def load(folder: Path, **options):
    return load_model(folder, progress=False, **options)


def cache(folder: Path) -> Path:
    """Where the files of the one state that was loaded are."""
    (found,) = (folder / transposed.FOLDER).iterdir()
    return found


def test_a_folder_whose_files_cannot_be_locked(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(transposed.fcntl, "flock", refuse)
    with pytest.raises(ArgumentError, match=r"^cache_dir: .*files can be locked.* got .*No locks available$"):
        load(folder)


def test_parameters_are_views_of_the_converted_files(folder):
    model, expected = load(folder), stock(folder, torch.bfloat16)
    for (path, module), (_, reference) in zip(routed_experts(model), routed_experts(expected), strict=True):
        assert module.gate_up_proj.shape == (E, H, 2 * I)
        assert module.gate_up_proj.stride() == (2 * I * H, 1, H)
        assert module.down_proj.stride() == (H * I, 1, I)
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(module, name), getattr(reference, name))
            assert mapped_file(getattr(module, name)) == f"{path}.{name}.safetensors"
            with safe_open(cache(folder) / f"{path}.{name}.safetensors", "pt") as file:
                assert torch.equal(file.get_tensor(f"{path}.{name}"), getattr(reference, name).transpose(1, 2))


def test_a_finished_conversion_is_reused(folder, written):
    load(folder)
    assert sorted(written) == WEIGHTS
    load(folder)
    assert len(written) == len(WEIGHTS)


def test_an_interrupted_conversion_goes_on(folder, written, monkeypatch):
    original = transposed._write

    def interrupted(file, one, *rest):
        original(file, one, *rest)
        if len(written) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(transposed, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(folder)
    assert not list(cache(folder).glob(".*partial"))
    model = load(folder)
    assert sorted(written) == sorted([*WEIGHTS, written[2]])  # only the one in the middle, again
    assert torch.equal(model(ids()).logits, load(folder)(ids()).logits)


def test_leftovers_of_a_killed_process_are_removed(folder, written):
    load(folder)
    lost = cache(folder) / f"{WEIGHTS[2]}.safetensors"
    left = lost.with_name(f".{WEIGHTS[0]}.safetensors.partial")
    left.write_bytes(lost.read_bytes()[:100])
    lost.unlink()
    foreign = [place / ".download.partial" for place in (lost.parent, lost.parent.parent)]
    for path in foreign:
        path.write_text("of another program")
    load(folder)
    assert written[4:] == [WEIGHTS[2]]
    assert not left.exists()
    assert all(path.exists() for path in foreign)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_file_is_made_anew(folder, written, damage):
    expected = load(folder)(ids()).logits
    path = cache(folder) / f"{WEIGHTS[0]}.safetensors"
    path.write_bytes({"cut": path.read_bytes()[:-2], "garbage": b"\xff" * 64, "empty": b""}[damage])
    assert torch.equal(load(folder)(ids()).logits, expected)
    assert written[4:] == [WEIGHTS[0]]


def test_a_changed_checkpoint_is_noticed(folder, written, tmp_path):
    load(folder)
    other = make("gpt_oss", torch.bfloat16)
    with torch.no_grad():
        other.model.layers[1].mlp.experts.down_proj.mul_(2)
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    other.save_pretrained(tmp_path / "new", max_shard_size="15KB")
    shard = CheckpointFiles(folder).file_of(WEIGHTS[2])
    os.replace(tmp_path / "new" / shard.name, shard)
    model = load(folder)
    assert WEIGHTS[2] in written[4:]
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, other.model.layers[1].mlp.experts.down_proj)


def test_a_folder_of_ones_own(folder, written, tmp_path):
    load(folder, cache_dir=tmp_path / "deep" / "cache")
    assert not (folder / transposed.FOLDER).exists()
    assert len(list((tmp_path / "deep" / "cache").glob("*/*.safetensors"))) == len(WEIGHTS)
    load(folder, cache_dir=tmp_path / "deep" / "cache")
    assert len(written) == len(WEIGHTS)


def test_checkpoints_share_a_folder(folder, written, tmp_path):
    other = make("gpt_oss", torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    other.save_pretrained(tmp_path / "other", max_shard_size="15KB")
    loaded = [load(path, cache_dir=tmp_path / "cache") for path in (folder, tmp_path / "other")]
    assert len(written) == 2 * len(WEIGHTS)
    for path in (folder, tmp_path / "other"):
        load(path, cache_dir=tmp_path / "cache")
    assert len(written) == 2 * len(WEIGHTS)
    states = [model.state_dict() for model in loaded]
    for name in WEIGHTS:
        assert torch.equal(2 * states[0][name], states[1][name])


def test_checkpoints_of_one_time_and_size_share_a_folder(folder, tmp_path):
    """As a Nix store or an archive of reproducible files has them: only the numbers differ."""
    other = make("gpt_oss", torch.bfloat16)
    with torch.no_grad():
        for _, module in routed_experts(other):
            module.down_proj.mul_(2)
    other.save_pretrained(tmp_path / "other", max_shard_size="15KB")
    places = (folder, tmp_path / "other")
    for path in (file for place in places for file in place.iterdir()):
        os.utime(path, (1, 1))
    states = [load(path, cache_dir=tmp_path / "cache").state_dict() for path in places]
    for name in WEIGHTS:
        assert torch.equal(states[1][name], states[0][name] * (2 if "down" in name else 1))


class TestFingerprint:
    """Of a file with an expert tensor of some megabytes, a small one, and one that is none."""

    SIZE = 3 * transposed._BLOCKS * transposed._BLOCK + 5

    @pytest.fixture
    def file(self, tmp_path):
        state = {"large": self.SIZE, "other": 99, "small": 77}
        path = tmp_path / "model.safetensors"
        save_file({name: torch.zeros(size, dtype=torch.uint8) for name, size in state.items()}, path)
        return path

    def notices(self, path: Path, name: str, index: int, kept: bool = True) -> bool:
        """Whether one byte of a tensor, changed in place, makes another print."""
        before = transposed._fingerprint(path, ["large", "small"])
        times = path.stat().st_mtime_ns
        raw = bytearray(path.read_bytes())
        header = int.from_bytes(raw[:8], "little")
        start, end = json.loads(raw[8 : 8 + header])[name]["data_offsets"]
        raw[8 + header + start + range(end - start)[index]] ^= 1
        path.write_bytes(raw)
        os.utime(path, ns=(times, times if kept else times + 1))
        return transposed._fingerprint(path, ["large", "small"]) != before

    @pytest.mark.parametrize("index", [0, transposed._BLOCK - 1, -transposed._BLOCK, -1])
    def test_ends_of_a_large_tensor_are_read(self, file, index):
        assert self.notices(file, "large", index)

    @pytest.mark.parametrize("index", [0, 38, -1])
    def test_all_of_a_small_tensor_is_read(self, file, index):
        assert self.notices(file, "small", index)

    def test_what_is_not_noticed(self, file):
        assert not self.notices(file, "other", 0)
        assert not self.notices(file, "large", transposed._BLOCK)
        assert self.notices(file, "large", transposed._BLOCK, kept=False)

    @pytest.mark.parametrize("length", [0, 1, 4096, 3 * 4096, 3 * 4096 + 1, 10**6, 6 * 10**10])
    @pytest.mark.parametrize("count", [2, 3, 1024])
    def test_blocks_are_few_and_spread_evenly(self, length, count):
        blocks = transposed._sampled(length, count)
        ends = [offset + size for offset, size in blocks]
        assert blocks[0][0] == 0
        assert ends[-1] == length
        assert sum(size for _, size in blocks) == min(length, count * 4096)
        gaps = [after - end for (after, _), end in zip(blocks[1:], ends, strict=False)]
        assert all(gap >= 0 for gap in gaps)
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_was_written_is_read_before_the_lock_is_released(folder, monkeypatch):
    held = []
    locked, read = transposed._locked, transposed._read

    @contextmanager
    def watched(place):
        with locked(place):
            held.append(place)
            yield
            held.pop()
            for path in place.glob("*.safetensors"):
                path.write_bytes(b"another process's")

    found = []

    def reading(*arguments):
        found.append((bool(held), read(*arguments)))
        return found[-1][1]

    monkeypatch.setattr(transposed, "_locked", watched)
    monkeypatch.setattr(transposed, "_read", reading)
    load(folder)
    assert all(inside for inside, tensor in found if tensor is not None)


def test_too_little_space_is_said_before_anything_is_written(folder, written, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, transposed._RESERVE))
        with pytest.raises(
            ArgumentError, match=r"cache_dir: expected 67,154,944 bytes of free .* got 67,108,864 in "
        ):
            load(folder)
    assert written == []
    load(folder)
    # Another process has written all of it when this one gets the lock.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 0))
    absent, read = set(WEIGHTS), transposed._read

    def late(place, one, stamp):
        if one.parameter in absent:
            absent.remove(one.parameter)
            return None
        return read(place, one, stamp)

    monkeypatch.setattr(transposed, "_read", late)
    load(folder)
    assert len(written) == len(WEIGHTS)


def test_a_folder_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=rf"cache_dir: expected a folder that can be written, .*{tmp_path}"):
        load(folder, cache_dir=tmp_path / "file")


def test_a_disk_that_fills_up(folder, monkeypatch):
    def full(file, one, *rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transposed, "_write", full)
    with pytest.raises(ArgumentError, match=r"cache_dir: expected room to write .*: No space left"):
        load(folder)
    assert os.listdir(cache(folder)) == [".lock"]


def test_progress_is_shown(folder, capsys):
    load_model(folder)
    shown = re.split(r"[\r\n]+", capsys.readouterr().err)
    assert any(line.startswith("experts, once: 100%") for line in shown)


def test_memory_is_bounded_by_one_expert(folder, monkeypatch):
    sizes = []
    original = transposed.Conversion.__init__

    def counted(self, *fields):
        expert = fields[-1]

        def one(index):
            matrix = expert(index)
            sizes.append(matrix.numel())
            return matrix

        original(self, *fields[:-1], one)

    monkeypatch.setattr(transposed.Conversion, "__init__", counted)
    load(folder)
    assert sorted(sizes) == sorted([2 * I * H] * 2 * E + [I * H] * 2 * E)


def test_another_dtype_needs_no_conversion(folder, written):
    model = load(folder, dtype=torch.float32)
    assert written == []
    assert torch.allclose(model(ids()).logits, stock(folder)(ids()).logits, atol=1e-5)


class TestMxfp4:
    @pytest.fixture
    def folder(self, tmp_path):
        """A checkpoint as gpt-oss is published: experts in blocks of 32 with a scale each."""
        model = make("gpt_oss", torch.bfloat16, intermediate_size=64)
        random = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

        state = {}
        for name, tensor in model.state_dict().items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                state[name] = tensor
                continue
            e, columns, rows = tensor.shape
            state[f"{name}_blocks"] = draw(e, rows, columns // 32, 16)
            state[f"{name}_scales"] = 118 + draw(e, rows, columns // 32) % 6
        model.config.save_pretrained(tmp_path)
        edit_config(tmp_path, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    def test_the_numbers_are_transformers_own(self, folder, written):
        expected = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
        )
        model = load(folder)
        assert len(written) == len(WEIGHTS)
        assert not hasattr(model.config, "quantization_config")
        for (_, module), (_, reference) in zip(routed_experts(model), routed_experts(expected), strict=True):
            for name in ("gate_up_proj", "down_proj"):
                assert torch.equal(getattr(module, name), getattr(reference, name))
                assert mapped_file(getattr(module, name)).endswith(f"{name}.safetensors")
        load(folder)
        assert len(written) == len(WEIGHTS)

    @pytest.mark.parametrize(("kind", "kept"), [("blocks", "scales"), ("scales", "blocks")])
    def test_half_of_it_is_refused(self, folder, kind, kept):
        files = CheckpointFiles(folder)
        state = {name: files.tensor(name).clone() for name in files if not name.endswith(f"down_proj_{kind}")}
        save_file(state, folder / "model.safetensors")
        with pytest.raises(ArgumentError, match=rf"down_proj: expected mxfp4 blocks and .*\['{kept}"):
            load(folder)
