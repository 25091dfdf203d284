"""build.toml, read once: every tool takes names, backends and shipped files from here."""

from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Config:
    """The parts of build.toml that the tools use. `root` is the checkout that it describes."""

    root: Path
    name: str
    version: int
    license: str
    source: str | None
    upstream: str | None
    repo_id: str
    backends: tuple[str, ...]
    pyext: tuple[str, ...]

    @classmethod
    def load(cls, root: Path = ROOT) -> "Config":
        data = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))
        general = data["general"]
        return cls(
            root=root,
            name=general["name"],
            version=general["version"],
            license=general["license"],
            source=general.get("source"),
            upstream=general.get("upstream"),
            repo_id=general["hub"]["repo-id"],
            backends=tuple(general["backends"]),
            pyext=tuple(data["torch-noarch"].get("pyext", ["py", "pyi"])),
        )

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        """The directory of the kernel's Python package."""
        return self.root / "torch-ext" / self.module

    def shipped_files(self) -> list[str]:
        """The files that go into every variant, relative to `package`; `_ops.py` is generated and not among them."""
        return sorted(
            path.relative_to(self.package).as_posix()
            for path in source_files(self.package)
            if path.suffix.removeprefix(".") in self.pyext and path != self.package / "_ops.py"
        )


def source_files(directory: Path) -> list[Path]:
    """All files below `directory` but bytecode."""
    return [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    ]
