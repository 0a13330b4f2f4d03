"""A pull of taps runs beside the step, also from another GPU."""

from typing import Any, cast

import pytest
import torch

from draftsmith.events import EventLog
from draftsmith.mailbox import Item, TrainerEnd
from draftsmith.taps import MailedTaps

pytestmark = pytest.mark.gpu


class Full:
    """A trainer's end of a mailbox whose slot is always full."""

    me, targets_waited = "trainer 0", [0.0]

    def __init__(self, slot: torch.Tensor):
        self.slots, self.given_back = [(slot,)], []

    def take(self, item: Item) -> torch.Tensor:
        return self.slots[0][0]

    def give_back(self, item: Item) -> None:
        self.given_back.append(item.number)


@pytest.mark.parametrize(
    "source",
    [
        "cuda:0",
        pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
    ],
)
def test_a_pull_does_not_wait_for_the_step(source, tmp_path):
    device = torch.device("cuda:0")
    slot = torch.randn(4096, 1024, device=source)
    static = torch.zeros(4096, 1024, device=device)
    end, items = Full(slot), [Item(i, "unit", i, 0, i) for i in range(2)]
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    with EventLog(tmp_path, "trainer") as events:
        taps = MailedTaps(cast(TrainerEnd, cast(Any, end)), iter(items), static, events)
        taps.fill("unit", 0)
        torch.cuda.synchronize()
        for _ in range(1000):  # more than a second
            a @ a
        busy = torch.cuda.Event()
        busy.record()
        taps.ahead(1)
        assert end.given_back == [0, 1] and not busy.query(), "the pull has ended, the work before it has not"
        slot.zero_()
        taps.fill("unit", 1)
    torch.cuda.synchronize()
    assert static.abs().sum() > 0
