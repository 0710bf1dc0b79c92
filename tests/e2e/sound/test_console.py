"""The console turns a file and a recording into text, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.sound.served import Served, floats
from tests.services.frontend.console.browser import CHROMIUM, Browser, browsing
from tests.shared.media.audio.files import noise

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


@pytest.fixture
def browser(served: Served) -> Iterator[Browser]:
    with browsing() as opened:
        opened.open(f"{served.base_url}/")
        opened.wait("!document.getElementById('sound').hidden")
        yield opened
        assert opened.errors == []
        assert [url for url in opened.addresses if not url.startswith((served.base_url, "data:", "about:"))] == []


def finished(browser: Browser) -> str:
    """Waits until the times of a transcript are shown, and returns its text."""
    browser.wait("document.querySelector('.message .times, .message.error') !== null")
    return str(browser.evaluate("document.querySelector('.message.assistant p, .message.error').textContent"))


def test_a_file_becomes_text_with_times(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "clip.wav").write_bytes(floats(noise(9_000)))
    browser.choose_files("#clips", tmp_path / "clip.wav")
    assert len(finished(browser)) > 20, "random weights write at length"
    assert browser.evaluate("document.querySelector('.message.user').textContent") == "clip.wav"
    times = browser.evaluate("[...document.querySelectorAll('.times time')].map(time => time.textContent)")
    assert times
    assert all(time.count(".") == 2 for time in times)


def test_the_microphone_is_recorded_and_read(browser: Browser) -> None:
    assert browser.evaluate("document.getElementById('microphone').hidden") is False
    browser.evaluate("document.getElementById('microphone').click()")
    browser.wait("document.getElementById('microphone').textContent === 'Stop recording (1 s)'")
    browser.evaluate("document.getElementById('microphone').click()")
    assert "is not available" not in finished(browser)
    assert browser.evaluate("document.querySelector('.message.error')") is None
    assert browser.evaluate("document.querySelector('.message.user').textContent") == "Recording"
    assert browser.evaluate("document.getElementById('microphone').textContent") == "Microphone"


def test_what_is_no_sound_is_said_so(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_bytes(b"no sound")
    browser.choose_files("#clips", tmp_path / "text.wav")
    assert "none of wav, mp3" in finished(browser)
    assert any("400" in error for error in browser.errors)
    browser.errors.clear()
