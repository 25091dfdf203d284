"""The harness under benchmarks/, run for real on tiny CPU shapes: what it writes, what it says of peers that fail."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import loss, peers, report, runner, timing, workloads
from benchmarks.reference import Reference
from benchmarks.trained import softmax_statistics

FAST = ["--rounds", "2", "--budget", "0.001", "--min-iterations", "2", "--device", "cpu"]
RESULT_KEYS = {
    "title",
    "metrics",
    "status",
    "first_call_s",
    "peak_bytes",
    "gradient_bytes",
    "peak_extra_bytes",
    "peak_source",
    "median_ms",
    "min_ms",
    "spread",
    "drift",
    "host_ms",
    "iterations",
    "ratio_to_floor",
    "ratio_to_logits_gemm",
}


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("benchmarks") / "build"
    subprocess.run([sys.executable, "-m", "tools.build", "--out", str(out)], cwd=ROOT, check=True, capture_output=True)
    return out


def run(path: Path, *argv: str) -> dict:
    assert loss.main([*FAST, "--json", str(path), *argv]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def measured(build, tmp_path_factory) -> Path:
    """One run of the harness, with a peer that is not there."""
    path = tmp_path_factory.mktemp("results") / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "liger_kernel", None)
        run(
            path,
            "--shapes",
            "48x96x16,40x80x16",
            "--contenders",
            "ours,ours@8MiB,logits,torch,liger",
            "--build",
            str(build),
        )
    return path


def test_the_run_has_the_keys_that_the_report_and_readers_need(measured):
    data = json.loads(measured.read_text())
    assert set(data) == {"schema", "date", "commit", "device", "versions", "settings", "peers", "skipped", "cases"}
    assert data["versions"]["torch"] == torch.__version__
    assert [(c["shape"], c["scenario"], c["inputs"]) for c in data["cases"]] == [
        ("48x96x16", "fwd_bwd", "random"),
        ("40x80x16", "fwd_bwd", "random"),
    ]
    for case in data["cases"]:
        assert list(case["results"]) == ["floor", "logits-gemm", "ours", "ours@8MiB", "logits", "torch", "liger"]
        assert case["floor_gemms"] == ["logits", "dX", "dW"]
        for name in ("floor", "logits-gemm", "ours", "ours@8MiB", "logits"):
            result = case["results"][name]
            assert set(result) - {"errors"} == RESULT_KEYS, name
            assert result["status"] == "ok" and result["iterations"] >= 2 and result["median_ms"] > 0
        assert case["results"]["floor"]["ratio_to_floor"] == 1.0
        ours = case["results"]["ours"]["errors"]
        assert ours.keys() == {"loss", "entropy", "num_correct_difference", "dX", "dW"}
        assert ours["num_correct_difference"] == 0
        assert max(ours[k] for k in ("loss", "entropy", "dX", "dW")) < 1e-5
        assert case["results"]["ours"]["gradient_bytes"] == 4 * case["hidden"] * (case["tokens"] + case["vocab"])


def test_no_path_of_the_machine_is_written(measured, build):
    text = measured.read_text()
    assert str(ROOT) not in text and str(build) not in text and str(Path.home()) + "/" not in text


def test_an_absent_peer_is_named_absent_with_the_reason(measured):
    data = json.loads(measured.read_text())
    assert data["peers"]["liger"]["status"] == "absent"
    for case in data["cases"]:
        result = case["results"]["liger"]
        assert result["status"] == "absent" and "liger_kernel" in result["reason"]
        assert "median_ms" not in result


@pytest.mark.skipif(hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this torch has it")
def test_torch_without_linear_cross_entropy_is_absent(measured):
    assert "2.13" in json.loads(measured.read_text())["peers"]["torch"]["reason"]


@pytest.mark.parametrize(
    "scenario",
    [name if name == "softcap_bias" else pytest.param(name, marks=pytest.mark.slow)
     for name in workloads.SCENARIOS],
)  # fmt: skip
def test_every_scenario_runs_and_its_errors_are_small(scenario, build, tmp_path):
    data = run(
        tmp_path / "run.json", "--shapes", "40x80x16", "--scenarios", scenario,
        "--contenders", "ours,logits", "--build", str(build),
    )  # fmt: skip
    s = workloads.SCENARIOS[scenario]
    for name in ("ours", "logits"):
        result = data["cases"][0]["results"][name]
        assert result["status"] == "ok", result
        errors = {k: v for k, v in result["errors"].items() if k != "num_correct_difference"}
        assert ("dX" in errors, "dW" in errors, "db" in errors) == (s.hidden_grad, s.weight_grad, s.bias)
        assert max(errors.values()) < (1e-2 if s.autocast else 1e-5), (name, errors)


@pytest.mark.gpu
def test_a_captured_step_is_checked_like_any_other(build):
    """Its gradients are the recording's, and there again after they were cleared."""
    case = workloads.make_case(workloads.parse_shape("300x1000x64"), workloads.SCENARIOS["fwd_bwd"], device="cuda")
    captured = peers.contender("ours-graph")
    captured.load(peers.Options(build))
    reference, step = Reference(case), runner.make_step(case, captured)
    for _ in range(2):
        case.reset()
        errors = reference.errors(case, *step())
        assert errors.pop("num_correct_difference") == 0
        assert max(errors.values()) < 1e-2


