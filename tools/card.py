"""CARD.md to the README of the Hub repository. Needs jinja2, which renders what kernel-builder's minijinja renders."""

import jinja2

from .config import Config
from .public_api import exported_names, layer_names


def render(config: Config) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((config.root / "CARD.md").read_text(encoding="utf-8"))
    return template.render(
        repo_id=config.repo_id,
        version=config.version,
        license=config.license.lower(),
        source=config.source,
        upstream=config.upstream,
        functions=[name for name in exported_names(config.package / "__init__.py") if name != "layers"],
        layers=layer_names(config.package),
        has_benchmark=(config.root / "benchmarks" / "benchmark.py").exists(),
    )
