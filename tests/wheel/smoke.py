"""An installed wheel, with numpy and nothing else: what a user without a compiler has in the first minute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import amx_sft_moe

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, RANK, TOKENS = 5, 2, 48, 36, 3, 11
TOLERANCE = 1e-5  # relative, for fp32 arithmetic


def expect(condition: bool, what: object) -> None:
    """Ends the program where something is not as it must be."""
    if not condition:
        sys.exit(f"smoke test: {what}")


class Layer:
    """One layer's inputs in fp32, and y in float64. Inputs by name: ``x`` and the six LoRA factors."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)

        def normal(scale: float, *shape: int) -> np.ndarray:
            return random.normal(0, scale, shape).astype(np.float32)

        self.inputs = {"x": normal(1, TOKENS, HIDDEN)}
        self.base: dict[str, np.ndarray] = {}
        for name, rows, columns in (
            ("gate", INTERMEDIATE, HIDDEN),
            ("up", INTERMEDIATE, HIDDEN),
            ("down", HIDDEN, INTERMEDIATE),
        ):
            self.base[name] = normal(0.2, EXPERTS, rows, columns)
            self.inputs[f"{name}_lora_a"] = normal(0.2, EXPERTS, RANK, columns)
            self.inputs[f"{name}_lora_b"] = normal(0.2, EXPERTS, rows, RANK)
        self.grad_y = normal(1, TOKENS, HIDDEN)
        self.expert_ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
        self.routing_weights = random.uniform(0.1, 1, (TOKENS, TOP_K)).astype(np.float32)

    def y(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """``[T, H]`` in float64; the LoRA scaling is 1."""
        wide = {name: value.astype(np.float64) for name, value in inputs.items()}
        merged = {
            name: weight.astype(np.float64) + wide[f"{name}_lora_b"] @ wide[f"{name}_lora_a"]
            for name, weight in self.base.items()
        }
        y = np.zeros((TOKENS, HIDDEN))
        for token, x in enumerate(wide["x"]):
            for expert, weight in zip(self.expert_ids[token], self.routing_weights[token], strict=True):
                gate = merged["gate"][expert] @ x
                hidden = gate / (1 + np.exp(-gate)) * (merged["up"][expert] @ x)
                y[token] += weight * (merged["down"][expert] @ hidden)
        return y

    def slope(self, name: str, direction: np.ndarray, step: float = 1e-5) -> float:
        """Derivative of ``sum(y * grad_y)`` along ``direction`` of one input, by a central difference."""
        value = self.inputs[name].astype(np.float64)
        ends = [self.y({**self.inputs, name: value + move * direction}) for move in (step, -step)]
        return float(np.sum((ends[0] - ends[1]) * self.grad_y)) / (2 * step)


def check_kernel(layer: Layer, kernel: str) -> None:
    """A forward against float64; of each gradient, its product with a direction against a difference."""
    op = amx_sft_moe.SftMoe(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, kernel=kernel)
    op.set_base(layer.base["gate"], layer.base["up"], layer.base["down"])
    op.set_lora(**{name: value for name, value in layer.inputs.items() if name != "x"})
    want = layer.y(layer.inputs)
    error = np.abs(op.forward_sft(layer.inputs["x"], layer.expert_ids, layer.routing_weights) - want).max()
    expect(error < TOLERANCE * np.abs(want).max(), f"{kernel}: y is off by {error}")
    gradients = op.backward(layer.grad_y)
    random = np.random.default_rng(8)
    for name, value in layer.inputs.items():
        gradient = gradients.grad_x if name == "x" else getattr(gradients, name)
        direction = random.normal(0, 1, value.shape)
        got, slope = float(np.sum(gradient * direction)), layer.slope(name, direction)
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        expect(size > 0, f"{kernel}: the gradient of {name} is zero")
        expect(abs(got - slope) < TOLERANCE * size, f"{kernel}: gradient of {name}: {got}, difference {slope}")


def check_onednn(found: dict[str, object]) -> str:
    """oneDNN does not come with the wheel: it works where the system has it, else the error says what to do."""
    if found["onednn"]:
        return f"onednn {found['onednn']}"
    try:
        amx_sft_moe.SftMoe(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, kernel="onednn")
    except amx_sft_moe.KernelError as error:
        expect("oneDNN" in str(error), f"onednn: the error does not say what is missing: {error}")
        return f"onednn refused: {error}"
    sys.exit("smoke test: kernel onednn without oneDNN")


def main() -> None:
    package = Path(amx_sft_moe.__file__).parent
    expect("site-packages" in package.parts, f"the package under test is {package}")
    expect((Path(amx_sft_moe.get_include()) / "amx_sft_moe/amx_sft_moe.hpp").is_file(), "no headers")
    expect((Path(amx_sft_moe.get_cmake_dir()) / "amx_sft_moe-config.cmake").is_file(), "no CMake files")
    found = amx_sft_moe.info()
    expect(len(found["openmp_libraries"]) == 1, f"OpenMP libraries: {found['openmp_libraries']}")
    layer = Layer()
    tried = [k["name"] for k in found["kernels"] if k["available"] and k["weights"] == "float32"]
    expect({"portable"} <= set(tried), f"kernels {tried}")
    for kernel in tried:
        check_kernel(layer, kernel)
    command = [sys.executable, "-m", "amx_sft_moe", "info", "--json"]
    parsed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    expect(parsed["version"] == amx_sft_moe.__version__, f"info: version {parsed['version']}")
    script = Path(sys.executable).parent / "amx-sft-moe"
    text = subprocess.run([script, "info"], capture_output=True, text=True, check=True).stdout
    expect("kernels, best first:" in text, text)
    sys.stdout.write(f"{text}\nfp32 kernels tried: {', '.join(tried)}; {check_onednn(found)}\n")


if __name__ == "__main__":
    main()
