"""The compiled module of kernel onednn; not in every build. See _core.pyi."""

onednn_version: str
provider: object  # a capsule for _core.info and _core.SftMoe
