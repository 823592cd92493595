"""``kt_adapter_manifest.json`` of a KTransformers adapter: writing it, and what of it no longer holds.

Facts read in kt-kernel 0.7.2 (``sft/artifacts.py``): loading wants version 1, status ``ready``, the rank and
alpha of the adapter, and for each file of ``artifacts`` (adapter_config.json, one standard adapter file and the
experts' file at least) its size and SHA-256; a symbolic link is refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors import safe_open

from amx_sft_moe.adapters.files import CONFIG, KT_MANIFEST, KT_WEIGHTS, WEIGHTS, read_json, save_json
from amx_sft_moe.errors import ArgumentError


def write_manifest(directory: Path) -> None:
    """The manifest for the files of ``directory``, which are complete by now."""
    config = read_json(directory / CONFIG)
    with safe_open(directory / KT_WEIGHTS, framework="pt", device="cpu") as handle:
        slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
        tensors = {
            key: {"shape": list(part.get_shape()), "dtype": part.get_dtype()} for key, part in slices.items()
        }
    artifacts = {name: _record(directory / name) for name in sorted((CONFIG, WEIGHTS, KT_WEIGHTS))}
    artifacts[KT_WEIGHTS] |= {"tensor_count": len(tensors), "tensors": dict(sorted(tensors.items()))}
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
    """What KTransformers would refuse of the manifest, a sentence each; empty: nothing, or there is none.

    Reads each file that it names once, whole.
    """
    path = directory / KT_MANIFEST
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
    expected = {"version": 1, "status": "ready", "lora": _lora_of(config)}
    problems = [
        f"{path}: {key}: expected {wanted}, got {str(manifest.get(key))[:80]}"
        for key, wanted in expected.items()
        if manifest.get(key) != wanted
    ]
    changes = [_changed(directory, name, record) for name, record in artifacts.items()]
    return problems + [change for change in changes if change]


def _lora_of(config: dict[str, Any]) -> dict[str, Any]:
    return {"rank": config.get("r"), "alpha": config.get("lora_alpha")}


def _changed(directory: Path, name: str, record: Any) -> str:
    where = f"{directory / KT_MANIFEST}: {name}"
    if Path(name).name != name or not isinstance(record, dict):
        return f"{where}: expected a file beside it, with size and sha256"
    path = directory / name
    if path.is_symlink() or not path.is_file():
        return f"{where}: expected a file, got {'a link' if path.is_symlink() else 'none'}"
    found = _record(path)
    for key, value in found.items():
        if record.get(key) != value:
            return f"{where}: expected {key} {record.get(key)}, got {value}: it is not the file of then"
    return ""


def _record(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}
