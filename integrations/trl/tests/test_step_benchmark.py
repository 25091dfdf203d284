"""benchmarks/trl_step.py, run for real on a tiny model: what it writes, and what its report says."""

import json

import pytest
import torch

from benchmarks import trl_heads, trl_report, trl_rows, trl_step
from fused_linear_ce_trl import host

pytestmark = pytest.mark.skipif(not host.FUSED_HEAD, reason="the benchmark compares with TRL >= 1.15")

FAST = ["--device", "cpu", "--rounds", "2", "--budget", "0.01", "--min-iterations", "2", "--modes", "eager"]


@pytest.fixture(scope="module")
def results(tmp_path_factory, kernel_build):
    path = tmp_path_factory.mktemp("step") / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_KERNELS", raising=False)
        rows = ["--rows", "tiny,tiny-lora,tiny-completion"]
        assert trl_step.main([*FAST, *rows, "--build", str(kernel_build), "--json", str(path)]) == 0
    return path


def test_all_heads_that_compute_the_loss_agree(results):
    data = json.loads(results.read_text())
    assert [c["row"] for c in data["cases"]] == ["tiny", "tiny-lora", "tiny-completion"]
    for case in data["cases"]:
        assert set(case["results"]) == {"cce", "nll", "chunked", "liger", "none", "floor"}
        cce, nll = case["results"]["cce"], case["results"]["nll"]
        assert cce["loss"] == pytest.approx(nll["loss"], rel=1e-6)
        assert cce["grad_norm"] == pytest.approx(nll["grad_norm"], rel=1e-5)
        for name in ("cce", "nll", "none", "floor"):
            assert case["results"][name]["status"] == "ok" and case["results"][name]["median_ms"] > 0
        assert case["results"]["chunked"]["status"] == "absent"
    valid = [c["valid_tokens"] for c in data["cases"]]
    assert valid == [62, 62, 20]  # 2 x 31 predicted tokens; 30 % of 2 x 32


def test_a_run_says_where_it_ran_and_names_no_folder(results, kernel_build):
    text = results.read_text()
    data = json.loads(text)
    assert data["versions"]["trl"] and data["versions"]["torch"] == torch.__version__ and data["commit"]
    assert str(kernel_build.parent) not in text


def test_the_report_shows_every_row_and_says_what_is_missing(results):
    cases = trl_report.read(results.parent)
    text = trl_report.block(cases)
    for row in ("tiny", "tiny-lora", "tiny-completion"):
        assert f"| {trl_rows.ROWS[row].title} |" in text
    assert "- chunked: absent at tiny, tiny-lora, tiny-completion" in text
    assert trl_report.block([]) == ""


def test_the_gain_is_measured_against_the_floor():
    case = {"results": {h: {"median_ms": ms} for h, ms in dict(cce=85.0, nll=100.0, floor=80.0, none=60.0).items()}}
    assert trl_report.loss_share(case) == pytest.approx(0.4)
    assert trl_report.speedup(case) == pytest.approx(0.15)
    assert trl_report.share_of_possible(case) == pytest.approx(0.75)


@pytest.mark.parametrize("chunked", [{}, {"chunked": {"status": "absent", "reason": "no folder", "title": "chunked"}}])
def test_a_peer_that_a_newer_run_lacks_is_an_earlier_runs_and_compared_with_nothing(results, tmp_path, chunked):
    older = json.loads(results.read_text())
    older["commit"] = "b" * 40
    case = older["cases"][0]
    case["results"]["chunked"] = {**case["results"]["nll"], "title": "chunked"}
    newer = json.loads(results.read_text()) | {"date": "2999-01-01T00:00:00Z", "commit": "c" * 40}
    own = {h: r for h, r in case["results"].items() if h in ("cce", "floor")}
    newer["cases"] = [{**case, "results": own | chunked}]
    for name, run in (("older", older), ("newer", newer)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    cases = trl_report.read(tmp_path)
    found = next(c for c in cases if c["row"] == "tiny")
    assert found["run"]["commit"] == "c" * 40
    assert set(found["results"]) == {"cce", "floor", "nll", "chunked"}
    assert trl_report.speedup(found) is None and trl_report.share_of_possible(found) is None
    text = trl_report.block(cases)
    row = next(line for line in text.splitlines() if line.startswith(f"| {found['title']} |"))
    assert row.count("†") == 2
    assert f"† of another run: {older['date'][:10]}, commit {'b' * 10}" in text


def test_no_row_is_started_after_the_time_limit(kernel_build, tmp_path):
    path = tmp_path / "run.json"
    limited = [*FAST, "--rows", "tiny", "--time-limit", "1e-9", "--build", str(kernel_build), "--json", str(path)]
    assert trl_step.main(limited) == 1
    assert json.loads(path.read_text())["skipped"] == [{"case": "tiny / eager", "reason": "time limit"}]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_floor_runs_the_gemms_of_a_step(frozen):
    """Its gradients are those of the products that it stands for; a frozen head needs no dW."""
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=not frozen)
    trl_heads.Gemms.apply(hidden, weight, None).backward()
    logits = (hidden @ weight.T).detach()
    torch.testing.assert_close(hidden.grad, logits @ weight.detach() / 35)
    if frozen:
        assert weight.grad is None
    else:
        torch.testing.assert_close(weight.grad, logits.T @ hidden.detach() / 35)
