"""Where the kernel comes from, and who allowed it.

A Hub kernel is code that is downloaded and run. So it is named by an immutable commit, it is fetched only when
loss_type="cce" asks for it, and only after the user has said yes.
"""

import importlib.metadata
import os
import re
from types import ModuleType

from packaging.version import Version

KERNEL_ID = "trl-lib/fused-linear-ce"
# The published commit of KERNEL_ID that this version of the package runs: 40 hex digits, never a branch. A commit can
# only be named here once it is published; until the first release it is None, and REVISION_VARIABLE must name one.
KERNEL_REVISION: str | None = None
# Overrides KERNEL_REVISION, for a commit of another Hub endpoint or a release that is being tried out.
REVISION_VARIABLE = "FUSED_LINEAR_CE_REVISION"

_loaded: dict[str, ModuleType] = {}


def load_kernel(trust_remote_code: bool = False) -> ModuleType:
    """The kernel, from a local build if LOCAL_KERNELS names one, else from the Hub at the pinned commit.

    Without a local build this DOWNLOADS AND RUNS CODE. A kernel that was loaded once is returned again without asking.

    Args:
        trust_remote_code: whether the code of KERNEL_ID may be downloaded and run.

    Raises:
        ValueError: it isn't allowed; or no commit is named.
        ImportError: the `kernels` package is missing or older than 0.14.
    """
    local = local_build()
    source = local or pinned_revision()
    if source not in _loaded:
        if not local and not trust_remote_code:
            raise ValueError(
                f"loss_type='cce' would download the kernel {KERNEL_ID} at revision {source} from the Hub and run its "
                "code, and nobody has allowed that. To allow it, set trust_remote_code=True in the SFTConfig or call "
                "fused_linear_ce_trl.load_kernel(trust_remote_code=True) first. To run a local build instead, set "
                f'LOCAL_KERNELS="{KERNEL_ID}=<its build folder>"'
            )
        _loaded[source] = _get_kernel(None if local else source)
    return _loaded[source]


def local_build() -> str | None:
    """The folder that LOCAL_KERNELS ("repo_id=path:repo_id=path") names for this kernel."""
    entries = (entry.partition("=") for entry in os.environ.get("LOCAL_KERNELS", "").split(":"))
    return next((path for repo_id, _, path in entries if repo_id == KERNEL_ID), None)


def pinned_revision() -> str:
    """The commit to load from the Hub: 40 hex digits."""
    revision = os.environ.get(REVISION_VARIABLE) or KERNEL_REVISION
    if revision is None:
        raise ValueError(
            f"loss_type='cce': this version of fused_linear_ce_trl names no published commit of {KERNEL_ID}. Set "
            f"{REVISION_VARIABLE} to one (40 hex digits), or "
            f'LOCAL_KERNELS="{KERNEL_ID}=<build folder>" to a local build'
        )
    if not re.fullmatch("[0-9a-f]{40}", revision):
        raise ValueError(
            f"loss_type='cce': the revision of {KERNEL_ID} must be a commit, 40 hex digits: a branch or a tag could "
            f"change what runs. Got {revision!r}"
        )
    return revision


def _get_kernel(revision: str | None) -> ModuleType:
    """revision None stands for a local build, for which `kernels` reads LOCAL_KERNELS itself."""
    version = kernels_0_14_or_newer()
    # Not through transformers' is_kernels_available(): its version range is narrower than what works here.
    from kernels import get_kernel

    if revision is None:
        return get_kernel(KERNEL_ID, version=1)
    return get_kernel(KERNEL_ID, revision=revision, trust_remote_code=allow_list(version))


def kernels_0_14_or_newer() -> Version:
    """The version of the installed `kernels`; ImportError if that is too old."""
    try:
        version = Version(importlib.metadata.version("kernels"))
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("loss_type='cce' needs the package `kernels`: pip install 'kernels>=0.14'") from None
    if version < Version("0.14"):
        raise ImportError(
            f"loss_type='cce' needs kernels>=0.14, the first that loads kernel repositories; {version} is installed: "
            "pip install -U kernels"
        )
    return version


def allow_list(version: Version) -> list[str] | bool:
    """trust_remote_code for this kernel alone; before kernels 0.17 there was only "any kernel"."""
    return [KERNEL_ID] if version >= Version("0.17") else True
