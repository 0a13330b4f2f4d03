"""One line of the doctor: what was looked at, what was found, and when it is wrong, why and what to do. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["pass", "fail", "not checked"]


@dataclass(frozen=True)
class Verdict:
    """`figure` is what was seen, for all states; `cause` and `remedy` go with a failure."""

    name: str
    state: State
    figure: str
    cause: str = ""
    remedy: str = ""
    worker: str = ""

    @property
    def failed(self) -> bool:
        return self.state == "fail"


def passed(name: str, figure: str) -> Verdict:
    return Verdict(name, "pass", figure)


def failed(name: str, figure: str, cause: str, remedy: str) -> Verdict:
    return Verdict(name, "fail", figure, cause, remedy)


def not_checked(name: str, why: str) -> Verdict:
    """What this device, torch or mode cannot show; never a pass."""
    return Verdict(name, "not checked", why)


def judge(name: str, good: bool, figure: str, cause: str, remedy: str) -> Verdict:
    return passed(name, figure) if good else failed(name, figure, cause, remedy)


def merge(by_worker: Iterable[tuple[str, list[Verdict]]]) -> list[Verdict]:
    """One line a check where all workers agree on its state and figure, else one line a worker, in the order of checks."""
    lines: dict[str, list[Verdict]] = {}
    for worker, verdicts in by_worker:
        for verdict in verdicts:
            lines.setdefault(verdict.name, []).append(replace(verdict, worker=worker))
    merged = []
    for same in lines.values():
        kinds = list(dict.fromkeys((v.state, v.figure, v.cause) for v in same))
        if len(kinds) == 1:
            merged.append(replace(same[0], worker=", ".join(dict.fromkeys(v.worker for v in same if v.worker))))
        else:
            merged += same
    return merged


MARKS = {"pass": "ok  ", "fail": "FAIL", "not checked": "  - "}


def render(verdicts: list[Verdict]) -> str:
    """Lines for a terminal or a log."""
    width = max(len(v.name) for v in verdicts)
    lines = []
    for v in verdicts:
        where = f"  [{v.worker}]" if v.worker else ""
        lines.append(f"{MARKS[v.state]} {v.name:<{width}}  {v.figure}{where}")
        if v.failed:
            lines += [f"{'':5}{'':<{width}}  why: {v.cause}", f"{'':5}{'':<{width}}  do:  {v.remedy}"]
    count = {state: sum(v.state == state for v in verdicts) for state in MARKS}
    lines.append(
        f"{count['pass']} passed, {count['fail']} failed, {count['not checked']} not checked here"
        + ("" if count["fail"] else ": go")
    )
    return "\n".join(lines)