def test_the_reference_finds_a_wrong_gradient_and_a_missing_one():
    case = workloads.make_case(workloads.parse_shape("40x80x16"), workloads.SCENARIOS["fwd_bwd"])
    reference = Reference(case)
    value, _ = runner.make_step(case, peers.contender("logits"))()
    assert reference.errors(case, value, None)["dW"] < 1e-5
    case.weight.grad *= 1.01
    assert reference.errors(case, value, None)["dW"] == pytest.approx(0.01, rel=1e-3)
    case.hidden.grad = None
    with pytest.raises(RuntimeError, match="dX was not computed"):
        reference.errors(case, value, None)


class Broken(peers.Contender):
    title = "broken"

    def __init__(self, name, error):
        self.name, self.error = name, error

    def build(self, case):
        def step():
            raise self.error

        return step


def test_a_contender_that_fails_does_not_stop_the_others():
    case = workloads.make_case(workloads.parse_shape("40x80x16"), workloads.SCENARIOS["softcap_bias"])
    contenders = [
        Broken("oom", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")),
        Broken("bug", ValueError("bad file /opt/some/where/thing.py")),
        Broken("cannot", peers.Unsupported("no such option")),
        peers.contender("cce"),
        peers.contender("logits"),
    ]
    results = runner.run_case(case, contenders, runner.Settings(rounds=1, budget_s=0.001, min_iterations=1))["results"]
    assert {n: r["status"] for n, r in results.items()} == {
        "floor": "ok",
        "logits-gemm": "ok",
        "oom": "oom",
        "bug": "error",
        "cannot": "unsupported",
        "cce": "unsupported",
        "logits": "ok",
    }
    assert results["bug"]["reason"] == "ValueError: bad file thing.py"


def test_the_floor_runs_what_the_scenario_needs_on_the_valid_rows():
    assert workloads.SCENARIOS["fwd"].gemms == ("logits",)
    assert workloads.SCENARIOS["frozen_head"].gemms == ("logits", "dX")
    assert workloads.SCENARIOS["frozen_hidden"].gemms == ("logits", "dW")
    case = workloads.make_case(workloads.parse_shape("40x80x16"), workloads.SCENARIOS["valid30"])
    assert case.valid_rows == int((case.targets != workloads.IGNORE_INDEX).sum()) == 12


def test_unknown_names_are_refused():
    for argv in (["--shapes", "Z"], ["--contenders", "ours,nobody"], ["--scenarios", "nothing"], ["--inputs", "none"]):
        with pytest.raises(SystemExit):
            loss.parse_args(argv)
    assert loss.parse_args(["--with", "quack"]).contenders[-1] == "quack"
    assert "quack" not in loss.parse_args([]).contenders
    assert peers.contender("ours@256MiB").workspace == 256 * 2**20
    assert peers.contender("ours-graph").captured and not peers.contender("ours").captured


def test_the_order_rotates_and_the_number_of_calls_follows_the_budget():
    names = list("abcdef")
    orders = [timing.rotation(names, r, 5) for r in range(5)]
    assert all(sorted(o) == names for o in orders)
    assert len({o[0] for o in orders}) == len({o[-1] for o in orders}) == 5
    assert timing.repeats(10.0, rounds=5, budget_s=1.0, min_iterations=5) == 20
    assert timing.repeats(5000.0, rounds=5, budget_s=1.0, min_iterations=5) == 1


PEAK = """
import torch
from benchmarks import timing

def step():
    torch.ones(64 << 20, dtype=torch.uint8)

for _ in range(3):
    print(*timing.peak_memory(step, lambda: None, torch.device("cpu")), sep=",")
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_peak_memory_sees_a_temporary():
    """In a process of its own, and three times: a system that reclaims cold pages meanwhile shrinks the resident set
    under the measurement, and a process that has run other tests has many."""
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, check=True, capture_output=True, text=True)
    results = [line.split(",") for line in done.stdout.splitlines()]
    assert [how for _, how in results] == ["peak resident set"] * 3
    assert any(60 << 20 < int(peak) < 80 << 20 for peak, _ in results), results


# --- trained-like inputs ---------------------------------------------------------------------------------------------


def test_trained_inputs_look_like_a_trained_model():
    shape = workloads.parse_shape("512x131072x384")
    hidden, weight, targets = workloads.INPUTS["trained"](shape, torch.device("cpu"), torch.Generator().manual_seed(0))
    figures = softmax_statistics(hidden, weight)
    assert 1.2 <= figures["entropy"] <= 2.1, figures
    assert 55 <= figures["entries_mean"] <= 101, figures
    assert 11 <= figures["entries_median"] <= 46, figures
    assert 0.15 <= figures["kept_blocks"] <= 0.21, figures
    assert 0.002 <= figures["dropped_mass"] <= 0.005, figures

    # the targets are what this softmax predicts, and low ids are the frequent ones
    part = slice(0, 256)
    logits = hidden[part] @ weight.T
    value = torch.nn.functional.cross_entropy(logits, targets[part])
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert abs(value - entropy) < 0.35
    mass = logits.softmax(-1).mean(0)
    octaves = [mass[2**k : 2 ** (k + 1)].mean() for k in range(4, 17)]
    assert all(a > b for a, b in zip(octaves, octaves[2:], strict=False))


@pytest.mark.slow
def test_trained_inputs_run_at_any_size_and_their_figures_are_written(build, tmp_path):
    data = run(
        tmp_path / "run.json", "--shapes", "40x80x16", "--inputs", "trained",
        "--contenders", "ours,logits", "--build", str(build),
    )  # fmt: skip
    (case,) = data["cases"]
    assert {"entropy", "kept_blocks", "dropped_mass"} < set(case["softmax"])
    assert case["results"]["ours"]["errors"]["dW"] < 1e-5


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.fixture
def readme(tmp_path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{report.BEGIN}\nformer figures\n{report.END}\n\nThe end.\n")
    path.with_name("trl.md").write_text(path.read_text())
    return path


def arguments(results: Path, readme: Path) -> list[str]:
    page, trl_page = readme.with_name("RESULTS.md"), readme.with_name("trl.md")
    return ["--results", str(results), "--readme", str(readme), "--page", str(page), "--trl-page", str(trl_page)]


def test_the_report_writes_table_and_plot_and_knows_when_it_is_stale(measured, readme):
    argv = arguments(measured.parent, readme)
    assert report.main([*argv, "--check"]) == 1
    assert report.main(argv) == 0
    assert report.main([*argv, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\nThe end.\n") and "former figures" not in text
    assert "| **fused-linear-ce** |" in text and "| floor: logits + dX + dW |" in text
    assert "Liger: absent" in text
    curve = text[text.index("| workspace: x floor (extra MiB) |") :].splitlines()
    assert [line.split(" | ")[0] for line in curve[2:4]] == ["| 8MiB", "| default"]
    assert "workspace 8MiB" not in text, "it has no row among the contenders"
    page = readme.with_name("RESULTS.md").read_text()
    assert "largest error against float64" in page
    plots = list(measured.parent.glob("*.png"))
    assert len(plots) == 1 and plots[0].name in text

    readme.write_text(text.replace("| **fused-linear-ce** |", "| **faster-than-light** |"))
    assert report.main([*argv, "--check"]) == 1


def test_the_newest_run_of_a_shape_is_shown(measured, readme, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    data = json.loads(measured.read_text())
    (results / "a.json").write_text(json.dumps(data))
    data["date"], data["commit"] = "2999-01-01T00:00:00Z", "newer"
    data["cases"] = data["cases"][:1]
    (results / "b.json").write_text(json.dumps(data))
    (group,) = report.read(results)
    assert list(group.cases) == ["40x80x16", "48x96x16"]
    assert group.cases["48x96x16"]["run"]["commit"] == "newer"
    assert group.cases["40x80x16"]["run"]["commit"] != "newer"


def test_a_run_of_other_workspaces_alone_stands_beside_an_older_one(measured, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    data = json.loads(measured.read_text())
    (results / "a.json").write_text(json.dumps(data))
    shape, commit = data["cases"][0]["shape"], data["commit"]
    data["date"], data["commit"] = "2999-01-01T00:00:00Z", "newer"
    for case in data["cases"]:
        ours = case["results"].pop("ours")
        case["results"]["ours@9MiB"] = ours
        case["results"]["ours@1KiB"] = {"title": "1KiB", "metrics": [], "status": "error", "reason": "too small"}
    (results / "b.json").write_text(json.dumps(data))
    (group,) = report.read(results)
    assert group.cases[shape]["run"]["commit"] == commit
    assert group.result(shape, "ours")["status"] == "ok"
    assert group.result(shape, "ours@9MiB")["run"]["commit"] == "newer"
    assert "- 1KiB: error (too small)" in report.reasons(group)


def test_of_one_commits_runs_the_one_that_was_timed_for_longest_is_shown(measured, tmp_path):
    """A run that compares values times little, and may come last."""
    results = tmp_path / "results"
    results.mkdir()
    data = json.loads(measured.read_text())
    times = copy.deepcopy(data)
    times["settings"]["budget_s"] = data["settings"]["budget_s"] + 1
    for case in times["cases"]:
        for result in case["results"].values():
            result.pop("errors", None)
    data["date"] = "2999-01-01T00:00:00Z"
    for name, run in (("times", times), ("values", data)):
        (results / f"{name}.json").write_text(json.dumps(run))
    (group,) = report.read(results)
    shape = data["cases"][0]["shape"]
    assert group.cases[shape]["run"]["settings"] == times["settings"]
    ours = group.result(shape, "ours")
    assert ours["errors"] == data["cases"][0]["results"]["ours"]["errors"]
    assert ours["errors_run"]["settings"] == data["settings"] and "run" not in ours


def test_errors_of_an_earlier_run_stand_beside_newer_times(measured, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    data = json.loads(measured.read_text())
    (results / "a.json").write_text(json.dumps(data))
    errors, commit = data["cases"][0]["results"]["ours"]["errors"], data["commit"]
    data["date"], data["commit"] = "2999-01-01T00:00:00Z", "newer"
    for case in data["cases"]:
        for result in case["results"].values():
            result.pop("errors", None)
    (results / "b.json").write_text(json.dumps(data))
    (group,) = report.read(results)
    ours = group.result(data["cases"][0]["shape"], "ours")
    assert ours["errors"] == errors and ours["errors_run"]["commit"] == commit
    (row,) = [line for line in report.error_table(group) if "fused-linear-ce" in line and "8MiB" not in line]
    assert f"(commit {report.commit({'commit': commit})})" in row
    assert "errors" not in group.result(data["cases"][0]["shape"], "floor")


def test_a_peer_that_was_left_out_keeps_its_figure(measured, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    data = json.loads(measured.read_text())
    (results / "a.json").write_text(json.dumps(data))
    older = data["cases"][0]["results"]["logits"]["ratio_to_floor"]
    data["date"], data["commit"] = "2999-01-01T00:00:00Z", "newer"
    data["cases"] = data["cases"][:1]
    newer = data["cases"][0]["results"]
    del newer["logits"], newer["ours@8MiB"]
    newer["ours"]["ratio_to_floor"] = older + 1
    (results / "b.json").write_text(json.dumps(data))
    (group,) = report.read(results)
    shape = data["cases"][0]["shape"]
    assert group.result(shape, "ours")["ratio_to_floor"] == older + 1
    assert group.result(shape, "logits")["ratio_to_floor"] == older
    assert "run" not in group.result(shape, "ours"), "this kernel's own figures are of another version"
    assert group.result(shape, "ours@8MiB")["run"]["commit"] != "newer"
    rows = {line.split(" | ")[0]: line for line in report.ratio_table(group)}
    marked = [label for label, line in rows.items() if report.EARLIER in line]
    assert marked == ["| full logits, eager"]
    assert "newer" in report.provenance(group) and f"{report.EARLIER} of another run, over that run's floor" in (
        report.provenance(group)
    )


def test_named_shapes_and_other_sizes_are_tables_of_their_own(measured, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    data = json.loads(measured.read_text())
    data["cases"][0]["shape"] = "A"
    (results / "a.json").write_text(json.dumps(data))
    groups = report.read(results)
    assert [(g.named, list(g.cases)) for g in groups] == [(True, ["A"]), (False, [data["cases"][1]["shape"]])]
    assert "| 40 x 80 x 16 |" not in report.readme_block(groups)
    assert "| 40 x 80 x 16 |" in report.results_page(groups)


def test_a_readme_without_the_markers_is_an_error(measured, readme, capsys):
    argv = arguments(measured.parent, readme)
    readme.write_text("# nothing\n")
    assert report.main(argv) == 2
    assert "benchmarks:begin" in capsys.readouterr().err


def test_the_report_works_before_there_are_results(readme, tmp_path):
    empty = tmp_path / "none"
    empty.mkdir()
    assert report.main(arguments(empty, readme)) == 0
    assert "No results yet." in readme.read_text()
    # a section that has nothing to show is not there
    assert readme.with_name("trl.md").read_text() == f"# Title\n\n{report.BEGIN}\n{report.END}\n\nThe end.\n"


# --- kernels benchmark -----------------------------------------------------------------------------------------------


def test_kernels_benchmark_runs_and_verifies(build, tmp_path):
    cli = pytest.importorskip("kernels.cli.benchmark")
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "benchmark.py"
    script.write_text((ROOT / "benchmarks" / "benchmark.py").read_text())
    (tmp_path / "build").symlink_to(build)
    results, _ = cli.run_benchmark_script(
        script, iterations=1, warmup=0, cwd=tmp_path, repo_id=str(tmp_path), is_local=True, revision="local"
    )
    workloads_run = {name.split(".")[1] for name in results}
    assert workloads_run == {"forward", "forward_backward", "per_token", "softcap_bias"}
    assert all(r.verified for r in results.values())
