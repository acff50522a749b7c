"""Progress where there is no terminal: lines with rate and time left."""

from __future__ import annotations

import pytest

from moestro.cli import _terminal
from moestro.cli._terminal import byte_progress, duration, progress_lines

GIB = 1 << 30


def test_lines_come_now_and_then_and_earlier_work_is_no_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(_terminal.time, "monotonic", lambda: now[0])
    update = progress_lines("converting", 60)
    for seconds, done in ((0, 8), (30, 9), (60, 9), (90, 10), (120, 10)):
        now[0] = 100.0 + seconds
        update(done * GIB, 16 * GIB)
    assert capsys.readouterr().err.splitlines() == [
        "converting: 9 GiB of 16 GiB, 17.1 MiB/s, 7 min left",
        "converting: 10 GiB of 16 GiB, 17.1 MiB/s, 6 min left",
    ]


def test_nothing_is_said_where_nothing_moves_or_nobody_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with byte_progress("loading") as progress:
        assert progress is None
    with byte_progress("converting", lines_every=0.0) as progress:
        assert progress is not None
        progress(5, 10)
        progress(5, 10)
    assert "left" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
