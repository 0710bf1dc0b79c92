"""`quire transcribe FILE...`: turns files of sound into text or subtitles."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.cli.connection import add_address, client_of
from quire.client import Client
from quire.requests import RequestOptions
from quire.shared.errors import InvalidArgument, QuireError
from quire.shared.transcription.formats import FORMATS, as_json, as_srt, as_text, as_verbose_json, as_vtt
from quire.shared.transcription.transcript import Transcript
from quire.transcriptions import TranscriptDelta, TranscriptionExtras, collected

BAR_CHARACTERS = 24
SUBTITLES = ("srt", "vtt")
TIMED = (*SUBTITLES, "verbose_json")
EXTENSIONS = {"text": ".txt", "json": ".json", "verbose_json": ".json", "srt": ".srt", "vtt": ".vtt"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="sound: wav, mp3, flac, ogg, m4a, webm, aac")
    parser.add_argument("--format", choices=FORMATS, default="text", help="what to write (default: text)")
    parser.add_argument("--language", default="", metavar="CODE", help="ISO 639 code; default: detected")
    parser.add_argument("--translate", action="store_true", help="write the text in English")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what was said before, or a text in that style")
    parser.add_argument("--hotwords", default="", metavar="TEXT", help="names and words that are likely")
    parser.add_argument(
        "--condition-on-previous-text", action="store_true", help="give the model the text before each piece"
    )
    parser.add_argument("--words", action="store_true", help="find the times of words; in subtitles, one cue for each")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 to 1 (default: 0)")
    parser.add_argument(
        "--output",
        default="",
        metavar="PATH",
        help="file to write, or a folder for one file each, named like the sound; default: standard output",
    )
    parser.add_argument(
        "--model", default="", metavar="MODEL", help="start a cluster with this model meanwhile, and stop it afterwards"
    )
    add_address(parser)


def run(arguments: argparse.Namespace) -> int:
    """Transcribes the files one after the other. Returns 0, or 1 if some failed: each is named on standard error with
    the reason, and the others are written. Raises InvalidArgument for arguments that do not fit together."""
    _check(arguments)
    num_failed = 0
    with _client(arguments) as client:
        for file in arguments.files:
            try:
                _write(arguments, file, _transcript(client, arguments, file))
            except QuireError as error:
                if len(arguments.files) == 1:
                    raise
                num_failed += 1
                print(f"quire: {file}: {error.message}", file=sys.stderr)
    return 1 if num_failed else 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises InvalidArgument for several files that would be written into one, and for words in a format without
    times."""
    if arguments.words and arguments.format not in TIMED:
        text = f"words: format {arguments.format} has no times; choose {', '.join(TIMED)}"
        raise InvalidArgument(text, field="words")
    is_folder = bool(arguments.output) and Path(arguments.output).is_dir()
    if len(arguments.files) == 1 or is_folder:
        return
    if arguments.output:
        text = f"output: {arguments.output!r} is no folder, which {len(arguments.files)} files need; create it first"
        raise InvalidArgument(text, field="output")
    if arguments.format in SUBTITLES:
        text = f"output: subtitles of {len(arguments.files)} files need a folder; name one with --output"
        raise InvalidArgument(text, field="output")


@contextlib.contextmanager
def _client(arguments: argparse.Namespace) -> Iterator[Client]:
    """Yields a client of the running cluster, or of one that serves `--model` meanwhile."""
    if not arguments.model:
        with client_of(arguments) as client:
            yield client
        return
    from quire.cluster import Cluster, ClusterOptions

    options = ClusterOptions(model=arguments.model, http_port=0, grpc_port=0)
    with Cluster(options, log=sys.stderr) as cluster, Client(cluster.grpc_address) as client:
        yield client


def _transcript(client: Client, arguments: argparse.Namespace, file: str) -> Transcript:
    """Returns the transcript of a file; on a terminal, standard error shows how far it has come."""
    extras: TranscriptionExtras = {"temperature": arguments.temperature, "translate": arguments.translate}
    extras |= {"language": arguments.language, "prompt": arguments.prompt, "hotwords": arguments.hotwords}
    extras["condition_on_previous_text"] = arguments.condition_on_previous_text
    if arguments.format in TIMED:
        extras["timestamp_granularities"] = ["segment", *(["word"] if arguments.words else [])]
    with shown_progress(Path(file).name, is_terminal=sys.stderr.isatty()) as show:
        deltas = client.stream_transcription(Path(file), RequestOptions(), **extras)
        return collected(show(delta) for delta in deltas)


@contextlib.contextmanager
def shown_progress(name: str, *, is_terminal: bool) -> Iterator[Callable[[TranscriptDelta], TranscriptDelta]]:
    """Yields a function that draws the progress of a file and returns the part that it is given. The line is drawn on a
    terminal only, and removed at the end."""
    if not is_terminal:
        yield lambda delta: delta
        return

    done_s = 0.0

    def show(delta: TranscriptDelta) -> TranscriptDelta:
        """Draws the line for the sound up to the end of the last segment."""
        nonlocal done_s
        done_s = delta.segments[-1].end if delta.segments else done_s
        line = progress_line(name, delta.seconds if delta.done else done_s, delta.seconds)
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        return delta

    print(f"{name}: reading", end="", file=sys.stderr, flush=True)
    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def progress_line(name: str, done_s: float, seconds: float) -> str:
    """Returns a bar with the time of the sound that is transcribed and the length of the file."""
    part = min(1.0, done_s / seconds) if seconds else 1.0
    num_full = int(part * BAR_CHARACTERS)
    bar = "#" * num_full + "." * (BAR_CHARACTERS - num_full)
    return f"{name}: [{bar}] {part:4.0%} {_clock(done_s)} of {_clock(seconds)}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _write(arguments: argparse.Namespace, file: str, transcript: Transcript) -> None:
    """Writes a transcript in the chosen format. Raises InvalidArgument for a file that cannot be written."""
    text = formatted(transcript, arguments.format, has_words=arguments.words)
    if not arguments.output:
        print(text, end="", flush=True)
        return
    target = Path(arguments.output)
    if target.is_dir():
        target /= Path(file).stem + EXTENSIONS[arguments.format]
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"output: cannot write {str(target)!r}: {error.strerror}", field="output") from None


def formatted(transcript: Transcript, form: str, *, has_words: bool = False) -> str:
    """Returns a transcript in one of FORMATS, ended by a newline. `has_words`: with the times of words."""
    match form:
        case "text":
            return as_text(transcript)
        case "srt":
            return as_srt(transcript, by_word=has_words)
        case "vtt":
            return as_vtt(transcript, by_word=has_words)
    is_verbose = form == "verbose_json"
    answer = as_verbose_json(transcript, has_words=has_words) if is_verbose else as_json(transcript)
    return json.dumps(answer, ensure_ascii=False) + "\n"
