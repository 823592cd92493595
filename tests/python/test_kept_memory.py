"""Large results lie in memory that is kept for the next ones (kept_memory.py)."""

from __future__ import annotations

import copy
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import amx_sft_moe
from amx_sft_moe.autograd import LoraFactors, sft_moe

E, K, H, INNER, R, T = 8, 2, 256, 192, 16, 80  # factors, x and y of 64 KiB and more
FACTORS = "gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b"


of_others = 0  # what tests before hold, in a fixture or a traceback


@pytest.fixture(autouse=True)
def empty() -> None:
    global of_others
    gc.collect()
    amx_sft_moe.empty_cache()
    of_others = amx_sft_moe.kept_memory()["in_use_bytes"]


def idle() -> int:
    return amx_sft_moe.kept_memory()["idle_bytes"]


def in_use() -> int:
    return amx_sft_moe.kept_memory()["in_use_bytes"] - of_others


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Layer:
    """An operator over random weights, torch's or numpy's."""

    def __init__(self, of_numpy: bool = False, scale: int = 1) -> None:
        torch.manual_seed(1)
        rank = R * scale
        convert = torch.Tensor.numpy if of_numpy else (lambda tensor: tensor)
        ins, outs = ((E, rank, H), (E, INNER, rank)), ((E, rank, INNER), (E, H, rank))
        shapes = *ins, *ins, *outs
        weights = (E, INNER, H), (E, INNER, H), (E, H, INNER)
        self.op = amx_sft_moe.SftMoe(num_experts=E, top_k=K, hidden_size=H, intermediate_size=INNER)
        self.op.set_base(*(convert(torch.randn(shape) * 0.1) for shape in weights))
        self.op.set_lora(**{n: convert(torch.randn(s) * 0.1) for n, s in zip(FACTORS, shapes, strict=True)})
        self.inputs = [convert(t) for t in (torch.randn(T, H), torch.randint(E, (T, K)), torch.rand(T, K))]
        self.grad_y = convert(torch.randn(T, H))

    def backward(self) -> amx_sft_moe.Gradients:
        self.op.forward_sft(*self.inputs, save_for_backward=True)
        return self.op.backward(self.grad_y)


def address(tensor: torch.Tensor | np.ndarray) -> int:
    return tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr()


def values(tensor: torch.Tensor | np.ndarray) -> np.ndarray:
    """A copy."""
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor.clone().numpy()


@pytest.mark.parametrize("of_numpy", [False, True])
class TestKept:
    def test_memory_of_gradients_that_are_gone_is_used_again(self, of_numpy: bool) -> None:
        layer = Layer(of_numpy)
        gradients = layer.backward()
        expected = {name: values(getattr(gradients, name)) for name in FACTORS}
        first = {address(getattr(gradients, name)) for name in FACTORS}
        assert len(first) == len(FACTORS)
        for name in FACTORS:
            getattr(gradients, name)[:] = float("nan")  # what is left there must not matter
        held = in_use()
        del gradients
        assert (in_use(), idle()) == (0, held)

        again = layer.backward()
        assert {address(getattr(again, name)) for name in FACTORS} == first
        assert (in_use(), idle()) == (held, 0)
        for name in FACTORS:
            np.testing.assert_array_equal(values(getattr(again, name)), expected[name])

    def test_what_anybody_still_sees_is_not_used_again(self, of_numpy: bool) -> None:
        layer = Layer(of_numpy)
        gradients = layer.backward()
        part = gradients.down_lora_b[1:, :, 3]
        before = values(part)
        del gradients
        others = [layer.backward() for _ in range(3)]
        np.testing.assert_array_equal(values(part), before)
        ends = sorted((address(g.down_lora_b), address(g.down_lora_b) + E * H * R * 4) for g in others)
        ends.append((address(part), address(part) + 4))
        assert all(a[1] <= b[0] for a, b in zip(sorted(ends), sorted(ends)[1:], strict=False))

    def test_never_more_than_was_in_use_at_one_time(self, of_numpy: bool) -> None:
        layer, most = Layer(of_numpy), 0
        for count in (1, 3, 2, 1, 4):
            held = [layer.backward() for _ in range(count)]
            most = max(most, in_use())
            assert in_use() + idle() <= most
            del held
            assert idle() <= most
        other = Layer(of_numpy, scale=2).backward()  # of other sizes: what is idle has none of them
        assert in_use() + idle() <= most
        del other

    def test_empty_cache_gives_idle_memory_back(self, of_numpy: bool) -> None:
        layer = Layer(of_numpy)
        held, gone = layer.backward(), layer.backward()
        expected = values(held.gate_lora_a)
        one = in_use() // 2
        del gone
        assert amx_sft_moe.empty_cache() == one
        assert (in_use(), idle()) == (one, 0)
        np.testing.assert_array_equal(values(held.gate_lora_a), expected)

    @pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="it keeps what was freed")
    def test_the_system_has_it_then(self, of_numpy: bool) -> None:
        layer = Layer(of_numpy, scale=16)
        torch.zeros(5 << 20)  # freed, it has the C library keep what is smaller
        gradients = layer.backward()
        held = torch.zeros(1 << 20)  # behind them
        kept, before = in_use(), resident()
        assert kept > 10 << 20
        del gradients
        amx_sft_moe.empty_cache()
        assert before - resident() > kept // 2
        del held

    def test_gradients_outlive_their_operator(self, of_numpy: bool) -> None:
        layer = Layer(of_numpy)
        gradients = layer.backward()
        expected = values(gradients.up_lora_b)
        del layer
        gc.collect()
        np.testing.assert_array_equal(values(gradients.up_lora_b), expected)


