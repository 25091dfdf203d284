"""Check a build: variants, metadata, digests, and that all of it agrees with build.toml.

`kernels.get_kernel` never compares a kernel's files with its digest, so a build is checked here, before it is
published or used. Needs the `kernels` package, whose own parser and validator decide.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernels._rust import Build, Digest, DigestValidationError, DigestViolation, Metadata

from .config import ROOT, Config


def verify(config: Config, build: Path) -> list[str]:
    """Everything that is wrong with the build, one line each."""
    if not build.is_dir():
        return [f"{build} is not a directory; `make build` writes one"]
    problems = list(_config_problems(config))
    expected = {f"torch-{backend}" for backend in config.backends}
    present = {path.name for path in build.iterdir() if path.is_dir()}
    problems += [f"{name}: missing, but build.toml lists its backend" for name in sorted(expected - present)]
    problems += [f"{name}: not a variant of build.toml" for name in sorted(present - expected)]
    variants = {}
    for name in sorted(expected & present):
        try:
            variants[name] = Metadata.read_from_file(build / name / "metadata.json")
        except ValueError as error:
            problems.append(f"{name}: metadata.json can't be read: {error}")
    for name, metadata in variants.items():
        problems += [f"{name}: {problem}" for problem in _variant_problems(config, build / name, metadata)]
    problems += _disagreements(config, variants)
    if not (build / "CARD.md").is_file():
        problems.append("CARD.md: missing")
    return problems


def _config_problems(config: Config) -> Iterator[str]:
    try:
        Build.open(config.root)
    except ValueError as error:
        yield f"build.toml: {error}"


def _variant_problems(config: Config, variant: Path, metadata: Metadata) -> Iterator[str]:
    backend = str(metadata.backend.backend_type)
    for key, found, wanted in (
        ("name", str(metadata.name), config.name),
        ("version", metadata.version, config.version),
        ("license", metadata.license, config.license),
        ("source", metadata.source, config.source),
        ("backend", f"torch-{backend}", variant.name),
    ):
        if found != wanted:
            yield f"metadata.json has {key} {found!r}, expected {wanted!r}"
    unique_id = _unique_id(config, metadata)
    if unique_id is None:
        yield f"metadata.json has id {metadata.id!r}, expected _{config.module}_{backend}_<unique id>"
    elif f'_{unique_id}"' not in _read(variant / "_ops.py"):
        yield f"_ops.py doesn't build its namespace from the unique id {unique_id} of metadata.json"
    if metadata.digest is None:
        yield "metadata.json has no digest"
        return
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    except DigestValidationError as error:
        yield from map(describe_violation, error.violations)


def describe_violation(violation: DigestViolation) -> str:
    if isinstance(violation, DigestViolation.MissingFile):
        return f"{violation.path} is missing, but the digest lists it"
    if isinstance(violation, DigestViolation.UnknownFile):
        return f"{violation.path} is there, but the digest doesn't list it"
    if isinstance(violation, DigestViolation.HashMismatch):
        return f"{violation.path} was changed after the build: its hash is {violation.got}, not {violation.expected}"
    return str(violation)


def _unique_id(config: Config, metadata: Metadata) -> str | None:
    backend = str(metadata.backend.backend_type)
    match = re.fullmatch(f"_{config.module}_{backend}_([0-9A-Za-z_]+)", metadata.id)
    return match and match[1]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _disagreements(config: Config, variants: dict[str, Metadata]) -> Iterator[str]:
    """All variants hold the same files from the same source; only metadata.json names the backend."""
    for what, of in (
        ("unique id", lambda metadata: _unique_id(config, metadata)),
        ("digest", lambda metadata: metadata.digest and metadata.digest.files),
        ("source commit", lambda metadata: _commit(metadata)),
    ):
        values = {name: of(metadata) for name, metadata in variants.items()}
        first = next(iter(values), None)
        for name, value in values.items():
            if value != values[first]:
                yield f"{name}: {what} differs from that of {first}"


def _commit(metadata: Metadata) -> tuple[str, bool] | None:
    kernel = metadata.provenance and metadata.provenance.kernel
    return (kernel.commit, kernel.dirty) if kernel else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, nargs="?", help="default: build/ in the checkout")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout with build.toml (default: this one)")
    args = parser.parse_args(argv)
    config = Config.load(args.root)
    build = args.build or args.root / "build"
    problems = verify(config, build)
    if problems:
        print(f"{build}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
        print("\n".join(f"  {problem}" for problem in problems))
        return 1
    print(f"{build}: {len(config.backends)} variants of {config.name} version {config.version} are in order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
