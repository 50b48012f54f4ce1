"""``races=`` on random histories, against a model that checks all accesses and clocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import Access, RaceError
from torchdevice.simulation import simulated_runtime
from torchdevice.simulation.observe import races
from torchdevice.simulation.observe.happens_before import Clock, knows, merge


class Everything(races.Accesses):
    """All accesses in one list."""

    def __init__(self) -> None:
        self.all: list[Access] = []

    def cell(self, access: Access) -> list[Access]:
        return self.all

    def between(self, start: int, end: int) -> list[Access]:
        return [each for each in self.all if each.start < end and start < each.end]


class Model(races.Races):
    """Clocks of all streams that every call asks, and a list of accesses."""

    def clock(self, stream: Any) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        merge(clock, self.host)
        return clock

    def device_synchronized(self, index: int) -> None:
        for stream in [each for each in self._clocks if each[0] == index]:
            merge(self.host, self.clock(stream))

    def allocated(self, block: Any) -> None:
        super().allocated(block)
        self._memory[block.address].accesses = Everything()

    def _note(self, memory: Any, access: Access) -> None:
        clock = self.clock(access.stream)
        kept = []
        for earlier in memory.accesses.all:
            overlaps = earlier.start < access.end and access.start < earlier.end
            known = knows(clock, earlier.stream, earlier.number)
            if overlaps and not known and (earlier.writes or access.writes):
                self._report(earlier, access, "")
            hidden = (
                access.start <= earlier.start
                and earlier.end <= access.end
                and (known or access.writes)
            )
            if not (hidden and (access.writes or not earlier.writes)):
                kept.append(earlier)
        memory.accesses.all = [*kept, access]


def findings(
    kind: type, seed: str, monkeypatch: pytest.MonkeyPatch, count: int, sort: str
) -> list[Any]:
    """Return the races of a random program."""
    found: list[Any] = []

    def report(self: races.Races, earlier: Access, later: Access, remedy: str) -> None:
        found.append([(names.index(each.stream), *each[3:]) for each in (earlier, later)])
        if sort == "error":
            raise RaceError(earlier, later, "", "", remedy)

    draw = random.Random(seed)
    with monkeypatch.context() as patch:
        patch.setattr(simulated_runtime.races, "Races", kind)
        patch.setattr(races.Races, "_report", report)
        with torchdevice.simulate(count=2, races=sort):
            streams = [torch.cuda.Stream(device=index % 2) for index in range(5)]
            streams += [torch.cuda.default_stream(index) for index in range(2)]
            names = [(each.device_index, each.stream_id) for each in streams]
            held = [
                [torch.ones(64, device=f"cuda:{index}") for _ in range(3)] for index in range(2)
            ]
            events: list[Any] = [torch.cuda.Event().record(streams[0]) or torch.cuda.Event()]
            torch.cuda.synchronize(0)
            for _ in range(count):
                stream, other = draw.choice(streams), draw.choice(streams)
                mine = held[stream.device_index]
                x, y = draw.sample(mine, 2)
                start, end = sorted(draw.sample(range(65), 2))
                far, value = draw.randrange(65 - (end - start)), draw.random()
                event = draw.choice(events)
                step = draw.choices(
                    [
                        "write",
                        "read",
                        "copy",
                        "whole",
                        "wait",
                        "record",
                        "event",
                        "sync",
                        "device",
                        "host",
                        "new",
                    ],
                    [8, 8, 4, 2, 3, 2, 2, 1, 0.5, 1, 1],
                )[0]
                try:
                    with torch.cuda.stream(stream):
                        if step == "write":
                            x[start:end].fill_(value)
                        elif step == "read":
                            x[start:end] + 1
                        elif step == "copy":
                            x[start:end].copy_(y[far : far + end - start])
                        elif step == "whole":
                            x.mul_(2)
                        elif step == "wait":
                            stream.wait_stream(other)
                        elif step == "record":
                            events.append(stream.record_event())
                        elif step == "event":
                            stream.wait_event(event)
                        elif step == "sync":
                            stream.synchronize()
                        elif step == "device":
                            torch.cuda.synchronize(stream.device_index)
                        elif step == "host":
                            event.synchronize()
                        else:
                            mine[draw.randrange(3)] = torch.ones(
                                64, device=f"cuda:{stream.device_index}"
                            )
                except RaceError:
                    continue
                finally:
                    del x, y
    return found


@pytest.mark.parametrize("sort", ["warn", "error"])
@pytest.mark.parametrize("seed", range(4))
def test_the_findings_of_the_model(
    seed: int, sort: str, sweep: tuple[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (
        findings(kind, f"{seed} {sweep[1]}", monkeypatch, 250, sort)
        for kind in (races.Races, Model)
    )
    assert len(one) > 20
    assert one == other


def test_an_access_has_few_others_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    knows_ = races._knows
    monkeypatch.setattr(
        races, "_knows", lambda clock, access: looked.append(1) or knows_(clock, access)
    )
    with torchdevice.simulate(races="error"):
        parts = torch.ones(2000, device="cuda")
        for i in range(2000):
            before = len(looked)
            parts[i].mul_(2)
            assert len(looked) - before < 10
        torch.cuda.synchronize()
        parts.sum()
        before = len(looked)
        parts.sum()
        assert len(looked) - before < 10
