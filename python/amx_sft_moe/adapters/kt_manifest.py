"""``kt_adapter_manifest.json`` of a KTransformers adapter: writing it, and what of it no longer holds.

Facts read in kt-kernel 0.7.2 (``sft/artifacts.py``): loading wants version 1, status ``ready``, the rank and
alpha of the adapter, and for each file of ``artifacts`` (adapter_config.json, one standard adapter file and the
experts' file at least) its size and SHA-256, for the last its tensors' shapes and dtypes; a symbolic link is
refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors import safe_open

from amx_sft_moe.adapters.files import (
    CONFIG,
    KT_MANIFEST,
    KT_WEIGHTS,
    PICKLED,
    WEIGHTS,
    read_json,
    save_json,
)
from amx_sft_moe.errors import ArgumentError


def write_manifest(directory: Path) -> None:
    """The manifest for the files of ``directory``, which are complete by now."""
    config = read_json(directory / CONFIG)
    artifacts = {name: _record(directory / name) for name in sorted((CONFIG, WEIGHTS, KT_WEIGHTS))}
    artifacts[KT_WEIGHTS] |= _contents(directory / KT_WEIGHTS)
    save_json(
        {
            "version": 1,
            "status": "ready",
            "expert_weight_format": "bf16",
            "base": {"model_name_or_path": config.get("base_model_name_or_path")},
            "lora": _lora_of(config),
            "artifacts": artifacts,
        },
        directory / KT_MANIFEST,
    )


def manifest_problems(directory: Path) -> list[str]:
    """What KTransformers would refuse of the manifest whatever the model is, a sentence each; empty: nothing,
    or there is none. Whether base and shapes are the model's own is not looked at.

    Reads each file that it names once, whole.
    """
    path = directory / KT_MANIFEST
    if path.is_symlink():
        return [f"{path}: expected a file, got a link"]
    if not path.exists():
        return []
    try:
        manifest = read_json(path)
        config = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    except ArgumentError as reason:
        return [str(reason)]
    artifacts = manifest.get("artifacts")
    if not isinstance(artifacts, dict) or not {CONFIG, KT_WEIGHTS} <= set(artifacts):
        return [f"{path}: expected artifacts with {CONFIG} and {KT_WEIGHTS}, got {str(artifacts)[:80]}"]
    problems = []
    if len(standard := {WEIGHTS, PICKLED} & set(artifacts)) != 1:
        problems.append(f"{path}: expected {WEIGHTS} or {PICKLED} among the artifacts, got {sorted(standard)}")
    if not manifest.get("expert_weight_format") and not {"non_expert_cache", "int8_experts"} <= set(manifest):
        problems.append(f"{path}: expected expert_weight_format, got none")
    expected = {"version": 1, "status": "ready", "lora": _lora_of(config)}
    problems += [
        f"{path}: {key}: expected {wanted}, got {str(manifest.get(key))[:80]}"
        for key, wanted in expected.items()
        if manifest.get(key) != wanted
    ]
    for name, record in artifacts.items():
        try:
            problem = _changed(directory, name, record)
        except OSError as reason:
            problem = f"{path}: {name[:80]}: expected a file that can be read, got {reason.strerror}"
        if problem:
            problems.append(problem)
    return problems


def _lora_of(config: dict[str, Any]) -> dict[str, Any]:
    return {"rank": config.get("r"), "alpha": config.get("lora_alpha")}


def _changed(directory: Path, name: str, record: Any) -> str:
    """What an artifact no longer has of its record; empty: nothing."""
    where = f"{directory / KT_MANIFEST}: {name}"
    if Path(name).name != name or not isinstance(record, dict):
        return f"{where}: expected a file beside it, with size and sha256"
    path = directory / name
    if path.is_symlink() or not path.is_file():
        return f"{where}: expected a file, got {'a link' if path.is_symlink() else 'none'}"
    found = _record(path) | (_contents(path) if name == KT_WEIGHTS else {})
    for key, value in found.items():
        if record.get(key) != value:
            return f"{where}: expected {key} {str(record.get(key))[:80]}, got {str(value)[:80]}"
    return ""


def _record(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _contents(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt", device="cpu") as handle:
        slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
        tensors = {
            key: {"shape": list(part.get_shape()), "dtype": part.get_dtype()} for key, part in slices.items()
        }
    return {"tensor_count": len(tensors), "tensors": dict(sorted(tensors.items()))}
