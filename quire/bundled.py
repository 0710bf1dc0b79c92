"""The model that Quire ships."""

from pathlib import Path

NAME = "quire-tiny"
FOLDER = Path(__file__).resolve().parent / "tiny" / "model"
