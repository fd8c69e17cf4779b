"""Old addresses of pages: each sends the reader on to the page that took its place.

The part after `#` stays, so an old link to a section arrives there if it still exists.
"""

import posixpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


MOVED = {
    "api/attention": "api",
    "api/models": "api",
    "api/muon": "api",
    "api/newton_schulz": "api",
    "api/qk_clip": "api",
    "api/types": "api",
    "architecture": "how_it_works",
    "clip_problems": "troubleshooting",
    "devices_cost": "accelerators",
    "ema": "checkpoints",
    "errors_axes": "errors",
    "errors_devices": "errors",
    "evidence_method": "limits",
    "examples_more": "examples",
    "faq": "troubleshooting",
    "from_optax_rate": "from_optax",
    "frozen": "labels",
    "host_memory": "speed",
    "layouts_experts": "layouts",
    "parameters_change": "parameters",
    "per_head": "parameters_names",
    "precision": "speed",
    "qk_clip_custom": "kernels",
    "qk_clip_settings": "qk_clip",
    "reading": "how_it_works",
    "shard_map": "pmap",
    "shardings": "layouts",
    "spikes": "troubleshooting",
    "state_space": "vision",
    "statistics": "kernels",
    "torch_weights": "from_torch",
    "train_state": "quick_start_linen",
    "tuning_schedules": "tuning_rates",
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{to}">
<meta name="robots" content="noindex">
<script>location.replace("{to}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={to}">
</head>
<body><a href="{to}">This page has moved.</a></body>
</html>
"""


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    for old, new in MOVED.items():
        if not {f"{new}.md", f"{new}/index.md"} & {f.src_uri for f in files}:
            raise FileNotFoundError(f"{old} moved to {new}, which is no page.")
        content = PAGE.format(to=posixpath.relpath(new, old) + "/")
        files.append(File.generated(config, f"{old}/index.html", content=content))
    return files
