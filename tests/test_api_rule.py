"""The version rule: api/v<version>.json describes the source, and only changes that the Hub's rules allow pass."""

import copy
import json
import shutil

import pytest

pytest.importorskip("tools", reason="the tools are not part of the Nix build's test sources")

from tools import api, public_api
from tools.config import ROOT, Config

from .checkout import commit, copy_checkout

CONFIG = Config.load()
COMMITTED = json.loads((ROOT / "api" / f"v{CONFIG.version}.json").read_text(encoding="utf-8"))


def test_the_committed_file_describes_the_source(kernel):
    current = {
        "version": CONFIG.version,
        **public_api.describe(CONFIG.package),
        "metrics": api.observe_metrics(kernel),
    }
    problems = api.problems(COMMITTED, current)
    assert problems == [], "\n".join(problems)


def test_description_of_a_package(tmp_path):
    files = {
        "__init__.py": (
            "from . import layers\nfrom .ops import Public, run as call\nfrom .sub import other\n\n"
            '__all__ = ["call", "layers", "Public", "other"]\n'
        ),
        "ops.py": (
            "class Result(NamedTuple):\n    '''Doc.'''\n    loss: Tensor\n    entropy: Optional[Tensor] = None\n\n"
            "class Unused: ...\n\n"
            "class Public:\n    def method(self, x, /): ...\n    def _private(self): ...\n\n"
            "def run(x: Tensor, y=(1, 2), *rest, k: int = 3, **more) -> tuple[Result, Public]: ...\n"
        ),
        "sub/__init__.py": "def other(): ...\n",
        "layers.py": "class Layer(Module):\n    has_backward: bool = True\n    def forward(self, x): 0\nclass _B: 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert public_api.describe(tmp_path) == {
        "names": {
            "call": {
                "parameters": ["x: Tensor", "y = (1, 2)", "*rest", "k: int = 3", "**more"],
                "returns": "tuple[Result, Public]",
            },
            "layers": {
                "classes": {
                    "Layer": {
                        "fields": ["has_backward: bool = True"],
                        "methods": {"forward": {"parameters": ["self", "x"], "returns": None}},
                    }
                }
            },
            "Public": {"fields": [], "methods": {"method": {"parameters": ["self", "x", "/"], "returns": None}}},
            "other": {"parameters": [], "returns": None},
        },
        "types": {"Result": {"fields": ["loss: Tensor", "entropy: Optional[Tensor] = None"], "methods": {}}},
    }


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ('__all__ = ["gone"]', "exports gone, but neither defines it nor imports it"),
        ('from .nowhere import gone\n__all__ = ["gone"]', "imports nowhere, which is not in its package"),
    ],
)
def test_a_name_that_is_not_there(tmp_path, init, message):
    (tmp_path / "__init__.py").write_text(init)
    with pytest.raises(ValueError, match=message):
        public_api.describe(tmp_path)


def test_signature_keeps_names_kinds_and_defaults():
    description = {"parameters": ["a", "/", "b: int = 1", "*rest", "c: str", "d = None", "**more"], "returns": None}
    # inspect quotes the texts that stand for types and defaults
    assert str(public_api.signature(description)) == "(a, /, b: 'int' = '1', *rest, c: 'str', d='None', **more)"


# --- which changes break ---------------------------------------------------------------------------------------------

BASE = {
    "version": 1,
    "names": {
        "f": {"parameters": ["x: Tensor", "y: int = 0", "*", "k: Optional[int] = None"], "returns": "Tensor"},
        "layers": {"classes": {"L": {"fields": ["a: bool = True"], "methods": {}}}},
    },
    "types": {"R": {"fields": ["p: Tensor", "q: Tensor"], "methods": {}}},
    "metrics": {"count": "int64"},
}


def changed(path, value):
    """BASE with what is at `path` replaced, or removed for `value` None."""
    result = copy.deepcopy(BASE)
    *parents, last = path
    item = result
    for key in parents:
        item = item[key]
    if value is None:
        del item[last]
    else:
        item[last] = value
    return result


