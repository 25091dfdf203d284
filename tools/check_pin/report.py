"""What the checks found, as a text for people, as JSON for programs, and as an exit code."""

import json
from dataclasses import dataclass, field

PASSED = "passed"
FAILED = "failed"
UNREACHABLE = "unreachable"  # the Hub gave no answer
BLOCKED = "not checked"  # because of an earlier check
SKIPPED = "skipped"  # not asked for


@dataclass
class Result:
    """The outcome of one check. `code` says what kind of failure it was, and is empty otherwise."""

    check: str
    status: str
    messages: list[str]
    code: str = ""


class Verdict(Exception):
    """Raised by a check that did not pass."""

    status: str
    code = ""

    def __init__(self, *messages: str):
        super().__init__(*messages)

    def result(self, check: str) -> Result:
        return Result(check, self.status, list(self.args), self.code)


class Failed(Verdict):
    """The pin must not be used. `code` names the kind of failure for programs, the messages say it to people."""

    status = FAILED

    def __init__(self, code: str, *messages: str):
        super().__init__(*messages)
        self.code = code


class Unreachable(Verdict):
    """The Hub gave no answer, so nothing is known about the pin."""

    status = UNREACHABLE


class Skipped(Verdict):
    """It was not asked for."""

    status = SKIPPED


@dataclass
class Report:
    repo_id: str
    revision: str
    endpoint: str
    results: list[Result] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: the pin is good; 1: it must not be used; 3: the Hub could not be asked, so it may be either."""
        statuses = {result.status for result in self.results}
        return 1 if FAILED in statuses else 3 if UNREACHABLE in statuses else 0

    def to_json(self) -> str:
        results = [vars(result) for result in self.results]
        head = {"repo_id": self.repo_id, "revision": self.revision, "endpoint": self.endpoint}
        return json.dumps({**head, "exit_code": self.exit_code, "checks": results}, indent=2)

    def to_text(self) -> str:
        lines = [f"{self.repo_id} @ {self.revision}", f"on {self.endpoint}"]
        width = max(len(result.check) for result in self.results)
        for result in self.results:
            first, *rest = result.messages
            lines.append(f"  {result.status:11} {result.check:{width}}  {first}")
            lines += [f"{'':{16 + width}}{message}" for message in rest]
        verdict = {
            0: "The pin is good.",
            1: "The pin must not be used.",
            3: "The Hub could not be asked: not checked.",
        }
        return "\n".join([*lines, verdict[self.exit_code]])
