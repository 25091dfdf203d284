"""Build the kernel into build/, as kernel-builder would.

A torch-noarch kernel has nothing to compile: a variant is the package's files, a generated _ops.py and metadata.json.
This writes them without Nix, for tests, examples and CI; publishing goes through kernel-builder itself.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import card, provenance
from .config import ROOT, Config, source_files
from .ops_template import ops_source

# The release of `kernels` whose formats are written here, and the oldest one that loads them.
FORMAT_VERSION = "0.17.2"
KERNELS_MINVER = "0.14.0"


def build(config: Config, out: Path, backends: Sequence[str] | None = None, unique_id: str | None = None) -> str:
    """Write one variant per backend and the rendered card to `out`, replacing it as a whole; returns the unique id.

    Everything is written next to `out` first and moved there at the end: a failure leaves the old build in place.
    """
    backends = config.backends if backends is None else backends
    unique_id = provenance.unique_id(config) if unique_id is None else unique_id
    _check(config, out, backends, unique_id)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as staging:
        new = Path(staging) / "new"
        for backend in backends:
            _write_variant(config, new / f"torch-{backend}", backend, unique_id)
        (new / "CARD.md").write_text(card.render(config), encoding="utf-8")
        if out.exists():
            out.rename(Path(staging) / "old")
        new.rename(out)
    return unique_id


def _check(config: Config, out: Path, backends: Sequence[str], unique_id: str) -> None:
    unknown = sorted(set(backends) - set(config.backends))
    if unknown:
        raise ValueError(f"build.toml has no backend {', '.join(unknown)}; it has {', '.join(config.backends)}")
    if not re.fullmatch(r"[0-9A-Za-z_]+", unique_id):
        raise ValueError(f"the unique id {unique_id!r} must be letters, digits and underscores: it names a module")
    if not (config.package / "__init__.py").is_file():
        raise ValueError(f"there is no package at {config.package}")
    foreign = [path.name for path in out.iterdir() if not _is_ours(path)] if out.exists() else []
    if foreign:
        raise ValueError(f"{out} holds {foreign[0]}, which no build wrote; it would be deleted")


def _is_ours(path: Path) -> bool:
    return path.name == "CARD.md" or (path.is_dir() and path.name.startswith("torch-"))


def _write_variant(config: Config, variant: Path, backend: str, unique_id: str) -> None:
    for name in config.shipped_files():
        target = variant / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((config.package / name).read_bytes())
    (variant / "_ops.py").write_text(ops_source(config.module, unique_id), encoding="utf-8")
    metadata = json.dumps(_metadata(config, variant, backend, unique_id), indent=2)
    (variant / "metadata.json").write_text(metadata, encoding="utf-8")


def _metadata(config: Config, variant: Path, backend: str, unique_id: str) -> dict:
    metadata = {
        "name": config.name,
        "id": f"_{config.module}_{backend}_{unique_id}",
        "version": config.version,
        "kernels-minver": KERNELS_MINVER,
        "license": config.license,
        "upstream": config.upstream,
        "source": config.source,
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": digest(variant),
        "provenance": {"kernel-builder": {"version": FORMAT_VERSION}},
    }
    state = provenance.git_state(config)
    if state is not None:
        metadata["provenance"]["kernel"] = {"commit": state.commit, "dirty": state.dirty}
    return {key: value for key, value in metadata.items() if value is not None}


def digest(variant: Path) -> dict:
    """The hashes of a variant's files, in the form of `kernel-builder hash`."""
    files = {}
    for path in source_files(variant):
        name = path.relative_to(variant).as_posix()
        if name not in ("metadata.json", "metadata.json.sigstore"):
            files[name] = base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
    return {"algorithm": "sha256", "files": dict(sorted(files.items()))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.build", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write (default: build/ in the checkout)")
    parser.add_argument("--backends", help="comma-separated (default: all of build.toml)")
    parser.add_argument("--unique-id", help="default: from git, or from the files where git cannot tell")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to build (default: this one)")
    args = parser.parse_args(argv)
    config = Config.load(args.root)
    out = args.out or args.root / "build"
    try:
        unique_id = build(config, out, args.backends.split(",") if args.backends else None, args.unique_id)
    except ValueError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    variants = ", ".join(sorted(path.name for path in out.glob("torch-*")))
    print(f"built {config.name} {unique_id} with {len(config.shipped_files())} files in {out}: {variants}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