PARAMETERS = ("names", "f", "parameters")
X, Y, K = "x: Tensor", "y: int = 0", "k: Optional[int] = None"


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("names", "f"), None, "f was removed"),
        (("names", "layers", "classes", "L"), None, "layers.L was removed"),
        (("names", "layers", "classes", "L", "fields"), [], "layers.L: the field `a: bool = True` was removed"),
        (("names", "f"), BASE["types"]["R"], "f became a class, before a function"),
        (PARAMETERS, [X, "*", K], "f lost its parameter y"),
        (PARAMETERS, [X, Y], "f lost its parameter k"),
        (PARAMETERS, [X, "z: int = 0", Y, "*", K], "f takes x, z, y by position, before x, y"),
        (PARAMETERS, ["y: int = 0", "x: Tensor = 0", "*", K], "f takes y, x by position, before x, y"),
        (PARAMETERS, [X, Y, "*", K, "new"], "f gained the required parameter new"),
        (PARAMETERS, [X, "y: int = 1", "*", K], "f: y has the default 1, before the default 0"),
        (PARAMETERS, [X, "y: int", "*", K], "f: y has no default, before the default 0"),
        (PARAMETERS, [X, "*", Y, K], "f: y is keyword-only, before positional or keyword"),
        (PARAMETERS, [X, "/", Y, "*", K], "f: x is positional-only, before positional or keyword"),
        (PARAMETERS, [X, Y, "*", "k: int = None"], "f: k takes int, before Optional[int]"),
        (("names", "f", "returns"), "int", "f returns int, before Tensor"),
        (("types", "R", "fields"), ["p: Tensor"], "R: the field `q: Tensor` was removed or changed"),
        (("types", "R", "fields"), ["q: Tensor", "p: Tensor"], "R: its fields changed places"),
        (("types", "R", "fields"), ["p: Tensor", "new: int", "q: Tensor"], "R: its fields changed places"),
        (("metrics", "count"), None, "metric count was removed"),
        (("metrics", "count"), "float32", "metric count is float32, before int64"),
    ],
)
def test_incompatible_changes_need_a_new_version(path, value, text):
    problems = api.problems(BASE, changed(path, value))
    assert any(problem.startswith(text) for problem in problems), problems
    assert problems[-1] == api.BREAKING
    assert "Raise `version` in build.toml" in problems[-1]


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("names", "g"), {"parameters": [], "returns": None}, "g was added"),
        (("names", "layers", "classes", "M"), {"fields": [], "methods": {}}, "layers.M was added"),
        (PARAMETERS, [X, Y, "*", K, "new = None"], "f gained the optional parameter new"),
        (PARAMETERS, [X, Y, "z: int = 0", "*", K], "f gained the optional parameter z"),
        (PARAMETERS, [X, Y, "*", K, "**more"], "f gained the optional parameter more"),
        (PARAMETERS, [X, Y, K], "f: k is positional or keyword, before keyword-only"),
        (PARAMETERS, ["x: Tensor = None", Y, "*", K], "f: x has the default None, before no default"),
        (
            PARAMETERS,
            [X, "y: Union[int, float] = 0", "*", "k: Optional[Union[str, int]] = None"],
            "f: k takes Optional[Union[str, int]], before Optional[int]",
        ),
        (("types", "R", "fields"), ["p: Tensor", "q: Tensor", "r: int"], "R: the field `r: int` was added"),
        (("metrics", "new"), "int64", "metric new was added"),
    ],
)
def test_extensions_keep_the_version(path, value, text):
    problems = api.problems(BASE, changed(path, value))
    assert text in problems
    assert problems[-1] == api.EXTENSION
    assert "replaces all of its variants" in problems[-1]
    assert not api.breaks(BASE, changed(path, value))


def test_a_break_beside_an_extension_is_named_first():
    new = changed(PARAMETERS, [X, "*", K, "new = 0"])
    assert api.problems(BASE, new)[:2] == ["f lost its parameter y", "f gained the optional parameter new"]
    assert api.problems(BASE, new)[-1] == api.BREAKING


def test_a_returned_class_may_become_public_but_not_private_again():
    public = copy.deepcopy(BASE)
    public["names"]["R"] = public["types"].pop("R")
    assert api.problems(BASE, public) == ["R entered __all__", api.EXTENSION]
    assert api.problems(public, BASE) == ["R left __all__", api.BREAKING]


def test_the_order_of_names_is_free_and_that_of_keywords_only_has_to_be_written():
    other = {**BASE, "names": dict(reversed(BASE["names"].items()))}
    assert api.problems(BASE, other) == []
    other = changed(PARAMETERS, [X, Y, "*", "l: int = 0", K])
    again = changed(PARAMETERS, [X, Y, "*", K, "l: int = 0"])
    assert api.problems(again, other) == [
        "the file describes the same API in another way than the source",
        api.COMMAND,
    ]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A git repository with a copy of what the command reads, and its API file committed."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    config = copy_checkout(tmp_path / "checkout")
    (config.root / "api").mkdir()
    shutil.copy(ROOT / "api" / f"v{CONFIG.version}.json", config.root / "api")
    commit(config)
    return config.root


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def run(checkout, capsys, *arguments) -> tuple[int, str]:
    status = api.main(["--root", str(checkout), *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_an_extension_is_written_and_a_break_is_not(checkout, capsys):
    source = checkout / "torch-ext" / CONFIG.module / "plan.py"
    assert run(checkout, capsys, "--check", "--base", "HEAD") == (0, "api/v1.json: describes the API\n")

    edit(source, "    upstream: str = ", "    extra: int = 0,\n    upstream: str = ")
    status, text = run(checkout, capsys, "--check")
    assert status == 1
    assert "plan gained the optional parameter extra" in text
    assert api.EXTENSION in text
    assert run(checkout, capsys)[0] == 0
    assert run(checkout, capsys, "--check", "--base", "HEAD")[0] == 0

    edit(source, "    workspace: Optional[int] = None,\n    label_smoothing", "    label_smoothing")
    edit(source, "validation.check_workspace(workspace)", "workspace = None")
    status, text = run(checkout, capsys)
    assert status == 1
    assert "api/v1.json was not written" in text
    assert "plan lost its parameter workspace" in text
    assert api.BREAKING in text

    # Deleting the file and writing it anew is no way round: the committed one is still in git.
    (checkout / "api/v1.json").unlink()
    assert run(checkout, capsys)[0] == 0
    assert run(checkout, capsys, "--check")[0] == 0
    status, text = run(checkout, capsys, "--check", "--base", "HEAD")
    assert status == 1
    assert "plan lost its parameter workspace" in text

    edit(checkout / "build.toml", "version = 1", "version = 2")
    status, text = run(checkout, capsys, "--check")
    assert status == 1
    assert "there is no api/v2.json" in text
    assert run(checkout, capsys) == (0, f"wrote api/v2.json: {', '.join(COMMITTED['names'])}\n")
    assert run(checkout, capsys, "--check", "--base", "HEAD")[0] == 0


def test_an_unknown_base_is_an_error(checkout, capsys):
    with pytest.raises(SystemExit):
        api.main(["--root", str(checkout), "--check", "--base", "nowhere"])
    assert "'nowhere' is no commit of this repository" in capsys.readouterr().err
