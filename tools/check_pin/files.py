"""The downloaded files: as the Hub has them, as metadata.json says, and built from known sources."""

import hashlib
import importlib.metadata
from pathlib import Path

from huggingface_hub.hf_api import RepoFile
from kernels._rust import Digest, DigestValidationError, Metadata

from ..config import source_files
from ..verify import describe_violation
from .report import Failed


def check_cache(snapshot: Path, files: dict[str, RepoFile]) -> str:
    """The cache holds what the Hub has. `kernels` never looks again at what is in the cache."""
    wrong = []
    for name, file in files.items():
        path = snapshot / name
        if not path.is_file():
            wrong.append(f"{name} is missing in {snapshot}")
        elif not _is(path.read_bytes(), file):
            wrong.append(f"{name} in {snapshot} is not what the Hub has")
    here = (path.relative_to(snapshot).as_posix() for path in source_files(snapshot))
    wrong += [f"{name} in {snapshot} is not on the Hub" for name in here if name not in files]
    if wrong:
        advice = "The cache was changed, or a download went wrong: delete that repository from it and check again"
        raise Failed("tampered-cache", *wrong, advice)
    return f"{len(files)} files, as the Hub has them"


def _is(content: bytes, file: RepoFile) -> bool:
    if file.lfs is not None:
        return hashlib.sha256(content).hexdigest() == file.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == file.blob_id  # git's name of a file


def read_metadata(snapshot: Path) -> dict[str, Metadata]:
    """metadata.json of every variant, by the variant's name."""
    metadata = {}
    for variant in sorted(path for path in (snapshot / "build").iterdir() if path.is_dir()):
        try:
            metadata[variant.name] = Metadata.read_from_file(variant / "metadata.json")
        except ValueError as error:
            raise Failed("broken-metadata", f"{variant.name}: metadata.json can't be read: {error}") from error
    return metadata


def check_digests(snapshot: Path, metadata: dict[str, Metadata]) -> str:
    """Every file of every variant is the one that was built. `kernels` loads them without looking."""
    missing = [name for name, variant in metadata.items() if variant.digest is None]
    if missing:
        raise Failed("no-digest", *(f"{name}: metadata.json has no digest" for name in missing))
    wrong = []
    for name, variant in metadata.items():
        try:
            variant.digest.validate(Digest.hash_variant(variant.digest.algorithm, snapshot / "build" / name))
        except DigestValidationError as error:
            wrong += (f"{name}: {describe_violation(violation)}" for violation in error.violations)
    if wrong:
        raise Failed("tampered-file", *wrong)
    count = sum(len(variant.digest.files) for variant in metadata.values())
    return f"{count} files in {len(metadata)} variants match the digests in metadata.json"


def check_metadata(metadata: dict[str, Metadata], version: int) -> str:
    """All variants are one kernel, of the version whose branch they are on, which the installed client can load."""
    wrong = []
    first = next(iter(metadata))
    for name, variant in metadata.items():
        if variant.version != version:
            wrong.append(f"{name} is of version {variant.version}, expected {version}")
        if name != f"torch-{variant.backend.backend_type}":
            wrong.append(f"{name} says that it is for {variant.backend.backend_type}")
        if variant.digest.files != metadata[first].digest.files:
            wrong.append(f"{name} has other files than {first}: they were not built together")
    if wrong:
        raise Failed("wrong-metadata", *wrong)
    installed = importlib.metadata.version("kernels")
    minimum = {str(variant.kernels_minver) for variant in metadata.values() if variant.kernels_minver is not None}
    too_new = [m for m in minimum if _numbers(m) > _numbers(installed)]
    if too_new:
        raise Failed("needs-newer-kernels", f"it needs kernels >= {too_new[0]}, installed is {installed}")
    return f"version {version}, the same files in all variants, for kernels >= {', '.join(sorted(minimum)) or 'any'}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:3] if number.isdigit()]


def check_source(metadata: dict[str, Metadata]) -> str:
    """The build names the commit of the source that it was made of, and was made of nothing else."""
    commits = set()
    for name, variant in metadata.items():
        provenance = variant.provenance
        if provenance is None or provenance.kernel is None:
            raise Failed("unknown-source", f"{name}: metadata.json does not say from which commit it was built")
        if provenance.dirty:
            raise Failed(
                "dirty-build", f"{name} was built from a checkout with uncommitted changes: nobody can review it"
            )
        commits.add(provenance.kernel.commit)
    if len(commits) > 1:
        raise Failed("unknown-source", f"the variants were built from different commits: {', '.join(sorted(commits))}")
    return f"built from commit {commits.pop()}, without uncommitted changes"