def experts_module() -> amx_sft_moe.nn.SftMoeExperts:
    weights = {"gate_up_proj": torch.randn(E, 2 * INNER, H), "down_proj": torch.randn(E, H, INNER)}
    return amx_sft_moe.nn.SftMoeExperts(K, **weights, lora_rank=R)


class TestTorch:
    def test_gradients_of_parameters_are_not_copied(self) -> None:
        experts = experts_module()
        ids, routing = torch.randint(E, (T, K)), torch.rand(T, K)
        for _ in range(3):
            experts(torch.randn(T, H), ids, routing).sum().backward()
            trained = [p for p in experts.parameters() if p.grad is not None]
            assert 0 < sum(p.grad.numel() * p.grad.element_size() for p in trained) <= in_use()
            here = {p.grad.data_ptr() for p in trained}
            experts.zero_grad(set_to_none=True)
            assert in_use() == 0
            experts(torch.randn(T, H), ids, routing).sum().backward()
            assert here == {p.grad.data_ptr() for p in trained}

    def test_saved_activations_are_kept_for_the_next_forward(self) -> None:
        experts = experts_module()
        x, ids, routing = torch.randn(T, H), torch.randint(E, (T, K)), torch.rand(T, K)
        y = experts(x, ids, routing)
        saved = in_use()
        assert saved >= 2 * T * K * INNER * 4
        del y
        assert (in_use(), idle()) == (0, saved)

    def test_gradients_of_factors_with_the_expert_last(self) -> None:
        experts = amx_sft_moe.nn.SftMoeExperts(
            K, gate_up_proj=torch.randn(E, 2 * INNER, H), down_proj=torch.randn(E, H, INNER)
        )
        down_a = torch.randn(R, INNER, E).permute(2, 0, 1).requires_grad_()  # as PEFT lays them out
        down_b = torch.randn(H, R, E).permute(2, 0, 1).requires_grad_()
        lora = LoraFactors((None, None, None, None, down_a, down_b))
        sft_moe(
            experts.experts(), torch.randn(T, H), torch.randint(E, (T, K)), torch.rand(T, K), lora
        ).sum().backward()
        assert down_a.grad.stride() == down_a.stride()
        held = down_a.numel() * 4 + down_b.numel() * 4
        assert in_use() >= held
        down_a.grad = down_b.grad = None
        assert in_use() == 0

    def test_y_and_the_gradient_of_x_are_of_torch(self) -> None:
        layer = Layer()
        y = layer.op.forward_sft(*layer.inputs, save_for_backward=True)
        grad_x = layer.op.backward(layer.grad_y).grad_x
        for tensor in (y, grad_x):
            tensor.untyped_storage().resize_(0)  # how activations are freed by some

    def test_gradients_are_tensors_like_others(self, tmp_path) -> None:
        gradient = Layer().backward().gate_lora_a
        expected = gradient.clone()
        torch.save(gradient, tmp_path / "gradient")
        for other in (torch.load(tmp_path / "gradient"), copy.deepcopy(gradient), gradient.share_memory_()):
            assert torch.equal(other, expected)
        assert gradient.is_contiguous()
        assert gradient.device.type == "cpu"
        assert not gradient.requires_grad

    def test_gone_in_another_thread(self) -> None:
        held = [Layer().backward()]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert in_use() == 0
        assert idle() > 0

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_forked_process_goes_on_by_itself(self) -> None:
        gradients = Layer().backward()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                held = in_use()
                del gradients
                status = 0 if (in_use(), idle()) == (0, held) and amx_sft_moe.empty_cache() == held else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert in_use() > 0
        assert torch.isfinite(gradients.gate_lora_a).all()
